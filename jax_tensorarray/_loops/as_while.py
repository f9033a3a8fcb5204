"""Lower scans and counted loops to a `ta_while` with a condition, which carries the number of its step.

    carry, ys = lax.scan(f, carry, xs)
    # becomes the loop of
    for k in range(length):
        carry, y = f(carry, ta_read(xs, k))
        ys = ta_write(ys, k, y)

A reverse loop counts down.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from jax_tensorarray import _compat
from jax_tensorarray._jaxprs import jaxprs, registry
from jax_tensorarray._loops.while_ import Loop, WhileOptions
from jax_tensorarray._ops.read import ta_read
from jax_tensorarray._ops.write import ta_write
from jax_tensorarray._types import Array


def numbered(f: Callable[..., Sequence[Any]], steps: Any, *, reverse: bool) -> Callable[[Sequence[Any]], Any]:
    """Return the body of a loop that calls `f(k, *carry)` for each number `k` of `steps` steps.

    Its carry is the number of steps taken and the carry of `f`.
    """

    def step(state: Sequence[Any]) -> Any:
        n, *carry = state
        return (n + 1, *f(steps - 1 - n if reverse else n, *carry))

    return step


def by_rows(f: Callable[[Any, Any], tuple[Any, Any]], xs: Any) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """Return a step of a scan as a function `(k, carry, ys)` that reads row `k` of `xs` and writes row `k` of `ys`."""

    def step(k: Any, carry: Any, ys: Any) -> tuple[Any, Any]:
        carry, y = f(carry, row_of(xs, k))
        return carry, jax.tree.map(lambda stack, row: ta_write(stack, k, row, mode="drop"), ys, y)

    return step


def row_of(xs: Any, k: Any) -> Any:
    """Return row `k` of each array of `xs`."""
    return jax.tree.map(lambda x: ta_read(x, k, mode="drop"), xs)


@_compat.cached
def scan_as_while(jaxpr: Jaxpr, num_consts: int, num_carry: int, length: int, reverse: bool) -> tuple[Any, Any]:
    """Return the condition and the body of a `ta_while` that replaces a scan.

    Its consts are the consts and xs of the scan. Its carry is the number of the step, the carry of the scan, and the
    ys.
    """
    consts, carry, xs = registry.Body(jaxpr, 0, 0, num_consts, num_carry).split(list(jaxpr.in_avals))
    ys = list(jaxpr.out_avals)[num_carry:]
    xs, ys = ([jax.ShapeDtypeStruct((length, *t.shape), t.dtype) for t in types] for types in (xs, ys))
    state = (jnp.int32(0), carry, ys)

    def step(consts: list[Array], xs: list[Array], state: Any) -> Any:
        def call(carry: list[Array], row: list[Array]) -> tuple[list[Array], list[Array]]:
            outs = jaxprs.function(jaxpr)(*consts, *carry, *row)
            return outs[:num_carry], outs[num_carry:]

        return numbered(by_rows(call, xs), length, reverse=reverse)(state)

    return jax.make_jaxpr(lambda state: [state[0] < length])(state), jax.make_jaxpr(step)(consts, xs, state)


def count_as_while(loop: Loop) -> Loop:
    """Return a loop with a condition that replaces a counted loop.

    The number of steps is also its first const, and the number of the step is its first carry.
    """
    cond, body = _count_as_while(loop.body, len(loop.body_consts), loop.options.reverse)
    (steps,) = loop.cond_consts
    consts, carry = [steps, *loop.body_consts], [steps * 0, *loop.carry]
    options = WhileOptions(loop.options.max_steps, loop.options.source, tapes=loop.options.tapes)
    return Loop([steps], consts, carry, cond, body, options)


@_compat.cached
def _count_as_while(body: Any, num_consts: int, reverse: bool) -> tuple[Any, Any]:
    steps, *types = body.in_avals
    consts, carry = types[:num_consts], types[num_consts:]

    def step(steps: Array, consts: list[Array], state: list[Array]) -> Any:
        def call(k: Array, *carry: Array) -> list[Array]:
            return jaxprs.function(body)(k, *consts, *carry)

        return numbered(call, steps, reverse=reverse)(state)

    cond = jax.make_jaxpr(lambda steps, state: [state[0] < steps])(steps, [steps, *carry])
    return cond, jax.make_jaxpr(step)(steps, consts, [steps, *carry])
