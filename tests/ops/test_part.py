"""`ta_read_part` and `ta_write_part`: only the first parts of a row are moved, in place."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from in_numpy import in_numpy
from in_place import assert_no_whole_buffer_copy, compiled
from jax import jit, lax
from ops import assert_same

from jax_tensorarray._ops.part import ta_read_part, ta_read_part_p, ta_write_part, ta_write_part_p

rng = np.random.default_rng(0)
ROWS, PARTS = 4, 5


def written(buffer, index, value, parts):
    buffer = buffer.copy()
    if 0 <= index < len(buffer):
        buffer[index, : max(parts, 0)] = value[: max(parts, 0)]
    return buffer


@pytest.mark.parametrize("elem", [(), (3,), (0,)], ids=str)
def test_the_first_parts_are_moved(elem):
    buffer, value = rng.normal(size=(ROWS, PARTS, *elem)), rng.normal(size=(PARTS, *elem))
    reads, writes = ((f, jax.jit(f)) for f in (ta_read_part, ta_write_part))
    for index, parts in itertools.product([-1, 0, ROWS - 1, ROWS], [-1, 0, 1, PARTS, PARTS + 1, 2**31 - 1]):
        args = jnp.int32(index), jnp.asarray(value), jnp.int32(parts)
        for write in writes:
            oracle.assert_same_bits(write(jnp.asarray(buffer), *args), written(buffer, index, value, parts))
        for read in reads if 0 <= index < ROWS else ():
            row = read(jnp.asarray(buffer), jnp.int32(index), jnp.int32(parts))
            oracle.assert_same_bits(row[: max(parts, 0)], buffer[index, : max(parts, 0)])


@pytest.mark.slow(but=7)
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=oracle.name_of)
def test_every_dtype(dtype):
    buffer, value = oracle.random_bits(rng, (ROWS, PARTS, 2), dtype), oracle.random_bits(rng, (PARTS, 2), dtype)
    found = jax.jit(ta_write_part)(jnp.asarray(buffer), jnp.int32(2), jnp.asarray(value), jnp.int32(3))
    row = jax.jit(ta_read_part)(found, jnp.int32(2), jnp.int32(3))
    oracle.assert_same_bits(np.asarray(found)[[0, 1, 3]], buffer[[0, 1, 3]])
    for moved in (np.asarray(found)[2, :3], np.asarray(row)[:3]):
        oracle.assert_same_bits(moved, value[:3])
    if dtype not in oracle.PACKED:  # their rows are moved as a whole
        oracle.assert_same_bits(np.asarray(found)[2, 3:], buffer[2, 3:])


@pytest.mark.parametrize("in_axes", [(0, 0, 0, 0), (1, None, 0, None), (None, 0, None, 0), (2, 0, 1, 0)], ids=str)
def test_under_vmap_every_example_has_its_own_number(in_axes):
    buffers, values = rng.normal(size=(3, ROWS, PARTS)), rng.normal(size=(3, PARTS))
    indices, parts = np.array([2, 0, 3], np.int32), np.array([1, 5, 0], np.int32)
    pairs = [*zip((buffers, indices, values, parts), in_axes, strict=True)]
    own = [x[:1].repeat(3, 0) if axis is None else x for x, axis in pairs]
    args = [jnp.asarray(x[0] if axis is None else np.moveaxis(x, 0, axis)) for x, axis in pairs]
    found = jax.jit(jax.vmap(ta_write_part, in_axes))(*args)
    rows = jax.vmap(ta_read_part, (0, in_axes[1], in_axes[3]))(found, args[1], args[3])
    for k, (buffer, index, value, n) in enumerate(zip(*own, strict=True)):
        oracle.assert_same_bits(found[k], written(buffer, index, value, n))
        oracle.assert_same_bits(rows[k, :n], value[:n])


def test_derivatives_are_those_of_whole_rows():
    buffer, value = jnp.asarray(rng.normal(size=(ROWS, PARTS))), jnp.asarray(rng.normal(size=PARTS))

    def f(buffer, value):
        buffer = ta_write_part(buffer, jnp.int32(1), value, jnp.int32(3))
        row = ta_read_part(buffer, jnp.int32(1), jnp.int32(3))
        return (row[:3] ** 2).sum() + (buffer[2] ** 2).sum()

    def plain(buffer, value):
        return (value[:3] ** 2).sum() + (buffer[2] ** 2).sum()

    def derivatives(f):
        return lambda *args: (jax.grad(f, (0, 1))(*args), jax.hessian(f, (0, 1))(*args))

    assert_same(
        jit(derivatives(f))(buffer, value), in_numpy(derivatives(plain))(buffer, value), np.testing.assert_array_equal
    )
    tangents = jax.jvp(f, (buffer, value), (buffer, value))[1], jax.jvp(plain, (buffer, value), (buffer, value))[1]
    np.testing.assert_allclose(*tangents, rtol=1e-14)


def test_a_platform_without_kernels_moves_whole_rows():
    buffer, value = rng.normal(size=(ROWS, PARTS)), rng.normal(size=PARTS)
    traced = jax.jit(ta_write_part).trace(jnp.asarray(buffer), jnp.int32(1), jnp.asarray(value), jnp.int32(2))
    assert "jax_tensorarray_write_part" in traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "jax_tensorarray" not in traced.lower(lowering_platforms=("tpu",)).as_text()


def rewritten(length):
    def f(buffer, value):
        def body(i, buffer):
            row = ta_read_part(buffer, i - 1, jnp.int32(2))
            return ta_write_part(buffer, i, value + row[0], jnp.int32(2))

        return lax.fori_loop(1, length, body, buffer)

    return f


def args_of(length):
    return jnp.ones((length, 8)), jnp.ones(8)


def test_a_loop_that_reads_and_writes_parts_is_in_place():
    f = compiled(rewritten(400), *args_of(400))
    assert_no_whole_buffer_copy(f, args_of(400)[0])
    np.testing.assert_array_equal(f(*args_of(400))[:, :2], np.arange(1, 401)[:, None].repeat(2, 1))


@pytest.mark.parametrize(
    ("bind", "error", "message"),
    [
        (lambda b, i, v: ta_read_part_p.bind(b, i, i, batch_dims=1), ValueError, "ta_read_part: .* share 1 batch axes"),
        (lambda b, i, v: ta_read_part_p.bind(b[0], i, i, batch_dims=0), ValueError, "do not share 0 batch axes"),
        (lambda b, i, v: ta_write_part_p.bind(b, i, b, i, batch_dims=0), TypeError, r"is not a row \(5,\) of float64"),
        (lambda b, i, v: ta_write_part_p.bind(b, i, v > 0, i, batch_dims=0), TypeError, "value bool.* is not a row"),
    ],
)
def test_binds_that_do_not_fit(bind, error, message):
    with pytest.raises(error, match=message):
        bind(jnp.zeros((ROWS, PARTS)), jnp.int32(0), jnp.zeros(PARTS))
