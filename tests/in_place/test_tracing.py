"""A body is repaired once: the time to trace grows linearly with the depth of nesting."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad

from jax_tensorarray import in_place

pytestmark = pytest.mark.slow(but=1)

ROWS, DEPTH = jnp.ones((16, 4)), 5


class Counted(Primitive):
    """The identity, which counts how often it is traced or evaluated."""

    times = 0

    def bind(self, *args: Any, **params: Any) -> Any:
        self.times += 1
        return super().bind(*args, **params)


identity = Counted("counted_identity")
identity.def_abstract_eval(lambda x: x)
ad.deflinear2(identity, lambda ct, x: [ct])


def innermost(b):
    return identity.bind(b.at[2].set(jnp.sin(b[1])))


# Each puts a loop, a branch or a checkpoint around a function of a buffer.


def writes(g):
    return lambda b: lax.scan(lambda b, x: (g(b.at[1].add(x)), 2 * x), b, ROWS[:3])[0]


def writes_in_while(g):
    def body(state):
        return state[0] + 1, g(state[1].at[state[0]].add(1.0))

    return lambda b: lax.while_loop(lambda state: state[0] < 3, body, (0, b))[1]


def writes_slices(g):
    def layer(b, c):
        return g(b.at[0].add(c[2])), c.at[1].set(b[0])

    def f(b):
        b, stack = lax.scan(layer, b, jnp.ones((3, *b.shape)))
        return b.at[0].set(stack[0, 0])

    return f


def loops_over_slices(g):
    def f(b):
        b, stack = lax.scan(lambda b, c: (b.at[0].add(1.0), g(c)), b, jnp.ones((3, *b.shape)))
        return b.at[0].set(stack[0, 0])

    return f


def shifts(g):
    return lambda b: lax.fori_loop(0, 5, lambda i, b: g(jnp.concatenate([b[1:], 2 * b[:1]])), b)


def carries_twice(g):
    def body(i, carry):
        new = g(carry[0].at[i].add(carry[1][i]))
        return new, new

    return lambda b: lax.fori_loop(0, 5, body, (b, b))[0]


def exchanges(g):
    def body(i, carry):
        b, c = carry
        return c.at[i].add(g(b)[0]), b

    return lambda b: lax.fori_loop(0, 6, body, (b, b + 1))[0]


def branches(g):
    return lambda b: lax.cond(b[0, 0] > 0, lambda b: g(jnp.concatenate([b[1:], 2 * b[:1]])), lambda b: b, b)


def checkpoints(g):
    return jax.checkpoint(lambda b: g(jnp.concatenate([b[1:], 2 * b[:1]])))


def in_loop(f: Callable[..., Any]) -> Callable[..., Any]:
    return in_place(lambda b: lax.fori_loop(0, 6, lambda i, b: f(b), b))


def of_gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    return in_place(jax.grad(lambda b: f(b).sum()))


def gradient_of(f: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda b: in_place(f)(b).sum())


LOOPS = (writes, writes_slices, loops_over_slices, shifts, carries_twice)


@pytest.mark.parametrize(
    ("nest", "transform"),
    [
        *((loop, in_place) for loop in (*LOOPS, writes_in_while, exchanges)),
        *zip(LOOPS, itertools.cycle([of_gradient, gradient_of]), strict=False),
        *((nest, in_loop) for nest in (branches, checkpoints)),
    ],
)
def test_one_around_five_others_costs_as_many_traces_as_one_around_one(nest, transform):
    def traces(depth):
        nested = functools.reduce(lambda f, _: nest(f), range(depth), innermost)
        identity.times = 0
        jax.make_jaxpr(transform(nested))(ROWS)
        return identity.times

    counts = [traces(depth) for depth in range(1, DEPTH + 2)]
    more = [after - before for before, after in itertools.pairwise(counts)]
    assert max(more) == more[0], counts
