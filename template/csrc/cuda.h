// The launches that cuda.cu defines and the handlers in cuda.cc call: nvcc sees no FFI, the host compiler no kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "logsumexp.h"
#include "update.h"

namespace kernels {

template <class T>
cudaError_t launch(cudaStream_t stream, Update<T> update);

template <class T>
cudaError_t launch(cudaStream_t stream, LogSumExp<T> sum);

}  // namespace kernels
