"""JAX primitives with kernels for CPU and CUDA: one updates a row of a buffer in place, one reduces all rows."""

from pkgutil import extend_path

# In a source checkout the compiled modules lie in the installed copy of the package.
__path__ = extend_path(__path__, __name__)

from decay_row import _ffi

_ffi.load()

from decay_row._ffi import disabled_checks  # noqa: E402
from decay_row._logsumexp import logsumexp_rows, logsumexp_rows_p  # noqa: E402
from decay_row._op import decay_row, decay_row_p  # noqa: E402

__all__ = ["decay_row", "decay_row_p", "disabled_checks", "logsumexp_rows", "logsumexp_rows_p"]
