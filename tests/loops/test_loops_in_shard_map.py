"""Loops inside of `jax.shard_map`, whose types say over which axes of the mesh an array varies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_tensorarray as ta

MESH = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])


def filled(b, n, residuals):
    def step(c):
        i, b = c
        return i + 1, ta.ta_write(b, i + 1, jnp.sin(ta.ta_read(b, i)))

    return jnp.sum(ta.while_loop(lambda c: c[0] < n, step, (jnp.int32(0), b), max_steps=5, residuals=residuals)[1])


def filled_in_numpy(b, n):
    """The gradient: element 0 reaches elements 0 to n."""
    x, d = np.array(b[:, 0]), np.ones(len(b))
    ct, slope = np.ones((len(b), b.shape[1])), np.ones(len(b))
    for i in range(max(n)):
        runs = n > i
        slope, x = slope * np.where(runs, np.cos(x), 1), np.where(runs, np.sin(x), x)
        d += np.where(runs, slope, 0)
        ct[runs, i + 1] = 0
    ct[:, 0] = d
    return ct


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("residuals", ["tape", "undo", "recompute", ta.residuals.Checkpoint(2)], ids=str)
@pytest.mark.parametrize("check", [True, False])
def test_a_bounded_loop_in_shard_map_has_examples_that_end_by_themselves(residuals, check):
    """The bound of each example varies over the mesh, and with it all that a step selects. The body has constants."""
    b, n = np.random.default_rng(0).standard_normal((8, 6)), np.array([2, 3, 4, 1, 0, 5, 4, 2], np.int32)
    f = jax.vmap(jax.grad(lambda b, n: filled(b, n, residuals)))
    divided = jax.shard_map(f, mesh=MESH, in_specs=P("d"), out_specs=P("d"), check_vma=check)
    np.testing.assert_allclose(jax.jit(divided)(b, n), filled_in_numpy(b, n), rtol=1e-10)


def step(x):
    return 1.5 * jnp.sin(x)


LOOPS = {
    "while_loop": lambda x, n: ta.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, step(c[1])), (0, x), max_steps=5)[
        1
    ],
    "fori_loop": lambda x, n: ta.fori_loop(0, n, lambda _, x: step(x), x, max_steps=5),
    "in_place": lambda x, n: ta.in_place(counted, max_steps=5)(x, n)[1],
}


def counted(x, n, k=0):
    return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, step(c[1])), (k, x))


def repeated(x, n):
    for _ in range(n):
        x = step(x)
    return x


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_what_all_devices_share_gets_the_sum_of_their_cotangents(loop):
    """Each device takes another number of steps from one start."""
    n, factors = np.array([1, 2, 3, 4], np.int32), np.array([1.0, 2.0, 3.0, 4.0])
    want = jax.grad(lambda x: sum(repeated(x, n) * f for n, f in zip(n, factors, strict=True)))(0.7)
    specs = {"mesh": MESH, "in_specs": (P(), P("d"), P("d")), "out_specs": P()}
    of_one = jax.shard_map(lambda x, n, f: jax.grad(lambda x: loop(x, n[0]) * f[0])(x), **specs)
    of_many = jax.shard_map(
        lambda x, n, f: jax.grad(lambda x: jnp.sum(jax.vmap(loop, (None, 0))(x, n) * f))(x), **specs
    )
    summed = jax.shard_map(lambda x, n, f: lax.psum(loop(x, n[0]) * f[0], "d"), **specs)
    for gradient in (of_one, of_many, jax.grad(summed)):
        np.testing.assert_allclose(jax.jit(gradient)(0.7, n, factors), want, rtol=1e-12)


def of_one(f):
    return lambda x, n: jax.tree.map(lambda out: out[None], f(x[0], n[0]))


@pytest.mark.parametrize("of_each", [of_one, jax.vmap])
def test_in_place_keeps_the_types_that_jax_gives_a_loop(of_each):
    """JAX types the counter as if all devices took as many steps. A scan that carries it on must fit."""

    def f(x, n):
        def around(c, _):
            k, x = counted(c[1], n, 0 * c[0])
            return (k, x), k

        (_, x), counts = lax.scan(around, (0, x), None, length=3)
        return x, counts

    n = np.array([1, 2, 3, 4], np.int32)
    for g in (f, ta.in_place(f)):
        divided = jax.shard_map(of_each(g), mesh=MESH, in_specs=(P("d"), P("d")), out_specs=P("d"))
        x, counts = jax.jit(divided)(np.full(4, 0.7), n)
        np.testing.assert_allclose(x, [repeated(0.7, 3 * k) for k in n], rtol=1e-12)
        np.testing.assert_array_equal(counts, np.repeat(n[:, None], 3, 1))
