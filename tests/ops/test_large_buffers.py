"""More than 2^31 elements: the arithmetic is 64-bit. The buffers are never touched but for a few rows."""

import resource

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from waiting import finish

from jax_tensorarray import in_place, ta_add, ta_empty, ta_read, ta_swap, ta_write

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


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("lowering", ["auto", "xla", "ffi"])
def test_constant_indices_past_two_to_the_31(lowering, x64):
    def f(index, size=2**32 + 8):
        b = ta_empty(size, (), jnp.int8)
        b = ta_write(ta_write(b, 3, jnp.int8(7)), index, jnp.int8(5), lowering=lowering)
        b = ta_add(b, index, jnp.int8(2), lowering=lowering)
        return ta_read(b, index, lowering=lowering), ta_read(b, 3), ta_read(b, -1, mode="drop", lowering=lowering)

    with jax.enable_x64(x64):
        for index in (2**31 - 1, 2**31, 2**32 - 1):
            assert jax.tree.map(int, jax.jit(f, static_argnums=(0, 1))(index, 2**32 + 8)) == (7, 7, 0)
        if x64:
            assert jax.tree.map(int, jax.jit(f, static_argnums=0)(2**32 + 3)) == (7, 7, 0)
        else:
            # Without jit the first write would copy the buffer, which takes many seconds.
            with pytest.raises(OverflowError, match=f"ta_write: index {2**32 + 3} does not fit .*jax_enable_x64"):
                jax.jit(f, static_argnums=0).trace(2**32 + 3)


@pytest.mark.parametrize("lowering", ["auto", "xla", "ffi"])
def test_a_tuple_addresses_more_than_two_to_the_31_elements(lowering):
    at = (2**16 - 1, 2**16 - 2)

    def f(i, j):
        b = ta_empty(2**16, (2**16,), jnp.int8)
        b = ta_write(b, (i, j), jnp.int8(5), lowering=lowering)
        b = ta_write(b, (i + 1, j), jnp.int8(3), lowering=lowering, mode="drop")
        return ta_read(b, (i, j), lowering=lowering), ta_read(b, (i, -j), mode="drop", lowering=lowering)

    with jax.enable_x64(False):
        assert jax.tree.map(int, jax.jit(f)(*map(jnp.int32, at))) == (5, 0)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("lowering", ["auto", "ffi"])
def test_in_place_takes_buffers_of_more_than_two_to_the_31_elements(lowering, monkeypatch):
    monkeypatch.setenv("JAX_TENSORARRAY_LOWERING", lowering)
    last = 2**16 - 1

    def f(j, x):
        def body(i, b):
            b = b.at[last - i, j].set(x + i.astype(jnp.int8))
            return b.at[last - i, j + 2].add(b[last - i, j])  # j + 2 is out of range

        b = lax.fori_loop(0, 3, body, ta_empty(2**16, (2**16,), jnp.int8))
        return [b[last - i, j + 2 - 2] for i in range(3)], b.at[last, j + 2].get(mode="fill", fill_value=1)

    with jax.enable_x64(False):
        assert "ta_write" in str(jax.make_jaxpr(in_place(f))(jnp.int32(last - 1), jnp.int8(7)))
        rows, outside = jax.jit(in_place(f))(jnp.int32(last - 1), jnp.int8(7))
    assert (list(map(int, rows)), int(outside)) == ([7, 8, 9], 1)


def test_an_index_past_two_to_the_31_is_reported_whole():
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=f"index {2**40} is out of range .* of size 4"):
        finish(ta_read(jnp.zeros(4), jnp.asarray(2**40)))
    with pytest.raises(IndexError, match=f"index {2**70} is out of range"):
        ta_read(jnp.zeros(4), 2**70)
