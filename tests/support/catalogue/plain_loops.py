"""Loops in plain JAX, which `in_place` repairs."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from .loop import Loop


def rows(steps):
    return (np.linspace(-0.9, 0.9, 4 * steps, dtype=np.float32).reshape(steps, 4),)


def scan(body, init, steps):
    return lax.scan(lambda c, i: (body(c, i), None), init, jnp.arange(steps))[0]


def columns(x):
    b = x.T

    def body(b, i):
        return b.at[:, i].set(jnp.sin(b[:, (i * 7) % b.shape[1]] + x[i]))

    return jnp.sum(scan(body, b, len(x)) ** 2)


def elements(x):
    def body(b, i):
        return b.at[i, i % 4].set(jnp.sin(b[(i * 7) % len(x), (i + 1) % 4]))

    return jnp.sum(scan(body, x, len(x)) ** 2)


def known_places(x):
    def body(b, i):
        new = jnp.sin(b[0]) + b[-1] * jnp.sum(b[2:5]) + b[i // 2, 1]
        return b.at[i].set(new).at[3].add(x[i])

    return jnp.sum(scan(body, x, len(x)) ** 2)


def windows(x):
    def body(b, i):
        rows = lax.dynamic_slice_in_dim(b, (i * 3) % (len(x) - 4), 4)
        return lax.dynamic_update_slice_in_dim(b, jnp.sin(rows), i, 0)

    return jnp.sum(scan(body, x, len(x)) ** 2)


def tiles(x):
    def body(b, i):
        tile = lax.dynamic_slice(b, ((i * 3) % len(x), i % 3), (2, 2))
        return lax.dynamic_update_slice(b, jnp.sin(tile), (i, i % 4))

    return jnp.sum(scan(body, x, len(x)) ** 2)


def between(x):
    b = jnp.stack([x, 2 * x], 1)[None]

    def body(b, i):
        return b.at[0, i, :, i % 4].set(jnp.sin(b[0, (i * 7) % len(x), :, (i + 1) % 4]))

    return jnp.sum(scan(body, b, len(x)) ** 2)


def crossing(x):
    def body(c, i):
        a, b = c
        return b.at[i].set(jnp.sin(a[(i * 7) % len(x)])), a

    a, b = scan(body, (x, x * 2), len(x))
    return jnp.sum(a**2) + jnp.sum(b)


def read_before_select(x):
    """The version that may not be selected is read, and the rows put back."""

    def body(b, i):
        new = b.at[i].set(jnp.sin(x[i]))
        return jnp.where(new[(i * 5) % len(x)][0] > 0.5, new, b)

    return jnp.sum(scan(body, x, len(x)) ** 2)


def combined(x):
    def body(b, i):
        b = b.at[i].multiply(1.5).at[(i * 7) % len(x)].min(0.3)
        b = b.at[i // 2].max(0.1).at[i].add(0.1).at[i // 3].subtract(0.2)
        two = jnp.stack([i // 4, len(x) - 1 - i // 4])
        return b.at[i // 5].divide(x[i] + 2).at[i // 6].power(2).at[two].multiply(0.9, unique_indices=True)

    return jnp.sum(scan(body, x, len(x)) ** 2)


def either(x):
    def body(c, i):
        one = lambda a, b: (a.at[i].set(b[i // 2]), b)  # noqa: E731
        return lax.cond(x[i, 0] > 0, one, lambda a, b: (a, b.at[i].add(a[i // 2])), *c)

    a, b = scan(body, (x, x + 1), len(x))
    return jnp.sum(a * b)


def read_again_beside_a_conditional(x):
    """A row is read and reshaped, beside a conditional that writes."""

    def body(c, i):
        b, total = c
        seen = b[(i * 7) % len(x)].reshape(1, 4)[0]
        return lax.cond(x[i, 0] > 0, lambda b: b.at[i].set(jnp.sin(x[i])), lambda b: b, b), total + jnp.sum(seen**2)

    return scan(body, (x, 0.0), len(x))[1]


def each_by_its_own_end(x):
    def one(n, x):
        body = lambda c: (c[0] + 1, c[1].at[c[0]].set(jnp.sin(c[1][c[0] // 2])))  # noqa: E731
        return lax.while_loop(lambda c: c[0] < n, body, (0, x))[1]

    steps = len(x)
    return jnp.sum(jax.vmap(one)(jnp.array([steps // 2, steps, steps - 1]), jnp.stack([x] * 3)) ** 2)


def each_by_its_own_branch(x):
    def one(k, x):
        write = lambda b, i: b.at[i].set(jnp.sin(b[i // 2]))  # noqa: E731
        return scan(lambda b, i: lax.cond((i + k) % 2 == 0, write, lambda b, i: b, b, i), x, len(x))

    return jnp.sum(jax.vmap(one)(jnp.arange(3), jnp.stack([x] * 3)) ** 2)


def walked(x, wave):
    return scan(lambda b, i: b.at[i].set(wave(b[i // 2]) + x[i]), x, len(x))


@jax.custom_jvp
def walk(x, times):
    return walked(x, jnp.sin) * times


@walk.defjvp
def _(primals, tangents):
    x, times = primals
    return walk(x, times), walked(x, jnp.cos) * times * tangents[0]


@jax.custom_vjp
def walk_back(x, times):
    return walked(x, jnp.sin) * times, times


def _walk_back(times, x, cts):
    return walked(x, jnp.cos) * times * cts[0], None


walk_back.defvjp(lambda x, times: (walk_back(x, times), (times, x)), lambda res, cts: _walk_back(*res, cts))


def rules_of_its_own(x):
    """Which are not derivatives of the function, and have loops too."""
    return jnp.sum(walk(x, 2) ** 2) + jnp.sum(walk_back(x, 3)[0])


def divided(x):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    f = jax.shard_map(lambda x: walked(x, jnp.sin) * lax.axis_size("x"), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    return jnp.sum(f(x) ** 2)


GRADIENTS = ("grad(in_place)", "in_place(grad)")


def _loop(f):
    orders = ("forward",) if f is each_by_its_own_end else GRADIENTS  # a while_loop has no gradient in plain JAX
    return Loop(f, rows(200), *rows(200), orders, rtol=2e-5, is_interpreted=f is not divided)


LOOPS = {
    f.__name__: _loop(f)
    for f in (
        columns,
        elements,
        known_places,
        windows,
        tiles,
        between,
        crossing,
        read_before_select,
        combined,
        either,
        read_again_beside_a_conditional,
        each_by_its_own_end,
        each_by_its_own_branch,
        rules_of_its_own,
        divided,
    )
}
