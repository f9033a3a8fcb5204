"""The op agrees with NumPy under every transformation, and is in place."""

import ctypes
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters import ad
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.test_util import check_grads

from decay_row import _ffi, decay_row, decay_row_p
from helpers import assert_close, by_a_loop, copies_in_loops, devices_of, gathers

TARGET = "decay_row_update"


def in_numpy(buffer, index, value, scale):
    """Compute the op in NumPy."""
    buffer = np.array(buffer)
    if not 0 <= index < len(buffer):
        return buffer, np.zeros_like(buffer[0])
    old = buffer[index].copy()
    buffer[index] = scale * old + value
    return buffer, old


def operands(batch=(), size=5, row=(3, 2), dtype=np.float64):
    rng = np.random.default_rng(0)
    buffer, value, scale = (rng.standard_normal(shape) for shape in [(*batch, size, *row), (*batch, *row), batch])
    return *(jnp.asarray(x, dtype) for x in (buffer, value, scale)), jnp.asarray(rng.integers(0, size, batch), "int32")


# --- values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_values_are_those_of_numpy(run, dtype):
    buffer, value, scale, index = operands(dtype=dtype)
    found = run(decay_row)(buffer, index, value, scale)
    assert [x.dtype for x in found] == [buffer.dtype, buffer.dtype]
    assert_close(found, in_numpy(np.asarray(buffer), int(index), np.asarray(value), np.asarray(scale)), dtype)


@pytest.mark.parametrize("dtype", ["float64", "float16"], ids=["kernel", "plain JAX"])
@pytest.mark.parametrize("index", [-6, -1, 5, 2**31 - 1, -(2**31), 2**32 + 1, -(2**32) + 1])
def test_a_traced_index_out_of_range_touches_nothing_and_gives_zeros(index, dtype):
    buffer, value, scale, _ = operands(dtype=dtype)
    index = jnp.asarray(index, "int32" if abs(index) <= 2**31 - 1 else "int64")
    found = jax.jit(decay_row)(buffer, index, value, scale)
    assert_close(found, (buffer, jnp.zeros_like(value)))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"])
def test_an_index_may_be_of_any_integer_dtype(dtype):
    buffer, value, scale, _ = operands(size=200, row=())
    top = min(199, np.iinfo(dtype).max)
    found = jax.jit(decay_row)(buffer, jnp.asarray(top, dtype), value, scale)
    assert_close(found, in_numpy(buffer, top, value, scale))


@pytest.mark.parametrize("size, row", [(1, ()), (3, (0,)), (7, (1000,)), (2, (3, 1, 5))])
def test_rows_of_all_shapes(size, row):
    buffer, value, scale, index = operands(size=size, row=row)
    assert_close(jax.jit(decay_row)(buffer, index, value, scale), in_numpy(buffer, int(index), value, scale))


@pytest.mark.parametrize("where", [True, False, np.True_, np.False_])
def test_where_false_touches_nothing_and_gives_zeros(where):
    buffer, value, scale, index = operands()
    expected = in_numpy(buffer, int(index) if where else -1, value, scale)
    for run in (lambda f: f, jax.jit):
        assert_close(run(lambda w: decay_row(buffer, index, value, scale, where=w))(where), expected)
    assert_close(decay_row(buffer, int(index), value, scale, where=where), expected)


def test_in_a_scan():
    buffer, _, _, _ = operands()
    indices, values = np.array([0, 3, 3, 1, 0]), np.random.default_rng(1).standard_normal((5, 3, 2))
    found = lax.scan(lambda b, x: decay_row(b, x[0], x[1], 0.5), buffer, (indices, values))
    expected, olds = buffer, []
    for i, v in zip(indices, values, strict=True):
        expected, old = in_numpy(expected, i, v, 0.5)
        olds.append(old)
    assert_close(found, (expected, np.stack(olds)))


def test_without_jit_as_a_debugger_sees_it():
    buffer, value, scale, index = operands()
    with jax.disable_jit():
        assert_close(decay_row(buffer, index, value, scale), in_numpy(buffer, int(index), value, scale))


# --- bad inputs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"index": 5}, IndexError, "index 5 is out of range for 5 rows"),
        ({"index": -1}, IndexError, "index -1 is out of range"),
        ({"index": 1.0}, TypeError, "index must be one integer"),
        ({"index": np.arange(2)}, TypeError, "index must be one integer"),
        ({"buffer": np.arange(5)}, TypeError, "floating or complex dtype, got int64"),
        ({"buffer": np.float64(1)}, ValueError, "got a scalar"),
        ({"buffer": np.ones((5, 3, 2), np.float32)}, TypeError, "value of dtype float64 does not fit"),
        ({"scale": np.ones(2)}, ValueError, "scale must be a scalar"),
        ({"where": np.ones(2, bool)}, TypeError, r"where must be one boolean, got bool\[2\]"),
        ({"where": 1}, TypeError, "where must be one boolean"),
        ({"value": np.ones(3)}, ValueError, "broadcast"),
    ],
)
def test_bad_inputs_are_said_to_be_so(changed, error, text):
    buffer, value, scale, index = operands()
    with pytest.raises(error, match=text):
        decay_row(**{"buffer": buffer, "index": index, "value": value, "scale": scale} | changed)


def test_a_bind_by_hand_is_checked():
    buffer, value, scale, index = operands()
    with pytest.raises(TypeError, match="with 1 batch axes"):
        decay_row_p.bind(buffer, index, value, scale, batch_dims=1)


# --- derivatives -----------------------------------------------------------------------------------------------

SOME = [some for n in (1, 2, 3) for some in itertools.combinations(("buffer", "value", "scale"), n)]


@pytest.mark.parametrize("names", SOME, ids="-".join)
def test_derivatives_of_two_orders_are_those_of_finite_differences(names):
    """Differentiate by some operands only: the tangents of the others are symbolic zeros."""
    buffer, value, scale, index = operands()
    given = {"buffer": buffer, "value": value, "scale": scale}

    def f(*args):
        return decay_row(index=index, **given | dict(zip(names, args, strict=True)))

    check_grads(jax.jit(f), [given[name] for name in names], order=2)


@pytest.mark.parametrize("result", [0, 1])
def test_derivatives_of_one_result_alone(result):
    """Differentiate one result: the cotangent of the other is a symbolic zero."""
    buffer, value, scale, index = operands()
    check_grads(jax.jit(lambda b, v, s: decay_row(b, index, v, s)[result] ** 2), (buffer, value, scale), order=2)


def test_derivatives_in_a_scan_with_repeated_and_missing_rows():
    buffer, _, scale, _ = operands(row=(2,))
    values = jnp.asarray(np.random.default_rng(1).standard_normal((5, 2)))

    @jax.jit
    def f(b, vs, s):
        b, olds = lax.scan(lambda b, x: decay_row(b, x[0], x[1], jnp.sin(s)), b, (np.array([0, 3, 9, 3, 3]), vs))
        return jnp.sum(jnp.cos(b)) + jnp.sum(olds**2)

    check_grads(f, (buffer, values, scale), order=2)


def test_cotangents_that_are_symbolic_zeros_stay_so():
    buffer, value, scale, index = operands()
    types = jax.typeof(buffer), jax.typeof(value)
    linear, zeros = [ad.UndefinedPrimal(t) for t in types], [ad.Zero(t) for t in types]
    found = ad.primitive_transposes[decay_row_p](zeros, linear[0], index, linear[1], scale, batch_dims=0)
    assert [type(x) for x in found] == [ad.Zero, type(None), ad.Zero, type(None)]


@pytest.mark.parametrize("index", [2, -1, 5])
def test_it_is_its_own_transpose(index):
    """Check `<A(b, v), (c, w)> = <(b, v), A(c, w)>`, also where the row is out of range."""
    buffer, value, scale, _ = operands()
    one, other = (buffer, value), (jnp.cos(buffer), jnp.sin(value))

    def inner(x, y):
        return sum(jnp.vdot(a, b) for a, b in zip(x, y, strict=True))

    def a(b, v):
        return decay_row(b, jnp.int32(index), v, scale)

    assert_close(inner(a(*one), other), inner(one, a(*other)))
    assert_close(jax.linear_transpose(a, *one)(other), a(*other))


# --- batches ---------------------------------------------------------------------------------------------------

IN_AXES = [axes for axes in itertools.product([0, None], repeat=4) if any(a == 0 for a in axes)]


def loss(buffer, index, value, scale):
    out, old = decay_row(buffer, index, value, scale)
    return jnp.sum(jnp.sin(out)) + jnp.sum(old**3)


def batch_of(axes):
    buffer, value, scale, index = operands((4,), row=(2,))
    index = index.at[0].set(7)  # out of range
    return [x if a == 0 else x[1] for x, a in zip((buffer, index, value, scale), axes, strict=True)]


@pytest.mark.parametrize("axes", IN_AXES, ids=str)
@pytest.mark.parametrize("f", [decay_row, jax.grad(loss, (0, 2, 3))], ids=["value", "grad"])
def test_vmap_is_a_loop(f, axes):
    args = batch_of(axes)
    assert_close(jax.vmap(f, axes)(*args), by_a_loop(f, axes, args))


def test_grad_of_vmap_is_vmap_of_grad():
    args = batch_of((0, 0, 0, 0))
    found = jax.grad(lambda b, i, v, s: jnp.sum(jax.vmap(loss)(b, i, v, s)), (0, 2, 3))(*args)
    assert_close(found, jax.vmap(jax.grad(loss, (0, 2, 3)))(*args))


def test_second_order_of_a_batch():
    buffer, index, value, scale = batch_of((0, 0, 0, 0))
    check_grads(jax.jit(lambda b, v, s: jax.vmap(loss)(b, index, v, s)), (buffer, value, scale), order=2)


def test_a_batch_that_is_masked_is_in_place(platform):
    """Under `vmap` a `cond` becomes a select of whole buffers; `where` does not."""
    if platform not in _ffi.platforms:
        pytest.skip(f"no kernel was built for {platform}")

    def loop(buffer, values, masks):
        def step(b, x):
            return jax.vmap(lambda b, v, p: decay_row(b, 1, v, 0.5, where=p)[0])(b, *x), None

        return lax.scan(step, buffer, (values, masks))[0]

    args = jnp.ones((2, 50, 3)), jnp.ones((20, 2, 3)), jnp.arange(40).reshape(20, 2) % 3 == 0
    assert copies_in_loops(loop, *args) == []
    text = jax.jit(loop).lower(*args).compile().as_text()
    assert not [line for line in text.split("\n") if "f64[2,50,3]" in line and " select(" in line]


def test_vmap_of_vmap_and_of_other_axes():
    buffer, value, scale, index = operands((2, 4), row=(3,))
    both = jax.vmap(jax.vmap(decay_row, (0, 0, 1, 0)), (1, 0, 2, 0))
    found = both(buffer.swapaxes(0, 1), index, value.transpose(2, 1, 0), scale)
    for k, m in np.ndindex(2, 4):
        expected = in_numpy(buffer[k, m], int(index[k, m]), value[k, m], scale[k, m])
        assert_close([x[k, m] for x in found], expected)


# --- kernels ---------------------------------------------------------------------------------------------------


def in_a_loop(buffer, values, both=False):
    def step(b, x):
        out, old = decay_row(b, x[0] % len(b), x[1], 0.9)
        return out, jnp.sum(old * x[1]) + (jnp.sum(b * out) if both else 0)  # with both, XLA has to keep b

    buffer, ys = lax.scan(step, buffer, (jnp.arange(len(values)), values))
    return jnp.sum(buffer**2) + jnp.sum(ys)


def test_loops_are_in_place_forward_and_backward(platform):
    if platform not in _ffi.platforms:
        pytest.skip(f"no kernel was built for {platform}")
    args = jnp.zeros((50, 3)), jnp.ones((20, 3))
    assert copies_in_loops(in_a_loop, *args) == []
    assert copies_in_loops(jax.grad(in_a_loop), *args) == []
    assert copies_in_loops(functools.partial(in_a_loop, both=True), *args)  # it finds those that are there


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="XLA for CPUs removes barriers too early")
def test_rows_that_plain_jax_has_written_are_not_copied(platform):
    if platform not in _ffi.platforms:
        pytest.skip(f"no kernel was built for {platform}")

    def loop(buffer):
        def step(i, b):
            return decay_row(b.at[3 * i % 50].add(1.5), i, jnp.ones(3, b.dtype), 0.5)[0]

        return lax.fori_loop(0, 20, step, buffer)

    for dtype in ("float32", "float64"):
        assert copies_in_loops(loop, jnp.zeros((50, 3), dtype)) == []


@pytest.mark.parametrize("kernel_platform", _ffi.platforms)
def test_the_kernel_is_called_in_place(kernel_platform):
    buffer, value, scale, index = operands((4,))
    traced = jax.jit(jax.vmap(decay_row)).trace(buffer, index, value, scale)
    text = traced.lower(lowering_platforms=(kernel_platform,)).as_text()
    (call,) = [line for line in text.split("\n") if TARGET in line]
    assert "output_operand_alias<output_tuple_indices = [0], operand_index = 0" in call
    assert "batch_dims = 1 : i64" in call


def test_other_platforms_have_plain_jax():
    buffer, value, scale, index = operands()
    text = jax.jit(decay_row).trace(buffer, index, value, scale).lower(lowering_platforms=("tpu",)).as_text()
    assert TARGET not in text


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("batch, size, row", [(1, 5, 3), (7, 4, 1), (3, 2, 1000), (2, 3, 0)])
def test_the_threads_of_a_gpu_do_what_numpy_does(threads, batch, size, row, dtype):
    rng = np.random.default_rng(0)
    buffer, value, scale = (rng.standard_normal(s).astype(dtype) for s in [(batch, size, row), (batch, row), batch])
    index, old = rng.integers(-1, size + 1, batch).astype(np.int32), np.full_like(value, np.nan)
    expected = [in_numpy(*of_one) for of_one in zip(buffer, index, value, scale, strict=True)]
    launch = threads.update_f32 if dtype == np.float32 else threads.update_f64
    arrays = [ctypes.c_void_p(x.ctypes.data) for x in (index, value, scale, buffer, old)]
    launch(*map(ctypes.c_int64, (batch, size, row)), *arrays)
    assert_close((buffer, old), [np.stack(x) for x in zip(*expected, strict=True)], dtype)


# --- calls by hand ---------------------------------------------------------------------------------------------


def test_a_call_by_hand_that_does_not_fit_is_an_error_before_memory_is_touched():
    buffer, value, scale, index = operands(batch=(2,))
    right = [jax.typeof(x) for x in (buffer, index, value, scale, buffer, value)]

    def call(types, batch_dims):
        results = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in types[4:]]
        made = jax.ffi.ffi_call(TARGET, results)
        return jax.block_until_ready(made(*(jnp.zeros(t.shape, t.dtype) for t in types[:4]), batch_dims=batch_dims))

    wrong = r"decay_row: .* does not fit the buffer|Wrong buffer dtype"
    call(right, np.int64(1))
    for batch_dims in (-1, 0, 2, 4, 2**62):
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=wrong):
            call(right, np.int64(batch_dims))
    for k, t in enumerate(right):
        for changed in (t.update(shape=(*t.shape, 2)), t.update(shape=(1, *t.shape[1:])), t.update(dtype=np.int64)):
            with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=wrong):
                call([*right[:k], changed, *right[k + 1 :]], np.int64(1))


# --- devices ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [(0, 0, 0, 0), (0, None, 0, None), (None, 0, None, None)], ids=str)
def test_in_shard_map_each_device_has_its_own(axes, platform):
    mesh = Mesh(devices_of(platform), "batch")
    specs = tuple(PartitionSpec("batch") if a == 0 else PartitionSpec() for a in axes)
    args = batch_of(axes)

    def total(*args):
        in_shards = jax.shard_map(jax.vmap(loss, axes), mesh=mesh, in_specs=specs, out_specs=PartitionSpec("batch"))
        return jnp.sum(in_shards(*args))

    found = jax.jit(jax.value_and_grad(total, (0, 2, 3)))(*args)
    expected = jax.value_and_grad(lambda *args: jnp.sum(by_a_loop(loss, axes, args)), (0, 2, 3))(*args)
    assert_close(found, expected)


#: For each case which axes of the operands `vmap` maps, if any, and how buffer, index, value and scale are divided.
DIVIDED = {
    "row": (None, [(None, "d"), (), ("d",), ()]),
    "row of the buffer alone": (None, [(None, "d"), (), (), ()]),
    "row of the value alone": (None, [(), (), ("d",), ()]),
    "batch": ((0, 0, 0, 0), [("d",)] * 4),
    "batch of the value": ((None, None, 0, None), [(), (), ("d",), ()]),
}


@pytest.mark.parametrize("case", DIVIDED)
def test_on_a_mesh_with_explicit_axes_each_device_has_its_part(case, platform):
    """The types say where all results and gradients are, and no buffer moves."""
    axes, specs = DIVIDED[case]
    buffer, value, scale, index = operands((4,), row=(8,))
    args = [
        x if axes and a == 0 else x[0] for x, a in zip((buffer, index, value, scale), axes or [None] * 4, strict=True)
    ]
    f = jax.vmap(decay_row, axes) if axes else decay_row

    def total(buffer, index, value, scale):
        return sum(jnp.sum(jnp.sin(x) ** 2) for x in f(buffer, index, value, scale))

    gradient = jax.grad(total, (0, 2, 3))
    expected = by_a_loop(decay_row, axes, args) if axes else in_numpy(args[0], int(args[1]), *args[2:]), gradient(*args)
    mesh = Mesh(devices_of(platform), "d", axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        args = [jax.device_put(x, NamedSharding(mesh, PartitionSpec(*s))) for x, s in zip(args, specs, strict=True)]
        found = jax.jit(f)(*args), jax.jit(gradient)(*args)
        assert_close(found, expected)
        assert [jax.typeof(x) for x in found[1]] == [jax.typeof(args[k]) for k in (0, 2, 3)]
        moved = [*gathers(f, *args), *gathers(gradient, *args)]
        assert not [line for line in moved if "5,8]" in line], moved
        if case in ("row", "batch"):
            assert moved == []


def test_a_loop_on_a_mesh_with_explicit_axes_is_in_place(platform):
    if platform not in _ffi.platforms:
        pytest.skip(f"no kernel was built for {platform}")
    mesh = Mesh(devices_of(platform), "d", axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        args = [jax.device_put(jnp.ones((n, 8)), NamedSharding(mesh, PartitionSpec(None, "d"))) for n in (50, 20)]
        for program in (in_a_loop, jax.grad(in_a_loop)):
            assert copies_in_loops(program, *args) == []
            assert gathers(program, *args) == []


def test_rows_that_are_divided_are_an_error_on_a_mesh_with_explicit_axes(platform):
    mesh = Mesh(devices_of(platform), "d", axis_types=(AxisType.Explicit,))
    buffer, value, scale, index = operands(size=8)
    with jax.set_mesh(mesh):
        divided = jax.device_put(buffer, NamedSharding(mesh, PartitionSpec("d")))
        with pytest.raises(ValueError, match=r"decay_row: the rows of the buffer are divided .*reshard"):
            decay_row(divided, index, value, scale)
        found = decay_row(jax.sharding.reshard(divided, PartitionSpec()), index, value, scale)
    assert_close(found, in_numpy(buffer, int(index), value, scale))
