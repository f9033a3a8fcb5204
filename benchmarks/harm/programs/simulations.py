"""Simulations and samplers that keep what they have been through."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.harm.program import floats, normal, program, whole


@program(lambda r: (whole(r, 2, 48, 48),), by=None)
def life(board, steps=60):
    """The game of life, every board of it."""

    def body(i, history):
        now = history[i]
        around = sum(jnp.roll(now, (a, b), (0, 1)) for a in (-1, 0, 1) for b in (-1, 0, 1)) - now
        return history.at[i + 1].set(((around == 3) | ((around == 2) & (now == 1))).astype(now.dtype))

    return lax.fori_loop(0, steps, body, jnp.zeros((steps + 1, *board.shape), board.dtype).at[0].set(board))


@program(lambda r: (whole(r, 2, 256),), by=None)
def rule_110(cells, steps=300):
    """An automaton in one dimension, by a table of its rule."""
    rule = jnp.array([0, 1, 1, 1, 0, 1, 1, 0])

    def body(i, rows):
        row = rows[i]
        return rows.at[i + 1].set(rule[4 * jnp.roll(row, 1) + 2 * row + jnp.roll(row, -1)])

    return lax.fori_loop(0, steps, body, jnp.zeros((steps + 1, cells.size), cells.dtype).at[0].set(cells))


@program(lambda r: (floats(r, 16, 3), floats(r, 16, 3, scale=0.1)))
def n_body(x, v, steps=200, dt=0.01):
    """Bodies that attract each other softly, with their paths."""

    def body(i, c):
        path, v = c
        x = path[i]
        apart = x[None] - x[:, None]
        v = v + dt * jnp.sum(apart / (jnp.sum(apart**2, -1, keepdims=True) + 0.5) ** 1.5, 1)
        return path.at[i + 1].set(x + dt * v), v

    return lax.fori_loop(0, steps, body, (jnp.zeros((steps + 1, *x.shape)).at[0].set(x), v))


@program(lambda r: (floats(r, 4), floats(r, 3000, 4, scale=0.1)))
def random_walk(x, moves):
    def body(i, path):
        return path.at[i + 1].set(0.99 * path[i] + moves[i])

    return lax.fori_loop(0, len(moves), body, jnp.zeros((len(moves) + 1, x.size)).at[0].set(x))


@program(lambda r: (floats(r, 8, scale=0.5), floats(r, 1000, 8), r.random(1000, np.float32)))
def metropolis(x, moves, numbers):
    """A chain that moves or stays, with all its states."""

    def energy(x):
        return jnp.sum(x**4 - x**2)

    def body(i, chain):
        now = chain[i]
        new = now + 0.3 * moves[i]
        ok = numbers[i] < jnp.exp(energy(now) - energy(new))
        return chain.at[i + 1].set(jnp.where(ok, new, now))

    return lax.fori_loop(0, len(moves), body, jnp.zeros((len(moves) + 1, x.size)).at[0].set(x))


@program(lambda r: (floats(r, 8, scale=0.5), floats(r, 1000, 8), r.random(1000, np.float32)))
def metropolis_kept(x, moves, numbers):
    """Only what is accepted is written, after what is there."""

    def step(c, m):
        kept, n, now = c
        new = now + 0.3 * m[0]
        ok = m[1] < jnp.exp(jnp.sum(now**2 - new**2))
        kept, n = lax.cond(ok, lambda: (kept.at[n].set(new), n + 1), lambda: (kept, n))
        return (kept, n, jnp.where(ok, new, now)), None

    return lax.scan(step, (jnp.zeros((len(moves), x.size)), 0, x), (moves, numbers))[0][0]


@program(lambda r: (floats(r, 64), floats(r, 100, 64), r.random(100, np.float32)))
def particle_filter(particles, noise, observed):
    """All particles are drawn anew in every step, with their histories."""

    def body(i, c):
        now, history = c
        now = 0.9 * now + noise[i]
        w = jnp.cumsum(jax.nn.softmax(-((now - observed[i]) ** 2)))
        ancestors = jnp.clip(jnp.searchsorted(w, (jnp.arange(64) + 0.5) / 64), 0, 63)
        return now[ancestors], history[:, ancestors].at[i].set(now[ancestors])

    return lax.fori_loop(0, len(noise), body, (particles, jnp.zeros((len(noise), 64))))


@program(lambda r: (floats(r, 4000, 4), whole(r, 2**30, 4000)))
def reservoir(xs, numbers, k=32):
    """A fair sample of a stream: a newcomer takes the place of one that is drawn, or of none."""

    def body(i, kept):
        j = jnp.where(i < k, i, numbers[i] % (i + 1))
        return lax.cond(j < k, lambda kept: kept.at[j].set(xs[i]), lambda kept: kept, kept)

    return lax.fori_loop(0, len(xs), body, jnp.zeros((k, xs.shape[1])))


@program(lambda r: (floats(r, 300, 2), floats(r, 8, 2)))
def k_means(xs, centres, steps=30):
    def body(i, history):
        now = history[i]
        of = jnp.argmin(jnp.sum((xs[:, None] - now[None]) ** 2, -1), 1)
        total = jnp.zeros_like(now).at[of].add(xs)
        count = jnp.zeros(len(now)).at[of].add(1.0)
        return history.at[i + 1].set(jnp.where(count[:, None] > 0, total / jnp.maximum(count, 1.0)[:, None], now))

    return lax.fori_loop(0, steps, body, jnp.zeros((steps + 1, *centres.shape)).at[0].set(centres))


@program(lambda r: (floats(r, 64, 64, scale=0.3),))
def heat(u, steps=50):
    """A field in two dimensions, and its value at a place in every step."""

    def step(u, _):
        u = u.at[1:-1, 1:-1].add(0.2 * (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4 * u[1:-1, 1:-1]))
        return u, u[32, 32]

    return lax.scan(step, u, None, length=steps)


@program(lambda r: (floats(r, 200, scale=0.1),))
def wave(u, steps=200):
    """Three levels in time, in a table of all of them."""

    def body(t, us):
        bend = jnp.roll(us[t], 1) - 2 * us[t] + jnp.roll(us[t], -1)
        return us.at[t + 1].set(2 * us[t] - us[t - 1] + 0.2 * bend)

    return lax.fori_loop(1, steps, body, jnp.zeros((steps + 1, u.size)).at[0].set(u).at[1].set(u))


@program(lambda r: (whole(r, 2, 32, 32) * 2 - 1, whole(r, 32, 4000, 2), r.random(4000, np.float32)), by=None)
def ising(spins, places, numbers):
    """One spin of a grid at a time."""

    def step(s, x):
        (i, j), u = x
        around = s[(i + 1) % 32, j] + s[(i - 1) % 32, j] + s[i, (j + 1) % 32] + s[i, (j - 1) % 32]
        flips = u < jnp.exp(-0.8 * s[i, j] * around)
        return s.at[i, j].set(jnp.where(flips, -s[i, j], s[i, j])), None

    return lax.scan(step, spins, (places, numbers))[0]


@program(lambda r: (r.random((30, 30), np.float32), r.random((2000, 2), np.float32) * 28))
def bilinear(image, places):
    """An image is read between its pixels, and what is read is written."""

    def body(k, out):
        y, x = places[k]
        i, j = jnp.floor(y).astype(int), jnp.floor(x).astype(int)
        a, b = y - i, x - j
        up = (1 - b) * image[i, j] + b * image[i, j + 1]
        down = (1 - b) * image[i + 1, j] + b * image[i + 1, j + 1]
        return out.at[k].set((1 - a) * up + a * down)

    return lax.fori_loop(0, len(places), body, jnp.zeros(len(places)))


@program(lambda r: (floats(r, 32, 32, scale=0.3), whole(r, 28, 300, 2), floats(r, 300, 4, 4)))
def stamps(image, places, patches):
    """Patches are blended into an image, one after the other."""

    def step(image, x):
        place, patch = x
        old = lax.dynamic_slice(image, place, (4, 4))
        return lax.dynamic_update_slice(image, 0.7 * old + 0.3 * jnp.tanh(patch), place), None

    return lax.scan(step, image, (places, patches))[0]


@program(normal(2))
def runge_kutta(x, steps=2000, dt=0.01):
    """Van der Pol's oscillator, with its path."""

    def slope(x):
        return jnp.stack([x[1], (1 - x[0] ** 2) * x[1] - x[0]])

    def body(i, path):
        x = path[i]
        a = slope(x)
        b = slope(x + dt / 2 * a)
        c = slope(x + dt / 2 * b)
        return path.at[i + 1].set(x + dt / 6 * (a + 2 * b + 2 * c + slope(x + dt * c)))

    return lax.fori_loop(0, steps, body, jnp.zeros((steps + 1, 2)).at[0].set(x))


@program(lambda r: (whole(r, 20, 1)[0] + 5000,), by=None)
def queue(n):
    """Customers come and go: a ring of the times at which they came."""

    def step(c):
        ring, head, tail, t, waited = c
        comes = (t * 7919) % 5 < 3
        ring, tail = lax.cond(comes, lambda: (ring.at[tail % 64].set(t), tail + 1), lambda: (ring, tail))
        goes = ((t * 104729) % 5 < 3) & (head < tail)
        waited = waited + jnp.where(goes, t - ring[head % 64], 0)
        return ring, head + goes, tail, t + 1, waited

    start = (jnp.zeros(64, jnp.int32), 0, 0, 0, 0)
    return lax.while_loop(lambda c: (c[3] < n) & (c[2] - c[1] < 64), step, start)


@program(lambda r: (floats(r, 16, 2),))
def gradient_descent(x, steps=300):
    """With momentum, and a history of positions and losses."""

    def loss(x):
        return jnp.sum((1 - x[:, 0]) ** 2 + (x[:, 1] - x[:, 0] ** 2) ** 2)

    def body(i, c):
        xs, losses, v = c
        value, g = jax.value_and_grad(loss)(xs[i])
        v = 0.9 * v - 0.01 * jnp.clip(g, -1, 1)
        return xs.at[i + 1].set(xs[i] + v), losses.at[i].set(value), v

    return lax.fori_loop(0, steps, body, (jnp.zeros((steps + 1, *x.shape)).at[0].set(x), jnp.zeros(steps), 0 * x))[:2]


@program(lambda r: (whole(r, 6, 500), r.random(500, np.float32)), by=None)
def q_learning(actions, numbers):
    """A table of values. One entry changes in a step."""

    def step(c, x):
        q, s = c
        a, u = x
        a = jnp.where(u < 0.2, a, jnp.argmax(q[s]))
        after = (s * 3 + a + 1) % 64
        reward = jnp.where(after == 7, 1.0, 0.0)
        return (q.at[s, a].add(0.1 * (reward + 0.9 * q[after].max() - q[s, a])), after), reward

    return lax.scan(step, (jnp.zeros((64, 6)), 0), (actions, numbers))


@program(lambda r: (floats(r, 300, 8), floats(r, 300)), by=None)
def snake(numbers, food):
    """A body that follows its head over a board: a ring of places, and the board itself."""

    def step(c, x):
        board, ring, head, i = c
        head = (head + jnp.where(x[0] > 0, 1, 16)) % 256
        tail = ring[i % 8]
        board = board.at[tail].set(0).at[head].set(1)
        return (board, ring.at[i % 8].set(head), head, i + 1), board[(head + 1) % 256]

    return lax.scan(step, (jnp.zeros(256, jnp.int32), jnp.zeros(8, jnp.int32), 0, 0), numbers)


@program(lambda r: (whole(r, 40, 300, 4),), by=None)
def environments(moves):
    """Boards on which one cell changes, one after the other, so that only those that are done start again."""

    def step(states, move):
        def one(inputs):
            (board, steps), move = inputs
            board, steps = board.at[(steps * 7 + move) % board.size].add(move + 1), steps + 1
            new = lax.cond(steps >= 50 + move, lambda: (jnp.zeros_like(board), 0), lambda: (board, steps))
            return new, board[steps]

        return lax.map(one, (states, move))

    states = jnp.zeros((moves.shape[1], 5000), jnp.int32), jnp.arange(moves.shape[1])
    return lax.scan(step, states, moves)


@program(lambda r: (floats(r, 64, scale=0.1),), by=None)
def trees_with_checkpoints(x, steps=50):
    """As NUTS grows trees: each doubling begins with checkpoints of zeros, which every second leaf writes."""

    def draw(i, x):
        start = jnp.zeros((10, x.size))

        def double(tree):
            depth, x = tree

            def leaf(state):
                k, kept, x = state
                kept = lax.cond(k % 2 == 0, lambda: kept.at[k // 2].set(jnp.sin(x)), lambda: kept)
                return k + 1, kept, x + 0.1 * kept[k // 3]

            return depth + 1, lax.while_loop(lambda s: s[0] < depth, leaf, (0, start, x))[2]

        return lax.while_loop(lambda t: (t[0] < 5) & (t[1][0] < 100), double, (1, x))[1]

    return lax.fori_loop(0, steps, draw, x)
