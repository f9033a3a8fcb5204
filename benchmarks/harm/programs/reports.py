"""Programs after public reports, each at three sizes: some lose only below or above a size."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.harm.program import floats, sized


@sized((32, 128, 512), lambda r, n: (floats(r, n, 2, 16),), by=None, rounding=256)
def half_precision_cache(xs):
    """Attention over a cache in bfloat16 whose first axis is time."""

    def step(cache, x):
        t, q = x
        cache = cache.at[t].set(q.astype(cache.dtype))
        scores = jnp.einsum("hd,thd->ht", q.astype(cache.dtype), cache).astype(jnp.float32)
        weights = jax.nn.softmax(scores).astype(cache.dtype)
        return cache, jnp.einsum("ht,thd->hd", weights, cache).astype(jnp.float32)

    return lax.scan(step, jnp.zeros(xs.shape, jnp.bfloat16), (jnp.arange(len(xs)), xs))[1]


@sized((16, 64, 256), lambda r, n: (np.eye(32, dtype=np.float32) / 3, floats(r, n, 32)), axes=(None, 0))
def layers_in_one_cache(w, xs):
    """Two layers, unrolled, write to and attend to their own slice of one cache."""

    def step(cache, x):
        t, h = x
        for layer in range(2):
            cache = cache.at[layer, t].set(jnp.tanh(h @ w))
            h = h + jax.nn.softmax(cache[layer] @ h) @ cache[layer]
        return cache, h

    return lax.scan(step, jnp.zeros((2, *xs.shape)), (jnp.arange(len(xs)), xs))[1]


@sized((2, 4, 8), lambda r, n: (floats(r, n, 16, 16, scale=0.1), floats(r, 32, 16)), axes=(None, 0))
def layers_stacked_again(w, xs):
    """A step takes a cache apart, writes and attends layer by layer, and stacks it again."""

    def step(cache, x):
        t, h = x
        layers = []
        for own, m in zip(cache, w, strict=True):
            layers.append(own.at[t].set(jnp.tanh(h @ m)))
            h = h + jax.nn.softmax(layers[-1] @ h) @ layers[-1]
        return jnp.stack(layers), h

    return lax.scan(step, jnp.zeros((len(w), *xs.shape)), (jnp.arange(len(xs)), xs))[1]


@sized((8, 24, 96), lambda r, n: (floats(r, n, 2, scale=0.1),), by=None)
def small_state(us):
    """Improve a plan by its gradient; the state of the rollout has three numbers, which are read one by one."""

    def move(x, u):
        new = x + 0.1 * jnp.stack([x[1], jnp.sin(x[0]) + u[0], u[1] - x[2]])
        return new, jnp.sum(x**2) + 0.01 * jnp.sum(u**2)

    def cost(us):
        return lax.scan(move, jnp.array([1.0, 0.0, 0.5]), us)[1].sum()

    return lax.scan(lambda us, _: (us - 0.05 * jax.grad(cost)(us), None), us, None, length=50)[0]


@sized((20, 100, 400), lambda r, n: (np.float32(0.5), floats(r, n, 24)), axes=(None, 0))
def sum_over_all_rows(q, us):
    """A step writes a row and takes the logsumexp of all rows."""

    def step(t, rows):
        return rows.at[t].set(q * jnp.tanh(jax.nn.logsumexp(rows) + us[t]))

    return lax.fori_loop(1, len(us), step, jnp.zeros(us.shape))


@sized((100, 400, 1600), lambda r, n: (floats(r, n, 24, scale=0.125),))
def emptied_register(noise):
    """A shift register that is emptied now and then."""

    def step(carry, e):
        x, context = carry
        x = 0.9 * x + 0.1 * jnp.tanh(context[-1] + context[-3]) + e
        context = jnp.concatenate([context[1:], x[None]])
        return (x, jnp.where(x[0] > 1.2, jnp.zeros_like(context), context)), x

    return lax.scan(step, (jnp.zeros(24), jnp.zeros((len(noise) // 2, 24))), noise)[1]


@sized((16, 64, 128), lambda r, n: (floats(r, 2, n, n, scale=0.1), floats(r, 100)), axes=(0, None))
def two_fields_in_one_array(fields, wavelet):
    """A wave with a source and a receiver, whose two fields lie in one array."""

    def step(b, x):
        t, w = x
        u = b[(t + 1) % 2]
        near = jnp.roll(u, 1, 0) + jnp.roll(u, -1, 0) + jnp.roll(u, 1, 1) + jnp.roll(u, -1, 1)
        new = (2 * u - b[t % 2] + 0.15 * (near - 4 * u)).at[3, 7].add(w)
        return b.at[t % 2].set(new), new[5, 5]

    return lax.scan(step, fields, (jnp.arange(len(wavelet)), wavelet))[1]


@sized((10, 40, 160), lambda r, n: (floats(r, n, 20, 20),))
def stack_of_frames(noise):
    """A history of the last four frames at each time."""

    def step(carry, x):
        stack, history = carry
        t, e = x
        stack = jnp.roll(stack, -1, 0).at[-1].set(0.9 * stack[-1] + e)
        return (stack, history.at[t].set(stack)), None

    start = jnp.zeros((4, 20, 20)), jnp.zeros((len(noise), 4, 20, 20))
    return lax.scan(step, start, (jnp.arange(len(noise)), noise))[0][1]


@sized((20, 60, 160), lambda r, n: (floats(r, n), floats(r, n)))
def two_rows_of_a_table(x, y):
    """Soft time warping that keeps two rows of its table, chosen by `i % 2`."""
    n = len(x)

    def row(i, rows):
        a, b = (i + 1) % 2, i % 2

        def cell(j, rows):
            least = -jax.nn.logsumexp(-jnp.stack([rows[a, j], rows[a, j - 1], rows[b, j - 1]]))
            return rows.at[b, j].set((x[i - 1] - y[j - 1]) ** 2 + least)

        return lax.fori_loop(1, n + 1, cell, rows)

    return lax.fori_loop(1, n + 1, row, jnp.full((2, n + 1), 1e4).at[0, 0].set(0))[n % 2, n]


@sized((60, 600, 6000), lambda r, n: (floats(r, n, 4), r.integers(4, size=60).astype(np.int32), floats(r, 60)))
def column_of_all_rows(b, columns, xs):
    """A step writes a column of a matrix. Each example has columns of its own."""

    def step(b, x):
        column, value = x
        return b.at[:, column].set(jnp.tanh(value)), b[0, column]

    return lax.scan(step, b, (columns, xs))


def decaying_sums(xs: Any, length: Any) -> Any:
    """Return a table, of which a loop makes the rows up to a length, one from the other."""

    def add(state: Any) -> Any:
        i, sums = state
        return i + 1, sums.at[i].set(0.9 * sums[i - 1] + xs[i])

    return lax.while_loop(lambda state: state[0] < length, add, (1, xs))[1]


@sized(
    (60, 600, 6000),
    lambda r, n: (floats(r, n), *(r.integers(k // 2, k, ()).astype(np.int32) for k in (n, 200))),
    by=None,
)
def sums_in_every_step(xs, length, steps):
    """A step makes the same table as every other one, by a loop, and reads a row. Examples end by themselves."""

    def step(state):
        k, total = state
        return k + 1, 0.9 * total + decaying_sums(xs, length)[k % len(xs)] * xs[k % len(xs)]

    return lax.while_loop(lambda state: state[0] < steps, step, (0, jnp.zeros(())))[1]


def _transitions(r: np.random.Generator, n: int) -> tuple[np.ndarray, ...]:
    return floats(r, n), r.integers(n, size=200).astype(np.int32), floats(r, 200)


@sized((60, 600, 6000), _transitions)
def eligibility_traces(values, states, rewards):
    """TD(lambda): all traces decay, and that of the state is raised. A step also reads rows of the one-hot vector."""

    def step(carry, x):
        values, traces = carry
        state, reward, before = x
        here = jnp.zeros(len(values)).at[state].set(1)
        traces = 0.9 * traces + here
        error = reward + 0.9 * values[state] - values[before]
        return (values + 0.1 * error * traces, traces), error + here[before]

    steps = states[1:], rewards[1:], states[:-1]
    return lax.scan(step, (values, jnp.zeros(len(values))), steps)


@sized(
    (60, 600, 6000), lambda r, n: (floats(r, n), *(r.integers(50, k, ()).astype(np.int32) for k in (60, 200))), by=None
)
def driven_at_one_place(u, place, steps):
    """An array decays, and one element of it is driven. Examples end by themselves."""

    def step(state):
        k, u = state
        force = jnp.zeros(len(u)).at[place].set(1)
        return k + 1, 0.9 * u + force

    return lax.while_loop(lambda state: state[0] < steps, step, (0, u))[1]


@sized((60, 600, 6000), lambda r, n: (floats(r, n), floats(r, 60)))
def best_so_far(x, values):
    """Keep the best state of a search. A step changes one row, and seldom improves."""

    def step(carry, x):
        state, best, score = carry
        k, value = x
        state = state.at[k].set(value)
        found = jnp.sum(state[:3]) + value
        is_better = found > score
        return (state, jnp.where(is_better, state, best), jnp.where(is_better, found, score)), found

    return lax.scan(step, (x, x, -jnp.inf), (jnp.arange(len(values)), values))


@sized((60, 600, 6000), lambda r, n: (floats(r, n), floats(r, 60)))
def normalised_weights(weights, values):
    """A step sets a weight, divides all by their sum, and reads one."""

    def step(weights, x):
        k, value = x
        weights = weights.at[k].set(value)
        weights = weights / jnp.sum(jnp.abs(weights))
        return weights, weights[k // 2]

    return lax.scan(step, weights, (jnp.arange(60), values))
