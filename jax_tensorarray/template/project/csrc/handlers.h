// What the handlers of all platforms share: the signature of the call, and how its buffers become an Update.
#pragma once

#include <cstdint>
#include <utility>

#include "update.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace kernels {

// The operands, results and attributes that the lowering rule in _op.py gives, in its order.
template <class Binding>
auto bind_update(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()         // buffer
      .template Arg<ffi::Buffer<ffi::S32>>()  // index
      .template Arg<ffi::AnyBuffer>()         // value
      .template Arg<ffi::AnyBuffer>()         // scale
      .template Ret<ffi::AnyBuffer>()         // buffer, in the memory of the operand
      .template Ret<ffi::AnyBuffer>()         // old
      .template Attr<int64_t>("batch_dims");
}

struct Call {
  ffi::AnyBuffer buffer;
  ffi::Buffer<ffi::S32> index;
  ffi::AnyBuffer value, scale;
  ffi::Result<ffi::AnyBuffer> out, old;
  int64_t batch_dims;
};

template <class T>
Update<T> update_of(Call call) {
  auto shape = call.buffer.dimensions();
  Update<T> update{1, shape[call.batch_dims], 1};
  for (int64_t d = 0; d < call.batch_dims; ++d) update.batch *= shape[d];
  for (size_t d = call.batch_dims + 1; d < shape.size(); ++d) update.row *= shape[d];
  update.index = call.index.typed_data();
  update.value = static_cast<const T*>(call.value.untyped_data());
  update.scale = static_cast<const T*>(call.scale.untyped_data());
  update.buffer = static_cast<T*>(call.out->untyped_data());
  update.old = static_cast<T*>(call.old->untyped_data());
  return update;
}

// Calls `run` with the Update of the dtype. The lowering rule asks for no other dtypes, and one of them is an error
// that Python sees: a handler must never abort the process.
template <class Run>
ffi::Error dispatch(Call call, Run run) {
  if (call.batch_dims < 0 || call.batch_dims >= static_cast<int64_t>(call.buffer.dimensions().size())) {
    return ffi::Error::InvalidArgument("decay_row: batch_dims does not fit the buffer");
  }
  switch (call.buffer.element_type()) {
    case ffi::F32: return run(update_of<float>(call));
    case ffi::F64: return run(update_of<double>(call));
    default: return ffi::Error::InvalidArgument("decay_row: there is no kernel for this dtype");
  }
}

}  // namespace kernels
