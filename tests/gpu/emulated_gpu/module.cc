// The handlers of csrc/cuda.cc on a GPU that is this process, for ctypes: see emulated_gpu.py.
#include "cuda.cc"  // NOLINT: one translation unit, so that nothing needs to be exported twice
#include "host_launch.h"

namespace jax_tensorarray {

inline cudaError_t done(int) { return cudaSuccess; }

cudaError_t enqueue_nothing(cudaStream_t) { return cudaSuccess; }

cudaError_t enqueue_read(cudaStream_t, const Walk& walk, const void* buffer, void* value) {
  return done(launch_read(OnHost{}, walk, buffer, value));
}

cudaError_t enqueue_write(cudaStream_t, const Walk& walk, void* buffer, const void* value) {
  return done(launch_write(OnHost{}, walk, buffer, value));
}

cudaError_t enqueue_swap(cudaStream_t, const Walk& walk, void* buffer, const void* value, void* old) {
  return done(launch_swap(OnHost{}, walk, buffer, value, old));
}

cudaError_t enqueue_combine(cudaStream_t, std::string_view op, ElementType type, const Walk& walk, void* buffer,
                            const void* value) {
  return done(launch_combine(Combining{}, op, OnHost{}, type, walk, buffer, value));
}

cudaError_t enqueue_clear(cudaStream_t, const Geometry& g, const Index& start, const Index& stop, void* buffer) {
  return done(launch_clear(OnHost{}, g, start, stop, buffer));
}

cudaError_t enqueue_read_part(cudaStream_t, const Parts& parts, const void* buffer, void* value) {
  return done(launch_read_part(OnHost{}, parts, buffer, value));
}

cudaError_t enqueue_write_part(cudaStream_t, const Parts& parts, void* buffer, const void* value) {
  return done(launch_write_part(OnHost{}, parts, buffer, value));
}

cudaError_t enqueue_check(cudaStream_t, const Index& index, const LiveSize& live, int32_t* checked, int64_t positions,
                          const Report& report) {
  return done(launch_check(OnHost{}, index, live, checked, positions, report));
}

}  // namespace jax_tensorarray

using namespace jax_tensorarray;

// Settles an error that has been raised. One that has not is left to the handler, which raises it.
void emulated_initialize() {
  const ErrorRecord& record = Records::get().first[0];
  if (!is_pending(record) || record.told == written(record)) (void)Initialize(0, nullptr);
}

extern "C" {

void* emulated_handler(const char* name) {
  for (const auto& [known, handler] : cuda_handlers()) {
    if (known == name) return reinterpret_cast<void*>(handler);
  }
  return nullptr;
}

// The name of the k-th handler, or null.
const char* emulated_name(size_t k) {
  static const Handlers handlers = cuda_handlers();
  return k < handlers.size() ? handlers[k].first.c_str() : nullptr;
}

bool emulated_has_run() { return has_run(); }

// The text of the error that there is to raise, or null.
const char* emulated_wait_for_error() {
  static std::string text;
  auto found = wait_for_error();
  if (found) text = *found;
  return found ? text.c_str() : nullptr;
}
}
