"""The main job: `python -m jax_tensorarray` shows quadratic against linear on your own machine."""

import argparse
import importlib.util
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from jax_tensorarray._selfcheck.measure import (
    LONGEST_RUN,
    OURS,
    PLAIN,
    REPAIRED,
    SIDES,
    Case,
    Key,
    Measured,
    Progress,
    check,
    compile_all,
    gradient,
    measure,
    second_order,
)
from jax_tensorarray._selfcheck.programs import programs
from jax_tensorarray.inspect._header import header, versions
from jax_tensorarray.inspect._text import wrapped

#: Each T is four times the one before, so that 16 times the time a step is quadratic.
SIZES = (125, 500, 2000)
SIZES_15906 = (625, 2500, 10000)
QUICK_SIZES = (16,)

Results = dict[Case, dict[str, Measured]]


def cases(quick: bool = False) -> list[Case]:
    """Return the rows of the tables: all loops, the one that started this first, and a few second derivatives."""
    found = []
    for program in programs.values():
        row, sizes = ((10, 5), SIZES_15906) if program.name == "issue_15906" else ((64,), SIZES)
        found.append(Case(program, gradient, row, QUICK_SIZES if quick else sizes))
    second = [programs[name] for name in ("write", "read_then_write") if name in programs]
    return found + [Case(p, second_order, (64,), QUICK_SIZES if quick else SIZES) for p in second[: 1 if quick else 2]]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _factor(value: float | None, *, is_noisy: bool = False) -> str:
    about = "~" if is_noisy else ""
    return "-" if value is None else f"{about}{value:.0f}" if value >= 99.95 else f"{about}{value:.1f}"


def _ratio(measured: dict[str, Measured], side: str) -> float | None:
    theirs, mine = (measured[name].microseconds[-1] for name in (PLAIN, side))
    return None if theirs is None or mine is None else theirs / mine


def table(rows: Results, width: int) -> Iterator[str]:
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


def tables(results: Results) -> Iterator[str]:
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
            yield from wrapped(text + ".", name.ljust(17))
    width = max(len(case.program.name) for case in results)
    sections: dict[str, Results] = {}
    for case, measured in results.items():
        title = f"{case.derivative.title}, rows of {' x '.join(map(str, case.row))} float32"
        sections.setdefault(title, {})[case] = measured
    for title, rows in sections.items():
        yield from ("", title, *table(rows, width))
    if any(None in m.microseconds for measured in results.values() for m in measured.values()):
        yield from ("", f"-: left out, since it was predicted to take more than {LONGEST_RUN:.0f} s.")


def summary(results: Results) -> str:
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


def plot(results: Results, file: Path) -> None:
    """Plot time a step against T, both axes logarithmic, one panel a case."""
    from matplotlib.figure import Figure

    columns = min(5, len(results))
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


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, programs))
    parser = argparse.ArgumentParser(
        prog="python -m jax_tensorarray",
        description="Print versions, devices and kernels. Check values and gradients of loops over a buffer against\n"
        "plain JAX. Then time their gradients with plain JAX, under in_place and with row ops, and\ncount the "
        "whole-buffer copies in their loops. It takes a minute on two cores.",
        epilog="\n".join(["loops:", *(f"  {p.name.ljust(width)}  {p.about}" for p in programs.values())])
        + "\n\nThe exit code is 1 if a check fails.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="also draw time a step against T (matplotlib)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="these loops at one tiny T, in 15 seconds: tries them, and measures nothing useful",
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
    print(f"\nChecks: {len(programs)} loops, written once: plain JAX, the same under in_place, and row ops")
    print(*(f"  {'ok  ' if passed else 'FAIL'}  {text}" for passed, text in checks), sep="\n", flush=True)
    if failed := sum(not passed for passed, _ in checks):
        print(f"{failed} of {len(checks)} checks failed, so nothing was timed.", file=sys.stderr)
        return 1

    executables |= compile_all(larger, progress)
    results = {case: {side: measure(case, side, executables, progress) for side in SIDES} for case in todo}
    progress.clear()
    print("", *tables(results), "", *wrapped(summary(results)), sep="\n", flush=True)
    if arguments.plot is not None:
        plot(results, arguments.plot)
        print(f"\nDrawn in {arguments.plot}.")
    return 0
