"""The parameters and the state that Haiku and Flax Linen keep around a function under `in_place`.

A function inside of `hk.transform`, or of a module of Linen, reads and changes them where they are. While they are
initialised, nothing is compiled. Later the function may read them. Changing them is an error, since a compiled function
would not do so in its next call.
"""

import sys
import types
from collections.abc import Iterator
from typing import Any

import jax

_HAIKU = (
    "parameters, state or random keys of Haiku inside of hk.transform",
    "jax.jit(in_place(hk.transform(f).apply))",
)
_LINEN = "variables of a Flax module inside of this module", "jax.jit(in_place(model.apply))"


def are_being_made(fun: Any, arguments: Any) -> bool:
    """Return whether parameters are being made now, in the transformed function or module that is around."""
    if _haiku_runs() and sys.modules["haiku"].running_init():
        return True
    return any(module.is_initializing() for module in _linen_modules(fun, arguments))


def state(fun: Any, arguments: Any) -> list[tuple[list[Any], tuple[str, str]]]:
    """Return lists of arrays around a function, each with a name and a line that may change them."""
    found = [(jax.tree.leaves(module.variables), _LINEN) for module in _linen_modules(fun, arguments)]
    if _haiku_runs():
        haiku = sys.modules["haiku"]
        all_of = haiku.get_params(), haiku.get_current_state(), haiku.maybe_get_rng_sequence_state()
        found.append((jax.tree.leaves(all_of), _HAIKU))
    return found


def _haiku_runs() -> bool:
    haiku = sys.modules.get("haiku")
    if haiku is None:
        return False
    try:
        haiku.running_init()
    except ValueError:  # not inside of hk.transform
        return False
    return True


def _linen_modules(fun: Any, arguments: Any) -> Iterator[Any]:
    """Yield the modules of Linen, with variables, that a function is a method of, closes over or is given."""
    linen = sys.modules.get("flax.linen")
    if linen is None:
        return
    while fun is not None:
        cells = getattr(fun, "__closure__", None) or () if isinstance(fun, types.FunctionType) else ()
        for x in [getattr(fun, "__self__", None), *map(_content, cells)]:
            if isinstance(x, linen.Module) and x.scope is not None:
                yield x
        fun = getattr(fun, "__wrapped__", None)
    for x in jax.tree.leaves(arguments):
        if isinstance(x, linen.Module) and x.scope is not None:
            yield x


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None
