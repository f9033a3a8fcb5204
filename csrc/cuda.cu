// The bodies of gpu_kernels.h as kernels.
#include "launches.h"

namespace jax_tensorarray {
namespace {

// Three blocks on a multiprocessor leave each thread 80 registers. Without this bound the compiler aims for more blocks
// and spills registers.
template <class Body>
__global__ void __launch_bounds__(256, 3) run(Body body, Grid grid) {
  run_thread(body, grid, blockIdx.x, blockIdx.y, threadIdx.x, threadIdx.y);
}

__global__ void do_nothing() {}

// This returns the status of this launch alone; after <<<...>>> it may be that of an earlier call by other code.
cudaError_t launch(cudaStream_t stream, const void* kernel, dim3 blocks, dim3 threads, void** arguments) {
  return cudaLaunchKernel(kernel, blocks, threads, arguments, 0, stream);
}

}  // namespace

template <class Body>
cudaError_t enqueue_body(cudaStream_t stream, Body body, Grid grid) {
  void* arguments[] = {&body, &grid};  // copied by the launch, and into a CUDA graph
  return launch(stream, reinterpret_cast<const void*>(&run<Body>), dim3(grid.blocks_x, grid.blocks_y),
                dim3(grid.threads_x, grid.threads_y), arguments);
}

cudaError_t enqueue_empty(cudaStream_t stream) {
  return launch(stream, reinterpret_cast<const void*>(&do_nothing), dim3(1), dim3(1), nullptr);
}

}  // namespace jax_tensorarray
