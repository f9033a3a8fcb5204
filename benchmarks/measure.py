"""A run: every rival is compiled, compared, and then timed in turns with the others."""

import contextlib
import json
import os
import platform
import select
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from benchmarks.cases import RIVALS, Point, rivals_of
from benchmarks.environments import FOLDER, ROOT, variables
from benchmarks.targets import exponent

Result = dict[str, Any]

#: A run that is predicted to take so many times `Limits.longest` is not begun: one over it, at most, is wanted.
BY_FAR = 4

#: Answers are equal if they differ by at most this share of the largest entry: sums of float32 in other orders.
TOLERANCE = 1e-3


class Limits(NamedTuple):
    """How much is done."""

    repeat: int = 7  # samples of each case
    compilations: int = 3  # of each case at its smallest T
    longest: float = 3.0  # a rival goes no further in T after a longer run (s), or before one predicted to be so by far
    patience: float = 180.0  # the most that anything may take, compilation too (s)
    memory: int = 6 * 2**30  # bytes that a process may take


class Unable(Exception):
    """Why a worker has no answer."""


class Environment:
    """A process with its own Python, which answers requests. It is ended if it takes too long or too much memory."""

    def __init__(self, name: str, python: Path, limits: Limits) -> None:
        self.name, self.python, self.limits = name, python, limits
        self.process: subprocess.Popen[str] | None = None
        self.started = 0  # how often

    def ask(self, do: str, *args: Any) -> Any:
        """What the worker's method `do` returns. Raises Unable."""
        process = self.process or self._start()
        stdin, stdout = _pipes(process)
        try:
            print(json.dumps({"do": do, "with": args}), file=stdin, flush=True)
            self._wait(process, stdout)
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.stop()
            raise Unable(f"crashed, see {FOLDER.name}/{self.name}.log")
        answer = json.loads(line)
        if "note" in answer:
            raise Unable(answer["note"])
        return answer["answer"]

    def _wait(self, process: subprocess.Popen[str], stdout: IO[str]) -> None:
        end = time.monotonic() + self.limits.patience
        while not select.select([stdout], [], [], 0.2)[0]:
            if time.monotonic() > end:
                self.stop()
                raise Unable(f"not done in {self.limits.patience:.0f} s")
            if _resident_bytes(process.pid) > self.limits.memory:
                self.stop()
                raise Unable(f"needs > {self.limits.memory / 2**30:.0f} GiB")

    def _start(self) -> subprocess.Popen[str]:
        self.started += 1
        FOLDER.mkdir(exist_ok=True)
        log = (FOLDER / f"{self.name}.log").open("a")
        self.process = subprocess.Popen(
            [self.python, "-m", "benchmarks.worker", self.name],
            cwd=ROOT,
            env=variables(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        log.close()
        return self.process

    def stop(self) -> None:
        """End the process. The next request starts another, which knows of no case."""
        if self.process is not None:
            self.process.kill()
            for pipe in _pipes(self.process):
                pipe.close()
            self.process.wait()
            self.process = None


def _resident_bytes(pid: int) -> int:
    """What a process takes now. (Linux; 0 elsewhere.)"""
    try:
        return os.sysconf("SC_PAGE_SIZE") * int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


class Side:
    """A rival on its way through the sizes of a point."""

    def __init__(self, rival: str, environment: Environment) -> None:
        self.rival, self.environment = rival, environment
        self.times: dict[int, float] = {}  # T -> the shortest sample: a long one says more of the machine
        self.stopped: str | None = None
        self.prepared_in = 0

    def predicted(self, T: int) -> float:
        """Seconds at T: growing as before, and at least linearly."""
        if not self.times:
            return 0.0
        last = max(self.times)
        return self.times[last] * (T / last) ** max(exponent(self.times) or 1.0, 1.0)


def equal(answer: Sequence[np.ndarray[Any, Any]], expected: Sequence[np.ndarray[Any, Any]]) -> bool:
    """Whether two answers are the same up to rounding. A NaN is not."""
    if len(answer) != len(expected):
        return False
    return all(
        bool(np.abs(a - e).max(initial=0) <= TOLERANCE * max(1e-6, np.abs(e).max(initial=0)))
        for a, e in zip(answer, expected, strict=True)
    )


def measure(point: Point, sides: Sequence[Side], limits: Limits) -> Iterator[list[Result]]:
    """Results of all sides at each T. Ours is the first side, and the others' answers are compared with its."""
    with tempfile.TemporaryDirectory() as folder:
        for T in point.sizes:
            yield _at(T, point, sides, limits, Path(folder), compilations=point.sizes[0] == T)


def _at(T: int, point: Point, sides: Sequence[Side], limits: Limits, folder: Path, compilations: bool) -> list[Result]:
    results: dict[str, Result] = {}
    expected: list[np.ndarray[Any, Any]] | None = None
    for side in sides:
        if side.stopped is not None:
            continue
        what = point.case.name, side.rival, point.derivative, T, point.row
        labels = dict(zip(("case", "rival", "derivative", "T", "row"), what, strict=True))
        result: Result = {**labels, "group": point.case.group, "seconds": [], "note": None}
        results[side.rival] = result
        if (predicted := side.predicted(T)) > BY_FAR * limits.longest:
            result["note"] = side.stopped = f"predicted {predicted:.0f} s"
            continue
        try:
            once = _prepare(side, what, result, limits, folder)
        except Unable as error:
            result["note"] = side.stopped = str(error)
            continue
        with np.load(folder / "answer.npz") as stored:
            answer = list(stored.values())
        if expected is None:
            expected = answer
        if answer and not equal(answer, expected):
            result["note"] = side.stopped = "wrong"
        elif once > limits.longest:
            side.stopped, result["note"], result["seconds"] = "slow", "one run", [once]

    timed = [side for side in sides if side.rival in results and results[side.rival]["note"] is None]
    for side in timed:
        if side.prepared_in != side.environment.started:  # another rival has ended the process
            what = point.case.name, side.rival, point.derivative, T, point.row
            _prepare(side, what, results[side.rival], limits, folder)
    _in_turns(timed, results, limits)
    if compilations:
        for _ in range(limits.compilations):
            for side in timed:
                with contextlib.suppress(Unable):
                    if (seconds := side.environment.ask("compile", side.rival)) is not None:
                        results[side.rival].setdefault("compilations", []).append(seconds)
    for side in sides:
        if side.rival in results:
            with contextlib.suppress(Unable):
                side.environment.ask("drop", side.rival)
            if results[side.rival]["seconds"] and side.stopped is None:
                side.times[T] = min(results[side.rival]["seconds"])
    return list(results.values())


def _prepare(side: Side, what: tuple[Any, ...], result: Result, limits: Limits, folder: Path) -> float:
    """Compile, run once, and leave the answer in the folder. Returns the seconds of that run."""
    result |= side.environment.ask("prepare", side.rival, what)
    if (result["temp_bytes"] or 0) > limits.memory:
        raise Unable(f"needs {result['temp_bytes'] / 2**30:.0f} GiB")
    first = side.environment.ask("first", side.rival, str(folder / "answer.npz"))
    side.prepared_in = side.environment.started
    result |= {key: value for key, value in first.items() if key != "seconds"}
    return float(first["seconds"])


def _in_turns(sides: Sequence[Side], results: dict[str, Result], limits: Limits) -> None:
    for _ in range(limits.repeat):
        for side in sides:
            result = results[side.rival]
            if result["note"] is None and sum(result["seconds"]) < limits.longest:
                try:
                    result["seconds"].append(side.environment.ask("sample", side.rival))
                except Unable as error:
                    result["note"] = side.stopped = str(error)


# --- what is measured once a run -----------------------------------------------------------------------------------

_IMPORTS = """
import time
start = time.perf_counter()
import jax
middle = time.perf_counter()
import jax_tensorarray
print(middle - start, time.perf_counter() - middle)
"""


def import_seconds(python: Path, repeat: int) -> list[list[float]]:
    """Seconds of `import jax`, and of `import jax_tensorarray` after it, each in a fresh process."""
    command = [str(python), "-c", _IMPORTS]
    runs = [
        subprocess.run(command, cwd=ROOT, env=variables(), check=True, capture_output=True, text=True).stdout
        for _ in range(repeat)
    ]
    return [[float(number) for number in run.split()] for run in runs]


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return {
        "platform": platform.platform(),
        "cpu": names[0].split(":")[1].strip() if names else platform.processor(),
        "cores": os.cpu_count(),
        "load before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


class Run:
    """Measures points one by one; `report` has what is known so far."""

    def __init__(self, pythons: dict[str, Path], rivals: Sequence[str], limits: Limits, label: str) -> None:
        self.environments = {name: Environment(name, python, limits) for name, python in pythons.items()}
        self.rivals, self.limits = rivals, limits
        self.report: dict[str, Any] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "label": label,
            "machine": machine(),
            "versions": {name: env.ask("versions") for name, env in self.environments.items()},
            "limits": limits._asdict(),
            "import": import_seconds(pythons["jax"], limits.repeat),
            "results": [],
        }

    def __call__(self, point: Point) -> Iterator[list[Result]]:
        sides = [
            Side(rival, self.environments[RIVALS[rival][0]])
            for rival in rivals_of(point)
            if rival in self.rivals and RIVALS[rival][0] in self.environments
        ]
        for results in measure(point, sides, self.limits):
            self.report["results"] += results
            yield results

    def close(self) -> None:
        """End all processes."""
        for environment in self.environments.values():
            environment.stop()
