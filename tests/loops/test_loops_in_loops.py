"""Loops in loops, each with a way to keep residuals of its own, have the derivatives of JAX's loops, batched too."""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gates import gates
from in_numpy import in_numpy
from jax import jit, lax

import jax_tensorarray as ta
from jax_tensorarray import in_place
from jax_tensorarray.residuals import Checkpoint, Inverse, Recompute, Tape

MOST = 6


class Plain:
    """Loops and row ops in plain JAX, with every derivative."""

    def scan(f, init, xs, residuals=None, reverse=False):
        return lax.scan(f, init, xs, reverse=reverse)

    def fori_loop(n, body, init, residuals=None):
        return lax.scan(lambda c, i: (body(i, c), None), init, jnp.arange(n))[0]

    def while_loop(goes_on, body, init, residuals=None):
        def step(c, _):
            return lax.cond(goes_on(c), body, lambda c: c, c), None

        return lax.scan(step, init, length=MOST)[0]

    def read(b, i):
        return b[i]

    def write(b, i, row):
        return b.at[i].set(row)

    def add(b, i, row):
        return b.at[i].add(row)

    def swap(b, i, row):
        return b.at[i].set(row), b[i]


class Ours:
    read, write, add, swap, scan = ta.ta_read, ta.ta_write, ta.ta_add, ta.ta_swap, ta.scan

    def fori_loop(n, body, init, residuals):
        return ta.fori_loop(0, n, body, init, residuals=residuals, max_steps=MOST)

    def while_loop(goes_on, body, init, residuals):
        return ta.while_loop(goes_on, body, init, residuals=residuals, max_steps=MOST)


def looped(lib, kind, residuals, body, carry, rows, n):
    """Return the carry after `body(i, carry, row)`, and its outputs. A `while_loop` takes `n` steps."""
    if kind.startswith("scan"):

        def run(carry, rows):
            numbered, how = (jnp.arange(len(rows)), rows), {"reverse": kind == "scan in reverse"}
            scan = lax.scan if kind == "scan of JAX" else functools.partial(lib.scan, residuals=residuals)
            return scan(lambda c, x: body(x[0], c, x[1]), carry, numbered, **how)

        if kind == "scan in a cond":
            return lax.cond(carry[2] < 100, run, lambda *args: args, carry, rows)
        return (jax.checkpoint(run) if kind == "scan in a checkpoint" else run)(carry, rows)

    def step(i, c):
        carry, outs = c
        carry, out = body(i, carry, lib.read(rows, i))
        return carry, lib.write(outs, i, out)

    if kind == "fori_loop":
        return lib.fori_loop(len(rows), step, (carry, rows), residuals=residuals)
    _, end = lib.while_loop(
        lambda c: c[0] < n, lambda c: (c[0] + 1, step(c[0], c[1])), (0, (carry, rows)), residuals=residuals
    )
    return end


def swaps(lib, b, x, i, k, c, row):
    s, t, u = c
    t, old = lib.swap(t, (i + k) % 4, row)
    return (t, s, u), jnp.tanh(old)


def closes_over(lib, b, x, i, k, c, row):
    _, t, u = c
    return (t, b, jnp.sin(u)), row * x


def twice(lib, b, x, i, k, c, row):
    s, t, u = c
    return (t, t, u + jnp.sum(lib.read(s, k)) * x), jnp.tanh(row) * u


def reads_all(lib, b, x, i, k, c, row):
    s, t, u = c
    row = jnp.sin(row + 0.1 * s.T @ (s @ row) * x)
    return (lib.write(s, k, row), lib.add(t, i % 4, row + u), u), row + lib.read(b, k)


def keys(lib, b, x, i, k, c, row):
    """A key that is carried and split, and keys whose rows are read, and written in a branch."""
    s, t, u, key, keys = c
    key, now = jax.random.split(key)
    row = jnp.tanh(row + 0.1 * jax.random.normal(now, row.shape, row.dtype)) * jax.random.uniform(lib.read(keys, i % 3))
    new = jax.random.fold_in(now, k)
    keys = lax.cond(jnp.sin(9 * u + k) > x - 0.4, lambda keys: lib.write(keys, k % 3, new), lambda keys: keys, keys)
    return (lib.write(s, (k + jnp.int32(2)) % 4, row), s, u * x, key, keys), t[i % 4] * row


def branches(lib, b, x, i, k, c, row):
    s, t, u = c
    s = lax.cond(
        jnp.sin(7 * u + k) > x - 0.4,
        lambda s: lib.write(s, k, jnp.sin(row) * u),
        lambda s: lib.add(s, i % 4, row * x),
        s,
    )
    return (s, t, u * 0.9), row + lib.read(t, k)


@jax.custom_vjp
def sine(x):
    return jnp.sin(x)


sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (jnp.clip(ct, -0.3, 0.3) * x,))


def rules(lib, b, x, i, k, c, row):
    """With a rule of the user, which is no derivative, and integers, which have none."""
    s, t, u = c
    t = lib.add(t, i % 4, sine(row * x) + jnp.floor(u))
    return (t, s, lax.cond(i % 2 == 0, sine, lambda u: u * x, u)), sine(row * u) + lib.read(t, k)


BODIES = {
    "swaps": swaps,
    "closes over": closes_over,
    "twice": twice,
    "reads all": reads_all,
    "keys": keys,
    "branches": branches,
    "rules": rules,
}


def program(lib, kinds, kept, body, b, z, x):
    """Return the end of loops in loops, which carry on what the inner ones stack."""
    n = 1 + 2 * jnp.int32(x > 0.4)

    def level(depth, i, carry, row):
        if depth == len(kinds):
            return carry, row

        def within(k, c, row):
            inner, row = level(depth + 1, k, c[:3], row)
            return BODIES[body](lib, b, x, i, k, (*inner, *c[3:]), row)

        p, q, r = carry
        more = (jax.random.key(3), KEYS) if body == "keys" else ()
        (s, _, u, *_), out = looped(lib, kinds[depth], kept[depth], within, (p, q, r, *more), p, n)
        end = (s, lib.add(out, i % 4, x), u) if body == "swaps" else (out, lib.add(s, i % 4, x * jnp.cos(u)), u)
        return end, row * r

    outermost = functools.partial(level, 1)
    (p, q, r), outs = looped(lib, kinds[0], kept[0], outermost, (b, z, x), z[:3], n)
    return p, q, r, outs


def inverse(lib, kinds, kept, body, b, z, x):
    """The same of loops whose steps have inverses."""
    n = 3 + jnp.int32(x > 0.4)

    def step(c, row):
        u, v = c
        return (v, u + x * jnp.sin(v) * row), v * row

    def back(c, row):
        v, w = c
        return w - x * jnp.sin(v) * row, v

    def back_to_start(c, row):
        def some(c, ix):
            return jax.tree.map(functools.partial(jnp.where, ix[0] < n), back(c, ix[1]), c), None

        return lax.scan(some, c, (jnp.arange(4), b * row), reverse=True)[0]

    def inner(c, row):
        rows = b * row

        def one(c):
            k, c = c
            return k + 1, step(c, lib.read(rows, k))[0]

        def one_back(c):
            k, c = c
            return k - 1, back(c, lib.read(rows, k - 1))

        if kinds[1] == "while_loop":
            how = Inverse(one_back) if kept[1] == "inverse" else kept[1]
            _, c = lib.while_loop(lambda c: c[0] < n, one, (0, c), residuals=how)
            return c, c[0]
        c, outs = lib.scan(step, c, rows, residuals=Inverse(back) if kept[1] == "inverse" else kept[1])
        return c, outs[1]

    n = 4 if kinds[1] == "scan" else n
    end, outs = lib.scan(inner, (z[0], z[1]), z, residuals=Inverse(back_to_start) if kept[0] == "inverse" else kept[0])
    return *end, outs, jnp.sum(outs)


def total(results):
    return sum(jnp.sum(jnp.sin(y) * jnp.arange(1.0, y.size + 1).reshape(y.shape)) for y in results)


B = jnp.sin(jnp.arange(12.0)).reshape(4, 3)
KEYS = jax.random.split(jax.random.key(1), 3)
OF = (0, 1, 2)


def many(axes):
    """Return arguments with those batch axes, of two examples."""
    each = [(B, 2 * B), (B + 1, jnp.cos(B)), (jnp.float64(0.3), jnp.float64(0.5))]
    return [x[0] if axis is None else jnp.stack(x, axis) for x, axis in zip(each, axes, strict=True)]


def vmapped(g, axes, out_axes=0):
    return jax.vmap(g, axes, out_axes)


#: Maps a program, one that returns a number, and batch axes to a derivative.
WAYS = {
    "grad": lambda f, g, axes: jax.grad(g, OF)(B, B + 1, 0.5),
    "vmap": lambda f, g, axes: vmapped(f, axes, -1)(*many(axes)),
    "vmap(grad)": lambda f, g, axes: vmapped(jax.grad(g, OF), axes, -1)(*many(axes)),
    "grad(vmap)": lambda f, g, axes: jax.grad(lambda *a: jnp.sum(vmapped(g, axes)(*a)), OF)(*many(axes)),
    "jacfwd": lambda f, g, axes: jax.jacfwd(f, OF)(B, B + 1, 0.5),
    "jacrev": lambda f, g, axes: jax.jacrev(lambda *a: f(*a)[2:], OF)(B, B + 1, 0.5),
    "hessian": lambda f, g, axes: jax.hessian(g, OF)(B, B + 1, 0.5),
    "vmap(jvp)": lambda f, g, axes: vmapped(lambda *a: jax.jvp(f, a, a)[1], axes)(*many(axes)),
    "jvp(vmap)": lambda f, g, axes: jax.jvp(vmapped(f, axes, -1), many(axes), many(axes))[1],
    "vmap(vmap(grad))": lambda f, g, axes: jax.vmap(
        vmapped(jax.grad(g, OF), axes), (0, None, None) if axes[2] is None else (None, None, 0)
    )(*(jnp.stack([y, y + 1]) if (k == 0) == (axes[2] is None) and k != 1 else y for k, y in enumerate(many(axes)))),
    "grad(vmap(grad))": lambda f, g, axes: jax.grad(
        lambda *a: sum(map(jnp.sum, vmapped(jax.grad(g, OF), axes)(*a))), OF
    )(*many(axes)),
    "vmap(hessian)": lambda f, g, axes: vmapped(jax.hessian(g, 2), axes)(*many(axes)),
}


def derivative(way, axes, f, compiled=jit):
    return compiled(lambda: WAYS[way](f, lambda *args: total(f(*args)), axes))()


@functools.cache
def wanted(way, axes, kinds, body):
    f = inverse if body == "inverse" else program
    by = jit if body == "keys" else in_numpy  # NumPy has no keys
    return derivative(way, axes, lambda *args: f(Plain, kinds, (None,) * len(kinds), body, *args), by)


def found(way, axes, kinds, kept, body):
    f = inverse if body == "inverse" else program
    with gates("open", "SENT_BYTES"):  # a tape on the host sends small rows, too
        return derivative(way, axes, lambda *args: f(Ours, kinds, kept, body, *args))


def assert_same(ours, plain):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9), ours, plain)


KINDS = ["scan", "scan of JAX", "scan in reverse", "scan in a cond", "scan in a checkpoint", "fori_loop", "while_loop"]
ON_HOST = Tape(offload=True), Recompute(offload=True)
KEPT = ["tape", "undo", "recompute", "auto", Checkpoint(1), Checkpoint(2), Checkpoint(3), *ON_HOST]
AXES = [axes for axes in itertools.product((0, 1, 2, None), (0, 1, 2, None), (0, None)) if set(axes) != {None}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "axes", "kinds", "kept", "body"),
    [
        ("grad(vmap)", (0, None, None), ("scan of JAX", "scan"), ("tape", "undo"), "swaps"),
        ("grad(vmap)", (None, 1, 0), ("scan of JAX", "while_loop"), ("tape", Checkpoint(2)), "closes over"),
        ("jacfwd", (), ("fori_loop", "scan"), (Checkpoint(3), Checkpoint(1)), "swaps"),
        ("grad(vmap)", (2, None, 0), ("scan of JAX", "scan in reverse"), ("tape", "undo"), "branches"),
        ("jvp(vmap)", (1, 2, None), ("fori_loop", "scan"), (Checkpoint(1), "undo"), "reads all"),
        ("grad(vmap(grad))", (0, None, 0), ("while_loop", "scan"), ("undo", Checkpoint(2)), "rules"),
        ("grad(vmap(grad))", (0, None, 0), ("while_loop", "scan in reverse"), ON_HOST, "swaps"),
        ("vmap(grad)", (0, None, 0), ("scan", "while_loop"), ("auto", "undo"), "keys"),
        ("jvp(vmap)", (0, None, 0), ("scan in reverse", "scan in a checkpoint"), ("undo", ON_HOST[1]), "keys"),
    ],
)
def test_loops_in_loops_are_batched_and_differentiated(way, axes, kinds, kept, body):
    assert_same(found(way, axes, kinds, kept, body), wanted(way, axes, kinds, body))


@st.composite
def programs(draw):
    body, way, axes = (draw(st.sampled_from(xs)) for xs in ([*BODIES, "inverse"], list(WAYS), AXES))
    if body == "rules":
        way = draw(st.sampled_from([way for way in WAYS if "grad" in way or way == "jacrev"]))
    most = 2 if way.count("grad") + 2 * way.count("hessian") > 1 else 3  # a derivative of a derivative takes long
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=2, max_size=most))
    kept = [draw(st.sampled_from(KEPT)) for _ in kinds]
    if body == "inverse":
        kinds = "scan", draw(st.sampled_from(["scan", "while_loop"]))
        kept = [draw(st.sampled_from(["inverse", *KEPT])) for _ in kinds]
    return way, axes, tuple(kinds), tuple(kept), body


@hypothesis.settings(max_examples=hypothesis.settings.default.max_examples * 12 // 25)
@hypothesis.given(programs())
def test_any_loops_in_loops(program):
    way, axes, kinds, _, body = program
    assert_same(found(*program), wanted(way, axes, kinds, body))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "way", "residuals", "body"),
    [
        (("scan", "fori_loop"), "grad(vmap)", "undo", "reads all"),
        (("fori_loop", "scan"), "jacfwd", "checkpoint", "keys"),
        (("scan", "scan in reverse"), "vmap(grad)", "undo", "keys"),
    ],
)
def test_loops_in_loops_in_place(kinds, way, residuals, body):
    axes = (0, 2, None)
    plain = functools.partial(program, Plain, kinds, (None, None), body)
    assert_same(derivative(way, axes, in_place(plain, residuals=residuals)), wanted(way, axes, kinds, body))


@pytest.mark.slow
def test_a_function_with_its_own_derivative_stacks_in_a_loop():
    """JAX's `vmap` takes it from the function where the batch axis is, and then it is where the rule has it."""

    def stacked(b, x):
        def step(b, row):
            b = lib.write(b, 1, jnp.sin(b.T @ (b @ row)) * x)
            return b, row + b[1]

        return lib.scan(step, b, b, residuals="undo")

    def f(b, x):
        g = jax.custom_jvp(stacked)
        g.defjvp(lambda primals, dots: jax.jvp(stacked, primals, (dots[0], 3 * dots[1])))
        (b, rows), _ = lax.scan(lambda c, _: (g(c[0] + c[1], x), None), (b, 2 * b), length=3)
        return jnp.sum(jnp.sin(b) * rows)

    def gradient(f, compiled=jit):
        return compiled(jax.grad(lambda *a: jnp.sum(jax.vmap(f, (0, None))(*a)), (0, 1)))(jnp.stack([B, B + 1]), 0.3)

    lib = Plain
    plain, ours = gradient(f, in_numpy), gradient(in_place(f, residuals="undo"))
    lib = Ours
    assert_same([ours, gradient(f)], [plain, plain])
