"""The times of a program and of the same under `in_place`, in turns; their results, and the bodies of their loops."""

import gc
import math
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.harm.program import PLAIN, VARIANTS, Function, Program
from benchmarks.wild.measure import TOLERANCE, difference

#: The targets: run time, and compile time at worst and in the median, as parts of plain JAX's.
RUN, COMPILE, COMPILE_MEDIAN = 1.1, 1.6, 1.2

ROOT = Path(__file__).parent.parent.parent

#: A sample takes no less.
LEAST_SECONDS = 0.005


class Effort(NamedTuple):
    """Seconds for which a function runs, least samples of it, and how often it is compiled."""

    seconds: float = 0.3
    samples: int = 4
    compilations: int = 2


FULL, QUICK = Effort(), Effort(0.15, 3, 1)


class Row(NamedTuple):
    """A variant of a program, plain and under `in_place`.

    `plain_ms` and `in_place_ms` are CPU times of a run. `ratio` is that of these or of the medians, whichever is less,
    since a busy machine only adds; `wall` is that of the least wall times. `compile_s` is what plain JAX takes to
    trace, lower and compile, in CPU seconds. `same` says whether the bodies of all loops are, equation for equation, or
    the program if it has no loop. `error` says why there is nothing.
    """

    family: str
    name: str
    variant: str
    plain_ms: float = 0.0
    in_place_ms: float = 0.0
    ratio: float = 0.0
    wall: float = 0.0
    compile_s: float = 0.0
    compile_ratio: float = 0.0
    same: bool = False
    difference: float = 0.0
    error: str = ""

    @property
    def is_right(self) -> bool:
        """Whether the results are equal."""
        return not self.error and self.difference <= TOLERANCE

    @property
    def is_harmless(self) -> bool:
        """Whether it reaches the targets that are set for one program."""
        return self.is_right and self.ratio <= RUN and self.compile_ratio <= COMPILE


def rows_of(program: Program, variants: Sequence[str], effort: Effort = FULL) -> Iterator[Row]:
    """Measure variants of a program. ImportError if it needs a library that is not installed."""
    for plain, f in PLAIN.items():
        chosen = [name for name in program.variants() if name in variants and VARIANTS[name][0] == plain]
        if chosen:
            args = program.arguments(plain.startswith("vmap"))
            functions = [f(program), *(VARIANTS[name][1](program) for name in chosen)]
            try:
                found = _measured(functions, args, effort)
            except Exception as error:  # the table says so, and the next is measured
                if len(chosen) > 1:  # one order of the gradient may do
                    for name in chosen:
                        yield from rows_of(program, [name], effort)
                    continue
                text = str(error).strip().partition("\n")[0].replace(f"{ROOT}/", "")
                found = [{"error": f"{type(error).__name__}: {text}"[:120]}]
            for name, values in zip(chosen, found, strict=True):
                if "difference" in values:
                    values["difference"] /= program.rounding
                yield Row(program.family, program.name, name, **values)


def _measured(functions: Sequence[Function], args: Sequence[Any], effort: Effort) -> list[dict[str, Any]]:
    """What a row says of each function but the first, which is plain."""
    built = [_Built(f, args) for f in functions]
    for _ in range(effort.compilations):
        for one in built:
            one.compile()
    if any(one.seconds > COMPILE * built[0].seconds for one in built):
        for one in built:
            one.compile()
    results = [one.run(*args) for one in built]
    _take(built, effort.seconds, effort.samples)
    for times, doubtful in ((3, math.inf), (9, 1.5)):  # a ratio above the limit is measured again before it counts
        if any(RUN < _ratio(one.cpu, built[0].cpu) < doubtful for one in built):
            _take(built, times * effort.seconds, effort.samples)
    return [
        {
            "plain_ms": 1e3 * _undisturbed(built[0].cpu),
            "in_place_ms": 1e3 * _undisturbed(one.cpu),
            "ratio": _ratio(one.cpu, built[0].cpu),
            "wall": min(one.wall) / min(built[0].wall),
            "compile_s": built[0].seconds,
            "compile_ratio": one.seconds / built[0].seconds,
            "same": one.loops == built[0].loops,
            "difference": difference(result, results[0]),
        }
        for one, result in zip(built[1:], results[1:], strict=True)
    ]


def _undisturbed(times: Sequence[float]) -> float:
    """The lower quartile. The least may be wrong: clocks of virtual CPUs leave out parts of some runs."""
    return sorted(times)[len(times) // 4]


def _ratio(ours: Sequence[float], plain: Sequence[float]) -> float:
    return min(of(ours) / of(plain) for of in (_undisturbed, statistics.median))


class _Built:
    """A function that is compiled, and its times: CPU seconds of making it, CPU and wall seconds of runs."""

    def __init__(self, f: Function, args: Sequence[Any]) -> None:
        self.f, self.args = f, args
        self.seconds = math.inf
        self.cpu: list[float] = []
        self.wall: list[float] = []
        self.runs = 0

    def compile(self) -> None:
        """Trace, lower and compile it as if for the first time."""
        jax.clear_caches()
        gc.collect()
        start = time.process_time()
        traced = jax.jit(lambda *args: self.f(*args)).trace(*self.args)
        self.run = traced.lower().compile()
        self.seconds = min(self.seconds, time.process_time() - start)
        self.loops = list(_bodies(traced.jaxpr.jaxpr)) or [_text(traced.jaxpr.jaxpr)]

    def sample(self) -> None:
        """Run it for some milliseconds at least: clocks of the CPU are no finer everywhere."""
        if not self.runs:
            self.runs = math.ceil(LEAST_SECONDS / min(self._timed(1)[1] for _ in range(3)))
        cpu, wall = self._timed(self.runs)
        self.cpu.append(cpu)
        self.wall.append(wall)

    def _timed(self, runs: int) -> tuple[float, float]:
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(runs):
            jax.block_until_ready(self.run(*self.args))
        return (time.process_time() - cpu) / runs, (time.perf_counter() - wall) / runs


def _take(built: Sequence[_Built], seconds: float, least: int) -> None:
    """Take samples for so long of each, in turns."""
    end, taken = time.perf_counter() + seconds * len(built), 0
    while taken < least or time.perf_counter() < end:
        for one in built if taken % 2 else reversed(built):
            one.sample()
        taken += 1


def _bodies(jaxpr: Any) -> Iterator[str]:
    """What is in the outermost loops, as text."""
    for eqn in jaxpr.eqns:
        for inner in _inner(list(eqn.params.values())):
            if eqn.primitive.name in ("scan", "while"):
                yield _text(inner)
            else:
                yield from _bodies(inner)


def _text(jaxpr: Any) -> str:
    """Without the addresses of objects."""
    return re.sub(r"0x[0-9a-f]+", "", str(jaxpr))


def _inner(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _inner(value)
        elif hasattr(value := getattr(value, "jaxpr", value), "eqns"):
            yield value
