"""Loops inside of loops that examples leave at different times: what has finished one of them is not copied.

`jax.vmap` selects between all of the old and all of the new buffer for each loop around a write.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .loop import Loop

ROWS, WEIGHTS = 40, jnp.ones(2)


def left_one_by_one(b, n, x):
    """Each loop writes rows before, inside and after the inner one."""

    def innermost(c):
        k, steps, b, h = c
        return k + 1, steps + 1, b.at[k // 2].set(jnp.sin(b[k]) + 0.1 * h), 0.5 * jnp.tanh(h)

    def middle(c):
        k, steps, b, h = c
        b = lax.cond(k % 2 == 0, lambda b: b.at[-1 - k % 5].add(jnp.sin(b[n])), lambda b: b, b)
        limit = jnp.where(h[0] > 0, 3, 1)
        inner = jax.checkpoint(lambda c: lax.while_loop(lambda c: c[1] < limit, innermost, c))
        k, _, b, h = inner((k, 0, b, h))
        return k, steps + 1, b.at[(7 * k + n) % ROWS].max(jnp.sin(h)), h + 0.1 * b[n]

    def outer(c):
        k, steps, b, h = c
        inner = lambda c: lax.while_loop(lambda c: c[1] < (k + n) % 4, middle, c)  # noqa: E731
        k, _, b, h = lax.cond(WEIGHTS[0] > 0, inner, lambda c: c, (k, 0, b.at[k].set(jnp.sin(b[k // 2]) + h), h))
        b = lax.fori_loop(0, 2, lambda j, b: b.at[k + j].add(0.1 * b[n] * h), b)
        return k + 1, steps + 1, b, h + 0.1 * b[-2]

    return lax.while_loop(lambda c: c[1] < 2 + n % 3, outer, (n % 3, 0, b, x))[2:]


B, X = (np.sin(np.arange(16.0 * n)).reshape(n, 16) for n in (ROWS, 3))
LOOPS = {
    left_one_by_one.__name__: Loop(
        left_one_by_one,
        (B, np.int32(1), X[0]),
        B,
        ("vmap", "in_place(vmap)"),
        batch=(np.stack([B, B[::-1], 0.5 * B]), np.array([1, 4, 8], np.int32), X),
        is_for_barriers=True,
    )
}
