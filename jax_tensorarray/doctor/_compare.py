"""Compare the values of two runs of a program: the results of its jitted functions, its output and its exit status."""

import contextlib
import pickle
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_tensorarray import _compat
from jax_tensorarray._in_place.checking import is_near, tolerance_for, tolerance_of

#: The first calls of each function are recorded, and then the calls whose number is a power of two.
_FIRST_CALLS = 100

#: The number of elements, evenly spaced, that are recorded of a larger array.
_ELEMENTS = 65_536

#: The bytes that are recorded in all.
_BYTES = 2**28

#: The largest relative difference of numbers that a program prints.
_PRINTED = 1e-3


@dataclass
class Recorded:
    """The record of a run."""

    #: By the function and the number of the call: by their paths, the arrays in the result, each with its dtype in JAX.
    calls: dict[tuple[str, int], dict[str, tuple[Any, str]]] = field(default_factory=dict)
    numbers: Counter[str] = field(default_factory=Counter)  #: of calls, by the function
    left_out: int = 0  #: the number of calls that were not recorded, because there was too much


# --- in the process of the program -----------------------------------------------------------------------------


class Recorder:
    """Keeps the results of jitted functions. `seconds` is the time that this took."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.recorded = Recorded()
        self._bytes = 0
        self._lock = threading.RLock()

    def seen(self, function: Any, results: Any) -> None:
        """Record the results of a call, unless JAX itself or the compiler of a framework has defined the function."""
        module = str(getattr(getattr(function, "__wrapped__", function), "__module__", ""))
        name = getattr(function, "__name__", "")
        if not name or f"{module}.".startswith(("jax.", "jaxlib.")):
            return
        with self._lock:
            self.recorded.numbers[name] += 1
            number = self.recorded.numbers[name]
            if number > _FIRST_CALLS and number & (number - 1):
                return
            if self._bytes > _BYTES:
                self.recorded.left_out += 1
                return
            jax.block_until_ready(results)  # this time is the program's
            started = time.perf_counter()
            arrays = self.recorded.calls[name, number] = {}
            for path, leaf in jax.tree_util.tree_leaves_with_path(results):
                array = _sample(leaf)
                if array is not None:
                    arrays[jax.tree_util.keystr(path)] = array, leaf.dtype.name
                    self._bytes += array.nbytes
            self.seconds += time.perf_counter() - started


def _sample(x: Any) -> Any:
    """Return the elements of an array that are compared. None if there are none here."""
    if not isinstance(x, jax.Array) or not x.is_fully_addressable or x.is_deleted():
        return None
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # such as keys of random numbers
        return None
    array = np.asarray(x)
    if array.dtype.kind not in "biufc":  # NumPy cannot store bfloat16 and other types of JAX
        array = array.astype(np.float32)
    if array.size <= _ELEMENTS:
        return array.copy()
    return array.reshape(-1)[np.linspace(0, array.size - 1, _ELEMENTS).astype(np.int64)]


@contextlib.contextmanager
def recorded(file: Path | None) -> Iterator[Recorder | None]:
    """Record the results of the jitted functions that are called in a block, in a file."""
    if file is None:
        yield None
        return
    recorder = Recorder()
    with _compat.results(recorder.seen):
        yield recorder
    file.write_bytes(pickle.dumps(recorder.recorded))


# --- in the process that compares ------------------------------------------------------------------------------


def run(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Run a command and pass its standard output on. Return its exit status and the output."""
    parts: list[bytes] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        while part := process.stdout.read1():  # type: ignore[attr-defined]
            parts.append(part)
            sys.stdout.write(part.decode(errors="replace"))
            sys.stdout.flush()
    return process.returncode, b"".join(parts).decode(errors="replace")


class Compared(NamedTuple):
    """The comparison of two runs."""

    calls: int  #: how many calls were compared
    functions: int  #: of how many functions
    left_out: int  #: how many calls were not recorded, because there was too much
    difference: str  #: the first one; empty if there is none
    output: str  #: the first difference of the standard outputs; empty if there is none

    def lines(self) -> list[str]:
        """Return the lines that say what was compared, and the result."""
        calls = f"{self.calls} call{'s' * (self.calls != 1)}"
        functions = f"{self.functions} jitted function{'s' * (self.functions != 1)}"
        rest = f" ({self.left_out} more calls were not recorded)" if self.left_out else ""
        compared = f"the results of {calls} of {functions}{rest}. Numbers of float32 may differ by "
        compared += f"{_allowed('float32')} of the largest in their array, float64 by {_allowed('float64')}, and "
        compared += f"bfloat16 by {_allowed('bfloat16')}, as with check=True."
        if not self.calls:
            compared = "only the output. The program called no function of its own that it jits."
        values = f"different, first in {self.difference}. {_SEEDS}" if self.difference else "the same"
        output = f"different, first in {self.output}" if self.output else "the same"
        return [f"compared: {compared}", f"values:   {values}", f"output:   {output}"]


def _allowed(dtype: str) -> str:
    """Return the relative tolerance of a type as text."""
    return f"{tolerance_of(dtype)[0]:.2g}"


def compared(files: Sequence[Path], outputs: Sequence[str]) -> Compared:
    """Compare the recorded results of two runs and their outputs."""
    unchanged, rewritten = (pickle.loads(file.read_bytes()) for file in files)  # the child is this program
    common = [call for call in unchanged.calls if call in rewritten.calls]
    found = ((call, _difference(unchanged.calls[call], rewritten.calls[call])) for call in common)
    differences = (f"call {number} of {name}, {text}" for (name, number), text in found if text)
    difference = next(differences, "") or _other_calls(unchanged.numbers, rewritten.numbers)
    left_out = max(unchanged.left_out, rewritten.left_out)
    return Compared(len(common), len({name for name, _ in common}), left_out, difference, _lines(*outputs))


def _other_calls(unchanged: Mapping[str, int], rewritten: Mapping[str, int]) -> str:
    """Return which function was not called equally often."""
    for name in [*unchanged, *rewritten]:
        before, after = unchanged.get(name, 0), rewritten.get(name, 0)
        if before != after:
            return f"the number of calls of {name}: {before} unchanged, {after} under in_place"
    return ""


def _difference(unchanged: Mapping[str, tuple[Any, str]], rewritten: Mapping[str, tuple[Any, str]]) -> str:
    """Return the first difference between the results of a call."""
    if list(unchanged) != list(rewritten):
        return f"its structure: {len(unchanged)} arrays unchanged, {len(rewritten)} under in_place"
    for path, (before, dtype) in unchanged.items():
        after, dtype_after = rewritten[path]
        if (before.shape, dtype) != (after.shape, dtype_after):
            types = f"{dtype}{list(before.shape)}", f"{dtype_after}{list(after.shape)}"
            return "result{}: {} unchanged, {} under in_place".format(path, *types)
        wrong = _wrong(before, after, dtype)
        if wrong.any():
            at = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
            element = f"[{', '.join(map(str, at))}]" if at else ""
            return f"result{path}{element}: {before[at]!s} unchanged, {after[at]!s} under in_place"
    return ""


def _wrong(before: Any, after: Any, dtype: str) -> Any:
    """Return where two arrays of a type differ by more than rounding, with the tolerance of `check=True`."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return np.asarray(before != after)
    with np.errstate(invalid="ignore"):
        return ~is_near(after, before, tolerance_for(before, dtype, np), np)


_SEEDS = "If the program takes random numbers without a fixed seed, two unchanged runs differ too."

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def _lines(unchanged: str, rewritten: str) -> str:
    """Return the first line in which two texts differ by more than the rounding of numbers."""
    before, after = unchanged.splitlines(), rewritten.splitlines()
    for number, (a, b) in enumerate(zip(before, after, strict=False), 1):
        numbers = [[float(x) for x in _NUMBER.findall(text)] for text in (a, b)]
        is_same = _NUMBER.sub("#", a) == _NUMBER.sub("#", b) and np.allclose(numbers[0], numbers[1], rtol=_PRINTED)
        if not is_same:
            return f"line {number}: {a.strip()[:60]!r} unchanged, {b.strip()[:60]!r} under in_place"
    if len(before) != len(after):
        return f"its length: {len(before)} lines unchanged, {len(after)} under in_place"
    return ""
