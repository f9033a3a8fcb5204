// What cpu.cc has for Python, and for the tests that call handlers without XLA.
#pragma once

#include "registration.h"

namespace jax_tensorarray {

Handlers cpu_handlers();

}  // namespace jax_tensorarray
