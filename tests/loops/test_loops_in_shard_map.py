"""Loops inside of `jax.shard_map`, whose types say over which axes of the mesh an array varies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_tensorarray as ta


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


@pytest.mark.parametrize("residuals", ["tape", "undo", "recompute", ta.Checkpoint(2)], ids=str)
@pytest.mark.parametrize("check", [True, False])
def test_a_bounded_loop_in_shard_map_has_examples_that_end_by_themselves(residuals, check):
    """The bound of each example varies over the mesh, and with it all that a step selects. The body has constants."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    b, n = np.random.default_rng(0).standard_normal((8, 6)), np.array([2, 3, 4, 1, 0, 5, 4, 2], np.int32)
    f = jax.vmap(jax.grad(lambda b, n: filled(b, n, residuals)))
    divided = jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=check)
    np.testing.assert_allclose(jax.jit(divided)(b, n), filled_in_numpy(b, n), rtol=1e-10)
