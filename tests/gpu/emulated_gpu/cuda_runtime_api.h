// A GPU that is this process: what csrc/cuda.cc needs of CUDA's runtime, done at once and by the CPU.
#pragma once

#include <cstdlib>
#include <cstring>
#include <optional>

#include "xla/ffi/api/ffi.h"

enum cudaError_t { cudaSuccess, cudaErrorMemoryAllocation };
enum cudaMemcpyKind { cudaMemcpyDeviceToDevice };
using cudaStream_t = struct EmulatedStream*;

constexpr unsigned cudaHostAllocMapped = 1, cudaHostAllocPortable = 2;

inline const char* cudaGetErrorString(cudaError_t) { return "out of memory"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int* count) { return *count = 8, cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }

inline cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  *memory = malloc(bytes);
  return *memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  memcpy(to, from, bytes);
  return cudaSuccess;
}

// XLA's CPU runtime has no stream to give to a handler, and does not run the stage before, kInitialize. A GPU that does
// everything at once can do in each call what that stage does in each run.
void emulated_initialize();

template <>
struct xla::ffi::CtxDecoding<xla::ffi::PlatformStream<cudaStream_t>> {
  using Type = cudaStream_t;
  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*, DiagnosticEngine&) {
    emulated_initialize();
    return cudaStream_t{};
  }
};
