"""Programs of the grammar of `random_programs` as functions of a number, for the programs of `page_programs`.

So each of the two grammars is tested inside of the loops, branches and transformations of the other.
"""

import functools

import jax.numpy as jnp
import numpy as np
import random_machines
from random_programs import Log, Page, examples, programs, statements

#: How many of them there are.
COUNT = 40


@functools.cache
def program(k):
    """Return the k-th program: one without effects, whose indices are in range and whose results are moderate."""
    for seed in range(1000 * k, 1000 * (k + 1)):
        for (one,) in reversed(examples(seed, programs())):
            if not any(isinstance(s, Log | Page) for s in statements(one)) and not random_machines.kinds(one) & {
                "jvp",
                "vjp",
            }:
                wanted = random_machines.expected(one)
                if not wanted.strays and np.isfinite(wanted.loss.x) and abs(wanted.loss.x) < 100:
                    return one
    raise AssertionError("no such program")


def in_numpy(k, x):
    one = program(k)
    return np.float64(random_machines.expected(one, random_machines.THETA + 0.1 * np.sin(np.float64(x))).loss.x)


def in_jax(k, x):
    one = program(k)
    theta = random_machines.THETA + 0.1 * jnp.sin(x)
    return random_machines.loss(random_machines.outputs(one, random_machines.InJax(), theta, jnp.int32(one.start)), jnp)
