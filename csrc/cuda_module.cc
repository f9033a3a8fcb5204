// The Python module that hands the CUDA handlers to jax.ffi.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "module.h"
#include "vendor.h"

namespace jax_tensorarray {

inline void define_gpu_module(nanobind::module_& m) {
  define_module(m, cuda_handlers(), cuda_stages());
  int built = 0;
  m.attr("cuda_version") = cudaRuntimeGetVersion(&built) == cudaSuccess ? built : 0;
  m.def(
      "driver_version",
      [] {
        int version = 0;
        return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
      },
      "Newest CUDA that the installed driver can run, 0 if there is no driver; 13000 is CUDA 13.0");
  m.def("has_run", has_run, "Whether an op has run on a GPU");
  m.def("wait_for_error", wait_for_error, nanobind::call_guard<nanobind::gil_scoped_release>(),
        "Wait for the GPUs that have run an op. The text of an error that they recorded, or None");
}

}  // namespace jax_tensorarray

#ifdef JAX_TENSORARRAY_ROCM
NB_MODULE(_rocm, m) { jax_tensorarray::define_gpu_module(m); }
#else
NB_MODULE(_cuda, m) { jax_tensorarray::define_gpu_module(m); }
#endif
