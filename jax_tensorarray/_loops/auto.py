"""The strategy of `residuals="auto"`: what each step would keep decides."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jax_tensorarray._loops.checkpoint import Checkpoint
from jax_tensorarray._loops.linearize import Linearized
from jax_tensorarray._loops.replay import live_carries
from jax_tensorarray._loops.strategy import Strategy
from jax_tensorarray._loops.undo import Undo, log


def bytes_of(types: Sequence[Any]) -> int:
    return sum(t.size * t.dtype.itemsize for t in types)


class Choice(NamedTuple):
    """The choice of `residuals="auto"`, its reason, and the bytes that each step would keep."""

    residuals: str
    reason: str
    tape_bytes: int
    undo_bytes: int | None
    checkpoints: int | None = None


def choose(linear: Linearized, body: Any) -> Choice:
    """Choose undo if the tape would hold, for every step, a buffer that the body updates by rows; else the tape."""
    carry = body.out_avals
    if not all(isinstance(t.size, int) for t in (*carry, *linear.taped)):
        return Choice("tape", "a shape is a symbol of jax.export, so nobody knows how large it is", 0, None)
    largest = max((t.size * t.dtype.itemsize for t in linear.taped), default=0)
    taped = bytes_of(linear.taped)
    if not any(1024 < c.size * c.dtype.itemsize <= largest and c.ndim for c in carry):
        return Choice("tape", "no residual is as large as a buffer of the carry", taped, None)
    undone, refused = _undo_bytes(body)
    if undone is None:
        k, why = next(iter(refused.items()))
        return Choice("tape", f"carry number {k}, {carry[k].str_short()}, cannot be rewound: {why}", taped, None)
    if undone >= taped:
        return Choice("tape", "the log would be as large as the tape", taped, undone)
    return Choice("undo", "the tape would hold a whole buffer for every step", taped, undone)


def _undo_bytes(body: Any) -> tuple[int | None, dict[int, str]]:
    """Return the bytes that undo would keep of a step, or None, and why the carries cannot be rewound."""
    logged, refused = log(body)
    kept = [c for c, r in zip(body.out_avals, logged.rewound, strict=True) if not r]
    return None if refused else bytes_of([*list(logged.jaxpr.out_avals)[len(body.out_avals) :], *kept]), refused


def choose_within(memory: int | None, max_steps: int, linear: Linearized, body: Any) -> Choice:
    """Return the choice of `choose` if it fits into `memory` bytes for all steps, else undo or checkpoints if one fits.

    If nothing fits, the choice with the fewest bytes is returned. There are enough checkpoints for every step to run
    nine times at most.
    """
    choice = choose(linear, body)
    kept = max_steps * (choice.tape_bytes if choice.residuals == "tape" else choice.undo_bytes or 0)
    if memory is None or kept <= memory:
        return choice
    reason = f'"{choice.residuals}" would take {kept} bytes for {max_steps} steps, and memory={memory}'
    undone, _ = _undo_bytes(body)
    other = choice._replace(undo_bytes=undone, reason=reason)
    others = [(kept, choice)]
    if undone is not None:
        others.append((undone * max_steps, other._replace(residuals="undo")))
    read = live_carries(body)
    size = max(1, bytes_of([c for c, is_read in zip(body.out_avals, read, strict=True) if is_read]))
    checkpoints = min(max_steps, max(int(memory // size), _fewest(max_steps)))
    others.append((checkpoints * size, other._replace(residuals="checkpoint", checkpoints=checkpoints)))
    fitting = (other for size, other in others if size <= memory)
    return next(fitting, min(others, key=lambda other: other[0])[1])


def _fewest(max_steps: int) -> int:
    """Return the fewest checkpoints with which a loop is reversed and no step is run more than nine times."""
    return next(k for k in range(1, max_steps + 2) if math.comb(k + 8, k) >= max_steps)


@dataclass(frozen=True)
class Auto(Strategy):
    """Let a loop choose what it keeps: a tape or, if a tape would hold whole buffers, what `Undo` keeps: "auto".

    `choice_of_residuals` returns the choice.

    Args:
        memory: how many bytes may be kept for `max_steps` steps, per example if the derivative is under `jax.vmap`.
            There is room for all these steps from the start, since XLA allocates the memory of a program before it
            runs. If the choice takes more, it is `Undo` if this fits, else `Checkpoint` with as many carries as fit,
            and enough for every step to run nine times at most. If nothing fits, it is what takes the fewest bytes.

    Raises:
        ValueError: `memory` is no number of bytes.

    >>> import jax, jax.numpy as jnp
    >>> from jax_tensorarray import Auto, fori_loop
    >>> long = lambda x: fori_loop(0, 1000, lambda i, y: jnp.sin(y), x, residuals=Auto(memory=400))
    >>> print(f"{jax.grad(long)(1.0):.6f}")
    0.000124
    """

    memory: int | None = None

    tapes = True

    def __post_init__(self) -> None:
        memory = 0 if self.memory is None else self.memory
        if isinstance(memory, bool) or not isinstance(memory, int | np.integer) or memory < 0:
            raise ValueError(f"Auto: memory must be a number of bytes, got {memory!r}")

    def instead_of(self, linear: Linearized, body: Any, max_steps: int) -> Strategy | None:
        choice = choose_within(self.memory, max_steps, linear, body)
        if choice.checkpoints is not None:
            return Checkpoint(choice.checkpoints)
        return Undo() if choice.residuals == "undo" else None
