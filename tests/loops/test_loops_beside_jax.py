"""The loops beside the rest of JAX: checks, effects, named axes, refs, dead steps, caches, and errors in its words."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import jit, lax
from jax.experimental import io_callback
from loop_programs import (
    BATCH_STEPS,
    OURS,
    POINT,
    POINTS,
    PROGRAMS,
    ROWS,
    TOLERANCE,
    assert_close,
    evaluated,
    expected,
    gradient,
    library,
    loss,
    python_while,
    up_to,
    weighted,
)

import jax_tensorarray as ta
from jax_tensorarray import ta_read, ta_write

# --- checks, effects, names, refs ------------------------------------------------------------------------------


def test_without_jit_a_fori_loop_takes_bounds_that_are_arrays():
    with jax.disable_jit():
        assert ta.fori_loop(jnp.int32(1), jnp.int32(4), lambda i, c: c + i, 0) == 6


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("name", "batched"), [("a_checkpointed_loop", False), ("a_loop_that_depends_on_the_data_in_a_loop", True)]
)
def test_everything_passes_the_checks_of_jax(name, batched):
    def f(p, n):
        return jax.hessian(loss(functools.partial(PROGRAMS[name], OURS, n=n)))(p)

    with jax.enable_checks(True):
        jax.jit(jax.vmap(f) if batched else f).lower(*((POINTS, BATCH_STEPS) if batched else (POINT, 4)))


@pytest.mark.slow
def test_no_tracer_leaks():
    def f(p, n):
        return gradient(functools.partial(PROGRAMS["a_checkpointed_loop"], OURS, n=n))(p)

    with jax.checking_leaks():
        jax.jit(jax.vmap(f)).lower(POINTS, BATCH_STEPS)


@pytest.mark.slow
def test_what_was_never_written_to_a_tape_is_no_nan():
    def f(x):
        return ta.while_loop(up_to(3), lambda c: (c[0] + 1, jnp.sin(c[1] * x)), (0, x), max_steps=1000)[1]

    jitted = jax.jit(jax.grad(f))
    for _ in range(3):
        jax.block_until_ready([jnp.full(1000, jnp.nan) for _ in range(8)])  # where the tape may be
        with jax.debug_nans(True):
            jax.grad(f)(jnp.arange(1.0, 2.0)[0])
            jitted(0.5)


def test_custom_derivatives_around_the_loop():
    def f(x):
        return ta.fori_loop(0, 3, lambda i, y: y * x, 1.0)

    g = jax.custom_vjp(f)
    g.defvjp(lambda x: jax.vjp(f, x), lambda pull, ct: pull(2 * ct))
    assert jax.jit(jax.grad(g))(2.0) == 2 * 12


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "policy",
    [
        None,
        jax.checkpoint_policies.everything_saveable,
        jax.checkpoint_policies.nothing_saveable,
        ta.checkpoint_policies.save_reads,
    ],
)
def test_policies_of_checkpoints_around_the_loop_and_its_body(policy):
    lib = library(checkpoint=functools.partial(jax.checkpoint, policy=policy))
    found = jit(jax.grad(loss(functools.partial(PROGRAMS["a_checkpointed_loop"], lib))))(POINT, 4)
    assert_close(found, weighted(expected("a_checkpointed_loop", 4, 1)))


CALLED = {
    "eager": (lambda f: f, None),
    "jit": (jax.jit, None),
    "jvp": (lambda f: lambda x: jax.jvp(f, (x,), (1.0,)), None),
    "jvp, max_steps": (lambda f: lambda x: jax.jvp(f, (x,), (1.0,)), 10),
    "grad": (jax.grad, 10),
    "jit of grad": (lambda f: jax.jit(jax.grad(f)), 10),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("transform", CALLED)
def test_a_callback_in_the_body_runs_once_a_step(transform):
    transformation, max_steps = CALLED[transform]
    calls = []

    def body(c):
        jax.debug.callback(lambda i: calls.append(int(i)), c[0])
        return c[0] + 1, jnp.sin(c[1])

    def f(x):
        return ta.while_loop(up_to(4), body, (0, x), max_steps=max_steps)[1]

    jax.block_until_ready(transformation(f)(0.5))
    jax.effects_barrier()
    assert sorted(calls) == [0, 1, 2, 3]


EFFECTS = {
    "debug": lambda f, i: jax.debug.callback(f, i),
    "ordered debug": lambda f, i: jax.debug.callback(f, i, ordered=True),
    "io": lambda f, i: jax.experimental.io_callback(f, None, i),
}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("effect", EFFECTS)
def test_effects_in_the_body_happen_whether_the_result_is_used_or_not(effect, used):
    calls = []

    def body(c):
        EFFECTS[effect](lambda i: calls.append(int(i)), c)
        return c + 1

    def f(x):
        y = ta.while_loop(lambda c: c < 3, body, x)
        return y if used else x

    jax.block_until_ready(jax.jit(f)(0))
    jax.effects_barrier()
    assert sorted(calls) == [0, 1, 2]


#: Every transformation with every effect and with every bound.
ASKED = [
    (transform, max_steps, effect)
    for k, transform in enumerate(["eager", "jit", "without jit", "vmap", "gradient"])
    for j, max_steps in enumerate([None, 2, 9])
    for i, effect in enumerate(EFFECTS)
    if (i + j + k) % 3 == 0
]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("transform", "max_steps", "effect"), ASKED)
def test_a_condition_is_asked_before_each_step_and_at_the_end(effect, max_steps, transform):
    calls = []

    def goes_on(c):
        EFFECTS[effect](lambda i: calls.append(int(i)), c[0])
        return c[0] < 3

    def f(x, **how):
        options = {"max_steps": max_steps, "on_limit": "stop", "return_steps": True} | how
        return ta.while_loop(goes_on, lambda c: (c[0] + 1, 2 * c[1]), (0, x), **options)

    def with_aux(x, **how):
        y = f(x, **how)
        return y[0][1], y

    if transform == "gradient" and max_steps is not None:
        (carry, steps), slope = (found := jax.value_and_grad(with_aux, has_aux=True)(0.5))[0][1], found[1]
        back = ta.residuals.Inverse(lambda c: (c[0] - 1, c[1] / 2), check=True)
        jax.effects_barrier()
        before = list(calls)
        assert slope == jax.grad(with_aux, has_aux=True)(0.5, residuals=back)[0] == carry[1] / 0.5
        jax.effects_barrier()
        calls[:] = before
    elif transform == "vmap" and effect == "debug":
        carry, steps = jax.tree.map(lambda x: x[0], jax.vmap(f)(jnp.array([0.5])))
    else:
        with jax.disable_jit(transform == "without jit"):
            carry, steps = (jit(f) if transform == "jit" else f)(0.5)
    jax.effects_barrier()
    taken = min(3, max_steps or 3)
    assert (carry[0], carry[1], steps.taken, steps.cut) == (taken, 0.5 * 2**taken, taken, taken < 3)
    assert sorted(calls) == list(range(taken + 1))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("max_steps", [None, 9])
def test_what_a_condition_writes_to_a_ref_is_what_jax_writes(max_steps):
    def f(loop, asked):
        def goes_on(c):
            asked[...] += 1
            return asked[...] < 4

        return loop(goes_on, lambda c: c + 1, 0)

    found = []
    for loop in (
        lax.while_loop,
        functools.partial(ta.while_loop, max_steps=max_steps),
        lambda *args: ta.while_loop(*args, max_steps=max_steps, return_steps=True)[0],
    ):
        asked = jax.new_ref(0)
        found.append((int(jit(functools.partial(f, loop))(asked)), int(asked[...])))
    assert found == [found[0]] * 3


def own_end(loop, x):
    return loop(lambda c: c[0] < x, lambda c: (c[0] + 1, 2 * c[1] + lax.axis_index("batch")), (0, x))[1]


def over_the_batch(f, loop, x):
    return loop(up_to(2), lambda c: (c[0] + 1, f(c[1])), (0, x))[1]


NAMED = {
    "sum": (functools.partial(over_the_batch, lambda y: y + lax.psum(y, "batch")), [36.0, 37, 39]),
    "index": (functools.partial(over_the_batch, lambda y: y + lax.axis_index("batch")), [1.0, 4, 8]),
    "index, and ends of their own": (own_end, [2.0, 11, 94]),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", NAMED)
def test_named_axes_inside_the_body(name):
    f, wanted = NAMED[name]
    xs = jnp.array([1.0, 2.0, 4.0])

    def run(loop):
        return jax.vmap(functools.partial(f, loop), axis_name="batch")

    def of_each(loop):
        return jax.vmap(jax.grad(functools.partial(f, loop)), axis_name="batch")

    def in_jax(cond, body, c):  # of two steps
        return lax.fori_loop(0, 2, lambda _, c: body(c), c)

    for loop in (ta.while_loop, OURS.while_loop):
        np.testing.assert_array_equal(run(loop)(xs), wanted)
    if f is not own_end:
        found, want = (
            jit(lambda xs, loop=loop: (jax.jacrev(run(loop))(jnp.sin(xs)), of_each(loop)(xs)))(xs)
            for loop in (OURS.while_loop, in_jax)
        )
        np.testing.assert_allclose(found[0], want[0], rtol=TOLERANCE)
        np.testing.assert_allclose(found[1], want[1], rtol=TOLERANCE)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("transform", "how"),
    [
        (lambda f: f, {}),
        (jax.jit, {"max_steps": 3, "on_limit": "stop"}),
        (lambda f: lambda x: jax.vmap(f)(x[None]), {"max_steps": 3, "on_limit": "stop"}),
        (lambda f: lambda x: jax.vmap(f)(x[None]), {"max_steps": 9}),
    ],
)
def test_refs_in_the_body_are_updated_as_by_jax(transform, how):
    def f(x):
        ref = jax.new_ref(jnp.zeros(5))

        def body(c):
            ref[c[0]] = c[1]
            return c[0] + 1, c[1] * 2

        last = ta.while_loop(lambda c: c[0] < 4, body, (0, x), **how)[1]
        return last, ref[...]

    wanted = [8.0, [1, 2, 4, 0, 0]] if how.get("max_steps") == 3 else [16.0, [1, 2, 4, 8, 0]]
    last, rows = transform(f)(jnp.float64(1))
    np.testing.assert_array_equal(jnp.ravel(last), wanted[:1])
    np.testing.assert_array_equal(jnp.ravel(rows), wanted[1])


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("transform", [lambda f: f, jax.grad], ids=["value", "grad"])
def test_a_batch_of_no_examples(transform):
    f = transform(loss(functools.partial(PROGRAMS["a_checkpointed_loop"], OURS)))
    assert jax.vmap(f)(jnp.zeros((0, 2 + ROWS)), jnp.zeros(0, int)).shape[0] == 0


def test_integer_arguments_have_tangents_of_no_dtype():
    def f(x, n):
        i, y = ta.while_loop(up_to(n), lambda c: (c[0] + 1, c[1] * x), (0, 1.0), max_steps=9)
        return y, i

    (y, i), (y_dot, i_dot) = jax.jvp(f, (3.0, 2), (1.0, np.zeros((), jax.dtypes.float0)))
    assert (y, i, y_dot) == (9, 2, 6)
    assert i_dot.dtype == jax.dtypes.float0
    _, pull = jax.vjp(f, 3.0, 2)
    x_ct, n_ct = pull((1.0, np.zeros((), jax.dtypes.float0)))
    assert x_ct == 6
    assert n_ct.dtype == jax.dtypes.float0


# --- what a body would do after the end ------------------------------------------------------------------------


def divides(loop, x, n):
    """It would divide by zero after the last step."""
    return loop(lambda c: c[0] > 0, lambda c: (c[0] - 1, c[1] + x / c[0]), (1.0 * n, x))[1]


def takes_roots(loop, x, n):
    """It would take the root of zero, where that has no derivative."""
    return loop(lambda c: c[0] > 0, lambda c: (c[0] - x, c[1] + jnp.sqrt(c[0])), (n * x, x))[1]


@pytest.mark.slow
@pytest.mark.parametrize("f", [divides, takes_roots])
def test_what_a_finished_example_would_do_leaves_no_nan(f):
    @jit
    def found(x, ns):
        ours = functools.partial(f, OURS.while_loop)
        batched = jax.vmap(ours, (None, 0))
        first = {
            "vmap of grad": jax.vmap(jax.grad(ours), (None, 0))(x, ns),
            "vmap of jacfwd": jax.vmap(jax.jacfwd(ours), (None, 0))(x, ns),
            "jvp of vmap": jax.jvp(lambda x: batched(x, ns), (x,), (1.0,))[1],
            "grad of vmap": jax.grad(lambda xs: jnp.sum(jax.vmap(ours)(xs, ns)))(jnp.full(len(ns), x)),
        }
        shared = jax.grad(lambda x: jnp.sum(batched(x, ns)))(x)
        return first, shared, jax.vmap(jax.hessian(ours), (None, 0))(x, ns)

    ns = np.array([0, 1, 2, 4])
    python = [functools.partial(f, python_while, n=int(n)) for n in ns]
    wanted, second = ([evaluated(d(g), 0.5) for g in python] for d in (jax.grad, jax.hessian))
    first, shared, hessians = found(0.5, ns)
    for transform, d in first.items():
        assert_close(d, wanted, transform)
    np.testing.assert_allclose(shared, sum(wanted), rtol=TOLERANCE)
    assert_close(hessians, second)


# --- compiled once ---------------------------------------------------------------------------------------------

_compilations = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: _compilations.append(event) if "backend_compile" in event else None
)


def predicate(c):
    return c[0] < 4


def body_of_a_row(c):
    return c[0] + 1, ta_write(c[1], c[0], jnp.sin(ta_read(c[1], 1)))


EAGER = {
    "value": lambda f: f,
    "grad": jax.grad,
    "jvp": lambda f: lambda b: jax.jvp(f, (b,), (b,))[1],
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("transform", "residuals"), [("value", "tape"), ("grad", "tape"), ("grad", "recompute"), ("jvp", "recompute")]
)
def test_repeated_eager_calls_compile_once(transform, residuals):
    def f(b):
        return ta.while_loop(predicate, body_of_a_row, (0, b), max_steps=9, residuals=residuals)[1][3]

    call = EAGER[transform](f)
    buffers = [jnp.asarray(b) for b in np.eye(5)]
    for b in buffers[:2]:
        call(b)
    before = len(_compilations)
    for b in buffers[2:]:
        call(b)
    assert len(_compilations) == before


# --- errors ----------------------------------------------------------------------------------------------------

MISFITS = {
    "structure": (lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1], c[1]), (0, 1.0)),
    "keys": (lambda c: c["a"] < 3, lambda c: {"b": c["a"]}, {"a": 1.0}),
    "dtype": (lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1].astype(int)), (0, jnp.ones(3))),
    "shape": (lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1][:2]), (0, jnp.ones(3))),
    "none": (lambda c: c < 3, lambda c: None, 0),
    "condition that is not a bool": (lambda c: c, lambda c: c + 1, 0),
    "condition that is an array": (lambda c: c < 3, lambda c: c + 1, jnp.zeros(2)),
    "condition that is a pair": (lambda c: (c < 3, c), lambda c: c + 1, 0),
    "no function": (lambda c: c < 3, 5, 0),
}


def message(f, *args, **kwargs):
    with pytest.raises((TypeError, ValueError)) as error:
        f(*args, **kwargs)
    return type(error.value), str(error.value)


def test_numbers_that_are_no_arrays_are_not_scanned():
    """Over a list of numbers. Each is a leaf of `xs`."""
    calls = [functools.partial(loop, lambda c, x: (c + 1, x), 0, [1, 2]) for loop in (lax.scan, ta.scan)]
    assert message(calls[1]) == message(calls[0])


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("loop", ["scan", "fori_loop"])
def test_unroll_means_what_jax_means_by_it(loop):
    def step(c, x):
        return jnp.sin(c * x), None

    def program(lib, unroll):
        if loop == "scan":
            return lambda xs: lib.scan(step, 1.0, xs, unroll=unroll)[0]
        return lambda xs: lib.fori_loop(0, 4, lambda i, c: step(c, xs[i])[0], 1.0, unroll=unroll)

    for unroll in (1, True, 2, False):  # some are equal
        ours, jaxs = (jax.jit(program(lib, unroll)).lower(jnp.ones(4)).as_text() for lib in (ta, lax))
        assert ours.count("sine") == jaxs.count("sine")


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_said_in_the_words_of_jax(name):
    cond_fun, body_fun, init = MISFITS[name]
    for jitted in (lambda f: f, jax.jit):

        def by(loop, **options):
            return jitted(functools.partial(loop, cond_fun, body_fun, init, **options))  # noqa: B023

        wanted = message(by(lax.while_loop))
        assert message(by(ta.while_loop)) == wanted
        assert message(by(ta.while_loop, max_steps=3, return_steps=True)) == wanted
    for traced in (False, True) if name in ("structure", "dtype", "shape") else ():

        def counted_by(loop, **options):
            return jax.jit(lambda n: loop(0, n if traced else 3, lambda i, c: body_fun(c), init, **options))  # noqa: B023

        wanted = message(counted_by(lax.fori_loop), 3)
        assert message(counted_by(ta.fori_loop), 3) == wanted
        assert message(counted_by(ta.fori_loop, max_steps=3), 3) == wanted


@pytest.mark.parametrize("loop", ["while_loop", "fori_loop"])
@pytest.mark.parametrize(
    ("value", "error"),
    [(True, TypeError), (2.0, TypeError), ("3", TypeError), (-1, ValueError), (jnp.int32(3), TypeError)],
)
def test_max_steps_must_be_a_python_integer(loop, value, error):
    args = (lambda c: c < 3, lambda c: c + 1, 0) if loop == "while_loop" else (0, 3, lambda i, c: c, 0)
    with pytest.raises(error, match=f"^{loop}: max_steps must"):
        getattr(ta, loop)(*args, max_steps=value)


def unlimited(x):
    return ta.while_loop(lambda y: y < 10.0, lambda y: y * x, 1.0 + x)


def unlimited_fori(x, n=3):
    return jax.jit(lambda n: ta.fori_loop(0, n, lambda i, y: y * x, 1.0))(n)


REVERSED = {
    "grad": lambda f: jax.grad(f),
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "jit of grad of checkpoint": lambda f: jax.jit(jax.grad(jax.checkpoint(f))),
    "vmap of grad": lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, x])),
    "grad of vmap": lambda f: jax.grad(lambda x: jnp.sum(jax.vmap(f)(jnp.stack([x, 2 * x])))),
    "linear_transpose": lambda f: lambda x: jax.linear_transpose(jax.linearize(f, x)[1], x)(1.0),
    "hessian": jax.hessian,
    "grad of jvp": lambda f: jax.grad(lambda x: jax.jvp(f, (x,), (1.0,))[1]),
    "grad in a scan": lambda f: jax.grad(lambda x: lax.scan(lambda c, _: (f(c), None), x, length=2)[0]),
    "grad in a cond": lambda f: jax.grad(lambda x: lax.cond(x > 0, f, lambda x: x, x)),
    "grad in a loop": lambda f: jax.grad(
        lambda x: ta.while_loop(up_to(2), lambda c: (c[0] + 1, f(c[1])), (0, x), max_steps=3)[1]
    ),
    "grad in a checkpointed body": lambda f: jax.grad(
        lambda x: ta.while_loop(up_to(2), jax.checkpoint(lambda c: (c[0] + 1, f(c[1]))), (0, x), max_steps=3)[1]
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("f", [unlimited, unlimited_fori])
@pytest.mark.parametrize("transform", REVERSED)
def test_reverse_mode_without_max_steps_names_it_and_the_line(transform, f):
    line = f.__code__.co_firstlineno + 1
    with pytest.raises(ValueError, match=rf"{Path(__file__).name}:{line} .*max_steps"):
        REVERSED[transform](f)(2.0)


def test_a_loop_with_an_ordered_effect_and_a_ref_reads_elements_by_a_kernel():
    """JAX binds the ops of such a loop again while it lowers the loop, when passes have settled their indices."""
    buffer, asked = np.arange(12.0).reshape(4, 3), []

    @jax.jit
    def f(n):
        seen = jax.new_ref(jnp.int32(0))

        def goes_on(c):
            io_callback(lambda i: asked.append(int(i)), None, c[0], ordered=True)
            return c[0] < n

        def step(c):
            i, b = c
            seen[...] += i
            at = (i % 4, i % 3)
            return i + 1, ta.ta_add(b, at, ta_read(b, at, lowering="ffi"), lowering="ffi")

        return (*lax.while_loop(goes_on, step, (jnp.int32(0), buffer)), seen[...])

    want = buffer.copy()
    for i in range(5):
        want[i % 4, i % 3] *= 2
    _, got, seen = f(5)
    np.testing.assert_array_equal(got, want)
    jax.effects_barrier()
    assert seen == 10 and asked == [*range(6)]


LOOPS_WITH_REFS = {
    "while": lambda lib, step, b: lib.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, step(*c)), (0, b))[1],
    "while, max_steps": lambda lib, step, b: ta.while_loop(
        lambda c: c[0] < 4, lambda c: (c[0] + 1, step(*c)), (0, b), max_steps=9
    )[1],
    "fori": lambda lib, step, b: lib.fori_loop(0, 4, step, b),
    "scan": lambda lib, step, b: lib.scan(lambda b, i: (step(i, b), None), b, jnp.arange(4))[0],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS_WITH_REFS)
def test_a_step_may_make_refs(name):
    """The oracle is the loop unrolled, with arrays: the gradient of JAX's own loops with refs is wrong up to 0.12."""

    def step(i, b):
        ref = jax.new_ref(b)
        ref[i] = jnp.sin(ref[(i + 1) % 4]) + ref[0]
        return ref[...]

    def unrolled(b):
        for i in range(4):
            b = b.at[i].set(jnp.sin(b[(i + 1) % 4]) + b[0])
        return b

    def f(b):
        return LOOPS_WITH_REFS[name](ta, step, b)

    b = jnp.linspace(0.1, 1, 8).reshape(4, 2)
    orders = [lambda f: f, jit, lambda f: jit(jax.vmap(f, 1, 1)), lambda f: lambda b: jax.jvp(f, (b,), (b,))[1]]
    if name != "while":
        orders.append(lambda f: jax.grad(lambda b: jnp.sum(f(b) ** 2)))
    for order in orders:
        np.testing.assert_allclose(order(f)(b), order(unrolled)(b), rtol=1e-9)
