"""Each way to keep residuals stores what it says, chooses well, and is right in hard cases.

`test_loops_in_loops.py` has its derivatives in general."""

import dataclasses
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_numpy import in_numpy
from in_place import assert_no_whole_buffer_copy, compiled
from jax import jit, lax
from waiting import finish

from jax_tensorarray import fori_loop, in_place, scan, ta_add, ta_read, ta_write, while_loop
from jax_tensorarray.residuals import Auto, Checkpoint, Choice, Inverse, Recompute, Tape, Undo, explain

MOST = 20


def assert_same(ours, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), ours, wanted)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_checkpoints_are_where_the_fewest_steps_are_run(slots):
    calls = []

    @functools.cache
    def fewest(steps, slots):
        """Steps run to reverse `steps` of them with so many carries kept, the first among them."""
        if steps == 1:
            return 0
        if slots == 1:
            return steps * (steps - 1) // 2
        return min(m + fewest(steps - m, slots - 1) + fewest(m, slots) for m in range(1, steps))

    def body(c):
        jax.debug.callback(lambda: calls.append(1))
        return c[0] + 1, jnp.sin(c[1])

    @jit
    @jax.grad
    def gradient(x, steps):
        return while_loop(lambda c: c[0] < steps, body, (0, x), max_steps=MOST, residuals=Checkpoint(slots))[1]

    for steps in (1, 2, 5, 10, 19):
        calls.clear()
        jax.block_until_ready(gradient(0.5, steps))
        jax.effects_barrier()
        assert len(calls) == steps + fewest(steps, slots) + steps  # forward, again, and once for each derivative


def test_a_loop_that_a_step_runs_backwards_is_undone_forwards():
    """The transpose of a loop visits its steps from the last to the first. Here it writes a row twice."""
    rows = jnp.array([1, 2, 1])

    def doubled(b):
        def body(state):
            k, b = state
            return k + 1, ta_write(b, rows[k], 2 * ta_read(b, rows[k]))

        return while_loop(lambda state: state[0] < 3, body, (0, b), max_steps=3)[1]

    def loss(b):
        def step(_, state):
            b, total = state
            (b,) = jax.linear_transpose(doubled, b)(b)
            return b, total + jnp.sum(jnp.sin(b))

        return fori_loop(0, 3, step, (b, 0.0), residuals=Undo())[1]

    b, factors = np.linspace(0.1, 1.0, 2000, dtype=np.float32), np.ones(2000, np.float32)
    factors[1:3] = 4, 2
    expected = sum(factors**k * np.cos(b * factors**k) for k in (1, 2, 3))
    np.testing.assert_allclose(jit(jax.grad(loss))(b), expected, rtol=1e-4)


def test_the_loop_of_a_gradient_is_undone_when_it_is_differentiated():
    """Its cotangent of the buffer is updated by rows, and its derivative reads all of each version."""
    start = jnp.cos(jnp.arange(2000.0))

    def by_loop(u, y):
        def step(state):
            k, b, y = state
            return k + 1, ta_write(b + u * y, k, y), jnp.sin(y) + 0.5

        return while_loop(lambda state: state[0] < 4, step, (0, start, y), max_steps=4)[1]

    def unrolled(u, y):
        b = start
        for k in range(4):
            b, y = (b + u * y).at[k].set(y), jnp.sin(y) + 0.5
        return b

    def second(f):
        gradient = jax.grad(lambda u, y: jnp.sum(jnp.sin(f(u, y))))
        return jit(jax.grad(lambda u, y: jnp.sum(gradient(u, y) * start), (0, 1)))(jnp.linspace(0.1, 1.0, 2000), 0.3)

    for found, expected in zip(second(by_loop), second(unrolled), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def rotated(x, w, back, n=5, check=False):
    """A leapfrog: each half is updated from the other."""

    def body(c):
        i, p, q = c
        p = p - 0.1 * w * jnp.sin(q)
        return i + 1, p, q + 0.1 * p

    return while_loop(lambda c: c[0] < n, body, (0, x, x), max_steps=9, residuals=Inverse(back, check))[2]


def leap_back(w, c, step=0.1):
    """It is the inverse with a step of 0.1, and goes too far with a longer one."""
    i, p, q = c
    q = q - step * p
    return i - 1, p + 0.1 * w * jnp.sin(q), q


CHECKED = {
    "grad": lambda f: jax.grad(f, (0, 1)),
    "vmap": lambda f: lambda x, w: jax.vmap(jax.grad(f, (0, 1)), (0, None))(jnp.stack([x, 2 * x]), w),
    "own ends": lambda f: (
        lambda x, w: jax.vmap(lambda x, n: jax.grad(f, (0, 1))(x, w, n=n))(jnp.stack([x, x]), jnp.array([3, 0]))
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("transform", CHECKED)
def test_an_inverse_that_is_none_is_found_out(transform):
    def run(check):
        def gradients(step):
            def f(x, w, **n):
                return rotated(x, w, functools.partial(leap_back, w, step=step), check=check, **n)

            return CHECKED[transform](f)(0.5, 2.0)

        compiled = jit(gradients)
        return lambda step: jax.block_until_ready(compiled(step))

    unchecked = run(False)
    wanted = unchecked(0.1)
    for check in (1e-9, True):
        checked = run(check)
        assert_same(checked(0.1), wanted)
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="inverse is not the inverse of body_fun"):
            checked(0.2)
    if transform == "grad":
        unchecked(0.2)  # unless it is asked for, there is no check
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="is not the inverse"):
            run(0)(0.2)


@pytest.mark.slow
def test_an_example_that_has_ended_in_a_loop_around_has_nothing_to_check():
    def inner(x, w, n):
        kept = Inverse(lambda c: (c[0] - 1, (c[1] - w) / 1.1), check=1e-9)
        how = {"max_steps": 5, "residuals": kept}
        return while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 1.1 + w), (0, x), **how)[1]

    def outer(x, w, n):
        def body(c):
            return c[0] + 1, jnp.sin(inner(w, c[1], c[0]))

        return while_loop(lambda c: c[0] < n, body, (0, x), max_steps=5)[1]

    def plain(x, w, n):
        for k in range(n):
            y = w
            for _ in range(k):
                y = y * 1.1 + x
            x = jnp.sin(y)
        return x

    x, w, ns = np.array([0.1, 0.2, 0.3]), np.array([0.5, 0.6, 0.7]), np.array([0, 2, 4])
    wanted = [
        in_numpy(jax.grad(functools.partial(plain, n=n), (0, 1)))(*each) for *each, n in zip(x, w, ns, strict=True)
    ]
    wanted = tuple(np.stack(gs) for gs in zip(*wanted, strict=True))
    assert_same(jit(jax.vmap(jax.grad(outer, (0, 1))))(x, w, ns), wanted)
    assert_same(jit(jax.grad(lambda x, w: jax.vmap(outer)(x, w, ns).sum(), (0, 1)))(x, w), wanted)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_the_message_says_which_carry_is_off_and_by_how_much(dtype):
    found = rf"test_residuals.py:\d+: .* to its start, carry number 1, {dtype}\[\], is off by 0\.\d+"
    with pytest.raises(ValueError, match=found):
        back = functools.partial(leap_back, 2.0, step=0.2)
        jax.grad(lambda x: rotated(x, 2.0, back, check=1e-3))(jnp.asarray(0.5, dtype))


@pytest.mark.slow
def test_rows_that_no_step_reads_need_no_inverse():
    def step(c, x):
        return c * x, c

    xs = jnp.linspace(0.5, 1.5, 7)

    def f(xs, **how):
        c, ys = scan(step, 2.0, xs, **how)
        return c + ys.sum()

    ours = jax.grad(functools.partial(f, residuals=Inverse(lambda c, x: c / x, check=1e-9)))(xs)
    np.testing.assert_allclose(ours, jax.grad(f)(xs), rtol=1e-12)


SHARED = {
    "grad": lambda f: jax.grad(f, (0, 1)),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f, (0, 1))),
    "grad of vmap": lambda f: jax.grad(lambda x, w, n: jax.vmap(f)(x, w, n).sum(), (0, 1)),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("transform", SHARED)
def test_what_all_steps_share_is_kept_once(transform):
    """A matrix, a function of it, and the mask of a `where`: a tape holds vectors only."""

    def f(x, w, n):
        def body(c):
            i, y = c
            y = jnp.tanh(jnp.exp(w) @ y + w.T @ y)
            return i + 1, jnp.where(jnp.arange(64)[:, None] < 32, y[:, None], jnp.broadcast_to(y[0], (64, 1)))[:, 0]

        return while_loop(lambda c: c[0] < n, body, (0, x), max_steps=1000)[1].sum()

    def plain(x, w, n):
        def body(y, i):
            new = jnp.tanh(jnp.exp(w) @ y + w.T @ y)
            new = jnp.where(jnp.arange(64) < 32, new, new[0])
            return jnp.where(i < n, new, y), None

        return lax.scan(body, x, jnp.arange(10))[0].sum()

    args = np.linspace(0.1, 0.9, 64), np.linspace(-0.04, 0.01, 64 * 64).reshape(64, 64), np.array(7)
    if "vmap" in transform:
        args = tuple(np.stack([a, a // 2 if a.ndim == 0 else a / 2]) for a in args)
    ours = jax.jit(SHARED[transform](f)).lower(*args).compile()
    assert_same(ours(*args), in_numpy(SHARED[transform](plain))(*args))
    matrices = 1000 * 64 * 64 * 8
    assert ours.memory_analysis().temp_size_in_bytes < matrices / 4


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("nested", [False, True])
def test_a_loop_of_no_steps_does_not_look_at_a_shared_index(nested):
    def f(x, b, k, n):
        def row(b):
            return ta_read(b, k)

        def body(c):
            return c[0] + 1, c[1] * jnp.sin(lax.cond(k > 0, row, lambda b: b[0], b) if nested else row(b))

        return while_loop(lambda c: c[0] < n, body, (0, x), max_steps=5)[1]

    g = jax.jit(jax.grad(f))
    assert g(2.0, jnp.ones(3), 3, 0) == 1
    np.testing.assert_allclose(g(2.0, jnp.ones(3), 2, 2), np.sin(1) ** 2, rtol=1e-12)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="ta_read: index 3 is out of range"):
        finish(g(2.0, jnp.ones(3), 3, 1))


def test_what_auto_chooses():
    def of(step, x, n=1000, **how):
        [choice] = explain(lambda x: fori_loop(0, n, step, x), **how)(x)
        return choice

    def rows(i, b):
        return ta_write(b, i, jnp.sin(ta_read(b, i // 2)))

    def whole(i, b):
        return ta_write(b, i, jnp.dot(b, b))

    def by_branches(i, b):
        return lax.cond(i > 2, lambda b: ta_write(b, i, jnp.dot(b, b)), lambda b: b, b)

    def overwritten(i, b):  # nothing of it can be restored
        return jnp.sin(b) * jnp.dot(b, b)

    b = jnp.ones(1000)
    chosen = of(whole, b)
    assert (chosen.residuals, chosen.steps, chosen.largest) == ("undo", 1000, "float64[1000]")
    assert chosen.undo_bytes < 100 < 8000 <= chosen.tape_bytes
    assert f"{Path(__file__).name}:" in chosen.loop
    assert "tape 8" in str(chosen)
    assert isinstance(chosen, Choice)
    with pytest.raises(dataclasses.FrozenInstanceError):
        chosen.residuals = "tape"
    with pytest.raises(TypeError, match="positional"):
        Choice("tape", "why", 1, 2)
    assert of(by_branches, b).undo_bytes < 100
    assert of(rows, b).residuals == of(overwritten, b).residuals == "tape"


@pytest.mark.parametrize(
    ("of_all", "rows", "chosen"),
    [
        (lambda b: jnp.mean(jnp.exp(-b)), 100, "tape"),
        (lambda b: jnp.mean(jnp.exp(-b)), 400, "undo"),  # a tape of 10 MB
        (lambda b: jnp.mean(b * b), 100, "undo"),  # nothing is computed again
        (lambda b: jnp.mean(jax.nn.softmax(b @ b[0]) @ b), 100, "undo"),  # `exp` of a number for each row
        (lambda b: jnp.mean(b * b) * lax.fori_loop(0, 100, lambda k, x: x + b[k, 0] ** 2, 0.0), 100, "undo"),
    ],
)
def test_a_small_tape_is_kept_if_undo_would_compute_much_again(of_all, rows, chosen):
    def f(b):
        return lax.fori_loop(0, rows, lambda i, b: b.at[i].set(jnp.tanh(of_all(b)) + b[i]), b)

    [choice, *_] = explain(f)(jax.ShapeDtypeStruct((rows, 8), jnp.float64))
    assert choice.residuals == chosen
    assert choice.undo_bytes < choice.tape_bytes / 10

    def bytes_of(gradient):
        compiled = jax.jit(gradient).lower(jax.ShapeDtypeStruct((rows, 8), jnp.float64)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    plain, ours = bytes_of(jax.grad(lambda b: jnp.sum(f(b)))), bytes_of(jax.grad(in_place(lambda b: jnp.sum(f(b)))))
    assert ours < plain / 5 if chosen == "undo" else ours < 1.1 * plain


def test_what_each_loop_of_a_function_chooses():
    def f(x, b):
        b = lax.fori_loop(0, 9, lambda i, b: b.at[i].set(b.sum(0)), b)  # of JAX
        b = while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 1, ta_write(c[1], c[0], c[1].sum(0) ** 2)), (0, b))[1]

        def outer(c, _):
            return lax.scan(lambda c, _: (jnp.sin(c), None), c, None, length=5)[0], None

        return lax.scan(outer, x, None, length=7)[0], lax.while_loop(lambda b: b.sum() < 0, jnp.sin, b)

    arrays = jnp.ones(3), jax.ShapeDtypeStruct((200, 5), jnp.float64)
    choices = explain(f)(*arrays)
    assert [c.loop.split()[0] for c in choices] == ["scan", "while", "scan", "scan", "while"]
    assert [c.residuals for c in choices] == ["tape", "none", "tape", "tape", "none"]
    assert "max_steps" in choices[1].reason
    assert [c.steps for c in choices] == [9, None, 7, 5, None]
    assert choices[0].tape_bytes < 100  # a sum needs nothing, and the write an index
    assert explain(f, max_steps=20)(*arrays)[-1].residuals == "tape"
    assert explain(lambda x: lax.fori_loop(0, 9, lambda i, x: x, 1))(1.0) == []
    kept = while_loop, lambda x: (lambda c: c[0] < 9, lambda c: (c[0] + 1, c[1] * x), (0, x))
    named = explain(lambda x: kept[0](*kept[1](x), max_steps=9, residuals=Checkpoint(3)))(2.0)
    assert [(c.residuals, c.reason) for c in named] == [("Checkpoint", "the loop says so")]
    told = explain(in_place(lambda x: lax.fori_loop(0, 9, lambda i, x: jnp.sin(x), x), residuals="checkpoint"))(2.0)
    assert [(c.residuals, c.checkpoints) for c in told] == [("checkpoint", 1)]
    with pytest.raises(TypeError, match=r"residuals.explain: fun must be callable, got 1"):
        explain(1)
    with pytest.raises(ValueError, match="memory must be a number of bytes"):
        explain(f, memory=-1)


@pytest.mark.slow
def test_what_takes_too_much_memory_gives_way_to_checkpoints():
    def of(step, x, **how):
        [choice] = explain(lambda x: fori_loop(0, many, step, x), **how)(x)
        return choice

    start, many = jnp.ones(100), 2000  # 800 bytes a step, and 812 a carry
    assert of(lambda i, x: jnp.sin(x), start, memory=800 * many).residuals == "tape"
    chosen = of(lambda i, x: jnp.sin(x), start, memory=800 * many - 1)
    assert (chosen.residuals, chosen.checkpoints) == ("checkpoint", (800 * many - 1) // 812)
    # Five of them reverse 1287 steps if each is run nine times, and six 3003.
    assert of(lambda i, x: jnp.sin(x), start, memory=0).checkpoints == 6
    assert of(lambda i, x: jnp.sin(jnp.sin(jnp.sin(x))), start, memory=1000 * many).residuals == "undo"

    def by_rows(i, b):  # whose carries are large
        return ta_write(b, i, jnp.sin(ta_read(b, i // 2)))

    assert of(by_rows, jnp.ones((many, 4)), memory=1).residuals == "tape"

    def body(c):
        return c[0] + 1, jnp.sin(c[1])

    loops = [
        lambda x, **how: while_loop(lambda c: c[0] < 7, body, (0, x), max_steps=many, **how)[1],
        lambda x, **how: fori_loop(0, many, lambda i, x: lax.select(i < 7, jnp.sin(x), x), x, **how),
        lambda x, **how: scan(lambda x, i: (lax.select(i < 7, jnp.sin(x), x), i), x, jnp.arange(many), **how)[0],
    ]
    x = jnp.linspace(0, 1, 100)
    want = in_numpy(jax.grad(lambda x: jnp.sum(functools.reduce(lambda y, _: jnp.sin(y), range(7), x))))(x)
    for loop in (functools.partial(loop, residuals=Auto(memory=100_000)) for loop in loops):
        within = jax.jit(jax.grad(lambda x, loop=loop: jnp.sum(loop(x)))).lower(x).compile()
        assert within.memory_analysis().temp_size_in_bytes < 200_000
        np.testing.assert_allclose(within(x), want, rtol=1e-10)


LOOPS = {
    "while_loop": lambda **how: while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, 1.0), **{"max_steps": 5} | how
    ),
    "fori_loop": lambda **how: fori_loop(0, 3, lambda i, c: c, 0, **how),
    "scan": lambda **how: scan(lambda c, x: (c + x, c), 0.0, jnp.arange(3.0), **how),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("residuals", "message"),
    [
        ("none", "residuals must be one of auto, tape, recompute, undo, or an object like Undo.*; got 'none'$"),
        ("", "residuals must be one of auto, tape"),
        (None, "residuals must be one of auto, tape"),
        (True, "residuals must be one of auto, tape"),
        (["tape"], "residuals must be one of auto, tape"),
        (Undo, "residuals must be one of auto, tape.* like Undo"),
        ("checkpoint", r"residuals must be one of auto, .*; got 'checkpoint'; write residuals=Checkpoint\(16\)"),
        ("inverse", r"residuals must be one of auto, .*; got 'inverse'; write residuals=Inverse\(f\)"),
    ],
)
def test_residuals_are_a_name_or_an_object(loop, residuals, message):
    if (loop, residuals) == ("fori_loop", "inverse"):
        message = r"Inverse is for while_loop and scan; write residuals=Undo\(\) or Checkpoint\(16\)"
    with pytest.raises(ValueError, match=f"^{loop}: {message}"):
        LOOPS[loop](residuals=residuals)


@pytest.mark.parametrize("residuals", ["undo", Undo(), Checkpoint(3), Inverse(abs), Auto(memory=9)])
def test_what_keeps_no_tape_needs_max_steps(residuals):
    with pytest.raises(ValueError, match=f"while_loop: residuals={re.escape(repr(residuals))} needs max_steps"):
        LOOPS["while_loop"](residuals=residuals, max_steps=None)


def test_a_fori_loop_has_no_inverse():
    with pytest.raises(ValueError, match="fori_loop: Inverse is for while_loop and scan"):
        LOOPS["fori_loop"](residuals=Inverse(abs))


@pytest.mark.parametrize(
    ("make", "given", "error", "message"),
    [
        (Tape, "pinned_host", TypeError, "Tape: offload must be True or False, got 'pinned_host'"),
        (Recompute, 1, TypeError, "Recompute: offload must be True or False, got 1"),
        (Auto, 1e9, ValueError, r"Auto: memory must be a number of bytes, got 1000000000\.0"),
        (Auto, -1, ValueError, "Auto: memory must be a number of bytes, got -1"),
        (Auto, True, ValueError, "Auto: memory must be a number of bytes, got True"),
        (Checkpoint, 0, ValueError, "Checkpoint: carries must be a positive integer, got 0"),
        (Checkpoint, None, ValueError, "Checkpoint: carries must be a positive integer, got None"),
        (Checkpoint, True, ValueError, "Checkpoint: carries must be a positive integer, got True"),
        (Inverse, 1, TypeError, "Inverse: f must be a function from a carry to the one before it, got 1"),
        (functools.partial(Inverse, abs), -0.1, ValueError, "Inverse: check must be True, False or a .*, got -0.1"),
        (functools.partial(Inverse, abs), "yes", ValueError, "Inverse: check must be True, .* got 'yes'"),
    ],
)
def test_what_an_object_must_be_given(make, given, error, message):
    with pytest.raises(error, match=f"^{message}"):
        make(given)


def test_objects_are_values():
    for make in (Tape, Recompute, Undo, Auto, lambda: Auto(9), lambda: Checkpoint(3), lambda: Inverse(abs, check=True)):
        assert make() == make()
        assert hash(make()) == hash(make())
        with pytest.raises(dataclasses.FrozenInstanceError):
            make().anything = 1
    assert Tape() != Recompute()


def write_once(b, i, x):
    return ta_write(b, i, jnp.sin(ta_read(b, i - 1)) * x)


def write_and_read(b, i, x):
    """Write two rows, one of them twice, and read between."""
    b = ta_add(ta_write(b, i, jnp.sin(ta_read(b, i)) * x), i, x)
    return ta_write(b, i - 1, ta_read(b, i) * ta_read(b, i - 1))


def write_and_read_in_jax(b, i, x):
    b = b.at[i].set(jnp.sin(b[i]) * x).at[i].add(x)
    return b.at[i - 1].set(b[i] * b[i - 1])


def with_jvp(f):
    """Return the function with three times the tangents of `x`."""
    g = jax.custom_jvp(f)

    @g.defjvp
    def _(primals, tangents):
        (b, i, x), (db, _, dx) = primals, tangents
        return g(b, i, x), jax.jvp(lambda b, x: f(b, i, x), (b, x), (db, 3 * dx))[1]

    return g


WITHIN = {"jit": jax.jit, "checkpoint": jax.checkpoint, "custom_jvp": with_jvp}
WITHIN["all of them"] = lambda f: jax.checkpoint(jax.jit(with_jvp(f)))


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHIN)
def test_rows_that_a_function_writes_are_undone(name):
    def gradient(loop, f, n):
        def value(x, b):
            end = loop(lambda c: c[0] < n, lambda c: (c[0] + 1, WITHIN[name](f)(c[1], c[0], x)), (1, b))[1]
            return jnp.sum(end**2 * jnp.cos(x))

        return jax.grad(value, (0, 1))

    def python(cond, body, c):
        while cond(c):
            c = body(c)
        return c

    undo = functools.partial(while_loop, max_steps=200, residuals="undo")
    args = jnp.array([0.4, -0.7]), jnp.asarray(np.random.default_rng(0).normal(size=(6, 2)))

    def of_both_orders(f):
        return lambda *args: jax.jvp(f, args, (args[0] + 1, args[1] - 1))

    ours = jit(of_both_orders(gradient(undo, write_and_read, 5)))
    assert_same(ours(*args), in_numpy(of_both_orders(gradient(python, write_and_read_in_jax, 5)))(*args))
    buffer = jnp.ones((200, 2))
    assert_no_whole_buffer_copy(compiled(lambda b: gradient(undo, write_once, 200)(args[0], b), buffer), buffer)


MODES = {
    "tape": lambda back: "tape",
    "recompute": lambda back: "recompute",
    "undo": lambda back: "undo",
    "two checkpoints": lambda back: Checkpoint(2),
    "more checkpoints than steps": lambda back: Checkpoint(10**9),
    "inverse": lambda back: Inverse(back, check=1e-9),
}


def jvp_of_grad(f):
    return lambda x, w: jax.jvp(lambda x: jax.grad(f)(x, w), (x,), (jnp.cos(x),))


def grad_of_grad(f):
    return jax.grad(lambda x, w: sum(jnp.vdot(jnp.cos(g), g) for g in jax.grad(f, (0, 1))(x, w)), (0, 1))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("mode", [*MODES.values(), lambda back: Checkpoint(1)])
def test_loops_of_hardly_a_step(mode):
    residuals = mode(lambda c: (c[0] - 1, c[1] / 3))

    def f(x, n, max_steps):
        how = {"max_steps": max_steps, "on_limit": "stop", "residuals": residuals}
        return while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 3), (0, x), **how)[1]

    gradients = jit(lambda x, n: [jax.grad(f)(x, n, max_steps) for max_steps in (0, 1)])
    assert gradients(2.0, 0) == [1, 1]
    assert gradients(2.0, 5) == [1, 3]


@pytest.mark.slow
def test_checkpoints_cost_no_more_than_they_are_used():
    def gradient(checkpoints, max_steps):
        def f(x):
            def body(c):
                return c[0] + 1, jnp.sin(c[1])

            kept = Checkpoint(checkpoints)
            return while_loop(lambda c: c[0] < 50, body, (0, x), max_steps=max_steps, residuals=kept)[1]

        return jax.jit(jax.grad(f)).lower(0.5)

    wanted = jax.grad(lambda x: functools.reduce(lambda x, _: jnp.sin(x), range(50), x))(0.5)
    for checkpoints, max_steps in ((10**9, 100), (1000, 10**8), (3, 2**31 - 1)):
        lowered = gradient(checkpoints, max_steps)
        assert len(lowered.as_text()) < 10**6  # a table for every number of them and of repetitions would be in it
        compiled = lowered.compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 10**5
        np.testing.assert_allclose(compiled(0.5), wanted, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("derivative", [jvp_of_grad, grad_of_grad])
def test_derivatives_of_second_order_take_memory_for_each_step_once(derivative):
    """The tape of a loop inside of a loop has room for all steps in each step of the outer one."""
    matrix = jnp.asarray(np.random.default_rng(0).normal(size=(6, 6)) / 3)

    def f(x, w, steps, loop):
        return jnp.sum(loop(0, steps, lambda i, x: jnp.tanh(w * matrix @ x), x) ** 2)

    def compiled_for(steps, loop):
        return jit(derivative(functools.partial(f, steps=steps, loop=loop))).lower(jnp.ones(6), 0.7).compile()

    def in_python(start, stop, body, x):
        return functools.reduce(lambda x, i: body(i, x), range(start, stop), x)

    checkpointed = functools.partial(fori_loop, residuals=Checkpoint(5))
    short, long = (compiled_for(steps, checkpointed) for steps in (12, 4 * 400))
    unrolled = in_numpy(derivative(functools.partial(f, steps=12, loop=in_python)))
    assert_same(short(jnp.ones(6), 0.7), unrolled(jnp.ones(6), 0.7))
    limit = 4.5 * compiled_for(400, checkpointed).memory_analysis().temp_size_in_bytes
    assert long.memory_analysis().temp_size_in_bytes < limit


@pytest.mark.slow
def test_what_the_body_prints_and_does_not_use_is_no_residual():
    seen = []

    def f(x):
        def body(c):
            i, y, b = c
            jax.debug.callback(seen.append, ta_read(b, i))
            return i + 1, jnp.sin(y), ta_write(b, i, y)

        return while_loop(lambda c: c[0] < 3, body, (0, x, jnp.arange(3.0)), max_steps=3, residuals="recompute")[1]

    wanted = jax.grad(lambda x: jnp.sin(jnp.sin(jnp.sin(x))))(0.5)
    np.testing.assert_allclose(jax.grad(f)(0.5), wanted, rtol=1e-12)
    jax.effects_barrier()
    assert sorted(set(map(float, seen))) == [0, 1, 2]


def test_a_buffer_that_takes_the_place_of_one_made_anew_is_kept():
    """Before the step it is in another place, and nobody can say what is there after it."""

    def f(x, residuals):
        def step(i, c):
            a, b = c
            return jnp.tanh(a + b) * x, ta_write(a, i, jnp.sum(a * b) * x)

        a, b = fori_loop(0, 5, step, (jnp.full(64, x), jnp.full(64, 0.1)), residuals=residuals)
        return jnp.sum(a * jnp.cos(b))

    ours, wanted = (jit(jax.grad(functools.partial(f, residuals=kept)))(0.3) for kept in ("undo", "tape"))
    assert_same(ours, wanted)


def test_explain_asks_a_loop_with_a_strategy_of_its_own():
    def f(x, residuals):
        return fori_loop(0, 1000, lambda i, x: jnp.sin(x), x, residuals=residuals)

    x = jnp.ones(64)
    kept = [explain(lambda x, s=s: f(x, s))(x)[0] for s in (Auto(memory=10**6), Auto(memory=10**5), Checkpoint(9))]
    assert [choice.residuals for choice in kept] == ["tape", "checkpoint", "Checkpoint"]
    sizes = [jax.jit(jax.grad(lambda x, m=m: jnp.sum(f(x, Auto(memory=m))))).lower(x).compile() for m in (10**6, 10**5)]
    tape, checkpoints = (program.memory_analysis().temp_size_in_bytes for program in sizes)
    assert checkpoints < 0.5 * tape
