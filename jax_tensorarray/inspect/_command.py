"""The command `python -m jax_tensorarray.inspect`: run a program, examine what it compiles, report, and repair it."""

import argparse
import contextlib
import functools
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np

from jax_tensorarray import in_place
from jax_tensorarray.inspect._page import html
from jax_tensorarray.inspect._watch import MIN_BYTES, WIDTH, watch

#: After a run of more seconds than this, no program is run again for timing.
_LONG = 60

#: Set in the process started by `--heal`, in which every function is jitted under `in_place`.
_HEAL = "JAX_TENSORARRAY_HEAL"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `python -m jax_tensorarray.inspect [options] SCRIPT [ARGS...]`, or `-m MODULE`. Return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_tensorarray.inspect",
        description="Run a program, and report which of its loops copy whole buffers, which arguments are copied in "
        "every call, where, and what in_place makes of them. The report goes to the standard error.",
    )
    parser.add_argument("-m", action="store_true", dest="module", help="SCRIPT is the name of a module")
    parser.add_argument("--fail", action="store_true", help="exit with 1 if something is listed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there as well")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with excerpts of the source and bars")
    parser.add_argument("--min-bytes", type=int, default=MIN_BYTES, metavar="N", help="leave smaller buffers out")
    parser.add_argument("--no-trial", action="store_true", help="do not try in_place")
    parser.add_argument("--heal", action="store_true", help="run the program again, with all that it jits in place")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS")
    options = parser.parse_args(arguments)
    if options.min_bytes < 0:
        parser.error("--min-bytes must not be negative")
    if not options.module and not Path(options.script).is_file():
        parser.error(f"there is no file {options.script}")
    return _compared(options) if options.heal else _inspected(options)


def _inspected(options: argparse.Namespace) -> int:
    out = sys.stderr
    started = time.perf_counter()
    with watch(min_bytes=options.min_bytes) as report, _healed() if _HEAL in os.environ else contextlib.nullcontext():
        status = _run(options)
    seconds = time.perf_counter() - started
    if not options.no_trial:
        report.try_in_place(timed=seconds < _LONG, progress=functools.partial(_progress, out))
    print(f"\n{report.text(out.isatty() and 'NO_COLOR' not in os.environ)}", file=out)
    if options.json:
        options.json.write_text(json.dumps(report.as_json() | {"seconds": seconds, "status": status}))
    if options.html:
        options.html.write_text(html(report, options.script), encoding="utf-8")
    return status or int(options.fail and bool(report.cases))


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
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name, more in (("as it is", {}), ("under in_place", {_HEAL: "1"})):
            print(f"\n--- {options.script}, {name}", file=sys.stderr, flush=True)
            file = Path(folder) / "report.json"
            command = [sys.executable, "-m", "jax_tensorarray.inspect", "--no-trial", "--json", str(file)]
            command += ["--min-bytes", str(options.min_bytes), *["-m"] * options.module]
            if options.html and not more:
                command += ["--html", str(options.html)]
            status = subprocess.call([*command, options.script, *options.arguments], env=os.environ | more)
            if not file.exists():
                return status or 1
            found.append(json.loads(file.read_text()))
            if status:
                return status
    as_is, healed = found
    left = sum(len(case["copies"]) for case in healed["cases"])
    before = sum(len(case["copies"]) for case in as_is["cases"])
    print(
        f"\n--- {options.script}: {before} operations on whole buffers in loops as it is, {left} under in_place;\n"
        f"    {as_is['seconds']:.1f} s as it is, {healed['seconds']:.1f} s under in_place, compilation included.",
        file=sys.stderr,
    )
    if options.json:
        options.json.write_text(json.dumps({"as it is": as_is, "under in_place": healed}))
    return int(options.fail and bool(left))


@contextlib.contextmanager
def _healed() -> Iterator[None]:
    """Make `jax.jit` take every function under `in_place`."""
    jit = jax.jit

    @functools.wraps(jit)
    def healing_jit(fun: Any = None, *args: Any, **options: Any) -> Any:
        if fun is None:
            return functools.partial(healing_jit, *args, **options)
        return jit(_under_in_place(fun) if callable(fun) else fun, *args, **options)

    jax.jit = healing_jit
    try:
        yield
    finally:
        jax.jit = jit


class _Healing(threading.local):
    """Whether a function is being traced under `in_place`, which also repairs the functions jitted inside."""

    now = False


_healing = _Healing()


def _under_in_place(fun: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fun)
    def healed(*args: Any, **kwargs: Any) -> Any:
        if _healing.now:
            return fun(*args, **kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        is_array = [isinstance(x, jax.Array | np.ndarray) for x in leaves]

        def of_arrays(*arrays: Any) -> Any:
            given = iter(arrays)
            args, kwargs = jax.tree.unflatten(
                tree, [next(given) if array else x for x, array in zip(leaves, is_array, strict=True)]
            )
            return fun(*args, **kwargs)

        _healing.now = True
        try:
            return in_place(of_arrays)(*(x for x, array in zip(leaves, is_array, strict=True) if array))
        except Exception:  # run it unchanged: if the error is its own, it raises it again
            return fun(*args, **kwargs)
        finally:
            _healing.now = False

    return healed
