"""The strategies of reverse mode: what each stores of the steps, and how it reconstructs a step.

The tape is here. `checkpoint`, `inverse`, `recompute` and `undo` have one strategy each, and `auto` has those that
choose.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jax_tensorarray._jaxprs.axis import Axis
from jax_tensorarray._loops.linearize import Linearized
from jax_tensorarray._types import Array

if TYPE_CHECKING:
    from jax_tensorarray._loops.replay import Replay
    from jax_tensorarray._loops.while_ import Loop


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How a loop stores the values of its steps for reverse mode, as `residuals.explain` finds.

    Attributes:
        residuals: "tape", "undo" or "checkpoint" if the loop chooses, the name of the class that it was given, or
            "none" if the loop has no derivative in reverse mode.
        reason: why.
        tape_bytes: how many bytes plain JAX, or a tape, stores per step.
        undo_bytes: how many bytes "undo" stores per step; None if it was not considered.
        checkpoints: how many carries "checkpoint" stores; None for any other choice.
        loop: the kind of the loop, and its file and line.
        steps: how many steps it takes at most; None if there is no bound.
        largest: the type of the largest array that the tape stores per step.
    """

    residuals: str
    reason: str
    tape_bytes: int
    undo_bytes: int | None
    checkpoints: int | None = None
    loop: str = ""
    steps: int | None = None
    largest: str = ""

    def __str__(self) -> str:
        times, unit = (self.steps, "in all") if self.steps else (1, "per step")
        sizes = ("tape", self.tape_bytes), ("undo", self.undo_bytes)
        texts = [f"{name} {times * n / 1e6:.3g} MB" for name, n in sizes if n]
        amounts = f" ({', '.join(texts)} {unit})" if texts else ""
        return f"{self.loop}: {self.residuals}: {self.reason}{amounts}"


class Strategy:
    """A way to reconstruct steps in reverse mode, by two functions.

    `forward` runs the loop, and returns what it stores. `pull_back` visits the steps from the last to the first. It is
    not a function of one step, because `Checkpoint` runs on from stored carries, and `Undo` restores only buffers, not
    the whole carry. All other methods have a default.
    """

    #: Whether the loop stores a tape, unless `instead_of` returns a better strategy.
    tapes = False

    #: Whether that tape is in the memory of the host.
    offload = False

    #: Whether `batched` needs a batch axis in the whole carry.
    batches_all = False

    def prepare(self, body: Any, consts: Any, tree: Any, leaves: Any, source: str) -> tuple["Strategy", Any, Any]:
        """Return the strategy, the body and the consts of a loop at `source`.

        `tree` and `leaves` are the user's carry. A leaf that the body returns unchanged is an array, because JAX makes
        it a const. Any other leaf is the number of a carry of the loop.
        """
        return self, body, consts

    def of_second(self) -> "Strategy":
        """Return the strategy, before `prepare`, for a loop that carries a bool and then the user's carry."""
        return self

    def has_choice(self, keeps_much: Callable[[], bool]) -> bool:
        """Return whether this strategy may be better for a scan than its tape. `keeps_much` analyses the body."""
        return True

    def choice(self, linear: Linearized, body: Any, max_steps: int) -> Choice:
        """Return the choice for a loop of at most `max_steps` steps, from its linearized body."""
        return Choice(residuals=type(self).__name__, reason="the loop says so", tape_bytes=0, undo_bytes=None)

    def instead_of(self, linear: Linearized, body: Any, max_steps: int) -> "Strategy | None":
        """Return a strategy that is better than the tape, or None."""
        return None

    def forward(self, loop: "Loop", again: "Replay") -> tuple[list[Array], Array, list[Array], "Strategy"]:
        """Run the loop. Return the carry, the steps taken, the operands `extra` of `pull_back`, and its strategy."""
        outs, steps = loop.run()
        return outs, steps, [], self

    def batched(self, axis: Axis, pred_batched: bool, consts_batched: Any, consts: Any, init: Any) -> "Strategy":
        """Return the strategy for a batch. The flagged consts and the whole carry have a batch axis."""
        return self

    def with_tangents(
        self, consts: Sequence[bool], carry: Sequence[bool], extra: list[bool]
    ) -> tuple["Strategy", list[bool]]:
        """Return the strategy for the flagged tangents of the loop, and which operands of `extra` it needs."""
        return self, extra

    def pull_back(
        self, loop: "Replay", steps: Array, consts: Any, init: Any, extra: Any, const_cts: Any, carry_cts: Any
    ) -> tuple[list[Array], list[Array]]:
        """Return the cotangents of the consts, added to `const_cts`, and of the carry before the loop.

        `carry_cts` are the cotangents of the carry after the loop.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Tape(Strategy):
    """Store all values that the derivative of a step needs, for every step: "tape".

    Args:
        offload: whether the tape is in host memory. The device holds no part of it, whatever `max_steps` is. The loop
            sends each row to the host while it goes on, and fetches the row one step before it is needed. On a CPU,
            which is its own host, this gains nothing.

    >>> import jax
    >>> from jax_tensorarray import fori_loop
    >>> from jax_tensorarray.residuals import Tape
    >>> power = lambda x: fori_loop(0, 3, lambda i, y: x * y, 1.0, residuals=Tape(offload=True))
    >>> print(jax.grad(power)(2.0))
    12.0
    """

    offload: bool = False

    tapes = True

    def has_choice(self, keeps_much: Callable[[], bool]) -> bool:
        return False

    def __post_init__(self) -> None:
        if not isinstance(self.offload, bool):
            raise TypeError(f"{type(self).__name__}: offload must be True or False, got {self.offload!r}")
