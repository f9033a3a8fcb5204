// What cuda.cc has for Python.
#pragma once

#include <optional>
#include <string>

#include "registration.h"

namespace jax_tensorarray {

Handlers cuda_handlers();

// Those of the other stages, the same for every op.
Handlers cuda_stages();

// Whether an op has run on a GPU.
bool has_run();

// The first error that a GPU has recorded and nobody has been told of, once the GPUs have nothing more to do.
std::optional<std::string> wait_for_error();

}  // namespace jax_tensorarray
