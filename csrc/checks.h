// Checks the arguments of a call.
//
// A call may have been written by hand or changed in an export, so a handler checks all of it before it touches memory
// or launches a kernel. Only the contents of arrays are not checked here: an index has a rule of its own, and the
// threads of a GPU check the order of positions when they use it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "combine.h"
#include "op_attribute.h"
#include "rows.h"
#include "xla/ffi/api/ffi.h"

namespace jax_tensorarray {

namespace ffi = xla::ffi;

// --- dtypes ----------------------------------------------------------------------------------------------------

inline IndexType index_type(ffi::DataType type) {
  switch (type) {
    case ffi::S8: return IndexType::kS8;
    case ffi::S16: return IndexType::kS16;
    case ffi::S32: return IndexType::kS32;
    case ffi::S64: return IndexType::kS64;
    case ffi::U8: return IndexType::kU8;
    case ffi::U16: return IndexType::kU16;
    case ffi::U32: return IndexType::kU32;
    case ffi::U64: return IndexType::kU64;
    default: return IndexType::kNone;
  }
}

// kNone for the types smaller than a byte, and for those that only a newer XLA has.
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

constexpr int64_t bytes_of(ElementType type) {
  switch (type) {
    case ElementType::kNone: return 0;
    case ElementType::kS16:
    case ElementType::kU16:
    case ElementType::kF16:
    case ElementType::kBF16: return 2;
    case ElementType::kS32:
    case ElementType::kU32:
    case ElementType::kF32: return 4;
    case ElementType::kS64:
    case ElementType::kU64:
    case ElementType::kF64:
    case ElementType::kC64: return 8;
    case ElementType::kC128: return 16;
    default: return 1;
  }
}

inline std::string name_of(ffi::DataType type) {
  switch (type) {
    case ffi::PRED: return "bool";
    case ffi::S2: return "int2";
    case ffi::S4: return "int4";
    case ffi::S8: return "int8";
    case ffi::S16: return "int16";
    case ffi::S32: return "int32";
    case ffi::S64: return "int64";
    case ffi::U2: return "uint2";
    case ffi::U4: return "uint4";
    case ffi::U8: return "uint8";
    case ffi::U16: return "uint16";
    case ffi::U32: return "uint32";
    case ffi::U64: return "uint64";
    case ffi::F16: return "float16";
    case ffi::BF16: return "bfloat16";
    case ffi::F32: return "float32";
    case ffi::F64: return "float64";
    case ffi::C64: return "complex64";
    case ffi::C128: return "complex128";
    default: return "XLA's dtype " + std::to_string(static_cast<int>(type));
  }
}

// --- what messages say -----------------------------------------------------------------------------------------
//
// None of these are inlined, so that correct calls stay fast.

using Dims = ffi::AnyBuffer::Dimensions;

[[gnu::cold, gnu::noinline]] inline std::string name_of(std::string_view op) {
  return std::string(named_at(op, 0).name);
}

// An argument, and its name in messages.
struct Argument {
  const char* name;
  ffi::AnyBuffer given;
};

[[gnu::cold, gnu::noinline]] inline std::string text(ffi::DataType dtype, Dims first, Dims second = {}) {
  std::string dims;
  for (Dims part : {first, second}) {
    for (int64_t n : part) dims += (dims.empty() ? "" : ", ") + std::to_string(n);
  }
  return name_of(dtype) + " [" + dims + "]";
}

[[gnu::cold, gnu::noinline]] inline ffi::Error wrong(std::string_view op, Argument argument, const char* must) {
  std::string given = text(argument.given.element_type(), argument.given.dimensions());
  return ffi::Error::InvalidArgument(name_of(op) + ": " + argument.name + " is " + given + ", and must " + must);
}

[[gnu::cold, gnu::noinline]] inline ffi::Error wrong_type(std::string_view op, Argument argument, ffi::DataType dtype,
                                                          Dims first, Dims second) {
  return wrong(op, argument, ("be " + text(dtype, first, second)).c_str());
}

[[gnu::cold, gnu::noinline]] inline ffi::Error wrong_batch(std::string_view op, Argument argument, Dims batch) {
  std::string shape = text(argument.given.element_type(), batch);
  return wrong(op, argument, ("begin with the dimensions of the batch, " + shape.substr(shape.find('['))).c_str());
}

[[gnu::cold, gnu::noinline]] inline ffi::Error wrong_batch_dims(std::string_view op, ffi::AnyBuffer buffer,
                                                                int64_t batch_dims, size_t least) {
  size_t rank = buffer.dimensions().size();
  if (rank < least) return wrong(op, {"buffer", buffer}, least == 1 ? "have rows" : "have rows that have parts");
  return ffi::Error::InvalidArgument(name_of(op) + ": batch_dims is " + std::to_string(batch_dims) +
                                     ", and must be from 0 to " + std::to_string(rank - least) + " for buffer " +
                                     text(buffer.element_type(), buffer.dimensions()));
}

[[gnu::cold, gnu::noinline]] inline ffi::Error wrong_index_dims(std::string_view op, ffi::AnyBuffer buffer,
                                                                int64_t index_dims, size_t most) {
  return ffi::Error::InvalidArgument(name_of(op) + ": index_dims is " + std::to_string(index_dims) +
                                     ", and must be from 1 to " + std::to_string(most) + " for buffer " +
                                     text(buffer.element_type(), buffer.dimensions()));
}

[[gnu::cold, gnu::noinline]] inline ffi::Error missing(std::string_view op, const char* name, const char* attribute) {
  return ffi::Error::InvalidArgument(name_of(op) + ": " + name + " is missing, and must be there since `" + attribute +
                                     "` is true");
}

// --- checks ----------------------------------------------------------------------------------------------------

// Multiplies `n` by `dims`, unless one of them is negative or the product overflows.
inline bool multiply(int64_t& n, Dims dims) {
  int64_t product = n;
  for (int64_t dim : dims) {
    if (dim < 0 || __builtin_mul_overflow(product, dim, &product)) return false;
  }
  n = product;
  return true;
}

inline bool same(const int64_t* dims, Dims as) {
  for (size_t d = 0; d < as.size(); ++d) {
    if (dims[d] != as[d]) return false;
  }
  return true;
}

// Checks the arguments of a call, the buffer first. Each function returns whether its argument is right, and otherwise
// puts what is wrong into `error`.
class Checks {
 public:
  Checks(std::string_view op, ffi::Error& error) : op_(op), error_(error) {}

  // `[*batch, *sizes, *row]`, where a row has at least `row_dims` dimensions and an index counts over all `sizes`.
  bool buffer(ffi::AnyBuffer given, int64_t batch_dims, size_t row_dims = 0, int64_t index_dims = 1) {
    Dims dims = given.dimensions();
    if (batch_dims < 0 || static_cast<size_t>(batch_dims) + row_dims >= dims.size()) {
      return fails(wrong_batch_dims(op_, given, batch_dims, row_dims + 1));
    }
    batch_ = dims.first(static_cast<size_t>(batch_dims));
    size_t most = dims.size() - batch_.size() - row_dims;
    if (index_dims < 1 || static_cast<size_t>(index_dims) > most) {
      return fails(wrong_index_dims(op_, given, index_dims, most));
    }
    dtype_ = given.element_type();
    row_ = dims.last(dims.size() - batch_.size() - static_cast<size_t>(index_dims));
    size_ = batches_ = 1;
    row_bytes_ = bytes_of(element_type(dtype_));
    if (row_bytes_ == 0) return fails(wrong(op_, {"buffer", given}, "have elements of whole bytes"));
    int64_t bytes = 0;
    if (multiply(batches_, batch_) && multiply(row_bytes_, row_) &&
        multiply(size_, dims.first(dims.size() - row_.size()).last(static_cast<size_t>(index_dims))) &&
        !__builtin_mul_overflow(batches_, size_, &bytes) && !__builtin_mul_overflow(bytes, row_bytes_, &bytes)) {
      return true;
    }
    return fails(wrong(op_, {"buffer", given}, "have fewer than 2^63 bytes"));
  }

  // The number of rows, in place of a buffer: int32 `[*batch]`.
  bool size(ffi::AnyBuffer given) {
    batch_ = given.dimensions();
    batches_ = 1;
    if (!is({"size", given}, ffi::S32, batch_)) return false;
    return multiply(batches_, batch_) || fails(wrong(op_, {"size", given}, "have fewer than 2^63 elements"));
  }

  // Integers `[*batch, *positions]`.
  bool index(ffi::AnyBuffer given, Index& rows) {
    Dims dims = given.dimensions();
    if (!integers({"index", given}, rows)) return false;
    if (dims.size() < batch_.size() || !same(dims.begin(), batch_)) {
      return fails(wrong_batch(op_, {"index", given}, batch_));
    }
    index_ = dims;
    count_ = 1;
    if (multiply(count_, dims.last(dims.size() - batch_.size()))) return true;
    return fails(wrong(op_, {"index", given}, "have fewer than 2^63 elements"));
  }

  // Integers `[*batch]`.
  bool bound(Argument argument, Index& bound) {
    return integers(argument, bound) && is(argument, argument.given.element_type(), batch_);
  }

  // A row for each batch.
  bool row(Argument argument) { return is(argument, dtype_, batch_, row_); }

  // A row for each position of the index.
  bool rows(Argument argument) { return is(argument, dtype_, index_, row_); }

  bool where(ffi::AnyBuffer given) { return is({"where", given}, ffi::PRED, index_); }

  // A number for each position, `[*batch, count]`.
  bool order(ffi::AnyBuffer given) {
    int64_t count = count_;
    return is({"order", given}, ffi::S32, batch_, Dims(&count, 1));
  }

  // The result that is the updated buffer.
  bool updated(ffi::AnyBuffer buffer, ffi::AnyBuffer out) {
    return is({"result buffer", out}, buffer.element_type(), buffer.dimensions());
  }

  bool is(Argument argument, ffi::DataType dtype, Dims first, Dims second = {}) {
    Dims dims = argument.given.dimensions();
    if (argument.given.element_type() == dtype && dims.size() == first.size() + second.size() &&
        same(dims.begin(), first) && same(dims.begin() + first.size(), second)) {
      return true;
    }
    return fails(wrong_type(op_, argument, dtype, first, second));
  }

  bool whole_bytes(ffi::AnyBuffer given) {
    if (element_type(given.element_type()) != ElementType::kNone) return true;
    return fails(wrong(op_, {"buffer", given}, "have elements of whole bytes"));
  }

  // Rows in bytes.
  Geometry geometry() const { return {batches_, size_, count_, row_bytes_}; }

 private:
  bool integers(Argument argument, Index& integers) {
    IndexType type = index_type(argument.given.element_type());
    if (type == IndexType::kNone) return fails(wrong(op_, argument, "be of an integer dtype"));
    integers = {argument.given.untyped_data(), nullptr, type};
    return true;
  }

  bool fails(ffi::Error&& error) {
    error_ = std::move(error);
    return false;
  }

  std::string_view op_;
  ffi::Error& error_;
  Dims batch_, index_, row_;
  ffi::DataType dtype_{};
  int64_t batches_ = 0, size_ = 0, count_ = 0, row_bytes_ = 0;
};

}  // namespace jax_tensorarray
