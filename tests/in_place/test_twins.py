"""Carries that only look equal stay apart. A `while_loop` carries equal buffers once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalogue.twins import ROWS, SIZE, X, in_a_branch, in_a_fori_loop, loss, one, updated
from in_numpy import in_numpy
from in_place import assert_no_whole_buffer_operation, compiled
from jax import jit, lax
from jax.extend.core import jaxpr_as_fun
from library_in_numpy import library_in_numpy

from jax_tensorarray import in_place

pytestmark = pytest.mark.slow(but=2)


def in_a_while_loop(step):
    def loop(first, x):
        def body(s):
            return s[0] + 1, *step(s[0], *s[1:])

        return lax.while_loop(lambda s: (s[0] < ROWS) & (s[1][0, 0] < 9), body, (0, *first, x))[1:]

    return loop


@pytest.mark.parametrize("step", [updated, in_a_branch])
def test_in_a_while_loop(step):
    f, g = (loss(loop(step), one) for loop in (in_a_while_loop, in_a_fori_loop))
    for ours, plain in ((in_place(f), g), (jax.grad(in_place(f, max_steps=ROWS)), jax.grad(g))):
        program = compiled(ours, X)
        np.testing.assert_allclose(program(X), in_numpy(plain)(X), rtol=1e-9)
        assert_no_whole_buffer_operation(program.as_text(), ROWS * X.nbytes)


DIFFERENT = {
    "other values": lambda b, x: ((b, b + x), lambda a, b, i: (a.at[i].set(x), b.at[i].set(x))),
    "another sign of zero": lambda b, x: ((b, -b), lambda a, b, i: (1 / a, 1 / b)),
    "without a derivative": lambda b, x: (
        (b, b),
        lambda a, b, i: (a.at[i].add(x * a[i - 1]), lax.stop_gradient(b.at[i].add(x * b[i - 1]))),
    ),
    "in another order": lambda b, x: ((b, b, 2 * b), lambda a, b, c, i: (b, c.at[i].set(x), a)),
    "a branch that differs": lambda b, x: (
        (b, b),
        lambda a, b, i: lax.cond(i % 3 == 0, lambda: (b.at[i].set(x), a), lambda: (a, b)),
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_is_carried_twice(name):
    def f(x):
        start, step = DIFFERENT[name](jnp.zeros((9, SIZE)), x)
        ends = lax.fori_loop(0, 7, lambda i, s: step(*s, i), start)
        return sum(k * jnp.sum(jnp.sin(jnp.where(jnp.isinf(end), jnp.sign(end), end))) for k, end in enumerate(ends, 1))

    want, slope = in_numpy(lambda x: (f(x), jax.grad(f)(x)))(X)
    ours = jax.jit(lambda x: [g(x) for g in (in_place(f), jax.grad(in_place(f)), in_place(jax.grad(f)))])
    for got, x in zip(ours(X), (want, slope, slope), strict=True):
        np.testing.assert_allclose(got, x, rtol=1e-12, atol=1e-12)


def taken_from_one(i, c):
    pair = lax.cond(i == 0, lambda u, v: (u.at[2].set(0.5), v), lambda u, v: (v, u), c, c)
    return c.at[1].set(pair[1][2])


def added_after_the_choice(i, c):
    u, v = lax.switch(i % 3, (lambda u, v: (u, v), lambda u, v: (v, u), lambda u, v: (v, u)), c, jnp.cos(c))
    return c.at[i].set(jnp.sin(u + v)[0])


@pytest.mark.parametrize("step", [taken_from_one, added_after_the_choice])
def test_the_cotangent_of_a_choice_between_equal_buffers_is_added(step):
    """The derivative chooses between equal cotangents, and adds the result to the cotangent of the buffer."""

    def loss(a, loop=lax.fori_loop):
        return jnp.sum(jnp.sin(loop(0, 3, step, a)) * jnp.arange(1.0, 5.0))

    def unrolled(low, high, step, a):
        return functools.reduce(lambda a, i: step(i, a), range(low, high), a)

    a = jnp.array([0.99, 0.76, -0.73, 0.3])
    want = in_numpy(jax.grad(lambda a: loss(a, unrolled)))(a)
    traced = jax.make_jaxpr(jax.grad(loss))(a)
    for ours in (in_place(jax.grad(loss), memory=0), in_place(lambda a: jaxpr_as_fun(traced)(a)[0])):
        np.testing.assert_allclose(library_in_numpy(ours)(a), want, rtol=1e-9)


def test_effects_of_a_step_happen_as_often_as_they_are_written():
    seen = []

    def f(b):
        def body(i, c):
            for _ in range(2):
                jax.debug.callback(lambda i: seen.append(int(i)), i)
            new = c[0].at[i].set(jnp.sin(c[1][i - 1]))
            return new, new

        return lax.fori_loop(1, 4, body, (b, b))

    a, b = jit(in_place(f))(jnp.ones((4, SIZE)))
    jax.effects_barrier()
    assert sorted(seen) == [1, 1, 2, 2, 3, 3]
    np.testing.assert_array_equal(a, b)
