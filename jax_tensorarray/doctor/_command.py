"""The command `python -m jax_tensorarray.doctor`: run a program, examine what it compiles, report, and repair it."""

import argparse
import contextlib
import functools
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.monitoring

from jax_tensorarray._in_place.jit import jit_in_place
from jax_tensorarray._in_place.package import PackageHook, in_place_package
from jax_tensorarray.doctor import _trace
from jax_tensorarray.doctor._copies import MIN_BYTES
from jax_tensorarray.doctor._page import fragment, html, html_of_two
from jax_tensorarray.doctor._programs import SLOWER
from jax_tensorarray.doctor._report import WIDTH
from jax_tensorarray.doctor._watch import Report, watch

#: After a run of more seconds than this, no program is run again for timing.
_LONG = 60

#: Seconds by which two runs of a program may differ because of what they import.
_IMPORTS = 0.5

#: Set in the process started by `--heal`, in which every function is jitted under `in_place`: the names of the packages
#: in which something has been found.
_HEAL = "JAX_TENSORARRAY_HEAL"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `python -m jax_tensorarray.doctor [options] SCRIPT [ARGS...]`, or `-m MODULE`. Return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_tensorarray.doctor",
        description="Run a program, and report which of its loops copy whole buffers, which arguments are copied in "
        "every call, where, and what in_place makes of them. The report goes to standard error.",
    )
    parser.add_argument("-m", action="store_true", dest="module", help="SCRIPT is the name of a module")
    parser.add_argument("--fail", action="store_true", help="exit with 1 if something is listed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there as well")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with excerpts of the source and bars")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="write a folder there to attach to a bug report")
    parser.add_argument("--min-bytes", type=int, default=MIN_BYTES, metavar="N", help="leave smaller buffers out")
    parser.add_argument("--no-trial", action="store_true", help="do not try in_place")
    parser.add_argument("--heal", action="store_true", help="run the program again, with all that it jits in place")
    parser.add_argument("--fragment", type=Path, help=argparse.SUPPRESS)  # for a page that has two reports
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS")
    options = parser.parse_args(arguments)
    if options.min_bytes < 0:
        parser.error("--min-bytes must not be negative")
    if not options.module and not Path(options.script).is_file():
        parser.error(f"there is no file {options.script}")
    for option, file in (("--json", options.json), ("--html", options.html)):
        if file and (file.is_dir() or not file.absolute().parent.is_dir()):
            parser.error(f"{option}: cannot write {file}: {'it is a folder' if file.is_dir() else 'no such folder'}")
    if options.trace and (why := _trace.why_not(options.trace)):
        parser.error(f"--trace: {why}")
    return _compared(options) if options.heal else _inspected(options)


def _inspected(options: argparse.Namespace) -> int:
    out = sys.stderr
    started = time.perf_counter()
    with contextlib.ExitStack() as around:
        report = around.enter_context(watch(min_bytes=options.min_bytes))
        programs = around.enter_context(_trace.recorded()) if options.trace else []
        compiled = around.enter_context(_compiling())
        hooks = around.enter_context(_healed(os.environ[_HEAL].split())) if _HEAL in os.environ else []
        status = _run(options)
    seconds = time.perf_counter() - started
    if not options.no_trial:
        report.try_in_place(timed=seconds < _LONG, progress=functools.partial(_progress, out))
    print(f"\n{report.text(out.isatty() and 'NO_COLOR' not in os.environ)}", file=out)
    if options.json:
        more: dict[str, Any] = {"seconds": seconds, "compiling": _covered(compiled), "status": status}
        more |= {"packages": _packages(report), "healed": [hook.name for hook in hooks if hook.found]}
        options.json.write_text(json.dumps(report.as_json() | more))
    if options.html:
        options.html.write_text(html(report, options.script), encoding="utf-8")
    if options.fragment:
        options.fragment.write_text(fragment(report), encoding="utf-8")
    if options.trace:
        command = " ".join([options.script, *options.arguments])
        print(f"\nTo report a bug, attach {_trace.write(options.trace, programs, report, command)}.", file=out)
    return status or int(options.fail and bool(report.cases))


@contextlib.contextmanager
def _compiling() -> Iterator[list[tuple[float, float]]]:
    """Note when JAX traces, lowers or compiles, which may be nested."""
    times: list[tuple[float, float]] = []

    def done(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.startswith("/jax/core/compile/"):
            now = time.perf_counter()
            times.append((now - duration_secs, now))

    jax.monitoring.register_event_duration_secs_listener(done)
    try:
        yield times
    finally:
        jax.monitoring.unregister_event_duration_listener(done)


def _covered(times: Sequence[tuple[float, float]]) -> float:
    """Return the seconds in at least one of these intervals."""
    total, until = 0.0, 0.0
    for start, end in sorted(times):
        total += max(end - max(start, until), 0.0)
        until = max(until, end)
    return total


def _packages(report: Report) -> list[str]:
    """Return the names of the packages, or modules, whose lines are in a report."""
    files = {copy.file for copy in report.copies}
    for case in report.cases:
        files |= {copy.file for copy in case.copies.arguments} | {case.loop and case.loop.file}
    files.discard(None)
    imported = ((name, getattr(module, "__dict__", {}).get("__file__")) for name, module in [*sys.modules.items()])
    return sorted({name.partition(".")[0] for name, file in imported if file in files} - {"__main__"})


def _progress(out: TextIO, text: str) -> None:
    if out.isatty():
        print(f"\r\x1b[K{text}"[:WIDTH], end="", file=out, flush=True)


def _run(options: argparse.Namespace) -> int:
    """Run the program as Python would, and return its exit status."""
    before, path = sys.argv, sys.path[0]
    sys.argv = [options.script, *options.arguments]
    try:
        if options.module:
            sys.path[0] = os.getcwd()
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(options.script).resolve().parent)
            runpy.run_path(options.script, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.argv, sys.path[0] = before, path
    return 0


def _compared(options: argparse.Namespace) -> int:
    """Run the program as it is, and with everything it jits under `in_place`, each in a process of its own."""
    found: list[dict[str, Any]] = []
    fragments = []
    packages: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("as it is", "under in_place"):
            print(f"\n--- {options.script}, {name}", file=sys.stderr, flush=True)
            file, part = Path(folder) / "report.json", Path(folder) / "report.html"
            command = [sys.executable, "-m", "jax_tensorarray.doctor", "--no-trial", "--json", str(file)]
            command += ["--min-bytes", str(options.min_bytes), "--fragment", str(part), *["-m"] * options.module]
            if options.trace and not found:
                command += ["--trace", str(options.trace)]
            more = {_HEAL: " ".join(packages)} if found else {}
            status = subprocess.call([*command, options.script, *options.arguments], env=os.environ | more)
            if not file.exists():
                return status or 1
            found.append(json.loads(file.read_text()))
            fragments.append(part.read_text(encoding="utf-8"))
            packages = found[0]["packages"]
            file.unlink()
            if status:
                return status
    as_is, healed = found
    (before, left), (arguments, arguments_left) = (
        [sum(len(case[what]) for case in run["cases"]) for run in found] for what in ("copies", "arguments")
    )
    compiling = as_is["compiling"], healed["compiling"]
    seconds = as_is["seconds"] - compiling[0], healed["seconds"] - compiling[1]
    counted = [f"{before} operations on whole buffers in loops as it is, {left} under in_place"]
    if arguments:
        are = "arguments are" if arguments > 1 else "argument is"
        counted.append(f"{arguments} {are} copied in every call as it is, {arguments_left} under in_place")
    operations = "; ".join(counted if before or left else counted[-1:])
    times = f"{seconds[0]:.1f} s as it is, {seconds[1]:.1f} s under in_place"
    times += f", plus {compiling[0]:.1f} s and {compiling[1]:.1f} s of compilation"
    slower = seconds[1] > max(SLOWER * seconds[0], seconds[0] + _IMPORTS)
    lines = [f"slower, {times}", operations] if slower else [operations, times]
    print(f"\n--- {options.script}: {lines[0]};\n    {lines[1]}.", file=sys.stderr)
    for package in healed["healed"]:
        print(
            f"    To keep what {package} gains, begin with jax_tensorarray.in_place_package({package!r}).",
            file=sys.stderr,
        )
    if options.json:
        options.json.write_text(json.dumps({"as it is": as_is, "under in_place": healed}))
    if options.html:
        page = html_of_two(fragments[0], fragments[1], options.script, f"{lines[0]}; {lines[1]}.", seconds)
        options.html.write_text(page, encoding="utf-8")
    return int(options.fail and bool(healed["cases"]))


@contextlib.contextmanager
def _healed(packages: Sequence[str]) -> Iterator[list[PackageHook]]:
    """Make `jax.jit` put every function under `in_place`, and those of packages too, wherever they have it from."""
    jit, jax.jit = jax.jit, jit_in_place
    try:
        with contextlib.ExitStack() as hooks:
            new = [package for package in packages if package not in sys.modules]
            yield [hooks.enter_context(in_place_package(package)) for package in new]
    finally:
        jax.jit = jit
