"""TensorFlow's own tests of its TensorArray, in JAX: the same programs, the same numbers.

The numbers are those of tensorflow/python/kernel_tests/data_structures/tensor_array_ops_test.py (commit 0ea9033), and
where a docstring says so of tensorflow/compiler/tests/{tensor_array_ops,cond}_test.py and of
tensorflow/python/eager/polymorphic_function/polymorphic_function_xla_jit_test.py. The docstring of a test names its
original. A port changes three things: a TensorArray carried by a loop states its `element_shape`, one that grows inside
a transformation states its `max_size`, and `tf.gradients` becomes `jax.vjp`. A while loop whose gradient is taken
becomes a `lax.fori_loop` or a `lax.scan`.

Here are dtypes, shapes, errors, rows of different shapes, and loops. What else TensorFlow's tests do with rows of one
shape, one method after the other with its gradient, is in `test_tensorarray_transforms.py`, and without a gradient in
`test_tensorarray_machine.py`. What they do with arguments and names is in `test_tensorarray.py`.

No counterpart: strings, which JAX arrays cannot hold (WritePack, WriteConcat, UnpackRead and SplitRead of
`tf.string`); `ta.grad(source)` and its gradient TensorArrays, which TensorFlow 2 has dropped too (TensorGradArray*,
TensorGradAccessTwice*, GradWithShape*ElementShape); the names of gradient sources (GetGradSource_*); handles, flows and
reads as another dtype (raw ops); sessions, step containers (ConcatFailsWhenMissingStepContainer) and name scopes;
devices and colocation (GetsDeviceFromFirstWrite*, DisabledColocateWithFirstWriteCall); the errors of `clear_after_read`
and of writing a row twice (ReadTwice and WriteMultipleFails of TensorFlow 1; here as in TensorFlow 2 both are allowed);
placeholders of unknown shape (WriteUnknownShape, GatherShape of unknown indices), for JAX knows every shape; a `cond`
whose branches give rows of different shapes (WriteConcatInParallel); benchmarks.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_tensorarray import TensorArray

pytestmark = pytest.mark.slow(but=6)

DTYPES = [np.float32, np.float64, np.int32, np.int64, np.complex64, np.complex128, np.bool_, jnp.bfloat16]
#: For programs that do nothing with a dtype that the others do not do.
SOME_DTYPES = [np.float32, np.int32, np.bool_, jnp.bfloat16]
FLOATS_AND_COMPLEX = [np.float32, np.float64, np.complex64, np.complex128]


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


# --- stack, gather, concat -------------------------------------------------------------------------------------


@gives([[[4.0, 5.0]], [[6.0, 7.0]], [[8.0, 9.0]]], of=([[4.0, 5.0]], [[6.0, 7.0]], [[8.0, 9.0]]), dtypes=DTYPES)
def test_stack_puts_the_rows_on_one_another(dtype, x0, x1, x2):
    """WritePack."""
    ta = TensorArray(dtype, tensor_array_name="foo", size=3)
    return ta.write(0, x0).write(1, x1).write(2, x2).stack()


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
    dtypes=SOME_DTYPES,
)
def test_concat_joins_rows(dtype, *rows):
    """WriteConcat, here and of the XLA tests."""
    different = TensorArray(dtype, tensor_array_name="foo", size=3, infer_shape=False)
    equal = TensorArray(dtype, tensor_array_name="foo", size=3)
    for i in range(3):
        different, equal = different.write(i, rows[i]), equal.write(i, rows[3 + i])
    return different.concat(), equal.concat()


# --- unstack, split, scatter -----------------------------------------------------------------------------------

PAIRS = [[1.0, 101.0], [2.0, 201.0], [3.0, 301.0]]


@gives(
    (PAIRS[:2], np.zeros((0, 2)), PAIRS[2:], PAIRS[:1], PAIRS[1:2], PAIRS[2:], *PAIRS), of=(PAIRS,), dtypes=SOME_DTYPES
)
def test_split_makes_rows_of_different_lengths_or_of_one(dtype, x):
    """SplitRead, here and of the XLA tests; UnpackRead."""
    ragged = TensorArray(dtype, tensor_array_name="foo", size=3, infer_shape=False).split(x, lengths=[2, 0, 1])
    even = TensorArray(dtype, tensor_array_name="foo", size=3).split(x, lengths=np.array([1, 1, 1]))
    assert even.element_shape == (1, 2)
    unstacked = TensorArray(dtype, size=3, infer_shape=False).unstack(x)
    return read_all(ragged, range(3)) + read_all(even, range(3)) + read_all(unstacked, range(3))


@gives(
    ([1.0, -1.0], [10.0, -10.0]),
    of=(np.array([1, 8]), [[1.0, -1.0], [10.0, -10.0]], np.array(1), np.array(8)),
    dtypes=DTYPES,
)
def test_scattered_rows_are_read_at_indices_known_when_the_program_runs(dtype, indices, value, id0, id1):
    """ScatterRead of the XLA tests; Int64GPU, ScatterBfloat16GPU."""
    w = TensorArray(dtype, tensor_array_name="foo", size=10).scatter(indices=indices, value=value)
    return w.read(id0), w.read(id1)


@gives(
    (np.zeros((0, 3, 5)), np.zeros((0, 5)), np.zeros((3, 0, 1)), np.zeros((42, 1)), np.zeros((0, 5, 10))),
    of=(np.zeros((0, 3, 5), np.float32), np.zeros((0, 1), np.float32)),
)
def test_there_may_be_no_rows_and_rows_without_elements(no_rows, no_elements):
    """EvalEmptyWithDefault, EmptyTensorArrayPack, StackShapeOnStaticSize, StackShapeOnEmpty."""
    ta = TensorArray(np.float32, size=0, dynamic_size=False, infer_shape=True)
    assert ta.size() == 0
    ta, empty = ta.unstack(no_rows), TensorArray(np.float32, size=3, tensor_array_name="foo")
    for i in range(3):
        empty = empty.write(i, no_elements)
    growing = TensorArray(np.float32, size=0, element_shape=(5, 10), dynamic_size=True)
    return ta.stack(), ta.concat(), empty.stack(), TensorArray(np.float32, 42).write(0, [0]).stack(), growing.stack()


# --- shapes ----------------------------------------------------------------------------------------------------


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


# --- errors ----------------------------------------------------------------------------------------------------


def foo(size=3, **options):
    return TensorArray(np.float32, tensor_array_name="foo", size=size, infer_shape=False, **options)


SUM_OF_LENGTHS = r"Expected sum of lengths to be equal to values.shape\[0\], but sum of lengths is {} and value's shape"
#: TensorFlow's test, what is wrong, the error, its text, the program and its arguments.
ERRORS = [
    ("WriteWrongIndexOrDataTypeFails", "dtype", TypeError, "float32", lambda: foo().write(0, "wrong").stack()),
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
]


@pytest.mark.parametrize("case", ERRORS, ids=lambda case: f"{case[0]}: {case[1]}")
def test_what_is_an_error_in_tensorflow_is_one_here(mode, case):
    _, _, error, message, f, *args = case
    with pytest.raises(error, match=message):
        run(mode, f, *(converted(x, np.float32) for x in args))


# --- gradients -------------------------------------------------------------------------------------------------


@gives(
    None,
    of=([[4.0, 5.0]], 3.0, [[4.0, 5.0]], [[3.0, 3.5]]),
    grad_ys=([[2.0, 3.0]], [[1.0, -1.0]], -2.0, [[2.0, 3.0]], [[1.0, -1.0]], [[-2.0, -10.0]]),
    gradients=([[3.0, 2.0]], -2.0, [[3.0, 2.0]], [[-2.0, -10.0]]),
    dtypes=FLOATS_AND_COMPLEX,
)
def test_the_gradient_of_reads_goes_to_the_row_written(dtype, *values):
    """GradientWriteRead; the second is that of the XLA tests, with rows of one shape."""
    tas = [TensorArray(dtype, tensor_array_name="foo", size=3, infer_shape=infer) for infer in (False, True)]
    tas = [ta.write(0, values[2 * k]).write(1, values[2 * k + 1]) for k, ta in enumerate(tas)]
    return tuple(w.read(index) for w in tas for index in (0, 0, 1))


@gives(None, of=(3.0, 4.0), grad_ys=(3.0, 4.0, 5.0), gradients=(0.0, 12.0), dtypes=FLOATS_AND_COMPLEX)
def test_gradients_of_one_row_are_summed_and_go_to_the_last_write(dtype, first, second):
    """WriteGradientAddMultipleAdds: a gradient written three times is a row read three times."""
    w1 = TensorArray(dtype, tensor_array_name="foo", size=3).write(2, first).write(2, second)
    return w1.read(2), w1.read(2), w1.read(2)


@gives(None, of=([1.0, 2.0, 3.0],) * 2, grad_ys=([1.0] * 4,) * 2, gradients=([1.0] * 3,) * 2)
def test_the_gradients_of_unstack_and_split_do_not_mind_a_later_write(x, y):
    """UnpackDynamic, SplitDynamic."""
    ta = TensorArray(np.float32, size=3, dynamic_size=True, max_size=4)
    return ta.unstack(x).write(3, 4.0).stack(), ta.split(y, [1, 1, 1]).write(3, [4.0]).concat()


BLOCK = np.arange(3 * 5, dtype=np.float32).reshape(3, 5) + 1


@gives(None, of=(BLOCK, BLOCK + 15), grad_ys=-BLOCK, gradients=(-BLOCK, -BLOCK))
def test_the_sum_of_two_rows_gives_both_its_gradient(a, b):
    """SumOfTwoReadVariablesWithoutRepeatGrad."""
    ta = TensorArray(np.float32, size=2)
    ta = ta.write(index=0, value=a, name="write_a")
    ta = ta.write(1, b, name="write_b")
    return ta.read(0, name="read_a_0") + ta.read(1, name="read_b_0")


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


STATIC, DYNAMIC = {"size": 3}, {"size": 0, "dynamic_size": True, "max_size": 3}


@pytest.mark.parametrize(
    ("mode", "loop", "options"),
    [
        ("eager", by_python, DYNAMIC),
        ("eager", by_fori_loop, STATIC),
        ("jit", by_scan, DYNAMIC),
        ("jit", by_while_loop, DYNAMIC),
    ],
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
        return loop(step, ta, state0).stack(pad=True)

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


def test_a_tensorarray_is_an_argument_and_a_result_of_a_function(mode):
    """TensorListConcat of polymorphic_function_xla_jit_test.py. The function fixes the shape of its argument."""
    x = jnp.array([1.0, 2.0, 3.0], np.float32)
    full = run(mode, lambda ta, x: ta.write(0, 2 * x).write(1, 3 * x), TensorArray(np.float32, size=2), x)
    assert isinstance(full, TensorArray)
    assert (full.dtype, full.element_shape, full.size()) == (np.float32, (3,), 2)
    assert_equal(full.concat(), [2.0, 4.0, 6.0, 3.0, 6.0, 9.0])
