// Every thread of the launches in csrc/cuda.cu, run by the CPU one after the other, the last one first: the result must
// not depend on their order, and none may touch what is not its own.
#include "../csrc/update.h"

template <class T>
void launch(kernels::Update<T> update) {
  int64_t threads = kernels::blocks_for(update.batch * update.row) * kernels::kThreads;
  for (int64_t n = threads; n-- > 0;) update.thread(n, threads);
}

extern "C" {
void launch_f32(int64_t batch, int64_t size, int64_t row, const int32_t* index, const float* value, const float* scale,
                float* buffer, float* old) {
  launch(kernels::Update<float>{batch, size, row, index, value, scale, buffer, old});
}

void launch_f64(int64_t batch, int64_t size, int64_t row, const int32_t* index, const double* value,
                const double* scale, double* buffer, double* old) {
  launch(kernels::Update<double>{batch, size, row, index, value, scale, buffer, old});
}
}
