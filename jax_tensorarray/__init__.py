"""TensorArray for JAX: row reads and writes that stay in place in loops, forward and under gradients."""

import importlib
from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

# In a source checkout the compiled modules lie in the installed copy of the package.
__path__ = extend_path(__path__, __name__)

# The builds of the wheels read it here.
__version__ = "0.1.0"

from jax_tensorarray import _compat, _replaced, checkpoint_policies, export, primitives
from jax_tensorarray._array.pytree import map_structure, register_with_flax
from jax_tensorarray._array.tensorarray import TensorArray
from jax_tensorarray._in_place.api import in_place
from jax_tensorarray._in_place.choices import choice_of_residuals
from jax_tensorarray._in_place.package import in_place_package
from jax_tensorarray._kernels import check_errors
from jax_tensorarray._loops.api import fori_loop, scan, while_loop
from jax_tensorarray._loops.auto import Auto, Undo
from jax_tensorarray._loops.checkpoint import Checkpoint
from jax_tensorarray._loops.growing import growing
from jax_tensorarray._loops.inverse import Inverse
from jax_tensorarray._loops.recompute import Recompute
from jax_tensorarray._loops.strategy import Tape
from jax_tensorarray._loops.tensorflow import foldl, foldr, map_fn, tf_scan, tf_while_loop
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
    from jax_tensorarray import inspect


def __getattr__(name: str) -> Any:
    """Import `jax_tensorarray.inspect` when it is first used, since few programs examine themselves."""
    if name == "inspect":
        return importlib.import_module("jax_tensorarray.inspect")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Auto",
    "Checkpoint",
    "Inverse",
    "Recompute",
    "Tape",
    "TensorArray",
    "Undo",
    "check_errors",
    "checkpoint_policies",
    "choice_of_residuals",
    "export",
    "foldl",
    "foldr",
    "fori_loop",
    "growing",
    "in_place",
    "in_place_package",
    "inspect",
    "map_fn",
    "map_structure",
    "primitives",
    "register_with_flax",
    "scan",
    "ta_add",
    "ta_empty",
    "ta_max",
    "ta_read",
    "ta_stack",
    "ta_swap",
    "ta_write",
    "tf_scan",
    "tf_while_loop",
    "while_loop",
]
