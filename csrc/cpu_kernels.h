// The row ops on a CPU: one position after another, which defines what duplicate indices mean.
//
// A walk moves the first `n` units of some rows, and several threads may walk at the same time. A walk that updates a
// buffer visits all positions in order and skips the rows of other threads, so that no two threads write the same row.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "parallel.h"
#include "rows.h"

namespace jax_tensorarray {

// An index without a mask, of a type known at compile time.
template <class T>
struct TypedIndex {
  const T* data;

  int64_t row(int64_t position, int64_t size) const {
    int64_t i = data[position];
    return i >= 0 && i < size ? i : kNoRow;
  }

  // The loop never ends early, so one instruction looks at many positions.
  bool all_inside(int64_t positions, int64_t size) const {
    T last = static_cast<T>(std::min<int64_t>(size - 1, std::numeric_limits<T>::max()));
    bool inside = true;
    for (int64_t p = 0; p < positions; ++p) inside &= data[p] >= 0 && data[p] <= last;
    return inside;
  }
};

// Calls `run` with the index, as a `TypedIndex` if it has a common type: walks over many small rows are twice as fast.
template <class Run>
auto with_index(const Index& index, Run run) {
  if (index.where == nullptr && index.type == IndexType::kS32) {
    return run(TypedIndex<int32_t>{static_cast<const int32_t*>(index.data)});
  }
  if (index.where == nullptr && index.type == IndexType::kS64) {
    return run(TypedIndex<int64_t>{static_cast<const int64_t*>(index.data)});
  }
  return run(index);
}

// Calls `run` with a number of bytes, as a constant for common small rows, which are then copied in a few moves.
template <class Run>
void with_bytes(int64_t n, Run run) {
  switch (n) {
    case 4: return run(std::integral_constant<int64_t, 4>{});
    case 8: return run(std::integral_constant<int64_t, 8>{});
    case 16: return run(std::integral_constant<int64_t, 16>{});
    case 32: return run(std::integral_constant<int64_t, 32>{});
    case 64: return run(std::integral_constant<int64_t, 64>{});
    default: return run(n);
  }
}

inline void copy_bytes(uint8_t* to, const uint8_t* from, int64_t n) {
  if (n > 0) memcpy(to, from, static_cast<size_t>(n));  // an array of no elements may be null
}

template <int64_t n>
void copy_bytes(uint8_t* to, const uint8_t* from, std::integral_constant<int64_t, n>) {
  memcpy(to, from, n);
}

inline void zero_bytes(uint8_t* to, int64_t n) {
  if (n > 0) memset(to, 0, static_cast<size_t>(n));
}

// for k in positions, counted over all batches: value[k] = buffer[index[k]], zeros where there is no such row
template <class Rows, class Bytes>
void walk_read(const Geometry& g, const Rows& index, const uint8_t* buffer, uint8_t* value, Range positions, Bytes n) {
  for (int64_t b = 0; b < g.batch; ++b) {
    Range here = positions.in_batch(b, g.count);
    for (int64_t k = here.begin; k < here.end; ++k) {
      int64_t position = b * g.count + k, row = index.row(position, g.size);
      uint8_t* to = value + position * g.row;
      if (row == kNoRow) zero_bytes(to, n);
      else copy_bytes(to, buffer + (b * g.size + row) * g.row, n);
    }
  }
}

// Calls `visit(position, row)` for each position in order. Both are counted over all batches; row may be kNoRow.
template <class Rows, class Visit>
void walk(const Geometry& g, const Rows& index, bool reverse, Visit visit) {
  for (int64_t b = 0; b < g.batch; ++b) {
    for (int64_t k = 0; k < g.count; ++k) {
      int64_t position = b * g.count + nth(k, g.count, reverse), row = index.row(position, g.size);
      visit(position, row == kNoRow ? kNoRow : b * g.size + row);
    }
  }
}

// for k: buffer[index[k]] = value[k]
template <class Rows, class Bytes>
void walk_write(const Geometry& g, const Rows& index, uint8_t* buffer, const uint8_t* value, bool reverse, Range rows,
                Bytes n) {
  walk(g, index, reverse, [=](int64_t position, int64_t row) {
    if (rows.holds(row)) copy_bytes(buffer + row * g.row, value + position * g.row, n);
  });
}

// for k: buffer[index[k]], old[k] = value[k], buffer[index[k]]
template <class Rows, class Bytes>
void walk_swap(const Geometry& g, const Rows& index, uint8_t* buffer, const uint8_t* value, uint8_t* old, bool reverse,
               Range rows, Bytes n) {
  walk(g, index, reverse, [=](int64_t position, int64_t row) {
    uint8_t* taken = old + position * g.row;
    if (row == kNoRow && rows.begin == 0) zero_bytes(taken, n);  // only one share of these bytes has the first row
    if (!rows.holds(row)) return;
    uint8_t* at = buffer + row * g.row;
    copy_bytes(taken, at, n);
    copy_bytes(at, value + position * g.row, n);
  });
}

// for k: buffer[index[k]] = combine(buffer[index[k]], value[k])
template <class Rule, class Rows>
void walk_combine(const Geometry& g, const Rows& index, typename Rule::Element* buffer,
                  const typename Rule::Element* value, bool reverse, Range rows, int64_t n) {
  walk(g, index, reverse, [=](int64_t position, int64_t row) {
    if (!rows.holds(row)) return;
    typename Rule::Element* at = buffer + row * g.row;
    const typename Rule::Element* from = value + position * g.row;
    for (int64_t c = 0; c < n; ++c) at[c] = Rule::combine(at[c], from[c]);
  });
}

// buffer[row] = 0 for every row in [start, stop) of the batch
inline void walk_clear(const Geometry& g, const Index& start, const Index& stop, uint8_t* buffer, int64_t batch) {
  int64_t first = bound(start, batch, g.size), last = bound(stop, batch, g.size);
  if (first < last) zero_bytes(buffer + (batch * g.size + first) * g.row, (last - first) * g.row);
}

// value[:parts] = buffer[index][:parts]
inline void walk_read_part(const Parts& p, const uint8_t* buffer, uint8_t* value, int64_t batch) {
  int64_t row = p.row(batch);
  if (row == kNoRow) return;
  copy_bytes(value + batch * p.g.row, buffer + (batch * p.g.size + row) * p.g.row, p.end(batch));
}

// buffer[index][:parts] = value[:parts]
inline void walk_write_part(const Parts& p, uint8_t* buffer, const uint8_t* value, int64_t batch) {
  int64_t row = p.row(batch);
  if (row == kNoRow) return;
  copy_bytes(buffer + (batch * p.g.size + row) * p.g.row, value + batch * p.g.row, p.end(batch));
}

}  // namespace jax_tensorarray
