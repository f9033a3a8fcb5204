"""What learns, searches or samples."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.harm.program import floats, normal, program, whole


def _replay(rows, fields):
    @program(
        lambda r: (floats(r, 8, 8, scale=0.1), whole(r, 1000, 300, rows)),
        axes=(0, None),
        name=f"replay_{rows}" + ("" if len(fields) == 1 else f"_of_{len(fields)}"),
    )
    def replay(w, places, capacity=1000):
        """A memory: one row is written, and random ones are read."""
        memory = {k: jnp.zeros((capacity, 8)) for k in fields}

        def step(c, x):
            memory, w = c
            i, at = x
            memory = {k: b.at[i % capacity].set(jnp.tanh(w.sum(0) if k == "a" else w[:, 0])) for k, b in memory.items()}
            seen = sum(b[at] for b in memory.values())
            w = w + 0.01 * seen.mean(0)[:, None]
            return (memory, w), w.sum()

        return lax.scan(step, (memory, w), (jnp.arange(len(places)), places))[1]


for rows, fields in ((1, "a"), (4, "a"), (16, "a"), (16, "abc"), (64, "a")):
    _replay(rows, fields)


@program(lambda r: (floats(r, 4, 32, scale=0.3), floats(r, 32, 2, scale=0.3), whole(r, 2**30, 500, 32)), by=None)
def dqn(first, second, numbers, capacity=500):
    """A small agent learns from a memory of transitions, by gradients in the loop."""
    params = {"first": first, "second": second}

    def q(params, state):
        return jnp.tanh(state @ params["first"]) @ params["second"]

    def loss(params, state, action, reward, after):
        target = reward + 0.9 * jnp.max(lax.stop_gradient(q(params, after)), -1)
        return jnp.mean((jnp.take_along_axis(q(params, state), action[:, None], 1)[:, 0] - target) ** 2)

    def step(c, x):
        params, memory, state, i = c
        action = jnp.where(x[0] % 10 == 0, x[1] % 2, jnp.argmax(q(params, state))).astype(jnp.int32)
        after = jnp.sin(state + jnp.array([0.1, -0.1])[action] + jnp.arange(4.0))
        new = {"state": state, "action": action, "reward": after[0], "after": after}
        memory = {k: v.at[i % capacity].set(new[k]) for k, v in memory.items()}
        at = x % jnp.maximum(jnp.minimum(i, capacity), 1)
        value, grads = jax.value_and_grad(loss)(params, *(memory[k][at] for k in new))
        params = jax.tree.map(lambda p, g: p - 0.05 * g, params, grads)
        return (params, memory, after, i + 1), value

    memory = {
        "state": jnp.zeros((capacity, 4)),
        "action": jnp.zeros(capacity, jnp.int32),
        "reward": jnp.zeros(capacity),
        "after": jnp.zeros((capacity, 4)),
    }
    return lax.scan(step, (params, memory, jnp.zeros(4), 0), numbers)[1]


@program(lambda r: (whole(r, 300, 600), whole(r, 30, 600), whole(r, 16, 600), r.random((600, 16), np.float32)), by=None)
def gibbs_topics(words, documents, topics, numbers):
    """Each word of a text is given a topic by the counts of all others."""
    n_words, n_documents, n_topics = 300, 30, 16
    by_word = jnp.zeros((n_words, n_topics)).at[words, topics].add(1.0)
    by_document = jnp.zeros((n_documents, n_topics)).at[documents, topics].add(1.0)
    total = jnp.zeros(n_topics).at[topics].add(1.0)

    def step(c, i):
        topics, by_word, by_document, total = c
        w, d, t = words[i], documents[i], topics[i]
        by_word, by_document, total = by_word.at[w, t].add(-1.0), by_document.at[d, t].add(-1.0), total.at[t].add(-1.0)
        p = (by_word[w] + 0.1) * (by_document[d] + 0.1) / (total + 0.1 * n_words)
        t = jnp.argmax(jnp.log(p) - jnp.log(-jnp.log(numbers[i] * 0.99 + 0.005)))
        by_word, by_document, total = by_word.at[w, t].add(1.0), by_document.at[d, t].add(1.0), total.at[t].add(1.0)
        return (topics.at[i].set(t.astype(topics.dtype)), by_word, by_document, total), None

    return lax.scan(step, (topics, by_word, by_document, total), jnp.arange(words.size))[0]


@program(lambda r: (floats(r, 32, 32, scale=0.2), floats(r, 32, 40, scale=0.2)), axes=(0, None))
def beam_histories(w, out, beam=8, steps=100):
    """A beam search whose histories follow their hypotheses: all are rearranged in every step."""

    def step(c, t):
        state, scores, history = c
        log_p = jax.nn.log_softmax(state @ out)
        scores, best = lax.top_k((scores[:, None] + log_p).ravel(), beam)
        parents, letter = best // log_p.shape[1], best % log_p.shape[1]
        state = jnp.tanh(state[parents] @ w + letter[:, None] / 40)
        return (state, scores - scores[0], history[parents].at[:, t].set(letter)), scores

    states = jnp.ones((beam, 32)) * jnp.arange(1, beam + 1)[:, None]
    start = (states, jnp.zeros(beam), jnp.zeros((beam, steps), jnp.int32))
    (_, _, history), scores = lax.scan(step, start, jnp.arange(steps))
    return history, scores


@program(lambda r: (floats(r, 8, 8, scale=0.3),))
def beam_states(w, beam=8, steps=100):
    """The same with states as rows of a history."""

    def step(c, t):
        history, scores = c
        state = jnp.tanh(history[:, t] @ w + jnp.arange(8.0))
        scores, parents = lax.top_k(scores + state.sum(-1), beam)
        return (history[parents].at[:, t + 1].set(state[parents]), scores - scores[0]), None

    start = jnp.zeros((beam, steps + 1, 8)).at[:, 0].set(jnp.arange(8.0)[:, None] / 8)
    return lax.scan(step, (start, jnp.zeros(beam)), jnp.arange(steps))[0][0]


@program(normal(30), by=None)
def nelder_mead(x, steps=200):
    """Nested conditionals. Each writes a row of the simplex, or all of it."""
    d = x.size

    def value(p):
        return jnp.sum((p - jnp.arange(d) / d) ** 2, -1)

    def body(c):
        i, s, v = c
        worst, best = jnp.argmax(v), jnp.argmin(v)
        mean = jnp.mean(s, 0)
        reflected = 2 * mean - s[worst]
        inside = 0.5 * (mean + s[worst])

        def put(p):
            return lambda: (s.at[worst].set(p), v.at[worst].set(value(p)))

        def shrink():
            new = s[best] + 0.5 * (s - s[best])
            return new, value(new)

        def inner():
            return lax.cond(value(inside) < v[worst], put(inside), shrink)

        def outer():
            return lax.cond(value(reflected) < v[best], put(3 * mean - 2 * s[worst]), inner)

        between = (value(reflected) >= v[best]) & (value(reflected) < v[worst])
        s, v = lax.cond(between, put(reflected), outer)
        return i + 1, s, v

    s = jnp.concatenate([x[None], x[None] + jnp.eye(d)])
    return lax.while_loop(lambda c: (c[0] < steps) & (jnp.max(c[2]) > -1), body, (0, s, value(s)))[1]


def _neighbours(k):
    @program(normal(128, 4), axes=None, by=None, name=f"nearest_{k}")
    def nearest(x, n=8000):
        """The nearest of many, one after the other, of a matrix that is computed just before."""
        points = jnp.sin(jnp.arange(4 * n).reshape(4, n))
        squares = (x**2).sum(-1)[:, None] + (points**2).sum(0)[None]
        d = -jnp.sqrt(jnp.clip(squares - 2 * x @ points, 0.0))

        def step(d, _):
            i = jnp.argmax(d, axis=1)
            v = jax.vmap(lambda row, j: row[j])(d, i)
            return jax.vmap(lambda row, j: row.at[j].set(-jnp.inf))(d, i), (v, i)

        return lax.scan(step, d, (), k)[1]


for k in (1, 4):
    _neighbours(k)


@program(normal(20000))
def largest(x):
    """The element that `argmax` finds, of something computed just before."""
    y = jnp.sin(x) * jnp.exp(-(x**2))
    return y[jnp.argmax(y)]
