"""The plain-JAX meaning of the ops, which is their lowering where no kernel is, and the kernels, against NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from ops import OPS, OURS, ROW_OPS, assert_same, every

import jax_tensorarray as ta
from jax_tensorarray import primitives
from jax_tensorarray._ops import reference
from jax_tensorarray._ops.primitive import row_params

pytestmark = pytest.mark.slow(but=4)

SIZE, ELEM, SHAPE = 4, (2,), (2, 3)
PLAIN = {
    "ta_read": lambda *xs, **how: (reference.read(*xs, **how),),
    "ta_write": lambda *xs, **how: (reference.write(*xs, **how),),
    "ta_add": lambda *xs, **how: (reference.add(*xs, **how),),
    "ta_max": lambda *xs, **how: (reference.maximum(*xs, **how),),
    "ta_swap": reference.swap,
}


def operands(op, batch, masked, dtype=np.float64):
    """Operands with batch axes and indices, some out of range."""
    rng = np.random.default_rng(len(batch))
    made = {
        "buffer": rng.integers(-9, 9, (*batch, SIZE, *ELEM)).astype(dtype),
        "index": rng.integers(-1, SIZE + 1, (*batch, *SHAPE)),
        "value": rng.integers(-9, 9, (*batch, *SHAPE, *ELEM)).astype(dtype),
        "where": rng.random((*batch, *SHAPE)) < 0.7,
    }
    return [made[name] for name in op.operands if masked or name != "where"]


def meaning(op, reverse, batch, *xs):
    """What NumPy says of each example, stacked."""
    swap = reverse and op.name == "ta_write"  # the oracle has one order of it only
    how = {"reverse": True} if reverse else {}
    outs = [
        (OPS["ta_swap"] if swap else op)(oracle, *(x[k] for x in xs), **how)[: 1 if swap else 2]
        for k in np.ndindex(batch)
    ]
    return [np.stack(out).reshape(*batch, *out[0].shape) for out in zip(*outs, strict=True)]


def plain(op, *xs, reverse=False, batch_dims=0):
    return PLAIN[op.name](*xs, reverse=reverse, batch_dims=batch_dims)


def kernel(op, *xs, reverse=False, batch_dims=0):
    params = row_params(op.name, "drop", batch_dims=batch_dims, reverse=reverse, lowering="ffi")
    found = getattr(primitives, f"{op}_p").bind(*xs, **params)
    return tuple(found) if isinstance(found, list | tuple) else (found,)


@every(ROW_OPS)
def test_plain_jax_and_the_kernels_both_mean_what_numpy_does(op):
    reverses = [False] if op.name in ("ta_read", "ta_max") else [False, True]
    cases = [(r, masked, batch) for r in reverses for masked in (False, True) for batch in [(), (2, 1, 3)]]
    given = [operands(op, batch, masked) for _, masked, batch in cases]

    @jax.jit
    def f(given):
        how = [{"reverse": reverse, "batch_dims": len(batch)} for reverse, _, batch in cases]
        return [[g(op, *xs, **h) for g in (plain, kernel)] for xs, h in zip(given, how, strict=True)]

    for found, (reverse, _, batch), xs in zip(f(given), cases, given, strict=True):
        assert_same(found, [meaning(op, reverse, batch, *xs)] * 2)


@pytest.mark.parametrize("op", ["ta_write", "ta_add", "ta_swap"])
def test_the_order_of_duplicates_is_the_other_way_round_in_reverse(op):
    op, value = OPS[op], np.array([1.0, 2.0**25, -(2.0**25)], np.float32)
    xs = np.zeros(2, np.float32), np.array([1, 1, 1]), value
    forward, backward = (meaning(op, reverse, (), *xs) for reverse in (False, True))
    assert not np.array_equal(forward[0], backward[0])
    for f in (plain, kernel):
        assert_same(f(op, *map(jnp.asarray, xs), reverse=True), backward)


@pytest.mark.parametrize(
    "dtype",
    [np.bool_, np.uint8, np.int64, ml_dtypes.int4, np.float16, ml_dtypes.bfloat16, np.complex64],
    ids=oracle.name_of,
)
def test_plain_jax_has_the_arithmetic_of_every_dtype(dtype):
    low, high = (0, 1) if dtype == np.bool_ else (-8, 7)
    cases = []
    for op in ROW_OPS:
        buffer, index, *rest = operands(op, (), True, np.int64)
        values = [np.clip(x, low, high).astype(dtype) for x in (buffer, *rest[:-1])]
        if op.name != "ta_max" or dtype != np.complex64:  # which has no order
            cases.append((op, [values[0], index, *values[1:], rest[-1]]))
    found = jax.jit(lambda given: [plain(op, *xs) for (op, _), xs in zip(cases, given, strict=True)])(
        [xs for _, xs in cases]
    )
    assert_same(found, [meaning(op, False, (), *xs) for op, xs in cases])


@pytest.mark.parametrize("index_dtype", [np.int8, np.uint8, np.uint64, np.int64], ids=oracle.name_of)
def test_plain_jax_does_not_wrap_an_index(index_dtype):
    limits = np.iinfo(index_dtype)
    index = np.array([0, 2, limits.max, limits.min or limits.max, limits.max // 2 + 1], index_dtype)
    given = [[np.arange(3.0), index, *[np.arange(5.0) + 10] * ("value" in op.operands)] for op in ROW_OPS]
    found = jax.jit(lambda given: [plain(op, *xs) for op, xs in zip(ROW_OPS, given, strict=True)])(given)
    assert_same(found, [meaning(op, False, (), *xs) for op, xs in zip(ROW_OPS, given, strict=True)])


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


@every(ROW_OPS)
def test_plain_jax_has_no_trouble_with_nothing(op):
    cases = [(shape, (n,)) for shape in [(0, 2), (3, 0), (0, 0)] for n in (0, 2)]
    given = [[np.ones(s), np.zeros(n, np.int64), *[np.ones(n + s[1:])] * ("value" in op.operands)] for s, n in cases]
    found = jax.jit(lambda given: [plain(op, *xs) for xs in given])(given)
    assert_same(found, [meaning(op, False, (), *xs) for xs in given])


@pytest.mark.parametrize("name", ["mask", "clear"])
@pytest.mark.parametrize("batch", [(), (3,), (2, 2), (0,), (2, 0)], ids=str)
def test_masking_and_clearing_in_plain_jax_and_by_the_kernel(batch, name):
    rng = np.random.default_rng(0)
    bounds = [rng.integers(-1, SIZE + 2, batch) for _ in range(1 if name == "mask" else 2)]
    op = OPS["ta_stack" if name == "mask" else "ta_clear"]
    functions = getattr(reference, name), getattr(primitives, f"{op}_p").bind
    given = [rng.normal(size=(*batch, *shape)) for shape in ((SIZE, *ELEM), (0, 2), (4, 0), (4,))]
    run = jax.jit(lambda given, *bounds: [[f(x, *bounds, batch_dims=len(batch)) for f in functions] for x in given])
    for buffer, found in zip(given, run(given, *bounds), strict=True):
        expected = np.empty_like(buffer)
        for k in np.ndindex(batch):
            (expected[k],) = op(oracle, buffer[k], *(b[k] for b in bounds))
        assert_same(found, [expected] * 2)


# --- platforms without kernels ---------------------------------------------------------------------------------


def calls(platform, f, *args):
    """Whether the program for a platform calls a kernel. (The name of a function of its own says nothing.)"""
    return "custom_call @jax_tensorarray_" in jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()


@every(ROW_OPS)
def test_a_platform_without_kernels_gets_plain_jax(op):
    many = 20  # of few a CPU makes slices
    named = {"buffer": jnp.zeros((3, 4, 2)), "index": jnp.zeros((3, many), int), "value": jnp.ones((3, many, 2))}
    given = [named[name] for name in op.operands if name != "where"]

    def loss(*xs):
        return sum(jnp.sin(out).sum() for out in op(OURS, *xs, mode=None))

    f = jax.vmap(jax.grad(loss, argnums=op.differentiable))
    for g, args in ((f, given), (lambda *xs: op(OURS, *xs, mode=None), [x[0] for x in given])):
        assert calls("cpu", g, *args)
        assert not calls("tpu", g, *args)


def clear(buffer, start):
    return (OURS.ta_clear(buffer, start, 3) ** 2).sum()


@pytest.mark.parametrize(
    ("f", "args"),
    [
        (lambda: ta.ta_empty(3), ()),
        (ta.ta_stack, (jnp.zeros((4, 2)), jnp.array(0))),
        (OURS.ta_check, (jnp.arange(3), np.int32(5))),
        (
            jax.vmap(jax.grad(lambda b, i: (OURS.ta_clear(b, i, 3) ** 2).sum()), (None, 0)),
            (jnp.ones((5, 2)), jnp.arange(3)),
        ),
    ],
    ids=["empty", "stack", "check", "clear"],
)
def test_a_platform_without_kernels_gets_plain_jax_for_the_others(f, args):
    assert calls("cpu", f, *args)
    assert not calls("tpu", f, *args)
