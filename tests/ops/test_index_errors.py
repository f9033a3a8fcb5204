"""Indices out of range: when they are errors, what the errors say, and what still works afterwards."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax
from jax.experimental import checkify
from ops import OPS, OURS, ROW_OPS, RUNTIME_ERRORS, UPDATES, assert_same, every, message
from waiting import finish

import jax_tensorarray as ta
from jax_tensorarray import _kernels

f64 = jnp.float64
SIZE = 10
BUFFER = np.arange(2.0 * SIZE).reshape(SIZE, 2)
VALUE = np.array([7.0, 8.0])
CHECK, READ, SWAP = OPS["ta_check"], OPS["ta_read"], OPS["ta_swap"]
CHECKING_OPS = [*ROW_OPS, CHECK]
#: One that reads, one that updates, and one without a buffer, for what the op makes no difference to.
THREE_OPS = [READ, SWAP, CHECK]


def call(op, lib, buffer, index, value=VALUE, **options):
    """The results of one op, of the size of a buffer if it takes no buffer."""
    given = {"buffer": buffer, "size": np.int32(len(buffer)), "index": index, "value": value}
    return op(lib, *(given[name] for name in op.operands if name != "where"), **{"mode": None, **options})


def zeros_like_results(op, buffer, index):
    return tuple(jnp.zeros(r.shape, r.dtype) for r in jax.eval_shape(lambda: call(op, OURS, buffer, index)))


def raises(op, index, size=SIZE):
    return pytest.raises(RUNTIME_ERRORS, match=message(op, index, size))


# --- everywhere that an op runs --------------------------------------------------------------------------------


def in_scan(op, buffer, index):
    def step(b, i):
        results = call(op, OURS, b, i)
        return (results[0] if op.results[0] == "buffer" else b), results

    return tuple(x[-1] for x in lax.scan(step, buffer, jnp.stack([index]))[1])


def in_while(op, buffer, index):
    start = (0, zeros_like_results(op, buffer, index))
    return lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, call(op, OURS, buffer, index + c[0])), start)[1]


def in_cond(op, buffer, index):
    return lax.cond(index != 5, lambda: call(op, OURS, buffer, index), lambda: zeros_like_results(op, buffer, index))


def in_vmap_of_where(op, buffer, index):
    """Only the mask is batched."""
    where = jnp.array([False, True])
    return tuple(x[1] for x in jax.vmap(lambda w: call(op, OURS, buffer, index, where=w))(where))


def in_vmap_of_index(op, buffer, index):
    """The index is batched."""
    both = jnp.stack([index * 0, index])
    return tuple(x[1] for x in jax.vmap(lambda i: call(op, OURS, buffer, i))(both))


def in_vjp(op, buffer, index):
    results, pullback = jax.vjp(lambda b: call(op, OURS, b, index), buffer)
    if op is CHECK:  # whose result has no cotangent
        return results
    return tuple(r + 0 * pullback(results)[0].sum() for r in results)


def direct(op, buffer, index):
    return call(op, OURS, buffer, index)


EVERYWHERE = {
    "direct": direct,
    "scan": in_scan,
    "while_loop": in_while,
    "cond": in_cond,
    "vmap_of_where": in_vmap_of_where,
    "vmap_of_index": in_vmap_of_index,
    "vjp": in_vjp,
    "masked": lambda op, buffer, index: call(op, OURS, buffer, index, where=index != 5),
}
#: Random programs have the row ops in loops, in branches, differentiated and batched.
CASES = [(op, c) for op in CHECKING_OPS for c in (EVERYWHERE if op is CHECK else ("direct", "vjp"))]
WITHOUT_JIT = [(CHECK, "direct"), (CHECK, "scan"), (SWAP, "cond"), (SWAP, "vmap_of_index"), (SWAP, "vjp")]


@pytest.mark.slow(but=6)
@pytest.mark.parametrize(("op", "context"), CASES, ids=str)
def test_a_stray_index_raises_in_every_call_and_does_no_harm(op, context):
    f = jax.jit(functools.partial(EVERYWHERE[context], op))
    buffer = jnp.asarray(BUFFER)
    for stray in (12, -1, 10):
        with raises(op, stray):
            finish(f(buffer, jnp.array(stray)))
        for good in (9, 0):
            assert_same(f(buffer, jnp.array(good)), call(op, oracle, BUFFER, good))
    oracle.assert_same_bits(buffer, BUFFER)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize(("op", "context"), WITHOUT_JIT, ids=str)
def test_a_stray_index_raises_without_an_outer_jit(op, context, disabled):
    f = functools.partial(EVERYWHERE[context], op)
    with jax.disable_jit(disabled):
        for _ in range(2):
            with raises(op, 12):
                finish(f(jnp.asarray(BUFFER), jnp.array(12)))
            assert_same(f(jnp.asarray(BUFFER), jnp.array(3)), call(op, oracle, BUFFER, 3))


@every(CHECKING_OPS)
def test_the_first_stray_in_order_is_named(op):
    index = jnp.array([[3, 10], [-4, 77]])
    with raises(op, 10):
        finish(call(op, OURS, jnp.asarray(BUFFER), index))
    with raises(op, -4):
        finish(call(op, OURS, jnp.asarray(BUFFER), index, where=jnp.array([[True, False], [True, True]])))


@every(CHECKING_OPS)
def test_a_buffer_without_rows_has_no_index_and_one_without_elements_has(op):
    with raises(op, 0, size=0):
        finish(call(op, OURS, jnp.zeros((0, 2)), jnp.array(0)))
    f = jax.jit(lambda b, i: call(op, OURS, b, i, jnp.zeros(0)))
    with raises(op, 12):
        finish(f(jnp.zeros((10, 0)), 12))
    assert op is CHECK or f(jnp.zeros((10, 0)), 9)[0].size == 0


STRAYS = [np.int8(-128), np.int16(-1), np.int32(2**31 - 1), np.int64(-(2**63)), np.int64(2**62), np.uint8(255)]
STRAYS += [np.int64(2**32 + 1), np.uint16(10), np.uint32(2**32 - 1), np.uint64(2**63 + 5), np.uint64(2**64 - 1)]


@pytest.mark.slow
@every(CHECKING_OPS)
def test_an_index_of_any_dtype_is_named_with_its_true_value(op):
    for index in STRAYS:
        with raises(op, int(index)):
            finish(call(op, OURS, jnp.asarray(BUFFER), jnp.asarray(index)))


@pytest.mark.parametrize("index", [12, 2**40, 2**63 + 5, np.uint64(2**63 + 5), np.int64(-(2**40))], ids=repr)
def test_a_constant_index_admitted_at_run_time_is_named(index):
    with raises("ta_read", int(index)):
        finish(jax.jit(lambda w: ta.ta_read(BUFFER, index, where=w))(True))


# --- where it was ----------------------------------------------------------------------------------------------


def by_ops_in_lines(count):
    """A loop with an op in each of its lines, from the second line of the source on, and the source."""
    dtypes = ["uint64", "int8", "int32"]
    lines = [f"  b = ta_add(b, at[{k}].astype('{dtypes[k % 3]}'), 1.0)" for k in range(count)]
    return "\n".join(["def body(b, at):", *lines, "  return b, None"])


def compiled(source, file):
    names = {"ta_add": ta.ta_add, "ta_write": ta.ta_write}
    exec(compile(source, file, "exec"), names)
    return names


def test_an_error_names_the_line_of_the_op_among_many():
    body = compiled(by_ops_in_lines(40), '/of mine/odd "näme".py')["body"]
    f = jax.jit(lambda b, at: lax.scan(body, b, at)[0])
    for k in (0, 1, 2, 17, 39):
        at = np.zeros((3, 40), int)
        at[1, k] = 12
        with pytest.raises(RUNTIME_ERRORS, match=message("ta_add", 12, SIZE) + rf' \(odd "näme"\.py:{k + 2}\)'):
            finish(f(BUFFER[:, 0], at))


def line(function, number):
    return rf" \(test_index_errors\.py:{function.__code__.co_firstlineno + number}\)"


@pytest.mark.slow
def test_wherever_an_op_is_called_the_error_names_its_line():
    def helper(b, i):
        return ta.ta_write(b, i, 1.0)

    def in_a_loop(i):
        return lax.fori_loop(i, i + 2, lambda k, b: helper(b, k), jnp.asarray(BUFFER))

    def in_a_bounded_loop(i):
        arrays = ta.TensorArray(f64, size=SIZE, element_shape=())

        def body(c):
            return c[0] + 1, c[1].write(c[0], 1.0)

        return ta.while_loop(lambda c: c[0] < 12, body, (i, arrays), max_steps=5)[1].stack().sum()

    def on_its_own(i):
        b = jnp.asarray(BUFFER)
        return ta.ta_read(b, i)

    is_cpu = jax.default_backend() == "cpu"
    raises_at_once = is_cpu and not hasattr(_kernels.modules["cpu"], "wait_for_error")
    for f, index, where in [
        (lambda i: helper(jnp.asarray(BUFFER), i), 10, line(helper, 1)),
        (in_a_loop, 9, line(helper, 1)),
        (in_a_bounded_loop, 9, line(in_a_bounded_loop, 4)),
        (lambda i: jax.grad(lambda x: (in_a_loop(i) * x).sum())(1.0), 9, line(helper, 1)),
        (on_its_own, 10, line(on_its_own, 2)),
    ]:
        for run in (jax.jit(f), *[f] * raises_at_once):  # a GPU runs an op on its own for many lines
            with pytest.raises(RUNTIME_ERRORS, match=rf": index 10 is out of range for a \w+ of size 10{where}"):
                finish(run(jnp.array(index)))


def test_an_op_that_is_jitted_itself_names_no_line():
    with pytest.raises(RUNTIME_ERRORS, match=message("ta_read", 12, SIZE) + "(?! .test)"):
        finish(jax.jit(ta.ta_read)(BUFFER, jnp.array(12)))


def test_a_program_does_not_depend_on_the_folder_that_its_source_is_in():
    def lowered(file):
        f = compiled("def f(b, i):\n  return ta_write(b, i, 1.0)", file)["f"]
        return jax.jit(f).lower(BUFFER, 3).as_text()

    assert lowered("/home/a/train.py") == lowered("/tmp/b/train.py") != lowered("/tmp/b/other.py")


# --- known while tracing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "index", [12, -1, 10, 2**70, np.int64(12), np.uint64(2**63 + 5), [3, 12], np.array([[3], [12]])], ids=repr
)
@every(ROW_OPS)
def test_a_python_or_numpy_index_is_checked_while_tracing(op, index):
    text = "^" + message(op, max(np.asarray(index, object).flat, key=abs), SIZE)
    buffer = jnp.asarray(BUFFER)
    with pytest.raises(IndexError, match=text):
        call(op, OURS, buffer, index)
    with pytest.raises(IndexError, match=text):
        jax.make_jaxpr(lambda b: call(op, OURS, b, index))(buffer)
    with pytest.raises(IndexError, match=text):
        jax.eval_shape(jax.vmap(lambda b: call(op, OURS, b, index, mode="error")), jnp.stack([buffer, buffer]))


@every(CHECKING_OPS)
def test_a_python_index_that_a_mask_admits_is_an_error_at_run_time(op):
    f = jax.jit(lambda b, w: call(op, OURS, b, [3, 12], where=w))
    with raises(op, 12):
        finish(f(BUFFER, np.array([True, True])))
    where = np.array([True, False])
    assert_same(f(BUFFER, where), call(op, oracle, BUFFER, np.array([3, 12]), where=where))


# --- checkify --------------------------------------------------------------------------------------------------


def found_by_checkify(f, *args, errors=checkify.index_checks):
    error, _ = jax.jit(checkify.checkify(f, errors=errors))(*args)
    return error.get()


@pytest.mark.slow
@every([READ, SWAP])
def test_checkify_finds_an_index_and_the_op_does_not_raise(op):
    text = "out-of-bounds indexing for array of shape (10, 2): index {} is out of bounds for axis 0 with size 10. "
    for index in (-1, SIZE, np.uint8(200), np.array([3, 12])):
        value = np.broadcast_to(VALUE, (*np.shape(index), 2))
        for run in (call, in_scan) if np.ndim(index) == 0 else (call,):
            f = functools.partial(run, op) if run is in_scan else functools.partial(call, op, OURS, value=value)
            assert found_by_checkify(f, BUFFER, index) == text.format(np.max(index) if np.ndim(index) else index)
    assert found_by_checkify(functools.partial(call, op, OURS), BUFFER, SIZE - 1) is None
    assert found_by_checkify(functools.partial(call, op, OURS, mode="drop"), BUFFER, SIZE) is None
    assert found_by_checkify(functools.partial(call, op, OURS), BUFFER, SIZE - 1, errors=checkify.nan_checks) is None
    each = jax.vmap(checkify.checkify(functools.partial(call, op, OURS), errors=checkify.index_checks))
    buffers, indices = np.stack([BUFFER, BUFFER]), np.array([3, SIZE])
    assert str(SIZE) in each(buffers, indices)[0].get()


@pytest.mark.slow(but=1)
@every([READ, SWAP])
def test_checkify_leaves_out_what_where_leaves_out_and_finds_elements(op):
    def masked(buffer, index, where):
        return call(op, OURS, buffer, index, value=np.broadcast_to(VALUE, (2, 2)), where=where)

    index = np.array([3, 12])
    assert found_by_checkify(masked, BUFFER, index, np.array([True, False])) is None
    assert "index 12" in found_by_checkify(masked, BUFFER, index, np.array([False, True]))


def test_checkify_finds_the_nan_of_a_sum_and_an_index_into_nothing_raises():
    f = functools.partial(ta.ta_add, jnp.array([jnp.inf, 1.0]))
    assert (
        found_by_checkify(lambda i: f(i, -jnp.inf), 0, errors=checkify.nan_checks) == "nan generated by primitive: add."
    )
    assert found_by_checkify(lambda i: f(i, -jnp.inf), 1, errors=checkify.nan_checks) is None
    assert found_by_checkify(lambda w: f(0, -jnp.inf, where=w), False, errors=checkify.nan_checks) is None
    with raises(READ, 0, 0):
        finish(found_by_checkify(lambda i: ta.ta_read(jnp.zeros((0, 2)), i), 0))


# --- batched ---------------------------------------------------------------------------------------------------

#: Ways to batch an index.
BATCHED = {
    "index": lambda f, buffer, index: jax.vmap(f, (None, 0))(buffer, index),
    "all": lambda f, buffer, index: jax.vmap(f)(jnp.stack([buffer, buffer]), index),
    # Only the outer vmap batches it.
    "outer": lambda f, buffer, index: jax.vmap(lambda i: jax.vmap(lambda b: f(b, i))(buffer[None]))(index),
    "inner": lambda f, buffer, index: jax.vmap(lambda b: jax.vmap(lambda i: f(b, i))(index))(buffer[None]),
}


@pytest.mark.slow
@every(CHECKING_OPS)
def test_a_batched_index_is_an_error_unless_it_is_dropped(op):
    def expected(index):
        each = [call(op, oracle, BUFFER, i, np.stack([VALUE, VALUE])) for i in index]
        results = tuple(map(np.stack, zip(*each, strict=True)))
        return [tuple(e[:, None] if k == "outer" else e[None] if k == "inner" else e for e in results) for k in BATCHED]

    @functools.partial(jax.jit, static_argnames=("mode", "ways"))
    def run(buffer, index, mode, ways=tuple(BATCHED)):
        return [BATCHED[way](functools.partial(call, op, OURS, mode=mode), buffer, index) for way in ways]

    good, stray = np.array([[0, 3], [7, 9]]), np.array([[0, 3], [-1, 9]])
    assert_same(run(BUFFER, stray, "drop"), expected(stray))
    assert_same(run(BUFFER, good, None), expected(good))
    for way in BATCHED:
        for mode in (None, "error") if way == "index" else (None,):
            with raises(op, -1):
                finish(run(BUFFER, stray, mode, (way,)))


@pytest.mark.slow
@every([SWAP, CHECK])
def test_an_index_of_an_example_that_does_not_run_is_no_error(op):
    """It is in the branch not taken, or has left the loop; its index may be anything then."""

    def in_switch(taken, index):
        other = zeros_like_results(op, BUFFER, index)
        branches = [lambda: other, lambda: call(op, OURS, jnp.asarray(BUFFER), index), lambda: other]
        return lax.switch(jnp.where(taken, 1, 2), branches)

    def in_our_while(taken, index):
        start = jnp.int64(0), zeros_like_results(op, BUFFER, index)
        step = lambda c: (c[0] + 1, call(op, OURS, jnp.asarray(BUFFER), index))  # noqa: E731
        return ta.while_loop(lambda c: c[0] < jnp.where(taken, 1, 0), step, start, max_steps=2)[1]

    taken, index = np.array([True, False, True]), np.array([SIZE - 1, 77, SIZE - 1])
    last, none = call(op, oracle, BUFFER, SIZE - 1), call(op, oracle, BUFFER, 0)
    expected = tuple(np.stack([x, np.zeros_like(y), x]) for x, y in zip(last, none, strict=True))
    for f in (in_switch, in_our_while):
        mapped = jax.jit(jax.vmap(f))
        assert_same(mapped(taken, index), expected)
        with raises(op, -3):
            finish(mapped(taken, np.array([9, 77, -3])))


def test_a_batched_index_is_dropped_only_where_no_mask_reaches():
    """A branch or a loop with effects is batched by JAX, which runs it for all examples."""

    def in_cond(taken, index):
        def shown():
            jax.debug.callback(lambda _: None, index)
            return ta.ta_read(BUFFER, index)

        return lax.cond(taken, shown, lambda: jnp.zeros(2))

    def in_while(taken, index):
        def shown(c):
            jax.debug.callback(lambda _: None, c[0])
            return c[0] + 1, ta.ta_read(BUFFER, index) + ta.TensorArray.from_array(BUFFER).read(index)

        return lax.while_loop(lambda c: taken & (c[0] < 1), shown, (0, jnp.zeros(2)))[1]

    taken, index = np.array([True, False, True]), np.array([3, 77, -1])
    for f, rows in ((in_cond, 1), (in_while, 2)):
        found = jax.jit(jax.vmap(f))(taken, index)
        np.testing.assert_array_equal(found, [rows * BUFFER[3], [0, 0], [0, 0]])


# --- not executed ----------------------------------------------------------------------------------------------


def fori(trips, body, start):
    return lax.fori_loop(0, trips, lambda _, carry: body(carry), start)


def with_branches_of_a_step(trips, body, start):
    return lax.fori_loop(0, 3, lambda k, carry: lax.cond(k < trips, body, lambda c: c, carry), start)


#: name -> loop(trips, body, start), for `body(carry) -> carry` that knows nothing of the step
LOOPS = {
    "fori": fori,
    "nested_jit": lambda trips, body, start: fori(trips, jax.jit(lambda c: jax.jit(body)(c)), start),
    "cond_of_step": with_branches_of_a_step,
    "inner_loop": lambda trips, body, start: fori(1, lambda c: fori(trips, body, c), start),
    "checkpoint": lambda trips, body, start: fori(trips, jax.checkpoint(body), start),
}
IN_LOOPS = [
    *((op, "fori", "carried" if op in UPDATES else "closed over") for op in CHECKING_OPS),
    *((READ, loop, "carried") for loop in ("cond_of_step", "inner_loop")),
    *((SWAP, loop, "carried") for loop in ("nested_jit", "checkpoint")),
    (CHECK, "cond_of_step", "closed over"),
]


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(("op", "loop", "place"), IN_LOOPS, ids=str)
def test_a_loop_of_no_steps_never_raises_although_one_of_one_step_does(op, loop, place):
    """Nothing in the step depends on its number, so XLA could take the call out of the loop."""

    def step(lib, buffer, index, carry):
        carried, total = carry
        results = call(op, lib, carried if place == "carried" else buffer, index)
        if place == "carried" and op.results[0] == "buffer":
            carried = results[0]
        return carried, total + results[-1].sum()

    @jax.jit
    def f(buffer, index, trips):
        return LOOPS[loop](trips, functools.partial(step, OURS, buffer, index), (buffer, 0.0))

    nothing = expected = BUFFER, np.asarray(0.0)
    for _ in range(2):
        expected = step(oracle, BUFFER, 4, expected)
    assert_same(f(BUFFER, 12, 0), nothing)
    for stray, steps in ((12, 1), (-1, 2)):
        with raises(op, stray):
            finish(f(BUFFER, stray, steps))
    assert_same(f(BUFFER, 4, 2), expected)


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


def test_a_loop_of_no_steps_never_raises_whatever_its_buffer_and_index_pass_through():
    @jax.jit
    def f(buffer, index, trips):
        def body(_, carry):
            buffer, index, total = carry
            for name, detour in DETOURS.items():
                buffer, total = detour(buffer, total)
                index, total = detour(index, total) if name in ("jit", "cond", "scan", "where") else (index, total)
            return buffer, index, total + ta.ta_read(buffer, index).sum()

        return lax.fori_loop(0, trips, body, (buffer, index, 0.0))[-1]

    assert f(BUFFER, 12, 0) == 0
    with raises("ta_read", 12):
        finish(f(BUFFER, 12, 1))


@pytest.mark.slow(but=1)
@every([SWAP, CHECK])
def test_derivatives_and_batches_of_a_loop_of_no_steps_never_raise(op):
    def f(x, index, trips):
        def body(_, total):
            return total + jnp.sin(call(op, OURS, BUFFER * x, index, VALUE * x)[-1]).sum()

        return lax.fori_loop(0, trips, body, x)

    one = jax.jit(lambda x, i, n: jax.jvp(lambda x: f(x, i, n), (x,), (1.0,)))
    batched = jax.jit(jax.vmap(f, (0, None, None)))
    x = np.array([1.5, 2.5])
    np.testing.assert_array_equal(one(1.5, 12, 0), [1.5, 1.0])
    np.testing.assert_array_equal(batched(x, 12, 0), x)
    for run, given in ((one, 1.5), (batched, x)):
        with raises(op, 12):
            finish(run(given, 12, 1))
    each_its_own = jax.jit(jax.vmap(f, (0, 0, 0)))
    np.testing.assert_array_equal(each_its_own(x, np.array([12, -1]), np.array([0, 0])), x)
    with raises(op, -1):
        finish(each_its_own(x, np.array([12, -1]), np.array([0, 1])))


@every([SWAP])
def test_the_gradient_of_a_scan_of_no_steps_never_raises(op):
    """JAX's derivative takes what no step changes out of the loop."""

    def f(x, index, length):
        def step(total, _):
            return total + call(op, OURS, BUFFER, index)[-1].sum(), total

        total, before = lax.scan(step, x, None, length=length)
        return total**2 + before.sum()

    index, x = jnp.int32(12), np.array([1.5, 2.5])
    assert jax.grad(f)(1.5, index, 0) == 3
    assert jax.hessian(f)(1.5, index, 0) == 2
    np.testing.assert_array_equal(jax.vmap(jax.grad(f), (0, None, None))(x, index, 0), 2 * x)
    np.testing.assert_array_equal(jax.vmap(f, (0, None, None))(x, index, 0), x**2)
    with raises(op, 12):
        finish(jax.grad(f)(1.5, index, 1))


def test_a_scan_of_no_steps_returns_the_types_of_a_step():
    def total(of_row, buffer):
        return lax.scan(lambda total, _: (0.5 * of_row(buffer, 0), total), 1.5, None, length=0)

    plain, ours = (total(f, jnp.ones(3)) for f in (lambda b, k: b[k], ta.ta_read))
    assert jax.typeof(ours[0]) == jax.typeof(plain[0]) and jax.typeof(ours[1]) == jax.typeof(plain[1])
    assert not ours[0].weak_type and ours[0] == 1.5
