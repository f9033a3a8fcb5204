"""The examples that fit and train: a solver as SciPy's, a memory as Python's deque, a model as its plain twin."""

import functools
import re
import sys
from collections import deque
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_numpy import in_numpy
from jax import jit
from scipy.integrate import RK45, solve_ivp
from scripts import example

pytestmark = pytest.mark.slow

ode = example("ode")
replay = example("replay_buffer")

# --- differential equations ------------------------------------------------------------------------------------

RATES = np.log(ode.PUBLISHED)


def hares_and_lynxes(t, y):
    births, eaten, deaths, gained = ode.PUBLISHED[:4]
    return [(births - eaten * y[1]) * y[0], (gained * y[0] - deaths) * y[1]]


def forced_relaxation(t, y):
    """Van der Pol's oscillator with a force: a field that depends on time, and steps that are often rejected."""
    return [y[1], 5 * (1 - y[0] ** 2) * y[1] - y[0] + t * (20 - t) / 50]


EQUATIONS = {
    "hares and lynxes": (hares_and_lynxes, 1900.0, 1920.0, ode.PUBLISHED[4:]),
    "forced relaxation": (forced_relaxation, 0.0, 20.0, (1.0, 0.0)),
}


@functools.cache
def solver(name):
    field, t0, t1, _ = EQUATIONS[name]
    times = np.linspace(t0, t1, 101)

    @jit
    def f(y0, tolerance):
        found = ode.solve(lambda t, y: jnp.stack(field(t, y)), y0, t0, t1, tolerance=tolerance)
        return ode.evaluate(found[0], times), *found

    return f, times


@pytest.mark.parametrize("tolerance", [1e-3, 1e-5, 1e-8])
@pytest.mark.parametrize("name", EQUATIONS)
def test_the_solver_takes_the_steps_of_scipy(name, tolerance):
    field, t0, t1, y0 = EQUATIONS[name]
    (f, times), options = solver(name), {"rtol": tolerance, "atol": tolerance, "first_step": 0.1}
    values, pieces, rejected, done = f(jnp.array(y0), tolerance)
    wanted = solve_ivp(field, (t0, t1), y0, "RK45", dense_output=True, **options)
    assert done and len(pieces) == len(wanted.t) - 1
    assert 6 * (len(pieces) + int(rejected)) + 1 == wanted.nfev
    assert rejected > 0
    np.testing.assert_allclose(pieces.stack().start, wanted.t[:-1], rtol=0, atol=1e-6)
    np.testing.assert_allclose(values, wanted.sol(times).T, rtol=1e-6, atol=1e-6)


def unrolled_loss(params, steps):
    """The same by SciPy's tables, over steps whose lengths are known."""
    births, eaten, deaths, gained, *y = jnp.exp(params)
    y, t, found = jnp.stack(y), ode.YEARS[0], []
    for k, h in enumerate(steps):
        slopes = []
        for weights in [*RK45.A, RK45.B]:
            hares, lynxes = y + h * sum((w * s for w, s in zip(weights, slopes, strict=False)), jnp.zeros(2))
            slopes.append(jnp.stack([(births - eaten * lynxes) * hares, (gained * hares - deaths) * lynxes]))
        end = t + h if k + 1 < len(steps) else np.inf
        for year in ode.YEARS[(t <= ode.YEARS) & (end > ode.YEARS)]:
            powers = ((year - t) / h) ** np.arange(1, 5)
            found.append(y + h * sum(w * s for w, s in zip(RK45.P @ powers, slopes, strict=True)))
        t, y = end, jnp.stack([hares, lynxes])
    return jnp.mean((jnp.log(jnp.stack(found)) - np.log(ode.PELTS)) ** 2)


@jit
def gradient(params, tolerance):
    return jax.value_and_grad(ode.loss, has_aux=True)(params, tolerance=tolerance)


def test_the_loss_has_the_gradient_of_the_unrolled_steps():
    (value, (accepted, rejected)), grad = gradient(jnp.asarray(RATES), 1e-4)
    *_, start = RATES.reshape(3, 2)
    run = solve_ivp(hares_and_lynxes, (1900, 1920), np.exp(start), rtol=1e-4, atol=1e-4, first_step=0.1)
    assert accepted == len(run.t) - 1 and rejected > 0
    wanted, slope = in_numpy(jax.value_and_grad(lambda params: unrolled_loss(params, np.diff(run.t))))(RATES)
    np.testing.assert_allclose(value, wanted, rtol=1e-8)
    np.testing.assert_allclose(grad, slope, rtol=1e-7, atol=1e-9)


def test_of_a_batch_each_ends_by_itself():
    guesses = ode.make_guesses(5)
    together, alone = jax.vmap(gradient, (0, None))(guesses, 1e-4), [gradient(params, 1e-4) for params in guesses]
    jax.tree.map(
        lambda found, *wanted: np.testing.assert_allclose(found, jnp.stack(wanted), rtol=1e-9), together, *alone
    )
    (_, (accepted, rejected)), _ = together
    assert len(np.unique(accepted)) > 2 and len(np.unique(rejected)) > 2


def test_a_solution_that_needs_more_steps_than_there_may_be_says_so():
    value, (accepted, _) = jit(lambda params: ode.loss(params, max_steps=10))(jnp.asarray(RATES))
    assert np.isinf(value) and accepted <= 10


# --- a replay buffer -------------------------------------------------------------------------------------------


def transitions(first, number):
    k = np.arange(first, first + number)
    return {"seen": np.stack([k, k * k], axis=1).astype(np.float32), "reward": (k / 2).astype(np.float32)}


def in_order(memory):
    """The rows, the oldest first."""
    rows = jax.tree.map(np.asarray, memory.rows.stack())
    filled, first = int(memory.filled), int(memory.next)
    order = (np.arange(filled) + (first if filled == len(memory.rows) else 0)) % len(memory.rows)
    return jax.tree.map(lambda x: x[order], rows)


remember = jax.jit(replay.remember, donate_argnums=0)


def pointers(memory):
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(memory.rows)]


@pytest.mark.parametrize("capacity", [1, 7, 16])
def test_the_memory_has_what_a_deque_has_and_stays_where_it_is(capacity):
    memory = replay.new_replay(jax.tree.map(lambda x: x[0], transitions(0, 1)), capacity)
    kept, before, total = deque(maxlen=capacity), pointers(memory), 0
    for number in [1, 1, 5, 5, 1, 11, 5, 1]:  # 11 are more than there is room for
        new = transitions(total, number)
        memory, total = remember(memory, new), total + number
        kept.extend(range(total - number, total))
        assert pointers(memory) == before
        wanted = [jax.tree.map(lambda x: x[0], transitions(k, 1)) for k in kept]
        jax.tree.map(np.testing.assert_array_equal, in_order(memory), jax.tree.map(lambda *x: np.stack(x), *wanted))


# --- flax ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def flax_training():
    for name in ("flax.nnx", "optax"):
        pytest.importorskip(name, reason=f"{name} is not installed: pip install '.[ecosystem]'")
    return example("flax_training")


def test_a_flax_model_has_the_gradient_of_the_unrolled_program(flax_training):
    ours = flax_training
    model, program = ours.Machine(ours.nnx.Rngs(0)), ours.make_program(np.random.default_rng(1), 6)
    graph, params = ours.nnx.split(model)

    def loop(params):
        return ours.LOSSES["after"](ours.nnx.merge(graph, params), program)

    def unrolled(params):
        model, states = ours.nnx.merge(graph, params), []
        for operator, *lines in zip(*program[:3], strict=True):
            a, b = (states[k] if k < len(states) else jnp.zeros(ours.HIDDEN, jnp.float32) for k in lines)
            states.append(model.line(operator, a, b))
        odds = model.answer(jnp.stack(states))[:, 0]
        return jnp.mean(jnp.where(program.bit == 1, jnp.logaddexp(0.0, -odds), jnp.logaddexp(0.0, odds)))

    found, wanted = jit(jax.value_and_grad(loop))(params), jax.value_and_grad(unrolled)(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, wanted)


def test_only_the_plain_loss_of_a_flax_model_copies_its_buffer(flax_training):
    before, after = (flax_training.copies(loss, 30) for loss in flax_training.LOSSES.values())
    assert {copy.in_gradient for copy in before} == {False, True}
    assert {copy.shape for copy in before} == {(30, flax_training.HIDDEN)}
    assert all(copy.code in Path(flax_training.__file__).read_text() for copy in before)
    assert after == []


def test_without_flax_the_example_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flax", None)
    with pytest.raises(SystemExit, match="This example needs flax and optax: pip install flax optax"):
        example("flax_training")


# --- a tree search ---------------------------------------------------------------------------------------------


def test_tree_search_finds_what_exhaustive_search_finds(monkeypatch, capsys):
    pytest.importorskip("mctx")
    search = example("tree_search")
    monkeypatch.setattr(search, "seconds", lambda *_: 1e-3)  # each compiles one more search
    moves = search.main(sizes=(8,))
    assert all(move in search.best(position)[1] for position, move in zip(search.POSITIONS, moves, strict=True))
    printed = capsys.readouterr().out
    assert "The trees are the same, bit for bit." in printed
    assert re.search(r"8 +125\.0 +125\.0 +1\.0$", printed, re.MULTILINE)
    assert "in_place: 0 operations on whole trees" in printed and "plain JAX: 0" not in printed


def test_without_mctx_the_tree_search_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mctx", None)
    with pytest.raises(SystemExit, match="This example needs mctx: pip install mctx"):
        example("tree_search")


# --- scripts ---------------------------------------------------------------------------------------------------


def test_the_script_fits_hares_and_lynxes(capsys):
    best, value = ode.main(updates=60)
    printed = capsys.readouterr().out
    np.testing.assert_allclose(np.exp(best), ode.PUBLISHED, rtol=0.1)
    assert value < 0.25**2
    lines = printed.splitlines()
    assert sum(line.count("H") for line in lines[-20:]) > 15
    assert next(line for line in lines if line.startswith("steps")).count("|") > 20


def test_the_script_of_the_replay_buffer_draws_the_ways(capsys):
    found = replay.main(rounds=3, sizes=(64,))
    printed = capsys.readouterr().out
    assert printed.count("The memory is where it was.") == 2
    assert printed.count("^ # # # # # # # # # # G") == 2
    assert len(found["wind"]) == len(found["calm"]) == 3


def test_the_script_of_the_flax_model_compares(flax_training, capsys):
    losses = flax_training.main(updates=3, length=20, lengths=(20,))
    printed = capsys.readouterr().out
    assert "after: 0 operations copy the buffer" in printed and "before: 0" not in printed
    np.testing.assert_allclose(losses["after"], losses["before"], rtol=1e-5)
