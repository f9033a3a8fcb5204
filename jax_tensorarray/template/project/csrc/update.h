// What the op does to one element: compiled for the CPU by the host compiler, and for GPUs by nvcc.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

namespace kernels {

// `buffer` is [batch, size, row], `value` and `old` are [batch, row], `index` and `scale` are [batch].
// All arithmetic on positions is 64-bit: a buffer may hold more than 2^31 elements.
template <class T>
struct Update {
  int64_t batch, size, row;
  const int32_t* index;
  const T* value;
  const T* scale;
  T* buffer;
  T* old;

  // The row that batch element b addresses; null if its index is out of range.
  HOST_DEVICE T* target(int64_t b) const {
    int64_t i = index[b];
    return i >= 0 && i < size ? buffer + (b * size + i) * row : nullptr;
  }

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

// How many threads are launched, in blocks. At least one block: a CUDA graph must not be empty.
constexpr int64_t kThreads = 256, kMostBlocks = 1 << 16;

inline int64_t blocks_for(int64_t elements) {
  int64_t blocks = (elements + kThreads - 1) / kThreads;
  return blocks < 1 ? 1 : blocks > kMostBlocks ? kMostBlocks : blocks;
}

}  // namespace kernels
