"""`in_place` of programs with refs (`jax.new_ref`): the answers of plain JAX, or of the program without refs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_place import compiled
from jax import jit, lax

from jax_tensorarray import in_place
from jax_tensorarray._hlo import text as hlo_text

T = 30


def assert_close(got, want):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=1e-4), got, want)


def rows(steps=T):
    return jnp.asarray(np.random.default_rng(0).random((steps, 8)), jnp.float32)


def carried(b):
    r = jax.new_ref(b)

    def body(c, i):
        x = jnp.sin(r[i - 1]) + 1e-3 * c
        r[i] = x
        return 0.5 * c + x.mean(), r[i // 2].sum()

    c, ys = lax.scan(body, 0.1, jnp.arange(1, len(b)))
    return (jax.freeze(r) ** 2).sum() + c + ys.sum()


def two(b):
    r, s = jax.new_ref(b), jax.new_ref(jnp.zeros_like(b))

    def body(i, c):
        s[i] = jnp.sin(r[i - 1])
        r[i] += s[i - 1]
        return c + r[i, 0]

    c = lax.fori_loop(1, len(b), body, 0.0)
    return (jax.freeze(r) ** 2).sum() + c + s[...].sum()


def nested(b):
    def outer(c, j):
        r = jax.new_ref(b)

        def body(i, c):
            r[i] = jnp.tanh(r[i - 1] + c)
            return c

        lax.fori_loop(1, len(b), body, c)
        return c + 0.01 * jax.freeze(r).sum(), None

    return lax.scan(outer, 0.3, None, length=3)[0]


def nested_without_refs(b):
    """JAX's own gradient of `nested` is wrong (0.10.2 to 0.12)."""
    c = 0.3
    for _ in range(3):
        r = lax.fori_loop(1, len(b), lambda i, r, c=c: r.at[i].set(jnp.tanh(r[i - 1] + c)), b)
        c = c + 0.01 * r.sum()
    return c


def read_only(b):
    r = jax.new_ref(b)

    def one(w):
        return lax.scan(lambda c, i: (c * 0.5 + (w * jnp.sin(r[i])).sum(), None), 0.0, jnp.arange(len(b)))[0]

    return jax.vmap(one)(jnp.ones((4, 8))).sum()


def forward_mode(f):
    return lambda b: jax.jvp(f, (b,), (jnp.cos(b),))


PROGRAMS = [two, nested, read_only, jax.jit(carried), jax.checkpoint(carried)]
ORDERS = jax.grad, forward_mode


def either_order(derived, f):
    yield derived(in_place(f))
    yield in_place(derived(f))


@pytest.mark.slow
@pytest.mark.parametrize("f", PROGRAMS)
def test_refs_and_their_derivatives_are_in_place(f):
    plain = nested_without_refs if f is nested else f
    b = rows()
    ours = [g for derived in ORDERS for g in either_order(derived, f)]
    program = compiled(lambda b: [g(b) for g in ours], b)
    want = jit(lambda b: [derived(plain)(b) for derived in ORDERS])(b)
    assert_close(program(b), [w for w in want for _ in range(2)])
    if f is not nested:  # each of its outer steps begins with a new buffer
        assert not hlo_text.copies_in_loops(program.as_text(), b.nbytes)
    batched = (jax.vmap, lambda f: jax.vmap(jax.grad(f)))[PROGRAMS.index(f) % 2]
    several = jnp.stack([b, 2 * b])
    got = jit(lambda b: [g(b) for g in either_order(batched, f)])(several)
    # With refs outside of jit: inside, JAX 0.10.2 cannot batch the gradient of a checkpoint with them.
    oracle = jit(batched(plain)) if f is nested else batched(plain)
    assert_close(got, [oracle(several)] * 2)


@pytest.mark.slow
def test_a_branch_over_a_ref_has_a_derivative():
    def f(b):  # JAX itself has none
        r = jax.new_ref(b)

        def write(i):
            r[i] = jnp.tanh(r[i - 1])

        lax.fori_loop(1, len(b), lambda i, _: lax.cond(i % 3 == 0, write, lambda i: None, i), None)
        return (jax.freeze(r) ** 2).sum()

    def without_refs(b):
        for i in range(3, len(b), 3):
            b = b.at[i].set(jnp.tanh(b[i - 1]))
        return (b**2).sum()

    want = jit(jax.grad(without_refs))(rows())
    for ours in either_order(jax.grad, f):
        assert_close(jit(ours)(rows()), want)


@pytest.mark.slow
def test_a_while_loop_over_a_ref_has_a_derivative():
    def f(b):
        r = jax.new_ref(b)

        def body(s):
            i, c = s
            r[i] = jnp.sin(r[i - 1]) + c
            return i + 1, c * 0.9

        _, c = lax.while_loop(lambda s: (s[0] < len(b)) & (s[1] > 0.1), body, (1, 0.7))
        return r[...].sum() + c

    def without_refs(b):
        i, c = 1, 0.7
        while i < len(b) and c > 0.1:
            b, i, c = b.at[i].set(jnp.sin(b[i - 1]) + c), i + 1, c * 0.9
        return b.sum() + c

    value, want = jit(jax.value_and_grad(without_refs))(rows())
    assert_close(in_place(f)(rows()), value)
    assert_close(jit(jax.grad(in_place(f, max_steps=T)))(rows()), want)
    assert_close(jit(in_place(jax.grad(f), max_steps=T))(rows()), want)


def test_refs_that_are_given_stay_refs():
    def f(r, x):
        def body(i, c):
            r[i] = jnp.sin(r[i - 1]) * x + c
            return c

        lax.fori_loop(1, T, body, 0.1)
        return r[...].sum()

    plain, ours, closed = (jax.new_ref(rows()) for _ in range(3))
    want = jax.jit(f)(plain, 2.0)
    assert_close(in_place(f)(ours, 2.0), want)
    assert_close(in_place(lambda x: f(closed, x))(2.0), want)
    assert_close((ours[...], closed[...]), (plain[...], plain[...]))


def test_a_ref_beside_a_gradient_inside_is_written_once():
    def f(b):
        log = jax.new_ref(jnp.zeros(T))

        def loss(b):
            def body(b, i):
                b = b.at[i].set(jnp.sin(b[i - 1]))
                log[i] += lax.stop_gradient(b[i].sum())
                return b, None

            return lax.scan(body, b, jnp.arange(1, T))[0].sum()

        return jax.grad(loss)(b), log[...]

    assert_close(in_place(f)(rows()), f(rows()))


@pytest.mark.slow
def test_a_rule_of_its_own_with_refs_inside_stays_a_rule():
    @jax.custom_vjp
    def g(b):
        r = jax.new_ref(b)

        def body(i, c):
            r[i] = jnp.sin(r[i - 1])
            return c

        lax.fori_loop(1, T, body, 0)
        return jax.freeze(r)

    g.defvjp(lambda b: (g(b), b), lambda b, ct: (ct * 7,))

    def f(b):
        return g(lax.fori_loop(1, T, lambda i, b: b.at[i].set(jnp.cos(b[i // 2])), b)).sum()

    assert_close(in_place(f)(rows()), f(rows()))
    want = jit(jax.grad(f))(rows())
    for ours in either_order(jax.grad, f):
        program = compiled(ours, rows())
        assert_close(program(rows()), want)
        assert not hlo_text.copies_in_loops(program.as_text(), rows().nbytes)


def test_a_number_of_python_that_a_loop_passes_on():
    def f(x):
        def inner(y):
            def body(i, s):
                r, c = s
                return r.at[i].add(jnp.sin(r[i - 1]) * x + c), c

            return lax.fori_loop(1, T, body, (rows() * y, 0.1))[0].sum()

        return jax.grad(inner)(x)

    assert_close(in_place(f)(1.3), f(1.3))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("around", [lambda f: f, jax.checkpoint], ids=["as it is", "checkpoint"])
def test_a_rule_in_a_scan_stores_its_cotangent_in_a_ref_that_is_an_argument(around):
    @jax.custom_vjp
    def stored(ref, x):
        return x

    def back(ref, ct):
        ref[...] = ct
        return None, ct

    stored.defvjp(lambda ref, x: (x, ref), back)

    @in_place
    def f(ref, x):
        return lax.scan(around(lambda x, _: (jnp.sin(stored(ref, jnp.sin(x))), None)), x, length=1)[0]

    for g in (f, jit(f)):
        ref = jax.new_ref(0.0)
        assert_close(jax.grad(g, argnums=1)(ref, 1.0), np.cos(np.sin(1.0)) * np.cos(1.0))
        assert_close(ref[...], np.cos(np.sin(1.0)))
