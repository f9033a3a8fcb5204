"""Programs of `page_programs` as functions of a number, for the programs of `random_programs`."""

import functools
import re

import hypothesis
import numpy as np
import page_numpy
import page_programs
from jax import lax

#: Effects, and errors on purpose, have oracles of their own.
EXCLUDED = re.compile(r"LOG|new_ref|random|mode='error'|callback|mixed\(|io_")


#: The sum of the sines of all results.
TOTAL = """\
outputs = [jnp.asarray(x) for x in (outputs.values() if isinstance(outputs, dict) else outputs)]
result = jnp.sin(sum(jnp.sum(jnp.sin(x)) for x in outputs if x.dtype == jnp.float64))
"""


@functools.cache
def body(number):
    """Return a program in double precision without effects, whose value is moderate."""
    for seed in range(10_000 + 100 * number, 10_100 + 100 * number):
        source = page_programs.program(seed)
        is_batched = "in_axes" in source.rpartition("\n\n")[2] or ", s):" in source
        if "jnp.float64)" in source and not is_batched and not EXCLUDED.search(source) and _is_moderate(source):
            return source
    raise AssertionError("no such program")


def _value(source):
    """Return the lines that compute one number of all results of a program whose first argument is shifted by `x`."""
    lines = source.split("\n")
    first = next(i for i, line in enumerate(lines) if line.startswith("a0 = "))
    last = next((i for i in range(first, len(lines)) if not re.match(r"\w+ = jnp\.asarray\(|$", lines[i])), len(lines))
    names = re.match(r"def f\((.*)\):", lines[0])[1]
    return "\n".join([*lines[:last], "a0 = a0 + x", f"outputs = f({names})", TOTAL])


def _is_moderate(source):
    """Return whether the program has a value that a change of the last digits of its argument does not change much."""
    try:
        here, there = (float(_in_numpy(source, x)) for x in (0.3, 0.3 + 1e-13))
    except Exception:  # an error on purpose, or an array that cannot be shifted
        return False
    return np.isfinite(here) and abs(here - there) < 1e-10


def _in_numpy(source, x):
    return np.float64(page_programs.run_fake(_value(source), x=np.float64(x)))


def in_numpy(number, x):
    """Return the value at `x`. A program that depends on the last digits there says nothing."""
    try:
        return _in_numpy(body(number), x)
    except page_numpy.Near:
        hypothesis.reject()


def in_jax(number, x):
    return page_programs.run_real(_value(body(number)), x=lax.stop_gradient(x))
