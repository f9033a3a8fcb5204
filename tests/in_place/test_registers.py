"""Shift registers that stay in order, whose examples end at different times, and rows among rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalogue.registers import ROWS, SIZE, STEPS, last, pushed_in_a_loop
from in_numpy import in_numpy
from in_place import assert_no_whole_buffer_copy, compiled
from jax import jit, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from orders import assert_as_in_numpy

from benchmarks.harm.programs.whole_arrays import string_with_ends
from jax_tensorarray import in_place


def in_a_while_loop(x):
    def goes_on(c):
        return (c[2] < STEPS) & (c[0][ROWS - 5, 1] < 0.9)

    return lax.while_loop(
        goes_on, lambda c: (last(c[0], c[1]), jnp.sin(2 * c[1] + c[0][c[2]]), c[2] + 1), (0 * ONES, x, 0)
    )


ONES = np.ones((ROWS, SIZE))


def test_examples_that_end_at_different_times():
    x = np.linspace(0.1, 1, SIZE) * np.array([[1], [0.01], [-1]])
    program = compiled(jax.vmap(in_place(in_a_while_loop)), x)
    jax.tree.map(np.testing.assert_allclose, program(x), jax.vmap(in_a_while_loop)(x))
    assert_no_whole_buffer_copy(program, np.stack([ONES] * 3))


@pytest.mark.filterwarnings("error")
def test_no_rows_move_along_the_axis_of_examples_that_end_at_different_times():
    def until(x, n):
        both = jnp.arange(2.0 * ROWS)

        def body(c):
            return c[0] + 1, c[1] + jnp.concatenate([both[:ROWS], both[ROWS:]])[c[0] % 3]

        return lax.while_loop(lambda c: c[0] < n, body, (0, x))[1]

    x, n = np.linspace(0.1, 1, ROWS), np.arange(ROWS) % STEPS
    expected = [start + sum(k % 3 for k in range(steps)) for start, steps in zip(x, n, strict=True)]
    np.testing.assert_allclose(in_place(jax.vmap(until))(x, n), expected)


@pytest.mark.parametrize(
    "push",
    [
        lambda b, x: last(b, x * b.sum()),
        lambda b, x: jnp.sort(last(b, x), 0),
        lambda b, x: last(b, jnp.linalg.norm(b @ x) * x),
        lambda b, x: jnp.concatenate([b, x[None]])[jnp.argsort(b[:, 0])],
    ],
)
def test_a_register_that_is_needed_in_order_stays_as_it_is(push):
    x, f = np.linspace(0.1, 1, SIZE), pushed_in_a_loop(push)
    assert str(jax.make_jaxpr(in_place(f))(x)).count("concatenate") == str(jax.make_jaxpr(f)(x)).count("concatenate")


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("places", [lambda t: (t * t) % 3, lambda t: jnp.array([2, -1, 0]) + t % 2])
@pytest.mark.parametrize("examples", [None, 0, 1])
def test_rows_at_computed_places_among_some_rows_and_new_ones(places, examples):
    def f(x):
        def step(c, t):
            b, x = c
            some = jnp.concatenate([b[-2:], x[None]])[places(t)]
            return (last(b, x), jnp.cos(0.1 * (x + some[0]))), some

        return lax.scan(step, (jnp.zeros((ROWS, SIZE)), x), jnp.arange(STEPS))

    x = np.linspace(0.1, 1, 2 * SIZE).reshape((2, SIZE) if examples == 0 else (SIZE, 2))
    g, x = (f, x[:, 0]) if examples is None else (jax.vmap(f, examples), x)
    program = assert_as_in_numpy(g, [x], "forward")
    assert_no_whole_buffer_copy(program, ONES if examples is None else np.stack([ONES] * 2))


@pytest.mark.parametrize(
    ("push", "put", "shape"),
    [
        (last, lambda a, b: jnp.roll(a, -1, 0).at[-1].set(b), (ROWS, 6, SIZE)),
        (
            lambda b, x: jnp.concatenate([x[:6, None], b[:, :-1]], 1),
            lambda a, b: last(a, b[0]).at[:6].set(b),
            (ROWS, SIZE),
        ),
    ],
    ids=["as one row", "whose columns move"],
)
def test_a_register_that_is_written_into_another_one(push, put, shape):
    def f(x):
        def step(c, _):
            a, b, x = c
            b = push(b, x)
            return (put(a, b), b, jnp.cos(x)), a[3]

        return lax.scan(step, (jnp.ones(shape), jnp.ones((6, SIZE)), x), None, length=STEPS)

    x = np.linspace(0.1, 1, SIZE)
    program = compiled(in_place(f), x)
    jax.tree.map(np.testing.assert_allclose, program(x), in_numpy(f)(x))
    assert_no_whole_buffer_copy(program, np.ones(shape))


def test_an_array_whose_type_says_how_it_is_divided():
    """What is made here would have to say so, too: such a register stays as it is."""

    def one(x):
        def step(c, _):
            b, x = c
            b = lax.cond(x[0] > 0.5, last, lambda b, x: b, b, x)
            return (b, jnp.sin(2 * x + b[5])), b[0]

        return lax.scan(step, (jnp.zeros((ROWS, SIZE)) + 0 * x, x), None, length=STEPS)

    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(np.linspace(0.1, 1, 2 * SIZE).reshape(2, SIZE), NamedSharding(mesh, P("d")))
        f = jax.vmap(one)
        jax.tree.map(np.testing.assert_allclose, jit(in_place(f))(x), jit(f)(x))


@pytest.mark.parametrize("order", ["in_place(grad)", "grad(in_place)"])
def test_a_stencil_whose_ends_are_set_has_its_gradient(order):
    """The gradient takes no rows from behind the last one of a register."""
    assert_as_in_numpy(string_with_ends, (np.sin(np.arange(3.0 * ROWS)), np.cos(np.arange(4.0))), order)
