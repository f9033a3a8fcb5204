"""Dynamic programming: tables that are filled row by row or cell by cell."""

import jax.numpy as jnp
from jax import lax

from benchmarks.harm.program import normal, program, whole


def _put_window(table, i, new):
    return table.at[i + 1, 1:].set(new)


def _put_slice(table, i, new):
    return lax.dynamic_update_slice(table, new[None], (i + 1, 1))


def _put_whole(table, i, new):
    return table.at[i + 1].set(jnp.concatenate([jnp.ones(1), new]))


def _by_rows(name, put):
    @program(normal(300, 100), name=f"{name}_of_rows")
    def rows(s):
        """A row from the one above it."""

        def row(i, table):
            up = table[i]
            return put(table, i, jnp.tanh(s[i] + up[:-1] + 0.5 * up[1:]))

        return lax.fori_loop(0, len(s), row, jnp.ones((s.shape[0] + 1, s.shape[1] + 1)))

    @program(normal(100, 100), name=f"{name}_by_inner_scan")
    def inner(s):
        """The cells of a row by a scan that reads single elements."""

        def row(i, table):
            def cell(left, j):
                h = jnp.tanh(table[i, j] + s[i, j] + 0.5 * table[i, j + 1] + 0.3 * left)
                return h, h

            return put(table, i, lax.scan(cell, 0.0, jnp.arange(s.shape[1]))[1])

        return lax.fori_loop(0, len(s), row, jnp.ones((s.shape[0] + 1, s.shape[1] + 1)))


_by_rows("windows", _put_window)
_by_rows("slices", _put_slice)
_by_rows("whole", _put_whole)


@program(normal(100, 100))
def smith_waterman(s, gap=0.5):
    """Local alignment, the maximum smooth."""
    n, m = s.shape

    def row(h, i):
        def cell(left, j):
            choices = jnp.stack([h[i, j] + s[i, j], h[i, j + 1] - gap, left - gap, 0.0])
            best = jnp.log(jnp.sum(jnp.exp(choices)))
            return best, best

        return h.at[i + 1, 1:].set(lax.scan(cell, 0.0, jnp.arange(m))[1]), None

    return lax.scan(row, jnp.zeros((n + 1, m + 1)), jnp.arange(n))[0]


@program(lambda r: (whole(r, 4, 100), whole(r, 4, 100)), by=None)
def levenshtein(a, b):
    """The edit distance of two words, cell by cell."""
    n, m = a.size, b.size
    table = jnp.zeros((n + 1, m + 1), jnp.int32).at[:, 0].set(jnp.arange(n + 1)).at[0].set(jnp.arange(m + 1))

    def row(i, table):
        def cell(j, table):
            change = table[i - 1, j - 1] + (a[i - 1] != b[j - 1])
            return table.at[i, j].set(jnp.minimum(change, 1 + jnp.minimum(table[i - 1, j], table[i, j - 1])))

        return lax.fori_loop(1, m + 1, cell, table)

    return lax.fori_loop(1, n + 1, row, table)[n, m]


@program(normal(300, scale=0.1))
def soft_cells(p, m=48):
    """A table of floats, cell by cell."""
    n = p.size

    def row(i, t):
        def cell(j, t):
            return t.at[i, j].set(jnp.minimum(t[i - 1, j], t[i, j - 1]) + p[i - 1] * (t[i - 1, j - 1] + 1))

        return lax.fori_loop(1, m + 1, cell, t)

    return lax.fori_loop(1, n + 1, row, jnp.zeros((n + 1, m + 1)))


@program(normal(500, 128))
def shifted_rows(p):
    """A row from the one above it and the same one shifted."""

    def row(i, t):
        return t.at[i].set(jnp.minimum(t[i - 1], jnp.roll(t[i - 1], 1)) + p[i - 1])

    return lax.fori_loop(1, len(p) + 1, row, jnp.zeros((len(p) + 1, p.shape[1])))
