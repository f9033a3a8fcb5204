"""A cache `[batch, length, heads, dim]` that products need as `[batch, heads, length, dim]` is not moved in a loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_numpy import in_numpy
from in_place import assert_no_whole_buffer_copy, compiled
from jax import jit, lax
from orders import assert_as_in_numpy, in_turn

from jax_tensorarray import in_place
from jax_tensorarray._compat import barriers_hold
from jax_tensorarray._hlo import text as hlo_text
from jax_tensorarray._in_place import layouts, registers
from jax_tensorarray._jaxprs import jaxprs, registry
from jax_tensorarray.doctor import explain

pytestmark = pytest.mark.slow(but=2)

BATCH, STEPS, HEADS, SIZE = 2, 40, 3, 4
CACHE = np.zeros((BATCH, STEPS, HEADS, SIZE))


def attention(h, k, v, t):
    k = lax.dynamic_update_slice(k, jnp.sin(h)[:, None], (0, t, 0, 0))
    v = v.at[:, t].set(jnp.cos(h))
    w = jax.nn.softmax(jnp.where(jnp.arange(STEPS) <= t, jnp.einsum("bhd,blhd->bhl", h, k), -jnp.inf))
    return h + 0.1 * jnp.einsum("bhl,blhd->bhd", w, v) + k[:, t // 2], k, v


def by_matrices(h, k, v, t):
    """Whose axes change places before the product, and after it."""
    k, v = k.at[:, t].set(jnp.sin(h)), v.at[:, t, 1].add(jnp.cos(h[:, 0])).at[0, t].multiply(1.5)
    w = (jnp.swapaxes(k, 1, 2) @ h[..., None])[..., 0]
    return jnp.tanh(h + jnp.einsum("blh,blhd->bhd", jnp.swapaxes(w, 1, 2), v)), k, v


def in_a_conditional(h, k, v, t):
    def one(k, v):
        return k.at[:, t].set(jnp.sin(h)), v

    k, v = lax.cond(h[0, 0, 0] > 0, one, lambda k, v: (k, v.at[:, t, :, 1:3].set(h[..., 1:3])), k, v)
    return jnp.tanh(h + jnp.einsum("bhl,blhd->bhd", jnp.einsum("bhd,blhd->bhl", h, k), v)), k, v


def at_places_of_each_example(h, k, v, t):
    own = jnp.arange(BATCH)
    k, v = k.at[:, t].set(jnp.sin(h)), v.at[own, (t * (1 + 2 * own)) % STEPS].set(jnp.cos(h))
    w, some = jnp.einsum("bhd,blhd->bhl", h, k), v[:, jnp.array([1, 2]) * t % STEPS].sum(1) + v[:, 3:5].sum(1)
    return jnp.tanh(h + jnp.einsum("bhl,blhd->bhd", w, v) + some + v[own, (t * (1 + own)) % STEPS]), k, v


def time_first(h, k, v, t):
    """Three axes change places, so the way there is not the way back."""
    k, v = k.at[t].set(jnp.sin(h)), v.at[t, :, 1].set(jnp.cos(h[:, 0]))
    w = jnp.einsum("bhd,lbhd->bhl", h, k)
    return jnp.tanh(h + jnp.einsum("bhl,lbhd->bhd", w, v) + k[t // 2]), k, v


def by_parts_that_are_put_back(h, k, v, t):
    k, v = (c.at[n].set(c[n].at[t].set(jnp.sin(h[n]))) for c, n in ((k, 0), (v, 1)))
    w = jnp.einsum("bhd,blhd->bhl", h, k)
    return jnp.tanh(h + jnp.einsum("bhl,blhd->bhd", w, v) + v[:, 2:9].sum(1)), k, v


def in_a_scan(step, cache=CACHE):
    def f(h):
        def one(c, t):
            c = step(*c, t)
            return c, c[0][:, 0]

        return lax.scan(one, (h, cache, cache), jnp.arange(STEPS))

    return f


def in_a_while_loop(step):
    def f(h):
        def goes_on(c):
            return (c[1] < STEPS) & (c[0][0][0, 0, 0] < 0.5)

        return lax.while_loop(goes_on, lambda c: (step(*c[0], c[1]), c[1] + 1), ((h, CACHE, CACHE), 0))

    return f


H = np.linspace(-1, 1, BATCH * HEADS * SIZE).reshape(BATCH, HEADS, SIZE)
PROGRAMS = {
    "attention": in_a_scan(attention),
    "attention in a checkpoint": in_a_scan(jax.checkpoint(attention)),
    "attention in a while loop": in_a_while_loop(attention),
    "by matrices": in_a_scan(by_matrices),
    "in a conditional": in_a_scan(in_a_conditional),
    "at places of each example": in_a_scan(at_places_of_each_example),
    "by parts that are put back": in_a_scan(by_parts_that_are_put_back),
    "time first": in_a_scan(time_first, np.moveaxis(CACHE, 1, 0)),
}


@pytest.mark.parametrize(("name", "order"), in_turn(PROGRAMS, ["forward", "vmap"]))
def test_a_cache_is_not_moved(name, order):
    program = assert_as_in_numpy(PROGRAMS[name], [np.stack([H, -H]) if order == "vmap" else H], order)
    assert_no_whole_buffer_copy(program, np.stack([CACHE] * 2) if order == "vmap" else CACHE)


@pytest.mark.skipif(not barriers_hold("cpu"), reason="where no barrier holds, XLA makes the update again")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_a_cache_of_half_precision_is_not_copied(dtype):
    """XLA converts all of it for a product, in a fusion that would also make the update again."""

    def f(h):
        def step(cache, x):
            t, q = x
            cache = cache.at[t].set(q)
            weights = jax.nn.softmax(jnp.einsum("hd,thd->ht", q, cache).astype(jnp.float32))
            return cache, jnp.einsum("ht,thd->hd", weights.astype(dtype), cache)

        return lax.scan(step, jnp.zeros_like(h), (jnp.arange(len(h)), h))[1]

    h = np.linspace(-1, 1, 1024).reshape(32, 2, 16).astype(dtype)
    program = compiled(in_place(f), h)
    np.testing.assert_allclose(np.float64(program(h)), np.float64(jit(f)(h)), rtol=0.02, atol=0.02)
    assert not hlo_text.copies_in_loops(program.as_text(), h.nbytes)


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("attention", "grad(in_place)"),
        ("by matrices", "in_place(grad)"),
        ("at places of each example", "in_place(grad)"),
    ],
)
def test_its_gradient(name, order):
    assert_as_in_numpy(PROGRAMS[name], [H], order, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "use", [lambda k: jnp.sort(k, 1).sum(), lambda k: k.reshape(-1, SIZE)[3].sum() + k.sum(2).max()]
)
def test_a_cache_that_is_needed_as_it_is_stays_so(use):
    def step(h, k, v, t):
        h, k, v = attention(h, k, v, t)
        return h + use(k), k, v

    f = in_a_scan(step)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9), jit(in_place(f))(H), jit(f)(H))
    assert f"f64[{BATCH},{STEPS},{HEADS},{SIZE}] = ta_write" in str(jax.make_jaxpr(in_place(f))(H))


def test_a_ring_buffer_lies_in_another_layout():
    def step(b, x):
        b = jnp.concatenate([b[1:], x[None]]).at[5, 1].add(x[2])
        return b, jnp.sin(x + b[STEPS // 2] + lax.dynamic_slice(b, (3 + (x[0, 0] > 0), 1, 0), (2, 1, SIZE)).sum(0))

    def f(b, x):
        return lax.scan(lambda c, _: (step(*c), None), (b, x), None, length=2 * STEPS)[0]

    b, x = np.arange(STEPS * HEADS * SIZE).reshape(STEPS, HEADS, SIZE) / 100, H[0]
    (loop,) = jax.make_jaxpr(f)(b, x).eqns
    [body] = registry.ENTRIES["scan"].bodies(loop.params)
    rings = registers.found_in(loop, body)
    permuted = layouts.Layouts(body._replace(jaxpr=rings.jaxpr, num_carry=3), {0: (1, 2, 0)})
    assert permuted.stays(0)
    carry, want = permuted.start([b, x, *rings.start()]), (b, x)
    for _ in range(STEPS + 3):
        carry, want = jaxprs.function(permuted.jaxpr)(*carry), in_numpy(step)(*want)
    jax.tree.map(np.testing.assert_allclose, tuple(rings.end(permuted.end(carry))), tuple(want))


def test_examples_whose_axis_is_behind_that_of_a_scan():
    """Each of them reads and writes rows of its own."""

    def f(x):
        def step(c, t):
            b, x = c
            r, b = lax.scan(lambda r, row: (r + row[t % 5], row.at[(x + t) % 5].set(r)), x, b)
            b = b.at[x % 4, (t * t) % 5].set(x).at[(x + 1) % 4].set(jnp.arange(5) + r)
            return (b, (r + b[x % 4, 3] + b[(x + 2) % 4].sum()) % 97), b[0, 1]

        return lax.scan(step, (jnp.zeros((4, 5), int), x), jnp.arange(9))

    g, x = jax.vmap(f), np.arange(5, 8)
    assert "its axes in the order (1, 0, 2)" in [line.became for line in explain(g)(x)]
    jax.tree.map(np.testing.assert_array_equal, jit(in_place(g))(x), jit(g)(x))
