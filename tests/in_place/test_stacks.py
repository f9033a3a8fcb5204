"""Stacks that stay as they are, and those of a batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalogue.stacks import ORDERS, SIZE, TOKENS, model, rows
from jax import lax
from orders import assert_as_in_numpy

from jax_tensorarray._compat import barriers_hold
from jax_tensorarray.doctor._copies import copies_in

pytestmark = pytest.mark.slow(but=1)


def test_a_checkpoint_of_a_layer():
    f, args = model(lambda w, cache, h, t: jax.checkpoint(rows)(w, cache, h, t))
    assert_as_in_numpy(f, args, "grad(in_place)", by=(0, 2))


def test_stacks_that_change_places_stay_as_they_are():
    def swapped(w, cache, h):
        def one(h, own):
            w, a, b = own
            return jnp.sin(w @ h), (b.at[0].set(h), a)

        return lax.scan(one, h, (w, cache, 2 * cache))

    assert_as_in_numpy(swapped, model(rows)[1], "forward")


def marked(b, h, done):
    """A board of integers starts again with zeros."""
    return lax.cond(done, lambda: (jnp.zeros_like(b), h), lambda: (b, h))


def never(b, h, done):
    return b, h


@pytest.mark.parametrize(("by", "dtype"), [(marked, np.int32), (never, np.float64)])
def test_the_stacks_of_a_batch_are_stored_as_the_scan_takes_them(by, dtype):
    """`jax.vmap` puts the axis of the batch second for the inner scan, and first for the outer one, in every step."""
    args = np.zeros((3, TOKENS, 4 * SIZE), dtype), np.linspace(-1, 1, 3 * 4 * SIZE).reshape(3, -1)
    args = tuple(np.stack([x, x[::-1]]) for x in args)

    def step(states, t):
        def one(states):
            b, h = states
            b = b.at[t].set((4 * jnp.tanh(h)).astype(dtype)).at[t // 3].add(1)
            return by(b, jnp.sin(h + b[t // 2]), (t % 7 == 6) & (h[0] > 0.2)), b[t // 2]

        return lax.map(one, states)

    f = jax.vmap(lambda b, h: lax.scan(step, (b, h), jnp.arange(TOKENS)))
    program = assert_as_in_numpy(f, args, "forward")
    if dtype is np.int32 and barriers_hold("cpu"):  # floats are moved by XLA, in one operation with others
        assert not [c for c in copies_in(program.as_text(), args[0].nbytes // 3) if c.kind != "anew"]
    if dtype is np.float64:
        for order in ORDERS[1:3]:
            assert_as_in_numpy(f, args, order, by=1)
