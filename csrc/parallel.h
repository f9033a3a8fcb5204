// Work that a handler shares with threads of XLA's intra-op pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

namespace jax_tensorarray {

struct Range {
  int64_t begin, end;

  int64_t size() const { return end - begin; }
  bool holds(int64_t k) const { return begin <= k && k < end; }

  // The part of this range in the k-th batch of `count`, counted from the start of that batch.
  Range in_batch(int64_t k, int64_t count) const {
    return {std::clamp<int64_t>(begin - k * count, 0, count), std::clamp<int64_t>(end - k * count, 0, count)};
  }
};

// Calls `work(k)` for every k in [0, count), on this thread and on those of the pool that are free.
//
// This thread works like the others and then waits for pieces that have been begun, not for threads to start: the pool
// may have none to spare. A thread that starts late, perhaps after this call has returned, finds no piece left and
// touches nothing but the counters, which it keeps alive.
template <class Pool, class Work>
void in_parallel(Pool& pool, int64_t count, const Work& work) {
  struct Counters {
    std::atomic<int64_t> begun{0};
    std::mutex mutex;
    std::condition_variable all_done;
    int64_t done = 0;
  };
  auto counters = std::make_shared<Counters>();
  auto help = [counters, count, &work] {
    for (int64_t k; (k = counters->begun.fetch_add(1)) < count;) {
      work(k);
      std::lock_guard<std::mutex> lock(counters->mutex);
      if (++counters->done == count) counters->all_done.notify_one();
    }
  };
  for (int64_t thread = 1; thread < count; ++thread) pool.Schedule(decltype(help)(help));
  help();
  std::unique_lock<std::mutex> lock(counters->mutex);
  counters->all_done.wait(lock, [&] { return counters->done == count; });
}

// On a busy machine, waking a thread costs as much as moving 0.5 MB and gains nothing. Beside a share this large that
// cost is small, and two free cores are nearly twice as fast as one.
constexpr int64_t kBytesForAThread = 2 << 20;

// The length from which threads divide a row.
constexpr int64_t kLongRow = 64 << 10;

// Divides a call that moves `moved` bytes among as many threads as are worth it, at most `most`. Calls `work(rows,
// bytes)` for each share: some of the rows, and some of the bytes of each.
template <class Pool, class Work>
void in_shares(Pool& pool, int64_t moved, int64_t most, int64_t rows, int64_t row, const Work& work) {
  int64_t shares = 1;
  if (moved >= 2 * kBytesForAThread) shares = std::min({moved / kBytesForAThread, most, pool.num_threads()});
  if (row < kLongRow) shares = std::min(shares, rows);  // each has a row, so only one begins with the first
  if (shares <= 1) return work(Range{0, rows}, Range{0, row});
  in_parallel(pool, shares, [&](int64_t k) {
    if (row < kLongRow) return work(Range{rows * k / shares, rows * (k + 1) / shares}, Range{0, row});
    auto cut = [&](int64_t n) { return n == shares ? row : row * n / shares / 64 * 64; };  // at the end of a cache line
    work(Range{0, rows}, Range{cut(k), cut(k + 1)});
  });
}

}  // namespace jax_tensorarray
