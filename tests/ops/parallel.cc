// Runs csrc/parallel.h, and a walk that it divides, under a sanitizer, on pools of threads that come at once, late, or
// never.
#include <chrono>
#include <cstdlib>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "../../csrc/cpu_kernels.h"

namespace {

// A pool like that of XLA, whose tasks may be run long after they were given to it.
class Pool {
 public:
  Pool(int threads, int delay_us) {
    for (int k = 0; k < threads; ++k) {
      threads_.emplace_back([this, delay_us] {
        while (auto task = next()) {
          std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
          task();
        }
      });
    }
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  int64_t num_threads() const { return static_cast<int64_t>(threads_.size()); }
  void Schedule(std::function<void()> task) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_one();
  }

 private:
  std::function<void()> next() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return ends_ || !tasks_.empty(); });
    if (tasks_.empty()) return nullptr;
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    return task;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool ends_ = false;
  std::vector<std::thread> threads_;
};

void check(Pool& pool, int64_t count) {
  std::vector<int64_t> done(static_cast<size_t>(count));  // not atomic: each is one thread's, and then this one's
  jax_tensorarray::in_parallel(pool, count, [&](int64_t k) { done[static_cast<size_t>(k)] += k + 1; });
  for (int64_t k = 0; k < count; ++k) {
    if (done[static_cast<size_t>(k)] != k + 1) abort();
  }
}

using jax_tensorarray::Range;

// Swaps a value for each of many positions, half of them out of range, so that there are more threads than rows.
void swap_few_rows(Pool& pool, int64_t rows) {
  constexpr int64_t kCount = 20'000, kRow = 1024;
  std::vector<int32_t> index(kCount);
  for (int64_t k = 0; k < kCount; ++k) index[static_cast<size_t>(k)] = static_cast<int32_t>(k % (2 * rows + 1));
  std::vector<uint8_t> buffer(static_cast<size_t>(rows * kRow), 1), value(kCount * kRow, 1), old(kCount * kRow, 2);
  jax_tensorarray::Geometry g{1, rows, kCount, kRow};
  jax_tensorarray::TypedIndex<int32_t> at{index.data()};
  std::atomic<int64_t> shares{0};
  jax_tensorarray::in_shares(pool, kCount * kRow, kRow / 128, rows, kRow, [&](Range mine, Range bytes) {
    ++shares;
    walk_swap(g, at, buffer.data(), value.data(), old.data(), false, mine, bytes.size());
  });
  if (shares > std::max<int64_t>(rows, 1)) abort();
  for (int64_t k = 0; k < kCount; ++k) {
    bool is_row = index[static_cast<size_t>(k)] < rows;
    if (old[static_cast<size_t>(k * kRow)] != is_row || old[static_cast<size_t>((k + 1) * kRow - 1)] != is_row) abort();
  }
}

}  // namespace

int main() {
  for (int threads : {0, 1, 4}) {
    for (int delay_us : {0, 100}) {
      Pool pool(threads, delay_us);
      for (int run = 0; run < 300; ++run) check(pool, 1 + run % 9);
    }
  }
  for (int64_t rows : {0, 1, 2, 5}) {
    Pool pool(8, 0);
    swap_few_rows(pool, rows);
  }
  Pool pool(4, 0);  // handlers that run at the same time, some of them on threads of the pool
  jax_tensorarray::in_parallel(pool, 20, [&](int64_t) {
    for (int run = 0; run < 100; ++run) check(pool, 5);
  });
}
