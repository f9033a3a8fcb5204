"""`tools/mutants.py` breaks the package: it replaces texts of it. Everything that is broken is noticed."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if not (ROOT / "tools").exists():
    pytest.skip("needs the tools of the sources", allow_module_level=True)

sys.path.insert(0, str(ROOT / "tools"))

import mutants  # noqa: E402
from mutants import MUTANTS  # noqa: E402


@pytest.mark.parametrize("name", MUTANTS)
def test_the_text_that_a_mutant_replaces_is_in_the_package(name):
    for file, old, new in MUTANTS[name].edits:
        assert old in (ROOT / "jax_tensorarray" / file).read_text()
        assert old != new


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_noticed(name):
    assert mutants.is_noticed(mutants.read()[name]), f"run python tools/mutants.py --save '{name}'"
    assert all((ROOT / "tests" / file.split(" -k ")[0]).exists() for file in MUTANTS[name].files)


def test_the_table_is_that_of_the_stored_results():
    page = mutants.PAGE.read_text()
    assert mutants.written(page, mutants.read()) == page, "run python tools/mutants.py --save"
