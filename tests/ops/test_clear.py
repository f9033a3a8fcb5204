"""`ta_clear`: zeros in a range of rows, in place, at no cost where there are none.

`test_transforms.py` and `test_batching.py` have its derivatives and its batches."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from in_place import assert_in_place, assert_no_whole_buffer_copy, compiled
from jax import lax
from ops import OPS, loop

from jax_tensorarray import ta_read, ta_write
from jax_tensorarray._ops import reference
from jax_tensorarray._ops.clear import ta_clear

rng = np.random.default_rng(0)
SIZE, ELEM = 5, (2,)
BUFFER = rng.normal(size=(SIZE, *ELEM))
DTYPES = [d for d in oracle.DTYPES if np.dtype(d) != ml_dtypes.float8_e8m0fnu]  # which has no zero


# --- values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "elem"), [(0, (2,)), (1, ()), (4, (2, 1, 3)), (4, (0,))], ids=str)
def test_rows_from_start_to_stop_are_zeros(rows, elem):
    buffer = rng.normal(size=(rows, *elem))
    f = jax.jit(ta_clear)
    for start, stop in itertools.product(range(-2, rows + 3), repeat=2):
        expected = oracle.ta_clear(buffer, start, stop)
        oracle.assert_same_bits(f(jnp.asarray(buffer), start, stop), expected)
        oracle.assert_same_bits(ta_clear(jnp.asarray(buffer), start, jnp.array(stop)), expected)


def test_buffers_of_rank_up_to_eight():
    for rank in range(1, 9):
        buffer = rng.normal(size=(3, 2, 1, 2, 1, 2, 1, 2)[:rank])
        oracle.assert_same_bits(ta_clear(jnp.asarray(buffer), jnp.array(1), 2), oracle.ta_clear(buffer, 1, 2))


def values_of(dtype):
    """Both ends of the range of an integer dtype, its middle, and what is around the ends of the buffer."""
    limits = np.iinfo(dtype)
    return sorted({0, 1, 3, SIZE - 1, SIZE, SIZE + 1, limits.max, limits.min, limits.max // 2 + 1})


@pytest.mark.slow
@pytest.mark.parametrize("start_dtype", oracle.INTEGERS, ids=oracle.name_of)
def test_start_and_stop_may_each_have_any_integer_dtype_and_value(start_dtype):
    """With and without jit of one dtype, and of two."""
    f = jax.jit(lambda *args: (ta_clear(*args), reference.clear(*args, batch_dims=0)))
    next_dtype = oracle.INTEGERS[(oracle.INTEGERS.index(start_dtype) + 3) % 8]
    for stop_dtype in (start_dtype, next_dtype):
        for start, stop in itertools.product(values_of(start_dtype), values_of(stop_dtype)):
            expected = oracle.ta_clear(BUFFER, start, stop)
            args = jnp.asarray(BUFFER), jnp.asarray(start, start_dtype), stop_dtype(stop)
            for found in (*f(*args), ta_clear(*args)):
                oracle.assert_same_bits(found, expected)


ANY = [-(2**100), -(2**40), -1, 2, 2**31, 2**32 + 2, 2**63, 2**100, np.int64(2**40), np.uint64(2**63)]


@pytest.mark.parametrize("x64", [True, False])
def test_a_python_or_numpy_bound_may_be_of_any_magnitude(x64):
    buffer = BUFFER.astype(np.float32)
    with jax.enable_x64(x64):
        for at in (*ANY, np.array(-(2**40))):
            oracle.assert_same_bits(ta_clear(jnp.asarray(buffer), at, 4), oracle.ta_clear(buffer, at, 4))
            oracle.assert_same_bits(ta_clear(jnp.asarray(buffer), 1, at), oracle.ta_clear(buffer, 1, at))


@pytest.mark.parametrize("dtype", [np.uint32, np.int32, np.uint8], ids=oracle.name_of)
def test_plain_jax_does_not_wrap_a_bound_without_64_bits(dtype):
    with jax.enable_x64(False):
        buffer = BUFFER.astype(np.float32)
        jitted = jax.jit(functools.partial(reference.clear, batch_dims=0))
        for start, stop in itertools.product(values_of(dtype), repeat=2):
            found = jitted(jnp.asarray(buffer), jnp.asarray(dtype(start)), dtype(stop))
            oracle.assert_same_bits(found, oracle.ta_clear(buffer, start, stop))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=oracle.name_of)
def test_other_rows_are_left_bit_for_bit(dtype):
    buffer = oracle.random_bits(rng, (5, 3), dtype)
    f = jax.jit(ta_clear)
    for start, stop in [(1, 3), (0, 9), (3, 3), (4, 1)]:
        oracle.assert_same_bits(f(jnp.asarray(buffer), start, stop), oracle.ta_clear(buffer, start, stop))
    # Dtypes that are packed below a byte have plain JAX, and all others a kernel.
    text = f.lower(jnp.zeros((4, 3), dtype), 1, 2).as_text()
    assert ("@jax_tensorarray_clear" in text) == (dtype not in oracle.PACKED)


def test_cleared_nans_become_zeros_and_so_do_their_tangents():
    buffer = jnp.array([1.0, np.nan, np.inf])
    value, tangent = jax.jvp(lambda b: ta_clear(b, 1, 3), (buffer,), (buffer,))
    np.testing.assert_array_equal(value, [1, 0, 0])
    np.testing.assert_array_equal(tangent, [1, 0, 0])


@pytest.mark.parametrize("name", ["start", "stop"])
def test_a_bound_is_an_integer_scalar(name):
    bounds = {"start": 0, "stop": 1}
    with pytest.raises(TypeError, match=f"^ta_clear: {name} must have an integer dtype, got float"):
        ta_clear(BUFFER, **(bounds | {name: 1.0}))
    with pytest.raises(ValueError, match=rf"^ta_clear: {name} must be a scalar, got shape \(2,\)"):
        ta_clear(BUFFER, **(bounds | {name: jnp.array([1, 2])}))


# --- batches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [(None, 0, 0), (2, None, 0), (1, 0, None)], ids=str)
def test_a_batch_in_plain_jax_is_a_loop_over_its_examples(axes):
    """A dtype that is packed below a byte has no kernel."""
    buffer = rng.integers(1, 7, (3, 4, 2)).astype(ml_dtypes.int4)
    args = np.moveaxis(buffer, 0, axes[0] or 0), np.array([1, -3, 4]), np.array([2, 3, 9])
    args = [x[0] if a is None else x for x, a in zip(args, axes, strict=True)]
    (expected,) = loop(functools.partial(OPS["ta_clear"], oracle), axes)(*args)
    oracle.assert_same_bits(jax.jit(jax.vmap(ta_clear, axes))(*args), expected)
    out = jax.vmap(ta_clear, axes, out_axes=1)(*map(jnp.asarray, args))
    oracle.assert_same_bits(np.moveaxis(np.asarray(out), 1, 0), expected)


# --- in place --------------------------------------------------------------------------------------------------


def rows_of(length, dtype=jnp.float32):
    return (jnp.ones((length, 64), dtype),)


def appending(x):
    """Each step writes a row some way past the live ones, and clears the gap; mostly there is none."""

    def body(carry, k):
        b, size = carry
        index = jnp.minimum(size + (k % 7 == 0), len(x) - 1)
        b = ta_write(ta_clear(b, size, index), index, jnp.sin(ta_read(b, k // 2)))
        return (b, jnp.maximum(size, index + 1)), None

    return jnp.sum(lax.scan(body, (x, jnp.int32(0)), jnp.arange(len(x)))[0][0] ** 2)


def clearing_nothing(x):
    def body(b, k):
        b = ta_clear(b, k, k - len(x))
        return ta_write(b, k, 2 * ta_read(b, (k * 7) % len(x))), None

    return jnp.sum(lax.scan(body, x, jnp.arange(len(x)))[0] ** 2)


def read_beside_clear(x):
    def body(carry, k):
        b, total = carry
        seen = ta_read(b, (k * 7) % len(x))
        cleared = ta_clear(b, k, k + 1)
        return (cleared, total + jnp.sum(jnp.sin(seen) * ta_read(b, k))), None

    return lax.scan(body, (x, jnp.zeros((), x.dtype)), jnp.arange(len(x)))[0][1]


def clear_in_cond(x):
    def body(b, k):
        b = lax.cond(k % 3 == 0, lambda b: ta_clear(b, k - 1, k), lambda b: ta_write(b, k, jnp.cos(ta_read(b, k))), b)
        return b, None

    return jnp.sum(lax.scan(body, x, jnp.arange(len(x)))[0] ** 2)


PROGRAMS = {f.__name__: f for f in (appending, clearing_nothing, read_beside_clear, clear_in_cond)}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_loop_that_clears_is_in_place(name):
    """Forward too, which its gradient begins with."""
    assert_in_place(jax.grad(PROGRAMS[name]), rows_of)


@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_clearing_nothing_costs_nothing_in_plain_jax_either(batch):
    """A dtype that is packed below a byte has no kernel."""

    def f(x):
        ends = jnp.zeros(batch, int)
        body = functools.partial(reference.clear, batch_dims=len(batch))
        return lax.fori_loop(0, x.shape[len(batch)], lambda k, b: body(b, ends + k, ends + k + (k % 5 == 0)), x)

    def args_of(length):
        return (jnp.ones((*batch, length, 64), jnp.int8),)

    assert_no_whole_buffer_copy(compiled(f, *args_of(2000)), args_of(2000)[0])
