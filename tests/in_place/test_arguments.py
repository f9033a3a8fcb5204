"""Arguments and results under `in_place`: floats, objects and pytrees of any kind come out as from the function.

The oracle is the function itself, in plain JAX.
"""

import copy
import dataclasses
import functools
import pickle
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_tensorarray import in_place

X = jnp.linspace(0.1, 1, 6)


def filled(x):
    return lax.fori_loop(1, len(x), lambda i, b: b.at[i].set(jnp.sin(b[i - 1])), x)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w", "scale", "act"], meta_fields=[])
@dataclasses.dataclass
class Module:
    """A pytree as Equinox and Flax have them: a float in it is not an array."""

    w: Any
    scale: Any = 0.5
    act: Any = jnp.tanh


class Params(NamedTuple):
    w: Any
    rate: Any


def same(got, want):
    """Compare results: values, types of Python and structure."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert isinstance(x, jax.Array) == isinstance(y, jax.Array)
        if isinstance(y, jax.Array):
            np.testing.assert_allclose(x, y, rtol=1e-6)
            assert x.dtype == y.dtype and x.weak_type == y.weak_type
        else:
            assert x is y or (type(x), x) == (type(y), y)


def inside_jit(f):
    """Return `f` called by a jitted function, with all of its results."""

    def g(x, *args):
        results = []

        @jax.jit
        def jitted(x):
            results.append(f(x, *args))
            return results[0][0]

        return jitted(x), *results[0][1:]

    return g


PLACES = {"in_place": in_place, "jit(in_place)": lambda f: inside_jit(in_place(f))}


@pytest.mark.parametrize("place", PLACES)
def test_a_float_is_traced_in_a_built_in_container_and_stays_a_float_in_any_other_node(place):
    seen = []

    def f(x, bare, tree, module):
        floats = bare, tree["a"][0], tree["b"].rate, tree["c"][1], module.scale
        seen.append([isinstance(y, jax.core.Tracer) for y in floats])
        return filled(x) * sum(floats), module

    args = X, 0.5, {"a": [1.5], "b": Params(X, 2.5), "c": (X, 1j)}, Module(X, 0.25)
    got, module = PLACES[place](f)(*args)
    np.testing.assert_allclose(got, f(*args)[0], rtol=1e-6)
    assert seen[0] == [True, True, True, True, False] and type(module.scale) is float and module.scale == 0.25


def test_a_float_of_a_module_that_the_function_changes_stays_a_float():
    def f(m):
        return dataclasses.replace(m, scale=m.scale * 0.5, w=filled(m.w) * m.scale)

    module, plain = Module(X), Module(X)
    for _ in range(3):
        module, plain = in_place(f)(module), f(plain)
    same(module, plain)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("value", [0.0, -0.0, float("nan"), 1, True, 1.0, 1 + 0j])
def test_numbers_that_compare_equal_are_told_apart(value):
    f = in_place(lambda m, x: (filled(x), repr(m.scale)))
    for other in (0.0, -0.0, 1, True, 1.0, 1 + 0j):
        f(Module(X, other), X)
    assert f(Module(X, value), X)[1] == repr(value)


def test_floats_that_pass_through_come_back_and_cost_no_further_trace():
    traced = []

    @in_place
    def f(x, rate):
        traced.append(type(rate))
        return filled(x) * rate, {"rate": rate, "half": rate / 2}

    for rate in (0.1, 0.2, 0.3):
        _, rates = f(X, rate)
        assert type(rates["rate"]) is float and rates["rate"] == rate and isinstance(rates["half"], jax.Array)
    assert len(traced) == 1
    got, want = (g(Params(X, 0.1)) for g in (in_place(lambda p: p), lambda p: p))
    same(got, want)


class Swish:
    def __init__(self, beta=1.0):
        self.beta = beta

    def __call__(self, x):
        return x * jax.nn.sigmoid(self.beta * x)


OBJECTS = {
    "function": jnp.tanh,
    "lambda": lambda x: x + 1,
    "partial": functools.partial(jnp.multiply, 3.0),
    "object": Swish(),
    "method": Swish(2.0).__call__,
    "sentinel": object(),
    "unhashable": [Swish(), {1: 2}],
    "strings": np.array(["a"]),
    "class": Swish,
}


@pytest.mark.slow(but=5)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_that_is_passed_in_comes_back(name, place):
    given = OBJECTS[name]

    def f(x, m):
        return filled(x), m, [m.act]

    for _ in range(2):
        _, module, [again] = PLACES[place](f)(X, Module(X, act=given))
        for found in (module.act, again):
            assert all(x is y for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(given), strict=True))


@pytest.mark.slow
def test_a_function_is_compiled_once_for_objects_with_the_same_contents():
    traced = []

    @in_place
    def f(x, act):
        traced.append(act)
        return act(filled(x))

    for beta in (1.0, 1.0, 2.0, 1.0):
        np.testing.assert_allclose(f(X, Swish(beta)), Swish(beta)(filled(X)), rtol=1e-6)
        np.testing.assert_allclose(f(X, functools.partial(jnp.multiply, beta)), beta * filled(X), rtol=1e-6)
    assert len(traced) == 4
    first, second = Swish(), Swish()
    assert in_place(lambda x, a, b: (filled(x), a is b))(X, first, first)[1]
    assert not in_place(lambda x, a, b: (filled(x), a is b))(X, first, second)[1]


@jax.tree_util.register_pytree_node_class
class Grid:
    """Its constructor computes with one field and checks the other."""

    def __init__(self, x, n):
        if not hasattr(x, "shape"):
            raise TypeError(f"x must be an array, got {type(x)}")
        self.x, self.n, self.dx = x, n, 1.0 / n

    def tree_flatten(self):
        return (self.x, self.n), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_a_pytree_is_built_of_its_own_leaves_only():
    def step(grid, act, more):
        return Grid(act(filled(grid.x)) / grid.n, grid.n), {"again": grid, "n": more}

    for n in (4, 0.5):
        got, rest = in_place(step)(Grid(X, n), jnp.tanh, n)
        want, _ = step(Grid(X, n), jnp.tanh, n)
        np.testing.assert_allclose(got.x, want.x, rtol=1e-6)
        assert rest["again"].n == rest["n"] == n and type(rest["n"]) is type(n)
    with pytest.raises(ZeroDivisionError):
        in_place(step)(Grid(X, 0), jnp.tanh, 0)


# --- pickling -------------------------------------------------------------------------------------------------


@in_place
def decorated(x):
    return filled(x)


@in_place(max_steps=9, static_argnames="n")
def with_options(x, n=2):
    return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1].at[c[0]].set(c[1][0] * 2)), (0, x))[1]


class Worker:
    def __init__(self, rate):
        self.rate = rate

    @in_place
    def step(self, x):
        return filled(x) * self.rate


@pytest.mark.parametrize("copied", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy, copy.copy])
@pytest.mark.parametrize(
    "f", [decorated, with_options, in_place(filled), in_place(filled, residuals="undo"), Worker(2.0).step]
)
def test_a_function_can_be_pickled_and_copied_where_the_plain_one_can(f, copied):
    np.testing.assert_allclose(copied(f)(X), f(X), rtol=1e-6)


SENT = """
import sys, functools, cloudpickle, jax, jax.numpy as jnp
from jax import lax
from jax_tensorarray import in_place

@in_place
def loss(x):
    return jnp.sum(lax.fori_loop(1, len(x), lambda i, b: b.at[i].set(jnp.sin(b[i - 1])), x))

class Worker:
    rate = 2.0
    @in_place(residuals="undo")
    def step(self, x):
        return self.rate * loss(x)

functions = [loss, in_place(functools.partial(jnp.multiply, 2.0)), jax.jit(loss), jax.grad(loss), Worker().step, Worker]
sys.stdout.buffer.write(cloudpickle.dumps(functions))
"""


@pytest.mark.slow
def test_cloudpickle_sends_functions_of_the_main_program():
    cloudpickle = pytest.importorskip("cloudpickle")
    sent = subprocess.run([sys.executable, "-c", SENT], capture_output=True, check=True).stdout
    loss, twice, jitted, gradient, step, worker = cloudpickle.loads(sent)
    want = filled(X).sum()
    for got in (loss(X), jitted(X), step(X) / 2, worker().step(X) / 2):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(twice(X), 2 * X)
    np.testing.assert_allclose(gradient(X), jax.grad(lambda x: filled(x).sum())(X), rtol=1e-6)


# --- the cost of a call ---------------------------------------------------------------------------------------


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("extra", [{}, {"step": 3}, {"rate": 0.5}, {"act": jnp.tanh}, {"act": Swish()}])
def test_the_python_that_a_call_takes_does_not_grow_with_the_arrays(extra):
    def calls(number):
        state = {f"w{k}": jnp.ones(2) for k in range(number)}
        f = in_place(lambda state: {k: x * 0.9 if isinstance(x, jax.Array) else x for k, x in state.items()})
        f(state | extra), f(state | extra)
        count = 0

        def counts(frame, event, arg):
            nonlocal count
            count += event == "call"

        sys.setprofile(counts)
        try:
            f(state | extra)
        finally:
            sys.setprofile(None)
        return count

    assert calls(200) == calls(20) < 100
