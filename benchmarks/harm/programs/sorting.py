"""Sorting and shuffling, and the heaps and stacks for them."""

import jax.numpy as jnp
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
    """A shuffle: each is exchanged with one behind it."""

    def body(i, xs):
        j = i + numbers[i] % (xs.size - i)
        a, b = xs[i], xs[j]
        return xs.at[i].set(b).at[j].set(a)

    return lax.fori_loop(0, xs.size, body, xs)
