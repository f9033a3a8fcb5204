"""Each device has its part of the op: in `shard_map`, and on a mesh with explicit axes."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, PartitionSpec

from decay_row import decay_row
from helpers import assert_close, copies_in_loops, devices_of, gathers, put
from test_decay_row import assert_as_in_plain_jax, batch_of, in_a_loop, in_plain_jax, loss_of, operands


@pytest.mark.parametrize("axes", [(0, 0, 0, 0), (0, None, 0, None), (None, 0, None, None)], ids=str)
def test_in_shard_map_each_device_has_its_own(axes, platform):
    in_specs = tuple(PartitionSpec() if a is None else PartitionSpec("d") for a in axes)
    divide = {"mesh": Mesh(devices_of(platform), "d"), "in_specs": in_specs, "out_specs": PartitionSpec("d")}

    def gradient(f):
        return jax.value_and_grad(loss_of(jax.shard_map(jax.vmap(f, axes), **divide)), (0, 2, 3))

    assert_as_in_plain_jax(gradient, *batch_of(axes))


#: For each case which axes of the operands `vmap` maps, if any, and how buffer, index, value and scale are divided.
DIVIDED = {
    "row": (None, [(None, "d"), (), ("d",), ()]),
    "row of the buffer alone": (None, [(None, "d"), (), (), ()]),
    "row of the value alone": (None, [(), (), ("d",), ()]),
    "batch": ((0, 0, 0, 0), [("d",)] * 4),
    "batch of the value": ((None, None, 0, None), [(), (), ("d",), ()]),
}


@pytest.mark.parametrize("case", DIVIDED)
def test_on_a_mesh_with_explicit_axes_each_device_has_its_part(case, mesh):
    """The types say where all results and gradients are, and no buffer moves."""
    axes, specs = DIVIDED[case]
    f, plain = (jax.vmap(f, axes) if axes else f for f in (decay_row, in_plain_jax))
    gradient, expected = (jax.grad(loss_of(f), (0, 2, 3)) for f in (f, plain))
    args = batch_of(axes or [None] * 4, row=(8,))
    divided = [put(mesh, x, *spec) for x, spec in zip(args, specs, strict=True)]
    found = jax.jit(gradient)(*divided)
    assert_close((jax.jit(f)(*divided), found), jax.jit(lambda *args: (plain(*args), expected(*args)))(*args))
    assert [jax.typeof(x) for x in found] == [jax.typeof(divided[k]) for k in (0, 2, 3)]
    moved = [*gathers(f, *divided), *gathers(gradient, *divided)]
    assert not [line for line in moved if "5,8]" in line or case in ("row", "batch")], moved


@pytest.mark.usefixtures("kernel")
def test_a_loop_on_a_mesh_with_explicit_axes_is_in_place(mesh):
    args = [put(mesh, jnp.ones((n, 8)), None, "d") for n in (50, 20)]
    for program in (in_a_loop, jax.grad(in_a_loop)):
        assert copies_in_loops(program, *args) == gathers(program, *args) == []


def test_rows_that_are_divided_are_an_error_on_a_mesh_with_explicit_axes(mesh):
    buffer, *others = operands(size=8)
    divided = put(mesh, buffer, "d")
    with pytest.raises(ValueError, match=r"decay_row: the rows of the buffer are divided .*reshard"):
        decay_row(divided, *others)
    assert_close(decay_row(jax.sharding.reshard(divided, PartitionSpec()), *others), in_plain_jax(buffer, *others))
