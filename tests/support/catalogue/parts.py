"""A buffer that is taken apart, updated in its parts and put together again is updated by rows."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .loop import EXAMPLES, ORDERS, Loop

N, D, STEPS = 120, 8, 30
#: name -> the shape of a buffer, and what a step makes of it, a number and a row. The page has more.
STEPS_OF_PARTS = {
    "halves": ((2, N, D), lambda c, i, x: jnp.stack([c[0].at[i].set(x), c[1].at[i].set(2 * x)])),
    "one of three": ((3, N, D), lambda c, i, x: jnp.stack([c[0], c[1].at[i].add(x), c[2]])),
    "the last axis": ((N, D, 2), lambda c, i, x: jnp.stack([c[..., 0].at[i].set(x), c[..., 1].at[i].set(x)], -1)),
    "split": (
        (2, N, D),
        lambda c, i, x: jnp.concatenate([p.at[:, i].set(x + k) for k, p in enumerate(jnp.split(c, 2))]),
    ),
    "half of a split": ((2, N, D), lambda c, i, x: jnp.concatenate([c[:1], jnp.split(c, 2)[1].at[:, i].set(x)])),
    "unequal": ((N, D), lambda c, i, x: jnp.concatenate([c[:50].at[i].set(x), c[50:].at[i].set(2 * x)])),
    "clamped": (
        (N, D),
        lambda c, i, x: jnp.concatenate([lax.dynamic_update_slice(c[:20], x[None], (i, 0)), c[20:].at[i].set(x)]),
    ),
    "parts of parts": (
        (2, 3, N, D),
        lambda c, i, x: jnp.stack([jnp.stack([p.at[i].set(x * (k + 1)) for k, p in enumerate(q)]) for q in c]),
    ),
    "a read of what has changed": (
        (2, N, D),
        lambda c, i, x: (lambda k, v: jnp.stack([k, v.at[i].set(x + k[i // 3] + v[i // 2])]))(c[0].at[i].set(x), c[1]),
    ),
    "a chosen part": (
        (2, N, D),
        lambda c, i, x: jnp.stack([jnp.where(x[0] > 0, c[0].at[i].set(x), c[0]), c[1].at[i].set(jnp.tanh(x))]),
    ),
    "a chosen part that is read": (
        (2, N, D),
        lambda c, i, x: (lambda k: jnp.stack([jnp.where(x[0] + k[3, 0] > 0, k, c[0]), c[1].at[i].set(x)]))(
            c[0].at[i].set(x)
        ),
    ),
    "parts put back": (
        (2, N, D),
        lambda c, i, x: c.at[0].set(c[0].at[i].set(x)).at[1].set(c[1].at[i].set(jnp.tanh(x))),
    ),
    # Each of two parts of a split is made of its own reshape: together they are all of the buffer.
    "a column, then every second row": (
        (N, D),
        lambda c, i, x: (lambda b: jnp.stack([b.reshape(-1, 2, D)[:, 0], b.reshape(-1, 2, D)[:, 1].at[i].set(x)], 1))(
            c.at[:, 2].set(c[:, 2].at[i].set(x[0]))
        ).reshape(N, D),
    ),
    "elements": ((N, D), lambda c, i, x: c.ravel().at[i].set(x[0]).reshape(N, D)),
    "from the middle of a row": (
        (N, D),
        lambda c, i, x: (lambda q: jnp.concatenate([q[:13], q[13:800].at[7 * i].set(x[0]), q[800:]]))(
            c.ravel()
        ).reshape(N, D),
    ),
    "columns one after another, rolled": (
        (N, D),
        lambda c, i, x: jnp.roll(jnp.roll(c.T.ravel(), 5).at[7 * i].set(x[0]), -5).reshape(D, N).T,
    ),
    "axes moved": (
        (2, N, D),
        lambda c, i, x: jnp.moveaxis(jnp.moveaxis(c, 0, 2).at[i].set(jnp.stack([x, -x], -1)), 2, 0),
    ),
    "several rows": (
        (2, N, D),
        lambda c, i, x: jnp.stack([c[0].at[jnp.stack([i, (i + 7) % N])].set(x), c[1].at[jnp.stack([i, i])].add(x)]),
    ),
    # XLA keeps a batched update of all of an axis of size 1, which is what it writes.
    "all of an axis of one row": (
        (N, D),
        lambda c, i, x: lax.dynamic_update_index_in_dim(
            c[None], (b := lax.dynamic_index_in_dim(c[None], i % 1, keepdims=False)).at[i].set(x + b[i - 1]), i % 1, 0
        )[0],
    ),
    "a tile": (
        (2, N, D),
        lambda c, i, x: jnp.stack([lax.dynamic_update_slice(c[0], x.reshape(2, 4), (i, i % 5)), c[1].at[i].add(x)]),
    ),
}


def loss(step):
    def f(c, xs):
        def body(carry, ix):
            (c, h), (i, x) = carry, ix
            c = step(c, i, jnp.tanh(x + h))
            return (c, 0.5 * h + jnp.sin(c[(0,) * (c.ndim - 2) + (i * 7 % c.shape[-2],)][0])), h

        (c, _), hs = lax.scan(body, (c, jnp.zeros(xs.shape[1:])), (jnp.arange(5, 5 + len(xs)), xs))
        return jnp.sum(jnp.cos(c)) + jnp.sum(hs)

    return f


def arguments(shape, *examples):
    random = np.random.default_rng(0)
    return random.standard_normal((*examples, *shape)), random.standard_normal((*examples, STEPS, D))


def loop(shape, step):
    half = jax.ShapeDtypeStruct((int(np.prod(shape)) // 2,), float)
    return Loop(loss(step), arguments(shape), half, tuple(ORDERS), by=(0, 1), batch=arguments(shape, EXAMPLES))


LOOPS = {name: loop(*of) for name, of in STEPS_OF_PARTS.items()}
