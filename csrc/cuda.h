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
cudaError_t launch_clear(cudaStream_t, const Geometry&, const Index& start, const Index& stop, void* buffer);

// `positions` of the index, the same number for each batch of `size`.
cudaError_t launch_check(cudaStream_t, const Index&, const int32_t* size, int32_t* checked, int64_t positions,
                         int64_t batch);

// Rows are in elements of Sum.
template <class Sum>
cudaError_t launch_add(cudaStream_t, const Geometry&, const Index&, void* buffer, const void* value, bool reverse);

}  // namespace jax_tensorarray
