"""Buffers that are divided among devices: the right values, nothing gathered, and in place, on eight devices."""

import contextlib
import functools
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_numpy import in_numpy
from in_place import assert_no_whole_buffer_copy
from jax import jit, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from waiting import finish

from jax_tensorarray import (
    check_errors,
    in_place,
    ta_add,
    ta_empty,
    ta_max,
    ta_read,
    ta_stack,
    ta_swap,
    ta_write,
    while_loop,
)
from jax_tensorarray._ops.clear import ta_clear

STEPS, BATCH, ROW = 16, 4, 8
rng = np.random.default_rng(0)
BUFFER = rng.normal(size=(STEPS, ROW)) / 2
VALUES = rng.normal(size=(STEPS, ROW)) / 2

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices: see tests/conftest.py")


def mesh_of(kind, shape=(8,), names=("x",)):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


def put(x, mesh, *spec):
    return jax.device_put(jnp.asarray(x), NamedSharding(mesh, P(*spec)))


def collectives(compiled):
    """How often each collective occurs, and the largest number of elements that one of them moves."""
    text = compiled.as_text()
    found = {}
    for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"):
        shapes = re.findall(rf"= \(?\w+\[([\d,]*)\][^=]* {name}(?:-start)?\(", text)
        if shapes:
            found[name] = len(shapes), max(int(np.prod([int(d) for d in s.split(",") if d])) for s in shapes)
    return found


# --- programs --------------------------------------------------------------------------------------------------


def written(buffer, values):
    def step(b, i):
        return ta_write(b, i, jnp.tanh(ta_read(b, i // 2) + ta_read(values, i))), None

    return lax.scan(step, buffer, jnp.arange(STEPS))[0]


def read_beside_the_write(buffer, values):
    def step(b, i):
        before = ta_read(b, (i + 1) % STEPS)  # which the write does not depend on
        return ta_write(b, i, jnp.sin(ta_read(values, i))), before

    return lax.scan(step, buffer, jnp.arange(STEPS))


def exchanged(buffer, values):
    def step(b, i):
        b, old = ta_swap(b, (5 * i) % STEPS, jnp.sin(ta_read(values, i)))
        return ta_add(b, i // 2, old * ta_read(b, 0)), old

    return lax.scan(step, buffer, jnp.arange(STEPS))


def masked_and_cleared(buffer, values):
    def step(b, i):
        b = ta_write(b, i, 2 * ta_read(values, i, where=i % 3 > 0), where=i % 2 == 0)
        return ta_clear(b, i // 2, i // 2 + 2), None

    b, _ = lax.scan(step, buffer, jnp.arange(STEPS))
    return ta_stack(b, jnp.sum(values < 9) // values.shape[1] - 3)


def gathered(buffer, values):
    index = jnp.array([3, 0, 15, 3, -1, 16, 7])
    rows = ta_read(buffer, index, mode="drop") * ta_read(values, index, mode="drop")
    return ta_add(ta_write(buffer, index[::-1], rows, mode="drop"), index, rows, mode="drop")


def looped(buffer, values):
    def body(c):
        i, b = c
        return i + 1, ta_write(b, i, jnp.tanh(ta_read(b, i // 2) + ta_read(values, i)))

    n = jnp.sum(values < 9) // values.shape[1] - 2
    return while_loop(lambda c: c[0] < n, body, (0, buffer), max_steps=STEPS)[1]


def from_nothing(buffer, values, made=lambda b: b, out_sharding=None):
    def step(b, i):
        return ta_write(b, i, ta_read(values, i) * ta_read(buffer, i)), None

    start = made(ta_empty(STEPS, buffer.shape[1:], buffer.dtype, out_sharding=out_sharding))
    return lax.scan(step, start, jnp.arange(STEPS))[0]


def maxima(buffer, values):
    def step(b, i):
        return ta_max(b, (5 * i) % STEPS, jnp.sin(ta_read(b, i))), None

    b = lax.scan(step, buffer, jnp.arange(STEPS))[0]
    return ta_max(b, jnp.array([3, 15, 3, -1, 16]), ta_read(values, jnp.arange(5)), mode="drop")


PROGRAMS = {
    f.__name__: f
    for f in (
        written,
        read_beside_the_write,
        exchanged,
        masked_and_cleared,
        gathered,
        maxima,
        looped,
        from_nothing,
    )
}


def gradient(f):
    def loss(buffer, values):
        return sum(jnp.sum(out * jnp.cos(out)) for out in jax.tree.leaves(f(buffer, values)))

    return jax.grad(loss, (0, 1))


TRANSFORMS = {"value": lambda f: f, "grad": gradient}


def both(f):
    """The value and the gradient."""
    return lambda *args: (f(*args), gradient(f)(*args))


@functools.cache
def wanted(name):
    """What one device says of a program."""
    return jit(both(PROGRAMS[name]))(BUFFER, VALUES)


def assert_same(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


# --- divided by elements, by rows, or both ---------------------------------------------------------------------

SPECS = {"elements": (None, "x"), "rows": ("x", None), "both": ("x", "y"), "one of two axes": (None, "y")}
KINDS = [AxisType.Auto, AxisType.Explicit]
#: Every op by elements and by rows, in turn on a mesh of each kind; some by other divisions.
DIVIDED = [
    (name, spec, KINDS[(n + k) % 2])
    for n, name in enumerate(["exchanged", "masked_and_cleared", "gathered", "maxima", "from_nothing"])
    for k, spec in enumerate(["elements", "rows"])
    if n < 3 or (n + k) % 2
]
DIVIDED += [
    ("looped", "elements", AxisType.Explicit),
    ("written", "rows", AxisType.Explicit),
    ("read_beside_the_write", "elements", AxisType.Auto),
]
DIVIDED += [("looped", "rows", AxisType.Auto), ("exchanged", "both", AxisType.Auto)]
DIVIDED += [("gathered", "both", AxisType.Explicit), ("looped", "one of two axes", AxisType.Explicit)]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("name", "divided", "kind"), DIVIDED)
def test_values_are_those_of_one_device_and_no_buffer_is_gathered(name, divided, kind):
    spec = SPECS[divided]
    mesh = mesh_of(kind, (4, 2), ("x", "y")) if "y" in spec else mesh_of(kind)
    f = PROGRAMS[name]
    if name == "from_nothing" and kind is AxisType.Explicit:
        f = functools.partial(f, out_sharding=P(*spec))
    with jax.set_mesh(mesh):
        args = put(BUFFER, mesh, *spec), put(VALUES, mesh, *spec)
        compiled = jit(both(f)).lower(*args).compile()
        assert_same(compiled(*args), wanted(name))
    found = collectives(compiled)
    if spec[0] is None:
        # Nothing but the sums over all elements that the program itself asks for, which are scalars.
        assert all(size == 1 for _, size in found.values()), found
    else:
        assert "all-gather" not in found or name == "gathered", found
        largest = {"gathered": 7, "maxima": 5}.get(name, 1) * ROW
        assert all(size <= largest for _, size in found.values()), found


@pytest.mark.slow
def test_the_result_is_divided_as_the_buffer_is():
    mesh = mesh_of(AxisType.Auto)
    args = put(BUFFER, mesh, None, "x"), put(VALUES, mesh, None, "x")
    for f in (written, gradient(written)):
        for out in jax.tree.leaves(jit(f)(*args)):
            assert out.sharding.spec == P(None, "x")
    with jax.set_mesh(mesh_of(AxisType.Explicit)) as _:
        mesh = mesh_of(AxisType.Explicit)
        for spec in ((None, "x"), ("x", None)):
            args = put(BUFFER, mesh, *spec), put(VALUES, mesh, *spec)
            for out in jax.tree.leaves(jit(gradient(written))(*args)):
                assert jax.typeof(out).sharding.spec == P(*spec)


@pytest.mark.slow
def test_a_batch_that_is_divided_needs_no_collective():
    buffers, values = rng.normal(size=(2, 8, STEPS, ROW)) / 2
    f = jax.vmap(both(looped))
    mesh = mesh_of(AxisType.Auto)
    args = put(buffers, mesh, "x"), put(values, mesh, "x")
    compiled = jit(f).lower(*args).compile()
    assert_same(compiled(*args), jit(f)(buffers, values))
    assert not {k: v for k, v in collectives(compiled).items() if v[1] > 1}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [("x", None), (None, "x")])
def test_a_limit_of_steps_moves_no_carry_between_devices(kind, spec):
    """The error depends on the number of steps, and each result on the error."""

    def f(x, n):
        return while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x), max_steps=3)[1]

    divided = put(rng.normal(size=(16, 16)), mesh_of(kind), *spec)
    compiled = jit(f).lower(divided, 3).compile()
    assert not collectives(compiled)
    last = compiled(divided, 3)
    assert last.sharding.spec == P(*spec)
    np.testing.assert_allclose(np.asarray(last), np.sin(np.sin(np.sin(np.asarray(divided)))))
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="still true after max_steps=3"):
        jax.block_until_ready(compiled(divided, 4))


IN_PLACE = [("written", "value", (None, "x")), ("written", "grad", ("x", None))]
IN_PLACE += [("looped", "value", ("x", None)), ("looped", "grad", (None, "x"))]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("name", "transform", "spec"), IN_PLACE)
def test_every_device_updates_its_part_in_place(name, transform, spec):
    def program(length):
        def f(buffer, values):
            def step(b, i):
                before = ta_read(b, i + 1, mode="drop")  # which the write does not depend on
                return ta_write(b, i, jnp.tanh(ta_read(b, i // 2) + ta_read(values, i))), jnp.sum(before)

            def body(c):
                return c[0] + 1, step(c[1], c[0])[0]

            if name == "written":
                return lax.scan(step, buffer, jnp.arange(length))[0]
            return while_loop(lambda c: c[0] < length, body, (0, buffer), max_steps=length)[1]

        return TRANSFORMS[transform](f)

    length = 800
    mesh = mesh_of(AxisType.Auto)
    args = [put(np.ones((length, 8 * ROW)), mesh, *spec)] * 2
    out = None if transform == "value" else (args[0].sharding,) * 2
    compiled = jax.jit(program(length), out_shardings=out).lower(*args).compile()
    part = args[0].addressable_shards[0].data
    assert_no_whole_buffer_copy(compiled, part)


# --- shard_map -------------------------------------------------------------------------------------------------


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("name", "check_vma"),
    [("exchanged", False), ("maxima", True), ("looped", False), ("from_nothing", True), ("from_nothing", False)],
)
def test_in_shard_map(name, check_vma):
    mesh, spec = mesh_of(AxisType.Auto), P(None, "x")
    f = PROGRAMS[name]
    if name == "from_nothing" and check_vma:  # as for jnp.zeros, JAX wants to know that the carry will vary
        with pytest.raises(TypeError, match=r"might be fixed by applying `jax.lax.pcast"):
            jax.shard_map(f, mesh=mesh, in_specs=(spec, spec), out_specs=spec)(BUFFER, VALUES)
        f = functools.partial(f, made=lambda b: lax.pcast(b, "x", to="varying"))
    mapped = jax.shard_map(both(f), mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=check_vma)
    args = put(BUFFER, mesh, None, "x"), put(VALUES, mesh, None, "x")
    compiled = jit(mapped).lower(*args).compile()
    assert_same(compiled(*args), wanted(name))
    assert not collectives(compiled)


@pytest.mark.slow
def test_a_buffer_that_devices_share_gets_the_sum_of_their_gradients():
    mesh = mesh_of(AxisType.Auto)

    def loss(buffer, values):  # values are each device's own
        def body(c):
            i, y = c
            return i + 1, jnp.sin(ta_read(buffer, i) * y)

        return lax.psum(while_loop(lambda c: c[0] < STEPS, body, (0, values), max_steps=STEPS)[1].sum(), "x")

    mapped = jax.shard_map(loss, mesh=mesh, in_specs=(P(), P("x")), out_specs=P())
    values = rng.normal(size=(8, ROW))

    def plain(buffer, values):
        return lax.fori_loop(0, STEPS, lambda i, y: jnp.sin(buffer[i] * y), values).sum()

    wanted = in_numpy(jax.grad(plain, (0, 1)))(BUFFER, values)
    assert_same(jax.jit(jax.grad(mapped, (0, 1)))(BUFFER, put(values, mesh, "x")), wanted)


# --- what else there is ----------------------------------------------------------------------------------------


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.bool_, np.complex64, np.float16, "bfloat16", np.uint8])
def test_rows_that_one_device_has_come_bit_for_bit(dtype):
    mesh = mesh_of(AxisType.Auto)
    buffer = np.abs(rng.normal(size=(STEPS, ROW)) * 2).astype(jnp.dtype(dtype))
    if jnp.issubdtype(buffer.dtype, jnp.floating):
        buffer[3], buffer[4] = -0.0, np.inf
    found = jax.jit(lambda b, i: ta_read(b, i))(put(buffer, mesh, "x"), jnp.array([3, 4, 15]))
    wanted = np.asarray(buffer)[[3, 4, 15]]
    assert found.dtype == buffer.dtype
    assert np.asarray(found).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("spec", [(None, "x"), ("x", None)])
def test_an_index_out_of_range_is_the_error_that_it_is_on_one_device(spec):
    mesh = mesh_of(AxisType.Auto)
    f = jax.jit(lambda b, i: ta_write(b, i, 1.0))
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="ta_write: index 16 is out of range for a b"):
        finish(f(put(BUFFER, mesh, *spec), 16))
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # of the other GPUs that have seen it
        check_errors()
    assert_same(f(put(BUFFER, mesh, *spec), 3), np.concatenate([BUFFER[:3], np.ones((1, ROW)), BUFFER[4:]]))


def divided_reads():
    """Sums over all devices of what each reads by its part of the index."""
    mesh = mesh_of(AxisType.Auto)
    table, tables = put(BUFFER, mesh), put(np.stack([BUFFER] * 8), mesh, "x")

    def read(b, i):
        return ta_read(b, i, mode="drop")

    def summed(b, i):
        return lax.psum(read(b, i).sum(), "x")

    return {
        "positions": (lambda b, i: read(b, i).sum(), table),
        "batch": (lambda b, i: jax.vmap(read)(b, i).sum(), tables),
        "shard_map": (jax.shard_map(summed, mesh=mesh, in_specs=(P(), P("x")), out_specs=P()), table),
    }


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ["positions", "batch", "shard_map"])
def test_one_device_may_drop_an_index_before_all_of_them_meet(name):
    f, buffer = divided_reads()[name]
    index = np.array([0, 1, 2, 3, 4, 99, 6, -1])
    found = jax.jit(f)(buffer, put(index, mesh_of(AxisType.Auto), "x"))
    assert_same(found, BUFFER[index[[0, 1, 2, 3, 4, 6]]].sum())


def test_an_index_that_only_one_device_has_is_an_error_of_the_whole_program():
    mesh = mesh_of(AxisType.Auto)
    f = jax.jit(jax.vmap(lambda b, i: ta_write(b, i, 1.0)))
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="ta_write: index 99 is out of range for a b"):
        finish(f(put(np.stack([BUFFER] * 8), mesh, "x"), put([0, 1, 2, 3, 4, 99, 6, 7], mesh, "x")))
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # of GPUs
        check_errors()


@pytest.mark.slow
@pytest.mark.parametrize("partitioner", ["shardy", "gspmd"])
def test_a_device_with_a_bad_index_raises_after_all_have_met(partitioner):
    script = Path(__file__).parents[1] / "support" / "one_bad_index.py"
    done = subprocess.run([sys.executable, script, partitioner], capture_output=True, text=True)
    text = r"OUT_OF_RANGE: (ta_read|ta_add|TensorArray.write): index (99|100|101) is out of range for a \w+"
    assert done.returncode == 1, done.stderr
    assert re.search(rf"Error: {text} of size 16 \(one_bad_index.py:\d+\)", done.stderr), done.stderr
    assert len(re.findall(f"^{text}", done.stdout, re.MULTILINE)) == len(done.stdout.splitlines())


@pytest.mark.parametrize("spec", [(None, "x"), ("x", None)])
def test_a_donated_buffer_is_updated_where_it_is(spec):
    mesh = mesh_of(AxisType.Auto)
    buffer = put(BUFFER, mesh, *spec)
    before = [s.data.unsafe_buffer_pointer() for s in buffer.addressable_shards]
    out = jax.jit(functools.partial(written, values=jnp.asarray(VALUES)), donate_argnums=0)(buffer)
    assert [s.data.unsafe_buffer_pointer() for s in out.addressable_shards] == before
    assert_same(out, written(BUFFER, VALUES))


# --- plain programs ----------------------------------------------------------------------------------------------

EXAMPLES = np.random.default_rng(1).normal(size=(2, 4, 3)) / 2


def of_element(b):
    return b.at[jnp.argmax(b[:, 0])].add(b[0])


def of_rows(b):
    return lax.scan(lambda b, k: (b.at[k % 2].set(jnp.sin(b[(k + 1) % 2])), b[0]), b, jnp.arange(5))


def of_selected(b):
    return lax.fori_loop(0, 3, lambda k, b: jnp.where(b[0, 0] > 0, b.at[k % 2].mul(2.0), b), b)


def of_boxes(b):
    return b.at[0, 1:].set(2 * lax.dynamic_slice(b, (jnp.argmax(b[:, 0]), 1), (1, 2))[0])


def of_slices(b):
    return lax.scan(lambda c, s: (c + jnp.sum(s), s.at[1].set(s[0] + c)), b[0, 0], b)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("f", [of_element, of_rows, of_selected, of_boxes, of_slices])
def test_a_batch_of_shard_maps_may_be_divided_by_an_axis_of_the_mesh(f):
    """By `spmd_axis_name`: what is batched varies over this axis too, and all else does not."""
    mesh, spec = mesh_of(AxisType.Auto, (2, 2), ("x", "y")), P("y")

    def divided(f):
        def varying(b):
            return jax.tree.map(lambda x: x[None], f(b))

        specs = jax.tree.map(lambda _: spec, jax.eval_shape(f, EXAMPLES[0, :2]))
        return jax.shard_map(varying, mesh=mesh, in_specs=spec, out_specs=specs)

    def batched(f):
        return jax.vmap(f, spmd_axis_name="x")

    def gradient(f):
        return jax.grad(lambda b: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(f(b))))

    plain = batched(divided(f))
    has_gradient = f in (of_element, of_boxes)  # of the others plain JAX has none
    every = batched(in_place(divided(f))), in_place(plain), batched(divided(in_place(f)))

    @jit
    def found(x):
        return [ours(x) for ours in every], [gradient(ours)(x) for ours in every if has_gradient]

    results, slope = jit(lambda x: (plain(x), [gradient(jax.vmap(divided(f)))(x)] if has_gradient else []))(EXAMPLES)
    values, slopes = found(EXAMPLES)
    for got in values:
        jax.tree.map(np.testing.assert_allclose, got, results)
    for got in slopes:
        np.testing.assert_allclose(got, slope[0], atol=1e-12)
