// The Python side of a compiled module: what _ffi.py looks for in it.
#pragma once

#include <nanobind/nanobind.h>

#include "handlers.h"

namespace kernels {

inline void define_module(nanobind::module_& m, const Targets& targets) {
  nanobind::dict handlers;
  for (const Target& target : targets) {
    handlers[target.name] = nanobind::capsule(reinterpret_cast<void*>(target.handler));
  }
  m.def("registrations", [handlers] { return handlers; }, "FFI target name -> handler");
  m.attr("ffi_api_version") = nanobind::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
}

}  // namespace kernels
