"""A factor that a loop solves with is stored by columns, so that no step copies it.

The catalogue has "a factor that grows". Here are a factor of which rows are read, and other solves and writes.
"""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax
from jax.scipy.linalg import solve_triangular

from jax_tensorarray import _gates, in_place
from jax_tensorarray.doctor import passes

N = 96


def factor(scale):
    """The Cholesky factor of a kernel matrix, a row in each step, which also reads a row of it."""
    x = jnp.sin(jnp.arange(N) * 0.7)

    def step(low, i):
        k = jnp.exp(-((x - x[i]) ** 2) / scale) * (jnp.arange(N) < i)
        row = solve_triangular(low, k, lower=True) + 0 * low[i // 2]
        return low.at[i].set(row.at[i].set(jnp.sqrt(1.1 - row @ row))), None

    return lax.scan(step, jnp.eye(N), jnp.arange(N))[0]


def expected(scale):
    x = np.sin(np.arange(N) * 0.7)
    return np.linalg.cholesky(np.exp(-((x[:, None] - x) ** 2) / scale) + 0.1 * np.eye(N))


def test_a_factor_of_which_rows_are_read_stays_by_rows():
    f = in_place(factor)
    assert "layout_constraint" not in str(passes(f, platform="cpu")(jnp.array(0.5))["columns"])
    np.testing.assert_allclose(jax.jit(f)(jnp.array(0.5)), expected(0.5), atol=1e-9)


SOLVES = {
    "lower": lambda low, k: solve_triangular(low, k, lower=True),
    "transposed": lambda low, k: solve_triangular(low, k, lower=True, trans=1),
    "upper": lambda low, k: solve_triangular(low + 0, k),
    "unit diagonal": lambda low, k: solve_triangular(low, k, lower=True, unit_diagonal=True),
    "from the right": lambda low, k: lax.linalg.triangular_solve(low, k[None], left_side=False, lower=True)[0],
    "several": lambda low, k: solve_triangular(low, jnp.stack([k, 2 * k], 1), lower=True).sum(1),
    "twice": lambda low, k: solve_triangular(low, solve_triangular(low, k, lower=True), lower=True, trans=1),
    "in a branch": lambda low, k: lax.cond(
        k[0] > 0, lambda: solve_triangular(low, k, lower=True), lambda: solve_triangular(low, k, lower=True, trans=1)
    ),
}
WRITES = {
    "a row": lambda low, i, row: low.at[i].set(row),
    "a column": lambda low, i, row: low.at[:, i].set(row),
    "an element": lambda low, i, row: low.at[i, i].set(row[i]),
    "rows": lambda low, i, row: lax.dynamic_update_slice(low, jnp.stack([row, 0.5 * row]), (i, 0)),
    "a sum": lambda low, i, row: low.at[i].add(row),
    "twice": lambda low, i, row: low.at[i].set(row).at[i - 1].set(0.5 * row),
}


@settings(max_examples=settings.default.max_examples // 2)
@given(
    solve=st.sampled_from(list(SOLVES)),
    write=st.sampled_from(list(WRITES)),
    dtype=st.sampled_from([jnp.float32, jnp.float64, jnp.complex128]),
    order=st.sampled_from(["forward", "vmap", "gradient"]),
)
def test_whatever_solves_and_writes(solve, write, dtype, order):
    """What a step computes is what it computes without a loop."""
    n = 16
    x = jnp.linspace(0.1, 1, n).astype(dtype)

    def step(i, low, x):
        row = SOLVES[solve](low, x * (1 + 0.1 * i))
        return WRITES[write](low, i, jnp.sin(0.1 * row) / n + 2 * (jnp.arange(n) == i))

    def looped(x):
        return lax.fori_loop(1, 4, lambda i, low: step(i, low, x), 2 * jnp.eye(n, dtype=dtype))

    def unrolled(x):
        low = 2 * jnp.eye(n, dtype=dtype)
        for i in range(1, 4):
            low = step(i, low, x)
        return low

    def of(f):
        if order == "gradient":
            return jax.grad(lambda x: jnp.sum(jnp.abs(f(x)) ** 2))
        return jax.vmap(f) if order == "vmap" else f

    args = jnp.stack([x, -x]) if order == "vmap" else x
    tolerance = 1e-4 if dtype == jnp.float32 else 1e-10
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_gates, "ORDERED_BYTES_OF_ALL", 0)
        found = jax.jit(of(in_place(looped)))(args)
    np.testing.assert_allclose(found, jax.jit(of(unrolled))(args), rtol=tolerance, atol=tolerance)
