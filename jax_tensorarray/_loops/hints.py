"""Hints for programs that come from TensorFlow: what to write in place of the arguments of its loops."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_KEYWORDS = {
    "cond": "cond_fun",
    "body": "body_fun",
    "loop_vars": "init_val, one pytree",
    "maximum_iterations": "max_steps",
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
    """Wrap a loop so that a keyword of TensorFlow raises an error, which says what to write instead."""

    @functools.wraps(loop)
    def called(*args: Any, **keywords: Any) -> Any:
        for name in (k for k in keywords if k in _KEYWORDS):
            instead = _KEYWORDS[name]
            hint = "leave it out" if instead is None else f"write {instead}"
            raise TypeError(f"{loop.__name__}: {name} is a keyword of TensorFlow; {hint}")
        return loop(*args, **keywords)

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
                f"argument, the whole carry. Write `def {name}(carry): {parts} = carry`, or call tf_while_loop"
            )
    return None


def _takes(f: Any, number: int) -> bool:
    try:
        inspect.signature(f).bind(*[None] * number)
    except (TypeError, ValueError):
        return False
    return True
