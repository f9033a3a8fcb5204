"""What a step costs, in figures that a busy machine does not change, compared with those in figures.json.

    python tests/support/figures.py            # prints what differs
    python tests/support/figures.py --update   # and writes it to figures.json, to be committed

`cpu` and `gpu` are the operations in the optimised HLO of one iteration of every loop of a program, nested ones and
branches included, by the version of jax: on the CPU each is a thunk or two, on a GPU a launch. Calls of ours are listed
by name, and `whole buffer` are the operations that make something as large as the buffer, copies or others. What cannot
be counted here is left as it is.
"""

import functools
import itertools
import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gpu_hlo
import in_place
import jax
import jax.numpy as jnp
import loop_steps as loops
from row_programs import ours, programs

from jax_tensorarray import _kernels
from jax_tensorarray._hlo import text as hlo_text
from jax_tensorarray._ops.calls import PREFIX

COMMITTED = Path(__file__).with_name("figures.json")
COMMAND = "python tests/support/figures.py --update"

TRANSFORMS: dict[str, Callable[..., Any]] = {"forward": lambda f: f, "gradient": jax.grad}
LOOPS = ("overwrite", "swap_and_add", "branch", "inner_while_loop")

#: Operations that compute nothing, and those whose computations are counted themselves.
FREE = {"bitcast", "call", "constant", "get-tuple-element", "opt-barrier", "parameter", "partition-id", "tuple"}

Figure = dict[str, int]


class Kind(NamedTuple):
    """Figures of one kind."""

    version: Callable[[], str]  #: of that which they depend on
    why_not: Callable[[], str]  #: why they cannot be counted here, or nothing
    count: Callable[[], dict[str, Figure]]


def _on_the_cpu() -> str:
    """Why what runs here is not the CPU's, or nothing."""
    if jax.default_backend() != "cpu":
        return "jax does not run on the CPU here"
    return "" if hasattr(_kernels.modules["cpu"], "__file__") else "the kernels here are those of an emulated GPU"


# --- operations in HLO -----------------------------------------------------------------------------------------


#: Every program and some loops of ours, with the shape of an argument.
FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[int, int]]] = {
    **{name: (program.with_ops(ours), (1000, 64)) for name, program in programs.items()},
    **{f"while_loop: {name}": (functools.partial(loops.run, name), (200, 16)) for name in LOOPS},
}


@functools.cache
def compiled(name: str, transform: str, compile_: Callable[..., str]) -> tuple[str, int]:
    """The HLO of one of these, and the bytes of its buffer."""
    f, shape = FUNCTIONS[name]
    with jax.enable_x64(False):
        return compile_(TRANSFORMS[transform](f), jnp.zeros(shape)), math.prod(shape) * 4


def _name(op: hlo_text.Instruction) -> str:
    _, is_ours, target = op.attributes.partition(f'custom_call_target="{PREFIX}')
    return "ta_" + target.split('"')[0] if is_ours else op.opcode


def operations(found: list[hlo_text.Instruction], text: str, nbytes: int) -> dict[str, int]:
    """How many there are of each."""
    whole = len(hlo_text.whole_buffer_operations_in_loops(text, nbytes))
    return {"all": len(found), "whole buffer": whole} | dict(sorted(Counter(map(_name, found)).items()))


def _count_operations(
    compile_: Callable[..., str], counted: Callable[[str], list[hlo_text.Instruction]]
) -> dict[str, Figure]:
    counts: dict[str, Figure] = {}
    for name, transform in itertools.product(FUNCTIONS, TRANSFORMS):
        text, nbytes = compiled(name, transform, compile_)
        counts[f"{name}, {transform}"] = operations(counted(text), text, nbytes)
    return counts


def _optimized(f: Callable[..., Any], *args: Any) -> str:
    return in_place.compiled(f, *args).as_text()


def thunks(text: str) -> list[hlo_text.Instruction]:
    """What an iteration of the loops of a program for a CPU runs."""
    return [op for op in hlo_text.operations_in_loops(text) if op.opcode not in FREE]


def _version_of_jax() -> str:
    return "jax " + ".".join(jax.__version__.split(".")[:2])


KINDS = {
    "cpu": Kind(_version_of_jax, _on_the_cpu, lambda: _count_operations(_optimized, thunks)),
    "gpu": Kind(
        _version_of_jax, gpu_hlo.why_not, lambda: _count_operations(gpu_hlo.compiled_for_h100, gpu_hlo.launches)
    ),
}


# --- comparison ------------------------------------------------------------------------------------------------


def committed() -> dict[str, dict[str, dict[str, Figure]]]:
    return json.loads(COMMITTED.read_text())


def _said(figure: Figure | None) -> str:
    return "nothing" if figure is None else ", ".join(f"{count} {name}" for name, count in figure.items())


def differences(before: dict[str, Figure], now: dict[str, Figure]) -> list[str]:
    """What is not the same, one line each."""
    names = list(dict.fromkeys([*before, *now]))
    return [
        f"{name}: {_changes(before.get(name), now.get(name))}" for name in names if before.get(name) != now.get(name)
    ]


def assert_committed(kind: str, name: str, figure: Figure) -> None:
    """A figure is the one that is committed, if there are figures for this version."""
    figures = committed().get(kind, {}).get(KINDS[kind].version())
    if figures is not None:
        said = differences({name: figures[name]} if name in figures else {}, {name: figure})
        assert not said, f"{said[0]}\nIf this is meant: {COMMAND}"


def _changes(before: Figure | None, now: Figure | None) -> str:
    if before is not None and now is not None:
        names = dict.fromkeys([*before, *now])
        changed = [n for n in names if before.get(n, 0) != now.get(n, 0)]
        return ", ".join(f"{n} {before.get(n, 0)} -> {now.get(n, 0)}" for n in changed)
    return f"{_said(before)} -> {_said(now)}"


def write(figures: dict[str, dict[str, dict[str, Figure]]]) -> None:
    """A line for each figure, so that a diff is readable."""
    lines = ["{"]
    for kind, versions in figures.items():
        lines.append(f" {json.dumps(kind)}: {{")
        for version, counts in sorted(versions.items()):
            lines.append(f"  {json.dumps(version)}: {{")
            lines += [f"   {json.dumps(name)}: {json.dumps(figure)}," for name, figure in counts.items()]
            lines[-1] = lines[-1].removesuffix(",")
            lines.append("  },")
        lines[-1] = lines[-1].removesuffix(",")
        lines.append(" },")
    lines[-1] = lines[-1].removesuffix(",")
    COMMITTED.write_text("\n".join([*lines, "}", ""]))


def main() -> None:
    figures = committed() if COMMITTED.exists() else {}
    for name, kind in KINDS.items():
        if reason := kind.why_not():
            print(f"{name}: not counted, {reason}")
            continue
        version, now = kind.version(), kind.count()
        before = figures.setdefault(name, {}).get(version, {})
        changed = differences(before, now)
        print(f"{name}, {version}: {len(now)} figures, {len(changed)} differ", *changed, sep="\n  ")
        figures[name][version] = now
    if "--update" in sys.argv:
        write(figures)


if __name__ == "__main__":
    main()
