"""A row of a buffer that is read, updated by its own rows, and put back: only these rows are touched.

The place of the row is a number of the data. It may be negative or out of range, where JAX clamps a read and leaves out
a write.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_place import assert_linear_time, assert_no_whole_buffer_operation, compiled
from jax import lax
from orders import ORDERS, assert_as_in_numpy, in_turn

from jax_tensorarray import doctor, in_place

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


CASES = {
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

#: What is another row, another version of the buffer, or used in another way.
OTHERS = {
    "the row before": lambda c, k, t, x: c.at[k].set(c[k - 1].at[t].set(x)),
    "a newer version": lambda c, k, t, x: c.at[k].set(c.at[k, t - 1].add(1.0)[k].at[t].set(x)),
    "an older version": lambda c, k, t, x: c.at[k, t - 1].add(1.0).at[k].set(c[k].at[t].set(x)),
    "used as a whole": lambda c, k, t, x: c.at[k].set(c[k].at[t].set(x)).at[0, 0].add(1e-2 * jnp.sum(c[k], 0)),
    "read after the update": lambda c, k, t, x: c.at[k].set(c[k].at[t].set(x)).at[0, 0].set(c[k][t]),
    "a row that is filled and put": lambda c, k, t, x: put(
        c, c.at[k].get(mode="fill", fill_value=0.5).at[t].set(x), jnp.where(k < 0, k + L, k)
    ),
    "transposed": lambda c, k, t, x: c.at[k].set(c[k].reshape(D, T).T.reshape(D, T).at[t % D].set(x[0]).reshape(T, D)),
    "a number of an iota": lambda c, k, t, x: c.at[jnp.arange(3)[k]].set(c[jnp.arange(3)[k]].at[t].set(x)),
    "an index of a narrow type": lambda c, k, t, x: c.at[(k % 3).astype(jnp.int8)].set(c[k % 3].at[t].set(x)),
    "an index that wraps": lambda c, k, t, x: c.at[(k * 256).astype(jnp.int8).astype(jnp.int32)].set(
        c[k * 256].at[t].set(x)
    ),
}
#: Orders in which all examples share some of the arguments, with the axes of these.
SHARED = {
    "all have the same row": (0, None, 0, 0),
    "all have the same rows of rows": (0, None, None, 0),
    "all have the same places in rows": (0, 0, None, 0),
}


def proved(step, order, dtype=np.int32):
    """Return the program of a loop in an order, which gives what NumPy says, and how many examples it has."""
    axes = SHARED.get(order, (0, 0, 0, 0) if "vmap" in order else None)
    change = ORDERS.get(order, lambda f, g, by: g(jax.vmap(f, axes)))
    return assert_as_in_numpy(loop(step), arguments(axes, dtype), change, by=(0, 3)), 2 if axes else 1


def loop(step):
    def f(c, ls, ts, xs):
        def body(c, ltx):
            k, t, x = ltx
            return step(c, k, t, jnp.tanh(x)), c[k, t]

        return lax.scan(body, c, (ls, ts, xs))

    return f


def arguments(axes=None, dtype=np.int32):
    random = np.random.default_rng(0)
    ls, ts = (random.integers(-n - 2, n + 3, (2, STEPS)).astype(dtype) for n in (L, T))
    args = random.standard_normal((2, L, T, D)), ls, ts, random.standard_normal((2, STEPS, D))
    return tuple(x if axes and axis == 0 else x[0] for x, axis in zip(args, axes or args, strict=True))


ALL = [*ORDERS, *SHARED]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("name", "order"), [*in_turn(CASES, ALL), *(("a read of the row", order) for order in ALL)])
def test_only_rows_of_the_row_are_touched(name, order):
    program, examples = proved(CASES[name], order)
    assert_no_whole_buffer_operation(program.as_text(), examples * T * D * 8)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("name", "order"), in_turn(OTHERS, ALL))
def test_what_is_another_row_is_what_it_was(name, order):
    proved(OTHERS[name], order)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ["set", "clamped", "a read of the row"])
def test_an_index_of_64_bits_is_narrowed(name):
    """JAX narrows it before or after it counts from the end, which makes different numbers of one far out of range."""
    c, ks, ts, xs = arguments(dtype=np.int64)
    ks[:12] = [s * 2**31 * many + k for s in (1, -1) for many in (1, 2) for k in (-1, 1, -L)]
    ts[:12] = ts[:12] % T
    program = compiled(in_place(loop(CASES[name])), c, ks, ts, xs)
    for x, y in zip(program(c, ks, ts, xs), jax.jit(loop(CASES[name]))(c, ks, ts, xs), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12)
    assert_no_whole_buffer_operation(program.as_text(), T * D * 8)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("order", ["forward", "grad(in_place)"])
def test_time_grows_with_the_steps(order):
    def args_of(length):
        numbers = np.arange(length, dtype=np.int32)
        return np.ones((L, length, D)), numbers % L, numbers, np.ones((length, D))

    program = jax.jit(ORDERS[order](loop(CASES["a read of the row"]), in_place, (0, 3)))
    assert_linear_time(program, program, args_of, 2000)


def test_explain_says_what_becomes_of_the_row():
    text = str(doctor.explain(loop(CASES["set"]))(*arguments()))
    assert "updates of the part that is put back" in text
    assert "Not rewritten: none" in text


def test_a_buffer_may_have_many_rows():
    """Sets of so many indices are not compared element by element."""

    def f(c, ks):
        return lax.scan(lambda c, k: (c.at[k].set(c[k].at[k % T].set(1.0)), c[k // 2, 3]), c, ks)

    args = jax.ShapeDtypeStruct((200_000, T, D), np.float32), jax.ShapeDtypeStruct((STEPS,), np.int32)
    assert not doctor.loop_copies(in_place(f), min_bytes=T * D * 4)(*args)
