"""The strategies "auto" and "undo". "auto" chooses a tape, an undo log or checkpoints by the residuals of one step."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jax_tensorarray import _gates
from jax_tensorarray._loops.checkpoint import Checkpoint
from jax_tensorarray._loops.linearize import Linearized, linearize
from jax_tensorarray._loops.replay import Replay, live_carries
from jax_tensorarray._loops.strategy import Choice, Strategy
from jax_tensorarray._loops.undo import Plan, plan, undone
from jax_tensorarray._loops.while_ import Loop
from jax_tensorarray._types import Array, bytes_of


def choose(linear: Linearized, max_steps: int) -> tuple[Choice, Plan | None]:
    """Choose undo if it stores at most half of a tape, because it need not store buffers. Otherwise choose the tape.

    Also choose a small tape if undo would recompute much of it.
    """

    def tape(reason: str, undone: int | None = None) -> tuple[Choice, None]:
        return Choice(residuals="tape", reason=reason, tape_bytes=taped, undo_bytes=undone), None

    carry, taped = list(linear.whole.out_avals)[: linear.num_outs], 0
    if not all(isinstance(t.size, int) for t in (*carry, *linear.taped)):
        return tape("a shape is a symbol of jax.export, so its size is not known")
    taped = bytes_of(linear.taped)
    if not any(t.ndim and bytes_of([t]) > _gates.LOGGED_BYTES for t in carry):
        return tape("the carry has no buffer of more than 1 kB")
    if not any(bytes_of([t]) > _gates.LOGGED_BYTES for t in linear.taped):
        return tape("no residual takes more than 1 kB")
    planned = plan(linear, max_steps)
    if not planned.saves_buffers:
        return tape("no residual is computed from a buffer that is updated by rows", planned.bytes)
    if 2 * planned.bytes > taped:
        return tape("undo would keep nearly as much as the tape", planned.bytes)
    if max_steps * taped <= _gates.TAPE_BYTES and planned.work > _gates.UNDONE_WORK * (taped - planned.bytes):
        return tape("the tape is small, and undo would take long to compute its values again", planned.bytes)
    reason = "the tape would hold a whole buffer, or something computed from one, for every step"
    return Choice(residuals="undo", reason=reason, tape_bytes=taped, undo_bytes=planned.bytes), planned


def choose_within(memory: int | None, max_steps: int, linear: Linearized, body: Any) -> tuple[Choice, Plan | None]:
    """Return the choice of `choose` if it fits into `memory` bytes for all steps, else undo or checkpoints if one fits.

    If nothing fits, return the choice with the fewest bytes. With checkpoints, a step runs at most nine times, the
    first run included.
    """
    choice, planned = choose(linear, max_steps)
    needed_bytes = max_steps * (choice.tape_bytes if choice.residuals == "tape" else choice.undo_bytes or 0)
    if memory is None or needed_bytes <= memory:
        return choice, planned
    reason = f'"{choice.residuals}" would take {needed_bytes} bytes for {max_steps} steps, and memory={memory}'
    smaller = plan(linear, max_steps, keeps_costly=False)
    other = replace(choice, undo_bytes=smaller.bytes, reason=reason)
    checkpoints, size = _checkpoints(memory, max_steps, body)
    others: list[tuple[int, Choice, Plan | None]] = [
        (needed_bytes, choice, planned),
        (smaller.bytes * max_steps, replace(other, residuals="undo"), smaller),
        (checkpoints * size, replace(other, residuals="checkpoint", checkpoints=checkpoints), None),
    ]
    fitting = (other for other in others if other[0] <= memory)
    return next(fitting, min(others, key=lambda other: other[0]))[1:]


def _checkpoints(memory: int, max_steps: int, body: Any) -> tuple[int, int]:
    """Return how many carries to store, and the size of one in bytes."""
    read = live_carries(body)
    size = max(1, bytes_of([c for c, is_read in zip(body.out_avals, read, strict=True) if is_read]))
    return min(max_steps, max(int(memory // size), _fewest(max_steps))), size


def _fewest(max_steps: int) -> int:
    """Return the fewest checkpoints with which no step of a reversed loop runs more than nine times."""
    return next(k for k in range(1, max_steps + 2) if math.comb(k + 8, k) >= max_steps)


@dataclass(frozen=True)
class Auto(Strategy):
    """Choose for each loop: a tape or, if a tape would hold whole buffers, the rows that `Undo` stores: "auto".

    A tape of at most 2 MiB for all steps is kept if `Undo` would take longer, because it computes a function such as
    `exp` of a whole buffer again. `residuals.explain` returns the choice.

    Args:
        memory: how many bytes the loop may store for `max_steps` steps, per example if the derivative is under
            `jax.vmap`. Room for all these steps is needed from the start, since XLA allocates the memory of a program
            before it runs. If the choice takes more, the loop uses `Undo` if this fits, else `Checkpoint` with as many
            carries as fit, and enough for every step to run nine times at most. If nothing fits, it uses the way that
            takes the fewest bytes.

    Raises:
        ValueError: `memory` is not a number of bytes.

    >>> import jax, jax.numpy as jnp
    >>> from jax_tensorarray import fori_loop
    >>> from jax_tensorarray.residuals import Auto
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

    def has_choice(self, keeps_much: Callable[[], bool]) -> bool:
        return self.memory is not None or keeps_much()

    def _chosen(self, linear: Linearized, body: Any, max_steps: int) -> tuple[Choice, Plan | None]:
        """Return the choice for a loop, and the plan to undo its steps or None."""
        return choose_within(self.memory, max_steps, linear, body)

    def choice(self, linear: Linearized, body: Any, max_steps: int) -> Choice:
        return self._chosen(linear, body, max_steps)[0]

    def instead_of(self, linear: Linearized, body: Any, max_steps: int) -> Strategy | None:
        choice, planned = self._chosen(linear, body, max_steps)
        if choice.checkpoints is not None:
            return Checkpoint(choice.checkpoints)
        return None if planned is None else _Planned(planned, self)


@dataclass(frozen=True)
class Checkpoints(Auto):
    """Store as many carries as fit into the memory, and at least enough to run each step at most nine times."""

    def has_choice(self, keeps_much: Callable[[], bool]) -> bool:
        return True

    def _chosen(self, linear: Linearized, body: Any, max_steps: int) -> tuple[Choice, None]:
        number, _ = _checkpoints(self.memory or 0, max_steps, body)
        choice = Choice(residuals="checkpoint", reason="the loop says so", tape_bytes=0, undo_bytes=None)
        return replace(choice, checkpoints=max(1, number)), None


@dataclass(frozen=True)
class _Planned(Strategy):
    """A plan that `Auto` has chosen instead of a tape. The derivatives of the loop have the strategy `then`."""

    plan: Plan
    then: Strategy

    def forward(self, loop: Loop, again: Replay) -> tuple[list[Array], Array, list[Array], Strategy]:
        return undone(loop, again, self.plan, self.then)


@dataclass(frozen=True)
class Undo(Strategy):
    """Store the rows that each step overwrites, and the values that cannot be recomputed: "undo".

    Use it for bodies that read a whole buffer in each step. A tape would hold a copy of the buffer for every step.

    >>> import jax, jax.numpy as jnp
    >>> from jax_tensorarray import fori_loop, ta_write
    >>> from jax_tensorarray.residuals import Undo
    >>> whole = lambda x: fori_loop(0, 2, lambda i, b: ta_write(b, i, jnp.dot(b, b)), x, residuals=Undo()).sum()
    >>> jax.grad(whole)(jnp.array([1.0, 2.0]))
    Array([22., 48.], dtype=float32)
    """

    def forward(self, loop: Loop, again: Replay) -> tuple[list[Array], Array, list[Array], Strategy]:
        linear = linearize(again.body, again.nonzero_consts, again.nonzero_carry)
        return undone(loop, again, plan(linear, again.max_steps), Auto())
