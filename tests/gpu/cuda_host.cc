// The threads of csrc/gpu_kernels.h, run by the CPU: every block and every thread of the launch that a GPU would get.
//
// Reads cases from one file and writes results to another; tests/gpu/test_cuda_host.py makes the cases and knows the
// results. Every array is an allocation of its own, exactly as long as it has to be and as badly aligned as the case
// says, so that the address sanitizer sees each access past it.
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "emulated_gpu/host_launch.h"

using namespace jax_tensorarray;

namespace {

// From kCombine on: the ops of `Combining`.
enum Op : int64_t { kRead, kWrite, kSwap, kClear, kCheck, kReadPart, kWritePart, kCombine };

struct Case {
  int64_t op;
  int64_t batch, size, count, row;  // row in bytes
  int64_t index_type, masked, sorted, reverse, strict, type, offset;
  Schedule schedule;
};

// An array at an address that is `offset` past a multiple of 64.
class Array {
 public:
  Array(int64_t bytes, int64_t offset) : bytes_(static_cast<size_t>(bytes)) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, bytes_ + static_cast<size_t>(offset)) != 0) abort();
    base_.reset(static_cast<uint8_t*>(memory));
    data_ = base_.get() + offset;
    memset(base_.get(), 0xa5, bytes_ + static_cast<size_t>(offset));
  }
  Array(FILE* in, int64_t bytes, int64_t offset) : Array(bytes, offset) {
    if (fread(data_, 1, bytes_, in) != bytes_) abort();
  }
  void write(FILE* out) const {
    if (fwrite(data_, 1, bytes_, out) != bytes_) abort();
  }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  struct Free {
    void operator()(uint8_t* p) const { free(p); }
  };
  size_t bytes_;
  std::unique_ptr<uint8_t, Free> base_;
  uint8_t* data_;
};

template <class... Ops>
std::string_view name_of(List<Ops...>, int64_t k) {
  constexpr std::string_view kNames[] = {Ops::kName...};
  return kNames[k];
}

void run(const Case& c, FILE* in, FILE* out) {
  constexpr int64_t kIndexBytes[] = {1, 2, 4, 8, 1, 2, 4, 8};
  int64_t positions = c.batch * c.count, index_bytes = kIndexBytes[c.index_type];
  auto type = static_cast<IndexType>(c.index_type);
  ErrorRecord record{};
  Report report{c.strict ? &record : nullptr, "the op"};
  OnHost on{c.schedule};

  if (c.op == kCheck) {
    Array index(in, positions * index_bytes, 0), live(in, c.batch * 4, 0), checked(positions * 4, 0);
    LiveSize size{live.as<int32_t>(), c.count};
    launch(on, CheckJob{Index{index.as<void>(), nullptr, type}, size, checked.as<int32_t>(), positions, report});
    checked.write(out);
  } else if (c.op == kClear) {
    Geometry g{c.batch, c.size, 0, c.row};
    Array buffer(in, c.batch * c.size * c.row, c.offset), start(in, c.batch * index_bytes, 0);
    Array stop(in, c.batch * index_bytes, 0);
    launch(on, ClearJob{g, Index{start.as<void>(), nullptr, type}, Index{stop.as<void>(), nullptr, type},
                        buffer.as<void>()});
    buffer.write(out);
  } else if (c.op == kReadPart || c.op == kWritePart) {  // a row has `count` parts
    Array buffer(in, c.batch * c.size * c.row, c.offset), index(in, c.batch * index_bytes, 0);
    Array live(in, c.batch * index_bytes, 0), value(in, c.batch * c.row, c.offset);
    Parts parts{Geometry{c.batch, c.size, 0, c.row}, Index{index.as<void>(), nullptr, type},
                Index{live.as<void>(), nullptr, type}, c.count == 0 ? 0 : c.row / c.count};
    bool reads = c.op == kReadPart;
    if (reads) launch(on, ReadPartJob{parts, buffer.as<void>(), value.as<void>()});
    else launch(on, WritePartJob{parts, buffer.as<void>(), value.as<void>()});
    (reads ? value : buffer).write(out);
  } else {
    Array buffer(in, c.batch * c.size * c.row, c.offset), index(in, positions * index_bytes, 0);
    Array where(in, c.masked ? positions : 0, 0), order(in, c.sorted ? positions * 4 : 0, 0);
    Walk walk{Geometry{c.batch, c.size, c.count, c.row},
              Index{index.as<void>(), c.masked ? where.as<uint8_t>() : nullptr, type},
              c.sorted ? order.as<int32_t>() : nullptr, c.reverse != 0, report};
    if (c.op == kRead) {
      Array value(positions * c.row, c.offset);
      launch(on, ReadJob{walk, buffer.as<void>(), value.as<void>()});
      value.write(out);
    } else {
      Array value(in, positions * c.row, c.offset);
      if (c.op == kWrite) launch(on, WriteJob{walk, buffer.as<void>(), value.as<void>()});
      if (c.op >= kCombine) {
        std::string_view op = name_of(Combining{}, c.op - kCombine);
        launch(on, CombineJob{op, static_cast<ElementType>(c.type), walk, buffer.as<void>(), value.as<void>()});
      }
      if (c.op == kSwap) {
        Array old(positions * c.row, c.offset);
        launch(on, SwapJob{walk, buffer.as<void>(), value.as<void>(), old.as<void>()});
        old.write(out);
      }
      buffer.write(out);
    }
  }
  std::string text = tell(record).value_or("");
  auto length = static_cast<int64_t>(text.size());
  fwrite(&length, sizeof length, 1, out);
  fwrite(text.data(), 1, text.size(), out);
}

}  // namespace

int main(int, char** argv) {
  FILE *in = fopen(argv[1], "rb"), *out = fopen(argv[2], "wb");
  for (Case c; fread(&c, sizeof c, 1, in) == 1;) run(c, in, out);
  return fclose(out);
}
