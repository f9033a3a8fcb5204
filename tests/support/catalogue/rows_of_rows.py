"""A row of a buffer that is read, updated by its own rows, and put back: only these rows are touched.

The place of the row is a number of the data. It may be negative or out of range, where JAX clamps a read and leaves out
a write.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .loop import EXAMPLES, ORDERS, Loop

L, T, D, STEPS = 4, 50, 8, 30


def row(c, k):
    return lax.dynamic_index_in_dim(c, k, 0, keepdims=False)


def put(c, r, k):
    return lax.dynamic_update_index_in_dim(c, r, k, 0)


def twice(c, k, t, x):
    c = c.at[k].set(c[k].at[t].set(x))
    return c.at[t % L].set(c[t % L].at[k + 5].add(jnp.sin(x)))


def two_levels(c, k, t, x):
    return c.at[k].set(c[k].at[t].set(c[k][t].at[k + 2].set(x[0] + c[k][t - 1][3])))


#: name -> what a step makes of a buffer, of the number of a row, of that of a row in it, and of a row
STEPS_OF_ROWS = {
    "set": lambda c, k, t, x: c.at[k].set(c[k].at[t].set(x)),
    "add": lambda c, k, t, x: c.at[k].set(c[k].at[t].add(x)),
    "multiply": lambda c, k, t, x: c.at[k].set(c[k].at[t].multiply(1 + x)),
    "maximum": lambda c, k, t, x: c.at[k].set(c[k].at[t].max(x)),
    "a read of the row": lambda c, k, t, x: c.at[k].set(c[k].at[t].set(jnp.sin(c[k][t - 1]) + x)),
    "clamped": lambda c, k, t, x: put(c, lax.dynamic_update_index_in_dim(row(c, k), x, t, 0), k),
    "the inner one drops": lambda c, k, t, x: put(c, row(c, k).at[t].set(x), k),
    "the outer one drops": lambda c, k, t, x: c.at[k].set(
        lax.dynamic_update_slice(c[k], jnp.stack([x, 2 * x]), (t, jnp.int32(0)))
    ),
    "several rows": lambda c, k, t, x: c.at[k].set(c[k].at[jnp.stack([t, t + 3, t - 2])].set(x).at[t + 1].add(x)),
    "a masked update": lambda c, k, t, x: (lambda r: c.at[k].set(jnp.where(x[0] > 0, r.at[t].set(x), r)))(c[k]),
    "a masked row": lambda c, k, t, x: jnp.where(x[0] > 0, c.at[k].set(c[k].at[t].set(x)), c),
    "a branch": lambda c, k, t, x: lax.cond(x[0] > 0, lambda: c.at[k].set(c[k].at[t].set(x)), lambda: c),
    "two rows": twice,
    "a row of a row": two_levels,
    "another axis": lambda c, k, t, x: c.at[:, t].set(c[:, t].at[k].set(x)),
    "a row that is filled": lambda c, k, t, x: c.at[k].set(c.at[k].get(mode="fill", fill_value=7.0).at[t].set(x)),
    "axes of size 1": lambda c, k, t, x: lax.dynamic_update_slice(
        c,
        lax.dynamic_slice(c, (k, jnp.int32(0), jnp.int32(0)), (1, T, D)).reshape(T, D).at[t].set(x).reshape(1, T, D),
        (k, jnp.int32(0), jnp.int32(0)),
    ),
}


def over(step):
    def f(c, ls, ts, xs):
        def body(c, ltx):
            k, t, x = ltx
            return step(c, k, t, jnp.tanh(x)), c[k, t]

        return lax.scan(body, c, (ls, ts, xs))

    return f


def arguments(*examples, dtype=np.int32):
    random = np.random.default_rng(0)
    ls, ts = (random.integers(-n - 2, n + 3, (*examples, STEPS)).astype(dtype) for n in (L, T))
    return random.standard_normal((*examples, L, T, D)), ls, ts, random.standard_normal((*examples, STEPS, D))


def loop(step):
    row = jax.ShapeDtypeStruct((T, D), float)
    return Loop(over(step), arguments(), row, tuple(ORDERS), by=(0, 3), batch=arguments(EXAMPLES))


LOOPS = {name: loop(step) for name, step in STEPS_OF_ROWS.items()}
# A branch that is batched inside of `in_place` selects a row of all examples.
LOOPS["a branch"] = LOOPS["a branch"]._replace(whole={"in_place(vmap)": 1})
