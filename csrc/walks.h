// The row ops as a CPU runs them: one position after the other, which is what duplicate indices mean.
//
// Each walks the positions of one batch and moves whole rows.
#pragma once

#include <cstring>

#include "kernels.h"

namespace jax_tensorarray {

inline void copy_bytes(uint8_t* to, const uint8_t* from, int64_t n) {
  if (n > 0) memcpy(to, from, static_cast<size_t>(n));  // an array of no elements may be null
}

inline void zero_bytes(uint8_t* to, int64_t n) {
  if (n > 0) memset(to, 0, static_cast<size_t>(n));
}

// for k: value[k] = buffer[index[k]], zeros where there is no such row
inline void walk_read(const Geometry& g, const Index& index, const uint8_t* buffer, uint8_t* value, int64_t batch) {
  for (int64_t k = 0; k < g.count; ++k) {
    int64_t position = batch * g.count + k, row = index.row(position, g.size);
    uint8_t* to = value + position * g.row;
    if (row == kNoRow) zero_bytes(to, g.row);
    else copy_bytes(to, buffer + (batch * g.size + row) * g.row, g.row);
  }
}

// for k: buffer[index[k]] = value[k]
inline void walk_write(const Geometry& g, const Index& index, uint8_t* buffer, const uint8_t* value, bool reverse,
                       int64_t batch) {
  for (int64_t n = 0; n < g.count; ++n) {
    int64_t position = batch * g.count + nth(n, g.count, reverse), row = index.row(position, g.size);
    if (row == kNoRow) continue;
    copy_bytes(buffer + (batch * g.size + row) * g.row, value + position * g.row, g.row);
  }
}

// for k: buffer[index[k]], old[k] = value[k], buffer[index[k]]
inline void walk_swap(const Geometry& g, const Index& index, uint8_t* buffer, const uint8_t* value, uint8_t* old,
                      bool reverse, int64_t batch) {
  for (int64_t n = 0; n < g.count; ++n) {
    int64_t position = batch * g.count + nth(n, g.count, reverse), row = index.row(position, g.size);
    uint8_t* taken = old + position * g.row;
    if (row == kNoRow) {
      zero_bytes(taken, g.row);
      continue;
    }
    uint8_t* at = buffer + (batch * g.size + row) * g.row;
    copy_bytes(taken, at, g.row);
    copy_bytes(at, value + position * g.row, g.row);
  }
}

// for k: buffer[index[k]] += value[k]
template <class Sum>
void walk_add(const Geometry& g, const Index& index, typename Sum::Element* buffer, const typename Sum::Element* value,
              bool reverse, int64_t batch) {
  for (int64_t n = 0; n < g.count; ++n) {
    int64_t position = batch * g.count + nth(n, g.count, reverse), row = index.row(position, g.size);
    if (row == kNoRow) continue;
    typename Sum::Element* at = buffer + (batch * g.size + row) * g.row;
    const typename Sum::Element* from = value + position * g.row;
    for (int64_t c = 0; c < g.row; ++c) at[c] = Sum::add(at[c], from[c]);
  }
}

// buffer[row] = 0 for every row in [start, stop) of the batch
inline void walk_clear(const Geometry& g, const Index& start, const Index& stop, uint8_t* buffer, int64_t batch) {
  int64_t first = bound(start, batch, g.size), last = bound(stop, batch, g.size);
  if (first < last) zero_bytes(buffer + (batch * g.size + first) * g.row, (last - first) * g.row);
}

// The first parts of value = those of buffer[index]
inline void walk_read_part(const Parts& p, const uint8_t* buffer, uint8_t* value, int64_t batch) {
  int64_t row = p.row(batch);
  if (row == kNoRow) return;
  copy_bytes(value + batch * p.g.row, buffer + (batch * p.g.size + row) * p.g.row, p.end(batch));
}

// The first parts of buffer[index] = those of value
inline void walk_write_part(const Parts& p, uint8_t* buffer, const uint8_t* value, int64_t batch) {
  int64_t row = p.row(batch);
  if (row == kNoRow) return;
  copy_bytes(buffer + (batch * p.g.size + row) * p.g.row, value + batch * p.g.row, p.end(batch));
}

}  // namespace jax_tensorarray
