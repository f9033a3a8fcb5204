"""Loops of public libraries under `in_place`: the same results. A test is skipped if its library is not installed."""

import importlib.metadata

import jax
import jax.numpy as jnp
import pytest

from benchmarks.wild import __main__ as command
from benchmarks.wild import report
from benchmarks.wild.measure import found
from benchmarks.wild.programs import PROGRAMS
from jax_tensorarray._in_place import rows


@pytest.fixture(autouse=True, scope="module")
def in_single_precision():
    with jax.enable_x64(False):
        yield


def is_installed(library):
    try:
        return bool(importlib.metadata.version(library))
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.mark.filterwarnings("default")  # those of libraries are not ours
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_library_gives_what_it_gave(program, monkeypatch):
    if not is_installed(program.library):
        pytest.skip(f"{program.library} is not installed: pip install '.[wild]'")
    monkeypatch.setattr(rows, "LEAST_BYTES", 0)
    f, args = program.make(max(program.small // 8, 4))
    value = found(f, args, 0, seconds=0)
    assert value.is_equal, value
    if program.gradient:
        gradient = found(jax.grad(lambda *args: sum(map(jnp.sum, jax.tree.leaves(f(*args))))), args, 0, seconds=0)
        assert gradient.is_equal, gradient


def test_the_documentation_has_what_was_measured():
    """Of all programs, and at both sizes with the same results."""
    measured = command.stored()
    assert [row.name for row in measured] == [program.name for program in PROGRAMS]
    for program, row in zip(PROGRAMS, measured, strict=True):
        passes = [row.forward, row.gradient] if program.gradient else [row.forward]
        assert all([x.size for x in of] == [program.small, program.large] for of in passes)
        assert all(x.is_equal for of in passes for x in of)
    for name, parts in (
        ("docs/wild.md", (report.table(measured), report.notes())),
        ("README.md", (report.best(measured),)),
    ):
        page = (command.ROOT / name).read_text()
        assert report.written(page, *parts) == page, f"run python -m benchmarks.wild --write: {name}"
