"""Every dtype of the buffer and of the index: rows are moved bit for bit, and added as NumPy and ml_dtypes add."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from ops import assert_same
from oracle import DTYPES, FLOAT8, name_of

import jax_tensorarray as ta
from jax_tensorarray import ta_add, ta_empty, ta_max, ta_read, ta_stack, ta_swap, ta_write
from jax_tensorarray._ops.check import ta_check
from jax_tensorarray._ops.clear import ta_clear

INDEX = np.array([[3, 0, 3], [9, 1, -2]])
FILLED = np.array([2, 0, 3, 1])
WHERE = np.array([[True, True, True], [True, False, True]])


@jax.jit
def moves(buffer, index, value, where):
    """Everything that moves rows and does not calculate with them, by slices and by kernels."""
    return (
        ta_read(buffer, index, mode="drop"),
        ta_read(buffer, index, where=where, mode="drop", lowering="ffi"),
        ta_write(buffer, index, value, where=where, mode="drop", lowering="ffi"),
        *ta_swap(buffer, index, value, where=where, mode="drop", lowering="ffi"),
        ta_stack(buffer, 2),
        ta_clear(buffer, 1, 3),
        jax.lax.scan(lambda b, x: ta_swap(b, x[0], x[1], mode="drop"), buffer, (index[0], value[0])),
        ta_read(ta_write(ta_empty(4, (3,), buffer.dtype), FILLED, buffer[:4]), FILLED),
    )


def moved(buffer, index, value, where):
    """The same by the oracle."""
    return (
        oracle.ta_read(buffer, index),
        oracle.ta_read(buffer, index, where=where),
        oracle.ta_write(buffer, index, value, where=where),
        *oracle.ta_swap(buffer, index, value, where=where),
        oracle.ta_stack(buffer, 2),
        oracle.ta_clear(buffer, 1, 3),
        oracle.ta_swap(buffer, index[0], value[0]),
        buffer[:4],
    )


# --- moving ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("fusions_of_users")  # without emitters, jax 0.10 changes bits of some floats of 8 bits
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_rows_are_moved_bit_for_bit(dtype):
    rng = np.random.default_rng(0)
    buffer = oracle.random_bits(rng, (5, 3), dtype)
    value = oracle.random_bits(rng, (*INDEX.shape, 3), dtype)
    args = [jnp.asarray(x) for x in (buffer, INDEX, value, WHERE)]
    found = moves.lower(*args).compile()(*args)
    if np.dtype(dtype) != ml_dtypes.float8_e8m0fnu:  # which has no zero
        assert_same(found, moved(buffer, INDEX, value, WHERE))
    else:
        index, where = np.clip(INDEX, 0, 4), None
        found = (ta_read(jnp.asarray(buffer), jnp.asarray(index)), *ta_swap(buffer, jnp.asarray(index), value))
        assert_same(found, (oracle.ta_read(buffer, index), *oracle.ta_swap(buffer, index, value, where=where)))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_all_dtypes_have_kernels_but_those_that_are_packed_below_a_byte(dtype):
    operands = [jax.ShapeDtypeStruct(*x) for x in (((4, 3), dtype), ((2,), np.int64), ((2, 3), dtype))]

    def f(*operands):
        return ta_read(*operands[:2]), [op(*operands) for op in (ta_write, ta_add, ta_swap)]

    text = jax.jit(f).lower(*operands).as_text()
    names = set(re.findall(r"custom_call @jax_tensorarray_(\w+)", text))
    assert names == (set() if dtype in oracle.PACKED else {"read", "write", "add", "swap"})


# --- adding ----------------------------------------------------------------------------------------------------


#: A few rows of these are updated by slices too, by the arithmetic of XLA.
SLICED = [np.bool_, np.int8, np.uint64, np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.complex64]
SLICED += FLOAT8[3::2]


@pytest.mark.slow(but=13)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_duplicate_rows_are_combined_in_order_and_rounded_by_the_dtype(dtype):
    index = np.array([3, 0, 3, 9, 3, -1])
    ops = ["max"] * (np.dtype(dtype).kind != "c") + ["add"] * (dtype not in FLOAT8)  # it has another test
    lowerings = ["ffi", "auto"] if dtype in SLICED else ["ffi"]

    def made(op):
        rng = np.random.default_rng(["max", "add"].index(op))
        return oracle.random_bits(rng, (5, 40), dtype), index, oracle.random_bits(rng, (6, 40), dtype)

    @jax.jit
    def f(given):
        return {
            op: [getattr(ta, f"ta_{op}")(*given[op], mode="drop", lowering=lowering) for lowering in lowerings]
            for op in ops
        }

    found = f({op: made(op) for op in ops})
    for op in ops:
        buffer, _, value = made(op)
        if np.issubdtype(dtype, np.complexfloating):  # complex numbers are NaN in each part by itself
            part = np.dtype(dtype).type(0).real.dtype
            found, buffer, value = jax.tree.map(lambda x, part=part: np.asarray(x).view(part), (found, buffer, value))
        with np.errstate(invalid="ignore"):
            wanted = getattr(oracle, f"ta_{op}")(buffer, index, value)
            for one in found[op]:
                oracle.assert_same_numbers(one, wanted)
    if dtype in oracle.PACKED:  # in plain JAX, by XLA's own maximum
        assert "jax_tensorarray_" not in jax.jit(ta_max).lower(*made("max")).as_text()


@pytest.mark.parametrize("dtype", FLOAT8, ids=name_of)
def test_all_pairs_of_8_bit_floats_have_the_sum_of_ml_dtypes_and_the_maximum(dtype):
    patterns = np.arange(256).astype(np.uint8)
    a, b = (x.reshape(-1).view(dtype) for x in np.meshgrid(patterns, patterns, indexing="ij"))
    args = jnp.asarray(a.copy()), jnp.arange(a.size), jnp.asarray(b.copy())
    oracle.assert_same_numbers(ta_add(*args), oracle.sum_of_small_floats(a, b))
    oracle.assert_same_numbers(ta_max(*args), oracle.larger(a, b))


def corners(dtype):
    """Zeros, subnormals, the ends of the range, infinities, NaN, and the neighbours of powers of two."""
    limits = ml_dtypes.finfo(dtype)
    width = np.dtype(dtype).itemsize * 8
    ends = np.array([0, 1, 2, 3], np.uint16)
    near = [
        np.asarray(x, dtype).view(np.uint16)[()]
        for x in (
            limits.smallest_normal,
            limits.max,
            1.0,
            2.0,
            float(limits.max) / 2,
            np.inf,
            np.nan,
            float(1 / limits.eps),
        )
    ]
    magnitudes = np.unique(np.concatenate([ends, *(np.array([n - 1, n, n + 1]) for n in near)])).astype(np.uint16)
    return np.concatenate([magnitudes, magnitudes | np.uint16(1 << (width - 1))]).view(dtype)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=name_of)
def test_16_bit_floats_have_the_sum_of_ml_dtypes(dtype):
    rng = np.random.default_rng(2)
    with np.errstate(all="ignore"):
        special = corners(dtype)
        a, b = (x.reshape(-1) for x in np.meshgrid(special, special))
        anything = rng.integers(0, 2**16, (2, 2**18)).astype(np.uint16).view(dtype)
        # Neighbouring exponents, for ties; and subnormals among themselves.
        close = anything[0], (anything[0].view(np.uint16) ^ rng.integers(0, 2**12, 2**18).astype(np.uint16)).view(dtype)
        tiny = (rng.integers(0, 2**11, (2, 2**14)) | rng.integers(0, 2, (2, 2**14)) << 15).astype(np.uint16).view(dtype)
        a = np.concatenate([a, anything[0], close[0], tiny[0]])
        b = np.concatenate([b, anything[1], close[1], tiny[1]])
    found = ta_add(jnp.asarray(a), jnp.arange(a.size), jnp.asarray(b))
    oracle.assert_same_numbers(found, oracle.sum_of_small_floats(a, b))


# --- indices ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", oracle.SMALL_INTEGERS, ids=name_of)
def test_an_index_may_be_packed_below_a_byte(dtype):
    index = np.array([0, 1, 1, 0]).astype(dtype)
    for found in (jax.jit(ta_read)(jnp.arange(3.0), jnp.asarray(index)), jax.jit(ta_check)(index, np.int32(5))):
        np.testing.assert_array_equal(found, [0, 1, 1, 0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "given", [2**31, 2**32, 2**32 + 1, 2**40, 2**63, 2**64 + 1, -1, -(2**32) + 1, -(2**63), -(2**64)]
)
@pytest.mark.parametrize("x64", [True, False])
def test_an_index_of_any_magnitude_is_not_wrapped_into_range(given, x64):
    forms = [given, [given, 1]]
    if -(2**63) <= given < 2**63:
        forms += [np.int64(given), np.array([given, 1])]
    elif 0 <= given < 2**64:
        forms += [np.uint64(given), np.array([given, 1], np.uint64)]
    with jax.enable_x64(x64):
        buffer = jnp.arange(1.0, 4.0)
        for index in forms:
            np.testing.assert_array_equal(ta_read(buffer, index, mode="drop"), [0, 2] if np.shape(index) else 0)
            np.testing.assert_array_equal(
                ta_write(buffer, index, 9.0, mode="drop"), [1, 9, 3] if np.shape(index) else [1, 2, 3]
            )
            with pytest.raises(IndexError, match=f"^ta_read: index {given} is out of range for a buffer of size 3$"):
                ta_read(buffer, index)


def test_without_64_bits_indices_and_buffers_of_numpy_still_work():
    with jax.enable_x64(False):
        buffer = np.arange(6.0).reshape(3, 2)  # float64, which JAX narrows
        for index in (np.int64(2), np.array([2, 0]), np.array([2, 0], np.uint64), [2, 0], 2):
            rows = ta_read(buffer, index)
            assert rows.dtype == np.float32
            np.testing.assert_array_equal(rows, buffer[index])
        written = ta_write(jnp.asarray(buffer), np.array([1]), np.array([[7.0, 8.0]]))
        np.testing.assert_array_equal(written, [[0, 1], [7, 8], [4, 5]])
        gradient = jax.grad(lambda b: (ta_read(b, np.array([2, 2])) ** 2).sum())(jnp.asarray(buffer))
        assert gradient.dtype == np.float32
        np.testing.assert_array_equal(gradient, [[0, 0], [0, 0], [16, 20]])


# --- beside differentiated code --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.bool_, np.int16], ids=name_of)
def test_every_op_on_discrete_values_has_float0_tangents(dtype):
    buffer, value = np.array([1, 0, 1]).astype(dtype), np.array([0, 1]).astype(dtype)

    def f(buffer, value):
        index = jnp.array([1, 2])
        return (
            ta_read(buffer, index),
            ta_write(buffer, index, value),
            ta_add(buffer, index, value),
            ta_max(buffer, index, value),
            ta_swap(buffer, index, value),
            ta_stack(buffer, jnp.array(1)),
        )

    tangents = np.zeros(3, jax.dtypes.float0), np.zeros(2, jax.dtypes.float0)
    values, dots = jax.jvp(f, (buffer, value), tangents)
    assert_same(
        values,
        (
            buffer[1:],
            oracle.ta_write(buffer, [1, 2], value),
            oracle.ta_add(buffer, [1, 2], value),
            oracle.ta_max(buffer, [1, 2], value),
            oracle.ta_swap(buffer, [1, 2], value),
            oracle.ta_stack(buffer, 1),
        ),
    )
    assert {d.dtype for d in jax.tree.leaves(dots)} == {jax.dtypes.float0}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.complex128], ids=name_of)
def test_gradients_have_the_dtype_of_what_they_belong_to(dtype):
    buffer, value = jnp.arange(3).astype(dtype), jnp.array([5, 6, 7]).astype(dtype)

    def f(buffer, value):
        index = jnp.array([1, 2, 1])
        swapped, old = ta_swap(buffer, index, value)
        total = 2 * swapped + ta_add(buffer, index, value) + ta_write(buffer, index, value)
        return jnp.real(total.sum() + 4 * old.sum() + 8 * ta_read(buffer, index).sum())

    gradients = jax.jit(jax.grad(f, argnums=(0, 1)))(buffer, value)
    oracle.assert_same_bits(gradients[0], np.array([2 + 1 + 1, 4 + 1 + 16, 4 + 1 + 8]).astype(dtype))
    oracle.assert_same_bits(gradients[1], np.array([4 + 1, 2 + 1 + 1, 2 + 1 + 1]).astype(dtype))


READS = {
    "ta_read": (lambda b: ta_read(b, 2), lambda b: b[2]),
    "rows": (lambda b: ta_read(b, jnp.array([1, 2, 1])), lambda b: b[jnp.array([1, 2, 1])]),
    "in a jit": (lambda b: jax.jit(lambda b: ta_read(b, jnp.array([3])))(b), lambda b: b[3:4]),
    "ta_swap": (lambda b: ta_swap(b, 2, jnp.ones(2, b.dtype))[1], lambda b: b[2]),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", READS)
def test_a_read_takes_a_cotangent_of_another_dtype_as_jax_does(name):
    """A rule of a `custom_vjp` may give one; its dtype is then that of the buffer's cotangent."""

    @jax.custom_vjp
    def loss(row):
        return jnp.sum(row.astype(jnp.float32) ** 2)

    loss.defvjp(lambda row: (loss(row), row), lambda row, ct: (2 * ct * row.astype(jnp.float32),))
    b = jnp.linspace(0.1, 1, 8).reshape(4, 2).astype(jnp.bfloat16)
    got, want = (jax.grad(lambda b, f=f: loss(f(b)))(b) for f in READS[name])
    assert got.dtype == want.dtype == jnp.float32
    np.testing.assert_array_equal(got, want)
