"""Run a `ta_while` that also writes the residuals of every step to tapes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jax_tensorarray._jaxprs import jaxprs
from jax_tensorarray._loops.tapes import avals_of, record, tapes_for
from jax_tensorarray._loops.while_ import Loop, counting

Array = jax.Array


def recorded(
    loop: Loop, body: Any, num_outs: int, steps: Sequence[int | None] | None = None, *, offload: bool = False
) -> tuple[list[Array], Any, Array, list[Array]]:
    """Run a loop with `body`, which returns, after its results, the values to be recorded.

    `steps` is as for `record`. Return the results, the number of steps if the loop counts them, how often the body
    was run, and the tapes.
    """
    cond, options, tapes, n = loop.cond, loop.options, loop.options.tapes, len(loop.carry)
    max_steps: int = options.max_steps  # type: ignore[assignment]
    call, predicate, inputs = jaxprs.function(body), jaxprs.function(cond), len(body.in_avals)
    before = inputs - len(tapes)  # the counter comes between the carry and the tapes

    def goes_on(*args: Array) -> list[Array]:
        k = len(loop.cond_consts) + n
        return predicate(*args[:k], *args[k + 1 : k + 1 + len(tapes)])

    def step(*args: Array) -> list[Array]:
        k, old = args[before], [*args[:before], *args[before + 1 : inputs + 1]]
        outs = call(*old)
        new = record(args[inputs + 1 :], k, outs[num_outs:], steps)
        return [*outs[:n], k + 1, *outs[n:num_outs], *new]

    start = jnp.zeros((), counting(max_steps))
    new = tapes_for(list(body.out_avals)[num_outs:], max_steps, offload)
    types, cond_types = [jax.typeof(start), *avals_of([*tapes, *new])], list(cond.in_avals)
    outs, taken = loop._replace(
        carry=[*loop.carry, start],
        cond=jax.make_jaxpr(goes_on)(*cond_types[: len(cond_types) - len(tapes)], *types),
        body=jax.make_jaxpr(step)(*body.in_avals[:before], *types),
        options=replace(options, tapes=(*tapes, *new)),
    ).run()
    return [*outs[:n], *outs[n + 1 : num_outs + 1]], taken, outs[n], outs[num_outs + 1 :]
