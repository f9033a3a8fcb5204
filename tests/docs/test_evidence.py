"""Pages quote figures of the stored results, and the page of evidence says when and where each was measured."""

import json
import re

import pytest

from benchmarks import evidence, facts
from benchmarks.pages import filled
from benchmarks.shapes import __main__ as shapes
from benchmarks.wild import __main__ as wild
from tests.support.catalogue.page import SHAPES


@pytest.mark.parametrize("page", facts.pages(), ids=lambda page: page.relative_to(facts.ROOT).as_posix())
def test_pages_quote_the_stored_results(page):
    assert facts.filled(page.read_text()) == page.read_text(), "run python -m benchmarks.facts"


def test_every_block_is_on_a_page_and_all_but_the_notes_name_their_date():
    page = (facts.ROOT / "docs/background/evidence.md").read_text() + wild.TABLE.read_text()
    for name, block in evidence.facts().items():
        assert f"<!--={name}-->" in page
        assert name == "evidence.notes" or re.search(r"jax [\d.]+, 2\d{3}-\d\d-\d\d", block), name


def test_a_name_that_no_figure_has_is_an_error():
    with pytest.raises(KeyError, match=r"no\.such"):
        facts.filled("<!--=no.such-->1<!--=-->")


def test_the_table_of_patterns_is_that_of_the_stored_results():
    made = json.loads(shapes.RESULTS.read_text())
    table = shapes.TABLE.read_text()
    assert shapes.written(table, made) == table, "run python -m benchmarks.shapes --save"
    assert list(made["shapes"]) == list(SHAPES)


def test_the_table_of_patterns_has_what_the_catalogue_says():
    """`tests/in_place/test_catalogue.py` counts again."""
    found = json.loads(shapes.RESULTS.read_text())["shapes"]
    ours = {name: {order: after for order, (_, after) in of["cpu"].items()} for name, of in found.items()}
    assert ours == {name: {order: of.whole.get(order, 0) for order in of.orders} for name, of in SHAPES.items()}


def test_a_page_without_the_mark_of_a_block_is_an_error():
    with pytest.raises(ValueError, match="has no mark"):
        filled("text", "<!-- mark -->", "block")
