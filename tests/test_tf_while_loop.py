"""`tf_while_loop` and `map_structure` take what TensorFlow's take, and do what Python's loop does."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import jit

from jax_tensorarray import TensorArray, fori_loop, map_structure, scan, tf_while_loop, while_loop

X = np.linspace(-1, 1, 12).reshape(4, 3)


def in_python(steps, x):
    rows = []
    for _ in range(steps):
        rows.append(x)
        x = jnp.sin(x) * 2
    return x, rows


def total(x, most, **options):
    rows = TensorArray(x.dtype, 6, element_shape=x.shape)
    _, last, rows = tf_while_loop(
        lambda i, x, rows: i < 6,
        lambda i, x, rows: (i + 1, jnp.sin(x) * 2, rows.write(i, x)),
        (0, x, rows),
        maximum_iterations=most,
        **options,
    )
    return jnp.sum(last) + jnp.sum(rows.stack() ** 2)


@pytest.mark.parametrize("most", [0, 4, 6, 9])
@pytest.mark.parametrize("swap_memory", [False, True])
def test_steps_and_gradients_are_those_of_pythons_loop(most, swap_memory):
    def want(x):
        last, rows = in_python(min(most, 6), x)
        return jnp.sum(last) + sum(jnp.sum(row**2) for row in rows)

    def traced(x, n):
        return total(x, n, max_steps=9, swap_memory=swap_memory)

    x = jnp.asarray(X[0])
    for f in (lambda x: total(x, most, swap_memory=swap_memory), lambda x: traced(x, jnp.int32(most))):
        np.testing.assert_allclose(jit(f)(x), want(x))
        np.testing.assert_allclose(jit(jax.grad(f))(x), jax.grad(want)(x))
    batched = jit(jax.vmap(jax.grad(traced)))(jnp.asarray(X), jnp.array([0, 2, 4, 6]))
    each = [jax.grad(lambda x, n=n: total(x, n))(x) for x, n in zip(X, [0, 2, 4, 6], strict=True)]
    np.testing.assert_allclose(batched, np.stack(each))


class Pair(NamedTuple):
    a: int
    b: float


@pytest.mark.parametrize("loop_vars", [(1, 2.0), [1, 2.0], Pair(1, 2.0)])
def test_the_results_are_held_as_the_variables_are(loop_vars):
    after = tf_while_loop(lambda a, b: a < 5, lambda a, b: [a + 1, b * 2], loop_vars)
    assert type(after) is type(loop_vars)
    assert tuple(after) == (5, 32.0)


def test_one_variable_need_not_be_packed():
    for body in (lambda x: x + 1, lambda x: [x + 1], lambda x: (x + 1,)):
        assert tf_while_loop(lambda x: x < 5, body, [0], parallel_iterations=1, shape_invariants=[()]) == [5]


def test_the_rest_of_the_keywords():
    def f(x, back_prop):
        return tf_while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * x), (0, x), None, 10, back_prop, False, 3)[1]

    assert jax.grad(f)(2.0, True) == 8 * 2.0**7
    assert jax.grad(f)(2.0, False) == 0
    text = jax.jit(lambda x: tf_while_loop(lambda x: x < 3, lambda x: x + 1, [x], name="counting")).lower(0)
    assert "counting" in text.as_text(debug_info=True)


def test_what_does_not_fit_is_said():
    with pytest.raises(TypeError, match="tf_while_loop: loop_vars must be a tuple or list, not int"):
        tf_while_loop(lambda x: x < 3, lambda x: x + 1, 0)
    with pytest.raises(TypeError, match="tf_while_loop: body must give 2 variables, but gives 3"):
        tf_while_loop(lambda i, x: i < 3, lambda i, x: (i, x, x), (0, 1.0))
    with pytest.raises(TypeError, match="tf_while_loop: body must give 2 variables, but gives "):
        tf_while_loop(lambda i, x: i < 3, lambda i, x: x, (0, 1.0))
    with pytest.raises(TypeError, match=r"while_loop: body_fun takes the 2 parts .* or call tf_while_loop"):
        while_loop(lambda c: c[0] < 3, lambda i, x: (i + 1, x), (0, 1.0))
    with pytest.raises(ValueError, match="max_steps"):
        jax.grad(lambda x: tf_while_loop(lambda x: x < 3, lambda x: x * 2, [x])[0])(1.0)


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

    after = map_structure(kept, state(1.0), state(2.0))
    np.testing.assert_array_equal(after["rows"].stack()[0], [2, 2, 2])
    np.testing.assert_array_equal(after["n"][0], [1, 2, 1])
    np.testing.assert_array_equal(after["h"][:, 0], [1, 2, 1])
    assert [type(x) for x in jax.tree.leaves(map_structure(lambda x: 1, state(1.0)))] == [int] * 3


def test_the_shape_of_a_row_is_that_of_what_the_body_writes():
    def by_while(x):
        start = (0, x, TensorArray(x.dtype, 4))
        body = lambda i, x, rows: (i + 1, jnp.sin(x) * 2, rows.write(i, x))  # noqa: E731
        return tf_while_loop(lambda i, *_: i < 4, body, start, maximum_iterations=4)[2]

    def by_fori_loop(x):
        body = lambda i, c: (jnp.sin(c[0]) * 2, {"rows": c[1]["rows"].write(i, c[0])})  # noqa: E731
        return fori_loop(0, 4, body, (x, {"rows": TensorArray(x.dtype, 4)}))[1]["rows"]

    def by_scan(x):
        body = lambda c, i: ((jnp.sin(c[0]) * 2, c[1].write(i, c[0])), None)  # noqa: E731
        return scan(body, (x, TensorArray(x.dtype, 4)), jnp.arange(4))[0][1]

    def want(x):
        return jnp.sum(jnp.stack(in_python(4, x)[1]) ** 2)

    x = jnp.asarray(X[0])
    for f in (by_while, by_fori_loop, by_scan):
        assert f(x).element_shape == (3,)
        np.testing.assert_allclose(jit(lambda x, f=f: jnp.sum(f(x).stack() ** 2))(x), want(x))
        np.testing.assert_allclose(jit(jax.grad(lambda x, f=f: jnp.sum(f(x).stack() ** 2)))(x), jax.grad(want)(x))


def test_where_nothing_says_a_shape_the_loop_asks_for_it():
    with pytest.raises(TypeError, match="say all of the shape of a row"):
        tf_while_loop(lambda i, _: i < 4, lambda i, rows: (i + 1, rows), (0, TensorArray(jnp.float32, 4)))
    with pytest.raises((TypeError, ValueError), match="shape of a row"):
        tf_while_loop(
            lambda i, _: i < 4, lambda i, ta: (i + 1, ta.write(i, ta.read(i))), (0, TensorArray(jnp.float32, 4))
        )
