"""Caches that pass through a scan over layers, as `xs` and as `ys`, are updated where they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_numpy import in_numpy
from in_place import compiled
from jax import lax

from jax_tensorarray import in_place
from jax_tensorarray._compat import barriers_hold
from jax_tensorarray.doctor._copies import copies_in

pytestmark = pytest.mark.slow(but=1)

LAYERS, TOKENS, SIZE, BATCH = 3, 60, 16, 2


def rows(w, cache, h, t):
    cache = cache.at[t].set(jnp.tanh(w @ h))
    return jnp.sin(h + cache[t // 2]), cache


def attention(w, cache, h, t):
    cache = cache.at[t].set(jnp.tanh(w @ h))
    shown = jnp.arange(len(cache)) <= t
    return jax.nn.softmax(jnp.where(shown, cache @ h, -jnp.inf)) @ cache, cache


def of_dicts(w, cache, h, t):
    keys, values = cache["keys"].at[t].set(w @ h), cache["values"].at[t].add(jnp.sin(h))
    return jnp.cos(keys[t // 2] + values[t]), {"keys": keys, "values": values, "step": cache["step"] + 1}


def of_a_batch(w, cache, h, t):
    cache = cache.at[:, t].set(jnp.tanh(h @ w))
    return jnp.sin(h + cache[:, t // 2]), cache


def in_a_branch(w, cache, h, t):
    cache = lax.cond(t % 2 > 0, lambda c: c.at[t].set(jnp.tanh(w @ h)), lambda c: c, cache)
    return jnp.sin(h + cache[t // 2]), cache


def windows_and_elements(w, cache, h, t):
    cache = lax.dynamic_update_slice(cache, jnp.stack([h, w @ h]), (t, 0)).at[t // 2, 3].set(h[0])
    return jnp.sin(0.5 * h + 0.2 * lax.dynamic_slice(cache, (t, 0), (2, SIZE)).sum(0)), cache


def out_of_range(w, cache, h, t):
    cache = cache.at[2 * t].set(h, mode="drop").at[-1 - t].add(w @ h)
    return jnp.sin(h + cache.at[3 * t].get(mode="fill", fill_value=0.5) + cache[5 * t]), cache


def jitted(w, cache, h, t):
    return jax.jit(rows)(w, cache, h, t)


def returned_twice(w, cache, h, t):
    h, cache = rows(w, cache, h, t)
    return h, (cache, cache[t])


def cache_of(layer):
    if layer is of_a_batch:
        return jnp.zeros((LAYERS, BATCH, TOKENS, SIZE))
    cache = jnp.zeros((LAYERS, TOKENS, SIZE))
    if layer is of_dicts:
        return {"keys": cache, "values": cache + 0.1, "step": jnp.zeros(LAYERS, jnp.int32)}
    return cache


def model(layer, **options):
    def f(w, cache, h):
        def token(carry, t):
            cache, h = carry

            def one(h, own):
                h, new = layer(*own, h, t)
                return h, new

            h, new = lax.scan(one, h, (w, cache), **options)
            return ((new[0] if layer is returned_twice else new), h), h

        (cache, _), hs = lax.scan(token, (cache, h), jnp.arange(TOKENS))
        return hs, cache

    h = jnp.linspace(-1, 1, SIZE) if layer is not of_a_batch else jnp.linspace(-1, 1, BATCH * SIZE).reshape(BATCH, SIZE)
    w = np.random.default_rng(0).normal(size=(LAYERS, SIZE, SIZE)) / SIZE**0.5
    return f, (jnp.asarray(w), cache_of(layer), h)


def loss(f):
    def g(w, cache, h):
        leaves = [x for x in jax.tree.leaves(f(w, cache, h)) if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum(jnp.sum(jnp.sin(x)) for x in leaves)

    return g


LAYER = [rows, attention, of_dicts, of_a_batch, in_a_branch, windows_and_elements, out_of_range, jitted, returned_twice]


def gradient(f):
    return jax.grad(f, (0, 2))


def copies(program):
    """The copies of all of a cache of a layer in the loops of a compiled program."""
    return [copy for copy in copies_in(program.as_text(), TOKENS * SIZE * 8) if copy.kind != "anew"]


@pytest.mark.parametrize("layer", LAYER)
def test_a_scan_over_layers_gives_what_it_gave_and_copies_no_cache(layer):
    f, args = model(layer)
    plain = compiled(f, *args)
    assert copies(plain)
    want = plain(*args), in_numpy(gradient(loss(f)))(*args)
    orders = in_place(f), gradient(in_place(loss(f))), in_place(gradient(loss(f)))
    for k, ours in enumerate(orders):
        program = compiled(ours, *args)
        close(program(*args), want[k > 0])
        # A step that reads all of a cache copies the stack once in its gradient.
        assert not copies(program) or (layer is attention and k)


@pytest.mark.parametrize("layer", LAYER)
def test_a_scan_backwards_or_of_a_batch_gives_what_it_gave(layer):
    f, args = model(layer, reverse=True)
    f, number = loss(f), LAYER.index(layer)
    ours = in_place(gradient(f)) if number % 2 else gradient(in_place(f))
    if layer in (rows, of_dicts, out_of_range):
        args = jax.tree.map(lambda x: jnp.stack([x, 0.9 * x if x.dtype == float else x]), args)
        ours, f = jax.vmap(ours), lambda *args, f=f: jnp.sum(jax.vmap(f)(*args))
    close(jax.jit(ours)(*args), in_numpy(gradient(f))(*args))


@pytest.mark.parametrize("layer", [rows, of_dicts, out_of_range])
def test_a_scan_that_is_unrolled_gives_what_it_gave(layer):
    f, args = model(layer, unroll=2)
    close(jax.jit(in_place(f))(*args), in_numpy(f)(*args))


def test_a_checkpoint_of_a_layer_and_stacks_that_stay_as_they_are():
    f, args = model(lambda w, cache, h, t: jax.checkpoint(rows)(w, cache, h, t))
    want = in_numpy(jax.grad(loss(f), (0, 2)))(*args)
    close(jax.jit(jax.grad(in_place(loss(f)), (0, 2)))(*args), want)

    def swapped(w, cache, h):
        def one(h, own):
            w, a, b = own
            return jnp.sin(w @ h), (b.at[0].set(h), a)

        return lax.scan(one, h, (w, cache, 2 * cache))

    _, (w, cache, h) = model(rows)
    close(jax.jit(in_place(swapped))(w, cache, h), in_numpy(swapped)(w, cache, h))


def starts_again(b, h, done):
    return lax.cond(done, lambda: (jnp.linspace(0, 1, b.size).reshape(b.shape), 0.5 * h), lambda: (b, h))


def goes_on(b, h, done):
    return lax.cond(~done, lambda b: (b.at[0].add(h), jnp.sin(h)), lambda b: (jnp.ones_like(b), h), b)


def one_of_three(b, h, done):
    branches = [lambda: (b, h), lambda: lax.cond(h[0] > 0, lambda: (0 * b, h), lambda: (b, -h)), lambda: (0.5 * b, h)]
    return lax.switch(done.astype(int) + (h[1] > 0), branches)


def in_a_jit(b, h, done):
    return jax.jit(starts_again)(b, h, done)


def environments(by, map_all):
    """Environments that are stepped one by one. Some start again."""

    def f(b, h):
        def step(states, t):
            def one(states):
                b, h = states
                b = b.at[t].set(jnp.tanh(h)).at[t // 3].add(0.1 * h)
                new = by(b, jnp.sin(h + b[t // 2]), (t % 7 == 6) & (h[0] > 0.2))
                return new, b[t // 2]  # of the board as it was before it started again

            return map_all(one, states)

        return lax.scan(step, (b, h), jnp.arange(TOKENS))

    return f


def one_after_the_other(f, states):
    outs = [f(jax.tree.map(lambda x, k=k: x[k], states)) for k in range(len(states[0]))]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *outs)


@pytest.mark.parametrize("by", [starts_again, goes_on, one_of_three, in_a_jit])
def test_a_slice_that_a_branch_replaces_stays_in_its_stack(by):
    args = jnp.zeros((3, TOKENS, SIZE)), jnp.linspace(-1, 1, 3 * SIZE).reshape(3, SIZE)
    f, want = environments(by, lax.map), environments(by, one_after_the_other)

    def total(f):
        return lambda *args: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(f(*args)))

    program = compiled(in_place(f), *args)
    close(program(*args), in_numpy(want)(*args))
    assert copies(compiled(f, *args)) and not (barriers_hold("cpu") and copies(program))
    gradient = in_numpy(jax.grad(total(want), (0, 1)))(*args)
    close(jax.jit(jax.grad(in_place(total(f)), (0, 1)))(*args), gradient)
    close(jax.jit(in_place(jax.grad(total(f), (0, 1))))(*args), gradient)
    both = tuple(jnp.stack([x, x[::-1] + 0.1]) for x in args)
    batched = compiled(jax.vmap(in_place(f)), *both)
    close(batched(*both), in_numpy(jax.vmap(want))(*both))
    if barriers_hold("cpu"):
        assert not [c for c in copies_in(batched.as_text(), 6 * TOKENS * SIZE * 8) if c.kind != "anew"]


def marked(b, h, done):
    """A board of integers starts again with zeros."""
    return lax.cond(done, lambda: (jnp.zeros_like(b), h), lambda: (b, h))


def never(b, h, done):
    return b, h


@pytest.mark.parametrize(("by", "dtype"), [(marked, np.int32), (never, np.float64)])
def test_the_stacks_of_a_batch_are_stored_as_the_scan_takes_them(by, dtype):
    """`jax.vmap` puts the axis of the batch second for the inner scan, and first for the outer one, in every step."""
    rows = jnp.zeros((3, TOKENS, 4 * SIZE), dtype), jnp.linspace(-1, 1, 3 * 4 * SIZE).reshape(3, -1)
    args = tuple(jnp.stack([x, x[::-1]]) for x in rows)

    def f(map_all):
        def step(states, t):
            def one(states):
                b, h = states
                b = b.at[t].set((4 * jnp.tanh(h)).astype(dtype)).at[t // 3].add(1)
                return by(b, jnp.sin(h + b[t // 2]), (t % 7 == 6) & (h[0] > 0.2)), b[t // 2]

            return map_all(one, states)

        return jax.vmap(lambda b, h: lax.scan(step, (b, h), jnp.arange(TOKENS)))

    def total(f):
        return jax.grad(lambda *args: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(f(*args))), 1)

    ours, want, size = f(lax.map), f(one_after_the_other), args[0].nbytes
    program = compiled(in_place(ours), *args)
    close(program(*args), in_numpy(want)(*args))
    if dtype is np.int32 and barriers_hold("cpu"):  # floats are moved by XLA, in one operation with others
        assert not [c for c in copies_in(program.as_text(), size // 3) if c.kind != "anew"]
    if dtype is np.float64:
        gradient = in_numpy(total(want))(*args)
        for order in (total(in_place(ours)), in_place(total(ours))):
            close(jax.jit(order)(*args), gradient)


def close(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-11)
        assert x.dtype == y.dtype
