"""`ta_write`: values, shapes, duplicates, masks, strays and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_tensorarray import ta_write

rng = np.random.default_rng(0)


@pytest.mark.parametrize("elem", [(), (3,), (2, 1, 3), (0,), (2, 0)], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (0,), (2, 0), (1, 2, 1)], ids=str)
def test_rows_are_written_where_the_index_says(shape, elem):
    buffer, index, value = rng.normal(size=(4, *elem)), rng.integers(0, 4, shape), rng.normal(size=shape + elem)
    written = ta_write(jnp.asarray(buffer), jnp.asarray(index), jnp.asarray(value))
    oracle.assert_same_bits(written, oracle.ta_write(buffer, index, value))


@pytest.mark.parametrize("rank", range(1, 9))
def test_buffers_of_rank_up_to_eight(rank):
    buffer = rng.normal(size=(3, 2, 1, 2, 1, 2, 1, 2)[:rank])
    index = np.array([[2, 0], [2, 2]])
    value = rng.normal(size=index.shape + buffer.shape[1:])
    written = ta_write(jnp.asarray(buffer), jnp.asarray(index), jnp.asarray(value))
    oracle.assert_same_bits(written, oracle.ta_write(buffer, index, value))


@pytest.mark.parametrize("index", [2, np.int8(2), np.uint64(2), [2, 0, 2], [[0], [1]], [], np.array([2, 1])], ids=repr)
def test_python_and_numpy_indices_are_integers_too(index):
    buffer = rng.normal(size=(3, 2))
    written = ta_write(jnp.asarray(buffer), index, 7.0)
    oracle.assert_same_bits(written, oracle.ta_write(buffer, np.asarray(index, int), 7.0))


@pytest.mark.parametrize("shape", [(), (1,), (2,), (3, 1), (1, 2), (3, 2), (1, 3, 2), (4, 3, 2), (4, 1, 1)], ids=str)
def test_the_value_is_broadcast_to_the_rows(shape):
    buffer, index, value = rng.normal(size=(5, 2)), rng.integers(0, 5, (4, 3)), rng.normal(size=shape)
    written = ta_write(jnp.asarray(buffer), jnp.asarray(index), jnp.asarray(value))
    oracle.assert_same_bits(written, oracle.ta_write(buffer, index, value))


def test_the_last_of_duplicate_writes_stays():
    written = ta_write(jnp.zeros(3), jnp.array([1, 1, 2, 1]), jnp.array([1.0, 2.0, 3.0, 4.0]))
    np.testing.assert_array_equal(written, [0, 4, 3])


def test_the_last_of_duplicate_writes_that_where_admits_stays():
    where = jnp.array([True, True, True, False])
    written = ta_write(jnp.zeros(3), jnp.array([1, 1, 2, 1]), jnp.array([1.0, 2.0, 3.0, 4.0]), where=where)
    np.testing.assert_array_equal(written, [0, 2, 3])


@pytest.mark.parametrize("where", [True, False, [True, False, True], [[True], [False]]], ids=repr)
def test_where_is_broadcast_to_the_index(where):
    buffer, index, value = rng.normal(size=(4, 2)), np.array([[0, 1, 2], [3, 3, 3]]), rng.normal(size=(2, 3, 2))
    written = ta_write(jnp.asarray(buffer), jnp.asarray(index), jnp.asarray(value), where=where)
    oracle.assert_same_bits(written, oracle.ta_write(buffer, index, value, where=where))


def test_strays_that_are_dropped_leave_the_buffer_alone():
    buffer, index = rng.normal(size=(3, 2)), np.array([-1, 3, 1, -(2**40), 2**40])
    written = ta_write(jnp.asarray(buffer), jnp.asarray(index), 7.0, mode="drop")
    np.testing.assert_array_equal(written, [buffer[0], [7, 7], buffer[2]])


def test_a_buffer_without_rows_takes_no_row():
    buffer = jnp.zeros((0, 2))
    assert ta_write(buffer, jnp.zeros(0, int), 1.0).shape == (0, 2)
    assert ta_write(buffer, jnp.array([0, 1]), 1.0, mode="drop").shape == (0, 2)
    assert ta_write(buffer, jnp.array(0), 1.0, where=jnp.array(False)).shape == (0, 2)


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


def test_a_value_that_was_broadcast_gets_the_sum_of_its_gradients():
    weights = jnp.array([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])
    gradient = jax.grad(lambda v: (weights * ta_write(jnp.zeros((3, 2)), jnp.array([0, 2]), v)).sum())
    np.testing.assert_array_equal(gradient(jnp.ones(())), 303)
    np.testing.assert_array_equal(gradient(jnp.ones(2)), [101, 202])
    np.testing.assert_array_equal(gradient(jnp.ones((2, 1))), [[3], [300]])


def test_the_old_buffer_is_still_there_after_a_write():
    @jax.jit
    def f(buffer):
        written = ta_write(buffer, jnp.array(0), 5.0)
        return written, buffer, ta_write(buffer, jnp.array(2), 6.0)

    first, buffer, second = f(jnp.zeros(3))
    np.testing.assert_array_equal([first, buffer, second], [[5, 0, 0], [0, 0, 0], [0, 0, 6]])
