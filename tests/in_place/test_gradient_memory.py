"""Gradients of loops that read all of what they have written keep rows, never buffers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_numpy import in_numpy
from in_place import assert_no_whole_buffer_operation, compiled
from jax import lax

from benchmarks.whole_reads import PROGRAMS, bytes_of_buffers
from jax_tensorarray import fori_loop, in_place, scan, ta_read, ta_write, while_loop
from jax_tensorarray.doctor import loop_copies
from jax_tensorarray.residuals import Inverse, Undo, explain

pytestmark = pytest.mark.slow

T = 256  # rows


def bytes_of(program):
    """The memory that XLA takes for a compiled program, besides its arguments and results."""
    return program.memory_analysis().temp_size_in_bytes


def temporary(f, *args):
    return bytes_of(compiled(f, *args))


def gradient(f, args):
    return jax.grad(f, tuple(range(len(args))))


def along(f, args):
    """The derivative of the gradient along a direction."""
    return lambda *args: jax.jvp(lambda x: jax.grad(f)(x, *args[1:]), (args[0],), (jnp.cos(args[0]),))[1]


def twice(f, args):
    return lambda *args: jax.grad(lambda x: jnp.vdot(jax.grad(f)(x, *args[1:]), jnp.cos(args[0])))(args[0])


ORDERS = {
    "grad(in_place)": lambda f, args: gradient(in_place(f), args),
    "in_place(grad)": lambda f, args: in_place(gradient(f, args)),
}
BATCHED = {
    "vmap(grad(in_place))": lambda f, args: of_first(jax.vmap(gradient(in_place(f), args))),
    "in_place(vmap(grad))": lambda f, args: of_first(in_place(jax.vmap(gradient(f, args)))),
    "grad(vmap(in_place))": lambda f, args: of_first(
        gradient(lambda *args: jnp.sum(jax.vmap(in_place(f))(*args)), args)
    ),
}


def of_first(f):
    """The first result of a batch, whose second example is another."""
    return lambda *args: [x[0] for x in f(*(jnp.stack([x, 0.9 * x]) for x in args))]


def close(found, want, message=""):
    for got, x in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, x, rtol=1e-9, atol=1e-11 * np.max(np.abs(x)), err_msg=message)


@pytest.mark.parametrize(("turn", "name"), list(enumerate(PROGRAMS)))
def test_a_gradient_is_right_and_takes_a_few_times_the_buffers(turn, name):
    f, args = PROGRAMS[name](T)
    plain = compiled(gradient(f, args), *args)
    most = min(12 * bytes_of_buffers(f, *args) + 2e5, bytes_of(plain) / 4)
    order = list(ORDERS | BATCHED)[turn % 5]  # the others are those of random programs
    program = compiled((ORDERS | BATCHED)[order](f, args), *args)
    assert bytes_of(program) <= most * (1 + (order in BATCHED)), order
    close(program(*args), plain(*args), order)
    assert "undo" in {choice.residuals for choice in explain(f)(*args)}


@pytest.mark.parametrize(("name", "derivative"), [("in_a_branch", along), ("lu", along), ("arnoldi", twice)])
def test_derivatives_of_second_order_keep_rows_too(name, derivative):
    f, args = PROGRAMS[name](T)
    plain, ours = (compiled(derivative(g, args), *args) for g in (f, in_place(f)))
    want = plain(*args)
    np.testing.assert_allclose(ours(*args), want, rtol=1e-7, atol=1e-9 * np.max(np.abs(want)))
    assert bytes_of(ours) <= min(40 * bytes_of_buffers(f, *args) + 2e5, bytes_of(plain) / 4)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layers", [2, 9])
def test_a_step_that_reads_all_of_a_cache_part_by_part_keeps_rows(layers, order):
    """A Python loop over the layers of a model reads a part of one cache for each: with nine layers, a ninth."""

    def f(w, xs):
        def step(cache, x):
            t, h = x
            parts = []
            for k in range(layers):
                part = cache[k].at[t].set(jnp.tanh(h @ w[k]))
                h = h + jax.nn.softmax(part @ h) @ part
                parts.append(part)
            return jnp.stack(parts), h

        return jnp.sum(lax.scan(step, jnp.zeros((layers, *xs.shape)), (jnp.arange(len(xs)), xs))[1] ** 2)

    args = np.linspace(-0.1, 0.1, layers * 64).reshape(layers, 8, 8), np.cos(np.arange(8.0 * T)).reshape(T, 8)
    plain, program = compiled(gradient(f, args), *args), compiled(ORDERS[order](f, args), *args)
    close(program(*args), plain(*args))
    assert bytes_of(program) <= bytes_of(plain) / 4


def rows(read, write, loop):
    """A loop that reads all, of each of our loops."""

    def f(Q):
        def step(i, Q):
            v = jnp.sin(read(Q, i - 1))
            return write(Q, i, v - 0.01 * Q.T @ (Q @ v))

        return jnp.sum(loop(1, len(Q), step, Q) ** 2)

    return f


def by_scan(low, high, step, Q, **options):
    return scan(lambda Q, i: (step(i, Q), None), Q, jnp.arange(low, high), **options)[0]


def by_while(low, high, step, Q, **options):
    return while_loop(lambda c: c[0] < high, lambda c: (c[0] + 1, step(*c)), (low, Q), max_steps=high, **options)[1]


@pytest.mark.parametrize("loop", [fori_loop, by_scan, by_while])
def test_our_loops_choose_with_a_number_of_steps_or_a_bound(loop):
    f, Q = rows(ta_read, ta_write, loop), jnp.ones((300, 16)) * 0.1
    taken = temporary(jax.grad(f), Q)
    assert taken < 12 * Q.nbytes
    assert temporary(jax.grad(rows(ta_read, ta_write, functools.partial(loop, residuals="tape"))), Q) > 20 * taken
    assert not any(copy.kind == "save" for copy in loop_copies(jax.grad(f), min_bytes=0)(Q))


def test_in_place_takes_residuals_and_memory():
    f, (Q,) = PROGRAMS["arnoldi"](300)
    plain = compiled(jax.grad(f), Q)
    want, plain = plain(Q), bytes_of(plain)
    for options, most in (
        ({"residuals": "tape"}, 1.1 * plain),
        ({"residuals": Undo()}, 6 * Q.nbytes),
        ({"residuals": "checkpoint"}, 20 * Q.nbytes),
        ({"residuals": "checkpoint", "memory": 30 * Q.nbytes}, 50 * Q.nbytes),
        ({"memory": 1000}, 20 * Q.nbytes),
    ):
        ours = compiled(jax.grad(in_place(f, **options)), Q)
        np.testing.assert_allclose(ours(Q), want, rtol=1e-9, atol=1e-12)
        assert bytes_of(ours) <= most, options
        assert (bytes_of(ours) > 0.9 * plain) == (options == {"residuals": "tape"})
    for options, message in (
        ({"residuals": "none"}, "in_place: residuals must be one of 'auto', 'tape'"),
        ({"residuals": "inverse"}, "in_place: residuals must be one of .*; got 'inverse'"),
        ({"residuals": Inverse(lambda c: c)}, "in_place: an Inverse belongs to one loop; write while_loop"),
        ({"residuals": "undo", "memory": 9}, 'in_place: memory is for residuals="auto" or "checkpoint"'),
        ({"memory": -1}, "memory must be a number of bytes, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            in_place(f, **options)


def test_a_custom_vjp_of_the_user_that_runs_such_a_loop():
    f, (Q,) = PROGRAMS["arnoldi"](200)

    @jax.custom_vjp
    def twice_as_steep(Q):
        return f(Q)

    twice_as_steep.defvjp(lambda Q: jax.vjp(f, Q), lambda pull, ct: pull(2 * ct))
    plain = compiled(jax.grad(f), Q)
    for ours in (jax.grad(in_place(twice_as_steep)), in_place(jax.grad(twice_as_steep))):
        program = compiled(ours, Q)
        np.testing.assert_allclose(program(Q), 2 * plain(Q), rtol=1e-9, atol=1e-12)
        assert bytes_of(program) < bytes_of(plain) / 10


def test_what_is_overwritten_as_a_whole_is_kept_once_a_step():
    def f(A):
        def step(carry, i):
            A, L = carry
            c = A[i] / jnp.sqrt(1 + A[i, i] ** 2)
            s = jnp.tanh(L.T @ (L @ c))
            return (A - 0.1 * jnp.outer(jnp.sin(c), c), L.at[i].set(s)), None

        return jnp.sum(lax.scan(step, (A, jnp.zeros_like(A)), jnp.arange(len(A)))[0][1] ** 2)

    A = jnp.asarray(np.random.default_rng(0).normal(size=(200, 200)) * 0.1)
    ours, plain = (compiled(g, A) for g in (in_place(jax.grad(f)), jax.grad(f)))
    np.testing.assert_allclose(ours(A), plain(A), rtol=1e-9, atol=1e-12)
    assert bytes_of(ours) < 15 * A.nbytes < bytes_of(plain) / 10


def everything(Q):
    """Duplicates, a branch, an inner loop and buffers that swap."""

    def step(carry, i):
        a, b = carry
        a = a.at[jnp.stack([i, i, i // 2])].set(jnp.sin(b[:3] + a.sum(0)))
        b = lax.cond(i % 3 > 0, lambda b: b.at[i].set(jnp.tanh((b * b).sum(0))), lambda b: b, b)

        def inner(b, k):
            return b.at[(i + 5 * k) % len(b)].set(jnp.cos(0.1 * b.sum(0))), None

        b, _ = lax.scan(inner, b, jnp.arange(2))
        return (b, a), None

    a, b = lax.scan(step, (Q, 2 * Q), jnp.arange(len(Q)))[0]
    return jnp.sum(a * a * b)


def test_rows_of_every_kind_are_put_back():
    Q = np.random.default_rng(0).normal(size=(20, 8)) * 0.3
    close(jax.jit(jax.grad(in_place(everything)))(Q), in_numpy(jax.grad(everything))(Q))


def test_rows_are_put_back_in_place():
    f, (Q,) = PROGRAMS["arnoldi"](300)
    found = loop_copies(jax.grad(in_place(f)), min_bytes=0)(Q)
    assert {copy.kind for copy in found} <= {"anew"}  # the cotangent of all rows, in every step


def test_a_rule_whose_loop_makes_values_and_tangents():
    """JAX makes the part of it that is linear."""

    def both(x, dx):
        def step(c, i):
            b, db = c
            row, y = jnp.tanh(0.01 * b.T @ (b @ x)), b @ x
            d = 0.01 * (1 - row**2) * (db.T @ y + b.T @ (db @ x) + b.T @ (b @ dx))
            return (b.at[i].set(row), db.at[i].set(d)), None

        start = jnp.cos(jnp.arange(64.0 * x.size)).reshape(64, x.size)
        b, db = lax.scan(step, (start, jnp.zeros_like(start)), jnp.arange(64))[0]
        return jnp.sum(b**2), jnp.sum(2 * b * db)

    @jax.custom_jvp
    def f(x):
        return both(x, 0 * x)[0]

    f.defjvp(lambda primals, tangents: both(*primals, *tangents))
    x, g = jnp.linspace(0.1, 0.5, 32), lambda x: f(jnp.sin(x))
    want = jax.jit(jax.grad(g))(x)
    assert np.abs(want).max() > 0.1
    np.testing.assert_allclose(jax.jit(jax.grad(in_place(g)))(x), want, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(in_place(jax.grad(g)))(x), want, rtol=1e-6)


CHUNK = 5


def folded(loop, x, costly):
    """Three tables of different rank, read by windows, by rows and as a whole, and a number."""
    n = len(x)
    first = jnp.zeros((2, n + 3, 8)), jnp.zeros((n + 3, 8)).at[n].set(x[0]), jnp.zeros(n + 3).at[n].set(1.0), x[0, 0]

    def step(s, i):
        a, b, c, number = s
        above = lax.dynamic_slice(a, (0, i + 1, 0), (2, 3, 8))
        new = jnp.tanh(jnp.roll(x[i], 1) + jnp.sum(above, 1) * b[i + 1]) + 0.1 * number
        for _ in range(costly):  # each step would keep much of it
            new = jnp.tanh(new + jnp.cos(new))
        whole = jnp.dot(c[1 : n + 1], jnp.cos(c[2 : n + 2])) / n
        b, c = b.at[i].set(jnp.sum(new, 0) + 0.5 * b[i + 1]), c.at[i].set(jnp.sum(new) * 0.1 + whole)
        return (a.at[:, i].set(new), b, c, jnp.sin(number + c[i]))

    a, b, c, number = loop(step, first, np.arange(n)[::-1].reshape(-1, CHUNK))
    return jnp.sum(a * b) + jnp.sum(c**2) + number


def scans(step, s, numbers):
    chunk = jax.checkpoint(lambda s, i: lax.scan(lambda s, i: (step(s, i), None), s, i))
    return lax.scan(chunk, s, jnp.array(numbers))[0]


def unrolled(step, s, numbers):
    for i in numbers.ravel():
        s = step(s, int(i))
    return s


def inputs(n):
    return np.sin(np.arange(8.0 * n)).reshape(n, 8)


@functools.cache
def unrolled_gradient(costly):
    return in_numpy(jax.grad(lambda x: folded(unrolled, x, costly)))(inputs(15))


# What a step computes is kept if it is not much, and computed again from the tables else.
@pytest.mark.parametrize(
    ("order", "costly"),
    [("grad(in_place)", 0), ("grad(in_place)", 4), ("in_place(grad)", 4), ("vmap(grad(in_place))", 0)],
)
def test_a_checkpoint_around_an_inner_loop_computes_again_in_place(order, costly):
    def f(x):
        return folded(scans, x, costly)

    close(jax.jit((ORDERS | BATCHED)[order](f, [None]))(inputs(15)), [unrolled_gradient(costly)], order)
    if order == "grad(in_place)":
        x = inputs(300)
        program, plain = (compiled(g, x) for g in (gradient(in_place(f), [x]), gradient(f, [x])))
        assert_no_whole_buffer_operation(program.as_text(), 2 * 303 * 8 * x.itemsize)
        assert bytes_of(program) < bytes_of(plain) / 2


LAGS = np.arange(400).reshape(20, 20) * 7 % 31
COLUMNS = np.arange(400).reshape(20, 20) * 3 % 8


def delayed(b, xs):
    """Elements at delays that differ, as networks of neurons read them."""

    def step(b, t_and_x):
        t, x = t_and_x
        heard = jnp.sum(b[t - LAGS, COLUMNS], 0)
        return b.at[t].set(jnp.tanh(0.1 * heard[:8] + x)), jnp.sum(heard)

    b, heard = lax.scan(step, b, (31 + jnp.arange(len(xs)), xs))
    return jnp.sum(jnp.sin(b)) + jnp.vdot(heard, heard)


def masked(b, xs):
    """Rows of a window, backwards, of which a mask takes some; others are added to at an index that is computed."""

    def step(b, t):
        at = t + jnp.arange(600) // 6
        window = jnp.where((at & 7 > 2)[:, None], b[at], 0)
        return b.at[at[::3] + 1].add(0.1 * window[::3] + xs[t % len(xs)]), window[5]

    b, rows = lax.scan(step, b, jnp.arange(len(b) - 101), reverse=True)
    return jnp.sum(jnp.sin(b)) + jnp.vdot(rows, rows)


INDEXED = {"delayed": (delayed, 31), "masked": (masked, 101)}


@pytest.mark.parametrize(
    ("name", "order"),
    [(list(INDEXED)[k % 2], order) for k, order in enumerate(ORDERS | BATCHED)],
)
def test_a_large_index_that_is_computed_from_less_is_computed_again(name, order):
    f, more = INDEXED[name]

    def args_of(steps):
        xs = np.sin(np.arange(8.0 * steps)).reshape(steps, 8)
        return jnp.asarray(0.1 * np.cos(np.arange(8.0 * (steps + more))).reshape(-1, 8)), jnp.asarray(xs)

    args = args_of(200)
    plain = compiled(gradient(f, args), *args)
    program = compiled((ORDERS | BATCHED)[order](f, args), *args)
    assert bytes_of(program) <= bytes_of(plain) * (1 + (order in BATCHED)) / 4
    close(program(*args), plain(*args))
    assert not loop_copies(gradient(in_place(f), args))(*args)


@pytest.mark.parametrize("derivative", [along, twice])
@pytest.mark.parametrize("name", INDEXED)
def test_derivatives_of_second_order_of_a_large_index(name, derivative):
    f, more = INDEXED[name]
    xs = jnp.sin(jnp.arange(80.0)).reshape(10, 8)
    args = 0.1 * jnp.cos(jnp.arange(8.0 * (10 + more))).reshape(-1, 8), xs
    want = in_numpy(derivative(f, args))(*args)
    close(jax.jit(derivative(in_place(f), args))(*args), want)


def test_a_kept_value_of_half_precision_matches_what_was_computed_from_it():
    """The scores are kept in bfloat16, their maximum and the sum of the exponentials in float32."""

    def attention(xs, dtype):
        def step(cache, x):
            t, q = x
            cache = cache.at[t].set(q.astype(dtype))
            scores = jnp.einsum("hd,thd->ht", q.astype(dtype), cache).astype(jnp.float32)
            weights = jax.nn.softmax(scores).astype(dtype)
            return cache, jnp.einsum("ht,thd->hd", weights, cache).astype(jnp.float32)

        return lax.scan(step, jnp.zeros(xs.shape, dtype), (jnp.arange(len(xs)), xs))[1]

    x = jnp.asarray(np.random.default_rng(0).normal(size=(32, 2, 16)), jnp.float32)

    def gradient(f, dtype):
        return jax.jit(jax.grad(lambda x: jnp.sum(f(x, dtype) ** 2)))(x)

    exact = gradient(attention, jnp.float32)
    undone = in_place(attention, static_argnums=1, residuals="undo")
    errors = [float(jnp.abs(gradient(f, jnp.bfloat16) - exact).max()) for f in (attention, undone)]
    assert errors[1] < 3 * errors[0], errors
