"""The content of a report, as a tree: programs, findings on lines of source, and bars. Text and HTML are made of it."""

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax_tensorarray import _compat
from jax_tensorarray._in_place import switch
from jax_tensorarray.doctor import _arguments, _kept
from jax_tensorarray.doctor._advice import OF_GRADIENT, OF_GROWTH, OF_JAXLIB
from jax_tensorarray.doctor._arguments import ArgumentCopy, headline_of_arguments
from jax_tensorarray.doctor._copies import LoopCopy, advice_of, cost, what_it_is
from jax_tensorarray.doctor._jitted import Line
from jax_tensorarray.doctor._kept import SourceLine
from jax_tensorarray.doctor._programs import OF_FINISHED, CompiledProgram, Programs
from jax_tensorarray.doctor._text import (
    REPORT_WIDTH,
    counted,
    grouped,
    milliseconds,
    more_about,
    name_of_file,
    readable,
    where,
    wrapped,
)

#: A copy that costs less than this fraction of the worst one is counted, not listed.
_NOISE = 1e-3


class Bar(NamedTuple):
    """A quantity, and which part of the largest one it is."""

    name: str
    value: str
    part: float
    is_gain: bool = False


class Finding(NamedTuple):
    """A problem of a line of source."""

    at: SourceLine
    said: tuple[str, ...]  #: what the line does, and how often
    advice: str
    tag: str = ""  #: the name of the advice
    moved: Bar | None = None


class Section(NamedTuple):
    """A program in which something was found."""

    title: str
    failed: str  #: why `in_place` could not be tried; else empty
    tried: list[str]  #: what came of it, without the end of the sentence
    keep: Line | None  #: the code that keeps what was tried, if it helps and no section before has it
    hint: str
    times: list[Bar]  #: as it is, and as it was tried
    findings: list[Finding]
    kept: list[str]  #: how much a gradient keeps in all, and the largest arrays
    needs: str  #: how much memory the program needs


class Tree(NamedTuple):
    """A report."""

    first: str  #: which programs are slower under `in_place`, which a reader must know first; else empty
    summary: str  #: how many programs and loops were compiled, and how many copy
    sections: list[Section]
    unlisted: str  #: how many copies move too little to be listed; else empty
    more: list[str]  #: where to read about the names in brackets
    of_jaxlib: str  #: what this version of jaxlib does; else empty


def tree(report: Programs) -> Tree:
    listed, compiled = _worth_listing(report), _times_compiled(report)
    worst = max((sum(map(cost, group)) for one in listed for group in _alike(one.copies)), default=0)
    slower = ", ".join(f"{case.program} ({case.trial.times})" for case in report.slower if case.trial)
    unlisted = sum(cost(copy) < _least_cost(report) for copy in report.copies)
    sections = [_section(number, one, worst, compiled) for number, one in enumerate(listed, 1)]
    return Tree(
        first=f"in_place makes these programs slower. Leave them unchanged: {slower}." if slower else "",
        summary=_summary(report) + _off(),
        sections=list(_each_once(sections)),
        unlisted=_UNLISTED[unlisted > 1].format(unlisted) if unlisted else "",
        more=more_about(finding.tag for section in sections for finding in section.findings),
        of_jaxlib=OF_JAXLIB if report.loops and _compat.small_loops_are_quadratic() else "",
    )


_UNLISTED = (
    "{} more moves less than a thousandth of the first, and is not listed.",
    "{} more move less than a thousandth of the first, and are not listed.",
)


def _each_once(sections: Sequence[Section]) -> Iterator[Section]:
    """Yield the sections without the advice, and the lines to keep, that a section before has."""
    seen: set[Any] = set()

    def is_new(text: Any) -> bool:
        is_first = text not in seen
        seen.add(text)
        return is_first

    for section in sections:
        findings = [
            finding
            if is_new(finding.advice)
            else finding._replace(advice=f"See above [{finding.tag}]." if finding.tag else "")
            for finding in section.findings
        ]
        keep = section.keep if section.keep is not None and is_new(section.keep) else None
        yield section._replace(findings=findings, keep=keep)


def text(report: Programs, colours: bool = False) -> str:
    """Return a report in 79 columns."""

    def bold(line: str) -> str:
        return f"\x1b[1m{line}\x1b[0m" if colours else line

    said = tree(report)
    lines = [bold(line) for of in (said.first, said.summary) for line in wrapped(of, width=REPORT_WIDTH)]
    if not report.cases:
        lines = wrapped(said.summary, width=REPORT_WIDTH)
    for section in said.sections:
        lines += ["", *map(bold, wrapped(section.title, width=REPORT_WIDTH))]
        failed = f"in_place could not be tried: {section.failed}" if section.failed else ""
        lines += _wrapped(*section.tried, section.hint, failed)
        if section.keep is not None:
            lines += [*_wrapped(section.keep.said), *(f"       {line}"[:REPORT_WIDTH] for line in section.keep.code)]
        for finding in section.findings:
            code = [f"       {finding.at.code}"[:REPORT_WIDTH]] if finding.at.code else []
            lines += ["", f"   {where(finding.at.file and name_of_file(finding.at.file), finding.at.line)}", *code]
            lines += _wrapped(*finding.said, finding.advice)
        if section.kept:
            in_all, *arrays = section.kept
            lines += ["", *_wrapped(in_all, *(f"- {array}" for array in arrays), section.needs)]
    lines += ["", said.unlisted] if said.unlisted else []
    lines += ["", *said.more] if said.more else []
    return "\n".join([*lines, *(["", said.of_jaxlib] if said.of_jaxlib else [])])


def _wrapped(*texts: str) -> list[str]:
    return [line for text in texts for line in wrapped(text, "   ", REPORT_WIDTH)]


# --- the tree --------------------------------------------------------------------------------------------------


#: A thing that a report says of a line.
_Found = LoopCopy | ArgumentCopy | SourceLine


class _Listed(NamedTuple):
    """A program, and the findings that no program before it lists."""

    case: CompiledProgram
    copies: list[LoopCopy]
    arguments: list[ArgumentCopy]


def _least_cost(report: Programs) -> float:
    """Return the bytes below which a copy is not listed: a thousandth of the worst."""
    return _NOISE * max((cost(copy) for copy in report.copies), default=0)


def _key(finding: _Found) -> Any:
    """Return a key that is equal for findings that a reader takes for one, in other programs or shapes too."""
    if isinstance(finding, LoopCopy):
        return finding.file, finding.line, finding.kind, finding.in_gradient
    return (finding.file, finding.line, *((finding.cause, finding.name) if isinstance(finding, ArgumentCopy) else ()))


def _found(case: CompiledProgram) -> list[_Found]:
    return [*case.copies, *case.copies.arguments, *([] if case.loop is None else [case.loop])]


def _times_compiled(report: Programs) -> Counter[Any]:
    """Return in how many programs something is found in a line."""
    return Counter(key for case in report.cases for key in {_key(copy) for copy in _found(case)})


def _worth_listing(report: Programs) -> list[_Listed]:
    """Return the programs, each with its copies that move at least a thousandth of the worst.

    A line that is compiled several times, such as for several shapes, is listed in the first of them.
    """
    least, seen, listed = _least_cost(report), set[Any](), []
    for case in report.cases:
        new = [finding for finding in _found(case) if _key(finding) not in seen]
        copies = [copy for copy in new if isinstance(copy, LoopCopy) and cost(copy) >= least]
        arguments = [copy for copy in new if isinstance(copy, ArgumentCopy)]
        loops = [finding for finding in new if isinstance(finding, SourceLine)]
        shown: list[_Found] = [*copies, *arguments, *loops]
        seen |= {_key(finding) for finding in shown if finding.file}
        listed += [_Listed(case, copies, arguments)] if shown else []
    return listed


def _summary(report: Programs) -> str:
    unread = f" ({report.unread} could not be read)" if report.unread else ""
    were = "program was" if report.programs == 1 else "programs were"
    compiled = f"{report.programs} {were} compiled{unread}, with {counted(report.loops, 'loop')}"
    if not report.cases:
        if not report.loops:
            return f"{compiled}."
        return f"{compiled}, in place: it copies no buffer." if report.loops == 1 else f"{compiled}, {_ALL_IN_PLACE}"
    copying = report.loops - report.in_place
    said = f"{compiled}: {copying} {'copies' if copying == 1 else 'copy'} whole buffers, "
    said += f"{report.in_place} {'does' if report.in_place == 1 else 'do'} not."
    if number := sum(bool(case.copies.arguments) for case in report.cases):
        said = said if report.loops else f"{compiled}."
        said += f" {number} program{'s copy' if number > 1 else ' copies'} a whole argument in every call."
    if number := sum(case.loop is not None for case in report.cases):
        said += f" The time of {number} program{'s grow' if number > 1 else ' grows'} faster than the steps."
    return said


def _off() -> str:
    """Say that something has turned `in_place` off."""
    off = switch.why_off()
    return f" in_place is off ({off}): the program ran as it is written. Trials of in_place turn it on." if off else ""


_ALL_IN_PLACE = "all in place: none copies a buffer."


def _section(number: int, listed: _Listed, worst: int, compiled: Counter[Any]) -> Section:
    case, trial, kept = listed.case, listed.case.trial, listed.case.copies.kept
    tried = [] if trial is None else [f"{trial.how}: {trial}"]
    tried += [f"{trial.how}: {trial.growth[1]}"] if trial is not None and trial.growth and trial.growth[1] else []
    tried += [trial.note] if trial is not None and trial.note else []
    times, needs, has_kept = list[Bar](), "", any(copy.for_gradient for copy in listed.copies)
    if trial is not None and trial.before and trial.after:
        longest = max(trial.before, trial.after)
        times.append(Bar("unchanged", milliseconds(trial.before), trial.before / longest))
        times.append(Bar(trial.how, milliseconds(trial.after), trial.after / longest, not trial.is_slower))
    if trial is not None and trial.memory:
        before, after = map(readable, trial.memory)
        needs = f"XLA needs {before} for results and temporary arrays; {trial.how} {after}."
    findings = [_of_copies(group, worst, compiled[_key(group[0])]) for group in _alike(listed.copies)]
    for arguments in _arguments.alike(listed.arguments):
        said = _arguments.sentences(arguments, _again(compiled[_key(arguments[0])]))
        findings.append(Finding(_place(arguments[0]), tuple(said[:-1]), said[-1]))
    if case.loop is not None:
        findings.append(Finding(case.loop, (_again(compiled[_key(case.loop)]),), OF_GROWTH))
    arrays = [k.at(k.file and name_of_file(k.file)) for k in kept[: _kept.LISTED]]
    return Section(
        title=f"{number}. {case.program}: {_headline(listed)}",
        failed=case.failed if trial is None else "",
        tried=tried,
        keep=trial.line if trial is not None and trial.is_worth_keeping else None,
        hint=OF_GRADIENT if trial is not None and kept and trial.how.endswith(OF_FINISHED) and not trial.helps else "",
        times=times,
        findings=findings,
        kept=[_kept.in_all(kept), *arrays] if has_kept or _kept.worth_listing(kept) else [],
        needs=needs,
    )


def _headline(listed: _Listed) -> str:
    """Say what is wrong with a program."""
    case, worth, arguments = listed
    growth = None if case.trial is None or case.trial.growth is None else case.trial.growth[0]
    first = max(worth, key=cost, default=None)
    if first is not None and first.for_gradient:
        return what_it_is(first)
    if first is not None and not arguments:
        keeps = f", the gradient keeps {_kept.total(case.copies.kept)}" if any(c.for_gradient for c in worth) else ""
        grows = f"; {growth.of_size}, {growth.of_time}" if growth is not None else ""
        more = "" if all(copy.steps for copy in worth) else " or more"
        return f"{readable(sum(map(cost, worth)))} copied per run{more}{keeps}{grows}"
    if arguments:
        return headline_of_arguments(arguments)
    return str(growth)


def _alike(copies: Sequence[LoopCopy]) -> list[list[LoopCopy]]:
    """Group copies of the same line, kind and advice, the most expensive first."""
    key = operator.attrgetter("file", "line", "kind", "shape", "dtype", "in_gradient", "advice")
    return list(grouped(sorted(copies, key=cost, reverse=True), key).values())


def _of_copies(copies: Sequence[LoopCopy], worst: int, compiled: int) -> Finding:
    """Describe copies that are alike, on a line that was compiled `compiled` times."""
    copy, moved = copies[0], sum(map(cost, copies))
    more = f" {_again(compiled)}" if compiled > 1 and copy.file else ""
    steps = counted(copy.steps, "step") if copy.steps else "steps that XLA cannot count"
    said = what_it_is(copy) + (f" ({len(copies)} times)" if len(copies) > 1 else "")
    said += "" if copy.for_gradient else f": {readable(copy.num_bytes)} per step, {steps}"
    bar = Bar("moved", readable(moved), moved / worst)
    return Finding(_place(copy), (f"{said}.{more}",), advice_of(copy), copy.reason, bar)


def _place(copy: LoopCopy | ArgumentCopy) -> SourceLine:
    return SourceLine(copy.file, copy.line, copy.code)


def _again(compiled: int) -> str:
    """Say in how many programs a line is, if there are several."""
    return f"It is compiled {compiled} times." if compiled > 1 else ""
