// The kernel and its launch.
#include <algorithm>

#include "cuda.h"

namespace kernels {
namespace {

constexpr int64_t kThreads = 256, kMostBlocks = 1 << 16;

// A thread for each element, or several elements for each thread where there are very many.
template <class T>
__global__ void run(Update<T> update) {
  int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; n < update.batch * update.row; n += stride) {
    int64_t b = n / update.row;
    update.element(update.target(b), b, n - b * update.row);
  }
}

}  // namespace

template <class T>
cudaError_t launch(cudaStream_t stream, Update<T> update) {
  int64_t blocks = (update.batch * update.row + kThreads - 1) / kThreads;
  // At least one: a CUDA graph must not be empty.
  dim3 grid(static_cast<unsigned>(std::clamp<int64_t>(blocks, 1, kMostBlocks)));
  void* arguments[] = {&update};
  // Its result is about this launch; that of <<<...>>> may be about an earlier call of anybody's.
  return cudaLaunchKernel(reinterpret_cast<const void*>(&run<T>), grid, dim3(kThreads), arguments, 0, stream);
}

template cudaError_t launch<float>(cudaStream_t, Update<float>);
template cudaError_t launch<double>(cudaStream_t, Update<double>);

}  // namespace kernels
