"""What the ops accept, and what they say about everything else."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_tensorarray import ta_add, ta_empty, ta_max, ta_read, ta_stack, ta_swap, ta_write

VALUED = [ta_write, ta_add, ta_max, ta_swap]
ROW_OPS = [ta_read, *VALUED]


def name(op):
    return op.__name__


def call(op, buffer, index, value=0, **options):
    """The buffer that comes out, or the rows of a read."""
    results = op(buffer, index, **options) if op is ta_read else op(buffer, index, value, **options)
    return results[0] if op is ta_swap else results


# --- index -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "index",
    [
        1.0,
        np.float32(1),
        np.array([1.0]),
        jnp.array(1.0),
        [1.0, 2.0],
        1j,
        True,
        np.True_,
        jnp.array(True),
        [True, False],
        np.zeros(0, np.float32),
        jnp.zeros(0),
        np.zeros(0, bool),
        np.zeros((2, 0)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("op", ROW_OPS, ids=name)
def test_an_index_that_is_not_an_integer_is_a_type_error(op, index):
    with pytest.raises(TypeError, match=f"^{name(op)}: index must "):
        call(op, jnp.zeros(3), index)


@pytest.mark.parametrize(
    "index", [None, "1", [1, None], [[1], [1, 2]], object()], ids=["None", "str", "with None", "ragged", "object"]
)
@pytest.mark.parametrize("op", ROW_OPS, ids=name)
def test_an_index_that_is_not_a_number_is_a_type_error(op, index):
    with pytest.raises(TypeError, match=f"^{name(op)}: index must "):
        call(op, jnp.zeros(3), index)


@pytest.mark.parametrize("op", ROW_OPS)
def test_a_list_of_traced_indices_is_an_index(op):
    b = jnp.arange(8.0).reshape(4, 2)
    got = jax.jit(lambda i: call(op, b, [i, 2]))(0)
    for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(call(op, b, [0, 2])), strict=True):
        np.testing.assert_array_equal(g, e)


@pytest.mark.parametrize("op", VALUED)
def test_a_list_of_values_is_a_type_error_that_says_what_to_do(op):
    with pytest.raises(TypeError, match=rf"{op.__name__}: value must be an array .* jnp.asarray"):
        op(jnp.zeros(4), [0, 1], [1.0, 2.0])


def test_a_random_key_is_no_index():
    with pytest.raises(TypeError, match=r"^ta_read: index must have an integer dtype, got key"):
        ta_read(jnp.zeros(3), jax.random.key(0))


# --- where -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [1, 0, 1.0, np.array([1, 0]), jnp.ones(2, jnp.int8), [1.0, 0.0]], ids=repr)
@pytest.mark.parametrize("op", ROW_OPS, ids=name)
def test_where_that_is_not_bool_is_a_type_error(op, where):
    with pytest.raises(TypeError, match=f"^{name(op)}: where must be bool, got (int|float)"):
        call(op, jnp.zeros(3), jnp.array([0, 1]), where=where)


@pytest.mark.parametrize("shape", [(3,), (2, 1), (1, 2), (0,)], ids=str)
@pytest.mark.parametrize("op", ROW_OPS, ids=name)
def test_where_that_does_not_fit_the_index_is_a_value_error_with_both_shapes(op, shape):
    text = f"^{name(op)}: where of shape {re.escape(str(shape))} does not fit an index of shape {re.escape('(2,)')}$"
    with pytest.raises(ValueError, match=text):
        call(op, jnp.zeros((3, 4)), jnp.array([0, 1]), where=jnp.zeros(shape, bool))


def test_where_of_a_scalar_index_is_a_scalar():
    with pytest.raises(ValueError, match=re.escape("ta_read: where of shape (1,) does not fit an index of shape ()")):
        ta_read(jnp.zeros(3), 1, where=[True])


# --- value -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("buffer", "value"),
    [
        (np.float32, np.float64),
        (np.float16, np.float32),
        (np.float16, ml_dtypes.bfloat16),
        (ml_dtypes.bfloat16, np.float16),
        (np.int32, np.float32),
        (np.int32, np.int64),
        (np.int8, np.uint8),
        (np.uint8, np.int8),
        (np.uint32, np.int32),
        (np.bool_, np.int8),
        (np.float64, np.complex64),
        (np.complex64, np.complex128),
        (ml_dtypes.float8_e4m3fn, np.float32),
        (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
        (ml_dtypes.int4, np.int8),
        (np.float64, ml_dtypes.float8_e4m3fn),
    ],
    ids=lambda d: np.dtype(d).name,
)
@pytest.mark.parametrize("op", VALUED, ids=name)
def test_a_value_that_would_lose_something_is_a_type_error_that_names_both_dtypes(op, buffer, value):
    text = f"^{name(op)}: a value of dtype {np.dtype(value).name} .* dtype {np.dtype(buffer).name} .*astype"
    with pytest.raises(TypeError, match=text):
        call(op, jnp.zeros(3, buffer), 1, jnp.ones((), value))
    with pytest.raises(TypeError, match=text):
        call(op, jnp.zeros(3, buffer), 1, np.ones((), value))


@pytest.mark.parametrize(
    ("buffer", "value"), [(np.int32, 1.0), (np.bool_, 1), (np.float32, 1j), (np.bool_, 0.5)], ids=repr
)
@pytest.mark.parametrize("op", VALUED, ids=name)
def test_a_python_number_that_would_lose_something_is_a_type_error(op, buffer, value):
    with pytest.raises(
        TypeError, match=f"^{name(op)}: a value of dtype {type(value).__name__}.* {np.dtype(buffer).name}"
    ):
        call(op, jnp.zeros(3, buffer), 1, value)


@pytest.mark.parametrize(
    ("buffer", "value"),
    [
        (np.float32, 7),
        (np.float32, 7.0),
        (np.float32, True),
        (np.float16, np.int32(7)),
        (np.float32, np.float16(7)),
        (np.float32, ml_dtypes.bfloat16(7)),
        (np.float64, np.float32(7)),
        (np.int32, 7),
        (np.int32, np.int8(7)),
        (np.int16, np.uint8(7)),
        (np.int8, True),
        (np.bool_, True),
        (np.complex64, 7.0),
        (np.complex64, np.float32(7)),
        (np.complex128, 7j),
        (ml_dtypes.float8_e4m3fn, 7.0),
        (ml_dtypes.bfloat16, 7),
        (ml_dtypes.int4, 7),
    ],
    ids=lambda x: np.dtype(x).name if isinstance(x, type) else repr(x),
)
@pytest.mark.parametrize("op", [op for op in VALUED if op is not ta_max], ids=name)  # which takes no complex numbers
def test_a_value_is_promoted_where_that_loses_nothing(op, buffer, value):
    out = call(op, jnp.zeros(3, buffer), 1, value)
    assert out.dtype == buffer
    np.testing.assert_array_equal(out, np.array([0, value, 0]).astype(buffer))


@pytest.mark.parametrize(("dtype", "value"), [(jnp.int8, 300), (jnp.uint8, -1), (jnp.int32, 2**40)])
@pytest.mark.parametrize("op", VALUED, ids=name)
def test_a_python_integer_that_the_dtype_cannot_hold_is_an_error(op, dtype, value):
    with pytest.raises(OverflowError, match=str(value)):
        call(op, jnp.zeros(3, dtype), 1, value)


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=lambda d: np.dtype(d).name)
def test_strict_promotion_is_respected(dtype):
    with jax.numpy_dtype_promotion("strict"):
        with pytest.raises(TypeError, match=f"^ta_write: a value of dtype int32 .* dtype {np.dtype(dtype).name} "):
            ta_write(jnp.zeros(3, dtype), 1, jnp.int32(1))
        np.testing.assert_array_equal(ta_write(jnp.zeros(3, dtype), 1, 1), [0, 1, 0])


@pytest.mark.parametrize(
    ("index", "shape"),
    [
        ((), (3,)),
        ((), (1, 2)),
        ((), (0,)),
        ((4,), (3, 2)),
        ((4,), (4, 3)),
        ((4,), (4,)),
        ((4,), (1, 4, 2)),
        ((0,), (3, 2)),
    ],
)
@pytest.mark.parametrize("op", VALUED, ids=name)
def test_a_value_that_does_not_fit_is_a_value_error_with_both_shapes(op, index, shape):
    rows = (*index, 2)
    text = f"^{name(op)}: value of shape {re.escape(str(shape))} does not fit rows of shape {re.escape(str(rows))}$"
    with pytest.raises(ValueError, match=text):
        call(op, jnp.zeros((5, 2)), jnp.zeros(index, int), jnp.zeros(shape))


@pytest.mark.parametrize("op", VALUED, ids=name)
def test_a_random_key_is_no_value(op):
    with pytest.raises(TypeError, match=f"^{name(op)}: a value of dtype key"):
        call(op, jnp.zeros(3), 1, jax.random.key(0))


@pytest.mark.parametrize("op", VALUED, ids=name)
@pytest.mark.parametrize("value", ["text", None, object()], ids=["str", "None", "object"])
def test_a_value_that_is_not_a_number_is_an_error(op, value):
    with pytest.raises((TypeError, ValueError)):
        call(op, jnp.zeros(3), 1, value)


# --- buffer and mode -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer", [1.0, 3, np.float32(1), jnp.array(1.0)], ids=repr)
@pytest.mark.parametrize("op", [*ROW_OPS, ta_stack], ids=name)
def test_a_scalar_is_no_buffer(op, buffer):
    with pytest.raises(ValueError, match=rf"^{name(op)}: buffer must have shape \[T, \*elem\], got a scalar"):
        ta_stack(buffer) if op is ta_stack else call(op, buffer, 0)


@pytest.mark.parametrize("op", [*ROW_OPS, ta_stack], ids=name)
def test_random_keys_are_no_buffer_and_the_error_says_what_to_do(op):
    keys = jax.random.split(jax.random.key(0), 3)
    with pytest.raises(TypeError, match=rf"^{name(op)}: .*key.*jax\.random\.key_data"):
        ta_stack(keys) if op is ta_stack else call(op, keys, 0)


@pytest.mark.parametrize("mode", ["clip", "fill", "", True, 1, "Error"], ids=repr)
@pytest.mark.parametrize("op", ROW_OPS, ids=name)
def test_an_unknown_mode_is_a_value_error(op, mode):
    with pytest.raises(
        ValueError, match=f'^{name(op)}: mode must be None, "error" or "drop", got {re.escape(repr(mode))}$'
    ):
        call(op, jnp.zeros(3), 0, mode=mode)


@pytest.mark.parametrize("op", ROW_OPS, ids=name)
def test_options_are_given_by_name(op):
    arguments = (jnp.zeros(3), 0) if op is ta_read else (jnp.zeros(3), 0, 1.0)
    with pytest.raises(TypeError, match="positional argument"):
        op(*arguments, True)


@pytest.mark.parametrize("op", VALUED, ids=name)
def test_a_weakly_typed_buffer_comes_out_with_its_dtype(op):
    buffer = jnp.full((3,), 2.0)  # weakly typed
    out = call(op, buffer, 1, np.float64(5))
    assert (out.dtype, out.weak_type) == (np.float64, False)

    # So that it can be the carry of a loop.
    carried = jax.lax.fori_loop(0, 3, lambda k, b: call(op, b, k, 1.0), jnp.zeros(3))
    np.testing.assert_array_equal(carried, [1, 1, 1])


# --- sizes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1.0, True, jnp.array(1.0), np.float32(1), np.True_], ids=repr)
def test_a_size_of_live_rows_that_is_not_an_integer_is_a_type_error(size):
    with pytest.raises(TypeError, match=r"^ta_stack: size must have an integer dtype, got (float|bool)"):
        ta_stack(jnp.zeros(3), size)


@pytest.mark.parametrize("size", [[1], np.array([1, 2]), jnp.array([[1]])], ids=repr)
def test_a_size_of_live_rows_that_is_not_a_scalar_is_a_value_error(size):
    with pytest.raises(ValueError, match=r"^ta_stack: size must be a scalar, got shape \("):
        ta_stack(jnp.zeros(3), size)


@pytest.mark.parametrize(
    ("size", "elem"),
    [
        (1.0, ()),
        (True, ()),
        (None, ()),
        (3, 2.0),
        (3, (2, 1.5)),
        (3, "ab"),
        (3, None),
        (3, (True,)),
        (np.array([1, 2]), ()),
    ],
)
def test_sizes_of_a_new_buffer_that_are_not_integers_are_type_errors(size, elem):
    with pytest.raises(TypeError, match=r"^ta_empty: sizes must be Python integers, known while tracing; got "):
        ta_empty(size, elem)


def test_sizes_of_a_new_buffer_are_not_traced():
    with pytest.raises(TypeError, match=r"^ta_empty: sizes must be Python integers, known while tracing; got "):
        jax.jit(ta_empty)(3)


@pytest.mark.parametrize(("size", "elem"), [(-1, ()), (3, -2), (3, (2, -1))])
def test_negative_sizes_of_a_new_buffer_are_value_errors(size, elem):
    with pytest.raises(ValueError, match=r"^ta_empty: sizes must not be negative, got -"):
        ta_empty(size, elem)


def test_a_dtype_that_does_not_exist_is_a_type_error():
    with pytest.raises(TypeError, match="nonsense"):
        ta_empty(3, dtype="nonsense")
