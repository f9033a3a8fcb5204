"""Binomial checkpointing (Revolve): store a few carries, and run the loop again from these as often as necessary.

for k in range(4): x = f(x)
# reverse mode with room for two carries; `ct` is the cotangent of `x`
store x0 and x1 = f(x0)
ct = vjp(f, f(f(x1)))(ct); ct = vjp(f, f(x1))(ct); ct = vjp(f, x1)(ct); ct = vjp(f, x0)(ct)
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tensorarray._jaxprs.custom_jvp import differentiated_as
from jax_tensorarray._jaxprs.jaxprs import flagged, merge
from jax_tensorarray._loops.replay import Replay, live_carries
from jax_tensorarray._loops.strategy import Strategy
from jax_tensorarray._loops.tapes import largest
from jax_tensorarray._loops.while_ import Loop, WhileOptions, count, counter
from jax_tensorarray._ops.empty import empty_like
from jax_tensorarray._ops.primitive import with_axis
from jax_tensorarray._ops.read import ta_read
from jax_tensorarray._ops.write import ta_write
from jax_tensorarray._types import Array

_LIMIT = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Checkpoint(Strategy):
    """Store a few carries in all, placed so that the fewest steps run again (binomial checkpointing).

    Args:
        carries: how many carries to store at a time. A loop uses no more than `max_steps`.

    Raises:
        ValueError: `carries` is not a positive integer.

    >>> import jax, jax.numpy as jnp
    >>> from jax_tensorarray import fori_loop
    >>> from jax_tensorarray.residuals import Checkpoint
    >>> long = lambda x: fori_loop(0, 1000, lambda i, y: jnp.sin(y), x, residuals=Checkpoint(10))
    >>> print(f"{jax.grad(long)(1.0):.6f}")
    0.000124

    Griewank and Walther, "Algorithm 799: Revolve", 2000.
    """

    carries: int

    def __post_init__(self) -> None:
        if isinstance(self.carries, bool) or not isinstance(self.carries, int) or self.carries < 1:
            raise ValueError(f"Checkpoint: carries must be a positive integer, got {self.carries!r}")

    def pull_back(
        self, loop: Replay, steps: Array, consts: Any, init: Any, extra: Any, const_cts: Any, carry_cts: Any
    ) -> tuple[list[Array], list[Array]]:
        run: Callable[..., Any] = functools.partial(self._run_again, loop)
        if not loop.body.effects:  # JAX allows no effects in a function with rules of its own
            # A derivative of the loop in `_run_again` would reserve a tape for all steps in each of its steps.
            run = differentiated_as(loop.pull_back_by_tape, run)
        return run(steps, list(consts), list(init), list(const_cts), list(carry_cts))

    def _run_again(
        self, loop: Replay, steps: Array, consts: Any, init: Any, const_cts: Any, carry_cts: Any
    ) -> tuple[list[Array], list[Array]]:
        m, c = len(consts), len(const_cts)
        slots = max(1, min(self.carries, loop.max_steps))  # at most one carry per step
        reach = _Reach(loop.max_steps)
        # We do not store carries that a step only writes, such as rows of results. Their writes go to a dummy.
        live = live_carries(loop.body)

        def whole(stored: Sequence[Array]) -> list[Array]:
            return merge(stored, live, [_dummy(x) for x in init])

        def advance(by: Array, start: Array, steps: Array, consts: Any, stored: Any) -> list[Array]:
            def step(k: Array, steps: Array, start: Array, *rest: Array) -> list[Array]:
                return loop.step(start + k, steps, rest[:m], rest[m:])

            carry = whole(stored)
            types = map(jax.typeof, [steps, start, *consts, *carry])
            body = jax.make_jaxpr(step)(counter(by), *types)
            outs = count(by, [steps, start, *consts], carry, body=body, max_steps=loop.max_steps, reverse=False)
            return flagged(outs, live)

        # The slots store the carries before steps positions[0] < ... < positions[top]. Steps from `end` on are done.
        def goes_on(*args: Array) -> list[Array]:
            return [args[0] > 0]

        n = sum(live)

        def step(steps: Array, *args: Array) -> list[Array]:
            consts, (end, top, positions, *rest) = args[:m], args[m:]
            stored, cts = rest[:n], rest[n:]
            start = ta_read(positions, top, mode="drop")
            length, free = end - start, slots - top
            by = jnp.where(length == 1, 0, jnp.where(free == 1, length - 1, reach.split(length, free)))
            pulls = (length == 1) | (free == 1)
            carry = advance(by, start, steps, consts, [ta_read(t, top, mode="drop") for t in stored])
            free_slot = top + 1
            positions, *stored = (
                ta_write(t, free_slot, x, where=~pulls, mode="drop")
                for t, x in zip([positions, *stored], [start + by, *carry], strict=True)
            )

            def pull(cts: list[Array]) -> list[Array]:
                const_cts, carry_cts = loop.pull_back(end - 1, steps, consts, whole(carry), cts[:c], cts[c:])
                return [*const_cts, *carry_cts]

            cts = lax.cond(pulls, pull, lambda cts: cts, list(cts))
            end = jnp.where(pulls, end - 1, end)
            top = jnp.where(pulls, jnp.where(start == end, jnp.maximum(top - 1, 0), top), free_slot)
            return [end, top, positions, *stored, *cts]

        end = largest(steps)
        first = end * 0
        slots_of = [ta_write(empty_like(with_axis(jax.typeof(x), slots)), 0, x) for x in [first, *flagged(init, live)]]
        state = [end, first, *slots_of, *const_cts, *carry_cts]
        types = [*map(jax.typeof, state)]
        options = WhileOptions(min(2 * loop.max_steps + 1, _LIMIT), "the checkpointed loop")
        cond, body = jax.make_jaxpr(goes_on)(*types), jax.make_jaxpr(step)(*map(jax.typeof, [steps, *consts]), *types)
        outs, _ = Loop([], [steps, *consts], state, cond, body, options).run()
        cts = outs[3 + n :]
        return cts[:c], cts[c:]


def _dummy(x: Array) -> Array:
    return empty_like(jax.typeof(x)) if x.ndim else x


class _Reach:
    """`reach(s, r)`: the most steps of a loop that `s` carries can reverse if no step runs more than `r` times.

    It is the binomial coefficient of s + r over s (Griewank 1992), limited to `max_steps`.
    """

    def __init__(self, max_steps: int) -> None:
        # Rows for the smaller of s and r, from 2 on, up to `max_steps`: a few times sqrt(max_steps) numbers in all.
        enough = min(max_steps, _LIMIT)
        b = np.arange(2 + math.isqrt(2 * enough))
        rows = [(b + 1) * (b + 2) // 2]
        while rows[-1][min(len(rows) + 1, len(rows[-1]) - 1)] < enough:
            row = np.cumsum(rows[-1])
            rows.append(row[: 1 + np.searchsorted(row, enough)])
        sizes = np.array([len(row) for row in rows])
        self.last, self.first = sizes - 1, np.cumsum(sizes) - sizes
        self.table = np.minimum(np.concatenate(rows), _LIMIT).astype(np.int32)

    def __call__(self, s: Array, r: Array) -> Array:
        few, many = jnp.minimum(s, r), jnp.maximum(s, r)
        row = jnp.clip(few - 2, 0, len(self.first) - 1)
        last, first = jnp.asarray(self.last)[row], jnp.asarray(self.first)[row]
        steps = jnp.asarray(self.table)[first + jnp.minimum(many, last)]
        return jnp.where(few < 2, jnp.where(few == 1, 1 + jnp.minimum(many, _LIMIT - 1), few == 0), steps)

    def split(self, length: Array, free: Array) -> Array:
        """Return how many steps to run before storing a carry, for the fewest in all (Griewank and Walther 2000)."""
        most = int(self.last[0])

        def halve(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = bounds
            middle = (low + high) // 2
            enough = self(free, middle) >= length
            return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

        _, r = lax.fori_loop(0, most.bit_length(), halve, (length * 0 + 1, length * 0 + most))
        by = jnp.maximum(self(free, r - 2), length - self(free - 1, r))
        return jnp.clip(by, 1, length - 1).astype(length.dtype)
