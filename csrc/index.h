// The index rule, once for every backend: which row does a position address?
//
// Compiled as plain C++ by the host compiler and as __host__ __device__ code by nvcc or hipcc.
#pragma once

#include <cstdint>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define TA_HD __host__ __device__
#else
#define TA_HD
#endif

namespace jax_tensorarray {

enum class IndexType : uint8_t { kS8, kS16, kS32, kS64, kU8, kU16, kU32, kU64 };

// `buffer` is [batch, size, row], `index` and `where` are [batch, count], `value` is [batch, count, row].
// All arithmetic is 64-bit: a buffer may hold more than 2^31 elements.
struct Geometry {
  int64_t batch;
  int64_t size;
  int64_t count;
  int64_t row;  // in units of whatever the kernel moves: bytes or elements
};

constexpr int64_t kNoRow = -1;

struct Index {
  const void* data;
  const uint8_t* where;  // null: every position takes part
  IndexType type;

  // A uint64 above the int64 range turns negative here, and is out of range either way.
  TA_HD int64_t value(int64_t position) const {
    switch (type) {
      case IndexType::kS8: return static_cast<const int8_t*>(data)[position];
      case IndexType::kS16: return static_cast<const int16_t*>(data)[position];
      case IndexType::kS32: return static_cast<const int32_t*>(data)[position];
      case IndexType::kS64: return static_cast<const int64_t*>(data)[position];
      case IndexType::kU8: return static_cast<const uint8_t*>(data)[position];
      case IndexType::kU16: return static_cast<const uint16_t*>(data)[position];
      case IndexType::kU32: return static_cast<const uint32_t*>(data)[position];
      case IndexType::kU64: return static_cast<int64_t>(static_cast<const uint64_t*>(data)[position]);
    }
    return kNoRow;
  }

  TA_HD bool skips(int64_t position) const { return where != nullptr && where[position] == 0; }

  // The row that `position` addresses, or kNoRow: masked by `where`, or out of range.
  TA_HD int64_t row(int64_t position, int64_t size) const {
    if (skips(position)) return kNoRow;
    int64_t i = value(position);
    return i >= 0 && i < size ? i : kNoRow;
  }

  // The first position whose index is an error, or kNoRow if there is none.
  TA_HD int64_t first_error(int64_t positions, int64_t size) const {
    for (int64_t p = 0; p < positions; ++p) {
      if (!skips(p) && row(p, size) == kNoRow) return p;
    }
    return kNoRow;
  }
};

}  // namespace jax_tensorarray
