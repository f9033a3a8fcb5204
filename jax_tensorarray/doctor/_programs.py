"""A program that JAX has compiled, what is wrong with it, and what `in_place` changes."""

from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from jax_tensorarray._compat import JittedFunction
from jax_tensorarray.doctor._advice import OF_GROWTH
from jax_tensorarray.doctor._arguments import CountedProgram
from jax_tensorarray.doctor._copies import LoopCopies
from jax_tensorarray.doctor._growth import Growth
from jax_tensorarray.doctor._jitted import Line
from jax_tensorarray.doctor._text import SourceLine, counted, factor, milliseconds

#: Slower than this many times as long is not noise.
SLOWER = 1.15

#: The end of `Trial.how` if `in_place` was tried on the finished program, which may have been differentiated before.
OF_FINISHED = ", tried on the finished program"


class Trial(NamedTuple):
    """The effect of `in_place` on a program: the copies left, and the seconds before and after if it could be run.

    There are no copies to be `left` if only the time or the memory of the program has been found to grow.

    `how` says what was tried: the doctor also donates the arguments that are copied. If the number of steps could be
    changed, `growth` has the time and the memory with 4 times the steps, before and after. `memory` is what XLA
    allocates for results and temporary arrays, if the program was run. `line` is the code that keeps what was tried.
    `note` says why the growth after may be wrong, or cannot be less.
    """

    left: int | None
    before: float | None
    after: float | None
    how: str = "under in_place"
    growth: tuple[Growth, Growth | None] | None = None
    memory: tuple[int, int] | None = None
    line: Line | None = None
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        growth = None if self.growth is None else [growth and growth.as_json() for growth in self.growth]
        return self._asdict() | {"growth": growth, "line": None if self.line is None else self.line._asdict()}

    @property
    def is_faster(self) -> bool:
        """Whether the program is faster, or was not timed."""
        return self.before is None or self.after is None or self.after < self.before

    @property
    def is_slower(self) -> bool:
        """Whether the program takes longer than unchanged, by more than noise."""
        return not self.is_faster and (self.after or 0) > SLOWER * (self.before or 0)

    @property
    def is_of_in_place(self) -> bool:
        """Whether `in_place` was tried, not donation alone."""
        return "in_place" in self.how

    @property
    def times(self) -> str:
        """The times before and after, if it could be run."""
        if self.before is None or self.after is None:
            return ""
        return f"{milliseconds(self.before)} -> {milliseconds(self.after)}"

    def __str__(self) -> str:
        text = "nothing left to copy" if self.left == 0 else f"{counted(self.left or 0, 'copy', 'copies')} left"
        left = [] if self.left is None else [text]
        if not self.before or not self.after:
            return "; ".join([*left, "not timed"])
        if self.is_slower:
            return "; ".join([f"slower, {self.times}", *left])
        gain = f"{factor(self.before / self.after)} times as fast" if self.is_faster else "no faster"
        return "; ".join([*left, f"{self.times}, {gain}"])


class SlowLoop(SourceLine):
    """The line of a loop whose time or memory grows faster than its steps."""

    cost, advice, reason = 0, OF_GROWTH, ""
    at = key = alike = property(lambda self: self)

    def describe(self, alike: Sequence["SlowLoop"]) -> list[str]:
        return []


@dataclass
class CompiledProgram:
    """A program that JAX has compiled, and what is wrong with it: whole buffers or arguments are copied, or it grows.

    `copies.arguments` are the arguments, `copies.kept` what its gradient keeps.
    """

    program: str
    copies: LoopCopies
    trial: Trial | None = None
    failed: str = ""  #: why there is no trial
    jaxpr: Any = field(default=None, repr=False)
    ends: bool = False  #: whether it terminates for every input
    loop: SourceLine | None = None  #: the first loop, if only time or memory are too much
    calls: CountedProgram | None = field(default=None, repr=False)
    donated: Set[int] = frozenset()  #: the numbers of the donated arguments
    function: JittedFunction | None = field(default=None, repr=False)  #: the function of the user, if it was jitted

    @property
    def can_grow(self) -> bool:
        """Whether it can run with fewer steps: JAX has shown its jaxpr, and it terminates."""
        return self.jaxpr is not None and self.ends

    @property
    def findings(self) -> list[Any]:
        """Each is a `LoopCopy`, an `ArgumentCopy` or a `SlowLoop`."""
        return [*self.copies, *self.copies.arguments, *([] if self.loop is None else [SlowLoop(*self.loop)])]

    @property
    def cost(self) -> int:
        """The bytes that its worst finding moves."""
        return max((finding.cost for finding in self.findings), default=0)

    def as_json(self) -> dict[str, Any]:
        return {
            "program": self.program,
            "copies": [asdict(copy) | {"cost": copy.cost} for copy in self.copies],
            "arguments": [asdict(copy) | {"cost": copy.cost} for copy in self.copies.arguments],
            "loop": None if self.loop is None else self.loop._asdict(),
            "kept": [asdict(kept) for kept in self.copies.kept],
            "in_place": None if self.trial is None else self.trial.as_json(),
        }
