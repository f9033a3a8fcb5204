// The launches that cuda.cu defines and the handlers in cuda.cc call. nvcc sees no FFI, and g++ no kernel.
#pragma once

#include "gpu_kernels.h"
#include "vendor.h"

namespace jax_tensorarray {

// Does nothing, but launches an empty kernel in a CUDA graph, since XLA refuses an empty graph.
cudaError_t enqueue_nothing(cudaStream_t);

// Rows are in bytes.
cudaError_t enqueue_read(cudaStream_t, const Walk&, const void* buffer, void* value);
cudaError_t enqueue_write(cudaStream_t, const Walk&, void* buffer, const void* value);
cudaError_t enqueue_swap(cudaStream_t, const Walk&, void* buffer, const void* value, void* old);
cudaError_t enqueue_combine(cudaStream_t, std::string_view op, ElementType, const Walk&, void* buffer,
                            const void* value);
cudaError_t enqueue_clear(cudaStream_t, const Geometry&, const Index& start, const Index& stop, void* buffer);
cudaError_t enqueue_read_part(cudaStream_t, const Parts&, const void* buffer, void* value);
cudaError_t enqueue_write_part(cudaStream_t, const Parts&, void* buffer, const void* value);
cudaError_t enqueue_check(cudaStream_t, const Index&, const LiveSize&, int32_t* checked, int64_t positions,
                          const Report&);

}  // namespace jax_tensorarray
