// What the kernels of a platform offer to its Python module, and to tests that call handlers without XLA.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jax_tensorarray {

// Handlers by the name of the op or of the stage.
using Handlers = std::vector<std::pair<std::string, XLA_FFI_Handler*>>;

Handlers cpu_handlers();
Handlers cuda_handlers();

// The handlers of the other stages, which all ops share.
Handlers cuda_stages();

// Whether an op has run on a GPU.
bool has_run();

// Waits for the GPUs, and returns the first error that was recorded and not raised yet.
std::optional<std::string> wait_for_error();

}  // namespace jax_tensorarray
