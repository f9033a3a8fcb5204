"""Loops that read all of what they have written, in plain JAX as everybody writes them.

Under `jax.grad` JAX keeps the whole buffer for every step. Each of `PROGRAMS` takes a number of rows and returns a
function of arrays and these arrays.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def _normal(*shape, seed=0, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, jnp.result_type(float))


def arnoldi(T, n=64):
    """Each row is made orthogonal to all rows before it."""

    def f(Q):
        def step(Q, i):
            v = jnp.sin(Q[i - 1])
            return Q.at[i].set(v - 0.01 * Q.T @ (Q @ v)), None

        return jnp.sum(lax.scan(step, Q, jnp.arange(1, T))[0] ** 2)

    return f, (_normal(T, n, scale=0.1),)


def triangular_dot(T):
    """The new element is a dot product with all before it."""

    def f(L, x):
        def step(i, ys):
            return ys.at[i].set(jnp.tanh(x[i] + jnp.dot(L[i], ys)))

        return jnp.sum(lax.fori_loop(0, T, step, jnp.zeros(T)) ** 2)

    return f, (_normal(T, T, scale=T**-0.5), _normal(T, seed=1))


def triangular_dot_shared(T):
    """Likewise, of weights that all steps share."""

    def f(w, x):
        def step(i, ys):
            return ys.at[i].set(jnp.tanh(x[i] + jnp.dot(w, ys)))

        return jnp.sum(lax.fori_loop(0, T, step, jnp.zeros(T)) ** 2)

    return f, (_normal(T, scale=T**-0.5), _normal(T, seed=1))


def attention(T, heads=4, n=16, batch=2):
    """Causal attention over a cache of keys and values, of several heads and a batch of examples."""

    def f(w, x):
        def step(carry, i):
            keys, values, x = carry
            q, k, v = jnp.einsum("bhn,rhnm->rbhm", x, w)
            keys = keys.at[:, i].set(k)
            values = values.at[:, i].set(v)
            scores = jnp.einsum("bhn,bthn->bht", q, keys) / n**0.5
            weights = jax.nn.softmax(jnp.where(jnp.arange(T) <= i, scores, -jnp.inf))
            return (keys, values, jnp.tanh(jnp.einsum("bht,bthn->bhn", weights, values))), None

        cache = jnp.zeros((batch, T, heads, n))
        return jnp.sum(lax.scan(step, (cache, cache, x), jnp.arange(T))[0][2] ** 2)

    return f, (_normal(3, heads, n, n, scale=0.5), _normal(batch, heads, n, seed=1))


def halves_of_rows(T, n=32):
    """Attention over keys and values in the columns of one buffer."""

    def f(w, x):
        def step(carry, i):
            rows, h = carry
            rows = rows.at[i].set(jnp.concatenate([jnp.tanh(w @ h), jnp.sin(h)]))
            scores = jnp.where(jnp.arange(T) <= i, rows[:, :n] @ h, -jnp.inf)
            return (rows, jnp.tanh(jax.nn.softmax(scores) @ rows[:, n:]) + x), None

        return jnp.sum(lax.scan(step, (jnp.zeros((T, 2 * n)), x), jnp.arange(T))[0][1] ** 2)

    return f, (_normal(n, n, scale=0.1), _normal(n, seed=1))


def in_a_branch(T, n=64):
    """A row is only written if a condition holds."""

    def f(Q):
        def step(Q, i):
            def write(Q):
                v = jnp.sin(Q[i - 1])
                return Q.at[i].set(v - 0.01 * Q.T @ (Q @ v))

            return lax.cond(i % 3 > 0, write, lambda Q: Q, Q), None

        return jnp.sum(lax.scan(step, Q, jnp.arange(1, T))[0] ** 2)

    return f, (_normal(T, n, scale=0.1),)


def columns(T):
    """A factor is made column by column, each from all columns before it."""

    def f(A):
        def step(i, L):
            c = A[:, i] - L @ L[i]
            return L.at[:, i].set(c / jnp.sqrt(1.0 + c[i] ** 2))

        return jnp.sum(lax.fori_loop(0, T, step, jnp.zeros((T, T))) ** 2)

    return f, (_normal(T, T, scale=T**-0.5),)


def inner_scan(T, n=16):
    """A scan inside of the step reads all rows, one after the other."""

    def f(Q):
        def step(Q, i):
            v = jnp.sin(Q[i - 1])

            def near(total, row):
                return total + row * jnp.exp(-jnp.sum((row - v) ** 2)), None

            total, _ = lax.scan(near, jnp.zeros(n), Q)
            return Q.at[i].set(v + total / T), None

        return jnp.sum(lax.scan(step, Q, jnp.arange(1, T))[0] ** 2)

    return f, (_normal(T, n, scale=0.1),)


def gaussian_process(T, n=4):
    """Points are sampled one after the other, each given all before it."""

    def f(x, z):
        def kernel(a, b):
            return jnp.exp(-0.5 * jnp.sum((a - b) ** 2, -1))

        def step(carry, i):
            L, y = carry
            k = jnp.where(jnp.arange(T) < i, kernel(x, x[i]), 0.0)
            row = jax.scipy.linalg.solve_triangular(L, k, lower=True)
            row = row.at[i].set(jnp.sqrt(1.1 - jnp.dot(row, row)))
            return (L.at[i].set(row), y.at[i].set(jnp.dot(row, z))), None

        start = jnp.eye(T), jnp.zeros(T)
        return jnp.sum(lax.scan(step, start, jnp.arange(T))[0][1] ** 2)

    return f, (_normal(T, n), _normal(T, seed=1))


def lu(T):
    """LU without pivoting, by rows: each row is reduced by all rows before it."""

    def f(A):
        def step(U, i):
            def reduce(k, row):
                factor = jnp.where(k < i, row[k] / U[k, k], 0.0)
                return (row - factor * U[k]).at[k].set(jnp.where(k < i, factor, row[k]))

            return U.at[i].set(lax.fori_loop(0, T, reduce, U[i])), None

        return jnp.sum(jnp.log(jnp.abs(jnp.diag(lax.scan(step, A, jnp.arange(T))[0]))))

    return f, (_normal(T, T, scale=0.1) + jnp.eye(T) * T**0.5,)


def cholesky_partial(T, n=64):
    """Cholesky with pivots, a column a step, as matfree has it."""

    def f(A):
        def step(i, carry):
            L, diagonal = carry
            p = jnp.argmax(diagonal)
            c = (A[:, p] - L @ L[p]) / jnp.sqrt(diagonal[p])
            return L.at[:, i].set(c), jnp.maximum(diagonal - c**2, 1e-3)

        L, _ = lax.fori_loop(0, n, step, (jnp.zeros((T, n)), jnp.diag(A)))
        return jnp.sum(L**2 * jnp.arange(n))

    B = _normal(T, T, scale=T**-0.5)
    return f, (B @ B.T + jnp.eye(T),)


def hessenberg(T, n=32):
    """Hessenberg's factorisation with full reorthogonalisation, as matfree has it."""

    def f(A, v):
        def step(i, carry):
            Q, H, v, length = carry
            v /= length
            Q = Q.at[:, i].set(v)
            v = A @ v
            h = Q.T @ v
            v -= Q @ h
            v -= Q @ (Q.T @ v)
            length = jnp.linalg.norm(v)
            h = jnp.where(jnp.arange(n) == i + 1, length, h)
            return Q, H.at[:, i].set(h), v, length

        start = jnp.zeros((T, n)), jnp.zeros((n, n)), v, jnp.linalg.norm(v)
        Q, H, v, _ = lax.fori_loop(0, n, step, start)
        return jnp.sum(H**2 * jnp.arange(n)) + jnp.sum(Q[:, -1]) + jnp.sum(v**2)

    return f, (_normal(T, T, scale=T**-0.5), _normal(T, seed=1))


PROGRAMS = {
    f.__name__: f
    for f in (
        arnoldi,
        triangular_dot,
        triangular_dot_shared,
        attention,
        halves_of_rows,
        in_a_branch,
        columns,
        inner_scan,
        gaussian_process,
        lu,
        cholesky_partial,
        hessenberg,
    )
}


def bytes_of_buffers(f, *args):
    """The bytes of what the loops carry, and of the arguments. A gradient needs at least one more of each."""
    arrays = list(args)

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("scan", "while"):
                arrays.extend(v.aval for v in eqn.outvars)
            for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "jaxpr")):
                if hasattr(inner, "jaxpr") and eqn.primitive.name not in ("scan", "while"):
                    visit(inner.jaxpr)

    visit(jax.make_jaxpr(f)(*args).jaxpr)
    return sum(x.size * x.dtype.itemsize for x in arrays)
