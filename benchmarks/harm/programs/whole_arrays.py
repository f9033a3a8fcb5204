"""Steps that compute with whole arrays beside updates of a few rows, each at three sizes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.harm.program import floats, sized

STEPS = 100


def _indices(r: np.random.Generator, *sizes: int) -> tuple[np.ndarray, ...]:
    return tuple(r.integers(n, size=STEPS).astype(np.int32) for n in sizes)


@sized((60, 600, 6000), lambda r, n: (floats(r, n), *_indices(r, n, n), floats(r, STEPS)))
def decayed(rates, first, second, values):
    """Two elements are changed, and then all decay."""

    def step(rates, x):
        i, j, value = x
        return 0.99 * rates.at[i].set(value).at[j].add(value), rates[i]

    return lax.scan(step, rates, (first, second, values))


@sized((60, 600, 6000), lambda r, n: (floats(r, n), *_indices(r, n), floats(r, STEPS)))
def traces_and_weights(weights, places, rewards):
    """Traces decay, one is set, and all weights move along them."""

    def step(carry, x):
        weights, traces = carry
        i, reward = x
        traces = (0.95 * traces).at[i].set(1)
        weights = weights + 0.01 * reward * traces
        return (weights, traces), weights[i]

    return lax.scan(step, (weights, jnp.zeros_like(weights)), (places, rewards))


@sized((60, 600, 60000), lambda r, n: (floats(r, n), *_indices(r, n), floats(r, STEPS)))
def discounted(values, places, factors):
    """All values are discounted, and one is multiplied: XLA must not discount again to read it."""

    def step(values, x):
        i, factor = x
        values = (0.99 * values).at[i].multiply(factor)
        return values, values[0]

    return lax.scan(step, values, (places, factors))


@sized((10, 100, 10000), lambda r, n: (floats(r, n, 8), *_indices(r, n), floats(r, STEPS, 8)))
def rectified(state, places, rows):
    """All units are rectified by a function with a derivative of its own, and one row is scaled."""

    def step(state, x):
        i, row = x
        return jax.nn.relu(state + 0.01).at[i].multiply(row), None

    return lax.scan(step, state, (places, rows))[0]


@sized((60, 600, 6000), lambda r, n: (floats(r, n), *_indices(r, n), floats(r, STEPS)))
def one_and_a_half(state, places, values):
    """The next state is half of the last one and one element."""

    def step(state, x):
        i, value = x
        return jnp.zeros_like(state).at[i].set(value) + 0.5 * state, state[0]

    return lax.scan(step, state, (places, values))


@sized((60, 600, 6000), lambda r, n: (floats(r, n), *_indices(r, n), floats(r, STEPS)))
def summed(state, places, values):
    """An element is added to, and the sum of all states goes on beside it."""

    def step(carry, x):
        state, total = carry
        i, value = x
        state = state.at[i].add(value)
        return (state, total + state), total[i]

    return lax.scan(step, (state, jnp.zeros_like(state)), (places, values))


@sized((10, 100, 1000), lambda r, n: (floats(r, n, 8), floats(r, STEPS, 8), *_indices(r, n)))
def gradient_steps(weights, xs, places):
    """A training loop: each step differentiates the loss of one row of the weights."""

    def step(weights, x):
        x, i = x
        loss, slope = jax.value_and_grad(lambda w: (w[i] @ x - 1) ** 2 + 0.01 * jnp.sum(w[i] ** 2))(weights)
        return weights - 0.1 * slope, loss

    return lax.scan(step, weights, (xs, places))


@sized((8, 32, 128), lambda r, n: (floats(r, n, n, scale=0.1),))
def swept(matrix):
    """The sweep operator of regression, for each pivot: a product of two vectors, a row, a column and an element."""

    def sweep(matrix, k):
        pivot = matrix[k, k] + 3
        row, column = matrix[k] / pivot, matrix[:, k]
        matrix = (matrix - jnp.outer(column, row)).at[k].set(row).at[:, k].set(-column / pivot)
        return 0.5 * matrix.at[k, k].set(1 / pivot), pivot

    return lax.scan(sweep, matrix, jnp.arange(len(matrix)))


@sized((10, 100, 1000), lambda r, n: (floats(r, n, 16), *_indices(r, n), floats(r, STEPS)))
def column_and_row(table, places, values):
    """A step adds to a column, and reads a row."""

    def step(table, x):
        i, value = x
        table = table.at[:, 2].add(0.01 * value)
        return table, jnp.sum(table[i])

    return lax.scan(step, table, (places, values))


def _laplacian(u: Any) -> Any:
    return sum(jnp.roll(u, by, axis) for axis in (0, 1) for by in (1, -1)) - 4 * u


@sized((8, 32, 128), lambda r, n: (floats(r, n, n),))
def diffusion(u):
    """A periodic field in two dimensions."""
    return lax.scan(lambda u, _: (u + 0.1 * _laplacian(u), None), u, length=STEPS)[0]


@sized((8, 32, 128), lambda r, n: (floats(r, n, n), *_indices(r, n, n), floats(r, STEPS)))
def driven_diffusion(u, rows, columns, values):
    """The same with a source, and two sides that are kept at 0."""

    def step(u, x):
        i, j, value = x
        u = (u + 0.1 * _laplacian(u)).at[i, j].add(value).at[0].set(0).at[:, -1].set(0)
        return u, u[i, j]

    return lax.scan(step, u, (rows, columns, values))


@sized((60, 600, 6000), lambda r, n: (floats(r, n), floats(r, STEPS)))
def string_with_ends(u, values):
    """A string that relaxes. One end is moved, the other is kept at 0."""

    def step(u, value):
        u = u.at[1:-1].set(0.5 * (u[2:] + u[:-2])).at[0].set(value).at[-1].set(0)
        return u, u[len(u) // 2]

    return lax.scan(step, u, values)


@sized((60, 600, 6000), lambda r, n: (floats(r, n), r.integers(50, STEPS, ()).astype(np.int32)), by=None)
def until_it_is_full(state, steps):
    """A step writes two elements, and all decay. Examples end by themselves."""

    def step(carry):
        k, state = carry
        value = state[3 * k % len(state)] + 1
        return k + 1, 0.99 * state.at[k % len(state)].set(value).at[7 * k % len(state)].set(-value)

    return lax.while_loop(lambda carry: carry[0] < steps, step, (0, state))[1]
