// Addition in the 8- and 16-bit float formats, by way of float: decode exactly, add, round to nearest even.
//
// One codec serves every format, so that host and device agree bit for bit and no vendor type is needed.
#pragma once

#include <cstdint>
#include <cstring>

#include "rows.h"

namespace jax_tensorarray {

// How a format spends the bit patterns that IEEE 754 reserves.
enum class Special {
  kIeee,  // all-ones exponent: infinity and NaN
  kFn,    // finite only: NaN is all ones, overflow gives NaN
  kFnuz,  // finite only, no negative zero: NaN is the pattern of -0
};

TA_HD inline uint32_t float_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

TA_HD inline float bits_float(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}

TA_HD inline float power_of_two(int e) {  // exact for every normal and subnormal float
  return e >= -126 ? bits_float(static_cast<uint32_t>(e + 127) << 23) : bits_float(e >= -149 ? 1u << (e + 149) : 0u);
}

template <class Storage, int kExponent, int kMantissa, int kBias, Special kSpecial>
struct SmallFloat {
  Storage bits;

  static constexpr uint32_t kSign = 1u << (kExponent + kMantissa);
  static constexpr uint32_t kMagnitude = kSign - 1;
  static constexpr uint32_t kMaxExponent = (1u << kExponent) - 1;
  static constexpr uint32_t kMantissaMask = (1u << kMantissa) - 1;
  static constexpr uint32_t kInfinity = kMaxExponent << kMantissa;
  static constexpr uint32_t kNan = kSpecial == Special::kIeee ? kInfinity | (1u << (kMantissa - 1))
                                   : kSpecial == Special::kFn ? kMagnitude
                                                              : kSign;
  static constexpr uint32_t kLargest = kSpecial == Special::kIeee ? kInfinity - 1
                                       : kSpecial == Special::kFn ? kMagnitude - 1
                                                                  : kMagnitude;

  TA_HD static bool is_nan(uint32_t b) {
    if (kSpecial == Special::kIeee) return (b & kMagnitude) > kInfinity;
    if (kSpecial == Special::kFn) return (b & kMagnitude) == kMagnitude;
    return b == kNan;
  }

  // bfloat16 is the upper half of a float.
  static constexpr bool kHalfOfFloat = kExponent == 8 && kMantissa == 7 && kSpecial == Special::kIeee;

  TA_HD float decode() const {
    uint32_t b = bits;
    if (kHalfOfFloat && !is_nan(b)) return bits_float(b << (23 - kMantissa));
    float sign = b & kSign ? -1.0f : 1.0f;
    if (is_nan(b)) return bits_float((b & kSign && kSpecial != Special::kFnuz ? 0x80000000u : 0u) | 0x7fc00000u);
    if (kSpecial == Special::kIeee && (b & kMagnitude) == kInfinity) return sign * bits_float(0x7f800000u);
    int exponent = static_cast<int>((b & kMagnitude) >> kMantissa);
    uint32_t mantissa = b & kMantissaMask;
    if (exponent == 0) exponent = 1;  // subnormal: same scale as exponent 1, no hidden bit
    else mantissa |= 1u << kMantissa;
    int shift = exponent - kBias - kMantissa;
    return sign * static_cast<float>(mantissa) * power_of_two(shift);
  }

  TA_HD static SmallFloat encode(float x) {
    uint32_t u = float_bits(x), sign = u >> 31 ? kSign : 0u, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return make(kSpecial == Special::kFnuz ? kNan : kNan | sign);
    uint32_t overflow = kSpecial == Special::kIeee ? kInfinity : kNan;
    if (magnitude == 0x7f800000u) return make(kSpecial == Special::kFnuz ? kNan : overflow | sign);
    if (magnitude == 0) return make(kSpecial == Special::kFnuz ? 0u : sign);
    if (kHalfOfFloat) return make((u + 0x7fffu + (u >> 16 & 1u)) >> 16);

    // x = significand * 2^(exponent - 23), 24-bit significand with its leading bit set.
    int exponent = static_cast<int>(magnitude >> 23) - 127;
    uint32_t significand = magnitude & 0x7fffffu;
    if (exponent == -127) {  // a float subnormal
      exponent = -126;
      while (!(significand & 0x800000u)) significand <<= 1, --exponent;
    } else {
      significand |= 0x800000u;
    }
    // Keep kMantissa bits below the leading one; fewer where the result is subnormal.
    int drop = 23 - kMantissa, biased = exponent + kBias;
    if (biased < 1) drop += 1 - biased, biased = 1;
    if (drop > 25) drop = 25;  // everything rounds to zero
    uint32_t kept = significand >> drop, rest = significand & ((1u << drop) - 1);
    uint32_t half = drop > 0 ? 1u << (drop - 1) : 0u;
    if (drop > 0 && (rest > half || (rest == half && (kept & 1u)))) ++kept;
    // `kept` carries its hidden bit, if any, into the exponent field; a carry from rounding lands there too.
    uint32_t result = kept + (static_cast<uint32_t>(biased - 1) << kMantissa);
    if (result > kLargest) return make(kSpecial == Special::kFnuz ? kNan : overflow | sign);
    if (kSpecial == Special::kFnuz && result == 0) return make(0u);
    return make(result | sign);
  }

  TA_HD static SmallFloat make(uint32_t b) { return SmallFloat{static_cast<Storage>(b)}; }
};

// float8_e8m0fnu holds 2^(bits - 127), and 0xff is NaN: its own arithmetic, since there is neither sign nor mantissa.
struct Float8E8M0FNU {
  uint8_t bits;
  TA_HD float decode() const {
    return bits == 0xff ? bits_float(0x7fc00000u) : power_of_two(static_cast<int>(bits) - 127);
  }
  TA_HD static Float8E8M0FNU encode(float x) {
    uint32_t u = float_bits(x);
    if (u >> 31 || u == 0 || u >= 0x7f800000u) return {0xff};
    uint32_t exponent = u >> 23, mantissa = u & 0x7fffffu;
    if (exponent == 0) return {static_cast<uint8_t>(mantissa > 0x600000u)};  // around 2^-127
    uint32_t up = mantissa >= 0x400000u;                                     // ties go up, as in ml_dtypes and XLA
    return {static_cast<uint8_t>(exponent + up)};
  }
};

using Float16 = SmallFloat<uint16_t, 5, 10, 15, Special::kIeee>;
using BFloat16 = SmallFloat<uint16_t, 8, 7, 127, Special::kIeee>;
using Float8E3M4 = SmallFloat<uint8_t, 3, 4, 3, Special::kIeee>;
using Float8E4M3 = SmallFloat<uint8_t, 4, 3, 7, Special::kIeee>;
using Float8E4M3FN = SmallFloat<uint8_t, 4, 3, 7, Special::kFn>;
using Float8E4M3FNUZ = SmallFloat<uint8_t, 4, 3, 8, Special::kFnuz>;
using Float8E4M3B11FNUZ = SmallFloat<uint8_t, 4, 3, 11, Special::kFnuz>;
using Float8E5M2 = SmallFloat<uint8_t, 5, 2, 15, Special::kIeee>;
using Float8E5M2FNUZ = SmallFloat<uint8_t, 5, 2, 16, Special::kFnuz>;

}  // namespace jax_tensorarray
