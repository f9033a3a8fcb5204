"""The programs that JAX has compiled, what is wrong with each, and what `in_place` changes."""

from collections.abc import Set
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from jax_tensorarray._compat import JittedFunction
from jax_tensorarray.doctor._arguments import CountedProgram
from jax_tensorarray.doctor._copies import LoopCopies, LoopCopy, cost
from jax_tensorarray.doctor._growth import Growth
from jax_tensorarray.doctor._jitted import Line
from jax_tensorarray.doctor._kept import SourceLine
from jax_tensorarray.doctor._text import counted, factor, milliseconds

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

    @property
    def helps(self) -> bool:
        """Whether no copies are known to be left, and the program is faster or was not timed."""
        return not self.left and self._is_faster_or_untimed

    def as_json(self) -> dict[str, Any]:
        growth = None if self.growth is None else [growth and growth.as_json() for growth in self.growth]
        return self._asdict() | {"growth": growth, "line": None if self.line is None else self.line._asdict()}

    @property
    def is_worth_keeping(self) -> bool:
        """Whether `in_place` was tried, and the program is faster or was not timed."""
        return self.is_of_in_place and self._is_faster_or_untimed

    @property
    def _is_faster_or_untimed(self) -> bool:
        return self.before is None or self.after is None or self.after < self.before

    @property
    def is_slower(self) -> bool:
        """Whether the program takes longer than as it is, by more than noise."""
        return self.before is not None and self.after is not None and self.after > SLOWER * self.before

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
        if self.before is None or self.after is None:
            return "; ".join([*left, "not timed"])
        if self.is_slower:
            return "; ".join([f"slower, {self.times}", *left])
        gain = f"{factor(self.before / self.after)} times as fast" if self.after < self.before else "no faster"
        return "; ".join([*left, f"{self.times}, {gain}"])


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
    def cost(self) -> int:
        """The bytes that its worst finding moves."""
        return max([*map(cost, self.copies), *(copy.cost for copy in self.copies.arguments)], default=0)


@dataclass(kw_only=True)
class Programs:
    """The subjects of a `Report`."""

    programs: int = 0
    loops: int = 0
    in_place: int = 0
    unread: int = 0
    cases: list[CompiledProgram] = field(default_factory=list)
    #: Programs with loops in which nothing was found.
    _others: list[CompiledProgram] = field(default_factory=list, init=False, repr=False)

    @property
    def copies(self) -> list[LoopCopy]:
        """All operations on whole buffers, sorted by the bytes they move, most first."""
        return sorted((copy for case in self.cases for copy in case.copies), key=cost, reverse=True)

    @property
    def slower(self) -> list[CompiledProgram]:
        """The programs that `try_in_place` has found to be slower under `in_place`: leave them as they are."""
        return [case for case in self.cases if (t := case.trial) is not None and t.is_of_in_place and t.is_slower]

    def as_json(self) -> dict[str, Any]:
        """Return the report as numbers and strings."""
        cases = [
            {
                "program": case.program,
                "copies": [asdict(copy) | {"cost": cost(copy)} for copy in case.copies],
                "arguments": [asdict(copy) | {"cost": copy.cost} for copy in case.copies.arguments],
                "loop": None if case.loop is None else case.loop._asdict(),
                "kept": [asdict(kept) for kept in case.copies.kept],
                "in_place": None if case.trial is None else case.trial.as_json(),
            }
            for case in self.cases
        ]
        return {"programs": self.programs, "loops": self.loops, "loops_in_place": self.in_place, "cases": cases}
