// The logarithm of a sum of exponentials: compiled for the CPU by the host compiler, and for GPUs by nvcc.
#pragma once

#include <cmath>
#include <cstdint>

#include "threads.h"

namespace kernels {

// `buffer` is [batch, size, row], `out` is [batch, row]. The rows are divided into parts, each with a maximum and a sum
// of its own, so that a GPU has work for all of its threads: `maxima` and `sums` are [parts, batch, row].
//
// A GPU fills them in one launch and combines them in the next, since blocks of one launch cannot wait for each other.
template <class T>
struct LogSumExp {
  int64_t batch, size, row, parts;
  T* maxima = nullptr;
  T* sums = nullptr;
  const T* buffer = nullptr;
  T* out = nullptr;

  // How many sums there are, and how many parts of sums, for the number of threads.
  int64_t elements() const { return batch * row; }
  int64_t elements_of_parts() const { return parts * elements(); }

  // Part p has the rows from first(p) to first(p + 1). Without a product of the two sizes, which might overflow.
  HOST_DEVICE int64_t first(int64_t p) const {
    int64_t rest = size % parts;
    return p * (size / parts) + (p < rest ? p : rest);
  }

  // Makes `sum * exp(maximum)` greater by `more * exp(x)`, and keeps both exponents at or below zero.
  HOST_DEVICE static void add(T& maximum, T& sum, T x, T more) {
    if (x <= maximum) {
      if (x == maximum) sum += more;  // infinities are equal, and their difference is NaN
      else sum += more * std::exp(x - maximum);
    } else {  // a NaN, too, which then stays
      sum = more + (sum == T{0} ? T{0} : sum * std::exp(maximum - x));
      maximum = x;
    }
  }

  HOST_DEVICE void begin(int64_t n) const {
    maxima[n] = -T{INFINITY};
    sums[n] = T{0};
  }

  // Adds element k of row t to part p of batch element b.
  HOST_DEVICE void element(int64_t p, int64_t b, int64_t t, int64_t k) const {
    int64_t n = (p * batch + b) * row + k;
    add(maxima[n], sums[n], buffer[(b * size + t) * row + k], T{1});
  }

  HOST_DEVICE void combine(int64_t n) const {
    T maximum = maxima[n], sum = sums[n];
    for (int64_t p = 1; p < parts; ++p) add(maximum, sum, maxima[p * batch * row + n], sums[p * batch * row + n]);
    out[n] = maximum + std::log(sum);
  }

  // What one of so many threads does in the first launch: parts of sums.
  HOST_DEVICE void thread_of_parts(int64_t number, int64_t threads) const {
    for (int64_t n = number; n < parts * batch * row; n += threads) {
      int64_t p = n / (batch * row), b = n / row % batch, k = n % row;
      begin(n);
      for (int64_t t = first(p); t < first(p + 1); ++t) element(p, b, t, k);
    }
  }

  // And in the second: whole sums.
  HOST_DEVICE void thread(int64_t number, int64_t threads) const {
    for (int64_t n = number; n < batch * row; n += threads) combine(n);
  }
};

}  // namespace kernels
