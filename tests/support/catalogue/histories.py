"""The histories of L-BFGS, as libraries keep them: in one step a row is written, and all are read, one by one."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .loop import ORDERS, Loop

ROWS, SIZE, STEPS = 48, 8, 12
X = np.linspace(-1, 1, SIZE)


def gradient(x):
    return x + 0.1 * jnp.sin(3 * x)


def direction(s, y, of_rows, q, places):
    """The recursion of two loops, which reads the rows at these places."""

    def down(r, i):
        a = of_rows[i] * jnp.vdot(s[i], r)
        return r - a * y[i], a

    def up(r, xs):
        i, a = xs
        return r + (a - of_rows[i] * jnp.vdot(y[i], r)) * s[i], None

    r, a = lax.scan(down, q, places, reverse=True)
    return lax.scan(up, r, (places, a))[0]


def differences(x, q):
    new = x - 0.3 * q
    s, y = new - x, gradient(new) - gradient(x)
    return new, s, y, 1 / (1 + jnp.vdot(s, y))


def places_from(i):
    return (i + jnp.arange(ROWS)) % ROWS


def in_a_branch(x):
    """As jaxopt has it: the step is a branch, and reads a row after the write."""

    def step(i, s, y, of_rows, x, scale):
        new, ds, dy, r = differences(x, direction(s, y, of_rows, scale * gradient(x), places_from(i)))
        k = i % ROWS
        s, y, of_rows = s.at[k].set(ds), y.at[k].set(dy), of_rows.at[k].set(r)
        return s, y, of_rows, new, (1 + jnp.vdot(y[k], s[k])) / (1 + jnp.vdot(y[k], y[k]))

    def body(c, i):
        return lax.cond(c[-1][0] < 9.0, lambda: step(i, *c[:-1], c[-1][0]), lambda: (*c[:-1], c[-1][0])), None

    def flat(c, i):
        out, _ = body((*c[:-1], c[-1][None]), i)
        return out, None

    rows = jnp.zeros((ROWS, SIZE))
    return lax.scan(flat, (rows, rows + 0 * x, jnp.zeros(ROWS), x, jnp.ones(())), jnp.arange(STEPS))[0][3:]


def twice_in_the_carry(x):
    """As optimistix has it: written in a branch of a branch, carried twice, and passed into a call."""

    def step(c, i):
        (s, y, of_rows, k), kept, x, q = c
        new, ds, dy, r = differences(x, q)

        def write():
            at = k % ROWS
            written = s.at[at].set(ds), y.at[at].set(dy), of_rows.at[at].set(r), k + 1
            return written, written

        def accepted():
            both = lax.cond(jnp.vdot(ds, dy) > 1e-9, write, lambda: ((s, y, of_rows, k), kept))
            (s1, y1, r1, k1), _ = both
            return *both, new, direction(s1, y1, r1, gradient(new), places_from(k1))

        return lax.cond(i % 5 != 4, accepted, lambda: (c[0], kept, x, 0.5 * q)), None

    @jax.custom_vjp
    def run(first, other, x):
        return lax.scan(step, (first, other, x, gradient(x)), jnp.arange(STEPS))[0][2:]

    def forward(*args):
        return jax.vjp(lambda *args: lax.scan(step, (*args, gradient(args[-1])), jnp.arange(STEPS))[0][2:], *args)

    run.defvjp(forward, lambda pull, ct: pull(ct))

    def zeros():
        return jnp.zeros((ROWS, SIZE)), jnp.zeros((ROWS, SIZE)), jnp.zeros(ROWS), jnp.int32(0)

    return run(zeros(), zeros(), x)


def moved_by_a_row(x):
    """As TensorFlow Probability has it: all rows move, inside a `where`, and scans have them as `xs`."""

    def push(rows, should, new):
        return jnp.where(should, jnp.concatenate([rows[1:], new[None]]), rows)

    def step(c, i):
        s, y, x = c

        def recursion():
            of_rows = jnp.sum(y * s, axis=-1)

            def down(r, xs):
                s, y, v = xs
                a = jnp.vdot(s, r) / (1 + v)
                return r - a * y, a

            def up(r, xs):
                a, s, y, v = xs
                return r + (a - jnp.vdot(y, r) / (1 + v)) * s, None

            flipped = jax.tree.map(lambda x: lax.rev(x, (0,)), (s, y, of_rows))
            r, a = lax.scan(down, gradient(x), flipped)
            r = r * (1 + of_rows[-1]) / (1 + jnp.vdot(y[-1], y[-1]))
            return lax.scan(up, r, (lax.rev(a, (0,)), s, y, of_rows))[0]

        new, ds, dy, _ = differences(x, lax.cond(i > 0, recursion, lambda: gradient(x)))
        should = jnp.vdot(ds, dy) > 1e-9
        return (push(s, should, ds), push(y, should, dy), new), None

    return lax.scan(step, (jnp.zeros((ROWS, SIZE)), jnp.zeros((ROWS, SIZE)), x), jnp.arange(STEPS))[0]


#: Gradients of what is read as a whole have arrays of its size.
WHOLE = {
    "in_a_branch": [0, 0, 0, 12, 12, 12, 12],
    "twice_in_the_carry": [0, 0, 0, 18, 18, 36, 36],
    "moved_by_a_row": [0, 0, 12, 14, 14, 38, 38],
}


def _loop(f, orders):
    whole = dict(zip(ORDERS, WHOLE[f.__name__], strict=True))
    buffer = jax.ShapeDtypeStruct((ROWS, SIZE), float)
    return Loop(f, (X,), buffer, orders, whole=whole, is_for_barriers=True)


KINDS = {"values": [*ORDERS][:3], "gradients": [*ORDERS][3:5], "gradients of a batch": [*ORDERS][5:]}
LOOPS = {
    f"{f.__name__}, {kind}": _loop(f, tuple(orders))
    for f in (in_a_branch, twice_in_the_carry, moved_by_a_row)
    for kind, orders in KINDS.items()
}
