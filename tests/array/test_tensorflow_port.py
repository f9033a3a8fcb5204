"""TensorFlow's own tests of its TensorArray, in JAX: the same programs, the same numbers.

The numbers are those of tensorflow/python/kernel_tests/data_structures/tensor_array_ops_test.py (commit 0ea9033), and
where a docstring says so of tensorflow/compiler/tests/{tensor_array_ops,cond}_test.py, of
tensorflow/python/eager/polymorphic_function/polymorphic_function_xla_jit_test.py and of
tensorflow/python/kernel_tests/control_flow/control_flow_ops_py_test.py. The docstring of a test names its original.
A port changes three things: a TensorArray carried by a loop states its `element_shape`, one that grows inside a
transformation states its `max_size`, and `tf.gradients` becomes `jax.vjp`. A while loop whose gradient is taken becomes
a `lax.fori_loop` or a `lax.scan`.

No counterpart: strings, which JAX arrays cannot hold (WritePack, WriteConcat, UnpackRead and SplitRead of
`tf.string`); `ta.grad(source)` and its gradient TensorArrays, which TensorFlow 2 has dropped too (TensorGradArray*,
TensorGradAccessTwice*, GradWithShape*ElementShape; their sums of gradients are here); the names of gradient sources
(GetGradSource_*); handles, flows and reads as another dtype (raw ops); sessions, step containers
(ConcatFailsWhenMissingStepContainer) and name scopes; devices and colocation (GetsDeviceFromFirstWrite*,
DisabledColocateWithFirstWriteCall); the errors of `clear_after_read` and of writing a row twice (ReadTwice and
WriteMultipleFails of TensorFlow 1; here as in TensorFlow 2 both are allowed); placeholders of unknown shape
(WriteUnknownShape, GatherShape of unknown indices), for JAX knows every shape; a `cond` whose branches give rows of
different shapes (WriteConcatInParallel, here with Python's `if`); benchmarks.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from waiting import finish

from jax_tensorarray import TensorArray

DTYPES = [np.float32, np.float64, np.int32, np.int64, np.complex64, np.complex128, np.bool_]
FLOATS_AND_COMPLEX = [np.float32, np.float64, np.complex64, np.complex128]

#: JAX raises the former from the first call of a compiled function, and the latter from its fast path.
RUNTIME_ERRORS = (jax.errors.JaxRuntimeError, ValueError)


@pytest.fixture(params=["eager", "jit"])
def mode(request):
    return request.param


def run(mode, f, *args):
    return jax.jit(f)(*args) if mode == "jit" else f(*args)


def constant(x, dtype=np.float32):
    return jnp.asarray(x, dtype)


def converter(dtype):
    """TensorFlow's numbers in another dtype: complex ones get an imaginary part, and as bool the odd ones are True."""

    def convert(x):
        x = np.asarray(x)
        if dtype == np.bool_:
            return jnp.asarray(x % 2 == 1)
        x = x.astype(dtype)
        return jnp.asarray(x - np.asarray(1j, dtype) * x if np.iscomplexobj(x) else x)

    return convert


def gradients(mode, f, xs, grad_ys):
    """`tf.gradients(f(*xs), xs, grad_ys)`."""
    return run(mode, lambda xs, grad_ys: jax.vjp(f, *xs)[1](grad_ys), xs, grad_ys)


def assert_equal(actual, expected):
    """The same shape and values."""
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected, actual.dtype), strict=True)


def assert_all_equal(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert_equal(a, e)


def growing(mode, max_size, dtype=np.float32, **options):
    """A TensorArray that grows from nothing: eagerly as far as it has to, under jit as far as it may."""
    return TensorArray(dtype, size=0, dynamic_size=True, max_size=max_size if mode == "jit" else None, **options)


def read_all(ta, indices):
    return [ta.read(i) for i in indices]


by_dtype = functools.partial(pytest.mark.parametrize, "dtype", ids=lambda dtype: np.dtype(dtype).name)


# --- write and read --------------------------------------------------------------------------------------------


def test_rows_of_different_shapes_are_read_as_they_were_written(mode):
    """WriteRead."""

    def f(x0, x1, x2):
        ta = TensorArray(np.float32, tensor_array_name="foo", size=3, infer_shape=False)
        w0 = ta.write(0, x0)
        w1 = w0.write(1, x1)
        w2 = w1.write(2, x2)
        return read_all(w2, range(3))

    expected = ([[4.0, 5.0]], [[1.0]], -3.0)
    assert_all_equal(run(mode, f, *map(constant, expected)), expected)


def test_lists_and_python_scalars_are_rows(mode):
    """WriteRead: the values as its source writes them."""

    def f():
        ta = TensorArray(np.float32, tensor_array_name="foo", size=3, infer_shape=False)
        return read_all(ta.write(0, [[4.0, 5.0]]).write(1, [[1.0]]).write(2, -3.0), range(3))

    found = run(mode, f)
    assert_all_equal(found, ([[4.0, 5.0]], [[1.0]], -3.0))
    assert [x.dtype for x in found] == [np.float32] * 3


def test_rows_of_one_shape_are_read_as_they_were_written(mode):
    """WriteRead of the XLA tests."""

    def f(index):
        ta = TensorArray(np.float32, tensor_array_name="foo", size=3)
        w2 = ta.write(index[0], [[4.0, 5.0]]).write(index[1], [[1.0, 3.0]]).write(index[2], [[7.0, -8.5]])
        return [w2.read(index[i]) for i in range(3)]

    assert_all_equal(run(mode, f, jnp.arange(3)), ([[4.0, 5.0]], [[1.0, 3.0]], [[7.0, -8.5]]))


def test_two_tensorarrays_of_one_function_are_two(mode):
    """MultiTensorArray."""

    def f(x, y):
        r1 = TensorArray(size=1, dtype=np.float32, tensor_array_name="foo").write(0, x).read(0)
        r2 = TensorArray(size=1, dtype=np.float32, tensor_array_name="bar").write(0, y).read(0)
        return r1 + r2

    assert_equal(run(mode, f, constant(4.0), constant(5.0)), 9.0)


def test_every_write_leaves_the_tensorarray_before_it_alone(mode):
    """WriteRead, with the TensorArray of each step kept."""

    def f():
        ta = TensorArray(np.float32, size=3, element_shape=[1, 2])
        w0 = ta.write(0, [[4.0, 5.0]])
        w1 = w0.write(0, [[1.0, 3.0]])
        return ta.read(0), w0.read(0), w1.read(0), w0.read(0)

    assert_all_equal(run(mode, f), ([[0.0, 0.0]], [[4.0, 5.0]], [[1.0, 3.0]], [[4.0, 5.0]]))


@pytest.mark.parametrize("clear_after_read", [None, True, False])
def test_a_row_can_be_read_twice(mode, clear_after_read):
    """ReadTwice, as in TensorFlow 2: clear_after_read clears nothing."""

    def f(value):
        ta = TensorArray(np.float32, tensor_array_name="foo", size=2, clear_after_read=clear_after_read)
        w = ta.unstack(value)
        return w.read(0), w.read(0)

    assert_all_equal(run(mode, f, constant([[1.0, -1.0], [10.0, -10.0]])), [[1.0, -1.0]] * 2)


def test_the_second_write_of_a_row_stays(mode):
    """WriteMultipleFails, which does not fail in TensorFlow 2; the writes of WriteGradientAddMultipleAdds."""

    def f(first, second):
        ta = TensorArray(np.float32, tensor_array_name="foo", size=3)
        return ta.write(2, first).write(2, second).stack()

    assert_equal(run(mode, f, 3.0, 3.0), [0.0, 0.0, 3.0])
    assert_equal(run(mode, f, 3.0, 4.0), [0.0, 0.0, 4.0])


def test_a_value_of_another_dtype_is_no_row(mode):
    """WriteWrongIndexOrDataTypeFails, here and of the XLA tests."""
    ta = TensorArray(np.float32, tensor_array_name="foo", size=3, infer_shape=False)
    with pytest.raises(TypeError, match="float32"):
        run(mode, lambda: ta.write(0, "wrong_type_scalar").stack())
    with pytest.raises(TypeError, match="TensorArray dtype is float32 but Op is trying to write dtype int32"):
        run(mode, lambda x: ta.write(0, x).stack(), constant(7, np.int32))


def test_an_index_out_of_range_is_not_written(mode):
    """WriteWrongIndexOrDataTypeFails."""
    ta = TensorArray(np.float32, tensor_array_name="foo", size=3, infer_shape=False)
    with pytest.raises(IndexError, match="index -1"):
        run(mode, lambda: ta.write(-1, 3.0).stack())
    with pytest.raises(IndexError, match="Tried to write to index 3 but array is not resizeable and size is: 3"):
        run(mode, lambda: ta.write(3, 3.0).stack())


def test_an_index_out_of_range_is_not_read(mode):
    """ReadWrongIndexOrDataTypeFails."""

    def f(index):
        ta = TensorArray(np.float32, tensor_array_name="foo", size=3, infer_shape=False)
        return ta.write(0, [[4.0, 5.0]]).read(index)

    with pytest.raises(IndexError, match="index -1"):
        run(mode, lambda: f(-1))
    with pytest.raises(IndexError, match="Tried to read from index 3 but array size is: 3"):
        run(mode, lambda: f(3))


@pytest.mark.parametrize("index", [-1, 3])
@pytest.mark.parametrize("op", ["read", "write"])
def test_an_index_known_only_when_the_program_runs_is_checked_then(op, index):
    """WriteWrongIndexOrDataTypeFails and ReadWrongIndexOrDataTypeFails with an index that is an argument."""

    @jax.jit
    def f(index):
        ta = TensorArray(np.float32, size=3).write(0, [[4.0, 5.0]])
        return ta.read(index) if op == "read" else ta.write(index, [[3.0, 3.0]]).stack()

    message = f"TensorArray.{op}: index {index} is out of range for a TensorArray of size 3"
    with pytest.raises(RUNTIME_ERRORS, match=message):
        finish(f(index))


# --- stack, gather, concat -------------------------------------------------------------------------------------


@by_dtype([*DTYPES, jnp.bfloat16])
def test_stack_puts_the_rows_on_one_another(mode, dtype):
    """WritePack."""
    convert = converter(dtype)

    def f(x0, x1, x2):
        ta = TensorArray(dtype, tensor_array_name="foo", size=3)
        return ta.write(0, x0).write(1, x1).write(2, x2).stack()

    rows = [convert([[4.0, 5.0]]), convert([[6.0, 7.0]]), convert([[8.0, 9.0]])]
    found = run(mode, f, *rows)
    assert_equal(found, convert([[[4.0, 5.0]], [[6.0, 7.0]], [[8.0, 9.0]]]))
    assert found.dtype == dtype


def test_rows_without_elements_are_stacked_too(mode):
    """EmptyTensorArrayPack."""

    def f(empty):
        ta = TensorArray(np.float32, tensor_array_name="foo", size=3)
        return ta.write(0, empty).write(1, empty).write(2, empty).stack()

    assert run(mode, f, constant(np.zeros((0, 1)))).shape == (3, 0, 1)


def test_unwritten_rows_of_a_known_shape_are_zeros(mode):
    """ReadOrPackNotAllValuesAvailableFillsZeros."""

    def f(x):
        ta = TensorArray(np.float32, tensor_array_name="foo", size=3, element_shape=[1, 2])
        return ta.read(0), ta.write(1, x).stack(), ta.write(1, x).concat()

    read, stack, concat = run(mode, f, constant([[4.0, 5.0]]))
    assert_equal(read, [[0.0, 0.0]])
    assert_equal(stack, [[[0.0, 0.0]], [[4.0, 5.0]], [[0.0, 0.0]]])
    assert_equal(concat, [[0.0, 0.0], [4.0, 5.0], [0.0, 0.0]])


def test_unwritten_rows_of_an_inferred_shape_are_zeros(mode):
    """ReadOrPackNotAllValuesAvailableInferShapeFillsZeros, ReadUninitializedInferShapeFillsZeros."""

    def f(x):
        w = TensorArray(np.float32, tensor_array_name="foo", size=3).write(1, x)
        return w.read(0), w.stack(), w.concat()

    read, stack, concat = run(mode, f, constant([[4.0, 5.0]]))
    assert_equal(read, [[0.0, 0.0]])
    assert_equal(stack, [[[0.0, 0.0]], [[4.0, 5.0]], [[0.0, 0.0]]])
    assert_equal(concat, [[0.0, 0.0], [4.0, 5.0], [0.0, 0.0]])


@by_dtype(DTYPES)
def test_concat_joins_rows_of_different_lengths(mode, dtype):
    """WriteConcat."""
    convert = converter(dtype)

    def f(x0, x1, x2):
        ta = TensorArray(dtype, tensor_array_name="foo", size=3, infer_shape=False)
        return ta.write(0, x0).write(1, x1).write(2, x2).concat()

    rows = [[[4.0, 5.0], [104.0, 105.0], [204.0, 205.0]], [[6.0, 7.0], [106.0, 107.0]], [[8.0, 9.0]]]
    found = run(mode, f, *map(convert, rows))
    expected = [[4.0, 5.0], [104.0, 105.0], [204.0, 205.0], [6.0, 7.0], [106.0, 107.0], [8.0, 9.0]]
    assert_equal(found, convert(expected))
    assert found.dtype == dtype


@by_dtype(DTYPES)
def test_concat_joins_rows_of_one_length(mode, dtype):
    """WriteConcat of the XLA tests."""
    convert = converter(dtype)

    def f(x0, x1, x2):
        ta = TensorArray(dtype, tensor_array_name="foo", size=3)
        return ta.write(0, x0).write(1, x1).write(2, x2).concat()

    rows = [[[4.0, 5.0], [104.0, 105.0]], [[6.0, 7.0], [106.0, 107.0]], [[8.0, 9.0], [204.0, 205.0]]]
    expected = [[4.0, 5.0], [104.0, 105.0], [6.0, 7.0], [106.0, 107.0], [8.0, 9.0], [204.0, 205.0]]
    assert_equal(run(mode, f, *map(convert, rows)), convert(expected))


def test_a_concat_of_concats_keeps_the_order(mode):
    """WriteConcatInParallel, with Python's `for` and `if` for `tf.while_loop` and `tf.cond`."""

    def concat_of(values):
        ta = TensorArray(np.int32, size=len(values), infer_shape=False)
        for i, value in enumerate(values):
            ta = ta.write(i, value)
        return ta.concat()

    def f(one, eight, none, nine):
        output = TensorArray(np.int32, size=6, infer_shape=False)
        for i in range(6):
            output = output.write(i, concat_of([one, none] if i < 3 else [eight, none, nine]))
        return output.concat()

    found = run(mode, f, *(constant(x, np.int32) for x in ([1], [8], [], [9])))
    assert_equal(found, [1, 1, 1, 8, 9, 8, 9, 8, 9])


def test_a_concat_of_scalars_is_an_error(mode):
    """ConcatIncompatibleShapesFails."""
    ta = TensorArray(np.float32, tensor_array_name="foo", size=3, infer_shape=False)
    with pytest.raises(ValueError, match="Concat saw a scalar shape at index 0 but requires at least vectors"):
        run(mode, lambda: ta.write(0, 3.0).write(1, 4.0).write(2, [3.0]).concat())


def test_a_concat_of_rows_of_different_ranks_is_an_error(mode):
    """ConcatIncompatibleShapesFails."""
    ta = TensorArray(np.float32, tensor_array_name="foo", size=3, infer_shape=False)
    with pytest.raises(ValueError, match=r"shape|rank"):
        run(mode, lambda: ta.write(0, [3.0]).write(1, [4.0]).write(2, [[3.0]]).concat())


def test_one_written_row_gives_stack_read_and_gather_their_shapes(mode):
    """StackShape, ReadShape, GatherShape."""

    def f(x, indices):
        ta = TensorArray(np.float32, size=3).write(0, x)
        assert ta.stack().shape == (3, 3)
        assert ta.read(0).shape == (3,)
        assert ta.gather(indices).shape == (1, 3)
        return ta.stack(), ta.read(0), ta.gather(indices)

    stack, read, gather = run(mode, f, constant([1.0, 2.0, 3.0]), constant([0], np.int32))
    assert_equal(stack, [[1.0, 2.0, 3.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert_equal(read, [1.0, 2.0, 3.0])
    assert_equal(gather, [[1.0, 2.0, 3.0]])


def test_stack_has_as_many_rows_as_the_size_says(mode):
    """StackShapeOnStaticSize."""
    assert run(mode, lambda: TensorArray(np.float32, size=42).write(0, [0]).stack()).shape == (42, 1)


def test_no_rows_of_a_known_shape_are_stacked(mode):
    """StackShapeOnEmpty."""
    f = lambda: TensorArray(np.float32, size=0, element_shape=(5, 10), dynamic_size=True).stack()  # noqa: E731
    assert run(mode, f).shape == (0, 5, 10)


def test_no_rows_of_an_unknown_shape_cannot_be_stacked(mode):
    """EvalEmpty."""
    ta = TensorArray(np.float32, size=0, dynamic_size=False, infer_shape=False)
    with pytest.raises(ValueError, match="element_shape"):
        run(mode, ta.stack)


def test_rows_of_a_partly_known_shape_cannot_be_stacked_before_one_is_written(mode):
    """StackOnPartiallyDefinedShape: JAX has no array of shape (None, 5, None)."""
    ta = TensorArray(np.float32, size=0, element_shape=(5, None), dynamic_size=True)
    with pytest.raises(ValueError, match="element_shape"):
        run(mode, ta.stack)


# --- unstack, split, scatter -----------------------------------------------------------------------------------


@by_dtype([*DTYPES, jnp.bfloat16])
@pytest.mark.parametrize(
    "value",
    [[1.0, 2.0, 3.0], [[1.0, 1.1], [2.0, 2.1], [3.0, 3.1]], [[], [], []]],
    ids=["vector", "matrix", "empty_matrix"],
)
@pytest.mark.parametrize("infer_shape", [True, False])
def test_unstack_makes_rows_of_an_array(mode, dtype, value, infer_shape):
    """UnpackRead; with infer_shape=True as in the XLA tests."""
    convert = converter(dtype)

    def f(x):
        ta = TensorArray(dtype, tensor_array_name="foo", size=3, infer_shape=infer_shape)
        return read_all(ta.unstack(x), range(3))

    found = run(mode, f, convert(value))
    assert_all_equal(found, [convert(row) for row in value])
    assert [x.dtype for x in found] == [dtype] * 3


def test_a_tensorarray_can_be_unstacked_into_again_with_another_shape(mode):
    """UnpackRead, of which every part uses the same TensorArray."""
    ta = TensorArray(np.float32, tensor_array_name="foo", size=3, infer_shape=False)

    def f(*xs):
        return [ta.unstack(x).read(1) for x in xs]

    values = [1.0, 2.0, 3.0], [[1.0, 1.1], [2.0, 2.1], [3.0, 3.1]], [[], [], []]
    assert_all_equal(run(mode, f, *map(constant, values)), (2.0, [2.0, 2.1], []))


@by_dtype([*DTYPES, jnp.bfloat16])
@pytest.mark.parametrize(
    ("value", "lengths", "expected"),
    [
        ([], [0, 0, 0], [[], [], []]),
        ([1.0, 2.0, 3.0], [2, 0, 1], [[1.0, 2.0], [], [3.0]]),
        (
            [[1.0, 101.0], [2.0, 201.0], [3.0, 301.0]],
            [2, 0, 1],
            [[[1.0, 101.0], [2.0, 201.0]], np.zeros((0, 2)), [[3.0, 301.0]]],
        ),
    ],
    ids=["empty_vector", "vector", "matrix"],
)
def test_split_makes_rows_of_different_lengths(mode, dtype, value, lengths, expected):
    """SplitRead."""
    convert = converter(dtype)

    def f(x):
        ta = TensorArray(dtype, tensor_array_name="foo", size=3, infer_shape=False)
        return read_all(ta.split(x, lengths=lengths), range(3))

    found = run(mode, f, convert(value))
    assert_all_equal(found, map(convert, expected))
    assert [x.dtype for x in found] == [dtype] * 3


@by_dtype([*DTYPES, jnp.bfloat16])
@pytest.mark.parametrize(
    ("value", "lengths", "expected"),
    [
        ([], [0, 0, 0], [[], [], []]),
        ([1.0, 2.0, 3.0], [1, 1, 1], [[1.0], [2.0], [3.0]]),
        (
            [[1.0, 101.0], [2.0, 201.0], [3.0, 301.0]],
            [1, 1, 1],
            [[[1.0, 101.0]], [[2.0, 201.0]], [[3.0, 301.0]]],
        ),
    ],
    ids=["empty_vector", "vector", "matrix"],
)
def test_split_makes_rows_of_one_length(mode, dtype, value, lengths, expected):
    """SplitRead of the XLA tests."""
    convert = converter(dtype)

    def f(x):
        ta = TensorArray(dtype, tensor_array_name="foo", size=3)
        return read_all(ta.split(x, lengths=np.array(lengths)), range(3))

    assert_all_equal(run(mode, f, convert(value)), map(convert, expected))


@pytest.mark.parametrize(
    ("size", "value", "lengths", "message"),
    [
        (3, [1.0, 2.0, 3.0], 1, r"Expected lengths to be a vector, received shape: \[\]"),
        (
            3,
            [1.0, 2.0, 3.0],
            [1],
            r"Expected sum of lengths to be equal to values.shape\[0\], "
            r"but sum of lengths is 1 and value's shape is: \[3\]",
        ),
        (
            3,
            [1.0, 2.0, 3.0],
            [1, 2, 3],
            r"Expected sum of lengths to be equal to values.shape\[0\], "
            r"but sum of lengths is 6 and value's shape is: \[3\]",
        ),
        (1, 1.0, [1], r"Expected value to be at least a vector, but received shape: \[\]"),
        (
            2,
            [1.0],
            [1],
            r"TensorArray's size is not equal to the size of lengths \(2 vs. 1\), and the TensorArray is not marked as "
            "dynamically resizeable",
        ),
    ],
    ids=["scalar_lengths", "too_few_lengths", "sum_too_large", "scalar_value", "other_number_of_lengths"],
)
def test_a_split_that_does_not_fit_is_an_error(mode, size, value, lengths, message):
    """SplitIncompatibleShapesFails."""
    ta = TensorArray(np.float32, size=size, infer_shape=False)
    with pytest.raises(ValueError, match=message):
        run(mode, lambda x: ta.split(x, lengths).read(0), constant(value))


def test_equal_lengths_give_split_a_shape_to_infer(mode):
    """SplitShape."""

    def f(value):
        ta = TensorArray(np.float32, tensor_array_name="foo", size=0, dynamic_size=True, infer_shape=True)
        w0 = ta.split(value, [1, 1, 1])
        assert w0.element_shape == (1, 2)
        return w0.read(0)

    assert_equal(run(mode, f, constant([[1.0, -1.0], [2.0, -2.0], [3.0, -3.0]])), [[1.0, -1.0]])


def test_different_lengths_need_infer_shape_false(mode):
    """SplitShape: TensorFlow infers an unknown shape there, and JAX has none."""
    value = constant([[1.0, -1.0], [2.0, -2.0], [3.0, -3.0]])

    def f(value, infer_shape):
        ta = TensorArray(np.float32, tensor_array_name="foo1", size=2, infer_shape=infer_shape)
        return read_all(ta.split(value, [1, 2]), range(2))

    with pytest.raises(ValueError, match="infer_shape=False"):
        run(mode, lambda x: f(x, True), value)
    assert [row.shape for row in run(mode, lambda x: f(x, False), value)] == [(1, 2), (2, 2)]


def test_scatter_leaves_the_other_rows_alone(mode):
    """ScatterIntoExistingList."""

    def f():
        ta0 = TensorArray(np.float32, tensor_array_name="foo", size=5)
        ta1 = ta0.scatter(indices=[3, 4], value=jnp.ones(2, np.float32))
        ta2 = ta1.scatter(indices=[1], value=jnp.ones(1, np.float32))
        ta3 = ta2.scatter(indices=[0, 2], value=[5.0, 6.0])
        return ta1.stack(), ta2.stack(), ta3.stack()

    expected = [0.0, 0.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 1.0, 1.0], [5.0, 1.0, 6.0, 1.0, 1.0]
    assert_all_equal(run(mode, f), expected)


@by_dtype([*DTYPES, jnp.bfloat16])
def test_scattered_rows_are_read_at_indices_known_when_the_program_runs(mode, dtype):
    """ScatterRead of the XLA tests."""
    convert = converter(dtype)

    def f(indices, value, id0, id1):
        w = TensorArray(dtype, tensor_array_name="foo", size=10).scatter(indices, value)
        return w.read(id0), w.read(id1)

    found = run(mode, f, jnp.array([1, 8]), convert([[1.0, -1.0], [10.0, -10.0]]), jnp.array(1), jnp.array(8))
    assert_all_equal(found, (convert([1.0, -1.0]), convert([10.0, -10.0])))


@by_dtype([np.int64])
def test_integers_of_64_bits_are_scattered(mode, dtype):
    """Int64GPU."""

    def f(value):
        return read_all(TensorArray(dtype, size=2).scatter([0, 1], value), range(2))

    assert_all_equal(run(mode, f, constant([-3, 100], dtype)), (-3, 100))


def test_bfloat16_is_scattered(mode):
    """ScatterBfloat16GPU."""

    def f(value):
        ta = TensorArray(jnp.bfloat16, tensor_array_name="foo", size=5)
        return ta.scatter(indices=[3, 4], value=value).stack()

    assert_equal(run(mode, f, jnp.ones(2, jnp.bfloat16)), [0.0, 0.0, 0.0, 1.0, 1.0])


def test_no_rows_are_unstacked_stacked_and_concatenated(mode):
    """EvalEmptyWithDefault."""

    def f(value):
        ta = TensorArray(np.float32, size=0, dynamic_size=False, infer_shape=True)
        size = ta.size()
        ta = ta.unstack(value)
        return size, ta.stack(), ta.concat()

    size, packed, concatenated = run(mode, f, jnp.zeros((0, 3, 5), np.float32))
    assert size == 0
    assert packed.shape == (0, 3, 5)
    assert concatenated.shape == (0, 5)


# --- shapes ----------------------------------------------------------------------------------------------------


def test_the_first_write_fixes_the_shape(mode):
    """WriteShape."""

    def f(c0, c1, c2):
        ta = TensorArray(np.float32, tensor_array_name="foo", size=3)
        w0 = ta.write(0, c0)
        assert w0.read(0).shape == c0.shape
        w1 = w0.write(1, c1)
        with pytest.raises(ValueError, match="Incompatible shape for value"):
            w0.write(0, c2)
        return read_all(w1, range(2))

    found = run(mode, f, constant([4.0, 5.0]), constant([6.0, 7.0]), constant([4.0, 5.0, 6.0]))
    assert_all_equal(found, ([4.0, 5.0], [6.0, 7.0]))


def test_a_known_element_shape_holds_from_the_first_write_on(mode):
    """WriteShape with the shape stated."""
    ta = TensorArray(np.float32, size=3, element_shape=[2])
    with pytest.raises(ValueError, match=r"Incompatible shape for value \(\(3,\)\), expected \(\(2,\)\)"):
        run(mode, lambda x: ta.write(0, x).stack(), constant([4.0, 5.0, 6.0]))


def test_unstack_fixes_the_shape(mode):
    """UnpackShape."""

    def f(value, c1, c2):
        ta = growing(mode, 5, tensor_array_name="foo", infer_shape=True)
        w0 = ta.unstack(value)
        r0 = w0.read(0)
        assert r0.shape == (2,)
        w1 = w0.write(3, c1)
        assert w1.read(1).shape == c1.shape
        with pytest.raises(ValueError, match="Incompatible shape for value"):
            w1.write(4, c2)
        return r0, w1.read(0), w1.read(3)

    value = constant([[1.0, -1.0], [10.0, -10.0], [100.0, -100.0]])
    found = run(mode, f, value, constant([4.0, 5.0]), constant([4.0, 5.0, 6.0]))
    assert_all_equal(found, ([1.0, -1.0], [1.0, -1.0], [4.0, 5.0]))


def test_a_write_fills_the_unknown_dimensions_of_the_shape(mode):
    """PartlyUnknownShape: where placeholders had unknown dimensions, the element_shape has them."""

    def f(row, rows):
        ta = TensorArray(np.float32, tensor_array_name="foo", size=6, element_shape=[None, None, None, 3])
        assert ta.element_shape == (None, None, None, 3)
        w0 = ta.write(0, row)
        assert w0.element_shape == (5, 4, 2, 3)
        w1 = w0.scatter([4, 5], rows)
        assert ta.element_shape == (None, None, None, 3)
        return w1.read(4), w1.read(1)

    found = run(mode, f, jnp.ones((5, 4, 2, 3), np.float32), jnp.ones((2, 5, 4, 2, 3), np.float32))
    assert_all_equal(found, (np.ones((5, 4, 2, 3)), np.zeros((5, 4, 2, 3))))


@pytest.mark.parametrize("element_shape", [None, [None, 4, 2, 3]], ids=str)
def test_a_split_fills_the_unknown_dimensions_of_the_shape(mode, element_shape):
    """PartlyUnknownShape, its last part."""

    def f(value):
        w = TensorArray(np.float32, size=2, element_shape=element_shape).split(value, [5, 5])
        assert w.element_shape == (5, 4, 2, 3)
        return w.read(0)

    assert run(mode, f, jnp.ones((10, 4, 2, 3), np.float32)).shape == (5, 4, 2, 3)


def test_without_inference_unknown_dimensions_may_differ(mode):
    """InferShapeFalseValid."""

    def f(long, short):
        ta = TensorArray(np.float32, size=3, infer_shape=False, element_shape=[None, 10, 20])
        return ta.write(0, long).write(1, long).write(2, short).concat()

    found = run(mode, f, jnp.ones((50, 10, 20), np.float32), jnp.ones((1, 10, 20), np.float32))
    assert_equal(found, np.ones((101, 10, 20)))


def test_without_inference_known_dimensions_may_not_differ(mode):
    """InferShapeFalseInvalid."""

    def f(first, second):
        ta = TensorArray(np.float32, size=2, infer_shape=False, element_shape=[None, 10, 20])
        return ta.write(0, first).write(1, second).concat()

    with pytest.raises(ValueError, match="Incompatible shape for value"):
        run(mode, f, jnp.ones((50, 10, 20), np.float32), jnp.ones((1, 20, 20), np.float32))


def test_with_inference_unknown_dimensions_are_fixed_by_the_first_write(mode):
    """InferShapeTrue."""

    def f(long, short):
        ta = TensorArray(np.float32, size=3, infer_shape=True, element_shape=[None, 10, 20])
        assert ta.element_shape == (None, 10, 20)
        ta = ta.write(0, long)
        assert ta.element_shape == (50, 10, 20)
        ta = ta.write(1, long)
        with pytest.raises(ValueError, match=r"\(1, 10, 20\).*\(50, 10, 20\)"):
            ta.write(2, short)
        return ta.read(1)

    found = run(mode, f, jnp.ones((50, 10, 20), np.float32), jnp.ones((1, 10, 20), np.float32))
    assert_equal(found, np.ones((50, 10, 20)))


# --- size, close, identity, grad -------------------------------------------------------------------------------


def test_size_is_the_number_of_rows(mode):
    """SizeTensorArray."""
    assert run(mode, lambda: TensorArray(np.float32, tensor_array_name="foo", size=3).size()) == 3


def test_close_does_nothing(mode):
    """CloseTensorArray, WriteCloseTensorArray."""

    def f():
        ta = TensorArray(np.float32, tensor_array_name="foo", size=3, infer_shape=False)
        assert ta.close() is None
        w1 = ta.write(0, [[4.0, 5.0]]).write(1, [3.0])
        assert w1.close() is None
        return w1.read(1)

    assert_equal(run(mode, f), [3.0])


def test_identity_keeps_dtype_rows_and_size(mode):
    """TensorArrayIdentity."""

    def f():
        ta0 = TensorArray(np.float32, size=2, infer_shape=False).write(0, 0.0).identity()
        ta1 = TensorArray(np.int32, size=4, infer_shape=True).write(0, 1).identity()
        assert ta0.dtype == np.float32
        assert ta1.dtype == np.int32
        assert ta0.read(0).shape == ta1.read(0).shape == ()
        return ta0.read(0), ta1.read(0), ta0.size(), ta1.size()

    assert tuple(map(int, run(mode, f))) == (0, 1, 2, 4)


def test_grad_says_that_there_is_none():
    """TensorGradArrayWriteRead: TensorFlow 2 raises NotImplementedError too."""
    with pytest.raises(NotImplementedError):
        TensorArray(np.float32, tensor_array_name="foo", size=3, infer_shape=False).grad("grad")


# --- growing ---------------------------------------------------------------------------------------------------


def test_rows_of_different_shapes_grow_one_by_one(mode):
    """TensorGradArrayDynamicWriteRead, its forward half."""

    def f():
        ta = growing(mode, 3, tensor_array_name="foo", infer_shape=False)
        w2 = ta.write(0, [[4.0, 5.0]]).write(1, [[1.0]]).write(2, -3.0)
        return (*read_all(w2, range(3)), w2.size(), ta.size())

    *rows, size, size_before = run(mode, f)
    assert_all_equal(rows, ([[4.0, 5.0]], [[1.0]], -3.0))
    assert (size, size_before) == (3, 0)


def test_rows_of_one_shape_grow_one_by_one(mode):
    """TensorGradArrayDynamicWriteRead of the XLA tests."""

    def f():
        w2 = growing(mode, 3).write(0, [[4.0]]).write(1, [[1.0]]).write(2, [[-3.0]])
        return (*read_all(w2, range(3)), w2.size())

    *rows, size = run(mode, f)
    assert_all_equal(rows, ([[4.0]], [[1.0]], [[-3.0]]))
    assert size == 3


def test_a_scatter_past_the_end_grows(mode):
    """ScatterReadAndGradients, its values; the rows between are zeros."""

    def f(value):
        w = growing(mode, 9, tensor_array_name="foo").scatter([1, 8], value)
        return (*read_all(w, (1, 8, 0)), w.size())

    *rows, size = run(mode, f, constant([[1.0, -1.0], [10.0, -10.0]]))
    assert_all_equal(rows, ([1.0, -1.0], [10.0, -10.0], [0.0, 0.0]))
    assert size == 9


def test_growth_after_unstack_and_split(mode):
    """UnpackDynamic, SplitDynamic: their values."""

    def f(x):
        max_size = 4 if mode == "jit" else None
        ta = TensorArray(np.float32, size=3, dynamic_size=True, max_size=max_size)
        return ta.unstack(x).write(3, 4.0).stack(), ta.split(x, [1, 1, 1]).write(3, [4.0]).concat()

    assert_all_equal(run(mode, f, constant([1.0, 2.0, 3.0])), [[1.0, 2.0, 3.0, 4.0]] * 2)


def test_growth_inside_a_transformation_needs_a_max_size():
    """UnpackDynamic under jit."""
    ta = TensorArray(np.float32, size=3, dynamic_size=True)
    with pytest.raises(ValueError, match="max_size"):
        jax.jit(lambda x: ta.unstack(x).write(3, 4.0).stack())(constant([1.0, 2.0, 3.0]))


def test_a_python_loop_grows_a_tensorarray(mode):
    """WhileLoopDynamicSizeZeroXla, eagerly a Python loop in TensorFlow as well."""

    def f():
        ta = growing(mode, 5, np.int32)
        for i in range(5):
            ta = ta.write(i, i**2 + 1)
        return ta.stack()

    assert_equal(run(mode, f), [1, 2, 5, 10, 17])


def test_a_while_loop_grows_a_tensorarray(mode):
    """WhileLoopDynamicSizeZeroXla."""

    def f():
        ta = TensorArray(np.int32, size=0, dynamic_size=True, element_shape=(), max_size=5)
        _, ta = lax.while_loop(
            lambda carry: carry[0] < 5,
            lambda carry: (carry[0] + 1, carry[1].write(carry[0], jnp.square(carry[0]) + 1)),
            (jnp.int32(0), ta),
        )
        return ta.stack(), ta.size()

    stack, size = run(mode, f)
    assert_equal(stack, [1, 2, 5, 10, 17])
    assert size == 5


# --- gradients -------------------------------------------------------------------------------------------------


@by_dtype(FLOATS_AND_COMPLEX)
def test_the_gradient_of_reads_goes_to_the_row_written(mode, dtype):
    """GradientWriteRead."""
    c = functools.partial(constant, dtype=dtype)
    values = c([[4.0, 5.0]]), c(3.0)
    none = c([[0.0, 0.0]]), c(0.0)

    def f(value_0, value_1):
        ta = TensorArray(dtype, tensor_array_name="foo", size=3, infer_shape=False)
        w1 = ta.write(0, value_0).write(1, value_1)
        return w1.read(0), w1.read(0), w1.read(1)

    just_r0 = gradients(mode, f, values, (c([[2.0, 3.0]]), none[0], none[1]))
    assert_all_equal(just_r0, ([[2.0, 3.0]], 0.0))
    r0_r0_2 = gradients(mode, f, values, (c([[2.0, 3.0]]), c([[1.0, -1.0]]), none[1]))
    assert_all_equal(r0_r0_2, ([[3.0, 2.0]], 0.0))
    just_r1 = gradients(mode, f, values, (none[0], none[0], c(-2.0)))
    assert_all_equal(just_r1, (none[0], -2.0))
    together = gradients(mode, f, values, (c([[2.0, 3.0]]), c([[1.0, -1.0]]), c(-2.0)))
    assert_all_equal(together, ([[3.0, 2.0]], -2.0))
    assert [x.dtype for x in together] == [dtype] * 2


@by_dtype(FLOATS_AND_COMPLEX)
def test_the_gradient_of_reads_of_rows_of_one_shape(mode, dtype):
    """GradientWriteRead of the XLA tests."""
    c = functools.partial(constant, dtype=dtype)

    def f(value_0, value_1):
        w1 = TensorArray(dtype, tensor_array_name="foo", size=3).write(0, value_0).write(1, value_1)
        return w1.read(0), w1.read(0), w1.read(1)

    values = c([[4.0, 5.0]]), c([[3.0, 3.5]])
    found = gradients(mode, f, values, (c([[2.0, 3.0]]), c([[1.0, -1.0]]), c([[-2.0, -10.0]])))
    assert_all_equal(found, ([[3.0, 2.0]], [[-2.0, -10.0]]))


@by_dtype(FLOATS_AND_COMPLEX)
def test_gradients_of_one_row_are_summed_and_go_to_the_last_write(mode, dtype):
    """WriteGradientAddMultipleAdds: a gradient written three times is a row read three times."""
    c = functools.partial(constant, dtype=dtype)

    def f(first, second):
        w1 = TensorArray(dtype, tensor_array_name="foo", size=3).write(2, first).write(2, second)
        return w1.read(2), w1.read(2), w1.read(2)

    assert_all_equal(gradients(mode, f, (c(3.0), c(4.0)), (c(3.0), c(4.0), c(5.0))), (0.0, 12.0))


def test_gradients_of_stack_read_and_concat_are_summed(mode):
    """GradientWritePackConcatAndRead."""

    def f(value_0, value_1):
        ta = TensorArray(np.float32, tensor_array_name="foo", size=2, clear_after_read=False)
        w1 = ta.write(0, value_0).write(1, value_1)
        return w1.stack(), w1.read(0), w1.concat()

    values = constant([-1.0, 1.0]), constant([-10.0, 10.0])
    grad_ys = constant([[2.0, 3.0], [4.0, 5.0]]), constant([-0.5, 1.5]), constant([20.0, 30.0, 40.0, 50.0])
    found = gradients(mode, f, values, grad_ys)
    assert_all_equal(found, ([2.0 - 0.5 + 20.0, 3.0 + 1.5 + 30.0], [4.0 + 40.0, 5.0 + 50.0]))


def test_the_gradient_of_concat_goes_through_nested_compilation(mode):
    """TensorListConcat*, TensorListConcatGrad* of polymorphic_function_xla_jit_test.py."""

    @jax.jit
    def f(x):
        ta = TensorArray(np.float32, size=2, element_shape=[3])
        return ta.write(0, 2 * x).write(1, 3 * x).concat()

    x = constant([3.14, 2.68, 7.69])
    np.testing.assert_allclose(run(mode, f, x), [6.28, 5.36, 15.38, 9.42, 8.04, 23.07], rtol=1e-6)
    (found,) = gradients(mode, f, (x,), jnp.ones(6, np.float32))
    np.testing.assert_allclose(found, [5.0, 5.0, 5.0], rtol=1e-6)


def test_the_gradient_of_unstack_is_that_of_the_rows_read(mode):
    """GradientUnpackRead."""

    def f(value):
        ta = TensorArray(np.float32, tensor_array_name="foo", size=2, clear_after_read=False)
        w = ta.unstack(value)
        return w.read(0), w.read(0), w.read(1)

    grad_ys = constant([2.0, 3.0]), constant([-1.5, 1.5]), constant([4.0, 5.0])
    (found,) = gradients(mode, f, (constant([[1.0, -1.0], [10.0, -10.0]]),), grad_ys)
    assert_equal(found, [[2.0 - 1.5, 3.0 + 1.5], [4.0, 5.0]])


def test_the_gradient_of_unstack_into_a_growing_tensorarray(mode):
    """GradientDynamicUnpackRead."""

    def f(value):
        ta = TensorArray(np.float32, tensor_array_name="foo", size=0, dynamic_size=True)
        return tuple(read_all(ta.unstack(value), range(2)))

    grad_ys = constant([2.0, 3.0]), constant([4.0, 5.0])
    (found,) = gradients(mode, f, (constant([[1.0, -1.0], [10.0, -10.0]]),), grad_ys)
    assert_equal(found, [[2.0, 3.0], [4.0, 5.0]])


def test_the_gradient_of_split_and_concat_is_itself(mode):
    """GradientSplitConcat."""

    def f(value):
        ta = TensorArray(np.float32, tensor_array_name="foo", size=2, infer_shape=False)
        return ta.split(value, [2, 1]).concat()

    value = constant([[1.0, -1.0], [10.0, -10.0], [100.0, -100.0]])
    (found,) = gradients(mode, f, (value,), constant([[2.0, -2.0], [20.0, -20.0], [200.0, -200.0]]))
    assert_equal(found, [[2.0, -2.0], [20.0, -20.0], [200.0, -200.0]])


def test_the_gradient_of_split_into_equal_lengths(mode):
    """GradientSplitConcat of the XLA tests, with the concat and with reads."""

    def concat(value):
        return TensorArray(np.float32, tensor_array_name="foo", size=2).split(value, [2, 2]).concat()

    def reads(value):
        w = TensorArray(np.float32, tensor_array_name="foo", size=2).split(value, [2, 2])
        return w.read(0), w.read(1)

    value = constant([[1.0, -1.0], [10.0, -10.0], [100.0, -100.0], [1000.0, -1000.0]])
    grad = constant([[2.0, -2.0], [20.0, -20.0], [200.0, -200.0], [2000.0, -2000.0]])
    assert_equal(gradients(mode, concat, (value,), grad)[0], grad)
    assert_equal(gradients(mode, reads, (value,), (grad[:2], grad[2:]))[0], grad)


def test_rows_that_nobody_reads_get_no_gradient(mode):
    """GradientWhenNotAllComponentsRead, WriteButNotAllComponentsReadGrad."""

    def unstack(x):
        return TensorArray(np.float32, size=2).unstack(x).read(0)

    def writes(x0, x1):
        return TensorArray(np.float32, size=2).write(0, x0).write(1, x1).read(0)

    assert_equal(gradients(mode, unstack, (constant([2.0, 3.0]),), constant(1.0))[0], [1.0, 0.0])
    assert_all_equal(gradients(mode, writes, (constant(5.0), constant(10.0)), constant(1.0)), (1.0, 0.0))


def test_the_gradient_of_unstack_does_not_mind_a_later_write(mode):
    """UnpackDynamic."""

    def f(x):
        ta = TensorArray(np.float32, size=3, dynamic_size=True, max_size=4)
        return ta.unstack(x).write(3, 4.0).stack()

    (found,) = gradients(mode, f, (constant([1.0, 2.0, 3.0]),), jnp.ones(4, np.float32))
    assert_equal(found, [1.0, 1.0, 1.0])


def test_the_gradient_of_split_does_not_mind_a_later_write(mode):
    """SplitDynamic."""

    def f(x):
        ta = TensorArray(np.float32, size=3, dynamic_size=True, max_size=4)
        return ta.split(x, [1, 1, 1]).write(3, [4.0]).concat()

    (found,) = gradients(mode, f, (constant([1.0, 2.0, 3.0]),), jnp.ones(4, np.float32))
    assert_equal(found, [1.0, 1.0, 1.0])


def test_the_gradient_of_scatter_is_that_of_the_rows_read(mode):
    """ScatterReadAndGradients; of a fixed size as in the XLA tests."""

    def f(ta, value):
        w = ta.scatter(jnp.array([1, 8]), value)
        return w.read(1), w.read(8)

    value, grad_ys = constant([[1.0, -1.0], [10.0, -10.0]]), (constant([2.0, 3.0]), constant([4.0, 5.0]))
    for options in ({"size": 0, "dynamic_size": True, "max_size": 9}, {"size": 10}):
        ta = TensorArray(np.float32, tensor_array_name="foo", **options)
        g = functools.partial(f, ta)
        assert_all_equal(run(mode, g, value), ([1.0, -1.0], [10.0, -10.0]))
        assert_equal(gradients(mode, g, (value,), grad_ys)[0], [[2.0, 3.0], [4.0, 5.0]])


def test_the_gradient_of_a_scattered_row_that_nobody_reads_is_zero(mode):
    """ScatterPartialReadAndGradients."""

    def f(value):
        ta = TensorArray(np.float32, tensor_array_name="foo", size=0, dynamic_size=True, max_size=9)
        return ta.scatter([1, 8], value).read(1)

    value = constant([[1.0, -1.0], [10.0, -10.0]])
    assert_equal(run(mode, f, value), [1.0, -1.0])
    assert_equal(gradients(mode, f, (value,), constant([2.0, 3.0]))[0], [[2.0, 3.0], [0.0, 0.0]])


@pytest.mark.parametrize("options", [{"size": 0, "dynamic_size": True}, {"size": 10}], ids=["dynamic", "static"])
@pytest.mark.parametrize("indices", [[1, 8], np.array([1, 8], np.int32)], ids=["list", "array"])
def test_the_gradient_of_gather_is_that_of_the_rows_gathered(mode, options, indices):
    """WriteGatherAndGradients; of a fixed size as in the XLA tests."""

    def f(values):
        return TensorArray(np.float32, tensor_array_name="foo", **options).unstack(values).gather(indices)

    values = constant([[1.0 * x, -1.0 * x] for x in range(10)])
    expected_grad = np.zeros((10, 2))
    expected_grad[1] = [2.0, 3.0]
    expected_grad[8] = [4.0, 5.0]
    assert_equal(run(mode, f, values), [[1.0, -1.0], [8.0, -8.0]])
    assert_equal(gradients(mode, f, (values,), constant([[2.0, 3.0], [4.0, 5.0]]))[0], expected_grad)


def test_the_sum_of_two_rows_gives_both_its_gradient(mode):
    """SumOfTwoReadVariablesWithoutRepeatGrad."""

    def f(a, b):
        ta = TensorArray(np.float32, size=2)
        ta = ta.write(0, a, name="write_a")
        ta = ta.write(1, b, name="write_b")
        return ta.read(0, name="read_a_0") + ta.read(1, name="read_b_0")

    a = constant(np.arange(3 * 5).reshape(3, 5) + 1)
    b = constant(np.arange(3 * 5).reshape(3, 5) + 1 + 3 * 5)
    g0 = constant(-(np.arange(3 * 5).reshape(3, 5) + 1))
    assert_equal(gradients(mode, lambda a: f(a, b), (a,), g0)[0], g0)
    assert_equal(gradients(mode, lambda b: f(a, b), (b,), g0)[0], g0)
    assert_all_equal(gradients(mode, f, (a, b), g0), (g0, g0))


def test_the_gradient_of_one_row_of_one_element(mode):
    """GradYsInCorrectScope."""

    def f(x):
        return TensorArray(np.float32, size=1, element_shape=[1]).write(index=0, value=x[0]).stack()

    assert_equal(gradients(mode, f, (constant([[1.42]]),), constant([[2.42]]))[0], constant([[2.42]]))


@pytest.mark.parametrize("infer_shape", [True, False])
def test_the_second_derivative_of_a_square_of_a_row(mode, infer_shape):
    """GradGrad."""

    def f(x):
        r0 = TensorArray(np.float32, tensor_array_name="foo", size=1, infer_shape=infer_shape).write(0, x).read(0)
        return r0 * r0

    assert_equal(run(mode, jax.grad(jax.grad(f)), constant(4.0)), 2.0)


# --- loops -----------------------------------------------------------------------------------------------------

V0 = np.arange(3 * 5, dtype=np.float32).reshape(3, 5)
STATE0 = np.ones(5, np.float32)
VAR = np.arange(100, 105, dtype=np.float32)
VOUT = [[101, 103, 105, 107, 109], [106, 109, 112, 115, 118], [116, 120, 124, 128, 132]]
GRAD_VAL = -np.arange(3 * 5, dtype=np.float32).reshape(3, 5)
V0_GRAD = [[-15, -18, -21, -24, -27], [-15, -17, -19, -21, -23], [-10, -11, -12, -13, -14]]
COLUMN_SUMS_OF_GRAD_VAL = [-15, -18, -21, -24, -27]


def by_python(step, ta, state):
    for time in range(3):
        ta, state = step(time, ta, state)
    return ta


def by_fori_loop(step, ta, state):
    return lax.fori_loop(0, 3, lambda time, carry: step(time, *carry), (ta, state))[0]


def by_scan(step, ta, state):
    return lax.scan(lambda carry, time: (step(time, *carry), None), (ta, state), jnp.arange(3))[0][0]


def by_while_loop(step, ta, state):
    start = (jnp.int32(0), ta, state)
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, *step(*c)), start)[1]


LOOPS = [by_python, by_fori_loop, by_scan, by_while_loop]
by_loop = functools.partial(pytest.mark.parametrize, "loop", ids=lambda loop: loop.__name__)
by_size = pytest.mark.parametrize(
    "options", [{"size": 3}, {"size": 0, "dynamic_size": True, "max_size": 3}], ids=["static", "dynamic"]
)


def recurrence(loop, options, v0, state0, var):
    """The recurrence of WhileLoopWritePackGradients: outputs are written and the state sums what was seen."""

    def step(time, ta, state):
        row = lax.dynamic_index_in_dim(v0, time, keepdims=False)
        return ta.write(time, row + var + state), state + row

    ta = TensorArray(np.float32, tensor_array_name="foo", element_shape=[5], **options)
    return loop(step, ta, state0).stack()


@by_loop(LOOPS)
@by_size
def test_a_loop_writes_its_outputs(mode, loop, options):
    """WhileLoopWritePackGradients, WhileLoopDynamicWritePackGradients: their values."""
    assert_equal(run(mode, functools.partial(recurrence, loop, options), V0, STATE0, VAR), VOUT)


@by_loop([by_python, by_fori_loop, by_scan])
@by_size
def test_the_gradient_goes_back_through_a_loop_of_writes(mode, loop, options):
    """WhileLoopWritePackGradients, WhileLoopDynamicWritePackGradients."""
    f = functools.partial(recurrence, loop, options)
    v0_grad, state0_grad, var_grad = gradients(mode, f, (V0, STATE0, VAR), GRAD_VAL)
    assert_equal(v0_grad, V0_GRAD)
    assert_equal(state0_grad, COLUMN_SUMS_OF_GRAD_VAL)
    assert_equal(var_grad, COLUMN_SUMS_OF_GRAD_VAL)


@by_loop(LOOPS)
@by_size
def test_derivatives_go_forward_through_a_loop_of_writes(mode, loop, options):
    """WhileLoopWritePackGradients by forward mode, the one that JAX has of a while loop."""

    def forward(*tangents):
        f = functools.partial(recurrence, loop, options)
        return jax.jvp(f, tuple(map(jnp.asarray, (V0, STATE0, VAR))), tuple(map(jnp.asarray, tangents)))[1]

    ones, zeros = jnp.ones(5, np.float32), jnp.zeros(5, np.float32)
    first_row = jnp.zeros((3, 5), np.float32).at[0].set(1)
    second_row = jnp.zeros((3, 5), np.float32).at[1].set(1)
    no_row = jnp.zeros((3, 5), np.float32)
    assert_equal(run(mode, forward, no_row, ones, zeros), np.ones((3, 5)))
    assert_equal(run(mode, forward, no_row, zeros, ones), np.ones((3, 5)))
    assert_equal(run(mode, forward, first_row, zeros, zeros), [[1] * 5, [1] * 5, [1] * 5])
    assert_equal(run(mode, forward, second_row, zeros, zeros), [[0] * 5, [1] * 5, [1] * 5])


def test_the_gradient_goes_back_through_two_loops_in_a_row(mode):
    """GradSerialTwoLoops: the first reads what it wrote, in one branch of a cond; the second pads with zeros."""

    def f(x):
        def double(i, acc):
            x1 = lax.cond(i == 0, lambda: x, lambda: acc.read(i - 1) * 2.0)
            return acc.write(i, x1)

        acc = TensorArray(np.float32, size=100, clear_after_read=False, element_shape=())
        acc = lax.fori_loop(0, 5, double, acc)
        acc = lax.fori_loop(5, 100, lambda i, acc: acc.write(i, 0.0), acc)
        return acc.stack()

    assert_equal(run(mode, f, constant(2.0)), [2.0, 4.0, 8.0, 16.0, 32.0, *[0.0] * 95])
    assert_equal(gradients(mode, f, (constant(2.0),), jnp.ones(100, np.float32))[0], 31.0)


def test_a_loop_in_python_infers_the_shape(mode):
    """ShapeAfterWhileLoop, as eager TensorFlow runs it."""

    def f():
        ta = TensorArray(np.float32, size=10)
        for i in range(10):
            ta = ta.write(i, [[0.0]])
        assert ta.element_shape == (1, 1)
        return ta.stack()

    assert_equal(run(mode, f), np.zeros((10, 1, 1)))


def test_a_loop_in_jax_wants_the_shape_stated(mode):
    """ShapeAfterWhileLoop, where TensorFlow infers it from the body."""

    def f(**options):
        start = jnp.int32(0), TensorArray(np.float32, size=10, **options)
        step = lambda carry: (carry[0] + 1, carry[1].write(carry[0], [[0.0]]))  # noqa: E731
        _, ta = lax.while_loop(lambda carry: carry[0] < 10, step, start)
        assert ta.element_shape == (1, 1)
        return ta.stack()

    with pytest.raises(TypeError, match="element_shape"):
        run(mode, f)
    assert_equal(run(mode, functools.partial(f, element_shape=[1, 1])), np.zeros((10, 1, 1)))


def test_a_while_loop_sums_the_rows_of_a_tensorarray_that_it_closes_over(mode):
    """The rows of UnpackRead; TensorFlow adds 1.0 + 2.0 + 3.0."""

    def f(x):
        ta = TensorArray(np.float32, size=3).unstack(x)
        start = jnp.int32(0), jnp.float32(0)
        return lax.while_loop(lambda c: c[0] < ta.size(), lambda c: (c[0] + 1, c[1] + ta.read(c[0])), start)[1]

    assert_equal(run(mode, f, constant([1.0, 2.0, 3.0])), 6.0)


# --- cond, closures, functions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("taken", "expected"), [(True, 5.0), (False, 10.0)])
def test_each_branch_of_a_cond_writes_the_tensorarray_it_closes_over(mode, taken, expected):
    """CondAndTensorArrayInDefun, CondAndTensorArrayInDefun_constFolding of cond_test.py."""

    def f(taken):
        ta = TensorArray(np.float32, size=1)
        return lax.cond(taken, lambda: ta.write(0, 5.0), lambda: ta.write(0, 10.0)).stack()

    assert_equal(run(mode, f, taken), [expected])


@pytest.mark.parametrize(("taken", "expected"), [(True, 5.0), (False, 0.0)])
def test_one_branch_of_a_cond_writes_and_the_other_does_not(mode, taken, expected):
    """CondAndTensorArrayInDefun with one of its writes."""

    def f(taken):
        ta = TensorArray(np.float32, size=1, element_shape=())
        return lax.cond(taken, lambda ta: ta.write(0, 5.0), lambda ta: ta, ta).stack()

    assert_equal(run(mode, f, taken), [expected])


def test_a_switch_writes_in_the_branch_it_takes(mode):
    """SwitchCaseAndTensorArrayInDefun of cond_test.py."""

    def f(index):
        ta = TensorArray(np.float32, size=1)
        return lax.switch(index, [lambda x=x: ta.write(0, x) for x in (5.0, 10.0, 15.0)]).stack()

    assert_equal(run(mode, f, 1), [10.0])


@pytest.mark.parametrize(("taken", "expected"), [(True, [2.0, 2.0, 2.0]), (False, [0.0, 0.0, 0.0])])
def test_the_gradient_of_a_map_in_one_branch_of_a_cond(mode, taken, expected):
    """CondWithTensorArrayGrad of control_flow_ops_py_test.py; `tf.map_fn` reads a TensorArray and writes another."""

    def double_all(x):
        xs = TensorArray(np.float32, size=3).unstack(x)
        ys = TensorArray(np.float32, size=3, element_shape=())
        return lax.fori_loop(0, 3, lambda i, ys: ys.write(i, xs.read(i) * 2.0), ys).stack()

    def f(x):
        return lax.cond(taken, double_all, lambda x: jnp.ones(3, np.float32), x)

    assert_equal(gradients(mode, f, (constant([1.0, 2.0, 3.0]),), jnp.ones(3, np.float32))[0], expected)


def test_a_tensorarray_is_an_argument_and_a_result_of_a_function(mode):
    """TensorListConcat of polymorphic_function_xla_jit_test.py, with the TensorArray handed in and out."""

    def f(ta, x):
        return ta.write(0, 2 * x).write(1, 3 * x)

    empty = TensorArray(np.float32, size=2, element_shape=[3])
    full = run(mode, f, empty, constant([3.14, 2.68, 7.69]))
    assert isinstance(full, TensorArray)
    assert (full.dtype, full.element_shape, full.size()) == (np.float32, (3,), 2)
    np.testing.assert_allclose(full.concat(), [6.28, 5.36, 15.38, 9.42, 8.04, 23.07], rtol=1e-6)
    assert_equal(empty.concat(), np.zeros(6))


def test_a_function_may_fix_the_shape_of_its_argument(mode):
    """The same without an element_shape."""

    def f(ta, x):
        return ta.write(0, 2 * x).write(1, 3 * x)

    full = run(mode, f, TensorArray(np.float32, size=2), constant([3.14]))
    assert full.element_shape == (1,)
    np.testing.assert_allclose(full.concat(), [6.28, 9.42], rtol=1e-6)


def test_the_gradient_goes_through_a_tensorarray_that_is_an_argument(mode):
    """GradientUnpackRead in two functions: the second takes the TensorArray of the first."""
    first = jax.jit(lambda value: TensorArray(np.float32, size=2).unstack(value))
    second = jax.jit(lambda w: (w.read(0), w.read(0), w.read(1)))
    grad_ys = constant([2.0, 3.0]), constant([-1.5, 1.5]), constant([4.0, 5.0])
    value = constant([[1.0, -1.0], [10.0, -10.0]])
    (found,) = gradients(mode, lambda value: second(first(value)), (value,), grad_ys)
    assert_equal(found, [[2.0 - 1.5, 3.0 + 1.5], [4.0, 5.0]])
