"""Programs that people have reported to JAX as quadratic, re-expressed."""

import jax
import jax.numpy as jnp
from jax import lax


def previous_matrix(matrices):
    """jax#10197: each is made of the one before. Quadratic under grad."""

    def body(b, i):
        return b.at[i].set(jnp.sin(b[i - 1])), None

    return jnp.sum(lax.scan(body, matrices, jnp.arange(2, len(matrices)))[0][-1])


def always_true(matrices):
    """jax#10197: the select of a condition that holds."""
    n = len(matrices)

    def body(b, i):
        return jnp.where(i < n, b.at[i].set(b[i - 1]), b), None

    return lax.scan(body, matrices, jnp.arange(2, n))[0]


def filled_by_cond(x, step):
    """jax#8192: quadratic under vmap."""

    def body(state, _):
        x, step = state
        return (lax.cond(step < x.size, lambda x: x.at[step].set(1), lambda x: x, x), step + 1), None

    return lax.scan(body, (x, step), None, length=x.size)[0][0]


def filled_by_while(x, step):
    """jax#13522: quadratic under vmap."""

    def body(state):
        step, x = state
        return step + 1, x.at[step].set(1)

    return lax.while_loop(lambda state: state[0] < x.size, body, (step, x))[1]


def popped(x, places, count=16):
    """jax#17845: what comes after a place moves there, as a window of fixed size."""

    def body(x, i):
        value = x[i]
        behind = lax.dynamic_slice(x, (i + 1,), (count,))
        return lax.dynamic_update_slice(x, behind, (i,)), value

    return lax.scan(body, x, places)


def random_sources(x):
    """jax#31284: an index that XLA cannot see through."""

    def body(state):
        step, x = state
        i = jax.random.randint(jax.random.key(step), (), 0, 2)
        return step + 1, x.at[step].set(x[i])

    return lax.while_loop(lambda state: state[0] < x.size, body, (0, x))[1]


def slices_of_rows(x):
    """jax#17640: a few rows of many are read as a slice and written as one. Quadratic under grad."""

    def body(x, i):
        some = lax.dynamic_slice(x, (i, 0), (3, x.shape[1]))
        return lax.dynamic_update_slice(x, jnp.cos(some) + some[::-1], (i, 0)), None

    return jnp.sum(lax.scan(body, x, jnp.arange(len(x) - 3))[0] ** 2)


def accumulated(x):
    """jax#40101: a small row into a large array, quadratic in some versions of XLA for the CPU."""

    def body(t, b):
        return b.at[t + 1].set(0.5 * b[t] + 1)

    return lax.fori_loop(0, len(x) - 1, body, x)


def vector(n, *more):
    return (jnp.linspace(0, 1, n, dtype=jnp.float32), *more)


def examples(n):
    return jnp.zeros((2, n), jnp.float32), jnp.array([0, n // 2])


def matrices(n):
    return (jnp.linspace(0, 1, 16 * n, dtype=jnp.float32).reshape(n, 4, 4),)


def rows(n):
    return (jnp.linspace(0, 1, 8 * n, dtype=jnp.float32).reshape(n, 8),)


def vector_and_places(n):
    return vector(n, jnp.arange(n) * 7 % (n - 17))


PROGRAMS = {
    "10197, gradient": (jax.grad, previous_matrix, matrices),
    "10197, select": (lambda f: f, always_true, matrices),
    "8192": (jax.vmap, filled_by_cond, examples),
    "13522": (jax.vmap, filled_by_while, examples),
    "17845": (lambda f: f, popped, vector_and_places),
    "17845, gradient": (
        lambda f: lambda x, places: jax.grad(lambda x: jnp.sum(f(x, places)[1] ** 2))(x),
        popped,
        vector_and_places,
    ),
    "31284": (lambda f: f, random_sources, vector),
    "17640": (jax.grad, slices_of_rows, rows),
    "40101": (lambda f: f, accumulated, vector),
}
