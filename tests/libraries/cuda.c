/* A fake CUDA driver. It prints each call in a line, and the function that FAIL names fails. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int code_of(const char *name) {
  const char *fail = getenv("FAIL");
  return fail != NULL && strcmp(fail, name) == 0 ? 700 : 0;
}

#define TELL(name, ...)          \
  do {                           \
    printf("%s ", name);         \
    printf(__VA_ARGS__);         \
    printf("\n");                \
    fflush(stdout);              \
  } while (0)

int cuDriverGetVersion(int *version) { *version = 13020; return 0; }

int cuGetErrorString(int code, const char **text) {
  *text = code == 700 ? "an illegal memory access was encountered" : NULL;
  return *text == NULL ? 1 : 0;
}

int cuStreamGetCtx(void *stream, void **context) {
  TELL("cuStreamGetCtx", "%p", stream);
  *context = (void *)0xc0;
  return code_of("cuStreamGetCtx");
}

int cuCtxPushCurrent_v2(void *context) {
  TELL("cuCtxPushCurrent", "%p", context);
  return code_of("cuCtxPushCurrent_v2");
}

int cuCtxPopCurrent_v2(void **context) {
  TELL("cuCtxPopCurrent", "%d", context != NULL);
  return code_of("cuCtxPopCurrent_v2");
}

int cuCtxGetDevice(int *device) { *device = 3; return 0; }

int cuDeviceGetAttribute(int *value, int attribute, int device) {
  /* In cuda.h, 75 and 76 are the major and minor compute capability. */
  *value = device != 3 ? -1 : attribute == 75 ? 10 : attribute == 76 ? 3 : -1;
  return 0;
}

int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return 0;
}

int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
  TELL("cuStreamCreateWithPriority", "flags %u priority %d", flags, priority);
  *stream = (void *)0x57;
  return code_of("cuStreamCreateWithPriority");
}

int cuEventCreate(void **event, unsigned flags) {
  TELL("cuEventCreate", "flags %u", flags);
  *event = (void *)0xe1;
  return code_of("cuEventCreate");
}

int cuMemHostAlloc(void **address, size_t bytes, unsigned flags) {
  static char memory[64];
  TELL("cuMemHostAlloc", "%zu flags %u", bytes, flags);
  *address = memory;
  return code_of("cuMemHostAlloc");
}

int cuStreamSynchronize(void *stream) {
  TELL("cuStreamSynchronize", "%p", stream);
  return code_of("cuStreamSynchronize");
}

int cuModuleLoadData(void **module, const void *image) {
  TELL("cuModuleLoadData", "%s", (const char *)image);
  *module = (void *)0x30;
  return code_of("cuModuleLoadData");
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
  TELL("cuModuleGetFunction", "%p %s", module, name);
  *function = (void *)0xf0;
  return code_of("cuModuleGetFunction");
}

int cuFuncLoad(void *function) {
  TELL("cuFuncLoad", "%p", function);
  return code_of("cuFuncLoad");
}

int cuModuleUnload(void *module) {
  TELL("cuModuleUnload", "%p", module);
  return 0;
}

int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void *stream, void **parameters, void **extra) {
  uint64_t a, out;
  int32_t batch, last;
  /* The finish kernel takes three pointers, then eight integers. */
  memcpy(&a, parameters[0], 8);
  memcpy(&out, parameters[2], 8);
  memcpy(&batch, parameters[3], 4);
  memcpy(&last, parameters[10], 4);
  TELL("cuLaunchKernel", "%p grid %u %u %u block %u %u %u shared %u stream %p extra %p: %#lx %#lx %d %d",
       function, gx, gy, gz, bx, by, bz, shared, stream, (void *)extra, (unsigned long)a,
       (unsigned long)out, batch, last);
  return code_of("cuLaunchKernel");
}

int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void *stream) {
  TELL("cuMemcpyDtoDAsync", "%#lx from %#lx %zu bytes stream %p", (unsigned long)to,
       (unsigned long)from, bytes, stream);
  return code_of("cuMemcpyDtoDAsync_v2");
}

/* The structure CUDA_MEMCPY2D of cuda.h. */
struct memcpy2d {
  size_t src_x, src_y;
  int src_type;
  const void *src_host;
  uint64_t src_device;
  void *src_array;
  size_t src_pitch, dst_x, dst_y;
  int dst_type;
  void *dst_host;
  uint64_t dst_device;
  void *dst_array;
  size_t dst_pitch, width, height;
};

int cuMemcpy2DAsync_v2(const struct memcpy2d *copy, void *stream) {
  TELL("cuMemcpy2DAsync", "types %d %d at %zu,%zu %zu,%zu: %#lx pitch %zu from %#lx pitch %zu, %zu x %zu stream %p",
       copy->src_type, copy->dst_type, copy->src_x, copy->src_y, copy->dst_x, copy->dst_y,
       (unsigned long)copy->dst_device, copy->dst_pitch, (unsigned long)copy->src_device,
       copy->src_pitch, copy->height, copy->width, stream);
  return code_of("cuMemcpy2DAsync_v2");
}

int cuEventRecord(void *event, void *stream) {
  TELL("cuEventRecord", "%p stream %p", event, stream);
  return code_of("cuEventRecord");
}

int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
  TELL("cuStreamWaitEvent", "stream %p %p flags %u", stream, event, flags);
  return code_of("cuStreamWaitEvent");
}
