"""Run a `ta_while` that also writes the residuals of every step to tapes.

    while cond(x): x = f(x)
    # becomes, for a body that also returns its residuals `r`
    while cond(x): x, r = body(x); tape = ta_write(tape, k, r); k += 1

The tapes are carries of the new loop. A counted loop has the number `k` of its step. Any other loop carries `k`, too.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jax_tensorarray._jaxprs import jaxprs
from jax_tensorarray._loops.tapes import avals_of, record, tapes_for
from jax_tensorarray._loops.while_ import Loop, steps_dtype
from jax_tensorarray._types import Array


def recorded(
    loop: Loop, body: Any, num_outs: int, steps: Sequence[int | None] | None = None, *, offload: bool = False
) -> tuple[list[Array], Any, Array, list[Array]]:
    """Run a loop with `body`, which returns the values to record after its results.

    `steps` is as for `record`. Return the results, the number of steps or None as in `Loop.run`, the number of runs of
    the body, and the tapes.
    """
    cond, options, tapes, n = loop.cond, loop.options, loop.options.tapes, len(loop.carry)
    # A counted loop has the number of its step. Another loop carries it, between its own carry and the tapes.
    start = [] if options.is_counted else [jnp.zeros((), steps_dtype(options.max_steps))]
    call, inputs, more = jaxprs.function(body), len(body.in_avals), len(start)
    before = inputs - len(tapes)

    def step(*args: Array) -> list[Array]:
        k, rest = args[0] if options.is_counted else args[before], args[before + more :]
        outs = call(*args[:before], *rest[: len(tapes)])
        new = record(rest[len(tapes) :], k, outs[num_outs:], steps)
        return [*outs[:n], *(k + 1 for _ in start), *outs[n:num_outs], *new]

    def goes_on(*args: Array) -> list[Array]:
        k = len(loop.cond_consts) + n
        return jaxprs.function(cond)(*args[:k], *args[k + more : k + more + len(tapes)])

    new = tapes_for(list(body.out_avals)[num_outs:], options.room, offload)
    types = [*map(jax.typeof, start), *avals_of([*tapes, *new])]
    if not options.is_counted:
        cond = jax.make_jaxpr(goes_on)(*cond.in_avals[: len(loop.cond_consts) + n], *types)
    outs, counted = loop._replace(
        carry=[*loop.carry, *start],
        cond=cond,
        body=jax.make_jaxpr(step)(*body.in_avals[:before], *types),
        options=replace(options, tapes=(*tapes, *new)),
    ).run()
    taken = loop.cond_consts[0] if options.is_counted else outs[n]
    return [*outs[:n], *outs[n + more : num_outs + more]], counted, taken, outs[num_outs + more :]
