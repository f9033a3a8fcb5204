"""Programs of plain JAX as people write them: decoders, keys, callbacks, errors, methods.

`tests/in_place` has effects in order, checks of users, several devices, and functions that are copied or pickled."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from placements import STEP, assert_same_or_refused, placed, waves

pytestmark = pytest.mark.usefixtures("in_single_precision")


# --- decoders --------------------------------------------------------------------------------------------------


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


# --- training --------------------------------------------------------------------------------------------------


def recurrent(w, xs):
    """The mean square of a recurrence that reads one of its earlier states."""

    def step(b, i):
        return b.at[i].set(jnp.tanh(b[i // 2] @ w + xs[i])), None

    return jnp.mean(lax.scan(step, jnp.zeros_like(xs), jnp.arange(len(xs)))[0] ** 2)


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


# --- effects ---------------------------------------------------------------------------------------------------


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


# --- errors ----------------------------------------------------------------------------------------------------


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


# --- functions as objects --------------------------------------------------------------------------------------


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


@pytest.mark.slow(but=1)
@placed("method", "grad", *STEP)
def test_a_dataclass_with_methods(at):
    def train_step(model, xs):
        value, grads = at("grad", jax.value_and_grad(lambda model: at("method", model.loss)(xs)))(model)
        return jax.tree.map(lambda p, g: p - 0.1 * g, model, grads), value

    return at.step(train_step)(Model(jnp.asarray(waves(2, 2)), 0.5), waves(5, 2))


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
