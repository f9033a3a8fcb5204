// The bodies of the row ops, shared by the CPU and CUDA.
//
// A lane owns the columns [begin, end) of all rows of one batch and walks the positions in order. Duplicate
// indices therefore have sequential meaning, deterministically and without atomics, however the columns are
// divided among lanes: on the CPU one lane is a whole row, on a GPU one thread is a lane of one unit.
#pragma once

#include <cstring>

#include "index.h"
#include "small_float.h"

namespace jax_tensorarray {

template <class Unit>
TA_HD void copy_units(Unit* to, const Unit* from, int64_t n) {
#if defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__)
  for (int64_t c = 0; c < n; ++c) to[c] = from[c];
#else
  if (n > 0) memcpy(to, from, static_cast<size_t>(n) * sizeof(Unit));  // an array of no elements may be null
#endif
}

template <class Unit>
TA_HD void zero_units(Unit* to, int64_t n) {
#if defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__)
  for (int64_t c = 0; c < n; ++c) to[c] = Unit{};
#else
  if (n > 0) memset(static_cast<void*>(to), 0, static_cast<size_t>(n) * sizeof(Unit));
#endif
}

// The n-th position of a walk over `count` positions, first to last or last to first.
TA_HD inline int64_t nth(int64_t n, int64_t count, bool reverse) { return reverse ? count - 1 - n : n; }

// value[k] = buffer[index[k]], zeros where there is no such row
template <class Unit>
TA_HD void read_lane(const Geometry& g, const Index& index, const Unit* buffer, Unit* value, int64_t batch,
                     int64_t begin, int64_t end) {
  for (int64_t k = 0; k < g.count; ++k) {
    int64_t position = batch * g.count + k, row = index.row(position, g.size);
    Unit* to = value + position * g.row + begin;
    if (row == kNoRow) zero_units(to, end - begin);
    else copy_units(to, buffer + (batch * g.size + row) * g.row + begin, end - begin);
  }
}

// for k: buffer[index[k]] = value[k]
template <class Unit>
TA_HD void write_lane(const Geometry& g, const Index& index, Unit* buffer, const Unit* value, bool reverse,
                      int64_t batch, int64_t begin, int64_t end) {
  for (int64_t n = 0; n < g.count; ++n) {
    int64_t position = batch * g.count + nth(n, g.count, reverse), row = index.row(position, g.size);
    if (row == kNoRow) continue;
    copy_units(buffer + (batch * g.size + row) * g.row + begin, value + position * g.row + begin, end - begin);
  }
}

// for k: buffer[index[k]], old[k] = value[k], buffer[index[k]]
template <class Unit>
TA_HD void swap_lane(const Geometry& g, const Index& index, Unit* buffer, const Unit* value, Unit* old, bool reverse,
                     int64_t batch, int64_t begin, int64_t end) {
  for (int64_t n = 0; n < g.count; ++n) {
    int64_t position = batch * g.count + nth(n, g.count, reverse), row = index.row(position, g.size);
    Unit* taken = old + position * g.row + begin;
    if (row == kNoRow) {
      zero_units(taken, end - begin);
      continue;
    }
    Unit* at = buffer + (batch * g.size + row) * g.row + begin;
    copy_units(taken, at, end - begin);
    copy_units(at, value + position * g.row + begin, end - begin);
  }
}

// What `+` means for a dtype. Integers wrap, as XLA's do, so signed ones are added as unsigned.
template <class T>
struct Plain {
  using Element = T;
  TA_HD static T add(T a, T b) { return static_cast<T>(a + b); }
};

struct Or {  // bool
  using Element = uint8_t;
  TA_HD static uint8_t add(uint8_t a, uint8_t b) { return a | b; }
};

template <class Float>
struct Rounded {
  using Element = Float;
  TA_HD static Float add(Float a, Float b) { return Float::encode(a.decode() + b.decode()); }
};

// for k: buffer[index[k]] += value[k]
template <class Sum>
TA_HD void add_lane(const Geometry& g, const Index& index, typename Sum::Element* buffer,
                    const typename Sum::Element* value, bool reverse, int64_t batch, int64_t begin, int64_t end) {
  for (int64_t n = 0; n < g.count; ++n) {
    int64_t position = batch * g.count + nth(n, g.count, reverse), row = index.row(position, g.size);
    if (row == kNoRow) continue;
    typename Sum::Element* at = buffer + (batch * g.size + row) * g.row;
    const typename Sum::Element* from = value + position * g.row;
    for (int64_t c = begin; c < end; ++c) at[c] = Sum::add(at[c], from[c]);
  }
}

// The row that a bound of a range stands for, in [0, size]; no bound is the end of the buffer.
TA_HD inline int64_t bound(const Index& at, int64_t batch, int64_t size) {
  if (at.data == nullptr) return size;
  int64_t row = at.value(batch);
  if (row < 0) return at.type == IndexType::kU64 ? size : 0;
  return row < size ? row : size;
}

// buffer[row] = 0 for every row in [start, stop) of the batch
template <class Unit>
TA_HD void clear_lane(const Geometry& g, const Index& start, const Index& stop, Unit* buffer, int64_t batch,
                      int64_t begin, int64_t end) {
  int64_t last = bound(stop, batch, g.size);
  for (int64_t row = bound(start, batch, g.size); row < last; ++row) {
    zero_units(buffer + (batch * g.size + row) * g.row + begin, end - begin);
  }
}

// A row is made of parts, of `part` units each. The end of the first parts[batch] of them, within [begin, end].
TA_HD inline int64_t end_of_parts(const Geometry& g, const Index& parts, int64_t part, int64_t batch, int64_t begin,
                                  int64_t end) {
  int64_t stop = part == 0 ? 0 : bound(parts, batch, g.row / part) * part;
  return stop < begin ? begin : stop < end ? stop : end;
}

// The first parts of value = those of buffer[index]; the others are left as they are
template <class Unit>
TA_HD void read_part_lane(const Geometry& g, const Index& index, const Index& parts, int64_t part, const Unit* buffer,
                          Unit* value, int64_t batch, int64_t begin, int64_t end) {
  int64_t row = index.row(batch, g.size), stop = end_of_parts(g, parts, part, batch, begin, end);
  if (row == kNoRow) return;
  copy_units(value + batch * g.row + begin, buffer + (batch * g.size + row) * g.row + begin, stop - begin);
}

// The first parts of buffer[index] = those of value
template <class Unit>
TA_HD void write_part_lane(const Geometry& g, const Index& index, const Index& parts, int64_t part, Unit* buffer,
                           const Unit* value, int64_t batch, int64_t begin, int64_t end) {
  int64_t row = index.row(batch, g.size), stop = end_of_parts(g, parts, part, batch, begin, end);
  if (row == kNoRow) return;
  copy_units(buffer + (batch * g.size + row) * g.row + begin, value + batch * g.row + begin, stop - begin);
}

// The index at a position, or kNoRow if it is none of the live rows: size[batch] of them, for `count` positions each.
TA_HD inline int32_t live_row(const Index& index, const int32_t* size, int64_t position, int64_t count) {
  return static_cast<int32_t>(index.row(position, size[position / count]));
}

}  // namespace jax_tensorarray
