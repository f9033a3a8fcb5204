"""Examples start again from a world that the step makes. Buffers are emptied, and old versions are read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalogue.loop import EXAMPLES, ORDERS, arguments
from catalogue.starting_again import FIRST, LOOPS, SIZE, STEPS, emptied
from in_numpy import in_numpy
from in_place import assert_linear_time, assert_moves_no_more, compiled
from jax import lax

from benchmarks.harm.programs.reports import best_so_far, driven_at_one_place
from jax_tensorarray import in_place
from jax_tensorarray._compat import barriers_hold
from jax_tensorarray._hlo import text as hlo_text
from jax_tensorarray._jaxprs import jaxprs

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("is_integer", "stops"), [(False, False), (True, True)])
def test_what_is_made_in_the_step_is_copied_where_an_example_starts_again(is_integer, stops):
    """A world is made in every step, rows of it are written, and it is taken where an episode is over."""
    rows = 40

    def made(x):
        return lax.fori_loop(0, 3, lambda i, b: b.at[i].set(x + i), jnp.zeros((rows, SIZE, SIZE)) + x)

    def f(x):
        def step(carry, n):
            state, marks = carry
            state = lax.fori_loop(0, 4, lambda i, b: b.at[(i + n) % rows].add(jnp.sin(b[i])), state)
            marks = lax.fori_loop(0, 4, lambda i, b: b.at[(i + n) % rows].add(1), marks)
            state = lax.stop_gradient(state) if stops else state
            done = jnp.mean(state[n % rows]) > 2.5
            state, marks = jnp.where(done, made(x * n), state), jnp.where(done, 0, marks)
            return (state, marks), done

        start = jnp.ones((rows, SIZE, SIZE)) + x, jnp.zeros((rows, SIZE, SIZE), jnp.int32)
        (state, marks), dones = lax.scan(step, start, jnp.arange(STEPS))
        return (marks if is_integer else state), dones

    xs = np.linspace(0.01, 0.5, EXAMPLES)
    want = in_numpy(jax.vmap(f))(xs)
    assert 0 < np.sum(want[1]) < want[1].size
    for ours in (in_place(jax.vmap(f)), jax.vmap(in_place(f))):
        got = compiled(ours, xs)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12), got(xs), want)
        if barriers_hold("cpu"):  # else one copy is left
            assert not hlo_text.copies_in_loops(got.as_text(), want[0].nbytes)

    def loss(x):
        return jnp.sum(jnp.cos(f(x)[0]))

    if not is_integer:
        want = in_numpy(jax.grad(loss))(0.3)
        for gradient in (jax.grad(in_place(loss)), in_place(jax.grad(loss))):
            np.testing.assert_allclose(jax.jit(gradient)(0.3), want, rtol=1e-9)


def selects(buffer, eqn):
    """Return whether an equation selects all elements of a buffer."""
    return eqn.primitive.name == "select_n" and eqn.outvars[0].aval.shape == buffer.shape


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["an emptied register", "an emptied buffer"])
def test_no_step_selects_a_buffer_that_is_emptied(name, order):
    loop = LOOPS[name]
    args = arguments(loop, order)
    jaxpr = jax.make_jaxpr(ORDERS[order](loop.f, in_place, loop.by))(*args)
    assert not jaxprs.any_equation(jaxpr, functools.partial(selects, args[0]))


@pytest.mark.skipif(not barriers_hold("cpu"), reason="XLA then calls each branch on its own")
@pytest.mark.parametrize("order", ["in_place(vmap)", "vmap(in_place)"])
def test_a_buffer_that_is_rarely_emptied_takes_linear_time(order):
    """Without a branch that asks whether any example is done, XLA selects all rows in every step."""

    def f(start, noise):
        return emptied(start, noise, is_register=False)[1]

    def args_of(length):
        start = np.zeros((2, length // 2, SIZE), np.float32)
        return start, np.random.default_rng(0).normal(0, 0.125, (2, length, SIZE)).astype(np.float32)

    ours = {"in_place(vmap)": in_place(jax.vmap(f)), "vmap(in_place)": jax.vmap(in_place(f))}[order]
    short, long = (compiled(ours, *args_of(length)) for length in (4000, 16000))
    assert_linear_time(short, long, args_of, 4000, limit=9)


@pytest.mark.parametrize("used", [lax.stop_gradient, lambda b: jnp.broadcast_to(b, (2, *b.shape))])
def test_a_version_is_used_by_what_has_its_elements(used):
    """Then the version that may not be selected exists, and rows are put back."""

    def f(b, keeps):
        def step(b, x):
            k, keep = x
            new = b.at[k].set(jnp.sin(b[k - 1]))
            return jnp.where(keep, b, new), jnp.max(used(new))

        return lax.scan(step, b, (jnp.arange(1, len(keeps) + 1), keeps))

    args = FIRST, np.arange(STEPS) % 3 == 0
    got = compiled(in_place(f), *args)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12), got(*args), in_numpy(f)(*args))
    assert not hlo_text.copies_in_loops(got.as_text(), FIRST.nbytes)


def test_a_part_of_a_cotangent_has_the_derivative_of_its_branch():
    """Each branch of a batched `cond` gets the operands with the derivative of the examples that take it."""

    def loss(n, b):
        def step(b, k):
            return lax.cond(k < n, lambda _: b, lambda b: b, b), None

        return jnp.sum(jnp.sin(lax.scan(step, b, jnp.arange(5))[0]))

    n, b = jnp.array([1, 3]), np.linspace(-1, 1, 80).reshape(2, 40)
    gradient = jax.vmap(jax.grad(loss, 1))

    def along(gradient):
        return lambda b: jax.jvp(lambda b: gradient(n, b), (b,), (jnp.cos(b),))[1]

    np.testing.assert_allclose(jax.jit(along(in_place(gradient)))(b), in_numpy(along(gradient))(b), rtol=1e-12)


@pytest.mark.parametrize("order", ["in_place(vmap)", "vmap(in_place)"])
def test_a_buffer_that_goes_on_is_not_written_over_with_another(order):
    """The step returns the state, and it returns it once more where it is better than the best one."""
    f = best_so_far
    states, values = np.sin(np.arange(3 * 2000.0)).reshape(3, -1), np.sin(np.arange(60.0)).reshape(3, -1)
    g = {"in_place(vmap)": in_place(jax.vmap(f)), "vmap(in_place)": jax.vmap(in_place(f))}[order]
    assert_moves_no_more(g, jax.vmap(f), (states, values), states[0].nbytes)
    (end, best, score), found = jax.jit(g)(states, values)
    for n, (state, row) in enumerate(zip(states.copy(), values, strict=True)):
        scores, kept = [], []
        for k, value in enumerate(row):
            state[k] = value
            scores.append(state[:3].sum() + value)
            kept.append(state.copy())
        np.testing.assert_array_equal(end[n], state)
        np.testing.assert_allclose(found[n], scores)
        np.testing.assert_array_equal(best[n], kept[int(np.argmax(scores))])
        np.testing.assert_allclose(score[n], max(scores))


@pytest.mark.parametrize("order", ["in_place(vmap)", "vmap(in_place)"])
def test_what_is_the_same_in_every_step_is_made_before_the_loop(order):
    f = driven_at_one_place
    us, places, steps = np.sin(np.arange(3 * 600.0)).reshape(3, -1), np.array([3, 0, 599]), np.array([5, 0, 2])
    g = {"in_place(vmap)": in_place(jax.vmap(f)), "vmap(in_place)": jax.vmap(in_place(f))}[order]
    assert_moves_no_more(g, jax.vmap(f), (us, places, steps), us[0].nbytes)
    found = jax.jit(g)(us, places, steps)
    for u, place, count, end in zip(us, places, steps, found, strict=True):
        for _ in range(count):
            u = 0.9 * u
            u[place] += 1
        np.testing.assert_allclose(end, u)
