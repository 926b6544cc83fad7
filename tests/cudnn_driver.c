/* A CUDA driver that does nothing, for plans of cuDNN without a GPU: each function answers success,
 * and handles are numbers that nobody follows. It has no private tables. */

#define ANSWERS(name) int name(void) { return 0; }
#define GIVES(name, value) int name(void **out) { *out = (void *)(value); return 0; }

int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuGetErrorString(int code, const char **text) { (void)code; *text = "an error"; return 0; }
int cuGetErrorName(int code, const char **text) { (void)code; *text = "AN_ERROR"; return 0; }
int cuKernelGetAttribute(int *value) { *value = 0; return 0; }
int cuFuncGetAttribute(int *value) { *value = 0; return 0; }
/* CUDA_ERROR_NOT_FOUND. */
int cuGetExportTable(void) { return 500; }

GIVES(cuLibraryLoadData, 16)
GIVES(cuLibraryGetKernel, 32)
GIVES(cuKernelGetFunction, 48)
GIVES(cuCtxGetCurrent, 64)

ANSWERS(cuInit)
ANSWERS(cuLibraryUnload)
ANSWERS(cuThreadExchangeStreamCaptureMode)
ANSWERS(cuCtxGetLimit)
ANSWERS(cuCtxPopCurrent)
ANSWERS(cuCtxPushCurrent)
ANSWERS(cuFuncSetAttribute)
ANSWERS(cuKernelSetAttribute)
ANSWERS(cuLaunchCooperativeKernel)
ANSWERS(cuLaunchKernel)
ANSWERS(cuLaunchKernelEx)
ANSWERS(cuLibraryLoadFromFile)
ANSWERS(cuLinkAddData)
ANSWERS(cuLinkComplete)
ANSWERS(cuLinkCreate)
ANSWERS(cuLinkDestroy)
ANSWERS(cuModuleGetFunction)
ANSWERS(cuModuleLoadData)
ANSWERS(cuModuleUnload)
ANSWERS(cuOccupancyMaxPotentialClusterSize)
ANSWERS(cuStreamGetCtx)
ANSWERS(cuTensorMapEncodeIm2col)
ANSWERS(cuTensorMapEncodeTiled)
