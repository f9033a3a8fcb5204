"""Run JAX's own tests without this library and with it imported, and name those that differ.

    git clone --depth 1 --branch jax-v0.10.2 https://github.com/jax-ml/jax /tmp/jax
    python tests/jax_own_tests.py /tmp/jax/tests/source_info_test.py /tmp/jax/tests/pjit_test.py

The tests should be those of the installed jax. Of another version's some fail in both runs, which says nothing.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


class Outcomes:
    """A pytest plugin that writes the outcome of every part of every test down at once: the process may die."""

    def __init__(self, file):
        self.file = file

    def pytest_runtest_logreport(self, report):
        print(json.dumps([report.nodeid, report.outcome]), file=self.file, flush=True)

    def pytest_collectreport(self, report):
        if report.failed:  # a file that cannot be imported has no tests
            self.pytest_runtest_logreport(report)


def run_here(path, output, setup):
    """Run one file of tests in this process, after the lines of Python in `setup`."""
    exec(setup, {})
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "--import-mode=importlib", "-c", os.devnull]
    with open(output, "w") as file:
        pytest.main([*options, f"--rootdir={Path(path).parents[1]}", path], plugins=[Outcomes(file)])
        print(json.dumps(["the whole run", "passed"]), file=file)


def outcomes(path, setup="", log=None):
    """{test: outcome} of one file of tests, run in a process of its own."""
    path, found = Path(path).resolve(), {}
    with tempfile.NamedTemporaryFile() as output:
        command = [sys.executable, __file__, "--here", path, output.name, setup]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
        subprocess.run(command, cwd=path.parent, env=environment, stdout=log, stderr=log, check=False)
        for test, outcome in map(json.loads, Path(output.name).read_text().splitlines()):
            # A test has a setup, a call and a teardown; passed it has if all three have.
            found[test] = outcome if found.get(test, "passed") == "passed" else found[test]
    return found


def main(paths, setup="import jax_tensorarray"):
    """Compare the two runs of each file, and say whether a test differs. `setup` is run first in the second of them."""
    logs, is_any = Path(tempfile.mkdtemp(prefix="jax_own_tests_")), False
    for path in paths:
        runs = []
        for name, lines in [("without", ""), ("with", setup)]:
            with open(logs / f"{Path(path).stem}_{name}.log", "w") as log:
                runs.append(outcomes(path, lines, log))
        without, with_library = runs
        differ = sorted(test for test in without | with_library if without.get(test) != with_library.get(test))
        failed = sum(outcome == "failed" for outcome in without.values())
        print(f"{path}: {len(without) - 1} tests, of which {failed} fail without the library; {len(differ)} differ")
        for test in differ:
            print(f"  {test}: {without.get(test)} without it, {with_library.get(test)} with it")
        sys.stdout.flush()
        is_any |= bool(differ)
    print(f"logs: {logs}")
    return is_any


if __name__ == "__main__":
    if sys.argv[1] == "--here":
        run_here(*sys.argv[2:])
    else:
        sys.exit(main(sys.argv[1:]))
