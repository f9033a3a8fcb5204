"""Every op by itself: its derivatives of every order and direction, and under JAX's switches for debugging.

In programs, and under all other transformations, `test_random_programs.py` has them."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import unrolled
from in_numpy import in_numpy
from jax import jit, lax
from jax.experimental.jet import jet
from ops import (
    BUFFER,
    DIRECTIONS,
    INDEX,
    OPS,
    OURS,
    SIZE,
    SMOOTH_OPS,
    VALUE,
    arguments,
    assert_same,
    call,
    every,
    expected_results,
    in_context,
    loss_by,
    loss_in,
    on_device,
)

import jax_tensorarray as ta

pytestmark = pytest.mark.slow(but=1)


def inner(xs, ys):
    return sum(jnp.vdot(x, y) for x, y in zip(xs, ys, strict=True))


def forward(f, tangents):
    """Directional derivative by forward mode."""
    return lambda *args: jax.jvp(f, args, on_device(*tangents))[1]


def reverse(f, tangents):
    """The same by reverse mode."""
    return lambda *args: inner(jax.grad(f, argnums=(0, 1))(*args), on_device(*tangents))


MODES = {"f": forward, "r": reverse}
FIRST_AND_SECOND = ["r", "ff", "fr", "rf", "rr"]


def derivatives(f, orders):
    """For every "fr" the reverse mode over the forward mode, and so on; for "" the value."""
    found = []
    for modes in orders:
        g = f
        for mode, tangents in zip(modes, DIRECTIONS, strict=False):
            g = MODES[mode](g, tangents)
        found.append(g)
    return lambda *args: [g(*args) for g in found]


@functools.cache
def expected_derivatives(op):
    """The value and the derivatives of order 1, 2 and 3: by unrolled plain JAX, checked against differences."""
    exact = list(map(float, in_numpy(derivatives(loss_by(unrolled, jnp, op), ["", "f", "ff", "fff"]))(BUFFER, VALUE)))
    f = loss_by(oracle, np, op)
    differences = [oracle.derivative(f, (BUFFER, VALUE), DIRECTIONS[:n]) for n in range(4)]
    np.testing.assert_allclose(exact, differences, rtol=1e-5)
    assert min(map(abs, exact)) > 1e-3  # else this would test nothing
    return exact


def assert_derivatives(found, op, orders):
    for value, modes in zip(found, orders, strict=True):
        np.testing.assert_allclose(value, expected_derivatives(op)[len(modes)], rtol=1e-10, err_msg=modes)


# --- values ----------------------------------------------------------------------------------------------------

WITHOUT_JIT = [(OPS[op], "direct") for op in ("ta_read", "ta_max", "ta_swap", "ta_stack", "ta_clear")]
WITHOUT_JIT.append((OPS["ta_swap"], "scan"))


@pytest.mark.parametrize(("op", "context"), WITHOUT_JIT, ids=str)
def test_values_and_derivatives_are_the_same_with_jit_disabled(op, context):
    with jax.disable_jit():
        assert_same(in_context(context, op, *on_device(BUFFER, VALUE)), expected_results(op))
        if op.name in ("ta_read", "ta_swap") and context == "direct":
            assert_derivatives(derivatives(loss_in(context, op), "fr")(*on_device(BUFFER, VALUE)), op, "fr")


@every(SMOOTH_OPS)
def test_inputs_keep_their_values_and_so_do_evaluated_jaxprs_and_branches(op):
    given, expected = arguments(op, BUFFER, VALUE), expected_results(op)
    operands = on_device(*given)
    assert_same(call(op, OURS, *operands), expected)
    jaxpr = jax.make_jaxpr(functools.partial(call, op, OURS))(*operands)
    assert {eqn.primitive.name for eqn in jaxpr.eqns} >= {op.name}
    assert_same(jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *operands), expected)
    others = [np.full(e.shape, 7.0) for e in expected]

    @jax.jit
    def branch(taken, *operands):
        return jax.lax.cond(taken, lambda: call(op, OURS, *operands), lambda: tuple(map(jnp.asarray, others)))

    assert_same(branch(False, *operands), others)
    assert_same(branch(True, *operands), expected)
    assert_same(operands, tuple(map(jnp.asarray, given)))


# --- derivatives -----------------------------------------------------------------------------------------------

#: Of the op that is not linear, and of the one that both reads and writes.
THIRD = {"ta_max": [*FIRST_AND_SECOND, "rrr"], "ta_swap": ["ff", "fr", "frf", "rfr", "rrr"]}


@every(SMOOTH_OPS)
def test_derivatives_agree_in_every_order_of_modes(op):
    orders = THIRD.get(op.name, FIRST_AND_SECOND)
    with jax.enable_checks(True):
        found = jit(derivatives(loss_in("direct", op), orders))(*on_device(BUFFER, VALUE))
        assert_same(call(op, OURS, *on_device(*arguments(op, BUFFER, VALUE))), expected_results(op))
    assert_derivatives(found, op, orders)


def test_derivatives_in_a_loop_agree_in_every_order_of_modes():
    op, orders = OPS["ta_swap"], ["ff", "fr", "rf", "rr"]
    with jax.enable_checks(True):
        found = jit(derivatives(loss_in("scan", op), orders))(*on_device(BUFFER, VALUE))
    assert_derivatives(found, op, orders)


def test_a_checkpoint_that_saves_reads_does_not_read_again():
    index = jnp.asarray(INDEX % SIZE)

    def f(buffer):
        return jnp.sum(jnp.sin(ta.ta_read(jnp.sin(buffer), index)) ** 2)

    def reads(policy):
        gradient = jax.grad(jax.checkpoint(f, policy=policy))
        return str(jax.make_jaxpr(gradient)(jnp.asarray(BUFFER))).count(" ta_read[")

    assert reads(ta.checkpoint_policies.save_reads) == 1
    assert reads(None) == 2


# --- debugging switches ----------------------------------------------------------------------------------------


FOR_NANS = [("ta_read", "direct"), ("ta_max", "direct"), ("ta_clear", "direct"), ("ta_swap", "scan")]


@pytest.mark.parametrize(("op", "context"), [(OPS[op], context) for op, context in FOR_NANS], ids=str)
def test_debug_nans_has_nothing_to_report_about_numbers(op, context):
    with jax.debug_nans(True):
        found = jax.jit(jax.value_and_grad(loss_in(context, op)))(*on_device(BUFFER, VALUE))[0]
        eager = in_context("direct", op, *on_device(BUFFER, VALUE))
    np.testing.assert_allclose(found, expected_derivatives(op)[0], rtol=1e-12)
    assert_same(eager, expected_results(op))


@pytest.mark.parametrize("op", ["ta_write", "ta_add", "ta_swap"])
def test_debug_nans_reports_a_nan_that_is_stored(op):
    f = jax.jit(functools.partial(OPS[op], OURS, mode=None))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        f(jnp.ones(3), jnp.array([1]), jnp.array([jnp.inf]) - jnp.inf, jnp.array([True]))


def test_debug_nans_does_not_mind_a_nan_that_is_not_read():
    buffer = jnp.asarray(np.array([1.0, np.nan]))
    with jax.debug_nans(True):
        rows = ta.ta_read(buffer, jnp.array([0, 1]), where=jnp.array([True, False]))
    np.testing.assert_array_equal(rows, [1.0, 0.0])


# --- Taylor series -----------------------------------------------------------------------------------------------


def coefficients(f, x, terms):
    """The derivatives in t of `f(x + terms[0] t + terms[1] t^2 / 2 + ...)` at 0, by nested forward mode."""
    at, found = lambda t: f(x + sum(c * t ** (k + 1) / math.factorial(k + 1) for k, c in enumerate(terms))), []
    for _ in terms:
        at = functools.partial(lambda f, t: jax.jvp(f, (t,), (1.0,))[1], at)
        found.append(at(0.0))
    return found


def programs_of_ops(ops):
    twice, masked = np.array([1, 3, 1]), {"where": np.array([True, False, True]), "mode": "drop"}
    yield lambda x: jnp.sin(ops.ta_read(x, twice))
    yield lambda x: jnp.sin(ops.ta_read(x * x, np.array([9, 1]), mode="drop"))
    yield lambda x: ops.ta_write(jnp.sin(x), twice, jnp.cos(x[:3]), **masked)
    yield lambda x: ops.ta_add(jnp.sin(x), twice, jnp.cos(x[:3])) ** 2
    yield lambda x: sum(jnp.sum(y**2) for y in ops.ta_swap(jnp.sin(x), twice, jnp.cos(x[:3])))
    yield lambda x: ops.ta_max(jnp.sin(x), twice, jnp.cos(x[:3]))
    yield lambda x: ops.ta_stack(jnp.sin(x), 3)


def test_jet_expands_every_op_in_a_taylor_series():
    x, *terms = np.random.default_rng(0).normal(size=(4, 5, 3))
    for k, (ours, plain) in enumerate(zip(programs_of_ops(ta), programs_of_ops(unrolled), strict=True)):
        wanted = in_numpy(lambda x, *terms, f=plain: (f(x), coefficients(f, x, terms)))(x, *terms)
        for transform in (jit, lambda f: f)[: 2 if k == 4 else 1]:
            value, series = transform(lambda x, *terms, f=ours: jet(f, (x,), (list(terms),)))(x, *terms)
            np.testing.assert_allclose(value, wanted[0], rtol=1e-12)
            np.testing.assert_allclose(series, wanted[1], rtol=1e-9, atol=1e-12)


def test_jet_expands_what_in_place_makes_of_rows():
    x, *terms = np.random.default_rng(0).normal(size=(4, 5, 3))

    def rows(x):
        row = lax.dynamic_slice(x, (jnp.int32(1), jnp.int32(0)), (1, 3))
        x = lax.dynamic_update_slice(x, jnp.sin(row), (jnp.int32(2), jnp.int32(0)))
        return x.at[0].add(x[2] * x[jnp.array([9, 4])][1])

    def elements(x):
        return x.at[:, 1].mul(jnp.exp(x[:, 2])).at[3, 0].max(x[1, 1])

    for f, transform in ((rows, lambda f: f), (jit(elements), jit)):
        wanted = in_numpy(lambda x, *terms, f=f: (f(x), coefficients(f, x, terms)))(x, *terms)
        value, series = transform(lambda x, *terms, f=f: jet(ta.in_place(f), (x,), (list(terms),)))(x, *terms)
        np.testing.assert_allclose(value, wanted[0], rtol=1e-12)
        np.testing.assert_allclose(series, wanted[1], rtol=1e-9, atol=1e-12)


def test_a_series_of_an_op_can_be_differentiated_and_batched():
    x, *terms = np.random.default_rng(0).normal(size=(3, 5, 3))
    ours, plain = (lambda x, ops=ops: ops.ta_max(jnp.sin(x), np.array([1, 3, 1]), x[:3]) for ops in (ta, unrolled))

    def total(series):
        return sum(jnp.sum(jnp.sin(c)) for c in series)

    found = jit(jax.vmap(jax.grad(lambda x: total(jet(ours, (x,), (terms,))[1]))))(np.stack([x, 2 * x]))
    expected = [in_numpy(jax.grad(lambda x: total(coefficients(plain, x, terms))))(x) for x in (x, 2 * x)]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
