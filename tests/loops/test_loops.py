"""The loops give the values and derivatives of unrolled Python loops, under every transformation."""

import contextlib
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import unrolled
from jax import jit, lax
from list_model import ListArray

import jax_tensorarray as ta
from jax_tensorarray import TensorArray, ta_add, ta_read, ta_swap, ta_write

MAX = 6  # steps
ROWS = 6

# --- one program, run by the library and by Python -------------------------------------------------------------


def python_while(cond_fun, body_fun, carry, *, max_steps=MAX):
    taken = 0
    while (max_steps is None or taken < max_steps) and cond_fun(carry):
        carry, taken = body_fun(carry), taken + 1
    return carry


def python_fori(lower, upper, body_fun, carry, *, max_steps=MAX):
    for i in range(int(lower), int(upper))[:max_steps]:
        carry = body_fun(i, carry)
    return carry


def python_scan(f, carry, xs):
    ys = []
    for x in xs:
        carry, y = f(carry, x)
        ys.append(y)
    return carry, jnp.stack(ys)


def library(residuals="auto", checkpoint=jax.checkpoint):
    options = {"max_steps": MAX, "residuals": residuals}
    return types.SimpleNamespace(
        while_loop=functools.partial(ta.while_loop, **options),
        fori_loop=functools.partial(ta.fori_loop, **options),
        lax_scan=lax.scan,
        cond=lax.cond,
        switch=lax.switch,
        checkpoint=checkpoint,
        read=ta_read,
        write=ta_write,
        add=ta_add,
        swap=ta_swap,
        array=TensorArray.from_array,
        select=jnp.where,
        truth=jnp.asarray,
    )


OURS = library()
PYTHON = types.SimpleNamespace(
    while_loop=python_while,
    fori_loop=python_fori,
    lax_scan=python_scan,
    cond=lambda p, yes, no, *xs: yes(*xs) if p else no(*xs),
    switch=lambda k, branches, *xs: branches[min(max(int(k), 0), len(branches) - 1)](*xs),
    checkpoint=lambda f: f,
    read=unrolled.ta_read,
    write=unrolled.ta_write,
    add=unrolled.ta_add,
    swap=unrolled.ta_swap,
    array=lambda rows, dynamic_size=None, max_size=None: ListArray.from_array(rows, max_size),
    select=lambda p, x, y: x if p else y,
    truth=bool,
)

#: name -> function of (lib, p, n) that gives a vector. p is [2 + ROWS], n the number of steps asked for.
#: These are what the grammar of tests/support/random_programs.py makes never or seldom.
PROGRAMS: dict[str, Any] = {}


def program(f):
    PROGRAMS[f.__name__] = f
    return f


def vector(*arrays):
    return jnp.concatenate([jnp.ravel(jnp.asarray(a, float)) for a in arrays])


def split(p):
    return p[0], p[1], p[2:]


def counted(lib, n, step, *carry):
    """`carry = step(i, *carry)` n times."""
    return lib.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, *step(*c)), (0, *carry))[1:]


@program
def until_converged(lib, p, n):
    x, w, _ = split(p)
    a = 1.5 + x * x  # it takes three steps or so
    root = lib.while_loop(lambda y: jnp.abs(y * y - a) > 1e-3 / (1 + n), lambda y: (y + a / y) / 2, 1 + w * w)
    return vector(root, root**2)


@program
def carries_of_every_kind(lib, p, n):
    """A pytree; integers, a bool and a complex number; what is not used, not changed, or has its gradient stopped."""
    x, w, b = split(p)

    def step(i, c, k, flag, z, y, same, unused):
        dead = jnp.exp(unused) + lib.read(c["rows"], i)
        del dead
        stopped = lax.stop_gradient(lib.read(c["rows"], i // 2)) + lax.stop_gradient(y)
        new = {"rows": lib.write(c["rows"], i, c["pair"][0]), "pair": (c["pair"][1] * w, [jnp.sin(c["pair"][0])][0])}
        z = z * jnp.exp(1j * w) + y
        y = lib.select(flag, y * jnp.real(z), jnp.sin(jnp.imag(z)) * k) * same + stopped
        return new | {"none": None}, (3 * k + i) % 7, lib.truth(k % 2 == 0), z, y, same, unused + y

    start = {"rows": b, "pair": (x, w), "none": None}, 1, lib.truth(True), x + 1j * b[0], w, x, 0.0
    c, k, flag, z, y, _, _ = counted(lib, n, step, *start)
    return vector(c["rows"], *c["pair"], k, flag, jnp.real(z), jnp.imag(z), y)


@program
def a_tensorarray_in_the_carry_and_one_that_is_closed_over(lib, p, n):
    x, w, b = split(p)
    closed = lib.array(jnp.sin(b))

    def step(i, ta, y):
        y = jnp.sin(ta.read(i // 2) + y * w * closed.read(i)) * closed.read(0)
        return ta.write(i, y * x).write(0, ta.read(i)), y

    array, y = counted(lib, n, step, lib.array(b.reshape(3, 2).repeat(2, axis=0)), jnp.stack([x, w]))
    return vector(array.stack(), y)


@program
def appends_and_pops(lib, p, n):
    x, w, b = split(p)
    size = n + 2 if lib is PYTHON else jnp.asarray(n, jnp.int32) + 2

    def step(ta):  # two more rows, one less
        ta, last = ta.append(x * w).append(jnp.sin(ta.read(ta.size() - 1) * w)).pop()
        return ta.write(ta.size() - 1, last + ta.read(0))

    start = lib.array(b[:2], dynamic_size=True, max_size=12)
    array = lib.while_loop(lambda ta: ta.size() < size, step, start)
    return vector(array.stack(), array.size())


@program
def a_branch(lib, p, n):
    x, w, b = split(p)

    def step(i, y, b):
        b = lib.cond(jnp.sin(9 * y) > 0, lambda b: lib.write(b, i, y * lib.read(b, i // 2)), lambda b: b, b)
        branches = [
            lambda y, b: (y, lib.add(b, 0, w)),
            lambda y, b: (jnp.sin(y * lib.read(b, i, where=lib.truth(i != 3))), b),
            lambda y, b: lib.swap(b, 1, y)[::-1],
        ]
        y, b = lib.switch((i * i + 1) % 3, branches, y, b)
        return jnp.cos(y * w + lib.read(b, i)), b

    return vector(*counted(lib, n, step, x, b))


@program
def a_loop_in_a_loop(lib, p, n):
    x, w, b = split(p)

    def step(i, y, b):
        y, b = counted(
            lib, i, lambda j, y, b: (jnp.sin(y + lib.read(b, j)) * w, lib.add(b, (i + j) % ROWS, y * x)), y, b
        )
        return y, lib.write(b, i, y)

    return vector(*counted(lib, n, step, x, b))


@program
def a_loop_that_depends_on_the_data_in_a_loop(lib, p, n):
    x, w, b = split(p)

    def step(i, y):
        z = lib.while_loop(lambda z: jnp.abs(z) < 0.5 + 0.2 * i, lambda z: z * 1.5 + w * y, y)
        return (jnp.cos(z) * lib.read(b, i),)

    return vector(*counted(lib, n, step, x))


@program
def counted_by_fori_loop_with_weights_that_are_closed_over(lib, p, n):
    x, w, b = split(p)
    weights = jnp.outer(b, b)

    def step(i, c):
        y, b = c
        return jnp.sin(y * w + lib.read(b, i - 1)), jnp.tanh(weights @ lib.write(b, i - 1, y))

    return vector(*lib.fori_loop(1, n + 1, step, (x, b)))


@program
def in_a_branch_of_a_scan_of_jax(lib, p, n):
    x, w, b = split(p)

    def f(c, row):
        def loop(y, b):
            return counted(lib, n, lambda i, y, b: (jnp.sin(y * w + lib.read(b, i)), lib.write(b, i, row * x)), y, b)

        y, b = lib.cond(n > 1, loop, lambda y, b: (y * w, b), *c)
        return (y, b), y

    (y, b), ys = lib.lax_scan(f, (x, b), b[:2])
    return vector(y, b, ys)


@program
def a_checkpointed_loop(lib, p, n):
    """And a checkpointed body, which reads two versions of a buffer."""

    def step(i, w, x, y, b):
        new, old = lib.swap(b, i, y * lib.read(b, i))
        return jnp.sin(old * w + lib.read(b, i) + lib.read(new, i // 2)) * x, lib.add(new, 1, old)

    def loop(x, w, b):
        return counted(lib, n, lambda i, y, b: lib.checkpoint(functools.partial(step, i))(w, x, y, b), x, b)

    return vector(*lib.checkpoint(loop)(*split(p)))


# --- derivatives ----------------------------------------------------------------------------------------------

_rng = np.random.default_rng(0)
POINT = _rng.uniform(0.3, 0.9, 2 + ROWS)
DIRECTION = _rng.normal(size=POINT.shape)
STEPS = (0, 4, MAX, MAX + 3)  # none, some, all, cut short
TOLERANCE = 1e-12


def weights(k):
    return jnp.asarray(np.linspace(-1.0, 1.2, k))


@functools.cache
def _expected(name, n, order, point):
    f = functools.partial(PROGRAMS[name], PYTHON, n=n)
    for _ in range(order):
        f = jax.jacfwd(f)
    return np.asarray(f(jnp.asarray(point)))


def expected(name, n, order, point=POINT):
    """The derivative of an order, of the loop unrolled: [outputs, inputs, ...]."""
    return _expected(name, int(n), order, tuple(map(float, point)))


def weighted(d):
    """The derivative of the weighted sum of the outputs."""
    return np.tensordot(weights(len(d)), d, 1)


def loss(f):
    def weighted_sum(p, *args):
        y = f(p, *args)
        return jnp.vdot(weights(len(y)), y)

    return weighted_sum


def gradient(f):
    return jax.grad(loss(f))


def assert_close(found, wanted, message=""):
    scale = max(1.0, np.max(np.abs(wanted), initial=0.0))
    np.testing.assert_allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE * scale, err_msg=message)


def pushed(f):
    return lambda p: jax.jvp(f, (p,), (jnp.asarray(DIRECTION),))[1]


def along(d):
    return d @ DIRECTION


def weighted_along(d):
    return weighted(d) @ DIRECTION


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


def kinds_of(name):
    """The first derivatives, and one of the second ones in turn."""
    turn = list(SECOND)[list(PROGRAMS).index(name) % len(SECOND)]
    return EVERY | {turn: SECOND[turn]}


@pytest.mark.parametrize("name", PROGRAMS)
def test_derivatives(name):
    kinds = kinds_of(name)

    @jit
    def found(p, n):
        f = functools.partial(PROGRAMS[name], OURS, n=n)
        recomputed = functools.partial(PROGRAMS[name], library("recompute"), n=n)
        return {kind: transform(f)(p) for kind, (transform, _, _) in kinds.items()}, gradient(recomputed)(p)

    for n in STEPS:
        derivatives, recomputed = found(POINT, n)
        for kind, (_, order, pick) in kinds.items():
            if order < 2 or n in (4, MAX + 3):
                assert_close(derivatives[kind], pick(expected(name, n, order)), f"{kind}, {n} steps")
        assert_close(recomputed, weighted(expected(name, n, 1)), f"recomputed, {n} steps")


def test_third_derivatives():
    name = "until_converged"

    @jit
    def found(p, n):
        f = functools.partial(PROGRAMS[name], OURS, n=n)
        return jax.grad(lambda p: jnp.vdot(gradient(pushed(f))(p), jnp.asarray(DIRECTION)))(p)

    assert_close(found(POINT, 2), weighted(expected(name, 2, 3)) @ DIRECTION @ DIRECTION)


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

BATCH_STEPS = np.array([4, 0, MAX + 3, 1])
POINTS = POINT + 0.05 * _rng.normal(size=(4, 2 + ROWS))


def expected_batch(name, order):
    return np.stack([expected(name, n, order, p) for p, n in zip(POINTS, BATCH_STEPS, strict=True)])


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_example_of_a_batch_takes_its_own_number_of_steps(name):
    def f(p, n):
        y = PROGRAMS[name](OURS, p, n)
        return jnp.vdot(weights(len(y)), y), y

    @jit
    def found(ps, shared, ns):
        def total(ps, shared):
            return jnp.sum(jax.vmap(lambda p, n: f(p + shared, n)[0])(ps, ns))

        gradients, values = jax.vmap(jax.grad(f, has_aux=True))(ps, ns)
        return values, gradients, *jax.grad(total, (0, 1))(ps, shared)

    value, vmap_of_grad, grad_of_vmap, shared = found(POINTS, np.zeros_like(POINT), BATCH_STEPS)
    wanted = np.stack([weighted(d) for d in expected_batch(name, 1)])
    assert_close(value, expected_batch(name, 0), "vmap")
    assert_close(vmap_of_grad, wanted, "vmap of grad")
    assert_close(grad_of_vmap, wanted, "grad of vmap")
    assert_close(shared, wanted.sum(0), "grad of vmap, of what is the same for every example")


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
    wanted = jax.value_and_grad(functools.partial(several_arguments, PYTHON), argnums=(0, 1, 2))
    for k, (x, w, b, n) in enumerate(examples):
        one = wanted(x, w, jnp.asarray(b), int(n))
        jax.tree.map(lambda a, e, k=k: assert_close(a[k], e), found, one)


# --- arguments and results -------------------------------------------------------------------------------------


def up_to(n):
    return lambda c: c[0] < n


def test_return_steps():
    def f(x, n):
        return ta.while_loop(up_to(n), lambda c: (c[0] + 1, c[1] * x), (0, 1.0), max_steps=5, return_steps=True)

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
    for limit, taken in (({"max_steps": 5}, [0, 1, 4, 5]), ({}, [0, 1, 4, 10])):
        steps = jax.jit(jax.vmap(functools.partial(f, **limit)))(asked)
        np.testing.assert_array_equal(steps.taken, taken)
        np.testing.assert_array_equal(steps.cut, [False, False, False, bool(limit)])


def test_no_step_is_allowed():
    def f(x, max_steps=0):
        return ta.while_loop(lambda y: y < 10, lambda y: y * x, x * x, max_steps=max_steps)

    assert (f(3.0), f(3.0, np.int64(0)), jax.grad(f)(3.0), jit(jax.grad(jax.grad(f)))(3.0)) == (9, 9, 6, 2)


@pytest.mark.parametrize("max_steps", [None, 3])
def test_fori_loop_of_known_and_traced_bounds(max_steps):
    def by(loop, x, low, high):
        def body(i, c):
            return jnp.sin(c[0] * c[1]) + i, c[1] * c[1]

        return sum(loop(low, high, body, (x, x), max_steps=max_steps))

    ours = functools.partial(by, ta.fori_loop)
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


@pytest.mark.parametrize(
    ("length", "start", "reverse"), [(1, None, False), (1, 0.4, True), (5, None, True), (5, 0.4, False)]
)
def test_folds_are_those_of_python(length, start, reverse):
    def ours(elems, initializer):
        last = (ta.foldr if reverse else ta.foldl)(pair, elems, initializer)
        return last, ta.tf_scan(pair, elems, initializer, reverse=reverse)

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

    found, wanted = (jit(jax.hessian(functools.partial(total, mapped)))(XS) for mapped in (ta.map_fn, python))
    assert_close(found, wanted)


def test_folds_of_nothing():
    nothing = jnp.zeros((0, 2))
    np.testing.assert_array_equal(ta.foldl(jnp.add, nothing, jnp.ones(2)), [1, 1])
    np.testing.assert_array_equal(ta.foldr(jnp.add, nothing, jnp.ones(2)), [1, 1])
    assert ta.tf_scan(jnp.add, nothing, jnp.ones(2)).shape == (0, 2)
    assert ta.map_fn(jnp.sin, nothing).shape == (0, 2)
    for name in ("foldl", "foldr", "tf_scan"):
        with pytest.raises(ValueError, match=name):
            getattr(ta, name)(jnp.add, nothing)


# --- dtypes ----------------------------------------------------------------------------------------------------


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


# --- with the rest of JAX --------------------------------------------------------------------------------------


def test_without_jit_a_fori_loop_takes_bounds_that_are_arrays():
    with jax.disable_jit():
        assert ta.fori_loop(jnp.int32(1), jnp.int32(4), lambda i, c: c + i, 0) == 6


@pytest.mark.parametrize(
    ("name", "batched"), [("a_checkpointed_loop", False), ("a_loop_that_depends_on_the_data_in_a_loop", True)]
)
def test_everything_passes_the_checks_of_jax(name, batched):
    def f(p, n):
        return jax.hessian(loss(functools.partial(PROGRAMS[name], OURS, n=n)))(p)

    with jax.enable_checks(True):
        jax.jit(jax.vmap(f) if batched else f).lower(*((POINTS, BATCH_STEPS) if batched else (POINT, 4)))


def test_no_tracer_leaks():
    def f(p, n):
        return gradient(functools.partial(PROGRAMS["a_checkpointed_loop"], OURS, n=n))(p)

    with jax.checking_leaks():
        jax.jit(jax.vmap(f)).lower(POINTS, BATCH_STEPS)


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


def own_end(loop, x):
    return loop(lambda c: c[0] < x, lambda c: (c[0] + 1, 2 * c[1] + lax.axis_index("batch")), (0, x))[1]


def over_the_batch(f, loop, x):
    return loop(up_to(2), lambda c: (c[0] + 1, f(c[1])), (0, x))[1]


NAMED = {
    "sum": (functools.partial(over_the_batch, lambda y: y + lax.psum(y, "batch")), [36.0, 37, 39]),
    "index": (functools.partial(over_the_batch, lambda y: y + lax.axis_index("batch")), [1.0, 4, 8]),
    "index, and ends of their own": (own_end, [2.0, 11, 94]),
}


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


@pytest.mark.parametrize(
    ("transform", "how"),
    [
        (lambda f: f, {}),
        (jax.jit, {"max_steps": 3}),
        (lambda f: lambda x: jax.vmap(f)(x[None]), {"max_steps": 3}),
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
    wanted, second = ([d(functools.partial(f, python_while))(0.5, int(n)) for n in ns] for d in (jax.grad, jax.hessian))
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
    "condition that is no bool": (lambda c: c, lambda c: c + 1, 0),
    "condition that is an array": (lambda c: c < 3, lambda c: c + 1, jnp.zeros(2)),
    "condition that is a pair": (lambda c: (c < 3, c), lambda c: c + 1, 0),
    "no function": (lambda c: c < 3, 5, 0),
}


def message(f, *args, **kwargs):
    with pytest.raises((TypeError, ValueError)) as error:
        f(*args, **kwargs)
    return type(error.value), str(error.value)


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


@pytest.mark.parametrize("f", [unlimited, unlimited_fori])
@pytest.mark.parametrize("transform", REVERSED)
def test_reverse_mode_without_max_steps_names_it_and_the_line(transform, f):
    line = f.__code__.co_firstlineno + 1
    with pytest.raises(ValueError, match=rf"test_loops\.py:{line} .*max_steps"):
        REVERSED[transform](f)(2.0)
