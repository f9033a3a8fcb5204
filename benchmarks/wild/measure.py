"""What the doctor finds in a program, what `in_place` makes of it, and whether the results are equal."""

import importlib.metadata
import os
import sysconfig
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.wild.programs import Program
from jax_tensorarray import in_place
from jax_tensorarray.doctor import LoopCopy, watch

#: Results differ if they do by more than this part of the largest number.
TOLERANCE = 1e-4


class Found(NamedTuple):
    """One program at one size, differentiated or not.

    `copies` whole-buffer operations are found, which move `num_bytes` a step; the worst is at `where`. Under `in_place`
    there are `left` of them. `before` and `after` are seconds, `difference` is that of the results.
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

    @property
    def gain(self) -> float:
        """How many times as fast it is."""
        return self.before / self.after

    @property
    def is_equal(self) -> bool:
        """Whether the results are."""
        return self.difference <= TOLERANCE


class Row(NamedTuple):
    """What is found of a program, at its sizes."""

    name: str
    version: str
    forward: list[Found]
    gradient: list[Found]


def row_of(program: Program, sizes: Sequence[int] | None = None, seconds: float = 2.0) -> Row:
    """Measure a program at its two sizes, or others."""
    sizes = sizes or (program.small, program.large)
    forward, gradient = [], []
    for size in sizes:
        f, args = program.make(size)
        forward.append(found(f, args, size, seconds))
        if program.gradient:
            gradient.append(found(jax.grad(_total_of(f)), args, size, seconds))
    return Row(program.name, importlib.metadata.version(program.library), forward, gradient)


def _total_of(f: Callable[..., Any]) -> Callable[..., Any]:
    def total(*args: Any) -> Any:
        return sum(jnp.sum(x) for x in jax.tree.leaves(f(*args)) if jnp.issubdtype(x.dtype, jnp.floating))

    return total


def found(f: Callable[..., Any], args: Sequence[Any], size: int, seconds: float) -> Found:
    """Measure a function."""
    with watch() as as_is:
        before = jax.jit(lambda *args: f(*args)).lower(*args).compile()
    with watch() as repaired:
        after = jax.jit(in_place(lambda *args: f(*args))).lower(*args).compile()
    copies = as_is.copies
    took = seconds_of([before, after], args, seconds)
    return Found(
        size=size,
        copies=len(copies),
        num_bytes=sum(copy.num_bytes for copy in copies),
        kind=copies[0].kind if copies else "",
        where=_place(copies[0]) if copies else "",
        left=len(repaired.copies),
        before=took[0],
        after=took[1],
        difference=difference(after(*args), before(*args)),
    )


def seconds_of(functions: Sequence[Callable[..., Any]], args: Sequence[Any], limit: float) -> list[float]:
    """The shortest of some runs of each function, two of them in turn: the first gives back memory of the other one."""
    took: list[list[float]] = [[] for _ in functions]
    for f in functions:
        jax.block_until_ready(f(*args))
    end = time.perf_counter() + limit
    while not took[0] or (time.perf_counter() < end and len(took[0]) < 60):
        for f, times in zip(functions, took, strict=True):
            for _ in range(2):
                start = time.perf_counter()
                jax.block_until_ready(f(*args))
                times.append(time.perf_counter() - start)
    return list(map(min, took))


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
