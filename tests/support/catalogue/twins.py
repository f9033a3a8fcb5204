"""What a loop carries in several places is carried once."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .loop import Loop

ROWS, SIZE = 100, 16
X = np.linspace(0.9, -0.7, SIZE)


def read(a, b, x, i):
    return jnp.tanh(jnp.sin(x) + a[(i - 1) % ROWS] + 0.5 * b[(i - 2) % ROWS])


def updated(i, a, b, x):
    x = read(a, b, x, i)
    new = b.at[i % ROWS].set(x)
    return new, new, x


def in_a_branch(i, a, b, x):
    x = read(a, b, x, i)

    def update():
        new = b.at[i % ROWS].set(x)
        return new, new

    return *lax.cond(x[0] > 0.2, update, lambda: (a, b)), x


def crossing_in_one_of_three(i, a, b, x):
    x = read(a, b, x, i)
    yes = lambda: (a.at[i % ROWS].set(x), b.at[i % ROWS].set(x))  # noqa: E731
    return *lax.switch(i % 3, (yes, lambda: (a, b), lambda: (b, a))), x


def in_calls(i, a, b, x):
    return jax.checkpoint(jax.jit(in_a_branch))(i, a, b, x)


def in_a_loop(i, a, b, x):
    return lax.scan(lambda s, k: (in_a_branch(i + k, *s), None), (a, b, x), jnp.arange(2))[0]


def selected(i, a, b, x):
    x = read(a, b, x, i)
    new = b.at[i % ROWS].set(x)
    return jnp.where(x[1] > 0.3, new, a), jnp.where(x[1] > 0.3, new, b), x


def in_a_fori_loop(step):
    return lambda first, x: lax.fori_loop(0, ROWS, lambda i, s: step(i, *s), (*first, x))


def loss(loop, first):
    def f(x):
        a, b, x = loop(first(), x)
        return jnp.sum(jnp.sin(a)) + jnp.sum(b**2) + jnp.sum(x)

    return f


def one():
    b = jnp.zeros((ROWS, SIZE))
    return b, b


def two_of_zeros():
    return jnp.zeros((ROWS, SIZE)), jnp.zeros((ROWS, SIZE))


STEPS = [updated, in_a_branch, crossing_in_one_of_three, in_calls, in_a_loop, selected]
PROGRAMS = {step.__name__: loss(in_a_fori_loop(step), one) for step in STEPS}
PROGRAMS["two of zeros"] = loss(in_a_fori_loop(in_a_branch), two_of_zeros)

BUFFER = jax.ShapeDtypeStruct((ROWS, SIZE), float)
ORDERS = ("forward", "grad(in_place)", "in_place(grad)", "vmap", "in_place(vmap(grad))")
LOOPS = {name: Loop(f, (X,), BUFFER, ORDERS) for name, f in PROGRAMS.items()}
