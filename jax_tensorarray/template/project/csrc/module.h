// The Python side of a compiled module: what _ffi.py looks for in it.
#pragma once

#include <nanobind/nanobind.h>

#include "xla/ffi/api/c_api.h"

namespace kernels {

inline void define_module(nanobind::module_& m, XLA_FFI_Handler* handler) {
  nanobind::dict targets;
  targets["decay_row_update"] = nanobind::capsule(reinterpret_cast<void*>(handler));
  m.def("registrations", [targets] { return targets; }, "FFI target name -> handler");
  m.attr("ffi_api_version") = nanobind::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
}

}  // namespace kernels
