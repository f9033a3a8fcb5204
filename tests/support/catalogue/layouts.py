"""A cache `[batch, length, heads, dim]` that products need as `[batch, heads, length, dim]` is not moved in a loop."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .loop import Loop

BATCH, STEPS, HEADS, SIZE = 2, 40, 3, 4
CACHE = np.zeros((BATCH, STEPS, HEADS, SIZE))


def attention(h, k, v, t):
    k = lax.dynamic_update_slice(k, jnp.sin(h)[:, None], (0, t, 0, 0))
    v = v.at[:, t].set(jnp.cos(h))
    w = jax.nn.softmax(jnp.where(jnp.arange(STEPS) <= t, jnp.einsum("bhd,blhd->bhl", h, k), -jnp.inf))
    return h + 0.1 * jnp.einsum("bhl,blhd->bhd", w, v) + k[:, t // 2], k, v


def by_matrices(h, k, v, t):
    """Whose axes change places before the product, and after it."""
    k, v = k.at[:, t].set(jnp.sin(h)), v.at[:, t, 1].add(jnp.cos(h[:, 0])).at[0, t].multiply(1.5)
    w = (jnp.swapaxes(k, 1, 2) @ h[..., None])[..., 0]
    return jnp.tanh(h + jnp.einsum("blh,blhd->bhd", jnp.swapaxes(w, 1, 2), v)), k, v


def in_a_conditional(h, k, v, t):
    def one(k, v):
        return k.at[:, t].set(jnp.sin(h)), v

    k, v = lax.cond(h[0, 0, 0] > 0, one, lambda k, v: (k, v.at[:, t, :, 1:3].set(h[..., 1:3])), k, v)
    return jnp.tanh(h + jnp.einsum("bhl,blhd->bhd", jnp.einsum("bhd,blhd->bhl", h, k), v)), k, v


def at_places_of_each_example(h, k, v, t):
    own = jnp.arange(BATCH)
    k, v = k.at[:, t].set(jnp.sin(h)), v.at[own, (t * (1 + 2 * own)) % STEPS].set(jnp.cos(h))
    w, some = jnp.einsum("bhd,blhd->bhl", h, k), v[:, jnp.array([1, 2]) * t % STEPS].sum(1) + v[:, 3:5].sum(1)
    return jnp.tanh(h + jnp.einsum("bhl,blhd->bhd", w, v) + some + v[own, (t * (1 + own)) % STEPS]), k, v


def time_first(h, k, v, t):
    """Three axes change places, so the way there is not the way back."""
    k, v = k.at[t].set(jnp.sin(h)), v.at[t, :, 1].set(jnp.cos(h[:, 0]))
    w = jnp.einsum("bhd,lbhd->bhl", h, k)
    return jnp.tanh(h + jnp.einsum("bhl,lbhd->bhd", w, v) + k[t // 2]), k, v


def by_parts_that_are_put_back(h, k, v, t):
    k, v = (c.at[n].set(c[n].at[t].set(jnp.sin(h[n]))) for c, n in ((k, 0), (v, 1)))
    w = jnp.einsum("bhd,blhd->bhl", h, k)
    return jnp.tanh(h + jnp.einsum("bhl,blhd->bhd", w, v) + v[:, 2:9].sum(1)), k, v


def in_a_scan(step, cache=CACHE):
    def f(h):
        def one(c, t):
            c = step(*c, t)
            return c, c[0][:, 0]

        return lax.scan(one, (h, cache, cache), jnp.arange(STEPS))

    return f


def in_a_while_loop(step):
    def f(h):
        def goes_on(c):
            return (c[1] < STEPS) & (c[0][0][0, 0, 0] < 0.5)

        return lax.while_loop(goes_on, lambda c: (step(*c[0], c[1]), c[1] + 1), ((h, CACHE, CACHE), 0))

    return f


H = np.linspace(-1, 1, BATCH * HEADS * SIZE).reshape(BATCH, HEADS, SIZE)
GRADIENTS = ("grad(in_place)", "in_place(grad)")
PROGRAMS = {
    "attention": in_a_scan(attention),
    "attention in a checkpoint": in_a_scan(jax.checkpoint(attention)),
    "attention in a while loop": in_a_while_loop(attention),
    "by matrices": in_a_scan(by_matrices),
    "in a conditional": in_a_scan(in_a_conditional),
    "at places of each example": in_a_scan(at_places_of_each_example),
    "by parts that are put back": in_a_scan(by_parts_that_are_put_back),
    "time first": in_a_scan(time_first, np.moveaxis(CACHE, 1, 0)),
}
#: What reads a cache as a whole has cotangents of all of it.
WHOLE = {"attention": 2, "by matrices": 4, "at places of each example": 4}
LOOPS = {
    name: Loop(f, (H,), CACHE, ("forward", "vmap"), batch=(np.stack([H, -H, 2 * H]),)) for name, f in PROGRAMS.items()
}
LOOPS |= {
    f"gradients of {name}": Loop(
        PROGRAMS[name], (H,), CACHE, GRADIENTS, whole=dict.fromkeys(GRADIENTS, whole), rtol=1e-8, is_for_barriers=True
    )
    for name, whole in WHOLE.items()
}
