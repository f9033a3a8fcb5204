// What cuda.cu defines and the handlers in cuda.cc call. nvcc sees no FFI, and g++ no kernel.
#pragma once

#include "gpu_kernels.h"
#include "vendor.h"

namespace jax_tensorarray {

// Does a job on a stream.
cudaError_t enqueue(cudaStream_t, const Job&);

}  // namespace jax_tensorarray
