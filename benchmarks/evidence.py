"""The blocks of the page of evidence, each made of one file in `benchmarks/results/`.

A block names the machine, the version of JAX and the date. `python -m benchmarks.facts` writes the blocks.
"""

import json
import re
import statistics
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harm import report as harm
from benchmarks.harm.measure import COMPILE, COMPILE_MEDIAN, ROOT, RUN, Row
from benchmarks.wild import report as wild
from benchmarks.wild.__main__ import RESULTS as WILD
from benchmarks.wild.__main__ import stored as wild_rows


def read(name: str) -> Any:
    """Return the content of a JSON file of results."""
    return json.loads((ROOT / "benchmarks/results" / name).read_text())


def made_on(made: Mapping[str, Any]) -> str:
    """Return the machine, the version of JAX and the date of a run, as far as its file has them."""
    cores = f"one of {made['cores']} cores" if made.get("pinned_to") == 1 else f"{made['cores']} cores"
    cpu = " of " + re.sub(r"\((?:R|TM)\)| Processor", "", made["cpu"]) if made["cpu"] else ""
    return f"{cores}{cpu}, jax {made['jax']}, {made['date'][:10]}"


def below(made: Mapping[str, Any]) -> str:
    """Return the line below the figures of a run."""
    return f"<sub>{made_on(made)}.</sub>"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table in Markdown, with the columns after the first flush right."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


# --- public programs ------------------------------------------------------------------------------------------------


def public_programs() -> str:
    """Return the programs that gain most, and those that lose."""
    made, rows = read(WILD.name), sorted(wild_rows(), key=wild.gain, reverse=True)
    listed = [(row, *max(wild.largest(row), key=lambda pair: pair[1].gain)) for row in rows if wild.gain(row) >= 2]
    lost = [(row, which, x) for row in rows for which, x in wild.slower(row)]
    found = sum(any(x.copies for _, x in wild.largest(row)) for row in rows)
    cells = [
        [
            f"{(program := wild.BY_NAME[row.name]).library} {row.version}, {program.what}{which and f', {which}'}",
            f"{program.n}: {x.size}",
            wild.milliseconds(x.before),
            wild.milliseconds(x.after),
            f"{x.gain:.1f}" if x.gain > 1 else f"{x.gain:.2f}",
        ]
        for row, which, x in [*listed, *lost]
    ]
    doctor = (
        f"The doctor found whole-buffer copies or selects in {found} of the {len(rows)} programs. The table has the "
        "best pass of each program that gains most, at its largest size"
        + (", and below it each pass and size that loses." if lost else ". No pass loses at any of three sizes.")
    )
    head = ["program", "size", "plain JAX", "`in_place`", "times as fast"]
    return "\n\n".join([textwrap.fill(doctor, 120), table(head, cells), below(made)])


def notes() -> str:
    """Return the notes on single programs."""
    return "\n".join(f"- **{p.library}, {p.what}.** {p.note}".replace("\n", " ") for p in wild.PROGRAMS if p.note)


# --- cost -----------------------------------------------------------------------------------------------------------


def cost() -> str:
    """Return run time and compile time under `in_place`, for each version of JAX."""
    columns = [list(_cost_of(made)) for _, made in sorted(read(harm.RESULTS.name).items(), key=_version, reverse=True)]
    titles = [title for title, _ in columns[0]]
    head, *rows = [[title, *(cells[k][1] for cells in columns)] for k, title in enumerate(titles)]
    return table(head, rows)


def _version(item: tuple[str, Any]) -> list[int]:
    return [int(number) for number in item[0].split(".")]


def _cost_of(made: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    rows = harm.rows_of(made)
    run, compiled = [row.ratio for row in rows], [row.compile_ratio for row in rows]
    yield "", f"jax {made['jax']}"
    yield "programs, in variants", f"{len({(row.family, row.name) for row in rows})}, {len(rows)}"
    yield "variants with other results or errors", str(sum(not row.is_right for row in rows))
    yield "run time, divided by plain JAX's: median", f"{statistics.median(run):.2f}"
    yield "run time: worst", _worst(rows, lambda row: row.ratio)
    yield f"run time: variants above {RUN} (target: none)", str(sum(ratio > RUN for ratio in run))
    yield "run time: variants below 0.5", str(sum(ratio < 0.5 for ratio in run))
    yield f"compile time: median (target: {COMPILE_MEDIAN})", f"{statistics.median(compiled):.2f}"
    yield "compile time: worst", _worst(rows, lambda row: row.compile_ratio)
    yield f"compile time: variants above {COMPILE} (target: none)", str(sum(ratio > COMPILE for ratio in compiled))
    yield "measured", harm.made_on(made)


def _worst(rows: Sequence[Row], key: Callable[[Row], float]) -> str:
    row = max(rows, key=key)
    return f"{key(row):.2f} ({row.name}, {row.variant})"


# --- patterns and tests ---------------------------------------------------------------------------------------------


def patterns() -> str:
    """Return how many patterns of loops move whole buffers, in plain JAX and under `in_place`, for each platform."""
    made = read("shapes.json")
    shapes = made["shapes"].values()
    lines = []
    for platform, title in {"cpu": "CPU", "cuda": "H100, compiled only", "tpu": "TPU v5e, compiled only"}.items():
        found = [list(of[platform].values()) for of in shapes if platform in of]
        plain, ours = (sum(any(pair[k] for pair in of) for of in found) for k in (0, 1))
        more = sum(any(ours > plain for plain, ours in of) for of in found)
        lines.append([title, len(found), plain, ours, more])
    head = ["platform", "patterns", "plain JAX moves whole buffers in", "`in_place` does in", "and moves more in"]
    return f"{table(head, lines)}\n\n<sub>jax {made['jax']}, {made['date']}. Counts do not depend on the machine.</sub>"


def suites() -> str:
    """Return what the test suites of other libraries found under `in_place`."""
    made = read("checks.json")["suites"]
    of_jax = ", ".join(f"`{name}`" for name in made["of_jax"])
    text = (
        f"`{made['tool']}` ran {made['sample']}, with every `jax.jit`, transformation and loop under `in_place`, and "
        f"compared each call with plain JAX. The libraries were {', '.join(made['libraries'])}, and JAX's own tests of "
        f"{of_jax}. {made['passed']} tests passed, and {made['calls']:,} calls were compared. Every other test failed "
        "in plain JAX too."
    )
    differ = [f"- {found['number']} {'differs' if found['number'] == 1 else 'differ'}: {found['reason']}"
              for found in made["differ"]]  # fmt: skip
    return "\n".join(
        [textwrap.fill(text, 120), "", *differ, f"- Not run: {'; '.join(made['left_out'])}", "", made_on(made)]
    )


def random_programs() -> str:
    """Return how many random programs ran, and which mutants they found."""
    made, mutants = read("checks.json")["programs"], read("mutants.json")["mutants"].values()
    since = [run["programs"] for run in made["runs"] if run["faults"] == 0]
    rest = [run for run in made["runs"] if run["faults"] != 0]
    text = (
        f"`{made['tool']}` writes programs of loops over buffers, which NumPy judges under every transformation. "
        f"{sum(run['programs'] for run in rest):,} programs found faults, which are repaired. The next {sum(since):,} "
        "found none."
    )
    by_programs = sum(found.get("programs", {}).get("noticed", False) for found in mutants)
    undone = (
        f"`tools/mutants.py` breaks one line at a time. The random programs notice {by_programs} of {len(mutants)} "
        "such mutants, each within 2,000 programs. Tests notice the others: [the table](../developers/mutants.md)."
    )
    dates = made | {"date": made["dates"][1]}
    return "\n\n".join([textwrap.fill(text, 120), textwrap.fill(undone, 120), below(dates)])


def facts() -> dict[str, str]:
    """Return the blocks by the names that marks of pages have."""
    return {
        "evidence.public_programs": public_programs(),
        "evidence.notes": notes(),
        "evidence.cost": cost(),
        "evidence.patterns": patterns(),
        "evidence.suites": suites(),
        "evidence.random_programs": random_programs(),
    }
