"""Look at all that a program compiles: which of its loops copy whole buffers, and what `in_place` makes of them."""

import argparse
import contextlib
import functools
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from jax_tensorarray import _carried, _compat, in_place, inspect
from jax_tensorarray.inspect import LoopCopies, LoopCopy

#: Buffers of fewer bytes are not looked for, unless asked for.
MIN_BYTES = 4096

#: What costs less than this part of the worst is counted, not listed.
_NOISE = 1e-3

_WIDTH = 79

#: Of what runs for more seconds than this, no program is run again to be timed.
_LONG = 60


class LoopCopyError(RuntimeError):
    """What `forbid_copies` raises. `copies` are the operations on whole buffers that were found."""

    def __init__(self, program: str, copies: LoopCopies) -> None:
        super().__init__(f"forbid_copies: in {program}, {copies}")
        self.copies = copies


class Trial(NamedTuple):
    """What `in_place` makes of a program: the copies left, and seconds before and after, if it could be run."""

    left: int
    before: float | None
    after: float | None

    def __str__(self) -> str:
        text = "nothing left to copy" if not self.left else f"{self.left} of them left"
        if self.before is None or self.after is None:
            return text
        gain = f"{self.before / self.after:.1f} times as fast" if self.after < self.before else "no faster"
        return f"{text}; {milliseconds(self.before)} -> {milliseconds(self.after)}, {gain}"


@dataclass
class Case:
    """A program that JAX has compiled, whose loops copy whole buffers."""

    program: str
    copies: LoopCopies
    trial: Trial | None = None
    failed: str = ""  #: why there is no trial
    jaxpr: Any = field(default=None, repr=False)
    ends: bool = False  #: whether it ends, whatever it is given


@dataclass
class Report:
    """What has been compiled while somebody watched.

    Attributes:
      programs: how many programs were compiled.
      loops: how many loops are in them.
      in_place: how many of these copy no whole buffer.
      unread: programs that could not be looked at.
      cases: the programs with loops that do, those that copy most first.
    """

    programs: int = 0
    loops: int = 0
    in_place: int = 0
    unread: int = 0
    cases: list[Case] = field(default_factory=list)

    @property
    def copies(self) -> list[LoopCopy]:
        """All operations on whole buffers, those that move most bytes first."""
        return sorted((copy for case in self.cases for copy in case.copies), key=cost, reverse=True)

    def try_in_place(self, *, timed: bool = True, progress: Callable[[str], None] = lambda text: None) -> None:
        """Try what `in_place` makes of each program: how many copies are left and, if `timed`, what is gained.

        A program is only run, on zeros, if it does nothing but compute, and XLA knows how many steps its loops take.
        """
        for n, case in enumerate(self.cases, 1):
            progress(f"trying in_place on {case.program} ({n} of {len(self.cases)})")
            if case.jaxpr is None:
                case.failed = "JAX had traced it before"
                continue
            try:
                case.trial = _tried(case, timed)
            except Exception as error:  # whatever it is, the report goes on
                case.failed = f"{type(error).__name__}: {error}".splitlines()[0]
        progress("")

    def as_json(self) -> dict[str, Any]:
        """The report as numbers and strings."""
        cases = [
            {
                "program": case.program,
                "copies": [copy._asdict() | {"cost": cost(copy)} for copy in case.copies],
                "in_place": None if case.trial is None else case.trial._asdict(),
            }
            for case in self.cases
        ]
        return {"programs": self.programs, "loops": self.loops, "loops_in_place": self.in_place, "cases": cases}

    def __str__(self) -> str:
        return self.text(False)

    def text(self, colours: bool) -> str:
        """The report in 79 columns."""

        def bold(text: str) -> str:
            return f"\x1b[1m{text}\x1b[0m" if colours else text

        unread = f" ({self.unread} could not be read)" if self.unread else ""
        compiled = f"{self.programs} programs were compiled{unread}, with {self.loops} loops"
        if not self.cases:
            return compiled + (", all in place: none copies a buffer." if self.loops else ".")
        lines = [bold(f"{compiled}: {self.loops - self.in_place} copy whole buffers, {self.in_place} do not.")]
        for number, (case, worth) in enumerate(worth_listing(self), 1):
            lines += ["", bold(f"{number}. {case.program}: {total_cost(worth)}")]
            if case.trial is not None:
                lines.append(f"   under in_place: {case.trial}")
            elif case.failed:
                lines += _wrapped(f"in_place could not be tried: {case.failed}")
            for copies in alike(worth):
                lines += ["", *_described(copies)]
        if small := len(self.copies) - sum(len(copies) for _, copies in worth_listing(self)):
            lines += ["", f"{small} more move less than a thousandth of the first, and are not listed."]
        if any(case.trial is not None for case in self.cases):
            lines += ["", "To keep what was tried, write jax.jit(jax_tensorarray.in_place(f))."]
        return "\n".join(lines)


def cost(copy: LoopCopy) -> int:
    """The bytes of a copy in all steps, or in one where XLA does not know how many there are."""
    return copy.num_bytes * (copy.steps or 1)


def worth_listing(report: Report) -> list[tuple[Case, list[LoopCopy]]]:
    """The programs, each with its copies that move a thousandth of the worst or more."""
    least = _NOISE * max((cost(copy) for copy in report.copies), default=0)
    listed = ((case, [copy for copy in case.copies if cost(copy) >= least]) for case in report.cases)
    return [(case, copies) for case, copies in listed if copies]


def total_cost(copies: Sequence[LoopCopy]) -> str:
    text = inspect.readable(sum(map(cost, copies)))
    return f"{text} a run" if all(copy.steps for copy in copies) else f"{text} a run or more"


def alike(copies: Sequence[LoopCopy]) -> list[list[LoopCopy]]:
    """Those of one line, kind and advice together, what costs most first."""
    found: dict[Any, list[LoopCopy]] = {}
    for copy in sorted(copies, key=cost, reverse=True):
        key = (copy.file, copy.line, copy.kind, copy.shape, copy.dtype, copy.in_gradient, copy.advice)
        found.setdefault(key, []).append(copy)
    return list(found.values())


def _described(copies: Sequence[LoopCopy]) -> list[str]:
    copy = copies[0]
    lines = [f"   {name_of_file(copy.file)}:{copy.line}" if copy.file else "   a line that XLA does not tell"]
    if copy.code:
        lines.append(f"       {copy.code}"[:_WIDTH])
    return [*lines, *_wrapped(what_and_how_often(copies)), *_wrapped(copy.advice)]


def what_and_how_often(copies: Sequence[LoopCopy]) -> str:
    """What copies that are alike do, in a sentence."""
    copy = copies[0]
    steps = f"{copy.steps} steps" if copy.steps else "steps that XLA cannot count"
    times = f" ({len(copies)} times)" if len(copies) > 1 else ""
    return f"{inspect.what_it_is(copy)}{times}: {inspect.readable(copy.num_bytes)} a step, {steps}."


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="   ", subsequent_indent="   ")


def name_of_file(file: str) -> str:
    """The file from here, or from where Python's packages are."""
    text = os.path.relpath(file)
    if text.startswith(".."):
        text = file
        for folder in ("site-packages", "dist-packages"):
            text = text.rpartition(f"{folder}{os.sep}")[2]
    return text


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


# --- watching --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def watch(*, min_bytes: int = MIN_BYTES) -> Iterator[Report]:
    """Look at all programs that JAX compiles in a block, in any thread, and at what their loops copy.

    What JAX has compiled before is not looked at. Programs run as they are.

    Args:
      min_bytes: buffers smaller than this are left out.

    Yields:
      A `Report`, which is complete when the block ends. It prints as a text, and `try_in_place()` adds what `in_place`
      would make of each program.

    Raises:
      NotImplementedError: this version of JAX does not tell what it compiles.

    >>> import jax, jax.numpy as jnp
    >>> from jax_tensorarray.inspect import watch
    >>> with watch() as report:
    ...     xs = jnp.ones((200, 64))
    ...     step = lambda i, ys: ys.at[i].set(jnp.sin(ys[i - 1]))
    ...     dx = jax.jit(jax.grad(lambda x: jax.lax.fori_loop(1, 200, step, x).sum()))(xs)
    >>> report.copies[0].kind, report.copies[0].shape, report.copies[0].steps
    ('copy', (200, 64), 199)
    """
    report = Report()

    def seen(name: str, jaxpr: Any, executable: Any) -> None:
        try:
            _look(report, name, jaxpr, executable, min_bytes)
        except Exception:  # the program goes on, whatever XLA has written
            report.unread += 1

    with inspect.lines_of_today(), _compat.compilations(seen):
        try:
            yield report
        finally:
            report.cases.sort(key=lambda case: max(map(cost, case.copies)), reverse=True)


@contextlib.contextmanager
def forbid_copies(*, min_bytes: int = MIN_BYTES) -> Iterator[None]:
    """Raise an error if a program is compiled in a block whose loops copy whole buffers, in place of running it.

    Args:
      min_bytes: buffers smaller than this may be copied.

    Raises:
      LoopCopyError: such a program is compiled. The message says where it copies, and what to do.
      NotImplementedError: this version of JAX does not tell what it compiles.

    >>> import jax, jax.numpy as jnp
    >>> from jax_tensorarray import in_place
    >>> from jax_tensorarray.inspect import forbid_copies
    >>> def loss(x):
    ...     return jax.lax.fori_loop(1, 200, lambda i, ys: ys.at[i].set(jnp.cos(ys[i - 1])), x).sum()
    >>> with forbid_copies():
    ...     dx = jax.jit(in_place(jax.grad(loss)))(jnp.ones((200, 64)))
    """

    def seen(name: str, jaxpr: Any, executable: Any) -> None:
        report = Report()
        _look(report, name, jaxpr, executable, min_bytes)
        for case in report.cases:
            raise LoopCopyError(case.program, case.copies)

    with inspect.lines_of_today(), _compat.compilations(seen):
        yield


def _look(report: Report, name: str, jaxpr: Any, executable: Any, min_bytes: int) -> None:
    report.programs += 1
    hlo = "\n".join(module.to_string() for module in executable.hlo_modules())
    loops = _carried.trip_counts(hlo)
    findings = list(_carried.findings(hlo)) if loops else []
    copies = inspect.copies_in(hlo, min_bytes, findings) if loops else LoopCopies()
    report.loops += len(loops)
    report.in_place += len(loops) - len({f.at[-1].name for f in findings if inspect.counts(f, min_bytes)})
    if copies:
        program = name.removeprefix("jit_")
        report.cases.append(Case(program, copies, jaxpr=jaxpr, ends=None not in loops))


def _tried(case: Case, timed: bool) -> Trial:
    plain, types = jaxpr_as_fun(case.jaxpr), [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in case.jaxpr.in_avals]
    least = min(copy.num_bytes for copy in case.copies)
    before, after = (jax.jit(f).lower(*types).compile() for f in (plain, in_place(plain)))
    left = len(inspect.copies_in(after.as_text() or "", least))
    if not (timed and case.ends) or case.jaxpr.effects:
        return Trial(left, None, None)
    zeros = [jax.numpy.zeros(a.shape, a.dtype) for a in types]
    return Trial(left, _seconds(before, zeros), _seconds(after, zeros))


def _seconds(f: Callable[..., Any], args: Sequence[Any], limit: float = 1.0) -> float:
    """The least of some runs, which take a second in all, or of one."""
    took: list[float] = []
    jax.block_until_ready(f(*args))
    while not took or (sum(took) < limit and len(took) < 10):
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        took.append(time.perf_counter() - start)
    return min(took)


# --- the command -----------------------------------------------------------------------------------------------

#: Set in a process that `--heal` starts: it jits every function under `in_place`.
_HEAL = "JAX_TENSORARRAY_HEAL"


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m jax_tensorarray.inspect [options] SCRIPT [ARGS...]`, or `-m MODULE`: the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_tensorarray.inspect",
        description="Run a program, and report which of its loops copy whole buffers, where, and what in_place makes "
        "of them. The report goes to the standard error.",
    )
    parser.add_argument("-m", action="store_true", dest="module", help="SCRIPT is the name of a module")
    parser.add_argument("--fail", action="store_true", help="exit with 1 if a loop copies a whole buffer")
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
        page = importlib.import_module("jax_tensorarray._page")  # which imports this module
        options.html.write_text(page.html(report, options.script), encoding="utf-8")
    return status or int(options.fail and bool(report.cases))


def _progress(out: TextIO, text: str) -> None:
    if out.isatty():
        print(f"\r\x1b[K{text}"[:_WIDTH], end="", file=out, flush=True)


def _run(options: argparse.Namespace) -> int:
    """Run the program as Python would: its exit status."""
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
    """Run the program as it is and with all that it jits under `in_place`, each in a process of its own."""
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
    """Have `jax.jit` take every function under `in_place`."""
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
    """Whether a function is being traced under `in_place`, which repairs what that jits too."""

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
        except Exception:  # it is what it was, then: with its own errors, if these are its own
            return fun(*args, **kwargs)
        finally:
            _healing.now = False

    return healed
