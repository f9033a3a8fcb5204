// Calls handlers without XLA, with whatever a file says: those of csrc/cpu.cc, or with EMULATED_GPU those of
// csrc/cuda.cc.
//
// tests/ops/test_calls.py makes the calls and knows what comes of them. Every array is an allocation of its own, as
// long as the call says that it is, so that the address sanitizer sees each access past it.
#ifdef EMULATED_GPU
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
    memset(buffer.data, 0xa5, bytes);
  }
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

// The text of the error that the call ends with, or nothing.
std::string call(XLA_FFI_Handler* handler, std::deque<Array>& operands, std::deque<Array>& results,
                 std::deque<Attribute>& attributes) {
  static const XLA_FFI_Api api = fake_api();
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
  frame.api = &api;
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
    std::deque<Array> operands, results;
    std::deque<Attribute> attributes;
    for (int64_t n = number(); n > 0; --n) {
      Array& array = operands.emplace_back();
      read(array.buffer.data, array.bytes);
    }
    for (int64_t n = number(); n > 0; --n) {
      Array& array = results.emplace_back();
      bool is_first_operand = number() != 0;
      if (is_first_operand) array.buffer.data = operands[0].buffer.data;
    }
    for (int64_t n = number(); n > 0; --n) attributes.emplace_back();
    XLA_FFI_Handler* handler = nullptr;
    for (const auto& [known, its] : handlers) {
      if (known == name) handler = its;
    }
    if (handler == nullptr) abort();
    std::string text = call(handler, operands, results, attributes);
#ifdef EMULATED_GPU
    if (auto found = wait_for_error(); found && text.empty()) text = *found;
#endif
    auto length = static_cast<int64_t>(text.size());
    fwrite(&length, sizeof length, 1, out);
    fwrite(text.data(), 1, text.size(), out);
    for (const auto& array : results) fwrite(array.buffer.data, 1, array.bytes, out);
  }
  return fclose(out);
}
