"""The plain-JAX meaning of the ops, which is their lowering where no kernel is, and the kernels, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest

import jax_tensorarray as ta
from jax_tensorarray import primitives
from jax_tensorarray._ops import reference
from jax_tensorarray._ops.primitive import row_params

SIZE, ELEM, SHAPE = 4, (2,), (2, 3)


def operands(batch, masked, dtype=np.float64):
    """Operands with batch axes, of which some indices are out of range."""
    rng = np.random.default_rng(len(batch))
    buffer, value = rng.integers(-9, 9, (*batch, SIZE, *ELEM)), rng.integers(-9, 9, (*batch, *SHAPE, *ELEM))
    where = (rng.random((*batch, *SHAPE)) < 0.7,) if masked else ()
    return buffer.astype(dtype), rng.integers(-1, SIZE + 1, (*batch, *SHAPE)), value.astype(dtype), where


def each(f, batch, buffer, index, value, where):
    """`f` of every example, with its results stacked."""
    outs = []
    for k in np.ndindex(batch):
        outs.append(f(buffer[k], index[k], value[k], where[0][k] if where else None))
    return [np.stack(out).reshape(*batch, *out[0].shape) for out in zip(*outs, strict=True)]


def by_oracle(op, reverse):
    """name -> what it means for one example, as a tuple."""
    return {
        "read": lambda b, i, v, w: (oracle.ta_read(b, i, where=w),),
        "write": lambda b, i, v, w: oracle.ta_swap(b, i, v, where=w, reverse=reverse)[:1],
        "swap": lambda b, i, v, w: oracle.ta_swap(b, i, v, where=w, reverse=reverse),
        "add": lambda b, i, v, w: (oracle.ta_add(b, i, v, where=w, reverse=reverse),),
    }[op]


def plain(op, reverse, batch_dims):
    """The plain-JAX function of an op."""
    if op == "read":
        return lambda b, i, v, *w: (reference.read(b, i, *w, batch_dims=batch_dims),)
    f = reference.add if op == "add" else reference.swap
    take = slice(None) if op == "swap" else slice(1)
    return lambda b, i, v, *w: f(b, i, v, *w, batch_dims=batch_dims, reverse=reverse)[take]


def kernel(op, reverse, batch_dims):
    """The primitive of an op."""
    primitive = getattr(primitives, f"ta_{op}_p")
    params = row_params(f"ta_{op}", "drop", batch_dims=batch_dims, reverse=reverse)
    if op == "read":
        return lambda b, i, v, *w: (primitive.bind(b, i, *w, **params),)
    return lambda *xs: primitive.bind(*xs, **params) if op == "swap" else (primitive.bind(*xs, **params),)


@pytest.mark.parametrize("batch", [(), (2,), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("op", ["read", "write", "add", "swap"])
def test_plain_jax_and_the_kernels_both_mean_what_numpy_does(op, reverse, masked, batch):
    buffer, index, value, where = operands(batch, masked)
    expected = each(by_oracle(op, reverse), batch, buffer, index, value, where)
    for implementation in (plain, kernel):
        f = jax.jit(implementation(op, reverse, len(batch)))
        for a, e in zip(f(buffer, index, value, *where), expected, strict=True):
            oracle.assert_same_bits(a, e)


@pytest.mark.parametrize("op", ["write", "add", "swap"])
def test_the_order_of_duplicates_is_the_other_way_round_in_reverse(op):
    buffer, index, value = (
        np.zeros(2, np.float32),
        np.array([1, 1, 1]),
        np.array([1.0, 2.0**25, -(2.0**25)], np.float32),
    )
    forward, backward = ([np.asarray(o) for o in by_oracle(op, r)(buffer, index, value, None)] for r in (False, True))
    assert not np.array_equal(forward[0], backward[0])
    for implementation in (plain, kernel):
        for a, e in zip(
            implementation(op, True, 0)(jnp.asarray(buffer), jnp.asarray(index), jnp.asarray(value)),
            backward,
            strict=True,
        ):
            oracle.assert_same_bits(a, e)


@pytest.mark.parametrize(
    "dtype",
    [np.bool_, np.uint8, np.int64, ml_dtypes.int4, np.float16, ml_dtypes.bfloat16, np.complex64],
    ids=oracle.name_of,
)
@pytest.mark.parametrize("op", ["read", "write", "add", "swap"])
def test_plain_jax_has_the_arithmetic_of_every_dtype(op, dtype):
    buffer, index, value, where = operands((), True, np.int64)
    low, high = (0, 2) if dtype == np.bool_ else (-8, 8)
    buffer, value = (np.clip(x, low, high - 1).astype(dtype) for x in (buffer, value))
    found = jax.jit(plain(op, False, 0))(jnp.asarray(buffer), index, jnp.asarray(value), *where)
    for a, e in zip(found, each(by_oracle(op, False), (), buffer, index, value, where), strict=True):
        oracle.assert_same_bits(a, e)


@pytest.mark.parametrize("index_dtype", [np.int8, np.uint8, np.uint64, np.int64], ids=oracle.name_of)
def test_plain_jax_does_not_wrap_an_index(index_dtype):
    limits = np.iinfo(index_dtype)
    index = np.array([0, 2, limits.max, limits.min or limits.max, limits.max // 2 + 1], index_dtype)
    buffer, value = np.arange(3.0), np.arange(5.0) + 10
    for op in ("read", "write", "add", "swap"):
        found = jax.jit(plain(op, False, 0))(buffer, index, value)
        for a, e in zip(found, by_oracle(op, False)(buffer, index, value, None), strict=True):
            oracle.assert_same_bits(a, e)


@pytest.mark.parametrize("index_dtype", [np.int8, np.uint8, np.int16, np.uint16], ids=oracle.name_of)
def test_a_buffer_may_be_longer_than_its_index_can_count(index_dtype):
    size = np.iinfo(index_dtype).max + 45
    last = np.iinfo(index_dtype).max
    index = jnp.asarray([last, 3], index_dtype)
    value = jnp.asarray([7.0, 8.0])
    new, old = reference.swap(jnp.arange(size, dtype=float), index, value, batch_dims=0, reverse=False)
    np.testing.assert_array_equal(old, [last, 3])
    np.testing.assert_array_equal(reference.read(new, index, batch_dims=0), [7, 8])
    masked = reference.mask(jnp.ones(size), jnp.asarray(last, index_dtype), batch_dims=0)
    assert masked.sum() == last
    packed = ta.ta_write(jnp.zeros(size, jnp.int4), index, jnp.asarray([5, 6], jnp.int4))  # plain JAX on the CPU too
    assert packed[last] == 5


@pytest.mark.parametrize("shape", [(0, 2), (3, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("positions", [(0,), (2,)], ids=str)
@pytest.mark.parametrize("op", ["read", "write", "add", "swap"])
def test_plain_jax_has_no_trouble_with_nothing(op, positions, shape):
    buffer, index, value = np.ones(shape), np.zeros(positions, np.int64), np.ones(positions + shape[1:])
    found = plain(op, False, 0)(jnp.asarray(buffer), jnp.asarray(index), jnp.asarray(value))
    for a, e in zip(found, by_oracle(op, False)(buffer, index, value, None), strict=True):
        oracle.assert_same_bits(a, e)


@pytest.mark.parametrize("batch", [(), (3,), (2, 2)], ids=str)
def test_masking_in_plain_jax_and_by_the_kernel(batch):
    rng = np.random.default_rng(0)
    buffer, size = rng.normal(size=(*batch, SIZE, *ELEM)), rng.integers(-1, SIZE + 2, batch)
    expected = [oracle.ta_stack(buffer[k], size[k]) for k in np.ndindex(batch)]
    expected = np.stack(expected).reshape(buffer.shape)
    oracle.assert_same_bits(reference.mask(jnp.asarray(buffer), jnp.asarray(size), batch_dims=len(batch)), expected)
    found = primitives.ta_stack_p.bind(jnp.asarray(buffer), jnp.asarray(size), batch_dims=len(batch))
    oracle.assert_same_bits(found, expected)


# --- platforms without kernels ---------------------------------------------------------------------------------


def lowered_for(platform, f, *args):
    return jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("op", ["ta_read", "ta_write", "ta_add", "ta_swap", "ta_stack", "ta_empty"])
def test_a_platform_without_kernels_gets_plain_jax(op):
    buffer, index, value = jnp.zeros((4, 2)), jnp.array([0, 3]), jnp.ones((2, 2))
    args = {"ta_empty": (), "ta_stack": (buffer, index[0]), "ta_read": (buffer, index)}.get(op, (buffer, index, value))
    f = functools.partial(getattr(ta, op), 3) if op == "ta_empty" else getattr(ta, op)
    assert "jax_tensorarray" in lowered_for("cpu", f, *args)
    assert "jax_tensorarray" not in lowered_for("tpu", f, *args)


@pytest.mark.parametrize("op", ["ta_read", "ta_write", "ta_add", "ta_swap"])
def test_derivatives_and_batches_have_plain_jax_too(op):
    many = 20  # of few a CPU makes slices
    buffer, index, value = jnp.zeros((3, 4, 2)), jnp.zeros((3, many), int), jnp.ones((3, many, 2))

    def loss(buffer, index, value):
        args = (buffer, index) if op == "ta_read" else (buffer, index, value)
        return sum(jnp.sin(out).sum() for out in jax.tree.leaves(getattr(ta, op)(*args)))

    f = jax.vmap(jax.grad(loss, argnums=(0, 2)))
    assert "jax_tensorarray" in lowered_for("cpu", f, buffer, index, value)
    assert "jax_tensorarray" not in lowered_for("tpu", f, buffer, index, value)
