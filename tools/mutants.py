"""Undo repairs, one at a time, and count how many random programs it takes to notice.

    python tools/mutants.py                      # each mutant below; a minute to half an hour each
    python tools/mutants.py "accumulator"        # those with this in their name
    python tools/mutants.py --unchanged 1000     # no mutant: so many programs of each kind, and none may fail

A mutant is a copy of the package in which a text is replaced, as before a repair. The random programs are those of the
tests, with other seeds, in turn under every transformation that is named. The exit code is 1 if one survives.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]

#: How many programs may pass before a mutant has survived.
MOST = 2000


class Mutant(NamedTuple):
    """A repair that is undone: replacements in files of the package, and the programs that should notice."""

    edits: tuple[tuple[str, str, str], ...]
    programs: tuple[str, ...]  #: `ops`, `plain` or `passes`, perhaps with the names of some transformations
    by: str = "numpy"  #: what evaluates the programs; "": what does so in the tests


EVERYTHING = ("ops", "plain")

MUTANTS = {
    "an accumulator in two operands is taken twice": Mutant(
        (
            (
                "_compat/transposes.py",
                "first = {k: next(j for j in hot if args[j] is args[k]) for k in hot}",
                "first = {k: k for k in hot}",
            ),
        ),
        EVERYTHING,
    ),
    "a predicate is evaluated twice a step": Mutant(
        (
            (
                "_in_place/control.py",
                "            return step(carry, is_active(carry) if shape else None)",
                "            active = is_active(carry)\n            return step(carry, active if shape else None)",
            ),
        ),
        ("plain:value", "ops:jit"),
        "",
    ),
    "a conditional is moved before operands that its branches ignore": Mutant(
        (
            (
                "_lowering/ordering.py",
                "        return [(n, v) for n, v in enumerate(atoms) if not isinstance(v, Literal)]\n",
                "        found = [(n, v) for n, v in enumerate(atoms) if not isinstance(v, Literal)]\n"
                '        if k < self.end and self.eqns[k].primitive.name == "cond":\n'
                "            from jax_tensorarray._lowering.branches import _used_arguments\n\n"
                '            used = set().union(*map(_used_arguments, self.eqns[k].params["branches"]))\n'
                "            found = [(n, v) for n, v in found if n == 0 or n - 1 in used]\n"
                "        return found\n",
            ),
            ("_lowering/branches.py", "    if len(used) == len(operands):\n", "    if True:\n"),
        ),
        ("passes:forward",),
    ),
    "a box that is out of range is moved into range": Mutant(
        (("_in_place/rows.py", '"drop" if self.drops else "clip"', '"clip"'),), ("plain",)
    ),
    "loops that choose, and checkpoints, are a custom_jvp of JAX": Mutant(
        (
            (
                "_jaxprs/custom_jvp.py",
                "    outs: list[Array] = ta_custom_jvp_p.bind(*operands, call_jaxpr=jaxpr, rule=rule)\n"
                "    return outs\n",
                "    return _of_jax(*operands, call_jaxpr=jaxpr, rule=rule)\n",
            ),
        ),
        EVERYTHING,
    ),
    "a custom_vjp is differentiated in what it closes over": Mutant(
        (
            (
                "_jaxprs/registry.py",
                "has_tangent = [x.value for x in args], [x.perturbed for x in args]",
                "has_tangent = [x.value for x in args], [True for x in args]",
            ),
        ),
        EVERYTHING,
    ),
    "a cotangent gets the dtype of its result": Mutant(
        (
            (
                "_jaxprs/registry.py",
                "        has_ct = [not is_any_zero(ct) for ct in cts]\n",
                "        has_ct = [not is_any_zero(ct) for ct in cts]\n"
                "        for ct, v in zip(cts, eqn.outvars):\n"
                "            assert is_any_zero(ct) or ct.dtype == v.aval.dtype\n",
            ),
        ),
        ("plain", "ops"),
    ),
    "abs of the least integer is an index": Mutant(
        (
            (
                "_lowering/program.py",
                '    Pass("absolute", lambda jaxpr, to: absolute.write_out(jaxpr), lambda to: to.is_known),\n',
                "",
            ),
        ),
        ("ops:jit",),  # outside of loops, where it is compiled as it is
        "",
    ),
    "a batch is not divided by spmd_axis_name": Mutant(
        (("_ops/primitive.py", "x if d is None else _compat.varying_over_batches(x)", "x"),), ("plain:devices",), ""
    ),
    "rules run in another mesh": Mutant(
        (
            (
                "_in_place/repair.py",
                "with _compat.at_source_of(eqn), eqn.ctx.manager, jaxprs.with_types_of(eqn):",
                "with _compat.at_source_of(eqn), jaxprs.with_types_of(eqn):",
            ),
        ),
        ("plain:auto axes",),
        "",
    ),
    "64 bits become 32": Mutant(
        (("_jaxprs/jaxprs.py", "    return jax.enable_x64(True)", "    return contextlib.nullcontext()"),),
        ("plain:64 bits inside",),
        "",
    ),
    "a NaN is looked for among tracers": Mutant(
        (("_in_place/api.py", "if not _compat.records_equations():", "if False:"),), ("plain:debug nans",), ""
    ),
    "memory is not initialised while NaNs are looked for": Mutant(
        # Memory that nobody has written to is often zero by luck. So that it never is, it is filled with NaNs here.
        (
            ("_ops/empty.py", " if debugs_nans()", " if False"),
            ("_ops/empty.py", "_uninitialised(ctx, effect=effect)", "_zeros(ctx, aval=aval)"),
            (
                "_ops/empty.py",
                "def _in_plain_jax(*, aval: Any, **_: Any) -> Array:\n    return jnp.zeros(aval.shape, aval.dtype)\n",
                "def _in_plain_jax(*, aval: Any, **_: Any) -> Array:\n"
                "    fill = jnp.nan if jnp.issubdtype(aval.dtype, jnp.inexact) else 0\n"
                "    return jnp.full(aval.shape, fill, aval.dtype)\n",
            ),
        ),
        ("plain:debug nans",),
        "",
    ),
    "a token is asked for its dtype": Mutant(
        (("_in_place/rows.py", 'if not hasattr(aval, "dtype"):', "if False:"),), ("plain:token",), ""
    ),
    "a token is asked whether its type is weak": Mutant(
        (("_in_place/values.py", 'getattr(jax.typeof(x.array), "weak_type", weak)', "jax.typeof(x.array).weak_type"),),
        ("plain:token",),
        "",
    ),
}


def main(args: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of the names of mutants")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--unchanged", type=int, metavar="N", help="run N programs on the package as it is")
    parser.add_argument("--programs", nargs="*", default=EVERYTHING, help="as in MUTANTS, for --unchanged")
    parser.add_argument("--by", default="numpy", help="as in MUTANTS, for --unchanged")
    given = parser.parse_args(args)
    if given.unchanged is not None:
        text = found(Mutant((), tuple(given.programs), given.by), given.seed, given.unchanged)
        print(text)
        return int(not text.startswith("none"))
    survived = 0
    for name, mutant in MUTANTS.items():
        if not given.names or any(part in name for part in given.names):
            text = found(mutant, given.seed, MOST)
            survived += text.startswith("none")
            print(f"{name}: {text}", flush=True)
    return int(survived > 0)


def found(mutant: Mutant, seed: int, most: int) -> str:
    """Return what the programs notice of a mutant."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("jax_tensorarray", "tests"):
            shutil.copytree(ROOT / name, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__"))
        for file, old, new in mutant.edits:
            path = Path(folder) / "jax_tensorarray" / file
            text = path.read_text()
            if old not in text:
                raise SystemExit(f"mutants: {file} has no {old!r} any more")
            path.write_text(text.replace(old, new))
        call = f"import mutants; mutants.run({folder!r}, {mutant.programs!r}, {seed}, {most})"
        env = os.environ | {"PYTHONPATH": str(ROOT / "tools")} | ({"RANDOM_PROGRAMS": mutant.by} if mutant.by else {})
        done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, env=env)
    if done.returncode < 0:
        return f"the process was ended by signal {-done.returncode}"
    if done.returncode:
        raise SystemExit(f"mutants: the programs could not be run: {done.stderr[-2000:]}")
    return done.stdout.strip().splitlines()[-1]


# --- in a process of its own -------------------------------------------------------------------------------------


def run(folder: str, programs: Sequence[str], seed: int, most: int) -> None:
    """Run random programs with the package in a folder until one fails, and print how many."""
    sys.path[:0] = [folder, *(f"{folder}/tests/{name}" for name in ("support", "ops", "in_place", "lowering"))]
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1")
    import logging
    import warnings

    import jax

    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_num_cpu_devices", 8)
    warnings.simplefilter("error")
    logging.disable(logging.CRITICAL)

    checks, count, failures = list(_checks(programs)), 0, list[str]()
    while count < most and not failures:
        for name, check in checks:
            for example in _examples(seed):
                count += 1
                try:
                    check(*example)
                except Exception as error:
                    failures.append(f"{name}: {type(error).__name__} {' '.join(str(error).split())[:150]}\n{example}")
                    break
            seed += 1
            if failures or count >= most:
                break
        jax.clear_caches()  # after each round: programs that are kept fill the memory
    if failures:
        print(failures[0], file=sys.stderr)
    print(
        f"found after {count} programs, by {failures[0].splitlines()[0]}" if failures else f"none in {count} programs"
    )


def _checks(programs: Sequence[str]) -> Iterator[tuple[str, Callable[..., None]]]:
    files = {"ops": "test_random_programs", "plain": "test_plain_programs", "passes": "test_passes"}
    modules = {kind: import_module(name) for kind, name in files.items()}
    gates = import_module("gates")
    for text in programs:
        kind, _, chosen = text.partition(":")
        module = modules[kind]
        every = module.ORDERS if kind == "plain" else module.TRANSFORMATIONS
        for name in chosen.split("|") if chosen else every:
            if os.environ.get("RANDOM_PROGRAMS") == "numpy" and (kind, name) in _ONLY_COMPILED:
                continue

            # In every other program of ops an index that is out of range is dropped.
            def check(
                program: Any,
                differ: Any,
                axis: int,
                setting: str,
                module: Any = module,
                name: str = name,
                is_of_ops: bool = kind == "ops",
            ) -> None:
                with gates.gates(setting):
                    module.check(name, program, *differ, axis, *([program.start % 2 == 0] if is_of_ops else []))

            yield f"{kind}, {name}", check


#: What NumPy cannot evaluate.
_ONLY_COMPILED = {
    *(("ops", name) for name in ("eager", "donation")),
    *(("plain", name) for name in ("token", "devices", "auto axes", "debug nans", "64 bits inside")),
}


def _examples(seed: int) -> list[Any]:
    checks, programs, gates = map(import_module, ("random_checks", "random_programs", "gates"))
    sampled = programs.st.sampled_from
    found: list[Any] = programs.examples(
        seed, programs.programs(), checks.BATCHES, sampled([0, 1, 2]), sampled(gates.SETTINGS)
    )
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
