"""`python -m benchmarks.shapes`: whole buffers that a step moves, in plain JAX and under `in_place`."""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import jax
import numpy as np

from benchmarks.harm.measure import ROOT
from benchmarks.pages import filled
from jax_tensorarray import in_place
from jax_tensorarray._hlo import ahead
from tests.support.catalogue.loop import ORDERS, Loop, arguments, bytes_of
from tests.support.catalogue.page import LOOPS, SHAPES, Shape, row
from tests.support.in_place import whole_buffer_operations

RESULTS = ROOT / "benchmarks/results/shapes.json"
TABLE = ROOT / "benchmarks/results/shapes.md"
BEGIN = "<!-- python -m benchmarks.shapes: begin -->"
PLATFORMS = {"cpu": "CPU", "cuda": "H100", "tpu": "TPU v5e"}


def main() -> None:
    """Compile every shape for every platform whose compiler is installed, and write the table if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shapes", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="shapes with this in their names")
    parser.add_argument("--platforms", nargs="+", choices=PLATFORMS, default=list(PLATFORMS))
    parser.add_argument("--save", action="store_true", help="write what was found into benchmarks/results")
    options = parser.parse_args()
    made: dict[str, Any] = {"date": datetime.now(UTC).date().isoformat(), "jax": jax.__version__}
    stored = json.loads(RESULTS.read_text())["shapes"] if RESULTS.exists() else {}
    for name in SHAPES:
        if not options.only or any(text in name for text in options.only):
            stored[name] = stored.get(name, {}) | _found(name, options.platforms)
            print(name, stored[name], flush=True)
    made["shapes"] = {name: stored[name] for name in SHAPES if name in stored}
    if options.save:
        RESULTS.write_text(json.dumps(made, indent=1) + "\n")
        TABLE.write_text(written(TABLE.read_text(), made))


def plain(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function unchanged, as plain JAX has it."""
    return f


def _found(name: str, platforms: list[str]) -> dict[str, Any]:
    of, loop = SHAPES[name], LOOPS[name]
    found: dict[str, Any] = {}
    for platform in platforms:
        if platform == "cpu" or not ahead.why_not(platform):
            found[platform] = {
                order: [whole_buffers(loop, order, by, platform) for by in (plain, in_place)] for order in of.orders
            }
    # What reads all rows in each step grows with them.
    if "cpu" in platforms and not any(name in of.code for name in ("einsum", "solve_triangular", "w @")):
        order = "forward" if "grad(in_place)" not in of.orders else "grad(in_place)"
        found["growth"] = [growth(of, order, by) for by in (plain, in_place)]
    return found


def whole_buffers(loop: Loop, order: str, by: Callable[..., Any], platform: str = "cpu") -> int:
    """Return how many operations in loops make anew as much as the smallest buffer of a program has."""
    size = bytes_of(loop, order)
    text = ahead.compiled_for(platform, ORDERS[order](loop.f, by, 0), *arguments(loop, order)).as_text()
    return len(whole_buffer_operations(text, size))


def growth(of: Shape, order: str, by: Callable[..., Any]) -> float:
    """Return how many times as long four times the steps take."""
    times, steps = [], 1000 if of.num_bytes(4000) < 1e6 else 128
    for T in (steps, 4 * steps):
        f, x = jax.jit(ORDERS[order](of.loss(T), by, 0)), row()
        jax.block_until_ready(f(x))
        runs = []
        for _ in range(5):
            start = time.process_time()
            jax.block_until_ready(f(x))
            runs.append(time.process_time() - start)
        times.append(min(runs))
    return round(float(np.divide(times[1], times[0])), 1)


def written(text: str, made: Mapping[str, Any]) -> str:
    """Return the file with a new table between its marks."""
    return filled(text, BEGIN, table(made))


def table(made: Mapping[str, Any]) -> str:
    """A line for each shape."""
    head = ["shape", "code", *PLATFORMS.values(), "growth"]
    lines = [f"jax {made['jax']}, {made['date']}.", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, found in made["shapes"].items():
        cells = [_cell(found.get(platform)) for platform in PLATFORMS]
        times = [f"{x:.0f}" for x in found.get("growth", ())]
        lines.append(f"| {name} | `{SHAPES[name].code}` | {' | '.join(cells)} | {' → '.join(times)} |")
    return "\n".join(lines)


def _cell(found: Mapping[str, list[int]] | None) -> str:
    """Forward, vmap, both orders of the gradient, and vmap of it."""
    return ", ".join(f"{plain} → {ours}" for plain, ours in found.values()) if found else ""


if __name__ == "__main__":
    main()
