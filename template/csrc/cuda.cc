// The CUDA handlers, and the Python module that hands them to jax.ffi.
//
// They enqueue on the stream that they are given and return. They neither allocate nor wait, so XLA may put them into a
// CUDA graph.
#include "cuda.h"

#include "handlers.h"
#include "module.h"

namespace kernels {
namespace {

ffi::Error status(cudaError_t error) {
  return error == cudaSuccess ? ffi::Error::Success() : ffi::Error::Internal(cudaGetErrorString(error));
}

ffi::Error RunUpdate(cudaStream_t stream, ffi::AnyBuffer buffer, ffi::Buffer<ffi::S32> index, ffi::AnyBuffer value,
                     ffi::AnyBuffer scale, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> old,
                     int64_t batch_dims) {
  return dispatch("decay_row", UpdateCall{buffer, index, value, scale, out, old, batch_dims}, [&](auto update) {
    if (out->untyped_data() != buffer.untyped_data() && buffer.size_bytes() != 0) {
      auto error = cudaMemcpyAsync(out->untyped_data(), buffer.untyped_data(), buffer.size_bytes(),
                                   cudaMemcpyDeviceToDevice, stream);
      if (error != cudaSuccess) return status(error);
    }
    return status(launch(stream, update));
  });
}

ffi::Error RunLogSumExp(cudaStream_t stream, ffi::AnyBuffer buffer, ffi::Result<ffi::AnyBuffer> out,
                        ffi::Result<ffi::AnyBuffer> scratch, int64_t batch_dims) {
  return dispatch("logsumexp_rows", LogSumExpCall{buffer, out, scratch, batch_dims},
                  [&](auto sum) { return status(launch(stream, sum)); });
}

auto on_stream() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>(); }

constexpr auto kCapturable = {ffi::Traits::kCmdBufferCompatible};

XLA_FFI_DEFINE_HANDLER_SYMBOL(kUpdate, RunUpdate, bind_update(on_stream()), kCapturable);
XLA_FFI_DEFINE_HANDLER_SYMBOL(kLogSumExp, RunLogSumExp, bind_logsumexp(on_stream()), kCapturable);

}  // namespace
}  // namespace kernels

NB_MODULE(_cuda, m) { kernels::define_module(m, kernels::targets(kernels::kUpdate, kernels::kLogSumExp)); }
