"""`ta_swap`: values, shapes, duplicates, masks, strays and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_tensorarray import ta_swap

rng = np.random.default_rng(0)


def assert_swaps(buffer, index, value, **options):
    """The library and the oracle exchange the same rows."""
    found = ta_swap(jnp.asarray(buffer), jnp.asarray(index), jnp.asarray(value), **options)
    for a, e in zip(found, oracle.ta_swap(buffer, index, value, where=options.get("where")), strict=True):
        oracle.assert_same_bits(a, e)


@pytest.mark.parametrize("elem", [(), (3,), (2, 1, 3), (0,), (2, 0)], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (0,), (2, 0), (1, 2, 1)], ids=str)
def test_rows_are_exchanged_where_the_index_says(shape, elem):
    assert_swaps(rng.normal(size=(4, *elem)), rng.integers(0, 4, shape), rng.normal(size=shape + elem))


@pytest.mark.parametrize("rank", range(1, 9))
def test_buffers_of_rank_up_to_eight(rank):
    buffer = rng.normal(size=(3, 2, 1, 2, 1, 2, 1, 2)[:rank])
    assert_swaps(buffer, np.array([[2, 0], [2, 2]]), rng.normal(size=(2, 2, *buffer.shape[1:])))


@pytest.mark.parametrize("index", [2, np.int8(2), np.uint64(2), [2, 0, 2], [[0], [1]], [], np.array([2, 1])], ids=repr)
def test_python_and_numpy_indices_are_integers_too(index):
    buffer = rng.normal(size=(3, 2))
    found = ta_swap(jnp.asarray(buffer), index, 7.0)
    for a, e in zip(found, oracle.ta_swap(buffer, np.asarray(index, int), 7.0), strict=True):
        oracle.assert_same_bits(a, e)


@pytest.mark.parametrize("shape", [(), (2,), (3, 1), (1, 3, 2), (4, 3, 2), (4, 1, 1)], ids=str)
def test_the_value_is_broadcast_to_the_rows(shape):
    assert_swaps(rng.normal(size=(5, 2)), rng.integers(0, 5, (4, 3)), rng.normal(size=shape))


def test_a_later_duplicate_takes_out_what_an_earlier_one_put_in():
    buffer, old = ta_swap(jnp.array([5.0, 6.0]), jnp.array([1, 1, 0, 1]), jnp.array([1.0, 2.0, 3.0, 4.0]))
    np.testing.assert_array_equal(buffer, [3, 4])
    np.testing.assert_array_equal(old, [6, 1, 5, 2])


@pytest.mark.parametrize("where", [True, False, [True, False, True], [[True], [False]]], ids=repr)
def test_where_is_broadcast_to_the_index(where):
    assert_swaps(rng.normal(size=(4, 2)), np.array([[0, 1, 2], [3, 3, 3]]), rng.normal(size=(2, 3, 2)), where=where)


def test_strays_that_are_dropped_leave_the_buffer_alone_and_give_zeros():
    buffer, old = ta_swap(jnp.array([5.0, 6.0]), jnp.array([-1, 2, 1, -(2**40), 2**40]), 7.0, mode="drop")
    np.testing.assert_array_equal(buffer, [5, 7])
    np.testing.assert_array_equal(old, [0, 0, 6, 0, 0])


def test_a_buffer_without_rows_has_none_to_exchange():
    for index, options in [
        (jnp.zeros(0, int), {}),
        (jnp.array([0, 1]), {"mode": "drop"}),
        (jnp.array([0, 1]), {"where": jnp.array(False)}),
    ]:
        buffer, old = ta_swap(jnp.zeros((0, 2)), index, 1.0, **options)
        assert buffer.shape == (0, 2)
        np.testing.assert_array_equal(old, np.zeros((*index.shape, 2)))


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


def test_the_old_buffer_is_still_there_after_a_swap():
    @jax.jit
    def f(buffer):
        swapped, old = ta_swap(buffer, jnp.array(0), 5.0)
        return swapped, buffer, old

    swapped, buffer, old = f(jnp.ones(3))
    np.testing.assert_array_equal(swapped, [5, 1, 1])
    np.testing.assert_array_equal(buffer, [1, 1, 1])
    np.testing.assert_array_equal(old, 1)
