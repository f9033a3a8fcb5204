"""Linear algebra by loops."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.harm.program import floats, normal, program, whole


def _positive(n):
    def make(r):
        a = floats(r, n, n)
        return (a @ a.T / n + np.eye(n, dtype=np.float32),)

    return make


def _system(n):
    return lambda r: (floats(r, n, n, scale=0.5 / n) + np.eye(n, dtype=np.float32), floats(r, n))


@program(_system(200))
def gauss_seidel(a, b):
    """Each unknown from the newest values of the others."""

    def sweep(x, _):
        return lax.fori_loop(0, b.size, lambda i, x: x.at[i].set((b[i] - a[i] @ x + a[i, i] * x[i]) / a[i, i]), x), None

    return lax.scan(sweep, jnp.zeros_like(b), None, length=5)[0]


@program(_positive(32))
def cholesky_elements(a):
    """The factor, element by element."""
    n = len(a)

    def row(i, low):
        def element(j, low):
            s = a[i, j] - low[i] @ low[j]
            below = s / jnp.where(j < i, low[j, j], 1.0)
            new = jnp.where(i == j, jnp.sqrt(jnp.maximum(s, 1e-6)), below)
            return low.at[i, j].set(jnp.where(j <= i, new, 0.0))

        return lax.fori_loop(0, n, element, low)

    return lax.fori_loop(0, n, row, jnp.zeros_like(a))


@program(_system(100))
def jacobi(a, b, steps=50):
    """Every iterate is kept."""
    d = jnp.diag(a)

    def body(i, xs):
        return xs.at[i + 1].set((b - a @ xs[i] + d * xs[i]) / d)

    return lax.fori_loop(0, steps, body, jnp.zeros((steps + 1, b.size)))


@program(lambda r: (floats(r, 32, 32, scale=0.3),))
def over_relaxation(f, sweeps=4):
    """Poisson's equation, cell by cell, in place."""
    n = len(f)

    def sweep(u, _):
        def cell(k, u):
            i, j = k // (n - 2) + 1, k % (n - 2) + 1
            around = u[i - 1, j] + u[i + 1, j] + u[i, j - 1] + u[i, j + 1]
            return u.at[i, j].set(-0.5 * u[i, j] + 1.5 * (around - f[i, j]) / 4)

        return lax.fori_loop(0, (n - 2) ** 2, cell, u), None

    return lax.scan(sweep, jnp.zeros_like(f), None, length=sweeps)[0]


@program(lambda r: (floats(r, 3, 2000, scale=0.2),))
def thomas(bands):
    """A tridiagonal system: forwards, then backwards."""
    a, c, d = bands
    n = d.size

    def forwards(i, s):
        cs, ds = s
        m = 1 / (2 - a[i] * cs[i - 1])
        return cs.at[i].set(c[i] * m), ds.at[i].set((d[i] - a[i] * ds[i - 1]) * m)

    cs, ds = lax.fori_loop(1, n, forwards, (jnp.zeros(n).at[0].set(c[0] / 2), jnp.zeros(n).at[0].set(d[0] / 2)))

    def backwards(k, x):
        i = n - 2 - k
        return x.at[i].set(ds[i] - cs[i] * x[i + 1])

    return lax.fori_loop(0, n - 1, backwards, jnp.zeros(n).at[-1].set(ds[-1]))


@program(_system(64))
def lu_rows(a, b):
    """A factorisation, row by row, without pivots."""
    n = len(a)

    def column(k, a):
        def row(i, a):
            m = jnp.where(i > k, a[i, k] / a[k, k], 0.0)
            return a.at[i].set(jnp.where(jnp.arange(n) > k, a[i] - m * a[k], a[i]))

        return lax.fori_loop(0, n, row, a)

    return lax.fori_loop(0, n - 1, column, a)


@program(_system(64))
def gauss_pivots(a, b):
    """Elimination with rows exchanged."""
    n = len(a)

    def column(k, a):
        p = jnp.argmax(jnp.where(jnp.arange(n) >= k, jnp.abs(a[:, k]), -1))
        a = a.at[jnp.stack([k, p])].set(a[jnp.stack([p, k])])
        m = jnp.where(jnp.arange(n) > k, a[:, k] / a[k, k], 0)
        return a - m[:, None] * a[k]

    return lax.fori_loop(0, n, column, jnp.concatenate([a, b[:, None]], 1))


@program(normal(64, 64))
def gram_schmidt(a):
    """Each row is made orthogonal to those before it."""

    def row(i, q):
        v = a[i] - q.T @ (q @ a[i])
        return q.at[i].set(v / (jnp.linalg.norm(v) + 0.1))

    return lax.fori_loop(0, len(a), row, jnp.zeros_like(a))


@program(normal(48, 48))
def gram_schmidt_modified(a):
    """The same, a pair of rows at a time."""

    def row(i, q):
        def minus(j, v):
            return v - jnp.where(j < i, q[j] @ v, 0.0) * q[j]

        v = lax.fori_loop(0, len(a), minus, q[i])
        return q.at[i].set(v / (jnp.linalg.norm(v) + 0.1))

    return lax.fori_loop(0, len(a), row, a)


@program(_positive(64))
def power_iteration(a, steps=200):
    def body(i, vs):
        v = a @ vs[i]
        return vs.at[i + 1].set(v / jnp.linalg.norm(v))

    return lax.fori_loop(0, steps, body, jnp.zeros((steps + 1, len(a))).at[0].set(1.0)) @ a


@program(_positive(100))
def lanczos(a, steps=12):
    def body(i, c):
        vs, alphas, betas = c
        w = a @ vs[i] - jnp.where(i > 0, betas[i - 1], 0.0) * vs[i - 1]
        alpha = w @ vs[i]
        w = w - alpha * vs[i]
        beta = jnp.linalg.norm(w)
        return vs.at[i + 1].set(w / beta), alphas.at[i].set(alpha), betas.at[i].set(beta)

    start = jnp.zeros((steps + 1, len(a))).at[0].set(len(a) ** -0.5)
    return lax.fori_loop(0, steps, body, (start, jnp.zeros(steps), jnp.zeros(steps)))[1:]


@program(_positive(100))
def arnoldi(a, steps=40):
    """Every step computes with all vectors so far."""

    def body(i, c):
        vs, h = c
        w = a @ vs[i]
        coefficients = vs @ w
        w = w - vs.T @ coefficients
        norm = jnp.linalg.norm(w) + 0.1
        return vs.at[i + 1].set(w / norm), h.at[i].set(coefficients.at[i + 1].set(norm))

    start = jnp.zeros((steps + 1, len(a))).at[0].set(len(a) ** -0.5)
    return lax.fori_loop(0, steps, body, (start, jnp.zeros((steps, steps + 1))))[1]


@program(lambda r: (floats(r, 200, 200, scale=0.1), floats(r, 200)))
def forward_substitution(low, b):
    def body(i, x):
        return x.at[i].set((b[i] - low[i] @ x) / (1 + low[i, i] ** 2))

    return lax.fori_loop(0, b.size, body, jnp.zeros_like(b))


@program(_positive(48))
def cholesky_columns(a):
    n = len(a)

    def column(j, low):
        c = a[:, j] - low @ low[j]
        return low.at[:, j].set(jnp.where(jnp.arange(n) >= j, c / jnp.sqrt(jnp.maximum(c[j], 0.01)), 0))

    return lax.fori_loop(0, n, column, jnp.zeros_like(a))


@program(normal(48, 48))
def householder(a):
    n = len(a)

    def column(k, a):
        x = jnp.where(jnp.arange(n) >= k, a[:, k], 0)
        v = x.at[k].add(jnp.sign(x[k]) * (jnp.linalg.norm(x) + 1e-3))
        v = v / (jnp.linalg.norm(v) + 1e-3)
        return a - 2 * jnp.outer(v, v @ a)

    return lax.fori_loop(0, n - 1, column, a)


@program(normal(32, 32))
def givens(a):
    """Two rows are turned at a time."""
    n = len(a)

    def turn(k, a):
        j, i = k // n, k % n
        i = jnp.where(i > j, i, j + 1) % n
        x, y = a[j, j], a[i, j]
        r = jnp.sqrt(x * x + y * y + 0.01)
        c, s = x / r, y / r
        up, down = a[j], a[i]
        return a.at[j].set(c * up + s * down).at[i].set(c * down - s * up)

    return lax.fori_loop(0, n * n, turn, a)


@program(lambda r: (floats(r, 200, 8), floats(r, 200)))
def recursive_least_squares(xs, ys):
    def step(c, xy):
        p, w, history, i = c
        x, y = xy
        k = p @ x / (1 + x @ p @ x)
        w = w + k * (y - w @ x)
        return (p - jnp.outer(k, x @ p), w, history.at[i].set(w), i + 1), None

    n = xs.shape[1]
    return lax.scan(step, (jnp.eye(n), jnp.zeros(n), jnp.zeros_like(xs), 0), (xs, ys))[0][2]


@program(lambda r: (floats(r, 40, 40), floats(r, 40, 40)))
def matrix_product(a, b):
    """Element by element."""
    n = len(a)

    def element(k, c):
        i, j = k // n, k % n
        return c.at[i, j].set(a[i] @ b[:, j])

    return lax.fori_loop(0, n * n, element, jnp.zeros((n, n)))


@program(lambda r: (floats(r, 3000), whole(r, 500, 3000, 2), floats(r, 500)))
def sparse_product(values, places, x):
    """A sparse matrix by a vector, entry by entry."""

    def entry(k, y):
        i, j = places[k]
        return y.at[i].add(values[k] * x[j])

    return lax.fori_loop(0, values.size, entry, jnp.zeros_like(x))


@program(lambda r: (floats(r, 100), floats(r, 100)))
def polynomial_product(a, b):
    def outer(i, c):
        return lax.fori_loop(0, b.size, lambda j, c: c.at[i + j].add(a[i] * b[j]), c)

    return lax.fori_loop(0, a.size, outer, jnp.zeros(a.size + b.size - 1))


@program(normal(100), by=None)
def divided_differences(y):
    """Newton's polynomial, in place."""
    n = y.size
    x = jnp.arange(n) * 2.0

    def level(k, c):
        def place(t, c):
            i = n - 1 - t
            return c.at[i].set((c[i] - c[i - 1]) / (x[i] - x[i - k]))

        return lax.fori_loop(0, n - k, place, c)

    return lax.fori_loop(1, n, level, y)
