"""The page of evidence has the figures of the stored results, with date and machine."""

import importlib.util
import json
import re

import pytest

from benchmarks import evidence, shapes
from benchmarks.shapes import __main__ as shapes_command

PAGE = evidence.PAGES[0].read_text()


@pytest.mark.parametrize("page", evidence.PAGES, ids=lambda page: page.name)
def test_a_page_has_the_blocks_of_the_stored_results(page):
    assert evidence.written(page.read_text()) == page.read_text(), "run python -m benchmarks.evidence"


def test_every_block_but_the_notes_names_its_date():
    blocks = {mark[2]: mark[0] for mark in evidence.MARK.finditer(PAGE)}
    assert blocks.keys() == evidence.BLOCKS.keys() - {"distribution"}
    for name in blocks.keys() - {"notes"}:
        assert re.search(r"\b2\d{3}-\d\d-\d\d, jax", blocks[name]), name


def test_every_program_is_counted_once():
    rows = evidence.wild_rows()
    assert sum(evidence.counts(rows)) == len(rows)
    assert all(found.gain < 1 for _, _, found in evidence.slower(rows))


def test_the_table_of_patterns_is_that_of_the_stored_results():
    made = json.loads(shapes_command.RESULTS.read_text())
    table = shapes_command.TABLE.read_text()
    assert shapes_command.written(table, made) == table, "run python -m benchmarks.shapes --save"
    assert made["shapes"].keys() <= shapes.programs.SHAPES.keys()


def test_every_mutant_is_recorded():
    file = evidence.ROOT / "tools/mutants.py"
    specification = importlib.util.spec_from_file_location("mutants", file)
    mutants = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(mutants)
    assert evidence.read("checks.json")["mutants"]["number"] == len(mutants.MUTANTS), "record the new mutant's run"


def test_a_page_without_the_mark_of_a_block_is_an_error():
    from benchmarks.pages import filled

    with pytest.raises(ValueError, match="has no mark"):
        filled("text", "<!-- mark -->", "block")
