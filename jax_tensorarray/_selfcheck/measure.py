"""Compile, check and time the loops of the main job."""

import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_tensorarray import in_place
from jax_tensorarray._hlo import text as hlo_text
from jax_tensorarray._selfcheck.programs import Program, ours, plain

PLAIN, REPAIRED, OURS = "plain JAX", "in_place", "jax_tensorarray"
#: How a program is run: written in plain JAX, the same under `in_place`, and written with row ops or a TensorArray.
SIDES: dict[str, Callable[[Program], Callable[[jax.Array], jax.Array]]] = {
    PLAIN: lambda program: program.with_ops(plain),
    REPAIRED: lambda program: in_place(program.with_ops(plain)),
    OURS: lambda program: program.with_ops(ours),
}

#: A run predicted to take longer than this, in seconds, is left out.
LONGEST_RUN = 5.0


class Derivative(NamedTuple):
    """A derivative of a program, which is a function of `x` with two outputs."""

    title: str
    outputs: tuple[str, str]
    of: Callable[[Callable[[jax.Array], jax.Array]], Callable[[jax.Array], Any]]


gradient = Derivative("Gradient (jax.value_and_grad)", ("value", "gradient"), jax.value_and_grad)

second_order = Derivative(
    "Second order (jax.jvp of jax.grad)",
    ("gradient", "second derivative"),
    lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (x,)),
)


class Case(NamedTuple):
    """A row of a table: a program, the derivative computed, the shape of a row, and the values of T."""

    program: Program
    derivative: Derivative
    row: tuple[int, ...]
    sizes: tuple[int, ...]

    def x(self, T: int) -> np.ndarray[Any, Any]:
        """Return the input, the same on every run and machine."""
        return np.random.default_rng(0).standard_normal((T, *self.row), dtype=np.float32)


class Key(NamedTuple):
    """A case on one side, at one T."""

    case: Case
    side: str
    T: int


class Measured(NamedTuple):
    """Measurements of a case on one side. A time is None where the run was left out."""

    microseconds: list[float | None]
    copies: int
    other: int
    is_noisy: bool = False  #: whether the same run took twice as long at one time as at another

    @property
    def growth(self) -> float | None:
        """Time a step at the largest T over that at the smallest."""
        first, last = self.microseconds[0], self.microseconds[-1]
        return None if first is None or last is None or len(self.microseconds) == 1 else last / first


class Progress:
    """One line on stderr, rewritten while there is work; where stderr is not a terminal, a line now and then."""

    SECONDS = 10.0  #: between two lines

    def __init__(self, total: int) -> None:
        self.done, self.total, self.start = 0, total, time.perf_counter()
        self.shown, self.said = sys.stderr.isatty(), self.start

    def step(self, doing: str) -> None:
        """Count one more thing as done, and show that `doing` is next."""
        self.done += 1
        filled = 30 * self.done // self.total
        now = time.perf_counter()
        text = f"{self.done}/{self.total}  {now - self.start:.0f} s  {doing}"
        self._write(f"[{'#' * filled}{'.' * (30 - filled)}] {text}")
        if not self.shown and now - self.said > self.SECONDS:
            self.said = now
            print(text, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Clear the line, to make room for output."""
        self._write("")

    def _write(self, text: str) -> None:
        if self.shown:
            width = shutil.get_terminal_size().columns - 1
            print("\r" + text[:width].ljust(width), end="" if text else "\r", file=sys.stderr, flush=True)


def compile_all(keys: Sequence[Key], progress: Progress) -> dict[Key, Any]:
    """Compile all keys. XLA compiles in two threads while this one traces and lowers."""
    executables: dict[Key, Any] = {}
    waiting: deque[tuple[Key, Future[Any]]] = deque()

    def collect(left: int) -> None:
        while len(waiting) > left:
            key, future = waiting.popleft()
            executables[key] = future.result()
            progress.step(f"compiling {key.case.program.name}, T = {key.T}")

    with ThreadPoolExecutor(2) as pool:
        for key in keys:
            f = key.case.derivative.of(SIDES[key.side](key.case.program))
            waiting.append((key, pool.submit(jax.jit(f).lower(key.case.x(key.T)).compile)))
            collect(3)
        collect(0)
    return executables


def check(case: Case, executables: dict[Key, Any]) -> tuple[bool, str]:
    """Return whether both outputs are plain JAX's, at the smallest T, and a sentence about it."""
    T, name, outputs = case.sizes[0], case.program.name, case.derivative.outputs
    x = jax.device_put(case.x(T))
    found = {side: [np.asarray(out) for out in executables[Key(case, side, T)](x)] for side in SIDES}
    expected, worst = found.pop(PLAIN), 0.0
    for side, actual in found.items():
        for what, a, e in zip(outputs, actual, expected, strict=True):
            size, difference = float(np.max(np.abs(e))), float(np.max(np.abs(a - e)))
            if not np.allclose(a, e, rtol=1e-3, atol=1e-4 * size, equal_nan=True):
                return False, (
                    f"{name}: the {what} of {side} differs from plain JAX's by {difference:.2g}, "
                    f"where the largest entry is {size:.2g} (T = {T})."
                )
            worst = max(worst, difference / (size or 1.0))
    how = "are exactly as in plain JAX" if worst == 0 else f"agree with plain JAX to {worst:.0e}"
    return True, f"{name}: the {outputs[0]} and the {outputs[1]} {how}."


def seconds_of(run: Callable[[jax.Array], Any], x: jax.Array, spend: float = 0.02) -> float:
    """Return the shortest of several runs: at least three, unless the first takes long."""
    times: list[float] = []
    while not times or (times[0] < 5 * spend and (sum(times) < spend or len(times) < 3)):
        start = time.perf_counter()
        for output in run(x):
            output.block_until_ready()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(case: Case, side: str, executables: dict[Key, Any], progress: Progress) -> Measured:
    """Time `case` at each T, smallest first, and count what its loops do to a whole buffer at the largest."""
    microseconds: list[float | None] = []
    seconds, before = 0.0, case.sizes[0]
    for T in case.sizes:
        progress.step(f"timing {case.program.name}, T = {T}")
        if seconds * (T / before) ** 2 > LONGEST_RUN:
            microseconds.append(None)
            continue
        seconds, before = seconds_of(executables[Key(case, side, T)], jax.device_put(case.x(T))), T
        microseconds.append(seconds / T * 1e6)
    is_noisy = repeat(case, side, executables, microseconds)
    largest = case.sizes[-1]
    hlo, num_bytes = executables[Key(case, side, largest)].as_text(), case.x(largest).nbytes
    copies = hlo_text.copies_in_loops(hlo, num_bytes)
    other = set(hlo_text.whole_buffer_operations_in_loops(hlo, num_bytes)) - set(copies)
    return Measured(microseconds, len(copies), len(other), is_noisy)


def repeat(case: Case, side: str, executables: dict[Key, Any], microseconds: list[float | None]) -> bool:
    """Repeat what is neither linear nor quadratic, as long as that helps. Return whether it is still in doubt."""
    factor, noisy = case.sizes[-1] // case.sizes[0], False
    for _ in range(3):
        first, last = microseconds[0], microseconds[-1]
        if len(case.sizes) == 1 or first is None or last is None or not 2 < last / first < 0.75 * factor:
            return False
        noisy = False
        for k in (0, -1):
            T, old = case.sizes[k], microseconds[k] or 0.0
            new = seconds_of(executables[Key(case, side, T)], jax.device_put(case.x(T)), 0.06) / T * 1e6
            noisy = noisy or not 0.67 < new / old < 1.5
            microseconds[k] = min(new, old)
    return noisy
