"""The plain-JAX meaning of the ops, which is their lowering where no kernel is, against NumPy.

`test_starts.py` has it for all shapes, by dtypes that are packed below a byte."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from ops import OPS, OURS, ROW_OPS, assert_same

import jax_tensorarray as ta
from jax_tensorarray import primitives
from jax_tensorarray._ops import reference
from jax_tensorarray._ops.primitive import row_params

pytestmark = pytest.mark.slow(but=4)

PLAIN = {
    "ta_read": lambda *xs, **how: (reference.read(*xs, **how),),
    "ta_write": lambda *xs, **how: (reference.write(*xs, **how),),
    "ta_add": lambda *xs, **how: (reference.add(*xs, **how),),
    "ta_max": lambda *xs, **how: (reference.updating(jnp.maximum)(*xs, **how),),
    "ta_swap": reference.swap,
}


def plain(op, *xs, reverse=False):
    return PLAIN[op.name](*xs, reverse=reverse, batch_dims=0)


def test_the_sums_of_duplicates_are_the_other_way_round_in_reverse():
    xs = np.zeros(2, np.float32), np.array([1, 1, 1]), np.array([1.0, 2.0**25, -(2.0**25)], np.float32)
    forward, backward = (oracle.ta_add(*xs, reverse=reverse) for reverse in (False, True))
    assert not np.array_equal(forward, backward)
    assert_same(plain(OPS["ta_add"], *xs, reverse=True), (backward,))
    params = row_params("ta_add", "drop", lowering="ffi", reverse=True)
    assert_same(primitives.ta_add_p.bind(*map(jnp.asarray, xs), **params), backward)


@pytest.mark.parametrize(
    "dtype",
    [np.bool_, np.uint8, np.int64, ml_dtypes.int4, np.float16, ml_dtypes.bfloat16, np.complex64],
    ids=oracle.name_of,
)
def test_plain_jax_has_the_arithmetic_of_every_dtype(dtype):
    rng, low, high = np.random.default_rng(0), *((0, 2) if dtype == np.bool_ else (-8, 8))
    buffer, value = (rng.integers(low, high, (n, 2)).astype(dtype) for n in (4, 6))
    named = {"buffer": buffer, "index": rng.integers(-1, 5, 6), "value": value, "where": rng.random(6) < 0.7}
    ops = [op for op in ROW_OPS if op.name != "ta_max" or dtype != np.complex64]  # which has no order
    cases = [(op, [named[name] for name in op.operands]) for op in ops]
    found = jax.jit(lambda given: [plain(op, *xs) for op, xs in zip(ops, given, strict=True)])([xs for _, xs in cases])
    assert_same(found, [op(oracle, *xs) for op, xs in cases])


@pytest.mark.parametrize("index_dtype", [np.int8, np.uint8, np.int16, np.uint16], ids=oracle.name_of)
def test_a_buffer_may_be_longer_than_its_index_can_count(index_dtype):
    last = np.iinfo(index_dtype).max
    size = last + 45

    @jax.jit
    def f(index):
        new, old = reference.swap(
            jnp.arange(size, dtype=float), index, jnp.array([7.0, 8.0]), batch_dims=0, reverse=False
        )
        masked = reference.mask(jnp.ones(size), index[0], batch_dims=0)
        packed = ta.ta_write(jnp.zeros(size, jnp.int4), index, jnp.array([5, 6], jnp.int4))  # plain JAX on the CPU too
        return old, reference.read(new, index, batch_dims=0), masked.sum(), packed[last]

    found = f(np.array([last, 3], index_dtype))
    for a, e in zip(found, ([last, 3], [7, 8], last, 5), strict=True):
        np.testing.assert_array_equal(a, e)


# --- platforms without kernels ---------------------------------------------------------------------------------


def calls(platform, f, *args):
    """Whether the program for a platform calls a kernel. (The name of a function of its own says nothing.)"""
    return "custom_call @jax_tensorarray_" in jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()


MANY = 20  # of few positions a CPU makes slices
NAMED = {"buffer": jnp.zeros((3, 4, 2)), "index": jnp.zeros((3, MANY), int), "value": jnp.ones((3, MANY, 2))}


@pytest.mark.parametrize("op", [*ROW_OPS, OPS["ta_stack"], OPS["ta_clear"], OPS["ta_check"], "ta_empty"], ids=str)
def test_a_platform_without_kernels_gets_plain_jax(op):
    if op == "ta_empty":
        f, args = (lambda: ta.ta_empty(3)), []
    else:
        args = [NAMED.get(name, jnp.arange(3, dtype=jnp.int32)) for name in op.operands if name != "where"]
        f = functools.partial(op, OURS, mode=None)
        if op.differentiable:
            f = jax.vmap(
                jax.grad(lambda *xs: sum(jnp.sin(out).sum() for out in op(OURS, *xs, mode=None)), op.differentiable)
            )
        elif op.name == "ta_check":
            f = jax.vmap(f)
    assert calls("cpu", f, *args)
    assert not calls("tpu", f, *args)
