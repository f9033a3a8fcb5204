// The kernel and its launch.
#include "cuda.h"

namespace kernels {
namespace {

template <class T>
__global__ void run(Update<T> update) {
  update.thread(int64_t{blockIdx.x} * blockDim.x + threadIdx.x, int64_t{gridDim.x} * blockDim.x);
}

}  // namespace

template <class T>
cudaError_t launch(cudaStream_t stream, Update<T> update) {
  dim3 grid(static_cast<unsigned>(blocks_for(update.batch * update.row)));
  void* arguments[] = {&update};
  // Its result is about this launch; that of <<<...>>> may be about an earlier call by other code.
  return cudaLaunchKernel(reinterpret_cast<const void*>(&run<T>), grid, dim3(kThreads), arguments, 0, stream);
}

template cudaError_t launch<float>(cudaStream_t, Update<float>);
template cudaError_t launch<double>(cudaStream_t, Update<double>);

}  // namespace kernels
