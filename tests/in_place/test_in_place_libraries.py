"""Loops of public libraries under `in_place`: the same results. A test is skipped if its library is not installed.

The benchmark that looks for harm finds results that differ and programs that are slower, and its table is up to date.
"""

import functools
import importlib.metadata
import inspect
import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks import families, pages
from benchmarks.harm import measure
from benchmarks.harm import report as harm_report
from benchmarks.harm.program import VARIANTS, Program, normal
from benchmarks.harm.programs import PROGRAMS as HARM
from benchmarks.wild import __main__ as command
from benchmarks.wild import report
from benchmarks.wild.measure import found, functions_of
from benchmarks.wild.programs import PROGRAMS
from jax_tensorarray import in_place

pytestmark = pytest.mark.usefixtures("in_single_precision")


def is_installed(library):
    try:
        return bool(importlib.metadata.version(library))
    except importlib.metadata.PackageNotFoundError:
        return False


#: The last program of each library, and its last one with a gradient: benchmarks.wild compares all of them.
SOME = {p.library: p for p in PROGRAMS} | {(p.library, "gradient"): p for p in PROGRAMS if p.gradient}


@pytest.mark.slow(but=2)
@pytest.mark.filterwarnings("default")  # those of libraries are not ours
@pytest.mark.parametrize("program", dict.fromkeys(SOME.values()), ids=lambda program: program.name)
def test_a_library_gives_what_it_gave(program):
    if not is_installed(program.library):
        pytest.skip(f"{program.library} is not installed: pip install '.[wild]'")
    f, args = program.make(max(program.small // 8, 4))

    def with_gradient(*args):
        def total(*args):
            outs = f(*args)
            return sum(map(jnp.sum, jax.tree.leaves(outs))), outs

        return jax.value_and_grad(total, has_aux=True)(*args)

    plain = with_gradient if program.gradient else f
    (value,) = found(plain, {"forward": in_place(plain)}, args, 0, seconds=0).values()
    assert value.is_equal, value


def test_the_tables_have_what_was_measured():
    """All programs were measured, at all sizes and in both orders of the gradient, with the same results."""
    measured = command.stored()
    assert [row.name for row in measured] == [program.name for program in PROGRAMS]
    for program, row in zip(PROGRAMS, measured, strict=True):
        assert list(row.passes) == ["forward", "grad(in_place)", "in_place(grad)"][: 3 if program.gradient else 1]
        assert all(tuple(x.size for x in of) == program.sizes for of in row.passes.values())
        assert all(x.is_equal for x in row.found)
    table = command.TABLE.read_text()
    assert pages.filled(table, report.BEGIN, report.table(measured)) == table, "run python -m benchmarks.wild --write"
    table = families.TABLE.read_text()
    assert families.written(table) == table, "run python -m benchmarks.families --save"


@pytest.mark.parametrize("family", [name for name, found in families.FAMILIES.items() if found])
def test_a_family_that_is_left_out_takes_the_same_arguments(family):
    for (module, name), other in families.FAMILIES[family].items():
        original = getattr(module, name)
        if not inspect.isfunction(original):
            continue  # a cache of JAX, which has no signature
        parameters = inspect.signature(original).parameters.values()
        named = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
        inspect.signature(other).bind(*[None for p in parameters if p.name not in named], **named)


def test_to_measure_some_programs_keeps_the_rows_of_the_others():
    rows = command.stored()
    anew = rows[3]._replace(version="anew")
    assert command.with_stored([anew]) == [*rows[:3], anew, *rows[4:]]


LITTLE = measure.Effort(seconds=0.01, samples=3, compilations=1)


def filled(x):
    return jax.lax.fori_loop(1, len(x), lambda i, b: b.at[i].set(jnp.sin(b[i // 2])), x)


def summed(x):
    return jax.lax.fori_loop(0, 300, lambda i, s: jnp.tanh(s + x), x)


@pytest.mark.parametrize("f, unchanged", [(summed, [True] * 3), (filled, [False] * 3)])
def test_a_program_is_unchanged_if_its_instructions_are(f, unchanged):
    args = [jnp.ones((300, 8))]
    passes = [found(plain, ours, args, 0, seconds=0).values() for plain, ours in functions_of(f, gradient=True)]
    assert [one.is_unchanged for of in passes for one in of] == unchanged


@pytest.mark.slow
def test_harm_compares_programs_and_their_loops():
    fill, sums = (Program("tests", f.__name__, f, normal(100, 8)) for f in (filled, summed))
    (repaired,) = measure.rows_of(fill, ["in_place(grad)"], LITTLE)
    (as_it_is,) = measure.rows_of(sums, ["vmap"], LITTLE)
    assert all(row.is_right and row.ratio > 0 and row.compile_ratio > 0 for row in (repaired, as_it_is))
    assert as_it_is.same and not repaired.same


def eight_times(f):
    return lambda x: functools.reduce(lambda y, _: f(y), range(8), x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "f, is_right",
    [(lambda p: lambda x: p.f(x) + 1, False), (lambda p: lambda x: eight_times(p.f)(x) * 0 + p.f(x), True)],
)
def test_harm_finds_what_differs_and_what_is_slower(f, is_right, monkeypatch):
    monkeypatch.setitem(VARIANTS, "forward", ("forward", f))
    (row,) = measure.rows_of(Program("tests", "summed", summed, normal(100, 8)), ["forward"], LITTLE)
    assert row.is_right == is_right and not row.is_harmless and not harm_report.is_reached([row])


def test_the_table_has_what_harm_has_measured():
    """Every version has all programs except those of libraries that were not installed, each with the same results.

    Programs after public reports, and of whole arrays, are measured with the newest version.
    """
    stored = json.loads(harm_report.RESULTS.read_text())
    newest = max(stored, key=lambda version: tuple(map(int, version.split("."))))
    for version, made in stored.items():
        rows = harm_report.rows_of(made)
        assert all(row.is_right for row in rows)
        measured = {(row.family, row.name) for row in rows}
        missing = {p.family for p in HARM if (p.family, p.name) not in measured}
        assert missing <= {"wild"} if version == newest else missing <= {"wild", "reports", "whole_arrays"}
    tables = harm_report.TABLES.read_text()
    assert harm_report.written(tables, stored) == tables, "run python -m benchmarks.harm --save"
