"""Makes JAX loops that update an array row by row run without copying the array, also under gradients."""

import importlib
from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

# In a source checkout the compiled modules lie in the installed copy of the package.
__path__ = extend_path(__path__, __name__)

# The builds of the wheels read it here.
__version__ = "0.1.0"

from jax_tensorarray import _compat, _replaced, checkpoint_policies, export, primitives, residuals, tf
from jax_tensorarray._array.tensorarray import TensorArray
from jax_tensorarray._in_place.api import in_place
from jax_tensorarray._in_place.package import in_place_package
from jax_tensorarray._kernels import check_errors
from jax_tensorarray._loops.api import fori_loop, scan, while_loop
from jax_tensorarray._loops.growing import growing
from jax_tensorarray._ops import partition
from jax_tensorarray._ops.add import ta_add
from jax_tensorarray._ops.empty import ta_empty
from jax_tensorarray._ops.max import ta_max
from jax_tensorarray._ops.read import ta_read
from jax_tensorarray._ops.stack import ta_stack
from jax_tensorarray._ops.swap import ta_swap
from jax_tensorarray._ops.write import ta_write

_compat.hide_own_frames()
_compat.on_first_use(_replaced.replacements)
partition.register()

if TYPE_CHECKING:
    from jax_tensorarray import doctor


def __getattr__(name: str) -> Any:
    """Import `jax_tensorarray.doctor` when it is first used, since few programs examine themselves."""
    if name == "doctor":
        return importlib.import_module("jax_tensorarray.doctor")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "TensorArray",
    "check_errors",
    "checkpoint_policies",
    "doctor",
    "export",
    "fori_loop",
    "growing",
    "in_place",
    "in_place_package",
    "primitives",
    "residuals",
    "scan",
    "ta_add",
    "ta_empty",
    "ta_max",
    "ta_read",
    "ta_stack",
    "ta_swap",
    "ta_write",
    "tf",
    "while_loop",
]
