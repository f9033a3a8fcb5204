// The CPU handler, and the Python module that hands it to jax.ffi.
#include <cstring>

#include "handlers.h"
#include "module.h"

namespace kernels {
namespace {

ffi::Error Run(ffi::AnyBuffer buffer, ffi::Buffer<ffi::S32> index, ffi::AnyBuffer value, ffi::AnyBuffer scale,
               ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> old, int64_t batch_dims) {
  return dispatch(Call{buffer, index, value, scale, out, old, batch_dims}, [&](auto update) {
    // XLA honours the alias of the lowering rule; another runtime that reads the same module need not.
    if (out->untyped_data() != buffer.untyped_data() && buffer.size_bytes() != 0) {
      memcpy(out->untyped_data(), buffer.untyped_data(), buffer.size_bytes());
    }
    for (int64_t b = 0; b < update.batch; ++b) {
      auto* target = update.target(b);
      for (int64_t k = 0; k < update.row; ++k) update.element(target, b, k);
    }
    return ffi::Error::Success();
  });
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(kRun, Run, bind_update(ffi::Ffi::Bind()));

}  // namespace
}  // namespace kernels

NB_MODULE(_cpu, m) { kernels::define_module(m, kernels::kRun); }
