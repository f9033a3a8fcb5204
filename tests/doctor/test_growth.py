"""Growth is what a clock and XLA say of two sizes. A program with fewer steps is that of a smaller problem."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from jax_tensorarray.doctor import (
    Growth,
    GrowthError,
    _growth,
    _quarter,
    _trial,
    forbid_growth,
    growth,
    loop_copies,
    watch,
)
from jax_tensorarray.doctor._report import html

pytestmark = pytest.mark.slow(but=5)


def rows(n):
    return jnp.linspace(0, 1, n * 8, dtype=jnp.float32).reshape(n, 8)


def fill(x):
    return jnp.sum(lax.fori_loop(1, len(x), lambda i, b: b.at[i].set(jnp.sin(b[i // 2]) + x[i]), x) ** 2)


def gram_schmidt(x):
    """Its gradient needs all rows of every step."""

    def body(b, i):
        row = b[i] - b.T @ jnp.where(jnp.arange(len(b)) < i, b @ b[i], 0.0)
        return b.at[i].set(row), None

    return jnp.sum(lax.scan(body, x, jnp.arange(len(x)))[0] ** 2)


def views(q):
    """Each step transposes all of it."""

    def body(h, i):
        return jnp.tanh(h + q.T[i]), None

    return jnp.sum(lax.scan(body, jnp.zeros(len(q), q.dtype), jnp.arange(q.shape[1]))[0])


def flat(x):
    def body(total, i):
        return total + x.reshape(-1)[8 * i], x[i] * 2

    return lax.scan(body, jnp.float32(0), jnp.arange(len(x)))


def attention(q):
    """Each step computes with all rows."""
    return lax.scan(lambda _, i: (_, jax.nn.softmax(q @ q[i]) @ q), 0, jnp.arange(len(q)))[1]


def diffusion(u):
    """Each step computes its state from all of the state."""
    return lax.fori_loop(0, len(u), lambda _, u: u + 0.1 * (jnp.roll(u, 1, 0) - u), u)


def versions(x):
    return lax.scan(lambda b, i: (b.at[i].set(1.0), b), x, jnp.arange(len(x)))


# --- growth of functions -----------------------------------------------------------------------------------------


def test_memory_is_what_xla_allocates_and_time_is_measured():
    found = growth(versions, rows, sizes=(20, 80))
    assert found.sizes == (20, 80)
    kept = 20 * 20 * 8 * 4
    assert kept < found.num_bytes[0] < 1.2 * kept
    assert 12 < found.memory_ratio < 16.1
    assert 1.8 < found.memory_exponent < 2.01
    assert found.time_ratio == found.seconds[1] / found.seconds[0]
    assert found.size_ratio == 4


def test_it_prints_as_one_line():
    found = Growth(sizes=(250, 1000), seconds=(0.001, 0.0152), num_bytes=(100, 400))
    assert str(found) == "4 times the steps, 15 times the time, 4 times the memory"
    assert (found.time_exponent, found.memory_exponent) == pytest.approx((1.963, 1), abs=1e-3)
    same = Growth(sizes=(1, 2), seconds=(1.0, 1.0), num_bytes=(0, 0))
    assert str(same) == "2 times the steps, the same time, the same memory"


def test_sizes_grow_until_a_run_takes_long_enough(monkeypatch):
    monkeypatch.setattr(_growth, "seconds_of", lambda f, args: 1e-4 * len(args()[0]))
    found = growth(jnp.sin, jnp.ones)
    assert found.sizes == (64, 256)
    monkeypatch.setattr(_growth, "seconds_of", lambda f, args: 1e-5 * len(args()[0]))
    assert growth(jnp.sin, jnp.ones).sizes == (256, 1024)


def test_arguments_may_be_several_and_are_made_anew_if_they_are_donated():
    made = []

    def make(n):
        made.append(n)
        return {"x": jnp.ones(n)}, jnp.ones(n)

    f = jax.jit(lambda state, y: {"x": state["x"] + y}, donate_argnums=0)
    found = growth(f, make, sizes=(1000, 4000))
    assert made.count(4000) > 3
    assert found.num_bytes == (0, 0)  # the results are where the arguments were
    assert found.memory_ratio == 1


def test_growth_can_be_forbidden(monkeypatch):
    monkeypatch.setattr(_growth, "seconds_of", lambda f, args: 1e-3 * len(args()[0]))
    assert forbid_growth(jnp.sin, jnp.ones, sizes=(10, 40)).time_ratio == 4
    with pytest.raises(
        GrowthError, match=r"forbid_growth: 4 times the steps, 4 times the time, 1. times the memory, from 50 to 200 "
    ) as error:
        forbid_growth(versions, rows, sizes=(50, 200))
    assert error.value.growth.sizes == (50, 200)
    assert forbid_growth(versions, rows, sizes=(50, 200), memory=20).memory_ratio > 12
    with pytest.raises(GrowthError, match="but 3 times the time is allowed"):
        forbid_growth(jnp.sin, jnp.ones, sizes=(10, 40), time=3)


def test_what_takes_too_long_is_measured_once_more(monkeypatch):
    times = iter([1.0, 16.0, 1.0, 4.0])
    monkeypatch.setattr(_growth, "seconds_of", lambda f, args: next(times))
    assert forbid_growth(jnp.sin, jnp.ones, sizes=(10, 40)).time_ratio == 4


@pytest.mark.parametrize("of", [growth, forbid_growth])
@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "text"),
    [
        ((1, jnp.ones), {}, TypeError, "fun must be a function, not int"),
        ((jnp.sin, np.ones(3)), {}, TypeError, "make_args must be a function, not ndarray"),
        ((jnp.sin, jnp.ones), {"sizes": (1.0, 2)}, TypeError, r"sizes must be two integers, but they are \(1.0, 2\)"),
        ((jnp.sin, jnp.ones), {"sizes": 3}, TypeError, "sizes must be two integers, but they are 3"),
        ((jnp.sin, jnp.ones), {"sizes": (4, 4)}, ValueError, r"sizes must be two positive integers that grow, but"),
        ((jnp.sin, jnp.ones), {"sizes": (0, 4)}, ValueError, "sizes must be two positive integers"),
    ],
)
def test_bad_arguments_are_refused(of, arguments, keywords, error, text):
    with pytest.raises(error, match=f"{of.__name__}: {text}"):
        of(*arguments, **keywords)


@pytest.mark.parametrize("allowed", [{"time": 0}, {"memory": "4"}])
def test_what_is_allowed_is_a_positive_number(allowed):
    with pytest.raises(ValueError, match=f"forbid_growth: {next(iter(allowed))} must be None or a positive number"):
        forbid_growth(jnp.sin, jnp.ones, **allowed)


# --- a quarter of the steps --------------------------------------------------------------------------------------


def gradient(f):
    return jax.grad(lambda x: jnp.sum(f(x)))


@pytest.mark.parametrize(
    "f", [fill, flat, lambda x: views(x.T), attention, versions, gradient(fill), gradient(gram_schmidt)]
)
def test_a_quarter_of_the_steps_is_the_same_function_of_fewer_rows(f):
    jaxpr, steps, few = _quarter.quartered(jax.make_jaxpr(f)(rows(200)))
    assert (steps, few) in {(200, 50), (199, 49)}
    got, expected = jax.jit(jaxpr_as_fun(jaxpr))(rows(50)), jax.tree.leaves(jax.jit(f)(rows(50)))
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("f", "x"),
    [
        (fill, rows(20)),  # a short loop
        (lambda x: lax.scan(lambda h, row: (jnp.tanh(x @ h + row), None), x[0], x)[0], jnp.eye(64)),  # width or steps?
        (lambda x: fill(x) + fill(x[:100]), rows(200)),  # two loops
        (lambda x: lax.fori_loop(0, x[0, 0].astype(int), lambda i, b: b.at[i].set(1.0), x), rows(200)),
        (jnp.sin, rows(200)),
        (lambda x: fill(jnp.pad(x, ((28, 28), (0, 0)))[x.shape[0] // 7 :][:200]), rows(200)),
    ],
)
def test_programs_whose_steps_are_not_safely_known_are_left(f, x):
    assert _quarter.quartered(jax.make_jaxpr(f)(x)) is None


def fake_seconds(f, make_args):
    """A clock for which a program is quadratic in its longest axis, unless it has row ops."""
    return 0.1 * (max(max(x.shape, default=0) for x in make_args()) / 200) ** 2


def test_a_program_that_grows_though_nothing_is_copied_is_found(monkeypatch):
    monkeypatch.setattr(_trial, "seconds_of", fake_seconds)
    with watch() as report:
        jax.jit(views)(rows(200).T)
        jax.jit(attention)(rows(200))  # these grow as well, but compute with all rows
        jax.jit(diffusion)(rows(200))
    assert report.cases == []
    report.try_in_place()
    (case,) = report.cases
    assert case.program == "views"
    text = " ".join(str(report).split())
    assert re.search(
        r"The time of 1 program grows faster than the steps\. 1\. views: 4 times the steps, 16 times", text
    )
    before, _ = report.as_json()["cases"][0]["in_place"]["growth"]
    assert (before["time_ratio"], before["sizes"]) == (16, (50, 200))


# --- what a gradient keeps ---------------------------------------------------------------------------------------


def test_what_a_gradient_keeps_is_listed_the_largest_first():
    n, m = 300, 8
    found = loop_copies(jax.grad(gram_schmidt))(rows(n))
    sizes = [kept.num_bytes for kept in found.kept]
    assert sizes == sorted(sizes, reverse=True)
    whole = n * n * m * 4
    assert [(kept.steps, kept.num_bytes) for kept in found.kept if len(kept.shape) == 2] == [(n, whole)] * 2
    assert {tuple(sorted(kept.shape)) for kept in found.kept[:2]} == {(m, n)}
    before, after = found.memory
    assert sum(sizes) < before < 1.5 * sum(sizes)
    assert after < before / 5
    report = str(found)
    assert re.search(r"\nThe gradient keeps 5\.\d MiB for all steps.*\n- float32\[", report)
    code = {kept.code for kept in found.kept[:2]}
    assert any("b.T @" in line or "lax.scan" in line for line in code)
    assert all(kept.file == __file__ for kept in found.kept)


def test_rows_that_a_gradient_keeps_are_known_and_no_reason_to_say_anything():
    def f(x):
        return jnp.sum(lax.scan(lambda h, row: (jnp.tanh(h + row), None), jnp.zeros(8, jnp.float32), x)[0])

    found = loop_copies(jax.grad(f), min_bytes=0)(rows(100))
    assert {(kept.dtype, kept.shape, kept.steps) for kept in found.kept} == {("float32", (8,), 100)}
    assert found.kept[0].num_bytes == 100 * 8 * 4
    assert "jnp.tanh" in found.kept[0].code
    assert str(found).count("\n") == 0
    assert loop_copies(f, min_bytes=0)(rows(100)).kept == []
    assert loop_copies(jax.grad(f), min_bytes=10**4)(rows(100)).kept == []


def test_the_report_says_how_a_gradient_grows_and_lists_what_it_keeps(monkeypatch):
    monkeypatch.setattr(_trial, "seconds_of", fake_seconds)
    monkeypatch.setattr(_trial, "_PATIENCE", float("inf"))  # a busy machine compiles for long
    with watch() as report:
        jax.jit(jax.grad(gram_schmidt))(rows(200))
    report.try_in_place()
    text = " ".join(str(report).split())
    first = (
        r"1\. gram_schmidt: \S+ MiB copied per run, the gradient keeps 2\.\d MiB; 4 times the steps, 16 times the time "
    )
    assert re.search(first + "under in_place:", text)
    assert re.search(
        r"The gradient keeps 2\.\d MiB .* XLA needs \S+ MiB for results and temporary arrays; under in", text
    )
    (case,) = report.as_json()["cases"]
    assert case["kept"][0]["num_bytes"] == 200 * 200 * 8 * 4
    assert "The gradient keeps 2." in html(report, "a page")
