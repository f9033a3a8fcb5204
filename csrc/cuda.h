// The launches that cuda.cu defines and the handlers in cuda.cc call. nvcc sees no FFI, and g++ no kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels.h"

namespace jax_tensorarray {

// Rows are in bytes. Indices out of range are dropped.
cudaError_t launch_read(cudaStream_t, const Geometry&, const Index&, const void* buffer, void* value);
cudaError_t launch_write(cudaStream_t, const Geometry&, const Index&, void* buffer, const void* value, bool reverse);
cudaError_t launch_swap(cudaStream_t, const Geometry&, const Index&, void* buffer, const void* value, void* old,
                        bool reverse);
cudaError_t launch_mask(cudaStream_t, const Geometry&, const Index& size, void* buffer);

// Rows are in elements of Sum.
template <class Sum>
cudaError_t launch_add(cudaStream_t, const Geometry&, const Index&, void* buffer, const void* value, bool reverse);

}  // namespace jax_tensorarray
