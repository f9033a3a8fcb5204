"""Try `in_place` on a program: what it still copies, how long it takes, and how it grows with its steps."""

import contextlib
import time
import warnings
from collections.abc import Callable, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, jaxpr_as_fun

from jax_tensorarray import in_place
from jax_tensorarray._hlo import buffers as hlo_buffers
from jax_tensorarray.doctor._arguments import argument_copies
from jax_tensorarray.doctor._copies import copies_in
from jax_tensorarray.doctor._growth import Growth, Measurement, allocated, growth_of, seconds_of
from jax_tensorarray.doctor._kept import kept_for_gradient, place_of
from jax_tensorarray.doctor._programs import CompiledProgram, Trial
from jax_tensorarray.doctor._quarter import computes_with_all_rows, outermost, quartered

#: A longer run is not repeated with fewer steps, and a shorter one says little about time.
_LONGEST, _SHORTEST = 3.0, 1e-3

#: Two more programs are compiled for that, if one takes no more than so many seconds.
_PATIENCE = 10.0

#: What grows is reported if `in_place` divides its time or memory by this.
_GAIN = 2


class _Way(NamedTuple):
    """A way to compile a program, and which of its arguments are donated."""

    how: str
    transformed: Callable[[Any], Any]
    donated: Set[int]

    def compiled(self, jaxpr: Jaxpr) -> Any:
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in jaxpr.in_avals]
        with warnings.catch_warnings():  # about donated arguments whose memory is of no use
            warnings.simplefilter("ignore")
            jitted = jax.jit(self.transformed(jaxpr_as_fun(jaxpr)), donate_argnums=tuple(sorted(self.donated)))
            return jitted.lower(*types).compile()

    def measured(self, jaxpr: Jaxpr, steps: int, compiled: Any = None) -> Measurement:
        """Run a program on zeros."""
        compiled = compiled or self.compiled(jaxpr)
        if None in hlo_buffers.trip_counts(compiled.as_text() or ""):
            raise ValueError("it is not known whether it ends")
        return Measurement(
            steps,
            seconds_of(compiled, lambda: [jnp.zeros(a.shape, a.dtype) for a in jaxpr.in_avals]),
            allocated(compiled),
        )

    def grown(self, fewer: tuple[Any, int, int], now: Measurement) -> Growth:
        """Run a program with fewer steps too."""
        jaxpr, steps, few = fewer
        return growth_of(self.measured(jaxpr, few), now._replace(size=steps))


def tried(case: CompiledProgram, timed: bool) -> Trial:
    """Compile a program under `in_place`, with the arguments donated that it copies, and run it on zeros if `timed`.

    Where donation is enough, `in_place` is left out.
    """
    least = min(copy.num_bytes for copy in (*case.copies, *case.copies.arguments))
    as_it_is = _Way("as it is", _unchanged, case.donated)
    donated = case.donated | {copy.number for copy in case.copies.arguments}
    both = "donated, under in_place" if donated > case.donated else "under in_place"
    ways = [_Way("donated", _unchanged, donated)] if donated > case.donated and not case.copies else []
    for way in (*ways, _Way(both, in_place, donated)):
        started = time.perf_counter()
        compiled = way.compiled(case.jaxpr)
        compiling = time.perf_counter() - started
        left = _left(compiled, least)
        if not left:
            break
    if not (timed and case.ends) or case.jaxpr.effects:
        return Trial(left, None, None, way.how)
    plain = as_it_is.compiled(case.jaxpr)

    def measured() -> tuple[Measurement, Measurement]:
        return as_it_is.measured(case.jaxpr, 1, plain), way.measured(case.jaxpr, 1, compiled)

    before, after = _again_if_slower(*measured(), measured)
    growth = None
    if before.seconds < _LONGEST and compiling < _PATIENCE and (fewer := quartered(case.jaxpr)):
        with contextlib.suppress(Exception):  # whatever it is, the program itself was measured
            growth = as_it_is.grown(fewer, before), way.grown(fewer, after)
    memory = before.num_bytes, after.num_bytes
    return Trial(left, before.seconds, after.seconds, way.how, growth, memory)


def grows(case: CompiledProgram) -> bool:
    """Return whether the time or the memory of a program grows faster than its steps for no good reason.

    A good reason is that each step computes with all rows, unless `in_place` makes it twice as good. The program gets a
    trial.
    """
    fewer = None if case.jaxpr.effects else quartered(case.jaxpr)
    if fewer is None:
        return False
    as_it_is, healed = _Way("as it is", _unchanged, case.donated), _Way("under in_place", in_place, case.donated)
    before = as_it_is.measured(case.jaxpr, 1)
    if not _SHORTEST < before.seconds < _LONGEST:
        return False
    growth = as_it_is.grown(fewer, before)
    if not growth.is_too_much:
        return False
    after = healed.measured(case.jaxpr, 1)
    before, after = _again_if_slower(
        before, after, lambda: (as_it_is.measured(case.jaxpr, 1), healed.measured(case.jaxpr, 1))
    )
    growths = growth, healed.grown(fewer, after)
    case.loop = place_of(outermost(case.jaxpr))
    case.copies.kept = kept_for_gradient(case.jaxpr)
    memory = before.num_bytes, after.num_bytes
    case.trial = Trial(None, before.seconds, after.seconds, healed.how, growths, memory)
    helps = _GAIN * after.seconds < before.seconds or _GAIN * after.num_bytes < before.num_bytes
    return helps or not computes_with_all_rows(case.jaxpr, fewer[1])


def _again_if_slower(
    before: Measurement, after: Measurement, measured: Callable[[], tuple[Measurement, Measurement]]
) -> tuple[Measurement, Measurement]:
    """Measure again what has become slower, since the machine may have been busy. Return the shorter times."""
    if after.seconds <= before.seconds:
        return before, after
    again, after_again = measured()
    return _shorter(before, again), _shorter(after, after_again)


def _shorter(first: Measurement, second: Measurement) -> Measurement:
    return min(first, second, key=lambda measured: measured.seconds)


def _unchanged(f: Any) -> Any:
    return f


def _left(compiled: Any, min_bytes: int) -> int:
    hlo = compiled.as_text() or ""
    return len(copies_in(hlo, min_bytes)) + len(argument_copies(hlo, min_bytes))
