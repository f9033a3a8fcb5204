// What the op does to one element: compiled for the CPU by the host compiler, and for GPUs by nvcc.
#pragma once

#include <cstdint>

#include "threads.h"

namespace kernels {

// `buffer` is [batch, size, row], `value` and `old` are [batch, row], `index` and `scale` are [batch].
// All arithmetic on positions is 64-bit: a buffer may hold more than 2^31 elements.
template <class T>
struct Update {
  int64_t batch, size, row;
  const int32_t* index = nullptr;
  const T* value = nullptr;
  const T* scale = nullptr;
  T* buffer = nullptr;
  T* old = nullptr;

  // The row that batch element b addresses; null if its index is out of range.
  HOST_DEVICE T* target(int64_t b) const {
    int64_t i = index[b];
    return i >= 0 && i < size ? buffer + (b * size + i) * row : nullptr;
  }

  // How many elements are updated, for the number of threads.
  int64_t elements() const { return batch * row; }

  // Element k of that row.
  HOST_DEVICE void element(T* target, int64_t b, int64_t k) const {
    T before = target == nullptr ? T{0} : target[k];
    if (target != nullptr) target[k] = scale[b] * before + value[b * row + k];
    old[b * row + k] = before;
  }

  // What one of so many threads of a GPU does: an element, or several where there are very many. It is ordinary C++, so
  // tests/threads.cc runs every thread of a launch without a GPU.
  HOST_DEVICE void thread(int64_t number, int64_t threads) const {
    for (int64_t n = number; n < batch * row; n += threads) {
      int64_t b = n / row;
      element(target(b), b, n - b * row);
    }
  }
};

}  // namespace kernels
