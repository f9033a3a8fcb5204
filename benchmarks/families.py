"""`python -m benchmarks.families`: what each family of rules of `in_place` is for.

Each family is left out in turn. Where that changes a program, it is compiled with the family and without. What counts
is what the doctor finds, operations on whole buffers in loops and the bytes that these move in a step, then XLA's
temporaries, and last the time of both.
"""

import argparse
import contextlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.harm.program import VARIANTS
from benchmarks.pages import filled
from benchmarks.wild.measure import instructions, seconds_of
from jax_tensorarray._in_place import layouts, parts, registers, repair, stacks, sums, twins, views
from jax_tensorarray._jaxprs import foreign, refs
from jax_tensorarray.doctor import watch

#: Programs of public libraries, of public reports, and of the pages.
PUBLIC = ("wild", "reported", "examples")

#: The sizes of programs of public libraries. Other programs have one size, and run with the smaller one.
SIZES = ("small", "large")

RESULTS = Path(__file__).parent / "results/families.json"

#: The file that has the table, between two marks.
TABLE = RESULTS.with_suffix(".md")
BEGIN = "<!-- python -m benchmarks.families: begin -->"

#: A program loses without a family if it takes so many times as long, or so many times the temporaries.
LOSS = 1.5

#: For each family, what takes the places of functions while it is left out, or the module whose rules are.
FAMILIES: dict[str, dict[tuple[Any, str], Callable[..., Any]]] = {
    "views": {(views, "viewed"): lambda *args: frozenset(), (views, "invariant"): lambda jaxpr, known: {}},
    "layouts": {(layouts, "may_be_in"): lambda body: False, (layouts, "found_in"): lambda *args, **options: None},
    "rings": {(registers, "may_be_in"): lambda body: False, (registers, "found_in"): lambda *args, **options: None},
    "twins": {
        (twins, "has_twins"): lambda loop, operands: False,
        (twins, "carried_once"): lambda loop, inputs: (loop, list(range(loop.num_carry))),
        (twins, "equal_operands"): lambda arrays: list(range(len(arrays))),
    },
    "stacks": {(stacks, "found_in"): lambda *args: None},
    "sums": {(sums, "moved_into"): lambda jaxpr: {}},
    "foreign": {(foreign, "lowered_as"): lambda eqn: {}},
    "refs": {(refs, "as_arrays"): lambda jaxpr: jaxpr},
    "parts": {(parts, "put_together"): lambda jaxpr: {}},
    "masks": {},
    "selects": {},
    "factors": {},
    "equinox": {},
}


@contextlib.contextmanager
def without(family: str) -> Iterator[None]:
    """Leave a family out. JAX's caches are emptied, since a jaxpr that was traced with the family must not be used."""
    kept = {key: getattr(*key) for key in FAMILIES[family]}
    rules = {name: list(found) for name, found in repair.RULES.items()}
    try:
        for (of, name), other in FAMILIES[family].items():
            setattr(of, name, other)
        for found in repair.RULES.values():
            found[:] = [rule for rule in found if not rule.__module__.endswith(f".{family}")]
        jax.clear_caches()
        yield
    finally:
        for (of, name), own in kept.items():
            setattr(of, name, own)
        repair.RULES.update(rules)
        jax.clear_caches()


class Case(NamedTuple):
    """A program under `in_place`, made anew for each use: nothing that JAX has traced with a family may be kept."""

    name: str
    make: Callable[[], tuple[Callable[..., Any], Sequence[Any]]]


def cases(families: Sequence[str], names: Sequence[str], size: str) -> Iterator[Case]:
    """The programs of `benchmarks.harm` in these families that have this size, forward and differentiated."""
    from benchmarks.harm.programs import PROGRAMS, shared

    large = [shared.public(program, program.large) for program in shared.WILD]
    for program in PROGRAMS if size == "small" else large:
        if program.family in families and (not names or any(part in program.name for part in names)):
            for variant in [v for v in ("forward", "grad(in_place)") if v in program.variants()]:

                def make(program: Any = program, variant: str = variant) -> Any:
                    return VARIANTS[variant][1](program), program.arguments(batched=False)

                name = f"{program.family}: {program.name}, {variant}"
                yield Case(name if size == "small" else f"{name}, {size}", make)


def text(case: Case) -> str:
    f, args = case.make()
    return str(jax.make_jaxpr(f)(*args))


def compiled(case: Case) -> tuple[Any, Sequence[Any], list[Any]]:
    f, args = case.make()
    with watch() as found:
        program = jax.jit(f).lower(*args).compile()
    return program, args, found.copies


def compared(case: Case, family: str) -> dict[str, Any]:
    """What the doctor finds, with and without the family, XLA's temporaries, and how many times as long it takes."""
    program, args, copies = compiled(case)
    with without(family):
        other, _, more = compiled(case)
    same = instructions(program) == instructions(other)
    took = [1.0, 1.0] if same else seconds_of([program, other], args, 0.25)
    return {
        "operations": [len(copies), len(more)],
        "bytes": [sum(c.num_bytes for c in copies), sum(c.num_bytes for c in more)],
        "memory": [p.memory_analysis().temp_size_in_bytes for p in (program, other)],
        "time": round(took[1] / took[0], 2),
    }


def loses(found: dict[str, Any]) -> bool:
    """Whether a program is worse without a family."""
    more = any(after > before for before, after in (found["operations"], found["bytes"]))
    before, after = found["memory"]
    return more or after > LOSS * before or found["time"] > LOSS


def lost(found: dict[str, Any]) -> str:
    """How much worse a program is."""
    operations, memory = found["operations"], found["memory"]
    parts = [f"{found['time']:.1f} times as long"]
    if operations[1] > operations[0]:
        parts.append(f"{operations[0]} → {operations[1]} whole buffers per step")
    if memory[1] > LOSS * memory[0]:
        parts.append(f"{memory[1] / memory[0]:.1f} times the memory")
    return ", ".join(parts)


def table(families: dict[str, dict[str, dict[str, Any]]]) -> str:
    """For each family how many programs it changes, which lose without it, and by how much."""
    lines = ["| family | changes | lose without it | the three that lose most |", "|---|---|---|---|"]
    for family, programs in families.items():
        losers = {name: found for name, found in programs.items() if loses(found)}
        worst = sorted(losers, key=lambda name: losers[name]["time"], reverse=True)[:3]
        most = "; ".join(f"{name}: {lost(losers[name])}" for name in worst)
        lines.append(f"| {family} | {len(programs)} | {len(losers)} | {most} |")
    return "\n".join(lines)


def stored() -> dict[str, dict[str, dict[str, Any]]]:
    """What has been found before, for each family and program."""
    found = json.loads(RESULTS.read_text())["families"] if RESULTS.exists() else {}
    return {family: found.get(family, {}) for family in FAMILIES}


def written(page: str) -> str:
    """Return the file with the table of the stored results."""
    return filled(page, BEGIN, table(stored()))


def behind(program: str) -> list[str]:
    """The families without which a program, `"wild: its name"`, would lose."""
    losers = {family: [name for name, x in found.items() if loses(x)] for family, found in stored().items()}
    return [family for family, names in losers.items() if any(name.startswith(f"{program},") for name in names)]


def main() -> None:
    """Compare, print a line for each program that a family changes, and then the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families", description=__doc__)
    parser.add_argument("--programs", nargs="+", default=PUBLIC, metavar="FAMILY", help="of the programs")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="programs with this in their names")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the programs of public libraries")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--save", action="store_true", help=f"keep what is found, in {RESULTS.name}")
    options = parser.parse_args()
    # A program that cannot be rewritten runs as written, with a warning. It would say nothing about a family.
    warnings.filterwarnings("error", "jax_tensorarray could not rewrite", RuntimeWarning)
    results = stored()
    for case in cases(options.programs, options.only, options.size):
        try:
            as_it_is = text(case)
            for family in options.families:
                results[family].pop(case.name, None)
                with without(family):
                    is_changed = text(case) != as_it_is
                if is_changed:
                    results[family][case.name] = compared(case, family)
                    print(f"{family}: {case.name}: {results[family][case.name]}", flush=True)
        except Exception as error:
            print(f"{case.name}: left out, {type(error).__name__} {str(error)[:100]}", file=sys.stderr)
        jax.clear_caches()
        if options.save:
            RESULTS.write_text(json.dumps({"jax": jax.__version__, "families": results}, indent=1) + "\n")
    print(table(results))
    if options.save:
        TABLE.write_text(written(TABLE.read_text()))


if __name__ == "__main__":
    main()
