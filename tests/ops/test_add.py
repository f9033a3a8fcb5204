"""`ta_add`: values, shapes, duplicates, masks, strays and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_tensorarray import ta_add

rng = np.random.default_rng(0)


@pytest.mark.parametrize("elem", [(), (3,), (2, 1, 3), (0,), (2, 0)], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (0,), (2, 0), (1, 2, 1)], ids=str)
def test_rows_are_added_where_the_index_says(shape, elem):
    buffer, index, value = rng.normal(size=(4, *elem)), rng.integers(0, 4, shape), rng.normal(size=shape + elem)
    added = ta_add(jnp.asarray(buffer), jnp.asarray(index), jnp.asarray(value))
    oracle.assert_same_bits(added, oracle.ta_add(buffer, index, value))


@pytest.mark.parametrize("rank", range(1, 9))
def test_buffers_of_rank_up_to_eight(rank):
    buffer = rng.normal(size=(3, 2, 1, 2, 1, 2, 1, 2)[:rank])
    index = np.array([[2, 0], [2, 2]])
    value = rng.normal(size=index.shape + buffer.shape[1:])
    added = ta_add(jnp.asarray(buffer), jnp.asarray(index), jnp.asarray(value))
    oracle.assert_same_bits(added, oracle.ta_add(buffer, index, value))


@pytest.mark.parametrize("index", [2, np.int8(2), np.uint64(2), [2, 0, 2], [[0], [1]], [], np.array([2, 1])], ids=repr)
def test_python_and_numpy_indices_are_integers_too(index):
    buffer = rng.normal(size=(3, 2))
    added = ta_add(jnp.asarray(buffer), index, 7.0)
    oracle.assert_same_bits(added, oracle.ta_add(buffer, np.asarray(index, int), 7.0))


@pytest.mark.parametrize("shape", [(), (2,), (3, 1), (1, 3, 2), (4, 3, 2), (4, 1, 1)], ids=str)
def test_the_value_is_broadcast_to_the_rows(shape):
    buffer, index, value = rng.normal(size=(5, 2)), rng.integers(0, 5, (4, 3)), rng.normal(size=shape)
    added = ta_add(jnp.asarray(buffer), jnp.asarray(index), jnp.asarray(value))
    oracle.assert_same_bits(added, oracle.ta_add(buffer, index, value))


def test_duplicates_are_added_in_order():
    # In float32, only one order gives one: the first sum swallows what the second would keep.
    big = 2.0**25
    added = ta_add(jnp.zeros(2, jnp.float32), jnp.array([1, 1, 1]), jnp.array([big, -big, 1.0], jnp.float32))
    np.testing.assert_array_equal(added, [0, 1])
    added = ta_add(jnp.zeros(2, jnp.float32), jnp.array([1, 1, 1]), jnp.array([big, 1.0, -big], jnp.float32))
    np.testing.assert_array_equal(added, [0, 0])


@pytest.mark.parametrize("where", [True, False, [True, False, True], [[True], [False]]], ids=repr)
def test_where_is_broadcast_to_the_index(where):
    buffer, index, value = rng.normal(size=(4, 2)), np.array([[0, 1, 2], [3, 3, 3]]), rng.normal(size=(2, 3, 2))
    added = ta_add(jnp.asarray(buffer), jnp.asarray(index), jnp.asarray(value), where=where)
    oracle.assert_same_bits(added, oracle.ta_add(buffer, index, value, where=where))


def test_strays_that_are_dropped_leave_the_buffer_alone():
    buffer, index = np.arange(6.0).reshape(3, 2), np.array([-1, 3, 1, -(2**40), 2**40])
    added = ta_add(jnp.asarray(buffer), jnp.asarray(index), 7.0, mode="drop")
    np.testing.assert_array_equal(added, [[0, 1], [9, 10], [4, 5]])


def test_a_buffer_without_rows_takes_no_row():
    buffer = jnp.zeros((0, 2))
    assert ta_add(buffer, jnp.zeros(0, int), 1.0).shape == (0, 2)
    assert ta_add(buffer, jnp.array([0, 1]), 1.0, mode="drop").shape == (0, 2)
    assert ta_add(buffer, jnp.array(0), 1.0, where=jnp.array(False)).shape == (0, 2)


def test_every_duplicate_gets_the_gradient_of_its_row_and_the_buffer_keeps_its_own():
    weights = jnp.array([10.0, 20.0, 30.0])

    def f(buffer, value):
        where = jnp.array([True, True, True, False, True])
        return (weights * ta_add(buffer, jnp.array([1, 2, 1, 1, 9]), value, where=where, mode="drop")).sum()

    of_buffer, of_value = jax.grad(f, argnums=(0, 1))(jnp.zeros(3), jnp.ones(5))
    np.testing.assert_array_equal(of_buffer, weights)
    np.testing.assert_array_equal(of_value, [20, 30, 20, 0, 0])


def test_a_value_that_was_broadcast_gets_the_sum_of_its_gradients():
    weights = jnp.array([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])
    gradient = jax.grad(lambda v: (weights * ta_add(jnp.zeros((3, 2)), jnp.array([0, 2]), v)).sum())
    np.testing.assert_array_equal(gradient(jnp.ones(())), 303)
    np.testing.assert_array_equal(gradient(jnp.ones(2)), [101, 202])


def test_the_old_buffer_is_still_there_after_an_add():
    @jax.jit
    def f(buffer):
        return ta_add(buffer, jnp.array(0), 5.0), buffer, ta_add(buffer, jnp.array(2), 6.0)

    np.testing.assert_array_equal(f(jnp.ones(3)), [[6, 1, 1], [1, 1, 1], [1, 1, 7]])
