// The kernels and their launches.
#include "cuda.h"

namespace kernels {
namespace {

template <class Kernel>
__global__ void run(Kernel kernel) {
  kernel.thread(int64_t{blockIdx.x} * blockDim.x + threadIdx.x, int64_t{gridDim.x} * blockDim.x);
}

template <class T>
__global__ void run_parts(LogSumExp<T> kernel) {
  kernel.thread_of_parts(int64_t{blockIdx.x} * blockDim.x + threadIdx.x, int64_t{gridDim.x} * blockDim.x);
}

template <class Kernel>
cudaError_t enqueue(cudaStream_t stream, void (*run)(Kernel), Kernel kernel, int64_t elements) {
  dim3 grid(static_cast<unsigned>(blocks_for(elements)));
  void* arguments[] = {&kernel};
  // Its result is about this launch; that of <<<...>>> may be about an earlier call by other code.
  return cudaLaunchKernel(reinterpret_cast<const void*>(run), grid, dim3(kThreads), arguments, 0, stream);
}

}  // namespace

template <class T>
cudaError_t launch(cudaStream_t stream, Update<T> update) {
  return enqueue(stream, run<Update<T>>, update, update.elements());
}

template <class T>
cudaError_t launch(cudaStream_t stream, LogSumExp<T> sum) {
  cudaError_t error = enqueue(stream, run_parts<T>, sum, sum.elements_of_parts());
  return error != cudaSuccess ? error : enqueue(stream, run<LogSumExp<T>>, sum, sum.elements());
}

template cudaError_t launch<float>(cudaStream_t, Update<float>);
template cudaError_t launch<double>(cudaStream_t, Update<double>);
template cudaError_t launch<float>(cudaStream_t, LogSumExp<float>);
template cudaError_t launch<double>(cudaStream_t, LogSumExp<double>);

}  // namespace kernels
