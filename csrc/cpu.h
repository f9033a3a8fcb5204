// What cpu.cc offers to Python, and to tests that call handlers without XLA.
#pragma once

#include "registration.h"

namespace jax_tensorarray {

Handlers cpu_handlers();

}  // namespace jax_tensorarray
