"""One op written four ways, which docs/primitive/which_way.md compares: `python docs/four_ways.py NAME`.

NAME is a package that the template has made, which is installed: it has the kernel. Every way is checked against NumPy,
with its gradient and batches of both where it has them, and a line says what each costs.
"""

import importlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

try:
    from jax.experimental.hijax import HiPrim, instantiate_zeros, linearize_from_jvp, vjp_from_lin
except ImportError:  # before jax 0.12
    HiPrim = None

TARGET = f"{sys.argv[1] if len(sys.argv) > 1 else 'decay_row'}_update"

# --- plain JAX -------------------------------------------------------------------------------------------------


def in_plain_jax(buffer, index, value, scale):
    old = buffer[index]
    return buffer.at[index].set(scale * old + value), old


# --- ffi_call --------------------------------------------------------------------------------------------------


def call(buffer, index, value, scale, batch_dims=0):
    types = jax.typeof(buffer), jax.typeof(value)
    f = jax.ffi.ffi_call(TARGET, types, input_output_aliases={0: 0}, vmap_method="sequential")
    return tuple(f(buffer, index, value, scale, batch_dims=np.int64(batch_dims)))


@jax.custom_vjp
def by_ffi_call(buffer, index, value, scale):
    return call(buffer, index, value, scale)


def _forward(buffer, index, value, scale):
    out, old = by_ffi_call(buffer, index, value, scale)
    return (out, old), (index, scale, old)


def _backward(residuals, cts):
    index, scale, old = residuals
    buffer_ct, value_ct = by_ffi_call(cts[0], index, cts[1], scale)
    return buffer_ct, None, value_ct, jnp.sum(value_ct * old)


by_ffi_call.defvjp(_forward, _backward)


# --- HiPrim ----------------------------------------------------------------------------------------------------


if HiPrim is not None:

    class HiDecay(HiPrim):
        def __init__(self, buffer, index, value, scale, batch_dims):
            self.in_avals, self.out_aval = (buffer, index, value, scale), (buffer, value)
            self.params = {"batch_dims": batch_dims}
            super().__init__()

        def expand(self, *operands):
            return call(*operands, batch_dims=self.batch_dims)

        def jvp(self, primals, tangents):
            _, index, _, scale = primals
            out, old = self(*primals)
            buffer_dot, _, value_dot, scale_dot = map(instantiate_zeros, tangents)
            value_dot += scale_dot.reshape(*scale_dot.shape, *[1] * (old.ndim - self.batch_dims)) * old
            return (out, old), self(buffer_dot, index, value_dot, scale)

        def transpose(self, cts, buffer, index, value, scale):
            buffer_ct, old_ct = map(instantiate_zeros, cts)
            grads = self(buffer_ct, index, old_ct, scale)
            for operand, grad in zip((buffer, value), grads, strict=True):
                if hasattr(operand, "accum"):
                    operand.accum(grad)

        def batch(self, axis_data, operands, dims):
            if all(d is None for d in dims):  # JAX calls it with nothing mapped as well
                return self(*operands), (None, None)
            moved = [
                jnp.broadcast_to(x, (axis_data.size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
                for x, d in zip(operands, dims, strict=True)
            ]
            return HiDecay(*map(jax.typeof, moved), self.batch_dims + 1)(*moved), (0, 0)

        lin, linearized = linearize_from_jvp
        vjp_fwd, vjp_bwd_retval = vjp_from_lin  # vjp_from_jvp keeps the whole buffer in each step of a loop

    def by_hi_prim(buffer, index, value, scale):
        return HiDecay(*map(jax.typeof, (buffer, index, value, scale)), 0)(buffer, index, value, scale)


# --- the table -------------------------------------------------------------------------------------------------


def quickest(f: Callable[[], Any], times: int = 30) -> float:
    """Return microseconds: the lower quartile."""
    jax.block_until_ready(f())
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        jax.block_until_ready(f())
        taken.append((time.perf_counter() - start) * 1e6)
    return statistics.quantiles(taken)[0]


def works(f: Callable[[], Any]) -> str:
    try:
        jax.block_until_ready(f())
    except (TypeError, ValueError, NotImplementedError):
        return "no"
    return "yes"


def check(way: Any) -> None:
    rng = np.random.default_rng(0)
    buffer, value, ct = rng.standard_normal((5, 3)), rng.standard_normal(3), rng.standard_normal((5, 3))
    out = buffer.copy()
    out[2] = 0.5 * buffer[2] + value
    expected = 0.5 * ct[2], np.sum(ct[2] * buffer[2]), ct[2], buffer[2], out

    def loss(buffer, value, scale):
        found = way(buffer, jnp.int32(2), value, scale)
        return jnp.sum(found[0] * ct) + 0 * jnp.sum(found[1]), found

    def all_of(buffer, value, scale):
        (grad, value_grad, scale_grad), found = jax.grad(loss, (0, 1, 2), has_aux=True)(buffer, value, scale)
        return grad[2], scale_grad, value_grad, found[1], found[0]

    given = jnp.asarray(buffer), jnp.asarray(value), jnp.asarray(0.5)
    for found in (all_of(*given), [x[1] for x in jax.vmap(all_of)(*(jnp.stack([x, x]) for x in given))]):
        for f, e in zip(found, expected, strict=True):
            np.testing.assert_allclose(f, e, rtol=1e-5, atol=1e-6)


def row(way: Any, size: int = 2000, steps: int = 1000) -> list[str]:
    """Return the cells of a line: what works, and what it costs with rows of 64 floats."""
    index, value, scale = jnp.int32(3), jnp.ones(64), jnp.float32(0.5)
    buffer, jitted = jnp.ones((20, 64)), jax.jit(way)

    def loop(buffer, values, scale):
        numbers = jnp.arange(steps) * 7 % size
        return lax.scan(lambda b, x: way(b, x[0], x[1], scale), buffer, (numbers, values))

    def loss(*args):
        return sum(jnp.sum(x**2) for x in loop(*args))

    many = jnp.ones((size, 64)), jnp.ones((steps, 64)), scale
    forward, gradient = (jax.jit(f).lower(*many).compile() for f in (loop, jax.grad(loss, (0, 1, 2))))
    return [
        works(lambda: jax.jvp(lambda v: way(buffer, index, v, scale), (value,), (value,))),
        works(lambda: jax.hessian(lambda s: jnp.sum(way(buffer, index, value, s)[0] ** 2))(scale)),
        works(lambda: jax.linear_transpose(lambda b, v: way(b, index, v, scale), buffer, value)((buffer, value))),
        f"{quickest(lambda: way(buffer, index, value, scale)):.0f}",
        f"{quickest(lambda: jitted(buffer, index, value, scale)):.0f}",
        f"{quickest(lambda: forward(*many)) / steps:.2g}",
        f"{quickest(lambda: gradient(*many)) / steps:.2g}",
        f"{gradient.memory_analysis().temp_size_in_bytes / 1e6:.1f} MB",
    ]


def main() -> None:
    package = importlib.import_module(TARGET.removesuffix("_update"))
    ways = {"plain JAX": in_plain_jax, "`ffi_call`, `custom_vjp`": by_ffi_call}
    if HiPrim is not None:
        ways["`HiPrim`"] = by_hi_prim
    ways["a primitive"] = getattr(package, package.__name__)
    print("| way | forward mode | Hessian | transpose | eager call | jitted call | a step | its gradient | memory |")
    for name, way in ways.items():
        check(way)
        print("|", " | ".join([name, *row(way)]), "|", flush=True)


if __name__ == "__main__":
    main()
