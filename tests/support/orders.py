"""Orders of `in_place`, `jax.grad` and `jax.vmap`, and the proof that a program is right in one of them."""

import functools
import itertools

import jax
import numpy as np
from catalogue.loop import ORDERS, arguments, total
from in_numpy import in_numpy
from in_place import compiled

from jax_tensorarray import in_place

__all__ = ["ORDERS", "assert_as_in_numpy", "assert_right", "in_turn", "total"]


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
    found = program(*args)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol), found, want)
    assert [x.dtype for x in jax.tree.leaves(found)] == [x.dtype for x in jax.tree.leaves(want)]
    return program


def assert_right(loop, order):
    """A loop of the catalogue in an order gives what NumPy says. Return the compiled program."""
    oracle = in_numpy if loop.is_interpreted else jax.jit
    return assert_as_in_numpy(
        loop.f, arguments(loop, order), order, by=loop.by, oracle=oracle, rtol=loop.rtol, atol=loop.rtol
    )
