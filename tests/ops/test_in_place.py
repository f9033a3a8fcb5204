"""Loops that users write with lax, forward and gradient, update every buffer in place and take linear time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_numpy import in_numpy
from in_place import assert_in_place, assert_linear_time, assert_no_whole_buffer_copy, compiled
from jax import jit, lax
from row_programs import ours, plain, programs

from jax_tensorarray import fori_loop, ta_add, ta_empty, ta_max, ta_read, ta_stack, ta_swap, ta_write
from jax_tensorarray._hlo import text as hlo_text
from jax_tensorarray.checkpoint_policies import save_reads

ROW = 16  # small enough for a buffer of 8000 rows to stay in the cache of one core


def rows(length, row=ROW):
    """Buffer-sized input with rows of both signs, so that both branches of a cond are taken."""
    return jnp.asarray(np.random.default_rng(0).standard_normal((length, row)) * 0.5, jnp.float32)


def forward(f):
    return f


def forward_over_reverse(f):
    """The product of the Hessian and a vector."""
    return lambda x: jax.jvp(jax.grad(f), (x,), (jnp.cos(x),))[1]


def args_of(length):
    return (rows(length),)


#: Those that do what no other does: `write` and the like are parts of these, and of the random programs.
OF_HIGHER_ORDER = ["three_reads", "cross", "swap", "branches", "closed_over_scan", "inner_writes", "many_rows"]


@pytest.mark.slow
@pytest.mark.parametrize("name", programs)
def test_program_and_its_gradient_give_what_plain_jax_gives(name):
    x = rows(40, 6)
    found = jax.jit(jax.value_and_grad(programs[name].with_ops(ours)))(x)
    expected = in_numpy(jax.value_and_grad(programs[name].with_ops(plain)))(x)
    for a, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-4, atol=1e-5)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", OF_HIGHER_ORDER)
def test_second_order_is_in_place(name):
    assert_in_place(forward_over_reverse(programs[name].with_ops(ours)), args_of)


#: For these, that time is linear, too. That needs no reader of HLO. (HLO of all programs: tests/gpu/test_figures.py.)
TIMED = ["write", "cross", "branches"]


def gradients_at_two_lengths(ops, name):
    def args_of(length):
        return (rows(length, 64),)

    f = jax.grad(programs[name].with_ops(ops))
    return *(compiled(f, *args_of(length)) for length in (1000, 4000)), args_of


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", TIMED)
def test_four_times_the_steps_take_four_times_as_long(name):
    assert_linear_time(*gradients_at_two_lengths(ours, name), 1000)


@pytest.mark.slow
def test_the_proofs_fail_for_plain_jax():
    short, long, args_of = gradients_at_two_lengths(plain, "write")
    with pytest.raises(AssertionError, match="operations on the whole buffer"):
        assert_no_whole_buffer_copy(short, *args_of(1000))
    with pytest.raises(AssertionError, match="took"):
        assert_linear_time(short, long, args_of, 1000, attempts=1)


# --- loops that cannot be written once for every transformation ------------------------------------------------


def while_program(x):
    """Reads two earlier rows and writes a third, until a count known only at run time."""

    def body(c):
        i, b = c
        return i + 1, ta_write(b, i, jnp.tanh(ta_read(b, i // 2) + ta_read(x, i)))

    limit = jnp.where(x[0, 0] > 1e9, 1, len(x))
    return lax.while_loop(lambda c: c[0] < limit, body, (0, jnp.zeros_like(x)))[1]


def while_that_reads_in_its_condition(x):
    def body(c):
        i, b = c
        return i + 1, ta_write(b, i, jnp.sin(ta_read(x, i)))

    def running(c):
        i, b = c
        return (i < len(x)) & (ta_read(b, i, where=i < len(x))[0] < 1e9)

    return lax.while_loop(running, body, (0, jnp.zeros_like(x)))[1]


def forward_mode(f):
    return lambda x: jax.jvp(f, (x,), (jnp.cos(x),))[1]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("transform", [forward, forward_mode])
@pytest.mark.parametrize("f", [while_program, while_that_reads_in_its_condition])
def test_while_loop(f, transform):
    assert_in_place(transform(f), args_of)


def test_uninitialised_buffer_that_a_loop_fills_and_stacks():
    def f(x):
        b = lax.fori_loop(0, len(x), lambda i, b: ta_write(b, i, jnp.sin(ta_read(x, i))), ta_empty(len(x), (ROW,)))
        return jnp.sum(ta_stack(b, jnp.int32(len(x) // 2)) ** 2)

    assert_no_whole_buffer_copy(compiled(jax.grad(f), rows(2000)), rows(2000))
    x = rows(50)
    np.testing.assert_allclose(f(x), np.sum(np.sin(np.asarray(x))[:25] ** 2), rtol=1e-5)


def test_constant_buffer_that_a_loop_reads_is_not_made_anew_in_every_step():
    def f(x):
        zeros = jnp.zeros_like(x)
        return lax.scan(lambda c, i: (c + ta_read(zeros, i), None), x[0], jnp.arange(len(x)))[0]

    assert_no_whole_buffer_copy(compiled(f, rows(2000)), rows(2000))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["three_reads", "closed_over_jit", "inner_writes"])
def test_vmapped_gradient(name):
    f = jax.vmap(jax.grad(programs[name].with_ops(ours)))
    assert_in_place(f, lambda length: (jnp.stack([rows(length, 16)] * 3),), length=1000)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("branches", "transform"), [(2, jax.grad), (3, forward), (4, jax.grad)])
def test_switch_whose_branches_write_add_swap_or_read(branches, transform):
    def loss(x):
        def body(c, ix):
            (b, hand), (i, row) = c, ix
            choices = [
                lambda b, hand: (ta_write(b, i, jnp.sin(row) + hand), hand),
                lambda b, hand: (b, hand + ta_read(b, i // 2)),
                lambda b, hand: ta_swap(b, i // 3, jnp.cos(hand)),
                lambda b, hand: (ta_add(b, i // 2, hand), hand * 0.5),
            ]
            return lax.switch(i % branches, choices[:branches], b, hand), None

        b, hand = lax.scan(body, (x, x[0]), (jnp.arange(len(x)), x))[0]
        return jnp.sum(b**2) + jnp.sum(hand)

    assert_in_place(transform(loss), args_of)


@pytest.mark.parametrize("transform", [forward, jax.grad])
def test_a_conditional_in_a_branch_of_another(transform):
    """XLA 0.12 copies the buffer three times per step, in plain JAX too, if the operands are those of the branch."""

    def loss(x):
        first = x[0]

        def step(i, c):
            b, hand = c

            def inner(b):
                return lax.cond(hand[1] > 0, lambda b: ta_write(b, i, hand), lambda b: b, b)

            b = lax.cond(hand[0] > 0, inner, lambda b: ta_write(b, i, 2 * hand), b)
            return b, jnp.sin(hand + first)

        return jnp.sum(fori_loop(0, len(x), step, (x, first))[0] ** 2)

    assert_in_place(transform(loss), args_of)


saved = functools.partial(jax.checkpoint, policy=save_reads)

#: What is given one buffer in several operands, by functions of the number of the step, these operands and a row.
TAKING_ONE_TWICE = {
    "cond": lambda f: lambda i, p, q, x: lax.cond(i % 3 > 0, f, lambda i, p, q, x: x * 2, i, p, q, x),
    "switch": lambda f: lambda i, p, q, x: lax.switch(i % 2, [f, lambda i, p, q, x: f(i // 2, q, p, x)], i, p, q, x),
    "jit": jax.jit,
    "checkpoint": saved,
    "scan": lambda f: jax.jit(
        lambda i, p, q, x: lax.scan(lambda x, k: (f((i + k) // 2, p, q, x), None), x, jnp.arange(2))[0], inline=True
    ),
    "checkpoint of a cond of a jit": lambda f: saved(TAKING_ONE_TWICE["cond"](jax.jit(f))),
    "scan of a switch": lambda f: TAKING_ONE_TWICE["scan"](TAKING_ONE_TWICE["switch"](f)),
}


@pytest.mark.slow
@pytest.mark.parametrize("context", TAKING_ONE_TWICE)
def test_reads_of_one_buffer_in_several_operands_add_to_one_cotangent_in_place(context):
    def product(ops, i, p, q, x):
        return jnp.sin(ops.read(p, i // 2) * ops.read(q, i // 3) + x)

    def beside_maximum(ops, i, p, q, x):  # whose derivative, by an op that is not linear, reads the buffer too
        new = ta_read(ta_max(p, i, x), i) if ops is ours else jnp.maximum(p[i], x)
        return product(ops, i, p, q, new)

    def loss(rows, ops, x):
        def step(b, i):
            row = TAKING_ONE_TWICE[context](functools.partial(rows, ops))(i, b, b, 0.5 * ops.read(x, i))
            return ops.write(b, (7 * i) % len(x), row), None

        return jnp.sum(lax.scan(step, x, jnp.arange(len(x)))[0] ** 2)

    x = rows(12, 3).astype(jnp.float64)
    got, want = (jax.grad(functools.partial(loss, beside_maximum, ops)) for ops in (ours, plain))
    np.testing.assert_allclose(jit(got)(x), in_numpy(want)(x), rtol=1e-9, atol=1e-12)
    assert_in_place(jax.grad(functools.partial(loss, product, ours)), args_of)


def test_policy_save_reads_keeps_rows_and_not_buffers():
    loss = programs["checkpointed"].with_ops(ours)
    x = rows(100, 4)
    jaxpr = jax.make_jaxpr(jax.grad(loss))(x)
    scans = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "scan"]
    shapes = {v.aval.shape for eqn in scans for v in eqn.outvars}
    assert (100, 100, 4) not in shapes
    without = functools.partial(programs["checkpointed"].loss, ours.__class__(**vars(ours) | {"policy": None}))
    eqns = jax.make_jaxpr(jax.grad(without))(x).jaxpr.eqns
    assert (100, 100, 4) in {v.aval.shape for eqn in eqns for v in eqn.outvars}


def test_dead_programs_compile_to_nothing():
    """The ordering operands keep nothing alive that the program does not need."""

    def f(x):
        def body(b, i):
            ta_read(b, (i * 7) % len(x))
            return ta_write(b, i, jnp.ones(ROW, x.dtype)), None

        lax.scan(body, x, jnp.arange(len(x)))
        return x[0]

    assert list(hlo_text.operations_in_loops(compiled(f, rows(100)).as_text())) == []
