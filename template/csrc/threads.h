// How work is shared among the threads of a GPU. Everything here is ordinary C++ as well, so tests run it on the CPU.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

namespace kernels {

// How many threads are launched, in blocks. At least one block: a CUDA graph must not be empty.
constexpr int64_t kThreads = 256, kMostBlocks = 1 << 16;

inline int64_t blocks_for(int64_t elements) {
  int64_t blocks = (elements + kThreads - 1) / kThreads;
  return blocks < 1 ? 1 : blocks > kMostBlocks ? kMostBlocks : blocks;
}

}  // namespace kernels
