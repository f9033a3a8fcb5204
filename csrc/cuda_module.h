// What cuda.cc offers to Python.
#pragma once

#include <optional>
#include <string>

#include "registration.h"

namespace jax_tensorarray {

Handlers cuda_handlers();

// The handlers of the other stages, which all ops share.
Handlers cuda_stages();

// Whether an op has run on a GPU.
bool has_run();

// Waits for the GPUs, and returns the first error that was recorded and not raised yet.
std::optional<std::string> wait_for_error();

}  // namespace jax_tensorarray
