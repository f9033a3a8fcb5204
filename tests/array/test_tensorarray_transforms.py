"""Programs of TensorArrays in compiled code, differentiated and batched, against Python lists; and arrays as arguments.

`HYPOTHESIS_PROFILE=night` draws many more programs, and others each time.
"""

import functools
import os

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from array_machines import Library
from array_programs import BATCH, Lists, compiled, inputs, loss, programs, pruned, run
from hypothesis import given, note
from hypothesis import strategies as st
from in_numpy import in_numpy
from jax import jit, lax
from library_in_numpy import library_in_numpy

from jax_tensorarray import TensorArray

pytestmark = pytest.mark.slow

NIGHT = os.environ.get("HYPOTHESIS_PROFILE") == "night"


# --- programs --------------------------------------------------------------------------------------------------


def function(machine, program, **options):
    """A function of the numbers and of the inputs: a scalar, and everything that the program has made."""

    def f(numbers, args):
        m = machine(program, **options)
        results = run(m, program, numbers, *args)
        return loss(m, results), results

    return f


def value(f, args):
    return f(args)


def gradient(f, args):
    return jax.value_and_grad(f, has_aux=True)(args)


def forward(f, args):
    return jax.jvp(f, (args,), (args,), has_aux=True)


def forward_over_reverse(f, args):
    return jax.jvp(jax.grad(f, has_aux=True), (args,), (args,), has_aux=True)


def reverse_over_reverse(f, args):
    def product(args):
        first, results = jax.grad(f, has_aux=True)(args)
        return sum(jnp.vdot(x, jnp.cos(g)) for x, g in zip(args, first, strict=True)), results

    return jax.grad(product, has_aux=True)(args)


def assert_close(found, wanted, atol=1e-9):
    """Equal in structure and shape. A size of Python is that of NumPy."""
    found, wanted = jax.tree.leaves(found), jax.tree.leaves(wanted)
    assert len(found) == len(wanted)
    for k, (x, y) in enumerate(zip(found, wanted, strict=True)):
        assert np.shape(x) == np.shape(y), k
        if getattr(y, "dtype", None) == jnp.float64:
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=atol, err_msg=str(k))
        else:
            np.testing.assert_array_equal(x, y, err_msg=str(k))


def of_lists(program, k):
    """The function of the inputs that an example is, by Python lists."""
    return functools.partial(function(Lists, program, math=jnp), program.numbers[k])


def as_numbers(program):
    return np.asarray(program.numbers, np.int32)


def some(count, *strategies):
    """Draw so many examples; with more, hypothesis would begin to vary those that it has."""
    return lambda f: hypothesis.settings(max_examples=5000 if NIGHT else count)(given(*strategies)(f))


def computed(f, by_xla):
    """NumPy evaluates what JAX has traced, in a third of the time, and memory that is not initialised is NaNs."""
    return jit(f) if by_xla else library_in_numpy(f)


FLOATS = programs(compiled(), 8, 12)
ways = st.sampled_from([False, False, False, True])


@some(7, FLOATS, st.sampled_from([gradient, gradient, forward_over_reverse, reverse_over_reverse]), ways)
def test_a_compiled_program_has_the_values_and_derivatives_of_lists(program, order, by_xla):
    note(program := pruned(program))
    f = function(Library, program)
    found = computed(lambda numbers, args: order(functools.partial(f, numbers), args), by_xla)(
        as_numbers(program)[0], inputs(program, 0)
    )
    assert_close(found, in_numpy(functools.partial(order, of_lists(program, 0)))(inputs(program, 0)))


@some(7, programs(compiled(), 6, 10, ("float64", "int32", "bool", "complex64", "bfloat16")), st.booleans())
def test_so_has_a_program_of_other_dtypes_and_one_that_is_not_jitted(program, is_jitted):
    note(program := pruned(program))
    f, args = function(Library, program), (as_numbers(program)[0], inputs(program, 0))
    if is_jitted:
        _, found = jit(f)(*args)
    else:
        with jax.disable_jit():
            _, found = f(*jax.tree.map(jnp.asarray, args))
    assert_close(found, function(Lists, program)(program.numbers[0], inputs(program, 0))[1])


@some(7, FLOATS, st.sampled_from([gradient, forward_over_reverse, forward]), st.sampled_from([0, 0, None]), ways)
def test_a_batch_has_those_of_its_examples(program, order, axis, by_xla):
    """Each example has numbers of its own, and so sizes; or all have the same."""
    note(program := pruned(program))
    f = function(Library, program, forward=order is forward)

    def of_one(numbers, args):
        return order(functools.partial(f, numbers), args)

    args = jax.tree.map(lambda *x: np.stack(x), *[inputs(program, k) for k in range(BATCH)])
    numbers = as_numbers(program)
    found = computed(jax.vmap(of_one, (axis, 0)), by_xla)(numbers if axis == 0 else numbers[0], args)
    for k in range(BATCH):
        wanted = in_numpy(functools.partial(order, of_lists(program, 0 if axis is None else k)))(inputs(program, k))
        assert_close(jax.tree.map(lambda x, k=k: x[k], found), wanted)


@some(7, FLOATS, st.tuples(*[st.sampled_from([None, 0, -1])] * 3), st.booleans(), ways)
def test_the_derivatives_of_a_batch_are_sums_if_examples_share_an_input(program, axes, is_first, by_xla):
    order = gradient if is_first else forward_over_reverse
    note(program := pruned(program))
    each = [inputs(program, k) for k in range(BATCH)]
    args = [x[0] if axis is None else np.stack(x, axis) for x, axis in zip(zip(*each, strict=True), axes, strict=True)]

    def total(one_by_one, args):
        losses, results = one_by_one(args)
        return losses.sum(), results

    def batched(args):
        return jax.vmap(function(Library, program, vjp=False), (0, tuple(axes)))(as_numbers(program), tuple(args))

    def listed(args):
        pick = [
            [x if axis is None else jnp.take(x, k, axis) for x, axis in zip(args, axes, strict=True)]
            for k in range(BATCH)
        ]
        found = [of_lists(program, k)(tuple(mine)) for k, mine in enumerate(pick)]
        return jax.tree.map(lambda *x: jnp.stack([jnp.asarray(y) for y in x]), *found)

    found = computed(functools.partial(order, functools.partial(total, batched)), by_xla)(args)
    assert_close(found, in_numpy(functools.partial(order, functools.partial(total, listed)))(args))


@some(3, programs(compiled(0), 6, 8))
def test_a_gradient_outside_of_jit(program):
    note(program := pruned(program))
    f, args = functools.partial(function(Library, program), program.numbers[0]), inputs(program, 0)
    assert_close(
        gradient(f, jax.tree.map(jnp.asarray, args)), in_numpy(functools.partial(gradient, of_lists(program, 0)))(args)
    )


# --- a TensorArray as an argument ------------------------------------------------------------------------------

STEPS, SIZE, MAX_SIZE = 3, 4, 8

_rng = np.random.default_rng(0)
ROWS, VALUES = _rng.normal(size=(BATCH, SIZE, 2)), _rng.normal(size=(STEPS, 2))


def at(k, xs):
    return jax.tree.map(lambda x: x[k], xs)


def weighted(*trees):
    return sum(k * jnp.sum(jnp.sin(x)) for k, x in enumerate(jax.tree.leaves(trees), 1))


def use_array(ta):
    """Row 1 is overwritten, so it has no gradient; row 2 counts twice."""
    new = ta.write(1, jax.tree.map(jnp.sin, ta.read(2)))
    return weighted(new.stack(), new.read(3), new.gather([0, 0]))


def use_rows(rows):
    """The same of the rows, without an array."""
    new = jax.tree.map(lambda x: jnp.stack([x[0], jnp.sin(x[2]), *x[2:]]), rows)
    return weighted(new, at(3, new), jax.tree.map(lambda x: x[jnp.array([0, 0])], new))


def assert_near(found, wanted):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, wanted)


def test_the_gradient_with_respect_to_an_array_is_an_array():
    """A step of gradient descent makes an array of it."""
    rows = {"a": ROWS, "b": (ROWS[..., :1], np.cos(ROWS).astype(np.float32))}
    wanted = [in_numpy(jax.grad(use_rows))(at(k, rows)) for k in range(BATCH)]
    ta, gradient = TensorArray.from_array(jax.tree.map(jnp.asarray, at(0, rows))), jax.grad(use_array)

    @jit
    def everything(ta, rows):
        of_batch = jax.vmap(lambda ta: gradient(ta).stack())(jax.vmap(TensorArray.from_array)(rows))
        return gradient(ta), of_batch

    found, of_batch = everything(ta, rows)
    assert isinstance(found, TensorArray)
    assert_near(found.stack(), wanted[0])
    for k in range(BATCH):
        assert_near(at(k, of_batch), wanted[k])
    moved = jax.tree.map(lambda x, g: x - 0.5 * g, ta, found)
    assert_near(moved.stack(), jax.tree.map(lambda x, g: x - 0.5 * g, at(0, rows), wanted[0]))


def test_the_gradient_of_an_array_with_a_size_has_all_possible_rows():
    """Its size has none, and JAX is told so: otherwise it says that it was given an int32."""

    def f(ta):
        return jnp.sum(ta.append(2 * ta.read(1)).stack(pad=True) ** 2)

    ta = TensorArray.from_array(jnp.asarray(ROWS[0, :3]), dynamic_size=True, max_size=5)
    wanted = np.concatenate([2 * ROWS[0, :3], np.zeros((2, *ROWS.shape[2:]), np.float32)])
    wanted[1] += 8 * ROWS[0, 1]
    gradient = jax.grad(f, allow_int=True)
    for found in (gradient(ta), jit(gradient)(ta), jax.vjp(f, ta)[1](jnp.ones_like(f(ta)))[0]):
        np.testing.assert_allclose(found.stack(), wanted, rtol=1e-6)
        assert jax.tree.leaves(found)[1].dtype == jax.dtypes.float0
    for transform in (jax.grad, jax.value_and_grad, jax.jacrev, jax.jacfwd):
        with pytest.raises(
            TypeError, match=r"TensorArray: with max_size, the size is a leaf .* allow_int=True.* here 5"
        ):
            transform(f)(ta)
    np.testing.assert_array_equal(jax.grad(lambda x, ta: f(ta) * x)(1.0, ta), f(ta))


def test_derivatives_of_arrays_are_arrays_and_so_are_directions():
    def f(ta):
        return ta.write(0, ta.read(1) ** 2)

    ta, other = (TensorArray.from_array(jnp.asarray(x)) for x in (ROWS[0], ROWS[1]))
    value, direction = jax.jvp(f, (ta,), (other,))
    np.testing.assert_allclose(value.stack(), [ROWS[0, 1] ** 2, *ROWS[0, 1:]])
    np.testing.assert_allclose(direction.stack(), [2 * ROWS[0, 1] * ROWS[1, 1], *ROWS[1, 1:]])
    (cotangent,) = jax.vjp(f, ta)[1](other)
    row = ROWS[1, 1] + 2 * ROWS[0, 1] * ROWS[1, 0]
    np.testing.assert_allclose(cotangent.stack(), [np.zeros(2), row, *ROWS[1, 2:]])


def test_a_rule_of_custom_vjp_may_write_its_cotangent_into_an_array():
    @jax.custom_vjp
    def reversed_gradient(ta, index):
        return ta.read(index)

    def backward(residuals, cotangent):
        ta, index = residuals
        return jax.tree.map(jnp.zeros_like, ta).write(index, -cotangent), None

    reversed_gradient.defvjp(lambda ta, index: (ta.read(index), (ta, index)), backward)
    f = jit(jax.grad(lambda ta: jnp.sum(reversed_gradient(ta, 2) ** 2)))
    expected = np.zeros((SIZE, 2))
    expected[2] = -2 * ROWS[0, 2]
    np.testing.assert_allclose(f(TensorArray.from_array(jnp.asarray(ROWS[0]))).stack(), expected)


@pytest.mark.parametrize("options", [{}, {"dynamic_size": True, "max_size": MAX_SIZE}], ids=["static", "dynamic"])
def test_scan_stacks_the_arrays_that_its_steps_give(options):
    ta = TensorArray.from_array(jnp.asarray(ROWS[0]), **options)
    _, tas = lax.scan(lambda ta, v: (ta.write(1, v), ta), ta, jnp.asarray(VALUES))
    for k in range(STEPS):
        expected = ROWS[0] if k == 0 else np.stack([ROWS[0, 0], VALUES[k - 1], *ROWS[0, 2:]])
        found = at(k, tas).stack()
        np.testing.assert_array_equal(found, expected)
        padding = np.zeros((MAX_SIZE - SIZE if options else 0, 2))
        np.testing.assert_array_equal(jax.vmap(lambda ta: ta.stack(pad=True))(tas)[k], [*found, *padding])


def test_an_array_is_what_scan_iterates_over():
    tas = jax.vmap(TensorArray.from_array)(jnp.asarray(ROWS))
    _, found = lax.scan(lambda c, ta: (c, ta.read(2)), None, tas)
    np.testing.assert_array_equal(found, ROWS[:, 2])
