"""The command `python -m jax_tensorarray.doctor`: run a program, examine what it compiles, and report."""

import argparse
import contextlib
import functools
import json
import os
import runpy
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.monitoring

from jax_tensorarray._in_place import switch
from jax_tensorarray._in_place.jit import jit_in_place
from jax_tensorarray._in_place.package import PackageHook, in_place_package
from jax_tensorarray.doctor import _compare, _trace
from jax_tensorarray.doctor._blocks import REPORT_WIDTH, Bar, Bars, Items, Text, as_html, page
from jax_tensorarray.doctor._copies import MIN_BYTES
from jax_tensorarray.doctor._programs import SLOWER
from jax_tensorarray.doctor._report import Report, html
from jax_tensorarray.doctor._text import counted, wrapped
from jax_tensorarray.doctor._watch import watch
from jax_tensorarray.doctor._why import why

#: After a run of more seconds than this, no program is run again for timing.
_LONG = 60

#: Seconds by which two runs of a program may differ because of their imports.
_IMPORTS = 0.5

_DESCRIPTION = """\
Run a program unchanged, and report which of its loops copy whole buffers, which
arguments each call copies, on which lines, and what in_place makes of them. The
report goes to standard error. The output and the exit status are the program's.
"""

_EXAMPLES = """\
examples:
  {prog} train.py --steps 1000
  {prog} --html report.html -m package.train
  {prog} --compare train.py --steps 10
  {prog} --why whole-select
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `python -m jax_tensorarray.doctor [options] SCRIPT [ARGS...]`, or `-m MODULE`. Return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.why is not None:
        try:
            print(why(options.why))
        except (LookupError, FileNotFoundError) as failure:
            parser.error(f"--why: {failure}")
        return 0
    if options.script is None:
        parser.error("the following arguments are required: SCRIPT")
    if options.min_bytes < 0:
        parser.error("--min-bytes must not be negative")
    if not options.module and not Path(options.script).is_file():
        parser.error(f"there is no file {options.script}")
    for option, file in (("--json", options.json), ("--html", options.html)):
        if file and (file.is_dir() or not file.absolute().parent.is_dir()):
            parser.error(f"{option}: cannot write {file}: {'it is a folder' if file.is_dir() else 'no such folder'}")
    if options.trace and (reason := _trace.why_not(options.trace)):
        parser.error(f"--trace: {reason}")
    return _compared(options) if options.compare else _examined(options)


def _parser() -> argparse.ArgumentParser:
    called = Path(sys.argv[0]).name if sys.argv else ""
    prog = called if called == "jax-tensorarray-doctor" else "python -m jax_tensorarray.doctor"
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [options] SCRIPT [ARGS ...]\n       {prog} [options] -m MODULE [ARGS ...]\n"
        f"       {prog} --why TAG",
        description=_DESCRIPTION,
        epilog=_EXAMPLES.format(prog=prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="the program: a Python file, or with -m a module")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="the arguments of the program")
    parser.add_argument("-m", action="store_true", dest="module", help="SCRIPT is the name of a module")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="run the program unchanged, and again with all that it jits under in_place, and compare values and times; "
        "exit with 1 if values differ",
    )
    parser.add_argument("--why", metavar="TAG", help="explain a name in brackets of a report, and exit")
    parser.add_argument("--fail", action="store_true", help="exit with 1 if something is listed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report to a file")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with excerpts of the source and bars")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="write a folder to attach to a bug report")
    parser.add_argument("--min-bytes", type=int, default=MIN_BYTES, metavar="N", help="ignore smaller buffers")
    parser.add_argument("--no-trial", action="store_true", help="do not try in_place, which compiles again")
    # The options by which `--compare` tells the two processes that it starts where to write, and what to rewrite.
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rewrite", help=argparse.SUPPRESS)
    return parser


def _examined(options: argparse.Namespace) -> int:
    out = sys.stderr
    started = time.perf_counter()
    with contextlib.ExitStack() as around:
        report = around.enter_context(watch(min_bytes=options.min_bytes))
        programs = around.enter_context(_trace.recorded()) if options.trace else []
        compiled = around.enter_context(_compiling())
        recorder = around.enter_context(_compare.recorded(options.record and options.record / _RESULTS))
        hooks = [] if options.rewrite is None else around.enter_context(_rewritten(options.rewrite.split()))
        status = _run(options)
    seconds = time.perf_counter() - started - (recorder.seconds if recorder else 0.0)
    if not options.no_trial:
        number = report.to_try(timed=seconds < _LONG)
        if number and not out.isatty():  # a terminal shows the progress
            print(f"\ntrying in_place on {counted(number, 'program')} (--no-trial skips this)", file=out, flush=True)
        report.try_in_place(timed=seconds < _LONG, progress=functools.partial(_progress, out))
    print(f"\n{report.text(out.isatty() and 'NO_COLOR' not in os.environ)}", file=out)
    if options.json or options.record:
        more: dict[str, Any] = {"seconds": seconds, "compiling": _covered(compiled), "status": status}
        more |= {"packages": _packages(report), "rewritten": [hook.name for hook in hooks if hook.found]}
        (options.json or options.record / _JSON).write_text(json.dumps(report.as_json() | more))
    if options.html:
        options.html.write_text(html(report, options.script), encoding="utf-8")
    if options.record:
        (options.record / _FRAGMENT).write_text(report._repr_html_(), encoding="utf-8")
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
        print(f"\r\x1b[K{text}"[:REPORT_WIDTH], end="", file=out, flush=True)


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


_RUNS = ("unchanged", "under in_place")

#: The files that each of the two runs writes into its folder.
_JSON, _FRAGMENT, _RESULTS = "report.json", "report.html", "results.pickle"

#: The columns of a label, such as "values:".
_LABEL = 10


def _compared(options: argparse.Namespace) -> int:
    """Run the program unchanged, and with all that it jits under `in_place`, each in a process of its own."""
    out, reports, outputs = sys.stderr, list[dict[str, Any]](), list[str]()
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary) / name for name in _RUNS]
        for name, folder in zip(_RUNS, folders, strict=True):
            print(f"\n--- {options.script}, {name}", file=out, flush=True)
            folder.mkdir()
            command = [sys.executable, "-m", "jax_tensorarray.doctor", "--no-trial", "--record", str(folder)]
            command += ["--min-bytes", str(options.min_bytes)]
            command += ["--rewrite", " ".join(reports[0]["packages"])] if reports else []
            command += ["--trace", str(options.trace)] if options.trace and not reports else []
            command += [*["-m"] * options.module, options.script, *options.arguments]
            on = {switch.VARIABLE: "1"} if reports else {}  # or the second run would be the first one
            status, output = _compare.run(command, os.environ | on)
            if status or not (folder / _JSON).exists():
                ended = f"the program ended with status {status} {name}"
                before = " and with status 0 unchanged" if reports else ""
                print(f"\n--- {options.script}: {ended}{before}. Nothing was compared.", file=out)
                return status or 1
            reports.append(json.loads((folder / _JSON).read_text()))
            outputs.append(output)
        fragments = [(folder / _FRAGMENT).read_text(encoding="utf-8") for folder in folders]
        values = _compare.compared([folder / _RESULTS for folder in folders], outputs)
    unchanged, rewritten = reports
    lines = [*_costs(unchanged, rewritten), *values.lines()]
    if off := switch.why_off():
        lines.append(f"off:      {off} turns in_place off, and the run under in_place has turned it on.")
    print(f"\n--- {options.script}:", file=out)
    for line in lines:
        print("\n".join(wrapped(line[_LABEL:], f"    {line[:_LABEL]}", REPORT_WIDTH)), file=out)
    for package in rewritten["rewritten"]:
        print(f"    To keep what {package} gains, begin with jax_tensorarray.in_place_package({package!r}).", file=out)
    if options.json:
        runs: dict[str, Any] = dict(zip(_RUNS, reports, strict=True))
        options.json.write_text(json.dumps(runs | {"compared": values._asdict()}))
    if options.html:
        options.html.write_text(_page_of_two(options.script, lines, reports, fragments), encoding="utf-8")
    return int(bool(values.difference) or (options.fail and bool(rewritten["cases"])))


def _page_of_two(title: str, lines: Sequence[str], reports: Sequence[dict[str, Any]], fragments: Sequence[str]) -> str:
    """Return the page of a program that has run twice."""
    before, after = seconds = [*map(_seconds, reports)]
    gains = (False, after <= before)
    runs = zip(_RUNS, seconds, gains, strict=True)
    bars = [Bar(name, f"{took:.1f} s", took / max(seconds), is_gain) for name, took, is_gain in runs]
    parts = [as_html([Items(lines), Bars(bars)])]
    for name, part in zip(_RUNS, fragments, strict=True):
        parts += [as_html([Text(name.capitalize(), "h2.run")]), part]
    return page(title, *parts)


def _seconds(run: dict[str, Any]) -> float:
    """Return how long a run took besides compilation."""
    return float(run["seconds"] - run["compiling"])


def _costs(unchanged: dict[str, Any], rewritten: dict[str, Any]) -> list[str]:
    """Say what the two runs copied and how long they took. Slower programs come first."""
    (before, left), (arguments, arguments_left) = (
        [sum(len(case[what]) for case in run["cases"]) for run in (unchanged, rewritten)]
        for what in ("copies", "arguments")
    )
    copies = [f"{counted(before, 'operation')} on whole buffers in loops unchanged, {left} under in_place"]
    if arguments:
        are = "arguments are" if arguments > 1 else "argument is"
        copies.append(f"{arguments} {are} copied in every call unchanged, {arguments_left} under in_place")
    operations = "copies:   " + "; ".join(copies if before or left else copies[-1:])
    seconds = _seconds(unchanged), _seconds(rewritten)
    is_slower = seconds[1] > max(SLOWER * seconds[0], seconds[0] + _IMPORTS)
    times = f"{seconds[0]:.1f} s unchanged, {seconds[1]:.1f} s under in_place, for the whole program with its imports"
    times += f", plus {unchanged['compiling']:.1f} s and {rewritten['compiling']:.1f} s of compilation. "
    times += "Without --compare the doctor times each compiled program alone"
    lines = [f"times:    {'slower, ' * is_slower}{times}", operations]
    return lines if is_slower else lines[::-1]


@contextlib.contextmanager
def _rewritten(packages: Sequence[str]) -> Iterator[list[PackageHook]]:
    """Make `jax.jit` put every function under `in_place`, and those of packages too, wherever they have it from."""
    jit, jax.jit = jax.jit, jit_in_place
    try:
        with contextlib.ExitStack() as hooks:
            new = [package for package in packages if package not in sys.modules]
            yield [hooks.enter_context(in_place_package(package)) for package in new]
    finally:
        jax.jit = jit
