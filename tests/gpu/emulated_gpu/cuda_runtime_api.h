// A GPU that is this process: what csrc/cuda.cc needs of CUDA's runtime, done by the CPU.
#pragma once

#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

enum cudaError_t { cudaSuccess, cudaErrorMemoryAllocation };
enum cudaMemcpyKind { cudaMemcpyDeviceToDevice };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };

// Does at once what is enqueued, or, while a CUDA graph is recorded, keeps it for its replays.
struct EmulatedStream {
  bool is_capturing = false;
  std::vector<std::function<void()>> graph;

  void enqueue(std::function<void()> work) {
    if (is_capturing) graph.push_back(std::move(work));
    else work();
  }
};

using cudaStream_t = EmulatedStream*;

// The stream that handlers are given.
inline EmulatedStream emulated_stream;

inline cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = stream->is_capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

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

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  stream->enqueue([=] { memcpy(to, from, bytes); });
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
    return &emulated_stream;
  }
};
