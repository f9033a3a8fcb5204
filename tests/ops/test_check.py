"""`ta_check`: an index that is not of a live row is an error, or -1.

`test_index_errors.py` has the errors that it has in common with the row ops, and `test_starts.py` its values and
batches. The programs of TensorArrays have its derivatives: each read and write checks its index against the size."""

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
from jax_tensorarray._ops.check import ta_check

rng = np.random.default_rng(0)
BUFFER = rng.normal(size=(10, 2))
SIZE = np.int32(5)  # of the buffer's ten rows, five are live


def raises(index, size=SIZE, op="ta_check"):
    return ops.raises(op, index, size)


# --- values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint8", "uint64"])
def test_an_unsigned_index_of_a_loop_is_astray_if_there_are_no_rows(dtype):
    found = jit(lambda n, at: lax.scan(lambda _, i: (None, ta_check(i, n, mode="drop")), None, at)[1])
    for n in range(3):
        np.testing.assert_array_equal(
            found(jnp.int32(n), jnp.array([0, 1, 255], dtype)), [i if i < n else -1 for i in (0, 1, 255)]
        )


@pytest.mark.parametrize("x64", [True, False])
def test_a_python_index_of_any_magnitude_is_not_wrapped_into_range(x64):
    with jax.enable_x64(x64):
        for index in [-1, 12, 2**31, 2**40, 2**63, 2**100, -(2**100)]:
            oracle.assert_same_bits(ta_check([1, index], SIZE, mode="drop"), np.array([1, -1], np.int32))


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
        primitives.ta_check_p.bind(
            jnp.arange(3), jnp.int32(3), jnp.ones(2, bool), batch_dims=0, mode="drop", op="ta_check"
        )


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


def test_the_first_stray_in_order_is_named_with_the_size_of_its_example():
    with raises(6, size=3):
        f = jax.vmap(ta_check)
        finish(f(jnp.array([[1, 6], [2, 6], [7, 7]]), jnp.array([7, 3, 5], jnp.int32)))


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


def reading_the_old_buffer_after_a_write(x):
    """The read that follows the write in the text is moved in front of it, and its check too."""

    def body(carry, kx):
        (b, size, total), (k, row) = carry, kx
        new = ta_write(b, k, jnp.sin(row))
        return (new, size, total + jnp.sum(ta_read(b, ta_check(k // 3, size)) ** 2)), None

    return lax.scan(body, (x, jnp.int32(len(x)), jnp.float32(0)), (jnp.arange(len(x)), x))[0][2]


def test_a_loop_that_checks_is_in_place():
    """Forward too, which its gradient begins with."""
    assert_in_place(jax.grad(reading_the_old_buffer_after_a_write), rows_of)


def test_an_index_is_no_buffer_that_a_loop_should_hold():
    """The pass keeps a constant buffer from being made anew in every step; a constant index may be."""

    def f(trips, size):
        index = jnp.full(3, 2)
        return lax.fori_loop(0, trips, lambda _, total: total + ta_check(index, size), jnp.zeros(3, jnp.int32))

    assert "jax_tensorarray_fence" not in jax.jit(f).lower(3, SIZE).as_text()
    np.testing.assert_array_equal(jax.jit(f)(3, SIZE), [6, 6, 6])
