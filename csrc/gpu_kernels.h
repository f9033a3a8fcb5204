// The row ops on a GPU: what each thread does, and how many threads there are.
//
// A thread handles one position of the index and a few columns of its row. Duplicate indices must mean the same as on a
// CPU, which visits the positions in order. So a thread looks at its run, the positions that address the same row: the
// last write of a run stays, a swap takes out what the one before it put in, and the first position combines all values
// in order. No two threads ever write to the same place, so no atomic operation is needed, and the result is always the
// same.
//
// A thread finds its run by scanning the index or, if there are many positions, in a list of the positions sorted by
// row (see _ops/sorting.py).
//
// All of this is ordinary C++ to a host compiler: tests/gpu/cuda_host.cc runs it, block by block and thread by thread.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <string_view>
#include <type_traits>
#include <variant>

#include "combine.h"
#include "errors.h"
#include "rows.h"

namespace jax_tensorarray {

// --- launches --------------------------------------------------------------------------------------------------

// The most columns that a thread moves. It starts all its loads before its first store.
constexpr int kColumns = 4;

// A few columns of a row: `begin` and every `step`-th one after it, before `end`.
struct Columns {
  int64_t begin, step, end;

  // True in only one of the threads of a row.
  TA_HD bool has_first() const { return begin == 0; }

  TA_HD Columns before(int64_t limit) const { return {begin, step, end < limit ? end : limit}; }
};

// Threads for `rows` rows of `columns` columns: x counts columns, and y rows. Two dimensions save each thread a
// division.
struct Grid {
  int64_t rows, columns;
  uint32_t blocks_x, blocks_y, threads_x, threads_y;
  int64_t columns_per_thread;
};

inline Grid grid_for(int64_t rows, int64_t columns) {
  constexpr int64_t kThreads = 256, kMaxBlocksY = 65535;
  constexpr int64_t kEnoughThreads =
      1 << 18;  // keeps a large GPU busy: an H100 has 132 multiprocessors of 2048 threads
  auto ceil = [](int64_t n, int64_t d) { return (n + d - 1) / d; };
  int64_t x = 1;
  while (x < columns && x < kThreads) x *= 2;
  int64_t y = kThreads / x;
  int64_t each = rows * columns >= kColumns * kEnoughThreads ? kColumns : 1;
  int64_t blocks_x = ceil(columns, x * each), blocks_y = ceil(rows, y);
  if (blocks_x == 0) blocks_x = 1;  // the indices of rows without elements are checked, too
  if (blocks_y > kMaxBlocksY) blocks_y = kMaxBlocksY;
  return Grid{rows,
              columns,
              static_cast<uint32_t>(blocks_x),
              static_cast<uint32_t>(blocks_y),
              static_cast<uint32_t>(x),
              static_cast<uint32_t>(y),
              each};
}

// All that one thread does: `body(row, columns)` for its rows.
template <class Body>
TA_HD void run_thread(const Body& body, const Grid& grid, uint32_t block_x, uint32_t block_y, uint32_t thread_x,
                      uint32_t thread_y) {
  int64_t width = grid.threads_x * grid.columns_per_thread;
  int64_t begin = block_x * width + thread_x, end = (block_x + int64_t{1}) * width;
  if (end > grid.columns) end = grid.columns;
  if (begin >= end && begin != 0) return;
  int64_t stride = int64_t{grid.blocks_y} * grid.threads_y;
  for (int64_t row = int64_t{block_y} * grid.threads_y + thread_y; row < grid.rows; row += stride) {
    body(row, Columns{begin, grid.threads_x, end});
  }
}

// --- what a thread moves ---------------------------------------------------------------------------------------

struct alignas(16) Unit16 {
  uint64_t low, high;
};

template <class Unit>
TA_HD void load(Unit (&units)[kColumns], const Unit* row, const Columns& at) {
  TA_UNROLL
  for (int j = 0; j < kColumns; ++j) {
    int64_t c = at.begin + j * at.step;
    if (c < at.end) units[j] = row[c];
  }
}

template <class Unit>
TA_HD void store(Unit* row, const Unit (&units)[kColumns], const Columns& at) {
  TA_UNROLL
  for (int j = 0; j < kColumns; ++j) {
    int64_t c = at.begin + j * at.step;
    if (c < at.end) row[c] = units[j];
  }
}

template <class Unit>
TA_HD void copy(Unit* to, const Unit* from, const Columns& at) {
  Unit units[kColumns] = {};
  load(units, from, at);
  store(to, units, at);
}

// The elements that a thread combines at once: 16 bytes, but at most four elements, which fit into the registers.
template <class Rule>
struct Wide {
  using Element = typename Rule::Element;
  static constexpr int kElements = sizeof(Element) < 4 ? 4 : 16 / static_cast<int>(sizeof(Element));

  struct alignas(sizeof(Element) * kElements) Unit {
    Element element[kElements];
  };

  TA_HD static Unit combine(Unit a, const Unit& b) {
    TA_UNROLL
    for (int e = 0; e < kElements; ++e) a.element[e] = Rule::combine(a.element[e], b.element[e]);
    return a;
  }
};

template <class Rule>
struct Single {
  using Unit = typename Rule::Element;
  TA_HD static Unit combine(Unit a, Unit b) { return Rule::combine(a, b); }
};

// --- the positions of an index, and those that address one row -------------------------------------------------

struct Walk {
  Geometry g;
  Index index;
  const int32_t* order;  // null, or the positions of each batch, sorted by row and then by when they are visited
  bool reverse;          // visit the positions last to first; `order` accounts for this already
  Report report;

  // The n-th position of a batch. `order` is an operand like any other, so a number in it that is not a position must
  // not lead to an access out of bounds.
  TA_HD int64_t position(int64_t batch, int64_t n) const {
    int64_t first = batch * g.count;
    if (order == nullptr) return first + nth(n, g.count, reverse);
    auto sorted = static_cast<uint32_t>(order[first + n]);
    return first + (sorted < g.count ? sorted : 0);
  }

  TA_HD int64_t row(int64_t batch, int64_t n) const { return index.row(position(batch, n), g.size); }

  TA_HD bool is(int64_t row, int64_t batch, int64_t n) const {
    return n >= 0 && n < g.count && this->row(batch, n) == row;
  }

  // The position before the n-th in its run, or a negative number.
  TA_HD int64_t previous(int64_t row, int64_t batch, int64_t n) const {
    if (order != nullptr) return is(row, batch, n - 1) ? n - 1 : -1;
    do --n;
    while (n >= 0 && !is(row, batch, n));
    return n;
  }

  // The position after the n-th in its run, or `count`.
  TA_HD int64_t next(int64_t row, int64_t batch, int64_t n) const {
    if (order != nullptr) return is(row, batch, n + 1) ? n + 1 : g.count;
    do ++n;
    while (n < g.count && !is(row, batch, n));
    return n;
  }

  // The last position in the run of the n-th.
  TA_HD int64_t last(int64_t row, int64_t batch, int64_t n) const {
    if (order == nullptr) {
      int64_t m = g.count - 1;
      while (m > n && !is(row, batch, m)) --m;
      return m;
    }
    int64_t step = 1;  // doubled, since most runs are short
    for (; is(row, batch, n + step); step *= 2) n += step;
    int64_t end = n + step;
    while (end - n > 1) {
      int64_t middle = n + (end - n) / 2;
      if (is(row, batch, middle)) n = middle;
      else end = middle;
    }
    return n;
  }

  // Reports a position that addresses no row, if that is an error.
  TA_HD void drop(int64_t position, const Columns& at) const {
    if (at.has_first() && index.strays(position, g.size)) report(index, g.positions(), BufferSize{g.size});
  }
};

// --- the ops ---------------------------------------------------------------------------------------------------

// value[k] = buffer[index[k]], zeros where there is no such row
template <class Unit>
struct ReadThread {
  Walk walk;
  const Unit* buffer;
  Unit* value;

  TA_HD void operator()(int64_t position, const Columns& at) const {
    const Geometry& g = walk.g;
    int64_t row = walk.index.row(position, g.size);
    Unit units[kColumns] = {};
    if (row == kNoRow) walk.drop(position, at);
    else load(units, buffer + (g.batch_of(position) * g.size + row) * g.row, at);
    store(value + position * g.row, units, at);
  }
};

// for k: buffer[index[k]] = value[k]
template <class Unit>
struct WriteThread {
  Walk walk;
  Unit* buffer;
  const Unit* value;

  TA_HD void operator()(int64_t k, const Columns& at) const {
    const Geometry& g = walk.g;
    int64_t batch = g.batch_of(k), n = k - batch * g.count;
    int64_t position = walk.position(batch, n), row = walk.index.row(position, g.size);
    if (row == kNoRow) return walk.drop(position, at);
    if (walk.next(row, batch, n) < g.count) return;
    copy(buffer + (batch * g.size + row) * g.row, value + position * g.row, at);
  }
};

// for k: buffer[index[k]], old[k] = value[k], buffer[index[k]]
template <class Unit>
struct SwapThread {
  Walk walk;
  Unit* buffer;
  const Unit* value;
  Unit* old;

  TA_HD void operator()(int64_t k, const Columns& at) const {
    const Geometry& g = walk.g;
    int64_t batch = g.batch_of(k), n = k - batch * g.count;
    int64_t position = walk.position(batch, n), row = walk.index.row(position, g.size);
    Unit taken[kColumns] = {}, put[kColumns] = {};
    if (row == kNoRow) {
      walk.drop(position, at);
    } else if (int64_t previous = walk.previous(row, batch, n); previous >= 0) {
      load(taken, value + walk.position(batch, previous) * g.row, at);
    } else {
      // The first of a run takes the row out, so it also has to put the last value in.
      Unit* there = buffer + (batch * g.size + row) * g.row;
      load(taken, there, at);
      load(put, value + walk.position(batch, walk.last(row, batch, n)) * g.row, at);
      store(there, put, at);
    }
    store(old + position * g.row, taken, at);
  }
};

// for k: buffer[index[k]] = combine(buffer[index[k]], value[k])
template <class Rules>
struct CombineThread {
  using Unit = typename Rules::Unit;
  Walk walk;
  Unit* buffer;
  const Unit* value;

  TA_HD void operator()(int64_t k, const Columns& at) const {
    const Geometry& g = walk.g;
    int64_t batch = g.batch_of(k), n = k - batch * g.count;
    int64_t position = walk.position(batch, n), row = walk.index.row(position, g.size);
    if (row == kNoRow) return walk.drop(position, at);
    if (walk.previous(row, batch, n) >= 0) return;
    Unit* there = buffer + (batch * g.size + row) * g.row;
    for (int64_t c = at.begin; c < at.end; c += at.step) {
      there[c] = walk.order == nullptr ? scanned(there[c], row, batch, n, c) : sorted(there[c], row, batch, n, c);
    }
  }

  TA_HD Unit scanned(Unit result, int64_t row, int64_t batch, int64_t n, int64_t c) const {
    for (; n < walk.g.count; n = walk.next(row, batch, n)) result = Rules::combine(result, value_at(batch, n, c));
    return result;
  }

  // Values are fetched a few at a time: they are scattered, and a long run would spend its time waiting for one after
  // another.
  TA_HD Unit sorted(Unit result, int64_t row, int64_t batch, int64_t n, int64_t c) const {
    constexpr int kAhead = 4;
    for (bool more = true; more; n += kAhead) {
      Unit ahead[kAhead] = {};
      bool is_one[kAhead];
      TA_UNROLL
      for (int j = 0; j < kAhead; ++j) {
        is_one[j] = walk.is(row, batch, n + j);
        if (is_one[j]) ahead[j] = value_at(batch, n + j, c);
      }
      TA_UNROLL
      for (int j = 0; j < kAhead; ++j) {
        if (is_one[j]) result = Rules::combine(result, ahead[j]);
      }
      more = is_one[kAhead - 1];
    }
    return result;
  }

  TA_HD Unit value_at(int64_t batch, int64_t n, int64_t c) const {
    return value[walk.position(batch, n) * walk.g.row + c];
  }
};

// buffer[row] = 0 for every row in [start, stop) of the batch. Only the GPU knows the range, so each of the `lanes`
// threads of a batch takes every `lanes`-th row of it, and the time is proportional to the number of rows cleared.
template <class Unit>
struct ClearThread {
  Geometry g;
  Index start, stop;
  Unit* buffer;
  int64_t lanes;

  TA_HD void operator()(int64_t k, const Columns& at) const {
    int64_t batch = k < lanes ? 0 : k / lanes;
    int64_t last = bound(stop, batch, g.size);
    const Unit zeros[kColumns] = {};
    for (int64_t row = bound(start, batch, g.size) + k - batch * lanes; row < last; row += lanes) {
      store(buffer + (batch * g.size + row) * g.row, zeros, at);
    }
  }
};

// value[:parts] = buffer[index][:parts]. Only the GPU knows how many parts, so the threads of the others have nothing
// to do.
template <class Unit>
struct ReadPartThread {
  Parts parts;
  const Unit* buffer;
  Unit* value;

  TA_HD void operator()(int64_t batch, const Columns& at) const {
    const Geometry& g = parts.g;
    int64_t row = parts.row(batch);
    if (row == kNoRow) return;
    copy(value + batch * g.row, buffer + (batch * g.size + row) * g.row, at.before(parts.end(batch)));
  }
};

template <class Unit>
struct WritePartThread {
  Parts parts;
  Unit* buffer;
  const Unit* value;

  TA_HD void operator()(int64_t batch, const Columns& at) const {
    const Geometry& g = parts.g;
    int64_t row = parts.row(batch);
    if (row == kNoRow) return;
    copy(buffer + (batch * g.size + row) * g.row, value + batch * g.row, at.before(parts.end(batch)));
  }
};

// The index at each position, or -1 if no live row has it.
struct CheckThread {
  Index index;
  LiveSize live;
  int32_t* checked;
  int64_t positions;
  Report report;

  TA_HD void operator()(int64_t position, const Columns&) const {
    int64_t size = live(position);
    checked[position] = static_cast<int32_t>(index.row(position, size));
    if (index.strays(position, size)) report(index, positions, live);
  }
};

// --- jobs ------------------------------------------------------------------------------------------------------
//
// What a call does: a body whose rows are in bytes, and which has not been given a unit yet.

struct NoJob {};
using ReadJob = ReadThread<void>;
using WriteJob = WriteThread<void>;
using SwapJob = SwapThread<void>;
using ReadPartJob = ReadPartThread<void>;
using WritePartJob = WritePartThread<void>;
using CheckJob = CheckThread;

struct CombineJob {
  std::string_view op;
  ElementType type;
  Walk walk;
  void* buffer;
  const void* value;
};

struct ClearJob {
  Geometry geometry;
  Index start, stop;
  void* buffer;
};

using Job = std::variant<NoJob, ReadJob, WriteJob, SwapJob, CombineJob, ClearJob, ReadPartJob, WritePartJob, CheckJob>;

// --- from bytes to units ---------------------------------------------------------------------------------------
//
// `launch(on, job)` does a job by `on(body, rows, columns)`, which runs a body on a grid.

inline bool is_aligned(size_t unit, int64_t row, std::initializer_list<const void*> pointers) {
  auto bits = static_cast<uintptr_t>(row);
  for (const void* p : pointers) bits |= reinterpret_cast<uintptr_t>(p);
  return bits % unit == 0;
}

// Calls `run` with a null pointer to the widest unit that divides the row and to which all pointers are aligned.
template <class Run>
auto with_unit(int64_t row, std::initializer_list<const void*> pointers, Run run) {
  if (is_aligned(16, row, pointers)) return run(static_cast<Unit16*>(nullptr));
  if (is_aligned(8, row, pointers)) return run(static_cast<uint64_t*>(nullptr));
  if (is_aligned(4, row, pointers)) return run(static_cast<uint32_t*>(nullptr));
  if (is_aligned(2, row, pointers)) return run(static_cast<uint16_t*>(nullptr));
  return run(static_cast<uint8_t*>(nullptr));
}

inline Geometry in_units(Geometry g, size_t unit) {
  g.row /= static_cast<int64_t>(unit);
  return g;
}

inline Parts in_units(Parts parts, size_t unit) {
  parts.g = in_units(parts.g, unit);
  parts.part /= static_cast<int64_t>(unit);
  return parts;
}

inline Walk in_units(Walk walk, size_t unit) {
  walk.g = in_units(walk.g, unit);
  return walk;
}

// The size that a unit has to divide, and the number of rows that threads have work for.
inline int64_t divisible(const Walk& walk) { return walk.g.row; }
inline int64_t divisible(const Parts& parts) { return parts.part; }
inline int64_t rows_of(const Walk& walk) { return walk.g.positions(); }
inline int64_t rows_of(const Parts& parts) { return parts.g.batch; }

template <class Unit>
Unit* as(void* array) {
  return static_cast<Unit*>(array);
}

template <class Unit>
const Unit* as(const void* array) {
  return static_cast<const Unit*>(array);
}

template <template <class> class Thread, class On, class Place, class... Arrays>
auto launch_in_units(On on, const Place& place, Arrays*... arrays) {
  return with_unit(divisible(place), {arrays...}, [&](auto* unit) {
    using Unit = std::remove_pointer_t<decltype(unit)>;
    Place in = in_units(place, sizeof(Unit));
    return on(Thread<Unit>{in, as<Unit>(arrays)...}, rows_of(in), in.g.row);
  });
}

// Reads and writes, of rows and of parts.
template <class On, template <class> class Thread>
auto launch(On on, const Thread<void>& job) {
  const auto& [place, buffer, value] = job;
  return launch_in_units<Thread>(on, place, buffer, value);
}

template <class On>
auto launch(On on, const SwapJob& job) {
  return launch_in_units<SwapThread>(on, job.walk, job.buffer, job.value, job.old);
}

template <class Rules, class On>
auto launch_combine_by(On on, const CombineJob& job) {
  using Unit = typename Rules::Unit;
  Walk walk = in_units(job.walk, sizeof(Unit));
  CombineThread<Rules> body{walk, as<Unit>(job.buffer), as<Unit>(job.value)};
  return on(body, walk.g.positions(), walk.g.row);
}

template <class Op, class On>
auto launch_combine(On on, const CombineJob& job) {
  return with_rule<Op>(job.type, [&](auto rule) {
    using Rule = decltype(rule);
    return is_aligned(sizeof(typename Wide<Rule>::Unit), job.walk.g.row, {job.buffer, job.value})
               ? launch_combine_by<Wide<Rule>>(on, job)
               : launch_combine_by<Single<Rule>>(on, job);
  });
}

template <class On, class... Ops>
auto launch_one_of(List<Ops...>, On on, const CombineJob& job) {
  decltype(launch(on, ReadJob{})) result{};
  ((job.op == Ops::kName && (result = launch_combine<Ops>(on, job), true)) || ...);
  return result;
}

template <class On>
auto launch(On on, const CombineJob& job) {
  return launch_one_of(Combining{}, on, job);
}

template <class On>
auto launch(On on, const ClearJob& job) {
  return with_unit(job.geometry.row, {job.buffer}, [&](auto* unit) {
    using Unit = std::remove_pointer_t<decltype(unit)>;
    constexpr int64_t kLanes = 4096;
    Geometry g = in_units(job.geometry, sizeof(Unit));
    int64_t lanes = g.size < kLanes ? g.size : kLanes;
    return on(ClearThread<Unit>{g, job.start, job.stop, as<Unit>(job.buffer), lanes}, g.batch * lanes, g.row);
  });
}

template <class On>
auto launch(On on, const CheckJob& job) {
  return on(job, job.positions, 1);
}

}  // namespace jax_tensorarray
