// The bodies of gpu_kernels.h as kernels, and their launches.
#include "cuda.h"

namespace jax_tensorarray {
namespace {

// Three blocks on a multiprocessor leave each thread 80 registers. Without this bound the compiler aims for more blocks
// and spills registers.
template <class Body>
__global__ void __launch_bounds__(256, 3) run(Body body, Grid grid) {
  run_thread(body, grid, blockIdx.x, blockIdx.y, threadIdx.x, threadIdx.y);
}

__global__ void do_nothing() {}

struct OnStream {
  cudaStream_t stream;

  template <class Body>
  cudaError_t operator()(Body body, int64_t rows, int64_t columns) const {
    if (rows == 0) return enqueue_nothing(stream);
    Grid grid = grid_for(rows, columns);
    void* arguments[] = {&body, &grid};
    // This returns the status of this launch alone; after <<<...>>> it may be that of an earlier call by other code.
    return cudaLaunchKernel(reinterpret_cast<const void*>(&run<Body>), dim3(grid.blocks_x, grid.blocks_y),
                            dim3(grid.threads_x, grid.threads_y), arguments, 0, stream);
  }
};

}  // namespace

cudaError_t enqueue_nothing(cudaStream_t stream) {
  cudaStreamCaptureStatus capturing;
  if (auto error = cudaStreamIsCapturing(stream, &capturing); error != cudaSuccess) return error;
  if (capturing == cudaStreamCaptureStatusNone) return cudaSuccess;
  return cudaLaunchKernel(reinterpret_cast<const void*>(&do_nothing), dim3(1), dim3(1), nullptr, 0, stream);
}

cudaError_t enqueue_read(cudaStream_t stream, const Walk& walk, const void* buffer, void* value) {
  return launch_read(OnStream{stream}, walk, buffer, value);
}

cudaError_t enqueue_write(cudaStream_t stream, const Walk& walk, void* buffer, const void* value) {
  return launch_write(OnStream{stream}, walk, buffer, value);
}

cudaError_t enqueue_swap(cudaStream_t stream, const Walk& walk, void* buffer, const void* value, void* old) {
  return launch_swap(OnStream{stream}, walk, buffer, value, old);
}

cudaError_t enqueue_combine(cudaStream_t stream, std::string_view op, ElementType type, const Walk& walk, void* buffer,
                            const void* value) {
  return launch_combine(Combining{}, op, OnStream{stream}, type, walk, buffer, value);
}

cudaError_t enqueue_clear(cudaStream_t stream, const Geometry& g, const Index& start, const Index& stop, void* buffer) {
  return launch_clear(OnStream{stream}, g, start, stop, buffer);
}

cudaError_t enqueue_read_part(cudaStream_t stream, const Parts& parts, const void* buffer, void* value) {
  return launch_read_part(OnStream{stream}, parts, buffer, value);
}

cudaError_t enqueue_write_part(cudaStream_t stream, const Parts& parts, void* buffer, const void* value) {
  return launch_write_part(OnStream{stream}, parts, buffer, value);
}

cudaError_t enqueue_check(cudaStream_t stream, const Index& index, const LiveSize& live, int32_t* checked,
                          int64_t positions, const Report& report) {
  return launch_check(OnStream{stream}, index, live, checked, positions, report);
}

}  // namespace jax_tensorarray
