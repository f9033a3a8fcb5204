"""Build what this machine can of a release, look into it, and use it where nothing else of this repository is.

    python tools/build_wheels.py                      # sdist, a wheel for each Python that has one of its own
    python tools/build_wheels.py --kinds abi3         # the wheel for Python 3.12 and newer alone: a minute
    python tools/build_wheels.py --cuda               # and jax-tensorarray-cuda13, which takes minutes

Wheels are built from the source distribution, and each is installed into a virtual environment in a temporary folder,
with what it asks for. There a part of the tests runs. `dist/` gets the files if everything passed. It needs uv, which
unpacks JAX once for all of these environments: `pip install uv`.
Those for PyPI come from `.github/workflows/wheels.yml`, which builds for old systems, for arm64 and for macOS too. The
exit code is 1 if anything failed.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ["twine", "abi3audit", *(["auditwheel"] if sys.platform == "linux" else [])]

#: What the main job finds. (cibuildwheel runs all of it, which takes longer than building a wheel.)
HEADER = "from jax_tensorarray.doctor._header import header; print(*header(), sep='\\n')"

#: The kernels, their errors, and what is done with a plugin.
TESTS = ["package/test_plugin.py", *(f"ops/test_{name}.py" for name in ("primitives", "empty", "errors", "starts"))]

#: For Python 3.11, and for 3.12 and newer.
KINDS = ["cp311", "abi3"]

CPU, CUDA = "jax_tensorarray", "jax_tensorarray_cuda13"
#: In bytes. Of the wheel for CPUs the kernels take 0.38 MB, and the Python code takes 0.54 MB.
SIZE_LIMITS = {CPU: 1_100_000, CUDA: 6_500_000, "sdist": 3_000_000}


class Failure(Exception):
    """What is wrong, in a sentence."""


class Python(NamedTuple):
    """An interpreter of this machine."""

    version: tuple[int, ...]
    executable: str

    def __str__(self) -> str:
        return ".".join(map(str, self.version))


class Row(NamedTuple):
    """One artifact in the table."""

    file: str
    size: int
    found: str
    seconds: float
    failure: str | None


def run(*command: object, cwd: Path, env: dict[str, str] | None = None, limit: int = 3600) -> str:
    """Run a command and return its output. If it fails, the end of its output is the failure."""
    # Whatever is on the path of this process is not there for the one that is tested.
    hidden = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")
    shown = " ".join(map(str, command))
    try:
        done = subprocess.run(
            list(map(str, command)),
            cwd=cwd,
            env={name: value for name, value in os.environ.items() if name not in hidden}
            | {"JAX_PLATFORMS": "cpu"}
            | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Failure(f"not done after {limit} seconds: {shown}") from None
    if done.returncode:
        raise Failure(f"exit code {done.returncode}: {shown}\n" + "\n".join(done.stdout.splitlines()[-40:]))
    return done.stdout


def virtual_environment(python: str, folder: Path, *packages: object) -> Path:
    """Make an environment with those packages and nothing else, and return its interpreter."""
    run(python, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    inside = folder / "bin" / "python"
    run("uv", "pip", "install", "--python", inside, *packages, cwd=folder.parent)
    return inside


def pythons() -> list[Python]:
    """Return the newest interpreter of each version from 3.11 on, oldest first; no free-threaded ones."""
    candidates = [Path(sys.executable), *Path.home().glob(".pyenv/versions/*/bin/python")]
    candidates += [Path(found) for minor in range(11, 20) if (found := shutil.which(f"python3.{minor}"))]
    ask = "import sys, sysconfig; print(*sys.version_info[:3], sysconfig.get_config_var('Py_GIL_DISABLED') or 0)"
    newest: dict[tuple[int, ...], Python] = {}
    for executable in candidates:
        said = subprocess.run([executable, "-c", ask], capture_output=True, text=True, check=False).stdout.split()
        if len(said) != 4 or said[3] != "0":
            continue
        version = tuple(map(int, said[:3]))
        if version >= (3, 11) and version > newest.get(version[:2], Python((), "")).version:
            newest[version[:2]] = Python(version, str(executable))
    return sorted(newest.values())


def users(kind: str) -> list[Python]:
    """Return the interpreters of this machine that can use a kind of wheel, oldest first."""
    return [p for p in pythons() if (p.version[:2] == (3, 11) if kind == "cp311" else p.version >= (3, 12))]


# --- what must be in an artifact, and what must not ---------------------------------------------------------------


def check_size(file: Path, limit: int) -> None:
    """Raise Failure if a file is larger than `limit`, which is far above its known size."""
    if file.stat().st_size > limit:
        raise Failure(f"{file.name} has {file.stat().st_size} bytes, more than {limit}")


def check_sdist(sdist: Path) -> str:
    """Check that an sdist has all files that git tracks, and no built ones. Return a summary."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    if built := sorted(name for name in names if re.search(r"\.(so|pyc|pyd|dylib|o|whl)$", name)):
        raise Failure(f"built files in {sdist.name}: {', '.join(built)}")
    if (ROOT / ".git").exists():
        tracked = set(run("git", "ls-files", cwd=ROOT).splitlines())
        if lost := sorted(name for name in tracked - names if (ROOT / name).exists()):
            raise Failure(f"not in {sdist.name}: {', '.join(lost)}")
        if more := sorted(names - tracked - {"PKG-INFO", ""}):
            raise Failure(f"in {sdist.name}, and not in git: {', '.join(more)}")
    check_size(sdist, SIZE_LIMITS["sdist"])
    return f"{len(names)} files"


def expected_files(package: str, source: Path) -> set[str]:
    """Return the files of a wheel, with `*` for what depends on the platform."""
    if package == CUDA:
        return {f"{CUDA}/__init__.py", f"{CUDA}/_cuda*.so"}
    # CMakeLists.txt installs the template and, below, the page of messages.
    folders = {source / CPU: Path(CPU), source / "template": Path(CPU, "_template")}
    files = {
        to / path.relative_to(folder)
        for folder, to in folders.items()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".so"
    }
    kept = {path.as_posix() for path in files if not any(part.endswith(("cache", "cache__")) for part in path.parts)}
    return kept | {f"{CPU}/_cpu*.so", f"{CPU}/doctor/messages.md"}


def check_wheel(wheel: Path, package: str, kind: str, source: Path, version: str) -> str:
    """Check the tag, each file, and the size of a wheel. Return a summary."""
    found_package, found_version, python_tag, abi_tag, _ = wheel.name.removesuffix(".whl").split("-")
    wanted = (package, version, *(("cp312", "abi3") if kind == "abi3" else (kind, kind)))
    if (found_package, found_version, python_tag, abi_tag) != wanted:
        raise Failure(f"{wheel.name} is not {'-'.join(wanted)}")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        metadata = archive.read(f"{package}-{version}.dist-info/METADATA").decode()
        compiled = [name for name in names if name.endswith(".so")]
    inside = {
        re.sub(r"(/_c\w+)\..*\.so|(/_c\w+)\.so", r"\1\2*.so", name) for name in names if ".dist-info/" not in name
    }
    expected = expected_files(package, source)
    if inside != expected or len(compiled) != 1:
        raise Failure(f"{wheel.name}: too many: {sorted(inside - expected)}, too few: {sorted(expected - inside)}")
    if kind == "abi3" and not compiled[0].endswith(".abi3.so"):
        raise Failure(f"{wheel.name} has {compiled[0]}")
    if package == CUDA and f"Requires-Dist: jax-tensorarray[cuda13]=={version}" not in metadata:
        raise Failure(f"{wheel.name} does not ask for jax-tensorarray {version}")
    check_size(wheel, SIZE_LIMITS[package])
    return f"{len(names)} files"


def audited(wheel: Path, kind: str, tools: Path, work: Path) -> Iterator[str]:
    """Check that a wheel uses only the stable ABI and libraries of every system. Yield what the tools for that find."""
    run(tools, "-m", "twine", "check", "--strict", wheel, cwd=work)
    if kind == "abi3":
        report = work / f"{wheel.name}.json"
        run(tools, "-m", "abi3audit", "--strict", "--report", "--output", report, wheel, cwd=work)
        (module,) = json.loads(report.read_text())["specs"][str(wheel)]["wheel"]
        yield f"stable ABI of {module['result']['computed']}"
    if "auditwheel" in TOOLS:
        # A library that is not of the system, such as libcuda or libcudart, leaves it a linux_* tag.
        said = " ".join(run(tools, "-m", "auditwheel", "show", wheel, cwd=work).split())
        tag = re.search(r'platform tag: "(\w+)"', said)
        if tag is None or not tag.group(1).startswith("manylinux"):
            raise Failure(f"{wheel.name} needs libraries of this machine: {said}")
        yield tag.group(1)


# --- use -----------------------------------------------------------------------------------------------------------


def without_package(source: Path, folder: Path) -> Path:
    """Copy the tests and their settings to `folder`: all that they may find of this repository."""
    folder.mkdir()
    for name in ("pyproject.toml", "conftest.py"):
        shutil.copy(source / name, folder)
    shutil.copytree(source / "tests", folder / "tests")
    return folder


def try_wheel(python: Python, wheel: Path, source: Path, work: Path) -> tuple[Path, str]:
    """Install a CPU wheel and run some of the tests. Return its interpreter and a summary."""
    folder = work / f"use-{wheel.stem}-{python}"
    inside = virtual_environment(python.executable, folder, wheel, "hypothesis", "pytest", "ml_dtypes")
    tests = without_package(source, work / f"tests-{wheel.stem}-{python}")
    program = "import jax, jax_tensorarray as t; print(jax.__version__, t.__version__, t.__file__)"
    jax, version, place = run(inside, "-c", program, cwd=tests).strip().split(" ", 2)
    if not Path(place).resolve().is_relative_to(folder.resolve()) or version != wheel.name.split("-")[1]:
        raise Failure(f"{wheel.name} is installed, and jax_tensorarray {version} comes from {place}")
    said = run(inside, "-W", "error", "-c", HEADER, cwd=tests)
    if "kernels cpu not cuda (not built" not in " ".join(said.split()):
        raise Failure(f"the main job says\n{said}")
    said = run(inside, "-m", "pytest", "-q", *(f"tests/{name}" for name in TESTS), cwd=tests)
    passed = re.search(r"(\d+) passed", said)
    if passed is None:
        raise Failure(f"pytest says\n{said}")
    return inside, f"Python {python}, jax {jax}: {passed.group(1)} tests"


def try_plugin(inside: Path, plugin: Path, work: Path) -> str:
    """Install the plugin beside a CPU wheel that was tried before, and take it away again. No GPU is needed."""
    # What it asks for is there, but for JAX's own plugin, which has 2 GB.
    run("uv", "pip", "install", "--python", inside, "--no-deps", plugin, cwd=work)
    program = """
import jax, jax.numpy as jnp
from jax_tensorarray import _kernels, ta_write
from jax_tensorarray.doctor._header import header
print(*header(), sep="\\n")
kernels = _kernels.modules["cuda"]
assert kernels.__name__ == "jax_tensorarray_cuda13._cuda" and kernels.cuda_version // 1000 == 13, kernels
write = jax.jit(lambda b, i: ta_write(b, i, 1.0))
assert "jax_tensorarray_write" in write.trace(jnp.zeros(3), 1).lower(lowering_platforms=("cuda",)).as_text()
assert (write(jnp.zeros(3), 1) == jnp.array([0.0, 1.0, 0.0])).all()
"""
    said = run(inside, "-W", "error", "-c", program, cwd=work)
    if "cuda (of jax-tensorarray-cuda13" not in said:
        raise Failure(f"the main job says\n{said}")
    run("uv", "pip", "uninstall", "--python", inside, "jax-tensorarray-cuda13", cwd=work)
    run(
        inside,
        "-W",
        "error",
        "-c",
        "from jax_tensorarray import _kernels; assert 'cuda' not in _kernels.modules",
        cwd=work,
    )
    return "found, and lowered to"


# --- the command ---------------------------------------------------------------------------------------------------


def built(command: Sequence[object], folder: Path, pattern: str, work: Path, env: dict[str, str] | None = None) -> Path:
    """Run a build, and return the file that it leaves in `folder`."""
    folder.mkdir()
    run(*command, cwd=work, env=env)
    (file,) = folder.glob(pattern)
    return file


def wheels(arguments: argparse.Namespace, work: Path, dist: Path) -> Iterator[Row]:
    """Build and try everything. Yield a row for each artifact, and no wheel without an sdist."""
    start = time.monotonic()
    tools = virtual_environment(sys.executable, work / "tools", *TOOLS)
    sdist = built(("uv", "build", "--sdist", "--out-dir", work / "sdist", ROOT), work / "sdist", "*.tar.gz", work)
    run(tools, "-m", "twine", "check", "--strict", sdist, cwd=work)
    found = check_sdist(sdist)
    with tarfile.open(sdist) as archive:
        archive.extractall(work / "source", filter="data")
    (source,) = (work / "source").iterdir()
    version = source.name.removeprefix(f"{CPU}-")
    shutil.copy(sdist, dist)
    yield Row(sdist.name, sdist.stat().st_size, found, time.monotonic() - start, None)

    for kind in arguments.kinds:
        candidates = users(kind)
        if not candidates:
            missing = "3.11" if kind == "cp311" else "3.12 or newer"
            yield Row(f"{CPU}, {kind}", 0, "", 0.0, f"there is no Python {missing} here")
            continue
        # The oldest Python that can use it builds, and the newest tries it.
        builder, user = candidates[0], candidates[-1]
        inside = None
        for package in (CPU, CUDA) if arguments.cuda else (CPU,):
            start, size, name = time.monotonic(), 0, f"{package}, {kind}"
            try:
                if package == CUDA and inside is None:
                    raise Failure("the wheel that it needs failed")
                folder = work / f"{package}-{kind}"
                command = ["uv", "build", "--wheel", "--python", builder.executable, "--out-dir", folder]
                if package == CPU:
                    wheel = built([*command, sdist], folder, "*.whl", work, {"JAX_TENSORARRAY_CUDA": "OFF"})
                else:
                    define = f"cmake.define.CMAKE_CUDA_ARCHITECTURES={arguments.architectures}"
                    command += [f"--config-setting={define}", source / "cuda13"]
                    wheel = built(command, folder, "*.whl", work)
                name, size = wheel.name, wheel.stat().st_size
                parts = [check_wheel(wheel, package, kind, source, version), *audited(wheel, kind, tools, work)]
                if package == CPU:
                    inside, used = try_wheel(user, wheel, source, work)
                else:
                    assert inside is not None
                    used = try_plugin(inside, wheel, work)
                shutil.copy(wheel, dist)
                yield Row(name, size, "; ".join([*parts, used]), time.monotonic() - start, None)
            except Failure as failure:
                yield Row(name, size, "", time.monotonic() - start, str(failure))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--kinds", nargs="+", choices=["cp311", "abi3"], help="which wheels (what the Pythons here can)"
    )
    parser.add_argument("--cuda", action="store_true", help="jax-tensorarray-cuda13 too; PyPI has the compiler")
    parser.add_argument("--architectures", default="all-major", help="of GPUs, for --cuda; a release has the default")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder for what passed (dist/)")
    arguments = parser.parse_args(argv)
    if shutil.which("uv") is None:
        parser.error("uv is not on the path: pip install uv")
    arguments.kinds = arguments.kinds or [kind for kind in KINDS if users(kind)]
    print(f"{platform.system()} {platform.machine()}, Pythons {', '.join(map(str, pythons()))}", flush=True)

    failed = 0
    with tempfile.TemporaryDirectory(prefix="wheels-") as name:
        work = Path(name)
        dist = work / "dist"
        dist.mkdir()
        try:
            for row in wheels(arguments, work, dist):
                failed += row.failure is not None
                print(f"{'FAIL' if row.failure else 'ok':4}  {row.file}  {row.size / 1e3:.0f} kB  {row.seconds:.0f} s")
                print(f"      {row.failure or row.found}", flush=True)
        except Failure as failure:
            failed += 1
            print(f"FAIL  {failure}")
        if not failed:
            arguments.output.mkdir(parents=True, exist_ok=True)
            for file in dist.iterdir():
                shutil.copy(file, arguments.output)
            print(f"All of it is in {arguments.output}.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
