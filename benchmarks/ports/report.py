"""The tables of benchmarks/results/ports.md, and whether a port gives what its original gives."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.ports import addons, agents, asr, detr, keras, lingvo, opennmt, probability
from benchmarks.ports.source import Change, Program, count, lines_of, own_operations, renamed

PROGRAMS = {
    "addons": addons.PROGRAM,
    "opennmt": opennmt.PROGRAM,
    "keras": keras.PROGRAM,
    "probability": probability.PROGRAM,
    "detr": detr.PROGRAM,
    "asr": asr.PROGRAM,
    "agents": agents.PROGRAM,
    "lingvo": lingvo.PROGRAM,
}


def differences(found: dict[str, Any], wanted: dict[str, Any], filler: dict[str, Any]) -> list[str]:
    """What a port gives that its original does not. Where it has more rows these must be the filler of that result."""
    wrong = [f"{name}: only one of them has it" for name in found.keys() ^ wanted.keys()]
    for name in sorted(found.keys() & wanted.keys()):
        got, want = np.asarray(found[name]), np.asarray(wanted[name])
        if got.ndim != want.ndim or got.dtype != want.dtype or np.any(np.less(got.shape, want.shape)):
            wrong.append(f"{name}: {got.dtype}{list(got.shape)}, not {want.dtype}{list(want.shape)}")
            continue
        expected = np.full(got.shape, filler.get(name.rpartition(": ")[2], 0), want.dtype)
        expected[tuple(map(slice, want.shape))] = want
        if not np.allclose(got, expected, rtol=1e-4, atol=1e-5):
            wrong.append(f"{name}: {got} is not {expected}")
    return wrong


def table(programs: Sequence[Program]) -> str:
    """How many lines change."""
    rows = [
        (
            "program",
            "lines of code",
            "with an array or a loop",
            "only names change",
            "changed",
            "of these for an array or a loop",
            "functions to write",
        ),
        ("---", "---:", "---:", "---:", "---:", "---:", "---:"),
    ]
    for program in programs:
        wheel, counts = program.wheel, count(program)
        title = f"{program.title} ({wheel.package} {wheel.version})"
        rows.append((title, *map(str, counts), str(len(own_operations(program)))))
    return _markdown(rows)


def reasons(programs: Sequence[Program]) -> str:
    """What changes, and why."""
    rows = [("program", "lines", "TensorFlow", "here", "why"), ("---", "---:", "---", "---", "---")]
    for program in programs:
        rows += [_row(program, change) for change in program.changes]
    return _markdown(rows)


def _row(program: Program, change: Change) -> tuple[str, ...]:
    first = program.title.partition("'")[0]
    return first, str(lines_of(program, change)), _shown(change.old), _shown(renamed(change.new)), change.why


def _shown(lines: str) -> str:
    """The first of the lines, as the cell of a table."""
    first, *others = lines.strip().split("\n") if lines.strip() else [""]
    code = first.partition("  # ")[0].replace("|", "\\|")
    return (f"`{code}`" if code else "nothing") + (" …" if others else "")


def _markdown(rows: list[tuple[str, ...]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
