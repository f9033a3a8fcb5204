// Runs csrc/parallel.h under a sanitizer, on pools of threads that come at once, late, or never.
#include "../../csrc/parallel.h"

#include <chrono>
#include <cstdlib>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

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

}  // namespace

int main() {
  for (int threads : {0, 1, 4}) {
    for (int delay_us : {0, 100}) {
      Pool pool(threads, delay_us);
      for (int run = 0; run < 300; ++run) check(pool, 1 + run % 9);
    }
  }
  Pool pool(4, 0);  // handlers that run at the same time, some of them on threads of the pool
  jax_tensorarray::in_parallel(pool, 20, [&](int64_t) {
    for (int run = 0; run < 100; ++run) check(pool, 5);
  });
}
