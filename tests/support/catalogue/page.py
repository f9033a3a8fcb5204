"""A program for each shape of a loop over a buffer: T steps, and buffers of T rows."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import solve_triangular

from .loop import Loop

ROW = 16


class Shape(NamedTuple):
    """A loop that many programs have."""

    code: str  #: the line that matters
    run: Callable[[Any, int], Any]  #: from a row and T to a row
    orders: tuple[str, ...]
    num_bytes: Callable[[int], int]  #: the size of its smallest buffer, for T
    whole: Mapping[str, int]  #: how many whole buffers a step makes under `in_place`: 0 in an order that is not here
    rtol: float  #: how far results in 32 bits may differ

    def loss(self, T):
        return lambda x: jnp.sum(self.run(x, T) ** 2)


FORWARD = ("forward", "vmap")
GRADIENTS = ("grad(in_place)", "in_place(grad)", "vmap(grad)")

NONE: dict[str, int] = {}

SHAPES: dict[str, Shape] = {}


def shape(code, orders=FORWARD + GRADIENTS, num_bytes=lambda T: 4 * T * ROW, whole=NONE, rtol=2e-4):
    def add(f):
        SHAPES[f.__name__.replace("_", " ")] = Shape(code, f, orders, num_bytes, whole, rtol)
        return f

    return add


def row():
    return np.linspace(0.1, 1.0, ROW, dtype=np.float32)


def buffer(T):
    return jnp.zeros((T, ROW), jnp.float32)


# --- rows ------------------------------------------------------------------------------------------------------


def _rows(read, write):
    """Read a row, and write another one."""

    def f(x, T):
        def step(i, s):
            b, x = s
            y = read(b, i, T)
            return write(b, i, jnp.sin(x + y), T), 0.5 * x + 0.1 * y

        return lax.fori_loop(1, T, step, (buffer(T) + 1, x))[1]

    return f


def _add(name, code, f, **options):
    f.__name__ = name
    shape(code, **options)(f)


_half = lambda b, i, T: b[i // 2]  # noqa: E731
_add("a row", "b.at[i].set(f(b[j]))", _rows(_half, lambda b, i, y, T: b.at[i].set(y)))
_add("rows", "b.at[idx].add(f(b[j]))", _rows(_half, lambda b, i, y, T: b.at[i * jnp.array([1, 3]) % T].add(y)))
_add("the smaller row", "b.at[i].min(x)", _rows(_half, lambda b, i, y, T: b.at[i].min(y)))
_add("a row multiplied", "b.at[i].multiply(x)", _rows(_half, lambda b, i, y, T: b.at[i].multiply(y)))
_add("a row divided", "b.at[i].divide(x)", _rows(_half, lambda b, i, y, T: b.at[i].divide(y + 2)))
_add("a power of a row", "b.at[i].power(2)", _rows(_half, lambda b, i, y, T: b.at[i].power(2).at[i].add(y)))
_add(
    "indices that are clipped",
    'b.at[i].set(x, mode="clip")',
    _rows(_half, lambda b, i, y, T: b.at[i].set(y, mode="clip")),
)
_add("a view", "b.T[:, i]", _rows(lambda b, i, T: b.T[:, i // 2], lambda b, i, y, T: b.at[i].set(y)))
_add(
    "a row by a mask",
    "jnp.where((jnp.arange(n) == i)[:, None], x, b)",
    _rows(_half, lambda b, i, y, T: jnp.where((jnp.arange(T) == i)[:, None], y, b)),
)
_add(
    "a row read by a mask",
    "jnp.where(one_hot(i, n, dtype=bool)[:, None], b, 0).sum(0)",
    _rows(
        lambda b, i, T: jnp.where(jax.nn.one_hot(i // 2, T, dtype=bool)[:, None], b, 0).sum(0),
        lambda b, i, y, T: b.at[i].set(y),
    ),
)
_add(
    "a chosen version",
    "jnp.where(p, b.at[i].set(x), b)",
    _rows(_half, lambda b, i, y, T: jnp.where(y[0] > 1, b.at[i].set(y), b)),
)


@shape("jnp.stack([c[0].at[i].set(x), c[1].at[i].set(y)])")
def a_buffer_taken_apart(x, T):
    def step(i, s):
        c, x = s
        y = c[0, i // 2] + c[1, i // 3]
        c = jnp.stack([c[0].at[i].set(jnp.sin(x + y)), c[1].at[i].set(jnp.cos(x))])
        return c, 0.5 * x + 0.1 * y

    return lax.fori_loop(1, T, step, (jnp.ones((2, T, ROW)), x))[1]


@shape("b.reshape(2, n, d).at[1, i].set(x).reshape(-1, d)")
def a_write_in_another_shape(x, T):
    def step(i, s):
        b, x = s
        y = b[i // 2]
        b = b.reshape(2, T // 2, ROW).at[1, i // 2].set(jnp.sin(x + y)).reshape(T, ROW)
        return b, 0.5 * x + 0.1 * y

    return lax.fori_loop(1, T, step, (buffer(T) + 1, x))[1]


@shape("b.T.at[:, i].set(x).T")
def a_write_through_a_view(x, T):
    def step(i, s):
        b, x = s
        y = b[i // 2]
        return b.T.at[:, i].set(jnp.sin(x + y)).T, 0.5 * x + 0.1 * y

    return lax.fori_loop(1, T, step, (buffer(T) + 1, x))[1]


@shape("lax.cond(p, write, keep, b)")
def a_branch(x, T):
    def step(i, s):
        b, x = s
        b = lax.cond(x[0] > 0.3, lambda b: b.at[i].set(jnp.sin(x)), lambda b: b, b)
        return b, 0.5 * x + b[i // 2]

    return lax.fori_loop(1, T, step, (buffer(T), x))[1]


@shape("lax.switch(op, [push, add, nop, swap], b)")
def a_switch(x, T):
    ops = [
        lambda b, i, x: b.at[i].set(x),
        lambda b, i, x: b.at[i].add(x * b[i - 1]),
        lambda b, i, x: b,
        lambda b, i, x: b.at[i].set(b[i // 2]).at[i - 1].set(x),
    ]

    def step(i, s):
        b, x = s
        b = lax.switch((100 * x[0]).astype(jnp.int32) % 4, ops, b, i, x)
        return b, jnp.sin(x + b[i // 2])

    return lax.fori_loop(1, T, step, (buffer(T), x))[1]


# --- buffers that move -----------------------------------------------------------------------------------------


@shape("return b, a")
def two_that_change_places(x, T):
    def step(s, i):
        a, b, x = s
        return (b.at[i].set(jnp.sin(x + a[i // 2])), a, 0.5 * x + b[i // 3]), None

    return lax.scan(step, (buffer(T), buffer(T) + 1, x), jnp.arange(T))[0][2]


@shape("new = b.at[i].set(x); return new, new", rtol=0.05)
def one_in_two_places(x, T):
    def step(i, s):
        a, b, x = s
        new = b.at[i].set(jnp.sin(x) + a[i - 1] + 0.5 * b[i // 2])
        return new, new, jnp.sin(x + a[i // 3])

    return lax.fori_loop(0, T, step, (buffer(T), buffer(T), x))[2]


@shape("lax.cond(p, lambda: (new, new), lambda: (a, b))")
def in_two_places_or_as_it_was(x, T):
    def step(i, s):
        a, b, x = s
        x = jnp.sin(x) + a[i - 1] + 0.5 * b[i // 2]
        new = b.at[i].set(x)
        a, b = lax.cond(x[0] > -0.5, lambda: (new, new), lambda: (a, b))
        return a, b, x

    return lax.fori_loop(0, T, step, (buffer(T), buffer(T), x))[2]


@shape("jnp.roll(b, -1, 0).at[-1].set(x)")
def a_register_that_rolls(x, T):
    def step(s, _):
        b, x = s
        return (jnp.roll(b, -1, 0).at[-1].set(jnp.sin(x + b[T // 2])), x + b[T // 3]), None

    return lax.scan(step, (buffer(T), x), None, length=T)[0][1]


@shape("jnp.concatenate([x[None], b[:-1]])")
def a_register_that_is_joined(x, T):
    def step(s, _):
        b, x = s
        return (jnp.concatenate([jnp.sin(x + b[-1])[None], b[:-1]]), x), b[T // 2]

    return jnp.sum(lax.scan(step, (buffer(T), x), None, length=T)[1], 0)


@shape("jnp.where(done, first, state)", FORWARD, whole=dict.fromkeys(FORWARD, 1))
def starting_again(x, T):
    first = buffer(T)

    def step(i, s):
        b, n, x = s
        x = jnp.sin(x + b[n // 2])
        b, done = b.at[n].set(x), (x[0] > 1) | (i == T // 2)  # which is not known before
        return jnp.where(done, first, b), jnp.where(done, 0, n + 1), x

    return lax.fori_loop(0, T, step, (first, 0, x))[2]


# --- checkpoints -----------------------------------------------------------------------------------------------


@shape("lax.scan(jax.checkpoint(lambda b, i: lax.scan(step, b, i)), b, i)")
def a_scan_of_checkpointed_scans(x, T):
    def step(s, i):
        b, x = s
        y = jnp.mean(jnp.sin(lax.dynamic_slice(b, (i - 24, 0), (24, ROW))), axis=0)
        return (b.at[i].set(jnp.sin(x + y)), 0.5 * x + 0.1 * y), None

    chunk = jax.checkpoint(lambda s, i: lax.scan(step, s, i))
    return lax.scan(chunk, (buffer(T) + 1, x), jnp.arange(T).reshape(-1, 8))[0][1]


# --- caches ----------------------------------------------------------------------------------------------------


@shape("h, cache = lax.scan(layer, h, cache)", rtol=0.01)
def a_cache_through_layers(x, T):
    def token(s, t):
        def layer(h, c):
            c = c.at[t].set(jnp.sin(h))
            return h + c[t // 2], c

        return lax.scan(layer, *s), None

    return lax.scan(token, (x, jnp.zeros((3, T, ROW), jnp.float32)), jnp.arange(T))[0][0]


@shape("lax.map(lambda s: lax.cond(done, start, lambda: step(s)), states)")
def environments_one_by_one(x, T):
    def step(states, t):
        def one(s):
            b, x, steps = s
            b, x = b.at[t].set(jnp.sin(x)), 0.5 * x + 0.1 * b[t // 2]
            return lax.cond(steps == 100, lambda: (jnp.ones_like(b), 0.9 * x, 0), lambda: (b, x, steps + 1))

        return lax.map(one, states), None

    states = jnp.zeros((3, T, ROW), jnp.float32), jnp.stack([x] * 3), jnp.arange(3)
    return lax.scan(step, states, jnp.arange(T))[0][1]


def _attention(x, T, order):
    """Einsums over two caches. What is read as a whole has cotangents as a whole, two buffers in each step."""
    shape, at = {"b": 2, "l": T, "h": 2, "d": ROW // 4}, order.index("l")
    cache = jnp.zeros([shape[c] for c in order], jnp.float32)

    def token(s, t):
        h, k, v = s
        start = [t if c == "l" else 0 for c in order]
        k = lax.dynamic_update_slice(k, jnp.expand_dims(jnp.sin(h), at), start)
        v = lax.dynamic_update_slice(v, jnp.expand_dims(jnp.cos(h), at), start)
        w = jnp.einsum(f"bhd,{order}->bhl", h, k)
        w = jax.nn.softmax(jnp.where(jnp.arange(T) <= t, w, -1e9))
        return (jnp.einsum(f"bhl,{order}->bhd", w, v), k, v), None

    return lax.scan(token, (x.reshape(2, 2, ROW // 4), cache, cache), jnp.arange(T))[0][0]


for _name, _order in (("attention over a cache", "bhld"), ("a cache by length first", "blhd")):
    _add(
        _name,
        f'jnp.einsum("bhd,{_order}->bhl", q, cache)',
        lambda x, T, order=_order: _attention(x, T, order),
        whole=dict.fromkeys(GRADIENTS, 2),
    )


# --- boxes -----------------------------------------------------------------------------------------------------


@shape("lax.dynamic_slice(a, (i, j), (4, 4))")
def a_tile(x, T):
    def step(i, s):
        a, x = s
        t = lax.dynamic_slice(a, (i // 2, i % 5), (4, 4))
        return lax.dynamic_update_slice(a, jnp.sin(t + x.reshape(4, 4)), (i, i % 7)), 0.5 * x + 0.1 * t.ravel()

    return lax.fori_loop(0, T, step, (jnp.ones((T + 4, ROW), jnp.float32), x))[1]


@shape("k.at[l, :, t].set(x)")
def axes_apart(x, T):
    def step(i, s):
        k, x = s
        y = k[i % 3, :, i // 2]
        return k.at[i % 3, :, i].set(jnp.sin(x.reshape(4, 4) + y)), 0.5 * x + 0.1 * y.ravel()

    return lax.fori_loop(0, T, step, (jnp.ones((3, 4, T, 4), jnp.float32), x))[1]


@shape("a.at[i, ::2].set(x)")
def steps_of_a_row(x, T):
    def step(i, s):
        a, x = s
        y = a[i // 2, ::2]
        return a.at[i, ::2].set(jnp.sin(x[:8] + y)), (0.5 * x).at[:8].add(0.1 * y)

    return lax.fori_loop(0, T, step, (buffer(T) + 1, x))[1]


@shape("a.at[i, i].set(x)", num_bytes=lambda T: 4 * T * T)
def a_diagonal(x, T):
    def step(i, s):
        a, x = s
        y = a[i // 2, i // 2]
        return a.at[i, i].set(jnp.sin(x[0] + y)), 0.5 * x + 0.1 * y

    return lax.fori_loop(0, T, step, (jnp.ones((T, T), jnp.float32), x))[1]


@shape("a[jnp.ix_(rows, columns)]")
def a_grid_of_elements(x, T):
    def step(i, s):
        a, x = s
        r, c = (i // 2 + jnp.array([0, 3])) % T, (i + jnp.array([1, 5])) % ROW
        y = a[jnp.ix_(r, c)]
        a = a.at[jnp.ix_((i + jnp.array([0, 2])) % T, c)].set(jnp.sin(x[:4].reshape(2, 2) + y))
        return a, (0.5 * x).at[:4].add(0.1 * y.ravel())

    return lax.fori_loop(0, T, step, (buffer(T) + 1, x))[1]


@shape("solve_triangular(low, k), low.at[i].set(...)", num_bytes=lambda T: 4 * T * T, whole=dict.fromkeys(GRADIENTS, 2))
def a_factor_that_grows(x, T):
    """The Cholesky factor of a kernel matrix, a row in each step."""
    points = jnp.arange(T) * x[0]

    def step(i, low):
        k = jnp.where(jnp.arange(T) < i, jnp.exp(-((points - points[i]) ** 2)), 0)
        new = solve_triangular(low, k, lower=True)
        return low.at[i].set(new.at[i].set(jnp.sqrt(1.1 - new @ new)))

    return lax.fori_loop(0, T, step, jnp.eye(T, dtype=jnp.float32)).sum(0)


@shape(
    "w @ (xs.at[i].set(x) + rs.at[i].set(r))",
    whole=dict.fromkeys(FORWARD, 1) | dict.fromkeys(GRADIENTS, 5),
    rtol=0.01,
)
def histories_that_are_combined(x, T):
    """Anderson acceleration, but for its solve: two histories, and the Gram matrix of one."""

    def step(i, s):
        x, xs, rs, gram = s
        r = jnp.cos(jnp.roll(x, 1)) - x
        xs, rs = xs.at[i].set(x), rs.at[i].set(r)
        gram = gram.at[i, :].set(rs @ r).at[:, i].set(rs @ r)
        return jax.nn.softmax(gram @ (rs @ r)) @ (xs + rs), xs, rs, gram

    return lax.fori_loop(0, T, step, (x, buffer(T), buffer(T), jnp.eye(T, dtype=jnp.float32)))[0]


# --- loops inside ----------------------------------------------------------------------------------------------


@shape("a heap: swaps in a while_loop, inside of a loop that pushes", FORWARD, lambda T: 4 * T)
def a_heap(x, T):
    def push(h, n, v):
        def up(s):
            h, k = s
            p = (k - 1) // 2
            return h.at[p].set(h[k]).at[k].set(h[p]), p

        is_less = lambda s: (s[1] > 0) & (s[0][(s[1] - 1) // 2] > s[0][s[1]])  # noqa: E731
        return lax.while_loop(is_less, up, (h.at[n].set(v), n))[0]

    def step(i, s):
        h, x = s
        h = push(h, i, jnp.sin(x[0] * i))
        return h, jnp.sin(x + h[0])

    return lax.fori_loop(0, T, step, (jnp.full(T, jnp.inf, jnp.float32), x))[1]


@shape("union-find: paths are halved in a while_loop", FORWARD, lambda T: 4 * T)
def union_and_find(x, T):
    def find(p, i):
        up = lambda s: (s[0].at[s[1]].set(s[0][s[0][s[1]]]), s[0][s[1]])  # noqa: E731
        return lax.while_loop(lambda s: s[0][s[1]] != s[1], up, (p, i))

    def step(i, s):
        p, x = s
        p, a = find(p, jnp.abs(x[0] * i).astype(jnp.int32) % T)
        p, b = find(p, jnp.abs(7 * x[1] * i).astype(jnp.int32) % T)
        return p.at[a].set(b), jnp.sin(x + p[a])

    return lax.fori_loop(0, T, step, (jnp.arange(T, dtype=jnp.int32), x))[1]


#: How many rows the buffers have whose steps are counted for the page.
STEPS = 256


def _loop(of):
    buffer = jax.ShapeDtypeStruct((of.num_bytes(STEPS) // 4,), np.float32)
    return Loop(of.loss(STEPS), (row(),), buffer, of.orders, whole=of.whole, rtol=of.rtol, is_for_barriers=True)


LOOPS = {name: _loop(of) for name, of in SHAPES.items()}
