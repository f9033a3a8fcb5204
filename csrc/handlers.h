// What the handlers of every platform share: the attributes of a call, and its geometry.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "combine.h"
#include "kernels.h"
#include "registration.h"
#include "xla/ffi/api/ffi.h"

namespace jax_tensorarray {

namespace ffi = xla::ffi;

inline ffi::ErrorOr<IndexType> index_type(ffi::DataType type) {
  switch (type) {
    case ffi::S8: return IndexType::kS8;
    case ffi::S16: return IndexType::kS16;
    case ffi::S32: return IndexType::kS32;
    case ffi::S64: return IndexType::kS64;
    case ffi::U8: return IndexType::kU8;
    case ffi::U16: return IndexType::kU16;
    case ffi::U32: return IndexType::kU32;
    case ffi::U64: return IndexType::kU64;
    default: return ffi::Unexpected(ffi::Error::InvalidArgument("the index of a row op must be an integer"));
  }
}

inline ElementType element_type(ffi::DataType type) {
  switch (type) {
    case ffi::PRED: return ElementType::kBool;
    case ffi::S8: return ElementType::kS8;
    case ffi::S16: return ElementType::kS16;
    case ffi::S32: return ElementType::kS32;
    case ffi::S64: return ElementType::kS64;
    case ffi::U8: return ElementType::kU8;
    case ffi::U16: return ElementType::kU16;
    case ffi::U32: return ElementType::kU32;
    case ffi::U64: return ElementType::kU64;
    case ffi::F16: return ElementType::kF16;
    case ffi::BF16: return ElementType::kBF16;
    case ffi::F32: return ElementType::kF32;
    case ffi::F64: return ElementType::kF64;
    case ffi::F8E3M4: return ElementType::kF8E3M4;
    case ffi::F8E4M3: return ElementType::kF8E4M3;
    case ffi::F8E4M3FN: return ElementType::kF8E4M3FN;
    case ffi::F8E4M3FNUZ: return ElementType::kF8E4M3FNUZ;
    case ffi::F8E4M3B11FNUZ: return ElementType::kF8E4M3B11FNUZ;
    case ffi::F8E5M2: return ElementType::kF8E5M2;
    case ffi::F8E5M2FNUZ: return ElementType::kF8E5M2FNUZ;
    case ffi::F8E8M0FNU: return ElementType::kF8E8M0FNU;
    case ffi::C64: return ElementType::kC64;
    case ffi::C128: return ElementType::kC128;
    default: return ElementType::kNone;
  }
}

inline ffi::ErrorOr<Index> index_of(const ffi::AnyBuffer& index) {
  auto type = index_type(index.element_type());
  if (type.has_error()) return ffi::Unexpected(type.error());
  return Index{index.untyped_data(), nullptr, type.value()};
}

// The attributes that all row ops share.
struct Call {
  std::string_view op;  // the name the user called, for messages
  int64_t batch_dims;
  bool strict;   // an index out of range is an error
  bool masked;   // a `where` operand follows the named ones
  bool sorted;   // the order of the positions, sorted by row, follows that
  bool reverse;  // walk the positions last to first
};

}  // namespace jax_tensorarray

// XLA hands attributes over sorted by name, so each of ours has its place. To look them up by name, as XLA's own
// decoding of structs does, takes twice as many instructions as all else that a call of one row does.
namespace xla::ffi {

template <>
struct AttrDecoding<jax_tensorarray::Call> {
  using Type = jax_tensorarray::Call;

  static std::optional<Type> Decode(XLA_FFI_AttrType, void* dictionary, DiagnosticEngine& diagnostic) {
    const auto& attrs = *static_cast<const XLA_FFI_Attrs*>(dictionary);
    Type call;
    if (get(attrs, 0, "batch_dims", call.batch_dims, diagnostic) && get(attrs, 1, "masked", call.masked, diagnostic) &&
        get(attrs, 2, "op", call.op, diagnostic) && get(attrs, 3, "reverse", call.reverse, diagnostic) &&
        get(attrs, 4, "sorted", call.sorted, diagnostic) && get(attrs, 5, "strict", call.strict, diagnostic)) {
      return call;
    }
    return std::nullopt;
  }

 private:
  template <class T, size_t size>
  XLA_FFI_ATTRIBUTE_ALWAYS_INLINE static bool get(const XLA_FFI_Attrs& attrs, int64_t place, const char (&name)[size],
                                                  T& member, DiagnosticEngine& diagnostic) {
    bool given = place < attrs.size && attrs.names[place]->len == size - 1 &&
                 memcmp(attrs.names[place]->ptr, name, size - 1) == 0;
    auto value = given ? AttrDecoding<T>::Decode(attrs.types[place], attrs.attrs[place], diagnostic) : std::nullopt;
    if (value) member = *value;
    else diagnostic.Emit("Wrong or missing attribute: ") << name;
    return value.has_value();
  }
};

}  // namespace xla::ffi

namespace jax_tensorarray {

inline int64_t product(ffi::AnyBuffer::Dimensions dims, size_t begin, size_t end) {
  int64_t n = 1;
  for (size_t d = begin; d < end; ++d) n *= dims[d];
  return n;
}

inline Geometry geometry_of(const ffi::AnyBuffer& buffer, int64_t batch_dims, int64_t positions) {
  auto dims = buffer.dimensions();
  auto time = static_cast<size_t>(batch_dims);
  Geometry g{};
  g.batch = product(dims, 0, time);
  g.size = dims[time];
  g.count = g.batch == 0 ? 0 : positions / g.batch;
  g.row = product(dims, time + 1, dims.size()) * static_cast<int64_t>(ffi::ByteWidth(buffer.element_type()));
  return g;
}

// Where the buffer lies, which rows to visit, and how large everything is.
struct Plan {
  Geometry geometry;  // row in bytes
  Index index;
  const int32_t* order;  // null: as they come
};

inline ffi::ErrorOr<Plan> make_plan(const Call& call, const ffi::AnyBuffer& buffer, const ffi::AnyBuffer& index,
                                    const ffi::RemainingArgs& rest) {
  Plan plan{};
  auto rows = index_of(index);
  if (rows.has_error()) return ffi::Unexpected(rows.error());
  plan.index = rows.value();
  if (call.masked) {
    auto where = rest.get<ffi::AnyBuffer>(0);
    if (where.has_error()) return ffi::Unexpected(where.error());
    plan.index.where = static_cast<const uint8_t*>(where.value().untyped_data());
  }
  if (call.sorted) {
    auto order = rest.get<ffi::Buffer<ffi::S32>>(call.masked ? 1 : 0);
    if (order.has_error()) return ffi::Unexpected(order.error());
    plan.order = order.value().typed_data();
  }
  plan.geometry = geometry_of(buffer, call.batch_dims, static_cast<int64_t>(index.element_count()));
  return plan;
}

// In bytes. The parts of a row are its rows, so to say.
inline ffi::ErrorOr<Parts> make_parts(const ffi::AnyBuffer& buffer, const ffi::AnyBuffer& index,
                                      const ffi::AnyBuffer& parts, int64_t batch_dims) {
  auto at = index_of(index), count = index_of(parts);
  if (at.has_error()) return ffi::Unexpected(at.error());
  if (count.has_error()) return ffi::Unexpected(count.error());
  Geometry g = geometry_of(buffer, batch_dims, 0);
  int64_t of_a_row = buffer.dimensions()[static_cast<size_t>(batch_dims) + 1];
  return Parts{g, at.value(), count.value(), of_a_row == 0 ? 0 : g.row / of_a_row};
}

inline ffi::Error no_rule(const Call& call) {
  return ffi::Error::InvalidArgument(std::string(call.op) + ": not for buffers of this dtype");
}

// Operands and results of each kind of op, appended to a binding that may hold a context already.
template <class Binding>
auto bind_read(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()  // buffer
      .template Arg<ffi::AnyBuffer>()  // index
      .RemainingArgs()                 // where, readers
      .template Ret<ffi::AnyBuffer>()  // value
      .template Attrs<Call>();
}

template <class Binding>
auto bind_write(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()  // buffer
      .template Arg<ffi::AnyBuffer>()  // index
      .template Arg<ffi::AnyBuffer>()  // value
      .RemainingArgs()                 // where, order, readers
      .template Ret<ffi::AnyBuffer>()  // buffer
      .template Attrs<Call>();
}

template <class Binding>
auto bind_swap(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()  // buffer
      .template Arg<ffi::AnyBuffer>()  // index
      .template Arg<ffi::AnyBuffer>()  // value
      .RemainingArgs()                 // where, order, readers
      .template Ret<ffi::AnyBuffer>()  // buffer
      .template Ret<ffi::AnyBuffer>()  // old
      .template Attrs<Call>();
}

template <class Binding>
auto bind_mask(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()  // buffer
      .template Arg<ffi::AnyBuffer>()  // size
      .RemainingArgs()                 // readers
      .template Ret<ffi::AnyBuffer>()  // buffer
      .template Attr<int64_t>("batch_dims");
}

template <class Binding>
auto bind_clear(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()  // buffer
      .template Arg<ffi::AnyBuffer>()  // start
      .template Arg<ffi::AnyBuffer>()  // stop
      .RemainingArgs()                 // readers
      .template Ret<ffi::AnyBuffer>()  // buffer
      .template Attr<int64_t>("batch_dims");
}

template <class Binding>
auto bind_read_part(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()  // buffer
      .template Arg<ffi::AnyBuffer>()  // index
      .template Arg<ffi::AnyBuffer>()  // parts
      .RemainingArgs()                 // readers
      .template Ret<ffi::AnyBuffer>()  // value
      .template Attr<int64_t>("batch_dims");
}

template <class Binding>
auto bind_write_part(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()  // buffer
      .template Arg<ffi::AnyBuffer>()  // index
      .template Arg<ffi::AnyBuffer>()  // value
      .template Arg<ffi::AnyBuffer>()  // parts
      .RemainingArgs()                 // readers
      .template Ret<ffi::AnyBuffer>()  // buffer
      .template Attr<int64_t>("batch_dims");
}

template <class Binding>
auto bind_check(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()         // index
      .template Arg<ffi::Buffer<ffi::S32>>()  // size
      .template Ret<ffi::Buffer<ffi::S32>>()  // index
      .template Attr<std::string_view>("op")
      .template Attr<bool>("strict");
}

template <class Binding>
auto bind_fence(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()  // buffer
      .RemainingArgs()                 // readers
      .template Ret<ffi::AnyBuffer>();
}

template <class Binding>
auto bind_empty(Binding binding) {
  return std::move(binding).RemainingArgs().template Ret<ffi::AnyBuffer>();
}

// --- the handlers of a platform --------------------------------------------------------------------------------
//
// Every platform defines the functions declared here.

extern "C" {
XLA_FFI_Handler kRead, kWrite, kSwap, kMask, kClear, kReadPart, kWritePart, kCheck, kFence, kEmpty;
}

template <class Op>
XLA_FFI_Error* combine(XLA_FFI_CallFrame* call);

template <class... Ops>
Handlers handlers_with(List<Ops...>) {
  return {{"read", kRead},
          {"write", kWrite},
          {"swap", kSwap},
          {"mask", kMask},
          {"clear", kClear},
          {"read_part", kReadPart},
          {"write_part", kWritePart},
          {"check", kCheck},
          {"fence", kFence},
          {"empty", kEmpty},
          {std::string(Ops::kName), combine<Ops>}...};
}

inline Handlers all_handlers() { return handlers_with(Combining{}); }

}  // namespace jax_tensorarray
