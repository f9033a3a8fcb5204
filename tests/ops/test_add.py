"""`ta_add`: duplicates are added in order, and each has a gradient. `test_rows.py` has its values."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_tensorarray import ta_add


def test_duplicates_are_added_in_order():
    # In float32, only one order gives one: the first sum swallows what the second would keep.
    big = 2.0**25
    added = ta_add(jnp.zeros(2, jnp.float32), jnp.array([1, 1, 1]), jnp.array([big, -big, 1.0], jnp.float32))
    np.testing.assert_array_equal(added, [0, 1])
    added = ta_add(jnp.zeros(2, jnp.float32), jnp.array([1, 1, 1]), jnp.array([big, 1.0, -big], jnp.float32))
    np.testing.assert_array_equal(added, [0, 0])


def test_every_duplicate_gets_the_gradient_of_its_row_and_the_buffer_keeps_its_own():
    weights = jnp.array([10.0, 20.0, 30.0])

    def f(buffer, value):
        where = jnp.array([True, True, True, False, True])
        return (weights * ta_add(buffer, jnp.array([1, 2, 1, 1, 9]), value, where=where, mode="drop")).sum()

    of_buffer, of_value = jax.grad(f, argnums=(0, 1))(jnp.zeros(3), jnp.ones(5))
    np.testing.assert_array_equal(of_buffer, weights)
    np.testing.assert_array_equal(of_value, [20, 30, 20, 0, 0])
