"""`jnp.where(done, first, state)` in every step copies nothing but the examples that are done."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_numpy import in_numpy
from in_place import assert_linear_time, compiled
from jax import lax

from jax_tensorarray import in_place
from jax_tensorarray._compat import barriers_hold
from jax_tensorarray._hlo import text as hlo_text
from jax_tensorarray._jaxprs import jaxprs

pytestmark = pytest.mark.slow

STEPS, ROWS, SIZE, EXAMPLES = 40, 128, 16, 5
X = np.linspace(-1, 1, EXAMPLES * SIZE).reshape(EXAMPLES, SIZE)
FIRST = np.linspace(-1, 1, ROWS * SIZE).reshape(ROWS, SIZE)


def episodes(x, first, *, early=False, alive=False):
    """Write a row after the other, until one is large."""

    def again(done, state):
        return jnp.where(~done, state, first) if alive else jnp.where(done, first, state)

    def step(carry, _):
        state, n, x, done = carry
        if early:
            state = again(done, state)
        x = jnp.sin(3 * x + state[n // 2])
        state, done = state.at[n].set(x), x[0] > 0.9
        if not early:
            state = again(done, state)
        return (state, jnp.where(done, 0, n + 1), x, done), done

    (state, *_), dones = lax.scan(step, (first, 0, x, False), None, length=STEPS)
    return jnp.sum(jnp.sin(state)), (state, dones)


@pytest.mark.parametrize(
    ("options", "shared"), [({}, False), ({"early": True}, True), ({"alive": True}, True)], ids=str
)
def test_examples_that_start_again(options, shared):
    def f(x, first):
        return episodes(x, first, **options)

    def gradient(x, first):
        return jax.grad(f, has_aux=True)(x, first)

    def of_both(x, first):
        return jax.grad(f, (0, 1), has_aux=True)(x, first)

    axis, first = (None, FIRST) if shared else (0, np.stack([FIRST * k for k in range(1, EXAMPLES + 1)]))
    one, many, batched = (X[2], FIRST), (X, first), functools.partial(jax.vmap, in_axes=(0, axis))
    plain = {"one": f, "many": batched(f), "gradient": gradient, "gradients": batched(gradient), "both": of_both}
    want = {name: in_numpy(g)(*(many if name in ("many", "gradients") else one)) for name, g in plain.items()}
    assert np.any(want["one"][1][1])
    for name, ours, args in (
        ("one", in_place(f), one),
        ("many", batched(in_place(f)), many),
        ("many", in_place(batched(f)), many),
        ("gradient", jax.grad(in_place(f), has_aux=True), one),
        ("gradients", in_place(batched(gradient)), many),
        ("both", in_place(of_both), one),  # that by `first` is an array of its size in each step
    ):
        got = compiled(ours, *args)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12), got(*args), want[name])
        copies = hlo_text.copies_in_loops(got.as_text(), FIRST.nbytes * (EXAMPLES if args is many else 1))
        assert name == "both" or not copies, copies


@pytest.mark.parametrize(("is_integer", "stops"), [(False, False), (True, True)])
def test_what_is_made_in_the_step_is_copied_where_an_example_starts_again(is_integer, stops):
    """A world is made in every step, rows of it are written, and it is taken where an episode is over."""
    rows = 40

    def made(x):
        return lax.fori_loop(0, 3, lambda i, b: b.at[i].set(x + i), jnp.zeros((rows, SIZE, SIZE)) + x)

    def f(x):
        def step(carry, n):
            state, marks = carry
            state = lax.fori_loop(0, 4, lambda i, b: b.at[(i + n) % rows].add(jnp.sin(b[i])), state)
            marks = lax.fori_loop(0, 4, lambda i, b: b.at[(i + n) % rows].add(1), marks)
            state = lax.stop_gradient(state) if stops else state
            done = jnp.mean(state[n % rows]) > 2.5
            state, marks = jnp.where(done, made(x * n), state), jnp.where(done, 0, marks)
            return (state, marks), done

        start = jnp.ones((rows, SIZE, SIZE)) + x, jnp.zeros((rows, SIZE, SIZE), jnp.int32)
        (state, marks), dones = lax.scan(step, start, jnp.arange(STEPS))
        return (marks if is_integer else state), dones

    xs = np.linspace(0.01, 0.5, EXAMPLES)
    want = in_numpy(jax.vmap(f))(xs)
    assert 0 < np.sum(want[1]) < want[1].size
    for ours in (in_place(jax.vmap(f)), jax.vmap(in_place(f))):
        got = compiled(ours, xs)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12), got(xs), want)
        if barriers_hold("cpu"):  # else one copy is left
            assert not hlo_text.copies_in_loops(got.as_text(), want[0].nbytes)

    def loss(x):
        return jnp.sum(jnp.cos(f(x)[0]))

    if not is_integer:
        want = in_numpy(jax.grad(loss))(0.3)
        for gradient in (jax.grad(in_place(loss)), in_place(jax.grad(loss))):
            np.testing.assert_allclose(jax.jit(gradient)(0.3), want, rtol=1e-9)


def emptied(start, noise, *, is_register):
    """Write a row in every step, and zeros over all rows if the row is large."""

    def step(carry, of):
        x, rows = carry
        t, e = of
        x = 0.9 * x + 0.1 * jnp.tanh(rows[-1] + rows[-3]) + e
        rows = jnp.concatenate([rows[1:], x[None]]) if is_register else rows.at[t % len(rows)].set(x)
        done = x[0] > 1.2
        return (x, jnp.where(done, jnp.zeros_like(rows), rows)), (x, done)

    (_, rows), (xs, dones) = lax.scan(step, (jnp.zeros(SIZE, start.dtype), start), (jnp.arange(len(noise)), noise))
    return jnp.sum(jnp.sin(xs)) + jnp.sum(jnp.cos(rows)), dones


def selects(buffer, eqn):
    """Return whether an equation selects all elements of a buffer."""
    return eqn.primitive.name == "select_n" and eqn.outvars[0].aval.shape == buffer.shape


def noise(steps):
    """Return noise that makes each example empty its buffer now and then."""
    return np.random.default_rng(0).normal(0, 0.4, (EXAMPLES, steps, SIZE))


@pytest.mark.parametrize("is_register", [True, False])
def test_a_buffer_that_is_emptied(is_register):
    f = functools.partial(emptied, is_register=is_register)
    many = np.stack([FIRST * k for k in range(1, EXAMPLES + 1)]), noise(STEPS)
    one = tuple(x[2] for x in many)

    def gradient(start, noise, of=f):
        return jax.grad(of, (0, 1), has_aux=True)(start, noise)

    plain = {"one": f, "many": jax.vmap(f), "gradient": gradient, "gradients": jax.vmap(gradient)}
    want = {name: in_numpy(g)(*(many if name in ("many", "gradients") else one)) for name, g in plain.items()}
    assert 0 < np.sum(want["many"][1]) < want["many"][1].size
    for name, ours, args in (
        ("one", in_place(f), one),
        ("many", jax.vmap(in_place(f)), many),
        ("many", in_place(jax.vmap(f)), many),
        ("gradient", functools.partial(gradient, of=in_place(f)), one),
        ("gradient", in_place(gradient), one),
        ("gradients", jax.vmap(functools.partial(gradient, of=in_place(f))), many),
        ("gradients", in_place(jax.vmap(gradient)), many),
    ):
        got = compiled(ours, *args)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12), got(*args), want[name])
        assert not hlo_text.copies_in_loops(got.as_text(), args[0].nbytes)
        assert not jaxprs.any_equation(jax.make_jaxpr(ours)(*args), functools.partial(selects, args[0]))


@pytest.mark.skipif(not barriers_hold("cpu"), reason="XLA then calls each branch on its own")
@pytest.mark.parametrize("order", ["in_place(vmap)", "vmap(in_place)"])
def test_a_buffer_that_is_rarely_emptied_takes_linear_time(order):
    """Without a branch that asks whether any example is done, XLA selects all rows in every step."""

    def f(start, noise):
        return emptied(start, noise, is_register=False)[1]

    def args_of(length):
        start = np.zeros((2, length // 2, SIZE), np.float32)
        return start, np.random.default_rng(0).normal(0, 0.125, (2, length, SIZE)).astype(np.float32)

    ours = {"in_place(vmap)": in_place(jax.vmap(f)), "vmap(in_place)": jax.vmap(in_place(f))}[order]
    short, long = (compiled(ours, *args_of(length)) for length in (4000, 16000))
    assert_linear_time(short, long, args_of, 4000, limit=9)


@pytest.mark.parametrize("used", [lax.stop_gradient, lambda b: jnp.broadcast_to(b, (2, *b.shape))])
def test_a_version_is_used_by_what_has_its_elements(used):
    """Then the version that may not be selected exists, and rows are put back."""

    def f(b, keeps):
        def step(b, x):
            k, keep = x
            new = b.at[k].set(jnp.sin(b[k - 1]))
            return jnp.where(keep, b, new), jnp.max(used(new))

        return lax.scan(step, b, (jnp.arange(1, len(keeps) + 1), keeps))

    args = FIRST, np.arange(STEPS) % 3 == 0
    got = compiled(in_place(f), *args)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12), got(*args), in_numpy(f)(*args))
    assert not hlo_text.copies_in_loops(got.as_text(), FIRST.nbytes)
