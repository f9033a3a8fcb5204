"""A loop that needs more than `max_steps` steps raises an error, or stops if it is told to, and costs nothing else."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import RUNTIME_ERRORS
from in_place import assert_no_whole_buffer_copy, compiled
from jax import jit, lax
from waiting import finish

from jax_tensorarray import fori_loop, in_place, ta_read, ta_write, while_loop
from jax_tensorarray._hlo import text as hlo_text
from jax_tensorarray.residuals import Checkpoint, Inverse

MOST = 5


def power(x, n, **how):
    """x to the power of n, by n steps."""
    body = lambda c: (c[0] + 1, c[1] * x)  # noqa: E731
    return while_loop(lambda c: c[0] < n, body, (0, 1.0), **{"max_steps": MOST} | how)[1]


def power_by_fori(x, n, **how):
    return fori_loop(2, n + 2, lambda i, y: y * x, 1.0, **{"max_steps": MOST} | how)


TO_DO = r"\. Give a larger max_steps, or on_limit=\"stop\" to end the loop there"
TEXTS = {
    power: rf"while_loop: cond_fun is still true after max_steps=5{TO_DO}",
    power_by_fori: rf"fori_loop: upper - lower is more than max_steps=5{TO_DO}",
}

#: Each gives the value of x ** n at 1, or the derivative of that order.
TRANSFORMS = {
    "value": (lambda f: f, 0),
    "grad": (jax.grad, 1),
    "jvp": (lambda f: lambda x, n: jax.jvp(lambda x: f(x, n), (x,), (1.0,))[1], 1),
    "second": (lambda f: jax.grad(jax.grad(f)), 2),
    "checkpoint": (lambda f: jax.grad(jax.checkpoint(f)), 1),
    "linearize": (lambda f: lambda x, n: jax.linearize(lambda x: f(x, n), x)[1](1.0), 1),
    "in_place": (lambda f: in_place(jax.grad(f)), 1),
}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("f", TEXTS, ids=["while_loop", "fori_loop"])
def test_a_step_too_many_is_an_error_under_every_transformation(f, transform):
    transformed, order = TRANSFORMS[transform]
    run = jit(transformed(f))
    for n in (0, 3, MOST):
        np.testing.assert_allclose(run(1.0, n), [1, n, n * (n - 1)][order])
    with pytest.raises(RUNTIME_ERRORS, match=TEXTS[f]):
        finish(run(1.0, MOST + 1))


def test_outside_of_jit_it_is_an_error_too():
    for run in (power, jax.grad(power)):
        assert run(1.0, MOST) in (1, MOST)
        with pytest.raises(RUNTIME_ERRORS, match=TEXTS[power]):
            finish(run(1.0, MOST + 1))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "residuals",
    ["tape", "recompute", "undo", Checkpoint(2), Inverse(lambda c: (c[0] - 1, c[1] / 2))],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_a_step_too_many_is_an_error_whatever_reverse_mode_stores(residuals):
    def f(x, n):
        how = {"max_steps": 3, "residuals": residuals}
        return while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 2), (0, x), **how)[1]

    run = jit(jax.grad(f))
    assert run(2.0, 3) == 8
    with pytest.raises(RUNTIME_ERRORS, match="still true after max_steps=3"):
        finish(run(2.0, 4))


def test_known_bounds_that_are_too_far_apart_are_refused_while_tracing():
    text = r"fori_loop: upper - lower is 10, more than max_steps=5\. Give a larger max_steps"
    for call in (power_by_fori, jit(power_by_fori, static_argnums=1)):
        with pytest.raises(ValueError, match=text):
            call(2.0, 10)
        assert call(2.0, 5) == 32
    assert fori_loop(0, 10, lambda i, c: c + 1, 0, max_steps=5, on_limit="stop") == 5
    assert fori_loop(10, 0, lambda i, c: c + 1, 0, max_steps=5) == 0


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("f", TEXTS, ids=["while_loop", "fori_loop"])
def test_the_examples_of_a_batch_that_run_are_counted(f):
    xs = jnp.full(3, 2.0)
    batch = jit(jax.vmap(jax.value_and_grad(f)))
    np.testing.assert_allclose(batch(xs, jnp.array([0, 5, 2])), [[1, 32, 4], [0, 80, 4]])
    with pytest.raises(RUNTIME_ERRORS, match=TEXTS[f]):
        finish(batch(xs, jnp.array([0, 6, 2])))
    # Of an example that does not take the branch, nothing is counted.
    branch = jit(jax.vmap(lambda x, n, p: lax.cond(p, lambda: f(x, n), lambda: -x)))
    ns, chosen = jnp.array([0, 6, 2]), np.array([True, False, True])
    np.testing.assert_allclose(branch(xs, ns, chosen), [1, -2, 4])
    with pytest.raises(RUNTIME_ERRORS, match=TEXTS[f]):
        finish(branch(xs, ns, ~chosen))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("transform", [lambda f: f, jax.grad], ids=["value", "grad"])
def test_an_inner_loop_that_is_cut_is_an_error_and_its_buffer_stays_in_place(transform):
    """In a loop no result waits for the check: see the programs compiled for a TPU and an H100."""

    def f(x, n):
        def step(b, i):
            body = lambda c: (c[0] + 1, ta_write(c[1], c[0], jnp.sin(ta_read(c[1], i))))  # noqa: E731
            return while_loop(lambda c: c[0] < n + i, body, (0, b), max_steps=MOST)[1], None

        return jnp.sum(lax.scan(step, x, jnp.arange(3))[0])

    x = jnp.ones((300, 16))
    program = compiled(transform(f), x, 3)
    assert_no_whole_buffer_copy(program, x)
    finish(program(x, 3))
    with pytest.raises(RUNTIME_ERRORS, match=TEXTS[power]):
        finish(program(x, 4))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("outer", ["lax", "ours"])
def test_an_example_that_has_ended_a_loop_around_is_not_counted(outer):
    loop = lax.while_loop if outer == "lax" else functools.partial(while_loop, max_steps=9)

    def f(n):  # the inner loop takes as many steps as the number of the outer one, which is n at its end
        def step(k):
            return k + 1 + 0 * power(1.0, k).astype(int)

        return loop(lambda k: k < n, step, 0)

    batch = jit(jax.vmap(f))
    assert batch(jnp.array([6, 1, 0])).tolist() == [6, 1, 0]
    with pytest.raises(RUNTIME_ERRORS, match=TEXTS[power]):
        finish(batch(jnp.array([1, 7, 0])))


def test_without_jit_too():
    with jax.disable_jit():
        assert power(2.0, 5) == 32
        assert power(2.0, 9, on_limit="stop") == 32
        with pytest.raises(ValueError, match=TEXTS[power]):
            power(2.0, 6)
        with pytest.raises(ValueError, match="fori_loop: upper - lower is 6, more than max_steps=5"):
            jit(lambda n: power_by_fori(2.0, n))(jnp.int32(6))


def test_the_steps_are_told_with_both():
    def f(n, **how):
        body = lambda c: c + 1  # noqa: E731
        return while_loop(lambda c: c < n, body, 0, max_steps=MOST, return_steps=True, **how)[1]

    assert jit(f)(3) == (3, False)
    assert jit(functools.partial(f, on_limit="stop"))(9) == (5, True)
    with pytest.raises(RUNTIME_ERRORS, match="still true"):
        finish(jit(f)(6))


CONDITIONS = {
    "an array": lambda c: jnp.sum(c[1]) < 100,
    "rows": lambda c: ta_read(c[1], 0) < 50,
    "a callback": lambda c: jax.pure_callback(lambda x: np.asarray(x < 50), jnp.bool_(True), c[1][0]),
    "an effect": lambda c: (jax.debug.callback(lambda x: None, c[0]), c[1][0] < 50)[1],
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", CONDITIONS)
def test_a_condition_of_any_kind(name):
    """The rows double in each step: it takes six steps."""

    def f(x, most):
        body = lambda c: (c[0] + 1, ta_write(c[1], jnp.arange(2), 2 * c[1]))  # noqa: E731
        return while_loop(CONDITIONS[name], body, (0, x), max_steps=most)

    x = jnp.ones(2)
    run = jit(f, static_argnums=1)
    k, rows = run(x, 6)
    assert (k, rows.tolist()) == (6, [64, 64])
    assert run(x, 7)[0] == 6
    with pytest.raises(RUNTIME_ERRORS, match="still true after max_steps=5"):
        finish(run(x, 5))


def test_a_condition_with_effects_is_asked_as_often_as_before():
    asked = []

    def f(n, most, on_limit):
        def goes_on(k):
            jax.debug.callback(lambda k: asked.append(int(k)), k, ordered=True)
            return k < n

        return while_loop(goes_on, lambda k: k + 1, 0, max_steps=most, on_limit=on_limit)

    for on_limit in ("raise", "stop"):
        asked.clear()
        assert jit(f, static_argnums=(1, 2))(3, 4, on_limit) == 3
        jax.effects_barrier()
        assert asked == [0, 1, 2, 3]


@pytest.mark.slow
def test_every_carry_knows():
    """A program may use any of them, and JAX drops the others."""

    def f(n):
        key, start = jax.random.key(0), jnp.zeros((50, 3))
        body = lambda c: (c[0] + 1, ta_write(c[1], c[0], 1.0), jax.random.split(c[2])[0], c[3] + 1)  # noqa: E731
        carry = while_loop(lambda c: c[0] < n, body, (0, start, key, jnp.zeros(2)), max_steps=3)
        return [carry[0], carry[1], jax.random.key_data(carry[2]), carry[3]]

    for k in range(4):
        one = jit(lambda n, k=k: f(n)[k])
        finish(one(3))
        with pytest.raises(RUNTIME_ERRORS, match="still true after max_steps=3"):
            finish(one(4))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("order", [lambda f: f, jax.grad], ids=["value", "gradient"])
def test_nothing_is_added_to_a_step(order):
    """A step has the operations that it has in a loop that stops, and copies no buffer."""

    def f(x, n, on_limit):
        body = lambda c: (c[0] + 1, ta_write(c[1], c[0], jnp.sin(ta_read(c[1], c[0] // 2))))  # noqa: E731
        return jnp.sum(while_loop(lambda c: c[0] < n, body, (0, x), max_steps=500, on_limit=on_limit)[1])

    args = jnp.ones((500, 8)), 400
    programs = {how: compiled(order(functools.partial(f, on_limit=how)), *args) for how in ("raise", "stop")}
    assert_no_whole_buffer_copy(programs["raise"], args[0])
    operations = {how: operations_in_loops(program.as_text()) for how, program in programs.items()}
    assert operations["raise"] == operations["stop"]
    memory = {how: program.memory_analysis().temp_size_in_bytes for how, program in programs.items()}
    assert memory["raise"] <= memory["stop"] + 1000
    np.testing.assert_allclose(programs["raise"](*args), programs["stop"](*args))


def operations_in_loops(hlo):
    return Counter(instruction.opcode for instruction in hlo_text.operations_in_loops(hlo))


def test_a_tpu_stops_since_it_raises_no_errors():
    traced = jit(power).trace(2.0, 9)
    assert "jax_tensorarray" not in traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("f", TEXTS, ids=["while_loop", "fori_loop"])
@pytest.mark.parametrize("given", ["cut", "", None, True, ["stop"]])
def test_on_limit_is_one_of_two_words(f, given):
    name = "while_loop" if f is power else "fori_loop"
    with pytest.raises(
        ValueError, match=rf"^{name}: on_limit must be one of raise, stop; got {re.escape(repr(given))}"
    ):
        f(2.0, 3, on_limit=given)
