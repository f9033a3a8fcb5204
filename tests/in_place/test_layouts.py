"""Caches that are needed in the order in which they are, in half precision, or as ring buffers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalogue.layouts import BATCH, HEADS, SIZE, STEPS, H, attention, in_a_scan
from in_numpy import in_numpy
from in_place import compiled
from jax import jit, lax

from jax_tensorarray import in_place
from jax_tensorarray._compat import barriers_hold
from jax_tensorarray._hlo import text as hlo_text
from jax_tensorarray._in_place import layouts, registers
from jax_tensorarray._jaxprs import jaxprs, registry
from jax_tensorarray.doctor import explain

pytestmark = pytest.mark.slow(but=2)


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
