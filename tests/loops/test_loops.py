"""The loops give the values and derivatives of unrolled Python loops, under every transformation."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import jit, lax
from loop_programs import (
    BATCH_STEPS,
    DIRECTION,
    MAX,
    OURS,
    POINT,
    POINTS,
    PROGRAMS,
    PYTHON,
    ROWS,
    STEPS,
    TOLERANCE,
    along,
    assert_close,
    counted,
    evaluated,
    expected,
    gradient,
    library,
    loss,
    pushed,
    python_fori,
    python_while,
    up_to,
    vector,
    weighted,
    weighted_along,
    weights,
)

import jax_tensorarray as ta
from jax_tensorarray import ta_read, ta_write

#: name -> (transformation of a function of p, order of the derivative, what it gives of the exact one).
EVERY = {
    "value": (lambda f: f, 0, lambda y: y),
    "jvp": (pushed, 1, along),
    "grad": (gradient, 1, weighted),
}
SECOND = {
    "jvp of grad": (lambda f: pushed(gradient(f)), 2, weighted_along),
    "grad of jvp": (lambda f: gradient(pushed(f)), 2, weighted_along),
    "jacrev of grad": (lambda f: jax.jacrev(gradient(f)), 2, weighted),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("turn", "name"), list(enumerate(PROGRAMS)))
def test_derivatives(turn, name):
    """The first derivatives; one of the second ones, or what is recomputed, in turn."""
    second = list(SECOND)[turn // 2 % len(SECOND)]
    kinds = EVERY | ({} if turn % 2 else {second: SECOND[second]})

    @jit
    def found(p, n):
        f = functools.partial(PROGRAMS[name], OURS, n=n)
        derivatives = {kind: transform(f)(p) for kind, (transform, _, _) in kinds.items()}
        if turn % 2:
            derivatives["recomputed"] = gradient(functools.partial(PROGRAMS[name], library("recompute"), n=n))(p)
        return derivatives

    for n in STEPS:
        for kind, derivative in found(POINT, n).items():
            _, order, pick = kinds.get(kind, EVERY["grad"])
            if order < 2 or n == MAX + 3:
                assert_close(derivative, pick(expected(name, n, order)), f"{kind}, {n} steps")


@pytest.mark.slow
def test_third_derivatives():
    name = "until_converged"

    @jit
    def found(p, n):
        f = functools.partial(PROGRAMS[name], OURS, n=n)
        return jax.grad(lambda p: jnp.vdot(gradient(pushed(f))(p), jnp.asarray(DIRECTION)))(p)

    assert_close(found(POINT, 2), weighted(expected(name, 2, 3)) @ DIRECTION @ DIRECTION)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "context"),
    [
        ("appends_and_pops", contextlib.nullcontext),
        ("appends_and_pops", jax.disable_jit),
        ("a_loop_that_depends_on_the_data_in_a_loop", jax.disable_jit),
    ],
)
def test_derivatives_need_no_jit(name, context):
    f = functools.partial(PROGRAMS[name], OURS, n=4)
    with context():
        assert_close(f(jnp.asarray(POINT)), expected(name, 4, 0))
        assert_close(gradient(f)(jnp.asarray(POINT)), weighted(expected(name, 4, 1)))
        if context is contextlib.nullcontext:
            assert_close(pushed(f)(jnp.asarray(POINT)), expected(name, 4, 1) @ DIRECTION)


# --- vmap -----------------------------------------------------------------------------------------------------


def expected_batch(name, order):
    return np.stack([expected(name, n, order, p) for p, n in zip(POINTS, BATCH_STEPS, strict=True)])


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("turn", "name"), list(enumerate(PROGRAMS)))
def test_every_example_of_a_batch_takes_its_own_number_of_steps(turn, name):
    """The orders are in turn: random programs have both."""

    def f(p, n):
        y = PROGRAMS[name](OURS, p, n)
        return jnp.vdot(weights(len(y)), y), y

    @jit
    def grad_of_vmap(ps, shared, ns):
        def total(ps, shared):
            losses, values = jax.vmap(lambda p, n: f(p + shared, n))(ps, ns)
            return jnp.sum(losses), values

        return jax.grad(total, (0, 1), has_aux=True)(ps, shared)

    wanted = np.stack([weighted(d) for d in expected_batch(name, 1)])
    if turn % 2:
        gradients, values = jit(jax.vmap(jax.grad(f, has_aux=True)))(POINTS, BATCH_STEPS)
    else:
        (gradients, shared), values = grad_of_vmap(POINTS, np.zeros_like(POINT), BATCH_STEPS)
        assert_close(shared, wanted.sum(0), "of what is the same for every example")
    assert_close(values, expected_batch(name, 0), "values")
    assert_close(gradients, wanted, "gradients")


@pytest.mark.slow
def test_batches_of_batches_and_of_hessians():
    name = "appends_and_pops"
    f = functools.partial(PROGRAMS[name], OURS)

    @jit
    def found(ps, ns):
        squares = [a.reshape(2, 2, *a.shape[1:]) for a in (ps, ns)]
        return {
            "vmap of vmap": jax.vmap(jax.vmap(f))(*squares),
            "vmap of grad of vmap": jax.vmap(
                lambda ps, ns: jax.grad(lambda ps: jnp.sum(jax.vmap(loss(f))(ps, ns)))(ps)
            )(*squares),
            "vmap of hessian": jax.vmap(jax.hessian(loss(f)))(ps, ns),
        }

    found = found(POINTS, BATCH_STEPS)
    value, first, second = (expected_batch(name, order) for order in (0, 1, 2))
    assert_close(found["vmap of vmap"].reshape(value.shape), value)
    first = np.stack([weighted(d) for d in first])
    assert_close(found["vmap of grad of vmap"].reshape(first.shape), first)
    assert_close(found["vmap of hessian"], np.stack([weighted(d) for d in second]))


def several_arguments(lib, x, w, b, n):
    def step(i, y, b):
        y = jnp.sin(y * w + lib.read(b, i // 2))
        return y, lib.write(b, i, y * lib.read(b, i))

    y, b = counted(lib, n, step, x, b)
    return jnp.vdot(vector(y, b), weights(1 + ROWS))


@pytest.mark.slow
@pytest.mark.parametrize("batched", [(0, 1, 2, 3), (0,), (1,), (2,), (3,)])
def test_in_axes(batched):
    """All arguments differ, or a single one."""
    arguments = POINTS[:, 0], POINTS[:, 1], POINTS[:, 2:], BATCH_STEPS
    args = [a if k in batched else a[0] for k, a in enumerate(arguments)]
    examples = [[a[e] if k in batched else a for k, a in enumerate(args)] for e in range(4)]
    axes = [0 if k in batched else None for k in range(4)]
    if 2 in batched:  # of a buffer any axis may be the batch
        args[2], axes[2] = args[2].T, 1
    f = jax.value_and_grad(functools.partial(several_arguments, OURS), argnums=(0, 1, 2))
    found = jit(jax.vmap(f, axes))(*args)
    for k, (*variables, n) in enumerate(examples):
        python = functools.partial(several_arguments, PYTHON, n=int(n))
        one = evaluated(jax.value_and_grad(python, argnums=(0, 1, 2)), *variables)
        jax.tree.map(lambda a, e, k=k: assert_close(a[k], e), found, one)


# --- arguments and results -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_return_steps():
    limit = {"max_steps": 5, "on_limit": "stop"}

    def f(x, n):
        return ta.while_loop(up_to(n), lambda c: (c[0] + 1, c[1] * x), (0, 1.0), **limit, return_steps=True)

    jitted = jax.jit(f)
    differentiated = jax.grad(lambda x, n: (f(x, n)[0][1], f(x, n)[1]), has_aux=True)
    for asked, taken, cut in ((0, 0, False), (1, 1, False), (5, 5, False), (6, 5, True)):
        for g in (f, jitted):
            (i, y), steps = g(2.0, asked)
            assert (int(i), float(y)) == (taken, 2.0**taken)
            assert (int(steps.taken), bool(steps.cut)) == (taken, cut)
            assert steps == (steps.taken, steps.cut)
        slope, steps = differentiated(2.0, asked)
        assert (slope, int(steps.taken), bool(steps.cut)) == (taken * 2.0 ** (taken - 1), taken, cut)
    with jax.disable_jit():
        (i, _), steps = f(2.0, 9)
        assert (i, steps.taken, steps.cut) == (5, 5, True)


def test_return_steps_of_a_batch_and_without_a_limit():
    def f(n, **limit):
        return ta.while_loop(up_to(n), lambda c: (c[0] + 2, c[1]), (0, 1.0), return_steps=True, **limit)[1]

    asked = jnp.array([0, 1, 7, 20])
    for limit, taken in (({"max_steps": 5, "on_limit": "stop"}, [0, 1, 4, 5]), ({}, [0, 1, 4, 10])):
        steps = jax.jit(jax.vmap(functools.partial(f, **limit)))(asked)
        np.testing.assert_array_equal(steps.taken, taken)
        np.testing.assert_array_equal(steps.cut, [False, False, False, bool(limit)])


def test_no_step_is_allowed():
    def f(x, max_steps=0):
        return ta.while_loop(lambda y: y < 10, lambda y: y * x, x * x, max_steps=max_steps, on_limit="stop")

    assert (f(3.0), f(3.0, np.int64(0)), jax.grad(f)(3.0), jit(jax.grad(jax.grad(f)))(3.0)) == (9, 9, 6, 2)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("max_steps", [None, 3])
def test_fori_loop_of_known_and_traced_bounds(max_steps):
    def by(loop, x, low, high):
        def body(i, c):
            return jnp.sin(c[0] * c[1]) + i, c[1] * c[1]

        return sum(loop(low, high, body, (x, x), max_steps=max_steps))

    ours = functools.partial(by, functools.partial(ta.fori_loop, on_limit="stop"))
    bounds = [(0, 4), (2, 5), (-3, 1), (4, 4), (5, 2)]
    wanted = [jax.value_and_grad(functools.partial(by, python_fori))(0.6, *ends) for ends in bounds]
    np.testing.assert_allclose(jax.value_and_grad(ours)(0.6, *bounds[0]), wanted[0], rtol=TOLERANCE)
    known = jit(lambda x: [jax.value_and_grad(ours)(x, *ends) for ends in bounds])
    np.testing.assert_allclose(known(0.6), wanted, rtol=TOLERANCE)
    if max_steps is None:  # and so forward mode only
        traced = jit(lambda x, low, high: jax.jvp(lambda x: ours(x, low, high), (x,), (1.0,)))
    else:
        traced = jit(jax.value_and_grad(ours))
    np.testing.assert_allclose([traced(0.6, *ends) for ends in bounds], wanted, rtol=TOLERANCE)
    if max_steps is not None:
        batch = jit(jax.vmap(jax.value_and_grad(ours), (None, 0, 0)))(0.6, *np.transpose(bounds))
        np.testing.assert_allclose(np.transpose(batch), wanted, rtol=TOLERANCE)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "int64"])
def test_the_index_of_fori_loop_has_the_dtype_that_it_has_in_jax(dtype):
    def by(loop):
        seen = []
        bounds = [jax.ShapeDtypeStruct((), dtype)] * 2
        value = jax.eval_shape(
            lambda *ends: loop(*ends, lambda i, c: (seen.append(jax.typeof(i)), c + i)[1], 0), *bounds
        )
        return value.dtype, value.weak_type, seen[0]

    assert by(ta.fori_loop) == by(lax.fori_loop)


XS = np.linspace(0.1, 0.9, 5)
SCANS = {
    "reverse": {"reverse": True},
    "unroll": {"unroll": 2},
    "unroll all": {"unroll": True},
}


def rows_by(scan, options, x, xs):
    def f(c, x):
        i, y, b = c
        y = jnp.sin(y * x + ta_read(b, i))
        return (i + 1, y, ta_write(b, i, y)), {"y": y, "i": i}

    (_, y, b), ys = scan(f, (0, x, jnp.sin(xs)), xs, **SCANS[options])
    return vector(y, b, ys["y"], ys["i"])


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("options", SCANS)
def test_scan_is_that_of_jax(options):
    @jit
    def jacobians(x, xs):
        ours = [jax.jacrev(functools.partial(rows_by, functools.partial(ta.scan, residuals=r), options), (0, 1))(x, xs)
                for r in ("auto", "tape", "recompute")]  # fmt: skip
        return ours, jax.jacfwd(functools.partial(rows_by, lax.scan, options), (0, 1))(x, xs)

    ours, jaxs = jacobians(0.7, XS)
    for found in ours:
        jax.tree.map(assert_close, found, jaxs)


def test_scan_without_xs():
    assert jax.grad(lambda x: ta.scan(lambda c, _: (c * x, None), 1.0, length=3)[0])(2.0) == 12


def pair(a, x):
    return {"s": jnp.sin(a["s"] * x["s"]) + a["t"][0], "t": (a["t"][0] * x["t"][0],)}


def folded(elems, initializer, reverse):
    n = len(jax.tree.leaves(elems)[0])
    slices = [jax.tree.map(lambda v, k=k: v[k], elems) for k in range(n)]
    slices = slices[::-1] if reverse else slices
    every = [slices.pop(0)] if initializer is None else []
    a = every[0] if initializer is None else initializer
    for x in slices:
        a = pair(a, x)
        every.append(a)
    return a, jax.tree.map(lambda *v: jnp.stack(v), *(every[::-1] if reverse else every))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("length", "start", "reverse"), [(1, None, False), (1, 0.4, True), (5, None, True), (5, 0.4, False)]
)
def test_folds_are_those_of_python(length, start, reverse):
    def ours(elems, initializer):
        last = (ta.tf.foldr if reverse else ta.tf.foldl)(pair, elems, initializer)
        return last, ta.tf.scan(pair, elems, initializer, reverse=reverse)

    def by(fold):
        def f(x, start):
            initializer = None if start is None else {"s": start, "t": (start * start,)}
            return vector(*jax.tree.leaves(fold({"s": x, "t": (jnp.cos(x),)}, initializer)))

        return f

    @jit
    def found(x, start):
        batched = jax.vmap(by(ours), (0, None))(jnp.stack([x, 2 * x]), start)
        return batched, jax.jacrev(by(ours), wrt)(x, start)

    @jit
    def wanted(x, start):
        python = by(lambda elems, initializer: folded(elems, initializer, reverse))
        return jnp.stack([python(x, start), python(2 * x, start)]), jax.jacrev(python, wrt)(x, start)

    wrt = 0 if start is None else (0, 1)
    jax.tree.map(assert_close, found(XS[:length], start), wanted(XS[:length], start))


def test_map_fn_is_that_of_python():
    def f(x):
        return {"a": jnp.sin(x["x"]) * x["y"].sum(), "b": x["y"]}

    def total(mapped, x):
        out = mapped(f, {"x": x, "y": jnp.outer(x, x)})
        return jnp.sum(out["a"] ** 2) + jnp.sum(jnp.cos(out["b"]))

    def python(f, elems):
        outs = [f(jax.tree.map(lambda v, k=k: v[k], elems)) for k in range(5)]
        return jax.tree.map(lambda *v: jnp.stack(v), *outs)

    found, wanted = (jit(jax.hessian(functools.partial(total, mapped)))(XS) for mapped in (ta.tf.map_fn, python))
    assert_close(found, wanted)


def test_folds_of_nothing():
    nothing = jnp.zeros((0, 2))
    np.testing.assert_array_equal(ta.tf.foldl(jnp.add, nothing, jnp.ones(2)), [1, 1])
    np.testing.assert_array_equal(ta.tf.foldr(jnp.add, nothing, jnp.ones(2)), [1, 1])
    assert ta.tf.scan(jnp.add, nothing, jnp.ones(2)).shape == (0, 2)
    assert ta.tf.map_fn(jnp.sin, nothing).shape == (0, 2)
    for name in ("foldl", "foldr", "scan"):
        with pytest.raises(ValueError, match=f"tf.{name}:"):
            getattr(ta.tf, name)(jnp.add, nothing)


# --- dtypes ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_derivatives_have_the_dtype_of_the_carry(dtype):
    def f(loop, x, b):  # exact in all of these dtypes
        def body(c):
            i, y, b = c
            y = y * 2 - b[i % 4]
            return i + 1, y, b.at[i % 4].set(y * y)

        return loop(up_to(2), body, (0, x, b))[2]

    def value_and_cotangents(loop, *args):
        value, pull = jax.vjp(functools.partial(f, loop), *args)
        return value, *pull(value)

    args = jnp.asarray(0.5, dtype), jnp.asarray([0.25, 1.0, 2.0, 0.5], dtype)
    found, wanted = (
        jit(functools.partial(value_and_cotangents, loop))(*args) for loop in (OURS.while_loop, python_while)
    )
    for a, e in zip(found, wanted, strict=True):
        assert a.dtype == dtype
        np.testing.assert_array_equal(a, e)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("make_key", "residuals"), [(jax.random.key, "tape"), (jax.random.PRNGKey, "recompute")])
def test_random_keys_in_the_carry(make_key, residuals):
    def f(loop, x, seed, n):
        def body(c):
            i, key, y = c
            key, now = jax.random.split(key)
            return i + 1, key, jnp.sin(y * x) + jax.random.normal(now, dtype=float)

        _, key, y = loop(up_to(n), body, (0, make_key(seed), x))
        return y + jax.random.normal(key, dtype=float)

    ours = jax.value_and_grad(functools.partial(f, functools.partial(ta.while_loop, max_steps=5, residuals=residuals)))
    seeds, ns = np.array([1, 2, 3]), np.array([3, 0, 5])
    wanted = [jax.value_and_grad(functools.partial(f, python_while))(0.7, s, n) for s, n in zip(seeds, ns, strict=True)]
    one, batch = jit(lambda *args: (ours(*(jnp.ravel(a)[0] for a in args)), jax.vmap(ours, (None, 0, 0))(*args)))(
        0.7, seeds, ns
    )
    np.testing.assert_allclose(one, wanted[0], rtol=TOLERANCE)
    np.testing.assert_allclose(np.stack(batch, 1), wanted, rtol=TOLERANCE)
