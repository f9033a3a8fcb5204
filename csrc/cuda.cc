// CUDA handlers of the row ops.
//
// A handler enqueues its kernel on the stream it is given and returns: it neither allocates nor synchronises, so
// XLA may capture it in a CUDA graph. What has to be allocated is allocated in the stage before, kInitialize.
#include "cuda.h"

#include <algorithm>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "handlers.h"
#include "registration.h"

namespace jax_tensorarray {
namespace {

ffi::Error status(cudaError_t error) {
  return error == cudaSuccess ? ffi::Error::Success() : ffi::Error::Internal(cudaGetErrorString(error));
}

// --- errors that kernels have recorded -------------------------------------------------------------------------

std::mutex errors;

// A record for every GPU, in host memory that all of them can write. They are allocated on first use. They belong to no
// executable, since a kernel may write after its executable has gone, and check_errors() asks for them all.
struct Records {
  ErrorRecord* first = nullptr;
  int count = 0;
  cudaError_t error = cudaSuccess;

  Records() {
    error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) return;
    void* memory = nullptr;
    error = cudaHostAlloc(&memory, count * sizeof(ErrorRecord), cudaHostAllocMapped | cudaHostAllocPortable);
    if (error != cudaSuccess) return;
    first = static_cast<ErrorRecord*>(memory);
    std::fill_n(first, count, ErrorRecord{});
  }

  static const Records& get() {
    static const Records records;  // never freed: kernels may be running when the process ends
    return records;
  }
};

// The GPUs that have run an op.
std::vector<int> used;

void note_use(int device) {
  std::lock_guard<std::mutex> lock(errors);
  if (std::find(used.begin(), used.end(), device) == used.end()) used.push_back(device);
}

// Call this after waiting for the GPU, which must be done without the lock: the GPU may itself wait for a launch by
// another thread.
std::optional<std::string> tell_and_settle(ErrorRecord& record) {
  std::lock_guard<std::mutex> lock(errors);
  auto text = tell(record);
  settle(record);
  return text;
}

ffi::Error raised(const std::string& text) { return ffi::Error(ffi::ErrorCode::kOutOfRange, text); }

// Runs before each run of an executable that has an op of ours, even if that op is in a CUDA graph.
//
// It raises the error of an earlier run, once the GPU has finished that run and found all that there is to find.
ffi::Error Initialize(int32_t device, cudaStream_t stream) {
  const Records& records = Records::get();
  if (records.error != cudaSuccess) return status(records.error);
  note_use(device);
  ErrorRecord& record = records.first[device];
  if (!is_pending(record)) return ffi::Error::Success();
  if (auto error = cudaStreamSynchronize(stream); error != cudaSuccess) return status(error);
  auto text = tell_and_settle(record);
  return text ? raised(*text) : ffi::Error::Success();
}

// --- handlers --------------------------------------------------------------------------------------------------

// Where an op runs.
struct Device {
  cudaStream_t stream;
  ErrorRecord* record;

  Report report(bool strict, std::string_view op) const {
    return {strict ? record : nullptr, strict ? kept(op) : nullptr};
  }
};

// A handler that first raises what an earlier op of the same run has recorded, if the host can see it yet, so that a
// loop ends soon after the step that failed. Initialize has already allocated the records.
template <auto kHandler>
constexpr auto raising = [](int32_t ordinal, cudaStream_t stream, auto... args) {
  const Records& records = Records::get();
  if (records.error != cudaSuccess) return status(records.error);
  ErrorRecord* record = records.first + ordinal;
  if (is_pending(*record)) {
    std::lock_guard<std::mutex> lock(errors);
    if (auto text = tell(*record)) return raised(*text);
  }
  return kHandler(Device{stream, record}, args...);
};

// The memory of the updated buffer. XLA honours the alias, but another runtime that loads the same module need not.
ffi::ErrorOr<void*> in_place(cudaStream_t stream, const ffi::AnyBuffer& buffer, ffi::Result<ffi::AnyBuffer>& out) {
  void* to = out->untyped_data();
  if (to != buffer.untyped_data() && buffer.size_bytes() != 0) {
    auto error = cudaMemcpyAsync(to, buffer.untyped_data(), buffer.size_bytes(), cudaMemcpyDeviceToDevice, stream);
    if (error != cudaSuccess) return ffi::Unexpected(status(error));
  }
  return to;
}

Walk walk_of(const Device& device, const Plan& plan, const Call& call) {
  return Walk{plan.geometry, plan.index, plan.order, call.reverse, device.report(call.strict, call.op)};
}

ffi::Error Read(Device device, ffi::AnyBuffer buffer, ffi::AnyBuffer index, ffi::RemainingArgs rest,
                ffi::Result<ffi::AnyBuffer> value, Call call) {
  ffi::Error error;
  Plan plan{};
  if (!plan_read(plan, call, buffer, index, rest, *value, error)) return error;
  Walk walk = walk_of(device, plan, call);
  return status(enqueue(device.stream, ReadJob{walk, buffer.untyped_data(), value->untyped_data()}));
}

ffi::Error Write(Device device, ffi::AnyBuffer buffer, ffi::AnyBuffer index, ffi::AnyBuffer value,
                 ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out, Call call) {
  ffi::Error error;
  Plan plan{};
  if (!plan_write(plan, call, buffer, index, value, rest, *out, error)) return error;
  auto rows = in_place(device.stream, buffer, out);
  if (rows.has_error()) return rows.error();
  Walk walk = walk_of(device, plan, call);
  return status(enqueue(device.stream, WriteJob{walk, *rows, value.untyped_data()}));
}

ffi::Error Swap(Device device, ffi::AnyBuffer buffer, ffi::AnyBuffer index, ffi::AnyBuffer value,
                ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> old, Call call) {
  ffi::Error error;
  Plan plan{};
  if (!plan_write(plan, call, buffer, index, value, rest, *out, error, *old)) return error;
  auto rows = in_place(device.stream, buffer, out);
  if (rows.has_error()) return rows.error();
  Walk walk = walk_of(device, plan, call);
  return status(enqueue(device.stream, SwapJob{walk, *rows, value.untyped_data(), old->untyped_data()}));
}

template <class Op>
ffi::Error Combine(Device device, ffi::AnyBuffer buffer, ffi::AnyBuffer index, ffi::AnyBuffer value,
                   ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out, Call call) {
  ffi::Error error;
  Plan plan{};
  if (!plan_combine<Op>(plan, call, buffer, index, value, rest, *out, error)) return error;
  auto rows = in_place(device.stream, buffer, out);
  if (rows.has_error()) return rows.error();
  Walk walk = walk_of(device, plan, call);
  ElementType type = element_type(buffer.element_type());
  return status(enqueue(device.stream, CombineJob{Op::kName, type, walk, *rows, value.untyped_data()}));
}

ffi::Error clear_rows(Device device, const Cleared& cleared, const ffi::AnyBuffer& buffer,
                      ffi::Result<ffi::AnyBuffer>& out) {
  auto rows = in_place(device.stream, buffer, out);
  if (rows.has_error()) return rows.error();
  return status(enqueue(device.stream, ClearJob{cleared.geometry, cleared.start, cleared.stop, *rows}));
}

ffi::Error Mask(Device device, ffi::AnyBuffer buffer, ffi::AnyBuffer size, ffi::RemainingArgs,
                ffi::Result<ffi::AnyBuffer> out, BatchCall call) {
  ffi::Error error;
  Cleared cleared{};
  if (!plan_mask(cleared, buffer, size, *out, call.batch_dims, error)) return error;
  return clear_rows(device, cleared, buffer, out);
}

ffi::Error Clear(Device device, ffi::AnyBuffer buffer, ffi::AnyBuffer start, ffi::AnyBuffer stop, ffi::RemainingArgs,
                 ffi::Result<ffi::AnyBuffer> out, BatchCall call) {
  ffi::Error error;
  Cleared cleared{};
  if (!plan_clear(cleared, buffer, start, stop, *out, call.batch_dims, error)) return error;
  return clear_rows(device, cleared, buffer, out);
}

ffi::Error ReadPart(Device device, ffi::AnyBuffer buffer, ffi::AnyBuffer index, ffi::AnyBuffer count,
                    ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> value, BatchCall call) {
  ffi::Error error;
  Parts parts{};
  if (!plan_read_part(parts, buffer, index, count, *value, call.batch_dims, error)) return error;
  return status(enqueue(device.stream, ReadPartJob{parts, buffer.untyped_data(), value->untyped_data()}));
}

ffi::Error WritePart(Device device, ffi::AnyBuffer buffer, ffi::AnyBuffer index, ffi::AnyBuffer value,
                     ffi::AnyBuffer count, ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> out, BatchCall call) {
  ffi::Error error;
  Parts parts{};
  if (!plan_write_part(parts, buffer, index, value, count, *out, call.batch_dims, error)) return error;
  auto rows = in_place(device.stream, buffer, out);
  if (rows.has_error()) return rows.error();
  return status(enqueue(device.stream, WritePartJob{parts, *rows, value.untyped_data()}));
}

ffi::Error Check(Device device, ffi::AnyBuffer index, ffi::AnyBuffer size, ffi::Result<ffi::AnyBuffer> out,
                 CheckCall call) {
  ffi::Error error;
  Checked checked{};
  if (!plan_check(checked, call.op, index, size, *out, error)) return error;
  if (checked.positions == 0) return status(enqueue(device.stream, NoJob{}));
  Report report = device.report(call.strict, call.op);
  auto* to = static_cast<int32_t*>(out->untyped_data());
  return status(enqueue(device.stream, CheckJob{checked.index, checked.size, to, checked.positions, report}));
}

ffi::Error Fence(Device device, ffi::AnyBuffer buffer, ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> out) {
  ffi::Error error;
  if (!plan_fence(buffer, *out, error)) return error;
  auto rows = in_place(device.stream, buffer, out);
  return rows.has_error() ? rows.error() : status(enqueue(device.stream, NoJob{}));
}

// Leaves its result as XLA allocated it.
ffi::Error Empty(Device device, ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer>) {
  return status(enqueue(device.stream, NoJob{}));
}

// A kernel has recorded the errors of this device, and the next op raises them.
ffi::Error Raise(Device device, ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer>) {
  return status(enqueue(device.stream, NoJob{}));
}

auto on_device() { return ffi::Ffi::Bind().Ctx<ffi::DeviceOrdinal>().Ctx<ffi::PlatformStream<cudaStream_t>>(); }

constexpr auto kCapturable = {ffi::Traits::kCmdBufferCompatible};

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    kInitialize, Initialize,
    ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>().Ctx<ffi::PlatformStream<cudaStream_t>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kRead, raising<Read>, bind_read(on_device()), kCapturable);
XLA_FFI_DEFINE_HANDLER_SYMBOL(kWrite, raising<Write>, bind_write(on_device()), kCapturable);
XLA_FFI_DEFINE_HANDLER_SYMBOL(kSwap, raising<Swap>, bind_swap(on_device()), kCapturable);
XLA_FFI_DEFINE_HANDLER_SYMBOL(kMask, raising<Mask>, bind_mask(on_device()), kCapturable);
XLA_FFI_DEFINE_HANDLER_SYMBOL(kClear, raising<Clear>, bind_clear(on_device()), kCapturable);
XLA_FFI_DEFINE_HANDLER_SYMBOL(kReadPart, raising<ReadPart>, bind_read_part(on_device()), kCapturable);
XLA_FFI_DEFINE_HANDLER_SYMBOL(kWritePart, raising<WritePart>, bind_write_part(on_device()), kCapturable);
XLA_FFI_DEFINE_HANDLER_SYMBOL(kCheck, raising<Check>, bind_check(on_device()), kCapturable);
XLA_FFI_DEFINE_HANDLER_SYMBOL(kFence, raising<Fence>, bind_fence(on_device()), kCapturable);
XLA_FFI_DEFINE_HANDLER_SYMBOL(kEmpty, raising<Empty>, bind_empty(on_device()), kCapturable);
XLA_FFI_DEFINE_HANDLER_SYMBOL(kRaise, raising<Raise>, bind_empty(on_device()), kCapturable);

template <class Op>
XLA_FFI_Error* combine(XLA_FFI_CallFrame* call) {
  XLA_FFI_DEFINE_HANDLER(handler, raising<Combine<Op>>, bind_write(on_device()), kCapturable);
  return (*handler)(call);
}

Handlers cuda_handlers() { return all_handlers(); }

Handlers cuda_stages() { return {{"initialize", kInitialize}}; }

bool has_run() {
  std::lock_guard<std::mutex> lock(errors);
  return !used.empty();
}

// Waits for one GPU after another, since work that is still under way may find an error.
std::optional<std::string> wait_for_error() {
  std::vector<int> devices;
  {
    std::lock_guard<std::mutex> lock(errors);
    devices = used;
  }
  std::optional<std::string> text;
  int current = 0;
  if (devices.empty() || cudaGetDevice(&current) != cudaSuccess) return text;
  for (int device : devices) {
    if (cudaSetDevice(device) != cudaSuccess || cudaDeviceSynchronize() != cudaSuccess) continue;
    auto found = tell_and_settle(Records::get().first[device]);
    if (!text) text = found;
  }
  cudaSetDevice(current);
  return text;
}

}  // namespace jax_tensorarray
