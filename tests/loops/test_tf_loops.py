"""The loops of `tf` have the arguments of TensorFlow in its order, and the results of a loop of Python."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tensorarray import tf
from jax_tensorarray.tf.nest import map_structure

XS = jnp.array([1.0, 2.0, 3.0])

#: TensorFlow 2.21: `inspect.signature(tf.scan)` and so on.
SIGNATURES = {
    "while_loop": "cond, body, loop_vars, shape_invariants=None, parallel_iterations=10, back_prop=True, "
    "swap_memory=False, maximum_iterations=None, name=None",
    "scan": "fn, elems, initializer=None, parallel_iterations=10, back_prop=True, swap_memory=False, infer_shape=True, "
    "reverse=False, name=None",
    "map_fn": "fn, elems, dtype=None, parallel_iterations=None, back_prop=True, swap_memory=False, infer_shape=True, "
    "name=None, fn_output_signature=None",
    "foldl": "fn, elems, initializer=None, parallel_iterations=10, back_prop=True, swap_memory=False, name=None",
    "foldr": "fn, elems, initializer=None, parallel_iterations=10, back_prop=True, swap_memory=False, name=None",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_signature_is_that_of_tensorflow(name):
    parameters = inspect.signature(getattr(tf, name)).parameters.values()
    ours = [p.replace(annotation=p.empty) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert ", ".join(map(str, ours)) == SIGNATURES[name]
    assert not [p for p in parameters if p.kind is not p.POSITIONAL_OR_KEYWORD and p.name != "max_steps"]


def mixed(a, x):
    return 2 * a + x


def accumulators(xs, first=None, reverse=False):
    found, xs = [], list(xs)[::-1] if reverse else list(xs)
    for x in xs:
        first = x if first is None else mixed(first, x)
        found.append(first)
    return found[::-1] if reverse else found


def test_scan_by_position_and_by_name():
    zero = jnp.float64(0)
    forward, back = accumulators([1, 2, 3], 0), accumulators([1, 2, 3], 0, True)
    assert forward != back
    for found in (
        tf.scan(mixed, XS, zero),
        tf.scan(mixed, XS, zero, 10),  # the fourth argument was once the direction
        tf.scan(mixed, XS, zero, 1, True, False, True, False, "scanning"),
        tf.scan(mixed, XS, zero, parallel_iterations=None, swap_memory=True),
        jax.jit(lambda xs: tf.scan(mixed, xs, zero, 10))(XS),
    ):
        assert found.tolist() == forward
    for found in (tf.scan(mixed, XS, zero, 10, True, False, True, True), tf.scan(mixed, XS, zero, reverse=True)):
        assert found.tolist() == back


def test_without_an_initializer_the_first_slice_is_the_first_result():
    for reverse in (False, True):
        assert tf.scan(mixed, XS, reverse=reverse).tolist() == accumulators([1, 2, 3], reverse=reverse)
    assert tf.scan(mixed, XS[:1]).tolist() == [1]
    assert tf.foldl(mixed, XS, None, 10) == accumulators([1, 2, 3])[-1]
    assert tf.foldr(mixed, XS, None, 10) == accumulators([1, 2, 3], reverse=True)[0]


def test_accumulators_and_elements_are_any_pytrees():
    def step(a, x):
        return {"sum": a["sum"] + x[0], "last": x[1]}

    start = {"sum": jnp.zeros(2), "last": jnp.int32(0)}
    found = tf.scan(step, (jnp.ones((3, 2)), jnp.arange(3, dtype=jnp.int32)), start)
    assert found["sum"].tolist() == [[1, 1], [2, 2], [3, 3]]
    assert found["last"].tolist() == [0, 1, 2]


def test_map_fn_by_position_and_by_name():
    for found in (
        tf.map_fn(lambda x: x * x, XS),
        tf.map_fn(lambda x: x * x, XS, jnp.float64, 10, True, False, True, "mapping"),
        tf.map_fn(lambda x: x * x, XS, fn_output_signature="float64", swap_memory=True),
        tf.map_fn(lambda x: x * x, XS, jnp.int32, fn_output_signature=jax.ShapeDtypeStruct((), jnp.float64)),
    ):
        assert found.tolist() == [1, 4, 9]
    pair = tf.map_fn(lambda x: (x > 1, {"n": x.astype(int)}), XS, (bool, {"n": np.int64}))
    assert [pair[0].tolist(), pair[1]["n"].tolist()] == [[False, True, True], [1, 2, 3]]


@pytest.mark.parametrize(
    ("result", "options", "text"),
    [
        (lambda x: x, {"dtype": jnp.int32}, r"dtype says int32, but fn returns float64\[\]; convert it in fn"),
        (lambda x: x, {"fn_output_signature": np.float32}, "fn_output_signature says float32, but fn returns float64"),
        (lambda x: (x, x), {"dtype": jnp.float64}, "dtype is .*float64.*, but fn returns"),
        (lambda x: x, {"dtype": (jnp.float64,)}, "dtype is .*float64.*, but fn returns"),
        (
            lambda x: x,
            {"fn_output_signature": jax.ShapeDtypeStruct((2,), jnp.float64)},
            r"fn_output_signature says float64\[2\], but fn returns float64\[\]",
        ),
        (lambda x: x, {"dtype": "floot"}, "dtype must be of dtypes, got 'floot'"),
    ],
)
def test_what_fn_returns_is_compared_with_the_signature(result, options, text):
    with pytest.raises(TypeError, match=f"^tf.map_fn: {text}"):
        tf.map_fn(result, XS, **options)


LOOPS = {
    "scan": lambda xs, **how: tf.scan(mixed, xs, **how).sum(),
    "foldl": lambda xs, **how: tf.foldl(mixed, xs, **how),
    "foldr": lambda xs, **how: tf.foldr(mixed, xs, **how),
    "map_fn": lambda xs, **how: tf.map_fn(lambda x: x * x, xs, **how).sum(),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", LOOPS)
def test_without_back_prop_there_is_no_gradient(name):
    gradient = jax.grad(LOOPS[name])
    assert gradient(XS).all()
    np.testing.assert_array_equal(gradient(XS, swap_memory=True), gradient(XS))
    assert not gradient(XS, back_prop=False).any()


@pytest.mark.parametrize("name", LOOPS)
def test_the_name_is_that_of_a_scope(name):
    lowered = jax.jit(lambda xs: LOOPS[name](xs, name="my_loop")).lower(XS)
    assert "my_loop" in lowered.as_text(debug_info=True)


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"parallel_iterations": True}, "parallel_iterations must be a positive integer or None, got True"),
        ({"parallel_iterations": 0}, "parallel_iterations must be a positive integer or None, got 0"),
        ({"parallel_iterations": "a"}, "parallel_iterations must be a positive integer or None, got 'a'"),
        ({"back_prop": 10}, "back_prop must be True or False, got 10"),
        ({"swap_memory": None}, "swap_memory must be True or False, got None"),
        ({"name": 3}, "name must be a string or None, got 3"),
    ],
)
def test_arguments_that_change_nothing_have_types_too(name, options, text):
    with pytest.raises(TypeError, match=f"^tf.{name}: {text}$"):
        LOOPS[name](XS, **options)


def test_further_arguments_have_types():
    with pytest.raises(TypeError, match=r"^tf.scan: reverse must be True or False, got 1$"):
        tf.scan(mixed, XS, reverse=1)
    for loop in (tf.scan, tf.map_fn):
        with pytest.raises(TypeError, match=r"infer_shape must be True or False, got 'yes'$"):
            loop(mixed, XS, infer_shape="yes")
    for options in ({"back_prop": 1}, {"parallel_iterations": -1}, {"swap_memory": 0}, {"name": b"a"}):
        with pytest.raises(TypeError, match=f"^tf.while_loop: {next(iter(options))} must be"):
            tf.while_loop(lambda i: i < 3, lambda i: i + 1, [0], **options)


@pytest.mark.parametrize("loop", [tf.scan, tf.foldl, tf.foldr, tf.map_fn])
def test_what_is_no_function_or_has_no_slices_is_said(loop):
    name = f"^tf.{loop.__name__}: "
    with pytest.raises(TypeError, match=f"{name}fn must be a function, got 3$"):
        loop(3, XS)
    for elems, given in ((3.0, r"\(\)"), ((XS, XS[:2]), r"\(3,\), \(2,\)"), ([], "no array")):
        with pytest.raises(ValueError, match=f"{name}elems must be arrays with the same number of slices, got {given}"):
            loop(mixed, elems)
    if loop is not tf.map_fn:
        with pytest.raises(ValueError, match=f"{name}without an initializer there must be at least one slice"):
            loop(mixed, XS[:0])


def test_map_structure_says_what_does_not_fit():
    for call, error, text in (
        (lambda: map_structure(3, XS), TypeError, "func must be a function, got 3"),
        (lambda: map_structure(abs), ValueError, "give at least one structure"),
        (lambda: map_structure(abs, XS, check_types=1), TypeError, "check_types must be True or False, got 1"),
    ):
        with pytest.raises(error, match=f"^tf.nest.map_structure: {text}"):
            call()


@pytest.mark.parametrize(
    ("name", "instead"), [("int32", r"jnp\.int32"), ("reduce_all", r"jnp\.all"), ("function", r"jax\.jit")]
)
def test_another_name_of_tensorflow_says_where_jax_has_it(name, instead):
    with pytest.raises(AttributeError, match=rf"it has TensorArray, .*for tf\.{name} look at {instead}$"):
        getattr(tf, name)
    assert not hasattr(tf, "__path_of_nothing__")
