"""Dynamic programming: tables that are filled row by row or cell by cell."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.harm.program import floats, normal, program, whole


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
            best = jax.nn.logsumexp(choices)
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


@program(normal(200, scale=0.1))
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


@program(lambda r: (whole(r, 4, 200), whole(r, 4, 200)), by=None)
def common_subsequence(a, b):
    """A row at a time, its cells by a scan."""

    def row(i, table):
        def cell(left, j):
            here = jnp.where(a[i] == b[j], table[i, j] + 1, jnp.maximum(table[i, j + 1], left))
            return here, here

        return table.at[i + 1, 1:].set(lax.scan(cell, 0, jnp.arange(b.size))[1])

    return lax.fori_loop(0, a.size, row, jnp.zeros((a.size + 1, b.size + 1), jnp.int32))[-1, -1]


@program(lambda r: (np.abs(floats(r, 60)), whole(r, 50, 60) + 1))
def knapsack(values, weights, capacity=500):
    """All capacities at once, a row for each thing."""

    def row(i, best):
        taken = jnp.where(jnp.arange(capacity + 1) >= weights[i], jnp.roll(best[i], weights[i]) + values[i], -jnp.inf)
        return best.at[i + 1].set(jnp.maximum(best[i], taken))

    return lax.fori_loop(0, values.size, row, jnp.zeros((values.size + 1, capacity + 1)))[-1, -1]


@program(lambda r: (np.abs(floats(r, 30)), whole(r, 50, 30) + 1))
def knapsack_cells(values, weights, capacity=300):
    """One row, from its end to its beginning, in place."""

    def thing(i, best):
        def cell(k, best):
            w = capacity - k
            with_it = jnp.where(w >= weights[i], best[w - weights[i]] + values[i], 0.0)
            return best.at[w].set(jnp.maximum(best[w], with_it))

        return lax.fori_loop(0, capacity, cell, best)

    return lax.fori_loop(0, values.size, thing, jnp.zeros(capacity + 1))


@program(lambda r: (whole(r, 30, 10) + 1,), by=None)
def coins(values, total=1000):
    """In how many ways a sum can be paid."""

    def coin(i, ways):
        def pay(s, ways):
            return ways.at[s].add(jnp.where(s >= values[i], ways[s - values[i]], 0) % 10007)

        return lax.fori_loop(1, total, pay, ways)

    return lax.fori_loop(0, values.size, coin, jnp.zeros(total, jnp.int32).at[0].set(1))


@program(lambda r: (np.abs(floats(r, 41)) + 0.5,), by=None)
def matrix_chain(sizes):
    """The cheapest order of multiplications, diagonal by diagonal."""
    n = sizes.size - 1

    def diagonal(length, table):
        def start(i, table):
            def split(k, best):
                ok = (k >= i) & (k < i + length)
                cost = table[i, k] + table[k + 1, i + length] + sizes[i] * sizes[k + 1] * sizes[i + length + 1]
                return jnp.where(ok, jnp.minimum(best, cost), best)

            return table.at[i, i + length].set(lax.fori_loop(0, n - 1, split, jnp.inf))

        return lax.fori_loop(0, n - length, start, table)

    return lax.fori_loop(1, n, diagonal, jnp.zeros((n, n)))[0, -1]


@program(lambda r: (np.abs(floats(r, 9, 9)),))
def travelling_salesman(d):
    """A table over sets of places."""
    n = len(d)

    def sets(s, table):
        def last(j, table):
            before = table[s ^ (1 << j)] + d[:, j]
            inside = (s >> j) & 1
            return table.at[s, j].set(jnp.where(inside & (s != (1 << j)), before.min(), table[s, j]))

        return lax.fori_loop(0, n, last, table)

    first = jnp.full((2**n, n), 1e6).at[1, 0].set(0.0)
    return (lax.fori_loop(2, 2**n, sets, first)[-1] + d[:, 0]).min()


@program(lambda r: (floats(r, 64, 64),))
def path_sum(cost):
    """The cheapest way through a grid, cell by cell, in place."""
    n, m = cost.shape

    def row(i, t):
        def cell(j, t):
            up = jnp.where(i > 0, t[i - 1, j], jnp.where(j > 0, jnp.inf, 0.0))
            left = jnp.where(j > 0, t[i, j - 1], jnp.where(i > 0, jnp.inf, 0.0))
            return t.at[i, j].add(jnp.minimum(up, left))

        return lax.fori_loop(0, m, cell, t)

    return lax.fori_loop(0, n, row, cost)[-1, -1]


@program(normal(100, 100))
def time_warping(cost):
    """A table with a border of infinity, filled along its rows."""
    n, m = cost.shape

    def row(i, t):
        def cell(left, j):
            here = cost[i, j] ** 2 + jnp.minimum(left, jnp.minimum(t[i, j], t[i, j + 1]))
            return here, here

        return lax.dynamic_update_slice(t, lax.scan(cell, jnp.inf, jnp.arange(m))[1][None], (i + 1, 1))

    return lax.fori_loop(0, n, row, jnp.full((n + 1, m + 1), jnp.inf).at[0, 0].set(0.0))[-1, -1]


@program(lambda r: (np.float32(1 + 0.01 * r.random()),))
def pascal(x, n=200):
    """A triangle, row by row, scaled so that it stays small."""

    def row(i, t):
        return t.at[i + 1, 1:].set(0.5 * x * (t[i, 1:] + t[i, :-1])).at[i + 1, 0].set(0.5 * x * t[i, 0])

    return lax.fori_loop(0, n - 1, row, jnp.zeros((n, n)).at[0, 0].set(1.0))


@program(lambda r: (whole(r, 100, 1)[0] + 3000,), by=None)
def collatz(end, n=3000):
    """How long it takes from each number to 1, by what is known of smaller ones."""

    def number(i, steps):
        def further(c):
            return jnp.where(c[0] % 2 == 0, c[0] // 2, 3 * c[0] + 1), c[1] + 1

        k, s = lax.while_loop(lambda c: c[0] >= i, further, (i, 0))
        return steps.at[i].set(s + steps[k])

    return lax.fori_loop(2, jnp.minimum(end, n), number, jnp.zeros(n, jnp.int32))


@program(lambda r: (floats(r, 500),), by=None)
def increasing_subsequence(x):
    """Each from all before it."""

    def body(i, length):
        before = jnp.where((jnp.arange(x.size) < i) & (x < x[i]), length, 0)
        return length.at[i].set(before.max() + 1)

    return lax.fori_loop(0, x.size, body, jnp.zeros(x.size, jnp.int32))


@program(lambda r: (floats(r, 60, 20), floats(r, 20, 20), whole(r, 60, 1)[0]))
def value_iteration(rewards, transitions, start):
    """Backwards in time, with the values of all times kept."""
    p = jnp.exp(transitions) / jnp.exp(transitions).sum(-1, keepdims=True)

    def body(k, values):
        t = len(rewards) - 1 - k
        return values.at[t].set(jnp.maximum(rewards[t], 0.9 * p @ values[t + 1]))

    return lax.fori_loop(0, len(rewards), body, jnp.zeros((len(rewards) + 1, rewards.shape[1])))[start]


@program(lambda r: (whole(r, 2, 20, 24),), by=None)
def parsing(letters, n=24, symbols=8):
    """Which symbols a part of a text can be, by a table over parts."""
    rules = (jnp.arange(symbols**3) * 2654435 % 7 == 0).reshape(symbols, symbols, symbols)

    def length(k, t):
        def start(i, t):
            def split(j, found):
                pairs = t[i, i + j][:, None] & t[i + j + 1, i + k][None]
                return found | ((j < k) & (rules & pairs).any((1, 2)))

            return t.at[i, i + k].set(lax.fori_loop(0, n - 1, split, jnp.zeros(symbols, bool)))

        return lax.fori_loop(0, n - k, start, t)

    first = jnp.zeros((n, n, symbols), bool).at[jnp.arange(n), jnp.arange(n), letters[0]].set(True)
    return lax.fori_loop(1, n, length, first)


@program(normal(320, 16))
def folded_in_chunks(x, chunk=16, window=24):
    """A row from some rows above it. Only every 16th state is kept for the gradient."""

    def row(table, i):
        above = lax.dynamic_slice(table, (i, 0), (window, x.shape[1]))
        return table.at[i + window].set(jnp.mean(jnp.sin(above), axis=0) + x[i]), None

    rows = jnp.arange(len(x)).reshape(-1, chunk)
    return lax.scan(jax.checkpoint(lambda table, i: lax.scan(row, table, i)), jnp.zeros((len(x) + window, 16)), rows)[0]
