"""`jnp.where(done, first, state)` in every step copies nothing but the examples that are done."""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

from .loop import ORDERS, Loop

STEPS, ROWS, SIZE = 40, 128, 16
X = np.linspace(-1, 1, 5 * SIZE).reshape(5, SIZE)[2:]
FIRST = np.linspace(-1, 1, ROWS * SIZE).reshape(ROWS, SIZE)
FIRSTS = np.stack([FIRST * k for k in (3, 4, 5)])


def episodes(x, first, *, early=False, alive=False):
    """Write a row after the other, until one is large."""

    def again(done, state):
        return jnp.where(~done, state, first) if alive else jnp.where(done, first, state)

    def step(carry, _):
        state, n, x, done = carry
        if early:
            state = again(done, state)
        x = jnp.sin(3 * x + state[n // 2])
        state, done = state.at[n].set(x), x[0] > 0.9
        if not early:
            state = again(done, state)
        return (state, jnp.where(done, 0, n + 1), x, done), done

    (state, *_), dones = lax.scan(step, (first, 0, x, False), None, length=STEPS)
    return jnp.sum(jnp.sin(state)), (state, dones)


def emptied(start, noise, *, is_register):
    """Write a row in every step, and zeros over all rows if the row is large."""

    def step(carry, of):
        x, rows = carry
        t, e = of
        x = 0.9 * x + 0.1 * jnp.tanh(rows[-1] + rows[-3]) + e
        rows = jnp.concatenate([rows[1:], x[None]]) if is_register else rows.at[t % len(rows)].set(x)
        done = x[0] > 1.2
        return (x, jnp.where(done, jnp.zeros_like(rows), rows)), (x, done)

    (_, rows), (xs, dones) = lax.scan(step, (jnp.zeros(SIZE, start.dtype), start), (jnp.arange(len(noise)), noise))
    return jnp.sum(jnp.sin(xs)) + jnp.sum(jnp.cos(rows)), dones


def episodes_of_one_state(x, **options):
    return episodes(x, FIRST, **options)


#: Noise that makes each example empty its buffer now and then.
NOISE = np.random.default_rng(0).normal(0, 0.4, (5, STEPS, SIZE))[2:]


#: A branch makes all rows if an example starts again, and the cotangent of a first state has all rows.
WHOLE = {order: 2 if "grad" in order else 1 for order in ORDERS}


def _loop(f, *batch, by=0, whole=WHOLE):
    return Loop(f, tuple(x[0] for x in batch), FIRST, tuple(whole), by=by, batch=batch, whole=whole)


LOOPS = {
    "the state of each": _loop(episodes, X, FIRSTS),
    "by the first state": _loop(episodes, X, FIRSTS, by=(0, 1), whole={"in_place(grad)": 4, "grad(in_place)": 4}),
    "before the step": _loop(functools.partial(episodes_of_one_state, early=True), X),
    "while alive": _loop(functools.partial(episodes_of_one_state, alive=True), X),
    "an emptied register": _loop(functools.partial(emptied, is_register=True), FIRSTS, NOISE, by=(0, 1)),
    "an emptied buffer": _loop(functools.partial(emptied, is_register=False), FIRSTS, NOISE, by=(0, 1)),
}
