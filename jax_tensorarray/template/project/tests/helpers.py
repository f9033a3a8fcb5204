"""What the tests of all ops need."""

import re

import jax
import jax.numpy as jnp
import numpy as np

# --- expected values -------------------------------------------------------------------------------------------


def assert_close(found, expected, dtype=np.float64):
    tolerance = max(1e-12, 8 * float(jnp.finfo(dtype).eps))
    for f, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(f, complex), np.asarray(e, complex), rtol=tolerance, atol=tolerance)


def by_a_loop(f, axes, args):
    """Compute `jax.vmap(f, axes)(*args)` one example after the other."""
    size = next(len(x) for x, a in zip(args, axes, strict=True) if a == 0)
    rows = [f(*(x if a is None else x[k] for x, a in zip(args, axes, strict=True))) for k in range(size)]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *rows)


# --- compiled programs -----------------------------------------------------------------------------------------


def copies_in_loops(f, *args):
    """Return the copies of arrays of the first argument's shape in the loops of the compiled program."""
    sizes = ",".join(map(str, args[0].sharding.shard_shape(args[0].shape)))
    text = jax.jit(f).lower(*args).compile().as_text()
    computations = dict(re.findall(r"^(?:ENTRY )?%?([\w.-]+) [^\n]*\{\n(.*?)^\}", text, re.DOTALL | re.MULTILINE))
    inside, called = [], re.findall(r"body=%?([\w.-]+)", text)
    while called:
        computation = computations.pop(called.pop(), "")
        inside.append(computation)
        called += re.findall(r"[\w.-]+", computation)
    return re.findall(rf"= \(?\w+\[{sizes}\]\S* copy(?:-start)?\(.*", "".join(inside))


def gathers(f, *args):
    """Return the collectives in the compiled program that bring parts of arrays together on one device."""
    text = jax.jit(f).lower(*args).compile().as_text()
    return re.findall(r"\S+ (?:all-gather|all-to-all|collective-permute)(?:-start)?\(", text)


# --- meshes ----------------------------------------------------------------------------------------------------


def devices_of(platform):
    """Return four devices, or one where there are fewer."""
    devices = jax.devices(platform)
    return np.array(devices[: 4 if len(devices) >= 4 else 1])
