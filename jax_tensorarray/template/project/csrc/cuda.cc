// The CUDA handler, and the Python module that hands it to jax.ffi.
//
// It enqueues on the stream that it is given and returns. It neither allocates nor waits, so XLA may put it into a
// CUDA graph.
#include "cuda.h"

#include "handlers.h"
#include "module.h"

namespace kernels {
namespace {

ffi::Error status(cudaError_t error) {
  return error == cudaSuccess ? ffi::Error::Success() : ffi::Error::Internal(cudaGetErrorString(error));
}

ffi::Error Run(cudaStream_t stream, ffi::AnyBuffer buffer, ffi::Buffer<ffi::S32> index, ffi::AnyBuffer value,
               ffi::AnyBuffer scale, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> old,
               int64_t batch_dims) {
  return dispatch(Call{buffer, index, value, scale, out, old, batch_dims}, [&](auto update) {
    if (out->untyped_data() != buffer.untyped_data() && buffer.size_bytes() != 0) {
      auto error = cudaMemcpyAsync(out->untyped_data(), buffer.untyped_data(), buffer.size_bytes(),
                                   cudaMemcpyDeviceToDevice, stream);
      if (error != cudaSuccess) return status(error);
    }
    return status(launch(stream, update));
  });
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(kRun, Run, bind_update(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace
}  // namespace kernels

NB_MODULE(_cuda, m) { kernels::define_module(m, kernels::kRun); }
