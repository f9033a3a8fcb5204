"""The C++ programs that tests run under sanitizers."""

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
NEEDED = [
    pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(not CSRC.exists(), reason="needs the C++ sources, which an installed package has not"),
]


def built(tmp_path_factory: pytest.TempPathFactory, source: Path, name: str, *flags: str) -> Path:
    """Compile a program, once for all processes of xdist: it takes longer than to run it."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    program, new = folder / name, base / f"{name}.new"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            command = [str(COMPILER), "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}"]
            command += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", *flags]
            command += [str(source), "-o", str(new)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if "cannot find" in done.stderr and "san" in done.stderr:
                pytest.skip("the compiler has no sanitizers here")
            assert done.returncode == 0, done.stderr
            new.replace(program)
    return program
