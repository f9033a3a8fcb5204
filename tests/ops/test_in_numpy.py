"""The interpreter of oracles gives what the compiled program gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_numpy import in_numpy
from jax import jit, lax

X = np.random.default_rng(0).normal(size=(4, 3))


def rows(x):
    y = x.at[2].set(jnp.sin(x[0])).at[jnp.array([1, 1])].add(x[:2] ** 3)
    return (
        y[::2, 1:],
        lax.pad(y, jnp.zeros((), x.dtype), ((1, -2, 1), (-1, 1, 0))),
        jnp.stack([y[0], *y]).T,
        jnp.concatenate([y, x]),
        y[-1],
    )


def loops(x):
    def body(c, ix):
        i, row = ix
        c = lax.switch(i % 3, [jnp.sin, lambda c: c * row.sum(), lambda c: c - c[0]], c)
        return c, lax.dynamic_slice(x, (i, i), (2, 2)) * c[1]

    c, ys = lax.scan(body, x[0], (jnp.arange(4), x), reverse=True)
    n = lax.while_loop(lambda c: c[1].sum() < 9, lambda c: (c[0] + 2, c[1] + 1.5), (jnp.int32(0), x[1] * 0))
    filled = lax.fori_loop(0, 5, lambda k, b: lax.dynamic_update_slice(b, b[k % 4][None] * k, (k, 0)), x)
    return c, ys, lax.stop_gradient(n), filled


def numbers(x):
    k = jnp.arange(-3, 4)
    whole = k // 2, lax.div(k, 2), lax.rem(k, jnp.int64(-2)), ~k, k & 5, k**2, k.astype(jnp.int8) * jnp.int8(100)
    y = jnp.where(x > 0, jnp.exp(x), x**-2) / jnp.tanh(x), x @ x.T, jnp.einsum("ij,ik->ijk", x, x), jnp.sign(x)
    return whole, y, jnp.maximum(x, 0), jnp.isfinite(x / 0), x.astype(jnp.float32), jax.nn.logsumexp(x, 0), x.max()


def derivatives(f):
    def sines(x):
        leaves = [jnp.sin(y.astype(float)).sum() for y in jax.tree.leaves(f(x))]
        return sum(leaves) * leaves[0]

    return lambda x: (
        jax.grad(sines)(x),
        jax.grad(jax.checkpoint(sines))(x),
        jax.jvp(jax.grad(sines), (x,), (jnp.cos(x),))[1],
    )


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("f", "transform"),
    [(f, derivatives) for f in (rows, loops, numbers)]
    + [(loops, lambda f: f), (numbers, lambda f: f)]
    + [(rows, jax.vmap), (loops, jax.vmap)],
)
def test_an_oracle_in_numpy_has_the_values_of_the_compiled_one(f, transform):
    if transform is derivatives and f is loops:
        f = lambda x: loops(x)[::3]  # noqa: E731  # there is no reverse mode of while_loop
    x = np.stack([X, 2 * X, -X]) if transform is jax.vmap else X
    found, wanted = in_numpy(transform(f))(x), jit(transform(f))(x)
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        np.testing.assert_allclose(a, e, rtol=1e-6 if e.dtype == np.float32 else 1e-11, atol=1e-12)
