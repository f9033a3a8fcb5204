"""`python -m benchmarks.wild`: the doctor and `in_place` over public programs, as a table."""

import argparse
import json
import os
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from benchmarks.measure import machine
from benchmarks.pages import filled
from benchmarks.wild import report
from benchmarks.wild.measure import Found, Row, row_of
from benchmarks.wild.programs import PROGRAMS

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks/results/wild-cpu.json"
TABLE = ROOT / "benchmarks/results/wild.md"


def main() -> int:
    """Measure, print the table, and write the files of results if asked to. 1 if a result differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wild", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="programs whose name has this in it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument(
        "--write",
        action="store_true",
        help="write figures, tables and picture; programs that are not measured keep theirs",
    )
    options = parser.parse_args()
    rows = []
    for program in PROGRAMS:
        if options.only and not any(text in program.name for text in options.only):
            continue
        try:
            rows.append(row_of(program))
        except ImportError as error:
            print(f"{program.name}: left out, {error}", file=sys.stderr)
            continue
        print(report.line(rows[-1]), file=sys.stderr, flush=True)
        if options.write:
            RESULTS.write_text(_as_json(with_stored(rows)))
    print(report.table(rows))
    if options.json:
        options.json.write_text(_as_json(rows))
    if options.write:
        kept = with_stored(rows)
        report.draw(kept, ROOT / "docs/background/public_programs.svg")
        TABLE.write_text(filled(TABLE.read_text(), report.BEGIN, report.table(kept)))
        print("run python -m benchmarks.facts, which writes the figures of the pages", file=sys.stderr)
    different = [row.name for row in rows if not all(found.is_equal for found in row.found)]
    print(f"Results differ in {', '.join(different)}" if different else "All results are equal.", file=sys.stderr)
    return int(bool(different))


def with_stored(rows: list[Row]) -> list[Row]:
    """Return these rows, and the stored rows of all other programs."""
    known = {row.name: row for row in [*stored(), *rows]}
    return [known[program.name] for program in PROGRAMS if program.name in known]


def _as_json(rows: list[Row]) -> str:
    made = {
        "date": datetime.now(UTC).date().isoformat(),
        "jax": jax.__version__,
        "cpu": machine()["cpu"],
        "cores": os.cpu_count(),
        "pinned_to": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "rows": [_plain(row) for row in rows],
    }
    return re.sub(r"\n {6}|\n {5}(?=\})", " ", json.dumps(made, indent=1)) + "\n"  # a line for each size


def _plain(row: Row) -> dict[str, object]:
    passes = {which: [_rounded(found._asdict()) for found in of] for which, of in row.passes.items()}
    return row._asdict() | {"passes": passes}


def _rounded(found: dict[str, Any]) -> dict[str, Any]:
    return {name: float(f"{v:.4g}") if isinstance(v, float) else v for name, v in found.items()}


def stored() -> list[Row]:
    """Return the stored rows."""
    return [
        Row(
            row["name"],
            row["version"],
            {which: [Found(**found) for found in of] for which, of in row["passes"].items()},
        )
        for row in json.loads(RESULTS.read_text())["rows"]
    ]


if __name__ == "__main__":
    sys.exit(main())
