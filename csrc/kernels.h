// What the row ops do to a row, shared by the CPU (walks.h) and GPUs (threads.h).
#pragma once

#include "index.h"

namespace jax_tensorarray {

// The n-th position of a walk over `count` positions, first to last or last to first.
TA_HD inline int64_t nth(int64_t n, int64_t count, bool reverse) { return reverse ? count - 1 - n : n; }

// The row that a bound of a range stands for, in [0, size]; no bound is the end of the buffer.
TA_HD inline int64_t bound(const Index& at, int64_t batch, int64_t size) {
  if (at.data == nullptr) return size;
  int64_t row = at.value(batch);
  if (row < 0) return at.type == IndexType::kU64 ? size : 0;
  return row < size ? row : size;
}

// A row for each batch, of which only the first parts are moved. The others are nobody's concern.
struct Parts {
  Geometry g;
  Index index, count;  // of the row, and of its parts
  int64_t part;        // the size of a part, in the units of `g.row`

  TA_HD int64_t row(int64_t batch) const { return index.row(batch, g.size); }
  TA_HD int64_t end(int64_t batch) const { return part == 0 ? 0 : bound(count, batch, g.row / part) * part; }
};

}  // namespace jax_tensorarray
