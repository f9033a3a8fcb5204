"""Every op by itself: its derivatives of every order and direction, and under JAX's switches for debugging.

In programs, and under all other transformations, `test_random_programs.py` has them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import programs
import pytest
import unrolled
from in_numpy import in_numpy
from jax.test_util import check_grads
from programs import BUFFER, CONTEXTS, DIRECTIONS, INDEX, OPS, VALUE, WHERE
from quick import jit

import jax_tensorarray as ta

LINEAR_INPUTS = {"ta_read": (0,), "ta_stack": (0,), "ta_write": (0, 1), "ta_add": (0, 1), "ta_swap": (0, 1)}


def on_device(*arrays):
    return tuple(map(jnp.asarray, arrays))


def expected_results(op):
    return programs.call(oracle, op, BUFFER, INDEX, VALUE, WHERE)


def assert_equal_results(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        oracle.assert_same_bits(a, e)


def inner(xs, ys):
    return sum(jnp.vdot(x, y) for x, y in zip(xs, ys, strict=True))


def forward(f, tangents):
    """Directional derivative by forward mode."""
    return lambda *args: jax.jvp(f, args, on_device(*tangents))[1]


def reverse(f, tangents):
    """The same by reverse mode."""
    return lambda *args: inner(jax.grad(f, argnums=(0, 1))(*args), on_device(*tangents))


MODES = {"fwd": forward, "rev": reverse}


def derivatives(f, orders, modes):
    """Every derivative of the given orders: {"fwd-over-rev": function, ...}."""
    found = {}
    for order in orders:
        for names in itertools.product(modes, repeat=order):
            g = f
            for name, tangents in zip(names, DIRECTIONS, strict=False):
                g = MODES[name](g, tangents)
            found["-over-".join(reversed(names))] = g
    return found


@functools.cache
def expected_derivatives(op):
    """The derivatives of order 1, 2 and 3 along DIRECTIONS: by unrolled plain JAX, checked against differences."""
    exact = [
        float(
            in_numpy(derivatives(programs.loss_by(unrolled, jnp, op), [n], ["fwd"])["-over-".join(["fwd"] * n)])(
                BUFFER, VALUE
            )
        )
        for n in (1, 2, 3)
    ]
    differences = [
        oracle.derivative(programs.loss_by(oracle, np, op), (BUFFER, VALUE), DIRECTIONS[:n]) for n in (1, 2, 3)
    ]
    np.testing.assert_allclose(exact, differences, rtol=1e-5)
    assert min(map(abs, exact)) > 1e-3  # else this would test nothing
    return exact


# --- values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "context"), programs.cases(["direct", "nested_jit", "scan", "while_loop", "cond"]))
def test_values_are_the_same_with_jit_disabled(op, context):
    with jax.disable_jit():
        assert_equal_results(CONTEXTS[context](op, *on_device(BUFFER, INDEX, VALUE, WHERE)), expected_results(op))


@pytest.mark.parametrize("op", OPS)
def test_inputs_keep_their_values(op):
    operands = on_device(BUFFER, INDEX, VALUE, WHERE)
    programs.call(ta, op, *operands)
    jax.jit(functools.partial(CONTEXTS["scan" if op != "ta_stack" else "direct"], op))(*operands)
    assert_equal_results(operands, (BUFFER, INDEX, VALUE, WHERE))


@pytest.mark.parametrize("op", OPS)
def test_the_untaken_branch_of_a_cond_leaves_no_trace(op):
    expected = expected_results(op)

    @jax.jit
    def f(taken, *operands):
        other = tuple(jnp.full(e.shape, 7.0) for e in expected)
        return jax.lax.cond(taken, lambda: programs.call(ta, op, *operands), lambda: other)

    operands = on_device(BUFFER, INDEX, VALUE, WHERE)
    assert_equal_results(f(False, *operands), [np.full(e.shape, 7.0) for e in expected])
    assert_equal_results(f(True, *operands), expected)


@pytest.mark.parametrize("op", OPS)
def test_an_evaluated_jaxpr_gives_the_same_values(op):
    operands = on_device(BUFFER, INDEX, VALUE, WHERE)
    jaxpr = jax.make_jaxpr(functools.partial(programs.call, ta, op))(*operands)
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    assert names.count(op) == 1
    assert_equal_results(jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *operands), expected_results(op))


# --- derivatives -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "context"), programs.cases(["direct"]))
def test_first_and_second_derivatives_agree_in_every_order_of_modes(op, context):
    expected = expected_derivatives(op)
    f = programs.loss_in(context, op)
    functions = derivatives(f, (1, 2), MODES)
    found = jit(lambda *args: {name: g(*args) for name, g in functions.items()})(*on_device(BUFFER, VALUE))
    assert len(found) == 6
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name.count("-over-")], rtol=1e-10, err_msg=name)


@pytest.mark.parametrize(("op", "context"), programs.cases(["direct", "scan", "cond"]))
def test_third_derivatives_agree_in_every_order_of_modes(op, context):
    functions = derivatives(programs.loss_in(context, op), (3,), MODES)
    found = jit(lambda *args: {name: g(*args) for name, g in functions.items()})(*on_device(BUFFER, VALUE))
    assert len(found) == 8
    for name, value in found.items():
        np.testing.assert_allclose(value, expected_derivatives(op)[2], rtol=1e-10, err_msg=name)


@pytest.mark.parametrize("op", programs.ROW_OPS)
def test_a_while_loop_has_forward_derivatives_up_to_the_third(op):
    functions = derivatives(programs.loss_in("while_loop", op), (1, 2, 3), ["fwd"])
    found = jit(lambda *args: [g(*args) for g in functions.values()])(*on_device(BUFFER, VALUE))
    np.testing.assert_allclose(found, expected_derivatives(op), rtol=1e-10)


@pytest.mark.parametrize(
    ("op", "context"), [*((op, "direct") for op in OPS), ("ta_read", "scan"), ("ta_swap", "checkpointed_scan")]
)
def test_check_grads_agrees_up_to_the_second_order(op, context):
    f = jax.jit(programs.loss_in(context, op))
    check_grads(f, on_device(BUFFER, VALUE), order=2, modes=("fwd", "rev"), rtol=1e-3)


@pytest.mark.parametrize(("op", "context"), programs.cases(["direct", "scan"]))
def test_derivatives_exist_with_jit_disabled(op, context):
    f = programs.loss_in(context, op)
    with jax.disable_jit():
        found = [MODES[m](f, DIRECTIONS[0])(*on_device(BUFFER, VALUE)) for m in MODES]
    np.testing.assert_allclose(found, [expected_derivatives(op)[0]] * 2, rtol=1e-10)


def pairs_of_operands():
    return [(op, inputs) for op in OPS for n in (1, 2) for inputs in itertools.combinations(LINEAR_INPUTS[op], n)]


@pytest.mark.parametrize(("op", "inputs"), pairs_of_operands())
@pytest.mark.parametrize("context", ["direct", "scan"])
def test_linear_transpose_is_the_adjoint(op, inputs, context):
    if op == "ta_stack":
        context = "cond"  # it has no positions to loop over
    rng = np.random.default_rng(1)
    tangents = [rng.normal(size=(BUFFER, VALUE)[k].shape) for k in inputs]
    # Linear in these inputs: the others are zero, as in a derivative.
    full = [np.zeros_like(BUFFER), np.zeros_like(VALUE)]
    for k, t in zip(inputs, tangents, strict=True):
        full[k] = t
    results = programs.call(oracle, op, full[0], INDEX, full[1], WHERE)
    cotangents = tuple(rng.normal(size=r.shape) for r in results)
    index, where = on_device(INDEX, WHERE)

    def f(*args):
        operands = [jnp.zeros(BUFFER.shape), jnp.zeros(VALUE.shape)]
        for k, a in zip(inputs, args, strict=True):
            operands[k] = a
        return CONTEXTS[context](op, operands[0], index, operands[1], where)

    transposed = jit(lambda ts, cs: jax.linear_transpose(f, *ts)(cs))(on_device(*tangents), on_device(*cotangents))
    assert [t.shape for t in transposed] == [t.shape for t in tangents]
    np.testing.assert_allclose(inner(transposed, tangents), inner(cotangents, results), rtol=1e-12)


@pytest.mark.parametrize("op", programs.ROW_OPS)
def test_a_transpose_can_be_transposed_back(op):
    index, where = on_device(INDEX, WHERE)

    def f(buffer, value):
        return programs.call(ta, op, buffer, index, value, where)

    operands = on_device(BUFFER, VALUE)
    results = jax.eval_shape(f, *operands)
    once = jax.linear_transpose(f, *operands)
    twice = jax.linear_transpose(once, results)
    assert_equal_results(jax.jit(lambda *xs: twice(xs)[0])(*operands), expected_results(op))


def test_a_checkpoint_that_saves_reads_does_not_read_again():
    index = jnp.asarray(INDEX % programs.SIZE)

    def f(buffer):
        return jnp.sum(jnp.sin(ta.ta_read(jnp.sin(buffer), index)) ** 2)

    def reads(policy):
        gradient = jax.grad(jax.checkpoint(f, policy=policy))
        return str(jax.make_jaxpr(gradient)(jnp.asarray(BUFFER))).count(" ta_read[")

    assert reads(ta.checkpoint_policies.save_reads) == 1
    assert reads(None) == 2


# --- debugging switches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "context"), programs.cases(["direct", "scan"]))
def test_everything_passes_the_checks_of_jax(op, context):
    f = programs.loss_in(context, op)
    functions = [
        f,
        forward(f, DIRECTIONS[0]),
        reverse(f, DIRECTIONS[0]),
        forward(reverse(f, DIRECTIONS[0]), DIRECTIONS[1]),
    ]
    with jax.enable_checks(True):
        found = jit(lambda *args: [g(*args) for g in functions])(*on_device(BUFFER, VALUE))
        if context == "direct":
            assert_equal_results(programs.call(ta, op, *on_device(BUFFER, INDEX, VALUE, WHERE)), expected_results(op))
    value = programs.loss_by(oracle, np, op)(BUFFER, VALUE)
    first, second, _ = expected_derivatives(op)
    np.testing.assert_allclose(found, [value, first, first, second], rtol=1e-10)


@pytest.mark.parametrize(("op", "context"), programs.cases(["direct", "scan"]))
def test_debug_nans_has_nothing_to_report_about_numbers(op, context):
    f = programs.loss_in(context, op)
    with jax.debug_nans(True):
        found = jax.jit(jax.value_and_grad(f))(*on_device(BUFFER, VALUE))[0]
        eager = programs.call(ta, op, *on_device(BUFFER, INDEX, VALUE, WHERE))
    np.testing.assert_allclose(found, programs.loss_by(oracle, np, op)(BUFFER, VALUE), rtol=1e-12)
    assert_equal_results(eager, expected_results(op))


@pytest.mark.parametrize("op", ["ta_write", "ta_add", "ta_swap"])
def test_debug_nans_reports_a_nan_that_is_stored(op):
    f = jax.jit(functools.partial(programs.call, ta, op, mode=None))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        f(jnp.ones(3), jnp.array([1]), jnp.array([jnp.inf]) - jnp.inf, jnp.array([True]))


def test_debug_nans_does_not_mind_a_nan_that_is_not_read():
    buffer = jnp.asarray(np.array([1.0, np.nan]))
    with jax.debug_nans(True):
        rows = ta.ta_read(buffer, jnp.array([0, 1]), where=jnp.array([True, False]))
    np.testing.assert_array_equal(rows, [1.0, 0.0])
