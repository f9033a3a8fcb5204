"""`explain` says what becomes of reads, writes and selects under `in_place`, and why, by names that have a page."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_tensorarray import in_place, ta_read, ta_write
from jax_tensorarray.doctor import explain, loop_copies
from jax_tensorarray.doctor._reasons import REASONS

pytestmark = pytest.mark.slow(but=6)

B = jax.ShapeDtypeStruct((64, 8), jnp.float32)


@pytest.fixture(autouse=True)
def as_users_run_it():
    with jax.enable_x64(False):
        yield


def fates(explanation):
    return [(x.kind, x.became, x.reason) for x in explanation]


# --- what it becomes -------------------------------------------------------------------------------------------


def row(b, i):
    return jnp.sin(b[i - 1])


def masked(b, i):
    return jnp.where(i % 3 == 0, b.at[i].set(row(b, i)), b)


def put_back(b, i):
    new = b.at[i].set(row(b, i))
    return jnp.where(i % 3 == 0, new.at[0].add(new[i]), b)


def shifted(b, i):
    return jnp.roll(b, -1, 0).at[-1].set(jnp.sin(b[0]))


def viewed(b, i):
    return b.at[:, i % 8].set((2 * b).T[(i + 1) % 8])


def chosen(b, i):
    new = b.at[i].set(0.0)
    return lax.cond(i % 3 == 0, lambda: new, lambda: b)


def multiplied(b, i):
    return b.at[i].multiply(2.0)


def added(b, i):
    return b.at[i].add(1.0)


def by_ops(b, i):
    return ta_write(b, i, ta_read(b, i - 1))


WRITTEN = ("write", "ta_write", "")
READ = ("read", "ta_read", "")


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (masked, [READ, WRITTEN, ("select", "a masked write", "")]),
        (put_back, [READ, WRITTEN, ("write", "ta_add", ""), ("select", "a write that puts the old rows back", "")]),
        (shifted, [("shift", "a ring buffer", ""), READ, WRITTEN]),
        (viewed, [WRITTEN, ("read", "a read of rows of what it is computed from", "")]),
        (chosen, [WRITTEN, ("select", "a masked write", "")]),
        (multiplied, [("write", "a ta_read and a ta_write", "")]),
        (added, [("write", "ta_add", "")]),
        (by_ops, []),
    ],
)
def test_what_a_step_becomes(step, expected):
    found = explain(lambda b: lax.fori_loop(1, 64, lambda i, b: step(b, i), b))(B)
    assert set(fates(found)) == set(expected), found
    assert {x.shape for x in found} <= {B.shape, B.shape[::-1]}


def exchange(b):
    def body(i, c):
        return c[1].at[i].set(jnp.sin(c[0][i - 1])), c[0]

    return lax.fori_loop(1, 64, body, (b, 2 * b))


def exchange_in_jit(b):
    updated = jax.jit(lambda a, b, i: b.at[i].set(jnp.sin(a[i - 1])))
    return lax.fori_loop(1, 64, lambda i, c: (updated(*c, i), c[0]), (b, 2 * b))


def exchange_of_ops(b):
    def body(i, c):
        return ta_write(c[1], i, jnp.sin(c[0][i - 1])), c[0]

    return lax.fori_loop(1, 64, body, (b, 2 * b))


def twins(b):
    def body(i, c):
        new = c[0].at[i].set(c[1][i - 1])
        return new, new

    return lax.fori_loop(1, 64, body, (b, b))


def layers(b):
    def layer(h, c):
        c = c.at[3].set(jnp.sin(h))
        return h + c[2], c

    return lax.scan(layer, jnp.ones(8), jnp.stack([b, b]))


def cache(b, of=lambda keys: keys):
    keys = jnp.zeros((2, 64, 4, 8))

    def body(t, c):
        keys, q = c
        keys = keys.at[:, t].set(q)
        return keys, q + jnp.einsum("bhd,blhd->bhl", q, of(keys)).mean()

    return lax.fori_loop(0, 64, body, (keys, jnp.ones((2, 4, 8))))


def cache_of_logarithms(b):
    return cache(b, jnp.exp)


@pytest.mark.parametrize(
    ("loop", "fate"),
    [
        *((loop, ("exchange", "2 steps in one", "")) for loop in (exchange, exchange_in_jit, exchange_of_ops)),
        (twins, ("carry", "one carry with another that equals it", "")),
        (layers, ("slice", "a part of the carry of the scan", "")),
        *((loop, ("layout", "its axes in the order (0, 2, 1, 3)", "")) for loop in (cache, cache_of_logarithms)),
    ],
)
def test_what_the_carry_of_a_loop_becomes(loop, fate):
    assert fate in fates(explain(loop)(B))


def test_what_is_chosen_between_as_a_whole_is_listed_also_where_no_rows_are():
    def passing(a, b):
        return lax.fori_loop(0, 9, lambda i, c: lax.cond(i > 3, lambda: a, lambda: c), b)

    def until(b, n):
        def body(c):
            i, b, state = c
            return i + 1, b.at[i].set(0.0), jnp.tanh(state @ state)

        return lax.while_loop(lambda c: c[0] < n, body, (0, b, b[:8]))[1:]

    assert fates(explain(passing)(B, B)) == [("select", "", "another-buffer")]
    of_examples = explain(jax.vmap(until, (None, 0)))(B, jnp.arange(3))
    assert {x.shape: x.reason for x in of_examples if x.kind == "select"} == {(3, 8, 8): "made-in-the-step"}


def test_under_in_place_the_doctor_knows_the_line_of_what_jax_has_jitted():
    def f(b):
        def body(i, c):
            b, total = c
            b = b.at[i].set(jnp.tanh(total))
            return jnp.where(b > i, b, total), total + b[i - 1]

        return lax.fori_loop(0, 64, body, (b, b[0]))

    [select] = [copy for copy in loop_copies(in_place(f), min_bytes=0)(B) if copy.kind == "select"]
    assert "jnp.where(" in select.code


def test_a_loop_in_a_loop_is_listed_once_and_what_a_line_has_is_counted():
    def body(c, x):
        def layer(h, b):
            b = b.at[3].set(h + b[0] + b[1] + b[2])
            return h, b

        return lax.scan(layer, x, c)[1], None

    found = explain(lambda b, xs: lax.scan(body, jnp.stack([b, b]), xs)[0])(B, B)
    assert {(x.kind, x.became): x.times for x in found if x.kind in ("read", "write")} == {
        ("read", "ta_read"): 3,
        ("write", "ta_write"): 1,
    }
    assert "read of float32[64, 8]: ta_read (3 times)" in str(found)


# --- how it is called ------------------------------------------------------------------------------------------


def fill(b, steps, *, kind="sin"):
    f = {"sin": jnp.sin, "cos": jnp.cos}[kind]
    return lax.fori_loop(1, steps, lambda i, b: b.at[i].set(f(b[i - 1])), b)


def test_arguments_are_those_of_in_place_and_nothing_runs():
    ran = []

    def f(b, steps, kind):
        jax.debug.callback(lambda: ran.append(1))
        return fill(b, steps, kind=kind)

    expected = [WRITTEN, READ]
    for args in [(B, 64, "sin"), (np.ones((64, 8), np.float32), 64, "cos"), (jnp.ones((64, 8)), 64, "sin")]:
        assert sorted(fates(explain(f)(*args))) == sorted(expected)
    assert sorted(fates(explain(f, static_argnums=(1,), static_argnames="kind")(B, 64, kind="cos"))) == sorted(expected)
    assert not ran


def test_gradients_and_batches_are_explained_on_the_lines_of_the_function():
    line = fill.__code__.co_firstlineno + 2
    batched = explain(jax.vmap(lambda b: fill(b, 64)))(jnp.ones((3, 64, 8)))
    assert {(x.file, x.line, x.shape) for x in batched} == {(__file__, line, (3, 64, 8))}
    differentiated = explain(jax.grad(lambda b: fill(b, 64).sum()))(B)
    assert {READ, WRITTEN} <= set(fates(differentiated))
    assert {(x.file, x.line) for x in differentiated} == {(__file__, line)}


def test_what_a_derivative_makes_of_a_loop_of_the_user_is_in_no_loop_of_the_library():
    def f(b):
        def step(c, i):
            b, h = c
            row = jnp.roll(b[i - 1], 1)
            b = b.at[i].set(jnp.sin(row + jnp.sum(b[2:60], 0) + jnp.repeat(h, 2)))
            return (b, jnp.tanh(row)[:4] + b[i // 2][4:]), None

        chunk = jax.checkpoint(lambda c, rows: lax.scan(step, c, rows))
        return lax.scan(chunk, (b, b[0, :4]), jnp.arange(1, 61).reshape(6, 10))[0][1].sum()

    buffer = jnp.ones((64, 8))
    for g, b in ((jax.grad(f), buffer), (jax.vmap(jax.grad(f)), jnp.stack([buffer, buffer]))):
        found = explain(g)(b)
        assert {READ, WRITTEN} <= set(fates(found))
        assert "library-loop" not in {x.reason for x in found}


def test_what_jax_has_traced_before_is_explained_and_in_place_stays_what_it_was():
    inner = jax.jit(jax.grad(lambda b: fill(b, 64).sum()))
    before = str(jax.make_jaxpr(in_place(lambda b: inner(b)))(B))
    first, second = (explain(lambda b: inner(b))(B) for _ in range(2))
    assert READ in fates(first) and first == second
    assert str(jax.make_jaxpr(in_place(lambda b: inner(b)))(B)) == before


def test_with_max_steps_a_while_loop_has_a_derivative():
    def f(b):
        return lax.while_loop(lambda c: c[0] < 64, lambda c: (c[0] + 1, c[1].at[c[0]].set(0.0)), (0, b))[1]

    assert "no-bound" in {x.reason for x in explain(f)(B)}
    assert "no-bound" not in {x.reason for x in explain(f, max_steps=64)(B)}


def test_a_report_has_lines_code_names_and_advice_and_an_empty_one_is_one_line():
    def f(b, a):
        return lax.fori_loop(1, 64, lambda i, c: lax.cond(i > 5, lambda: c.at[i].set(c[i - 1]), lambda: a), b)

    found = explain(f)(B, B)
    line = f.__code__.co_firstlineno + 1
    assert str(found).startswith("Reads, writes and selects of rows: 3. Not rewritten: 1.\n")
    assert f"test_explain.py:{line}\n    return lax.fori_loop(1, 64, lambda i, c: lax.cond(" in str(found)
    text, advice = REASONS["another-buffer"]
    assert "  select of float32[64, 8]: not rewritten [another-buffer]\n" in str(found)
    assert f"{text} {advice}" in " ".join(str(found).split())
    assert [x.line for x in found] == sorted(x.line for x in found)
    assert str(explain(jnp.sin)(B)).count("\n") == 0


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((np.ones(3),), {}, TypeError, "explain: the first argument must be a function, not ndarray. Write explain"),
        ((fill,), {"max_steps": 1.5}, TypeError, "explain: max_steps must be a Python integer, got 1.5"),
        ((fill,), {"max_steps": -1}, ValueError, "explain: max_steps must not be negative, got -1"),
        ((fill,), {"residuals": "all"}, ValueError, "explain: "),
        ((fill,), {"residuals": "tape", "memory": 10}, ValueError, "explain: memory is for"),
    ],
)
def test_bad_arguments_are_refused(arguments, options, error, text):
    with pytest.raises(error, match=re.escape(text)):
        explain(*arguments, **options)
