"""Rings, caches, images and histories: buffers that a step writes a little of."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.harm.program import floats, normal, program, whole


def _taps(r):
    return floats(r, 2, 8, scale=0.4), floats(r, 3000, 8)


@program(_taps, axes=(None, 0))
def delay_line(p, xs, length=441):
    """A ring buffer that is read at two places."""

    def step(c, x):
        ring, i = c
        y = jnp.tanh(p[0] * ring[(i - length + 1) % length] + p[1] * ring[(i - length // 3) % length] + x)
        return (ring.at[i % length].set(y), i + 1), y

    return lax.scan(step, (jnp.zeros((length, xs.shape[1])), 0), xs)[1]


@program(_taps, axes=(None, 0))
def comb_filter(p, xs, length=441):
    """A ring buffer that is read at one place, where it is written next."""

    def step(c, x):
        ring, i = c
        y = p[0] * ring[i] + x
        return (ring.at[i].set(y), jnp.where(i + 1 == length, 0, i + 1)), y

    return lax.scan(step, (jnp.zeros((length, xs.shape[1])), 0), xs)[1]


@program(normal(2000, 16))
def sliding_window(xs):
    """All rows move by one, and the last is new."""

    def step(window, x):
        window = jnp.roll(window, -1, 0).at[-1].set(x)
        return window, jnp.tanh(window.mean(0))

    return lax.scan(step, jnp.zeros((64, xs.shape[1])), xs)[1]


@program(lambda r: (floats(r, 20000), whole(r, 19000, 2000)))
def priority_pop(queue, places):
    """What comes after a place moves there, as a window."""

    def step(queue, i):
        behind = lax.dynamic_slice(queue, (i + 1,), (50,))
        return lax.dynamic_update_slice(queue, behind, (i,)), queue[i]

    return lax.scan(step, queue, places)


def _add_at(count):
    @program(normal(20000), name=f"add_at_{count}")
    def add_at(h):
        """Some elements are read, and numbers made of them added."""

        def step(h, i):
            at = (i * jnp.arange(count) + i) % h.size
            return h.at[at].add(h[at] * 0.1 + 1.0), None

        return lax.scan(step, h, jnp.arange(1000))[0]


for count in (4, 16, 17, 128):
    _add_at(count)


def _sum_of(count):
    @program(normal(4000, 8), name=f"sum_of_{count}")
    def sum_of(h):
        """Some rows are read, and summed."""

        def step(total, i):
            return total + jnp.sum(h[(i * jnp.arange(count) * 13 + i) % len(h)], 0), None

        return lax.scan(step, jnp.zeros(8), jnp.arange(1000))[0]


for count in (20, 24):
    _sum_of(count)


@program(lambda r: (whole(r, 256, 20000),), by=None)
def histogram(values):
    return lax.fori_loop(0, values.size, lambda i, h: h.at[values[i]].add(1), jnp.zeros(256, jnp.int32))


@program(lambda r: (np.abs(floats(r, 5000)), whole(r, 256, 5000)))
def weighted_histogram(weights, bins):
    return lax.fori_loop(0, bins.size, lambda i, h: h.at[bins[i]].add(weights[i]), jnp.zeros(256))


@program(lambda r: (floats(r, 100, 100), whole(r, 121, 100)))
def pileup(values, starts, width=221):
    """A masked write of single pixels into an image."""
    n, length = values.shape

    def row(c, x):
        image, r = c
        value, start = x
        where = start + jnp.arange(length)
        ok = (where >= 0) & (where < width)

        def pixel(i, image):
            written = image.at[r, jnp.clip(where[i], 0, width - 1)].set(value[i])
            return jnp.where(ok[i] & (r < n), written, image)

        return (lax.fori_loop(0, length, pixel, image), r + 1), None

    return lax.scan(row, (jnp.zeros((n, width)), 0), (values, starts))[0][0]


@program(normal(1000, 64))
def masked_rows(x):
    def body(i, b):
        return jnp.where(x[i, 0] > 0, b.at[i].set(jnp.sin(x[i])), b)

    return lax.fori_loop(0, len(x), body, jnp.zeros_like(x))


def _by_mask(name, put):
    """A cache whose rows are written by a mask over all of them, as programs for TPUs do it."""

    @program(normal(400, 64), name=name)
    def by_mask(x):
        def step(c, x):
            cache, at = c
            cache = put(cache, at, x + jnp.sin(cache[at // 2]))
            return (cache, at + 1), cache[at // 3]

        return lax.scan(step, (jnp.zeros_like(x), 0), x)[1]


def _by_product(cache, at, row):
    mask = jax.nn.one_hot(at, len(cache), dtype=cache.dtype)[:, None]
    return cache * (1 - mask) + mask * row


_by_mask("rows_by_a_mask", lambda cache, at, row: jnp.where((jnp.arange(len(cache)) == at)[:, None], row, cache))
_by_mask("rows_by_a_product", _by_product)


def _weak(name, init):
    """Buffers whose type is weak: the first value is a Python number."""

    @program(normal(3000), name=f"{name}_cond")
    def in_cond(x):
        def body(i, h):
            return lax.cond(x[i] > 0, lambda h: h.at[i].set(x[i] + 0.5 * h[i - 1]), lambda h: h, h)

        return lax.fori_loop(0, x.size, body, init(x.size))

    @program(lambda r: (whole(r, 8, 1)[0] + 1,), by=None, name=f"{name}_while")
    def in_while(m, n=3000):
        def body(c):
            return c[0].at[c[1]].add(1), c[1] + 1

        return lax.while_loop(lambda c: c[1] < n - m, body, (init(n), 0))[0]

    @program(lambda r: (whole(r, 8, 1)[0] + 1,), by=None, name=f"{name}_while_in_loop")
    def in_both(m, n=1000):
        def body(i, h):
            add = lambda c: (c[0].at[c[1] % n].add(1), c[1] + 1)  # noqa: E731
            return lax.while_loop(lambda c: c[1] < i + m, add, (h, i))[0]

        return lax.fori_loop(0, n, body, init(n))


_weak("full", lambda n: jnp.full(n, 1.0))
_weak("full_inf", lambda n: jnp.full(n, jnp.inf))
_weak("arange", lambda n: jnp.arange(n) * 1.0)
_weak("full_typed", lambda n: jnp.full(n, 1.0, jnp.float32))


@program(normal(1000, 64))
def two_buffers_swap(x):
    """A row of one is made of the other, and they change places."""

    def body(i, c):
        a, b = c
        return b.at[i].set(jnp.sin(a[(i * 7) % len(x)])), a

    return lax.fori_loop(0, len(x), body, (x, 2 * x))


@program(normal(2000, 8))
def places_in_the_buffer(x):
    """Three rows, at places that depend on what is in the buffer."""

    def body(i, b):
        i = i + (b[0, 0] > 100).astype(int)
        return b.at[i - jnp.arange(3)].set(jnp.sin(b[i // 2]))

    return lax.fori_loop(0, len(x), body, x)


@program(normal(500, 64))
def forty_accesses(x):
    """Twenty reads and twenty writes in one body."""

    def body(i, b):
        for k in range(20):
            b = b.at[(i + k) % len(x)].set(jnp.sin(b[(i * 7 + k) % len(x)]))
        return b

    return lax.fori_loop(0, 50, body, x)


@program(normal(4, 4, 16))
def kv_cache(q, length=128):
    """Attention over a cache `[batch, length, heads, dim]`."""
    batch, heads, dim = q.shape

    def step(c, i):
        x, k, v = c
        k = lax.dynamic_update_slice(k, x[:, None], (0, i, 0, 0))
        v = lax.dynamic_update_slice(v, jnp.cos(x)[:, None], (0, i, 0, 0))
        s = jnp.einsum("bhd,blhd->bhl", x, k)
        s = jax.nn.softmax(jnp.where(jnp.arange(length) <= i, s, -1e9))
        y = jnp.einsum("bhl,blhd->bhd", s, v)
        return (jnp.tanh(x + y), k, v), y[:, 0, 0]

    empty = jnp.zeros((batch, length, heads, dim))
    return lax.scan(step, (q, empty, empty), jnp.arange(length))[1]


@program(normal(64))
def layered_cache(h, layers=4, tokens=128):
    """A cache that is carried through the layers as inputs and outputs of a scan."""

    def token(c, t):
        cache, h = c

        def layer(h, rows):
            rows = rows.at[t].set(jnp.sin(h))
            return jnp.tanh(h + rows[t // 2]), rows

        h, cache = lax.scan(layer, h, cache)
        return (cache, h), h

    return lax.scan(token, (jnp.zeros((layers, tokens, h.size)), h), jnp.arange(tokens))[1]


@program(normal(64))
def two_names(x, n=500):
    """One buffer is carried in two places, and written in both or in none."""

    def body(i, c):
        a, b, x = c
        x = jnp.sin(x) + a[(i - 1) % n] + 0.5 * b[(i - 2) % n]

        def update():
            new = b.at[i % n].set(x)
            return new, new

        a, b = lax.cond(x[0] > -0.5, update, lambda: (a, b))
        return a, b, x

    start = jnp.zeros((n, x.size))
    return lax.fori_loop(0, 1000, body, (start, start, x))


def _opcodes(branches):
    @program(lambda r: (whole(r, branches, 3000), np.ones(1024, np.float32)), by=1, name=f"opcodes_{branches}")
    def opcodes(ops, memory):
        """A machine: one of its instructions writes into memory."""

        def step(c, op):
            def store(m, pc):
                return m.at[pc].set(pc * 0.5 + m[pc]), pc + 1

            others = [lambda m, pc, k=k: (m, pc + k) for k in range(1, branches)]
            m, pc = lax.switch(op, [store, *others], *c)
            return (m, pc % m.size), m[pc % m.size]

        return lax.scan(step, (memory, 0), ops)


for branches in (2, 3, 8):
    _opcodes(branches)


@program(normal(500, 100))
def now_and_then(x):
    """All of an array changes in one step of a hundred."""

    def step(p, i):
        g = jnp.sin(p[0, 0])
        return lax.cond(i % 100 == 0, lambda p: p * 0.999 + g, lambda p: p, p), None

    return lax.scan(step, x, jnp.arange(1000))[0]


@program(normal(300, 6))
def columns_of_six(x):
    """A window along the first axis, at an index of the second."""
    n = len(x)

    def body(i, m):
        return m.at[0:6, i].set(jnp.sin(m[0:6, i - 1]) + x[i])

    return lax.fori_loop(1, n, body, jnp.zeros((n, n)))


@program(lambda r: (floats(r, 60, 16, 16, scale=0.06), np.arange(-1, 59, dtype=np.int32)))
def kinematic_chain(x, parent):
    """Constant matrices, read by index in a cond in an inner scan."""
    n = len(x)

    def outer(c, i):
        def inner(c, k):
            def compute(j, f):
                return parent[j], jnp.tanh(x[j] @ f)

            return lax.cond(k == parent[c[0]], compute, lambda j, f: (j, f), *c), None

        (j, f), _ = lax.scan(inner, (i, x[i]), jnp.arange(1, n)[::-1])
        return c + x[j] @ f, None

    return lax.scan(outer, jnp.eye(16), jnp.arange(1, n)[::-1])[0]
