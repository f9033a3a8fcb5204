"""The op is what plain JAX computes, under every transformation, and is in place."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters import ad

from decay_row import decay_row, decay_row_p
from helpers import assert_close, call, copies_in_loops, launch, refused


def in_plain_jax(buffer, index, value, scale):
    """Select from all rows. The derivatives and batches of this are those that JAX knows."""
    here = jnp.expand_dims(jnp.arange(len(buffer)) == index, range(1, jnp.ndim(buffer)))
    return jnp.where(here, scale * buffer + value, buffer), jnp.sum(jnp.where(here, buffer, 0), 0)


def assert_as_in_plain_jax(transform, *args, dtype=np.float64):
    assert_close(*(jax.jit(transform(f))(*args) for f in (decay_row, in_plain_jax)), dtype)


def loss_of(f):
    return lambda *args: sum(jnp.sum(jnp.sin(x) + x**3) for x in f(*args))


def operands(batch=(), size=5, row=(3, 2), dtype=np.float64):
    rng = np.random.default_rng(0)
    buffer, value, scale = (rng.standard_normal(shape) for shape in [(*batch, size, *row), (*batch, *row), batch])
    index = jnp.asarray(rng.integers(0, size, batch), "int32")
    return jnp.asarray(buffer, dtype), index, jnp.asarray(value, dtype), jnp.asarray(scale, dtype)


GIVEN = [{"dtype": t} for t in ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")]
GIVEN += [{"size": size, "row": row} for size, row in [(1, ()), (3, (0,)), (7, (1000,)), (2, (3, 1, 5))]]


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_values(given):
    buffer, *others = operands(**given)
    with jax.disable_jit():
        as_a_debugger_sees_it = decay_row(buffer, *others)
    for found in (as_a_debugger_sees_it, decay_row(buffer, *others), jax.jit(decay_row)(buffer, *others)):
        assert [x.dtype for x in found] == [buffer.dtype] * 2
        assert_close(found, in_plain_jax(buffer, *others), buffer.dtype)


INDICES = [(min(199, np.iinfo(t).max), t) for t in "int8 uint8 int16 int32 uint32 int64 uint64".split()]
INDICES += [(i, "int32") for i in (-200, -1, 200, 2**31 - 1, -(2**31))] + [(2**32 + 1, "int64"), (1 - 2**32, "int64")]


@pytest.mark.parametrize("dtype", ["float64", "float16"], ids=["kernel", "plain JAX"])
@pytest.mark.parametrize(("index", "integer"), INDICES)
def test_an_index_of_any_dtype_touches_nothing_if_it_is_out_of_range(index, integer, dtype):
    buffer, _, *others = operands(size=200, row=(), dtype=dtype)
    assert_as_in_plain_jax(lambda f: f, buffer, jnp.asarray(index, integer), *others, dtype=dtype)


@pytest.mark.parametrize("where", [True, False, np.True_, np.False_])
def test_where_false_touches_nothing(where):
    buffer, index, *others = operands()
    expected = in_plain_jax(buffer, index if where else -1, *others)
    assert_close(jax.jit(lambda w: decay_row(buffer, index, *others, where=w))(where), expected)
    assert_close(decay_row(buffer, int(index), *others, where=where), expected)


BAD_INPUTS = [
    *(({"index": i}, IndexError, f"index {i} is out of range for 5 rows") for i in (5, -1)),
    *(({"index": i}, TypeError, "index must be one integer") for i in (1.0, np.arange(2))),
    *(({"where": w}, TypeError, "where must be one boolean, got") for w in (1, np.ones(2, bool))),
    ({"buffer": np.arange(5)}, TypeError, "floating or complex dtype, got int64"),
    ({"buffer": np.float64(1)}, ValueError, "got a scalar"),
    ({"buffer": np.ones((5, 3, 2), np.float32)}, TypeError, "value of dtype float64 does not fit"),
    ({"scale": np.ones(2)}, ValueError, "scale must be a scalar"),
    ({"value": np.ones(3)}, ValueError, "broadcast"),
]


@pytest.mark.parametrize(("changed", "error", "text"), BAD_INPUTS)
def test_bad_inputs_are_said_to_be_so(changed, error, text):
    with pytest.raises(error, match=text):
        decay_row(**dict(zip(("buffer", "index", "value", "scale"), operands(), strict=True)) | changed)
    with pytest.raises(TypeError, match="with 1 batch axes"):  # by hand
        decay_row_p.bind(*operands(), batch_dims=1)


def of_two_orders(f, argnums):
    losses = loss_of(f), loss_of(jax.grad(loss_of(f), argnums))
    return lambda *args: [f(*args), *(d(loss, argnums)(*args) for loss in losses for d in (jax.grad, jax.jacfwd))]


SOME = [some for n in (1, 2, 3) for some in itertools.combinations((0, 2, 3), n)]  # of buffer, value and scale


@pytest.mark.parametrize(("argnums", "results"), [*((s, [0, 1]) for s in SOME), (SOME[-1], [0]), (SOME[-1], [1])])
def test_derivatives_where_those_of_the_others_are_symbolic_zeros(argnums, results):
    assert_as_in_plain_jax(lambda f: of_two_orders(lambda *args: [f(*args)[k] for k in results], argnums), *operands())


def test_derivatives_in_a_scan_with_repeated_and_missing_rows():
    def scan(f, buffer, values, scale):
        return lax.scan(lambda b, x: f(b, *x, jnp.sin(scale)), buffer, (np.array([0, 3, 9, 3, 3]), values))

    buffer, _, value, scale = operands(row=(2,))
    args = buffer, jnp.cos(jnp.arange(10.0)).reshape(5, 2) * value, scale
    assert_as_in_plain_jax(lambda f: of_two_orders(functools.partial(scan, f), (0, 1, 2)), *args)


def test_cotangents_that_are_symbolic_zeros_stay_so():
    buffer, index, value, scale = operands()
    (b, v), zeros = map(ad.UndefinedPrimal, (jax.typeof(buffer), jax.typeof(value))), [ad.Zero(jax.typeof(buffer))] * 2
    found = ad.primitive_transposes[decay_row_p](zeros, b, index, v, scale, batch_dims=0)
    assert [type(x) for x in found] == [ad.Zero, type(None), ad.Zero, type(None)]


def batch_of(axes, row=(2,)):
    buffer, index, *others = operands((4,), row=row)
    args = zip((buffer, index.at[0].set(7), *others), axes, strict=True)  # 7 is out of range
    return [x[1] if a is None else jnp.moveaxis(x, 0, a) for x, a in args]


IN_AXES = list(itertools.product([1, None], [0, None], [-1, None], [0, None]))[:-1]  # but for four times None


@pytest.mark.parametrize("axes", IN_AXES, ids=str)
def test_batches_and_their_gradients(axes):
    assert_as_in_plain_jax(lambda f: jax.vmap(jax.vmap(f, axes)), *(jnp.stack([x, 2 * x]) for x in batch_of(axes)))
    assert_as_in_plain_jax(lambda f: jax.grad(loss_of(jax.vmap(f, axes)), (0, 2, 3)), *batch_of(axes))


def in_a_loop(buffer, values, both=False):
    def step(b, x):
        out, old = decay_row(b, x[0] % len(b), x[1], 0.9)
        return out, jnp.sum(old * x[1]) + (jnp.sum(b * out) if both else 0)  # with both, XLA has to keep b

    buffer, ys = lax.scan(step, buffer, (jnp.arange(len(values)), values))
    return jnp.sum(buffer**2) + jnp.sum(ys)


@pytest.mark.usefixtures("kernel")
def test_loops_are_in_place_forward_and_backward():
    args = jnp.zeros((50, 3)), jnp.ones((20, 3))
    assert copies_in_loops(in_a_loop, *args) == []
    assert copies_in_loops(jax.grad(in_a_loop), *args) == []
    assert copies_in_loops(functools.partial(in_a_loop, both=True), *args)  # it finds those that are there


@pytest.mark.usefixtures("kernel")
def test_a_batch_that_is_masked_is_in_place():
    """Under `vmap` a `cond` becomes a select of whole buffers; `where` does not."""

    def loop(buffer, values, masks):
        masked = jax.vmap(lambda b, v, p: decay_row(b, 1, v, 0.5, where=p)[0])
        return lax.scan(lambda b, x: (masked(b, *x), None), buffer, (values, masks))[0]

    args = jnp.ones((2, 50, 3)), jnp.ones((20, 2, 3)), jnp.arange(40).reshape(20, 2) % 3 == 0
    assert copies_in_loops(loop, *args) == []
    text = jax.jit(loop).lower(*args).compile().as_text()
    assert not [line for line in text.split("\n") if "f64[2,50,3]" in line and " select(" in line]


@pytest.mark.usefixtures("kernel")
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="XLA for CPUs removes barriers too early")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_that_plain_jax_has_written_are_not_copied(dtype):
    step = lambda i, b: decay_row(b.at[3 * i % 50].add(1.5), i, jnp.ones(3, dtype), 0.5)[0]  # noqa: E731
    assert copies_in_loops(lambda buffer: lax.fori_loop(0, 20, step, buffer), jnp.zeros((50, 3), dtype)) == []


def test_other_platforms_have_plain_jax():
    assert "decay_row_update" not in jax.jit(decay_row).trace(*operands()).lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("batch, size, row", [(1, 5, 3), (7, 4, 1), (3, 2, 1000), (2, 3, 0)])
def test_the_threads_of_a_gpu(threads, batch, size, row, dtype):
    buffer, _, value, scale = map(np.array, operands((batch,), size, (row,), dtype))
    index, old = np.random.default_rng(1).integers(-1, size + 1, batch).astype(np.int32), np.full_like(value, np.nan)
    expected = jax.vmap(in_plain_jax)(buffer, index, value, scale)
    launch(threads[f"update_{dtype}"], (batch, size, row), index, value, scale, buffer, old)
    assert_close((buffer, old), expected, dtype)


def test_a_call_by_hand_that_does_not_fit_is_an_error_before_memory_is_touched():
    buffer, index, value, scale = map(jax.typeof, operands((2,)))
    right = [buffer, index, value, scale, buffer, value]
    call("decay_row_update", right[:4], right[4:], 1)
    wrong = [(right, batch_dims) for batch_dims in (-1, 0, 2, 4, 2**62)]
    for k, t in enumerate(right):
        for changed in (t.update(shape=(*t.shape, 2)), t.update(shape=(1, *t.shape[1:])), t.update(dtype=np.int64)):
            wrong.append(([*right[:k], changed, *right[k + 1 :]], 1))
    for types, batch_dims in wrong:
        with refused():
            call("decay_row_update", types[:4], types[4:], batch_dims)
