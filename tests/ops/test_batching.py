"""A batch of row ops repeats no buffer that its examples share. `test_starts.py` has the values of batches."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.extend.core import jaxprs_in_params

import jax_tensorarray as ta

pytestmark = pytest.mark.slow(but=3)


@pytest.mark.parametrize("op", [ta.ta_write, ta.ta_add, ta.ta_max, lambda *args: ta.ta_swap(*args)[0]])
def test_a_bool_that_a_jitted_function_makes(op):
    buffers, index = jnp.zeros((2, 3), bool), jnp.array([0, 2])
    got = jax.vmap(jax.jit(lambda b, k: op(b, k, jnp.asarray(True))))(buffers, index)
    np.testing.assert_array_equal(got, [[True, False, False], [False, False, True]])


def test_a_batch_of_no_examples():
    buffer, index = jnp.zeros((0, 4, 2)), jnp.zeros((0, 3), int)
    assert jax.vmap(ta.ta_read)(buffer, index).shape == (0, 3, 2)
    assert jax.vmap(lambda b, i: ta.ta_write(b, i, 1.0))(buffer, index).shape == (0, 4, 2)
    assert jax.vmap(lambda i: ta.ta_read(buffer.reshape(0, 2), i, mode="drop"))(index).shape == (0, 3, 2)


# --- a shared buffer is not broadcast --------------------------------------------------------------------------


def shapes_in(jaxpr):
    """Shapes of all results, in nested jaxprs too."""
    for eqn in jaxpr.eqns:
        yield from (v.aval.shape for v in eqn.outvars)
        for inner in jaxprs_in_params(eqn.params):
            yield from shapes_in(inner)


LENGTH, WIDTH = 11, 7


def whole_buffers(f, *operands):
    """Shapes of those results of `f` that hold more than one buffer of LENGTH rows of WIDTH."""
    closed = jax.make_jaxpr(f)(*operands)
    return [
        s for s in shapes_in(closed.jaxpr) if (s[-2:] == (LENGTH, WIDTH) and len(s) > 2) or np.prod(s) > LENGTH * WIDTH
    ]


@pytest.mark.parametrize(
    "in_axes", [(None, 0, None), (None, 0, 0), (None, -1, 0), (None, -1, -1), (None, None, 0)], ids=str
)
def test_a_gather_from_a_shared_buffer_is_no_broadcast(in_axes):
    buffer = jnp.arange(float(LENGTH * WIDTH)).reshape(LENGTH, WIDTH)
    rng = np.random.default_rng(10)
    shapes = [(3,) if axis is None else (3, 3) for axis in in_axes[1:]]  # three examples of three positions
    index, where = rng.integers(-1, 6, shapes[0]).astype(np.int32), rng.random(shapes[1]) < 0.7

    def f(buffer, index, where):
        return jax.vmap(lambda b, i, w: ta.ta_read(b, i, where=w, mode="drop"), in_axes)(buffer, index, where)

    operands = buffer, jnp.asarray(index), jnp.asarray(where)
    assert not whole_buffers(f, *operands)
    assert not whole_buffers(lambda b, *rest: jax.jvp(lambda b: f(b, *rest), (b,), (b,)), *operands)
    assert not whole_buffers(jax.grad(lambda *xs: jnp.sin(f(*xs)).sum()), *operands)


def under_two_vmaps(buffer, index):
    return jax.vmap(jax.vmap(lambda i: ta.ta_read(buffer, i)))(index)


def in_a_vmapped_scan(buffer, index):
    def one(i):
        return jax.lax.scan(lambda total, k: (total + ta.ta_read(buffer, k), None), jnp.zeros(WIDTH), i)[0]

    return jax.vmap(one)(index)


@pytest.mark.parametrize(("f", "axis"), [(under_two_vmaps, ()), (in_a_vmapped_scan, 1)])
def test_a_gather_from_a_shared_buffer_within_something_is_no_broadcast(f, axis):
    buffer = jnp.arange(float(LENGTH * WIDTH)).reshape(LENGTH, WIDTH)
    index = jnp.array([[0, 3], [10, 5], [3, 3]])
    assert not whole_buffers(f, buffer, index)
    assert not whole_buffers(jax.grad(lambda b, i: jnp.sin(f(b, i)).sum()), buffer, index)
    np.testing.assert_allclose(f(buffer, index), oracle.ta_read(buffer, index).sum(axis), rtol=1e-15)


def test_batched_buffers_that_share_an_inner_vmap_are_not_broadcast_again():
    buffers = jnp.arange(float(2 * LENGTH * WIDTH)).reshape(2, LENGTH, WIDTH)
    index = jnp.array([[[0], [3], [10]], [[5], [1], [1]]])

    def f(buffers, index):
        return jax.vmap(lambda b, i: jax.vmap(lambda j: ta.ta_read(b, j))(i))(buffers, index)

    shapes = list(shapes_in(jax.make_jaxpr(f)(buffers, index).jaxpr))
    assert shapes
    assert all(np.prod(s) < 3 * LENGTH * WIDTH for s in shapes)
    oracle.assert_same_bits(
        f(buffers, index), np.stack([oracle.ta_read(b, i) for b, i in zip(buffers, index, strict=True)])
    )
