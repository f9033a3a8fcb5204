"""The row ops: values for every shape, and for every form of an index, a mask and a value. NumPy says which.

What only one op has is in the file of that op."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from ops import OPS, OURS, ROW_OPS, UPDATES, assert_same, every, on_device

pytestmark = pytest.mark.slow(but=3)

INDICES = [2, np.int8(2), np.uint64(2), np.array(2), [2, 0, 2], [1, 1], [[0], [1]], [np.int8(1), 2], [], range(3)]
INDICES += [np.array([2, 1]), np.array([[[[2]]], [[[0]]]])]
SHAPES = [(), (1,), (5,), (2, 3), (0,), (2, 0), (1, 2, 1), (2, 1, 2, 1, 2, 1, 2, 1)]
ELEMENTS = [(), (3,), (2, 1, 3), (0,), (2, 0)]
MASKS = [True, False, np.bool_(False), [True, False, True], [[True], [False]], [[True, False, False]]]
VALUES = [(), (1,), (2,), (3, 1), (1, 2), (3, 2), (1, 3, 2), (4, 3, 2), (4, 1, 1)]


def cases():
    """name -> buffer, index, value, where"""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape)  # noqa: E731
    for shape in SHAPES:
        for elem in ELEMENTS:
            yield f"{shape} of {elem}", (normal(4, *elem), rng.integers(0, 4, shape), normal(*shape, *elem), None)
    for rank in range(1, 9):
        buffer = normal(*(3, 2, 1, 2, 1, 2, 1, 2)[:rank])
        yield f"rank {rank}", (buffer, np.array([[2, 0], [2, 2]]), normal(2, 2, *buffer.shape[1:]), None)
    for shape in VALUES:
        yield f"a value of {shape}", (normal(5, 2), rng.integers(0, 5, (4, 3)), normal(*shape), None)
    for index in (np.array([-1, 3, 1, -(2**40), 2**40]), np.zeros((0, 3), int)):
        yield f"strays {index}", (normal(3, 2), index, np.array(7.0), None)
        yield f"strays {index}, no rows", (normal(0, 2), index, np.array(7.0), None)
    yield "no rows, masked", (normal(0, 2), np.array([0, 1]), np.array(7.0), np.zeros(2, bool))
    yield "duplicates, masked", (normal(4, 2), np.array([1, 1, 2, 1]), normal(4, 2), np.arange(4) < 3)


def of(op, buffer, index, value, where):
    return [buffer, index, *[value] * ("value" in op.operands), where]


@pytest.mark.parametrize("lowering", ["auto", "ffi"])
@every(ROW_OPS)
def test_rows_are_those_that_the_index_and_the_mask_say(op, lowering):
    names, given = zip(*((name, of(op, *case)) for name, case in cases()), strict=True)

    @jax.jit
    def f(given):
        modes = ["drop" if "strays" in name or lowering == "ffi" else None for name in names]
        return [op(OURS, *one, mode=mode, lowering=lowering) for one, mode in zip(given, modes, strict=True)]

    found = f([[*on_device(*one[:-1]), one[-1]] for one in given])
    for name, results, one in zip(names, found, given, strict=True):
        for a, e in zip(results, op(oracle, *one), strict=True):
            assert (a.shape, a.dtype) == (e.shape, e.dtype), name
            np.testing.assert_array_equal(oracle.bytes_of(a), oracle.bytes_of(e), err_msg=name)


@every([OPS["ta_read"], OPS["ta_swap"]])
def test_an_index_and_a_mask_may_be_of_python_or_numpy(op):
    rng = np.random.default_rng(1)
    buffer = rng.normal(size=(4, 2))
    for index in INDICES:
        found = op(OURS, *of(op, jnp.asarray(buffer), index, 7.0, None), mode=None)
        assert_same(found, op(oracle, *of(op, buffer, np.asarray(index, int), 7.0, None)))
    (found,) = OPS["ta_read"](OURS, [1.0, 2.0, 3.0], [2, 0])  # a list is a buffer too
    np.testing.assert_array_equal(found, [3.0, 1.0])
    index, value = np.array([[0, 1, 2], [3, 3, 3]]), rng.normal(size=(2, 3, 2))
    for where in MASKS:
        found = op(OURS, *of(op, *on_device(buffer, index, value), where), mode=None)
        assert_same(found, op(oracle, *of(op, buffer, index, value, where)))


@every([*UPDATES, OPS["ta_stack"], OPS["ta_clear"]])
def test_the_old_buffer_is_still_there_after_an_update(op):
    first, second = {"ta_stack": ((1,), (2,)), "ta_clear": ((0, 1), (2, 3))}.get(op.name, ((0, 5.0), (2, 6.0)))
    f = jax.jit(lambda b: (op(OURS, b, *map(jnp.array, first)), b, op(OURS, b, *map(jnp.array, second))))
    buffer = np.ones(3)
    assert_same(f(jnp.asarray(buffer)), (op(oracle, buffer, *first), buffer, op(oracle, buffer, *second)))


@pytest.mark.parametrize("op", [op for op in UPDATES if op.is_linear], ids=str)
def test_a_value_that_was_broadcast_gets_the_sum_of_its_gradients(op):
    weights = jnp.array([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])
    gradient = jax.grad(lambda v: (weights * op(OURS, jnp.zeros((3, 2)), jnp.array([0, 2]), v)[0]).sum())
    for shape, expected in (((), 303), ((2,), [101, 202]), ((2, 1), [[3], [300]])):
        np.testing.assert_array_equal(gradient(jnp.ones(shape)), expected)
