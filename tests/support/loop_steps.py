"""Bodies of loops over a buffer, and batches of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tensorarray import (
    TensorArray,
    checkpoint_policies,
    fori_loop,
    ta_add,
    ta_read,
    ta_swap,
    ta_write,
    while_loop,
)

ROW = 16


#: name -> one step of a loop: a function of the step, the row of that step, and a buffer, that gives the buffer.
STEPS = {}


def step(f):
    STEPS[f.__name__] = f
    return f


@step
def write(i, x, b):
    return ta_write(b, i, jnp.sin(x))


@step
def overwrite(i, x, b):
    return ta_write(b, i // 2, jnp.sin(x * ta_read(b, i)))


@step
def read_beside_write(i, x, b):
    return ta_write(b, i, jnp.sin(x * ta_read(b, (7 * i + 3) % b.shape[0])))


@step
def swap_and_add(i, x, b):
    b, old = ta_swap(b, i, x * ta_read(b, i // 2))
    return ta_add(b, i // 3, old)


@step
def branch(i, x, b):
    return lax.cond(
        x[0] > 0, lambda b: ta_write(b, i, jnp.sin(x) * ta_read(b, i // 2)), lambda b: ta_add(b, i // 3, x), b
    )


@step
def branch_that_may_do_nothing(i, x, b):
    return lax.cond(x[0] > 0, lambda b: ta_write(b, i, jnp.sin(x) * ta_read(b, i // 2)), lambda b: b, b)


@step
def branch_of_three(i, x, b):
    branches = [lambda b: ta_write(b, i, x + ta_read(b, 0)), lambda b: ta_add(b, 0, x), lambda b: b]
    return lax.switch((i + (x[0] > 0)) % 3, branches, b)


@step
def inner_while_loop(i, x, b):
    def body(c):
        return c[0] + 1, ta_add(c[1], (i + c[0]) % b.shape[0], jnp.sin(x * ta_read(c[1], i)))

    return while_loop(lambda c: c[0] < 1 + i % 3, body, (0, b), max_steps=3)[1]


@step
def inner_fori_loop(i, x, b):
    def body(j, b):
        return ta_add(b, (i + j) % b.shape[0], jnp.sin(x * ta_read(b, i)))

    return fori_loop(0, i % 3, body, b, max_steps=3)


@step
def inner_scan(i, x, b):
    def body(b, j):
        return ta_add(b, (i + j) % b.shape[0], jnp.sin(x * ta_read(b, i))), None

    return lax.scan(body, b, jnp.arange(2))[0]


@step
def call(i, x, b):
    return jax.jit(lambda b: ta_write(b, i, jnp.sin(x) * ta_read(b, i // 2)))(b)


@step
def checkpoint(i, x, b):
    save_reads = functools.partial(jax.checkpoint, policy=checkpoint_policies.save_reads)
    return save_reads(lambda b: ta_write(b, i, jnp.sin(x) * ta_read(b, i // 2)))(b)


@step
def tensorarray(i, x, b):
    array = TensorArray.from_array(b)
    return array.write(i, jnp.sin(x) * array.read(i // 2)).stack()


@step
def branch_in_an_inner_loop(i, x, b):
    def body(c):
        j, b = c
        add = functools.partial(ta_add, index=(i + j) % b.shape[0], value=x * ta_read(b, i))
        return j + 1, lax.cond(x[0] > 0.5 * j, add, lambda b: b, b)

    return while_loop(lambda c: c[0] < 2, body, (0, b), max_steps=3)[1]


def run(name, xs, n=None, residuals="auto"):
    """The loop of some step, of as many steps as there are rows, which only the run knows."""
    n = jnp.sum(xs[:, 0] < 99) if n is None else n

    def body(c):
        i, b = c
        return i + 1, STEPS[name](i, ta_read(xs, i), b)

    b = while_loop(lambda c: c[0] < n, body, (0, 1 + xs), max_steps=len(xs), residuals=residuals)[1]
    return jnp.sum(b**2)


def rows(length, row=ROW):
    return jnp.asarray(np.random.default_rng(0).standard_normal((length, row)) * 0.5, jnp.float32)


BATCH = 3


BATCHED = {
    "vmap": lambda f, xs, ns: jax.vmap(f)(xs, ns),
    "vmap of grad": lambda f, xs, ns: jax.vmap(jax.grad(f))(xs, ns),
    "grad of vmap": lambda f, xs, ns: jax.grad(lambda xs: jnp.sum(jax.vmap(f)(xs, ns)))(xs),
}


def batch(length):
    return jnp.stack([rows(length), 2 * rows(length), rows(length)[::-1]])
