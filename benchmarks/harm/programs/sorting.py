"""Sorting and shuffling, and the heaps and stacks for them."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.harm.program import floats, normal, program, whole


@program(normal(500), by=None)
def heap(xs):
    """Numbers are pushed onto a heap."""

    def push(i, c):
        h, size = c
        h = h.at[size].set(xs[i])

        def up(c):
            h, j = c
            p = (j - 1) // 2
            a, b = h[p], h[j]
            return h.at[p].set(b).at[j].set(a), p

        h, _ = lax.while_loop(lambda c: (c[1] > 0) & (c[0][(c[1] - 1) // 2] > c[0][c[1]]), up, (h, size))
        return h, size + 1

    return lax.fori_loop(0, xs.size, push, (jnp.full(xs.size + 2, jnp.inf), 0))[0]


@program(normal(500), by=None)
def quicksort(xs):
    """With a stack of the ranges that are left."""

    def exchange(a, i, j):
        x, y = a[i], a[j]
        return a.at[i].set(y).at[j].set(x)

    def partition(c):
        a, stack, top = c
        low, high = stack[top - 1]
        pivot = a[high]

        def move(j, c):
            a, i = c
            smaller = a[j] < pivot
            return lax.cond(smaller, lambda: exchange(a, i, j), lambda: a), i + smaller

        a, middle = lax.fori_loop(low, high, move, (a, low))
        a = exchange(a, middle, high)
        top = top - 1
        stack = stack.at[top].set(jnp.stack([low, middle - 1]))
        top = jnp.where(middle - 1 > low, top + 1, top)
        stack = stack.at[top].set(jnp.stack([middle + 1, high]))
        return a, stack, jnp.where(high > middle + 1, top + 1, top)

    stack = jnp.zeros((xs.size, 2), jnp.int32).at[0].set(jnp.array([0, xs.size - 1], jnp.int32))
    return lax.while_loop(lambda c: c[2] > 0, partition, (xs, stack, 1))[0]


@program(lambda r: (floats(r, 5000), whole(r, 2**30, 5000)))
def fisher_yates(xs, numbers):
    """A shuffle: each is exchanged with a later one."""

    def body(i, xs):
        j = i + numbers[i] % (xs.size - i)
        a, b = xs[i], xs[j]
        return xs.at[i].set(b).at[j].set(a)

    return lax.fori_loop(0, xs.size, body, xs)


@program(normal(400), by=None)
def insertion_sort(xs):
    def insert(i, xs):
        x = xs[i]
        hole, xs = lax.while_loop(
            lambda c: (c[0] > 0) & (c[1][c[0] - 1] > x),
            lambda c: (c[0] - 1, c[1].at[c[0]].set(c[1][c[0] - 1])),
            (i, xs),
        )
        return xs.at[hole].set(x)

    return lax.fori_loop(1, xs.size, insert, xs)


@program(normal(150))
def bubble_sort(xs):
    def sweep(i, xs):
        def pair(j, xs):
            a, b = xs[j], xs[j + 1]
            return xs.at[j].set(jnp.minimum(a, b)).at[j + 1].set(jnp.maximum(a, b))

        return lax.fori_loop(0, xs.size - 1, pair, xs)

    return lax.fori_loop(0, xs.size, sweep, xs)


@program(normal(500))
def selection_sort(xs):
    def place(i, xs):
        j = jnp.argmin(jnp.where(jnp.arange(xs.size) >= i, xs, jnp.inf))
        return xs.at[jnp.stack([i, j])].set(xs[jnp.stack([j, i])])

    return lax.fori_loop(0, xs.size, place, xs)


@program(lambda r: (floats(r, 1024),), by=None)
def merge_sort(xs):
    """From runs of one to runs of all, into a second buffer and back."""
    n = xs.size

    def merged(width, a):
        def pair(k, out):
            low = 2 * width * k

            def one(t, c):
                i, j, out = c
                left = (i < low + width) & ((j >= low + 2 * width) | (a[i] <= a[jnp.minimum(j, n - 1)]))
                out = out.at[low + t].set(jnp.where(left, a[jnp.minimum(i, n - 1)], a[jnp.minimum(j, n - 1)]))
                return i + left, j + ~left, out

            return lax.fori_loop(0, 2 * width, one, (low, low + width, out))[2]

        return lax.fori_loop(0, n // (2 * width), pair, a)

    return lax.while_loop(lambda c: c[0] < n, lambda c: (2 * c[0], merged(*c)), (1, xs))[1]


@program(lambda r: (floats(r, 3000), whole(r, 64, 3000)))
def counting_sort(values, keys):
    """Counts, their sums, and each value to its place."""
    count = lax.fori_loop(0, keys.size, lambda i, c: c.at[keys[i]].add(1), jnp.zeros(64, jnp.int32))
    start = jnp.cumsum(count) - count

    def place(i, c):
        out, next_of = c
        at = next_of[keys[i]]
        return out.at[at].set(values[i]), next_of.at[keys[i]].add(1)

    return lax.fori_loop(0, keys.size, place, (jnp.zeros_like(values), start))[0]


@program(normal(256), by=None)
def heap_sort(xs):
    """Down a heap by exchanges, and the largest to the end."""

    def exchange(h, i, j):
        a, b = h[i], h[j]
        return h.at[i].set(b).at[j].set(a)

    def sift(h, i, size):
        def larger(h, i):
            c = jnp.minimum(2 * i + 1, xs.size - 1)
            d = jnp.minimum(2 * i + 2, xs.size - 1)
            return jnp.where((2 * i + 2 < size) & (h[d] > h[c]), d, c)

        def goes_on(c):
            h, i = c
            return (2 * i + 1 < size) & (h[larger(h, i)] > h[i])

        def down(c):
            h, i = c
            j = larger(h, i)
            return exchange(h, i, j), j

        return lax.while_loop(goes_on, down, (h, i))[0]

    n = xs.size
    h = lax.fori_loop(0, n // 2, lambda k, h: sift(h, n // 2 - 1 - k, n), xs)
    return lax.fori_loop(1, n, lambda k, h: sift(exchange(h, 0, n - k), 0, n - k), h)


@program(lambda r: (floats(r, 2000),), by=None)
def next_greater(xs):
    """With a stack of those that still wait."""

    def body(i, c):
        answer, stack, top = c
        answer, top = lax.while_loop(
            lambda c: (c[1] > 0) & (xs[stack[jnp.maximum(c[1] - 1, 0)]] < xs[i]),
            lambda c: (c[0].at[stack[c[1] - 1]].set(i), c[1] - 1),
            (answer, top),
        )
        return answer, stack.at[top].set(i), top + 1

    start = (jnp.full(xs.size, -1), jnp.zeros(xs.size, jnp.int32), 0)
    return lax.fori_loop(0, xs.size, body, start)[0]


@program(lambda r: (floats(r, 2000),))
def prefix_max(xs):
    return lax.fori_loop(1, xs.size, lambda i, m: m.at[i].set(jnp.maximum(m[i - 1], m[i])), xs)


@program(lambda r: (whole(r, 3, 8000),), by=None)
def failure_table(text):
    """Knuth, Morris and Pratt's."""

    def body(i, table):
        k = lax.while_loop(lambda k: (k > 0) & (text[k] != text[i]), lambda k: table[k - 1], table[i - 1])
        return table.at[i].set(jnp.where(text[k] == text[i], k + 1, k))

    return lax.fori_loop(1, text.size, body, jnp.zeros(text.size, jnp.int32))


@program(lambda r: (whole(r, 2, 2000), whole(r, 2, 8)), by=None)
def string_matching(text, pattern):
    """Where a pattern begins, one after the other."""

    def body(i, c):
        places, n = c
        same = jnp.all(lax.dynamic_slice(text, (i,), (pattern.size,)) == pattern)
        return places.at[n].set(jnp.where(same, i, places[n])), n + same

    return lax.fori_loop(0, text.size - pattern.size, body, (jnp.full(text.size, -1), 0))


@program(lambda r: (whole(r, 10, 1)[0] + 8000,), by=None)
def sieve(end, n=8000):
    """Primes, by a write at each multiple."""

    def number(i, prime):
        def multiples(prime):
            return lax.fori_loop(i, jnp.minimum(end, n - 1) // i + 1, lambda k, p: p.at[i * k].set(False), prime)

        return lax.cond(prime[i], multiples, lambda prime: prime, prime)

    return lax.fori_loop(2, 90, number, jnp.ones(n, bool))


@program(lambda r: (r.permutation(2000).astype(np.int32),), by=None)
def cycles(permutation):
    """The cycle that each element is in."""

    def body(i, label):
        def follow(c):
            label, j = c
            return label.at[j].set(i), permutation[j]

        return lax.while_loop(lambda c: c[0][c[1]] < 0, follow, (label, i))[0]

    return lax.fori_loop(0, permutation.size, body, jnp.full(permutation.size, -1))


@program(normal(512))
def butterflies(x):
    """A transform of Walsh and Hadamard, pair by pair."""
    n = x.size

    def level(k, x):
        step = 1 << k

        def pair(j, x):
            low = (j // step) * 2 * step + j % step
            a, b = x[low], x[low + step]
            return x.at[low].set((a + b) * 0.7).at[low + step].set((a - b) * 0.7)

        return lax.fori_loop(0, n // 2, pair, x)

    return lax.fori_loop(0, 9, level, x)


@program(normal(1024))
def fourier(x):
    """Levels of a fast Fourier transform, each of all pairs at once."""
    n = x.size
    k = jnp.arange(n // 2)

    def level(m, c):
        re, im = c
        step = 1 << m
        low = (k // step) * 2 * step + k % step
        angle = -jnp.pi * (k % step) / step
        a, b = re[low + step], im[low + step]
        twisted = jnp.cos(angle) * a - jnp.sin(angle) * b, jnp.sin(angle) * a + jnp.cos(angle) * b
        parts = [(z[low], t) for z, t in zip((re, im), twisted, strict=True)]
        new = [z.at[low].set(u + t).at[low + step].set(u - t) for z, (u, t) in zip((re, im), parts, strict=True)]
        return tuple(0.7 * z for z in new)

    return lax.fori_loop(0, 10, level, (x, jnp.zeros_like(x)))
