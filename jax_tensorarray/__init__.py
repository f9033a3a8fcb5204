"""Makes JAX loops that update an array row by row run without copying the array, also under gradients."""

import importlib
from collections.abc import Sequence
from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

# In a source checkout the compiled modules lie in the installed copy of the package.
__path__ = extend_path(__path__, __name__)

# The builds of the wheels read it here.
__version__ = "0.1.0"

from jax_tensorarray import _compat, _contexts  # noqa: F401  # JAX forbids to make contexts later
from jax_tensorarray._kernels import check_errors
from jax_tensorarray._ops import partition
from jax_tensorarray._ops.add import ta_add
from jax_tensorarray._ops.empty import ta_empty
from jax_tensorarray._ops.max import ta_max
from jax_tensorarray._ops.read import ta_read
from jax_tensorarray._ops.stack import ta_stack
from jax_tensorarray._ops.swap import ta_swap
from jax_tensorarray._ops.write import ta_write

if TYPE_CHECKING:
    from jax_tensorarray import checkpoint_policies, doctor, export, primitives, residuals, tf
    from jax_tensorarray._array.tensorarray import TensorArray
    from jax_tensorarray._in_place.api import in_place
    from jax_tensorarray._in_place.package import in_place_package
    from jax_tensorarray._in_place.switch import disable_in_place
    from jax_tensorarray._loops.api import fori_loop, scan, while_loop
    from jax_tensorarray._loops.growing import growing


def _replacements() -> Sequence[_compat.Replacement]:
    from jax_tensorarray import _replaced

    return _replaced.replacements()


# A program may run kernels that another program has stored, so kernels are registered here. Everything else is imported
# at its first use, because it takes two thirds of the time.
_compat.hide_own_frames()
_compat.on_first_use(_replacements)
partition.register()

#: Where to import a public name from at its first use. Names in `__all__` without an entry are modules, or are here.
_MODULES = {
    "TensorArray": "_array.tensorarray",
    "disable_in_place": "_in_place.switch",
    "fori_loop": "_loops.api",
    "growing": "_loops.growing",
    "in_place": "_in_place.api",
    "in_place_package": "_in_place.package",
    "scan": "_loops.api",
    "while_loop": "_loops.api",
}


if not TYPE_CHECKING:  # a type checker knows by the imports above which names there are

    def __getattr__(name: str) -> Any:
        """Import a public name at its first use."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name not in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "TensorArray",
    "check_errors",
    "checkpoint_policies",
    "disable_in_place",
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
