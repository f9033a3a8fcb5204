// Calls handlers without XLA, with whatever a file says: those of csrc/cpu.cc, or with EMULATED_GPU those of
// csrc/cuda.cc.
//
// tests/ops/test_calls.py makes the calls and knows what comes of them. Every array is an allocation of its own, as
// long as the call says that it is, so that the address sanitizer sees each access past it.
//
// A call may be recorded in a CUDA graph, as XLA does: the handler runs once, without the contents of any array, and
// what it enqueued runs again and again, without anything that the call consisted of.
#ifdef EMULATED_GPU
#include <sanitizer/asan_interface.h>

#include "emulated_gpu/module.cc"  // NOLINT
#else
#include "../../csrc/cpu.cc"  // NOLINT
#endif

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

struct XLA_FFI_Error {
  std::string text;
};

namespace {

XLA_FFI_Api fake_api() {
  XLA_FFI_Api api{};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) { return new XLA_FFI_Error{args->message}; };
  api.XLA_FFI_ThreadPool_NumThreads = [](XLA_FFI_ThreadPool_NumThreads_Args* args) -> XLA_FFI_Error* {
    *args->num_threads = 2;
    return nullptr;
  };
  api.XLA_FFI_ThreadPool_Schedule = [](XLA_FFI_ThreadPool_Schedule_Args* args) -> XLA_FFI_Error* {
    args->task(args->data);
    return nullptr;
  };
  api.XLA_FFI_DeviceOrdinal_Get = [](XLA_FFI_DeviceOrdinal_Get_Args* args) -> XLA_FFI_Error* {
    args->device_ordinal = 0;
    return nullptr;
  };
  api.XLA_FFI_RunId_Get = [](XLA_FFI_RunId_Get_Args* args) -> XLA_FFI_Error* {
    args->run_id = 7;
    return nullptr;
  };
  return api;
}

// --- what the file says ----------------------------------------------------------------------------------------

FILE* in;

void read(void* to, size_t bytes) {
  if (bytes != 0 && fread(to, 1, bytes, in) != bytes) abort();
}

int64_t number() {
  int64_t n;
  read(&n, sizeof n);
  return n;
}

std::string string() {
  std::string text(static_cast<size_t>(number()), ' ');
  read(text.data(), text.size());
  return text;
}

struct Free {
  void operator()(void* memory) const { free(memory); }
};

struct Array {
  XLA_FFI_Buffer buffer{};
  std::vector<int64_t> dims;
  size_t bytes;
  std::unique_ptr<void, Free> memory;

  Array() {
    buffer.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
    buffer.dtype = static_cast<XLA_FFI_DataType>(number());
    dims.resize(static_cast<size_t>(number()));
    read(dims.data(), dims.size() * sizeof(int64_t));
    buffer.rank = static_cast<int64_t>(dims.size());
    buffer.dims = dims.data();
    bytes = static_cast<size_t>(number());
    if (posix_memalign(&buffer.data, 64, bytes) != 0) abort();
    memory.reset(buffer.data);
    clear();
  }
  void clear() { memset(memory.get(), 0xa5, bytes); }
};

struct Attribute {
  std::string name = string(), text;
  int64_t kind = number(), integer = 0;
  XLA_FFI_ByteSpan name_span{name.data(), name.size()}, text_span{};
  XLA_FFI_Scalar scalar{};

  XLA_FFI_AttrType type() const { return kind == 2 ? XLA_FFI_AttrType_STRING : XLA_FFI_AttrType_SCALAR; }

  Attribute() {
    if (kind == 2) {
      text = string();
      text_span = {text.data(), text.size()};
    } else {
      integer = number();
      scalar.dtype = kind == 0 ? XLA_FFI_DataType_S64 : kind == 1 ? XLA_FFI_DataType_PRED : XLA_FFI_DataType_F64;
      scalar.value = &integer;
    }
  }
  Attribute(const Attribute&) = delete;

  void* value() { return kind == 2 ? static_cast<void*>(&text_span) : &scalar; }
};

const XLA_FFI_Api* api() {
  static const XLA_FFI_Api api = fake_api();
  return &api;
}

#ifdef EMULATED_GPU
// What XLA does before each run of an executable that has an op of ours, also of one that is in a CUDA graph.
XLA_FFI_Error* initialize() {
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = api();
  frame.stage = XLA_FFI_ExecutionStage_INITIALIZE;
  frame.args.struct_size = XLA_FFI_Args_STRUCT_SIZE;
  frame.rets.struct_size = XLA_FFI_Rets_STRUCT_SIZE;
  frame.attrs.struct_size = XLA_FFI_Attrs_STRUCT_SIZE;
  return kInitialize(&frame);
}
#endif

// The text of the error that the call ends with, or nothing.
std::string call(XLA_FFI_Handler* handler, std::deque<Array>& operands, std::deque<Array>& results,
                 std::deque<Attribute>& attributes) {
  std::vector<XLA_FFI_ArgType> operand_types;
  std::vector<XLA_FFI_RetType> result_types;
  std::vector<XLA_FFI_AttrType> attribute_types;
  std::vector<void*> operand_buffers, result_buffers, values;
  std::vector<XLA_FFI_ByteSpan*> names;
  for (auto& x : operands) {
    operand_types.push_back(XLA_FFI_ArgType_BUFFER);
    operand_buffers.push_back(&x.buffer);
  }
  for (auto& x : results) {
    result_types.push_back(XLA_FFI_RetType_BUFFER);
    result_buffers.push_back(&x.buffer);
  }
  for (auto& x : attributes) {
    attribute_types.push_back(x.type());
    names.push_back(&x.name_span);
    values.push_back(x.value());
  }
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = api();
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(operands.size()), operand_types.data(),
                operand_buffers.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(results.size()), result_types.data(),
                result_buffers.data()};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr,      static_cast<int64_t>(attributes.size()),
                 attribute_types.data(),    names.data(), values.data()};
  std::unique_ptr<XLA_FFI_Error> error(handler(&frame));
  return error ? error->text : "";
}

struct Made {
  XLA_FFI_Handler* handler = nullptr;
  std::deque<Array> operands, results;
  std::deque<Attribute> attributes;
};

void write(FILE* out, const std::string& text) {
  auto length = static_cast<int64_t>(text.size());
  fwrite(&length, sizeof length, 1, out);
  fwrite(text.data(), 1, text.size(), out);
}

void write(FILE* out, const std::deque<Array>& results) {
  for (const auto& array : results) fwrite(array.buffer.data, 1, array.bytes, out);
}

#ifdef EMULATED_GPU
// Writes the error of the call; then for each replay the error that the host has found before it, and the results; then
// the error that the host finds at the end.
void record_and_replay(Made& made, int64_t replays, FILE* out) {
  std::deque<Array> arrays[] = {std::move(made.operands), std::move(made.results)};
  auto& [operands, results] = arrays;
  auto each = [&](auto f) {
    for (auto& side : arrays) {
      for (auto& array : side) f(array);
    }
  };
  each([](Array& array) { ASAN_POISON_MEMORY_REGION(array.memory.get(), array.bytes); });
  emulated_stream.is_capturing = true;
  std::string text = call(made.handler, operands, results, made.attributes);
  emulated_stream.is_capturing = false;
  each([](Array& array) { ASAN_UNPOISON_MEMORY_REGION(array.memory.get(), array.bytes); });
  made.attributes.clear();
  each([](Array& array) { std::vector<int64_t>().swap(array.dims); });
  auto graph = std::exchange(emulated_stream.graph, {});
  if (text.empty() && graph.empty()) text = "the graph is empty";
  write(out, text);
  for (; replays > 0; --replays) {
    bool begins_run = number() != 0;  // else it is one more step of a loop
    std::string earlier;
    if (begins_run) {
      std::unique_ptr<XLA_FFI_Error> error(initialize());
      if (error) earlier = error->text;
    }
    write(out, earlier);
    for (auto& array : results) array.clear();
    for (auto& array : operands) read(array.memory.get(), array.bytes);
    for (const auto& work : graph) work();
    write(out, results);
  }
  write(out, wait_for_error().value_or(""));
}
#endif

}  // namespace

int main(int, char** argv) {
#ifdef EMULATED_GPU
  auto handlers = cuda_handlers();
#else
  auto handlers = jax_tensorarray::cpu_handlers();
#endif
  in = fopen(argv[1], "rb");
  FILE* out = fopen(argv[2], "wb");
  for (int64_t left = number(); left > 0; --left) {
    std::string name = string();
    Made made;
    for (const auto& [known, its] : handlers) {
      if (known == name) made.handler = its;
    }
    if (made.handler == nullptr) abort();
    for (int64_t n = number(); n > 0; --n) {
      Array& array = made.operands.emplace_back();
      read(array.buffer.data, array.bytes);
    }
    for (int64_t n = number(); n > 0; --n) {
      Array& array = made.results.emplace_back();
      bool is_first_operand = number() != 0;
      if (is_first_operand) array.buffer.data = made.operands[0].buffer.data;
    }
    for (int64_t n = number(); n > 0; --n) made.attributes.emplace_back();
    if (int64_t replays = number(); replays > 0) {
#ifdef EMULATED_GPU
      record_and_replay(made, replays, out);
      continue;
#else
      abort();  // a CPU has no such graphs
#endif
    }
    std::string text = call(made.handler, made.operands, made.results, made.attributes);
#ifdef EMULATED_GPU
    if (auto found = wait_for_error(); found && text.empty()) text = *found;
#endif
    write(out, text);
    write(out, made.results);
  }
  return fclose(out);
}
