// Indices that are errors: what is said of them, and how a GPU says it.
//
// A kernel cannot raise. It drops the access and leaves a record in host memory that it can write; the host looks
// at the record without waiting for the GPU, and the next op that runs there, or check_errors(), raises.
#pragma once

#include <algorithm>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "called.h"
#include "rows.h"

namespace jax_tensorarray {

// The attribute `op` of a call that is never gone: a kernel in a CUDA graph outlives the call that put it there.
inline const char* kept(std::string_view op) {
  static std::mutex lock;
  static std::set<std::string, std::less<>> all;
  std::lock_guard<std::mutex> alone(lock);
  auto found = all.find(op);
  return (found == all.end() ? all.emplace(op).first : found)->c_str();
}

struct Stray {
  const char* op;
  IndexType type;
  int64_t position, index, size;
};

inline std::string message(std::string_view op, IndexType type, int64_t position, int64_t index, int64_t size) {
  std::string text = type == IndexType::kU64 ? std::to_string(static_cast<uint64_t>(index)) : std::to_string(index);
  Called called = called_at(op, position);
  text = std::string(called.name) + ": index " + text + " is out of range for a TensorArray of size " +
         std::to_string(size);
  return called.place.empty() ? text : text + " (" + std::string(called.place) + ")";
}

// One for each GPU, in host memory that is mapped into the GPU's. The words count errors, and the GPU writes some and
// the host the others, so that no atomic operation has to be one for both sides of the bus. From its claim until the
// host has settled it, an error keeps its place, and others are dropped: what follows an error is often due to it.
struct ErrorRecord {
  uint32_t claimed;  // GPU: by the thread that is first to find one, ...
  uint32_t written;  // GPU: ... whose `stray` is complete
  uint32_t told;     // host: raised as an exception
  uint32_t settled;  // host: all that the GPU had to do since the error is done, so what comes now is a new one
  Stray stray;
};

// Where a kernel reports to; nowhere if indices out of range are dropped in silence.
struct Report {
  ErrorRecord* record;
  const char* op;

  // Called by a thread that has found a stray, any of them. Which thread is first is a matter of chance, so the one
  // that is looks for the first stray in order: the message is the same on every platform and in every run.
  template <class SizeAt>
  TA_HD void operator()(const Index& index, int64_t positions, SizeAt size_at) const {
    if (record == nullptr || !claim()) return;
    int64_t first = index.first_stray(positions, size_at);
    record->stray = Stray{op, index.type, first, index.value(first), size_at(first)};
    publish();
  }

#ifdef TA_ON_GPU
  __device__ bool claim() const {
    uint32_t settled = *const_cast<volatile uint32_t*>(&record->settled);
    return atomicCAS(&record->claimed, settled, settled + 1) == settled;
  }
  __device__ void publish() const {
    __threadfence_system();  // the host sees the count only after what it counts
    *const_cast<volatile uint32_t*>(&record->written) = record->claimed;
    __threadfence_system();
  }
#else
  bool claim() const {
    uint32_t settled = __atomic_load_n(&record->settled, __ATOMIC_ACQUIRE);
    return __atomic_compare_exchange_n(&record->claimed, &settled, settled + 1, false, __ATOMIC_RELAXED,
                                       __ATOMIC_RELAXED);
  }
  void publish() const { __atomic_store_n(&record->written, record->claimed, __ATOMIC_RELEASE); }
#endif
};

// --- the host's side, under a lock but for is_pending ----------------------------------------------------------

inline uint32_t written(const ErrorRecord& record) { return __atomic_load_n(&record.written, __ATOMIC_ACQUIRE); }

inline bool is_pending(const ErrorRecord& record) {
  return written(record) != __atomic_load_n(&record.settled, __ATOMIC_RELAXED);
}

// The text of an error that nobody has been told of.
inline std::optional<std::string> tell(ErrorRecord& record) {
  if (!is_pending(record) || record.told == written(record)) return std::nullopt;
  record.told = written(record);
  const Stray& stray = record.stray;
  return message(stray.op, stray.type, stray.position, stray.index, stray.size);
}

// To be called once the GPU has nothing more to do: from here on there is room for another error.
inline void settle(ErrorRecord& record) { __atomic_store_n(&record.settled, written(record), __ATOMIC_RELEASE); }

}  // namespace jax_tensorarray
