"""Run a file of tests in a process of its own, and know the outcome of each, even if the process dies.

`jax_own_tests.py` and `peers_tests.py` share this.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

#: What ran to its end has this outcome in `WHOLE`; what the clock has ended has `SLOW`.
WHOLE, SLOW = "the whole run", "slow"


class _TooSlow(BaseException):
    """Not an Exception, or the test might catch it."""


class _Outcomes:
    """A pytest plugin that writes the outcome of every part of every test down at once: the process may die."""

    def __init__(self, file: Any, seconds: int, every: int, collected: Callable[[], None]) -> None:
        self.file, self.seconds, self.every, self.collected, self.is_slow = file, seconds, every, collected, False

    def write(self, nodeid: str, outcome: str) -> None:
        print(json.dumps([nodeid, outcome]), file=self.file, flush=True)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = items[:: self.every]
        self.collected()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(nodeid, "started")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        def end(*_: Any) -> None:
            self.is_slow = True
            raise _TooSlow(f"it has taken {self.seconds} seconds")

        self.is_slow = False
        signal.signal(signal.SIGALRM, end)
        signal.alarm(self.seconds)
        try:
            yield
        finally:
            signal.alarm(0)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.write(report.nodeid, SLOW if report.when == "call" and self.is_slow else report.outcome)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:  # a file that cannot be imported has no tests
            self.write(report.nodeid, report.outcome)


def _run_here(output: str, setup: str, seconds: int, every: int, options: Sequence[str]) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # pytest then says what has failed so far
    names: dict[str, Any] = {}
    exec(setup, names)
    shared = ["-q", "--tb=short", "-p", "no:cacheprovider", "--import-mode=importlib", "-c", os.devnull]
    shared += ["--continue-on-collection-errors"]
    with open(output, "w") as file:
        pytest.main(
            [*shared, *options], plugins=[_Outcomes(file, seconds, every, names.get("collected", lambda: None))]
        )
        print(json.dumps([WHOLE, "passed"]), file=file)


def outcomes(
    tests: Sequence[str | Path],
    setup: str,
    log: Path,
    *,
    rootdir: Path,
    options: Sequence[str] = (),
    python: str = sys.executable,
    path: Sequence[str | Path] = (),
    seconds: int = 0,
    seconds_of_test: int = 0,
    every: int = 1,
) -> dict[str, str]:
    """Return {test: outcome} of tests that are run in a process of their own, after the lines of Python in `setup`.

    Tests have the names that pytest gives them, with the path from `rootdir`. One that the process died in is
    "started". If `seconds` have passed, the process is ended, and `WHOLE` is slow; if `seconds_of_test` have, the test
    is. 0 means no limit. `every` runs only each so many-th test. `path` comes before what Python finds by itself. If
    `setup` defines a function `collected`, it is called when the files have been imported.
    """
    found: dict[str, str] = {}
    with tempfile.NamedTemporaryFile() as output, log.open("w") as said:
        given = [output.name, setup, seconds_of_test, every, [*options, f"--rootdir={rootdir}", *map(str, tests)]]
        command = [python, __file__, json.dumps(given)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
        written = None
        with subprocess.Popen(command, cwd=rootdir, env=environment, stdout=said, stderr=said) as process:
            for limit, ending in ((seconds or None, signal.SIGTERM), (60, signal.SIGKILL)):
                try:
                    process.wait(timeout=limit)
                    break
                except subprocess.TimeoutExpired:
                    written = written or Path(output.name).read_text()
                    process.send_signal(ending)
        for line in (written or Path(output.name).read_text()).splitlines():
            test, outcome = json.loads(line)
            # A test has a setup, a call and a teardown; passed it has if all three have.
            found[test] = outcome if found.get(test, "started") in ("started", "passed") else found[test]
        if written is not None:
            found[WHOLE] = SLOW
    return found


if __name__ == "__main__":
    _run_here(*json.loads(sys.argv[1]))
