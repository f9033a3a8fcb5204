"""Programs that people have reported to JAX as quadratic, re-expressed."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .loop import Loop


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


N = 1100


def floats(*shape):
    return np.linspace(0, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)


VECTOR, MATRICES, ROWS = floats(N), floats(N, 4, 4), floats(N, 8)
PLACES = np.arange(N) * 7 % (N - 17)
EXAMPLES = np.zeros((3, N), np.float32), np.array([0, N // 2, 7])
GRADIENTS, BATCHES = ("grad(in_place)", "in_place(grad)"), ("vmap", "in_place(vmap)")


def _loop(f, args, *orders, batch=None):
    return Loop(
        f, args, args[0], orders or ("forward",), batch=batch, rtol=1e-5, is_interpreted=f is not random_sources
    )


LOOPS = {
    "10197, gradient": _loop(previous_matrix, (MATRICES,), *GRADIENTS),
    "10197, select": _loop(always_true, (MATRICES,)),
    "8192": _loop(filled_by_cond, (VECTOR, 0), *BATCHES, batch=EXAMPLES),
    "13522": _loop(filled_by_while, (VECTOR, 0), *BATCHES, batch=EXAMPLES),
    "17845": _loop(popped, (VECTOR, PLACES)),
    "17845, gradient": _loop(lambda x, places: jnp.sum(popped(x, places)[1] ** 2), (VECTOR, PLACES), *GRADIENTS),
    "31284": _loop(random_sources, (VECTOR,)),
    "17640": _loop(slices_of_rows, (ROWS,), *GRADIENTS),
    "40101": _loop(accumulated, (VECTOR,)),
}
