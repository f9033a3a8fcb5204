"""Loops that carry a TensorArray, forward and gradient, update its rows in place and take linear time.

Reads and writes of an array of a fixed size are row ops: `support/row_programs.py` has those in loops and branches.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_place import assert_in_place, assert_no_whole_buffer_copy, compiled
from jax import lax

from jax_tensorarray import TensorArray

ROW = 16
LENGTH = 2000

#: name -> function of `xs` of shape [T, ROW] that gives a scalar.
PROGRAMS = {}


def program(f):
    PROGRAMS[f.__name__] = f
    return f


def rows(length, row=ROW):
    """Rows of both signs, so that both branches of a cond are taken."""
    return jnp.asarray(np.random.default_rng(0).standard_normal((length, row)) * 0.5, jnp.float32)


def empty(xs):
    return TensorArray(xs.dtype, size=len(xs), element_shape=xs.shape[1:])


def growing(xs, size=0, extra=0):
    return TensorArray(xs.dtype, size=size, dynamic_size=True, max_size=len(xs) + extra, element_shape=xs.shape[1:])


def over_steps(body, carry, xs):
    """The carry after `body(carry, i, xs[i])` for every row."""
    return lax.scan(lambda c, ix: (body(c, *ix), None), carry, (jnp.arange(len(xs)), xs))[0]


def total(ta):
    return jnp.sum(ta.stack(pad=True) ** 2)


# --- fixed size ------------------------------------------------------------------------------------------------


@program
def reads_past_the_end(xs):
    def body(ta, i, x):
        return ta.write(i, jnp.sin(x) + ta.read(i - 1, mode="drop") + ta.read(i // 2, where=x[0] > 0))

    return total(over_steps(body, TensorArray.from_array(xs), xs))


@program
def masked_gather_and_scatter(xs):
    def body(ta, i, x):
        seen = ta.gather(i + jnp.arange(-2, 2), where=x[:4] > 0, mode="drop")
        return ta.scatter(i * 5 % len(xs) + jnp.arange(4), jnp.tanh(seen) + x, where=x[4:8] > 0, mode="drop")

    return total(over_steps(body, TensorArray.from_array(xs), xs))


@program
def dict_of_arrays(xs):
    def body(tas, i, x):
        from_h, from_c = tas["h"].read(i // 2), tas["c"].read(i // 2)
        return {"h": tas["h"].write(i, jnp.tanh(from_c + x)), "c": tas["c"].append(jnp.sin(from_h) * x)}

    tas = over_steps(body, {"h": empty(xs), "c": growing(xs, 1, 1)}, xs)
    return total(tas["h"]) + total(tas["c"])


@program
def pytree_rows(xs):
    row = {"h": xs[0], "c": (xs[0], jnp.float32(0))}

    def body(ta, i, x):
        old = ta.read(i // 2)
        new = jnp.tanh(old["h"] + x)
        return ta.write(i, {"h": new, "c": (jnp.sin(old["c"][0]) * x, jnp.sum(new) + old["c"][1] * 0.5)})

    found = over_steps(body, TensorArray.like(row, len(xs)), xs).stack()
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(found))


# --- dynamic size ----------------------------------------------------------------------------------------------


@program
def append_where(xs):
    return total(over_steps(lambda ta, i, x: ta.append(jnp.sin(x), where=x[0] > 0), growing(xs), xs))


@program
def write_with_gaps(xs):
    return total(over_steps(lambda ta, i, x: ta.write(2 * i, jnp.sin(x)), growing(xs, extra=len(xs)), xs))


@program
def read_with_a_traced_size(xs):
    def body(ta, i, x):
        return ta.append(jnp.sin(x + ta.read(i // 2) + ta.read(ta.size() - 1)))

    return total(over_steps(body, growing(xs, 1, 1), xs))


@program
def stack_machine(xs):
    def body(ta, i, x):
        ta, row = ta.pop()
        return ta.append(jnp.sin(row)).append(x + row)

    return total(over_steps(body, growing(xs, 1, 2), xs))


@program
def masked_stack_machine(xs):
    def body(ta, i, x):
        ta, row = ta.pop(where=x[0] > 0)
        ta, none = ta.pop(where=x[1] > 0, mode="drop")
        return ta.append(jnp.sin(row), where=x[0] > 0).append(none + x + ta.read(i // 2, mode="drop"), mode="drop")

    return total(over_steps(body, growing(xs, 1, 2), xs))


# --- the proofs ------------------------------------------------------------------------------------------------


def with_gradient(f):
    """Both loops, of `f` and of its gradient, in one program."""
    return lambda xs: (f(xs), jax.grad(f)(xs))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_loop_and_its_gradient_have_no_copy(name):
    assert_no_whole_buffer_copy(compiled(with_gradient(PROGRAMS[name]), rows(LENGTH)), rows(LENGTH))


def test_rows_are_cleared_in_place_in_time_that_grows_linearly():
    """How many rows a kernel clears is not in the HLO."""
    assert_in_place(jax.grad(PROGRAMS["write_with_gaps"]), lambda length: (rows(length),), LENGTH)


def forward_over_reverse(f):
    return lambda x: jax.jvp(jax.grad(f), (x,), (jnp.cos(x),))[1]


def test_second_order_has_no_copy():
    f = forward_over_reverse(PROGRAMS["stack_machine"])
    assert_no_whole_buffer_copy(compiled(f, rows(LENGTH)), rows(LENGTH))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ["dict_of_arrays", "append_where", "write_with_gaps", "stack_machine"])
def test_vmapped_loop_and_its_gradient_have_no_copy(name):
    batch = jnp.stack([rows(LENGTH)] * 3)
    assert_no_whole_buffer_copy(compiled(jax.vmap(with_gradient(PROGRAMS[name])), batch), rows(LENGTH))


# --- while_loop: forward only ----------------------------------------------------------------------------------


def while_loop_of_a_fixed_array(xs):
    source = TensorArray.from_array(xs)

    def body(c):
        i, ta = c
        return i + 1, ta.write(i, jnp.tanh(ta.read(i // 2) + source.read(i)))

    limit = jnp.where(xs[0, 0] > 1e9, 1, len(xs))
    return lax.while_loop(lambda c: c[0] < limit, body, (0, empty(xs)))[1].stack()


def while_loop_until_there_are_enough_rows(xs):
    source = TensorArray.from_array(xs)
    limit = jnp.where(xs[0, 0] > 1e9, 1, len(xs))

    def body(ta):
        return ta.append(jnp.sin(source.read(ta.size())))

    return lax.while_loop(lambda ta: ta.size() < limit, body, growing(xs)).stack(pad=True)


@pytest.mark.parametrize("f", [while_loop_of_a_fixed_array, while_loop_until_there_are_enough_rows])
def test_while_loop_is_in_place(f):
    program = compiled(lambda x: (f(x), jax.jvp(f, (x,), (jnp.cos(x),))), rows(LENGTH))
    assert_no_whole_buffer_copy(program, rows(LENGTH))


def test_the_proof_fails_for_a_choice_between_whole_arrays():
    def loss(xs):
        def body(ta, i, x):
            return jax.tree.map(lambda a, b: jnp.where(x[0] > 0, a, b), ta.write(i, x), ta)

        return total(over_steps(body, empty(xs), xs))

    with pytest.raises(AssertionError, match="whole buffer"):
        assert_no_whole_buffer_copy(compiled(jax.grad(loss), rows(LENGTH)), rows(LENGTH))
