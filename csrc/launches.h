// Defines `enqueue` of cuda.h, for one file that says what runs a kernel: cuda.cu a GPU, in tests the CPU.
#pragma once

#include "cuda.h"

namespace jax_tensorarray {

// What that file defines: `run_thread` of a body for every thread of a grid, and a kernel that does nothing.
template <class Body>
cudaError_t enqueue_body(cudaStream_t, Body, Grid);
cudaError_t enqueue_empty(cudaStream_t);

// Launches an empty kernel in a CUDA graph, since XLA refuses an empty graph.
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

cudaError_t launch(OnStream on, const NoJob&) { return enqueue_nothing(on.stream); }

cudaError_t enqueue(cudaStream_t stream, const Job& job) {
  return std::visit([&](const auto& one) { return launch(OnStream{stream}, one); }, job);
}

}  // namespace jax_tensorarray
