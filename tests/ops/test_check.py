"""`ta_check`: an index that is not of a live row is an error, or -1.

`test_index_errors.py` has the errors that it has in common with the row ops, and `test_batching.py` its batches. The
programs of TensorArrays have its derivatives: each read and write checks its index against the size."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import ops
import oracle
import pytest
from in_place import assert_in_place
from jax import jit, lax
from waiting import finish

from jax_tensorarray import primitives, ta_read, ta_write
from jax_tensorarray._ops import reference
from jax_tensorarray._ops.check import ta_check

rng = np.random.default_rng(0)
BUFFER = rng.normal(size=(10, 2))
SIZE = np.int32(5)  # of the buffer's ten rows, five are live


def raises(index, size=SIZE, op="ta_check"):
    return ops.raises(op, index, size)


bind = primitives.ta_check_p.bind
drop = functools.partial(ta_check, mode="drop")


def masked(index, size, good):
    """The same by the kernel, which is asked for the good ones only."""
    return ta_check(index, size, where=good, mode="error")


# --- values ----------------------------------------------------------------------------------------------------


def test_an_index_of_live_rows_is_itself():
    for shape in [(), (2, 3), (0,)]:
        index = rng.integers(0, SIZE, shape)
        for f in (ta_check, jax.jit(ta_check), drop):
            oracle.assert_same_bits(f(jnp.asarray(index), SIZE), index.astype(np.int32))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", oracle.INTEGERS, ids=oracle.name_of)
def test_an_index_may_have_any_integer_dtype_and_value(dtype):
    limits = np.iinfo(dtype)
    values = {0, 1, 99, 100, 101, 127, limits.min, limits.max, limits.max // 2 + 1, min(2**32 + 1, limits.max)}
    values |= {max(-1, limits.min), max(-(2**32) + 1, limits.min), min(2**31 - 1, limits.max)}
    index = np.array(sorted(values), dtype)

    def every_way(index, size, good):
        return drop(index, size), masked(index, size, good), reference.check(index, size, batch_dims=0)

    for x64 in (True, False) if limits.bits < 64 else (True,):
        with jax.enable_x64(x64):
            jitted = jax.jit(every_way)
            for size in (-(2**31), -1, 0, 1, 100, 2**31 - 1):
                expected = oracle.ta_check(index, size)
                for f in (jitted, every_way) if size == 100 and dtype in (np.int8, np.uint64) else (jitted,):
                    for found in f(jnp.asarray(index), jnp.int32(size), expected >= 0):
                        oracle.assert_same_bits(found, expected)


@pytest.mark.parametrize("dtype", ["uint8", "uint64"])
def test_an_unsigned_index_of_a_loop_is_astray_if_there_are_no_rows(dtype):
    found = jit(lambda n, at: lax.scan(lambda _, i: (None, ta_check(i, n, mode="drop")), None, at)[1])
    for n in range(3):
        np.testing.assert_array_equal(
            found(jnp.int32(n), jnp.array([0, 1, 255], dtype)), [i if i < n else -1 for i in (0, 1, 255)]
        )


@pytest.mark.parametrize("dtype", oracle.SMALL_INTEGERS, ids=oracle.name_of)
def test_an_index_may_be_packed_below_a_byte(dtype):
    oracle.assert_same_bits(jax.jit(ta_check)(jnp.array([0, 1, 1], dtype), SIZE), np.array([0, 1, 1], np.int32))


def test_python_and_numpy_indices_are_integers_too():
    for index in [2, np.int8(2), np.uint64(2), [2, 0, 2], [[0], [1]], [], np.array([2, 1])]:
        expected = oracle.ta_check(np.asarray(index, int), SIZE)
        oracle.assert_same_bits(ta_check(index, 5), expected)
        oracle.assert_same_bits(jax.jit(lambda size, index=index: ta_check(index, size))(SIZE), expected)


@pytest.mark.parametrize("x64", [True, False])
def test_a_python_index_of_any_magnitude_is_not_wrapped_into_range(x64):
    with jax.enable_x64(x64):
        for index in [-1, 12, 2**31, 2**40, 2**63, 2**100, -(2**100)]:
            oracle.assert_same_bits(drop([1, index], SIZE), np.array([1, -1], np.int32))


@pytest.mark.parametrize("batch", [(), (3,), (2, 2), (0,)], ids=str)
def test_plain_jax_and_the_kernel_both_mean_what_numpy_does(batch):
    def every_way(index, size, good, where):
        params = {"batch_dims": len(batch), "op": "ta_check"}
        dropped = bind(index, size, mode="drop", **params), bind(index, size, where, mode="drop", **params)
        checked = bind(index, size, good, mode=None, **params)
        return reference.check(index, size, batch_dims=len(batch)), checked, *dropped

    given, wanted = [], []
    for shape in [(), (4,), (0,)]:
        index, size = rng.integers(-1, 8, (*batch, *shape)), rng.integers(0, 7, batch).astype(np.int32)
        where, expected = rng.random(index.shape) < 0.5, np.empty(index.shape, np.int32)
        for k in np.ndindex(batch):
            expected[k] = oracle.ta_check(index[k], size[k])
        given.append((index, size, expected >= 0, where))
        wanted.append((expected, expected, expected, np.where(where, expected, np.int32(-1))))
    ops.assert_same(jit(lambda given: [every_way(*one) for one in given])(given), wanted)


# --- arguments -------------------------------------------------------------------------------------------------


BAD_ARGUMENTS = [
    ((jnp.array(1.0), 3), {"op": "ta.read"}, TypeError, r"^ta\.read: index must have an integer dtype, got float"),
    ((1.0, 3), {}, TypeError, r"^ta_check: index must be an integer or an array of integers, got 1\.0"),
    ((1, 3.0), {}, TypeError, "^ta_check: size must have an integer dtype, got float"),
    ((1, jnp.int8(3)), {}, TypeError, "^ta_check: size must be int32, got int8"),
    ((1, jnp.array([3, 4])), {}, ValueError, r"^ta_check: size must be a scalar, got shape \(2,\)"),
    ((1, 3), {"mode": "clip"}, ValueError, r'^ta_check: mode must be None, "error" or "drop", got \'clip\''),
    ((1, 3), {"where": jnp.int32(1)}, TypeError, "^ta_check: where must be bool, got int32"),
    (
        ([1, 2, 0], 3),
        {"where": jnp.ones(2, bool)},
        ValueError,
        r"^ta_check: where of shape \(2,\) does not fit an .*\(3,\)",
    ),
]


def test_arguments_are_checked():
    for args, keywords, error, text in BAD_ARGUMENTS:
        with pytest.raises(error, match=text):
            ta_check(*args, **keywords)
    with pytest.raises(TypeError, match=r"^ta_check: where bool\[2\] must be bool\(3,\)"):
        bind(jnp.arange(3), jnp.int32(3), jnp.ones(2, bool), batch_dims=0, mode="drop", op="ta_check")


# --- errors ----------------------------------------------------------------------------------------------------


def test_the_error_names_the_op_that_the_user_called():
    with raises(7, op="TensorArray.read"):
        finish(ta_check(7, SIZE, op="TensorArray.read"))


@pytest.mark.parametrize("size", [SIZE, 0, -(2**31)], ids=str)
def test_a_masked_index_is_not_looked_at(size):
    """Also where there are no rows; and the first stray that counts is named, with the size that there is."""
    index = np.array([[-9, 0, 7], [3, 99, -1]])
    f = jax.jit(ta_check)
    for where in (oracle.ta_check(index, size) >= 0, np.zeros((2, 3), bool), np.array([[False], [False]])):
        oracle.assert_same_bits(f(index, np.int32(size), where=where), oracle.ta_check(index, size, where=where))
    with raises(99, size):
        finish(f(index, np.int32(size), where=index > 7))


@pytest.mark.parametrize("size", [-(2**31), 0, 6, 2**31 - 1])
def test_the_error_names_the_live_size(size):
    with raises(-3, size):
        finish(jax.jit(ta_check)(-3, np.int32(size)))


def test_the_first_stray_in_order_is_named_with_the_size_of_its_example():
    with raises(6, size=3):
        f = jax.vmap(ta_check)
        finish(f(jnp.array([[1, 6], [2, 6], [7, 7]]), jnp.array([7, 3, 5], jnp.int32)))


def test_an_index_known_while_tracing_is_an_error_at_run_time():
    f = jax.jit(lambda size: ta_check([0, 7], size))
    with raises(7):
        finish(f(SIZE))
    np.testing.assert_array_equal(f(np.int32(8)), [0, 7])


# --- derivatives of what is done with the index ----------------------------------------------------------------


def test_an_index_has_no_derivative():
    zero = np.zeros((), jax.dtypes.float0)
    value, tangent = jax.jit(lambda i, s: jax.jvp(ta_check, (i, s), (zero, zero)))(3, SIZE)
    assert value == 3
    assert tangent.dtype == jax.dtypes.float0
    gradients = jax.grad(lambda x, i: x * ta_check(i, SIZE), argnums=(0, 1), allow_int=True)(2.0, 3)
    assert gradients[0] == 3
    assert gradients[1].dtype == jax.dtypes.float0


# --- in place --------------------------------------------------------------------------------------------------


def rows_of(length):
    return (jnp.ones((length, 64), jnp.float32),)


def growing(x):
    def body(carry, k):
        b, size = carry
        row = ta_read(b, ta_check(k // 2, size))
        return (ta_write(b, size, jnp.sin(row)), size + 1), None

    (b, _), _ = lax.scan(body, (x, jnp.int32(1)), jnp.arange(len(x) - 1))
    return jnp.sum(b**2)


def reading_the_old_buffer_after_a_write(x):
    """The read that follows the write in the text is moved in front of it, and its check too."""

    def body(carry, kx):
        (b, size, total), (k, row) = carry, kx
        new = ta_write(b, k, jnp.sin(row))
        return (new, size, total + jnp.sum(ta_read(b, ta_check(k // 3, size)) ** 2)), None

    return lax.scan(body, (x, jnp.int32(len(x)), jnp.float32(0)), (jnp.arange(len(x)), x))[0][2]


def shared_between_loops(x):
    def body(total, k):
        return total + jnp.sin(ta_read(x, ta_check(k, jnp.int32(len(x))))), None

    return jnp.sum(lax.scan(body, x[0], jnp.arange(len(x)))[0])


PROGRAMS = {f.__name__: f for f in (growing, reading_the_old_buffer_after_a_write, shared_between_loops)}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_loop_that_checks_is_in_place(name):
    """Forward too, which its gradient begins with."""
    assert_in_place(jax.grad(PROGRAMS[name]), rows_of)


def test_an_index_is_no_buffer_that_a_loop_should_hold():
    """The pass keeps a constant buffer from being made anew in every step; a constant index may be."""

    def f(trips, size):
        index = jnp.full(3, 2)
        return lax.fori_loop(0, trips, lambda _, total: total + ta_check(index, size), jnp.zeros(3, jnp.int32))

    assert "jax_tensorarray_fence" not in jax.jit(f).lower(3, SIZE).as_text()
    np.testing.assert_array_equal(jax.jit(f)(3, SIZE), [6, 6, 6])
