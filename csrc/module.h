// The Python side of a compiled module: what _kernels.py looks for in it.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "registration.h"

namespace jax_tensorarray {

inline nanobind::capsule capsule(XLA_FFI_Handler* handler) {
  return nanobind::capsule(reinterpret_cast<void*>(handler));
}

// `registrations()` maps each FFI target name to a handler for each stage: "execute", and the stages that all targets
// share. `ffi_api_version` is the version of the headers used here.
inline void define_module(nanobind::module_& m, const Handlers& handlers, const Handlers& shared_stages = {}) {
  nanobind::dict targets;
  for (const auto& [name, handler] : handlers) {
    nanobind::dict stages;
    stages["execute"] = capsule(handler);
    for (const auto& [stage, shared] : shared_stages) stages[stage.c_str()] = capsule(shared);
    targets[("jax_tensorarray_" + name).c_str()] = stages;
  }
  m.def("registrations", [targets] { return targets; }, "FFI target name -> stage -> handler capsule");
  m.attr("ffi_api_version") = nanobind::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
}

}  // namespace jax_tensorarray
