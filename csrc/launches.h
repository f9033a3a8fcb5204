// Defines the launches of cuda.h, for one file that says what runs a kernel: cuda.cu a GPU, in tests the CPU.
#pragma once

#include "cuda.h"

namespace jax_tensorarray {

// What that file defines: `run_thread` of a body for every thread of a grid, and a kernel that does nothing.
template <class Body>
cudaError_t enqueue_body(cudaStream_t, Body, Grid);
cudaError_t enqueue_empty(cudaStream_t);

cudaError_t enqueue_nothing(cudaStream_t stream) {
  cudaStreamCaptureStatus capturing;
  if (auto error = cudaStreamIsCapturing(stream, &capturing); error != cudaSuccess) return error;
  return capturing == cudaStreamCaptureStatusNone ? cudaSuccess : enqueue_empty(stream);
}

struct OnStream {
  cudaStream_t stream;

  template <class Body>
  cudaError_t operator()(Body body, int64_t rows, int64_t columns) const {
    return rows == 0 ? enqueue_nothing(stream) : enqueue_body(stream, body, grid_for(rows, columns));
  }
};

cudaError_t enqueue_read(cudaStream_t stream, const Walk& walk, const void* buffer, void* value) {
  return launch_read(OnStream{stream}, walk, buffer, value);
}

cudaError_t enqueue_write(cudaStream_t stream, const Walk& walk, void* buffer, const void* value) {
  return launch_write(OnStream{stream}, walk, buffer, value);
}

cudaError_t enqueue_swap(cudaStream_t stream, const Walk& walk, void* buffer, const void* value, void* old) {
  return launch_swap(OnStream{stream}, walk, buffer, value, old);
}

cudaError_t enqueue_combine(cudaStream_t stream, std::string_view op, ElementType type, const Walk& walk, void* buffer,
                            const void* value) {
  return launch_combine(Combining{}, op, OnStream{stream}, type, walk, buffer, value);
}

cudaError_t enqueue_clear(cudaStream_t stream, const Geometry& g, const Index& start, const Index& stop, void* buffer) {
  return launch_clear(OnStream{stream}, g, start, stop, buffer);
}

cudaError_t enqueue_read_part(cudaStream_t stream, const Parts& parts, const void* buffer, void* value) {
  return launch_read_part(OnStream{stream}, parts, buffer, value);
}

cudaError_t enqueue_write_part(cudaStream_t stream, const Parts& parts, void* buffer, const void* value) {
  return launch_write_part(OnStream{stream}, parts, buffer, value);
}

cudaError_t enqueue_check(cudaStream_t stream, const Index& index, const LiveSize& live, int32_t* checked,
                          int64_t positions, const Report& report) {
  return launch_check(OnStream{stream}, index, live, checked, positions, report);
}

}  // namespace jax_tensorarray
