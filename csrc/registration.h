// The handlers of a module, by the name of the op or of the stage.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jax_tensorarray {

using Handlers = std::vector<std::pair<std::string, XLA_FFI_Handler*>>;

}  // namespace jax_tensorarray
