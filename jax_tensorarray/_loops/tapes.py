"""Tapes, as in reverse-mode automatic differentiation: buffers with a row for the residuals of each step of a loop.

A loop carries its tapes, but they are no operands. Its parameters have their types, and the loop allocates them when it
runs, so no other equation fills or copies them.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_tensorarray import _gates
from jax_tensorarray._jaxprs.jaxprs import flagged
from jax_tensorarray._loops.host import is_on_host, on_host, placed_as, ta_host_empty, ta_host_read, ta_host_write
from jax_tensorarray._ops.empty import empty_like
from jax_tensorarray._ops.part import ta_read_part, ta_write_part
from jax_tensorarray._ops.primitive import row_params, with_axis
from jax_tensorarray._ops.read import ta_read_p
from jax_tensorarray._ops.write import ta_write_p
from jax_tensorarray._types import Array

#: The type of a tape, and the number of batch axes before its axis of steps.
TapeType = tuple[Any, int]


def tapes_for(residuals: Sequence[Any], max_steps: int, offload: bool = False) -> tuple[TapeType, ...]:
    """Return tapes for residuals of these types.

    Residuals in host memory have their tapes there. With `offload` so do all other large ones.
    """
    types = [on_host(a) if offload and a.size * a.dtype.itemsize >= _gates.SENT_BYTES else a for a in residuals]
    # XLA computes equal zeros once and copies them for a second tape, so all tapes on the host have different lengths.
    # A slice is never larger than its array, so a tape on the host is not even empty for a loop without steps.
    lengths = [max(max_steps, 1) + k if is_on_host(a) else max_steps for k, a in enumerate(types)]
    return tuple((with_axis(a, n), 0) for a, n in zip(types, lengths, strict=True))


def batched_tapes(tapes: Sequence[TapeType], batched: Sequence[bool], size: int) -> tuple[TapeType, ...]:
    """Return the tapes for a batch. The flagged ones get a batch axis, and examples share the others."""
    return tuple((with_axis(t, size), n + 1) if b else (t, n) for (t, n), b in zip(tapes, batched, strict=True))


def tangent_tapes(tapes: Sequence[TapeType], nonzero: Sequence[bool]) -> tuple[TapeType, ...]:
    """Return the tapes for the tangents of the flagged tapes."""
    return tuple((aval.to_tangent_aval(), batch_dims) for aval, batch_dims in flagged(tapes, nonzero))


def avals_of(tapes: Sequence[TapeType]) -> list[Any]:
    return [aval for aval, _ in tapes]


def make(tapes: Sequence[TapeType]) -> list[Array]:
    """Return uninitialised tapes. Untouched rows cost nothing."""
    return [ta_host_empty(aval) if is_on_host(aval) else empty_like(aval) for aval in avals_of(tapes)]


_PARAMS = row_params("tape", "drop", is_tape=True)

#: The name scope of writes to tapes. The doctor finds it in the compiled program.
SCOPE = "ta_tape"


def record(
    tapes: Sequence[Array], k: Array, residuals: Sequence[Array], steps: Sequence[int | None] | None = None
) -> list[Array]:
    """Write the residuals of step `k` to the tapes.

    If a residual is the tape of an inner loop, its entry in `steps` is the number of the residual that counts its
    steps.
    """

    def write(tape: Array, residual: Array, n: int | None) -> Array:
        if is_on_host(jax.typeof(tape)):
            return ta_host_write(tape, k, residual)
        if n is None:
            with jax.named_scope(SCOPE):
                return ta_write_p.bind(tape, k, residual, **_PARAMS)
        return ta_write_part(tape, k, residual, largest(residuals[n]))

    return list(map(write, tapes, residuals, steps or [None] * len(tapes)))


def play_back(tapes: Sequence[Array], k: Array, steps: Sequence[int | None], types: Sequence[Any]) -> list[Array]:
    """Read the residuals of step `k`, of these types, from the tapes."""

    def read(tape: Array, n: int | None, aval: Any) -> Array:
        if is_on_host(jax.typeof(tape)):
            return placed_as(ta_host_read(tape, k), aval)
        if n is None:
            return ta_read_p.bind(tape, k, **_PARAMS)
        return ta_read_part(tape, k, largest(ta_read_p.bind(tapes[n], k, **_PARAMS)))

    return list(map(read, tapes, steps, types))


def largest(steps: Array) -> Array:
    """Return the number of steps until the last example has ended."""
    return jnp.max(steps, initial=0) if jnp.ndim(steps) else steps
