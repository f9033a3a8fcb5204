"""JAX's own tests with the loops of this library in the place of those of `jax.lax`.

    python tools/jax_own_tests.py ~/jax/tests/lax_control_flow_test.py [another test file ...] [-- options of pytest]

The files are those of a checkout of JAX, at the version that is installed. Where they say `lax.scan`,
`lax.while_loop` or `lax.fori_loop`, a copy says ours; JAX itself is as it is. In `lax_control_flow_test.py` four tests
fail, as is expected, and in `checkify_test.py` none. The exit code is 1 if another one did.
"""

import re
import sys
import tempfile
from pathlib import Path

import pytest

#: They look for `while` in a jaxpr, and for JAX's text of the error in reverse mode.
EXPECTED = ("testForiLoopBatchedIssue1190", "testWhileGradError")


def with_our_loops(source: str) -> str:
    """The source of a test file, line by line the same, but for whose loops it calls."""
    source = re.sub(r"""(?<![\w."'])(jax\.)?lax\.(scan|while_loop|fori_loop)\b""", r"_ours.\2", source)
    return re.sub(r"^import jax$", "import jax; import jax_tensorarray as _ours", source, count=1, flags=re.MULTILINE)


class Failures:
    """The names of the tests that fail."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.names.add(report.nodeid.split("::")[-1])


def main(arguments: list[str]) -> int:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    failures = Failures()
    with tempfile.TemporaryDirectory() as directory:
        copies = []
        for file in map(Path, arguments[:split]):
            copies.append(Path(directory, file.name))
            copies[-1].write_text(with_our_loops(file.read_text()))
        where = ["--rootdir", directory, "-c", "/dev/null", "-p", "no:cacheprovider"]
        status = pytest.main([*map(str, copies), *where, *arguments[split + 1 :]], plugins=[failures])
    unexpected = sorted(name for name in failures.names if not name.startswith(EXPECTED))
    print(f"{len(failures.names)} failed, of which {len(unexpected)} unexpected", *unexpected, sep="\n")
    return int(bool(unexpected) or status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
