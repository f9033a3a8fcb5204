"""`ta_write`: the last of duplicates stays, and has the gradient. `test_rows.py` has its values."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_tensorarray import ta_write


def test_the_last_of_duplicate_writes_stays():
    written = ta_write(jnp.zeros(3), jnp.array([1, 1, 2, 1]), jnp.array([1.0, 2.0, 3.0, 4.0]))
    np.testing.assert_array_equal(written, [0, 4, 3])


def test_the_last_of_duplicate_writes_gets_the_gradient():
    weights = jnp.array([10.0, 20.0, 30.0])

    def f(buffer, value):
        return (weights * ta_write(buffer, jnp.array([1, 2, 1, 1]), value)).sum()

    of_buffer, of_value = jax.grad(f, argnums=(0, 1))(jnp.zeros(3), jnp.ones(4))
    np.testing.assert_array_equal(of_buffer, [10, 0, 0])
    np.testing.assert_array_equal(of_value, [0, 30, 0, 20])


def test_masked_and_dropped_writes_get_no_gradient():
    weights = jnp.array([10.0, 20.0, 30.0])

    def f(buffer, value):
        where = jnp.array([True, True, False, True])
        return (weights * ta_write(buffer, jnp.array([1, 2, 1, 9]), value, where=where, mode="drop")).sum()

    of_buffer, of_value = jax.grad(f, argnums=(0, 1))(jnp.zeros(3), jnp.ones(4))
    np.testing.assert_array_equal(of_buffer, [10, 0, 0])
    np.testing.assert_array_equal(of_value, [20, 30, 0, 0])
