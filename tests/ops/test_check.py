"""`ta_check`: an index that is not of a live row is an error, or -1, and never of anything that does not run."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import unrolled
from in_numpy import in_numpy
from in_place import assert_in_place
from jax import lax
from quick import jit
from waiting import finish

from jax_tensorarray import checkpoint_policies, primitives, ta_read, ta_write
from jax_tensorarray._ops import reference
from jax_tensorarray._ops.check import ta_check

rng = np.random.default_rng(0)
BUFFER = rng.normal(size=(10, 2))
SIZE = np.int32(5)  # of the buffer's ten rows, five are live

#: JAX raises the former from the first call of a compiled function, and the latter from its fast path.
RUNTIME_ERRORS = (jax.errors.JaxRuntimeError, ValueError)


def raises(index, size=SIZE, op="ta_check"):
    text = f"{op}: index {index} is out of range for a TensorArray of size {size}"
    return pytest.raises(RUNTIME_ERRORS, match=re.escape(text) + r"(?!\d)")


bind = primitives.ta_check_p.bind
drop = functools.partial(ta_check, mode="drop")


def masked(index, size):
    """The same by the kernel, which is asked for the good ones only."""
    return ta_check(index, size, where=oracle.ta_check(index, size) >= 0, mode="error")


# --- values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (0,), (2, 0), (1, 2, 1)], ids=str)
def test_an_index_of_live_rows_is_itself(shape):
    index = rng.integers(0, SIZE, shape)
    for f in (ta_check, jax.jit(ta_check), drop, masked):
        oracle.assert_same_bits(f(jnp.asarray(index), SIZE), index.astype(np.int32))


@pytest.mark.parametrize("dtype", oracle.INTEGERS, ids=oracle.name_of)
@pytest.mark.parametrize("size", [-(2**31), -1, 0, 1, 100, 2**31 - 1])
def test_an_index_may_have_any_integer_dtype_and_value(dtype, size):
    limits = np.iinfo(dtype)
    values = {0, 1, 99, 100, 101, 127, limits.min, limits.max, limits.max // 2 + 1, min(2**32 + 1, limits.max)}
    values |= {max(-1, limits.min), max(-(2**32) + 1, limits.min), min(2**31 - 1, limits.max)}
    index = np.array(sorted(values), dtype)
    expected = oracle.ta_check(index, size)
    for f in (drop, masked):
        oracle.assert_same_bits(f(jnp.asarray(index), np.int32(size)), expected)
    oracle.assert_same_bits(jax.jit(drop)(index, np.int32(size)), expected)
    oracle.assert_same_bits(jax.jit(functools.partial(reference.check, batch_dims=0))(index, np.int32(size)), expected)
    if limits.bits < 64:
        with jax.enable_x64(False):
            for f in (drop, masked):
                oracle.assert_same_bits(f(jnp.asarray(index), np.int32(size)), expected)
            plain = reference.check(jnp.asarray(index), jnp.int32(size), batch_dims=0)
            oracle.assert_same_bits(plain, expected)


@pytest.mark.parametrize("dtype", oracle.SMALL_INTEGERS, ids=oracle.name_of)
def test_an_index_may_be_packed_below_a_byte(dtype):
    oracle.assert_same_bits(jax.jit(ta_check)(jnp.array([0, 1, 1], dtype), SIZE), np.array([0, 1, 1], np.int32))


@pytest.mark.parametrize("index", [2, np.int8(2), np.uint64(2), [2, 0, 2], [[0], [1]], [], np.array([2, 1])], ids=repr)
def test_python_and_numpy_indices_are_integers_too(index):
    expected = oracle.ta_check(np.asarray(index, int), SIZE)
    oracle.assert_same_bits(ta_check(index, 5), expected)
    oracle.assert_same_bits(jax.jit(lambda size: ta_check(index, size))(SIZE), expected)


@pytest.mark.parametrize("index", [-1, 12, 2**31, 2**40, 2**63, 2**100, -(2**100)], ids=repr)
@pytest.mark.parametrize("x64", [True, False])
def test_a_python_index_of_any_magnitude_is_not_wrapped_into_range(index, x64):
    with jax.enable_x64(x64):
        oracle.assert_same_bits(drop([1, index], SIZE), np.array([1, -1], np.int32))


@pytest.mark.parametrize("batch", [(), (3,), (2, 2), (0,)], ids=str)
@pytest.mark.parametrize("shape", [(), (4,), (0,)], ids=str)
def test_plain_jax_and_the_kernel_both_mean_what_numpy_does(batch, shape):
    index, size = rng.integers(-1, 8, (*batch, *shape)), rng.integers(0, 7, batch).astype(np.int32)
    expected = np.empty(index.shape, np.int32)
    for k in np.ndindex(batch):
        expected[k] = oracle.ta_check(index[k], size[k])
    n, args = len(batch), (jnp.asarray(index), jnp.asarray(size))
    oracle.assert_same_bits(reference.check(*args, batch_dims=n), expected)
    params = {"batch_dims": n, "op": "ta_check"}
    oracle.assert_same_bits(bind(*args, mode="drop", **params), expected)
    oracle.assert_same_bits(bind(*args, jnp.asarray(expected >= 0), mode=None, **params), expected)
    where = rng.random(index.shape) < 0.5
    oracle.assert_same_bits(bind(*args, jnp.asarray(where), mode="drop", **params), np.where(where, expected, -1))


def test_a_platform_without_kernels_gets_plain_jax():
    traced = jax.jit(ta_check).trace(jnp.arange(3), SIZE)
    assert "@jax_tensorarray_check" in traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "jax_tensorarray" not in traced.lower(lowering_platforms=("tpu",)).as_text()


# --- arguments -------------------------------------------------------------------------------------------------


def test_arguments_are_checked():
    with pytest.raises(TypeError, match=r"^ta\.read: index must have an integer dtype, got float"):
        ta_check(jnp.array(1.0), 3, op="ta.read")
    with pytest.raises(TypeError, match=r"^ta_check: index must be an integer or an array of integers, got 1\.0"):
        ta_check(1.0, 3)
    with pytest.raises(TypeError, match=r"^ta_check: size must have an integer dtype, got float"):
        ta_check(1, 3.0)
    with pytest.raises(TypeError, match=r"^ta_check: size must be int32, got int8"):
        ta_check(1, jnp.int8(3))
    with pytest.raises(ValueError, match=r"^ta_check: size must be a scalar, got shape \(2,\)"):
        ta_check(1, jnp.array([3, 4]))
    with pytest.raises(ValueError, match=r'^ta_check: mode must be None, "error" or "drop", got \'clip\''):
        ta_check(1, 3, mode="clip")
    with pytest.raises(TypeError, match=r"^ta_check: where must be bool, got int32"):
        ta_check(1, 3, where=jnp.int32(1))
    with pytest.raises(ValueError, match=r"^ta_check: where of shape \(2,\) does not fit an index of shape \(3,\)"):
        ta_check([1, 2, 0], 3, where=jnp.array([True, False]))
    with pytest.raises(TypeError, match=r"^ta_check: where bool\[2\] must be bool\(3,\)"):
        bind(jnp.arange(3), jnp.int32(3), jnp.ones(2, bool), batch_dims=0, mode="drop", op="ta_check")


# --- errors ----------------------------------------------------------------------------------------------------


def in_scan(index, size):
    return lax.scan(lambda s, i: (s, ta_check(i, s)), size, jnp.stack([index]))[1][-1]


def in_while(index, size):
    return lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, ta_check(index, size)), (0, jnp.int32(0)))[1]


def in_fori(index, size):
    return lax.fori_loop(index, index + 1, lambda k, _: ta_check(k, size), jnp.int32(0))


def in_cond(index, size):
    return lax.cond(index != 3, lambda: ta_check(index, size), lambda: jnp.int32(3))


def in_vmap_of_others(index, size):
    """Neither the index nor the size is batched."""
    return jax.vmap(lambda x: x + ta_check(index, size))(jnp.zeros(2, jnp.int32))[1]


def in_vmap_of_where(index, size):
    """A batched mask leaves the index as it is: not batched, so that a stray raises."""
    return jax.vmap(lambda where: ta_check(index, size, where=where))(jnp.array([True, False]))[0]


def in_vmap_of_index(index, size):
    """The index is batched, and strays are asked for."""
    return jax.vmap(lambda i: ta_check(i, size, mode="error"))(jnp.stack([index * 0, index]))[1]


def in_vmap_of_size(index, size):
    return jax.vmap(lambda s: ta_check(index, s, mode="error"))(jnp.stack([size, size]))[1]


def in_jvp(index, size):
    tangents = (np.zeros((), jax.dtypes.float0),) * 2
    return jax.jvp(ta_check, (index, size), tangents)[0]


CONTEXTS = {
    "direct": ta_check,
    "nested_jit": lambda index, size: jax.jit(jax.jit(ta_check))(index, size),
    "scan": in_scan,
    "while_loop": in_while,
    "fori_loop": in_fori,
    "cond": in_cond,
    "checkpoint": jax.checkpoint(ta_check),
    "masked": lambda index, size: ta_check(index, size, where=index != 3),
    "masked_vector": lambda index, size: ta_check(index[None], size, where=index != 3)[0],
    "vmap_of_others": in_vmap_of_others,
    "vmap_of_where": in_vmap_of_where,
    "vmap_of_index": in_vmap_of_index,
    "vmap_of_size": in_vmap_of_size,
    "jvp": in_jvp,
}


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_stray_index_raises_on_the_first_call_and_later_ones(context, jit):
    f = jit(CONTEXTS[context])
    for stray in (7, -1, 5):
        with raises(stray):
            finish(f(jnp.array(stray), jnp.int32(SIZE)))
        for good in (4, 0):
            oracle.assert_same_bits(f(jnp.array(good), jnp.int32(SIZE)), np.int32(good))


@pytest.mark.parametrize("context", ["direct", "scan", "while_loop", "cond"])
def test_a_stray_index_raises_with_jit_disabled(context):
    with jax.disable_jit(), raises(7):
        finish(CONTEXTS[context](jnp.array(7), jnp.int32(SIZE)))


def test_the_error_names_the_op_that_the_user_called():
    with raises(7, op="TensorArray.read"):
        finish(ta_check(7, SIZE, op="TensorArray.read"))


@pytest.mark.parametrize("size", [SIZE, 0, -(2**31)], ids=str)
def test_a_masked_index_is_not_looked_at(size):
    """Also where there are no rows; and the first stray that counts is named, with the size that there is."""
    index = np.array([[-9, 0, 7], [3, 99, -1]])
    f = jax.jit(ta_check)
    for where in (oracle.ta_check(index, size) >= 0, np.zeros((2, 3), bool), np.array([[False], [False]])):
        oracle.assert_same_bits(f(index, np.int32(size), where=where), oracle.ta_check(index, size, where=where))
    with raises(99, size):
        finish(f(index, np.int32(size), where=index > 7))


@pytest.mark.parametrize("size", [-(2**31), 0, 6, 2**31 - 1])
def test_the_error_names_the_live_size(size):
    with raises(-3, size):
        finish(jax.jit(ta_check)(-3, np.int32(size)))


def test_the_first_stray_in_order_is_named_with_the_size_of_its_example():
    with raises(-4):
        finish(ta_check(jnp.array([[3, 4], [-4, 77]]), SIZE))
    with raises(6, size=3):
        f = jax.vmap(functools.partial(ta_check, mode="error"))
        finish(f(jnp.array([[1, 6], [2, 6], [7, 7]]), jnp.array([7, 3, 5], jnp.int32)))


@pytest.mark.parametrize(
    "index",
    [
        np.int8(-128),
        np.int16(-1),
        np.int32(2**31 - 1),
        np.int64(-(2**63)),
        np.int64(2**32 + 1),
        np.uint8(255),
        np.uint16(10),
        np.uint32(2**32 - 1),
        np.uint64(2**63 + 5),
        np.uint64(2**64 - 1),
    ],
    ids=repr,
)
def test_an_index_of_any_dtype_is_named_with_its_true_value(index):
    for given in (index, jnp.asarray(index)):
        with raises(int(index)):
            finish(ta_check(given, SIZE))


def test_an_index_known_while_tracing_is_an_error_at_run_time():
    f = jax.jit(lambda size: ta_check([0, 7], size))
    with raises(7):
        finish(f(SIZE))
    np.testing.assert_array_equal(f(np.int32(8)), [0, 7])


# --- dropped ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", ["direct", "scan", "fori_loop", "cond", "vmap"])
def test_mode_drop_never_raises(context):
    index = np.array([7, -1, 3, 5, 4])
    f = {
        "direct": drop,
        "scan": lambda i, s: lax.scan(lambda _, i: (0, drop(i, s)), 0, i)[1],
        "fori_loop": lambda i, s: lax.fori_loop(0, 5, lambda k, r: r.at[k].set(drop(i[k], s)), jnp.zeros(5, jnp.int32)),
        "cond": lambda i, s: lax.cond(s > 0, drop, lambda i, s: i.astype(jnp.int32), i, s),
        "vmap": jax.vmap(drop, (0, None)),
    }[context]
    oracle.assert_same_bits(jax.jit(f)(index, SIZE), oracle.ta_check(index, SIZE))


AXES = [a for a in itertools.product([None, 0, 1, 2], [None, 0]) if a != (None, None)]


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_what_vmap_batches_is_dropped_by_default(axes):
    index, size = rng.integers(-1, 8, (3, 2, 4)), np.array([5, 0, 7], np.int32)
    index = index[0] if axes[0] is None else np.moveaxis(index, 0, axes[0])
    args = index, size[0] if axes[1] is None else size
    expected = [
        oracle.ta_check(*(x if a is None else np.take(x, k, a) for x, a in zip(args, axes, strict=True)))
        for k in range(3)
    ]
    f = jax.vmap(ta_check, axes)
    oracle.assert_same_bits(f(*map(jnp.asarray, args)), np.stack(expected))
    oracle.assert_same_bits(jax.jit(f)(*args), np.stack(expected))
    mapped = jax.vmap(functools.partial(ta_check, mode="error"), axes)
    with pytest.raises(RUNTIME_ERRORS, match=r"ta_check: index -?\d+ is out of range for a TensorArray of size \d"):
        finish(jax.jit(mapped)(*args))


def test_a_batch_of_batches_is_one_call():
    index, size = rng.integers(-1, 8, (2, 4)), np.array([5, 0, 7], np.int32)
    f = jax.vmap(jax.vmap(ta_check, (None, 0)), (0, None))
    expected = np.array([[oracle.ta_check(i, s) for s in size] for i in index])
    oracle.assert_same_bits(f(jnp.asarray(index), size), expected)
    assert str(jax.make_jaxpr(f)(index, size)).count("= ta_check[") == 1


def test_a_dropped_index_reads_zeros():
    f = jax.jit(lambda b, i, s: ta_read(b, drop(i, s), mode="drop"))
    np.testing.assert_array_equal(f(BUFFER, np.array([4, 5, -1]), SIZE), [BUFFER[4], [0, 0], [0, 0]])


# --- not executed ----------------------------------------------------------------------------------------------


def test_an_untaken_branch_never_raises():
    @jax.jit
    def f(index, size, which):
        def check():
            return ta_check(index, size)

        def nothing():
            return jnp.int32(99)

        return (
            lax.cond(which == 1, check, nothing),
            lax.switch(which, [nothing, lambda: jax.jit(check)(), nothing]),
            lax.scan(lambda _, k: (0, lax.cond(which == k, check, nothing)), 0, jnp.array([1]))[1][0],
        )

    for _ in range(2):
        np.testing.assert_array_equal(f(7, SIZE, 2), [99, 99, 99])
        with raises(7):
            finish(f(7, SIZE, 1))
        np.testing.assert_array_equal(f(4, SIZE, 1), [4, 4, 4])


@pytest.mark.parametrize("policy", [None, checkpoint_policies.save_reads], ids=["all", "save_reads"])
def test_an_untaken_branch_never_raises_under_grad(policy):
    @jax.jit
    def f(x, index, size, taken):
        @functools.partial(jax.checkpoint, policy=policy)
        def loss(x):
            seen = lax.cond(taken, lambda: jnp.sin(ta_read(BUFFER * x, ta_check(index, size))).sum(), lambda: x)
            return seen * x

        return jax.value_and_grad(loss)(x)

    np.testing.assert_allclose(f(1.5, 7, SIZE, False), [1.5**2, 3.0])
    with raises(7):
        finish(f(1.5, 7, SIZE, True))


def fori(trips, body, start):
    return lax.fori_loop(0, trips, lambda _, carry: body(carry), start)


LOOPS = {
    "fori": fori,
    "while_loop": lambda trips, body, start: lax.while_loop(
        lambda c: c[0] > 0, lambda c: (c[0] - 1, body(c[1])), (trips, start)
    )[1],
    "nested_jit": lambda trips, body, start: fori(trips, jax.jit(lambda c: jax.jit(body)(c)), start),
    "cond": lambda trips, body, start: fori(jnp.abs(trips), lambda c: lax.cond(trips > 0, body, lambda c: c, c), start),
    "cond_of_step": lambda trips, body, start: lax.fori_loop(
        0, 3, lambda k, c: lax.cond(k < trips, body, lambda c: c, c), start
    ),
    "inner_loop": lambda trips, body, start: fori(1, lambda c: fori(trips, body, c), start),
    "loop_of_loop": lambda trips, body, start: fori(trips, lambda c: fori(1, body, c), start),
    "checkpoint": lambda trips, body, start: fori(trips, jax.checkpoint(body), start),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("place", ["carried", "closed over"])
def test_a_loop_of_no_steps_never_raises_although_one_of_one_step_does(loop, place):
    """Nothing in the step depends on its number, so XLA could take the call out of the loop."""

    @jax.jit
    def f(index, size, trips):
        def body(carry):
            carried, total = carry
            return carried, total + ta_check(carried if place == "carried" else index, size)

        return LOOPS[loop](trips, body, (index, jnp.int32(0)))[1]

    assert f(7, SIZE, 0) == 0
    with raises(7):
        finish(f(7, SIZE, 1))
    with raises(-1):
        finish(f(-1, SIZE, 2))
    assert f(4, SIZE, 2) == 8
    assert f(7, SIZE, 0) == 0


def test_derivatives_and_batches_of_a_loop_of_no_steps_never_raise():
    def f(x, index, size, trips):
        def body(_, total):
            return total + jnp.sin(ta_read(BUFFER * x, ta_check(index, size))).sum()

        return lax.fori_loop(0, trips, body, x)

    tangent = jax.jit(lambda x, *rest: jax.jvp(lambda x: f(x, *rest), (x,), (1.0,)))
    np.testing.assert_array_equal(tangent(1.5, 7, SIZE, 0), [1.5, 1.0])
    with raises(7):
        finish(tangent(1.5, 7, SIZE, 1))

    batched = jax.jit(jax.vmap(f, (0, None, None, None)))
    np.testing.assert_array_equal(batched(np.array([1.5, 2.5]), 7, SIZE, 0), [1.5, 2.5])
    with raises(7):
        finish(batched(np.array([1.5, 2.5]), 7, SIZE, 1))


def test_the_gradient_of_a_scan_of_no_steps_never_raises():
    def f(x, index, size, steps):
        def body(total, _):
            return total + jnp.sin(ta_read(BUFFER * x, ta_check(index, size))).sum(), None

        return lax.scan(body, x, None, length=steps)[0]

    gradient = jax.jit(jax.grad(f), static_argnums=3)
    assert gradient(1.5, 7, SIZE, 0) == 1
    with raises(7):
        finish(gradient(1.5, 7, SIZE, 1))


# --- derivatives of what is done with the index ----------------------------------------------------------------

INDEX = np.array([3, 0, 4, 3])


def loss_of(read, buffer, index, size):
    """In each step, a row is read and another written; the size grows."""

    def body(carry, i):
        b, s, total = carry
        seen = read(b, i, s)
        return (ta_write(b, s, jnp.sin(seen) * 2), s + 1, total + (seen**2).sum()), seen

    (b, _, total), rows = lax.scan(body, (buffer, size, 0.0), index)
    return total + jnp.cos(b).sum() + (rows**3).sum()


def checked(b, i, s):
    return ta_read(b, ta_check(i, s))


READS = {
    "plain": checked,
    "masked": lambda b, i, s: ta_read(b, ta_check(i, s, where=s > 0)),
    "drop": lambda b, i, s: ta_read(b, drop(i, s), mode="drop"),
    "nested_jit": jax.jit(checked),
    "cond": lambda b, i, s: lax.cond(s > 0, checked, lambda b, i, s: b[0], b, i, s),
    "checkpoint": jax.checkpoint(checked),
    "save_reads": jax.checkpoint(checked, policy=checkpoint_policies.save_reads),
}


def by_unrolling(buffer):
    total, size, rows = 0.0, int(SIZE), []
    for i in INDEX:
        seen = unrolled.ta_read(buffer, i)
        buffer = unrolled.ta_write(buffer, size, jnp.sin(seen) * 2)
        total, size = total + (seen**2).sum(), size + 1
        rows.append(seen)
    return total + jnp.cos(buffer).sum() + (jnp.stack(rows) ** 3).sum()


@functools.cache
def expected_derivatives():
    return tuple(in_numpy(f(by_unrolling))(BUFFER) for f in (jax.grad, jax.hessian))


@pytest.mark.parametrize("read", READS)
def test_derivatives_with_a_checked_index_are_those_of_plain_jax(read):
    def f(buffer):
        return loss_of(READS[read], buffer, jnp.asarray(INDEX), jnp.int32(SIZE))

    gradient, hessian = expected_derivatives()
    for first in (jax.grad, jax.jacfwd):
        np.testing.assert_allclose(jit(first(f))(BUFFER), gradient, rtol=1e-10, atol=1e-12)
    for second in (jax.jacfwd, jax.jacrev):
        np.testing.assert_allclose(jit(second(jax.grad(f)))(BUFFER), hessian, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("read", READS)
def test_batches_of_gradients_and_gradients_of_batches_are_those_of_plain_jax(read):
    buffers = np.stack([BUFFER, 2 * BUFFER, -BUFFER])
    expected = in_numpy(jax.vmap(jax.grad(by_unrolling)))(buffers)
    for axes in [(0, None, None), (0, 0, None), (0, None, 0)]:
        index = np.stack([INDEX] * 3) if axes[1] == 0 else INDEX
        size = np.stack([SIZE] * 3) if axes[2] == 0 else SIZE
        f = functools.partial(loss_of, READS[read])
        of_gradients = jit(jax.vmap(jax.grad(f), axes))(buffers, index, size)
        np.testing.assert_allclose(of_gradients, expected, rtol=1e-10, atol=1e-12)
        of_batch = jit(jax.grad(lambda *args, axes=axes, f=f: jax.vmap(f, axes)(*args).sum()))
        np.testing.assert_allclose(of_batch(buffers, index, size), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("read", ["plain", "masked", "nested_jit", "cond", "checkpoint", "save_reads"])
def test_a_stray_index_raises_in_derivatives(read):
    f = functools.partial(loss_of, READS[read])
    second = jax.grad(lambda b, *rest: (jax.grad(f)(b, *rest) ** 2).sum())
    for derivative in (jax.jit(jax.grad(f)), jax.jit(second)):
        with raises(7, size=6):
            finish(derivative(BUFFER, np.array([3, 7, 4, 3]), SIZE))
        assert np.isfinite(derivative(BUFFER, INDEX, SIZE)).all()


def test_an_index_has_no_derivative():
    zero = np.zeros((), jax.dtypes.float0)
    value, tangent = jax.jit(lambda i, s: jax.jvp(ta_check, (i, s), (zero, zero)))(3, SIZE)
    assert value == 3
    assert tangent.dtype == jax.dtypes.float0
    gradients = jax.grad(lambda x, i: x * ta_check(i, SIZE), argnums=(0, 1), allow_int=True)(2.0, 3)
    assert gradients[0] == 3
    assert gradients[1].dtype == jax.dtypes.float0


# --- in place --------------------------------------------------------------------------------------------------


def rows_of(length):
    return (jnp.ones((length, 64), jnp.float32),)


def growing(x):
    def body(carry, k):
        b, size = carry
        row = ta_read(b, ta_check(k // 2, size))
        return (ta_write(b, size, jnp.sin(row)), size + 1), None

    (b, _), _ = lax.scan(body, (x, jnp.int32(1)), jnp.arange(len(x) - 1))
    return jnp.sum(b**2)


def reading_the_old_buffer_after_a_write(x):
    """The read that follows the write in the text is moved in front of it, and its check too."""

    def body(carry, kx):
        (b, size, total), (k, row) = carry, kx
        new = ta_write(b, k, jnp.sin(row))
        return (new, size, total + jnp.sum(ta_read(b, ta_check(k // 3, size)) ** 2)), None

    return lax.scan(body, (x, jnp.int32(len(x)), jnp.float32(0)), (jnp.arange(len(x)), x))[0][2]


def shared_between_loops(x):
    def body(total, k):
        return total + jnp.sin(ta_read(x, ta_check(k, jnp.int32(len(x))))), None

    return jnp.sum(lax.scan(body, x[0], jnp.arange(len(x)))[0])


PROGRAMS = {f.__name__: f for f in (growing, reading_the_old_buffer_after_a_write, shared_between_loops)}


@pytest.mark.parametrize("transform", [lambda f: f, jax.grad], ids=["forward", "gradient"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_loop_that_checks_is_in_place(name, transform):
    assert_in_place(transform(PROGRAMS[name]), rows_of)


def test_an_index_is_no_buffer_that_a_loop_should_hold():
    """The pass keeps a constant buffer from being made anew in every step; a constant index may be."""

    def f(trips, size):
        index = jnp.full(3, 2)
        return lax.fori_loop(0, trips, lambda _, total: total + ta_check(index, size), jnp.zeros(3, jnp.int32))

    assert "jax_tensorarray_fence" not in jax.jit(f).lower(3, SIZE).as_text()
    np.testing.assert_array_equal(jax.jit(f)(3, SIZE), [6, 6, 6])
