"""`in_place` leaves an update alone if it puts no row back. Examples may share the numbers of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalogue.rows_of_rows import LOOPS, STEPS, D, L, T, arguments, loop, put
from in_place import assert_no_whole_buffer_operation, compiled
from jax import lax
from orders import ORDERS, assert_as_in_numpy, in_turn

from jax_tensorarray import doctor, in_place

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


def proved(of, order):
    """Return the program of a loop in an order, which gives what NumPy says."""
    axes = SHARED.get(order, (0, 0, 0, 0) if "vmap" in order else None)
    args = [x if axes and axis == 0 else x[0] for x, axis in zip(arguments(2), axes or (0,) * 4, strict=True)]
    change = ORDERS.get(order, lambda f, g, by: g(jax.vmap(f, axes)))
    return assert_as_in_numpy(of.f, args, change, by=of.by)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("name", "order"),
    [(name, order) for k, order in enumerate(SHARED) for name in ("a read of the row", [*LOOPS][4 * k + 2])],
)
def test_examples_may_share_the_row(name, order):
    assert_no_whole_buffer_operation(proved(LOOPS[name], order).as_text(), 2 * T * D * 8)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("name", "order"), in_turn(OTHERS, [*ORDERS, *SHARED]))
def test_what_is_another_row_is_what_it_was(name, order):
    proved(loop(OTHERS[name]), order)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ["set", "clamped", "a read of the row"])
def test_an_index_of_64_bits_is_narrowed(name):
    """JAX narrows it before or after it counts from the end, which makes different numbers of one far out of range."""
    c, ks, ts, xs = arguments(dtype=np.int64)
    ks[:12] = [s * 2**31 * many + k for s in (1, -1) for many in (1, 2) for k in (-1, 1, -L)]
    ts[:12] = ts[:12] % T
    f = LOOPS[name].f
    program = compiled(in_place(f), c, ks, ts, xs)
    for x, y in zip(program(c, ks, ts, xs), jax.jit(f)(c, ks, ts, xs), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12)
    assert_no_whole_buffer_operation(program.as_text(), T * D * 8)


def test_explain_says_what_becomes_of_the_row():
    text = str(doctor.explain(LOOPS["set"].f)(*arguments()))
    assert "updates of the part that is put back" in text
    assert "Not rewritten: none" in text


def test_a_buffer_may_have_many_rows():
    """Sets of so many indices are not compared element by element."""

    def f(c, ks):
        return lax.scan(lambda c, k: (c.at[k].set(c[k].at[k % T].set(1.0)), c[k // 2, 3]), c, ks)

    args = jax.ShapeDtypeStruct((200_000, T, D), np.float32), jax.ShapeDtypeStruct((STEPS,), np.int32)
    assert not doctor.loop_copies(in_place(f), min_bytes=T * D * 4)(*args)
