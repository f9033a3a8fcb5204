"""One primitive an op: what it accepts, what its rules turn into, and what it lowers to."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import ShapedArray
from jax.extend.core import Primitive, jaxprs_in_params
from ops import OPS, ROW_OPS, every

import jax_tensorarray as ta
from jax_tensorarray import primitives
from jax_tensorarray._ops.check import ta_check
from jax_tensorarray._ops.clear import ta_clear
from jax_tensorarray._ops.primitive import row_params

BUFFER, INDEX, VALUE, WHERE = jnp.zeros((4, 2)), jnp.array([0, 3, 0]), jnp.ones((3, 2)), jnp.array([True, False, True])


def call(op, *args, **options):
    return getattr(ta, op)(*(args[:2] if op == "ta_read" else args), **options)


def names(f, *args):
    """Names of the library's primitives that `f` binds, in order, nested ones too."""

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name.startswith("ta_"):
                yield eqn.primitive.name
            for inner in jaxprs_in_params(eqn.params):
                yield from walk(inner)

    return list(walk(jax.make_jaxpr(f)(*args).jaxpr))


def test_every_op_has_a_primitive_of_its_name():
    ops = [*OPS, "ta_empty"]
    assert {name for name in ta.__all__ if name.startswith("ta_")} == {*ops} - {"ta_check", "ta_clear"}
    assert sorted(primitives.__all__) == sorted(["ROW_OPS", *(f"{op}_p" for op in ops)])
    for op in ops:
        primitive = getattr(primitives, f"{op}_p")
        assert isinstance(primitive, Primitive)
        assert primitive.name == op


@every(ROW_OPS)
def test_a_call_is_one_equation(op):
    for options in ({}, {"where": WHERE}, {"mode": "drop"}):
        jaxpr = jax.make_jaxpr(lambda *xs, options=options: call(op.name, *xs, **options))(BUFFER, INDEX, VALUE).jaxpr
        assert [eqn.primitive.name for eqn in jaxpr.eqns] == [op.name]
        shapes = [{"buffer": (4, 2), "value": (3, 2)}[name] for name in op.results]
        assert [v.aval.shape for v in jaxpr.outvars] == shapes
        assert {v.aval.dtype for v in jaxpr.outvars} == {np.dtype(np.float64)}


def test_sizes_and_new_buffers_are_one_equation_too():
    assert names(ta.ta_stack, BUFFER, jnp.array(2)) == ["ta_stack"]
    assert names(lambda: ta.ta_empty(3)) == ["ta_empty"]
    assert names(ta.ta_stack, BUFFER) == []
    assert names(ta_clear, BUFFER, jnp.array(1), jnp.array(3)) == ["ta_clear"]
    assert names(ta_check, INDEX, jnp.int32(3)) == ["ta_check"]


ZEROS = jnp.zeros((3, 2))
#: A function that is linear in these arguments, and what its transpose binds.
TRANSPOSES = [
    (lambda b: ta.ta_read(b, INDEX), (BUFFER,), "ta_add"),
    (lambda b, v: ta.ta_write(b, INDEX, v), (BUFFER, VALUE), "ta_swap"),
    (lambda b: ta.ta_write(b, INDEX, ZEROS), (BUFFER,), "ta_write"),
    (lambda b, v: ta.ta_add(b, INDEX, v), (BUFFER, VALUE), "ta_read"),
    (lambda b, v: ta.ta_swap(b, INDEX, v), (BUFFER, VALUE), "ta_swap"),
    (lambda b: ta.ta_stack(b, jnp.array(2)), (BUFFER,), "ta_stack"),
    (lambda b: ta_clear(b, 1, 3), (BUFFER,), "ta_clear"),
]


def test_each_transpose_is_one_of_the_ops():
    for f, args, op in TRANSPOSES:
        cotangents = jax.tree.map(jnp.ones_like, jax.eval_shape(f, *args))
        assert names(jax.linear_transpose(f, *args), cotangents) == [op]


@pytest.mark.parametrize("op", ["ta_read", "ta_write", "ta_add", "ta_swap"])
def test_a_tangent_takes_the_same_op(op):
    def f(buffer, value):
        return call(op, buffer, INDEX, value)

    assert names(lambda b, v: jax.jvp(f, (b, v), (b, v)), BUFFER, VALUE) == [op, op]


def test_a_tangent_that_does_not_exist_costs_nothing():
    assert names(lambda v: jax.jvp(lambda v: (ta.ta_read(BUFFER, INDEX), v), (v,), (v,)), VALUE) == ["ta_read"]
    assert names(lambda b: jax.jvp(lambda b: ta.ta_add(b, INDEX, VALUE), (b,), (b,)), BUFFER) == ["ta_add"]


def test_reads_of_one_buffer_add_into_one_cotangent():
    def f(buffer):
        first = jnp.sin(ta.ta_read(buffer, INDEX)).sum()
        return first + jnp.sin(ta.ta_read(buffer, INDEX[::-1])).sum() + jnp.cos(buffer).sum()

    jaxpr = jax.make_jaxpr(jax.grad(f))(BUFFER).jaxpr
    adds = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "ta_add"]
    assert len(adds) == 2
    assert adds[1].invars[0] is adds[0].outvars[0]  # the second starts from the first, not from zeros
    assert sum(eqn.primitive.name == "add_any" and eqn.outvars[0].aval.shape == (4, 2) for eqn in jaxpr.eqns) == 0


def test_a_batch_is_an_axis_of_one_call():
    buffers, values = jnp.zeros((5, 4, 2)), jnp.ones((5, 3, 2))
    for op in ("ta_write", "ta_add", "ta_max", "ta_swap"):
        assert names(jax.vmap(lambda b, v, op=op: call(op, b, INDEX, v)), buffers, values) == [op]
    assert names(jax.vmap(jax.vmap(lambda b: ta.ta_read(b, INDEX))), buffers[None]) == ["ta_read"]
    of_clear = jax.vmap(jax.vmap(ta_clear, (None, None, 0)), (None, 0, None))
    assert names(of_clear, BUFFER, INDEX, INDEX) == ["ta_clear"]
    of_check = jax.vmap(jax.vmap(ta_check, (None, 0)), (0, None))
    assert names(of_check, buffers[:, 0].astype(int), jnp.zeros(3, jnp.int32)) == ["ta_check"]


@pytest.mark.parametrize(
    ("operands", "error"),
    [
        ([((4, 2), float), ((3,), float), ((3, 2), float)], TypeError),  # index
        ([((4, 2), float), ((3,), int), ((3, 3), float)], TypeError),  # shape of value
        ([((4, 2), float), ((3,), int), ((3, 2), np.float32)], TypeError),  # dtype of value
        ([((4, 2), float), ((3,), int), ((3, 2), float), ((2,), bool)], TypeError),  # shape of where
        ([((4, 2), float), ((3,), int), ((3, 2), float), ((3,), int)], TypeError),  # dtype of where
        ([((), float), ((3,), int), ((3,), float)], ValueError),  # buffer
    ],
)
@pytest.mark.parametrize("op", ["ta_write", "ta_add", "ta_max", "ta_swap"])
def test_a_bind_by_hand_is_checked(op, operands, error):
    avals = [ShapedArray(shape, np.dtype(dtype)) for shape, dtype in operands]
    primitive = getattr(primitives, f"{op}_p")
    with pytest.raises(error, match=f"^{op}: "):
        primitive.abstract_eval(*avals, **row_params(op, None))


def test_an_index_and_a_mask_that_examples_share_stay_as_small_as_they_are():
    def f(buffer, index, value, where):
        return ta.ta_swap(buffer, index, value, where=where)

    operands = ((4, 2), float), ((3,), int), ((3, 2), float), ((3,), bool)
    types = [ShapedArray(shape, np.dtype(dtype)) for shape, dtype in operands]
    both, mask, index = (0, None, None, None), (None, 0, 0, None), (0, None, None, 0)
    for in_axes, sizes in {both: (1, 1), mask: (5, 1), index: (1, 5)}.items():
        given = [t if d is None else t.update(shape=(5, *t.shape)) for t, d in zip(types, in_axes, strict=True)]
        [eqn] = [e for e in jax.make_jaxpr(jax.vmap(f, in_axes))(*given).eqns if e.primitive.name == "ta_swap"]
        found = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
        assert found == [(5, 4, 2), (sizes[0], 3), (5, 3, 2), (sizes[1], 3), (5, 4, 2), (5, 3, 2)]


def test_a_value_of_a_bind_by_hand_is_not_shared():
    types = [ShapedArray(shape, np.dtype(t)) for shape, t in (((5, 4, 2), float), ((1, 3), int), ((1, 3, 2), float))]
    with pytest.raises(TypeError, match=r"^ta_write: value float64\[1,3,2\] does not fit rows \(5, 3, 2\)"):
        primitives.ta_write_p.abstract_eval(*types, **row_params("ta_write", None, batch_dims=1))


def test_batch_axes_of_a_bind_by_hand_must_be_shared():
    avals = ShapedArray((2, 4, 2), np.dtype(float)), ShapedArray((3, 5), np.dtype(int))
    with pytest.raises(ValueError, match=r"^ta_read: .* do not share 1 batch axes"):
        primitives.ta_read_p.abstract_eval(*avals, **row_params("ta_read", None, batch_dims=1))
    with pytest.raises(ValueError, match=r"^ta_stack: .* do not share 1 batch axes"):
        primitives.ta_stack_p.abstract_eval(*avals, batch_dims=1)
    with pytest.raises(ValueError, match=r"^ta_clear: .* do not share 1 batch axes"):
        primitives.ta_clear_p.abstract_eval(*avals, avals[1], batch_dims=1)
    with pytest.raises(ValueError, match=r"^ta_check: .* do not share 1 batch axes"):
        primitives.ta_check_p.abstract_eval(*avals, batch_dims=1, mode=None, op="ta_check")


@pytest.mark.parametrize("op", ["ta_write", "ta_add", "ta_max", "ta_swap"])
def test_an_update_aliases_its_buffer(op):
    text = jax.jit(lambda *args: call(op, *args)).lower(BUFFER, INDEX, VALUE).as_text()
    calls = [line for line in text.splitlines() if "stablehlo.custom_call" in line]
    assert len(calls) == 1
    assert re.search(r"output_operand_alias<output_tuple_indices = \[[0]?\], operand_index = 0", calls[0])


def test_a_read_aliases_nothing():
    text = jax.jit(ta.ta_read).lower(BUFFER, INDEX).as_text()
    assert "@jax_tensorarray_read" in text
    assert "output_operand_alias" not in text


def test_a_policy_can_name_a_primitive():
    saveable = ta.checkpoint_policies.save_reads
    assert saveable(primitives.ta_read_p, batch_dims=0)
    assert not saveable(primitives.ta_write_p, batch_dims=0)
