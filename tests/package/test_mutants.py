"""`tools/mutants.py` undoes repairs: it replaces texts of the package."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if not (ROOT / "tools").exists():
    pytest.skip("needs the tools of the sources", allow_module_level=True)

sys.path.insert(0, str(ROOT / "tools"))

from mutants import MUTANTS  # noqa: E402


@pytest.mark.parametrize("name", MUTANTS)
def test_the_text_that_a_mutant_replaces_is_in_the_package(name):
    for file, old, new in MUTANTS[name].edits:
        assert old in (ROOT / "jax_tensorarray" / file).read_text()
        assert old != new
