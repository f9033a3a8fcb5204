// The Python module that hands the CPU handlers to jax.ffi.
#include "module.h"

NB_MODULE(_cpu, m) { jax_tensorarray::define_module(m, jax_tensorarray::cpu_handlers()); }
