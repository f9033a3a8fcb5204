"""`ta_read`: zeros for what is masked, and its gradient. `test_rows.py` has its values."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_tensorarray import ta_read

rng = np.random.default_rng(0)


def test_a_buffer_may_be_a_numpy_array_or_a_list():
    np.testing.assert_array_equal(ta_read(np.array([1.0, 2.0, 3.0]), 1), 2.0)
    np.testing.assert_array_equal(ta_read([1.0, 2.0, 3.0], [2, 0]), [3.0, 1.0])


def test_the_gradient_counts_how_often_each_row_was_read():
    index = jnp.array([[1, 1, 3], [1, 7, 0]])
    where = jnp.array([[True, True, True], [False, True, True]])
    gradient = jax.grad(lambda b: ta_read(b, index, where=where, mode="drop").sum())(jnp.zeros((4, 2)))
    np.testing.assert_array_equal(gradient, [[1, 1], [2, 2], [0, 0], [1, 1]])


def test_the_gradients_of_several_reads_and_a_plain_use_add_up():
    weights = rng.normal(size=(4, 2))

    def f(buffer):
        first, again = ta_read(buffer, jnp.array(1)), ta_read(buffer, jnp.array([1, 3]))
        return (2 * first).sum() + (weights * buffer).sum() + (5 * again).sum()

    expected = weights + np.array([[0], [7], [0], [5]])
    np.testing.assert_allclose(jax.grad(f)(jnp.zeros((4, 2))), expected, rtol=1e-15)
    np.testing.assert_allclose(jax.jit(jax.grad(f))(jnp.zeros((4, 2))), expected, rtol=1e-15)


def test_an_unused_read_has_a_gradient_of_zeros():
    def f(buffer):
        ta_read(buffer, jnp.array(1))
        return 3.0 * ta_read(buffer, jnp.array(0), where=jnp.array(False)).sum()

    np.testing.assert_array_equal(jax.grad(f)(jnp.ones((4, 2))), np.zeros((4, 2)))


def test_reads_of_a_closed_over_buffer_in_nested_control_flow_accumulate_their_gradient():
    def f(buffer):
        def body(total, k):
            total += ta_read(buffer, k).sum()
            total += jax.jit(lambda b: 10 * ta_read(b, k).sum())(buffer)
            total += jax.lax.cond(k > 1, lambda: 100 * ta_read(buffer, 0).sum(), lambda: 0.0)
            inner = jax.lax.scan(lambda t, j: (t + 1000 * ta_read(buffer, j).sum(), None), total, jnp.array([1, 1]))
            return inner[0], None

        return jax.lax.scan(body, 0.0, jnp.arange(4))[0] + (0.5 * buffer).sum()

    row = [0.5 + 11 + 200, 0.5 + 11 + 8000, 0.5 + 11, 0.5 + 11]
    np.testing.assert_array_equal(jax.jit(jax.grad(f))(jnp.ones((4, 2))), np.stack([row, row], axis=1))
