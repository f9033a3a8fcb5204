"""Try `in_place` on a program: what it still copies, how long it takes, and how it grows with its steps."""

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, jaxpr_as_fun

from jax_tensorarray import _compat, in_place
from jax_tensorarray._hlo import buffers as hlo_buffers
from jax_tensorarray.doctor._arguments import argument_copies
from jax_tensorarray.doctor._copies import copies_in
from jax_tensorarray.doctor._growth import Growth, Measurement, allocated, growth_of, seconds_of
from jax_tensorarray.doctor._jitted import Line, line_for, silent, under_in_place
from jax_tensorarray.doctor._kept import kept_for_gradient, line_of
from jax_tensorarray.doctor._programs import OF_FINISHED, CompiledProgram, Trial
from jax_tensorarray.doctor._quarter import computes_with_all_rows, outermost, quartered
from jax_tensorarray.doctor._text import counted

#: A longer run is not repeated with fewer steps, and a shorter one says little about time.
_LONGEST, _SHORTEST = 3.0, 1e-3

#: Two more programs are compiled for that, if one takes no more than so many seconds.
_PATIENCE = 10.0

#: Growth is reported if `in_place` divides the time or the memory by this.
_GAIN = 2

#: How often a time is measured again that grows too much though nothing is copied.
_REPEATED = 3

_BOTH = "donated, under in_place"

#: The programs that JAX compiles for loops outside of jit.
_LOOPS = {"scan", "while", "cond"}

#: The line to write if the function of the user is not known.
_NOT_JITTED = Line(
    "The loop runs outside of jit. To keep this, put in_place and jit around the function that contains {}.", ()
)
_JITTED_BEFORE = Line("To keep this, put in_place directly inside your jit, around the function that contains {}.", ())


class _Program(NamedTuple):
    """A compiled program, the types of its arguments, and its jaxpr. `how` and `line` say what was tried."""

    compiled: Any
    types: Sequence[Any]
    jaxpr: Jaxpr
    donated: Set[int]
    how: str = ""
    line: Line | None = None

    def measured(self, steps: int = 1) -> Measurement:
        """Run the program on zeros."""
        return Measurement(
            steps,
            seconds_of(self.compiled, lambda: [jnp.zeros(a.shape, a.dtype) for a in self.types]),
            allocated(self.compiled),
        )

    def grown(self, now: Measurement, *, doubts: bool = False) -> Growth | None:
        """Measure this program with fewer steps too. None if these cannot be made of its jaxpr.

        With `doubts` both are measured again if the time grows too much: the machine may have been busy.
        """
        with contextlib.suppress(Exception):  # whatever it is, the program itself was measured
            if fewer := quartered(self.jaxpr):
                smaller, steps, few = fewer
                program = _of_jaxpr(smaller, self.donated)
                if None not in hlo_buffers.trip_counts(program.compiled.as_text() or ""):  # it ends
                    small, large = program.measured(few), now
                    for _ in range(_REPEATED):
                        if not doubts or not growth_of(small, large._replace(size=steps)).is_quadratic:
                            break
                        small, large = _shorter(small, program.measured(few)), _shorter(large, self.measured())
                    return growth_of(small, large._replace(size=steps))
        return None


def _compiled(function: Callable[..., Any], types: Sequence[Any], donated: Set[int], how: str = "") -> _Program:
    with warnings.catch_warnings(), silent():  # about donated arguments whose memory is of no use
        warnings.simplefilter("ignore")
        traced = jax.jit(function, donate_argnums=tuple(sorted(donated))).trace(*types)
        return _Program(traced.lower().compile(), types, traced.jaxpr, donated, how)


def _of_jaxpr(jaxpr: Jaxpr, donated: Set[int], how: str = "", transformed: Any = lambda f: f) -> _Program:
    """Compile a jaxpr, perhaps after a transformation."""
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in jaxpr.in_avals]
    return _compiled(transformed(jaxpr_as_fun(jaxpr)), types, donated, how)


def _under_in_place(case: CompiledProgram, donated: Set[int], how: str) -> _Program:
    """Put `in_place` around the function that was jitted, or around the finished program if there is none."""
    if case.function is not None:
        with contextlib.suppress(Exception):  # the function may not be traceable again; the program is
            flat = under_in_place(case.function, case.jaxpr, donated)
            if flat is not None:
                names = _compat.names_of_arguments(case.jaxpr)
                line = line_for(case.function, [names[k] for k in sorted(donated - case.donated)])
                return _compiled(*flat, how)._replace(line=line)
    return _of_jaxpr(case.jaxpr, donated, f"{how}{OF_FINISHED}", in_place)._replace(line=_line_otherwise(case))


def _line_otherwise(case: CompiledProgram) -> Line:
    """Return where to put `in_place` if only the finished program could be tried."""
    if case.function is not None:
        with contextlib.suppress(Exception):  # the source may be gone
            return line_for(case.function)
    line = _NOT_JITTED if case.program in _LOOPS else _JITTED_BEFORE
    at = next((copy.at for copy in case.copies if copy.file), line_of(outermost(case.jaxpr)))
    return line._replace(said=line.said.format(at.place if at.file else "the loop"))


def tried(case: CompiledProgram, timed: bool) -> Trial:
    """Compile a program under `in_place`, with the arguments donated that it copies, and run it on zeros if `timed`.

    If donation alone is enough, `in_place` is not tried.
    """
    least = min(copy.num_bytes for copy in (*case.copies, *case.copies.arguments))
    donated = case.donated | {copy.number for copy in case.copies.arguments}
    ways = [lambda: _under_in_place(case, donated, "under in_place" if donated == case.donated else _BOTH)]
    if donated > case.donated and not case.copies:
        ways.insert(0, lambda: _of_jaxpr(case.jaxpr, donated, "donated"))
    for try_it in ways:
        started = time.perf_counter()
        way = try_it()
        compiling = time.perf_counter() - started
        hlo = way.compiled.as_text() or ""
        left = len(copies_in(hlo, least)) + len(argument_copies(hlo, least))
        if not left:
            break
    if not (timed and case.ends) or case.jaxpr.effects:
        return Trial(left, None, None, way.how, line=way.line)
    plain = _of_jaxpr(case.jaxpr, case.donated)
    before = plain.measured()
    is_short = before.seconds < _LONGEST and compiling < _PATIENCE
    return _timed(plain, before, plain.grown(before) if is_short else None, way, left)


def _timed(plain: _Program, before: Measurement, growth: Growth | None, way: _Program, left: int | None) -> Trial:
    """Time a program as it was tried. If it is slower, measure both again: the machine may have been busy."""
    after = way.measured()
    if after.seconds > before.seconds:
        before, after = _shorter(before, plain.measured()), _shorter(after, way.measured())
    grown = None if growth is None else way.grown(after, doubts=left == 0)
    return Trial(
        left,
        before.seconds,
        after.seconds,
        way.how,
        growth=None if growth is None else (growth, grown),
        memory=(before.num_bytes, after.num_bytes),
        line=way.line,
        note=_why_it_grows(grown, plain.jaxpr) if left == 0 else "",
    )


def _why_it_grows(growth: Growth | None, jaxpr: Jaxpr) -> str:
    """Say why the time of a program may grow like that of one that copies, though it does not copy."""
    if growth is None or not growth.is_quadratic:
        return ""
    if computes_with_all_rows(jaxpr, growth.sizes[1]):
        return "Each step computes with all rows, so the time grows with their number"
    load, cores = _load(), os.cpu_count() or 1
    if load > cores:
        busy = f"Other programs run on this machine (load {load:.0f}, {counted(cores, 'core')})"
        return f"{busy}, so its times vary. Run the doctor again when the machine is idle"
    return "Nothing is copied, so this growth may be chance. Run the doctor again: short times vary"


def _load() -> float:
    """Return the average load of the last minute, 0 if the system does not say."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return 0.0


def grows(case: CompiledProgram) -> bool:
    """Return whether the time or the memory of a program grows faster than its steps for no good reason.

    A good reason is that each step computes with all rows, unless `in_place` makes it twice as good. The program gets a
    trial.
    """
    fewer = None if case.jaxpr.effects else quartered(case.jaxpr)
    if fewer is None:
        return False
    plain = _of_jaxpr(case.jaxpr, case.donated)
    before = plain.measured()
    growth = plain.grown(before) if _SHORTEST < before.seconds < _LONGEST else None
    if growth is None or not growth.is_too_much:
        return False
    case.trial = trial = _timed(plain, before, growth, _under_in_place(case, case.donated, "under in_place"), None)
    case.loop = line_of(outermost(case.jaxpr))
    case.copies.kept = kept_for_gradient(case.jaxpr)
    assert trial.before and trial.after and trial.memory
    helps = any(_GAIN * after < before for before, after in ((trial.before, trial.after), trial.memory))
    return helps or not computes_with_all_rows(case.jaxpr, fewer[1])


def _shorter(first: Measurement, second: Measurement) -> Measurement:
    return min(first, second, key=lambda measured: measured.seconds)
