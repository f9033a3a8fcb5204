"""Figures that pages quote. `python -m benchmarks.facts` writes them into the pages, from `benchmarks/results`.

A page quotes a figure between marks, `<!--=wild.programs-->43<!--=-->`, and a table likewise, on lines of its own. A
figure on two pages has one name, and a test compares every mark with the results. With `--measure` the command first
times the example of the README again.
"""

import argparse
import datetime
import functools
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import evidence
from benchmarks.wild import __main__ as wild
from benchmarks.wild import report
from benchmarks.wild.measure import NOISE

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"

MARK = re.compile(r"(<!--=([\w.]+)-->)(.*?)(<!--=-->)", re.DOTALL)


def pages() -> list[Path]:
    """Return the pages that may quote figures."""
    return [ROOT / "README.md", RESULTS / "wild.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(page: str) -> str:
    """Return a page with the figures of the committed results between its marks.

    Raises:
        KeyError: a mark has a name that no figure has.
    """

    def shown(match: re.Match[str]) -> str:
        begin, name, _, end = match.groups()
        value = facts()[name]
        return f"{begin}\n\n{value}\n\n{end}" if "\n" in value else f"{begin}{value}{end}"

    return MARK.sub(shown, page)


@functools.cache
def facts() -> Mapping[str, str]:
    """Return all figures by their names."""
    return {**_of_wild(), **_of_harm(), **_of_ports(), **_of_the_example(), **evidence.facts()}


# --- public programs -------------------------------------------------------------------------------------------


def _of_wild() -> dict[str, str]:
    rows = sorted(wild.stored(), key=report.gain, reverse=True)
    libraries = [report.BY_NAME[row.name].library for row in rows]
    best = [report.gain(row) for row in rows]
    worst = [max((1 / found.gain for _, found in report.slower(row)), default=0) for row in rows]
    slower = [(library, worse) for library, worse in zip(libraries, worst, strict=True) if worse]
    found = {
        name: [(library, gain) for library, gain in zip(libraries, best, strict=True) if low <= gain < high]
        for name, (low, high) in {"ten": (10, 1e9), "two": (2, 10), "some": (NOISE, 2), "none": (0, NOISE)}.items()
    }
    return {
        "wild.programs": str(len(rows)),
        "wild.libraries": str(len(set(libraries))),
        **{f"wild.{name}": str(len(of)) for name, of in found.items()},
        "wild.best": f"{max(best):.0f}",
        "wild.made": evidence.made_on(_read("wild-cpu.json")),
        "wild.distribution": _distribution(found, slower),
    }


def _distribution(found: Mapping[str, list[tuple[str, float]]], slower: list[tuple[str, float]]) -> str:
    def such_as(of: list[tuple[str, float]]) -> str:
        best: dict[str, float] = {}
        for library, gain in of:
            best.setdefault(library, gain)
        few = list(best.items())[:4]
        return ", ".join(name + (f" ({gain:.{int(gain < 10)}f} times)" if gain > NOISE else "") for name, gain in few)

    about = {
        "ten": "at least ten times as fast",
        "two": "two to ten times as fast",
        "some": f"{NOISE} to two times as fast",
        "none": f"the same, within {100 * (NOISE - 1):.0f} %",
    }
    lines = [f"| {text} | {len(found[name])} | {such_as(found[name])} |" for name, text in about.items()]
    if slower:
        names = ", ".join(f"{name} ({worse:.2f} times as long)" for name, worse in slower)
        lines.append(f"| at one of its sizes slower by more | {len(slower)} | {names} |")
    return "\n".join(["| with `in_place` | programs | such as |", "|---|--:|---|", *lines])


# --- ports of TensorFlow programs ------------------------------------------------------------------------------


def _of_ports() -> dict[str, str]:
    """Return the sums of the two tables of `benchmarks.ports`."""
    tables = re.findall(r"(?:^\|.*\n)+", (RESULTS / "ports.md").read_text(), re.MULTILINE)
    counted, changes = ([line.split(" | ") for line in table.strip().split("\n")[2:]] for table in tables)
    code, lines, _, _, changed = (sum(int(row[k]) for row in counted) for k in range(1, 6))
    padded = sum(int(row[1]) for row in changes if row[-1].startswith("how many rows there are"))
    ranges = sum(int(row[1]) for row in changes if row[-1].startswith("JAX does not rewrite Python's loops"))
    return {
        "ports.code": f"{code:,}",
        "ports.lines": str(lines),
        "ports.changed": str(changed),
        "ports.padded": str(padded),
        "ports.ranges": str(ranges),
        "ports.other": str(changed - padded - ranges),
    }


# --- programs with nothing to gain -----------------------------------------------------------------------------


def _of_harm() -> dict[str, str]:
    rows = {
        version: [dict(zip(made["columns"], row, strict=True)) for row in made["rows"]]
        for version, made in _read("harm-cpu.json").items()
    }
    newest = max(rows, key=lambda version: tuple(map(int, version.split("."))))
    right = [row for row in rows[newest] if not row["error"]]
    everywhere = [row for of in rows.values() for row in of if not row["error"]]
    return {
        "harm.programs": str(len({(row["family"], row["name"]) for row in right})),
        "harm.variants": f"{len(right):,}",
        "harm.half": str(sum(row["ratio"] < 0.5 for row in right)),
        "harm.slowest": f"{max(row['ratio'] for row in right):.1f}",
        "harm.slowest_anywhere": f"{max(row['ratio'] for row in everywhere):.1f}",
        "harm.compile": f"{max(row['compile_ratio'] for row in right):.1f}",
        "harm.compile_median": f"{statistics.median(row['compile_ratio'] for row in right):.2f}",
        "harm.compile_anywhere": f"{max(row['compile_ratio'] for row in everywhere):.1f}",
        "harm.made": evidence.made_on(_read("harm-cpu.json")[newest]),
    }


# --- the example of the README ---------------------------------------------------------------------------------


def _of_the_example() -> dict[str, str]:
    made = _read("readme.json")
    return {
        "readme.plain": f"{1e6 * made['plain'] / made['steps']:.0f}",
        "readme.in_place": f"{1e6 * made['in_place'] / made['steps']:.2g}",
        "readme.made": evidence.made_on(made),
    }


def measure() -> dict[str, Any]:
    """Time the gradient of the example of the README, in plain JAX and under `in_place`."""
    import jax

    snippet = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert snippet
    names: dict[str, Any] = {}
    exec(snippet.group(1), names)
    loss, x = names["loss"], jax.numpy.ones(names["gradient"].shape)
    plain, ours = jax.jit(jax.grad(loss)), jax.jit(names["in_place"](jax.grad(loss)))
    return {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "steps": len(x),
        "row": x.shape[1],
        "plain": _seconds(lambda: plain(x), 3),
        "in_place": _seconds(lambda: ours(x), 30),
    }


def _seconds(run: Callable[[], Any], repeat: int) -> float:
    """Return the shortest time of several runs, after one that compiles."""
    run().block_until_ready()
    samples = []
    for _ in range(repeat):
        start = time.perf_counter()
        run().block_until_ready()
        samples.append(time.perf_counter() - start)
    return min(samples)


def _cpu() -> str:
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found.group(1) if found else platform.processor()


# --- the command -----------------------------------------------------------------------------------------------


def _read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def main() -> None:
    """Write the figures into the pages."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.facts", description=__doc__)
    parser.add_argument("--measure", action="store_true", help="first time the example of the README")
    if parser.parse_args().measure:
        (RESULTS / "readme.json").write_text(json.dumps(measure(), indent=1) + "\n")
    for page in pages():
        text = page.read_text()
        if (new := filled(text)) != text:
            page.write_text(new)
            print(f"{page.relative_to(ROOT)} has new figures")


if __name__ == "__main__":
    main()
