"""Models of sequences: what they have made is a buffer, which later steps read."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.harm.program import floats, normal, program, whole


def _cell(r, steps=200, width=32):
    return floats(r, steps, width), floats(r, 2 * width, 4 * width, scale=0.1)


@program(_cell, by=1, axes=(0, None))
def lstm_outputs(xs, w):
    """An LSTM whose outputs are written into a buffer."""
    width = xs.shape[1]

    def body(i, c):
        h, cell, outputs = c
        forget, take, new, out = jnp.split(jnp.concatenate([xs[i], h]) @ w, 4)
        cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(take) * jnp.tanh(new)
        h = jax.nn.sigmoid(out) * jnp.tanh(cell)
        return h, cell, outputs.at[i].set(h)

    return lax.fori_loop(0, len(xs), body, (jnp.zeros(width), jnp.zeros(width), jnp.zeros_like(xs)))[2]


@program(lambda r: (floats(r, 500, 32), floats(r, 32, 32, scale=0.1)), by=1, axes=(0, None))
def skip_rnn(xs, w):
    """A recurrent net that sees the state of eight steps before."""

    def step(c, x):
        states, i = c
        h = jnp.tanh(x + states[(i - 1) % len(xs)] @ w + 0.5 * states[(i - 8) % len(xs)])
        return (states.at[i].set(h), i + 1), None

    return lax.scan(step, (jnp.zeros_like(xs), 0), xs)[0][0]


@program(lambda r: (floats(r, 200, 16), floats(r, 100, 16), floats(r, 100, 100, scale=0.1)), by=2, axes=(0, None, None))
def echo_state(xs, into, w):
    """A reservoir. All of its states are kept."""

    def body(i, c):
        h, states = c
        h = jnp.tanh(into @ xs[i] + w @ h)
        return h, states.at[i].set(h)

    return lax.fori_loop(0, len(xs), body, (jnp.zeros(len(w)), jnp.zeros((len(xs), len(w)))))[1]


@program(lambda r: (floats(r, 32, scale=0.3), floats(r, 3, 32, 32, scale=0.2)), by=1, axes=(0, None))
def causal_attention(x, w, length=100):
    """One head, which attends to all that it has made."""

    def step(c, i):
        x, keys, values = c
        keys, values = keys.at[i].set(x @ w[0]), values.at[i].set(x @ w[1])
        s = jnp.where(jnp.arange(length) <= i, keys @ (x @ w[2]), -1e9)
        x = jnp.tanh(x + jax.nn.softmax(s) @ values)
        return (x, keys, values), x

    empty = jnp.zeros((length, x.size))
    return lax.scan(step, (x, empty, empty), jnp.arange(length))[1]


@program(lambda r: (floats(r, 32, scale=0.3), floats(r, 32, 32, scale=0.2)), axes=(0, None))
def sliding_attention(x, w, length=200, window=16):
    """Attention to the last rows alone, which are sliced out of the cache."""

    def step(c, i):
        x, cache = c
        cache = cache.at[i].set(x)
        seen = lax.dynamic_slice_in_dim(cache, jnp.maximum(i - window + 1, 0), window)
        return (jnp.tanh(x @ w + jax.nn.softmax(seen @ x) @ seen), cache), None

    return lax.scan(step, (x, jnp.zeros((length, x.size))), jnp.arange(length))[0][1]


@program(lambda r: (floats(r, 50, 32), whole(r, 50, 400), floats(r, 32, 50, scale=0.2)), axes=(None, 0, None))
def embedding(table, tokens, out):
    """Rows of a table that is closed over, in a language model."""

    def step(h, token):
        h = jnp.tanh(0.5 * h + table[token])
        return h, jax.nn.log_softmax(h @ out)[token]

    return lax.scan(step, jnp.zeros(table.shape[1]), tokens)[1]


@program(lambda r: (floats(r, 50, 32), floats(r, 32, 50, scale=0.2)), axes=(0, None))
def generation(table, out, length=300):
    """Each token is the likeliest after the last, and written."""

    def body(i, c):
        tokens, scores, h = c
        h = jnp.tanh(0.5 * h + table[tokens[i - 1]] + i / length)
        log_p = jax.nn.log_softmax(h @ out)
        best = jnp.argmax(log_p)
        return tokens.at[i].set(best), scores.at[i].set(log_p[best]), h

    start = (jnp.zeros(length, jnp.int32), jnp.zeros(length), jnp.zeros(table.shape[1]))
    return lax.fori_loop(1, length, body, start)[:2]


@program(lambda r: (floats(r, 300, 4),), by=0)
def kalman(ys):
    """A filter that keeps means and covariances."""
    n = ys.shape[1]
    a, q, noise = 0.9 * jnp.eye(n) + 0.05, 0.1 * jnp.eye(n), jnp.eye(n)

    def body(i, c):
        means, covariances = c
        m, p = a @ means[i], a @ covariances[i] @ a.T + q
        gain = jnp.linalg.solve(p + noise, p).T
        means = means.at[i + 1].set(m + gain @ (ys[i] - m))
        return means, covariances.at[i + 1].set(p - gain @ p)

    start = (jnp.zeros((len(ys) + 1, n)), jnp.zeros((len(ys) + 1, n, n)).at[0].set(jnp.eye(n)))
    return lax.fori_loop(0, len(ys), body, start)


@program(lambda r: (floats(r, 500, 16), floats(r, 16, 16)), axes=(0, None))
def viterbi(emissions, transitions):
    """The best path: a table forwards, and backwards along its choices."""
    n = len(emissions)

    def forwards(i, c):
        scores, choices = c
        all_of = scores[i - 1][:, None] + transitions
        return scores.at[i].set(all_of.max(0) + emissions[i]), choices.at[i].set(all_of.argmax(0))

    start = (jnp.zeros_like(emissions).at[0].set(emissions[0]), jnp.zeros(emissions.shape, jnp.int32))
    scores, choices = lax.fori_loop(1, n, forwards, start)

    def backwards(k, path):
        i = n - 1 - k
        return path.at[i - 1].set(choices[i, path[i]])

    path = lax.fori_loop(0, n - 1, backwards, jnp.zeros(n, jnp.int32).at[n - 1].set(scores[-1].argmax()))
    return scores[-1].max(), path


@program(lambda r: (floats(r, 400, 16), floats(r, 16, 16)), axes=(0, None))
def forward_algorithm(emissions, transitions):
    def body(i, alphas):
        return alphas.at[i].set(jax.nn.logsumexp(alphas[i - 1][:, None] + transitions, 0) + emissions[i])

    return lax.fori_loop(1, len(emissions), body, emissions)[-1]


@program(lambda r: (floats(r, 3000), np.array([0.5, -0.3, 0.2], np.float32)), axes=(0, None))
def autoregression(noise, coefficients):
    """Each number is made of the three before it."""

    def body(i, y):
        return y.at[i].set(noise[i] + coefficients @ lax.dynamic_slice(y, (i - 3,), (3,)))

    return lax.fori_loop(3, noise.size, body, jnp.zeros_like(noise))


@program(normal(3000))
def moving_average(x, window=8):
    """A running sum with a ring of what is in it."""

    def step(c, i):
        ring, total = c
        total = total + x[i] - ring[i % window]
        return (ring.at[i % window].set(x[i]), total), total / window

    return lax.scan(step, (jnp.zeros(window), 0.0), jnp.arange(x.size))[1]


@program(normal(3000, 8))
def cumulative_sum(x):
    return lax.fori_loop(1, len(x), lambda i, s: s.at[i].set(s[i - 1] + x[i]), jnp.zeros_like(x).at[0].set(x[0]))


@program(normal(3000, 8))
def exponential_average(x, a=0.9):
    return lax.fori_loop(1, len(x), lambda i, y: y.at[i].set(a * y[i - 1] + (1 - a) * y[i]), x)


@program(lambda r: (floats(r, 1000), floats(r, 32, scale=0.2)), axes=(0, None))
def convolution(x, kernel):
    """By hand, a window at a time."""
    n = x.size - kernel.size + 1

    def body(i, y):
        return y.at[i].set(lax.dynamic_slice(x, (i,), (kernel.size,)) @ kernel)

    return lax.fori_loop(0, n, body, jnp.zeros(n))


@program(lambda r: (floats(r, 300, 64, scale=0.1),))
def residual_layers(w):
    """Layers that are rows of an array, with all activations kept."""

    def body(i, acts):
        return acts.at[i + 1].set(acts[i] + 0.1 * jnp.tanh(w[i] * acts[i] + acts[i // 2]))

    return lax.fori_loop(0, len(w), body, jnp.ones((len(w) + 1, w.shape[1])))


@program(lambda r: (floats(r, 200, 32), floats(r, 200, 32)))
def linear_attention(ks, vs):
    """The state is a matrix. All of it changes."""

    def step(c, kv):
        state, out, i = c
        k, v = kv
        state = 0.95 * state + jnp.outer(k, v)
        return (state, out.at[i].set(jnp.tanh(k @ state)), i + 1), None

    return lax.scan(step, (jnp.zeros((32, 32)), jnp.zeros_like(vs), 0), (ks, vs))[0][1]


@program(lambda r: (floats(r, 100, 16), floats(r, 64, 16, scale=0.3)), axes=(0, None))
def memory_slots(xs, memory):
    """A memory. The slot that is most alike is read and overwritten."""

    def step(memory, x):
        slot = jnp.argmax(memory @ x)
        old = memory[slot]
        return memory.at[slot].set(0.5 * old + 0.5 * x), old

    return lax.scan(step, memory, xs)


@program(lambda r: (floats(r, 100, 20), whole(r, 19, 12) + 1), by=0)
def ctc(logits, labels):
    """The probability of a word, by a table over frames."""
    log_p = jax.nn.log_softmax(logits)
    states = jnp.zeros(2 * labels.size + 1, jnp.int32).at[1::2].set(labels)
    skips = (states != 0) & (states != jnp.roll(states, 2))

    def body(t, table):
        up = table[t - 1]
        one = jnp.concatenate([jnp.array([-1e9]), up[:-1]])
        two = jnp.where(skips, jnp.concatenate([jnp.array([-1e9, -1e9]), up[:-2]]), -1e9)
        return table.at[t].set(jnp.logaddexp(jnp.logaddexp(up, one), two) + log_p[t, states])

    first = jnp.full((len(logits), states.size), -1e9).at[0, 0].set(log_p[0, 0]).at[0, 1].set(log_p[0, states[1]])
    table = lax.fori_loop(1, len(logits), body, first)
    return jnp.logaddexp(table[-1, -1], table[-1, -2])
