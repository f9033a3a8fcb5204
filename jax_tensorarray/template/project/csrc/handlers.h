// What the handlers of all platforms share: the signature of the call, and how its buffers become an Update.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

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

// The name of an argument that does not fit the others, or null. Anybody can call a handler with anything, so whatever
// memory is addressed by is checked before any is touched.
inline const char* misfit(Call call) {
  auto shape = call.buffer.dimensions();
  auto dims = static_cast<size_t>(call.batch_dims);
  if (call.batch_dims < 0 || dims >= shape.size()) return "batch_dims";
  std::vector<int64_t> all(shape.begin(), shape.end()), batch(all.begin(), all.begin() + dims), row(all);
  row.erase(row.begin() + dims);
  auto is = [](auto x, ffi::DataType type, const std::vector<int64_t>& like) {
    auto shape = x.dimensions();
    return x.element_type() == type && std::equal(shape.begin(), shape.end(), like.begin(), like.end());
  };
  auto type = call.buffer.element_type();
  if (!is(call.index, ffi::S32, batch)) return "index";
  if (!is(call.value, type, row)) return "value";
  if (!is(call.scale, type, batch)) return "scale";
  if (!is(*call.out, type, all)) return "the first result";
  if (!is(*call.old, type, row)) return "the second result";
  return nullptr;
}

// Calls `run` with the Update of the dtype. The lowering rule asks for nothing that is an error here, and what is one
// is an error that Python sees: a handler must never abort the process.
template <class Run>
ffi::Error dispatch(Call call, Run run) {
  if (const char* name = misfit(call)) {
    return ffi::Error::InvalidArgument(std::string("decay_row: ") + name + " does not fit the buffer");
  }
  switch (call.buffer.element_type()) {
    case ffi::F32: return run(update_of<float>(call));
    case ffi::F64: return run(update_of<double>(call));
    default: return ffi::Error::InvalidArgument("decay_row: there is no kernel for this dtype");
  }
}

}  // namespace kernels
