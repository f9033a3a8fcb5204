"""Graphs: distances, components, orders."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.harm.program import floats, program, whole


def _distances(n):
    return lambda r: (np.abs(floats(r, n, n)) + 1,)


@program(_distances(60))
def floyd_warshall_rows(d):
    """All distances, row by row, by what people write for the minimum of two rows."""
    n = len(d)

    def through(k, d):
        return lax.fori_loop(0, n, lambda i, d: d.at[i].set(jnp.minimum(d[i], d[i, k] + d[k])), d)

    return lax.fori_loop(0, n, through, d)


@program(_distances(60))
def floyd_warshall_min(d):
    """The same by `.min`."""
    n = len(d)

    def through(k, d):
        return lax.fori_loop(0, n, lambda i, d: d.at[i].min(d[i, k] + d[k]), d)

    return lax.fori_loop(0, n, through, d)


@program(_distances(60))
def floyd_warshall_whole(d):
    return lax.fori_loop(0, len(d), lambda k, d: jnp.minimum(d, d[:, k, None] + d[None, k]), d)


@program(lambda r: (whole(r, 1000, 1500, 2),), by=None)
def union_find(edges, n=1000):
    """Components, with path halving."""

    def find(parent, x):
        def up(c):
            parent, x = c
            parent = parent.at[x].set(parent[parent[x]])
            return parent, parent[x]

        return lax.while_loop(lambda c: c[0][c[1]] != c[1], up, (parent, x))

    def join(i, parent):
        parent, a = find(parent, edges[i, 0])
        parent, b = find(parent, edges[i, 1])
        return parent.at[a].set(b)

    return lax.fori_loop(0, len(edges), join, jnp.arange(n))
