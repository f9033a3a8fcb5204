// Launches by the CPU: every block and every thread, one after the other.
#pragma once

#include "gpu_kernels.h"

namespace jax_tensorarray {

// In which order the threads run. On a GPU it is anybody's guess, so the result must be the same for all of them.
enum class Schedule : int64_t { kForward, kBackward, kShuffled };

// Runs every thread of a launch.
template <class Body>
void run_grid(Body body, const Grid& grid, Schedule schedule = Schedule::kForward) {
  uint64_t blocks = uint64_t{grid.blocks_x} * grid.blocks_y, threads = uint64_t{grid.threads_x} * grid.threads_y;
  uint64_t total = blocks * threads;
  for (uint64_t n = 0; n < total; ++n) {
    uint64_t at = n;
    if (schedule == Schedule::kBackward) at = total - 1 - n;
    if (schedule == Schedule::kShuffled) at = n * 7919 % total;  // a prime: every thread has its turn
    uint64_t block = at / threads, thread = at % threads;
    run_thread(body, grid, static_cast<uint32_t>(block % grid.blocks_x), static_cast<uint32_t>(block / grid.blocks_x),
               static_cast<uint32_t>(thread % grid.threads_x), static_cast<uint32_t>(thread / grid.threads_x));
  }
}

struct OnHost {
  Schedule schedule;

  template <class Body>
  int operator()(Body body, int64_t rows, int64_t columns) const {
    if (rows != 0) run_grid(body, grid_for(rows, columns), schedule);
    return 0;
  }
};

}  // namespace jax_tensorarray
