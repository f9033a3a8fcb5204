// Index errors: their text, and how a GPU reports them.
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

#include "op_attribute.h"
#include "rows.h"

namespace jax_tensorarray {

// Keeps the attribute `op` of a call for good, since a kernel in a CUDA graph outlives the call that launched it.
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

// What the user of an op has: methods of a TensorArray are named after it, and other ops take buffers.
inline std::string noun(std::string_view op) {
  constexpr std::string_view kTensorArray = "TensorArray";
  return std::string(op.substr(0, kTensorArray.size()) == kTensorArray ? kTensorArray : "buffer");
}

inline std::string message(std::string_view op, IndexType type, int64_t position, int64_t index, int64_t size) {
  Named named = named_at(op, position);
  std::string text(named.name);
  if (!named.is_text) {
    text += ": index " +
            (type == IndexType::kU64 ? std::to_string(static_cast<uint64_t>(index)) : std::to_string(index)) +
            " is out of range for a " + noun(named.name) + " of size " + std::to_string(size);
  }
  return named.place.empty() ? text : text + " (" + std::string(named.place) + ")";
}

// The record of one GPU, in host memory that the GPU can write. Each counter is written by the GPU alone or by the host
// alone, so the atomic operation of `claim` orders only the threads of one GPU: none has to work across the bus. Until
// the host has settled an error, later ones are dropped, since they often follow from it.
struct ErrorRecord {
  uint32_t claimed;  // GPU: errors that a thread has claimed
  uint32_t written;  // GPU: errors whose `stray` is complete
  uint32_t told;     // host: errors raised as exceptions
  uint32_t settled;  // host: errors since which the GPU has finished all its work, so that the next one is new
  Stray stray;
};

// Where a kernel reports errors; `record` is null if indices out of range are dropped silently.
struct Report {
  ErrorRecord* record;
  const char* op;

  // Called by any thread that finds an index out of range. Threads race, so the first of them searches for the first
  // such index in order: the message is the same on every platform and in every run.
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

// --- the host's side; all but is_pending need a lock -----------------------------------------------------------

inline uint32_t written(const ErrorRecord& record) { return __atomic_load_n(&record.written, __ATOMIC_ACQUIRE); }

inline bool is_pending(const ErrorRecord& record) {
  return written(record) != __atomic_load_n(&record.settled, __ATOMIC_RELAXED);
}

// The text of an error that has not been raised yet.
inline std::optional<std::string> tell(ErrorRecord& record) {
  if (!is_pending(record) || record.told == written(record)) return std::nullopt;
  record.told = written(record);
  const Stray& stray = record.stray;
  return message(stray.op, stray.type, stray.position, stray.index, stray.size);
}

// Makes room for another error. Call it only when the GPU is idle.
inline void settle(ErrorRecord& record) { __atomic_store_n(&record.settled, written(record), __ATOMIC_RELEASE); }

}  // namespace jax_tensorarray
