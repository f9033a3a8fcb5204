"""The loops are those of `jax.lax`: of the same functions they give the same values, types and errors.

`tools/jax_own_tests.py` asks JAX's own tests the same.
"""

import functools
import gc
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import jit, lax
from jax.experimental import checkify

import jax_tensorarray as ta
from jax_tensorarray._loops import while_ as while_module

pytestmark = pytest.mark.slow(but=1)

LAX, OURS = (types.SimpleNamespace(while_loop=m.while_loop, fori_loop=m.fori_loop, scan=m.scan) for m in (lax, ta))


def less(limit):
    return lambda c: c[0] < limit


# --- values and types under transformations --------------------------------------------------------------------

#: Of the loops and a float.
PROGRAMS = {
    "a weak float with its own end": lambda by, x: by.while_loop(lambda y: y < x, lambda y: y + 1.0, 0.0),
    "weak types": lambda by, x: by.while_loop(less(x), lambda c: (c[0] + 1, c[1] * 2, c[2]), (0, 1.0, 3.5)),
    "promoted": lambda by, x: by.while_loop(less(x), lambda c: (c[0] + 1, c[1] * x, c[2]), (0, 1, np.float32(3.5))),
    "a bool": lambda by, x: by.while_loop(lambda c: c[0], lambda c: (~c[0], c[1] + x), (True, 1)),
    "NumPy": lambda by, x: by.while_loop(less(x), lambda c: (c[0] + 1, c[1] * 2, c[2]), (np.int8(0), np.ones(3), True)),
    "partly without a derivative": lambda by, x: by.while_loop(
        less(3), lambda c: (c[0] + 1, jnp.floor(x * c[1]), c[2] * x), (0, 0.5, 1.0)
    ),
    "float bounds": lambda by, x: by.fori_loop(x, x + 2.0, lambda i, c: (c[0] * i, c[1], x * c[1]), (1.0, 5.0, x)),
    "an int16 bound": lambda by, x: by.fori_loop(0, jnp.int16(x), lambda i, c: (c[0] + i * x, c[1]), (0.0, 5)),
}

POINT, BATCH = np.float32(2.5), np.array([0.5, 1.5, 2.5, 5.0], np.float32)

#: Of a function of a float, a float and some.
TRANSFORMS = {
    "value": lambda f, x, xs: f(x),
    "vmap": lambda f, x, xs: jax.vmap(f)(xs),
    "jvp": lambda f, x, xs: jax.jvp(f, (x,), (x,)),
    "linearize": lambda f, x, xs: jax.linearize(f, x)[1](x),
    "linearize of checkpoint": lambda f, x, xs: jax.linearize(jax.checkpoint(f), x)[1](x),
}


def described(x):
    if getattr(x, "dtype", None) == jax.dtypes.float0:
        return repr(x)
    x = jnp.asarray(x)
    return x.dtype, x.weak_type, x.tolist()


def assert_same(transforms, name, compiled=lambda f: f):
    def by(loops):
        f = functools.partial(PROGRAMS[name], loops)
        found = compiled(lambda *args: [TRANSFORMS[transform](f, *args) for transform in transforms])(POINT, BATCH)
        return jax.tree.map(described, found)

    assert by(OURS) == by(LAX)


@pytest.mark.parametrize(("turn", "name"), list(enumerate(PROGRAMS)))
def test_values_and_types(turn, name):
    """Half of the transformations, in turn."""
    assert_same(list(TRANSFORMS)[turn % 2 :: 2], name, jit)
    if name in ("weak types", "promoted", "NumPy"):
        assert_same(["value", "linearize"], name)


def test_values_and_types_without_jit():
    with jax.disable_jit():
        for turn, name in enumerate(PROGRAMS):
            assert_same(["value", ["vmap", "jvp"][turn % 2]], name)


def test_without_jit_the_body_may_change_an_array_of_numpy():
    def body(c):
        y = np.array(c)
        y[0] += 1
        return y

    with jax.disable_jit():
        assert ta.while_loop(lambda c: c[0] < 5, body, np.zeros(2)).tolist() == [5, 0]


def test_vmap_promotes_nothing():
    with jax.numpy_dtype_promotion("strict"):
        limits = jnp.array([0, 3, 1])
        found = jax.vmap(lambda n: ta.while_loop(lambda k: k < n, lambda k: k + 1, 0, max_steps=9))(limits)
        assert found.tolist() == limits.tolist()


def test_named_axes_where_no_operand_is_batched():
    def f(by):
        return [
            by.while_loop(lambda k: k < lax.axis_index("i"), lambda k: k + 1, 0),
            by.while_loop(lambda k: k < lax.psum(1, "i"), lambda k: k + 1, 0),
            by.while_loop(less(3), lambda c: (c[0] + 1, lax.psum(c[1], "i")), (0, lax.axis_index("i"))),
        ]

    wanted, found = (jit(jax.vmap(lambda _, by=by: f(by), axis_name="i"))(jnp.arange(4)) for by in (LAX, OURS))
    assert jax.tree.map(described, found) == jax.tree.map(described, wanted)


# --- bounds and other arguments --------------------------------------------------------------------------------

BOUNDS = [
    (True, False),
    (False, True),
    (0, True),
    (np.int8(0), 3),
    (np.uint8(0), np.uint8(3)),
    (jnp.int32(1), 3),
    (jnp.int16(1), jnp.int32(3)),
    (0, 2.5),
    (0.0, 3.0),
    (2**31 + 1, 2**31 + 3),
    (0, jnp.arange(2)),
]


def outcome(f, *args):
    try:
        return jax.tree.map(described, f(*args))
    except (TypeError, ValueError) as error:
        return type(error), str(error).splitlines()[0]


@pytest.mark.parametrize(("lower", "upper"), BOUNDS, ids=str)
def test_bounds(lower, upper):
    def f(by, lower, upper):
        return by.fori_loop(lower, upper, lambda i, c: c + 1, 0)

    def traced(by, lower, upper):
        return jax.jit(functools.partial(f, by, lower))(upper)

    for call in (f, traced):
        assert outcome(call, OURS, lower, upper) == outcome(call, LAX, lower, upper)


@pytest.mark.parametrize("unroll", [0, 2, True, False, None, -1])
def test_unroll(unroll):
    def known(by):
        return by.fori_loop(0, 5, lambda i, c: c + i, 0, unroll=unroll)

    def traced(by):
        return jit(lambda n: by.fori_loop(0, n, lambda i, c: c + i, 0, unroll=unroll))(5)

    for call in (known, traced):
        assert outcome(call, OURS) == outcome(call, LAX)


class Unhashable:
    __hash__ = None

    def __call__(self, c):
        return c < 3


@pytest.mark.parametrize(
    "args",
    [
        (None, lambda c: c, 0),
        (lambda c: c < 3, lambda c: c, "text"),
        (lambda c: c < 3, lambda c: c, (1, object)),
        (Unhashable(), lambda c: c + 1, 0),
        (functools.partial(np.less, 1), lambda c: c, 0),
    ],
)
def test_arguments(args):
    assert outcome(ta.while_loop, *args) == outcome(lax.while_loop, *args)


# --- reverse mode without max_steps ----------------------------------------------------------------------------

#: Functions of a loop whose derivative passes no loop, and that derivative at 2.5.
NOT_DIFFERENTIATED = {
    "an integer": (lambda loop, x: x * loop(lambda k: k < x, lambda k: k + 1, 0), 3.0),
    "constants": (lambda loop, x: x * loop(lambda y: y < 9.0, lambda y: y * 2, 1.0), 16.0),
    "stopped": (lambda loop, x: x + loop(lambda y: y < 9.0, lambda y: y * 2, lax.stop_gradient(x)), 1.0),
    "unused": (lambda loop, x: (x * x, loop(lambda y: y < 9.0, lambda y: y * x, x, max_steps=9))[0], 5.0),
    "a predicate": (lambda loop, x: x * loop(lambda c: c[0] < c[1], lambda c: (c[0] + 1, c[1]), (0, x))[0], 3.0),
    "passed on": (lambda loop, x: loop(lambda c: c[0] < c[1], lambda c: (c[0] + 1, c[1]), (0, x))[1] ** 2, 5.0),
    "another carry is": (lambda loop, x: x * loop(less(4), lambda c: (c[0] + 2, c[1] * x), (0, x))[0], 4.0),
    "rounded": (lambda loop, x: x + loop(less(4), lambda c: (c[0] + 2, jnp.floor(c[1] * x)), (0, 1.0))[1], 1.0),
    "rejection": (
        lambda loop, x: x * jnp.sign(loop(
            lambda c: c[1] > x / 9,
            lambda c: (jax.random.split(c[0])[0], jax.random.uniform(c[0])),
            (jax.random.PRNGKey(0), 1.0),
        )[1]),
        1.0,
    ),
}  # fmt: skip

REVERSE = {
    "grad": jax.grad,
    "vmap": lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, x]))[1],
    "of vmap": lambda f: lambda x: jax.grad(lambda xs: jnp.sum(jax.vmap(f)(xs)))(jnp.stack([x, x]))[1],
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "scan": lambda f: jax.grad(lambda x: lax.scan(lambda c, _: (c + f(x), None), 0.0, length=2)[0] / 2),
    "scan of checkpoint": lambda f: jax.grad(
        lambda x: lax.scan(jax.checkpoint(lambda c, _: (c + f(x), None)), 0.0, length=2)[0] / 2
    ),
    "a loop": lambda f: jax.grad(
        lambda x: ta.while_loop(less(2), lambda c: (c[0] + 1, c[1] + f(x)), (0, 0.0), max_steps=3)[1] / 2
    ),
    "forward over reverse": lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (x,))[0],
}


@pytest.mark.parametrize("name", NOT_DIFFERENTIATED)
def test_what_is_not_differentiated_needs_no_max_steps(name):
    f, wanted = NOT_DIFFERENTIATED[name]
    f = functools.partial(f, ta.while_loop)
    found = jit(lambda x: {transform: reverse(f)(x) for transform, reverse in REVERSE.items()})(2.5)
    for transform, slope in found.items():
        np.testing.assert_allclose(slope, wanted, rtol=1e-6, err_msg=transform)


@pytest.mark.parametrize("residuals", ["tape", ta.residuals.Checkpoint(2), "undo"])
def test_a_loop_that_is_linear_has_a_transpose(residuals):
    options = {"max_steps": 9, "residuals": residuals}
    matrix = jnp.array([[1.0, 2.0], [-1.0, 0.5]])

    def f(y, n):
        return ta.fori_loop(0, n, lambda i, y: i * y + matrix @ y, y, **options)

    @jit
    def transposed(ns, ct):
        def one(n):
            return jax.linear_transpose(functools.partial(f, n=n), jnp.zeros(2))(ct)[0]

        jacobians = [jax.jacfwd(lambda y, n=n: f(y, n))(jnp.zeros(2)) for n in (0, 3)]
        return one(ns[1]), jax.vmap(one)(ns), jacobians

    ct = np.array([1.0, 2.0])
    one, each, jacobians = transposed(np.array([0, 3]), ct)
    wanted = [jacobian.T @ ct for jacobian in jacobians]
    np.testing.assert_allclose(one, wanted[1])
    np.testing.assert_allclose(each, np.stack(wanted))


# --- checkify --------------------------------------------------------------------------------------------------


def checked(i):
    checkify.check(i < 3, "i is {i}", i=i)
    return i


CHECKED = {
    "check": lambda by, n: by.while_loop(lambda i: i < n, lambda i: checked(i) + 1, 0),
    "in the condition": lambda by, n: by.while_loop(lambda i: checked(i) < n, lambda i: i + 1, 0),
    "nan": lambda by, n: by.while_loop(less(n), lambda c: (c[0] + 1, jnp.log(c[1] - 1)), (0, 2.0)),
    "division": lambda by, n: by.while_loop(less(n), lambda c: (c[0] + 1, 1 / (3 - c[0])), (0, 2.0)),
    "index": lambda by, n: by.while_loop(less(n), lambda c: (c[0] + 1, jnp.arange(3.0)[c[0]]), (0, 2.0)),
    "fori_loop": lambda by, n: by.fori_loop(0, n, lambda i, c: jnp.arange(3.0)[i] / (2 - i), 1.0),
}


@pytest.mark.parametrize("name", CHECKED)
def test_checkify_finds_the_errors_of_a_body(name):
    def errors(by):
        f = checkify.checkify(functools.partial(CHECKED[name], by), errors=checkify.all_checks)
        try:
            batched = jit(jax.vmap(f))(jnp.arange(1, 6))[0].get()
        except ValueError as error:  # that of JAX before 0.11, whose own loop has it too
            batched = str(error)
        jitted = jit(f)
        found = [jitted(1)[0].get(), f(5)[0].get(), jitted(5)[0].get(), batched]
        return [text and text.splitlines()[0].split(" (check")[0] for text in found]

    ours = errors(OURS)
    assert ours == errors(LAX)
    assert ours[0] is None
    assert all(ours[1:])
    with pytest.raises(ValueError, match="vmap-of-checkify"):
        checkify.checkify(jax.vmap(functools.partial(CHECKED[name], OURS)))(jnp.arange(3))


@pytest.mark.parametrize("residuals", ["tape", "recompute", ta.residuals.Checkpoint(2), "undo"])
def test_checkify_finds_the_errors_of_a_derivative_and_no_others(residuals):
    options = {"max_steps": 9, "residuals": residuals}

    def f(x, low):
        return ta.while_loop(less(4), lambda c: (c[0] + 1, jnp.sqrt(c[1] - low) + x), (0, x), **options)[1]

    checks = checkify.float_checks | checkify.index_checks
    derivative = jit(checkify.checkify(jax.value_and_grad(f), errors=checks))
    error, (value, slope) = derivative(2.0, 1.0)
    assert error.get() is None
    np.testing.assert_allclose((value, slope), jax.value_and_grad(f)(2.0, 1.0))
    assert "nan" in derivative(2.0, 3.0)[0].get()


# --- counts of steps -------------------------------------------------------------------------------------------


def test_a_count_that_its_dtype_cannot_hold(monkeypatch):
    """In 8 bits here, since 2**31 steps take a while."""
    monkeypatch.setattr(while_module, "steps_dtype", lambda max_steps: jnp.dtype(jnp.int8))

    def f(x, max_steps, n=300):
        how = {"max_steps": max_steps, "on_limit": "stop", "return_steps": True}
        return ta.while_loop(less(n), lambda c: (c[0] + 1, c[1] + x), (0, x), **how)

    for max_steps in (None, 128, 1000, 2**80):
        (i, y), steps = f(2.0, max_steps)
        assert (i, y, steps.taken, steps.cut) == (300, 602, 127, False)
        assert jax.jacfwd(lambda x, m=max_steps: f(x, m)[0][1])(2.0) == 301
        (i, _), steps = jax.vmap(lambda n, m=max_steps: f(2.0, m, n))(jnp.array([300, 5, 127]))
        assert (i.tolist(), steps.taken.tolist()) == ([300, 5, 127], [127, 5, 127])
        with pytest.raises(ValueError, match=r"needs max_steps( of at most 127, not \d+)?, the largest number"):
            jax.grad(lambda x, m=max_steps: f(x, m)[0][1])(2.0)
    (i, y), steps = f(2.0, 127)
    assert (i, steps.taken, steps.cut) == (127, 127, True)
    assert jax.grad(lambda x: f(x, 127)[0][1])(2.0) == 128


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("max_steps", [2**31 - 1, 2**31, 2**40, 2**80])
def test_max_steps_may_be_any_integer(max_steps, bits):
    with jax.enable_x64(bits == 64):

        def f(x):
            return ta.while_loop(lambda y: y < 9, lambda y: y * x, x, max_steps=max_steps, return_steps=True)

        value, steps = f(2.0)
        assert (value, steps.taken, steps.cut) == (16, 3, False)
        assert jax.jvp(lambda x: f(x)[0], (2.0,), (1.0,))[1] == 32
        assert ta.fori_loop(0, 3, lambda i, c: c + i, 0, max_steps=max_steps) == 3


# --- costs -----------------------------------------------------------------------------------------------------


def test_functions_are_traced_once_and_not_kept():
    traced = []

    def call(cond_fun, body_fun):
        return ta.while_loop(cond_fun, body_fun, (0, jnp.ones(2)), max_steps=9)

    def functions():
        def body(c):
            traced.append(None)
            return c[0] + 1, c[1] * 2

        return less(3), body

    cond_fun, body_fun = functions()
    call(cond_fun, body_fun)
    once = len(traced)
    for _ in range(3):
        call(cond_fun, body_fun)
    assert len(traced) == once
    call(less(2), body_fun)
    kept = weakref.ref(cond_fun), weakref.ref(body_fun)
    del cond_fun
    gc.collect()
    assert kept[0]() is None
    del body_fun
    gc.collect()
    assert kept[1]() is None


# --- programs that come from TensorFlow ------------------------------------------------------------------------

PORTED = {
    "maximum_iterations": "write max_steps",
    "parallel_iterations": "leave it out",
    "swap_memory": "leave it out",
    "shape_invariants": "leave it out",
    "back_prop": "stop_gradient",
    "name": "named_scope",
}


@pytest.mark.parametrize("keyword", PORTED)
def test_keywords_of_tensorflow(keyword):
    with pytest.raises(TypeError, match=f"^while_loop: {keyword} .*{PORTED[keyword]}"):
        ta.while_loop(less(3), lambda c: c, (0, 1.0), **{keyword: 1})


def test_functions_of_several_arguments():
    two = [lambda i, x: i < 3, lambda i, x: (i + 1, x)]
    for functions, name in (((two[0], lambda c: c), "cond_fun"), ((less(3), two[1]), "body_fun")):
        with pytest.raises(TypeError, match=rf"^while_loop: {name} takes the 2 .*def {name}\(carry\): i, x = carry"):
            ta.while_loop(*functions, (0, 1.0))


def test_what_a_body_and_an_inverse_must_give():
    cond, body = (lambda c: c["a"] < 3), (lambda c: {"a": c["a"] + 1})
    wrong = [(lambda c: {"b": c["a"]}, r"\{'b': \*\}"), (lambda c: {"a": c["a"][None]}, r"float64\[1\]")]
    for inverse, given in wrong:
        with pytest.raises(TypeError, match=rf"^while_loop: inverse must return .*but returns .*{given}"):
            ta.while_loop(cond, body, {"a": 1.0}, max_steps=5, residuals=ta.residuals.Inverse(inverse))
    with pytest.raises(TypeError, match=r"^scan: inverse must return what body_fun returns"):
        ta.scan(lambda c, x: (c + x, x), 0.0, jnp.ones(3), residuals=ta.residuals.Inverse(lambda c, x: (c, x)))
