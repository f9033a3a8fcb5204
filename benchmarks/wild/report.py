"""The table of all public programs, and its picture."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import families
from benchmarks.wild.measure import NOISE, Found, Row
from benchmarks.wild.programs import PROGRAMS, Program
from jax_tensorarray.doctor._text import readable

BEGIN = "<!-- python -m benchmarks.wild: begin -->"

BY_NAME = {program.name: program for program in PROGRAMS}


def table(rows: Sequence[Row]) -> str:
    """All programs, those that gain most first."""
    head = "| program | grows | | found | plain | `in_place` | gains | by |\n|---|---|---|---|---|---|---|---|"
    lines = [line for row in sorted(rows, key=gain, reverse=True) for line in _lines(row)]
    return "\n".join([head, *lines])


def gain(row: Row) -> float:
    """How many times as fast the largest program is, forward or backward."""
    return max(found.gain for _, found in largest(row))


def largest(row: Row) -> Iterator[tuple[str, Found]]:
    """Yield each pass at the largest size, with its name: nothing for the forward pass."""
    for which, sizes in row.passes.items():
        yield _shown(which), sizes[-1]


def line(row: Row) -> str:
    """A program while the run goes on: how many times as fast each pass is at each size."""
    gains = (f"{which} {', '.join(f'{found.gain:.2f}' for found in of)}" for which, of in row.passes.items())
    return f"{row.name}: {'; '.join(gains)} times as fast"


def slower(row: Row) -> Iterator[tuple[str, Found]]:
    """Yield each pass at each size at which it is slower, likewise."""
    for which, sizes in row.passes.items():
        yield from ((_shown(which), found) for found in sizes if found.gain < 1 / NOISE)


def _shown(which: str) -> str:
    return "" if which == "forward" else f"`{which}`"


def _lines(row: Row) -> Iterator[str]:
    program = BY_NAME[row.name]
    first = f"**{program.library}** {row.version}, {program.what}"
    by = ", ".join(families.behind(f"wild: {row.name}"))
    sizes = f"{program.n}: " + ", ".join(str(found.size) for found in row.passes["forward"])
    for which, found in row.passes.items():
        before, after = (
            " → ".join(map(milliseconds, times)) for times in ([x.before for x in found], [x.after for x in found])
        )
        cells = [first, sizes, _shown(which) or which, _what_is_found(found[-1]), before, after, _gains(found), by]
        yield f"| {' | '.join(cells)} |"
        first = sizes = by = ""


def _what_is_found(found: Found) -> str:
    if not found.copies:
        return "nothing"
    left = "none left" if not found.left else f"{found.left} left"
    return f"{found.copies} in `{found.where}`, {readable(found.num_bytes)} per step; {left}"


def _gains(of: Sequence[Found]) -> str:
    """Return the gain at each size."""
    texts = [_gained(found) for found in of]
    if len(set(texts)) == 1 and texts[0] in ("the same", "unchanged"):
        return texts[0]
    return "; ".join(f"{found.size}: {text}" for found, text in zip(of, texts, strict=True))


def _gained(found: Found) -> str:
    if not found.is_equal:
        return "**different results**"
    if found.is_unchanged:
        return "unchanged"
    if 1 / NOISE <= found.gain <= NOISE:
        return "the same"
    return f"{found.gain:.1f} times as fast" if found.gain > 1 else f"**{1 / found.gain:.2f} times as slow**"


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds, with two or three digits."""
    return f"{1e3 * seconds:.2g} ms" if seconds < 0.0995 else f"{1e3 * seconds:.0f} ms"


def draw(rows: Sequence[Row], file: Path) -> None:
    """A bar for each program and pass: how many times as fast it is."""
    from matplotlib.figure import Figure

    bars = []
    for row in sorted(rows, key=gain):
        program = BY_NAME[row.name]
        for which, found in largest(row):
            bars.append((f"{program.library}, {_short(program)}{which and f', {which}'}".replace("`", ""), found.gain))
    figure = Figure(figsize=(8, 0.21 * len(bars) + 0.9), layout="constrained")
    axes = figure.subplots()
    colours = ["#2b8a3e" if value > NOISE else "#d9480f" if value < 1 / NOISE else "0.65" for _, value in bars]
    axes.barh(range(len(bars)), [value - 1 for _, value in bars], left=1, color=colours)
    axes.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=7)
    axes.set_xscale("log")
    axes.set_xticks([1, 10, 100], ["as fast", "10 times", "100 times"])
    axes.minorticks_off()
    axes.set_ylim(-0.7, len(bars) - 0.3)
    axes.grid(True, axis="x", color="0.9")
    axes.set_axisbelow(True)
    axes.set_title("Public programs under in_place, at the largest size", fontsize=10)
    figure.savefig(file, metadata={"Date": None})


def _short(program: Program) -> str:
    return program.what.split(",")[0].split(" (")[0]
