"""Shift registers, whose rows all move in every step, stay where they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_numpy import in_numpy
from in_place import assert_no_whole_buffer_copy, compiled
from jax import jit, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from orders import assert_as_in_numpy, in_turn

from jax_tensorarray import in_place

ROWS, SIZE, STEPS = 160, 8, 30


def last(b, x):
    return jnp.roll(b, -1, 0).at[-1].set(x)


def first(b, x):
    return jnp.concatenate([x[None], b[:-1]])


def pushed_in_a_loop(push):
    def f(x):
        def step(c, t):
            b, x = c
            return (push(b, x), jnp.sin(2 * x + b[ROWS // 3] + b[t])), b[-1]

        return lax.scan(step, (jnp.zeros((ROWS, SIZE)), x), jnp.arange(STEPS))

    return f


def history(x):
    """The two loops of L-BFGS, over all rows: these are read one by one."""

    def step(c, _):
        s, y, x = c

        def down(k, c):
            a = 0.01 * jnp.vdot(s[ROWS - 1 - k], c[0])
            return c[0] - a * y[ROWS - 1 - k], c[1].at[ROWS - 1 - k].set(a)

        q, a = lax.fori_loop(0, ROWS, down, (x, jnp.zeros(ROWS)))
        r, _ = lax.scan(lambda r, of: (r + of[0] * (of[2] - 0.01 * jnp.vdot(of[1], r)), None), q, (s, y, a))
        keep = jnp.vdot(r, r) < 5
        return (jnp.where(keep, last(s, -r), s), jnp.where(keep, last(y, jnp.sin(r)), y), x - 0.1 * r), None

    return lax.scan(step, (jnp.zeros((ROWS, SIZE)), jnp.zeros((ROWS, SIZE)), x), None, length=STEPS)[0]


def two_that_change_places(x):
    def step(c, _):
        a, b, x = c
        return (last(b, x), first(a, x), jnp.sin(x + a[3] + b[7])), a[5]

    return lax.scan(step, (jnp.zeros((ROWS, SIZE)), jnp.ones((ROWS, SIZE)), x), None, length=STEPS, unroll=2)


def columns(x):
    def step(c, _):
        b, x = c
        return (jnp.concatenate([b[:, 2:], x[:, None], x[:, None]], 1), jnp.sin(x + b[:, ROWS // 2])), b[1, 5:9]

    return lax.scan(step, (jnp.ones((SIZE, ROWS)), x), None, length=STEPS, reverse=True)


def in_a_while_loop(x):
    def goes_on(c):
        return (c[2] < STEPS) & (c[0][ROWS - 5, 1] < 0.9)

    return lax.while_loop(
        goes_on, lambda c: (last(c[0], c[1]), jnp.sin(2 * c[1] + c[0][c[2]]), c[2] + 1), (0 * ONES, x, 0)
    )


ONES = np.ones((ROWS, SIZE))
PROGRAMS = {
    "windows are read and rows added": pushed_in_a_loop(
        lambda b, x: (
            last(b, x + b[-4:].sum(0) + lax.dynamic_slice(b, (b[0, 0].astype(int), 3), (3, 1)).sum())
            .at[jnp.array([1, 4, ROWS + 3])]
            .add(0.1 * x, mode="drop")
        )
    ),
    "in a conditional": pushed_in_a_loop(
        lambda b, x: lax.switch(
            (100 * x[0]).astype(int) % 4, [last, first, lambda b, x: b.at[2, 1].set(x[0]), lambda b, x: b], b, x
        )
    ),
    "in a checkpoint": pushed_in_a_loop(jax.checkpoint(lambda b, x: last(first(b, x), x))),
    "in a checkpoint that says of each operand whether it is computed once": pushed_in_a_loop(
        jax.checkpoint(lambda b, x: last(first(b, x), x), prevent_cse=(True, False))
    ),
    "by a number that is computed": pushed_in_a_loop(
        lambda b, x: jnp.roll(b, (100 * x[0]).astype(int), 0).at[5].set(x)
    ),
    "one row written over the others": pushed_in_a_loop(lambda b, x: b.at[3:].set(b[:-3]).at[0].set(x)),
    "joined, then cut": pushed_in_a_loop(lambda b, x: lax.dynamic_slice(jnp.vstack([b, x]), (1, 0), b.shape)),
    "nothing between": pushed_in_a_loop(lambda b, x: jnp.concatenate([b[1:], b[:0], x[None]]).at[0].add(b[3:3].sum())),
    "the histories of an optimizer": history,
    "two that change places": two_that_change_places,
    "columns": columns,
    "two rows change places": pushed_in_a_loop(
        lambda b, x: (lambda b: jnp.concatenate([b[:-2], b[-1:], b[-2:-1]]))(last(b, x)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "order"),
    [*in_turn(PROGRAMS, ["forward", "in_place(vmap(grad))"]), ("two rows change places", "forward")],
)
def test_a_register_stays_where_it_is(name, order):
    x = np.linspace(0.1, 1, SIZE)
    x = np.stack([x, -x]) if "vmap" in order else x
    oracle = jit if PROGRAMS[name] is history else in_numpy  # which takes a while for many rows, one by one
    program = assert_as_in_numpy(PROGRAMS[name], [x], order, oracle=oracle)
    if name != "the histories of an optimizer" or "grad" not in order:  # all rows of them have cotangents
        assert_no_whole_buffer_copy(program, np.stack([ONES] * len(x)) if x.ndim > 1 else ONES)


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
