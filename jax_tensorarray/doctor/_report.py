"""What `watch` has found: the report, and the blocks that it is made of."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from jax_tensorarray import _compat
from jax_tensorarray._in_place import switch
from jax_tensorarray.doctor import _kept
from jax_tensorarray.doctor._advice import OF_GRADIENT, OF_JAXLIB
from jax_tensorarray.doctor._arguments import ArgumentCopy, headline_of_arguments
from jax_tensorarray.doctor._blocks import (
    REPORT_WIDTH,
    Bar,
    Bars,
    Block,
    Code,
    Group,
    Text,
    as_html,
    as_text,
    fragment,
    more_about,
    page,
)
from jax_tensorarray.doctor._copies import LoopCopy
from jax_tensorarray.doctor._finding import alike, blocks_of, moved
from jax_tensorarray.doctor._programs import OF_FINISHED, CompiledProgram
from jax_tensorarray.doctor._text import counted, milliseconds, readable
from jax_tensorarray.doctor._trial import grows, tried

#: A copy that costs less than this fraction of the worst one is counted, not listed.
_NOISE = 1e-3

#: So many seconds are spent on programs in which nothing was found.
_FOR_GROWTH = 30


@dataclass(kw_only=True)
class Report:
    """The programs that JAX has compiled in a block of `watch`, and the findings about them.

    It prints as a text, and a notebook shows it as a page.

    Attributes:
      programs: the number of compiled programs.
      loops: the number of loops in these programs.
      in_place: the number of these loops that copy no whole buffer.
      unread: the number of programs that could not be examined.
      cases: the programs with findings. The program that copies most comes first. `try_in_place` adds programs whose
        time or memory grows faster than the number of steps.
    """

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
        return sorted((copy for case in self.cases for copy in case.copies), key=lambda copy: copy.cost, reverse=True)

    @property
    def slower(self) -> list[CompiledProgram]:
        """The programs that `try_in_place` has found to be slower under `in_place`: leave them as they are."""
        return [case for case in self.cases if (t := case.trial) is not None and t.is_of_in_place and t.is_slower]

    def as_json(self) -> dict[str, Any]:
        """Return the report as numbers and strings."""
        counts = {"programs": self.programs, "loops": self.loops, "loops_in_place": self.in_place}
        return counts | {"cases": [case.as_json() for case in self.cases]}

    def try_in_place(self, *, timed: bool = True, progress: Callable[[str], None] = lambda text: None) -> Self:
        """Try `in_place` on each program: count the remaining copies and, if `timed`, measure the gain.

        If `jax.jit` has traced a function in the block, `in_place` is tried on that function, which is traced once
        more. Otherwise it is tried on the finished program. The programs run on zeros, and only if they have no side
        effects and XLA knows how many steps their loops take. If all loops take the same number of steps, and a run
        takes less than 3 seconds, a program also runs with a quarter of the steps. Programs without findings run with
        fewer steps too, for half a minute in all.

        Args:
          timed: whether to run the programs. Otherwise they are only compiled.
          progress: is called with a text before each trial.

        Returns:
          The report itself.
        """
        with switch.enable_in_place() if switch.why_off() else contextlib.nullcontext():
            self._try_in_place(timed, progress)
        return self

    def to_try(self, *, timed: bool = True) -> int:
        """Return on how many programs `try_in_place` works."""
        return len(self.cases) + (sum(case.can_grow for case in self._others) if timed else 0)

    def _try_in_place(self, timed: bool, progress: Callable[[str], None]) -> None:
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
            if not case.can_grow:
                continue
            progress(f"running {case.program} with fewer steps")
            with contextlib.suppress(Exception):  # nothing is wrong with it that is known
                if grows(case):
                    self.cases.append(case)
        progress("")

    def __str__(self) -> str:
        return self.text(False)

    def text(self, colours: bool) -> str:
        """Return the report in 79 columns."""
        return as_text(_blocks(self), REPORT_WIDTH, colours)

    def _repr_html_(self) -> str:
        """Return the report as HTML, which notebooks show."""
        return fragment(_blocks(self))


def html(report: Report, title: str) -> str:
    """Return a report as a page."""
    return page(title, as_html(_blocks(report)))


# --- the blocks ------------------------------------------------------------------------------------------------


def _blocks(report: Report) -> list[Block]:
    """Return the content of a report."""
    slower = ", ".join(f"{case.program} ({case.trial.times})" for case in report.slower if case.trial)
    first = f"in_place makes these programs slower. Leave them unchanged: {slower}."
    blocks: list[Block] = [Text(first, "p.slower")] if slower else []
    blocks.append(Text(_summary(report), "p.summary"))
    least = _NOISE * max((copy.cost for copy in report.copies), default=0)
    listed = [*_listed(report.cases, least)]
    worst = max((moved(group) for _, findings in listed for group in alike(findings)), default=0)
    compiled = Counter(key for case in report.cases for key in {finding.key for finding in case.findings})
    told: set[Any] = set()
    for number, (case, findings) in enumerate(listed, 1):
        blocks.append(_section(number, case, findings, compiled, told, worst))
    if unlisted := sum(copy.cost < least for copy in report.copies):
        are = "is" if unlisted == 1 else "are"
        text = (
            f"{counted(unlisted, 'more moves', 'more move')} less than a thousandth of the first, and {are} not listed."
        )
        blocks.append(Group([Text(text)]))
    blocks += more_about(finding.reason for _, findings in listed for finding in findings)
    if report.loops and _compat.small_loops_are_quadratic():
        blocks.append(Group([Text(line) for line in OF_JAXLIB.splitlines()]))
    return blocks


def _listed(cases: Sequence[CompiledProgram], least: float) -> Iterator[tuple[CompiledProgram, list[Any]]]:
    """Yield the programs, each with the findings that no program before it has, unless they move less than `least`.

    A line that is compiled several times, such as for several shapes, is listed in the first of them.
    """
    seen: set[Any] = set()
    for case in cases:
        new = [x for x in case.findings if x.key not in seen and not (isinstance(x, LoopCopy) and x.cost < least)]
        seen |= {finding.key for finding in new if finding.file}
        if new:
            yield case, new


def _summary(report: Report) -> str:
    """Say how many programs and loops were compiled, how many copy, and what has turned `in_place` off."""
    unread = f" ({report.unread} could not be read)" if report.unread else ""
    compiled = f"{counted(report.programs, 'program was', 'programs were')} compiled{unread}, with "
    compiled += counted(report.loops, "loop")
    said = [f"{compiled}."]
    if report.loops and report.cases:
        copy, do = counted(report.loops - report.in_place, "copies", "copy"), counted(report.in_place, "does", "do")
        said = [f"{compiled}: {copy} whole buffers, {do} not."]
    elif report.loops:
        none = "in place: it copies no buffer" if report.loops == 1 else "all in place: none copies a buffer"
        said = [f"{compiled}, {none}."]
    if number := sum(bool(case.copies.arguments) for case in report.cases):
        said.append(f"{counted(number, 'program copies', 'programs copy')} a whole argument in every call.")
    if number := sum(case.loop is not None for case in report.cases):
        said.append(f"The time of {counted(number, 'program grows', 'programs grow')} faster than the steps.")
    if off := switch.why_off():
        said.append(f"in_place is off ({off}): the program ran as it is written. Trials of in_place turn it on.")
    return " ".join(said)


def _section(
    number: int, case: CompiledProgram, findings: Sequence[Any], compiled: Counter[Any], told: set[Any], worst: int
) -> Group:
    """Describe a program in which something was found."""
    blocks: list[Block] = [Text(f"{number}. {case.program}: {_headline(case, findings)}", "h2", -3)]
    blocks += [*_of_trial(case, told), *blocks_of(findings, compiled, told, worst)]
    kept = _kept.listed(case.copies.kept, any(getattr(copy, "for_gradient", False) for copy in findings))
    if kept and case.trial is not None and case.trial.memory:
        before, after = map(readable, case.trial.memory)
        kept.append(Text(f"XLA needs {before} for results and temporary arrays; {case.trial.how} {after}."))
    return Group([*blocks, *([Group(kept)] if kept else [])], "section", 3)


def _of_trial(case: CompiledProgram, told: set[Any]) -> Iterator[Block]:
    """Say what came of `in_place`, and how to keep it."""
    trial = case.trial
    if trial is None:
        if case.failed:
            yield Text(f"in_place could not be tried: {case.failed}")
        return
    yield Text(f"{trial.how}: {trial}")
    if trial.growth and trial.growth[1]:
        yield Text(f"{trial.how}: {trial.growth[1]}")
    if trial.note:
        yield Text(trial.note)
    if case.copies.kept and trial.how.endswith(OF_FINISHED) and (trial.left or not trial.is_faster):
        yield Text(OF_GRADIENT)
    if trial.line is not None and trial.is_of_in_place and trial.is_faster and trial.line not in told:
        told.add(trial.line)
        yield Text(trial.line.said)
        if trial.line.code:
            yield Code(trial.line.code)
    if trial.before and trial.after:
        longest = max(trial.before, trial.after)
        before = Bar("unchanged", milliseconds(trial.before), trial.before / longest)
        yield Bars([before, Bar(trial.how, milliseconds(trial.after), trial.after / longest, not trial.is_slower)])


def _headline(case: CompiledProgram, findings: Sequence[Any]) -> str:
    """Say what is wrong with a program."""
    growth = None if case.trial is None or case.trial.growth is None else case.trial.growth[0]
    copies = [finding for finding in findings if isinstance(finding, LoopCopy)]
    arguments = [finding for finding in findings if isinstance(finding, ArgumentCopy)]
    first = max(copies, key=lambda copy: copy.cost, default=None)
    if first is not None and first.for_gradient:
        return first.what
    if arguments:
        return headline_of_arguments(arguments)
    if not copies:
        return str(growth)
    keeps = f", the gradient keeps {_kept.total(case.copies.kept)}" if any(c.for_gradient for c in copies) else ""
    slow = f"; {growth.of_time}" if growth is not None else ""
    more = "" if all(copy.steps for copy in copies) else " or more"
    return f"{readable(moved(copies))} copied per run{more}{keeps}{slow}"
