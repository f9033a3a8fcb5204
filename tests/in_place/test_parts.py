"""Parts of a buffer that are not put back in their place, and what an index of a part means."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalogue import parts
from catalogue.parts import D, N
from in_place import whole_buffer_operations
from jax import lax
from orders import assert_as_in_numpy, assert_right, in_turn

from jax_tensorarray import doctor, in_place
from jax_tensorarray._compat import barriers_hold

#: What is no version of the buffer in its place.
OTHERS = {
    "halves that change places": ((2, N, D), lambda c, i, x: jnp.stack([c[1].at[i].set(x), c[0].at[i].set(2 * x)])),
    "one half twice": ((2, N, D), lambda c, i, x: jnp.stack([c[0].at[i].set(x), c[0].at[i].set(2 * x)])),
    "a half put in another place": ((2, N, D), lambda c, i, x: c.at[1].set(c[0].at[i].set(x))),
    "an older version of a half": (
        (2, N, D),
        lambda c, i, x: (lambda d: jnp.stack([d[0].at[i].set(x), c[1]]))(c.at[1, i].add(1.0)),
    ),
    "two versions": (
        (2, N, D),
        lambda c, i, x: (lambda k: jnp.stack([k.at[i].add(x), c[1].at[i].set(k.at[3].set(2 * x)[3])]))(
            c[0].at[i].set(x)
        ),
    ),
    "rows in two places": (
        (N, D),
        lambda c, i, x: jnp.concatenate([c[-2:], c, c[:2]]).at[jnp.stack([i - 5, i + N - 10])].add(x)[2:-2],
    ),
    "windows that go on in the next row": (
        (N, D),
        lambda c, i, x: lax.dynamic_update_slice(c.ravel(), x, (i * 5,)).reshape(N, D),
    ),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("name", "order"), in_turn(OTHERS))
def test_what_is_not_put_back_is_what_it_was(name, order):
    assert_right(parts.loop(*OTHERS[name]), order)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("index", [0, 19, 20, 49, 50, -1, -20, -21, 1000])
def test_an_index_is_one_of_the_part(index):
    """A row past the end of a part is not the first one of the next part, forward against NumPy."""

    def step(c, i):
        first, rest = c[:20], c[20:]
        first = first.at[i].set(1.0, mode="drop")
        rest = lax.dynamic_update_slice(rest, jnp.full((1, 2), 2.0), (i, 0))
        return jnp.concatenate([first, rest]), None

    expected = np.zeros((70, 2))
    if -20 <= index < 20:
        expected[:20][index] = 1
    expected[20:][np.clip(index + 50 * (index < 0), 0, 49)] = 2
    f = lambda i: lax.scan(step, jnp.zeros((70, 2)), jnp.full(3, i))[0]  # noqa: E731
    np.testing.assert_array_equal(jax.jit(in_place(f))(index), expected)


@pytest.mark.parametrize("index", [0, 1, -1, -2])
def test_an_axis_of_size_1_has_indices_out_of_range(index):
    """A part that is put back out of range is left out, also along an axis of which there is one row."""

    def step(c, i):
        view = c[None]
        return view.at[index_of(c), 1].set(view[0, 1].at[i].set(2.0))[0], None

    index_of = lambda c: jnp.int32(index) + jnp.int32(c[0, 0])  # noqa: E731
    out, _ = jax.jit(in_place(lambda c: lax.scan(step, c, jnp.arange(5))))(jnp.zeros((3, 70)))
    expected = np.zeros((3, 70))
    expected[1, :5] = 2 if -1 <= index < 1 else 0
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("column", [0, 2, -1, -3])
def test_an_axis_of_one_element_has_stray_indices_too(column):
    """The axis is taken as a whole, so the row op does not start along it."""

    def f(b, j):
        return lax.fori_loop(0, 3, lambda i, b: b.at[i, j].add(jnp.cos(b[i, 0]) + b[i + 1, 0]), b)

    b = np.arange(5.0)[:, None]
    assert "ta_add[" in str(jax.make_jaxpr(in_place(f))(b, column))
    found, want = jax.jit(in_place(f))(b, column), jax.jit(f)(b, column)
    np.testing.assert_array_equal(found, want)
    assert bool(jnp.all(want == b)) == (column in (2, -3))


def test_explain_says_that_a_part_is_put_back():
    halves = parts.LOOPS["halves"]
    text = str(doctor.explain(halves.f)(*halves.args))
    assert "a part of the buffer that is put back in its place (2 times)" in text
    assert "Not rewritten: none" in text
    one_row = parts.LOOPS["all of an axis of one row"]
    assert "what it writes: it is all of the array" in str(doctor.explain(jax.vmap(one_row.f))(*one_row.batch))


@pytest.mark.slow
def test_a_step_may_have_keys():
    def f(key, c):
        def step(c, key):
            keys = key.reshape(1)
            return jnp.stack([c[0].at[3].set(jax.random.normal(keys[0], (D,))), c[1]]), None

        return lax.scan(step, c, jax.random.split(key, 4))[0]

    args = jax.random.key(0), jnp.ones((2, N, D))
    np.testing.assert_array_equal(in_place(f)(*args), f(*args))


def test_an_index_that_is_known_has_a_type():
    """300 is 44 in 8 bits."""

    def step(c, x):
        k = lax.convert_element_type(np.int32(300), jnp.uint8)
        return c.at[k].set(c[k].at[x].set(1.0)), None

    expected = np.zeros((400, 20))
    expected[44] = 1
    f = lambda xs: lax.scan(step, jnp.zeros((400, 20)), xs)[0]  # noqa: E731
    np.testing.assert_array_equal(jax.jit(in_place(f))(np.arange(20)), expected)


@pytest.mark.parametrize("first", [0, 1])
def test_a_function_takes_another_part_in_each_of_its_calls(first):
    """JAX traces it once, so both calls have the same variables. An unsigned start is not counted from the end."""
    zero = np.uint32(0)
    take = jax.jit(lambda c, k: lax.dynamic_slice(c, (k, zero, zero), (1, N, D))[0])
    put = jax.jit(lambda c, part, k: lax.dynamic_update_slice(c, part[None], (k, zero, zero)))

    def step(c, i):
        one, other = take(c, np.uint32(0)).at[i].set(1.0), take(c, np.uint32(2)).at[i].add(2.0)
        parts = [(one, np.uint32(0)), (other, np.uint32(2))]
        for part, k in (parts[first], parts[1 - first]):
            c = put(c, part, k)
        return c, None

    f = lambda c: lax.scan(step, c, np.arange(5))[0]  # noqa: E731
    given = np.random.default_rng(0).standard_normal((3, N, D))
    expected = given.copy()
    expected[0, :5], expected[2, :5] = 1, given[2, :5] + 2
    np.testing.assert_array_equal(jax.jit(in_place(f))(given), expected)


def test_columns_are_put_back_into_what_is_transposed_twice():
    """That is the buffer itself, and one of the columns has not changed."""

    def f(b):
        def step(b, i):
            b = b.T.T
            return b.at[:, 1].set(b[:, 1]).at[:, 7].set(b[:, 7].at[i].set(0.5 * i)), None

        return lax.scan(step, b, jnp.arange(4, 40))[0]

    args = [np.arange(N * D, dtype=float).reshape(N, D)]
    text = assert_as_in_numpy(f, args, "forward").as_text()
    assert not (barriers_hold("cpu") and whole_buffer_operations(text, args[0].nbytes))
