"""`check=True` compares a rewritten function with the function as it is written; `strict=True` looks for copies."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_tensorarray import check_errors, disable_in_place, in_place
from jax_tensorarray._in_place import checking
from jax_tensorarray._in_place.repair import Repair
from jax_tensorarray._lowering import program
from jax_tensorarray.doctor import LoopCopyError

X = jnp.linspace(0.1, 1, 6)


def filled(x):
    return lax.fori_loop(1, len(x), lambda i, b: b.at[i].set(jnp.sin(b[i - 1]) * x[i]), x)


def tree(params):
    return {"loss": (params["w"], filled(params["w"])), "count": jnp.int32(3)}


checked = functools.partial(in_place, check=True)


@pytest.fixture
def wrong(monkeypatch):
    """Return a function that has `in_place` change each result of a program: it is given that and the arguments."""

    def wrong(change):
        function = Repair.function

        def wrongly(self, jaxpr, *args, is_whole=False, **options):
            run = function(self, jaxpr, *args, is_whole=is_whole, **options)
            return (lambda *xs: [change(x, xs) for x in run(*xs)]) if is_whole else run

        monkeypatch.setattr(Repair, "function", wrongly)

    return wrong


def message(call, *args):
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as error:
        jax.block_until_ready(call(*args))
        check_errors()
    found = str(error.value)
    return found[found.index("in_place: check=True: ") :]


# --- programs that are right -----------------------------------------------------------------------------------

ORDERS = {
    "value": lambda f: f,
    "jit": jax.jit,
    "gradient": jax.grad,
    "jit of gradient": lambda f: jax.jit(jax.grad(f)),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.cos(x),)),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](jnp.cos(x)),
    "Hessian": jax.hessian,
    "reverse over reverse": lambda f: jax.jacrev(jax.grad(f)),
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, 2 * x])),
    "vmap of gradient": lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, 2 * x])),
    "gradient of vmap": lambda f: jax.grad(lambda x: jax.vmap(f)(jnp.stack([x, 2 * x])).sum()),
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (c + jax.grad(f)(c), f(c)), x, None, length=2),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("order", ORDERS)
def test_a_right_program_has_its_results_and_derivatives(order):
    def loss(f):
        return lambda x: jnp.sum(f(x) ** 2)

    got, want = (ORDERS[order](loss(f))(X) for f in (checked(filled), filled))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8), got, want)


@pytest.mark.slow
def test_dtypes_keys_nans_and_empty_arrays():
    def f(x, key, empty):
        def body(i, c):
            x, n, key = c
            return x.at[i].set(jnp.nan), n.at[i].add(i), jax.random.fold_in(key, n[i - 1])

        x, n, key = lax.fori_loop(1, 4, body, (x, jnp.zeros(4, jnp.int8), key))
        return x, n, key, n > 1, empty, x.astype(jnp.bfloat16), x.astype(jnp.float8_e4m3fn), x * 1j, 1 / (x - x)

    args = jnp.ones(4), jax.random.key(1), jnp.ones((0, 3))
    for got, want in zip(checked(f)(*args), f(*args), strict=True):
        got, want = (jax.random.key_data(x) if x is args[1] or "key" in str(x.dtype) else x for x in (got, want))
        np.testing.assert_array_equal(np.asarray(got).tobytes(), np.asarray(want).tobytes())


def test_closures_static_arguments_and_what_is_changed():
    def f(found, scale, *, name):
        found.append(filled(X * scale))
        return name, lax.fori_loop(1, 4, lambda i, b: b.at[i].set(b[i - 1] * y), jnp.ones(4))

    def outer(y_):
        nonlocal y
        y, found = y_, []
        out = checked(f, static_argnames="name")(found, 2.0, name="a")
        return out[1].sum() + found[0].sum() * y_

    y = None
    np.testing.assert_allclose(jax.grad(outer)(0.5), 1 + 2 * 0.5 + 3 * 0.5**2 + filled(X * 2.0).sum(), rtol=1e-6)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_arrays_that_devices_divide(kind):
    mesh = jax.make_mesh((4,), ("a",), axis_types=(kind,))
    x = jax.device_put(jnp.outer(X, jnp.ones(4)), NamedSharding(mesh, PartitionSpec(None, "a")))
    np.testing.assert_allclose(checked(filled)(x), filled(x))


def test_refs():
    def f(ref, x):
        def body(i, _):
            ref[i] = jnp.sin(ref[i - 1]) * x[i]

        lax.fori_loop(1, len(x), body, None)
        return filled(x).sum()

    ref, other = jax.new_ref(X), jax.new_ref(X)
    np.testing.assert_allclose(checked(f)(ref, X), f(other, X))
    np.testing.assert_allclose(ref[...], other[...])


@pytest.mark.slow
def test_a_while_loop_with_max_steps_is_compared_in_its_values(wrong):
    def until(x):
        b = lax.while_loop(
            lambda c: c[0] < len(x), lambda c: (c[0] + 1, c[1].at[c[0]].set(c[1][c[0] - 1] * x[0])), (1, x)
        )
        return b[1].sum()

    f = checked(until, max_steps=8)
    np.testing.assert_allclose(f(X), until(X))
    np.testing.assert_allclose(jax.grad(f)(X), jax.grad(in_place(until, max_steps=8))(X))
    wrong(lambda x, args: x + 1)
    assert "result of <lambda> is" in message(checked(lambda x: until(x), max_steps=8), X)


# --- effects ---------------------------------------------------------------------------------------------------


def test_effects_happen_once():
    printed = []

    def f(x):
        jax.debug.callback(lambda: printed.append("ordered"), ordered=True)

        def body(i, b):
            jax.debug.callback(lambda i: printed.append(int(i)), i)
            io_callback(lambda i: printed.append(int(i)), None, i)
            return lax.cond(i > 2, lambda b: b.at[i].set(b[i - 1]), lambda b: b, b)

        return lax.fori_loop(1, 4, body, x)

    np.testing.assert_array_equal(checked(f)(X), f(X))
    jax.effects_barrier()
    assert sorted(map(str, printed)) == sorted([*["1", "2", "3"] * 4, *["ordered"] * 2])


def test_effects_in_derivatives_happen_once():
    printed = []

    @jax.custom_vjp
    def sine(x):
        return jnp.sin(x)

    def forward(x):
        jax.debug.callback(lambda: printed.append("forward"))
        return jnp.sin(x), x

    def backward(x, ct):
        jax.debug.callback(lambda: printed.append("backward"))
        return (jnp.cos(x) * ct,)

    sine.defvjp(forward, backward)
    grad = jax.grad(lambda x: checked(lambda x: sine(filled(x)).sum())(x))(X)
    jax.effects_barrier()
    np.testing.assert_allclose(grad, jax.grad(lambda x: jnp.sin(filled(x)).sum())(X))
    assert sorted(printed) == ["backward", "forward"]


def test_a_callback_that_returns_a_value_must_be_pure():
    def f(x, callback):
        y = callback(lambda x: np.asarray(x) + 1, jax.typeof(x), x)
        return filled(y)

    pure = checked(lambda x: f(x, jax.pure_callback))
    np.testing.assert_allclose(pure(X), filled(X + 1))
    with pytest.raises(
        TypeError, match=r"^in_place: check=True runs the program twice, but `io_callback` has an effect"
    ):
        checked(lambda x: f(x, io_callback))(X)


# --- programs that are wrong -----------------------------------------------------------------------------------


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("order", [lambda f: f, jax.jit, lambda f: lambda w: jax.jit(f)(w)])
def test_the_first_result_that_differs_is_named(order, wrong):
    wrong(lambda x, args: x.at[2].add(0.25) if x.ndim else x)
    x = jnp.asarray(X, jnp.float32)
    text = message(order(checked(lambda w: tree({"w": w}))), x)
    got, want = np.float32(x[2] + 0.25), x[2]
    tolerance = np.finfo(np.float32).eps ** 0.5 * 1 + np.finfo(np.float32).eps
    assert text.startswith(
        f"in_place: check=True: result['loss'][0] of <lambda> at [2] is {got} as in_place has rewritten the function, "
        f"but {want} as it is written. The tolerance is {tolerance:.3g}. 1 of 6 elements differ. "
    )
    assert "report it with the program" in text


def test_integers_must_be_equal(wrong):
    wrong(lambda x, args: x if jnp.issubdtype(x.dtype, jnp.inexact) else x + 1)
    text = message(checked(tree), {"w": X})
    assert text.startswith("in_place: check=True: result['count'] of tree is 4 as in_place has rewritten")
    assert "but 3 as it is written. The tolerance is 0. If" in text


def test_rounding_is_no_difference(wrong):
    wrong(lambda x, args: x * (1 + 1e-9) if jnp.issubdtype(x.dtype, jnp.inexact) else x)
    checked(tree)({"w": X})
    assert checking.tolerance_of(jnp.float32)[0] == pytest.approx(3.45e-4, rel=1e-2)


def test_each_example_of_a_batch_is_compared(wrong):
    wrong(lambda x, args: jnp.where(args[-1][0] > 1, x + 1, x) if x.ndim else x)
    f = jax.vmap(checked(filled))
    f(jnp.stack([X, 0.5 * X]))
    assert "of filled at [1, 0] is" in message(f, jnp.stack([X, 0.5 * X, X + 3])[1:])


@pytest.mark.slow
def test_gradients_are_compared(wrong):
    """The results of these programs are right, and their derivatives are not."""
    wrong(lambda x, args: x + (args[-1] - lax.stop_gradient(args[-1])) if x.ndim else x)
    f = checked(lambda w: tree({"w": w})["loss"][1])
    np.testing.assert_array_equal(f(X), filled(X))
    text = message(jax.grad(lambda w: f(w).sum()), X)
    right = jax.grad(lambda x: filled(x).sum())(X)
    assert text.startswith("in_place: check=True: the cotangent of argument w of <lambda> at [0] is ")
    assert float(text.split("is ")[1].split()[0]) == pytest.approx(right[0] + 1)
    assert float(text.split("but ")[1].split()[0]) == pytest.approx(right[0])
    for order in ("jit of gradient", "vmap of gradient", "gradient of vmap"):
        assert "the cotangent of argument w of" in message(ORDERS[order](lambda w: f(w).sum()), X)
    assert "the tangent of result of <lambda> at [0]" in message(ORDERS["jvp"](f), X)


def test_the_contents_of_refs_are_compared(wrong):
    def f(ref, x):
        ref[...] = filled(x)
        return filled(x)

    checked(f)(jax.new_ref(X), X)

    def writes(x, args):
        args[0][...] = x + 1
        return x

    wrong(writes)
    found = message(checked(lambda ref, x: f(ref, x)), jax.new_ref(X), X)
    assert "the contents of argument ref of <lambda> at [0] is" in found


def test_off_compares_nothing(wrong):
    wrong(lambda x, args: x + 1)
    with disable_in_place():
        np.testing.assert_array_equal(checked(filled)(X), filled(X))
    np.testing.assert_array_equal(in_place(filled, check=True, enabled=False)(X), filled(X))


# --- strict ----------------------------------------------------------------------------------------------------

ROWS = jnp.ones((200, 64), jnp.float32)


def good(x):
    return lax.fori_loop(1, 200, lambda i, b: b.at[i].set(jnp.sin(b[i - 1])), x).sum()


def bad(x):
    other = 2 * x

    def body(i, b):
        return lax.cond(b[i, 0] > 0.5, lambda: b.at[i].set(jnp.sin(b[i - 1])), lambda: other)

    return lax.fori_loop(1, 200, body, x).sum()


WAYS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "gradient": jax.grad,
    "jit of gradient": lambda f: jax.jit(jax.grad(f)),
    "in a larger program": lambda f: jax.jit(lambda x: lax.scan(lambda c, _: (c + f(x), None), 0.0, None, length=3)),
    "ahead of time": lambda f: lambda x: jax.jit(f).lower(x).compile(),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_that_is_left_is_an_error(way):
    WAYS[way](in_place(good, strict=True))(ROWS)
    line = bad.__code__.co_firstlineno
    for _ in range(2):
        with pytest.raises(LoopCopyError, match=r"^in_place: strict=True: in ") as error:
            WAYS[way](in_place(bad, strict=True))(ROWS)
        assert error.value.copies[0].reason and line < error.value.copies[0].line <= line + 6
    WAYS[way](in_place(bad))(ROWS)


def test_only_loops_of_the_function_are_judged():
    def outer(x):
        def body(i, b):
            new = b.at[i].set(in_place(good, strict=True)(x) + b[i - 1])
            return jnp.where(b[i, 0] > 0.5, new, 2 * x)

        return lax.fori_loop(1, 200, body, x)

    jax.jit(outer)(ROWS)


class Config:
    rate = 2.0


@pytest.mark.slow
def test_after_a_strict_function_other_functions_and_their_objects_are_not_kept():
    """The hook that judges programs stays, and the doctor's memory of functions has nothing to do with it."""
    jax.block_until_ready(
        in_place(lambda b: lax.fori_loop(1, 4, lambda i, b: b.at[i].set(b[i - 1]), b), strict=True)(X)
    )
    config = Config()
    jax.block_until_ready(in_place(lambda x, config: config.rate * x)(X, config))
    alive = weakref.ref(config)
    del config
    gc.collect()
    assert alive() is None


def test_a_strict_function_may_be_checked_too():
    in_place(lambda x: good(x), strict=True, check=True)(ROWS)  # as it is written it copies, and is not judged


def test_a_fault_is_an_error(monkeypatch):
    def fails(*args, **kwargs):
        raise KeyError("a variable")

    monkeypatch.setattr(Repair, "evaluate", fails)
    for order in (lambda f: f, jax.grad, jax.jit):
        with pytest.raises(KeyError, match="a variable") as error:
            order(in_place(lambda x: good(x), strict=True))(ROWS)
        assert "Please report it" in error.value.__notes__[0]
    monkeypatch.undo()
    monkeypatch.setattr(program, "PASSES", (program.PASSES[0]._replace(run=fails),))
    with pytest.raises(KeyError, match="a variable"):
        jax.jit(in_place(lambda x: good(x), strict=True))(ROWS)
    with pytest.warns(RuntimeWarning, match="a fault of jax_tensorarray"):
        jax.jit(in_place(lambda x: good(x)))(ROWS)


def test_a_fault_in_a_derivative_inside_is_an_error(monkeypatch):
    def fails(*args, **kwargs):
        raise KeyError("a variable")

    monkeypatch.setattr(Repair, "evaluate", fails)
    early = in_place(lambda x: jax.grad(lambda x: good(x))(x), strict=True)
    with pytest.raises(KeyError, match="a variable"):
        early(ROWS)


def test_a_step_with_its_gradient_inside_is_compared():
    """The loop is rewritten while JAX traces it, before it is differentiated, and nothing is left to rewrite."""

    def step(x):
        def body(b, i):
            return b.at[i + 1].set(jnp.tanh(b[i // 2] + x[i])), None

        def loss(x):
            return jnp.sum(jax.lax.scan(body, jnp.zeros((9, 4)), jnp.arange(8))[0] ** 2)

        return x - jax.grad(loss)(x)

    traced = jax.make_jaxpr(in_place(step, check=True))(jnp.ones((8, 4)))
    assert "in_place_same" in str(traced)
