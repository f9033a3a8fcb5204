"""`python -m benchmarks.harm`: run time and compile time under `in_place`, as parts of plain JAX's."""

import argparse
import concurrent.futures
import functools
import json
import multiprocessing
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import jax
import jaxlib.version

from benchmarks.harm import worker  # first: the others compute something

# isort: split
from benchmarks.harm import report
from benchmarks.harm.measure import FULL, QUICK, Effort, Row
from benchmarks.harm.program import VARIANTS
from benchmarks.harm.programs import PROGRAMS
from benchmarks.measure import machine


def main() -> int:
    """Measure, print the table, and write the files of results if asked to. 1 if a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.harm", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="forward and one gradient, with fewer repeats")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="programs with this in their family or name")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, metavar="VARIANT", help=", ".join(VARIANTS))
    parser.add_argument("--jobs", type=int, default=1, help="processes that measure at a time")
    parser.add_argument("--save", action="store_true", help="write what was measured into benchmarks/results")
    options = parser.parse_args()
    chosen = [
        k
        for k, program in enumerate(PROGRAMS)
        if not options.only or any(text in f"{program.family} {program.name}" for text in options.only)
    ]
    if not chosen:
        parser.error(f"no program has {' or '.join(options.only)} in its family or name")
    variants = options.variants or (["forward", "grad(in_place)"] if options.quick else list(VARIANTS))
    rows, left_out = [], []
    for found in _measured(chosen, variants, QUICK if options.quick else FULL, options.jobs):
        if isinstance(found, str):
            left_out.append(found)
        elif found:
            print(report.line(found), file=sys.stderr, flush=True)
            rows += found
    print(report.table(report.worst(rows)))
    print(report.totals(rows))
    print(f"Left out, since a library is not installed: {len(left_out)} ({', '.join(left_out)})" if left_out else "")
    if options.save:
        stored = json.loads(report.RESULTS.read_text()) if report.RESULTS.exists() else {}
        stored[jax.__version__] = _made(rows, stored.get(jax.__version__), quick=options.quick)
        report.RESULTS.write_text(_text(stored))
        report.TABLES.write_text(report.written(report.TABLES.read_text(), stored))
        print("run python -m benchmarks.facts, which writes the figures of the pages", file=sys.stderr)
    return int(not report.is_reached(rows))


def _measured(chosen: Sequence[int], variants: Sequence[str], effort: Effort, jobs: int) -> Iterator[list[Row] | str]:
    of = functools.partial(worker.rows, variants=variants, effort=effort)
    if jobs == 1:
        yield from map(of, chosen)
    else:
        with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            yield from pool.map(of, chosen)


def _made(rows: Sequence[Row], before: Mapping[str, Any] | None, quick: bool) -> dict[str, Any]:
    """Return the stored form of a run. Its rows replace those of the same programs and variants."""
    found = {(row.family, row.name, row.variant): row for row in [*(report.rows_of(before) if before else ()), *rows]}
    every = [found.get((p.family, p.name, variant)) for p in PROGRAMS for variant in p.variants()]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "python": platform.python_version(),
        "cpu": machine()["cpu"],
        "cores": os.cpu_count(),
        "pinned_to": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "quick": quick,
        "columns": Row._fields,
        "rows": [[float(f"{v:.4g}") if isinstance(v, float) else v for v in row] for row in every if row],
    }


def _text(stored: Mapping[str, Any]) -> str:
    """JSON with a line for each row."""
    return re.sub(r"\n {4,}|\n {3}(?=\])", " ", json.dumps(stored, indent=1)) + "\n"


if __name__ == "__main__":
    sys.exit(main())
