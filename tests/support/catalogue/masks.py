"""A select by a mask that is true for one row is a row op: `jnp.where((jnp.arange(T) == i)[:, None], row, b)`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .loop import EXAMPLES, Loop

T, D, STEPS = 160, 8, 40
places = jnp.arange(T)


def onto(x):
    """Repeat what is true of a row along it."""
    return jnp.expand_dims(x, -1)


def hot(i, dtype=bool):
    return jax.nn.one_hot(i, T, dtype=dtype)


#: name -> what a step makes of a buffer `[T, D]`, a number and a row
WRITES = {
    "a number of a row": lambda b, i, x: jnp.where(onto(jnp.arange(T) == i), x, b),
    "closed-over numbers": lambda b, i, x: jnp.where(onto(places == i), x, b),
    "the other way round": lambda b, i, x: jnp.where(onto(i != jnp.arange(T)), b, x),
    "one hot": lambda b, i, x: jnp.where(onto(hot(i)), x, b),
    "one hot, numbers": lambda b, i, x: jnp.where(onto(hot(i, jnp.int32)) > 0, x, b),
    "one hot, as bools": lambda b, i, x: jnp.where(onto(hot(i, jnp.float32).astype(bool)), x, b),
    "iota": lambda b, i, x: lax.select(lax.broadcasted_iota(i.dtype, (T, D), 0) == i, jnp.broadcast_to(x, (T, D)), b),
    "out of range": lambda b, i, x: jnp.where(onto(jnp.arange(T) == 9 * i - 20), x, b),
    "a small dtype": lambda b, i, x: jnp.where(onto(jnp.arange(T) == (9 * i - 20).astype(jnp.int8)), x, b),
    "two": lambda b, i, x: jnp.where(onto((places == i) | (places == i // 2 * 2)), x, b),
    "all but two": lambda b, i, x: jnp.where(onto(~((places == i) | (places == 9 * i))), b, x),
    "the same twice": lambda b, i, x: jnp.where(onto((places == i) & (places == i // 2 * 2)), x, b),
    "a condition": lambda b, i, x: jnp.where(onto((places == i) & (i % 3 > 0)), x, b),
    "or a condition": lambda b, i, x: jnp.where(onto((places != i) | (i % 3 == 0)), b, x),
    "rows of an array": lambda b, i, x: jnp.where(onto(places == i), jnp.broadcast_to(x, b.shape) * 1.0, b),
    "one after the other": lambda b, i, x: jnp.where(onto(places == i), x, jnp.where(onto(places == 9 * i), x, b)),
    "a sum": lambda b, i, x: b + jnp.where(onto(places == i), x, 0),
    "a row of the buffer": lambda b, i, x: jnp.where(onto(places == i), 0.5 * b + x, b),
    "an element": lambda b, i, x: jnp.where(onto(places == i) & (jnp.arange(D) == i % D), x, b),
}

#: name -> a row that a step makes of rows that a mask chooses
READS = {
    "a sum": lambda b, i: jnp.where(onto(places == i), b, 0).sum(0),
    "a sum of some": lambda b, i: jnp.sum(b, 0, where=onto(hot(i))),
    "a sum of larger floats": lambda b, i: jnp.where(onto(places == i), b.astype(jnp.float32), 0).sum(0),
    "a sum of elements": lambda b, i: jnp.where(onto(places == i), b, 0).sum() * jnp.ones(D),
    "a sum or none": lambda b, i: jnp.where(onto((places == i) & (i % 3 > 0)), b, 0).sum(0),
    "a sum of none": lambda b, i: b[i] + jnp.where(onto(places == i - T), b, 0).sum(0),
}

#: name -> a row of an array of integers: what is multiplied by 0 is 0, so the sum has no other row in it
PRODUCTS = {
    "a vector and a matrix": lambda c, i: hot(i, c.dtype) @ c,
    "a matrix and a vector": lambda c, i: c.T @ hot(i, c.dtype),
    "einsum": lambda c, i: jnp.einsum("td,t->d", c, hot(i, jnp.int8)),
    "a condition": lambda c, i: ((jnp.arange(T) == i) & (i % 3 > 0)).astype(c.dtype) @ c,
    "none": lambda c, i: c[i] + hot(i - T, c.dtype) @ c,
}


def filled(write, read):
    """A loop that reads a row, and writes one that is made of it."""

    def f(b, x, first):
        def step(c, x):
            b, i = c
            b = write(b, i, x + jnp.sin(read(b, i // 2)))
            return (b, i + 1), b[i // 3, 0]

        return lax.scan(step, (b, first), x)

    return f


def a_row(b, i):
    return b[i]


def multiplied(read):
    def f(c, start):
        return lax.fori_loop(1, T, lambda i, c: c.at[i].set(read(c, (i + start) // 2) * 3 % 97 + i), c)

    return f


def integers_by_a_mask(b):
    def body(i, b):
        here = onto(hot(i, b.dtype))
        return b * (1 - here) + here * (b[i - 1] * 3 + i)

    return lax.fori_loop(1, 60, body, b)


def nothing_else(b, x):
    """Whose mask comes from the data."""
    return lax.scan(
        lambda b, x: (WRITES["a number of a row"](b, x[0].astype(int), READS["a sum"](b, 3) + x), None), b, x
    )[0]


B, X = np.sin(np.arange(1.0 * T * D)).reshape(T, D), np.cos(np.arange(1.0 * STEPS * D)).reshape(STEPS, D)
#: The last example leaves the buffer: its mask is true nowhere.
FIRST = np.array([3, 7, T - 20], np.int32)
C = (7919 * np.arange(EXAMPLES * T * D, dtype=np.int32) % 101).reshape(EXAMPLES, T, D)
ORDERS = ("forward", "grad(in_place)", "vmap", "in_place(grad)", "vmap(grad)")


def _loop(write, read=a_row, rtol=1e-9):
    batch = np.stack([B, 0.5 * B, 0.2 * B]), np.stack([X, 0.5 * X, 0.2 * X]), FIRST
    return Loop(filled(write, read), (B, X, FIRST[0]), B, ORDERS, by=(0, 1), batch=batch, rtol=rtol)


LOOPS = {name: _loop(write) for name, write in WRITES.items()}
# Cotangents of larger floats are added in smaller ones.
LOOPS |= {
    f"{name} is read": _loop(WRITES["one hot"], read, 1e-5 if "floats" in name else 1e-9)
    for name, read in READS.items()
}
LOOPS |= {
    name: Loop(multiplied(read), (C[1], FIRST[0]), C[1], ("forward", "vmap", "in_place(vmap)"), batch=(C, FIRST - 3))
    for name, read in PRODUCTS.items()
}
LOOPS |= {
    "integers": Loop(integers_by_a_mask, (C[1],), C[1], ("forward",)),
    "nothing else": Loop(nothing_else, (B, np.abs(X) * (T - 1)), B, ("forward",)),
}
