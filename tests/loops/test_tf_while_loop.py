"""`tf.while_loop` and `tf.nest.map_structure` take what TensorFlow's take, and do what Python's loop does."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_numpy import in_numpy
from jax import jit

from jax_tensorarray import TensorArray, fori_loop, scan, tf, while_loop

pytestmark = pytest.mark.slow(but=6)

X = np.linspace(-1, 1, 12).reshape(4, 3)

#: JAX raises the former from the first call of a compiled function, and the latter from its fast path.
RUNTIME_ERRORS = (jax.errors.JaxRuntimeError, ValueError)


def in_python(steps, x):
    rows = []
    for _ in range(steps):
        rows.append(x)
        x = jnp.sin(x) * 2
    return x, rows


def total(x, most, **options):
    rows = TensorArray(x.dtype, 6, element_shape=x.shape)
    _, last, rows = tf.while_loop(
        lambda i, x, rows: i < 6,
        lambda i, x, rows: (i + 1, jnp.sin(x) * 2, rows.write(i, x)),
        (0, x, rows),
        maximum_iterations=most,
        **options,
    )
    return jnp.sum(last) + jnp.sum(rows.stack() ** 2)


@pytest.mark.parametrize("swap_memory", [False, True])
def test_steps_and_gradients_are_those_of_pythons_loop(swap_memory):
    def of_python(x, most):
        last, rows = in_python(min(most, 6), x)
        return jnp.sum(last) + sum(jnp.sum(row**2) for row in rows)

    def traced(x, n):
        return total(x, n, max_steps=9, swap_memory=swap_memory)

    mosts = 0, 4, 6, 9
    want = in_numpy(lambda xs: [[jax.value_and_grad(of_python)(x, most) for most in mosts] for x in xs])(X)
    found = jit(lambda x: [jax.value_and_grad(total)(x, most, swap_memory=swap_memory) for most in mosts])(X[0])
    np.testing.assert_allclose([value for value, _ in found], [value for value, _ in want[0]])
    np.testing.assert_allclose([d for _, d in found], [d for _, d in want[0]])
    one, batch = jit(lambda x, n: (jax.value_and_grad(traced)(x[0], n[1]), jax.vmap(jax.value_and_grad(traced))(x, n)))(
        X, np.array(mosts)
    )
    jax.tree.map(np.testing.assert_allclose, one, want[0][1])
    for k in range(4):
        jax.tree.map(lambda a, b, k=k: np.testing.assert_allclose(a[k], b), batch, want[k][k])


def test_maximum_iterations_stop_a_loop_and_max_steps_are_an_error():
    def count(**bounds):
        return tf.while_loop(lambda i: i < 9, lambda i: i + 1, [0], **bounds)

    assert count(maximum_iterations=3) == count(maximum_iterations=3, max_steps=5) == [3]
    assert count(maximum_iterations=3, max_steps=3) == count(maximum_iterations=jnp.int32(3), max_steps=3) == [3]
    assert jit(lambda n: count(maximum_iterations=n, max_steps=3))(3) == [3]
    assert count(max_steps=9) == count(maximum_iterations=20, max_steps=9) == [9]
    for bounds in ({"max_steps": 3}, {"maximum_iterations": 5, "max_steps": 3}):
        with pytest.raises(RUNTIME_ERRORS, match=r"tf\.while_loop: cond is still true after max_steps=3"):
            count(**bounds)
    with pytest.raises(RUNTIME_ERRORS, match=r"tf\.while_loop: cond is still true after max_steps=3"):
        jit(lambda n: count(maximum_iterations=n, max_steps=3))(5)


class Pair(NamedTuple):
    a: int
    b: float


@pytest.mark.parametrize("loop_vars", [(1, 2.0), [1, 2.0], Pair(1, 2.0)])
def test_the_results_are_held_as_the_variables_are(loop_vars):
    after = tf.while_loop(lambda a, b: a < 5, lambda a, b: [a + 1, b * 2], loop_vars)
    assert type(after) is type(loop_vars)
    assert tuple(after) == (5, 32.0)


def test_one_variable_need_not_be_packed():
    for body in (lambda x: x + 1, lambda x: [x + 1], lambda x: (x + 1,)):
        assert tf.while_loop(lambda x: x < 5, body, [0], parallel_iterations=1, shape_invariants=[()]) == [5]


def test_the_rest_of_the_keywords():
    def f(x, back_prop):
        return tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * x), (0, x), None, 10, back_prop, False, 3)[1]

    assert jax.grad(f)(2.0, True) == 8 * 2.0**7
    assert jax.grad(f)(2.0, False) == 0
    text = jax.jit(lambda x: tf.while_loop(lambda x: x < 3, lambda x: x + 1, [x], name="counting")).lower(0)
    assert "counting" in text.as_text(debug_info=True)


def test_what_does_not_fit_is_said():
    with pytest.raises(TypeError, match=r"tf.while_loop: loop_vars must be a tuple or list, not int"):
        tf.while_loop(lambda x: x < 3, lambda x: x + 1, 0)
    with pytest.raises(TypeError, match=r"tf.while_loop: body must return 2 variables, but returns 3"):
        tf.while_loop(lambda i, x: i < 3, lambda i, x: (i, x, x), (0, 1.0))
    with pytest.raises(TypeError, match=r"tf.while_loop: body must return 2 variables, but returns "):
        tf.while_loop(lambda i, x: i < 3, lambda i, x: x, (0, 1.0))
    with pytest.raises(TypeError, match=r"while_loop: body_fun takes the 2 parts .* or call tf\.while_loop"):
        while_loop(lambda c: c[0] < 3, lambda i, x: (i + 1, x), (0, 1.0))
    with pytest.raises(
        ValueError, match=r"needs maximum_iterations, .*: tf\.while_loop\(.* maximum_iterations=\.\.\.\)"
    ):
        jax.grad(lambda x: tf.while_loop(lambda x: x < 3, lambda x: x * 2, [x])[0])(1.0)


def test_an_array_is_a_leaf_of_a_structure():
    """A decoder keeps the state of finished examples, but passes its arrays on, as TensorFlow Addons' does."""
    finished = jnp.array([True, False, True])

    def state(value):
        rows = TensorArray(jnp.float64, 3, element_shape=(3,)).write(0, jnp.full(3, value))
        return {"h": jnp.full((3, 3), value), "rows": rows, "n": [jnp.full(3, value)]}

    def kept(old, new):
        if isinstance(new, TensorArray):
            return new
        return jnp.where(finished.reshape(-1, *[1] * (new.ndim - 1)), old, new)

    after = tf.nest.map_structure(kept, state(1.0), state(2.0))
    np.testing.assert_array_equal(after["rows"].stack()[0], [2, 2, 2])
    np.testing.assert_array_equal(after["n"][0], [1, 2, 1])
    np.testing.assert_array_equal(after["h"][:, 0], [1, 2, 1])
    kept = tf.nest.map_structure(lambda x: 1, state(1.0), check_types=False, expand_composites=True)
    assert [type(x) for x in jax.tree.leaves(kept)] == [int] * 3


def test_a_mask_mapped_into_a_growing_array_is_found_by_its_size():
    """With as many rows as examples nothing else is wrong with it."""
    finished = jnp.array([True, False, True])
    old = TensorArray(jnp.float64, 0, dynamic_size=True, max_size=3, element_shape=(3,))

    def kept(old, new):
        return jnp.where(finished.reshape(-1, *[1] * (new.ndim - 1)), old, new)

    mixed = jax.tree.map(kept, old, old.write(0, jnp.ones(3)))
    for use in (lambda ta: ta.stack(), lambda ta: ta.read(0), lambda ta: ta.append(jnp.ones(3))):
        for call in (use, jax.jit(use)):
            with pytest.raises(TypeError, match=r"is of shape \(3,\), .* jax.tree.map .*tf.nest.map_structure"):
                call(mixed)


def test_an_array_is_not_chosen_by_where():
    ta = TensorArray(jnp.float64, 3, element_shape=())
    with pytest.raises(TypeError, match="TensorArray"):
        jnp.where(True, ta, ta)


def test_the_shape_of_a_row_is_that_of_what_the_body_writes():
    def by_scan(x):
        body = lambda c, i: ((jnp.sin(c[0]) * 2, c[1].write(i, c[0])), None)  # noqa: E731
        return scan(body, (x, TensorArray(x.dtype, 4)), jnp.arange(4))[0][1]

    def want(x):
        return jnp.sum(jnp.stack(in_python(4, x)[1]) ** 2)

    loops = [functools.partial(loop, 4, ta=TensorArray(X.dtype, 4)) for loop in (by_tensorflows_loop, by_fori_loop)]
    loops.append(by_scan)
    assert [f(jnp.asarray(X[0])).element_shape for f in loops] == [(3,)] * 3

    @jit
    def found(x):
        return [jax.value_and_grad(lambda x, f=f: jnp.sum(f(x).stack() ** 2))(x) for f in loops]

    wanted = in_numpy(jax.value_and_grad(want))(X[0])
    for one in found(X[0]):
        jax.tree.map(np.testing.assert_allclose, one, wanted)


@pytest.mark.parametrize("options", [{"size": 4}, {"size": 0, "dynamic_size": True}])
def test_an_array_that_nobody_writes_needs_no_shape(options):
    """As one for what is only kept if it is asked for."""

    def f():
        start = (0, TensorArray(jnp.float64, **options))
        _, rows = tf.while_loop(lambda i, _: i < 4, lambda i, rows: (i + 1, rows), start, maximum_iterations=5)
        assert (rows.element_shape, rows.size()) == (None, options["size"])
        return rows

    for after in (f().write(1, jnp.ones(2)).stack(), jit(lambda: f().unstack(jnp.eye(2)).stack())()):
        assert after.shape[1:] == (2,)


def test_where_nothing_says_a_shape_the_loop_asks_for_it():
    with pytest.raises((TypeError, ValueError), match="shape of a row"):
        tf.while_loop(
            lambda i, _: i < 4, lambda i, ta: (i + 1, ta.write(i, ta.read(i))), (0, TensorArray(jnp.float32, 4))
        )


@pytest.mark.parametrize("options", [{"size": 4}, {"size": 0, "dynamic_size": True}])
def test_a_fold_takes_the_keywords_of_tensorflow(options):
    def f(x, fold, **keywords):
        start = (0, jnp.zeros(3), TensorArray(x.dtype, **options))
        step = lambda a, x: (a[0] + 1, a[1] + x, a[2].write(a[0], a[1] * x))  # noqa: E731
        _, total, rows = fold(step, x, start, parallel_iterations=1, name="folding", **keywords)
        return jnp.sum(total**2) + jnp.sum(rows.stack(pad=True) ** 2)

    def want(x):
        total, squares = jnp.zeros(3), 0.0
        for row in x:
            squares += jnp.sum((total * row) ** 2)
            total += row
        return jnp.sum(total**2) + squares

    @jit
    def found(x):
        gradient = jax.value_and_grad(f)
        forward, back = (
            [gradient(y, fold, swap_memory=swap_memory) for swap_memory in (False, True)]
            for fold, y in ((tf.foldl, x), (tf.foldr, x[::-1]))
        )
        return forward, back, jax.grad(f)(x, tf.foldl, back_prop=False), jax.grad(f)(x, tf.foldr, back_prop=False)

    forward, back, *stopped = found(X)
    value, gradient = in_numpy(jax.value_and_grad(want))(X)
    for one in forward:
        jax.tree.map(np.testing.assert_allclose, one, (value, gradient))
    for one in back:
        jax.tree.map(np.testing.assert_allclose, one, (value, gradient[::-1]))
    assert not np.any(stopped)


# --- arrays that grow, and do not say how far -----------------------------------------------------------------------
#
# Their rows, and errors where there is no room for one: the histories of `test_sizes.py`.


def growing(**options):
    return TensorArray(np.float64, size=0, dynamic_size=True, **options)


def by_tensorflows_loop(steps, x, ta):
    return tf.while_loop(
        lambda i, *_: i < steps,
        lambda i, x, ta: (i + 1, jnp.sin(x) * 2, ta.write(i, x)),
        (0, x, ta),
        maximum_iterations=6,
    )[2]


def by_fori_loop(steps, x, ta):
    body = lambda i, c: (jnp.sin(c[0]) * 2, c[1].write(i, c[0]))  # noqa: E731
    return fori_loop(0, steps, body, (x, ta), max_steps=6)[1]


def test_where_they_cannot_be_counted_there_is_room_for_one():
    def f(n, both):
        body = lambda i, ta: ta.append(1.0).append(2.0, where=both)  # noqa: E731
        return fori_loop(0, n, body, growing(), max_steps=4).stack(pad=True)

    np.testing.assert_array_equal(jit(f)(4, False), [1, 1, 1, 1])
    np.testing.assert_array_equal(jit(f)(2, True), [1, 2, 1, 2])
    with pytest.raises(RUNTIME_ERRORS, match=r"max_size=4, which a loop found: one row a step.*index 4 is out of"):
        jax.block_until_ready(jit(f)(3, True))


def append_twice(ta, more=0):
    return tf.while_loop(
        lambda j, ta: j < 2, lambda j, ta: (j + 1, ta.append(1.0 + j)), (0, ta), maximum_iterations=2 + more
    )[1]


def test_a_loop_in_a_loop_adds_its_rows_in_each_step():
    def f(n, **options):
        start = (0, growing(element_shape=()))
        return tf.while_loop(lambda i, _: i < n, lambda i, ta: (i + 1, append_twice(ta)), start, **options)[1]

    np.testing.assert_array_equal(f(2, maximum_iterations=3).stack(), [1, 2, 1, 2])
    stacked = jit(lambda n: f(n, maximum_iterations=3).stack(pad=True))
    np.testing.assert_array_equal(stacked(3), [1, 2, 1, 2, 1, 2])
    np.testing.assert_array_equal(stacked(1), [1, 2, 0, 0, 0, 0])
    with pytest.raises(
        ValueError, match=r"a TensorArray grows in a loop without a bound: .* give TensorArray\(\.\.\., max"
    ):
        f(2)


def test_a_second_loop_under_jit_has_the_room_that_the_first_one_found():
    f = jit(lambda: append_twice(append_twice(growing(element_shape=()), 2)).stack(pad=True))
    np.testing.assert_array_equal(f(), [1, 2, 1, 2])
    f = jit(lambda: append_twice(append_twice(growing(element_shape=()), 1)).stack(pad=True))
    with pytest.raises(RUNTIME_ERRORS, match=r"max_size=3, which a loop found: .*index 3 is out of range"):
        jax.block_until_ready(f())


def looks_up(i, token, ta):
    return i + 1, token, ta.write(i, X[token].sum())


def looks_up_at(i, carry):
    return looks_up(i, *carry)[1:]


def looks_up_slice(carry, i):
    return looks_up(i, *carry)[1:], None


def looks_up_next(carry, i):
    return looks_up(i, *carry)[1:]


@pytest.mark.parametrize("known", [{}, {"element_shape": ()}], ids=["unknown", "known"])
@pytest.mark.parametrize(
    ("function", "run"),
    {
        "while": (looks_up, lambda ta: tf.while_loop(lambda i, *_: i < 3, looks_up, (0, 1, ta))),
        "bounded": (
            looks_up,
            lambda ta: jit(
                lambda n: tf.while_loop(lambda i, *_: i < 3, looks_up, (0, 1, ta), maximum_iterations=n, max_steps=5)
            )(4),
        ),
        "fori": (looks_up_at, lambda ta: fori_loop(0, 3, looks_up_at, (1, ta), residuals="tape")),
        "scan": (looks_up_slice, lambda ta: scan(looks_up_slice, (1, ta), jnp.arange(3))),
        "foldl": (looks_up_next, lambda ta: tf.foldl(looks_up_next, jnp.arange(3), (1, ta))),
    }.values(),
    ids=["while", "bounded", "fori", "scan", "foldl"],
)
def test_an_error_of_jax_names_the_function_and_the_line_of_the_user(function, run, known):
    with pytest.raises(jax.errors.TracerArrayConversionError) as found:
        run(TensorArray(float, 3, **known))
    assert f"{function.__name__} at {__file__}:{function.__code__.co_firstlineno} " in str(found.value)


def test_a_condition_with_not_says_where_it_is_and_what_to_write():
    def goes_on(i, ta):
        return i < 3 and not i > 5

    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"goes_on at .*test_tf_while_loop(.|\n)*Write `&`"):
        tf.while_loop(goes_on, lambda i, ta: (i + 1, ta.write(i, 1.0)), (0, TensorArray(float, 3, element_shape=())))


def test_a_mistake_in_the_body_is_what_the_error_is_about():
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        fori_loop(0, 3, lambda i, ta: ta.write(i, jnp.ones(3) @ jnp.ones(4)), growing())


def test_a_bound_that_is_beyond_every_size_is_cut():
    more = jax.eval_shape(lambda: by_huge_bound().stack(pad=True))
    assert more.shape == (2**31 - 1,)


def by_huge_bound():
    rows = TensorArray(jnp.bool_, size=2, dynamic_size=True, element_shape=())
    return while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1].append(True)), (0, rows), max_steps=2**40)[1]


def test_an_array_that_does_not_grow_in_the_loop_stays_as_it_was():
    ta = growing().unstack(jnp.asarray(X))
    _, total, after = tf.while_loop(
        lambda i, *_: i < 4, lambda i, s, ta: (i + 1, s + ta.read(i), ta), (0, jnp.zeros(3), ta), maximum_iterations=9
    )
    np.testing.assert_allclose(total, X.sum(0))
    assert len(jit(lambda ta: by_reads(ta))(ta)) == len(after) == 4


def by_reads(ta):
    return tf.while_loop(lambda i, ta: i < 4, lambda i, ta: (i + 1, ta), (0, ta), maximum_iterations=9)[1]


@pytest.mark.parametrize(
    ("given", "described"),
    [
        ("x", "'x'"),
        (2.5, "2.5"),
        (True, "True"),
        ([3], r"\[3\]"),
        (np.ones(2, np.int32), r"int32\[2\]"),
        (np.float32(3), "f"),
    ],
)
def test_maximum_iterations_is_an_integer(given, described):
    with pytest.raises(TypeError, match=f"tf.while_loop: maximum_iterations must be an integer, got {described}"):
        tf.while_loop(lambda i: i < 2, lambda i: i + 1, [0], maximum_iterations=given)
    if hasattr(given, "dtype"):
        with pytest.raises(TypeError, match=f"tf.while_loop: maximum_iterations must be an integer, got {described}"):
            jax.jit(lambda n: tf.while_loop(lambda i: i < 2, lambda i: i + 1, [0], maximum_iterations=n))(given)


def test_max_steps_is_an_integer_too():
    for given in ("x", 2.5):
        with pytest.raises(TypeError, match=f"tf.while_loop: max_steps must be a Python integer, got {given!r}"):
            tf.while_loop(lambda i: i < 2, lambda i: i + 1, [0], maximum_iterations=3, max_steps=given)


def test_maximum_iterations_is_not_negative():
    with pytest.raises(ValueError, match=r"tf.while_loop: maximum_iterations must not be negative, got -1"):
        tf.while_loop(lambda i: i < 2, lambda i: i + 1, [0], maximum_iterations=-1)
