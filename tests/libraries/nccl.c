/* A fake NCCL with one communicator, of rank 1 of 2. It prints the messages of each call. */

#include <stddef.h>
#include <stdio.h>

int ncclGetVersion(int *version) { *version = 23007; return 0; }
const char *ncclGetErrorString(int code) { return code == 0 ? "no error" : "unhandled system error"; }
const char *ncclGetLastError(void *comm) { return comm == NULL ? "" : "a cable is loose"; }
int ncclCommCount(void *comm, int *count) { (void)comm; *count = 2; return 0; }
int ncclCommUserRank(void *comm, int *rank) { (void)comm; *rank = 1; return 0; }
int ncclCommGetAsyncError(void *comm, int *error) { (void)comm; *error = 0; return 0; }
int ncclGroupStart(void) { printf("ncclGroupStart\n"); return 0; }
int ncclGroupEnd(void) { printf("ncclGroupEnd\n"); fflush(stdout); return 0; }

int ncclSend(const void *from, size_t count, int type, int peer, void *comm, void *stream) {
  printf("ncclSend %p %zu type %d to %d %p %p\n", from, count, type, peer, comm, stream);
  return peer == 0 ? 0 : 2;
}

int ncclRecv(void *to, size_t count, int type, int peer, void *comm, void *stream) {
  printf("ncclRecv %p %zu type %d from %d %p %p\n", to, count, type, peer, comm, stream);
  return 0;
}
