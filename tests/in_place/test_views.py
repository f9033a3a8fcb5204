"""Views that are made before a loop, of all rows, or of versions that are discarded."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalogue.views import COMPUTED, D, N, Q
from in_numpy import in_numpy
from in_place import assert_no_whole_buffer_copy, compiled
from jax import jit, lax
from orders import ORDERS, assert_as_in_numpy, in_turn

from jax_tensorarray import in_place
from jax_tensorarray._compat import barriers_hold
from jax_tensorarray._hlo.text import copies_in_loops, whole_buffer_operations_in_loops

pytestmark = pytest.mark.slow(but=1)


def in_a_while_loop(read):
    def f(q):
        def step(c):
            return c[0] + 1, jnp.tanh(0.5 * c[1] + jnp.sum(jnp.sin(read(q, c[0]))))

        return lax.while_loop(lambda c: c[0] < 30, step, (0, jnp.ones(())))[1]

    return f


@pytest.mark.parametrize("name", COMPUTED)
def test_what_a_loop_without_a_bound_reads_is_made_before_it(name):
    f = in_a_while_loop(COMPUTED[name])
    found, want = (
        by(lambda q, g=g: jax.jvp(g, (q,), (jnp.ones_like(q),)))(Q) for by, g in ((jit, in_place(f)), (in_numpy, f))
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-12), found, want)


def test_cotangents_of_a_smaller_float_are_added_in_the_larger_one():
    """A row of a table in 16 bits is read 3000 times: in 16 bits the sum would end at 256."""

    def f(q):
        def step(i, s):
            return s + q.astype(jnp.bfloat16)[0].astype(q.dtype)

        return lax.fori_loop(0, 3000, step, q[0]).sum()

    assert jit(jax.grad(in_place(f)))(jnp.ones((N, D)))[0, 0] == 3001


def test_a_number_without_a_derivative_is_no_buffer():
    def f(b):
        def step(i, b):
            return b.at[i].set(b[i - 1] + (lax.stop_gradient(3.0) * jnp.arange(1.0 * len(b)))[i])

        return lax.fori_loop(1, len(b), step, b)

    np.testing.assert_array_equal(jit(in_place(f))(jnp.ones(50)), jit(f)(jnp.ones(50)))


@pytest.mark.parametrize("examples", [None, 3])
def test_rows_of_a_buffer_that_a_step_makes_as_a_whole_are_read_of_it(examples):
    """One array is made in a step, whoever reads rows of it, and none is copied."""

    def f(b, x):
        def step(c, x):
            b, i = c
            here = (jnp.arange(len(b)) == i)[:, None]
            b = b * (1 - here) + here * (x + jnp.sin(b[i // 2]))
            return (b, i + 1), b[i // 3, 0]

        return lax.scan(step, (b, 0), x)[1]

    args = np.zeros((examples or 1, 300, 16)), np.sin(np.arange((examples or 1) * 4800.0)).reshape(-1, 300, 16)
    want = []
    for b, x in zip(*args, strict=True):
        b = b.copy()
        for i, row in enumerate(x):
            b[i] = row + np.sin(b[i // 2])
            want.append(b[i // 3, 0])
    args, f = (args, jax.vmap(f)) if examples else ([x[0] for x in args], f)
    program = compiled(in_place(f), *args)
    np.testing.assert_allclose(program(*args).ravel(), want, rtol=1e-12)
    of_whole = whole_buffer_operations_in_loops(program.as_text(), args[0].nbytes)
    assert len(of_whole) <= (1 if barriers_hold("cpu") else 3)


OF_WHOLE = {
    "reversed": lambda b: b[::-1][0],
    "padded": lambda b: jnp.pad(b, 1)[1],
    "joined": lambda b: jnp.concatenate([b, b])[0],
    "rolled": lambda b: jnp.roll(2 * b, 3)[1],
    "repeated": lambda b: jnp.sum(jnp.resize(b, (2, b.size + 3))[:, 1]),
}


@pytest.mark.parametrize("size", [400, 8000])
@pytest.mark.parametrize(
    ("view", "op"), [*zip(OF_WHOLE, ("add", "max", "multiply", "set after a read", "add"), strict=True)]
)
def test_a_row_of_what_is_made_of_all_rows_is_read_before_the_update(view, op, size):
    """XLA takes the row alone. A barrier between the view and the update would have it copy the buffer for that."""

    def f(b):
        def body(i, c):
            b, total = c
            row = 0.5 * OF_WHOLE[view](b)
            if op == "set after a read":
                total += b[i - 1]
            b = getattr(b.at[i], op.split()[0])(row)
            return b, total + b[i]

        return lax.fori_loop(1, len(b), body, (b, 0.0))

    b = np.linspace(0.1, 1, size)
    program = compiled(in_place(f), b)
    assert not copies_in_loops(program.as_text(), b.nbytes)
    jax.tree.map(np.testing.assert_allclose, program(b), jit(f)(b))


def written_by_a_call(b, i):
    write = jit(lambda b, x: b.at[i].set(x))
    row = write(b, 2.0)[i // 2]
    return write(b, jnp.cos(row)), row


def one_of_two(b, i):
    rows = [b.at[i].set(x)[i // 2] for x in (1.0, 2.0)]
    return b.at[i].set(jnp.where(jnp.sum(rows[0]) > i, *rows)), rows[1]


#: What a step of a loop returns that tries a change of a buffer `[N, D]`.
TRIALS = {
    "a row": lambda b, i: (b, b.at[i].set(2.0)[i // 2]),
    "a row of a sum": lambda b, i: (b, b.at[i].add(2.0)[jnp.array([0, 1]) + i]),
    "a window": lambda b, i: (b, lax.dynamic_slice_in_dim(b.at[i].set(2.0), i // 2, 3)),
    "a row of what is computed": lambda b, i: (b, jnp.sin(b.at[i].set(2.0))[i // 2]),
    "by a mask": lambda b, i: (b, jnp.where((jnp.arange(len(b)) == i)[:, None], 2.0, b)[i // 2]),
    "a choice": lambda b, i: (b, jnp.where(i % 3 > 0, b.at[i].set(2.0), b)[i // 2]),
    "in a branch": lambda b, i: lax.cond(
        i % 2 == 0, lambda b: (b, b.at[i].set(2.0)[i // 2]), lambda b: (b, jnp.zeros(D)), b
    ),
    "before a change": lambda b, i: (b.at[i + 1].set(b.at[i].set(2.0)[i // 2]), b[i // 3]),
    "by a call": written_by_a_call,
    "one of two": one_of_two,
}


@pytest.mark.parametrize(
    ("name", "order"), in_turn([*TRIALS, *TRIALS], ["forward", "vmap", "grad(in_place)", "in_place(vmap)"])
)
def test_a_version_that_is_discarded_is_not_made(name, order):
    """XLA computes the rows that are read of it."""

    def f(b):
        return lax.scan(lambda b, i: TRIALS[name](b, i), b, jnp.arange(40))

    args = [np.stack([Q, 0.5 * Q]) if "vmap" in order else Q]
    program = assert_as_in_numpy(f, args, order)
    if "grad" not in order:
        plain = compiled(ORDERS[order](f, lambda f: f, 0), *args)
        ours, theirs = (len(copies_in_loops(p.as_text(), args[0].nbytes)) for p in (program, plain))
        is_put_back = name in ("before a change", "by a call", "one of two")  # of these XLA makes versions, too
        assert ours <= theirs and (is_put_back or not theirs)


@pytest.mark.parametrize("order", ["forward", "grad(in_place)", "in_place(grad)"])
@pytest.mark.parametrize("is_chosen", [operator.eq, operator.lt])
def test_a_row_of_a_choice_by_place_is_computed_alone(is_chosen, order):
    """Plain JAX makes a cotangent of all rows in each step."""

    def f(b):
        def step(b, i):
            return b, 2 * jnp.where(is_chosen(jnp.arange(len(b)), i)[:, None], 0.5, b)[i // 2]

        return lax.scan(step, b, jnp.arange(len(b)))

    assert_no_whole_buffer_copy(assert_as_in_numpy(f, [Q], order), Q)


def test_a_step_may_call_a_function_without_arguments():
    def f(b):
        return lax.fori_loop(1, len(b), lambda i, b: b.at[i].set(b[i - 1] + jit(lambda: jnp.ones(b.shape[1]))()), b)

    np.testing.assert_array_equal(jit(in_place(f))(jnp.ones((50, 2))), f(jnp.ones((50, 2))))


def test_elements_of_a_state_that_is_computed_with_as_a_whole_are_no_rows():
    """Its cotangent is made as a whole in any case, and rows of it would only be added to that."""

    def f(us):
        def move(x, u):
            return x + 0.1 * jnp.stack([x[1], jnp.sin(x[0]) + u, u - x[2]]), jnp.sum(x**2)

        return jnp.sum(lax.scan(move, jnp.array([1.0, 0.0, 0.5]), us)[1])

    us = np.linspace(-1, 1, 24)
    gradient = jax.grad(in_place(f))
    np.testing.assert_allclose(gradient(us), in_numpy(jax.grad(f))(us), rtol=1e-9)
    assert "ta_read" not in str(jax.make_jaxpr(gradient)(us))
