/* Calls a kernel's FFI handler as XLA does, in a process of its own: built for another CPU and run by qemu-user.

   HANDLER is the handler's name. Standard input: the number of operands and of results; then of each buffer its rank, sizes and bytes; then
   the operands' data. Numbers are int64, little-endian. Standard output: the results' data. On AArch64 floats are flushed before the call, as
   XLA's threads have them. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

XLA_FFI_Error* HANDLER(XLA_FFI_CallFrame*);

static int64_t number(void) {
  int64_t value;
  if (fread(&value, sizeof value, 1, stdin) != 1) exit(3);
  return value;
}

static XLA_FFI_Error* threads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  *args->num_threads = 1; /* the calling thread runs every task */
  return NULL;
}

int main(void) {
  int64_t operands = number(), results = number(), count = operands + results;
  XLA_FFI_Buffer* buffers = calloc(count, sizeof *buffers);
  void** pointers = calloc(count, sizeof *pointers);
  int64_t* bytes = calloc(count, sizeof *bytes);
  for (int64_t i = 0; i < count; ++i) {
    buffers[i].struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
    buffers[i].rank = number();
    buffers[i].dims = calloc(buffers[i].rank + 1, sizeof(int64_t));
    for (int64_t axis = 0; axis < buffers[i].rank; ++axis) buffers[i].dims[axis] = number();
    bytes[i] = number();
    if (posix_memalign(&buffers[i].data, 64, bytes[i] + 64)) return 4;
    memset(buffers[i].data, 0xA5, bytes[i] + 64);
    pointers[i] = &buffers[i];
  }
  for (int64_t i = 0; i < operands; ++i)
    if (fread(buffers[i].data, 1, bytes[i], stdin) != (size_t)bytes[i]) return 3;

  XLA_FFI_Api api;
  memset(&api, 0, sizeof api);
  api.struct_size = sizeof api;
  api.XLA_FFI_ThreadPool_NumThreads = threads;
  XLA_FFI_CallFrame frame;
  memset(&frame, 0, sizeof frame);
  frame.struct_size = sizeof frame;
  frame.api = &api;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args.size = operands;
  frame.args.args = pointers;
  frame.rets.size = results;
  frame.rets.rets = pointers + operands;
#ifdef __aarch64__
  uint64_t before = 1u << 24, after; /* FPCR.FZ */
  __asm__ volatile("msr fpcr, %0" ::"r"(before));
#endif
  XLA_FFI_Error* error = HANDLER(&frame);
#ifdef __aarch64__
  __asm__ volatile("mrs %0, fpcr" : "=r"(after));
  if (after != before) return 5; /* the handler gives the thread back as it was */
#endif
  if (error) return 6;
  for (int64_t i = operands; i < count; ++i)
    if (fwrite(buffers[i].data, 1, bytes[i], stdout) != (size_t)bytes[i]) return 7;
  return 0;
}
