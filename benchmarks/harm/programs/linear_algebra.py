"""Linear algebra by loops."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.harm.program import floats, program


def _positive(n):
    def make(r):
        a = floats(r, n, n)
        return (a @ a.T / n + np.eye(n, dtype=np.float32),)

    return make


def _system(n):
    return lambda r: (floats(r, n, n, scale=0.5 / n) + np.eye(n, dtype=np.float32), floats(r, n))


@program(_system(200))
def gauss_seidel(a, b):
    """Each unknown from the newest values of the others."""

    def sweep(x, _):
        return lax.fori_loop(0, b.size, lambda i, x: x.at[i].set((b[i] - a[i] @ x + a[i, i] * x[i]) / a[i, i]), x), None

    return lax.scan(sweep, jnp.zeros_like(b), None, length=5)[0]


@program(_positive(32))
def cholesky_elements(a):
    """The factor, element by element."""
    n = len(a)

    def row(i, low):
        def element(j, low):
            s = a[i, j] - low[i] @ low[j]
            below = s / jnp.where(i == j, 1.0, low[j, j])
            return low.at[i, j].set(jnp.where(i == j, jnp.sqrt(jnp.maximum(s, 1e-6)), below))

        return lax.fori_loop(0, i + 1, element, low)

    return lax.fori_loop(0, n, row, jnp.zeros_like(a))
