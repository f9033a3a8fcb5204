// CPU handlers of the row ops.
//
// Every in-place handler aliases its first operand with its first result, so XLA copies the buffer beforehand
// only where the old value is still needed. Operands past the named ones order this call after the readers of
// the buffer; the kernel does not look at them.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "cpu_kernels.h"
#include "errors.h"
#include "handlers.h"
#include "parallel.h"
#include "registration.h"

namespace jax_tensorarray {
namespace {

// Compiles a handler and all that it calls as one function. The checks of a call are short, and passing their results
// from function to function would cost half as much again. Tests that compile this file do without.
#ifndef TA_ONE_PIECE
#define TA_ONE_PIECE [[gnu::flatten]]
#endif

// --- errors that are raised later ------------------------------------------------------------------------------
//
// If one of several devices stopped at an error, the others would wait for it. So it drops the access and goes on to
// the call of `raise` at the end.

// A run of a program on one device: the number of the run, which all devices share, and the device.
using Run = std::pair<int64_t, int32_t>;

Run run_of(const ffi::Context& context) {
  return {context.get<ffi::RunId>()->run_id, *context.get<ffi::DeviceOrdinal>()};
}

// The first error of each run. They are global, since XLA gives the handlers of a CPU nothing that belongs to one run:
// it calls none before a run, and what an executable may keep is shared by all runs of it. A run that ends before
// `raise` leaves its error here, so the oldest is forgotten in the end.
std::deque<std::pair<Run, std::string>> noted;
std::atomic<size_t> number_noted{0};
std::mutex noting;
constexpr size_t kMostNoted = 1024;

auto noted_in(Run run) {
  return std::find_if(noted.begin(), noted.end(), [&](const auto& one) { return one.first == run; });
}

void note(Run run, std::string text) {
  std::lock_guard<std::mutex> lock(noting);
  if (noted_in(run) != noted.end()) return;
  if (noted.size() == kMostNoted) noted.pop_front();
  noted.emplace_back(run, std::move(text));
  number_noted = noted.size();
}

std::optional<std::string> take_noted(Run run) {
  std::lock_guard<std::mutex> lock(noting);
  auto found = noted_in(run);
  if (found == noted.end()) return std::nullopt;
  std::string text = std::move(found->second);
  noted.erase(found);
  number_noted = noted.size();
  return text;
}

// Whether the call goes on although the index at that position is out of range. If not, the error is put into `error`.
[[gnu::cold, gnu::noinline]] bool passes_over(const ffi::Context& context, std::string_view op, const Index& index,
                                              int64_t position, int64_t size, ffi::Error& error) {
  std::string text = message(op, index.type, position, index.value(position), size);
  if (goes_on(op)) return note(run_of(context), std::move(text)), true;
  return error = ffi::Error(ffi::ErrorCode::kOutOfRange, std::move(text)), false;
}

// Whether all indices are in range. If one is not, the buffer stays as it was.
bool all_inside(const ffi::Context& context, const Call& call, const Plan& plan, ffi::Error& error) {
  if (!call.strict) return true;
  BufferSize size{plan.geometry.size};
  int64_t positions = plan.geometry.positions();
  if (with_index(plan.index, [&](auto rows) { return rows.all_inside(positions, size.size); })) return true;
  int64_t stray = plan.index.first_stray(positions, size);
  return passes_over(context, call.op, plan.index, stray, size(stray), error);
}

// XLA honours the alias, but another runtime that loads the same module need not.
template <class Unit>
Unit* in_place(const ffi::AnyBuffer& buffer, ffi::Result<ffi::AnyBuffer>& out) {
  if (out->untyped_data() != buffer.untyped_data() && buffer.size_bytes() != 0) {
    memcpy(out->untyped_data(), buffer.untyped_data(), buffer.size_bytes());
  }
  return static_cast<Unit*>(out->untyped_data());
}

// Divides the work of an op that updates a buffer, where each thread has rows of its own. It has to look at all indices
// to find them, so short rows are left to one thread.
template <class Work>
void in_shares_of_buffer(ffi::ThreadPool& pool, const Geometry& g, const Work& work) {
  in_shares(pool, g.positions() * g.row, g.row / 128, g.batch * g.size, g.row, work);
}

TA_ONE_PIECE ffi::Error Read(ffi::Context context, ffi::ThreadPool pool, ffi::AnyBuffer buffer, ffi::AnyBuffer index,
                             ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> value, Call call) {
  ffi::Error error;
  Plan plan{};
  if (!plan_read(plan, call, buffer, index, rest, *value, error) || !all_inside(context, call, plan, error)) {
    return error;
  }
  const Geometry& g = plan.geometry;
  const auto* from = static_cast<const uint8_t*>(buffer.untyped_data());
  auto* to = static_cast<uint8_t*>(value->untyped_data());
  in_shares(pool, g.positions() * g.row, g.positions() * g.row, g.positions(), g.row,
            [&](Range positions, Range bytes) {
              with_index(plan.index, [&](auto rows) {
                with_bytes(bytes.size(),
                           [&](auto n) { walk_read(g, rows, from + bytes.begin, to + bytes.begin, positions, n); });
              });
            });
  return ffi::Error::Success();
}

TA_ONE_PIECE ffi::Error Write(ffi::Context context, ffi::ThreadPool pool, ffi::AnyBuffer buffer, ffi::AnyBuffer index,
                              ffi::AnyBuffer value, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                              Call call) {
  ffi::Error error;
  Plan plan{};
  if (!plan_write(plan, call, buffer, index, value, rest, *out, error) || !all_inside(context, call, plan, error)) {
    return error;
  }
  const Geometry& g = plan.geometry;
  auto* to = in_place<uint8_t>(buffer, out);
  const auto* from = static_cast<const uint8_t*>(value.untyped_data());
  in_shares_of_buffer(pool, g, [&](Range mine, Range bytes) {
    with_index(plan.index, [&](auto rows) {
      with_bytes(bytes.size(),
                 [&](auto n) { walk_write(g, rows, to + bytes.begin, from + bytes.begin, call.reverse, mine, n); });
    });
  });
  return ffi::Error::Success();
}

TA_ONE_PIECE ffi::Error Swap(ffi::Context context, ffi::ThreadPool pool, ffi::AnyBuffer buffer, ffi::AnyBuffer index,
                             ffi::AnyBuffer value, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                             ffi::Result<ffi::AnyBuffer> old, Call call) {
  ffi::Error error;
  Plan plan{};
  if (!plan_write(plan, call, buffer, index, value, rest, *out, error, *old) ||
      !all_inside(context, call, plan, error)) {
    return error;
  }
  const Geometry& g = plan.geometry;
  auto* to = in_place<uint8_t>(buffer, out);
  auto* taken = static_cast<uint8_t*>(old->untyped_data());
  const auto* from = static_cast<const uint8_t*>(value.untyped_data());
  in_shares_of_buffer(pool, g, [&](Range mine, Range bytes) {
    with_index(plan.index, [&](auto rows) {
      with_bytes(bytes.size(), [&](auto n) {
        walk_swap(g, rows, to + bytes.begin, from + bytes.begin, taken + bytes.begin, call.reverse, mine, n);
      });
    });
  });
  return ffi::Error::Success();
}

// Not inlined, or every handler would contain the checks once for each dtype.
template <class Rule>
[[gnu::noinline]] ffi::Error combine_rows(ffi::ThreadPool& pool, const Plan& plan, const ffi::AnyBuffer& buffer,
                                          const ffi::AnyBuffer& value, ffi::Result<ffi::AnyBuffer>& out, bool reverse) {
  using Element = typename Rule::Element;
  constexpr auto kWidth = static_cast<int64_t>(sizeof(Element));
  Geometry g = plan.geometry;
  g.row /= kWidth;  // complex numbers are two elements
  auto* to = in_place<Element>(buffer, out);
  const auto* from = static_cast<const Element*>(value.untyped_data());
  in_shares_of_buffer(pool, plan.geometry, [&](Range mine, Range bytes) {
    int64_t first = bytes.begin / kWidth, n = bytes.size() / kWidth;
    with_index(plan.index, [&](auto rows) { walk_combine<Rule>(g, rows, to + first, from + first, reverse, mine, n); });
  });
  return ffi::Error::Success();
}

template <class Op>
TA_ONE_PIECE ffi::Error Combine(ffi::Context context, ffi::ThreadPool pool, ffi::AnyBuffer buffer, ffi::AnyBuffer index,
                                ffi::AnyBuffer value, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                                Call call) {
  ffi::Error error;
  Plan plan{};
  if (!plan_combine<Op>(plan, call, buffer, index, value, rest, *out, error) ||
      !all_inside(context, call, plan, error)) {
    return error;
  }
  return with_rule<Op>(element_type(buffer.element_type()), [&](auto rule) {
    return combine_rows<decltype(rule)>(pool, plan, buffer, value, out, call.reverse);
  });
}

void clear_rows(const Cleared& cleared, const ffi::AnyBuffer& buffer, ffi::Result<ffi::AnyBuffer>& out) {
  auto* rows = in_place<uint8_t>(buffer, out);
  for (int64_t b = 0; b < cleared.geometry.batch; ++b) {
    walk_clear(cleared.geometry, cleared.start, cleared.stop, rows, b);
  }
}

TA_ONE_PIECE ffi::Error Mask(ffi::AnyBuffer buffer, ffi::AnyBuffer size, ffi::RemainingArgs,
                             ffi::Result<ffi::AnyBuffer> out, BatchCall call) {
  ffi::Error error;
  Cleared cleared{};
  if (plan_mask(cleared, buffer, size, *out, call.batch_dims, error)) clear_rows(cleared, buffer, out);
  return error;
}

ffi::Error Clear(ffi::AnyBuffer buffer, ffi::AnyBuffer start, ffi::AnyBuffer stop, ffi::RemainingArgs,
                 ffi::Result<ffi::AnyBuffer> out, BatchCall call) {
  ffi::Error error;
  Cleared cleared{};
  if (plan_clear(cleared, buffer, start, stop, *out, call.batch_dims, error)) clear_rows(cleared, buffer, out);
  return error;
}

ffi::Error ReadPart(ffi::AnyBuffer buffer, ffi::AnyBuffer index, ffi::AnyBuffer parts, ffi::RemainingArgs,
                    ffi::Result<ffi::AnyBuffer> value, BatchCall call) {
  ffi::Error error;
  Parts p{};
  if (!plan_read_part(p, buffer, index, parts, *value, call.batch_dims, error)) return error;
  const auto* rows = static_cast<const uint8_t*>(buffer.untyped_data());
  for (int64_t b = 0; b < p.g.batch; ++b) walk_read_part(p, rows, static_cast<uint8_t*>(value->untyped_data()), b);
  return error;
}

ffi::Error WritePart(ffi::AnyBuffer buffer, ffi::AnyBuffer index, ffi::AnyBuffer value, ffi::AnyBuffer parts,
                     ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> out, BatchCall call) {
  ffi::Error error;
  Parts p{};
  if (!plan_write_part(p, buffer, index, value, parts, *out, call.batch_dims, error)) return error;
  auto* rows = in_place<uint8_t>(buffer, out);
  for (int64_t b = 0; b < p.g.batch; ++b) {
    walk_write_part(p, rows, static_cast<const uint8_t*>(value.untyped_data()), b);
  }
  return error;
}

ffi::Error Check(ffi::Context context, ffi::AnyBuffer index, ffi::AnyBuffer size, ffi::Result<ffi::AnyBuffer> out,
                 CheckCall call) {
  ffi::Error error;
  Checked checked{};
  if (!plan_check(checked, call.op, index, size, *out, error)) return error;
  const auto& [rows, live, positions] = checked;
  int64_t stray = call.strict ? rows.first_stray(positions, live) : kNoRow;
  if (stray != kNoRow && !passes_over(context, call.op, rows, stray, live(stray), error)) return error;
  auto* inside = static_cast<int32_t*>(out->untyped_data());
  for (int64_t p = 0; p < positions; ++p) inside[p] = static_cast<int32_t>(rows.row(p, live(p)));
  return error;
}

// Not inlined: XLA gives a fence the buffer itself, so there is normally nothing to copy.
[[gnu::noinline]] ffi::Error copy_buffer(const ffi::AnyBuffer& buffer, ffi::Result<ffi::AnyBuffer>& out) {
  ffi::Error error;
  if (plan_fence(buffer, *out, error)) in_place<uint8_t>(buffer, out);
  return error;
}

// An identity whose extra operands must be ready first: it orders readers of the buffer before its next owner.
ffi::Error Fence(ffi::AnyBuffer buffer, ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> out) {
  if (out->untyped_data() == buffer.untyped_data()) return ffi::Error::Success();
  return copy_buffer(buffer, out);
}

// Leaves its result as XLA allocated it: no page is touched.
ffi::Error Empty(ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer>) { return ffi::Error::Success(); }

// Raises the error that this run has noted. It only waits for its operands, and its result has no meaning.
ffi::Error Raise(ffi::Context context, ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer>) {
  if (number_noted == 0) return ffi::Error::Success();
  auto text = take_noted(run_of(context));
  return text ? ffi::Error(ffi::ErrorCode::kOutOfRange, *text) : ffi::Error::Success();
}

auto with_context() { return ffi::Ffi::Bind().Ctx<ffi::Context>(); }

auto with_pool() { return with_context().Ctx<ffi::ThreadPool>(); }

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(kRead, Read, bind_read(with_pool()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(kWrite, Write, bind_write(with_pool()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(kSwap, Swap, bind_swap(with_pool()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(kMask, Mask, bind_mask(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(kClear, Clear, bind_clear(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(kReadPart, ReadPart, bind_read_part(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(kWritePart, WritePart, bind_write_part(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(kCheck, Check, bind_check(with_context()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(kFence, Fence, bind_fence(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(kEmpty, Empty, bind_empty(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(kRaise, Raise, bind_empty(with_context()));

template <class Op>
XLA_FFI_Error* combine(XLA_FFI_CallFrame* call) {
  XLA_FFI_DEFINE_HANDLER(handler, Combine<Op>, bind_write(with_pool()));
  return (*handler)(call);
}

Handlers cpu_handlers() { return all_handlers(); }

}  // namespace jax_tensorarray
