"""Tables of what was measured, and the file that has them."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harm.measure import COMPILE, COMPILE_MEDIAN, ROOT, RUN, Row
from benchmarks.harm.program import VARIANTS
from benchmarks.harm.programs import PROGRAMS
from benchmarks.pages import filled

RESULTS = ROOT / "benchmarks/results/harm-cpu.json"
TABLES = ROOT / "benchmarks/results/harm.md"

BEGIN = "<!-- python -m benchmarks.harm: begin -->"


def line(rows: Sequence[Row]) -> str:
    """A program while the run goes on."""
    found = [f"{row.variant} {row.error or f'{row.ratio:.2f}'}{'' if row.is_right else ' WRONG'}" for row in rows]
    compiled = max(row.compile_ratio for row in rows)
    return f"{rows[0].family} {rows[0].name}: {', '.join(found)}; compile {compiled:.2f}"


def worst(rows: Sequence[Row]) -> list[Row]:
    """Those that are slower by most first, and before them what is wrong."""
    return sorted(rows, key=lambda row: (row.is_right, -row.ratio))


def table(rows: Sequence[Row]) -> str:
    """A line for each variant."""
    head = "| program | variant | plain, ms | `in_place`, ms | ratio | compile time | loops |"
    return "\n".join([head, "|---|---|--:|--:|--:|--:|---|", *map(_line, rows)])


def _line(row: Row) -> str:
    if row.error:
        cells = [row.error, "", "", "", ""]
    else:
        ratio = f"{row.ratio:.2f}" if row.is_right else f"**different results** ({row.difference:.1g})"
        same = "unchanged" if row.same else ""
        cells = [f"{row.plain_ms:.3g}", f"{row.in_place_ms:.3g}", ratio, f"{row.compile_ratio:.2f}", same]
    return f"| {' | '.join([f'{row.family}: {row.name}', row.variant, *cells])} |"


def totals(rows: Sequence[Row]) -> str:
    """How many reach the targets, and by how much the others miss them."""
    right = [row for row in rows if row.is_right]
    ratios = [row.ratio for row in right] or [0.0]
    compiled = [row.compile_ratio for row in right] or [0.0]
    lines = [
        f"{len({(row.family, row.name) for row in rows})} programs in {len(rows)} variants: "
        f"{len(rows) - len(right)} with other results or errors.",
        f"Run time: {statistics.median(ratios):.2f} in the median, {max(ratios):.2f} at worst, "
        f"{sum(ratio > RUN for ratio in ratios)} above {RUN} (target: none); "
        f"{sum(ratio < 0.5 for ratio in ratios)} below 0.5; "
        f"{sum(row.same for row in right)} with unchanged loops.",
        f"Compile time: {statistics.median(compiled):.2f} in the median (target: {COMPILE_MEDIAN}), "
        f"{max(compiled):.2f} at worst, {sum(ratio > COMPILE for ratio in compiled)} above {COMPILE} (target: none).",
    ]
    return "\n".join(lines)


def is_reached(rows: Sequence[Row]) -> bool:
    """Whether all targets are."""
    compiled = [row.compile_ratio for row in rows] or [0.0]
    return all(row.is_harmless for row in rows) and statistics.median(compiled) <= COMPILE_MEDIAN


def programs(rows: Sequence[Row]) -> str:
    """A line for each program, a column for each variant."""
    lines = [f"| program | {' | '.join(VARIANTS)} | compile |", f"|---|{'--:|' * (len(VARIANTS) + 1)}"]
    by_program: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        by_program.setdefault((row.family, row.name), {})[row.variant] = row
    for (family, name), found in by_program.items():
        cells = [_cell(found.get(variant)) for variant in VARIANTS]
        compiled = _number(max(row.compile_ratio for row in found.values()), COMPILE)
        lines.append(f"| {family}: {name} | {' | '.join(cells)} | {compiled} |")
    return "\n".join(lines)


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return _number(row.ratio, RUN) if row.is_right else "**wrong**"


def _number(ratio: float, limit: float) -> str:
    return f"**{ratio:.2f}**" if ratio > limit else f"{ratio:.2f}"


def rows_of(made: Mapping[str, Any]) -> list[Row]:
    """The rows of a run that is stored."""
    return [Row(**dict(zip(made["columns"], row, strict=True))) for row in made["rows"]]


def made_on(made: Mapping[str, Any]) -> str:
    """Return the date, the versions and the machine of a run, and how thorough it was."""
    cores = f"one of {made['cores']} cores" if made["pinned_to"] == 1 else f"{made['cores']} cores"
    repeats = ", fewer repeats (`--quick`)" if made["quick"] else ""
    versions = f"jax {made['jax']}, {made['date']}, Python {made['python']}"
    return f"{versions}, {cores} of {made['cpu']}{repeats}"


def page(stored: Mapping[str, Mapping[str, Any]]) -> str:
    """Return, for each version of JAX, the totals, the fifteen slowest variants, and all programs."""
    parts = []
    for made in stored.values():
        rows = rows_of(made)
        there = {(row.family, row.name) for row in rows}
        left = [p.family for p in PROGRAMS if (p.family, p.name) not in there]
        libraries = left.count("wild")  # the programs of other libraries
        newer = f" {len(left) - libraries} newer programs were not measured." if len(left) > libraries else ""
        parts += [
            f"## jax {made['jax']}",
            f"{made_on(made)}. The libraries of {libraries} programs were not installed.{newer}",
            "- " + totals(rows).replace("\n", "\n- "),
            "The fifteen variants that are slowest beside plain JAX:",
            table(worst(rows)[:15]),
            "All programs: run time divided by plain JAX's, and the worst compile time:",
            programs(rows),
        ]
    return "\n\n".join(parts)


def written(text: str, stored: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the file with new tables between its marks."""
    return filled(text, BEGIN, page(stored))
