"""Orders of `in_place`, `jax.grad` and `jax.vmap`, and the proof that a program is right in one of them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from in_numpy import in_numpy
from in_place import compiled

from jax_tensorarray import in_place


def total(f):
    """A number that depends on all that a function returns."""
    return lambda *args: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(f(*args)))


#: What becomes of a function: `g` is `in_place`, or nothing for an oracle. It is differentiated by the arguments `by`.
ORDERS = {
    "forward": lambda f, g, by: g(f),
    "vmap": lambda f, g, by: jax.vmap(g(f)),
    "in_place(vmap)": lambda f, g, by: g(jax.vmap(f)),
    "grad(in_place)": lambda f, g, by: jax.grad(g(total(f)), by),
    "in_place(grad)": lambda f, g, by: g(jax.grad(total(f), by)),
    "vmap(grad)": lambda f, g, by: jax.vmap(jax.grad(g(total(f)), by)),
    "in_place(vmap(grad))": lambda f, g, by: g(jax.vmap(jax.grad(total(f), by))),
}


def in_turn(names, orders=ORDERS):
    """Each name with one order. Random programs have all orders."""
    return [*zip(names, itertools.cycle(orders), strict=False)]


def assert_as_in_numpy(f, args, order, *, by=0, oracle=in_numpy, rtol=1e-9, atol=1e-12):
    """A function under `in_place` in an order, or in a function like an order, gives what NumPy says.

    Return the compiled program.
    """
    change = ORDERS[order] if isinstance(order, str) else order
    program = compiled(change(f, in_place, by), *args)
    want = oracle(change(f, lambda f: f, by))(*args)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol), program(*args), want)
    return program
