"""The loops of the catalogue give what NumPy says, and move no more whole buffers than the catalogue says."""

import contextlib
import itertools
from collections import defaultdict

import jax
import pytest
from catalogue import LOOPS
from catalogue.loop import bytes_of
from in_place import whole_buffer_operations
from orders import assert_right

from jax_tensorarray._compat import barriers_hold


def cases():
    """Each loop in each of its orders. One of them is in every run, in turn, and the others are at night."""
    turns = defaultdict(itertools.count)
    for (family, name), loop in LOOPS.items():
        turn = next(turns[family, loop.orders]) % len(loop.orders)
        for k, order in enumerate(loop.orders):
            yield pytest.param(family, name, order, marks=[] if k == turn else pytest.mark.nightly)


@pytest.mark.slow(but=12)
@pytest.mark.parametrize(("family", "name", "order"), [*cases()])
def test_a_loop_gives_what_numpy_says_and_moves_no_buffer(family, name, order):
    loop = LOOPS[family, name]
    with jax.enable_x64(False) if family == "page" else contextlib.nullcontext():
        program = assert_right(loop, order)
    if barriers_hold("cpu") or not loop.is_for_barriers:
        num_bytes = bytes_of(loop, order)
        found = whole_buffer_operations(program.as_text(), num_bytes)
        assert len(found) <= loop.whole.get(order, 0), found
        assert "grad" in order or program.memory_analysis().temp_size_in_bytes < 24 * num_bytes + 4096
