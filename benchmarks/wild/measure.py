"""What the doctor finds in a program, what `in_place` makes of it, and whether the results are equal."""

import importlib.metadata
import math
import os
import re
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.wild.programs import Program
from jax_tensorarray import in_place
from jax_tensorarray.doctor import LoopCopy, watch

Function = Callable[..., Any]

#: Results differ if they do by more than this part of the largest number.
TOLERANCE = 1e-4

#: A difference by less than this is none. A larger loss is measured again before it counts.
NOISE = 1.1

#: A sample takes no less.
LEAST_SECONDS = 0.005


class Found(NamedTuple):
    """One program at one size, forward or differentiated in one order.

    `copies` whole-buffer operations are found, which move `num_bytes` a step; the worst is at `where`. Under `in_place`
    there are `left` of them. `before` and `after` are CPU seconds, `difference` is that of the results. If XLA compiles
    the same instructions for both, the program `is_unchanged`, and both times are that of plain JAX.
    """

    size: int
    copies: int
    num_bytes: int
    kind: str
    where: str
    left: int
    before: float
    after: float
    difference: float
    is_unchanged: bool

    @property
    def gain(self) -> float:
        """How many times as fast it is."""
        return self.before / self.after

    @property
    def is_equal(self) -> bool:
        """Whether the results are."""
        return self.difference <= TOLERANCE


class Row(NamedTuple):
    """The measurements of a program: for each pass, one at each size."""

    name: str
    version: str
    passes: dict[str, list[Found]]

    @property
    def found(self) -> list[Found]:
        """The measurements of all passes."""
        return [found for sizes in self.passes.values() for found in sizes]


def row_of(program: Program, seconds: float = 0.4) -> Row:
    """Measure a program at its sizes."""
    passes: dict[str, list[Found]] = {}
    for size in program.sizes:
        f, args = program.make(size)
        for plain, ours in functions_of(f, program.gradient):
            for which, one in found(plain, ours, args, size, seconds).items():
                passes.setdefault(which, []).append(one)
    return Row(program.name, importlib.metadata.version(program.library), passes)


def functions_of(f: Function, gradient: bool) -> Iterator[tuple[Function, dict[str, Function]]]:
    """Yield a function and the same under `in_place`, by the name of the pass; then its gradient in both orders."""
    yield f, {"forward": in_place(f)}
    if gradient:
        yield (
            jax.grad(_total_of(f)),
            {"grad(in_place)": jax.grad(_total_of(in_place(f))), "in_place(grad)": in_place(jax.grad(_total_of(f)))},
        )


def _total_of(f: Function) -> Function:
    def total(*args: Any) -> Any:
        return sum(jnp.sum(x) for x in jax.tree.leaves(f(*args)) if jnp.issubdtype(x.dtype, jnp.floating))

    return total


def found(
    plain: Function, ours: Mapping[str, Function], args: Sequence[Any], size: int, seconds: float
) -> dict[str, Found]:
    """Measure a function and its versions under `in_place`."""
    before, copies = _compiled(plain, args)
    compiled = {which: _compiled(f, args) for which, f in ours.items()}
    changed = {which: it for which, (it, _) in compiled.items() if instructions(it) != instructions(before)}
    took, *others = _settled([before, *changed.values()], args, seconds)
    after = dict(zip(changed, others, strict=True))
    return {
        which: Found(
            size=size,
            copies=len(copies),
            num_bytes=sum(copy.num_bytes for copy in copies),
            kind=copies[0].kind if copies else "",
            where=_place(copies[0]) if copies else "",
            left=len(left),
            before=took,
            after=after.get(which, took),
            difference=difference(program(*args), before(*args)),
            is_unchanged=which not in changed,
        )
        for which, (program, left) in compiled.items()
    }


def instructions(program: Any) -> str:
    """The HLO of a program without the lines of the source, its names numbered as they come."""
    source = r", metadata=\{[^}]*\}|^(File|Function|Stack)[A-Z]\w+\n.*?\n\n"
    text = re.sub(source, "", program.as_text(), flags=re.S | re.M)
    names: dict[str, str] = {}
    return re.sub(r"%?\b[a-zA-Z_][\w-]*(\.\d+)+\b", lambda m: names.setdefault(m[0].lstrip("%"), f"{len(names)}"), text)


def _compiled(f: Function, args: Sequence[Any]) -> tuple[Any, Sequence[LoopCopy]]:
    with watch() as seen:
        program = jax.jit(lambda *args: f(*args)).lower(*args).compile()
    return program, seen.copies


def seconds_of(functions: Sequence[Function], args: Sequence[Any], limit: float) -> list[float]:
    """The CPU seconds of a run of each function, each of which runs for about `limit` seconds.

    Functions take turns of two samples: in the first, memory of the other one is given back. The lower quartile counts,
    since a busy machine only adds.
    """
    runs = [max(1, math.ceil(LEAST_SECONDS / min(_seconds(f, args, 1) for _ in range(3)))) for f in functions]
    samples: list[list[float]] = [[] for _ in functions]
    end = time.process_time() + limit * len(functions)
    while not samples[0] or time.process_time() < end:
        for f, times, of in zip(functions, samples, runs, strict=True):
            times += [_seconds(f, args, of) for _ in range(2)]
    return [sorted(times)[len(times) // 4] for times in samples]


def _seconds(f: Function, args: Sequence[Any], runs: int) -> float:
    start = time.process_time()
    for _ in range(runs):
        jax.block_until_ready(f(*args))
    return (time.process_time() - start) / runs


def _settled(functions: Sequence[Function], args: Sequence[Any], limit: float) -> list[float]:
    """The times of functions. If one seems slower than the first, longer measurements replace them, up to two."""
    for times in (1, 3, 9):
        took = seconds_of(functions, args, times * limit)
        if max(took) <= NOISE * took[0]:
            break
    return took


def difference(ours: Any, theirs: Any) -> float:
    """The largest difference of two results, as a part of the largest number of its array."""
    parts = [0.0]
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        a, b = (np.asarray(z, np.float64) for z in (x, y))
        if not np.array_equal(a, b, equal_nan=True):
            finite = np.isfinite(b)
            same = np.array_equal(a[~finite], b[~finite], equal_nan=True)
            part = np.max(np.abs(a[finite] - b[finite]), initial=0) / np.max(np.abs(b[finite]), initial=1e-30)
            parts.append(float(part) if same else np.inf)
    return max(parts)


def _place(copy: LoopCopy) -> str:
    """The line, from where Python's packages are."""
    if not copy.file:
        return "?"
    packages = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    inside = [os.path.relpath(copy.file, p) for p in packages if copy.file.startswith(p)]
    return f"{inside[0] if inside else os.path.basename(copy.file)}:{copy.line}"
