"""`jax.vmap` of JAX's own `cond`, `switch` and `while_loop` around row ops: linear. The random programs are right."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_place import assert_no_whole_buffer_copy, compiled, loops_in_loops
from jax import lax

import jax_tensorarray as ta

EXAMPLES = 3


def counted(n, x, b):
    def body(state):
        i, b = state
        return i + 1, ta.ta_write(b, i, jnp.sin(ta.ta_read(b, i - 1)) + x)

    return lax.while_loop(lambda state: state[0] < n, body, (1, b))


def update(b, i, x):
    return ta.ta_write(b, i, jnp.sin(ta.ta_read(b, i - 1)) + x)


@jax.custom_jvp
def with_jvp(b, i, x):
    return update(b, i, x)


@with_jvp.defjvp
def _(primals, tangents):
    (b, i, x), (db, _, dx) = primals, tangents
    return with_jvp(b, i, x), ta.ta_write(db, i, 0.5 * ta.ta_read(db, i - 1) + 2 * dx / x)


@jax.custom_vjp
def with_vjp(b, i, x):
    return update(b, i, x)


def _backward(kept, ct):
    i, x = kept
    row = ta.ta_read(ct, i)
    return ta.ta_add(ta.ta_write(ct, i, jnp.zeros_like(row)), i - 1, 0.5 * row), None, 2 * row / x


with_vjp.defvjp(lambda b, i, x: (update(b, i, x), (i, x)), _backward)

saved = functools.partial(jax.checkpoint, policy=ta.checkpoint_policies.save_reads)
FUNCTIONS = {
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "checkpoint": saved(update),
    "switch": lambda b, i, x: lax.switch(i % 3, [update, ta.ta_add, lambda b, i, x: b], b, i, x),
    "custom_jvp in a checkpoint": lambda b, i, x: saved(lambda b: jax.jit(with_jvp)(b, i, x))(b),
    "custom_jvp in a switch": lambda b, i, x: lax.switch(i % 2, [with_jvp, lambda b, i, x: b], b, i, x),
}
MANY, FEW = (200, 193, 1), (5, 3, 1)  # the last example takes no step, whose derivative would divide by zero


def after_loop(function, loop, n, x, b):
    return loop(lambda state: state[0] < n, lambda state: (state[0] + 1, function(state[1], state[0], x)), (1, b))[1]


def in_python(cond, body, state):
    while cond(state):
        state = body(state)
    return state


def pulled_back(f, xs, bs):
    out, pull = jax.vjp(f, xs, bs)
    return out, pull(jnp.cos(bs))


#: Each in one of the loops, in turn.
OF_LOOPS = [*zip(FUNCTIONS, itertools.cycle([ta.while_loop, lax.while_loop]), strict=False)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "loop"), OF_LOOPS)
def test_row_ops_in_functions_are_in_place(name, loop):
    function, ours = FUNCTIONS[name], loop is ta.while_loop
    if ours:
        loop = functools.partial(loop, max_steps=200)

    def batched(ends):
        return lambda xs, bs: jax.vmap(functools.partial(after_loop, function, loop))(jnp.array(ends), xs, bs)

    def of_each(xs, bs):
        return jnp.stack([after_loop(function, in_python, *one) for one in zip(FEW, xs, bs, strict=True)])

    transforms = [pulled_back] if ours else []
    transforms += [lambda f, xs, bs: jax.jvp(f, (xs, bs), (xs, bs))] if name != "custom_vjp" else []
    transforms = transforms or [lambda f, *args: f(*args)]
    xs = jnp.array([[1.0, -2.0], [0.5, 3.0], [0.0, 0.0]])
    for transform in transforms:
        program = compiled(lambda bs: transform(batched(MANY), xs, bs), jnp.ones((3, 200, 2)))  # noqa: B023
        assert_no_whole_buffer_copy(program, jnp.zeros((200, 2)))

    bs = jnp.asarray(np.random.default_rng(0).normal(size=(3, 6, 2)))
    found, want = (jax.jit(lambda bs, f=f: [t(f, xs, bs) for t in transforms])(bs) for f in (batched(FEW), of_each))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), found, want)


@pytest.mark.slow
@pytest.mark.parametrize("residuals", ["tape", "undo"])
def test_a_custom_vjp_with_constants_and_results_that_are_integers(residuals):
    """JAX gives the zeros of constants and results as symbols, which the rule does not ask for."""

    def added(b, i):
        return ta.ta_add(b, jnp.array([0, 2, 2]), jnp.sin(b)), i + 1

    function = jax.custom_vjp(added)
    function.defvjp(lambda *args: jax.vjp(added, *args), lambda pull, ct: pull(ct))

    def total(function, loop):
        def of(n, b):
            cond, body = lambda state: state[0] < n, lambda state: function(state[1], state[0])[::-1]
            return jnp.sum(jnp.cos(loop(cond, body, (1, b))[1]))

        return of

    ours = total(function, functools.partial(ta.while_loop, max_steps=5, residuals=residuals))
    bs = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3, 2)))
    found = jax.grad(lambda bs: jnp.sum(jax.vmap(ours)(jnp.array(FEW), bs)))(bs)
    want = [jax.grad(total(added, in_python), 1)(*one) for one in zip(FEW, bs, strict=True)]
    np.testing.assert_allclose(found, jnp.stack(want), rtol=1e-6)


def test_while_loop_that_ends_for_all_at_once_shares_what_it_shares():
    _, b = jax.eval_shape(jax.vmap(counted, (None, None, 0)), 3, 1.0, jnp.zeros((EXAMPLES, 4)))
    assert b.shape == (EXAMPLES, 4)
    text = str(jax.make_jaxpr(jax.vmap(counted, (None, None, 0)))(3, 1.0, jnp.zeros((EXAMPLES, 4))))
    assert "ta_while" not in text


@pytest.mark.parametrize("order", ["vmap(in_place)", "in_place(vmap)", "vmap"])
def test_a_loop_that_is_the_same_in_every_step_runs_once(order):
    ours = functools.partial(ta.while_loop, max_steps=30, on_limit="stop")
    while_loop = ours if order == "vmap" else lax.while_loop

    def f(loop, steps, n, x, start):
        def step(state):
            k, b = state
            rows = loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1].at[s[0]].set(x * s[1][s[0] - 1])), (1, start))[1]
            return k + 1, jnp.where(k % 2 == 0, rows, b)

        return loop(lambda state: state[0] < steps, step, (0, start))[1]

    plain = functools.partial(f, while_loop)
    g = {
        "vmap(in_place)": jax.vmap(ta.in_place(plain)),
        "in_place(vmap)": ta.in_place(jax.vmap(plain)),
        "vmap": jax.vmap(plain),
    }[order]
    args = jnp.array([20, 9, 0]), jnp.array([1, 30, 7]), jnp.array([0.5, 1.5, 2.5]), jnp.ones((EXAMPLES, 30))
    program, of_jax = compiled(g, *args), compiled(jax.vmap(functools.partial(f, lax.while_loop)), *args)
    assert loops_in_loops(program) <= loops_in_loops(of_jax)  # on jax 0.10 a scatter is a loop
    want = [f(in_python, *one) for one in zip(*args, strict=True)]
    np.testing.assert_allclose(program(*args), np.stack(want), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("loop", [lax.while_loop, ta.while_loop])
def test_an_example_that_has_ended_keeps_buffers_that_a_scan_exchanges(loop):
    def f(n, x):
        def exchange(buffers, k):
            a, b = buffers
            return (b, ta.ta_write(a, k, x + ta.ta_read(b, k))), None

        def body(state):
            return state[0] + 1, *lax.scan(exchange, state[1:], jnp.arange(3))[0]

        return loop(lambda state: state[0] < n, body, (0, jnp.zeros(4), jnp.ones(4)))

    ns, xs = jnp.arange(4), jnp.arange(1.0, 5.0)
    of_each = [f(n, x) for n, x in zip(ns, xs, strict=True)]
    jax.tree.map(lambda found, *each: np.testing.assert_array_equal(found, each), jax.vmap(f)(ns, xs), *of_each)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("mode", [None, "error"])
def test_a_branch_that_is_not_taken_does_not_raise(mode):
    def f(p, i):
        return lax.cond(p, lambda: ta.ta_read(jnp.arange(3.0), i, mode=mode), lambda: -1.0)

    found = jax.vmap(f)(jnp.array([True, False]), jnp.array([2, 7]))
    np.testing.assert_array_equal(found, [2.0, -1.0])
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="ta_read: index 7 is out of range"):
        jax.block_until_ready(jax.vmap(f)(jnp.array([True, True]), jnp.array([2, 7])))
        ta.check_errors()


#: Functions of where to begin and to end, which read and write rows until then.
WRITERS = {
    "while": lambda loop, i, n: loop(
        lambda c: c[0] < n, lambda c: (c[0] + 1, ta.ta_write(c[1], c[0], 1.0)), (i, jnp.zeros(4))
    )[1],
    "array": lambda loop, i, n: loop(
        lambda c: c[0] < n, lambda c: (c[0] + 1, c[1].write(c[0], 1.0)), (i, ta.TensorArray.from_array(jnp.zeros(4)))
    )[1].stack(),
    "append": lambda loop, i, n: loop(
        lambda c: c[0] < n,
        lambda c: (c[0] + 1, c[1].append(1.0)),
        (i, ta.TensorArray(float, size=i, dynamic_size=True, max_size=4, element_shape=())),
    )[1].stack(pad=True),
    "cond in a scan": lambda loop, i, n: lax.scan(
        lambda b, k: (lax.cond(k < n, lambda: ta.ta_write(b, k, 1.0), lambda: b), None), jnp.zeros(4), i + jnp.arange(5)
    )[0],
    "switch in a fori": lambda loop, i, n: lax.fori_loop(
        0, 5, lambda k, b: lax.switch((i + k < n) + 0, [lambda: b, lambda: ta.ta_write(b, i + k, 1.0)]), jnp.zeros(4)
    ),
    "nested": lambda loop, i, n: loop(
        lambda c: c[0] < n,
        lambda c: lax.fori_loop(0, 1, lambda _, c: (c[0] + 1, jax.jit(ta.ta_write)(c[1], c[0], 1.0)), c),
        (i, jnp.zeros(4)),
    )[1],
    "the same in every step": lambda loop, i, n: loop(
        lambda c: c[0] < n,
        lambda c: (
            c[0] + 1,
            lax.fori_loop(0, 5, lambda k, b: ta.ta_write(b, jnp.where((i <= k) & (k < n), k, i), 1.0), jnp.zeros(4)),
        ),
        (i, jnp.zeros(4)),
    )[1],
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("loop", [lax.while_loop, ta.while_loop])
@pytest.mark.parametrize("name", WRITERS)
def test_an_example_that_has_ended_does_not_raise_and_one_that_runs_does(name, loop):
    loop = functools.partial(loop, max_steps=5) if loop is ta.while_loop else loop
    f = jax.jit(jax.vmap(lambda i, n: WRITERS[name](loop, i, n)))
    first, end = np.array([0, 2, 4, 1], np.int32), np.array([4, 3, 4, 0], np.int32)
    np.testing.assert_array_equal(f(first, end), [[1] * 4, [0, 0, 1, 0], [0] * 4, [0] * 4])
    for k, what in ((0, 4), (2, 4)):
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=f"index {what} is out of range"):
            jax.block_until_ready(f(first, end + (np.arange(4) == k).astype(np.int32)))
            ta.check_errors()


@pytest.mark.slow
def test_an_infinite_derivative_that_is_not_taken_is_not_seen():
    def f(x, p):
        def yes(b):
            return ta.ta_write(b, 0, jnp.sqrt(x))

        return lax.cond(p, yes, lambda b: ta.ta_write(b, 1, x), jnp.zeros(2)).sum()

    of_each = jax.vmap(jax.grad(f))(jnp.array([0.0, 4.0]), jnp.array([False, True]))
    np.testing.assert_array_equal(of_each, [1.0, 0.25])
    shared = jax.grad(lambda x: jnp.sum(jax.vmap(f, (None, 0))(x, jnp.array([False, False]))))(0.0)
    assert shared == 2.0


@pytest.mark.slow
def test_collectives_and_names_inside():
    def f(p, x):
        def yes(b):
            return ta.ta_write(b, 0, lax.psum(x, "examples"))

        return lax.cond(p, yes, lambda b: ta.ta_write(b, 1, 1.0 * lax.axis_index("examples")), jnp.zeros(2))

    found = jax.vmap(f, axis_name="examples")(jnp.array([True, False, True]), jnp.array([1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(found, [[6, 0], [0, 1], [6, 0]])


def test_what_acts_is_left_to_jax():
    def f(p):
        def yes(b):
            jax.experimental.io_callback(lambda: None, None)
            return ta.ta_write(b, 0, 1.0)

        return lax.cond(p, yes, lambda b: b, jnp.zeros(2))

    with pytest.raises(NotImplementedError, match="IO effect not supported in vmap-of-cond"):
        jax.vmap(f)(jnp.array([True, False]))


def test_programs_without_row_ops_are_jaxs():
    def f(p, x):
        return lax.cond(p, jnp.sin, jnp.cos, x)

    jaxpr = jax.make_jaxpr(jax.vmap(f))(jnp.array([True, False]), jnp.ones(2))
    assert "select_n" in str(jaxpr) and "ta_" not in str(jaxpr)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("loop", ["while", "fori", "scan"])
def test_what_all_examples_share_is_kept_once(loop):
    w = jnp.linspace(-1, 1, 40 * 500).reshape(40, 500)

    def f(x):
        def step(i, x):
            return x * jnp.exp(jnp.sin(w[i]))

        if loop == "scan":
            return jnp.sum(ta.scan(lambda x, i: (step(i, x), None), x, jnp.arange(40), residuals="tape")[0])
        if loop == "fori":
            return jnp.sum(ta.fori_loop(0, 40, step, x, residuals="tape"))
        return jnp.sum(
            ta.while_loop(lambda s: s[0] < 40, lambda s: (s[0] + 1, step(*s)), (0, x), max_steps=40, residuals="tape")[
                1
            ]
        )

    xs = jnp.sin(jnp.arange(8 * 500.0)).reshape(8, 500)
    one, all_of_them = compiled(jax.grad(f), xs[0]), compiled(jax.vmap(jax.grad(f)), xs)
    np.testing.assert_allclose(all_of_them(xs), np.tile(np.exp(np.sin(np.asarray(w))).prod(0), (8, 1)), rtol=1e-12)
    of_one, of_all = (program.memory_analysis().temp_size_in_bytes for program in (one, all_of_them))
    assert w.nbytes < of_one
    assert of_all < 2 * of_one
