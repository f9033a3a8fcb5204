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

from jax_tensorarray import TensorArray, _compat

DTYPES = [np.float32, np.float64, np.int32, np.int64, np.complex64, np.complex128, np.bool_, jnp.bfloat16]
FLOATS_AND_COMPLEX = [np.float32, np.float64, np.complex64, np.complex128]

#: JAX raises the former from the first call of a compiled function, and the latter from its fast path.
RUNTIME_ERRORS = (jax.errors.JaxRuntimeError, ValueError)


@pytest.fixture(params=["eager", "jit"])
def mode(request):
    return request.param


def run(mode, f, *args):
    return jax.jit(f)(*args) if mode == "jit" else f(*args)


def converted(x, dtype):
    """TensorFlow's numbers in another dtype: complex ones get an imaginary part, and as bool the odd ones are True.

    What is in a NumPy array already stays as it is.
    """
    if isinstance(x, np.ndarray | jax.Array | TensorArray):
        return x
    if dtype == np.bool_:
        return jnp.asarray(np.asarray(x) % 2 == 1)
    x = np.asarray(x).astype(dtype)
    return jnp.asarray(x - np.asarray(1j, dtype) * x if np.iscomplexobj(x) else x)


def assert_equal(actual, expected):
    """The same shape and values; of a tuple of arrays the same for each."""
    if isinstance(actual, list | tuple):
        for a, e in zip(actual, expected, strict=True):
            assert_equal(a, e)
    else:
        actual = np.asarray(actual)
        np.testing.assert_array_equal(actual, np.asarray(expected, actual.dtype), strict=True)


def gives(expected, of=(), *, grad_ys=None, gradients=None, dtypes=None):
    """The decorated program of `of` gives what is expected, eagerly and compiled.

    So does `tf.gradients(f(*of), of, grad_ys)`, if it is given. With `dtypes` all is converted to each of these, and
    the program takes the dtype as its first argument.
    """

    def decorate(f):
        @functools.wraps(f)
        def test(mode):
            programs = [functools.partial(f, dtype) for dtype in dtypes or ()] or [f]
            each = [*zip(dtypes or [np.float32], programs, strict=True)]

            def all_of_them(args):
                found = []
                for (_, program), (xs, ys) in zip(each, args, strict=True):
                    out = program(*xs) if expected is not None else None
                    found.append((out, jax.vjp(program, *xs)[1](ys) if grad_ys is not None else None))
                return found

            def of_dtype(xs, dtype):
                if not isinstance(xs, tuple):
                    return None if xs is None else converted(xs, dtype)
                return tuple(converted(x, dtype) for x in xs)

            found = run(mode, all_of_them, [(of_dtype(of, dtype), of_dtype(grad_ys, dtype)) for dtype, _ in each])
            for (dtype, _), (out, derived) in zip(each, found, strict=True):
                if expected is not None:
                    assert_equal(out, of_dtype(expected, dtype))
                if gradients is not None:
                    assert_equal(derived, of_dtype(gradients, dtype))
                assert not dtypes or {x.dtype for x in jax.tree.leaves((out, derived))} == {np.dtype(dtype)}

        del test.__wrapped__  # whose arguments pytest would take for fixtures
        return test

    return decorate


def growing(max_size, dtype=np.float32, **options):
    """A TensorArray that grows: eagerly as far as it has to, under jit as far as it may."""
    limit = None if _compat.executes_eagerly() else max_size
    return TensorArray(dtype, dynamic_size=True, max_size=limit, **{"size": 0} | options)


def read_all(ta, indices):
    return tuple(ta.read(i) for i in indices)


# --- write and read --------------------------------------------------------------------------------------------


@gives(([[4.0, 5.0]], [[1.0]], -3.0) * 2, of=([[4.0, 5.0]], [[1.0]], -3.0))
def test_rows_of_different_shapes_are_read_as_they_were_written(*xs):
    """WriteRead; the second time with the values as its source writes them."""
    tas = [TensorArray(np.float32, tensor_array_name="foo", size=3, infer_shape=False)] * 2
    for i, value in enumerate(([[4.0, 5.0]], [[1.0]], -3.0)):
        tas = [tas[0].write(i, xs[i]), tas[1].write(i, value)]
    assert [tas[1].read(i).dtype for i in range(3)] == [np.float32] * 3
    return read_all(tas[0], range(3)) + read_all(tas[1], range(3))


@gives(([[4.0, 5.0]], [[1.0, 3.0]], [[7.0, -8.5]]), of=(np.arange(3),))
def test_rows_of_one_shape_are_read_as_they_were_written(index):
    """WriteRead of the XLA tests."""
    ta = TensorArray(np.float32, tensor_array_name="foo", size=3)
    w2 = ta.write(index[0], [[4.0, 5.0]]).write(index[1], [[1.0, 3.0]]).write(index[2], [[7.0, -8.5]])
    return tuple(w2.read(index[i]) for i in range(3))


@gives(9.0, of=(4.0, 5.0))
def test_two_tensorarrays_of_one_function_are_two(x, y):
    """MultiTensorArray."""
    r1 = TensorArray(size=1, dtype=np.float32, tensor_array_name="foo").write(0, x).read(0)
    r2 = TensorArray(size=1, dtype=np.float32, tensor_array_name="bar").write(0, y).read(0)
    return r1 + r2


@gives(([[0.0, 0.0]], [[4.0, 5.0]], [[1.0, 3.0]], [[4.0, 5.0]]))
def test_every_write_leaves_the_tensorarray_before_it_alone():
    """WriteRead, with the TensorArray of each step kept."""
    ta = TensorArray(np.float32, size=3, element_shape=[1, 2])
    w0 = ta.write(0, [[4.0, 5.0]])
    w1 = w0.write(0, [[1.0, 3.0]])
    return ta.read(0), w0.read(0), w1.read(0), w0.read(0)


@gives(([1.0, -1.0],) * 6, of=([[1.0, -1.0], [10.0, -10.0]],))
def test_a_row_can_be_read_twice(value):
    """ReadTwice, as in TensorFlow 2: clear_after_read clears nothing."""
    tas = [TensorArray(np.float32, size=2, clear_after_read=clear) for clear in (None, True, False)]
    return tuple(w.read(0) for w in [ta.unstack(value) for ta in tas] for _ in range(2))


@gives(([0.0, 0.0, 3.0], [0.0, 0.0, 4.0]), of=(3.0, 4.0))
def test_the_second_write_of_a_row_stays(first, second):
    """WriteMultipleFails, which does not fail in TensorFlow 2; the writes of WriteGradientAddMultipleAdds."""
    w = TensorArray(np.float32, tensor_array_name="foo", size=3).write(2, first)
    return w.write(2, first).stack(), w.write(2, second).stack()


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


@gives([[[4.0, 5.0]], [[6.0, 7.0]], [[8.0, 9.0]]], of=([[4.0, 5.0]], [[6.0, 7.0]], [[8.0, 9.0]]), dtypes=DTYPES)
def test_stack_puts_the_rows_on_one_another(dtype, x0, x1, x2):
    """WritePack."""
    ta = TensorArray(dtype, tensor_array_name="foo", size=3)
    return ta.write(0, x0).write(1, x1).write(2, x2).stack()


@gives(np.zeros((3, 0, 1)), of=(np.zeros((0, 1), np.float32),))
def test_rows_without_elements_are_stacked_too(empty):
    """EmptyTensorArrayPack."""
    ta = TensorArray(np.float32, tensor_array_name="foo", size=3)
    return ta.write(0, empty).write(1, empty).write(2, empty).stack()


@gives(
    ([[0.0, 0.0]], [[[0.0, 0.0]], [[4.0, 5.0]], [[0.0, 0.0]]], [[0.0, 0.0], [4.0, 5.0], [0.0, 0.0]]) * 2,
    of=([[4.0, 5.0]],),
)
def test_unwritten_rows_of_a_known_or_inferred_shape_are_zeros(x):
    """ReadOrPackNotAllValuesAvailable{,InferShape}FillsZeros, ReadUninitializedInferShapeFillsZeros."""
    known = TensorArray(np.float32, tensor_array_name="foo", size=3, element_shape=[1, 2])
    w = TensorArray(np.float32, tensor_array_name="foo", size=3).write(1, x)
    return known.read(0), known.write(1, x).stack(), known.write(1, x).concat(), w.read(0), w.stack(), w.concat()


@gives(
    (
        [[4.0, 5.0], [104.0, 105.0], [204.0, 205.0], [6.0, 7.0], [106.0, 107.0], [8.0, 9.0]],
        [[4.0, 5.0], [104.0, 105.0], [6.0, 7.0], [106.0, 107.0], [8.0, 9.0], [204.0, 205.0]],
    ),
    of=(
        *([[4.0, 5.0], [104.0, 105.0], [204.0, 205.0]], [[6.0, 7.0], [106.0, 107.0]], [[8.0, 9.0]]),
        *([[4.0, 5.0], [104.0, 105.0]], [[6.0, 7.0], [106.0, 107.0]], [[8.0, 9.0], [204.0, 205.0]]),
    ),
    dtypes=DTYPES,
)
def test_concat_joins_rows(dtype, *rows):
    """WriteConcat, here and of the XLA tests."""
    different = TensorArray(dtype, tensor_array_name="foo", size=3, infer_shape=False)
    equal = TensorArray(dtype, tensor_array_name="foo", size=3)
    for i in range(3):
        different, equal = different.write(i, rows[i]), equal.write(i, rows[3 + i])
    return different.concat(), equal.concat()


@gives([1, 1, 1, 8, 9, 8, 9, 8, 9], of=tuple(np.array(x, np.int32) for x in ([1], [8], [], [9])))
def test_a_concat_of_concats_keeps_the_order(one, eight, none, nine):
    """WriteConcatInParallel, with Python's `for` and `if` for `tf.while_loop` and `tf.cond`."""

    def concat_of(values):
        ta = TensorArray(np.int32, size=len(values), infer_shape=False)
        for i, value in enumerate(values):
            ta = ta.write(i, value)
        return ta.concat()

    output = TensorArray(np.int32, size=6, infer_shape=False)
    for i in range(6):
        output = output.write(i, concat_of([one, none] if i < 3 else [eight, none, nine]))
    return output.concat()


@gives(
    ([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]], [1.0, 2.0, 3.0], [[1.0, 2.0, 3.0]]),
    of=([1.0, 2.0, 3.0], np.array([0], np.int32)),
)
def test_one_written_row_gives_stack_read_and_gather_their_shapes(x, indices):
    """StackShape, ReadShape, GatherShape."""
    ta = TensorArray(np.float32, size=3).write(0, x)
    return ta.stack(), ta.read(0), ta.gather(indices)


@gives((np.zeros((42, 1)), np.zeros((0, 5, 10))))
def test_stack_has_as_many_rows_as_the_size_says():
    """StackShapeOnStaticSize, StackShapeOnEmpty."""
    empty = TensorArray(np.float32, size=0, element_shape=(5, 10), dynamic_size=True)
    return TensorArray(np.float32, size=42).write(0, [0]).stack(), empty.stack()


# --- unstack, split, scatter -----------------------------------------------------------------------------------

MATRIX = [[1.0, 1.1], [2.0, 2.1], [3.0, 3.1]]


@gives(tuple(MATRIX) * 2, of=(MATRIX,), dtypes=DTYPES)
def test_unstack_makes_rows_of_an_array(dtype, x):
    """UnpackRead; with infer_shape=True as in the XLA tests."""
    tas = [TensorArray(dtype, tensor_array_name="foo", size=3, infer_shape=infer) for infer in (False, True)]
    return tuple(row for ta in tas for row in read_all(ta.unstack(x), range(3)))


@gives((1.0, [2.0, 2.1], []), of=([1.0, 2.0, 3.0], MATRIX, [[], [], []]))
def test_a_tensorarray_can_be_unstacked_into_again_with_another_shape(*xs):
    """UnpackRead, of which every part uses the same TensorArray."""
    ta = TensorArray(np.float32, tensor_array_name="foo", size=3, infer_shape=False)
    return tuple(ta.unstack(x).read(k) for k, x in enumerate(xs))


PAIRS = [[1.0, 101.0], [2.0, 201.0], [3.0, 301.0]]


@gives((PAIRS[:2], np.zeros((0, 2)), PAIRS[2:], PAIRS[:1], PAIRS[1:2], PAIRS[2:]), of=(PAIRS,), dtypes=DTYPES)
def test_split_makes_rows_of_different_lengths_or_of_one(dtype, x):
    """SplitRead, here and of the XLA tests."""
    ragged = TensorArray(dtype, tensor_array_name="foo", size=3, infer_shape=False).split(x, lengths=[2, 0, 1])
    even = TensorArray(dtype, tensor_array_name="foo", size=3).split(x, lengths=np.array([1, 1, 1]))
    return read_all(ragged, range(3)) + read_all(even, range(3))


@gives(([1.0, 2.0], [], [3.0], [], [], [], [1.0], [2.0], [3.0], [], [], []), of=([1.0, 2.0, 3.0], []))
def test_vectors_are_split_too(vector, empty):
    """SplitRead, here and of the XLA tests."""
    ragged = TensorArray(np.float32, tensor_array_name="foo", size=3, infer_shape=False)
    even = TensorArray(np.float32, tensor_array_name="foo", size=3)
    cases = [(ragged, vector, [2, 0, 1]), (ragged, empty, [0] * 3), (even, vector, [1] * 3), (even, empty, [0] * 3)]
    return tuple(row for ta, x, lengths in cases for row in read_all(ta.split(x, lengths), range(3)))


@gives([[1.0, -1.0]], of=([[1.0, -1.0], [2.0, -2.0], [3.0, -3.0]],))
def test_equal_lengths_give_split_a_shape_to_infer(value):
    """SplitShape."""
    ta = TensorArray(np.float32, tensor_array_name="foo", size=0, dynamic_size=True, infer_shape=True)
    w0 = ta.split(value, [1, 1, 1])
    assert w0.element_shape == (1, 2)
    return w0.read(0)


@gives(([[1.0, -1.0]], [[2.0, -2.0], [3.0, -3.0]]), of=([[1.0, -1.0], [2.0, -2.0], [3.0, -3.0]],))
def test_different_lengths_need_infer_shape_false(value):
    """SplitShape: TensorFlow infers an unknown shape there, and JAX has none."""
    with pytest.raises(ValueError, match="infer_shape=False"):
        TensorArray(np.float32, tensor_array_name="foo1", size=2, infer_shape=True).split(value, [1, 2])
    return read_all(TensorArray(np.float32, size=2, infer_shape=False).split(value, [1, 2]), range(2))


@gives(([0.0, 0.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 1.0, 1.0], [5.0, 1.0, 6.0, 1.0, 1.0]))
def test_scatter_leaves_the_other_rows_alone():
    """ScatterIntoExistingList."""
    ta0 = TensorArray(np.float32, tensor_array_name="foo", size=5)
    ta1 = ta0.scatter(indices=[3, 4], value=jnp.ones(2, np.float32))
    ta2 = ta1.scatter(indices=[1], value=jnp.ones(1, np.float32))
    ta3 = ta2.scatter(indices=[0, 2], value=[5.0, 6.0])
    return ta1.stack(), ta2.stack(), ta3.stack()


@gives(
    ([1.0, -1.0], [10.0, -10.0]),
    of=(np.array([1, 8]), [[1.0, -1.0], [10.0, -10.0]], np.array(1), np.array(8)),
    dtypes=DTYPES,
)
def test_scattered_rows_are_read_at_indices_known_when_the_program_runs(dtype, indices, value, id0, id1):
    """ScatterRead of the XLA tests; Int64GPU, ScatterBfloat16GPU."""
    w = TensorArray(dtype, tensor_array_name="foo", size=10).scatter(indices, value)
    return w.read(id0), w.read(id1)


@gives((0, np.zeros((0, 3, 5)), np.zeros((0, 5))), of=(np.zeros((0, 3, 5), np.float32),))
def test_no_rows_are_unstacked_stacked_and_concatenated(value):
    """EvalEmptyWithDefault."""
    ta = TensorArray(np.float32, size=0, dynamic_size=False, infer_shape=True)
    size = ta.size()
    ta = ta.unstack(value)
    return size, ta.stack(), ta.concat()


# --- shapes ----------------------------------------------------------------------------------------------------


@gives(([4.0, 5.0], [6.0, 7.0]), of=([4.0, 5.0], [6.0, 7.0], [4.0, 5.0, 6.0]))
def test_the_first_write_fixes_the_shape(c0, c1, c2):
    """WriteShape."""
    w0 = TensorArray(np.float32, tensor_array_name="foo", size=3).write(0, c0)
    assert w0.read(0).shape == c0.shape
    w1 = w0.write(1, c1)
    with pytest.raises(ValueError, match="Incompatible shape for value"):
        w0.write(0, c2)
    return read_all(w1, range(2))


@gives(
    ([1.0, -1.0], [1.0, -1.0], [4.0, 5.0]),
    of=([[1.0, -1.0], [10.0, -10.0], [100.0, -100.0]], [4.0, 5.0], [4.0, 5.0, 6.0]),
)
def test_unstack_fixes_the_shape(value, c1, c2):
    """UnpackShape."""
    w0 = growing(5, tensor_array_name="foo", infer_shape=True).unstack(value)
    r0 = w0.read(0)
    assert r0.shape == (2,)
    w1 = w0.write(3, c1)
    assert w1.read(1).shape == c1.shape
    with pytest.raises(ValueError, match="Incompatible shape for value"):
        w1.write(4, c2)
    return r0, w1.read(0), w1.read(3)


@gives(
    (np.ones((5, 4, 2, 3)), np.zeros((5, 4, 2, 3))),
    of=(np.ones((5, 4, 2, 3), np.float32), np.ones((2, 5, 4, 2, 3), np.float32)),
)
def test_a_write_fills_the_unknown_dimensions_of_the_shape(row, rows):
    """PartlyUnknownShape: where placeholders had unknown dimensions, the element_shape has them."""
    ta = TensorArray(np.float32, tensor_array_name="foo", size=6, element_shape=[None, None, None, 3])
    assert ta.element_shape == (None, None, None, 3)
    w0 = ta.write(0, row)
    assert w0.element_shape == (5, 4, 2, 3)
    w1 = w0.scatter([4, 5], rows)
    assert ta.element_shape == (None, None, None, 3)
    return w1.read(4), w1.read(1)


@gives((np.ones((5, 4, 2, 3)),) * 2, of=(np.ones((10, 4, 2, 3), np.float32),))
def test_a_split_fills_the_unknown_dimensions_of_the_shape(value):
    """PartlyUnknownShape, its last part."""
    tas = [TensorArray(np.float32, size=2, element_shape=shape) for shape in (None, [None, 4, 2, 3])]
    tas = [ta.split(value, [5, 5]) for ta in tas]
    assert {ta.element_shape for ta in tas} == {(5, 4, 2, 3)}
    return tuple(ta.read(0) for ta in tas)


LONG, SHORT = np.ones((50, 10, 20), np.float32), np.ones((1, 10, 20), np.float32)


@gives(np.ones((101, 10, 20)), of=(LONG, SHORT))
def test_without_inference_only_unknown_dimensions_may_differ(long, short):
    """InferShapeFalseValid, InferShapeFalseInvalid."""
    ta = TensorArray(np.float32, size=3, infer_shape=False, element_shape=[None, 10, 20])
    ta = ta.write(0, long)
    with pytest.raises(ValueError, match="Incompatible shape for value"):
        ta.write(1, jnp.ones((1, 20, 20), np.float32))
    return ta.write(1, long).write(2, short).concat()


@gives(LONG, of=(LONG, SHORT))
def test_with_inference_unknown_dimensions_are_fixed_by_the_first_write(long, short):
    """InferShapeTrue."""
    ta = TensorArray(np.float32, size=3, infer_shape=True, element_shape=[None, 10, 20])
    assert ta.element_shape == (None, 10, 20)
    ta = ta.write(0, long)
    assert ta.element_shape == (50, 10, 20)
    ta = ta.write(1, long)
    with pytest.raises(ValueError, match=r"\(1, 10, 20\).*\(50, 10, 20\)"):
        ta.write(2, short)
    return ta.read(1)


# --- errors ----------------------------------------------------------------------------------------------------


def foo(size=3, **options):
    return TensorArray(np.float32, tensor_array_name="foo", size=size, infer_shape=False, **options)


SUM_OF_LENGTHS = r"Expected sum of lengths to be equal to values.shape\[0\], but sum of lengths is {} and value's shape"
#: TensorFlow's test, what is wrong, the error, its text, the program and its arguments.
ERRORS = [
    ("WriteWrongIndexOrDataTypeFails", "dtype", TypeError, "float32", lambda: foo().write(0, "wrong").stack()),
    (
        *("WriteWrongIndexOrDataTypeFails", "dtype of an array", TypeError),
        "TensorArray dtype is float32 but Op is trying to write dtype int32",
        *(lambda x: foo().write(0, x).stack(), np.array(7, np.int32)),
    ),
    ("WriteWrongIndexOrDataTypeFails", "index", IndexError, "index -1", lambda: foo().write(-1, 3.0).stack()),
    (
        *("WriteWrongIndexOrDataTypeFails", "index past the end", IndexError),
        "Tried to write to index 3 but array is not resizeable and size is: 3",
        lambda: foo().write(3, 3.0).stack(),
    ),
    ("ReadWrongIndexOrDataTypeFails", "index", IndexError, "index -1", lambda: foo().write(0, [[4.0]]).read(-1)),
    (
        *("ReadWrongIndexOrDataTypeFails", "index past the end", IndexError),
        "Tried to read from index 3 but array size is: 3",
        lambda: foo().write(0, [[4.0]]).read(3),
    ),
    (
        *("ConcatIncompatibleShapesFails", "scalars", ValueError),
        "Concat saw a scalar shape at index 0 but requires at least vectors",
        lambda: foo().write(0, 3.0).write(1, 4.0).write(2, [3.0]).concat(),
    ),
    (
        *("ConcatIncompatibleShapesFails", "different ranks", ValueError, r"shape|rank"),
        lambda: foo().write(0, [3.0]).write(1, [4.0]).write(2, [[3.0]]).concat(),
    ),
    ("EvalEmpty", "no shape", ValueError, "element_shape", lambda: foo(0, dynamic_size=False).stack()),
    (
        # JAX has no array of shape (None, 5, None).
        *("StackOnPartiallyDefinedShape", "no row was written", ValueError, "element_shape"),
        lambda: TensorArray(np.float32, size=0, element_shape=(5, None), dynamic_size=True).stack(),
    ),
    (
        *("SplitIncompatibleShapesFails", "scalar lengths", ValueError),
        r"Expected lengths to be a vector, received shape: \[\]",
        *(lambda x: foo().split(x, 1).read(0), [1.0, 2.0, 3.0]),
    ),
    (
        *("SplitIncompatibleShapesFails", "too few lengths", ValueError, SUM_OF_LENGTHS.format(1) + r" is: \[3\]"),
        *(lambda x: foo().split(x, [1]).read(0), [1.0, 2.0, 3.0]),
    ),
    (
        *("SplitIncompatibleShapesFails", "too large a sum", ValueError, SUM_OF_LENGTHS.format(6) + r" is: \[3\]"),
        *(lambda x: foo().split(x, [1, 2, 3]).read(0), [1.0, 2.0, 3.0]),
    ),
    (
        *("SplitIncompatibleShapesFails", "scalar value", ValueError),
        r"Expected value to be at least a vector, but received shape: \[\]",
        *(lambda x: foo(1).split(x, [1]).read(0), 1.0),
    ),
    (
        *("SplitIncompatibleShapesFails", "other number of lengths", ValueError),
        r"TensorArray's size is not equal to the size of lengths \(2 vs. 1\), and the TensorArray is not marked as "
        "dynamically resizeable",
        *(lambda x: foo(2).split(x, [1]).read(0), [1.0]),
    ),
    (
        *("WriteShape", "another shape than the one stated", ValueError),
        r"Incompatible shape for value \(\(3,\)\), expected \(\(2,\)\)",
        *(lambda x: TensorArray(np.float32, size=3, element_shape=[2]).write(0, x).stack(), [4.0, 5.0, 6.0]),
    ),
    (
        # TensorFlow 2 raises NotImplementedError too.
        *("TensorGradArrayWriteRead", "grad", NotImplementedError, r"jax\.grad"),
        lambda: foo().grad("grad"),
    ),
]


@pytest.mark.parametrize("case", ERRORS, ids=lambda case: f"{case[0]}: {case[1]}")
def test_what_is_an_error_in_tensorflow_is_one_here(mode, case):
    _, _, error, message, f, *args = case
    with pytest.raises(error, match=message):
        run(mode, f, *(converted(x, np.float32) for x in args))


def test_growth_inside_a_transformation_needs_a_max_size():
    """UnpackDynamic under jit."""
    ta = TensorArray(np.float32, size=3, dynamic_size=True)
    with pytest.raises(ValueError, match="max_size"):
        jax.jit(lambda x: ta.unstack(x).write(3, 4.0).stack())(jnp.array([1.0, 2.0, 3.0], np.float32))


# --- size, close, identity -------------------------------------------------------------------------------------


@gives((3, [3.0]))
def test_size_is_the_number_of_rows_and_close_does_nothing():
    """SizeTensorArray, CloseTensorArray, WriteCloseTensorArray."""
    ta = TensorArray(np.float32, tensor_array_name="foo", size=3, infer_shape=False)
    assert ta.close() is None
    w1 = ta.write(0, [[4.0, 5.0]]).write(1, [3.0])
    assert w1.close() is None
    return ta.size(), w1.read(1)


@gives((0, 1, 2, 4))
def test_identity_keeps_dtype_rows_and_size():
    """TensorArrayIdentity."""
    ta0 = TensorArray(np.float32, size=2, infer_shape=False).write(0, 0.0).identity()
    ta1 = TensorArray(np.int32, size=4, infer_shape=True).write(0, 1).identity()
    assert (ta0.dtype, ta1.dtype) == (np.float32, np.int32)
    assert ta0.read(0).shape == ta1.read(0).shape == ()
    return ta0.read(0), ta1.read(0), ta0.size(), ta1.size()


# --- growing ---------------------------------------------------------------------------------------------------


@gives(([[4.0, 5.0]], [[1.0]], -3.0, [[4.0]], [[1.0]], [[-3.0]], 3, 0, 3))
def test_rows_grow_one_by_one():
    """TensorGradArrayDynamicWriteRead, its forward half, with rows of different shapes; and of the XLA tests."""
    ta = growing(3, tensor_array_name="foo", infer_shape=False)
    w2 = ta.write(0, [[4.0, 5.0]]).write(1, [[1.0]]).write(2, -3.0)
    of_one_shape = growing(3).write(0, [[4.0]]).write(1, [[1.0]]).write(2, [[-3.0]])
    rows = read_all(w2, range(3)) + read_all(of_one_shape, range(3))
    return (*rows, w2.size(), ta.size(), of_one_shape.size())


@gives(([1.0, -1.0], [10.0, -10.0], [0.0, 0.0], 9), of=([[1.0, -1.0], [10.0, -10.0]],))
def test_a_scatter_past_the_end_grows(value):
    """ScatterReadAndGradients, its values; the rows between are zeros."""
    w = growing(9, tensor_array_name="foo").scatter([1, 8], value)
    return (*read_all(w, (1, 8, 0)), w.size())


@gives(([1.0, 2.0, 3.0, 4.0],) * 2, of=([1.0, 2.0, 3.0],))
def test_growth_after_unstack_and_split(x):
    """UnpackDynamic, SplitDynamic: their values."""
    ta = growing(4, size=3)
    return ta.unstack(x).write(3, 4.0).stack(), ta.split(x, [1, 1, 1]).write(3, [4.0]).concat()


@gives(([1, 2, 5, 10, 17], [1, 2, 5, 10, 17], 5))
def test_a_loop_grows_a_tensorarray():
    """WhileLoopDynamicSizeZeroXla; eagerly a Python loop in TensorFlow as well."""
    by_python = growing(5, np.int32)
    for i in range(5):
        by_python = by_python.write(i, i**2 + 1)
    _, ta = lax.while_loop(
        lambda carry: carry[0] < 5,
        lambda carry: (carry[0] + 1, carry[1].write(carry[0], jnp.square(carry[0]) + 1)),
        (jnp.int32(0), TensorArray(np.int32, size=0, dynamic_size=True, element_shape=(), max_size=5)),
    )
    return by_python.stack(), ta.stack(), ta.size()


# --- gradients -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grad_ys", "gradients", "dtypes"),
    [
        (([[2.0, 3.0]], [[0.0, 0.0]], 0.0), ([[2.0, 3.0]], 0.0), [np.float32]),
        (([[2.0, 3.0]], [[1.0, -1.0]], 0.0), ([[3.0, 2.0]], 0.0), [np.float32]),
        (([[0.0, 0.0]], [[0.0, 0.0]], -2.0), ([[0.0, 0.0]], -2.0), [np.float32]),
        (([[2.0, 3.0]], [[1.0, -1.0]], -2.0), ([[3.0, 2.0]], -2.0), FLOATS_AND_COMPLEX),
        (([[2.0, 3.0]], [[1.0, -1.0]], [[-2.0, -10.0]]), ([[3.0, 2.0]], [[-2.0, -10.0]]), FLOATS_AND_COMPLEX),
    ],
)
def test_the_gradient_of_reads_goes_to_the_row_written(mode, grad_ys, gradients, dtypes):
    """GradientWriteRead; the last is that of the XLA tests, with rows of one shape."""
    infer_shape = isinstance(gradients[1], list)

    @gives(
        None,
        of=([[4.0, 5.0]], [[3.0, 3.5]] if infer_shape else 3.0),
        grad_ys=grad_ys,
        gradients=gradients,
        dtypes=dtypes,
    )
    def test(dtype, value_0, value_1):
        ta = TensorArray(dtype, tensor_array_name="foo", size=3, infer_shape=infer_shape)
        w1 = ta.write(0, value_0).write(1, value_1)
        return w1.read(0), w1.read(0), w1.read(1)

    test(mode)


@gives(None, of=(3.0, 4.0), grad_ys=(3.0, 4.0, 5.0), gradients=(0.0, 12.0), dtypes=FLOATS_AND_COMPLEX)
def test_gradients_of_one_row_are_summed_and_go_to_the_last_write(dtype, first, second):
    """WriteGradientAddMultipleAdds: a gradient written three times is a row read three times."""
    w1 = TensorArray(dtype, tensor_array_name="foo", size=3).write(2, first).write(2, second)
    return w1.read(2), w1.read(2), w1.read(2)


@gives(
    None,
    of=([-1.0, 1.0], [-10.0, 10.0]),
    grad_ys=([[2.0, 3.0], [4.0, 5.0]], [-0.5, 1.5], [20.0, 30.0, 40.0, 50.0]),
    gradients=([2.0 - 0.5 + 20.0, 3.0 + 1.5 + 30.0], [4.0 + 40.0, 5.0 + 50.0]),
)
def test_gradients_of_stack_read_and_concat_are_summed(value_0, value_1):
    """GradientWritePackConcatAndRead."""
    ta = TensorArray(np.float32, tensor_array_name="foo", size=2, clear_after_read=False)
    w1 = ta.write(0, value_0).write(1, value_1)
    return w1.stack(), w1.read(0), w1.concat()


@gives([2.0, 4.0, 6.0, 3.0, 6.0, 9.0], of=([1.0, 2.0, 3.0],), grad_ys=[1.0] * 6, gradients=([5.0, 5.0, 5.0],))
@jax.jit
def test_the_gradient_of_concat_goes_through_nested_compilation(x):
    """TensorListConcat*, TensorListConcatGrad* of polymorphic_function_xla_jit_test.py."""
    return TensorArray(np.float32, size=2, element_shape=[3]).write(0, 2 * x).write(1, 3 * x).concat()


TWO_ROWS = [[1.0, -1.0], [10.0, -10.0]]


@gives(
    None,
    of=(TWO_ROWS,),
    grad_ys=([2.0, 3.0], [-1.5, 1.5], [4.0, 5.0]),
    gradients=([[2.0 - 1.5, 3.0 + 1.5], [4.0, 5.0]],),
)
def test_the_gradient_of_unstack_is_that_of_the_rows_read(value):
    """GradientUnpackRead."""
    ta = TensorArray(np.float32, tensor_array_name="foo", size=2, clear_after_read=False)
    w = ta.unstack(value)
    return w.read(0), w.read(0), w.read(1)


@gives(None, of=(TWO_ROWS,), grad_ys=([2.0, 3.0], [4.0, 5.0]), gradients=([[2.0, 3.0], [4.0, 5.0]],))
def test_the_gradient_of_unstack_into_a_growing_tensorarray(value):
    """GradientDynamicUnpackRead."""
    ta = TensorArray(np.float32, tensor_array_name="foo", size=0, dynamic_size=True)
    return read_all(ta.unstack(value), range(2))


GRAD = [[2.0, -2.0], [20.0, -20.0], [200.0, -200.0], [2000.0, -2000.0]]


@gives(None, of=([*TWO_ROWS, [100.0, -100.0]],), grad_ys=GRAD[:3], gradients=(GRAD[:3],))
def test_the_gradient_of_split_and_concat_is_itself(value):
    """GradientSplitConcat."""
    ta = TensorArray(np.float32, tensor_array_name="foo", size=2, infer_shape=False)
    return ta.split(value, [2, 1]).concat()


@gives(
    None,
    of=([*TWO_ROWS, [100.0, -100.0], [1000.0, -1000.0]],) * 2,
    grad_ys=(GRAD, GRAD[:2], GRAD[2:]),
    gradients=(GRAD, GRAD),
)
def test_the_gradient_of_split_into_equal_lengths(joined, read):
    """GradientSplitConcat of the XLA tests, with the concat and with reads."""
    ta = TensorArray(np.float32, tensor_array_name="foo", size=2)
    return ta.split(joined, [2, 2]).concat(), *read_all(ta.split(read, [2, 2]), range(2))


@gives(None, of=([2.0, 3.0], 5.0, 10.0), grad_ys=(1.0, 1.0), gradients=([1.0, 0.0], 1.0, 0.0))
def test_rows_that_nobody_reads_get_no_gradient(x, x0, x1):
    """GradientWhenNotAllComponentsRead, WriteButNotAllComponentsReadGrad."""
    ta = TensorArray(np.float32, size=2)
    return ta.unstack(x).read(0), ta.write(0, x0).write(1, x1).read(0)


@gives(None, of=([1.0, 2.0, 3.0],) * 2, grad_ys=([1.0] * 4,) * 2, gradients=([1.0] * 3,) * 2)
def test_the_gradients_of_unstack_and_split_do_not_mind_a_later_write(x, y):
    """UnpackDynamic, SplitDynamic."""
    ta = TensorArray(np.float32, size=3, dynamic_size=True, max_size=4)
    return ta.unstack(x).write(3, 4.0).stack(), ta.split(y, [1, 1, 1]).write(3, [4.0]).concat()


@gives(
    (*TWO_ROWS, *TWO_ROWS),
    of=(TWO_ROWS, TWO_ROWS),
    grad_ys=([2.0, 3.0], [4.0, 5.0], [6.0, 7.0], [8.0, 9.0]),
    gradients=([[2.0, 3.0], [4.0, 5.0]], [[6.0, 7.0], [8.0, 9.0]]),
)
def test_the_gradient_of_scatter_is_that_of_the_rows_read(*values):
    """ScatterReadAndGradients; of a fixed size as in the XLA tests."""
    sizes = {"size": 0, "dynamic_size": True, "max_size": 9}, {"size": 10}
    tas = [TensorArray(np.float32, tensor_array_name="foo", **options) for options in sizes]
    tas = [ta.scatter(jnp.array([1, 8]), value) for ta, value in zip(tas, values, strict=True)]
    return tuple(row for ta in tas for row in read_all(ta, (1, 8)))


@gives([1.0, -1.0], of=(TWO_ROWS,), grad_ys=[2.0, 3.0], gradients=([[2.0, 3.0], [0.0, 0.0]],))
def test_the_gradient_of_a_scattered_row_that_nobody_reads_is_zero(value):
    """ScatterPartialReadAndGradients."""
    ta = TensorArray(np.float32, tensor_array_name="foo", size=0, dynamic_size=True, max_size=9)
    return ta.scatter([1, 8], value).read(1)


@pytest.mark.parametrize("options", [{"size": 0, "dynamic_size": True}, {"size": 10}], ids=["dynamic", "static"])
def test_the_gradient_of_gather_is_that_of_the_rows_gathered(mode, options):
    """WriteGatherAndGradients; of a fixed size as in the XLA tests."""
    grad = np.zeros((10, 2))
    grad[1], grad[8] = [2.0, 3.0], [4.0, 5.0]

    @gives(
        ([[1.0, -1.0], [8.0, -8.0]],) * 2,
        of=([[1.0 * x, -1.0 * x] for x in range(10)],),
        grad_ys=([[2.0, 3.0], [4.0, 5.0]],) * 2,
        gradients=(2 * grad,),
    )
    def test(values):
        ta = TensorArray(np.float32, tensor_array_name="foo", **options).unstack(values)
        return ta.gather([1, 8]), ta.gather(np.array([1, 8], np.int32))

    test(mode)


BLOCK = np.arange(3 * 5, dtype=np.float32).reshape(3, 5) + 1


@gives(None, of=(BLOCK, BLOCK + 15), grad_ys=-BLOCK, gradients=(-BLOCK, -BLOCK))
def test_the_sum_of_two_rows_gives_both_its_gradient(a, b):
    """SumOfTwoReadVariablesWithoutRepeatGrad."""
    ta = TensorArray(np.float32, size=2)
    ta = ta.write(0, a, name="write_a")
    ta = ta.write(1, b, name="write_b")
    return ta.read(0, name="read_a_0") + ta.read(1, name="read_b_0")


@gives(None, of=([[1.42]],), grad_ys=[[2.42]], gradients=([[2.42]],))
def test_the_gradient_of_one_row_of_one_element(x):
    """GradYsInCorrectScope."""
    return TensorArray(np.float32, size=1, element_shape=[1]).write(index=0, value=x[0]).stack()


@gives((2.0, 2.0), of=(4.0,))
def test_the_second_derivative_of_a_square_of_a_row(x):
    """GradGrad."""

    def second(infer_shape):
        def f(x):
            r0 = TensorArray(np.float32, tensor_array_name="foo", size=1, infer_shape=infer_shape).write(0, x).read(0)
            return r0 * r0

        return jax.grad(jax.grad(f))(x)

    return second(True), second(False)


# --- loops -----------------------------------------------------------------------------------------------------

V0 = np.arange(3 * 5, dtype=np.float32).reshape(3, 5)
STATE0 = np.ones(5, np.float32)
VAR = np.arange(100, 105, dtype=np.float32)
VOUT = [[101, 103, 105, 107, 109], [106, 109, 112, 115, 118], [116, 120, 124, 128, 132]]
GRAD_VAL = -np.arange(3 * 5, dtype=np.float32).reshape(3, 5)
V0_GRAD = [[-15, -18, -21, -24, -27], [-15, -17, -19, -21, -23], [-10, -11, -12, -13, -14]]
COLUMN_SUMS_OF_GRAD_VAL = [-15, -18, -21, -24, -27]
ONES, ZEROS, NO_ROW = np.ones(5, np.float32), np.zeros(5, np.float32), np.zeros((3, 5), np.float32)
#: Tangents of `V0`, `STATE0` and `VAR`, and the tangent of the outputs.
DIRECTIONS = [
    ((NO_ROW, ONES, ZEROS), np.ones((3, 5))),
    ((NO_ROW, ZEROS, ONES), np.ones((3, 5))),
    ((np.stack([ONES, ZEROS, ZEROS]), ZEROS, ZEROS), [[1] * 5] * 3),
    ((np.stack([ZEROS, ONES, ZEROS]), ZEROS, ZEROS), [[0] * 5, [1] * 5, [1] * 5]),
]


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


@pytest.mark.parametrize("loop", [by_python, by_fori_loop, by_scan, by_while_loop], ids=lambda loop: loop.__name__)
@pytest.mark.parametrize(
    "options", [{"size": 3}, {"size": 0, "dynamic_size": True, "max_size": 3}], ids=["static", "dynamic"]
)
def test_a_loop_writes_its_outputs_and_derivatives_go_through_it(mode, loop, options):
    """WhileLoopWritePackGradients, WhileLoopDynamicWritePackGradients.

    Outputs are written and the state sums what was seen. Derivatives also go forward, as JAX has them of a while loop.
    """

    def recurrence(v0, state0, var):
        def step(time, ta, state):
            row = lax.dynamic_index_in_dim(v0, time, keepdims=False)
            return ta.write(time, row + var + state), state + row

        ta = TensorArray(np.float32, tensor_array_name="foo", element_shape=[5], **options)
        return loop(step, ta, state0).stack()

    def everything(args, grad_val, directions):
        out, push_forward = jax.linearize(recurrence, *args)
        backward = () if loop is by_while_loop else jax.vjp(recurrence, *args)[1](grad_val)
        return out, backward, [push_forward(*tangents) for tangents in directions]

    args = tuple(map(jnp.asarray, (V0, STATE0, VAR)))
    out, backward, forward = run(
        mode, everything, args, jnp.asarray(GRAD_VAL), [jax.tree.map(jnp.asarray, d) for d, _ in DIRECTIONS]
    )
    assert_equal(out, VOUT)
    assert_equal(forward, [tangent for _, tangent in DIRECTIONS])
    if loop is not by_while_loop:
        assert_equal(backward, (V0_GRAD, COLUMN_SUMS_OF_GRAD_VAL, COLUMN_SUMS_OF_GRAD_VAL))


@gives([2.0, 4.0, 8.0, 16.0, 32.0, *[0.0] * 95], of=(2.0,), grad_ys=np.ones(100, np.float32), gradients=(31.0,))
def test_the_gradient_goes_back_through_two_loops_in_a_row(x):
    """GradSerialTwoLoops: the first reads what it wrote, in one branch of a cond; the second pads with zeros."""

    def double(i, acc):
        x1 = lax.cond(i == 0, lambda: x, lambda: acc.read(i - 1) * 2.0)
        return acc.write(i, x1)

    acc = TensorArray(np.float32, size=100, clear_after_read=False, element_shape=())
    acc = lax.fori_loop(0, 5, double, acc)
    return lax.fori_loop(5, 100, lambda i, acc: acc.write(i, 0.0), acc).stack()


@gives((np.zeros((10, 1, 1)),) * 2)
def test_a_loop_in_python_infers_the_shape_and_one_in_jax_wants_it_stated():
    """ShapeAfterWhileLoop, as eager TensorFlow runs it, and where TensorFlow infers it from the body."""
    by_python = TensorArray(np.float32, size=10)
    for i in range(10):
        by_python = by_python.write(i, [[0.0]])

    def by_jax(**options):
        start = jnp.int32(0), TensorArray(np.float32, size=10, **options)
        step = lambda carry: (carry[0] + 1, carry[1].write(carry[0], [[0.0]]))  # noqa: E731
        return lax.while_loop(lambda carry: carry[0] < 10, step, start)[1]

    with pytest.raises(TypeError, match="element_shape"):
        by_jax()
    ta = by_jax(element_shape=[1, 1])
    assert by_python.element_shape == ta.element_shape == (1, 1)
    return by_python.stack(), ta.stack()


@gives(6.0, of=([1.0, 2.0, 3.0],))
def test_a_while_loop_sums_the_rows_of_a_tensorarray_that_it_closes_over(x):
    """The rows of UnpackRead; TensorFlow adds 1.0 + 2.0 + 3.0."""
    ta = TensorArray(np.float32, size=3).unstack(x)
    start = jnp.int32(0), jnp.float32(0)
    return lax.while_loop(lambda c: c[0] < ta.size(), lambda c: (c[0] + 1, c[1] + ta.read(c[0])), start)[1]


# --- cond, closures, functions ---------------------------------------------------------------------------------


@gives(([5.0], [5.0], [10.0], [0.0]), of=(np.array(True), np.array(False)))
def test_the_branches_of_a_cond_write_a_tensorarray_or_do_not(*preds):
    """CondAndTensorArrayInDefun{,_constFolding} of cond_test.py: closed over, and with one of the writes."""
    closed, ta = (TensorArray(np.float32, size=1, element_shape=shape) for shape in (None, ()))
    return tuple(
        after.stack()
        for taken in preds
        for after in (
            lax.cond(taken, lambda: closed.write(0, 5.0), lambda: closed.write(0, 10.0)),
            lax.cond(taken, lambda ta: ta.write(0, 5.0), lambda ta: ta, ta),
        )
    )


@gives([10.0], of=(np.array(1),))
def test_a_switch_writes_in_the_branch_it_takes(index):
    """SwitchCaseAndTensorArrayInDefun of cond_test.py."""
    ta = TensorArray(np.float32, size=1)
    return lax.switch(index, [lambda x=x: ta.write(0, x) for x in (5.0, 10.0, 15.0)]).stack()


@gives(
    None,
    of=([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]),
    grad_ys=([1.0] * 3, [1.0] * 3),
    gradients=([2.0, 2.0, 2.0], [0.0, 0.0, 0.0]),
)
def test_the_gradient_of_a_map_in_one_branch_of_a_cond(*xs):
    """CondWithTensorArrayGrad of control_flow_ops_py_test.py; `tf.map_fn` reads a TensorArray and writes another."""

    def double_all(x):
        xs = TensorArray(np.float32, size=3).unstack(x)
        ys = TensorArray(np.float32, size=3, element_shape=())
        return lax.fori_loop(0, 3, lambda i, ys: ys.write(i, xs.read(i) * 2.0), ys).stack()

    def f(taken, x):
        return lax.cond(taken, double_all, lambda x: jnp.ones(3, np.float32), x)

    return tuple(f(taken, x) for taken, x in zip((True, False), xs, strict=True))


@pytest.mark.parametrize("element_shape", [[3], None], ids=str)
def test_a_tensorarray_is_an_argument_and_a_result_of_a_function(mode, element_shape):
    """TensorListConcat of polymorphic_function_xla_jit_test.py. The function may fix the shape of its argument."""
    empty = TensorArray(np.float32, size=2, element_shape=element_shape)
    x = jnp.array([1.0, 2.0, 3.0], np.float32)
    full = run(mode, lambda ta, x: ta.write(0, 2 * x).write(1, 3 * x), empty, x)
    assert isinstance(full, TensorArray)
    assert (full.dtype, full.element_shape, full.size()) == (np.float32, (3,), 2)
    assert_equal(full.concat(), [2.0, 4.0, 6.0, 3.0, 6.0, 9.0])
    if element_shape:
        assert_equal(empty.concat(), np.zeros(6))


@gives(
    None,
    of=(TWO_ROWS,),
    grad_ys=([2.0, 3.0], [-1.5, 1.5], [4.0, 5.0]),
    gradients=([[2.0 - 1.5, 3.0 + 1.5], [4.0, 5.0]],),
)
def test_the_gradient_goes_through_a_tensorarray_that_is_an_argument(value):
    """GradientUnpackRead in two functions: the second takes the TensorArray of the first."""
    first = jax.jit(lambda value: TensorArray(np.float32, size=2).unstack(value))
    return jax.jit(lambda w: (w.read(0), w.read(0), w.read(1)))(first(value))
