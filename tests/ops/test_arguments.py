"""What the ops accept, and what they say about everything else."""

import fnmatch
import inspect
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from ops import OPS, OURS, ROW_OPS, UPDATES, every

from jax_tensorarray import TensorArray, ta_empty, ta_read, ta_stack, ta_swap, ta_write


def call(op, buffer, index, value=0, **options):
    """The first result of an op."""
    return op(OURS, *(buffer, index, value)[: len(op.operands) - 1], mode=None, **options)[0]


KEYS = jax.random.split(jax.random.key(0), 3)
FOR_KEYS = (
    "jax.random.key_data converts random keys to numbers, and jax.random.wrap_key_data converts numbers to random keys"
)
BY_TREE = "for a tree of arrays call {op} for each of them, by jax.tree.map, or use TensorArray.like"


def function():
    """What somebody may have forgotten to call."""


# Of each argument: what no op takes for it, and all that is said after the name of the op.
REFUSED = {
    "buffer": [
        *[(x, TypeError, "must be an array of shape [T, *elem], got *") for x in ["text", b"x", None, object(), int]],
        (function, TypeError, "must be an array of shape [T, *elem], got <function func*"),
        ([[1], [1, 2]], TypeError, "must be an array of shape [T, *elem], got [[1], [1, 2]]"),
        (np.array(["a"]), TypeError, "must be an array of shape [T, *elem], got dtype <U1"),
        (jax.ShapeDtypeStruct((3,), float), TypeError, "must be an array of shape [T, *elem], got ShapeDtype*"),
        ({"a": jnp.zeros(3)}, TypeError, f"must be an array of shape [T, *elem], got {{'a': *; {BY_TREE}"),
        (TensorArray(int, 3, element_shape=()), TypeError, "must be *; a TensorArray is read and written by its own *"),
        *[(x, ValueError, "must have shape [T, *elem], got a scalar of dtype *") for x in [1.0, 3, jnp.array(1)]],
    ],
    "index": [
        *[(x, TypeError, "must be an integer or an array of integers, got *") for x in ["1", None, object(), 1.0, int]],
        *[(x, TypeError, f"must be an integer or an array of integers, got {x}") for x in [[1.0], [1, None], slice(2)]],
        ([[1], [1, 2]], TypeError, "must be an integer or an array of integers, got [[1], [1, 2]]"),
        ({"a": 1}, TypeError, f"must be an integer or an array of integers, got {{'a': 1}}; {BY_TREE}"),
        ((), TypeError, "must be an integer, an array of integers or a tuple of these, got ()"),
        *[
            (x, IndexError, "has 2 parts, more than there are axes in a buffer of shape (3,)")
            for x in [(1, 2), ([0, 1], [0, 1])]
        ],
        ([True, 2], TypeError, "must be an integer or an array of integers, got [True, 2]; a mask is given by where"),
        *[
            (x, TypeError, "must have an integer dtype, got bool; a mask is given by where")
            for x in [True, np.True_, jnp.array(True), np.zeros(3, bool)]
        ],
        *[(x, TypeError, "must have an integer dtype, got float32") for x in [np.float32(1), jnp.zeros(0, "f4")]],
        *[(x, TypeError, "must have an integer dtype, got float64") for x in [np.zeros((2, 0)), jnp.array(1.0)]],
        (1j, TypeError, "must have an integer dtype, got complex128"),
        (KEYS[0], TypeError, "must have an integer dtype, got key<fry>"),
    ],
    "value": [
        *[(x, TypeError, "must be an array or a number, got *") for x in ["text", None, object(), jnp.float32]],
        *[(x, TypeError, f"must be an array or a number, got {x}; convert it with jnp.asarray") for x in [[1.0], (1,)]],
        ({"a": 1}, TypeError, f"must be an array or a number, got {{'a': 1}}; {BY_TREE}"),
    ],
    "where": [
        *[(x, TypeError, "must be bool, got int*") for x in [1, 0, np.array([1, 0]), jnp.ones(2, jnp.int8), [True, 2]]],
        *[(x, TypeError, "must be bool, got float64") for x in [1.0, [1.0, 0.0]]],
        *[(x, TypeError, "must be bool or an array of bools, got *") for x in ["text", object(), {"a": True}, 2**70]],
        (KEYS[0], TypeError, "must be bool, got key<fry>"),
    ],
    "axis": [
        *[(x, TypeError, "must be an integer that is known while tracing, got *") for x in [None, 1.0, True, (0,)]],
        *[(x, ValueError, f"{x} is out of range for a buffer of shape (3,)") for x in [1, -2, 2**70]],
    ],
    "length": [
        *[(x, TypeError, "must be an integer that is known while tracing, got *") for x in [1.0, True, jnp.array(1)]],
        *[(x, ValueError, f"{x} is not in [0, 3], the size of axis 0") for x in [4, -1]],
    ],
    "mode": [
        (x, ValueError, f'must be None, "error" or "drop", got {x!r}')
        for x in ["clip", "", True, 1, "Error", np.zeros(2)]
    ],
    "lowering": [(x, ValueError, f'must be "auto", "ffi" or "xla", got {x!r}') for x in ["", None, np.zeros(2)]],
    "size": [
        *[(x, TypeError, "must be an integer, got *") for x in ["text", object(), function]],
        *[(x, TypeError, "must have an integer dtype, got float64") for x in [1.0, jnp.array(1.0)]],
        *[(x, TypeError, "must have an integer dtype, got bool") for x in [True, np.True_]],
        *[(x, ValueError, "must be a scalar, got shape (*)") for x in [[1], np.array([1, 2]), jnp.array([[1]])]],
    ],
}


def called(op, **given):
    """That call, with a good value for every argument that is not given."""
    good = {"buffer": jnp.zeros(3), "index": jnp.array([0, 1]), "value": 1.0, "size": 2}
    names = [p for p in inspect.signature(op).parameters if p in good]
    return op(**{p: good[p] for p in names} | given)


@pytest.mark.slow(but=4)
@every([*ROW_OPS, OPS["ta_stack"]])
def test_a_wrong_argument_is_an_error_that_says_what_is_allowed(op):
    op = getattr(OURS, op.name)
    for argument in REFUSED.keys() & inspect.signature(op).parameters.keys():
        for given, kind, text in REFUSED[argument]:
            with pytest.raises(kind) as error:
                called(op, **{argument: given})
            expected = f"{op.__name__}: {argument} {text.replace('{op}', op.__name__)}"
            assert fnmatch.fnmatchcase(str(error.value), expected.replace("[", "[[]")), (str(error.value), expected)


@every([op for op in ROW_OPS if op.name in ("ta_add", "ta_max")])
def test_random_keys_are_not_added_or_compared(op):
    text = re.escape(f"{op}: buffer must hold numbers or bools, got dtype key<fry>; random keys can only be read, ")
    with pytest.raises(TypeError, match=f"^{text}.*{re.escape(FOR_KEYS)}"):
        call(op, KEYS, 1, KEYS[0])


@pytest.mark.parametrize(
    ("buffer", "value"),
    [(KEYS, 1.0), (KEYS, jax.random.PRNGKey(0)), (KEYS, jax.random.key(0, impl="rbg")), (jnp.zeros(3), KEYS[0])],
)
def test_keys_and_numbers_are_not_mixed_in_a_buffer(buffer, value):
    for op in (ta_write, ta_swap):
        with pytest.raises(TypeError, match=f"^{op.__name__}: a value of dtype .* in a buffer of dtype .*{FOR_KEYS}$"):
            op(buffer, 1, value)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TypeError("mine"), ValueError("mine"), RuntimeError("mine")])
@pytest.mark.parametrize("method", ["__jax_array__", "__array__"])
def test_an_error_or_an_interrupt_in_a_conversion_reaches_the_caller(method, error):
    def convert(*_, **__):
        raise error

    x = type("Convertible", (), {method: convert})()
    ta = TensorArray(jnp.float32, 3, element_shape=())
    calls = [lambda a=argument: called(ta_swap, **{a: x}) for argument in ("buffer", "index", "value", "where")]
    calls += [
        lambda: called(ta_stack, size=x),
        lambda: ta.write(0, x),
        lambda: ta.scatter([0], x),
        lambda: ta.unstack(x),
    ]
    for run in calls:
        with pytest.raises(type(error)) as caught:
            run()
        assert caught.value is error


# --- index -----------------------------------------------------------------------------------------------------


@pytest.mark.slow(but=1)
@every(ROW_OPS)
def test_a_list_of_traced_indices_is_an_index(op):
    b = jnp.arange(8.0).reshape(4, 2)
    got = jax.jit(lambda i: call(op, b, [i, 2]))(0)
    for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(call(op, b, [0, 2])), strict=True):
        np.testing.assert_array_equal(g, e)


# --- where -----------------------------------------------------------------------------------------------------


@every(ROW_OPS)
def test_where_of_another_shape_is_a_value_error_with_both_shapes(op):
    for shape in [(3,), (2, 1), (1, 2), (0,)]:
        text = f"^{op}: where of shape {re.escape(str(shape))} does not fit an index of shape {re.escape('(2,)')}$"
        with pytest.raises(ValueError, match=text):
            call(op, jnp.zeros((3, 4)), jnp.array([0, 1]), where=jnp.zeros(shape, bool))


def test_where_of_a_scalar_index_is_a_scalar():
    with pytest.raises(ValueError, match=re.escape("ta_read: where of shape (1,) does not fit an index of shape ()")):
        ta_read(jnp.zeros(3), 1, where=[True])


# --- value -----------------------------------------------------------------------------------------------------


#: dtype of a buffer: dtypes of values that it cannot hold
LOSSES = {
    "float32": ["float64"],
    "float16": ["float32", "bfloat16"],
    "bfloat16": ["float16"],
    "int32": ["float32", "int64"],
    "int8": ["uint8"],
    "uint8": ["int8"],
    "uint32": ["int32"],
    "bool": ["int8"],
    "float64": ["complex64", "float8_e4m3fn"],
    "complex64": ["complex128"],
    "float8_e4m3fn": ["float32", "float8_e5m2"],
    "int4": ["int8"],
}


@every(UPDATES)
def test_a_lossy_value_is_a_type_error_that_names_both_dtypes(op):
    for dtype, values in LOSSES.items():
        for value in values:
            text = f"^{op}: a value of dtype {value} .* dtype {dtype} .*astype"
            for number in (jnp.ones((), value), np.ones((), jnp.dtype(value))):
                with pytest.raises(TypeError, match=text):
                    call(op, jnp.zeros(3, dtype), 1, number)
    for dtype, number in (("int32", 1.0), ("bool", 1), ("float32", 1j), ("bool", 0.5)):
        with pytest.raises(TypeError, match=f"^{op}: a value of dtype {type(number).__name__}.* {dtype}"):
            call(op, jnp.zeros(3, dtype), 1, number)


#: dtype of a buffer: values that it holds
PROMOTED = {
    "float32": [7, 7.0, True, np.float16(7), ml_dtypes.bfloat16(7)],
    "float16": [np.int32(7)],
    "float64": [np.float32(7)],
    "int32": [7, np.int8(7)],
    "int16": [np.uint8(7)],
    "int8": [True],
    "bool": [True],
    "complex64": [7.0, np.float32(7)],
    "complex128": [7j],
    "float8_e4m3fn": [7.0],
    "bfloat16": [7],
    "int4": [7],
}


@pytest.mark.slow
@every(UPDATES)
def test_a_value_is_promoted_where_that_loses_nothing(op):
    for dtype, values in PROMOTED.items():
        for value in values if op.is_linear or "complex" not in dtype else ():
            out = call(op, jnp.zeros(3, dtype), 1, value)
            assert out.dtype == dtype
            np.testing.assert_array_equal(out, np.array([0, value, 0]).astype(jnp.dtype(dtype)))


@pytest.mark.parametrize(("dtype", "value"), [(jnp.int8, 300), (jnp.uint8, -1), (jnp.int32, 2**40), (jnp.int8, 2**70)])
@every(UPDATES)
def test_a_python_integer_that_the_dtype_cannot_hold_is_an_error(op, dtype, value):
    with pytest.raises(OverflowError, match=f"^{op}: value {value} does not fit into {jnp.dtype(dtype).name}, "):
        call(op, jnp.zeros(3, dtype), 1, value)


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=lambda d: np.dtype(d).name)
def test_strict_promotion_is_respected(dtype):
    with jax.numpy_dtype_promotion("strict"):
        with pytest.raises(TypeError, match=f"^ta_write: a value of dtype int32 .* dtype {np.dtype(dtype).name} "):
            ta_write(jnp.zeros(3, dtype), 1, jnp.int32(1))
        np.testing.assert_array_equal(ta_write(jnp.zeros(3, dtype), 1, 1), [0, 1, 0])


#: An index of no or four positions, and shapes that do not fit rows of shape (2,) there.
MISFITS = {
    (): [(3,), (1, 2), (0,)],
    (4,): [(3, 2), (4, 3), (4,), (1, 4, 2)],
    (0,): [(3, 2)],
}


@every(UPDATES)
def test_a_value_that_does_not_fit_is_a_value_error_with_both_shapes(op):
    for index, shapes in MISFITS.items():
        for shape in shapes:
            given, rows = (re.escape(str(x)) for x in (shape, (*index, 2)))
            with pytest.raises(ValueError, match=f"^{op}: value of shape {given} does not fit rows of shape {rows}$"):
                call(op, jnp.zeros((5, 2)), jnp.zeros(index, int), jnp.zeros(shape))


@every(ROW_OPS)
def test_options_are_given_by_name(op):
    arguments = (jnp.zeros(3), 0, 1.0)[: len(op.operands) - 1]
    with pytest.raises(TypeError, match="positional argument"):
        getattr(OURS, op.name)(*arguments, True)


@pytest.mark.slow(but=1)
@every(UPDATES)
def test_a_weakly_typed_buffer_comes_out_with_its_dtype(op):
    buffer = jnp.full((3,), 2.0)  # weakly typed
    out = call(op, buffer, 1, np.float64(5))
    assert (out.dtype, out.weak_type) == (np.float64, False)

    # So that it can be the carry of a loop.
    carried = jax.lax.fori_loop(0, 3, lambda k, b: call(op, b, k, 1.0), jnp.zeros(3))
    np.testing.assert_array_equal(carried, [1, 1, 1])


# --- sizes -----------------------------------------------------------------------------------------------------


BAD_SIZES = [(1.0, ()), (True, ()), (None, ()), (3, 2.0), (3, (2, 1.5)), (3, "ab"), (3, b"ab"), (3, None), (3, (True,))]


def test_sizes_of_a_new_buffer_are_integers_that_are_known_while_tracing():
    text = r"^ta_empty: sizes must be Python integers, known while tracing; got "
    for size, elem in [*BAD_SIZES, (np.array([1, 2]), ())]:
        with pytest.raises(TypeError, match=text):
            ta_empty(size, elem)
    with pytest.raises(TypeError, match=text):
        jax.jit(ta_empty)(3)
    for size, elem in [(-1, ()), (3, -2), (3, (2, -1))]:
        with pytest.raises(ValueError, match=r"^ta_empty: sizes must not be negative, got -"):
            ta_empty(size, elem)
    with pytest.raises(ValueError, match=r"^ta_empty: sizes must be less than 2\*\*63, got 1180591620717411303424$"):
        ta_empty(3, 2**70)


def test_a_dtype_that_is_none_of_numbers_is_a_type_error():
    for dtype in ["nonsense", "U1", object(), {"a": 1}, [1], np.zeros(1)]:
        with pytest.raises(TypeError, match=r"^ta_empty: dtype must be a number type or bool, got "):
            ta_empty(3, dtype=dtype)
    with pytest.raises(
        TypeError, match=r"^ta_empty: dtype must be the dtype of an array, .* jax.random.key\(0\).dtype$"
    ):
        ta_empty(3, dtype=jax.dtypes.prng_key)
