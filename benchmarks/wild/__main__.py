"""`python -m benchmarks.wild`: the doctor and `in_place` over public programs, as a table."""

import argparse
import json
import os
import sys
from pathlib import Path

import jax

from benchmarks.wild import report
from benchmarks.wild.measure import Found, Row, row_of
from benchmarks.wild.programs import PROGRAMS

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks/results/wild-cpu.json"


def main() -> int:
    """Measure, print the table, and write the page if asked to. 1 if a result differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wild", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="programs whose name has this in it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument(
        "--write", action="store_true", help="write figures, page and picture; what is not measured stays as it is"
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
        print(f"{program.name}: {report.gain(rows[-1]):.2f} times as fast", file=sys.stderr, flush=True)
    print(report.table(rows))
    if options.json:
        options.json.write_text(_as_json(rows))
    if options.write:
        kept = with_stored(rows)
        RESULTS.write_text(_as_json(kept))
        report.draw(kept, ROOT / "docs/wild.svg")
        write_pages(kept)
    different = [row.name for row in rows if not all(x.is_equal for x in (*row.forward, *row.gradient))]
    print(f"Results differ in {', '.join(different)}" if different else "All results are equal.", file=sys.stderr)
    return int(bool(different))


def write_pages(rows: list[Row]) -> None:
    """Put the table into the documentation, and its best rows into the README."""
    for file, parts in (
        (ROOT / "docs/wild.md", (report.table(rows), report.notes())),
        (ROOT / "README.md", (report.best(rows),)),
    ):
        file.write_text(report.written(file.read_text(), *parts))


def with_stored(rows: list[Row]) -> list[Row]:
    """These rows, and of all other programs those that are in the documentation."""
    known = {row.name: row for row in [*stored(), *rows]}
    return [known[program.name] for program in PROGRAMS if program.name in known]


def _as_json(rows: list[Row]) -> str:
    made = {"jax": jax.__version__, "cores": os.cpu_count(), "rows": [_plain(row) for row in rows]}
    return json.dumps(made, indent=1) + "\n"


def _plain(row: Row) -> dict[str, object]:
    passes = {"forward": row.forward, "gradient": row.gradient}
    return row._asdict() | {name: [found._asdict() for found in of] for name, of in passes.items()}


def stored() -> list[Row]:
    """The rows that are in the documentation."""
    return [
        Row(
            row["name"],
            row["version"],
            *([Found(**found) for found in row[which]] for which in ("forward", "gradient")),
        )
        for row in json.loads(RESULTS.read_text())["rows"]
    ]


if __name__ == "__main__":
    sys.exit(main())
