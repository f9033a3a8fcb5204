// The handlers of csrc/cuda.cc on a GPU that is this process, for ctypes: see emulated_gpu.py.
#include "cuda.cc"  // NOLINT: one translation unit, so that nothing needs to be exported twice
#include "host_launch.h"
#include "launches.h"

namespace jax_tensorarray {

template <class Body>
cudaError_t enqueue_body(cudaStream_t stream, Body body, Grid grid) {
  stream->enqueue([=] { run_grid(body, grid); });
  return cudaSuccess;
}

cudaError_t enqueue_empty(cudaStream_t stream) {
  stream->enqueue([] {});
  return cudaSuccess;
}

}  // namespace jax_tensorarray

using namespace jax_tensorarray;

// Settles an error that has been raised. One that has not is left to the handler, which raises it.
void emulated_initialize() {
  const ErrorRecord& record = Records::get().first[0];
  if (!is_pending(record) || record.told == written(record)) (void)Initialize(0, &emulated_stream);
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
