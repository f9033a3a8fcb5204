// What the handlers of all platforms share: the signatures of the calls, and how their buffers become a kernel's.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "logsumexp.h"
#include "update.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace kernels {

// --- targets ---------------------------------------------------------------------------------------------------

// The name that a lowering rule calls, and what a platform has for it.
struct Target {
  const char* name;
  XLA_FFI_Handler* handler;
};

using Targets = std::array<Target, 2>;

inline Targets targets(XLA_FFI_Handler* update, XLA_FFI_Handler* logsumexp) {
  return {{{"decay_row_update", update}, {"decay_row_logsumexp", logsumexp}}};
}

// --- signatures ------------------------------------------------------------------------------------------------

// The operands, results and attributes that the lowering rule gives, in its order. A binding may begin with a context.
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

template <class Binding>
auto bind_logsumexp(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()  // buffer
      .template Ret<ffi::AnyBuffer>()  // result
      .template Ret<ffi::AnyBuffer>()  // scratch memory
      .template Attr<int64_t>("batch_dims");
}

// --- checks ----------------------------------------------------------------------------------------------------
//
// Anybody can call a handler with anything, so whatever memory is addressed by is checked before any is touched. What
// does not fit is an error that Python sees: a handler must never abort the process.

using Shape = ffi::Span<const int64_t>;

inline ffi::Error does_not_fit(const char* op, const char* name) {
  return ffi::Error::InvalidArgument(std::string(op) + ": " + name + " does not fit the buffer");
}

// The shape of a buffer `[*batch, size, *row]`, and what the shapes of other arrays have to be.
struct Layout {
  Shape shape;
  size_t batch_dims;
  int64_t batch = 1, size = 0, row = 1;

  // False if the buffer has no axis of rows.
  bool set(Shape dimensions, int64_t dims) {
    if (dims < 0 || static_cast<size_t>(dims) >= dimensions.size()) return false;
    shape = dimensions;
    batch_dims = static_cast<size_t>(dims);
    size = shape[batch_dims];
    for (size_t d = 0; d < batch_dims; ++d) batch *= shape[d];
    for (size_t d = batch_dims + 1; d < shape.size(); ++d) row *= shape[d];
    return true;
  }

  bool is_buffer(Shape other) const { return std::equal(shape.begin(), shape.end(), other.begin(), other.end()); }

  bool is_batch(Shape other) const {
    return other.size() == batch_dims && std::equal(other.begin(), other.end(), shape.begin());
  }

  // Whether that is the shape of one row for each batch, from its axis `first` on.
  bool is_row(Shape other, size_t first = 0) const {
    if (other.size() != first + shape.size() - 1) return false;
    auto row_of = other.begin() + first;
    return std::equal(row_of, row_of + batch_dims, shape.begin()) &&
           std::equal(row_of + batch_dims, other.end(), shape.begin() + batch_dims + 1);
  }
};

// --- calls -----------------------------------------------------------------------------------------------------

struct UpdateCall {
  ffi::AnyBuffer buffer;
  ffi::Buffer<ffi::S32> index;
  ffi::AnyBuffer value, scale;
  ffi::Result<ffi::AnyBuffer> out, old;
  int64_t batch_dims;
  Layout layout{};

  // The name of an argument that does not fit the others, or null.
  const char* misfit() {
    auto type = buffer.element_type();
    if (!layout.set(buffer.dimensions(), batch_dims)) return "batch_dims";
    if (!layout.is_batch(index.dimensions())) return "index";
    if (value.element_type() != type || !layout.is_row(value.dimensions())) return "value";
    if (scale.element_type() != type || !layout.is_batch(scale.dimensions())) return "scale";
    if (out->element_type() != type || !layout.is_buffer(out->dimensions())) return "the first result";
    if (old->element_type() != type || !layout.is_row(old->dimensions())) return "the second result";
    return nullptr;
  }

  template <class T>
  Update<T> kernel() {
    Update<T> update{layout.batch, layout.size, layout.row};
    update.index = index.typed_data();
    update.value = value.typed_data<T>();
    update.scale = scale.typed_data<T>();
    update.buffer = out->typed_data<T>();
    update.old = old->typed_data<T>();
    return update;
  }
};

struct LogSumExpCall {
  ffi::AnyBuffer buffer;
  ffi::Result<ffi::AnyBuffer> out, scratch;
  int64_t batch_dims;
  Layout layout{};

  const char* misfit() {
    auto type = buffer.element_type();
    auto parts = scratch->dimensions();
    if (!layout.set(buffer.dimensions(), batch_dims)) return "batch_dims";
    if (out->element_type() != type || !layout.is_row(out->dimensions())) return "the result";
    if (scratch->element_type() != type || !layout.is_row(parts, 2) || parts[0] != 2 || parts[1] < 1) {
      return "the scratch memory";
    }
    return nullptr;
  }

  template <class T>
  LogSumExp<T> kernel() {
    LogSumExp<T> sum{layout.batch, layout.size, layout.row, scratch->dimensions()[1]};
    sum.maxima = scratch->typed_data<T>();
    sum.sums = sum.maxima + sum.elements_of_parts();
    sum.buffer = buffer.typed_data<T>();
    sum.out = out->typed_data<T>();
    return sum;
  }
};

// Calls `run` with the kernel for the dtype. The lowering rule calls for no other dtype.
template <class Call, class Run>
ffi::Error dispatch(const char* op, Call call, Run run) {
  if (const char* name = call.misfit()) return does_not_fit(op, name);
  switch (call.buffer.element_type()) {
    case ffi::F32: return run(call.template kernel<float>());
    case ffi::F64: return run(call.template kernel<double>());
    default: return ffi::Error::InvalidArgument(std::string(op) + ": there is no kernel for this dtype");
  }
}

}  // namespace kernels
