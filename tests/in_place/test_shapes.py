"""The page of shapes is true: a step of each moves as many whole buffers as it says, on this version of JAX."""

import json

import pytest

from benchmarks.shapes.__main__ import RESULTS, whole_buffers
from benchmarks.shapes.programs import ORDERS, SHAPES
from jax_tensorarray._compat import barriers_hold

pytestmark = pytest.mark.usefixtures("in_single_precision")
FOUND = json.loads(RESULTS.read_text())["shapes"]


def test_every_shape_is_on_the_page():
    assert list(FOUND) == list(SHAPES)


@pytest.mark.slow(but=1)
@pytest.mark.skipif(not barriers_hold("cpu"), reason="the page is of a version of JAX in which barriers hold")
@pytest.mark.parametrize("name", SHAPES)
def test_a_step_moves_what_the_page_says(name):
    """Of the orders in which `in_place` moves something, or of the last one, if it never does."""
    of, found = SHAPES[name], FOUND[name]["cpu"]
    moving = [order for order, (_, ours) in found.items() if ours]
    for order in [*moving[:1], of.orders[-1]]:
        assert whole_buffers(of, ORDERS[order][1], order) <= found[order][1]
