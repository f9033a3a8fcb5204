"""Run JAX's own tests without this library and with it imported, and name those that only fail with it.

    git clone --depth 1 --branch jax-v0.12.0 https://github.com/jax-ml/jax
    python tests/jax_own_tests.py jax/tests/source_info_test.py jax/tests/pjit_test.py

The tests should be those of the installed jax. Of others some fail in both runs, which says nothing about this library.
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

    pytest_collectreport = pytest_runtest_logreport


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
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=path.parents[1], env=environment, stdout=log, stderr=log, check=False)
        for test, outcome in map(json.loads, Path(output.name).read_text().splitlines()):
            # A test has a setup, a call and a teardown; passed it has if all three have.
            found[test] = outcome if found.get(test, "passed") == "passed" else found[test]
    return found


def main(paths):
    """Compare the two runs of each file; the logs lie beside each other in a temporary directory."""
    logs, harmed = Path(tempfile.mkdtemp(prefix="jax_own_tests_")), []
    for path in paths:
        runs = []
        for name, setup in [("without", ""), ("with", "import jax_tensorarray")]:
            with open(logs / f"{Path(path).stem}_{name}.log", "w") as log:
                runs.append(outcomes(path, setup, log))
        without, with_library = runs
        differ = sorted(test for test in without | with_library if without.get(test) != with_library.get(test))
        failed = sum(outcome == "failed" for outcome in without.values())
        print(f"{path}: {len(without)} tests, {failed} fail without this library too, {len(differ)} differ", flush=True)
        for test in differ:
            print(f"  {test}: {without.get(test)} without, {with_library.get(test)} with it", flush=True)
        harmed += differ
    print(f"logs: {logs}")
    return bool(harmed)


if __name__ == "__main__":
    if sys.argv[1] == "--here":
        run_here(*sys.argv[2:])
    else:
        sys.exit(main(sys.argv[1:]))
