// Every thread of the launches in csrc/cuda.cu, run by the CPU one after the other, the last one first: the result must
// not depend on their order, and none may touch what is not its own.
#include "../csrc/logsumexp.h"
#include "../csrc/update.h"

template <class Thread>
void launch(int64_t elements, Thread thread) {
  int64_t threads = kernels::blocks_for(elements) * kernels::kThreads;
  for (int64_t n = threads; n-- > 0;) thread(n, threads);
}

template <class T>
void update(int64_t batch, int64_t size, int64_t row, const int32_t* index, const T* value, const T* scale, T* buffer,
            T* old) {
  kernels::Update<T> kernel{batch, size, row, index, value, scale, buffer, old};
  launch(kernel.elements(), [&](int64_t n, int64_t threads) { kernel.thread(n, threads); });
}

template <class T>
void logsumexp(int64_t batch, int64_t size, int64_t row, int64_t parts, T* scratch, const T* buffer, T* out) {
  kernels::LogSumExp<T> kernel{batch, size, row, parts, scratch, scratch + parts * batch * row, buffer, out};
  launch(kernel.elements_of_parts(), [&](int64_t n, int64_t threads) { kernel.thread_of_parts(n, threads); });
  launch(kernel.elements(), [&](int64_t n, int64_t threads) { kernel.thread(n, threads); });
}

extern "C" {
void update_float32(int64_t batch, int64_t size, int64_t row, const int32_t* index, const float* value,
                    const float* scale, float* buffer, float* old) {
  update(batch, size, row, index, value, scale, buffer, old);
}

void update_float64(int64_t batch, int64_t size, int64_t row, const int32_t* index, const double* value,
                    const double* scale, double* buffer, double* old) {
  update(batch, size, row, index, value, scale, buffer, old);
}

void logsumexp_float32(int64_t batch, int64_t size, int64_t row, int64_t parts, float* scratch, const float* buffer,
                       float* out) {
  logsumexp(batch, size, row, parts, scratch, buffer, out);
}

void logsumexp_float64(int64_t batch, int64_t size, int64_t row, int64_t parts, double* scratch, const double* buffer,
                       double* out) {
  logsumexp(batch, size, row, parts, scratch, buffer, out);
}
}
