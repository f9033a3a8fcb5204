"""Rows of something made of a closed-over array, in the body of a loop."""

import jax.numpy as jnp
from jax import lax

from benchmarks.harm.program import normal, program

VIEWS = {
    "transposed": lambda q: q.T,
    "cast": lambda q: q.astype(jnp.bfloat16),
    "scaled": lambda q: q * 2,
    "reshaped": lambda q: q.reshape(-1, 32),
    "activated": lambda q: jnp.tanh(q) + 1,
}


def _viewed(name, view):
    @program(normal(*(64, 400) if name == "transposed" else (400, 64)), name=f"{name}_rows")
    def rows(q):
        def step(h, i):
            return jnp.tanh(h + view(q)[i].astype(h.dtype)), None

        shape = view(q).shape
        return lax.scan(step, jnp.zeros(shape[1]), jnp.arange(shape[0]))[0]


for name, view in VIEWS.items():
    _viewed(name, view)


@program(normal(64, 400), by=None)
def columns(q):
    """Forward only, as a column at a time."""
    return lax.fori_loop(0, q.shape[1], lambda i, h: jnp.tanh(h + q[:, i]), jnp.zeros(q.shape[0]))


@program(normal(500, 64))
def view_of_the_carry(x):
    """A row is read from the transpose of what changes."""

    def body(i, b):
        return b.at[i].set(jnp.sin(b.T[:, i // 2]) + x[i])

    return lax.fori_loop(1, len(x), body, x)


@program(normal(500, 64))
def scaled_carry(x):
    def body(i, b):
        return b.at[i].set(jnp.sin((b * 2)[i // 2]) + x[i])

    return lax.fori_loop(1, len(x), body, x)


@program(normal(300, 64))
def keys_and_values(x):
    """Halves of one buffer are taken, updated by rows and stacked again."""

    def step(cache, ix):
        i, row = ix
        k, v = cache[0].at[i].set(row), cache[1].at[i].set(jnp.tanh(row))
        return jnp.stack([k, v]), jnp.sin(k[i // 2] + v[i // 3])

    return lax.scan(step, jnp.zeros((2, *x.shape)), (jnp.arange(len(x)), x))[1]


@program(normal(300, 64))
def written_transposed(x):
    def body(i, b):
        return b.T.at[:, i].set(jnp.sin(b[i // 2]) + x[i]).T

    return lax.fori_loop(1, len(x), body, x)


@program(normal(300, 64))
def written_in_another_shape(x):
    def body(i, b):
        return b.reshape(2, -1, 64).at[1, i // 2].set(jnp.sin(b[i // 2]) + x[i]).reshape(b.shape)

    return lax.fori_loop(1, len(x), body, x)
