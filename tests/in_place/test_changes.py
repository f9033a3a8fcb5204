"""What a function under `in_place` changes while it runs: it is changed, or an error says so. Nothing is lost silently.

The oracle is the function itself in plain JAX.
"""

import collections
import functools
import re
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_tensorarray import in_place

X = jnp.linspace(0.1, 1, 6)


def filled(x):
    return lax.fori_loop(1, len(x), lambda i, b: b.at[i].set(jnp.sin(b[i - 1])), x)


@jax.tree_util.register_pytree_node_class
class State:
    """A pytree that can be changed."""

    def __init__(self, w, count, more):
        self.w, self.count, self.more = w, count, more

    def tree_flatten(self):
        return (self.w, self.count, self.more), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def pops(d):
    return filled(d.pop("w"))


def sets(d):
    d["new"], d["n"] = filled(d["w"]), d["n"] + 1
    return d["new"] * 2


def appends(d):
    d["log"].append(filled(d["w"]).sum())
    d["log"][0] = "first"


def moves(d):
    d["inner"], d["log"] = d["log"], d["inner"]
    d["log"]["w"] = filled(d["w"])


def assigns(d):
    state = d["state"]
    state.w, state.count = filled(state.w) * state.count, state.count + 1
    state.more["seen"] = state.w[1]
    return state.w


def returns_too(d):
    d["w"] = filled(d["w"])
    return d, d["w"]


CHANGES = [pops, sets, appends, moves, assigns, returns_too]


def made():
    return {"w": X, "n": 1, "f": 0.5, "log": [0.0], "inner": {"w": X}, "state": State(X, 2, {}), "last": (X, [])}


def described(x):
    """Return values and types, with numbers as what JAX makes of them."""
    if isinstance(x, State):
        return "State", described(vars(x))
    if isinstance(x, dict):
        return {k: described(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return type(x), [described(v) for v in x]
    return x if isinstance(x, str) or x is None else np.round(np.asarray(x, float), 5).tolist()


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("f", CHANGES)
def test_arguments_are_changed_as_by_the_function_in_every_call(f):
    got, want, g = made(), made(), in_place(f)
    parts = {k: got[k] for k in ("log", "inner", "state")}
    for _ in range(3):
        results = g(got), f(want)
        got.setdefault("w", X), want.setdefault("w", X)
        if f is moves:
            got["log"], got["inner"], want["log"], want["inner"] = got["inner"], got["log"], want["inner"], want["log"]
        assert described(got) == described(want) and described(results[0]) == described(results[1])
        assert all(got[k] is x for k, x in parts.items())


TRANSFORMS = {
    "grad": jax.grad,
    "jit(grad)": lambda f: jax.jit(jax.grad(f)),
    "vmap(grad)": lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, x / 2])),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("f", CHANGES)
def test_changes_have_derivatives_and_batches(f, transform):
    def total(g):
        def of(x):
            d = made() | {"w": x}
            g(d)
            return sum(jnp.sum(y) for y in jax.tree.leaves(d) if not isinstance(y, str))

        return of

    got, want = (TRANSFORMS[transform](total(g))(X) for g in (in_place(f), f))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), got, want)


def test_jit_around_it_loses_nothing_that_is_returned():
    def step(state):
        state.w, state.count = filled(state.w), state.count + 1
        return state

    got, want = State(X, 0, {}), State(X, 0, {})
    for _ in range(3):
        got, want = jax.jit(in_place(step))(got), step(want)
    assert described(got) == described(want)


LOG, CACHE, SEEN = [], {}, set()


class Trainer:
    rows: ClassVar[list] = []

    def __init__(self):
        self.history, self.last, self.calls = [1], None, 0

    def appends(self, x):
        self.history.append(filled(x).sum())

    def assigns(self, x):
        self.last = filled(x).sum()

    def of_class(self, x):
        Trainer.rows.append(filled(x))

    def counts(self, x):
        self.calls += 1
        return filled(x) * self.calls

    @functools.cached_property
    def twice(self):
        return 2 * X

    def uses(self, x):
        return filled(x) * self.twice


def appends_to_a_global(x):
    LOG.append(filled(x))


def nested(x):
    return appends_to_a_global(x)


def sets_a_global(x):
    CACHE["x"] = {"deep": (filled(x), 1)}


def closes_over(container):
    def f(x):
        container.append(filled(x)) if isinstance(container, list | collections.deque) else container.update(a=x)

    return f


def by_default(x, log=LOG):
    log.append(filled(x))


OUTSIDE = {
    "`LOG[0]`": appends_to_a_global,
    "`LOG[0]` ": nested,
    "`CACHE['x']`": sets_a_global,
    "`container[0]`": closes_over([]),
    "`container['a']`": closes_over({}),
    "`container[0]` ": closes_over(collections.deque()),
    "`default[0]`": by_default,
    "`partial[0]`": functools.partial(lambda log, x: log.append(filled(x)), LOG),
    "`self.history[1]`": Trainer().appends,
    "`self.last`": Trainer().assigns,
    "`Trainer.rows[0]`": Trainer().of_class,
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_traced_array_that_stays_outside_of_the_function_is_an_error_and_is_removed(name):
    for place in (in_place, lambda f: jax.jit(in_place(f)), lambda f: jax.vmap(in_place(f))):
        with pytest.raises(TypeError, match="^in_place: .* stores a traced array in " + re.escape(name.strip())):
            place(OUTSIDE[name])(X[None])
        assert not LOG and not CACHE and not Trainer.rows


def test_an_argument_that_is_an_object_holds_no_traced_array():
    trainer = Trainer()
    for method in ("appends", "assigns"):
        with pytest.raises(TypeError, match=r"stores a traced array in `Trainer\."):
            in_place(lambda t, x, method=method: getattr(t, method)(x))(trainer, X)
    assert vars(trainer) == {"history": [1], "last": None, "calls": 0}


def test_what_is_not_an_array_may_change_outside():
    trainer = Trainer()
    step = in_place(lambda t, x: t.counts(x))
    for k in range(1, 4):
        np.testing.assert_allclose(step(trainer, X), k * filled(X), rtol=1e-6)
        assert trainer.calls == k
    np.testing.assert_allclose(in_place(trainer.uses)(X), filled(X) * 2 * X, rtol=1e-6)
    np.testing.assert_allclose(trainer.twice, 2 * X)  # and not a tracer


def test_a_node_without_attributes_that_is_changed_is_an_error():
    class Slots:
        __slots__ = ("x",)

    def make(x):
        slots = Slots()
        slots.x = x
        return slots

    jax.tree_util.register_pytree_node(Slots, lambda s: ((s.x,), None), lambda _, children: make(*children))

    def f(slots):
        slots.x = filled(slots.x)

    with pytest.raises(TypeError, match="in_place: `f` changes one of its arguments inside"):
        in_place(f)(make(X))


def test_a_ref_that_is_passed_in_is_written():
    def f(ref, x):
        ref[1] = filled(x)[2]
        return ref[...] + x[0]

    for g in (in_place(f), jax.jit(in_place(f)), in_place(jax.jit(f))):
        got, want = jax.new_ref(X), jax.new_ref(X)
        np.testing.assert_allclose(g(got, X), f(want, X), rtol=1e-6)
        np.testing.assert_allclose(got[...], want[...], rtol=1e-6)


# --- Haiku ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_inside_of_haiku_parameters_are_read_and_a_change_is_an_error():
    hk = pytest.importorskip("haiku")

    def net(x):
        return filled(hk.Linear(4)(x))

    def counts(x):
        hk.set_state("n", hk.get_state("n", (), init=jnp.zeros) + 1)
        return filled(x)

    def noisy(x):
        return filled(x + jax.random.normal(hk.next_rng_key(), x.shape))

    x, key = jnp.ones((6, 3)), jax.random.key(0)
    for f in (net, counts, noisy):
        plain = hk.transform_with_state(f)
        inside = hk.transform_with_state(lambda x, f=f: in_place(f)(x))
        params, state = inside.init(key, x)
        jax.tree.map(np.testing.assert_allclose, (params, state), plain.init(key, x))
        want = plain.apply(params, state, key, x)
        outside = jax.jit(in_place(plain.apply))(params, state, key, x)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), outside, want)
        if f is net:
            np.testing.assert_allclose(inside.apply(params, state, key, x)[0], want[0], rtol=1e-5)
        else:
            with pytest.raises(TypeError, match=r"Haiku .*jax\.jit\(in_place\(hk\.transform\(f\)\.apply\)\)"):
                inside.apply(params, state, key, x)


@pytest.mark.slow
def test_inside_of_linen_variables_are_read_and_a_change_is_an_error():
    linen = pytest.importorskip("flax.linen")

    class Net(linen.Module):
        place: Any
        trains: bool

        @linen.compact
        def __call__(self, x):
            dense, norm = linen.Dense(4), linen.BatchNorm(use_running_average=not self.trains)
            return self.place(lambda x: filled(dense(norm(x))))(x)

    x, key = jnp.ones((6, 3)).at[1].set(0.5), jax.random.key(0)
    for trains in (False, True):
        plain, inside = Net(lambda f: f, trains), Net(in_place, trains)
        variables = inside.init(key, x)
        jax.tree.map(close, variables, plain.init(key, x))
        want = plain.apply(variables, x, mutable=["batch_stats"])
        outside = jax.jit(in_place(lambda v, x, plain=plain: plain.apply(v, x, mutable=["batch_stats"])))(variables, x)
        jax.tree.map(close, outside, want)
        if trains:
            with pytest.raises(TypeError, match=r"variables of a Flax module .*jax\.jit\(in_place\(model\.apply\)\)"):
                inside.apply(variables, x, mutable=["batch_stats"])
        else:
            close(inside.apply(variables, x, mutable=["batch_stats"])[0], want[0])


# --- Flax NNX -------------------------------------------------------------------------------------------------


@pytest.fixture
def nnx():
    with jax.enable_x64(False):  # as the parameters of Flax are
        yield pytest.importorskip("flax.nnx")


def close(x, y):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x, y = jax.random.key_data(x), jax.random.key_data(y)
    np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


def net_of(nnx):
    class Net(nnx.Module):
        """Two layers share their weights; what the call changes is of every kind."""

        def __init__(self):
            rngs = nnx.Rngs(0)
            self.a, self.b = nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 3, rngs=rngs)
            self.b.kernel = self.a.kernel
            self.norm, self.drop = nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
            self.count, self.scale = 0, 0.5

        def __call__(self, x):
            self.count += 1
            self.seen = nnx.Intermediate(x[0])
            return filled(self.drop(self.norm(self.b(jnp.tanh(self.a(x)))))) * self.scale

    return Net()


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [in_place, lambda f: jit_of()(in_place(f)), lambda f: in_place(jit_of()(f)), lambda f: in_place(in_place(f))],
    ids=["in_place", "nnx.jit(in_place)", "in_place(nnx.jit)", "in_place(in_place)"],
)
def test_a_step_updates_the_modules_as_under_nnx_jit(nnx, place):
    optax = pytest.importorskip("optax")

    def step(net, optimizer, x):
        loss, gradients = nnx.value_and_grad(lambda net: jnp.mean(net(x) ** 2))(net)
        optimizer.update(net, gradients)
        return loss, net, {"again": net.a}

    def trained(f):
        net = net_of(nnx)
        optimizer, losses = nnx.Optimizer(net, optax.adam(0.01), wrt=nnx.Param), []
        for _ in range(3):
            loss, same, parts = f(net, optimizer, jnp.ones((5, 3)).at[0].set(2.0))
            assert same is net and parts["again"] is net.a and net.b.kernel is net.a.kernel
            losses.append(loss)
        assert net.count == 3 and type(net.scale) is float
        return losses, nnx.state(net), nnx.state(optimizer)

    got, want = trained(place(step)), trained(nnx.jit(step))
    jax.tree.map(close, got, want)


def jit_of():
    return pytest.importorskip("flax.nnx").jit


@pytest.mark.slow
def test_modules_in_containers_methods_and_derivatives(nnx):
    class Counter(nnx.Module):
        def __init__(self):
            self.n = nnx.Variable(jnp.zeros(()))

        @in_place
        def __call__(self, x):
            self.n[...] += 1
            return filled(x) * self.n[...]

    counter, x = Counter(), jnp.linspace(0.1, 1, 6)
    for k in range(1, 4):
        np.testing.assert_allclose(counter(x), k * filled(x), rtol=1e-6)
    tree = {"both": [counter, counter], "x": x}
    got = in_place(lambda tree, rate: tree["both"][0](tree["x"]) + tree["both"][1](tree["x"]) * rate)(tree, 2.0)
    np.testing.assert_allclose(got, (4 + 2 * 5) * filled(x), rtol=1e-6)
    assert counter.n[...] == 5

    def loss(net, x):
        return jnp.sum(net(x) ** 2)

    x = jnp.ones((5, 3)).at[1].set(0.5)
    got, want = (nnx.grad(f)(net_of(nnx), x) for f in (in_place(loss), loss))
    jax.tree.map(close, got, want)
