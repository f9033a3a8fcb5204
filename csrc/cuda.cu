// Launches of the row ops on a GPU: one thread is one lane, of one unit, of kernels.h.
#include "cuda.h"

namespace jax_tensorarray {
namespace {

struct alignas(16) Unit16 {
  uint64_t low, high;
};

template <class Lane>
__global__ void run_lanes(Lane lane, int64_t rows, int64_t columns) {
  int64_t stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t t = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; t < rows * columns; t += stride) {
    lane(t / columns, t % columns);
  }
}

// Calls `lane(row, column)` for every pair, each on a thread of its own.
template <class Lane>
cudaError_t launch(cudaStream_t stream, Lane lane, int64_t rows, int64_t columns) {
  if (rows * columns == 0) return cudaSuccess;
  constexpr int64_t kThreads = 256, kMaxBlocks = 4096;
  int64_t blocks = (rows * columns + kThreads - 1) / kThreads;
  run_lanes<<<static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks), kThreads, 0, stream>>>(lane, rows,
                                                                                                       columns);
  return cudaGetLastError();
}

template <class Unit>
struct ReadLane {
  Geometry g;
  Index index;
  const Unit* buffer;
  Unit* value;
  // Reads need no order, so every position is a lane of its own: a batch of one row each.
  __device__ void operator()(int64_t position, int64_t column) const {
    int64_t row = index.row(position, g.size);
    int64_t from = (position / g.count * g.size + row) * g.row + column;
    value[position * g.row + column] = row == kNoRow ? Unit{} : buffer[from];
  }
};

template <class Unit>
struct WriteLane {
  Geometry g;
  Index index;
  Unit* buffer;
  const Unit* value;
  bool reverse;
  __device__ void operator()(int64_t batch, int64_t c) const {
    write_lane(g, index, buffer, value, reverse, batch, c, c + 1);
  }
};

template <class Unit>
struct SwapLane {
  Geometry g;
  Index index;
  Unit* buffer;
  const Unit* value;
  Unit* old;
  bool reverse;
  __device__ void operator()(int64_t batch, int64_t c) const {
    swap_lane(g, index, buffer, value, old, reverse, batch, c, c + 1);
  }
};

template <class Sum>
struct AddLane {
  Geometry g;
  Index index;
  typename Sum::Element* buffer;
  const typename Sum::Element* value;
  bool reverse;
  __device__ void operator()(int64_t batch, int64_t c) const {
    add_lane<Sum>(g, index, buffer, value, reverse, batch, c, c + 1);
  }
};

template <class Unit>
struct ClearLane {
  Geometry g;
  Index start, stop;
  Unit* buffer;
  __device__ void operator()(int64_t batch, int64_t c) const { clear_lane(g, start, stop, buffer, batch, c, c + 1); }
};

struct CheckLane {
  Index index;
  const int32_t* size;
  int32_t* checked;
  int64_t count;
  __device__ void operator()(int64_t batch, int64_t k) const {
    int64_t position = batch * count + k;
    checked[position] = live_row(index, size, position, count);
  }
};

// Calls `run` with a null pointer to the widest unit that divides the row and to which all pointers are aligned.
template <class Run>
cudaError_t with_unit(int64_t row, std::initializer_list<const void*> pointers, Run run) {
  auto bits = static_cast<uintptr_t>(row);
  for (const void* p : pointers) bits |= reinterpret_cast<uintptr_t>(p);
  if (bits % 16 == 0) return run(static_cast<Unit16*>(nullptr));
  if (bits % 4 == 0) return run(static_cast<uint32_t*>(nullptr));
  return run(static_cast<uint8_t*>(nullptr));
}

template <class Unit>
Geometry in_units(Geometry g) {
  g.row /= static_cast<int64_t>(sizeof(Unit));
  return g;
}

}  // namespace

cudaError_t launch_read(cudaStream_t stream, const Geometry& bytes, const Index& index, const void* buffer,
                        void* value) {
  return with_unit(bytes.row, {buffer, value}, [&](auto* unit) {
    using Unit = std::remove_pointer_t<decltype(unit)>;
    Geometry g = in_units<Unit>(bytes);
    ReadLane<Unit> lane{g, index, static_cast<const Unit*>(buffer), static_cast<Unit*>(value)};
    return launch(stream, lane, g.batch * g.count, g.row);
  });
}

cudaError_t launch_write(cudaStream_t stream, const Geometry& bytes, const Index& index, void* buffer,
                         const void* value, bool reverse) {
  return with_unit(bytes.row, {buffer, value}, [&](auto* unit) {
    using Unit = std::remove_pointer_t<decltype(unit)>;
    Geometry g = in_units<Unit>(bytes);
    WriteLane<Unit> lane{g, index, static_cast<Unit*>(buffer), static_cast<const Unit*>(value), reverse};
    return launch(stream, lane, g.batch, g.row);
  });
}

cudaError_t launch_swap(cudaStream_t stream, const Geometry& bytes, const Index& index, void* buffer, const void* value,
                        void* old, bool reverse) {
  return with_unit(bytes.row, {buffer, value, old}, [&](auto* unit) {
    using Unit = std::remove_pointer_t<decltype(unit)>;
    Geometry g = in_units<Unit>(bytes);
    SwapLane<Unit> lane{
        g, index, static_cast<Unit*>(buffer), static_cast<const Unit*>(value), static_cast<Unit*>(old), reverse};
    return launch(stream, lane, g.batch, g.row);
  });
}

cudaError_t launch_clear(cudaStream_t stream, const Geometry& bytes, const Index& start, const Index& stop,
                         void* buffer) {
  return with_unit(bytes.row, {buffer}, [&](auto* unit) {
    using Unit = std::remove_pointer_t<decltype(unit)>;
    Geometry g = in_units<Unit>(bytes);
    return launch(stream, ClearLane<Unit>{g, start, stop, static_cast<Unit*>(buffer)}, g.batch, g.row);
  });
}

cudaError_t launch_check(cudaStream_t stream, const Index& index, const int32_t* size, int32_t* checked,
                         int64_t positions, int64_t batch) {
  if (positions == 0) return cudaSuccess;
  CheckLane lane{index, size, checked, positions / batch};
  return launch(stream, lane, batch, lane.count);
}

template <class Sum>
cudaError_t launch_add(cudaStream_t stream, const Geometry& g, const Index& index, void* buffer, const void* value,
                       bool reverse) {
  using Element = typename Sum::Element;
  AddLane<Sum> lane{g, index, static_cast<Element*>(buffer), static_cast<const Element*>(value), reverse};
  return launch(stream, lane, g.batch, g.row);
}

#define TA_INSTANTIATE_ADD(...) \
  template cudaError_t launch_add<__VA_ARGS__>(cudaStream_t, const Geometry&, const Index&, void*, const void*, bool)
TA_INSTANTIATE_ADD(Or);
TA_INSTANTIATE_ADD(Plain<uint8_t>);
TA_INSTANTIATE_ADD(Plain<uint16_t>);
TA_INSTANTIATE_ADD(Plain<uint32_t>);
TA_INSTANTIATE_ADD(Plain<uint64_t>);
TA_INSTANTIATE_ADD(Plain<float>);
TA_INSTANTIATE_ADD(Plain<double>);
TA_INSTANTIATE_ADD(Rounded<Float16>);
TA_INSTANTIATE_ADD(Rounded<BFloat16>);
TA_INSTANTIATE_ADD(Rounded<Float8E3M4>);
TA_INSTANTIATE_ADD(Rounded<Float8E4M3>);
TA_INSTANTIATE_ADD(Rounded<Float8E4M3FN>);
TA_INSTANTIATE_ADD(Rounded<Float8E4M3FNUZ>);
TA_INSTANTIATE_ADD(Rounded<Float8E4M3B11FNUZ>);
TA_INSTANTIATE_ADD(Rounded<Float8E5M2>);
TA_INSTANTIATE_ADD(Rounded<Float8E5M2FNUZ>);
TA_INSTANTIATE_ADD(Rounded<Float8E8M0FNU>);

}  // namespace jax_tensorarray
