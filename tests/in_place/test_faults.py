"""A fault of this library in a rewrite: the program runs as it is written, and one warning says whose fault it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters import ad, batching

from jax_tensorarray import _faults, in_place
from jax_tensorarray._in_place.repair import Repair
from jax_tensorarray._loops.while_ import ta_while_p
from jax_tensorarray._lowering import program
from jax_tensorarray.residuals import Checkpoint

X = jnp.linspace(0.1, 1, 6)


def filled(x):
    return lax.fori_loop(1, len(x), lambda i, b: b.at[i].set(jnp.sin(b[i - 1])), x)


FAULTS = [KeyError("a"), StopIteration(), AssertionError("b"), AttributeError("c")]

ORDERS = {
    "value": lambda f: f,
    "jit": jax.jit,
    "gradient": lambda f: jax.grad(lambda x: f(x).sum()),
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, 2 * x])),
}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(("order", "fault"), list(zip(ORDERS, FAULTS, strict=True)))
def test_a_program_that_cannot_be_rewritten_runs_as_it_is(order, fault, monkeypatch):
    def fails(*args, **kwargs):
        raise fault

    want = ORDERS[order](filled)(X)
    with monkeypatch.context() as patch:
        patch.setattr(Repair, "evaluate", fails)
        with pytest.warns(RuntimeWarning, match=f"a fault of jax_tensorarray, .* {type(fault).__name__}") as warned:
            got = ORDERS[order](in_place(filled))(X)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert len(warned) == 1 and warned[0].filename == __file__


def test_a_fault_in_a_rule_of_a_loop_leaves_the_program_as_it_is(monkeypatch):
    def f(x):  # under in_place it is a loop of ours
        return lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1].at[c[0]].set(jnp.sin(c[1][0]))), (0, x))[1]

    def fails(*args, **kwargs):
        raise StopIteration

    def derivative(f):
        return lambda x: jax.jvp(f, (x,), (x,))[1]

    for order, table in ((derivative, ad.primitive_jvps), (ORDERS["vmap"], batching.fancy_primitive_batchers)):
        monkeypatch.setitem(table, ta_while_p, _faults.named(fails, "a rule"))
        with pytest.warns(RuntimeWarning, match=r"a fault of jax_tensorarray, .*: a rule failed with StopIteration"):
            got = order(in_place(lambda x: f(x)))(X)
        np.testing.assert_allclose(got, order(f)(X), rtol=1e-6)


def test_an_error_of_the_program_is_its_own_and_the_program_is_traced_once():
    traced = []

    def f(x):
        traced.append("once")
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        in_place(f)(X)
    assert traced == ["once"]


def test_an_error_on_purpose_stays_an_error(monkeypatch):
    def fails(*args, **kwargs):
        raise ValueError("in_place: more than max_steps steps: a lax.while_loop takes more than 3")

    monkeypatch.setattr(Repair, "evaluate", fails)
    with pytest.raises(ValueError, match="more than max_steps"):
        in_place(filled)(X)
    for name in ("in_place", "while_loop", "ta_read", "Inverse", "tf.scan", "fori_loop"):
        assert _faults._ON_PURPOSE.match(f"{name}: text")


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("number", range(len(program.PASSES)), ids=[p.name for p in program.PASSES])
def test_a_program_is_lowered_without_a_pass_that_fails(number, monkeypatch):
    def fails(*args, **kwargs):
        raise KeyError("a variable")

    one = program.PASSES[number]
    if not one.applies_to(program.target_of(("cpu",), True)):
        one = one._replace(applies_to=lambda target: True)
    passes = [*program.PASSES]
    passes[number] = one._replace(run=fails)

    def f(x):
        def body(c):
            i, b = c
            old = b[i // 2]
            return i + 1, lax.cond(i % 2 == 0, lambda b: b.at[i].set(old), lambda b: b.at[i].add(b[i - 1]), b)

        return lax.while_loop(lambda c: c[0] < len(x), body, (1, x))[1]

    want = f(X)
    monkeypatch.setattr(program, "PASSES", tuple(passes))
    with pytest.warns(RuntimeWarning, match="a fault of jax_tensorarray, .* KeyError: 'a variable'"):
        got = in_place(lambda x: f(x))(X)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_checkpoint_is_named_in_errors_on_purpose():
    with pytest.raises(ValueError, match=r"^Checkpoint: "):
        in_place(filled, residuals=Checkpoint(0))
