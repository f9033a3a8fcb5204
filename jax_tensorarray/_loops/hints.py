"""Hints for programs ported from TensorFlow: replacements for the arguments of its loops, and for traced sizes."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from jax_tensorarray._array.pytree import is_array

F = TypeVar("F", bound=Callable[..., Any])

_KEYWORDS = {
    "cond": "cond_fun",
    "body": "body_fun",
    "loop_vars": "init_val, one pytree",
    "maximum_iterations": 'max_steps, and on_limit="stop" to end the loop there',
    "parallel_iterations": None,
    "swap_memory": None,
    "infer_shape": None,
    "shape_invariants": None,
    "fn_output_signature": None,
    "dtype": None,
    "back_prop": "jax.lax.stop_gradient of what has no derivative",
    "name": "the call inside of `with jax.named_scope(name)`",
}


def explained(loop: F) -> F:
    """Wrap a loop: a keyword of TensorFlow raises an error that says what to write instead."""

    @functools.wraps(loop)
    def called(*args: Any, **keywords: Any) -> Any:
        for name in (k for k in keywords if k in _KEYWORDS):
            instead = _KEYWORDS[name]
            hint = "leave it out" if instead is None else f"write {instead}"
            raise TypeError(f"{loop.__name__}: {name} is a keyword of TensorFlow; {hint}")
        return loop(*args, **keywords)

    return called  # type: ignore[return-value]


_NO_SHAPE = (
    "How many rows a TensorArray has is known only at run time here, as is the number of a step: it is no range, no "
    "shape and no end of a slice. Instead of `for k in range(ta.size())` write `fori_loop(0, ta.size(), ...)`; instead "
    "of `ta.gather(jnp.arange(n))` or `rows[:n]` take as many rows as there may be, "
    "`ta.gather(k, where=k < n)` with `k = jnp.arange(most)`, or `ta.stack(pad=True)` and `ta.mask()`."
)


_NO_BOOL = (
    "In the functions of a loop each value is known only at run time: Python's `and`, `or`, `not`, `if` and `while` "
    "cannot use it. Write `&`, `|` and `~` of bools, `jnp.where` or `lax.cond`, and `write(..., where=p)`."
)

#: Texts of JAX's errors for traced ends of slices, in the newest version and in the oldest.
_OF_SLICES = ("must have static start/stop/step", "Slice entries must be static")


def about_sizes(loop: F) -> F:
    """Wrap a loop: if it carries TensorArrays, add a hint to JAX's error for a traced size or bool.

    In such a loop, a number that the program uses as a range, a shape or the end of a slice is mostly a size.
    """

    @functools.wraps(loop)
    def called(*args: Any, **keywords: Any) -> Any:
        try:
            return loop(*args, **keywords)
        except (jax.errors.ConcretizationTypeError, jax.errors.TracerIntegerConversionError, IndexError) as error:
            text = str(error)
            is_of_jax = not isinstance(error, IndexError) or any(part in text for part in _OF_SLICES)
            has_arrays = any(map(is_array, jax.tree.leaves((args, keywords), is_leaf=is_array)))
            hint = _NO_BOOL if isinstance(error, jax.errors.TracerBoolConversionError) else _NO_SHAPE
            if is_of_jax and has_arrays and hint not in text:
                error.args = (f"{text}\n\n{hint}",)
            raise

    return called  # type: ignore[return-value]


def unpacked(op: str, functions: dict[str, Any], carry: Any) -> TypeError | None:
    """Return an error if one of the functions takes the parts of the carry, as in TensorFlow."""
    if not isinstance(carry, tuple | list):
        return None
    for name, f in functions.items():
        if callable(f) and not _takes(f, 1) and _takes(f, len(carry)):
            parts = ", ".join(list(inspect.signature(f).parameters)[: len(carry)])
            return TypeError(
                f"{op}: {name} takes the {len(carry)} parts of the carry, as in TensorFlow; here it takes one "
                f"argument, the whole carry. Write `def {name}(carry): {parts} = carry`, or call tf.while_loop"
            )
    return None


def _takes(f: Any, number: int) -> bool:
    try:
        inspect.signature(f).bind(*[None] * number)
    except (TypeError, ValueError):
        return False
    return True
