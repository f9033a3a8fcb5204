"""Examine everything that a program compiles: which of its loops copy whole buffers, and what `in_place` changes."""

import contextlib
import os
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import jax
from jax.extend.core import jaxpr_as_fun

from jax_tensorarray import _compat, in_place
from jax_tensorarray._hlo import buffers as hlo_buffers
from jax_tensorarray.inspect._advice import OF_JAXLIB
from jax_tensorarray.inspect._copies import (
    MIN_BYTES,
    LoopCopies,
    LoopCopy,
    copies_in,
    counts,
    lines_of_today,
    readable,
    what_it_is,
)

#: Slower than this many times as long is no noise.
SLOWER = 1.15

#: A copy that costs less than this part of the worst one is counted, not listed.
_NOISE = 1e-3

WIDTH = 79


class LoopCopyError(RuntimeError):
    """The error of `forbid_copies`. `copies` are the operations on whole buffers that were found."""

    def __init__(self, program: str, copies: LoopCopies) -> None:
        super().__init__(f"forbid_copies: in {program}, {copies}")
        self.copies = copies


class Trial(NamedTuple):
    """The effect of `in_place` on a program: the copies left, and the seconds before and after if it could be run."""

    left: int
    before: float | None
    after: float | None

    @property
    def is_slower(self) -> bool:
        """Whether the program takes longer under `in_place`, by more than noise."""
        return self.before is not None and self.after is not None and self.after > SLOWER * self.before

    def __str__(self) -> str:
        text = "nothing left to copy" if not self.left else f"{self.left} of them left"
        if self.before is None or self.after is None:
            return f"{text}; not timed"
        if self.is_slower:
            return f"slower, {self.times}; {text}"
        gain = f"{self.before / self.after:.1f} times as fast" if self.after < self.before else "no faster"
        return f"{text}; {self.times}, {gain}"

    @property
    def times(self) -> str:
        """The times before and after, if it could be run."""
        if self.before is None or self.after is None:
            return ""
        return f"{milliseconds(self.before)} -> {milliseconds(self.after)}"


@dataclass
class Case:
    """A program that JAX has compiled and whose loops copy whole buffers."""

    program: str
    copies: LoopCopies
    trial: Trial | None = None
    failed: str = ""  #: why there is no trial
    jaxpr: Any = field(default=None, repr=False)
    ends: bool = False  #: whether it terminates for every input


@dataclass
class Report:
    """What JAX has compiled while it was watched.

    Attributes:
      programs: how many programs were compiled.
      loops: how many loops are in them.
      in_place: how many of these copy no whole buffer.
      unread: how many programs could not be examined.
      cases: the programs with loops that copy one, those that copy most first.
    """

    programs: int = 0
    loops: int = 0
    in_place: int = 0
    unread: int = 0
    cases: list[Case] = field(default_factory=list)

    @property
    def copies(self) -> list[LoopCopy]:
        """All operations on whole buffers, sorted by the bytes they move, most first."""
        return sorted((copy for case in self.cases for copy in case.copies), key=cost, reverse=True)

    @property
    def slower(self) -> list[Case]:
        """The programs that `try_in_place` has found to be slower under `in_place`: leave them as they are."""
        return [case for case in self.cases if case.trial is not None and case.trial.is_slower]

    def try_in_place(self, *, timed: bool = True, progress: Callable[[str], None] = lambda text: None) -> Self:
        """Try `in_place` on each program: count the copies that are left and, if `timed`, measure the gain.

        A program is run on zeros, and only if it has no side effects and XLA knows how many steps its loops take.
        Returns the report itself.
        """
        for n, case in enumerate(self.cases, 1):
            progress(f"trying in_place on {case.program} ({n} of {len(self.cases)})")
            if case.jaxpr is None:
                case.failed = "JAX had traced it before"
                continue
            try:
                case.trial = _tried(case, timed)
            except Exception as error:  # whatever it is, the report goes on
                case.failed = f"{type(error).__name__}: {error}".splitlines()[0]
        progress("")
        return self

    def as_json(self) -> dict[str, Any]:
        """Return the report as numbers and strings."""
        cases = [
            {
                "program": case.program,
                "copies": [copy._asdict() | {"cost": cost(copy)} for copy in case.copies],
                "in_place": None if case.trial is None else case.trial._asdict(),
            }
            for case in self.cases
        ]
        return {"programs": self.programs, "loops": self.loops, "loops_in_place": self.in_place, "cases": cases}

    def __str__(self) -> str:
        return self.text(False)

    def _repr_html_(self) -> str:
        """Be shown by notebooks as the page that `--html` writes."""
        from jax_tensorarray.inspect._page import fragment

        return fragment(self)

    def text(self, colours: bool) -> str:
        """Return the report in 79 columns."""

        def bold(text: str) -> str:
            return f"\x1b[1m{text}\x1b[0m" if colours else text

        unread = f" ({self.unread} could not be read)" if self.unread else ""
        compiled = f"{self.programs} programs were compiled{unread}, with {self.loops} loops"
        of_jaxlib = ["", OF_JAXLIB] if self.loops and _compat.small_loops_are_quadratic() else []
        if not self.cases:
            return "\n".join([compiled + (", all in place: none copies a buffer." if self.loops else "."), *of_jaxlib])
        lines = [bold(line) for line in textwrap.wrap(first_of_all(self), WIDTH)]
        lines += [bold(f"{compiled}: {self.loops - self.in_place} copy whole buffers, {self.in_place} do not.")]
        compiled_times = times_compiled(self)
        for number, (case, worth) in enumerate(worth_listing(self), 1):
            lines += ["", bold(f"{number}. {case.program}: {total_cost(worth)}")]
            if case.trial is not None:
                lines.append(f"   under in_place: {case.trial}")
            elif case.failed:
                lines += _wrapped(f"in_place could not be tried: {case.failed}")
            for copies in alike(worth):
                lines += ["", *_described(copies, compiled_times[place_of(copies[0])])]
        if small := sum(cost(copy) < least_cost(self) for copy in self.copies):
            lines += ["", f"{small} more move less than a thousandth of the first, and are not listed."]
        if any(case.trial is not None and not case.trial.is_slower for case in self.cases):
            lines += ["", "To keep what was tried, write jax.jit(jax_tensorarray.in_place(f))."]
        return "\n".join([*lines, *of_jaxlib])


def cost(copy: LoopCopy) -> int:
    """Return the bytes of a copy in all steps, or in one step if XLA does not know how many there are."""
    return copy.num_bytes * (copy.steps or 1)


def first_of_all(report: Report) -> str:
    """Return what a reader must know first: which programs are slower under `in_place`; else an empty text."""
    slower = ", ".join(f"{case.program} ({case.trial.times})" for case in report.slower if case.trial)
    return f"Leave as it is what in_place makes slower: {slower}." if slower else ""


def least_cost(report: Report) -> float:
    """Return the bytes below which a copy is not listed: a thousandth of the worst."""
    return _NOISE * max((cost(copy) for copy in report.copies), default=0)


def place_of(copy: LoopCopy) -> Any:
    """Return what copies have in common that are one for the reader, in whichever program and for whichever shapes."""
    return copy.file, copy.line, copy.kind, copy.in_gradient


def times_compiled(report: Report) -> Counter[Any]:
    """Return in how many programs each line copies a buffer."""
    return Counter(place for case in report.cases for place in {place_of(copy) for copy in case.copies})


def worth_listing(report: Report) -> list[tuple[Case, list[LoopCopy]]]:
    """Return the programs, each with its copies that move at least a thousandth of the worst.

    A line that is compiled several times, such as for several shapes, stands in the first of them.
    """
    least, seen, listed = least_cost(report), set[Any](), []
    for case in report.cases:
        copies = [copy for copy in case.copies if cost(copy) >= least and place_of(copy) not in seen]
        seen |= {place_of(copy) for copy in copies if copy.file}
        listed += [(case, copies)] if copies else []
    return listed


def total_cost(copies: Sequence[LoopCopy]) -> str:
    text = readable(sum(map(cost, copies)))
    return f"{text} a run" if all(copy.steps for copy in copies) else f"{text} a run or more"


def alike(copies: Sequence[LoopCopy]) -> list[list[LoopCopy]]:
    """Group copies of the same line, kind and advice, the most expensive first."""
    found: dict[Any, list[LoopCopy]] = {}
    for copy in sorted(copies, key=cost, reverse=True):
        key = (copy.file, copy.line, copy.kind, copy.shape, copy.dtype, copy.in_gradient, copy.advice)
        found.setdefault(key, []).append(copy)
    return list(found.values())


def _described(copies: Sequence[LoopCopy], compiled: int) -> list[str]:
    copy = copies[0]
    lines = [f"   {name_of_file(copy.file)}:{copy.line}" if copy.file else "   a line that XLA does not tell"]
    if copy.code:
        lines.append(f"       {copy.code}"[:WIDTH])
    return [*lines, *_wrapped(what_and_how_often(copies, compiled)), *_wrapped(copy.advice)]


def what_and_how_often(copies: Sequence[LoopCopy], compiled: int) -> str:
    """Describe copies that are alike, on a line that is compiled so many times, in one sentence."""
    copy = copies[0]
    again = f" It is compiled {compiled} times." if compiled > 1 and copy.file else ""
    steps = f"{copy.steps} steps" if copy.steps else "steps that XLA cannot count"
    times = f" ({len(copies)} times)" if len(copies) > 1 else ""
    if copy.for_gradient:
        return f"{what_it_is(copy)}{times}.{again}"
    return f"{what_it_is(copy)}{times}: {readable(copy.num_bytes)} a step, {steps}.{again}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="   ", subsequent_indent="   ")


def name_of_file(file: str) -> str:
    """Return the path relative to the current folder, or to the folder of Python's packages."""
    text = os.path.relpath(file)
    if text.startswith(".."):
        text = file
        for folder in ("site-packages", "dist-packages"):
            text = text.rpartition(f"{folder}{os.sep}")[2]
    return text


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


# --- watching --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def watch(*, min_bytes: int = MIN_BYTES) -> Iterator[Report]:
    """Examine all programs that JAX compiles in a block, in any thread, for what their loops copy.

    Programs that JAX has compiled before are not examined. Programs run as they are.

    Args:
      min_bytes: buffers smaller than this are left out.

    Yields:
      A `Report`, which is complete when the block ends. It prints as a text, and `try_in_place()` adds the effect that
      `in_place` would have on each program.

    Raises:
      NotImplementedError: this version of JAX does not tell what it compiles.

    >>> import jax, jax.numpy as jnp
    >>> from jax_tensorarray.inspect import watch
    >>> with watch() as report:
    ...     xs = jnp.ones((200, 64))
    ...     step = lambda i, ys: ys.at[i].set(jnp.sin(ys[i - 1]))
    ...     dx = jax.jit(jax.grad(lambda x: jax.lax.fori_loop(1, 200, step, x).sum()))(xs)
    >>> report.copies[0].kind, report.copies[0].shape, report.copies[0].steps
    ('copy', (200, 64), 199)
    """
    report = Report()

    def seen(name: str, jaxpr: Any, executable: Any) -> None:
        try:
            _look(report, name, jaxpr, executable, min_bytes)
        except Exception:  # the program must go on, even if its HLO cannot be read
            report.unread += 1

    with lines_of_today(), _compat.compilations(seen):
        try:
            yield report
        finally:
            report.cases.sort(key=lambda case: max(map(cost, case.copies)), reverse=True)


@contextlib.contextmanager
def forbid_copies(*, min_bytes: int = MIN_BYTES) -> Iterator[None]:
    """Raise an error if a program compiled in a block has loops that copy whole buffers; it is then not run.

    Args:
      min_bytes: buffers smaller than this may be copied.

    Raises:
      LoopCopyError: such a program is compiled. The message says where it copies, and what to do.
      NotImplementedError: this version of JAX does not tell what it compiles.

    >>> import jax, jax.numpy as jnp
    >>> from jax_tensorarray import in_place
    >>> from jax_tensorarray.inspect import forbid_copies
    >>> def loss(x):
    ...     return jax.lax.fori_loop(1, 200, lambda i, ys: ys.at[i].set(jnp.cos(ys[i - 1])), x).sum()
    >>> with forbid_copies():
    ...     dx = jax.jit(in_place(jax.grad(loss)))(jnp.ones((200, 64)))
    """

    def seen(name: str, jaxpr: Any, executable: Any) -> None:
        report = Report()
        _look(report, name, jaxpr, executable, min_bytes)
        for case in report.cases:
            raise LoopCopyError(case.program, case.copies)

    with lines_of_today(), _compat.compilations(seen):
        yield


def _look(report: Report, name: str, jaxpr: Any, executable: Any, min_bytes: int) -> None:
    report.programs += 1
    hlo = "\n".join(module.to_string() for module in executable.hlo_modules())
    loops = hlo_buffers.trip_counts(hlo)
    findings = list(hlo_buffers.findings(hlo)) if loops else []
    copies = copies_in(hlo, min_bytes, findings) if loops else LoopCopies()
    report.loops += len(loops)
    report.in_place += len(loops) - len({f.at[-1].name for f in findings if counts(f, min_bytes)})
    if copies:
        program = name.removeprefix("jit_")
        report.cases.append(Case(program, copies, jaxpr=jaxpr, ends=None not in loops))


def _tried(case: Case, timed: bool) -> Trial:
    plain, types = jaxpr_as_fun(case.jaxpr), [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in case.jaxpr.in_avals]
    least = min(copy.num_bytes for copy in case.copies)
    before, after = (jax.jit(f).lower(*types).compile() for f in (plain, in_place(plain)))
    left = len(copies_in(after.as_text() or "", least))
    if not (timed and case.ends) or case.jaxpr.effects:
        return Trial(left, None, None)
    zeros = [jax.numpy.zeros(a.shape, a.dtype) for a in types]
    as_is, healed = _seconds(before, zeros), _seconds(after, zeros)
    if healed > as_is:  # or the machine was busy meanwhile
        as_is, healed = min(as_is, _seconds(before, zeros)), min(healed, _seconds(after, zeros))
    return Trial(left, as_is, healed)


def _seconds(f: Callable[..., Any], args: Sequence[Any], limit: float = 1.0) -> float:
    """Return the shortest time of several runs, a second in all, or of one longer run."""
    took: list[float] = []
    jax.block_until_ready(f(*args))
    while not took or (sum(took) < limit and len(took) < 10):
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        took.append(time.perf_counter() - start)
    return min(took)
