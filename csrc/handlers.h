// What the handlers of every platform share: the attributes of a call, and what it means once it has been checked.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "checks.h"
#include "combine.h"
#include "op_attribute.h"
#include "registration.h"
#include "rows.h"
#include "xla/ffi/api/ffi.h"

namespace jax_tensorarray {

// The attributes that all row ops share.
struct Call {
  int64_t batch_dims;
  int64_t index_dims = 1;  // how many axes an index counts over; left out if it is 1
  bool masked;             // a `where` operand follows the named ones
  std::string_view op;     // its name in messages, see op_attribute.h
  bool reverse;            // walk the positions last to first
  bool sorted;             // an operand with the positions sorted by row follows those
  bool strict;             // an index out of range is an error
};

// The attributes of ops that have one row, or one range of rows, for each batch.
struct BatchCall {
  int64_t batch_dims;
};

struct CheckCall {
  std::string_view op;
  bool strict;
};

}  // namespace jax_tensorarray

// XLA passes attributes sorted by name, so the place of each is known. The two public ways to decode attributes are
// slower here and have other limits. If these do not matter to you, use one of them and do not copy these decoders.
//
// - `XLA_FFI_REGISTER_STRUCT_ATTR_DECODING` looks attributes up by name in each call. With it a call of `read` for a
//   row of 16 bytes took 576 nanoseconds instead of 103, and it has no attributes that may be left out.
// - `BindInstantiate` decodes them once for an executable. A step of a loop took 415 nanoseconds instead of 395. And
//   the type of such a state must be registered before the handlers, while up to jaxlib 0.12 what is registered before
//   there is a backend is handed over in the other order: importing this library would break all of JAX.
namespace xla::ffi {

template <class Attributes>
struct DecodingByPlace {
  using Type = Attributes;

 protected:
  template <class T, size_t size>
  struct Attribute {
    const char (&name)[size];
    T Attributes::* member;
  };

  template <class T, size_t size>
  static Attribute<T, size> attribute(const char (&name)[size], T Attributes::* member) {
    return {name, member};
  }

  // Decodes these attributes, in this order, and allows no others.
  template <class... Expected>
  XLA_FFI_ATTRIBUTE_ALWAYS_INLINE static std::optional<Type> decode(void* dictionary, DiagnosticEngine& diagnostic,
                                                                    const Expected&... expected) {
    const auto& attrs = *static_cast<const XLA_FFI_Attrs*>(dictionary);
    if (XLA_FFI_PREDICT_FALSE(attrs.size != sizeof...(expected))) {
      return diagnostic.Emit("Wrong number of attributes: expected ")
             << sizeof...(expected) << " but got " << attrs.size;
    }
    Type decoded;
    int64_t place = 0;
    bool all = (get(attrs, place++, expected, decoded, diagnostic) && ...);
    return XLA_FFI_PREDICT_TRUE(all) ? std::optional(decoded) : std::nullopt;
  }

 private:
  template <class T, size_t size>
  XLA_FFI_ATTRIBUTE_ALWAYS_INLINE static bool get(const XLA_FFI_Attrs& attrs, int64_t place,
                                                  const Attribute<T, size>& expected, Type& decoded,
                                                  DiagnosticEngine& diagnostic) {
    const XLA_FFI_ByteSpan& name = *attrs.names[place];
    bool given = name.len == size - 1 && memcmp(name.ptr, expected.name, size - 1) == 0;
    if (XLA_FFI_PREDICT_TRUE(given)) {
      auto value = AttrDecoding<T>::Decode(attrs.types[place], attrs.attrs[place], diagnostic);
      if (XLA_FFI_PREDICT_TRUE(value.has_value())) {
        decoded.*expected.member = *value;
        return true;
      }
    }
    diagnostic.Emit("Wrong or missing attribute: ") << expected.name;
    return false;
  }
};

template <>
struct AttrDecoding<jax_tensorarray::Call> : DecodingByPlace<jax_tensorarray::Call> {
  XLA_FFI_ATTRIBUTE_ALWAYS_INLINE
  static std::optional<Type> Decode(XLA_FFI_AttrType, void* dictionary, DiagnosticEngine& diagnostic) {
    auto decode_with = [&](const auto&... index_dims) {
      return decode(dictionary, diagnostic, attribute("batch_dims", &Type::batch_dims), index_dims...,
                    attribute("masked", &Type::masked), attribute("op", &Type::op),
                    attribute("reverse", &Type::reverse), attribute("sorted", &Type::sorted),
                    attribute("strict", &Type::strict));
    };
    constexpr int64_t kWithIndexDims = 7;
    if (static_cast<const XLA_FFI_Attrs*>(dictionary)->size != kWithIndexDims) return decode_with();
    return decode_with(attribute("index_dims", &Type::index_dims));
  }
};

template <>
struct AttrDecoding<jax_tensorarray::BatchCall> : DecodingByPlace<jax_tensorarray::BatchCall> {
  XLA_FFI_ATTRIBUTE_ALWAYS_INLINE
  static std::optional<Type> Decode(XLA_FFI_AttrType, void* dictionary, DiagnosticEngine& diagnostic) {
    return decode(dictionary, diagnostic, attribute("batch_dims", &Type::batch_dims));
  }
};

template <>
struct AttrDecoding<jax_tensorarray::CheckCall> : DecodingByPlace<jax_tensorarray::CheckCall> {
  XLA_FFI_ATTRIBUTE_ALWAYS_INLINE
  static std::optional<Type> Decode(XLA_FFI_AttrType, void* dictionary, DiagnosticEngine& diagnostic) {
    return decode(dictionary, diagnostic, attribute("op", &Type::op), attribute("strict", &Type::strict));
  }
};

}  // namespace xla::ffi

namespace jax_tensorarray {

// --- what a call means -----------------------------------------------------------------------------------------
//
// Each `plan_` function checks a call and fills in what its op has to know. If the call is wrong, it returns false and
// puts the reason into `error`. Handlers call it first.

// Where the buffer lies, which rows to visit, and how large everything is.
struct Plan {
  Geometry geometry;  // row in bytes
  Index index;
  const int32_t* order;  // null: positions are visited as they come
};

// `rows` are the operands and results that have a row for each position.
template <class... Rows>
XLA_FFI_ATTRIBUTE_ALWAYS_INLINE inline bool plan_rows(Plan& plan, const Call& call, ffi::AnyBuffer buffer,
                                                      ffi::AnyBuffer index, const ffi::RemainingArgs& rest,
                                                      ffi::Error& error, Rows... rows) {
  Checks checks(call.op, error);
  if (!checks.buffer(buffer, call.batch_dims, 0, call.index_dims) || !checks.index(index, plan.index) ||
      !(checks.rows(rows) && ...)) {
    return false;
  }
  plan.geometry = checks.geometry();
  if (call.masked) {
    auto where = rest.get<ffi::AnyBuffer>(0);
    if (where.has_error()) return error = missing(call.op, "where", "masked"), false;
    if (!checks.where(*where)) return false;
    plan.index.where = static_cast<const uint8_t*>(where->untyped_data());
  }
  if (call.sorted) {
    auto order = rest.get<ffi::AnyBuffer>(call.masked ? 1 : 0);
    if (order.has_error()) return error = missing(call.op, "order", "sorted"), false;
    if (!checks.order(*order)) return false;
    plan.order = static_cast<const int32_t*>(order->untyped_data());
  }
  return true;
}

inline bool plan_read(Plan& plan, const Call& call, ffi::AnyBuffer buffer, ffi::AnyBuffer index,
                      const ffi::RemainingArgs& rest, ffi::AnyBuffer value, ffi::Error& error) {
  return plan_rows(plan, call, buffer, index, rest, error, Argument{"result", value});
}

// `old` is given if the overwritten rows are a result, too.
template <class... Old>
bool plan_write(Plan& plan, const Call& call, ffi::AnyBuffer buffer, ffi::AnyBuffer index, ffi::AnyBuffer value,
                const ffi::RemainingArgs& rest, ffi::AnyBuffer out, ffi::Error& error, Old... old) {
  return plan_rows(plan, call, buffer, index, rest, error, Argument{"value", value}, Argument{"result old", old}...) &&
         Checks(call.op, error).updated(buffer, out);
}

template <class Op>
bool plan_combine(Plan& plan, const Call& call, ffi::AnyBuffer buffer, ffi::AnyBuffer index, ffi::AnyBuffer value,
                  const ffi::RemainingArgs& rest, ffi::AnyBuffer out, ffi::Error& error) {
  if (!plan_write(plan, call, buffer, index, value, rest, out, error)) return false;
  if (has_rule<Op>(element_type(buffer.element_type()))) return true;
  return error = wrong(call.op, {"buffer", buffer}, "be of a dtype that this op has a meaning for"), false;
}

// The rows of each batch that become zeros.
struct Cleared {
  Geometry geometry;  // row in bytes
  Index start, stop;
};

inline bool plan_mask(Cleared& cleared, ffi::AnyBuffer buffer, ffi::AnyBuffer size, ffi::AnyBuffer out,
                      int64_t batch_dims, ffi::Error& error) {
  Checks checks("jax_tensorarray_mask", error);
  if (!checks.buffer(buffer, batch_dims) || !checks.bound({"size", size}, cleared.start)) return false;
  cleared.geometry = checks.geometry();
  return checks.updated(buffer, out);
}

inline bool plan_clear(Cleared& cleared, ffi::AnyBuffer buffer, ffi::AnyBuffer start, ffi::AnyBuffer stop,
                       ffi::AnyBuffer out, int64_t batch_dims, ffi::Error& error) {
  Checks checks("jax_tensorarray_clear", error);
  if (!checks.buffer(buffer, batch_dims) || !checks.bound({"start", start}, cleared.start) ||
      !checks.bound({"stop", stop}, cleared.stop)) {
    return false;
  }
  cleared.geometry = checks.geometry();
  return checks.updated(buffer, out);
}

// Each part is treated as a row. Sizes are in bytes, and `row` has one row for each batch.
inline bool plan_parts(Parts& plan, Checks& checks, ffi::AnyBuffer buffer, ffi::AnyBuffer index, Argument row,
                       ffi::AnyBuffer parts, int64_t batch_dims) {
  if (!checks.buffer(buffer, batch_dims, 1) || !checks.bound({"index", index}, plan.index) || !checks.row(row) ||
      !checks.bound({"parts", parts}, plan.count)) {
    return false;
  }
  int64_t parts_in_row = buffer.dimensions()[static_cast<size_t>(batch_dims) + 1];
  plan.g = checks.geometry();
  plan.part = parts_in_row == 0 ? 0 : plan.g.row / parts_in_row;
  return true;
}

inline bool plan_read_part(Parts& plan, ffi::AnyBuffer buffer, ffi::AnyBuffer index, ffi::AnyBuffer parts,
                           ffi::AnyBuffer value, int64_t batch_dims, ffi::Error& error) {
  Checks checks("jax_tensorarray_read_part", error);
  return plan_parts(plan, checks, buffer, index, {"result", value}, parts, batch_dims);
}

inline bool plan_write_part(Parts& plan, ffi::AnyBuffer buffer, ffi::AnyBuffer index, ffi::AnyBuffer value,
                            ffi::AnyBuffer parts, ffi::AnyBuffer out, int64_t batch_dims, ffi::Error& error) {
  Checks checks("jax_tensorarray_write_part", error);
  return plan_parts(plan, checks, buffer, index, {"value", value}, parts, batch_dims) && checks.updated(buffer, out);
}

// Indices, and the number of rows that those of each batch may address.
struct Checked {
  Index index;
  LiveSize size;
  int64_t positions;
};

inline bool plan_check(Checked& checked, std::string_view op, ffi::AnyBuffer index, ffi::AnyBuffer size,
                       ffi::AnyBuffer out, ffi::Error& error) {
  Checks checks(op, error);
  if (!checks.size(size) || !checks.index(index, checked.index) ||
      !checks.is({"result", out}, ffi::S32, index.dimensions())) {
    return false;
  }
  checked.size = {static_cast<const int32_t*>(size.untyped_data()), checks.geometry().count};
  checked.positions = checks.geometry().positions();
  return true;
}

inline bool plan_fence(ffi::AnyBuffer buffer, ffi::AnyBuffer out, ffi::Error& error) {
  Checks checks("jax_tensorarray_fence", error);
  return checks.whole_bytes(buffer) && checks.updated(buffer, out);
}

// --- signatures ------------------------------------------------------------------------------------------------

// Appends so many operands, whatever follows them, results and attributes to a binding that may begin with a context.
template <size_t kOperands, bool kAndMore, size_t kResults, class Attributes = void>
struct Signature {
  template <class Binding>
  auto operator()(Binding binding) const {
    if constexpr (kOperands > 0) {
      return Signature<kOperands - 1, kAndMore, kResults, Attributes>()(
          std::move(binding).template Arg<ffi::AnyBuffer>());
    } else if constexpr (kAndMore) {
      return Signature<0, false, kResults, Attributes>()(std::move(binding).RemainingArgs());
    } else if constexpr (kResults > 1 || (kResults == 1 && !std::is_void_v<Attributes>)) {
      return Signature<0, false, kResults - 1, Attributes>()(std::move(binding).template Ret<ffi::AnyBuffer>());
    } else if constexpr (kResults == 1) {
      return std::move(binding).template Ret<ffi::AnyBuffer>();
    } else {
      return std::move(binding).template Attrs<Attributes>();
    }
  }
};

// What follows the operands is `where` and `order`, if the attributes say so, and readers.
constexpr bool kMore = true, kNoMore = false;
constexpr Signature<2, kMore, 1, Call> bind_read;             // buffer, index -> value
constexpr Signature<3, kMore, 1, Call> bind_write;            // buffer, index, value -> buffer
constexpr Signature<3, kMore, 2, Call> bind_swap;             // buffer, index, value -> buffer, old
constexpr Signature<2, kMore, 1, BatchCall> bind_mask;        // buffer, size -> buffer
constexpr Signature<3, kMore, 1, BatchCall> bind_clear;       // buffer, start, stop -> buffer
constexpr Signature<3, kMore, 1, BatchCall> bind_read_part;   // buffer, index, parts -> value
constexpr Signature<4, kMore, 1, BatchCall> bind_write_part;  // buffer, index, value, parts -> buffer
constexpr Signature<2, kNoMore, 1, CheckCall> bind_check;     // index, size -> index
constexpr Signature<1, kMore, 1> bind_fence;                  // buffer -> buffer
constexpr Signature<0, kMore, 1> bind_empty;                  // -> buffer

// --- the handlers of a platform --------------------------------------------------------------------------------
//
// Every platform defines the functions declared here.

extern "C" {
XLA_FFI_Handler kRead, kWrite, kSwap, kMask, kClear, kReadPart, kWritePart, kCheck, kFence, kEmpty, kRaise;
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
          {"raise", kRaise},
          {std::string(Ops::kName), combine<Ops>}...};
}

inline Handlers all_handlers() { return handlers_with(Combining{}); }

}  // namespace jax_tensorarray
