// The rules of a row, once for every platform: which row does a position address, and which rows are in a range?
//
// Compiled as plain C++ by the host compiler and as __host__ __device__ code by nvcc or hipcc.
#pragma once

#include <cstdint>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define TA_HD __host__ __device__
#else
#define TA_HD
#endif

// Defined in the pass that compiles for the GPU: a CUDA source is compiled once for the host and once for the GPU.
#if defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__)
#define TA_ON_GPU
#endif

// Arrays that are indexed in a loop stay in registers only if the loop is unrolled.
#if defined(__CUDACC__) || defined(__HIPCC__)
#define TA_UNROLL _Pragma("unroll")
#else
#define TA_UNROLL
#endif

namespace jax_tensorarray {

enum class IndexType : uint8_t { kS8, kS16, kS32, kS64, kU8, kU16, kU32, kU64, kNone };

// `buffer` is [batch, size, row], `index` and `where` are [batch, count], `value` is [batch, count, row].
// All arithmetic is 64-bit: a buffer may hold more than 2^31 elements.
struct Geometry {
  int64_t batch;
  int64_t size;
  int64_t count;
  int64_t row;  // in units of whatever the kernel moves: bytes or elements

  TA_HD int64_t positions() const { return batch * count; }

  // The batch of a position. A division is slow on a GPU, so it is left out where it is not needed.
  TA_HD int64_t batch_of(int64_t position) const {
    if (position < count) return 0;
    return count == 1 ? position : position / count;
  }
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
      case IndexType::kNone: break;
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

  // Whether the index at `position` is out of range and not masked.
  TA_HD bool strays(int64_t position, int64_t size) const { return !skips(position) && row(position, size) == kNoRow; }

  bool all_inside(int64_t positions, int64_t size) const {
    for (int64_t p = 0; p < positions; ++p) {
      if (strays(p, size)) return false;
    }
    return true;
  }

  // The first position whose index is an error, or kNoRow if there is none. `size_at(position)` is the number of rows
  // for that position.
  template <class SizeAt>
  TA_HD int64_t first_stray(int64_t positions, SizeAt size_at) const {
    for (int64_t p = 0; p < positions; ++p) {
      if (strays(p, size_at(p))) return p;
    }
    return kNoRow;
  }
};

// The number of rows for a position: that of the buffer.
struct BufferSize {
  int64_t size;
  TA_HD int64_t operator()(int64_t) const { return size; }
};

// The number of rows for a position: size[batch] live ones, for the `count` positions of each batch.
struct LiveSize {
  const int32_t* size;
  int64_t count;
  TA_HD int64_t operator()(int64_t position) const { return size[position < count ? 0 : position / count]; }
};

// The n-th position of a walk over `count` positions, first to last or last to first.
TA_HD inline int64_t nth(int64_t n, int64_t count, bool reverse) { return reverse ? count - 1 - n : n; }

// Clamps a bound of a range to [0, size]; a missing bound is the end of the buffer.
TA_HD inline int64_t bound(const Index& at, int64_t batch, int64_t size) {
  if (at.data == nullptr) return size;
  int64_t row = at.value(batch);
  if (row < 0) return at.type == IndexType::kU64 ? size : 0;
  return row < size ? row : size;
}

// A row for each batch. Only its first parts are moved; the others are unspecified.
struct Parts {
  Geometry g;
  Index index, count;  // the row, and the number of its parts
  int64_t part;        // the size of a part, in the units of `g.row`

  TA_HD int64_t row(int64_t batch) const { return index.row(batch, g.size); }
  TA_HD int64_t end(int64_t batch) const { return part == 0 ? 0 : bound(count, batch, g.row / part) * part; }
};

}  // namespace jax_tensorarray
