"""The class: its arguments, its sizes, rows of different shapes, and what it is to JAX."""

import copy
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import (
    RUNTIME_ERRORS,
    eagerly_and_compiled,
    f64,
    fixed,
    growing,
    of_size,
    out_of_range,
    ragged,
    rows,
    static,
)
from jax import lax
from jax.sharding import PartitionSpec as P
from waiting import finish

from jax_tensorarray import TensorArray, scan, ta_read

# --- arguments -------------------------------------------------------------------------------------------------


def test_all_arguments_of_tensorflow_are_taken_in_its_order():
    ta = TensorArray(jnp.float32, 3, False, True, "name", None, None, True, (2,), False, "name")
    assert (ta.dtype, len(ta), ta.dynamic_size, ta.element_shape) == (np.float32, 3, False, (2,))


def test_the_last_argument_of_every_method_is_a_name():
    ta = static().write(0, [1.0, 2.0], "name").scatter([1], [[3.0, 4.0]], "name")
    np.testing.assert_array_equal(ta.read(0, "name"), [1, 2])
    np.testing.assert_array_equal(ta.gather([1, 0], "name"), [[3, 4], [1, 2]])
    assert ta.stack("name").shape == (3, 2)
    assert ta.concat("name").shape == (6,)
    assert ta.size("name") == 3
    assert ta.close("name") is None
    assert ta.unstack(jnp.ones((3, 2)), "name").split(jnp.ones(6), [2, 2, 2], "name").identity().size() == 3


def test_what_does_not_matter_here_is_ignored():
    ta = fixed(2, clear_after_read=True, colocate_with_first_write_call=False).unstack([1.0, 2.0])
    assert float(ta.read(0)) == float(ta.read(0)) == 1.0


def test_arguments_may_be_given_in_many_ways():
    for size in (3, np.int64(3), np.array(3), jnp.int32(3)):
        assert len(fixed(size)) == 3
    for shape in ((2, 3), [2, 3], (np.int64(2), 3)):
        assert fixed(element_shape=shape).element_shape == (2, 3)
    assert fixed(element_shape=4).element_shape == (4,)
    for dtype in ("float32", np.float32, jnp.float32, np.dtype("float32"), jnp.zeros(1, "f").dtype):
        assert TensorArray(dtype, size=1).dtype == np.float32
    for index in (1, np.int8(1), np.array(1), jnp.uint8(1)):
        ta = static().write(index, [1.0, 2.0])
        np.testing.assert_array_equal(ta.read(index), [1, 2])
        np.testing.assert_array_equal(ta[index], [1, 2])


def test_64_bit_dtypes_are_narrowed_where_jax_has_none():
    with jax.enable_x64(False):
        with pytest.warns(
            UserWarning, match="dtype float64 requested in TensorArray is not available.* float32"
        ) as found:
            ta = TensorArray(np.float64, size=2, element_shape=())
        assert ta.dtype == np.float32 and found[0].filename == __file__
        assert TensorArray(float, size=2).dtype == np.float32  # the widest that there is
        assert ta.write(0, np.float64(1.5)).stack().dtype == np.float32


def test_a_tensorarray_says_what_it_is():
    for ta, text in (
        (fixed(), "dtype=float64, element_shape=None, size=3"),
        (static(), "dtype=float64, element_shape=(2,), size=3"),
        (growing(max_size=4).append(1.0), "dtype=float64, element_shape=(), size=1, dynamic_size=True, max_size=4"),
        (fixed(1, infer_shape=False), "dtype=float64, element_shape=None, size=1, infer_shape=False"),
        (TensorArray.like({"a": jnp.zeros(2), "b": 1}, 3), "rows={a: float64[2], b: int64[]}, size=3"),
        (jax.tree.map(lambda x: None, static()), "rows=..."),
    ):
        assert repr(ta) == f"TensorArray({text})"
    seen = []
    jax.jit(lambda ta: seen.append(repr(ta)))(growing(max_size=4).append(1.0))
    assert "size=traced" in seen[0]


# --- sizes that are traced, or came as a leaf ------------------------------------------------------------------


def test_a_traced_size_needs_max_size():
    np.testing.assert_array_equal(jax.jit(lambda n: of_size(n).append(7.0).stack(pad=True))(3), [0, 0, 0, 7, 0])


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("size", [50, 6, -1, 2**32 + 3, -(2**32), np.int8(-1), np.uint32(2**32 - 1)])
def test_a_traced_size_that_is_not_allowed_is_an_error_at_run_time(size):
    for f in (lambda n: of_size(n).stack(pad=True), lambda n: of_size(n).size(), lambda n: of_size(n).mask()):
        message = rf"TensorArray: size not in \[0, max_size\]: index {size} is out of range"
        with pytest.raises(RUNTIME_ERRORS, match=message):
            finish(jax.jit(f)(size))
        with pytest.raises(RUNTIME_ERRORS, match=message):
            finish(jax.jit(jax.vmap(f))(jnp.stack([jnp.asarray(2, np.asarray(size).dtype), size])))


def test_each_example_of_a_batch_has_a_traced_size_of_its_own():
    def f(n):
        return of_size(n).append(7.0).stack(pad=True), of_size(n).size(), of_size(n).mask()

    stacked, sizes, masks = jax.vmap(f)(jnp.array([0, 4, 2]))
    np.testing.assert_array_equal(stacked, [[7, 0, 0, 0, 0], [0, 0, 0, 0, 7], [0, 0, 7, 0, 0]])
    np.testing.assert_array_equal(sizes, [0, 4, 2])
    np.testing.assert_array_equal(masks, np.arange(5) < np.array([[0], [4], [2]]))


def test_of_an_example_in_the_other_branch_it_may_be_anything():
    f = jax.jit(jax.vmap(lambda n: lax.cond(n < 6, lambda n: of_size(n).size(), lambda n: jnp.int32(-1), n)))
    np.testing.assert_array_equal(f(jnp.array([50, 5, 2])), [-1, 5, 2])


def with_size(ta, size):
    return jax.tree.map(lambda x: size if jnp.ndim(x) == 0 else x, ta)


@pytest.mark.parametrize(
    ("size", "error", "message"),
    [
        (50, ValueError, "size 50 is larger than max_size 5"),
        (-3, ValueError, "size must not be negative, got -3"),
        (np.int64(2**32 + 2), ValueError, "size 4294967298 is larger"),
        (2.5, TypeError, "size must be an integer, got 2.5"),
        (True, TypeError, "size must be an integer, got True"),
        ("x", TypeError, "size must be an integer, got 'x'"),
    ],
)
def test_a_size_that_came_as_a_leaf_is_checked(size, error, message):
    ta = with_size(of_size(0).append(1.0).append(2.0), size)
    uses = (
        lambda: ta.size(),
        lambda: ta.stack(),
        lambda: ta.read(0),
        lambda: ta.append(1.0),
        lambda: ta.pop(),
        lambda: pickle.dumps(ta),
        lambda: ta.write(0, 1.0),
    )
    for use in uses:
        with pytest.raises(error, match=message):
            use()


def test_so_is_a_traced_one():
    """No row that nobody wrote is seen: what reads, writes at the end or takes a row raises."""
    ta = of_size(0).append(1.0).append(2.0)
    for f in (
        lambda ta, i: ta.read(i + 4),
        lambda ta, i: ta.gather(jnp.array([0, 1]) + i),
        lambda ta, i: ta.append(1.0).stack(pad=True),
        lambda ta, i: ta.pop()[1],
    ):
        compiled = jax.jit(lambda n, i, f=f: f(with_size(ta, n), i))
        for size in (50, -3, 2**32 + 2):
            with pytest.raises(RUNTIME_ERRORS, match="is out of range"):
                finish(compiled(size, 0))
    stack = jax.jit(lambda n: with_size(ta, n).stack(pad=True))
    for size in (50, -3, 2**32 + 2):
        np.testing.assert_array_equal(stack(size), np.zeros(5))


def test_leaves_of_rows_have_as_many_of_them():
    ta = TensorArray.from_array((jnp.ones(3), jnp.ones(3)))
    other = jax.tree.unflatten(jax.tree.structure(ta), [jnp.ones(3), jnp.ones(2)])
    with pytest.raises(ValueError, match=r"different numbers of rows: \[3, 2\]"):
        other.read(2)


# --- rows: dtypes and shapes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (np.float32, 1),
        (np.float32, 1.5),
        (np.complex64, 2),
        (np.complex64, 1.5),
        (np.int8, 3),
        (bool, True),
        (np.float32, True),
        (np.float32, [1, 2]),
        (np.float32, [1.0, 2]),
        (np.float32, (1.0, 2.0)),
        (np.float32, [np.float32(1), np.float32(2)]),
        (np.float32, [jnp.float32(1), 2.0]),
        (np.float32, jnp.sin(1.0)),  # of a weak type
    ],
)
def test_python_numbers_and_lists_of_them_take_the_dtype_of_the_array(dtype, value):
    row = TensorArray(dtype, size=1).write(0, value).read(0)
    assert row.dtype == dtype
    np.testing.assert_array_equal(row, np.asarray(value, dtype))


def test_values_of_a_weak_type_are_carried_by_a_loop():
    carry, _ = lax.scan(lambda ta, i: (ta.write(i, jnp.sin(2.0)), None), static(3, ()), jnp.arange(3))
    np.testing.assert_allclose(carry.stack(), np.sin([2.0] * 3))


def test_the_first_write_fixes_the_shape_of_a_row():
    ta = fixed()
    assert ta.element_shape is None
    ta = ta.write(1, [1.0, 2.0])
    assert ta.element_shape == (2,)
    np.testing.assert_array_equal(ta.stack(), [[0, 0], [1, 2], [0, 0]])
    for fix in (lambda ta: ta.unstack(jnp.ones((3, 2))), lambda ta: ta.scatter([1], jnp.ones((1, 2)))):
        assert fix(fixed()).element_shape == (2,)


def test_an_element_shape_may_have_unknown_dimensions_until_then():
    ta = fixed(2, element_shape=(None, 2))
    assert ta.element_shape == (None, 2)
    with pytest.raises(ValueError, match=r"Incompatible shape for value \(\(2,\)\), expected \(\(None, 2\)\)"):
        ta.write(0, jnp.ones(2))
    ta = ta.write(0, jnp.ones((3, 2)))
    assert ta.element_shape == (3, 2)
    with pytest.raises(ValueError, match=r"expected \(\(3, 2\)\)"):
        ta.write(1, jnp.ones((4, 2)))


def test_a_split_fills_the_unknown_dimensions_of_the_shape():
    tas = [fixed(2, element_shape=shape).split(jnp.ones((10, 4)), [5, 5]) for shape in (None, [None, 4])]
    assert {ta.element_shape for ta in tas} == {(5, 4)}


def test_without_inference_only_unknown_dimensions_may_differ():
    ta = fixed(3, infer_shape=False, element_shape=[None, 4]).write(0, jnp.ones((5, 4)))
    with pytest.raises(ValueError, match="Incompatible shape for value"):
        ta.write(1, jnp.ones((1, 3)))
    assert ta.write(1, jnp.ones((1, 4))).write(2, jnp.ones((5, 4))).concat().shape == (11, 4)


@eagerly_and_compiled
def test_there_may_be_no_rows_and_rows_without_elements(run):
    empty = fixed(0).unstack(jnp.zeros((0, 3, 5)))
    assert run(lambda ta: (ta.stack(), ta.concat()), empty)[1].shape == (0, 5)
    assert run(lambda x: fixed().write(0, x).write(1, x).stack(), jnp.zeros((0, 1))).shape == (3, 0, 1)
    assert run(lambda: growing(element_shape=(5, 10)).stack()).shape == (0, 5, 10)


# --- indices ---------------------------------------------------------------------------------------------------

OUT_OF_RANGE = [
    (lambda ta, i: ta.read(i), 3, "Tried to read from index 3 but array size is: 3"),
    (lambda ta, i: ta.gather([0, i]), 3, "Tried to read from index 3 but array size is: 3"),
    (lambda ta, i: ta.read(i), -1, r"Reading from negative indices \(index -1\) is not allowed"),
    (lambda ta, i: ta.write(i, [1.0, 2.0]), 3, "Tried to write to index 3 but array is not resizeable and size is: 3"),
    (lambda ta, i: ta.write(i, [1.0, 2.0]), -1, r"Writing to negative indices \(index -1\) is not allowed"),
    (lambda ta, i: ta.scatter([0, i], jnp.ones((2, 2))), 3, "Tried to write to index 3"),
    (lambda ta, i: ta.scatter([0, i], jnp.ones((2, 2))), -2, r"Writing to negative indices \(index -2\)"),
]


@pytest.mark.parametrize(("f", "index", "message"), OUT_OF_RANGE)
def test_a_known_index_out_of_range_has_tensorflows_message(f, index, message):
    for kind in (int, np.int32, jnp.int32):
        with pytest.raises(IndexError, match=message):
            f(static(), kind(index))
    with pytest.raises(IndexError, match=message):
        jax.jit(lambda ta: jax.tree.leaves(f(ta, index)))(static())


def test_gather_takes_indices_of_any_shape_and_scatter_none():
    ta = TensorArray.from_array(jnp.arange(6.0).reshape(3, 2))
    assert ta.gather([[0, 1, 2]]).shape == (1, 3, 2)
    assert ta.gather([]).shape == (0, 2)
    np.testing.assert_array_equal(static().scatter([], jnp.ones((0, 2))).stack(), np.zeros((3, 2)))


# --- where and mode --------------------------------------------------------------------------------------------


def stack_of(*values, max_size=4):
    return TensorArray.from_array(jnp.array(values), dynamic_size=True, max_size=max_size)


#: The methods that take `where` and `mode`: what came out, and the array after it.
MASKABLE = {
    "read": lambda ta, i, **how: (ta.read(i, **how), ta),
    "gather": lambda ta, i, **how: (ta.gather([i], **how)[0], ta),
    "write": lambda ta, i, **how: (0.0, ta.write(i, 9.0, **how)),
    "scatter": lambda ta, i, **how: (0.0, ta.scatter([i], [9.0], **how)),
    "append": lambda ta, i, **how: (0.0, ta.append(9.0, **how)),
    "pop": lambda ta, i, **how: ta.pop(**how)[::-1],
}
#: An array and an index that are an error to the method: what is looked up or written is not there.
STRAY = {
    **{m: (stack_of(1.0, 2.0), 2) for m in ("read", "gather")},
    **{m: (stack_of(1.0, 2.0), 4) for m in ("write", "scatter")},
    "append": (stack_of(1.0, 2.0, 3.0, 4.0), 0),
    "pop": (stack_of(1.0).pop()[0], 0),
}
WRONG = [
    *({"where": where} for where in (1, "yes", np.ones((2, 3), bool), jnp.ones(2), [True, 1.0])),
    *({"mode": mode} for mode in ("clip", True)),
]


@eagerly_and_compiled
@pytest.mark.parametrize("method", MASKABLE)
def test_a_wrong_where_or_mode_is_what_it_is_to_the_ops(method, run):
    index = [0] if method in ("gather", "scatter") else 0
    for how in WRONG:
        with pytest.raises((TypeError, ValueError)) as of_op:
            ta_read(jnp.zeros(3), index, **how)
        text = str(of_op.value).replace("ta_read", f"TensorArray.{method}")
        with pytest.raises(of_op.type, match=re.escape(text)):
            run(lambda ta, how=how: MASKABLE[method](ta, 0, **how)[0], stack_of(1.0, 2.0))


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("method", MASKABLE)
def test_a_row_that_is_not_there_is_an_error_of_a_compiled_program(method):
    """For an index or a mask that is traced, and for each example of a batch."""
    (ta, index), f = STRAY[method], MASKABLE[method]
    two = jax.tree.map(lambda x: jnp.stack([x, x]), ta), jnp.array([index, index])
    for raising, operands in (
        (f, (ta, index)),
        (lambda w: f(ta, index, where=w, mode="error"), (True,)),
        (jax.vmap(f), two),
        (jax.vmap(lambda ta, i: f(ta, i, mode="error")), two),
        (jax.vmap(lambda w: f(ta, index, where=w)), (jnp.array([False, True]),)),
    ):
        with pytest.raises(RUNTIME_ERRORS, match=out_of_range(method)):
            finish(jax.jit(raising)(*operands))
    if method in ("read", "gather", "write", "scatter"):
        with pytest.raises(RUNTIME_ERRORS, match=rf"TensorArray\.{method}.*: index -1 is out of range"):
            finish(jax.jit(f)(ta, -1))
    found, after = jax.jit(jax.vmap(lambda w: f(*jax.tree.map(jnp.asarray, (ta, index)), where=w)))(np.zeros(2, bool))
    np.testing.assert_array_equal(found, [0, 0])
    np.testing.assert_array_equal(after.size(), [len(ta)] * 2)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("index", "x64"), [(2**31, False), (2**40, True), (-(2**100), False)])
def test_a_python_index_of_any_magnitude_is_masked_and_dropped(index, x64):
    """The array is one that grows, which has to find out how far."""

    def everything(ta, w):
        found = []
        for where, mode in ((w[0], None), (w[1], "drop")):
            written = ta.write(index, 5.0, where=where, mode=mode)
            scattered = ta.scatter([index, 2], [5.0, 6.0], where=[where, True], mode=mode)
            found.append((written, scattered, ta.gather([index, 1], where=[where, True], mode=mode)))
        return found

    with jax.enable_x64(x64):
        ta = TensorArray.from_array(jnp.ones(2, jnp.float32), dynamic_size=True, max_size=4)
        for f in (jax.jit, lambda f: f):
            for written, scattered, gathered in f(everything)(ta, np.array([False, True])):
                np.testing.assert_array_equal(rows(written), [1, 1])
                np.testing.assert_array_equal(rows(scattered), [1, 1, 6])
                np.testing.assert_array_equal(gathered, [0, 1])


# --- unstack, split --------------------------------------------------------------------------------------------


def test_unstack_and_stack_make_no_copy_and_fewer_rows_are_fewer():
    x = jnp.arange(6.0).reshape(3, 2)
    stacked = fixed().unstack(x).stack()
    assert stacked.unsafe_buffer_pointer() == x.unsafe_buffer_pointer()
    assert len(fixed().unstack(jnp.ones(2))) == 2
    assert len(growing(element_shape=(2,)).split(jnp.ones((0,)), [])) == 0


# --- rows of different shapes ----------------------------------------------------------------------------------


def test_the_gradient_with_respect_to_rows_of_different_lengths_has_their_lengths():
    grads = jax.grad(jax.jit(lambda ta: jnp.sum(ta.concat() ** 2)))(ragged())
    np.testing.assert_array_equal(grads.concat(), 2 * np.arange(5.0))


def test_rows_that_do_not_differ_yet_are_stacked():
    ta = fixed(infer_shape=False).unstack(jnp.ones((3, 2)))
    np.testing.assert_array_equal(jax.jit(lambda i: ta.read(i))(2), [1, 1])
    np.testing.assert_array_equal(ta.write(1, [5.0]).concat(), [1, 1, 5, 1, 1])


def test_what_jit_writes_into_them_is_not_seen_outside():
    ta = ragged()
    with jax.checking_leaks():
        jax.jit(lambda x: ta.write(0, x).concat())(jnp.ones(4))
    np.testing.assert_array_equal(ta.read(0), [0, 1])


# --- arrays that grow ------------------------------------------------------------------------------------------


def appended(n):
    """An array that has grown at an index that is traced."""
    return lax.fori_loop(0, n, lambda i, ta: ta.append(i + 1.0), growing(element_shape=(), max_size=4))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "make",
    [
        lambda n: appended(n),
        lambda n: growing(element_shape=(), max_size=4).write(n - 1, 1.0),
        lambda n: TensorArray(f64, size=n, dynamic_size=True, max_size=4, element_shape=()),
        lambda n: growing(max_size=4).append(1.0).append(2.0).append(3.0, where=n > 2),
        lambda n: growing(max_size=4).append(1.0).append(2.0).pop(where=n < 2)[0],
    ],
    ids=["append", "write", "size", "where", "pop"],
)
def test_a_size_that_is_known_only_at_run_time_takes_a_padded_stack(make):
    """Outside of jit the size of the same array is known."""
    text = r"how many rows there are is known only at run time here; there may be up to 4. Write "
    for f, n in ((jax.jit, 2), (jax.vmap, jnp.arange(1, 3))):
        for method in ("stack", "concat"):
            with pytest.raises(TypeError, match=rf"TensorArray\.{method}: {text}{method}\(pad=True\) for 4 rows"):
                f(lambda n, method=method: getattr(make(n), method)())(n)
    ta, stacked, mask = jax.jit(lambda n: (make(n), make(n).stack(pad=True), make(n).mask()))(2)
    assert ta.stack().shape == (2,)
    np.testing.assert_array_equal(stacked, [*ta.stack(), 0, 0])
    np.testing.assert_array_equal(mask, [True, True, False, False])
    np.testing.assert_array_equal(ta.mask(), mask)


@pytest.mark.slow
def test_without_max_size_an_array_grows_at_indices_that_are_known_while_tracing():
    """It may come from outside, where nothing changes. `test_sizes.py` has its values and derivatives."""
    ta = growing().append(1.0)
    np.testing.assert_array_equal(jax.jit(lambda ta, x: ta.append(x).stack())(ta, 7.0), [1, 7])
    np.testing.assert_array_equal(ta.stack(), [1])
    grown = jax.jit(lambda ta, x: ta.append(x))(ta, 7.0)
    np.testing.assert_array_equal(grown.append(8.0).stack(), [1, 7, 8])
    assert jax.jit(lambda x: growing().unstack(x).stack())(jnp.ones((3, 2))).shape == (3, 2)
    assert jax.jit(lambda x: growing().split(x, [2, 2]).read(1))(jnp.ones(4)).shape == (2,)
    assert jax.jit(lambda x: fixed(2, dynamic_size=True).write(1, x).stack())(1.0).shape == (2,)
    size = jax.eval_shape(lambda x: jnp.zeros(growing().write(2, x).size()), 1.0)
    assert size.shape == (3,)  # known, too


def test_at_others_and_in_loops_it_needs_max_size():
    ta = growing(element_shape=()).append(1.0)
    for f in (
        lambda ta, i: ta.write(i, 1.0),
        lambda ta, i: ta.scatter(i[None], [1.0]),
        lambda ta, i: ta.append(1.0, where=i > 0),
        lambda ta, i: lax.fori_loop(0, 3, lambda k, ta: ta.write(k, 1.0), ta),
        lambda ta, i: lax.fori_loop(0, 3, lambda k, ta: ta.append(1.0), ta),
        lambda ta, i: lax.scan(lambda ta, k: (ta.append(1.0), None), ta, length=3),
        lambda ta, i: lax.while_loop(lambda ta: ta.size() < 3, lambda ta: ta.append(1.0), ta),
        lambda ta, i: lax.cond(i > 0, lambda ta: ta.append(1.0), lambda ta: ta.append(2.0), ta),
        lambda ta, i: lax.switch(i, [lambda ta: ta.append(1.0), lambda ta: ta], ta),
    ):
        with pytest.raises(ValueError, match=r"grows no further than max_size: give TensorArray\(\.\.\., max_size=n\)"):
            jax.jit(f)(ta, 1)


@pytest.mark.parametrize("method", ["write", "scatter", "append"])
def test_to_grow_past_max_size_is_an_error_even_where_only_the_size_is_used(method):
    ta = stack_of(1.0, 2.0, 3.0, max_size=3)
    for f, args in (
        (lambda ta, i: MASKABLE[method](ta, i)[1].size(), (ta, 3)),
        (lambda ta, i: MASKABLE[method](MASKABLE[method](ta, i)[1].pop()[0], 0)[1].size(), (ta, 3)),
        (
            lambda tas, i: jax.vmap(lambda ta, i: MASKABLE[method](ta, i)[1].size())(tas, i),
            (jax.tree.map(lambda x: jnp.stack([x, x]), ta), jnp.array([3, 3])),
        ),
    ):
        with pytest.raises(RUNTIME_ERRORS, match=out_of_range(method)):
            finish(jax.jit(f)(*args))
    # It says so if it is known while tracing too.
    with pytest.raises(IndexError, match="max_size is 3"):
        jax.jit(lambda: MASKABLE[method](ta, 3)[1].size())()


def test_the_room_of_an_array_that_grows_cannot_be_read():
    grown = growing().append(1.0)
    with pytest.raises(RUNTIME_ERRORS, match="index 1 is out of range for a TensorArray of size 1"):
        finish(jax.jit(lambda i: grown.read(i))(1))


def test_an_array_that_may_grow_takes_no_time_to_make():
    with jax.enable_x64(False):
        ta = TensorArray(np.float32, size=0, dynamic_size=True, max_size=10**7, element_shape=(100,))  # 4 GB
        ta = ta.append(jnp.ones(100))
        assert float(ta.read(0).sum()) == 100


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint64])
def test_an_index_of_any_dtype_grows_an_array(dtype):
    ta = growing(max_size=300, element_shape=())
    written = jax.jit(
        lambda i: (ta.write(i, 7.0).size(), ta.write(i, 7.0).read(i), ta.write(i, 7.0).stack(pad=True)[i])
    )
    np.testing.assert_array_equal(written(dtype(100)), [101, 7, 7])


# --- what it is to JAX -----------------------------------------------------------------------------------------


def test_rows_of_a_static_array_are_its_only_leaves():
    leaves = jax.tree.leaves_with_path(static())
    assert [jax.tree_util.keystr(path) for path, _ in leaves] == [".rows"]
    assert leaves[0][1].shape == (3, 2)
    grown = growing().append(1.0)
    assert [x.shape for x in jax.tree.leaves(grown)] == [(1,)]  # without the room it has
    limited = growing(max_size=4).append(1.0)
    rows, size = jax.tree.leaves(limited)
    assert rows.shape == (4,)
    assert isinstance(size, np.ndarray)  # some libraries do not take NumPy's scalars for arrays
    assert (size.dtype, size.shape) == (np.int32, ())
    assert jax.tree.leaves(fixed()) == []


def test_it_keeps_what_it_is_through_a_round_trip():
    pytree = TensorArray.like({"a": jnp.zeros(2), "b": 1}, 3)
    for ta in (static(), fixed(), growing().append(1.0), growing(max_size=4).append(1.0), ragged(), pytree):
        leaves, tree = jax.tree.flatten(ta)
        again = jax.tree.unflatten(tree, leaves)
        assert repr(again) == repr(ta)
        assert jax.tree.structure(again) == tree
        for other in (copy.copy(ta), copy.deepcopy(ta), pickle.loads(pickle.dumps(ta))):
            assert repr(other) == repr(ta)
            assert jax.tree.structure(other) == tree
            padded = (TensorArray._of(x._rows.zero_padded()) for x in (other, ta))
            jax.tree.map(np.testing.assert_array_equal, *padded)


@pytest.mark.parametrize("make", [lambda: static(element_shape=()), lambda: growing(max_size=4).append(1.0)])
def test_trees_of_it_may_have_anything_as_leaves(make):
    """As the parts into which a library divides a model, and the axes, types and shardings that JAX is given."""
    ta = make()
    leaves = jax.tree.leaves(ta)
    assert jax.tree.leaves(jax.tree.map(lambda x: None, ta)) == []
    for leaf in (0, "rows", True, P(), jax.ShapeDtypeStruct((), f64)):
        tree = jax.tree.map(lambda x, leaf=leaf: leaf, ta)
        assert jax.tree.leaves(tree) == [leaf] * len(leaves)
        assert jax.tree.structure(tree) == jax.tree.structure(ta)
        # Some libraries map what is None too, and look at the leaves again.
        tree = jax.tree.map(lambda x, leaf=leaf: leaf, ta, is_leaf=lambda x: x is None)
        assert jax.tree.leaves(tree) == [leaf] * len(jax.tree.leaves(ta, is_leaf=lambda x: x is None))
    many = jax.tree.map(lambda x: jnp.stack([x, x]), ta)
    axes = jax.tree.map(lambda x: 0, ta)
    found = jax.vmap(lambda ta: ta.write(0, 5.0).stack(pad=True), in_axes=(axes,))(many)
    np.testing.assert_array_equal(found, jnp.stack([ta.write(0, 5.0).stack(pad=True)] * 2))


def test_unknown_rows_cannot_enter_control_flow():
    message = r"unknown shape cannot enter .* element_shape"
    for ta in (fixed(), fixed(infer_shape=False), growing()):
        for f in (
            lambda ta: lax.scan(lambda ta, i: (ta.write(i, 1.0), None), ta, jnp.arange(3)),
            lambda ta: lax.fori_loop(0, 3, lambda i, ta: ta.write(i, 1.0), ta),
            lambda ta: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1].write(c[0], 1.0)), (0, ta)),
            lambda ta: lax.cond(True, lambda ta: ta.write(0, 1.0), lambda ta: ta.write(1, 1.0), ta),
            lambda ta: lax.switch(0, [lambda ta: ta.write(0, 1.0), lambda ta: ta], ta),
        ):
            for g in (f, jax.jit(f)):
                with pytest.raises(TypeError, match=message):
                    g(ta)
    with pytest.raises(TypeError, match=r"a partly unknown shape, \(None, 3\), cannot enter .* element_shape"):
        lax.fori_loop(0, 3, lambda i, ta: ta.write(i, jnp.ones((2, 3))), fixed(element_shape=[None, 3]))


def test_but_they_can_enter_jit_and_be_closed_over():
    ta = fixed()
    found = jax.jit(lambda ta: ta.write(1, 5.0))(ta)
    assert isinstance(found, TensorArray) and (found.element_shape, found.size()) == ((), 3)
    np.testing.assert_array_equal(found.stack(), [0, 5, 0])
    _, stacked = lax.scan(lambda _, i: (None, ta.write(i, 5.0).stack()), None, jnp.arange(3))
    np.testing.assert_array_equal(stacked, 5 * np.eye(3))


def test_rows_that_are_pytrees():
    ta = TensorArray.like({"a": jnp.zeros(2), "b": jnp.int32(0)}, 3)
    assert ta.dtype == {"a": np.float64, "b": np.int32}
    assert ta.element_shape == {"a": (2,), "b": ()}
    ta = ta.write(1, {"a": [1.0, 2.0], "b": 7})
    row = ta.read(1)
    np.testing.assert_array_equal(row["a"], [1, 2])
    assert row["b"] == 7
    assert ta.stack()["a"].shape == (3, 2)
    assert ta.stack()["b"].tolist() == [0, 7, 0]
    with pytest.raises(ValueError, match="Concat saw a scalar"):
        ta.concat()
    again = TensorArray.from_array(ta.stack())
    assert jax.tree.structure(again) == jax.tree.structure(ta)
    abstract = TensorArray.like(jax.ShapeDtypeStruct((2,), np.float32), 3, dynamic_size=True, max_size=4)
    assert (abstract.dtype, abstract.element_shape, len(abstract)) == (np.float32, (2,), 3)


def test_iteration_gives_the_rows():
    ta = TensorArray.from_array(jnp.arange(3.0))
    assert [float(x) for x in ta] == [0, 1, 2]
    np.testing.assert_array_equal(jax.jit(lambda ta: sum(ta))(ta), 3)


@eagerly_and_compiled
def test_it_is_no_array_and_says_what_to_do(run):
    """As a user finds out who gives one to `jnp`, or to what goes through the slices of an array."""
    for f in (
        lambda ta: jnp.asarray(ta),
        lambda ta: jnp.sum(ta),
        lambda ta: 2 * ta,
        lambda ta: ta - jnp.ones(3),
        lambda ta: jnp.ones(3) + ta,
        lambda ta: ta / ta,
        lambda ta: ta**2,
        lambda ta: ta @ ta,
        lambda ta: ta < 1,
        lambda ta: -ta,
        lambda ta: np.float64(2) // ta,
        lambda ta: lax.scan(lambda c, x: (c + x, x), 0.0, ta),
        lambda ta: scan(lambda c, x: (x * c, x), 0.0, ta),
    ):
        with pytest.raises(TypeError, match=r"is no array: read its rows, or take all of them by ta\.stack\(\)"):
            run(f, TensorArray.from_array(jnp.arange(3.0)))
