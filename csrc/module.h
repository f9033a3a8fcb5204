// The Python side of a compiled module: what _ffi.py looks for in it.
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>
#include <string>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace jax_tensorarray {

// `registrations()` maps FFI target names to handlers; `ffi_api_version` is that of the headers used here.
inline void define_module(nanobind::module_& m,
                          std::initializer_list<std::pair<const char*, XLA_FFI_Handler*>> handlers) {
  nanobind::dict targets;
  for (const auto& [name, handler] : handlers) {
    std::string target = std::string("jax_tensorarray_") + name;
    targets[target.c_str()] = nanobind::capsule(reinterpret_cast<void*>(handler));
  }
  m.def("registrations", [targets] { return targets; }, "FFI target name -> handler capsule");
  m.attr("ffi_api_version") = nanobind::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
}

}  // namespace jax_tensorarray
