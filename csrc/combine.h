// The ops that combine rows with those that are there: `for k: buffer[index[k]] = combine(buffer[index[k]], value[k])`.
//
// An op is a struct that has a name and a rule for each kind of dtype. To add one, write a struct and add it to the
// list `Combining` at the end, which makes the handlers of every platform and the kernels for GPUs.
#pragma once

#include <cstring>
#include <string_view>
#include <type_traits>

#include "rows.h"
#include "small_float.h"

namespace jax_tensorarray {

enum class ElementType : uint8_t {
  kBool,
  kS8,
  kS16,
  kS32,
  kS64,
  kU8,
  kU16,
  kU32,
  kU64,
  kF16,
  kBF16,
  kF32,
  kF64,
  kF8E3M4,
  kF8E4M3,
  kF8E4M3FN,
  kF8E4M3FNUZ,
  kF8E4M3B11FNUZ,
  kF8E5M2,
  kF8E5M2FNUZ,
  kF8E8M0FNU,
  kC64,
  kC128,
  kNone,  // any other
};

// Whether an op is defined for a dtype.
template <class Op>
constexpr bool has_rule(ElementType type) {
  bool is_complex = type == ElementType::kC64 || type == ElementType::kC128;
  return type != ElementType::kNone && (Op::kCombinesParts || !is_complex);
}

// Calls `run(Rule{})` with the rule of an op for a dtype that has one.
template <class Op, class Run>
auto with_rule(ElementType type, Run run) -> decltype(run(typename Op::Bool{})) {
  switch (type) {
    case ElementType::kBool: return run(typename Op::Bool{});
    case ElementType::kS8: return run(typename Op::template Integer<int8_t>{});
    case ElementType::kS16: return run(typename Op::template Integer<int16_t>{});
    case ElementType::kS32: return run(typename Op::template Integer<int32_t>{});
    case ElementType::kS64: return run(typename Op::template Integer<int64_t>{});
    case ElementType::kU8: return run(typename Op::template Integer<uint8_t>{});
    case ElementType::kU16: return run(typename Op::template Integer<uint16_t>{});
    case ElementType::kU32: return run(typename Op::template Integer<uint32_t>{});
    case ElementType::kU64: return run(typename Op::template Integer<uint64_t>{});
    case ElementType::kF16: return run(typename Op::template Small<Float16>{});
    case ElementType::kBF16: return run(typename Op::template Small<BFloat16>{});
    case ElementType::kF32:
    case ElementType::kC64: return run(typename Op::template Float<float>{});
    case ElementType::kF64:
    case ElementType::kC128: return run(typename Op::template Float<double>{});
    case ElementType::kF8E3M4: return run(typename Op::template Small<Float8E3M4>{});
    case ElementType::kF8E4M3: return run(typename Op::template Small<Float8E4M3>{});
    case ElementType::kF8E4M3FN: return run(typename Op::template Small<Float8E4M3FN>{});
    case ElementType::kF8E4M3FNUZ: return run(typename Op::template Small<Float8E4M3FNUZ>{});
    case ElementType::kF8E4M3B11FNUZ: return run(typename Op::template Small<Float8E4M3B11FNUZ>{});
    case ElementType::kF8E5M2: return run(typename Op::template Small<Float8E5M2>{});
    case ElementType::kF8E5M2FNUZ: return run(typename Op::template Small<Float8E5M2FNUZ>{});
    case ElementType::kF8E8M0FNU: return run(typename Op::template Small<Float8E8M0FNU>{});
    case ElementType::kNone: break;
  }
  return {};
}

// --- rules: what two elements give -----------------------------------------------------------------------------

struct Or {
  using Element = uint8_t;
  TA_HD static uint8_t combine(uint8_t a, uint8_t b) { return a | b; }
};

template <class T>
struct Sum {
  using Element = T;
  TA_HD static T combine(T a, T b) { return static_cast<T>(a + b); }
};

template <class Format>
struct RoundedSum {
  using Element = Format;
  TA_HD static Format combine(Format a, Format b) { return Format::encode(a.decode() + b.decode()); }
};

template <class T>
struct Larger {
  using Element = T;
  TA_HD static T combine(T a, T b) { return a < b ? b : a; }
};

// Maps floats to integers of the same order: from -infinity, which is 0, past -0 and 0 to infinity, and NaN after all
// of them. XLA's threads compare subnormal floats as zeros, but not these integers.
template <class Bits>
TA_HD Bits total_order_key(Bits bits, Bits infinity) {
  Bits sign = bits >> (8 * sizeof(Bits) - 1);
  Bits ordered = bits ^ (-sign >> 1);  // a negative number is smaller the larger its magnitude
  return ordered + infinity + 1;       // a negative NaN wraps around to the end
}

TA_HD inline uint32_t total_order_key(float x) { return total_order_key<uint32_t>(float_bits(x), 0x7f800000); }

TA_HD inline uint64_t total_order_key(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  return total_order_key<uint64_t>(bits, 0x7ff0000000000000);
}

template <class Format>
TA_HD auto total_order_key(Format x) -> decltype(total_order_key(x.decode())) {
  return total_order_key(x.decode());
}

template <class T>
struct LargerFloat {
  using Element = T;
  TA_HD static T combine(T a, T b) { return total_order_key(a) < total_order_key(b) ? b : a; }
};

// --- ops -------------------------------------------------------------------------------------------------------

struct Add {
  static constexpr std::string_view kName = "add";
  static constexpr bool kCombinesParts = true;  // a complex number is two floats
  using Bool = Or;
  template <class T>
  using Integer = Sum<std::make_unsigned_t<T>>;  // wraps around, as in XLA
  template <class T>
  using Float = Sum<T>;
  template <class Format>
  using Small = RoundedSum<Format>;
};

struct Max {
  static constexpr std::string_view kName = "max";
  static constexpr bool kCombinesParts = false;  // complex numbers have no order
  using Bool = Or;
  template <class T>
  using Integer = Larger<T>;
  template <class T>
  using Float = LargerFloat<T>;
  template <class Format>
  using Small = LargerFloat<Format>;
};

template <class... Ops>
struct List {};

using Combining = List<Add, Max>;

}  // namespace jax_tensorarray
