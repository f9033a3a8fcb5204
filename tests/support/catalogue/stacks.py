"""Caches that pass through a scan over layers, as `xs` and as `ys`, are updated where they are."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .loop import Loop

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


LAYER = [rows, attention, of_dicts, of_a_batch, in_a_branch, windows_and_elements, out_of_range, jitted, returned_twice]


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


ORDERS = ("forward", "grad(in_place)", "in_place(grad)", "vmap(grad)")
ROWS = jax.ShapeDtypeStruct((TOKENS, SIZE), float)
#: A step that reads all of a cache makes arrays of its size, a loop that is unrolled copies slices, and a branch makes
#: what an environment starts with.
WHOLE = {
    "attention": [1, 6, 6, 6],
    "attention, backwards": [1, 6, 6, 6],
    "rows, unrolled": [2, 2, 2, 2],
    "of_dicts, unrolled": [4, 6, 6, 6],
    "out_of_range, unrolled": [2, 2, 2, 2],
    "starts_again": [1, 0, 0, 1],
    "one_of_three": [4, 4, 4, 3],
    "in_a_jit": [1, 0, 0, 1],
}


def _loop(name, f, args, by, last=ORDERS[-1]):
    orders = (*ORDERS[:-1], last)
    whole = dict(zip(orders, WHOLE.get(name, [0] * 4), strict=True))
    return name, Loop(f, args, ROWS, orders, by=by, whole=whole, is_for_barriers=True)


STATES = np.zeros((3, TOKENS, SIZE)), np.linspace(-1, 1, 3 * SIZE).reshape(3, SIZE)
LOOPS = dict(
    [
        *(_loop(layer.__name__, *model(layer), (0, 2)) for layer in LAYER),
        *(_loop(f"{layer.__name__}, backwards", *model(layer, reverse=True), (0, 2)) for layer in LAYER),
        *(_loop(f"{f.__name__}, unrolled", *model(f, unroll=2), (0, 2)) for f in (rows, of_dicts, out_of_range)),
        *(
            _loop(f.__name__, environments(f, lax.map), STATES, (0, 1), "vmap")
            for f in (starts_again, goes_on, one_of_three, in_a_jit)
        ),
    ]
)
