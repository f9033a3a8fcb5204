"""The main job: `python -m jax_tensorarray` shows quadratic against linear on your own machine."""

import argparse
import importlib.util
import math
import platform
import shutil
import statistics
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxlib.version
import numpy as np

from jax_tensorarray import __version__, _kernels, in_place
from jax_tensorarray._hlo import text as hlo_text
from jax_tensorarray._selfcheck.programs import Program, ours, plain
from jax_tensorarray._selfcheck.programs import shown as programs

PLAIN, REPAIRED, OURS = "plain JAX", "in_place", "jax_tensorarray"
#: How a program is run: written in plain JAX, the same under `in_place`, and written with row ops or a TensorArray.
SIDES: dict[str, Callable[[Program], Callable[[jax.Array], jax.Array]]] = {
    PLAIN: lambda program: program.with_ops(plain),
    REPAIRED: lambda program: in_place(program.with_ops(plain)),
    OURS: lambda program: program.with_ops(ours),
}

#: Each T is four times the one before, so that 16 times the time a step is quadratic.
SIZES = (125, 500, 2000)
SIZES_15906 = (625, 2500, 10000)
QUICK_SIZES = (16,)

#: Checked by name in the output; the others share a sentence. With --quick there are no others.
HANDFUL = ("issue_15906", "tensorarray", "write", "read_then_write", "swap", "branches", "closed_over_scan")
SECOND_ORDER = ("write", "read_then_write", "read_beside_write")

#: A run predicted to take longer than this, in seconds, is left out.
LONGEST_RUN = 5.0

#: Columns of the output.
WIDTH = 100


class Derivative(NamedTuple):
    """A derivative of a program, which is a function of `x` with two outputs."""

    title: str
    outputs: tuple[str, str]
    of: Callable[[Callable[[jax.Array], jax.Array]], Callable[[jax.Array], Any]]


gradient = Derivative("Gradient (jax.value_and_grad)", ("value", "gradient"), jax.value_and_grad)

second_order = Derivative(
    "Second order (jax.jvp of jax.grad)",
    ("gradient", "second derivative"),
    lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (x,)),
)


class Case(NamedTuple):
    """A row of a table: a program, the derivative computed, the shape of a row, and the values of T."""

    program: Program
    derivative: Derivative
    row: tuple[int, ...]
    sizes: tuple[int, ...]

    def x(self, T: int) -> np.ndarray[Any, Any]:
        """Return the input, the same on every run and machine."""
        return np.random.default_rng(0).standard_normal((T, *self.row), dtype=np.float32)


class Key(NamedTuple):
    """A case on one side, at one T."""

    case: Case
    side: str
    T: int


class Measured(NamedTuple):
    """Measurements of a case on one side. A time is None where the run was left out."""

    microseconds: list[float | None]
    copies: int
    other: int
    is_noisy: bool = False  #: whether the same run took twice as long at one time as at another

    @property
    def growth(self) -> float | None:
        """Time a step at the largest T over that at the smallest."""
        first, last = self.microseconds[0], self.microseconds[-1]
        return None if first is None or last is None or len(self.microseconds) == 1 else last / first


class Progress:
    """One line on stderr, rewritten while there is work; where stderr is not a terminal, a line now and then."""

    SECONDS = 10.0  #: between two lines

    def __init__(self, total: int) -> None:
        self.done, self.total, self.start = 0, total, time.perf_counter()
        self.shown, self.said = sys.stderr.isatty(), self.start

    def step(self, doing: str) -> None:
        """Count one more thing as done, and show that `doing` is next."""
        self.done += 1
        filled = 30 * self.done // self.total
        now = time.perf_counter()
        text = f"{self.done}/{self.total}  {now - self.start:.0f} s  {doing}"
        self._write(f"[{'#' * filled}{'.' * (30 - filled)}] {text}")
        if not self.shown and now - self.said > self.SECONDS:
            self.said = now
            print(text, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Clear the line, to make room for output."""
        self._write("")

    def _write(self, text: str) -> None:
        if self.shown:
            width = shutil.get_terminal_size().columns - 1
            print("\r" + text[:width].ljust(width), end="" if text else "\r", file=sys.stderr, flush=True)


# --- measuring -------------------------------------------------------------------------------------------------


def compile_all(keys: Sequence[Key], progress: Progress) -> dict[Key, Any]:
    """Compile all keys. XLA compiles in two threads while this one traces and lowers."""
    executables: dict[Key, Any] = {}
    waiting: deque[tuple[Key, Future[Any]]] = deque()

    def collect(left: int) -> None:
        while len(waiting) > left:
            key, future = waiting.popleft()
            executables[key] = future.result()
            progress.step(f"compiling {key.case.program.name}, T = {key.T}")

    with ThreadPoolExecutor(2) as pool:
        for key in keys:
            f = key.case.derivative.of(SIDES[key.side](key.case.program))
            lowered = jax.jit(f).lower(key.case.x(key.T))
            waiting.append((key, pool.submit(lowered.compile)))
            collect(3)
        collect(0)
    return executables


def seconds_of(run: Callable[[jax.Array], Any], x: jax.Array, spend: float = 0.02) -> float:
    """Return the shortest of several runs: at least three, unless the first takes long."""
    times: list[float] = []
    while not times or (times[0] < 5 * spend and (sum(times) < spend or len(times) < 3)):
        start = time.perf_counter()
        for output in run(x):
            output.block_until_ready()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(case: Case, side: str, executables: dict[Key, Any], progress: Progress, spend: float = 0.02) -> Measured:
    """Time `case` at each T, smallest first, and count what its loops do to a whole buffer at the largest."""
    microseconds: list[float | None] = []
    seconds, before = 0.0, case.sizes[0]
    for T in case.sizes:
        progress.step(f"timing {case.program.name}, T = {T}")
        if seconds * (T / before) ** 2 > LONGEST_RUN:
            microseconds.append(None)
            continue
        seconds, before = seconds_of(executables[Key(case, side, T)], jax.device_put(case.x(T)), spend), T
        microseconds.append(seconds / T * 1e6)
    is_noisy = _repeat(case, side, executables, microseconds, spend)
    largest = case.sizes[-1]
    hlo, num_bytes = executables[Key(case, side, largest)].as_text(), case.x(largest).nbytes
    copies = hlo_text.copies_in_loops(hlo, num_bytes)
    other = set(hlo_text.whole_buffer_operations_in_loops(hlo, num_bytes)) - set(copies)
    return Measured(microseconds, len(copies), len(other), is_noisy)


def _repeat(case: Case, side: str, executables: dict[Key, Any], microseconds: list[float | None], spend: float) -> bool:
    """Repeat what is neither linear nor quadratic, as long as that helps. Return whether it is still in doubt."""
    factor, noisy = case.sizes[-1] // case.sizes[0], False
    for _ in range(3):
        first, last = microseconds[0], microseconds[-1]
        if len(case.sizes) == 1 or first is None or last is None or not 2 < last / first < 0.75 * factor:
            return False
        noisy = False
        for k in (0, -1):
            T, old = case.sizes[k], microseconds[k] or 0.0
            new = seconds_of(executables[Key(case, side, T)], jax.device_put(case.x(T)), 3 * spend) / T * 1e6
            noisy = noisy or not 0.67 < new / old < 1.5
            microseconds[k] = min(new, old)
    return noisy


# --- checks ----------------------------------------------------------------------------------------------------


class Check(NamedTuple):
    """Whether a case gives the same as plain JAX, in one sentence."""

    case: Case
    passed: bool
    difference: float
    sentence: str


def check(case: Case, executables: dict[Key, Any]) -> Check:
    """Compare both outputs of a derivative with plain JAX's, at the smallest T."""
    T = case.sizes[0]
    x = jax.device_put(case.x(T))
    found = {side: [np.asarray(out) for out in executables[Key(case, side, T)](x)] for side in SIDES}
    name, outputs, expected = case.program.name, case.derivative.outputs, found.pop(PLAIN)
    worst = 0.0
    for side, actual in found.items():
        for what, a, e in zip(outputs, actual, expected, strict=True):
            size = float(np.max(np.abs(e)))
            difference = float(np.max(np.abs(a - e)))
            if not np.allclose(a, e, rtol=1e-3, atol=1e-4 * size, equal_nan=True):
                sentence = (
                    f"{name}: the {what} of {side} differs from plain JAX's by {difference:.2g}, "
                    f"where the largest entry is {size:.2g} (T = {T})."
                )
                return Check(case, False, difference, sentence)
            worst = max(worst, difference / (size or 1.0))
    how = "are exactly as in plain JAX" if worst == 0 else f"agree with plain JAX to {worst:.0e}"
    return Check(case, True, worst, f"{name}: the {outputs[0]} and the {outputs[1]} {how}.")


def report_checks(checks: Sequence[Check]) -> Iterator[str]:
    """Yield a sentence for each failure and for a handful of the others, and one for the rest."""
    passed = [c for c in checks if c.passed]
    named = [c for c in passed if c.case.program.name in HANDFUL and c.case.derivative is gradient]
    yield from (f"  ok    {c.sentence}" for c in named)
    if len(passed) > len(named):
        rest = [c for c in passed if c not in named]
        second = sum(c.case.derivative is second_order for c in rest)
        worst = max(c.difference for c in rest)
        what = f"The other {len(rest) - second} programs" if len(rest) > second else ""
        if second:
            what += f"{' and ' if what else 'The '}{second} second derivatives"
        yield f"  ok    {what} agree with plain JAX{f' to {worst:.0e}' if worst else ' exactly'}."
    yield from (f"  FAIL  {c.sentence}" for c in checks if not c.passed)


# --- output ----------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Return the versions that run here."""
    return {
        "jax_tensorarray": __version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "Python": platform.python_version(),
    }


def header() -> Iterator[str]:
    """Yield lines with versions, devices and kernels."""
    yield ", ".join(f"{name} {version}" for name, version in versions().items())
    yield "devices   " + ", ".join(f"{d.platform}:{d.id} ({d.device_kind})" for d in jax.devices())
    present = {"cpu"} | {"cuda" if d.platform == "gpu" else d.platform for d in jax.devices()}
    loaded = []
    for name, module in sorted(_kernels.modules.items()):
        notes = ["of jax-tensorarray-cuda13"] if _kernels.is_of_plugin(getattr(module, "__name__", "")) else []
        notes += [] if name in present else ["no such device here"]
        loaded.append(f"{name} ({', '.join(notes)})" if notes else name)
    yield "kernels   " + ", ".join(loaded)
    for module_name, why in _kernels.missing.items():
        platform_name = _kernels.PLATFORM_OF[module_name].lower()
        yield from textwrap.wrap(
            f"not {platform_name} ({why.rstrip('.')}): the ops run as plain JAX there",
            WIDTH,
            initial_indent=" " * 10,
            subsequent_indent=" " * 10,
            break_long_words=False,
            break_on_hyphens=False,
        )


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _factor(value: float | None, *, is_noisy: bool = False) -> str:
    about = "~" if is_noisy else ""
    return "-" if value is None else f"{about}{value:.0f}" if value >= 99.95 else f"{about}{value:.1f}"


def table(rows: dict[Case, dict[str, Measured]], width: int) -> Iterator[str]:
    """Yield a table of cases of the same sizes, the sides beside each other. Its first column is `width` wide."""
    side = f"T={next(iter(rows)).sizes[-1]}".rjust(7) + " grows copies"
    sides = {name: side if name == PLAIN else side + " faster" for name in SIDES}
    yield (" " * width + "".join(" |" + name.center(len(text)) for name, text in sides.items())).rstrip()
    yield "program".ljust(width) + "".join(" |" + text for text in sides.values())
    yield "-" * (width + 1) + "".join("+" + "-" * (len(text) + 1) for text in sides.values()).removesuffix("-")
    for case, measured in rows.items():
        line = case.program.name.ljust(width)
        for name, m in measured.items():
            copies = f"{m.copies}+{m.other}" if m.other else str(m.copies)
            grows = _factor(m.growth, is_noisy=m.is_noisy)
            line += " |" + _number(m.microseconds[-1]).rjust(7) + grows.rjust(6) + copies.rjust(7)
            line += "" if name == PLAIN else _factor(_ratio(measured, name)).rjust(7)
        yield line


def _ratio(measured: dict[str, Measured], side: str) -> float | None:
    theirs, mine = (measured[name].microseconds[-1] for name in (PLAIN, side))
    return None if theirs is None or mine is None else theirs / mine


def tables(results: dict[Case, dict[str, Measured]]) -> Iterator[str]:
    """Yield the meaning of the columns, and all tables."""
    sizes = next(iter(results)).sizes
    factor = sizes[-1] // sizes[0]
    meaning = {
        f"T={sizes[-1]}": "microseconds that a step takes, in a loop of so many; other tables have another T",
        "grows": f"that over the time of a step at T / {factor}: about 1 if a loop is linear in T, {factor} if it "
        "is quadratic; ~ is a noisy one, which differed each time it was measured",
        "copies": "whole-buffer copies in the loops of the optimised HLO; +n: other operations there that make a "
        "whole buffer anew",
        "faster": "how many times as fast as plain JAX",
        PLAIN: "as people write it",
        REPAIRED: "the same program under in_place",
        OURS: "written with row ops, or a TensorArray",
    }
    for name, text in meaning.items():
        if name != "grows" or factor > 1:
            yield from textwrap.wrap(
                text + ".", WIDTH, initial_indent=name.ljust(17), subsequent_indent=" " * 17, break_on_hyphens=False
            )
    width = max(len(case.program.name) for case in results)
    sections: dict[tuple[Derivative, tuple[int, ...]], dict[Case, dict[str, Measured]]] = {}
    for case, measured in results.items():
        sections.setdefault((case.derivative, case.row), {})[case] = measured
    for (derivative, row), rows in sections.items():
        yield ""
        yield f"{derivative.title}, rows of {' x '.join(map(str, row))} float32"
        yield from table(rows, width)
    if any(None in m.microseconds for measured in results.values() for m in measured.values()):
        yield ""
        yield f"-: left out, since it was predicted to take more than {LONGEST_RUN:.0f} s."


def summary(results: dict[Case, dict[str, Measured]]) -> str:
    """Return a summary in one sentence."""
    theirs, repaired, mine = (sum(m[side].copies + m[side].other for m in results.values()) for side in SIDES)
    made = (
        f"in all, the loops of plain JAX make a whole buffer in {theirs} places, "
        f"those under in_place in {repaired}, those with row ops in {mine}"
    )
    # Only cases whose growth is known on all sides, so that the medians are of the same loops.
    full = [m for m in results.values() if None not in {side.growth for side in m.values()}]
    if not full:
        return f"Over {len(results)} gradients, {made}."
    grown = [f"{statistics.median(m[side].growth or 0 for m in full):.1f}" for side in SIDES]
    faster = [f"{statistics.median(_ratio(m, side) or 0 for m in full):.1f}" for side in (REPAIRED, OURS)]
    sizes = next(iter(results)).sizes
    return (
        f"With {sizes[-1] // sizes[0]} times as many steps, a step takes {grown[0]} times as long in plain JAX, "
        f"{grown[1]} times under in_place and {grown[2]} times with row ops, which are then {faster[0]} and "
        f"{faster[1]} times as fast (medians of {len(full)} gradients); {made}."
    )


def plot(results: dict[Case, dict[str, Measured]], file: Path) -> None:
    """Plot time a step against T, both axes logarithmic, one panel a case."""
    from matplotlib.figure import Figure

    columns = min(7, len(results))
    lines = math.ceil(len(results) / columns)
    figure = Figure(figsize=(2.6 * columns + 0.6, 2.1 * lines + 1.3), layout="constrained")
    axes = figure.subplots(lines, columns, sharey=True, squeeze=False).ravel()
    styles = {PLAIN: ("tab:red", "o-"), REPAIRED: ("tab:green", "^-"), OURS: ("tab:blue", "s-")}
    for ax, (case, measured) in zip(axes, results.items(), strict=False):
        for side, (colour, style) in styles.items():
            points = [(T, t) for T, t in zip(case.sizes, measured[side].microseconds, strict=True) if t is not None]
            ax.loglog(*zip(*points, strict=True), style, color=colour, label=side, markersize=4)
        title = case.program.name + (", 2nd order" if case.derivative is second_order else "")
        ax.set_title(title, fontsize=9)
        ax.set_xticks(case.sizes, [str(T) for T in case.sizes])
        ax.minorticks_off()
        ax.grid(True, color="0.9")
        ax.tick_params(labelsize=8)
        ax.yaxis.set_major_formatter("{x:g}")
    for ax in axes[len(results) :]:
        ax.set_axis_off()
    figure.supxlabel("T, steps of the loop", fontsize=10)
    figure.supylabel("microseconds a step of the gradient", fontsize=10)
    described = ", ".join(f"{name} {version}" for name, version in versions().items())
    figure.suptitle(f"Flat is linear in T, a slope of one is quadratic\n{described}", fontsize=10)
    axes[0].legend(loc="upper left", fontsize=7, frameon=False)
    figure.savefig(file, dpi=130)


# --- the command -----------------------------------------------------------------------------------------------


def cases(quick: bool = False) -> list[Case]:
    """Return the rows of the tables: the loop that started this, all others, and a few second derivatives."""
    sizes = QUICK_SIZES if quick else SIZES
    chosen = [p for p in programs.values() if not quick or p.name in HANDFUL]
    found = [Case(program, gradient, (64,), sizes) for program in chosen if program.name != "issue_15906"]
    found.sort(key=lambda case: case.program.name != "tensorarray")
    if first := programs.get("issue_15906"):
        found.insert(0, Case(first, gradient, (10, 5), QUICK_SIZES if quick else SIZES_15906))
    second = SECOND_ORDER[:1] if quick else SECOND_ORDER
    return found + [Case(programs[name], second_order, (64,), sizes) for name in second if name in programs]


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, programs))
    parser = argparse.ArgumentParser(
        prog="python -m jax_tensorarray",
        description="Print versions, devices and kernels. Check values and gradients of loops over a buffer against\n"
        "plain JAX. Then time their gradients with plain JAX, under in_place and with row ops, and\ncount the "
        "whole-buffer copies in their loops. It takes two minutes on two cores.",
        epilog="\n".join(["loops:", *(f"  {p.name.ljust(width)}  {p.about}" for p in programs.values())])
        + "\n\nThe exit code is 1 if a check fails.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="also draw time a step against T (matplotlib)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a handful of loops at one tiny T, in 15 seconds: tries them, and measures nothing useful",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the main job, and return its exit code."""
    arguments = _parser().parse_args(argv)
    if arguments.plot is not None and (problem := _cannot_plot(arguments.plot)):
        print(problem, file=sys.stderr)
        return 1
    print(*header(), sep="\n", flush=True)

    todo = cases(arguments.quick)
    smallest = [Key(case, side, case.sizes[0]) for case in todo for side in SIDES]
    larger = [Key(case, side, T) for case in todo for T in case.sizes[1:] for side in SIDES]
    progress = Progress(2 * (len(smallest) + len(larger)))

    executables = compile_all(smallest, progress)
    checks = [check(case, executables) for case in todo]
    progress.clear()
    loops = len({case.program for case in todo})
    print(f"\nChecks: {loops} loops, written once: plain JAX, the same under in_place, and row ops")
    print(*report_checks(checks), sep="\n", flush=True)
    if failed := sum(not c.passed for c in checks):
        print(f"{failed} of {len(checks)} checks failed, so nothing was timed.", file=sys.stderr)
        return 1

    executables |= compile_all(larger, progress)
    results = {case: {side: measure(case, side, executables, progress) for side in SIDES} for case in todo}
    progress.clear()
    print("", *tables(results), "", *textwrap.wrap(summary(results), WIDTH), sep="\n", flush=True)
    if arguments.plot is not None:
        plot(results, arguments.plot)
        print(f"\nDrawn in {arguments.plot}.")
    return 0


def _cannot_plot(file: Path) -> str | None:
    """Return why plotting is impossible, in a sentence, before a minute is spent. None if it is possible."""
    if importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib. Run `pip install 'jax-tensorarray[plot]'`."
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if file.suffix[1:].lower() not in formats:
        return f"--plot: {file} must end in one of {', '.join('.' + f for f in sorted(formats))}."
    if not file.absolute().parent.is_dir():
        return f"--plot: there is no folder {file.absolute().parent}. Create it first."
    return None
