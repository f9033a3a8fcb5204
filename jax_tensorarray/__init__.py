"""TensorArray for JAX: row reads and writes that stay in place in loops, forward and under gradients."""

import importlib
from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

# In a source checkout the compiled modules lie in the installed copy of the package.
__path__ = extend_path(__path__, __name__)

# The builds of the wheels read it here.
__version__ = "0.1.0"

from jax_tensorarray import _ffi

_ffi.load()

from jax_tensorarray import _compat, _lowering, checkpoint_policies, export, primitives  # noqa: E402
from jax_tensorarray._errors import check_errors  # noqa: E402
from jax_tensorarray._flax import register_with_flax  # noqa: E402
from jax_tensorarray._in_place import early  # noqa: E402
from jax_tensorarray._in_place.api import in_place  # noqa: E402
from jax_tensorarray._loops import under_vmap  # noqa: E402
from jax_tensorarray._loops.api import (  # noqa: E402
    choice_of_residuals,
    foldl,
    foldr,
    fori_loop,
    map_fn,
    scan,
    tf_scan,
    tf_while_loop,
    while_loop,
)
from jax_tensorarray._ops.add import ta_add  # noqa: E402
from jax_tensorarray._ops.empty import ta_empty  # noqa: E402
from jax_tensorarray._ops.max import ta_max  # noqa: E402
from jax_tensorarray._ops.read import ta_read  # noqa: E402
from jax_tensorarray._ops.stack import ta_stack  # noqa: E402
from jax_tensorarray._ops.swap import ta_swap  # noqa: E402
from jax_tensorarray._ops.write import ta_write  # noqa: E402
from jax_tensorarray._tensorarray import TensorArray, map_structure  # noqa: E402

_compat.hide_own_frames()
_compat.install_forwarding_transposes()
early.install()
under_vmap.install()
_lowering.install()

if TYPE_CHECKING:
    from jax_tensorarray import inspect


def __getattr__(name: str) -> Any:
    """Import `jax_tensorarray.inspect` when it is first used, since few programs examine themselves."""
    if name == "inspect":
        return importlib.import_module("jax_tensorarray.inspect")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "TensorArray",
    "check_errors",
    "checkpoint_policies",
    "choice_of_residuals",
    "export",
    "foldl",
    "foldr",
    "fori_loop",
    "in_place",
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
