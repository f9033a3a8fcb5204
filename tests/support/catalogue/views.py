"""Rows of what is computed from a whole buffer, `q.T[i]` or `(q * 2)[i]`, are rows of the buffer."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .loop import Loop

N, D = 120, 12
SCALES = np.cos(np.arange(N * D)).reshape(N, D)

#: name -> what a step reads of a buffer `[N, D]`
VIEWS = {
    "a column": lambda b, i: b.T[:, i],
    "a row of the transposed": lambda b, i: b.T[i % D],
    "columns": lambda b, i: lax.dynamic_slice(b.T, (0, i), (D, 5)),
    "some columns": lambda b, i: b.T[:, (i + 5 * jnp.arange(6)) % N],
    "smaller floats": lambda b, i: b.astype(jnp.float32)[i],
    "smaller floats, by a function": lambda b, i: jnp.take(b.astype(jnp.float32), i, axis=0),
    "a column of smaller floats": lambda b, i: b.astype(jnp.float32).T[:, i],
    "some of smaller floats": lambda b, i: (b.astype(jnp.float32) * 2)[(i + 5 * jnp.arange(6)) % N],
    "scaled by a number": lambda b, i: (b * b[0, 0] + 1)[i],
    "scaled by a row": lambda b, i: (b * SCALES[0])[i],
    "scaled by a column": lambda b, i: (b * SCALES[:, :1])[i],
    "a column, scaled": lambda b, i: (b * SCALES[:, :1]).T[:, i],
    "an element, scaled by a number": lambda b, i: (b * jnp.broadcast_to(b[0, 0], b.shape))[i, i % D],
    "elements, scaled by a number": lambda b, i: (b * jnp.full_like(b, b[0, 0]))[(i + jnp.arange(3)) % N, i % D],
    "two arrays": lambda b, i: (jnp.sin(b) * b)[i],
    "longer rows": lambda b, i: b.reshape(-1, 3, D)[i % (N // 3)],
    "shorter rows": lambda b, i: b.reshape(-1, 4)[i],
    "longer rows, turned": lambda b, i: b.reshape(-1, 3, D).transpose(1, 2, 0)[:, :, i % (N // 3)],
    "longer rows, turned the other way": lambda b, i: b.reshape(-1, 3, D).transpose(2, 0, 1)[:, i % (N // 3)],
    "some of them": lambda b, i: lax.dynamic_slice(b.reshape(-1, 3, D).transpose(2, 0, 1), (0, i % 30, 0), (D, 5, 3)),
    "elements": lambda b, i: b.reshape(-1)[3 * i],
    "windows of longer rows": lambda b, i: lax.dynamic_slice(b.reshape(-1, 3, D), (i % 50, 0, 0), (2, 3, D)),
}

#: The same of what is not a view: only before a loop it is as good.
COMPUTED = VIEWS | {
    "a softmax": lambda b, i: jax.nn.softmax(b)[i],
    "a product": lambda b, i: (b @ SCALES[:D])[i],
    "chosen elements": lambda b, i: jnp.where(b > 0, b, 0)[i],
    "a sum of all": lambda b, i: (b + jnp.sum(b, 0))[i],
}


def weighed(x):
    """A number that says where each element is."""
    return 0.1 * jnp.vdot(jnp.sin(x), jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape))


def of_a_constant(read):
    def f(q):
        def step(h, i):
            return jnp.tanh(0.5 * h + weighed(read(q, i))), None

        return lax.scan(step, jnp.ones(()), jnp.arange(40) % 30)[0]

    return f


def of_what_changes(read):
    def f(q):
        def step(c, i):
            b, h = c
            h = jnp.tanh(0.5 * h + weighed(read(b, i)))
            return (b.at[7 * i % N].set(jnp.cos(h * jnp.arange(D))), h), None

        b, h = lax.scan(step, (q, jnp.ones(())), jnp.arange(40))[0]
        return jnp.sum(b**2) + h

    return f


Q = np.random.default_rng(0).standard_normal((N, D))


def _loop(loop, name, first):
    # Cotangents of smaller floats are added in larger ones: there is an array of them as large as Q.
    orders = ("grad(in_place)", "in_place(grad)", "vmap(grad)")
    rtol = 1e-3 if "smaller" in name else 1e-9
    buffer = jax.ShapeDtypeStruct(Q.shape, np.float32)
    return Loop(loop(COMPUTED[name]), (Q,), buffer, (*orders[first:], *orders[:first]), rtol=rtol)


LOOPS = {name: _loop(of_a_constant, name, 0) for name in COMPUTED}
LOOPS |= {f"{name}, of what changes": _loop(of_what_changes, name, 1) for name in VIEWS}
