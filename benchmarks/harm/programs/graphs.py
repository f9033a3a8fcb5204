"""Graphs: distances, components, orders."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.harm.program import floats, program, whole


def _distances(n):
    return lambda r: (np.abs(floats(r, n, n)) + 1,)


def _tree(n, *shape):
    """Parents, each before its children, and values."""
    return lambda r: (whole(r, 2**30, n) % np.maximum(np.arange(n, dtype=np.int32), 1), floats(r, n, *shape))


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


@program(_distances(200))
def dijkstra(d):
    """In a dense graph: the nearest that is not done, in every step."""
    n = len(d)

    def body(_, c):
        distance, done = c
        u = jnp.argmin(jnp.where(done, jnp.inf, distance))
        return jnp.minimum(distance, distance[u] + d[u]), done.at[u].set(True)

    return lax.fori_loop(0, n, body, (jnp.full(n, jnp.inf).at[0].set(0.0), jnp.zeros(n, bool)))[0]


@program(lambda r: (whole(r, 300, 300, 4),), by=None)
def breadth_first(neighbours):
    """With a queue of those that are reached."""
    n = len(neighbours)

    def step(c):
        queue, head, tail, depth = c
        u = queue[head]

        def visit(k, c):
            queue, tail, depth = c
            v = neighbours[u, k]
            new = depth[v] < 0
            queue = queue.at[tail].set(jnp.where(new, v, queue[tail]))
            return queue, tail + new, depth.at[v].set(jnp.where(new, depth[u] + 1, depth[v]))

        queue, tail, depth = lax.fori_loop(0, 4, visit, (queue, tail, depth))
        return queue, head + 1, tail, depth

    start = (jnp.zeros(n + 1, jnp.int32), 0, 1, jnp.full(n, -1, jnp.int32).at[0].set(0))
    return lax.while_loop(lambda c: c[1] < c[2], step, start)[3]


@program(lambda r: (whole(r, 300, 300, 3),), by=None)
def depth_first(neighbours):
    """With a stack, and the order in which they are reached."""
    n = len(neighbours)

    def step(c):
        stack, top, order, count = c
        u = stack[top - 1]
        top = top - 1
        new = order[u] < 0
        order = order.at[u].set(jnp.where(new, count, order[u]))

        def push(c):
            stack, top = c
            for k in range(3):
                stack = stack.at[top + k].set(neighbours[u, k])
            return stack, top + 3

        stack, top = lax.cond(new, push, lambda c: c, (stack, top))
        return stack, top, order, count + new

    start = (jnp.zeros(3 * n + 3, jnp.int32), 1, jnp.full(n, -1, jnp.int32), 0)
    return lax.while_loop(lambda c: c[1] > 0, step, start)[2]


@program(lambda r: (np.abs(floats(r, 600)) + 0.1, whole(r, 100, 600, 2)))
def bellman_ford(lengths, edges, n=100):
    """Edge by edge."""

    def edge(k, distance):
        k = k % lengths.size
        u, v = edges[k, 0], edges[k, 1]
        return distance.at[v].min(distance[u] + lengths[k])

    return lax.fori_loop(0, 5 * lengths.size, edge, jnp.full(n, 1e6).at[0].set(0.0))


@program(lambda r: (np.abs(floats(r, 600)) + 0.1, whole(r, 100, 600, 2)))
def bellman_ford_rounds(lengths, edges, n=100):
    """All edges at once, with the distances of each round."""

    def body(i, rounds):
        now = rounds[i]
        return rounds.at[i + 1].set(now.at[edges[:, 1]].min(now[edges[:, 0]] + lengths))

    return lax.fori_loop(0, 30, body, jnp.full((31, n), 1e6).at[0, 0].set(0.0))


@program(lambda r: (np.abs(floats(r, 800)) + 0.1, whole(r, 200, 800, 2)))
def page_rank(weights, links, n=200):
    def body(i, ranks):
        now = ranks[i]
        new = jnp.zeros(n).at[links[:, 1]].add(weights * now[links[:, 0]])
        return ranks.at[i + 1].set(0.15 / n + 0.85 * new / new.sum())

    return lax.fori_loop(0, 50, body, jnp.full((51, n), 1.0 / n))


@program(_distances(120))
def prim(d):
    """A tree of least length: the next vertex and the edge to it."""
    n = len(d)

    def body(i, c):
        near, parent, done, order = c
        u = jnp.argmin(jnp.where(done, jnp.inf, near))
        done = done.at[u].set(True)
        closer = ~done & (d[u] < near)
        return jnp.where(closer, d[u], near), jnp.where(closer, u, parent), done, order.at[i].set(near[u])

    start = (jnp.full(n, 10.0), jnp.zeros(n, jnp.int32), jnp.zeros(n, bool), jnp.zeros(n))
    return lax.fori_loop(0, n, body, start)[3]


@program(_tree(5000), by=1)
def subtree_sums(parents, values):
    """From the leaves of a tree to its root."""
    n = values.size

    def body(k, sums):
        i = n - 1 - k
        return sums.at[parents[i]].add(0.5 * sums[i])

    return lax.fori_loop(0, n - 1, body, values)


@program(_tree(1000, 4), by=1)
def down_a_tree(parents, values):
    """Each vertex from its parent."""

    def body(i, states):
        return states.at[i].set(jnp.tanh(states[parents[i]] + values[i]))

    return lax.fori_loop(1, len(values), body, values)


@program(lambda r: (floats(r, 1000), floats(r, 200)), by=None)
def search_tree(keys, wanted):
    """Keys are put into a tree of left and right indices, and others looked for."""
    n = keys.size

    def insert(i, c):
        children = c

        def down(c):
            at, _, _ = c
            side = (keys[i] > keys[at]).astype(jnp.int32)
            return children[at, side], at, side

        _, parent, side = lax.while_loop(lambda c: c[0] >= 0, down, (jnp.int32(0), jnp.int32(0), jnp.int32(0)))
        return children.at[parent, side].set(i)

    children = lax.fori_loop(1, n, insert, jnp.full((n, 2), -1, jnp.int32))

    def find(i, found):
        def down(c):
            return children[c[0], (wanted[i] > keys[c[0]]).astype(jnp.int32)], c[0]

        return found.at[i].set(lax.while_loop(lambda c: c[0] >= 0, down, (jnp.int32(0), jnp.int32(0)))[1])

    return lax.fori_loop(0, wanted.size, find, jnp.zeros(wanted.size, jnp.int32))
