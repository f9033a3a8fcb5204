"""Examine everything that a program compiles: which of its loops copy whole buffers, and what `in_place` changes."""

import contextlib
import operator
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from jax_tensorarray import _compat
from jax_tensorarray._hlo import buffers as hlo_buffers
from jax_tensorarray._hlo import text as hlo_text
from jax_tensorarray._hlo.arguments import donated
from jax_tensorarray.inspect import _arguments, _kept
from jax_tensorarray.inspect._advice import OF_GRADIENT, OF_GROWTH, OF_JAXLIB
from jax_tensorarray.inspect._arguments import (
    ArgumentCopy,
    Calls,
    CountedProgram,
    argument_copies,
    headline_of_arguments,
)
from jax_tensorarray.inspect._copies import (
    MIN_BYTES,
    LoopCopies,
    LoopCopy,
    advice_of,
    copies_in,
    counts,
    lines_of_today,
    what_it_is,
)
from jax_tensorarray.inspect._kept import Place
from jax_tensorarray.inspect._text import grouped, readable, wrapped
from jax_tensorarray.inspect._trial import Trial, grows, tried

#: A copy that costs less than this fraction of the worst one is counted, not listed.
_NOISE = 1e-3

#: So many seconds are spent on programs in which nothing was found.
_FOR_GROWTH = 30

WIDTH = 79


class LoopCopyError(RuntimeError):
    """The error of `forbid_copies`. `copies` are the operations on whole buffers that were found."""

    def __init__(self, program: str, copies: LoopCopies) -> None:
        super().__init__(f"forbid_copies: in {program}, {copies}")
        self.copies = copies


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
    loop: Place | None = None  #: the first loop, if only time or memory are too much
    calls: CountedProgram | None = field(default=None, repr=False)
    donated: Set[int] = frozenset()  #: the numbers of the arguments that it is given for good

    @property
    def cost(self) -> int:
        """The bytes that its worst finding moves."""
        return max([*map(cost, self.copies), *(copy.cost for copy in self.copies.arguments)], default=0)


@dataclass
class Report:
    """What JAX has compiled while it was watched.

    Attributes:
      programs: how many programs were compiled.
      loops: how many loops are in them.
      in_place: how many of these copy no whole buffer.
      unread: how many programs could not be examined.
      cases: the programs in which something was found, those that copy most first. `try_in_place` adds those whose time
        or memory grows faster than their steps.
    """

    programs: int = 0
    loops: int = 0
    in_place: int = 0
    unread: int = 0
    cases: list[CompiledProgram] = field(default_factory=list)
    #: Programs with loops in which nothing was found.
    _others: list[CompiledProgram] = field(default_factory=list, repr=False)

    @property
    def copies(self) -> list[LoopCopy]:
        """All operations on whole buffers, sorted by the bytes they move, most first."""
        return sorted((copy for case in self.cases for copy in case.copies), key=cost, reverse=True)

    @property
    def slower(self) -> list[CompiledProgram]:
        """The programs that `try_in_place` has found to be slower under `in_place`: leave them as they are."""
        return [case for case in self.cases if (t := case.trial) is not None and t.is_of_in_place and t.is_slower]

    def try_in_place(self, *, timed: bool = True, progress: Callable[[str], None] = lambda text: None) -> Self:
        """Try `in_place` on each program: count the copies that are left and, if `timed`, measure the gain.

        A program is run on zeros, and only if it has no side effects and XLA knows how many steps its loops take. If
        all of them take the same number, and a run takes less than 3 seconds, it is also run with a quarter of the
        steps. So are programs with loops in which nothing was found, for half a minute in all.
        Returns the report itself.
        """
        for n, case in enumerate(self.cases, 1):
            progress(f"trying in_place on {case.program} ({n} of {len(self.cases)})")
            if case.jaxpr is None:
                case.failed = "JAX had traced it before"
                continue
            try:
                case.trial = tried(case, timed)
            except Exception as error:  # whatever it is, the report goes on
                case.failed = f"{type(error).__name__}: {error}".splitlines()[0]
        started = time.perf_counter()
        while timed and self._others and time.perf_counter() - started < _FOR_GROWTH:
            case = self._others.pop(0)
            if case.jaxpr is None or not case.ends:
                continue
            progress(f"running {case.program} with fewer steps")
            with contextlib.suppress(Exception):  # nothing is wrong with it that is known
                if grows(case):
                    self.cases.append(case)
        progress("")
        return self

    def as_json(self) -> dict[str, Any]:
        """Return the report as numbers and strings."""
        cases = [
            {
                "program": case.program,
                "copies": [copy._asdict() | {"cost": cost(copy)} for copy in case.copies],
                "arguments": [copy._asdict() | {"cost": copy.cost} for copy in case.copies.arguments],
                "loop": None if case.loop is None else case.loop._asdict(),
                "kept": [kept._asdict() for kept in case.copies.kept],
                "in_place": None if case.trial is None else case.trial.as_json(),
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
        lines = [bold(line) for line in wrapped(first_of_all(self), width=WIDTH)]
        lines += [bold(line) for line in wrapped(summary(self, compiled), width=WIDTH)]
        compiled_times = times_compiled(self)
        for number, listed in enumerate(worth_listing(self), 1):
            case = listed.case
            lines += ["", *map(bold, wrapped(f"{number}. {case.program}: {headline(listed)}", width=WIDTH))]
            if case.trial is not None:
                lines += _wrapped(f"{case.trial.how}: {case.trial}")
                lines += _wrapped(how_it_grows(case.trial)) if case.trial.growth else []
                lines += _wrapped(OF_GRADIENT) if case.copies.kept and not case.trial.helps else []
            elif case.failed:
                lines += _wrapped(f"in_place could not be tried: {case.failed}")
            for copies in alike(listed.copies):
                lines += ["", *_described(copies, compiled_times[place_of(copies[0])])]
            for arguments in _arguments.alike(listed.arguments):
                texts = _arguments.sentences(arguments, again(compiled_times[place_of(arguments[0])]))
                lines += ["", *_place(arguments[0]), *(line for text in texts for line in _wrapped(text))]
            if case.loop is not None:
                text = f"{again(compiled_times[place_of(case.loop)])} {OF_GROWTH}"
                lines += ["", *_place(case.loop), *_wrapped(text.strip())]
            if is_kept_listed(listed):
                lines += _what_is_kept(case)
        if small := sum(cost(copy) < least_cost(self) for copy in self.copies):
            lines += ["", f"{small} more move less than a thousandth of the first, and are not listed."]
        if is_to_keep(self):
            lines += ["", "To keep what was tried, write jax.jit(jax_tensorarray.in_place(f))."]
        return "\n".join([*lines, *of_jaxlib])


def cost(copy: LoopCopy) -> int:
    """Return the bytes of a copy in all steps, or in one step if XLA does not know how many there are."""
    return copy.num_bytes * (copy.steps or 1)


def first_of_all(report: Report) -> str:
    """Return what a reader must know first: which programs are slower under `in_place`; else an empty text."""
    slower = ", ".join(f"{case.program} ({case.trial.times})" for case in report.slower if case.trial)
    return f"Leave as it is what in_place makes slower: {slower}." if slower else ""


def is_to_keep(report: Report) -> bool:
    """Return whether `in_place` makes a program no slower."""
    trials = (case.trial for case in report.cases if case.trial is not None)
    return any(trial.is_of_in_place and not trial.is_slower for trial in trials)


def least_cost(report: Report) -> float:
    """Return the bytes below which a copy is not listed: a thousandth of the worst."""
    return _NOISE * max((cost(copy) for copy in report.copies), default=0)


#: What a report says of a line.
_Finding = LoopCopy | ArgumentCopy | Place


def place_of(found: _Finding) -> Any:
    """Return what identifies findings that are one to the reader, whatever their programs and shapes."""
    if isinstance(found, LoopCopy):
        return found.file, found.line, found.kind, found.in_gradient
    return (found.file, found.line, *((found.cause, found.name) if isinstance(found, ArgumentCopy) else ()))


def _found(case: CompiledProgram) -> list[_Finding]:
    return [*case.copies, *case.copies.arguments, *([] if case.loop is None else [case.loop])]


def times_compiled(report: Report) -> Counter[Any]:
    """Return in how many programs something is found in a line."""
    return Counter(place for case in report.cases for place in {place_of(found) for found in _found(case)})


class Listed(NamedTuple):
    """A program, and what a report says of it: all that is not listed before."""

    case: CompiledProgram
    copies: list[LoopCopy]
    arguments: list[ArgumentCopy]


def worth_listing(report: Report) -> list[Listed]:
    """Return the programs, each with its copies that move at least a thousandth of the worst.

    A line that is compiled several times, such as for several shapes, is listed in the first of them.
    """
    least, seen, listed = least_cost(report), set[Any](), []
    for case in report.cases:
        new = [found for found in _found(case) if place_of(found) not in seen]
        copies = [copy for copy in new if isinstance(copy, LoopCopy) and cost(copy) >= least]
        arguments = [copy for copy in new if isinstance(copy, ArgumentCopy)]
        loops = [found for found in new if isinstance(found, Place)]
        shown: list[_Finding] = [*copies, *arguments, *loops]
        seen |= {place_of(found) for found in shown if found.file}
        listed += [Listed(case, copies, arguments)] if shown else []
    return listed


def summary(report: Report, compiled: str) -> str:
    """Say how much was found, before all the rest."""
    text = f"{compiled}: {report.loops - report.in_place} copy whole buffers, {report.in_place} do not."
    if number := sum(bool(case.copies.arguments) for case in report.cases):
        text = text if report.loops else f"{compiled}."
        text += f" {number} program{'s copy' if number > 1 else ' copies'} a whole argument in every call."
    if number := sum(case.loop is not None for case in report.cases):
        text += f" The time of {number} program{'s grow' if number > 1 else ' grows'} faster than the steps."
    return text


def headline(listed: Listed) -> str:
    """Say what is wrong with a program."""
    case, worth, arguments = listed
    growth = None if case.trial is None or case.trial.growth is None else case.trial.growth[0]
    first = max(worth, key=cost, default=None)
    if first is not None and first.for_gradient:
        return what_it_is(first)
    if first is not None and not arguments:
        keeps = f", the gradient keeps {_kept.total(case.copies.kept)}" if any(c.for_gradient for c in worth) else ""
        grows = f"; {growth.of_size}, {growth.of_time}" if growth is not None else ""
        return f"{total_cost(worth)}{keeps}{grows}"
    if arguments:
        return headline_of_arguments(arguments)
    return str(growth)


def how_it_grows(trial: Trial) -> str:
    """Say what becomes of time and memory with more steps, as it was tried."""
    assert trial.growth is not None
    return f"{trial.how}: {trial.growth[1]}"


def total_cost(copies: Sequence[LoopCopy]) -> str:
    text = readable(sum(map(cost, copies)))
    return f"{text} a run" if all(copy.steps for copy in copies) else f"{text} a run or more"


def alike(copies: Sequence[LoopCopy]) -> list[list[LoopCopy]]:
    """Group copies of the same line, kind and advice, the most expensive first."""
    key = operator.attrgetter("file", "line", "kind", "shape", "dtype", "in_gradient", "advice")
    return list(grouped(sorted(copies, key=cost, reverse=True), key).values())


def is_kept_listed(listed: Listed) -> bool:
    """Return whether to list what the gradient keeps: if it is much, or if there is a buffer among it."""
    return any(copy.for_gradient for copy in listed.copies) or _kept.worth_listing(listed.case.copies.kept)


def _what_is_kept(case: CompiledProgram) -> list[str]:
    kept = case.copies.kept
    lines = [_wrapped(f"- {k.at(k.file and name_of_file(k.file))}") for k in kept[: _kept.LISTED]]
    memory = _wrapped(what_it_needs(case.trial)) if case.trial is not None and case.trial.memory else []
    return ["", *_wrapped(_kept.in_all(kept)), *(line for of_one in lines for line in of_one), *memory]


def what_it_needs(trial: Trial) -> str:
    """Say how much memory a program needs, as it is and as it was tried."""
    before, after = map(readable, trial.memory or ())
    return f"XLA needs {before} for results and temporary arrays; {trial.how} {after}."


def _place(copy: LoopCopy | ArgumentCopy | Place) -> list[str]:
    lines = [f"   {name_of_file(copy.file)}:{copy.line}" if copy.file else "   a line that XLA does not name"]
    return [*lines, f"       {copy.code}"[:WIDTH]] if copy.code else lines


def _described(copies: Sequence[LoopCopy], compiled: int) -> list[str]:
    copy = copies[0]
    return [*_place(copy), *_wrapped(what_and_how_often(copies, compiled)), *_wrapped(advice_of(copy))]


def again(compiled: int) -> str:
    """Say in how many programs a line is, if there are several."""
    return f"It is compiled {compiled} times." if compiled > 1 else ""


def what_and_how_often(copies: Sequence[LoopCopy], compiled: int) -> str:
    """Describe copies that are alike, on a line that is compiled so many times, in one sentence."""
    copy = copies[0]
    more = f" {again(compiled)}" if compiled > 1 and copy.file else ""
    steps = f"{copy.steps} steps" if copy.steps else "steps that XLA cannot count"
    times = f" ({len(copies)} times)" if len(copies) > 1 else ""
    if copy.for_gradient:
        return f"{what_it_is(copy)}{times}.{more}"
    return f"{what_it_is(copy)}{times}: {readable(copy.num_bytes)} a step, {steps}.{more}"


def _wrapped(text: str) -> list[str]:
    return wrapped(text, "   ", WIDTH)


def name_of_file(file: str) -> str:
    """Return the path relative to the current folder, or to the folder of Python's packages."""
    text = os.path.relpath(file)
    if text.startswith(".."):
        text = file
        for folder in ("site-packages", "dist-packages"):
            text = text.rpartition(f"{folder}{os.sep}")[2]
    return text


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
    report, calls = Report(), Calls()

    def seen(name: str, jaxpr: Any, executable: Any) -> None:
        try:
            _look(report, name, jaxpr, executable, min_bytes, calls)
        except Exception:  # the program must go on, even if its HLO cannot be read
            report.unread += 1

    with lines_of_today(), _compat.compilations(seen):
        try:
            yield report
        finally:
            calls.end()
            for case in report.cases:
                if case.calls is not None:
                    case.copies.arguments = case.calls.counted(case.copies.arguments)
            found: list[CompiledProgram] = []
            for case in report.cases:
                (found if case.copies or case.copies.arguments else report._others).append(case)
            report.cases = sorted(found, key=lambda case: case.cost, reverse=True)


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
        for case in (case for case in report.cases if case.copies):
            raise LoopCopyError(case.program, case.copies)

    with lines_of_today(), _compat.compilations(seen):
        yield


def _look(report: Report, name: str, jaxpr: Any, executable: Any, min_bytes: int, calls: Calls | None = None) -> None:
    report.programs += 1
    hlo = hlo_text.of_executable(executable)
    loops = hlo_buffers.trip_counts(hlo)
    findings = list(hlo_buffers.findings(hlo)) if loops else []
    copies = copies_in(hlo, min_bytes, findings) if loops else LoopCopies()
    report.loops += len(loops)
    report.in_place += len(loops) - len({f.at[-1].name for f in findings if counts(f, min_bytes)})
    program = name.removeprefix("jit_")
    if calls is not None:
        copies.arguments = argument_copies(hlo, min_bytes)
    if copies and jaxpr is not None:
        with contextlib.suppress(Exception):  # what is not known is left out
            copies.kept = _kept.kept_for_gradient(jaxpr, min_bytes)
    case = CompiledProgram(program, copies, jaxpr=jaxpr, ends=None not in loops, donated=donated(hlo))
    if calls is not None and copies.arguments:
        case.calls = calls.expect(jaxpr, copies.arguments, program)
    if copies or copies.arguments:
        report.cases.append(case)
    elif loops and not findings:
        report._others.append(case)
