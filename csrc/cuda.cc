// CUDA handlers of the row ops, and the Python module that hands them to jax.ffi.
//
// A handler enqueues its kernel on the stream it is given and returns: it neither allocates nor synchronises, so
// XLA may capture it in a CUDA graph.
#include "cuda.h"

#include "handlers.h"
#include "module.h"

namespace jax_tensorarray {
namespace {

ffi::Error status(cudaError_t error) {
  return error == cudaSuccess ? ffi::Error::Success() : ffi::Error::Internal(cudaGetErrorString(error));
}

// The memory of the updated buffer. XLA honours the alias; another runtime that reads the same module need not.
ffi::ErrorOr<void*> in_place(cudaStream_t stream, const ffi::AnyBuffer& buffer, ffi::Result<ffi::AnyBuffer>& out) {
  void* to = out->untyped_data();
  if (to != buffer.untyped_data() && buffer.size_bytes() != 0) {
    auto error = cudaMemcpyAsync(to, buffer.untyped_data(), buffer.size_bytes(), cudaMemcpyDeviceToDevice, stream);
    if (error != cudaSuccess) return ffi::Unexpected(status(error));
  }
  return to;
}

ffi::Error Read(cudaStream_t stream, ffi::AnyBuffer buffer, ffi::AnyBuffer index, ffi::RemainingArgs rest,
                ffi::Result<ffi::AnyBuffer> value, Call call) {
  auto plan = make_plan(call, buffer, index, rest);
  if (plan.has_error()) return plan.error();
  return status(launch_read(stream, plan->geometry, plan->index, buffer.untyped_data(), value->untyped_data()));
}

ffi::Error Write(cudaStream_t stream, ffi::AnyBuffer buffer, ffi::AnyBuffer index, ffi::AnyBuffer value,
                 ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out, Call call) {
  auto plan = make_plan(call, buffer, index, rest);
  if (plan.has_error()) return plan.error();
  auto rows = in_place(stream, buffer, out);
  if (rows.has_error()) return rows.error();
  return status(launch_write(stream, plan->geometry, plan->index, *rows, value.untyped_data(), call.reverse));
}

ffi::Error Swap(cudaStream_t stream, ffi::AnyBuffer buffer, ffi::AnyBuffer index, ffi::AnyBuffer value,
                ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> old, Call call) {
  auto plan = make_plan(call, buffer, index, rest);
  if (plan.has_error()) return plan.error();
  auto rows = in_place(stream, buffer, out);
  if (rows.has_error()) return rows.error();
  return status(
      launch_swap(stream, plan->geometry, plan->index, *rows, value.untyped_data(), old->untyped_data(), call.reverse));
}

ffi::Error Add(cudaStream_t stream, ffi::AnyBuffer buffer, ffi::AnyBuffer index, ffi::AnyBuffer value,
               ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out, Call call) {
  auto plan = make_plan(call, buffer, index, rest);
  if (plan.has_error()) return plan.error();
  auto rows = in_place(stream, buffer, out);
  if (rows.has_error()) return rows.error();
  return with_sum(buffer.element_type(), [&](auto sum) {
    using Sum = decltype(sum);
    Geometry g = plan->geometry;
    g.row /= static_cast<int64_t>(sizeof(typename Sum::Element));
    return status(launch_add<Sum>(stream, g, plan->index, *rows, value.untyped_data(), call.reverse));
  });
}

ffi::Error clear_rows(cudaStream_t stream, const ffi::AnyBuffer& buffer, const Index& start, const Index& stop,
                      ffi::Result<ffi::AnyBuffer>& out, int64_t batch_dims) {
  auto rows = in_place(stream, buffer, out);
  if (rows.has_error()) return rows.error();
  return status(launch_clear(stream, geometry_of(buffer, batch_dims, 0), start, stop, *rows));
}

ffi::Error Mask(cudaStream_t stream, ffi::AnyBuffer buffer, ffi::AnyBuffer size, ffi::RemainingArgs,
                ffi::Result<ffi::AnyBuffer> out, int64_t batch_dims) {
  auto from = index_of(size);
  if (from.has_error()) return from.error();
  return clear_rows(stream, buffer, *from, Index{}, out, batch_dims);
}

ffi::Error Clear(cudaStream_t stream, ffi::AnyBuffer buffer, ffi::AnyBuffer start, ffi::AnyBuffer stop,
                 ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> out, int64_t batch_dims) {
  auto from = index_of(start), to = index_of(stop);
  if (from.has_error()) return from.error();
  if (to.has_error()) return to.error();
  return clear_rows(stream, buffer, *from, *to, out, batch_dims);
}

ffi::Error Check(cudaStream_t stream, ffi::AnyBuffer index, ffi::Buffer<ffi::S32> size,
                 ffi::Result<ffi::Buffer<ffi::S32>> checked, std::string_view, bool) {
  auto rows = index_of(index);
  if (rows.has_error()) return rows.error();
  auto positions = static_cast<int64_t>(index.element_count()), batch = static_cast<int64_t>(size.element_count());
  return status(launch_check(stream, *rows, size.typed_data(), checked->typed_data(), positions, batch));
}

ffi::Error Fence(cudaStream_t stream, ffi::AnyBuffer buffer, ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> out) {
  auto rows = in_place(stream, buffer, out);
  return rows.has_error() ? rows.error() : ffi::Error::Success();
}

using Stream = ffi::PlatformStream<cudaStream_t>;

XLA_FFI_DEFINE_HANDLER_SYMBOL(kRead, Read, bind_read(ffi::Ffi::Bind().Ctx<Stream>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(kWrite, Write, bind_write(ffi::Ffi::Bind().Ctx<Stream>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(kAdd, Add, bind_write(ffi::Ffi::Bind().Ctx<Stream>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(kSwap, Swap, bind_swap(ffi::Ffi::Bind().Ctx<Stream>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(kMask, Mask, bind_mask(ffi::Ffi::Bind().Ctx<Stream>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(kClear, Clear, bind_clear(ffi::Ffi::Bind().Ctx<Stream>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(kCheck, Check, bind_check(ffi::Ffi::Bind().Ctx<Stream>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(kFence, Fence, bind_fence(ffi::Ffi::Bind().Ctx<Stream>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(kEmpty, Empty, bind_empty(ffi::Ffi::Bind()), {ffi::Traits::kCmdBufferCompatible});

}  // namespace
}  // namespace jax_tensorarray

NB_MODULE(_cuda, m) {
  using namespace jax_tensorarray;
  define_module(m, {{"read", kRead},
                    {"write", kWrite},
                    {"add", kAdd},
                    {"swap", kSwap},
                    {"mask", kMask},
                    {"clear", kClear},
                    {"check", kCheck},
                    {"fence", kFence},
                    {"empty", kEmpty}});
}
