"""One environment's part of a run: does what it is told, one line of JSON at a time.

`python -m benchmarks.worker jax` reads requests from stdin and answers each on stdout; `measure.py` writes them.
"""

import ctypes
import gc
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rivals import Prepared, Unsupported

#: A sample is as many runs as take about this long (s).
SAMPLE = 0.02


def seconds_of(prepared: Prepared) -> tuple[float, Any]:
    """One run."""
    start = time.perf_counter()
    output = prepared.run()
    return time.perf_counter() - start, output


class PeakMemory:
    """Bytes by which the process grows at most in a `with` block. (Linux; None elsewhere.)"""

    status = Path("/proc/self/status")

    def __enter__(self) -> "PeakMemory":
        gc.collect()
        self.bytes: int | None = None
        self.before: int | None = None
        try:
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
            self.before = self._read("VmRSS")
        except (OSError, AttributeError):
            pass
        return self

    def __exit__(self, *_: object) -> None:
        if self.before is not None:
            self.bytes = self._read("VmHWM") - self.before

    def _read(self, key: str) -> int:
        return 1024 * int(self.status.read_text().split(f"{key}:")[1].split()[0])


class Worker:
    """Cases that are ready, by a key that the other side chooses."""

    def __init__(self, environment: str) -> None:
        self.rivals = importlib.import_module(f"benchmarks.rivals.in_{environment}")
        self.ready: dict[str, Prepared] = {}
        self.runs_a_sample: dict[str, int] = {}

    def versions(self) -> dict[str, str]:
        """What runs here."""
        return self.rivals.versions()

    def prepare(self, key: str, what: list[Any]) -> dict[str, Any]:
        """Compile a case. Its size is known before anything runs."""
        self.ready[key] = prepared = self.rivals.prepare(*what)
        return {name: getattr(prepared, name) for name in ("compile_seconds", "temp_bytes", "copies")}

    def first(self, key: str, path: str) -> dict[str, Any]:
        """Run once, and leave the answer in a file."""
        prepared = self.ready[key]
        found: dict[str, Any] = {}
        if prepared.compiles_on_call:
            found["compile_seconds"], _ = seconds_of(prepared)
        with PeakMemory() as peak:
            found["seconds"], output = seconds_of(prepared)
        if prepared.compiles_on_call:
            found["compile_seconds"] = max(0.0, found["compile_seconds"] - found["seconds"])
        if prepared.resident:
            found["resident_bytes"] = peak.bytes
        np.savez(path, *prepared.answer(output))
        self.runs_a_sample[key] = int(min(max(SAMPLE / max(found["seconds"], 1e-9), 1), 1000))
        return found

    def sample(self, key: str) -> float:
        """Seconds of a run, a mean where runs are short."""
        runs, prepared = self.runs_a_sample[key], self.ready[key]
        start = time.perf_counter()
        for _ in range(runs):
            prepared.run()
        return (time.perf_counter() - start) / runs

    def compile(self, key: str) -> float | None:
        """Seconds of one more compilation, if that can be had."""
        compile_anew = self.ready[key].compile
        return compile_anew() if compile_anew is not None else None

    def drop(self, key: str) -> None:
        """Forget a case."""
        self.ready.pop(key, None)
        gc.collect()


def main() -> None:
    # What frameworks print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    worker = Worker(sys.argv[1])
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"answer": getattr(worker, request["do"])(*request["with"])}
        except Unsupported as error:
            answer = {"note": f"not supported: {error}"}
        except Exception as error:  # what a rival cannot do is a result
            traceback.print_exc()
            answer = {"note": f"not supported: {type(error).__name__}"}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
