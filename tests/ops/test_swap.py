"""`ta_swap`: what duplicates exchange, and gradients. `test_rows.py` has its values."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_tensorarray import ta_swap

rng = np.random.default_rng(0)


def test_a_later_duplicate_takes_out_what_an_earlier_one_put_in():
    buffer, old = ta_swap(jnp.array([5.0, 6.0]), jnp.array([1, 1, 0, 1]), jnp.array([1.0, 2.0, 3.0, 4.0]))
    np.testing.assert_array_equal(buffer, [3, 4])
    np.testing.assert_array_equal(old, [6, 1, 5, 2])


def test_swapping_back_in_reverse_restores_everything():
    buffer, value = rng.normal(size=(4, 2)), rng.normal(size=(5, 2))
    index = jnp.array([3, 1, 3, 0, 1])
    swapped, old = ta_swap(jnp.asarray(buffer), index, jnp.asarray(value))
    restored, again = ta_swap(swapped, index[::-1], old[::-1])
    oracle.assert_same_bits(restored, buffer)
    oracle.assert_same_bits(again[::-1], value)


def test_the_gradient_follows_each_row_to_where_it_went():
    weights, old_weights = jnp.array([10.0, 20.0, 30.0]), jnp.array([1.0, 2.0, 3.0, 4.0, 5.0])

    def f(buffer, value):
        where = jnp.array([True, True, True, False, True])
        swapped, old = ta_swap(buffer, jnp.array([1, 1, 0, 2, 9]), value, where=where, mode="drop")
        return (weights * swapped).sum() + (old_weights * old).sum()

    of_buffer, of_value = jax.grad(f, argnums=(0, 1))(jnp.zeros(3), jnp.ones(5))
    np.testing.assert_array_equal(of_buffer, [3, 1, 30])
    np.testing.assert_array_equal(of_value, [2, 20, 10, 0, 0])


@pytest.mark.parametrize("used", ["buffer", "old"])
def test_either_result_may_go_unused(used):
    weights = rng.normal(size=(3, 2))

    def f(buffer, value):
        swapped, old = ta_swap(buffer, jnp.array([2, 0, 2]), value)
        return (jnp.sin(swapped if used == "buffer" else old) * weights).sum()

    def f_oracle(buffer, value):
        swapped, old = oracle.ta_swap(buffer, [2, 0, 2], value)
        return (np.sin(swapped if used == "buffer" else old) * weights).sum()

    args = rng.normal(size=(3, 2)), rng.normal(size=(3, 2))
    found = jax.jit(jax.grad(f, argnums=(0, 1)))(*args)
    for a, e in zip(found, oracle.gradient(f_oracle, args), strict=True):
        np.testing.assert_allclose(a, e, atol=1e-8)
