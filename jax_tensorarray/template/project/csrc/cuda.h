// The launch that cuda.cu defines and the handler in cuda.cc calls: nvcc sees no FFI, and the host compiler no kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "update.h"

namespace kernels {

template <class T>
cudaError_t launch(cudaStream_t stream, Update<T> update);

}  // namespace kernels
