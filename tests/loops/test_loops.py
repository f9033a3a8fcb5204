"""The loops give the values and derivatives of unrolled Python loops, under every transformation."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import jit, lax
from loop_programs import (
    BATCH_STEPS,
    DIRECTION,
    MAX,
    OURS,
    POINT,
    POINTS,
    PROGRAMS,
    STEPS,
    TOLERANCE,
    along,
    assert_close,
    expected,
    gradient,
    library,
    pushed,
    python_fori,
    up_to,
    weighted,
    weighted_along,
    weights,
)

import jax_tensorarray as ta

#: name -> (transformation of a function of p, order of the derivative, what it gives of the exact one).
EVERY = {
    "value": (lambda f: f, 0, lambda y: y),
    "jvp": (pushed, 1, along),
    "grad": (gradient, 1, weighted),
}
SECOND = {
    "jvp of grad": (lambda f: pushed(gradient(f)), 2, weighted_along),
    "grad of jvp": (lambda f: gradient(pushed(f)), 2, weighted_along),
    "jacrev of grad": (lambda f: jax.jacrev(gradient(f)), 2, weighted),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("turn", "name"), list(enumerate(PROGRAMS)))
def test_derivatives(turn, name):
    """The first derivatives; one of the second ones, or what is recomputed, in turn."""
    second = list(SECOND)[turn // 2 % len(SECOND)]
    kinds = EVERY | ({} if turn % 2 else {second: SECOND[second]})

    @jit
    def found(p, n):
        f = functools.partial(PROGRAMS[name], OURS, n=n)
        derivatives = {kind: transform(f)(p) for kind, (transform, _, _) in kinds.items()}
        if turn % 2:
            derivatives["recomputed"] = gradient(functools.partial(PROGRAMS[name], library("recompute"), n=n))(p)
        return derivatives

    for n in STEPS:
        for kind, derivative in found(POINT, n).items():
            _, order, pick = kinds.get(kind, EVERY["grad"])
            if order < 2 or n == MAX + 3:
                assert_close(derivative, pick(expected(name, n, order)), f"{kind}, {n} steps")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "context"),
    [
        ("carries_of_every_kind", contextlib.nullcontext),
        ("carries_of_every_kind", jax.disable_jit),
        ("a_loop_that_depends_on_the_data_in_a_loop", jax.disable_jit),
    ],
)
def test_derivatives_need_no_jit(name, context):
    f = functools.partial(PROGRAMS[name], OURS, n=4)
    with context():
        assert_close(f(jnp.asarray(POINT)), expected(name, 4, 0))
        assert_close(gradient(f)(jnp.asarray(POINT)), weighted(expected(name, 4, 1)))
        if context is contextlib.nullcontext:
            assert_close(pushed(f)(jnp.asarray(POINT)), expected(name, 4, 1) @ DIRECTION)


# --- vmap -----------------------------------------------------------------------------------------------------


def expected_batch(name, order):
    return np.stack([expected(name, n, order, p) for p, n in zip(POINTS, BATCH_STEPS, strict=True)])


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("turn", "name"), list(enumerate(PROGRAMS)))
def test_every_example_of_a_batch_takes_its_own_number_of_steps(turn, name):
    """The orders are in turn: random programs have both."""

    def f(p, n):
        y = PROGRAMS[name](OURS, p, n)
        return jnp.vdot(weights(len(y)), y), y

    @jit
    def grad_of_vmap(ps, shared, ns):
        def total(ps, shared):
            losses, values = jax.vmap(lambda p, n: f(p + shared, n))(ps, ns)
            return jnp.sum(losses), values

        return jax.grad(total, (0, 1), has_aux=True)(ps, shared)

    wanted = np.stack([weighted(d) for d in expected_batch(name, 1)])
    if turn % 2:
        gradients, values = jit(jax.vmap(jax.grad(f, has_aux=True)))(POINTS, BATCH_STEPS)
    else:
        (gradients, shared), values = grad_of_vmap(POINTS, np.zeros_like(POINT), BATCH_STEPS)
        assert_close(shared, wanted.sum(0), "of what is the same for every example")
    assert_close(values, expected_batch(name, 0), "values")
    assert_close(gradients, wanted, "gradients")


# --- arguments and results -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_return_steps():
    limit = {"max_steps": 5, "on_limit": "stop"}

    def f(x, n):
        return ta.while_loop(up_to(n), lambda c: (c[0] + 1, c[1] * x), (0, 1.0), **limit, return_steps=True)

    jitted = jax.jit(f)
    differentiated = jax.grad(lambda x, n: (f(x, n)[0][1], f(x, n)[1]), has_aux=True)
    for asked, taken, cut in ((0, 0, False), (1, 1, False), (5, 5, False), (6, 5, True)):
        for g in (f, jitted):
            (i, y), steps = g(2.0, asked)
            assert (int(i), float(y)) == (taken, 2.0**taken)
            assert (int(steps.taken), bool(steps.cut)) == (taken, cut)
            assert steps == (steps.taken, steps.cut)
        slope, steps = differentiated(2.0, asked)
        assert (slope, int(steps.taken), bool(steps.cut)) == (taken * 2.0 ** (taken - 1), taken, cut)
    with jax.disable_jit():
        (i, _), steps = f(2.0, 9)
        assert (i, steps.taken, steps.cut) == (5, 5, True)


def test_return_steps_of_a_batch_and_without_a_limit():
    def f(n, **limit):
        return ta.while_loop(up_to(n), lambda c: (c[0] + 2, c[1]), (0, 1.0), return_steps=True, **limit)[1]

    asked = jnp.array([0, 1, 7, 20])
    for limit, taken in (({"max_steps": 5, "on_limit": "stop"}, [0, 1, 4, 5]), ({}, [0, 1, 4, 10])):
        steps = jax.jit(jax.vmap(functools.partial(f, **limit)))(asked)
        np.testing.assert_array_equal(steps.taken, taken)
        np.testing.assert_array_equal(steps.cut, [False, False, False, bool(limit)])


def test_no_step_is_allowed():
    def f(x, max_steps=0):
        return ta.while_loop(lambda y: y < 10, lambda y: y * x, x * x, max_steps=max_steps, on_limit="stop")

    assert (f(3.0), f(3.0, np.int64(0)), jax.grad(f)(3.0), jit(jax.grad(jax.grad(f)))(3.0)) == (9, 9, 6, 2)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("max_steps", [None, 3])
def test_fori_loop_of_known_and_traced_bounds(max_steps):
    def by(loop, x, low, high):
        def body(i, c):
            return jnp.sin(c[0] * c[1]) + i, c[1] * c[1]

        return sum(loop(low, high, body, (x, x), max_steps=max_steps))

    ours = functools.partial(by, functools.partial(ta.fori_loop, on_limit="stop"))
    bounds = [(0, 4), (2, 5), (-3, 1), (4, 4), (5, 2)]
    wanted = [jax.value_and_grad(functools.partial(by, python_fori))(0.6, *ends) for ends in bounds]
    np.testing.assert_allclose(jax.value_and_grad(ours)(0.6, *bounds[0]), wanted[0], rtol=TOLERANCE)
    known = jit(lambda x: [jax.value_and_grad(ours)(x, *ends) for ends in bounds])
    np.testing.assert_allclose(known(0.6), wanted, rtol=TOLERANCE)
    if max_steps is None:  # and so forward mode only
        traced = jit(lambda x, low, high: jax.jvp(lambda x: ours(x, low, high), (x,), (1.0,)))
    else:
        traced = jit(jax.value_and_grad(ours))
    np.testing.assert_allclose([traced(0.6, *ends) for ends in bounds], wanted, rtol=TOLERANCE)
    if max_steps is not None:
        batch = jit(jax.vmap(jax.value_and_grad(ours), (None, 0, 0)))(0.6, *np.transpose(bounds))
        np.testing.assert_allclose(np.transpose(batch), wanted, rtol=TOLERANCE)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "int64"])
def test_the_index_of_fori_loop_has_the_dtype_that_it_has_in_jax(dtype):
    def by(loop):
        seen = []
        bounds = [jax.ShapeDtypeStruct((), dtype)] * 2
        value = jax.eval_shape(
            lambda *ends: loop(*ends, lambda i, c: (seen.append(jax.typeof(i)), c + i)[1], 0), *bounds
        )
        return value.dtype, value.weak_type, seen[0]

    assert by(ta.fori_loop) == by(lax.fori_loop)


def test_folds_of_nothing():
    nothing = jnp.zeros((0, 2))
    np.testing.assert_array_equal(ta.tf.foldl(jnp.add, nothing, jnp.ones(2)), [1, 1])
    np.testing.assert_array_equal(ta.tf.foldr(jnp.add, nothing, jnp.ones(2)), [1, 1])
    assert ta.tf.scan(jnp.add, nothing, jnp.ones(2)).shape == (0, 2)
    assert ta.tf.map_fn(jnp.sin, nothing).shape == (0, 2)
    for name in ("foldl", "foldr", "scan"):
        with pytest.raises(ValueError, match=f"tf.{name}:"):
            getattr(ta.tf, name)(jnp.add, nothing)
