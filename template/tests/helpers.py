"""What the tests of all ops need."""

import ctypes
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

# --- expected values -------------------------------------------------------------------------------------------


def assert_close(found, expected, dtype=np.float64):
    tolerance = max(1e-12, 8 * float(jnp.finfo(dtype).eps))
    for f, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(f, complex), np.asarray(e, complex), rtol=tolerance, atol=tolerance)


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


# --- kernels ---------------------------------------------------------------------------------------------------


def call(target, operands, results, batch_dims):
    """Call a kernel by hand, with zeros of these types."""
    called = jax.ffi.ffi_call(target, [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in results])
    zeros = (jnp.zeros(t.shape, t.dtype) for t in operands)
    return jax.block_until_ready(called(*zeros, batch_dims=np.int64(batch_dims)))


def refused():
    """Expect that a call by hand is an error before memory is touched."""
    text = r"(decay_row|logsumexp_rows): .* does not fit the buffer|Wrong buffer dtype"
    return pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=text)


def launch(function, sizes, *arrays):
    """Run the threads of a GPU on the CPU, by a function of `threads.cc`, which updates arrays of NumPy."""
    function(*map(ctypes.c_int64, sizes), *(ctypes.c_void_p(x.ctypes.data) for x in arrays))


# --- meshes ----------------------------------------------------------------------------------------------------


def devices_of(platform):
    """Return four devices, or one where there are fewer."""
    devices = jax.devices(platform)
    return np.array(devices[: 4 if len(devices) >= 4 else 1])


def put(mesh, x, *spec):
    """Divide an array among the devices of a mesh."""
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
