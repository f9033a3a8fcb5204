"""`TensorArray` refuses wrong arguments and names them. For errors in TensorFlow's own tests it uses their words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import f64, fixed, growing, ragged, static

from jax_tensorarray import TensorArray

KEY = jax.random.key(0)


def each(error, message, f, values):
    return [(error, message, lambda value=value: f(value)) for value in values]


REFUSED_ARGUMENTS = [
    (TypeError, "JAX has neither handles nor flows; leave out handle", lambda: fixed(handle=jnp.zeros(()))),
    (TypeError, "JAX has neither handles nor flows; leave out flow", lambda: fixed(flow=jnp.zeros(()))),
    (ValueError, "Size must be declared for TensorArrays", lambda: TensorArray(f64)),
    (ValueError, "Argument `size` must be provided", lambda: TensorArray.like(0.0)),
    *each(TypeError, "size must be an integer", fixed, [3.0, "3", True, [3], np.array([3])]),
    (ValueError, "size must not be negative, got -1", lambda: fixed(-1)),
    (TypeError, "give dynamic_size=True and max_size", lambda: jax.jit(lambda n: static(n).stack())(3)),
    (
        *(TypeError, "element_shape"),
        lambda: jax.jit(lambda n: TensorArray(f64, size=n, dynamic_size=True, max_size=3).stack(pad=True))(3),
    ),
    (ValueError, r"below 2\*\*31, since sizes are of int32", lambda: growing(max_size=2**31)),
    (TypeError, "max_size must be an integer, got '3'", lambda: growing(max_size="3")),
    (ValueError, "dynamic_size=True", lambda: fixed(max_size=3)),
    (ValueError, "size 4 is larger than max_size 3", lambda: fixed(4, dynamic_size=True, max_size=3)),
    (
        *(ValueError, "size 4 is larger than max_size 3"),
        lambda: TensorArray.from_array(jnp.ones(4), dynamic_size=True, max_size=3),
    ),
    (TypeError, "max_size is a shape", lambda: jax.jit(lambda n: growing(max_size=n).size())(3)),
    (TypeError, "integers and None", lambda: fixed(element_shape=(2.0,))),
    (ValueError, "negative", lambda: fixed(element_shape=(-2,))),
    (TypeError, "element_shape must be made of .*, got 2.5", lambda: fixed(element_shape=2.5)),
    *each(
        *(TypeError, None, lambda dtype: TensorArray(dtype, size=1, element_shape=())),
        [str, object, np.dtype("S3"), jax.dtypes.prng_key],
    ),
    (TypeError, "dtype must be a number type or bool, got 'abc'", lambda: TensorArray("abc", 3)),
    (TypeError, r"TensorArray\.like: value must be", lambda: TensorArray.like("abc", 3)),
    (ValueError, "no array", lambda: TensorArray.like({}, 3)),
    (ValueError, "no array", lambda: TensorArray.from_array([])),
    (TypeError, r"TensorArray\.from_array: value must be", lambda: TensorArray.from_array("abc")),
]
REFUSED_ROWS = [
    (TypeError, r"TensorArray\.write: value must be .* numbers, got 'abc'", lambda: static().write(0, "abc")),
    (TypeError, r"TensorArray\.write: value must be .* numbers, got {'a': 1}", lambda: static().write(0, {"a": 1})),
    (ValueError, r"TensorArray\.write: value .* of equal lengths", lambda: static().write(0, [[1.0], [1.0, 2.0]])),
    (TypeError, r"TensorArray\.write: .* write dtype key<fry>; .*key_data", lambda: static().write(0, KEY)),
    *each(
        *(TypeError, r"TensorArray\.write: .* is key<fry> .*key_data", lambda x: TensorArray(KEY.dtype, 3).write(0, x)),
        [1.0, [], np.zeros(2, np.uint32), jax.random.PRNGKey(0), jax.random.key(0, impl="rbg")],
    ),
    (TypeError, r"TensorArray\.write: .* int32; convert value", lambda: static().write(0, np.int32(1))),
    (OverflowError, "300 does not fit into int8", lambda: TensorArray(np.int8, size=1).write(0, [3, 300])),
    # Rows are not broadcast.
    (
        *(ValueError, r"TensorArray\.write: Incompatible shape for value \(\(\)\), expected \(\(2,\)\)"),
        lambda: static().write(0, 1.0),
    ),
    (ValueError, r"Incompatible shape .* expected \(\(2,\)\)", lambda: fixed().write(1, [1.0, 2.0]).write(0, [1.0])),
    (ValueError, r"Incompatible shape for value \(\(1,\)\)", lambda: static().unstack(jnp.ones((3, 1)))),
    (ValueError, "Incompatible shape", lambda: static().scatter([0], jnp.ones((1, 3)))),
    (ValueError, "Incompatible shape", lambda: fixed().unstack(jnp.ones((3, 2))).write(0, jnp.ones(3))),
    (ValueError, "Incompatible shape", lambda: fixed().scatter([1], jnp.ones((1, 2))).write(0, jnp.ones(3))),
    (TypeError, r"TensorArray\.unstack: value must be", lambda: static().unstack(None)),
    (ValueError, "rows along its first axis", lambda: fixed().unstack(1.0)),
    (
        *(ValueError, "Cannot unstack 5 tensors into a TensorArray of static size 3"),
        lambda: fixed().unstack(jnp.ones(5)),
    ),
    (
        *(ValueError, "Cannot unstack 5 tensors into a TensorArray of max_size 3"),
        lambda: growing(max_size=3).unstack(jnp.ones(5)),
    ),
    (TypeError, r"TensorArray\.split: value must be", lambda: static().split("abc", [1, 1, 1])),
    (TypeError, r"TensorArray\.split: lengths must be integers", lambda: static().split(jnp.ones(3), "abc")),
    (TypeError, "must be integers", lambda: fixed().split(jnp.ones(3), [1.0, 1.0, 1.0])),
    (ValueError, r"Expected lengths to be a vector, received shape: \[\]", lambda: fixed().split(jnp.ones(3), 1)),
    *each(
        *(
            ValueError,
            r"Expected sum of lengths to be equal to values.shape\[0\], but sum of lengths is \d and value's",
        ),
        *(lambda lengths: fixed(len(lengths), infer_shape=False).split(jnp.ones(3), lengths), [[1], [1, 2, 3]]),
    ),
    (
        *(ValueError, r"Expected value to be at least a vector, but received shape: \[\]"),
        lambda: fixed(1, infer_shape=False).split(1.0, [1]),
    ),
    (
        *(
            ValueError,
            r"size is not equal to the size of lengths \(2 vs. 1\), and the TensorArray is not marked as dyn",
        ),
        lambda: fixed(2, infer_shape=False).split(jnp.ones(1), [1]),
    ),
    (
        *(ValueError, "shape|rank"),
        lambda: fixed(infer_shape=False).write(0, [3.0]).write(1, [4.0]).write(2, [[3.0]]).concat(),
    ),
    (
        *(ValueError, "element_shape"),
        lambda: TensorArray(f64, size=0, element_shape=(5, None), dynamic_size=True).stack(),
    ),
    (ValueError, "must not be negative", lambda: fixed(infer_shape=False).split(jnp.ones(3), [-1, 2, 2])),
    (ValueError, r"shape is: \[6, 2\]", lambda: fixed(infer_shape=False).split(jnp.ones((6, 2)), [1, 2, 2])),
    (ValueError, "need infer_shape=False", lambda: fixed().split(jnp.ones(4), [1, 1, 2])),
    (
        *(ValueError, "need infer_shape=False"),
        lambda: fixed(2, infer_shape=False, element_shape=(2,)).split(jnp.ones(4), [1, 3]),
    ),
    (
        *(TypeError, "lengths are shapes"),
        lambda: jax.jit(lambda n: fixed(2, infer_shape=False).split(jnp.ones(4), n).concat())(jnp.array([1, 3])),
    ),
    (ValueError, "Concat saw a scalar shape at index 0 but requires at least vectors", lambda: static(3, ()).concat()),
    (
        *(ValueError, "Concat saw a scalar shape at index 1"),
        lambda: fixed(2, infer_shape=False).write(0, jnp.ones(2)).write(1, 1.0).concat(),
    ),
    (
        *(ValueError, r"TensorArray\.write: rows have the structure"),
        lambda: TensorArray.like({"a": 0.0, "b": 1}, 3).write(0, {"a": 1.0}),
    ),
    (
        *(ValueError, "different numbers of rows"),
        lambda: TensorArray.like({"a": 0.0, "b": 1}, 3).unstack({"a": jnp.ones(3), "b": jnp.zeros(2, int)}),
    ),
    *(
        (ValueError, "element_shape", lambda f=f, infer=infer: f(fixed(infer_shape=infer)))
        for f in (lambda ta: ta.stack(), lambda ta: ta.read(0), lambda ta: ta.concat(), lambda ta: ta.gather([0]))
        for infer in (True, False)
    ),
    (
        *(ValueError, "row 3 was never written"),
        lambda: growing(infer_shape=False).unstack(jnp.ones((3, 2))).write(4, [9.0]).concat(),
    ),
    (
        *(IndexError, r"TensorArray\.append: there are 1 rows, and max_size is 1; give a larger one"),
        lambda: growing(infer_shape=False, max_size=1).append(1.0).append(2.0),
    ),
    *each(
        *(ValueError, "a row that is not read is zeros, of no known shape", lambda f: f(ragged())),
        [
            lambda ta: ta.read(0, where=False),
            lambda ta: ta.read(9, mode="drop"),
            lambda ta: ta.gather([1, 9], mode="drop"),
        ],
    ),
    (ValueError, "dynamic_size=True", lambda: static().append([1.0, 2.0])),
    (ValueError, "dynamic_size=True", lambda: static().pop()),
    (IndexError, "array size is: 0", lambda: growing(element_shape=()).pop()),
    (NotImplementedError, r"jax\.grad", lambda: static().grad("source")),
]
REFUSED_INDICES = [
    *(
        (TypeError, "index must be an integer", lambda f=f, index=index: f(static(), index))
        for f in (lambda ta, i: ta.read(i), lambda ta, i: ta.write(i, [1.0, 2.0]))
        for index in (1.0, True, None, "1", np.float32(1), jnp.bool_(True))
    ),
    (TypeError, "use gather or scatter", lambda: static().read(jnp.array([0, 1]))),
    (TypeError, "indices must be integers", lambda: static().gather([0.5])),
    (TypeError, "indices must be integers", lambda: static().scatter(jnp.array([True]), jnp.ones((1, 2)))),
    (TypeError, "indices must be", lambda: static().gather([[0], [1, 2]])),
    (
        *(TypeError, r"TensorArray\.scatter: indices must be integers"),
        lambda: static().scatter({"a": 0}, [[1.0, 2.0]]),
    ),
    (IndexError, f"read from index {2**70} but array size is: 3", lambda: static().gather([2**70])),
    (IndexError, "no array has so many rows", lambda: growing().write(2**70, 1.0)),
    (TypeError, "gather", lambda: static()[0:2]),
    (ValueError, "2 indices were given, and 3 rows", lambda: static().scatter([0, 1], jnp.ones((3, 2)))),
    (ValueError, "indices must be a vector", lambda: static().scatter(1, jnp.ones((1, 2)))),
    (ValueError, "rows along its first axis", lambda: static().scatter([1], 1.0)),
    # What is given by keyword is not lost in the name.
    *each(
        TypeError,
        r"^TensorArray\.\w+: name must be a string, got .* given by keyword$",
        lambda f: f(static()),
        [
            lambda ta: ta.read(0, jnp.array(True)),
            lambda ta: ta.write(0, [1.0, 2.0], False),
            lambda ta: ta.gather([0], [True]),
            lambda ta: ta.scatter([0], [[1.0, 2.0]], [True]),
            lambda ta: ta.stack(False),
            lambda ta: ta.concat(True),
        ],
    ),
    *each(
        TypeError,
        r"^TensorArray\.(stack|concat): pad must be True or False, got ",
        lambda f: f(static()),
        [
            lambda ta: ta.stack(pad=None),
            lambda ta: ta.stack(pad=1),
            lambda ta: ta.concat(pad=None),
            lambda ta: ta.concat(pad="yes"),
            lambda ta: ta.stack(pad=jnp.bool_(True)),
        ],
    ),
]
REFUSED_IN_JIT = [
    (TypeError, r"there may be up to 4. Write stack\(pad=True\) for 4 rows.* mask\(\)", lambda ta: ta.stack()),
    (TypeError, r"there may be up to 4. Write stack\(pad=True\) for 4 rows", lambda ta: ta.stack(pad=False)),
    (TypeError, r"there may be up to 4. Write concat\(pad=True\) for 4 rows", lambda ta: ta.concat()),
    (TypeError, r"use size\(\), not len\(\)", len),
    (TypeError, r"use size\(\), not len\(\)", list),
]
#: Of rows of different shapes, where `i` is 1 and `p` True.
REFUSED_OF_RAGGED = [
    (ValueError, "rows have different shapes", lambda i, p: ragged().stack()),
    (ValueError, "rows have different shapes", lambda i, p: ragged().gather([0, 1])),
    (TypeError, "pad them to one shape", lambda i, p: ragged().read(i)),
    (TypeError, "pad them to one shape", lambda i, p: ragged().gather(i[None])),
    (TypeError, "pad them to one shape", lambda i, p: ragged().write(i, jnp.ones(1)).read(0)),
    (TypeError, "pad them to one shape", lambda i, p: ragged().scatter(i[None], jnp.ones((1, 1))).read(0)),
    (TypeError, "where that is known", lambda i, p: ragged().write(0, jnp.ones(1), where=p).read(0)),
    (TypeError, "where that is known", lambda i, p: ragged().read(0, where=p)),
    (TypeError, "where that is known", lambda i, p: ragged().gather([0], where=p)),
    (TypeError, "where that is known", lambda i, p: ragged().scatter([0], jnp.ones((1, 1)), where=p).read(0)),
]


@pytest.mark.slow(but=40)
@pytest.mark.parametrize(("error", "message", "f"), [*REFUSED_ARGUMENTS, *REFUSED_ROWS, *REFUSED_INDICES])
def test_what_is_wrong_is_refused_and_named(error, message, f):
    with pytest.raises(error, match=message):
        f()


@pytest.mark.parametrize(("error", "message", "f"), REFUSED_IN_JIT)
def test_what_needs_a_known_size_is_refused_in_jit(error, message, f):
    with pytest.raises(error, match=message):
        jax.jit(f)(growing(max_size=4).append(1.0))


@pytest.mark.parametrize(("error", "message", "f"), REFUSED_OF_RAGGED)
def test_what_rows_of_different_shapes_do_not_allow_is_refused(error, message, f):
    with pytest.raises(error, match=message):
        jax.jit(f)(jnp.array(1), True)


@pytest.mark.parametrize(
    ("dtype", "value", "given"),
    [
        (np.float32, np.float64(1), "float64"),
        (np.float32, np.int32(1), "int32"),
        (np.float32, np.ones(2, np.int8), "int8"),
        (np.int32, 1.5, "float"),
        (np.int32, [1, 2.5], "float"),
        (np.float32, 1j, "complex"),
        (np.float32, np.bool_(True), "bool"),
        (np.float32, "1.0", "str"),
        (np.float32, None, "object"),
        (bool, 1, "int"),
        (np.int32, np.float32(1), "float32"),
        (jnp.bfloat16, np.float32(1), "float32"),
        (np.float32, [np.float64(1)], "float64"),
    ],
)
def test_a_row_of_another_dtype_is_refused(dtype, value, given):
    message = f"TensorArray dtype is {np.dtype(dtype).name} but Op is trying to write dtype {given}"
    ta = TensorArray(dtype, size=1)
    with pytest.raises(TypeError, match=message):
        ta.write(0, value)
    with pytest.raises(TypeError, match=message):
        ta.unstack([value])


def test_what_interrupts_a_conversion_is_not_hidden():
    """NumPy takes what raises when it is asked for its length for something without one."""

    class Interrupted:
        def __len__(self):
            raise KeyboardInterrupt

        def __getitem__(self, _):
            return 1.0

    for f in (
        lambda x: static().write(0, x),
        lambda x: static().unstack([x]),
        lambda x: static().gather(x),
        lambda x: static().split(jnp.ones(3), x),
    ):
        with pytest.raises(KeyboardInterrupt):
            f(Interrupted())


def test_the_error_of_stacked_arrays_says_how_to_take_their_rows():
    tas = jax.vmap(TensorArray.from_array)(jnp.ones((2, 3)))
    with pytest.raises(ValueError, match=r"came out of vmap or scan.* jax\.vmap\(lambda ta: (.*)\)\(tas\) gives"):
        tas.stack()
    rows, mask = jax.vmap(lambda ta: (ta.stack(pad=True), ta.mask()))(tas)
    np.testing.assert_array_equal(rows, np.ones((2, 3)))
    assert mask.all()
