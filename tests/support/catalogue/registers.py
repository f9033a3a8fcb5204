"""Shift registers, whose rows all move in every step, stay where they are."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .loop import Loop

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


X = np.linspace(0.1, 1, SIZE)
#: name -> a loop with a register
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


def _loop(f):
    # All rows of the histories have cotangents, and NumPy takes a while for so many rows, one by one.
    orders, by_numpy = ("forward", "in_place(vmap(grad))"), f is not history
    whole = {} if by_numpy else {orders[1]: 6}
    return Loop(f, (X,), jax.ShapeDtypeStruct((ROWS, SIZE), float), orders, whole=whole, is_interpreted=by_numpy)


LOOPS = {name: _loop(f) for name, f in PROGRAMS.items()}
