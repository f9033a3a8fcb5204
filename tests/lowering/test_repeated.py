"""A row that a step reads twice of one version of a buffer is read once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_numpy import in_numpy
from in_place import assert_no_whole_buffer_copy, compiled
from jax import lax

from jax_tensorarray import in_place
from jax_tensorarray._jaxprs import jaxprs
from jax_tensorarray._ops.read import ta_read_p
from jax_tensorarray.doctor import passes

ROWS, SIZE = 40, 8
B = np.linspace(-1, 1, ROWS * SIZE).reshape(ROWS, SIZE)

#: By name: a step as a function of the buffer and its number, and how many rows it reads.
STEPS = {
    "the same row": (lambda b, t: (b.at[t].set(b[t - 1] * jnp.sum(b[t - 1])), b[t - 1]), 1),
    "by equal expressions": (lambda b, t: (b.at[t].set(jnp.sin(b[(3 * t) % 7])), b[(3 * t) % 7]), 1),
    "rows of another version": (lambda b, t: (c := b.at[t - 1].add(1.0), c[t - 1] - b[t - 1]), 2),
    "other rows": (lambda b, t: (b.at[t].set(b[t - 1]), b[t - 2]), 2),
    "rows of two buffers": (lambda b, t: (b.at[t].set(jnp.asarray(B)[t] + b[t]), b[0]), 3),
    "rows in a branch": (lambda b, t: (b, b[t] + lax.cond(t % 2 == 0, lambda: b[t], lambda: 2 * b[t])), 3),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_row_is_read_once(name):
    step, count = STEPS[name]

    def f(b):
        return lax.scan(lambda b, t: step(b, t), b, jnp.arange(2, ROWS))

    found = []
    after = passes(in_place(f))(B)
    jaxprs.any_equation(after["repeated"], lambda eqn: found.append(eqn) if eqn.primitive is ta_read_p else None)
    # "add" reads the row that it updates by itself.
    assert len(found) == count
    want = in_numpy(f)(B)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12), jax.jit(in_place(f))(B), want)


def test_layers_that_read_their_part_twice_do_not_copy_it_twice():
    """XLA merges equal slices, but not where a barrier is between them."""
    size = 256

    def f(xs):
        def step(cache, x):
            t, h = x
            for layer in range(2):
                cache = cache.at[layer, t].set(jnp.tanh(h))
                h = h + jax.nn.softmax(cache[layer] @ h) @ cache[layer]
            return cache, h

        return lax.scan(step, jnp.zeros((2, size, 16)), (jnp.arange(len(xs)), xs))[1]

    xs = np.sin(np.arange(20.0 * 16)).reshape(20, 16)
    ours = compiled(in_place(f), xs)
    np.testing.assert_allclose(ours(xs), in_numpy(f)(xs), rtol=1e-9)
    assert_no_whole_buffer_copy(ours, np.zeros((2, size, 16)))
