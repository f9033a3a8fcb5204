"""More than 2^31 elements: the arithmetic is 64-bit. The buffers are never touched but for a few rows."""

import resource

import jax
import jax.numpy as jnp
import pytest
from waiting import finish

from jax_tensorarray import ta_add, ta_empty, ta_read, ta_swap, ta_write

ROWS = 2**31 + 8


@pytest.mark.parametrize("dtype", [jnp.int64, jnp.uint32])
def test_rows_past_two_to_the_31(dtype):
    @jax.jit
    def f(i):
        b = ta_empty(ROWS, (), jnp.int8)
        b = ta_write(b, i, jnp.int8(5))
        b = ta_add(b, i, jnp.int8(2))
        b, _ = ta_swap(b, i - 1, jnp.int8(9))
        return ta_read(b, jnp.stack([i, i - 1])), ta_read(b, i + 5, mode="drop")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows, outside = f(jnp.asarray(ROWS - 3, dtype))
    assert rows.tolist() == [7, 9]
    assert outside == 0
    touched = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert touched < 2**29 or jax.default_backend() != "cpu"  # elsewhere the buffers are not this process's memory


def updated(index, size, *lowerings):
    """What comes of a write, an add and reads, in turn of these lowerings."""
    of_write, of_add, *of_reads = lowerings
    b = ta_empty(size, (), jnp.int8)
    b = ta_write(ta_write(b, 3, jnp.int8(7)), index, jnp.int8(5), lowering=of_write)
    b = ta_add(b, index, jnp.int8(2), lowering=of_add)
    reads = [(ta_read(b, index, lowering=how), ta_read(b, -1, mode="drop", lowering=how)) for how in of_reads]
    return ta_read(b, 3), reads


@pytest.mark.parametrize("lowering", ["auto", "xla", "ffi"])
def test_constant_indices_past_two_to_the_31(lowering):
    @jax.jit
    def f():
        return [updated(index, 2**32 + 8, *[lowering] * 3) for index in (2**31 - 1, 2**31, 2**32 - 1, 2**32 + 3)]

    assert jax.tree.map(int, f()) == [(7, [(7, 0)])] * 4


def test_constant_indices_past_two_to_the_31_without_64_bits():
    """The whole buffer is touched, which takes seconds: one has to do."""
    with jax.enable_x64(False):
        f = jax.jit(lambda: updated(2**31, 2**31 + 9, "ffi", "xla", "auto", "xla", "ffi"))
        assert jax.tree.map(int, f()) == (7, [(7, 0)] * 3)
        for lowering in ("auto", "xla", "ffi"):
            last = jax.jit(lambda how=lowering: updated(2**32 - 1, 2**32 + 8, *[how] * 3))
            assert "dense<4294967295> : tensor<ui32>" in last.lower().as_text()
        with pytest.raises(OverflowError, match=f"ta_write: index {2**32 + 3} does not fit .*jax_enable_x64"):
            updated(2**32 + 3, 2**32 + 8, *["auto"] * 3)


def test_an_index_past_two_to_the_31_is_reported_whole():
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=f"index {2**40} is out of range .* of size 4"):
        finish(ta_read(jnp.zeros(4), jnp.asarray(2**40)))
    with pytest.raises(IndexError, match=f"index {2**70} is out of range"):
        ta_read(jnp.zeros(4), 2**70)
