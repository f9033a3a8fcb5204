// The CPU handlers, and the Python module that hands them to jax.ffi.
#include <cstring>

#include "handlers.h"
#include "module.h"

namespace kernels {
namespace {

ffi::Error RunUpdate(ffi::AnyBuffer buffer, ffi::Buffer<ffi::S32> index, ffi::AnyBuffer value, ffi::AnyBuffer scale,
                     ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> old, int64_t batch_dims) {
  return dispatch("decay_row", UpdateCall{buffer, index, value, scale, out, old, batch_dims}, [&](auto update) {
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

ffi::Error RunLogSumExp(ffi::AnyBuffer buffer, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> scratch,
                        int64_t batch_dims) {
  return dispatch("logsumexp_rows", LogSumExpCall{buffer, out, scratch, batch_dims}, [](auto sum) {
    // The elements of a row in the innermost loop, as they lie in memory; threads of a GPU each follow one of them.
    for (int64_t n = 0; n < sum.elements_of_parts(); ++n) sum.begin(n);
    for (int64_t p = 0; p < sum.parts; ++p) {
      for (int64_t b = 0; b < sum.batch; ++b) {
        for (int64_t t = sum.first(p); t < sum.first(p + 1); ++t) {
          for (int64_t k = 0; k < sum.row; ++k) sum.element(p, b, t, k);
        }
      }
    }
    for (int64_t n = 0; n < sum.elements(); ++n) sum.combine(n);
    return ffi::Error::Success();
  });
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(kUpdate, RunUpdate, bind_update(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(kLogSumExp, RunLogSumExp, bind_logsumexp(ffi::Ffi::Bind()));

}  // namespace
}  // namespace kernels

NB_MODULE(_cpu, m) { kernels::define_module(m, kernels::targets(kernels::kUpdate, kernels::kLogSumExp)); }
