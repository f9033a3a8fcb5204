"""`ta_stack`: the dense array of a buffer, with zeros at or past its size."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_tensorarray import ta_stack

rng = np.random.default_rng(0)


def test_without_a_size_it_is_the_buffer():
    buffer = rng.normal(size=(4, 2))
    oracle.assert_same_bits(ta_stack(jnp.asarray(buffer)), buffer)
    oracle.assert_same_bits(jax.jit(ta_stack)(jnp.asarray(buffer)), buffer)


@pytest.mark.parametrize(("rows", "elem"), [(0, (2,)), (1, ()), (4, (2, 1, 3)), (4, (0,))], ids=str)
def test_rows_at_or_past_the_size_are_zeros(rows, elem):
    buffer = rng.normal(size=(rows, *elem))
    f = jax.jit(ta_stack)
    for size in range(-1, rows + 2):
        oracle.assert_same_bits(f(jnp.asarray(buffer), size), oracle.ta_stack(buffer, size))


@pytest.mark.parametrize("dtype", oracle.INTEGERS, ids=oracle.name_of)
def test_a_size_may_have_any_integer_dtype_and_value(dtype):
    buffer = rng.normal(size=(4, 2))
    f = jax.jit(ta_stack)
    limits = np.iinfo(dtype)
    for size in {0, 1, 3, 4, 5, limits.max, limits.min, limits.max // 2 + 1}:
        oracle.assert_same_bits(f(jnp.asarray(buffer), dtype(size)), oracle.ta_stack(buffer, size))
        oracle.assert_same_bits(ta_stack(jnp.asarray(buffer), dtype(size)), oracle.ta_stack(buffer, size))


SIZES = [-(2**100), -(2**40), 2**31, 2**32, 2**40, 2**63, 2**100, np.int64(2**40), np.int64(2**32 + 2)]
SIZES += [np.uint64(2**63), np.int64(-(2**40)), np.array(2**40)]


@pytest.mark.parametrize("x64", [True, False])
def test_a_python_or_numpy_size_may_be_of_any_magnitude(x64):
    buffer = rng.normal(size=(4, 2)).astype(np.float32)
    with jax.enable_x64(x64):
        for size in SIZES:
            oracle.assert_same_bits(ta_stack(jnp.asarray(buffer), size), oracle.ta_stack(buffer, size))


def test_masked_nans_become_zeros_and_so_do_their_tangents():
    buffer = jnp.array([1.0, np.nan, np.inf])
    value, tangent = jax.jvp(lambda b: ta_stack(b, jnp.array(1)), (buffer,), (buffer,))
    np.testing.assert_array_equal(value, [1, 0, 0])
    np.testing.assert_array_equal(tangent, [1, 0, 0])
