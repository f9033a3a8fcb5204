"""A factor that a loop solves with is stored by columns, so that no step copies it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy.linalg import solve_triangular

from jax_tensorarray import in_place
from jax_tensorarray.inspect import loop_copies, passes

N = 96


def factor(scale, *, reads_row=False):
    """The Cholesky factor of a kernel matrix, a row in each step."""
    x = jnp.sin(jnp.arange(N) * 0.7)

    def step(low, i):
        k = jnp.exp(-((x - x[i]) ** 2) / scale) * (jnp.arange(N) < i)
        row = solve_triangular(low, k, lower=True)
        if reads_row:
            row = row + 0 * low[i // 2]
        return low.at[i].set(row.at[i].set(jnp.sqrt(1.1 - row @ row))), None

    return lax.scan(step, jnp.eye(N), jnp.arange(N))[0]


def expected(scale):
    x = np.sin(np.arange(N) * 0.7)
    return np.linalg.cholesky(np.exp(-((x[:, None] - x) ** 2) / scale) + 0.1 * np.eye(N))


@pytest.mark.parametrize("is_batch", [False, True])
def test_a_growing_factor_is_not_copied(is_batch):
    f = jax.vmap(in_place(factor)) if is_batch else in_place(factor)
    scale = jnp.array([0.5, 0.9]) if is_batch else jnp.array(0.5)
    assert not loop_copies(f, scale, min_bytes=N * N * 8)
    found = np.asarray(jax.jit(f)(scale)).reshape(-1, N, N)
    for low, each in zip(found, np.atleast_1d(scale), strict=True):
        np.testing.assert_allclose(low, expected(each), atol=1e-9)


def test_a_factor_of_which_rows_are_read_stays_by_rows():
    f = in_place(lambda scale: factor(scale, reads_row=True))
    assert "layout_constraint" not in str(passes(f, jnp.array(0.5), platform="cpu")["columns"])
    np.testing.assert_allclose(jax.jit(f)(jnp.array(0.5)), expected(0.5), atol=1e-9)


def test_the_gradient_of_a_growing_factor():
    f = jax.jit(lambda s: jnp.sum(jnp.sin(in_place(factor)(s))))
    slope = (np.sin(expected(0.5 + 1e-6)).sum() - np.sin(expected(0.5 - 1e-6)).sum()) / 2e-6
    np.testing.assert_allclose(jax.grad(f)(jnp.array(0.5)), slope, rtol=1e-5)
