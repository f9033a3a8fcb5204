"""Programs of plain JAX as people write them: decoders, searches, training at scale, checks, callbacks."""

import copy
import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, io_callback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from placements import STEP, assert_same, assert_same_or_refused, placed, waves

from jax_tensorarray import in_place

pytestmark = pytest.mark.usefixtures("in_single_precision")


# --- decoders -------------------------------------------------------------------------------------------------


def attend(layer, cache, x, t):
    """One layer of a decoder: write the key and the value of this token, and attend to all before it."""
    k, v = cache["k"].at[:, t].set(x @ layer["k"]), cache["v"].at[:, t].set(x @ layer["v"])
    scores = jnp.einsum("bd,btd->bt", x @ layer["q"], k)
    scores = jnp.where(jnp.arange(k.shape[1]) <= t, scores, -1e9)
    return x + jnp.einsum("bt,btd->bd", jax.nn.softmax(scores), v), {"k": k, "v": v}


def decoder(batch=2, length=5, size=4, layers=2):
    params = {name: jnp.asarray(waves(layers, size, size)) / (n + 1) for n, name in enumerate("qkv")}
    cache = {name: jnp.zeros((layers, batch, length, size)) for name in "kv"}
    return {"layers": params, "embedding": jnp.asarray(waves(7, size))}, cache


def logits_of(params, cache, token, t):
    """Through all layers, whose caches are stacked."""

    def through(x, layer_and_cache):
        return attend(*layer_and_cache, x, t)

    x, cache = lax.scan(through, params["embedding"][token], (params["layers"], cache))
    return x @ params["embedding"].T, cache


@pytest.mark.slow(but=1)
@placed("layers", "around jit")
def test_a_decoder_that_samples(at):
    """A batch that ends at different times, with a key in the carry."""

    def generate(params, cache, token, key):
        def step(carry):
            t, cache, token, tokens, done, key = carry
            key, subkey = jax.random.split(key)
            logits, cache = at("layers", logits_of)(params, cache, token, t)
            token = jnp.where(done, 0, jax.random.categorical(subkey, logits / 0.7))
            return t + 1, cache, token, tokens.at[:, t].set(token), done | (token == 6), key

        start = jnp.int32(0), cache, token, jnp.zeros((2, 5), jnp.int32), jnp.zeros(2, bool), key
        return lax.while_loop(lambda c: (c[0] < 5) & ~jnp.all(c[4]), step, start)

    return at.step(generate)(*decoder(), jnp.array([1, 2]), jax.random.key(3))


@pytest.mark.slow
@placed("loss", "around jit")
def test_a_decoder_that_is_trained_on_its_samples(at):
    """The key is carried by the loop that is differentiated, and the state is donated."""

    def loss(params, cache, token, key):
        def step(t, carry):
            cache, token, total, key = carry
            key, subkey = jax.random.split(key)
            logits, cache = logits_of(params, cache, token, t)
            token = jax.random.categorical(subkey, logits)
            total += jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], 1))
            return cache, token, total, key

        return lax.fori_loop(0, 3, step, (cache, token, jnp.float32(0), key))[2]

    def train_step(params, cache, token, key):
        value, grads = at("grad", jax.value_and_grad(at("loss", loss)))(params, cache, token, key)
        return jax.tree.map(lambda p, g: p + 0.1 * g, params, grads), value

    jit = functools.partial(jax.jit, donate_argnums=0)
    return at.step(train_step, jit)(*decoder(length=3), jnp.array([1, 2]), jax.random.key(3))


@pytest.mark.slow(but=1)
@placed("search", "vmap", *STEP)
def test_a_beam_search(at):
    def search(table, first, width=3, length=5):
        """Keep the best sequences. Each step reorders all histories by their parents."""

        def step(state):
            t, scores, tokens, ended = state
            new = jnp.where(ended[:, None], jnp.where(jnp.arange(7) == 0, 0.0, -jnp.inf), table[tokens[:, t - 1]])
            scores, best = lax.top_k((scores[:, None] + new).ravel(), width)
            parent, token = best // 7, best % 7
            return t + 1, scores, tokens[parent].at[:, t].set(token), ended[parent] | (token == 0)

        tokens = jnp.zeros((width, length), jnp.int32).at[:, 0].set(first)
        start = jnp.int32(1), jnp.where(jnp.arange(width) == 0, 0.0, -jnp.inf), tokens, jnp.zeros(width, bool)
        return lax.while_loop(lambda s: (s[0] < length) & ~jnp.all(s[3]), step, start)

    def batch(table, firsts):
        return at("vmap", jax.vmap(at("search", search), (None, 0)))(table, firsts)

    return at.step(batch)(jax.nn.log_softmax(waves(7, 7)), jnp.array([3, 1]))


# --- training at scale ----------------------------------------------------------------------------------------


def recurrent(w, xs):
    """The mean square of a recurrence that reads one of its earlier states."""

    def step(b, i):
        return b.at[i].set(jnp.tanh(b[i // 2] @ w + xs[i])), None

    return jnp.mean(lax.scan(step, jnp.zeros_like(xs), jnp.arange(len(xs)))[0] ** 2)


@pytest.mark.slow(but=1)
@placed("loss", "grad", *STEP)
def test_gradients_that_are_accumulated_over_microbatches(at):
    def train_step(w, batches):
        def add(total, xs):
            value, grad = at("grad", jax.value_and_grad(at("loss", jax.checkpoint(recurrent))))(w, xs)
            return jax.tree.map(jnp.add, total, grad), value

        total, values = lax.scan(add, jnp.zeros_like(w), batches)
        return w - 0.1 * total / len(batches), values

    return at.step(train_step)(jnp.asarray(waves(2, 2)), waves(3, 5, 2))


@pytest.mark.slow(but=1)
@placed("auto", "undo", "checkpoint", "in jit")
def test_noise_of_keys_that_are_carried_and_scanned_over(at):
    """Reverse mode needs the keys of each step again, whatever it keeps."""

    def noisy(w, xs, key):
        def step(carry, i_and_key):
            (b, key), (i, own) = carry, i_and_key
            key, subkey = jax.random.split(key)
            row = jnp.tanh(b[i // 2] @ w) * jax.random.bernoulli(own, 0.5, (2,)) + jax.random.normal(subkey, (2,))
            return (b.at[i].set(row), key), None

        keys = jax.random.split(key, len(xs))
        return jnp.sum(lax.scan(step, (xs, key), (jnp.arange(len(xs)), keys))[0][0] ** 2)

    for residuals in ("auto", "undo", "checkpoint"):
        noisy = at(residuals, noisy, residuals=residuals)
    return at.step(jax.value_and_grad(noisy))(jnp.asarray(waves(2, 2)), waves(5, 2), jax.random.key(0))


@pytest.mark.slow(but=1)
@placed("loss", *STEP)
def test_mixed_precision_with_a_scale_of_the_loss(at):
    """The scale grows, is halved where a gradient is not finite, and then nothing is updated."""

    def train_step(state, xs):
        def scaled(w):
            return at("loss", recurrent)(w.astype(jnp.bfloat16), xs.astype(jnp.bfloat16)) * state["scale"]

        grad = jax.grad(scaled)(state["w"]).astype(jnp.float32) / state["scale"]
        is_finite = jnp.all(jnp.isfinite(grad))
        w = jnp.where(is_finite, state["w"] - 0.1 * grad, state["w"])
        return {"w": w, "scale": state["scale"] * jnp.where(is_finite, 2.0, 0.5)}, is_finite

    step, state = at.step(train_step), {"w": jnp.asarray(waves(2, 2)), "scale": jnp.float32(2.0**127)}
    state, first = step(state, waves(5, 2) * np.float32(1e3))
    return step(state, waves(5, 2)), first


@pytest.mark.slow(but=1)
@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices: see tests/conftest.py")
@placed("loss", *STEP)
def test_a_step_on_four_devices(at):
    """The batch is divided, by the compiler and by hand, and so are the parameters."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    by_data = NamedSharding(mesh, P("data"))

    def loss(w, batch):
        return jnp.mean(jax.vmap(at("loss", recurrent), (None, 0))(w, batch))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    def by_hand(w, batch):
        return lax.pmean(loss(w, batch), "data")

    def train_step(w, batch):
        grads = [jax.grad(f)(w, batch) for f in (loss, by_hand)]
        return w - 0.1 * grads[0], lax.with_sharding_constraint(grads[1], NamedSharding(mesh, P(None, "data")))

    return at.step(train_step)(jax.device_put(waves(4, 4), by_data), jax.device_put(waves(8, 5, 4), by_data))


# --- checks and effects ---------------------------------------------------------------------------------------


@pytest.mark.slow(but=1)
@placed("loop", "in jit")
def test_checks_of_users_and_of_indices(at):
    def fill(b):
        def step(i, b):
            checkify.check(b[i - 1, 0] < 2, "row {i} is too large: {x}", i=i, x=b[i - 1, 0])
            return b.at[i].set(b[i - 1] + b[i // 2])

        return lax.fori_loop(1, 6, step, b)

    errors = checkify.user_checks | checkify.index_checks
    step = at.step(checkify.checkify(at("loop", fill), errors=errors))
    found = [step(b) for b in (jnp.ones((6, 2)), jnp.zeros((6, 2)), jnp.zeros((4, 2)))]
    return [(error.get() or "").split(" (")[0] for error, _ in found], found[1][1]


@placed("loop", *STEP, raises=checkify.JaxRuntimeError)
def test_a_check_that_is_thrown(at):
    def fill(b):
        def step(i, b):
            checkify.check(b[i - 1, 0] < 2, "row {i} is too large", i=i)
            return b.at[i].set(b[i - 1] + b[i // 2])

        return lax.fori_loop(1, len(b), step, b)

    error, _ = at.step(checkify.checkify(at("loop", fill)))(jnp.ones((6, 2)))
    error.throw()


@pytest.mark.slow(but=1)
@placed("loop", *STEP, is_ordered=False)
def test_callbacks_of_a_loop_and_of_its_gradient(at):
    """A log of each step, one of the gradient, and a row that is computed by the host."""

    @jax.custom_vjp
    def logged(x):
        return x

    def backward(_, g):
        jax.debug.callback(lambda g: at.note("gradient", g), g)
        return (g,)

    logged.defvjp(lambda x: (x, None), backward)

    def loss(xs):
        def step(i, b):
            row = jnp.sin(logged(b[i // 2])) + xs[i]
            jax.debug.callback(lambda i, row: at.note(i, row), i, row)
            return b.at[i].set(row + jax.pure_callback(np.cos, row, lax.stop_gradient(row)))

        return jnp.sum(lax.fori_loop(1, len(xs), step, xs))

    return at.step(jax.value_and_grad(at("loop", loss)))(waves(4, 2))


@pytest.mark.slow(but=2)
@placed("loop", *STEP)
def test_effects_in_order(at):
    def fill(xs):
        def step(b, i):
            drawn = io_callback(lambda i: at.note(i) or np.float32(len(at.notes)), jnp.float32(0), i, ordered=True)
            lax.cond(i % 2 == 0, lambda: jax.debug.callback(at.note, "even", ordered=True), lambda: None)
            return b.at[i].set(jnp.sin(b[i // 2]) + drawn), None

        return lax.scan(step, xs, jnp.arange(len(xs)))[0]

    return at.step(at("loop", fill))(waves(4, 2))


# --- errors ---------------------------------------------------------------------------------------------------


@placed("loop", *STEP, raises=TypeError)
def test_a_carry_of_another_type(at):
    def fill(xs):
        def step(i, b):
            return b.at[i].set(b[i // 2]).astype(jnp.bfloat16)

        return lax.fori_loop(1, len(xs), step, xs)

    return at.step(at("loop", fill))(waves(4, 2))


@placed("loop", *STEP, raises=jax.errors.TracerBoolConversionError)
def test_a_branch_on_a_tracer(at):
    def fill(xs, limit):
        def step(i, b):
            return b.at[i].set(b[i // 2] if b[i, 0] > limit else b[i])

        return lax.fori_loop(1, len(xs), step, xs)

    return at.step(at("loop", fill))(waves(4, 2), 0.5)


@placed("loop", *STEP, raises=KeyError)
def test_an_error_of_the_user_in_a_loop(at):
    def fill(params, xs):
        return lax.fori_loop(1, len(xs), lambda i, b: b.at[i].set(params["weights"] * b[i - 1]), xs)

    return at.step(at("loop", fill))({"weight": 1.0}, waves(4, 2))


# --- functions as objects -------------------------------------------------------------------------------------


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["rate"])
@dataclasses.dataclass
class Model:
    """A dataclass that checks and computes when it is made."""

    w: jax.Array
    rate: float

    def __post_init__(self):
        self.shape = self.w.shape
        if len(self.shape) != 2:
            raise ValueError(f"w must be a matrix, got the shape {self.shape}")

    def loss(self, xs):
        return recurrent(self.w * self.rate, xs)

    @in_place
    def loss_in_place(self, xs):
        return recurrent(self.w * self.rate, xs)

    @jax.jit
    @in_place
    def jitted(self, xs):
        return recurrent(self.w * self.rate, xs)

    @staticmethod
    @in_place
    def of(w, xs):
        return recurrent(w, xs)

    def __call__(self, xs):
        return self.loss(xs)


@pytest.mark.slow(but=1)
@placed("method", "grad", *STEP)
def test_a_dataclass_with_methods(at):
    def train_step(model, xs):
        value, grads = at("grad", jax.value_and_grad(lambda model: at("method", model.loss)(xs)))(model)
        return jax.tree.map(lambda p, g: p - 0.1 * g, model, grads), value

    return at.step(train_step)(Model(jnp.asarray(waves(2, 2)), 0.5), waves(5, 2))


def of_wrapped(w, xs):
    return recurrent(w, xs)


of_wrapped = in_place(of_wrapped)  # pickle finds the decorated function under the name of the plain one
jitted = jax.jit(in_place(recurrent))


@pytest.mark.slow
@pytest.mark.parametrize("by", [copy.copy, copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))])
def test_functions_are_copied_and_pickled_as_plain_ones_are(by):
    w, xs = jnp.asarray(waves(2, 2)), jnp.asarray(waves(5, 2))
    model = Model(w, 0.5)
    for f in (in_place(recurrent), of_wrapped, in_place(recurrent, residuals="undo"), Model.of):
        assert_same(by(f)(w, xs), jax.jit(recurrent)(w, xs))
        assert_same(by(functools.partial(f, w))(xs), jax.jit(recurrent)(w, xs))
    for f in (model, in_place(model.loss), in_place(model), model.loss_in_place):
        assert_same(by(f)(xs), jax.jit(model.loss)(xs))


def test_jitted_functions_are_pickled_with_their_code():
    cloudpickle = pytest.importorskip("cloudpickle", reason="it is not installed: pip install '.[test-frameworks]'")
    w, xs = jnp.asarray(waves(2, 2)), jnp.asarray(waves(5, 2))
    in_a_closure = in_place(lambda w, xs: recurrent(w, xs))
    for f in (jitted, in_a_closure, jax.jit(in_a_closure), functools.partial(in_a_closure, w)):
        args = (xs,) if isinstance(f, functools.partial) else (w, xs)
        assert_same(cloudpickle.loads(cloudpickle.dumps(f))(*args), jax.jit(recurrent)(w, xs))


@pytest.mark.slow
def test_methods_are_bound():
    model, xs = Model(jnp.asarray(waves(2, 2)), 0.5), waves(5, 2)
    for f in (model.loss_in_place, model.jitted, in_place(model), in_place(model.loss), jax.jit(in_place(model))):
        assert_same(f(xs), jax.jit(model.loss)(xs))
    for of in (Model.of, model.of):
        assert_same(of(model.w, xs), jax.jit(recurrent)(model.w, xs))


def test_an_object_that_is_passed_in_comes_back_as_it_is():
    def step(w, xs, *objects):
        return recurrent(w, xs), objects

    objects = functools.partial(jnp.multiply, 0.5), Model(jnp.asarray(waves(2, 2)), 0.5).loss, Callback(3), jitted
    _, found = in_place(step)(jnp.asarray(waves(2, 2)), waves(5, 2), *objects)
    assert found == objects


class Callback:
    """An object that is called, compared by identity."""

    def __init__(self, every):
        self.every = every

    def __call__(self, step):
        return step % self.every == 0


@pytest.mark.parametrize("place", STEP)
def test_a_ref_that_is_passed_in_is_written_or_an_error_names_it(place):
    def program(at):
        def fill(ref, xs):
            def step(i, b):
                ref[...] += b[i]
                return b.at[i].set(jnp.sin(b[i // 2]))

            return lax.fori_loop(1, len(xs), step, xs)

        ref = jax.new_ref(jnp.zeros(2))
        return at.step(fill)(ref, jnp.asarray(waves(4, 2))), ref[...]

    assert_same_or_refused(program, place, "in_place", "ref")
