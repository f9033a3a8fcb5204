"""Indices out of range: when they are errors, what the errors say, and what still works afterwards."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax
from waiting import finish

import jax_tensorarray as ta

ROW_OPS = ["ta_read", "ta_write", "ta_add", "ta_swap"]
SIZE = 10
BUFFER = np.arange(2.0 * SIZE).reshape(SIZE, 2)
VALUE = np.array([7.0, 8.0])

#: JAX raises the former from the first call of a compiled function, and the latter from its fast path.
RUNTIME_ERRORS = (jax.errors.JaxRuntimeError, ValueError)


def call(lib, op, buffer, index, value=VALUE, **options):
    """The results of one op as a tuple."""
    results = (
        lib.ta_read(buffer, index, **options) if op == "ta_read" else getattr(lib, op)(buffer, index, value, **options)
    )
    return results if isinstance(results, tuple) else (results,)


def message(op, index, size=SIZE):
    return re.escape(f"{op}: index {index} is out of range for a TensorArray of size {size}") + r"(?!\d)"


def raises(op, index, size=SIZE):
    return pytest.raises(RUNTIME_ERRORS, match=message(op, index, size))


def assert_all_same(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        oracle.assert_same_bits(a, e)


# --- everywhere that an op runs --------------------------------------------------------------------------------


def in_scan(op, buffer, index):
    def step(b, i):
        results = call(ta, op, b, i)
        return (b if op == "ta_read" else results[0]), results

    return tuple(x[-1] for x in lax.scan(step, buffer, jnp.stack([index]))[1])


def in_while(op, buffer, index):
    start = (0, tuple(jnp.zeros(r.shape) for r in jax.eval_shape(lambda: call(ta, op, buffer, index))))
    return lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, call(ta, op, buffer, index + c[0])), start)[1]


def in_fori(op, buffer, index):
    start = tuple(jnp.zeros(r.shape) for r in jax.eval_shape(lambda: call(ta, op, buffer, index)))
    return lax.fori_loop(index, index + 1, lambda k, _: call(ta, op, buffer, k), start)


def in_cond(op, buffer, index):
    other = tuple(jnp.zeros(r.shape) for r in jax.eval_shape(lambda: call(ta, op, buffer, index)))
    return lax.cond(index != 5, lambda: call(ta, op, buffer, index), lambda: other)


def in_vmap(op, buffer, index):
    """The index is not batched."""
    return tuple(x[1] for x in jax.vmap(lambda b: call(ta, op, b, index))(jnp.stack([buffer, buffer])))


def in_vmap_of_where(op, buffer, index):
    """Only the mask is batched."""
    return tuple(x[1] for x in jax.vmap(lambda w: call(ta, op, buffer, index, where=w))(jnp.array([False, True])))


def in_vmap_of_index(op, buffer, index):
    """The index is batched, and strays are asked for."""
    return tuple(x[1] for x in jax.vmap(lambda i: call(ta, op, buffer, i, mode="error"))(jnp.stack([index * 0, index])))


def in_jvp(op, buffer, index):
    return jax.jvp(lambda b: call(ta, op, b, index), (buffer,), (buffer,))[0]


def in_vjp(op, buffer, index):
    results, pullback = jax.vjp(lambda b: call(ta, op, b, index), buffer)
    return tuple(r + 0 * pullback(results)[0].sum() for r in results)


CONTEXTS = {
    "direct": lambda op, buffer, index: call(ta, op, buffer, index),
    "nested_jit": lambda op, buffer, index: jax.jit(lambda b, i: call(ta, op, b, i))(buffer, index),
    "scan": in_scan,
    "while_loop": in_while,
    "fori_loop": in_fori,
    "cond": in_cond,
    "checkpoint": lambda op, buffer, index: jax.checkpoint(lambda b, i: call(ta, op, b, i))(buffer, index),
    "vmap": in_vmap,
    "vmap_of_where": in_vmap_of_where,
    "vmap_of_index": in_vmap_of_index,
    "jvp": in_jvp,
    "vjp": in_vjp,
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("op", ROW_OPS)
def test_a_stray_index_raises_on_the_first_call_and_later_ones_and_does_no_harm(op, context):
    f = jax.jit(functools.partial(CONTEXTS[context], op))
    buffer = jnp.asarray(BUFFER)
    for stray in (12, -1, 10):
        with raises(op, stray):
            finish(f(buffer, jnp.array(stray)))
        for good in (9, 0):
            assert_all_same(f(buffer, jnp.array(good)), call(oracle, op, BUFFER, good))
    oracle.assert_same_bits(buffer, BUFFER)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("op", ROW_OPS)
def test_a_stray_index_raises_without_an_outer_jit(op, context):
    f = functools.partial(CONTEXTS[context], op)
    for _ in range(2):
        with raises(op, 12):
            finish(f(jnp.asarray(BUFFER), jnp.array(12)))
        assert_all_same(f(jnp.asarray(BUFFER), jnp.array(3)), call(oracle, op, BUFFER, 3))


@pytest.mark.parametrize("context", ["direct", "scan", "while_loop", "cond"])
@pytest.mark.parametrize("op", ROW_OPS)
def test_a_stray_index_raises_with_jit_disabled(op, context):
    with jax.disable_jit(), raises(op, 12):
        finish(CONTEXTS[context](op, jnp.asarray(BUFFER), jnp.array(12)))


@pytest.mark.parametrize("op", ROW_OPS)
def test_an_error_that_comes_after_successful_calls_is_raised_too(op):
    f = jax.jit(functools.partial(call, ta, op))
    for _ in range(3):
        assert_all_same(f(jnp.asarray(BUFFER), jnp.array(3)), call(oracle, op, BUFFER, 3))
    for _ in range(3):
        with raises(op, 12):
            finish(f(jnp.asarray(BUFFER), jnp.array(12)))


@pytest.mark.parametrize("op", ROW_OPS)
def test_the_first_stray_in_order_is_named(op):
    index = jnp.array([[3, 9], [-4, 77]])
    with raises(op, -4):
        finish(call(ta, op, jnp.asarray(BUFFER), index))
    with raises(op, 77):
        finish(call(ta, op, jnp.asarray(BUFFER), index, where=jnp.array([[True, True], [False, True]])))


@pytest.mark.parametrize("op", ROW_OPS)
def test_a_buffer_without_rows_has_no_index(op):
    with raises(op, 0, size=0):
        finish(call(ta, op, jnp.zeros((0, 2)), jnp.array(0)))


@pytest.mark.parametrize("op", ROW_OPS)
def test_rows_without_elements_are_counted_too(op):
    f = jax.jit(lambda b, i: call(ta, op, b, i, jnp.zeros(0)))
    with raises(op, 12):
        finish(f(jnp.zeros((10, 0)), 12))
    assert f(jnp.zeros((10, 0)), 9)[0].size == 0


@pytest.mark.parametrize(
    "index",
    [
        np.int8(-128),
        np.int16(-1),
        np.int32(2**31 - 1),
        np.int64(-(2**63)),
        np.int64(2**62),
        np.uint8(255),
        np.uint16(10),
        np.uint32(2**32 - 1),
        np.uint64(2**63 + 5),
        np.uint64(2**64 - 1),
    ],
    ids=repr,
)
@pytest.mark.parametrize("op", ROW_OPS)
def test_an_index_of_any_dtype_is_named_with_its_true_value(op, index):
    with raises(op, int(index)):
        finish(call(ta, op, jnp.asarray(BUFFER), jnp.asarray(index)))


@pytest.mark.parametrize("index", [12, 2**40, 2**63 + 5, np.uint64(2**63 + 5), np.int64(-(2**40))], ids=repr)
def test_a_constant_that_a_mask_admits_at_run_time_is_named_with_its_true_value(index):
    with raises("ta_read", int(index)):
        finish(jax.jit(lambda w: ta.ta_read(BUFFER, index, where=w))(True))


@pytest.mark.parametrize(
    "derivative", [jax.grad, lambda f: jax.grad(jax.grad(lambda x: f(x).sum()))], ids=["grad", "second"]
)
def test_a_stray_index_raises_in_derivatives(derivative):
    def f(x, index):
        buffer, old = ta.ta_swap(jnp.asarray(BUFFER) * x, index, VALUE * x)
        return (jnp.sin(buffer).sum() + (old**2).sum()) * x

    g = jax.jit(lambda x, i: derivative(lambda x: f(x, i))(x))
    for _ in range(2):
        with raises("ta_swap", 12):
            finish(g(1.5, jnp.array(12)))
        assert np.isfinite(g(1.5, jnp.array(3)))


# --- known while tracing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "index", [12, -1, 10, 2**70, np.int64(12), np.uint64(2**63 + 5), [3, 12], np.array([[3], [12]])], ids=repr
)
@pytest.mark.parametrize("op", ROW_OPS)
def test_a_python_or_numpy_index_is_checked_while_tracing(op, index):
    stray = max(np.asarray(index, object).flat, key=abs)
    text = "^" + message(op, stray)
    buffer = jnp.asarray(BUFFER)
    with pytest.raises(IndexError, match=text):
        call(ta, op, buffer, index)
    with pytest.raises(IndexError, match=text):
        jax.make_jaxpr(lambda b: call(ta, op, b, index))(buffer)
    with pytest.raises(IndexError, match=text):
        jax.eval_shape(jax.vmap(lambda b: call(ta, op, b, index, mode="error")), jnp.stack([buffer, buffer]))


@pytest.mark.parametrize("op", ROW_OPS)
def test_a_python_index_that_is_dropped_or_masked_is_no_error(op):
    nothing = call(oracle, op, BUFFER, -1)
    for index in (12, -1, [12, -1], np.array(12)):
        if np.ndim(index):
            nothing = call(oracle, op, BUFFER, np.array(index))
        assert_all_same(call(ta, op, jnp.asarray(BUFFER), index, mode="drop"), nothing)
        assert_all_same(call(ta, op, jnp.asarray(BUFFER), index, where=jnp.array(False)), nothing)
        assert_all_same(jax.jit(lambda b, w, i=index: call(ta, op, b, i, where=w))(BUFFER, False), nothing)
        nothing = call(oracle, op, BUFFER, -1)


@pytest.mark.parametrize("op", ROW_OPS)
def test_a_python_index_that_a_mask_admits_is_an_error_at_run_time(op):
    f = jax.jit(lambda b, w: call(ta, op, b, [3, 12], where=w))
    with raises(op, 12):
        finish(f(BUFFER, np.array([True, True])))
    where = np.array([True, False])
    assert_all_same(f(BUFFER, where), call(oracle, op, BUFFER, np.array([3, 12]), where=where))


# --- dropped ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", ["scan", "vmap", "cond"])
@pytest.mark.parametrize("op", ROW_OPS)
def test_mode_drop_never_raises(op, context):
    index = np.array([12, -1, 3])
    f = functools.partial(call, ta, op, mode="drop")
    buffer = jnp.asarray(BUFFER)

    @jax.jit
    def run(buffer, index):
        if context == "vmap":
            return jax.vmap(f, (None, 0))(buffer, index)
        if context == "cond":
            other = tuple(jnp.zeros(r.shape) for r in jax.eval_shape(f, buffer, index[0]))
            branches = [lax.cond(i != 5, lambda i=i: f(buffer, i), lambda: other) for i in index]
            return tuple(map(jnp.stack, zip(*branches, strict=True)))
        return lax.scan(lambda _, i: (0, f(buffer, i)), 0, index)[1]

    expected = [call(oracle, op, BUFFER, i) for i in index]
    assert_all_same(run(buffer, index), tuple(map(np.stack, zip(*expected, strict=True))))


@pytest.mark.parametrize("op", ROW_OPS)
def test_a_batched_index_is_dropped_by_default(op):
    index = np.array([[12, 3], [-1, 9]])
    expected = [call(oracle, op, BUFFER, i, np.stack([VALUE, VALUE])) for i in index]
    expected = tuple(map(np.stack, zip(*expected, strict=True)))
    f = functools.partial(call, ta, op)
    assert_all_same(jax.vmap(f, (None, 0))(jnp.asarray(BUFFER), index), expected)
    assert_all_same(jax.jit(jax.vmap(f))(np.stack([BUFFER, BUFFER]), index), expected)
    outer = jax.vmap(lambda i: jax.vmap(lambda b: f(b, i))(jnp.asarray(BUFFER)[None]))  # only the outer vmap batches it
    assert_all_same(outer(index), tuple(e[:, None] for e in expected))


@pytest.mark.parametrize("op", ROW_OPS)
def test_an_unbatched_index_still_raises_beside_a_batched_value(op):
    f = jax.jit(jax.vmap(functools.partial(call, ta, op), (0, None, 0)))
    buffers, values = np.stack([BUFFER, BUFFER]), np.stack([VALUE, VALUE])
    for _ in range(2):
        with raises(op, 12):
            finish(f(buffers, 12, values))
        assert_all_same([x[0] for x in f(buffers, 2, values)], call(oracle, op, BUFFER, 2))


@pytest.mark.parametrize("op", ROW_OPS)
def test_mode_error_raises_for_a_batched_index_under_two_vmaps(op):
    f = functools.partial(call, ta, op, mode="error")
    nested = jax.jit(jax.vmap(jax.vmap(f, (None, 0)), (0, None)))
    with raises(op, -3):
        finish(nested(np.stack([BUFFER, BUFFER]), np.array([1, -3])))
    assert nested(np.stack([BUFFER, BUFFER]), np.array([1, 3]))[0].shape[:2] == (2, 2)


@pytest.mark.parametrize("op", ROW_OPS)
def test_masked_rows_never_raise(op):
    index, where = np.array([12, 3, -1, -(2**62)]), np.array([False, True, False, False])
    value = np.stack([VALUE] * 4)
    expected = call(oracle, op, BUFFER, index, value, where=where)
    f = functools.partial(call, ta, op)
    assert_all_same(f(jnp.asarray(BUFFER), jnp.asarray(index), value, where=where), expected)
    jitted = jax.jit(lambda b, i, v, w: f(b, i, v, where=w))
    assert_all_same(jitted(BUFFER, index, value, where), expected)
    with raises(op, 12):
        finish(jitted(BUFFER, index, value, ~where))
    mapped = jax.vmap(lambda b: f(b, jnp.asarray(index), value, where=jnp.asarray(where)))(jnp.asarray(BUFFER)[None])
    assert_all_same([x[0] for x in mapped], expected)


# --- not executed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ROW_OPS)
def test_an_untaken_branch_never_raises(op):
    zeros = tuple(np.zeros_like(r) for r in call(oracle, op, BUFFER, 0))

    @jax.jit
    def f(buffer, index, which):
        def branch():
            return call(ta, op, buffer, index)

        def nothing():
            return tuple(map(jnp.asarray, zeros))

        return (
            lax.cond(which == 1, branch, nothing),
            lax.switch(which, [nothing, lambda: jax.jit(branch)(), nothing]),
            lax.scan(lambda _, k: (0, lax.cond(which == k, branch, nothing)), 0, jnp.array([1]))[1],
        )

    for _ in range(2):
        for out in f(BUFFER, 12, 2)[:2]:
            assert_all_same(out, zeros)
        with raises(op, 12):
            finish(f(BUFFER, 12, 1))
        for out in f(BUFFER, 4, 1)[:2]:
            assert_all_same(out, call(oracle, op, BUFFER, 4))


@pytest.mark.parametrize("op", ROW_OPS)
def test_an_untaken_branch_never_raises_under_grad(op):
    @jax.jit
    def f(x, index, taken):
        def loss(x):
            outs = lax.cond(taken, lambda: jnp.sin(call(ta, op, BUFFER * x, index, VALUE * x)[0]).sum(), lambda: x)
            return outs * x

        return jax.value_and_grad(loss)(x)

    value, gradient = f(1.5, 12, False)
    np.testing.assert_allclose([value, gradient], [1.5**2, 3.0])
    with raises(op, 12):
        finish(f(1.5, 12, True))


def loops():
    """name -> loop(trips, body, start), for `body(carry) -> carry` that knows nothing of the step."""

    def fori(trips, body, start):
        return lax.fori_loop(0, trips, lambda _, carry: body(carry), start)

    def while_loop(trips, body, start):
        return lax.while_loop(lambda c: c[0] > 0, lambda c: (c[0] - 1, body(c[1])), (trips, start))[1]

    def nested_jit(trips, body, start):
        return fori(trips, jax.jit(lambda carry: jax.jit(body)(carry)), start)

    def cond(trips, body, start):
        # Whether the branch is taken is known before the loop.
        return lax.fori_loop(0, jnp.abs(trips), lambda _, carry: lax.cond(trips > 0, body, lambda c: c, carry), start)

    def cond_of_step(trips, body, start):
        return lax.fori_loop(0, 3, lambda k, carry: lax.cond(k < trips, body, lambda c: c, carry), start)

    def inner_loop(trips, body, start):
        return fori(1, lambda carry: fori(trips, body, carry), start)

    def loop_of_loop(trips, body, start):
        return fori(trips, lambda carry: fori(1, body, carry), start)

    def outer_jit(trips, body, start):
        return jax.jit(lambda trips, start: fori(trips, body, start))(trips, start)

    return {
        f.__name__: f for f in (fori, while_loop, nested_jit, cond, cond_of_step, inner_loop, loop_of_loop, outer_jit)
    }


@pytest.mark.parametrize("loop", loops())
@pytest.mark.parametrize("op", ROW_OPS)
@pytest.mark.parametrize("place", ["carried", "closed over"])
def test_a_loop_of_no_steps_never_raises_although_one_of_one_step_does(op, loop, place):
    """Nothing in the step depends on its number, so XLA could take the call out of the loop."""

    @jax.jit
    def f(buffer, index, trips):
        def body(carry):
            carried, total = carry
            results = call(ta, op, carried if place == "carried" else buffer, index)
            if place == "carried" and op != "ta_read":
                carried = results[0]
            return carried, total + results[-1].sum()

        return loops()[loop](trips, body, (buffer, 0.0))

    def by_oracle(index, trips):
        carried, total = BUFFER, 0.0
        for _ in range(trips):
            results = call(oracle, op, carried if place == "carried" else BUFFER, index)
            if place == "carried" and op != "ta_read":
                carried = results[0]
            total += results[-1].sum()
        return carried, np.asarray(total)

    assert_all_same(f(BUFFER, 12, 0), (BUFFER, np.asarray(0.0)))
    with raises(op, 12):
        finish(f(BUFFER, 12, 1))
    with raises(op, -1):
        finish(f(BUFFER, -1, 2))
    assert_all_same(f(BUFFER, 4, 2), by_oracle(4, 2))
    assert_all_same(f(BUFFER, 12, 0), (BUFFER, np.asarray(0.0)))


#: Ways through which a step of a loop can send what it carries, and get it back as it was.
DETOURS = {
    "jit": lambda x, t: jax.jit(lambda x, t: (x, t + 1.0))(x, t),
    "checkpoint": lambda x, t: jax.checkpoint(lambda x, t: (x, t + 1.0))(x, t),
    "cond": lambda x, t: lax.cond(t > 0, lambda x, t: (x, t + 1.0), lambda x, t: (x, t + 2.0), x, t),
    "scan": lambda x, t: lax.scan(lambda c, _: ((c[0], c[1] + 1.0), None), (x, t), None, length=3)[0],
    "barrier": lambda x, t: (lax.optimization_barrier(x), t),
    "no-op": lambda x, t: (x * 1 + 0, t),
    "where": lambda x, t: (jnp.where(t > 0, x, x), t),
    "transposed twice": lambda x, t: (x.T.T.reshape(1, *x.shape)[0], t),
}


@pytest.mark.parametrize("detour", DETOURS)
@pytest.mark.parametrize("carried", ["buffer", "index"])
def test_a_loop_of_no_steps_never_raises_whatever_else_its_step_does_with_what_it_carries(carried, detour):
    @jax.jit
    def f(buffer, index, trips):
        def body(_, carry):
            buffer, index, total = carry
            if carried == "buffer":
                buffer, total = DETOURS[detour](buffer, total)
            else:
                index, total = DETOURS[detour](index, total)
            return buffer, index, total + ta.ta_read(buffer, index).sum()

        return lax.fori_loop(0, trips, body, (buffer, index, 0.0))[-1]

    assert f(BUFFER, 12, 0) == 0
    with raises("ta_read", 12):
        finish(f(BUFFER, 12, 1))


@pytest.mark.parametrize("op", ROW_OPS)
def test_a_branch_inside_a_loop_that_is_never_taken_never_raises(op):
    @jax.jit
    def f(buffer, index, taken):
        def body(_, total):
            return lax.cond(taken, lambda: total + call(ta, op, buffer, index)[-1].sum(), lambda: total + 1.0)

        return lax.fori_loop(0, 3, body, 0.0)

    assert f(BUFFER, 12, False) == 3
    with raises(op, 12):
        finish(f(BUFFER, 12, True))
    np.testing.assert_allclose(f(BUFFER, 4, True), 3 * call(oracle, op, BUFFER, 4)[-1].sum(), rtol=1e-15)


@pytest.mark.parametrize("op", ROW_OPS)
def test_derivatives_and_batches_of_a_loop_of_no_steps_never_raise(op):
    def f(x, index, trips):
        def body(_, total):
            return total + jnp.sin(call(ta, op, BUFFER * x, index, VALUE * x)[-1]).sum()

        return lax.fori_loop(0, trips, body, x)

    tangent = jax.jit(lambda x, i, n: jax.jvp(lambda x: f(x, i, n), (x,), (1.0,)))
    np.testing.assert_array_equal(tangent(1.5, 12, 0), [1.5, 1.0])
    with raises(op, 12):
        finish(tangent(1.5, 12, 1))

    batched = jax.jit(jax.vmap(f, (0, None, None)))
    np.testing.assert_array_equal(batched(np.array([1.5, 2.5]), 12, 0), [1.5, 2.5])
    with raises(op, 12):
        finish(batched(np.array([1.5, 2.5]), 12, 1))

    each_its_own = jax.jit(jax.vmap(f, (0, None, 0)))
    np.testing.assert_array_equal(each_its_own(np.array([1.5, 2.5]), 12, np.array([0, 0])), [1.5, 2.5])
