"""Measure how the time and the memory of a function grow with its size."""

import math
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import jax

from jax_tensorarray.doctor._text import factor, milliseconds, readable

#: By how much a size is multiplied, and the first size, unless sizes are given.
_TIMES = 4
_FIRST = 64

#: Sizes grow until a run takes so many seconds, or a compilation so many, or they are so large.
_ENOUGH, _SLOW, _LARGEST = 0.01, 20.0, 4**10

#: By default time and memory may grow as this power of the size: half way between linear and quadratic.
_ALLOWED = 1.5


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How the time and the memory of a function grow with its size, or with the number of steps.

    Attributes:
      sizes: the smaller and the larger size.
      seconds: for each size, the shortest time of several runs.
      num_bytes: for each size, the bytes that XLA allocates for results and temporary arrays.
    """

    sizes: tuple[int, int]
    seconds: tuple[float, float]
    num_bytes: tuple[int, int]

    @property
    def size_ratio(self) -> float:
        """The larger size, divided by the smaller one."""
        return self.sizes[1] / self.sizes[0]

    @property
    def time_ratio(self) -> float:
        """The time at the larger size, divided by the time at the smaller one."""
        return self.seconds[1] / self.seconds[0]

    @property
    def memory_ratio(self) -> float:
        """The memory at the larger size, divided by that at the smaller one; 1 if the function needs no memory."""
        return self.num_bytes[1] / self.num_bytes[0] if all(self.num_bytes) else 1.0

    @property
    def time_exponent(self) -> float:
        """The exponent of the time as a power of the size: 1 if it is linear, 2 if it is quadratic."""
        return math.log(self.time_ratio) / math.log(self.size_ratio)

    @property
    def memory_exponent(self) -> float:
        """The exponent of the memory as a power of the size."""
        return math.log(self.memory_ratio) / math.log(self.size_ratio)

    @property
    def is_quadratic(self) -> bool:
        """Whether the time, whatever the memory does, is nearer to quadratic than to linear."""
        return self.time_ratio > self.size_ratio**_ALLOWED

    @property
    def is_too_much(self) -> bool:
        """Whether the time or the memory is nearer to quadratic than to linear."""
        return self.is_quadratic or self.memory_ratio > self.size_ratio**_ALLOWED

    def as_json(self) -> dict[str, Any]:
        """Return the measures and the factors as numbers."""
        ratios = {name: getattr(self, name) for name in ("size_ratio", "time_ratio", "memory_ratio")}
        return asdict(self) | ratios

    def __str__(self) -> str:
        return f"{self.of_time}, {_times(self.memory_ratio, 'memory')}"

    @property
    def of_time(self) -> str:
        """The growth of the time as text."""
        return f"{factor(self.size_ratio)} times the steps, {_times(self.time_ratio, 'time')}"


def _times(ratio: float, what: str) -> str:
    return f"{factor(ratio)} times the {what}" if factor(ratio) != "1" else f"the same {what}"


class GrowthError(RuntimeError):
    """The error of `forbid_growth`. `growth` is the `Growth` that was measured."""

    def __init__(self, growth: Growth, allowed: str) -> None:
        of_time = " -> ".join(map(milliseconds, growth.seconds))
        of_memory = " -> ".join(map(readable, growth.num_bytes))
        super().__init__(
            f"forbid_growth: {growth}, from {growth.sizes[0]} to {growth.sizes[1]} ({of_time}; {of_memory}), but "
            f"{allowed}. doctor.loop_copies and doctor.watch find what is copied or kept in every step."
        )
        self.growth = growth


def growth(
    fun: Callable[..., object], make_args: Callable[[int], object], sizes: tuple[int, int] | None = None
) -> Growth:
    """Run a function at two sizes, and return how its time and its memory grow.

    A loop of T steps is linear if 4 times the steps take 4 times the time. A copy of a buffer in every step makes it
    quadratic: 4 times the steps take 16 times the time.

    Args:
      fun: a function of arrays, or pytrees of them, jitted or not. `growth` compiles it for both sizes.
      make_args: a function that takes a size and returns the arguments of `fun`: a tuple, or the only argument.
      sizes: two sizes. By default the second is 4 times the first, and both grow from 64 until a run takes 10 ms.

    Returns:
      A `Growth`. It prints as "4 times the steps, 15 times the time, 4 times the memory".

    Raises:
      TypeError: `fun` or `make_args` is not a function, or a size is not an integer.
      ValueError: `sizes` is not two positive integers, the smaller one first.

    >>> import jax, jax.numpy as jnp
    >>> from jax_tensorarray.doctor import growth
    >>> def versions(x):
    ...     return jax.lax.scan(lambda b, i: (b.at[i].set(1.0), b), x, jnp.arange(len(x)))
    >>> grown = growth(versions, jnp.ones, sizes=(100, 400))
    >>> 12 < grown.memory_ratio < 17, round(grown.memory_exponent)
    (True, 2)
    """
    return _measured(*_checked("growth", fun, make_args, sizes))


def forbid_growth(
    fun: Callable[..., object],
    make_args: Callable[[int], object],
    sizes: tuple[int, int] | None = None,
    *,
    time: float | None = None,
    memory: float | None = None,
) -> Growth:
    """Raise an error if the time or the memory of a function grows too much with its size.

    A time that is too long is measured again, because another process may have been the cause.

    Args:
      fun: as for `growth`.
      make_args: as for `growth`.
      sizes: as for `growth`.
      time: the largest `time_ratio` that is allowed. The default is the ratio of the sizes to the power 1.5: 8 for 4
        times the size, half way between linear and quadratic. `float("inf")` allows anything.
      memory: the largest `memory_ratio` that is allowed, with the same default.

    Returns:
      The `Growth` that was measured.

    Raises:
      GrowthError: the time or the memory grows by more than the ratio that is allowed.
      TypeError, ValueError: as for `growth`, or `time` or `memory` is not positive.

    >>> import jax, jax.numpy as jnp
    >>> from jax_tensorarray.doctor import forbid_growth
    >>> def squares(x):
    ...     return jax.lax.scan(lambda total, y: (total + y * y, total), 0.0, x)
    >>> forbid_growth(squares, jnp.ones, sizes=(100, 400)).memory_ratio < 5
    True
    """
    for name, allowed in (("time", time), ("memory", memory)):
        if allowed is not None and not (isinstance(allowed, int | float) and allowed > 0):
            raise ValueError(f"forbid_growth: {name} must be None or a positive number, but it is {allowed!r}.")
    fun, make_args, sizes = _checked("forbid_growth", fun, make_args, sizes)
    measured = _measured(fun, make_args, sizes)
    default = measured.size_ratio**_ALLOWED
    time, memory = default if time is None else time, default if memory is None else memory
    if measured.time_ratio > time:
        again = _measured(fun, make_args, measured.sizes)
        small, large = map(min, measured.seconds, again.seconds)
        measured = replace(measured, seconds=(small, large))
    if measured.memory_ratio > memory:
        raise GrowthError(measured, f"{factor(memory)} times the memory are allowed")
    if measured.time_ratio > time:
        raise GrowthError(measured, f"{factor(time)} times the time is allowed")
    return measured


def _checked(name: str, fun: Any, make_args: Any, sizes: Any) -> tuple[Any, Any, Any]:
    for what, value in (("fun", fun), ("make_args", make_args)):
        if not callable(value):
            raise TypeError(f"{name}: {what} must be a function, not {type(value).__name__}.")
    if sizes is None:
        return fun, make_args, None
    try:
        small_and_large = tuple(map(operator.index, sizes))
    except TypeError:
        raise TypeError(f"{name}: sizes must be two integers, but they are {sizes!r}.") from None
    if len(small_and_large) != 2 or not 0 < small_and_large[0] < small_and_large[1]:
        raise ValueError(f"{name}: sizes must be two positive integers that grow, but they are {sizes!r}.")
    return fun, make_args, small_and_large


class Measurement(NamedTuple):
    """The measurement at one size."""

    size: int
    seconds: float
    num_bytes: int


def _measured(f: Callable[..., Any], make_args: Callable[[int], Any], sizes: tuple[int, int] | None) -> Growth:
    jitted = f if hasattr(f, "lower") else jax.jit(f)
    if sizes is not None:
        return growth_of(*(_at(jitted, make_args, n) for n in sizes))
    before, started = _at(jitted, make_args, _FIRST), time.perf_counter()
    while True:
        now = _at(jitted, make_args, _TIMES * before.size)
        took, started = time.perf_counter() - started, time.perf_counter()
        if now.seconds >= _ENOUGH or took >= _SLOW or now.size >= _LARGEST:
            return growth_of(before, now)
        before = now


def growth_of(small: Measurement, large: Measurement) -> Growth:
    """Compare the measurements at two sizes."""
    return Growth(
        sizes=(small.size, large.size),
        seconds=(small.seconds, large.seconds),
        num_bytes=(small.num_bytes, large.num_bytes),
    )


def _at(jitted: Any, make_args: Callable[[int], Any], n: int) -> Measurement:
    def args() -> tuple[Any, ...]:
        made = make_args(n)
        return made if isinstance(made, tuple) else (made,)

    num_bytes = allocated(jitted.lower(*args()).compile())
    return Measurement(n, seconds_of(jitted, args), num_bytes)


def allocated(compiled: Any) -> int:
    """Return the bytes that XLA allocates for the results and temporary arrays of a program, 0 if it does not say."""
    known = compiled.memory_analysis()
    if known is None:
        return 0
    return int(known.temp_size_in_bytes + known.output_size_in_bytes - known.alias_size_in_bytes)


def seconds_of(f: Callable[..., Any], make_args: Callable[[], Sequence[Any]]) -> float:
    """Return the shortest time of several runs, a second in all, or of one longer run.

    A run with donated arguments gets fresh ones.
    """
    took: list[float] = []
    args = jax.block_until_ready(make_args())
    jax.block_until_ready(f(*args))
    while not took or (sum(took) < 1.0 and len(took) < 10):
        if any(x.is_deleted() for x in jax.tree.leaves(args) if isinstance(x, jax.Array)):
            args = jax.block_until_ready(make_args())
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        took.append(time.perf_counter() - start)
    return min(took)
