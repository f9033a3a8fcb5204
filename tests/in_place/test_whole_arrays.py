"""Steps that compute with whole arrays beside updates: no more operations on these, and no fewer vectors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalogue.loop import examples
from in_place import assert_moves_no_more, compiled, fusions_that_update
from orders import ORDERS, assert_as_in_numpy

from benchmarks.harm.programs import PROGRAMS
from jax_tensorarray import _compat, in_place

FAMILY = [p for p in PROGRAMS if p.family == "whole_arrays"]
NAMES = [p.name for p in FAMILY[1::3]]  # of the second size
LOOPS = {"until_it_is_full_600"}  # a `while_loop` of JAX has no gradient
#: Where no barrier holds, XLA computes the arithmetic again for the row that an update reads, and copies its operand:
#: one whole buffer more than in plain JAX.
COPIED = () if _compat.barriers_hold("cpu") else ("traces_and_weights_600", "discounted_600", "rectified_100")


def case(name, order):
    """A function, its arguments in an order, and the size of its first argument in bytes."""
    [p] = [p for p in FAMILY if p.name == name]
    args = [x.astype(float) if x.dtype == np.float32 else x for x in p.make(np.random.default_rng(0))]
    args = examples(args) if "vmap" in order else args
    return p.f, args, args[0].nbytes


ORDERS_HERE = ["forward", "in_place(vmap)", "grad(in_place)", "in_place(grad)", "in_place(vmap(grad))"]
CASES = [(name, order) for name in NAMES for order in ORDERS_HERE if name not in LOOPS or "grad" not in order]


@pytest.mark.slow(but=16)
@pytest.mark.parametrize(("name", "order"), CASES)
def test_a_step_makes_whole_arrays_no_more_often_than_in_plain_jax(name, order):
    f, args, num_bytes = case(name, order)
    change = ORDERS[order]
    assert_as_in_numpy(f, args, order, oracle=jax.jit)
    if name not in COPIED:
        assert_moves_no_more(change(f, in_place, 0), change(f, lambda f: f, 0), args, num_bytes)


@pytest.mark.skipif(not _compat.barriers_hold("cpu"), reason="no barrier separates the two")
@pytest.mark.parametrize("order", ["vmap", "in_place(vmap)"])
@pytest.mark.parametrize("name", ["gradient_steps_100", "until_it_is_full_600"])
def test_updates_of_examples_are_in_no_fusion_with_arithmetic(name, order):
    """In plain JAX they are a scatter, which is in none."""
    f, args, _ = case(name, order)
    text = assert_as_in_numpy(f, args, order, oracle=jax.jit).as_text()
    found = fusions_that_update(text, ",".join(map(str, args[0].shape)))
    assert found and not any(found)


@pytest.mark.parametrize("order", ["grad(in_place)", "in_place(grad)"])
def test_the_gradient_of_rolled_arrays_is_the_program_of_plain_jax(order):
    def operations(g):
        program = compiled(ORDERS[order](f, g, 0), *args)
        return re.findall(r"= \S+ ([a-z\-]+)\(", program.as_text())

    f, args, _ = case("diffusion_32", order)
    assert operations(in_place) == operations(lambda f: f)


#: The shape of an array, and a function that changes a row by what is in it, given the number of the row and a value.
UPDATES = {
    "a row": ((4000, 2), lambda b, i, x: b.at[i].multiply(x)),
    "an element": ((4000, 2), lambda b, i, x: b.at[i, i % 2].multiply(x)),
    "a read before it": ((4000,), lambda b, i, x: b.at[i].set(jnp.sin(b[i]) * x)),
    "two updates": ((4000,), lambda b, i, x: b.at[i].multiply(x).at[i // 2].min(x)),
}


@pytest.mark.parametrize("lowering", ["auto", "ffi"])
@pytest.mark.parametrize("order", ["forward", "in_place(vmap)"])
@pytest.mark.parametrize("name", UPDATES)
def test_arithmetic_is_not_done_again_for_the_row_that_an_update_reads(name, order, lowering, monkeypatch):
    """XLA would copy its operand for that."""
    monkeypatch.setenv("JAX_TENSORARRAY_LOWERING", lowering)
    shape, update = UPDATES[name]

    def f(b, values):
        rows = jnp.arange(len(values)) * 37 % shape[0]
        return jax.lax.scan(lambda b, ix: (update(0.9 * b, *ix), None), b, (rows, values))[0]

    args = [np.sin(np.arange(float(np.prod(shape)))).reshape(shape), np.linspace(0.5, 1.5, 30)]
    args = examples(args) if "vmap" in order else args
    assert_as_in_numpy(f, args, order, oracle=jax.jit)
    if _compat.barriers_hold("cpu"):
        assert_moves_no_more(ORDERS[order](f, in_place, 0), ORDERS[order](f, lambda f: f, 0), args, args[0].nbytes)


@pytest.mark.parametrize("order", ["forward", "vmap", "in_place(vmap)"])
def test_what_a_checkpoint_returns_unchanged_is_not_chosen(order):
    """`vmap` chooses between the two branches: of the log they return the same."""

    def f(b, log, most):
        def body(state):
            k, b, log = state
            change = jax.checkpoint(lambda b, log: (b.at[k].set(jnp.sin(b[k // 2])), log))
            return k + 1, *jax.lax.cond(k % 3 > 0, change, lambda b, log: (b, log), b, log)

        return jax.lax.while_loop(lambda state: state[0] < most, body, (0, b, log))

    args = [np.sin(np.arange(400.0)), np.zeros(4000, np.int32), np.int32(9)]
    args = examples(args) if "vmap" in order else args
    assert_as_in_numpy(f, args, order, oracle=jax.jit)
    assert_moves_no_more(ORDERS[order](f, in_place, 0), ORDERS[order](f, lambda f: f, 0), args, args[0].nbytes)
