// Work that a handler shares with threads of XLA's intra-op pool.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

namespace jax_tensorarray {

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

}  // namespace jax_tensorarray
