"""What a program of the catalogue is, and the orders of `in_place`, `jax.grad` and `jax.vmap` in which it runs."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

EXAMPLES = 3


class Loop(NamedTuple):
    """A program with a loop over buffers. Under `in_place` no step makes all rows of one anew."""

    f: Callable[..., Any]
    args: tuple[Any, ...]
    buffer: Any  #: an array like its smallest buffer, or the type of one
    orders: tuple[str, ...]  #: the names of the orders in which it is looked at
    by: Any = 0  #: the arguments that it is differentiated by
    batch: tuple[Any, ...] | None = None  #: the arguments of `EXAMPLES` examples, if not those of `examples` below
    whole: Mapping[str, int] = {}  #: how many operations make all rows anew: 0 in an order that is not here
    rtol: float = 1e-9
    is_for_barriers: bool = False  #: it is in place where XLA keeps ordering barriers: see `barriers_hold`
    is_interpreted: bool = True  #: NumPy computes it in no time


def total(f):
    """A number that depends on all that a function returns."""
    return lambda *args: sum(jnp.sum(jnp.sin(x)) if jnp.ndim(x) else x for x in jax.tree.leaves(f(*args)))


#: What becomes of a function: `g` is `in_place`, or nothing for an oracle. It is differentiated by the arguments `by`.
ORDERS: dict[str, Callable[..., Any]] = {
    "forward": lambda f, g, by: g(f),
    "vmap": lambda f, g, by: jax.vmap(g(f)),
    "in_place(vmap)": lambda f, g, by: g(jax.vmap(f)),
    "grad(in_place)": lambda f, g, by: jax.grad(g(total(f)), by),
    "in_place(grad)": lambda f, g, by: g(jax.grad(total(f), by)),
    "vmap(grad)": lambda f, g, by: jax.vmap(jax.grad(g(total(f)), by)),
    "in_place(vmap(grad))": lambda f, g, by: g(jax.vmap(jax.grad(total(f), by))),
}


def examples(args):
    """Return the arguments of `EXAMPLES` examples: smaller floats, and integers in another order."""

    def of(x):
        x = np.asarray(x)
        if np.issubdtype(x.dtype, np.floating):
            return np.stack([x, 0.7 * x, -0.3 * x]).astype(x.dtype)
        return np.stack([x, x[::-1], np.roll(x, 3, 0)]) if x.ndim else x + np.arange(3, dtype=x.dtype)

    return jax.tree.map(of, args)


def arguments(loop: Loop, order: str) -> tuple[Any, ...]:
    """Return the arguments of a program in an order."""
    if "vmap" not in order:
        return loop.args
    return examples(loop.args) if loop.batch is None else loop.batch


def bytes_of(loop: Loop, order: str) -> int:
    """Return the size of its smallest buffer in an order."""
    buffer = loop.buffer
    return int(np.prod(buffer.shape)) * np.dtype(buffer.dtype).itemsize * (EXAMPLES if "vmap" in order else 1)
