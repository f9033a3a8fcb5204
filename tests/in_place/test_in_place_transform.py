"""`in_place`: plain programs give what they gave, and no loop in them works on whole buffers any more."""

import dataclasses
import enum
import functools
import gc
import inspect as python_inspect
import itertools
import re
import weakref
from pathlib import Path

import hypothesis.strategies as st
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from catalogue.plain_loops import rows, walked
from gates import gates
from hypothesis import example, given, settings
from in_numpy import in_numpy
from in_place import assert_in_place, assert_no_whole_buffer_copy, compiled
from jax import jit, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import checkify, io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from orders import ORDERS, assert_as_in_numpy, in_turn
from waiting import finish

from jax_tensorarray import _kernels, fori_loop, in_place, ta_read, while_loop
from jax_tensorarray._compat import barriers_hold
from jax_tensorarray._hlo import text as hlo_text
from jax_tensorarray.checkpoint_policies import save_reads
from jax_tensorarray.export import disabled_checks

# --- loops as people write them --------------------------------------------------------------------------------


def assert_same_and_in_place(f, order, rtol=2e-5, atol=2e-6):
    """A function of 200 rows."""
    program = assert_as_in_numpy(f, rows(200), order, rtol=rtol, atol=atol)
    assert_no_whole_buffer_copy(program, *rows(200))


GRADIENTS = ["grad(in_place)", "in_place(grad)"]


def test_what_all_examples_read_is_not_repeated_for_each():
    """`jax.vmap` of a `cond` gives each example a buffer of its own, which XLA does not make for a plain read."""
    table = jnp.sin(jnp.arange(4000.0)).reshape(1000, 4)

    def walk(x):
        def step(c):
            i, at, xs = c
            row = lax.cond(at % 3 == 0, lambda at, t: t[at], lambda at, t: t[at // 2] * 2, at, table)
            return i + 1, (at * 7 + 3) % len(table), xs.at[i].set(row)

        return lax.while_loop(lambda c: c[0] < 300, step, (1, x, jnp.zeros((300, 4))))[2]

    f, starts = jax.vmap(walk), jnp.arange(20)
    np.testing.assert_allclose(jax.jit(in_place(f))(starts), jax.jit(f)(starts), rtol=1e-6)
    program = compiled(in_place(f), starts)
    assert f"[20,{len(table)},4]" not in program.as_text()
    assert_no_whole_buffer_copy(program, jnp.zeros((20, 300, 4)))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "transform", [jit, lambda f: jax.vmap(f, (None, 0)), lambda f: jax.grad(lambda b, k: jnp.sum(jnp.sin(f(b, k))), 1)]
)
def test_what_a_function_closes_over_may_be_traced(transform):
    def filled(b, k, repaired=in_place):
        return repaired(lambda b: lax.fori_loop(1, len(b), lambda i, b: b.at[i].add(k * b[i - 1]), b))(b)

    args = jnp.ones((200, 3)), jnp.linspace(0.1, 0.5, 3)
    plain = functools.partial(filled, repaired=lambda f: f)
    np.testing.assert_allclose(transform(filled)(*args), transform(plain)(*args), rtol=1e-12)
    assert_no_whole_buffer_copy(compiled(transform(filled), *args), args[0])


def test_writes_of_most_elements_stay_as_they_are():
    def moved(x, places):
        return lax.fori_loop(0, 30, lambda i, x: x.at[places].set(jnp.sin(x[0]) + places), x)

    args = jnp.linspace(-1, 1, 2000), jnp.arange(0, 4000) // 2
    texts = [str(jax.make_jaxpr(g)(*args)) for g in (moved, in_place(moved))]
    assert texts[0].count("scatter[") == texts[1].count("scatter[") == 1
    assert "ta_write" not in texts[1]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("order", ["forward", "grad(in_place)"])
def test_copies_that_a_program_asks_for_are_left_to_xla(order):
    """Equinox's loops copy what they carry, and select between the copies."""

    def f(x):
        def step(c, _):
            i, b = c
            new = jnp.copy(b.at[i].set(jnp.sin(b[i // 2]) + b[i - 1]))
            return (i + 1, jnp.where(i < len(x) - 1, new, b)), None

        return jnp.sum(lax.scan(step, (1, jnp.copy(x)), None, length=len(x))[0][1] ** 2)

    assert_same_and_in_place(f, order)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("change", [lambda f: f, jax.grad])
def test_a_body_may_be_repaired_by_itself(change):
    def f(body, x):
        return jnp.sum(lax.scan(lambda b, i: (body(b, x, i), None), x, jnp.arange(len(x)))[0] ** 2)

    def body(b, x, i):
        new = b.at[i].set(jnp.sin(b[i // 2]) + x[i])
        return jnp.where(x[i, 0] > 0, new, b)

    program = compiled(change(functools.partial(f, in_place(body))), *rows(200))
    want = in_numpy(change(functools.partial(f, body)))(*rows(200))
    np.testing.assert_allclose(program(*rows(200)), want, rtol=2e-5, atol=2e-6)
    assert_no_whole_buffer_copy(program, *rows(200))


def test_a_loop_that_differs_by_where_it_is_traced():
    """A function that is compiled by itself is another one inside of `in_place`, and stays what it is outside."""
    walk_once = jax.jit(lambda x: walked(x, jnp.sin))
    before = str(jax.make_jaxpr(walk_once)(*rows(20)))
    inside = str(jax.make_jaxpr(in_place(jax.grad(lambda x: jnp.sum(walk_once(x)))))(*rows(20)))
    assert "ta_write" in inside and "ta_write" not in before
    assert str(jax.make_jaxpr(walk_once)(*rows(20))) == before
    assert "ta_" not in str(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(walk_once(x))))(*rows(20)))


# --- indices mean what they mean in JAX ------------------------------------------------------------------------

MODES = ("clip", "fill", "drop", "promise_in_bounds", None)


@st.composite
def indexing(draw):
    """How a buffer `[2, 5, 3]` is indexed: the places of the index, their dtypes, how far out they are, a window."""
    axes = draw(st.sampled_from([(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2), (0, 2)]))
    shape = draw(st.sampled_from([(), (3,), (2, 2)]))
    dtypes = [draw(st.sampled_from(["int8", "uint8", "int32", "uint32", "int64"])) for _ in axes]
    starts = [draw(st.integers(-7, 7)) for _ in axes]
    sizes = draw(st.tuples(st.integers(1, 2), st.integers(1, 5), st.integers(1, 3)))
    return axes, shape, dtypes, starts, sizes


@pytest.mark.slow
@settings(max_examples=max(settings.default.max_examples // 3, 5))
@given(
    how=indexing(),
    mode=st.sampled_from(MODES),
    op=st.sampled_from(["get", "set", "add", "multiply", "divide", "power", "min", "max", "window"]),
    dtype=st.sampled_from(["float32", "int32", "bool", "complex64", "float16"]),
)
@example(how=((0, 1), (), ["int32", "int32"], [0, 0], (0, 1, 3)), mode=None, op="window", dtype="float32")  # is empty
def test_an_index_out_of_range_means_what_it_means_in_jax(how, mode, op, dtype):
    axes, shape, dtypes, starts, sizes = how
    if dtype in ("complex64", "bool") and op not in ("get", "set", "window"):
        op = "set"
    if dtype == "int32" and op == "divide":  # the result is a float
        op = "power"
    if mode == "promise_in_bounds" and op != "get":
        mode = "drop"
    buffer = np.arange(30).reshape(2, 5, 3).astype(dtype)

    def f(buffer, k):
        def step(c, i):
            b, total = c
            at = [slice(None)] * 3
            for axis, d, start in zip(axes, dtypes, starts, strict=True):
                offsets = jnp.arange(np.prod(shape, dtype=int)).reshape(shape)
                at[axis] = (start + i + k + offsets).astype(d)
            at = tuple(at)
            if op == "window":
                first = [jnp.ravel(jnp.int32(0) if isinstance(a, slice) else a)[0].astype(dtypes[0]) for a in at]
                got = lax.dynamic_slice(b, first, sizes)
                b = lax.dynamic_update_slice(b, jnp.flip(got), first)
            else:
                got = b.at[at].get(mode=mode)
                if op != "get":
                    b = getattr(b.at[at], op)(jnp.asarray(3, b.dtype), mode=mode)
            return (b, total + jnp.sum(jnp.nan_to_num(got.astype(jnp.complex64)))), None

        return lax.scan(step, (buffer, jnp.complex64(0)), jnp.arange(3))[0]

    batch = np.stack([buffer] * 3), np.arange(3, dtype=np.int32)

    @jit
    def both(*args):
        return [g(buffer, 0) for g in (f, in_place(f))], [g(*args) for g in (jax.vmap(f), in_place(jax.vmap(f)))]

    for want, got in both(*batch):
        oracle.assert_same_bits(got[0], want[0])
        np.testing.assert_allclose(got[1], want[1], rtol=1e-5)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("start", [5, -1, 2**32 + 2, -(2**32) + 2])
def test_an_index_of_64_bits_is_not_taken_for_another_one(start):
    numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
    taken = lax.GatherDimensionNumbers((), (0,), (0,))
    buffer = np.arange(5.0)

    def f(buffer, start):
        def step(i, c):
            b, read, window = c
            read += lax.gather(b, start[None], taken, (1,), mode="fill", fill_value=-1)
            window += lax.dynamic_slice(b, (start,), (2,))
            return lax.scatter(b, start[None], b[i] + 1, numbers, mode="drop"), read, window

        return lax.fori_loop(0, 2, step, (buffer, 0.0, jnp.zeros(2)))

    b, read, window = in_place(f)(buffer, jnp.int64(start))
    np.testing.assert_array_equal(b, buffer)
    assert read == -2
    np.testing.assert_array_equal(window, [0, 2] if start < -5 else [6, 8])  # a slice counts -1 from the end


# --- what a function is besides its loops ----------------------------------------------------------------------


def fill(b, i):
    return b.at[i].set(jnp.sin(b[i - 1]))


def test_it_is_a_decorator_with_and_without_arguments():
    @in_place
    def f(x, *, n=3):
        """Doc."""
        return lax.fori_loop(0, n, lambda i, b: fill(b, i), x)

    @in_place(static_argnames="n")
    def g(x, n=3):
        return lax.fori_loop(0, n, lambda i, b: fill(b, i), x)

    assert f.__name__ == "f" and f.__doc__ == "Doc."
    assert list(python_inspect.signature(g).parameters) == ["x", "n"]
    x = jnp.arange(5.0)
    for got, n in [(f(x), 3), (f(x, n=4), 4), (g(x), 3), (g(x, 4), 4), (g(x, n=2), 2)]:
        np.testing.assert_allclose(got, lax.fori_loop(0, n, lambda i, b: fill(b, i), x), rtol=1e-6)
    h = in_place(lambda b, kind: b if kind == "a" else -b, static_argnums=1)
    assert h(1.0, "a") == 1 and h(1.0, "b") == -1


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: in_place(3), TypeError, "in_place: fun must be callable, got 3"),
        (lambda: in_place(fill, max_steps=1.5), TypeError, "in_place: max_steps must be a Python integer, got 1.5"),
        (lambda: in_place(fill, max_steps=-1), ValueError, "in_place: max_steps must not be negative, got -1"),
    ],
)
def test_what_it_does_not_take(make, error, text):
    with pytest.raises(error, match=text):
        make()


# --- arguments that are not arrays ----------------------------------------------------------------------------


class Config:
    """Compared by identity, and may change."""

    def __init__(self, rate):
        self.rate = rate


@dataclasses.dataclass
class Unhashable:
    rate: float


class Color(enum.Enum):
    RED = 0.5
    BLUE = 2.0


#: name -> an argument, and a loop that uses it in a way in which no tracer can be used
GIVEN = {
    "flag": (True, lambda x, flag: x if flag else -x),
    "shape": (10, lambda x, n: x.reshape(n, -1)),
    "bound": (7, lambda x, n: sum(x * k for k in range(n))),
    "string": ("sin", lambda x, name: getattr(jnp, name)(x)),
    "None": (None, lambda x, y: x if y is None else y),
    "function": (jnp.cos, lambda x, f: f(x)),
    "closure": (functools.partial(jnp.multiply, 3.0), lambda x, f: f(x)),
    "module": (jnp, lambda x, module: module.tanh(x)),
    "class": (np.float16, lambda x, dtype: x.astype(dtype)),
    "dtype": (np.dtype("float16"), lambda x, dtype: x.astype(dtype)),
    "enum": (Color.BLUE, lambda x, color: x * color.value),
    "object": (Config(3.0), lambda x, config: x * config.rate),
    "unhashable": (Unhashable(3.0), lambda x, config: x * config.rate),
    "set": ({"a", "b"}, lambda x, names: x * len(names)),
    "struct": (jax.ShapeDtypeStruct((20, 2), "float32"), lambda x, like: x.reshape(like.shape)),
    "strings": (np.array(["a", "b"]), lambda x, names: x * names.size),
    "tree": ({"f": jnp.sin, "by": [jnp.ones(4), 2]}, lambda x, t: t["f"](x) * t["by"][0] * [1, 2, 3][t["by"][1]]),
    "jitted": (5, jax.jit(lambda x, n: x.reshape(n, -1), static_argnames="n")),
}


#: Of a function of x and y. Each argument has one of them: what is done with it is done before.
USED = (
    lambda g, x, y: g(x, y),
    lambda g, x, y: jax.vmap(g, (0, None))(jnp.stack([x, 2 * x]), y)[1],
    lambda g, x, y: jax.grad(lambda x: jnp.sum(g(x, y).astype(x.dtype)))(x),
)


@pytest.mark.slow
@pytest.mark.parametrize(("turn", "name"), list(enumerate(GIVEN)))
def test_what_is_no_array_passes_through_as_it_is(turn, name):
    y, use = GIVEN[name]

    def f(x, y):
        return use(lax.fori_loop(1, len(x), lambda i, b: fill(b, i), x), y)

    g, (x,) = in_place(f), rows(10)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    found, want = (by(lambda x, h=h: (USED[turn % 3](h, x, y), h(x, y)))(x) for by, h in ((jit, g), (in_numpy, f)))
    jax.tree.map(close, found, want)
    for _ in range(2):
        close(g(x, y), want[1])


@pytest.mark.slow
def test_arrays_and_floats_are_traced_and_the_rest_is_compared():
    traced = []

    @in_place
    def f(x, rate, y=None):
        traced.append(y)
        return lax.fori_loop(1, len(x), lambda i, b: fill(b, i) * rate, x)

    (x,) = rows(10)
    for k in range(5):
        for rate in (k / 10, np.float32(k), jnp.float32(k), np.full(4, k, np.float32)):
            f(x, rate)
    assert len(traced) <= 4  # a Python float, and arrays of two shapes and two kinds
    traced.clear()
    for _ in range(3):
        for y in (1, True, "a", "b", jnp.sin, Color.RED, Color.BLUE, (1, "a")):
            f(x, 1.0, y)
    assert traced == [1, True, "a", "b", jnp.sin, Color.RED, Color.BLUE, (1, "a")]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kind", [Config, Unhashable])
def test_an_object_that_changes_is_seen_to_change_and_is_not_kept(kind):
    f = in_place(lambda x, config: lax.fori_loop(1, len(x), lambda i, b: fill(b, i) * config.rate, x))
    config, (x,) = kind(2.0), rows(10)
    for rate in (2.0, 3.0):
        config.rate = rate
        np.testing.assert_allclose(f(x, config), f(x, kind(rate)), rtol=1e-6)
    assert not np.allclose(f(x, kind(2.0)), f(x, kind(3.0)))
    alive = weakref.ref(config)
    del config
    gc.collect()
    assert alive() is None


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kind", [Config, Unhashable])
def test_two_objects_that_change_are_told_apart(kind):
    def f(x, first, second):
        return lax.fori_loop(1, len(x), lambda i, b: fill(b, i) * first.rate + second.rate, x)

    g, (x,), (a, b) = in_place(f), rows(10), (kind(0.5), kind(2.0))
    for _ in range(2):
        for pair in ((a, b), (b, a), (a, a)):
            np.testing.assert_allclose(g(x, *pair), f(x, *pair), rtol=1e-6)
        a.rate = 1.5


def test_methods():
    class Model:
        rate = 2.0

        def plain(self, x):
            return lax.fori_loop(1, len(x), lambda i, b: fill(b, i) * self.rate, x)

        own = in_place(plain)
        compiled = functools.partial(jax.jit, static_argnums=0)(in_place(plain))
        compiled_once = in_place(plain, static_argnums=0)

    model, (x,) = Model(), rows(10)
    want = model.plain(x)
    for f in (model.own, model.compiled, model.compiled_once, in_place(model.plain)):
        np.testing.assert_allclose(f(x), want, rtol=1e-6)


def test_results_are_what_jit_makes_of_them_unless_they_were_passed_in():
    def f(x, tree):
        return x * 2, tree | {"n": tree["n"] + 1, "label": "new"}

    tree = {"f": lambda x: x, "n": 10_000, "flag": True, "scale": 0.5}
    for g in (in_place(f), lambda x, tree: jax.jit(lambda x: in_place(f)(x, tree)[0])(x)):
        got = g(2.0, tree)
    doubled, after = in_place(f)(2.0, tree)
    assert doubled == got == 4 and after.pop("f") is tree["f"] and after["flag"] is True
    assert isinstance(after["n"], jax.Array) and after == {"n": 10_001, "flag": True, "scale": 0.5, "label": "new"}
    with pytest.raises(TypeError, match="function"):  # it may hold a tracer
        in_place(lambda x: lambda: x)(1.0)


def test_errors_of_jax_have_the_names_of_the_user():
    def shaped(x, *, number):
        return x[: number["of"]].reshape(number["of"])

    with pytest.raises((jax.errors.ConcretizationTypeError, IndexError, TypeError)) as plain:
        jax.jit(shaped)(jnp.ones(3), number={"of": jnp.int32(2)})
    with pytest.raises(type(plain.value)) as found:
        jax.jit(in_place(shaped))(jnp.ones(3), number={"of": jnp.int32(2)})
    assert str(found.value) == str(plain.value)

    def branching(x, flag):
        return x if flag else -x

    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"function branching .*argument flag"):
        in_place(branching)(1.0, jnp.bool_(True))


def test_what_in_place_returns_can_do_what_jit_returns_can():
    def f(x, n):
        return lax.fori_loop(1, n, lambda i, b: fill(b, i), x)

    (x,) = rows(10)
    g = in_place(f, static_argnames="n")
    struct = jax.ShapeDtypeStruct(x.shape, x.dtype)
    np.testing.assert_allclose(g.lower(struct, 7).compile()(x), f(x, 7), rtol=1e-6)
    assert g.eval_shape(struct, n=7).shape == g.trace(struct, 7).out_info.shape == x.shape
    stored = jax.export.export(g, disabled_checks=disabled_checks())(struct, 7)
    np.testing.assert_allclose(stored.call(x), f(x, 7), rtol=1e-6)
    assert not hasattr(jax.grad(g), "lower") and "of <function" in repr(g)
    with jax.disable_jit():
        np.testing.assert_allclose(in_place(lambda x: x if x[0] > 0 else -x)(-np.ones(3)), np.ones(3))
    with pytest.raises(ValueError, match=r"[Nn]on-hashable"):
        g(x, [7])


def test_a_float0_may_be_repeated():
    """It is the cotangent of an index."""

    def f(x, i):
        return jax.vjp(lambda x, i: x[i], x, i)[1](jnp.ones(i.shape))

    args = jnp.arange(10.0), jnp.array([3, 5, 3])
    (got, zeros), (want, _) = in_place(f)(*args), f(*args)
    np.testing.assert_array_equal(got, want)
    assert (zeros.shape, zeros.dtype) == ((3,), jax.dtypes.float0)


def test_a_program_with_nothing_to_repair_compiles_to_the_same():
    def f(x, w):
        def body(c, row):
            c = jnp.tanh(c @ w + row)
            return c, jnp.where(c > 0, c, 0)

        c, ys = lax.scan(body, x[0], x)
        return jnp.sum(ys[jnp.argmax(ys[:, 0])]), lax.while_loop(lambda c: jnp.sum(c) > 1, lambda c: c / 2, c)

    args = jnp.ones((6, 4)), jnp.ones((4, 4))
    texts = [jax.jit(g).lower(*args).as_text() for g in (f, in_place(f))]
    assert texts[0] == texts[1]


def test_types_and_trees_are_those_of_the_function():
    def f(tree, n):
        def body(i, c):
            return {"b": fill(c["b"], i), "n": c["n"] + 1, "w": c["w"] * 2.0}

        return lax.fori_loop(0, n, body, tree | {"w": 1.0, "n": 0}), None, (n, "no array")[:1]

    args = {"b": jnp.ones(4, jnp.bfloat16)}, 3
    got, want = (jax.eval_shape(g, *args) for g in (in_place(f), f))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.shape, x.dtype, x.weak_type) == (y.shape, y.dtype, y.weak_type)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("changes", [lambda b: b, lambda b: 2 * b, lambda b: b.at[0].set(b[1])])
def test_linearize_has_the_effects_of_plain_jax(changes):
    """Of the values, and again of the tangents."""
    seen = []

    def f(b, n):
        def body(i, b):
            jax.debug.callback(lambda x: seen.append(float(x)), b[0], ordered=True)
            return changes(b)

        return lax.fori_loop(0, n, body, b)

    def linearized(f):
        def g(b, n):
            out, tangents = jax.linearize(lambda b: f(b, n), b)
            return out, tangents(b)

        return g

    def effects(f):
        seen.clear()
        jax.block_until_ready(f(jnp.arange(1.0, 4), jnp.int32(2)))
        jax.effects_barrier()
        return list(seen)

    want = effects(jit(linearized(f)))
    assert effects(jit(linearized(in_place(f)))) == effects(in_place(linearized(f))) == want != []


def test_effects_happen_in_order_and_once():
    seen = []

    def f(b):
        def body(i, b):
            io_callback(lambda i: seen.append(int(i)), None, i, ordered=True)
            return fill(b, i)

        return lax.fori_loop(0, 4, body, b)

    finish(jax.jit(in_place(f))(jnp.ones(5)))
    jax.effects_barrier()
    assert seen == [0, 1, 2, 3]


ASKED = {
    "io": lambda note, i: io_callback(note, None, i),
    "ordered io": lambda note, i: io_callback(note, None, i, ordered=True),
    "debug": jax.debug.callback,
    "ordered debug": functools.partial(jax.debug.callback, ordered=True),
}


def asked(effect, note, kind):
    """A loop whose predicate has an effect."""

    def goes_on(s):
        ASKED[effect](note, s[0])
        return s[0] < s[2]

    def step(s):
        return s[0] + 1, fill(s[1], s[0]), s[2]

    def f(b, n):
        if kind == "nested":
            return lax.scan(lambda b, _: (lax.while_loop(goes_on, step, (0, b, n))[1], 0), b, length=2)
        return lax.while_loop(goes_on, step, (0, b, n))

    return f


ASKERS = [(effect, "one", how) for effect in ASKED for how in ({}, {"max_steps": 9})]
ASKERS += [("ordered io", "nested", {"max_steps": 9}), ("debug", "batched", {})]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("effect", "kind", "how"), ASKERS)
def test_a_predicate_is_asked_as_often_as_in_plain_jax(effect, kind, how):
    seen, want = [], []
    ours = in_place(asked(effect, lambda i: seen.append(int(i)), kind), **how)
    plain = asked(effect, lambda i: want.append(int(i)), kind)
    args = (jnp.ones(6), jnp.int32(3))
    if kind == "batched":
        args, ours, plain = (jnp.ones((3, 6)), jnp.array([3, 5, 1])), jax.vmap(ours), jax.vmap(plain)
    jax.tree.map(np.testing.assert_array_equal, finish(ours(*args)), finish(jit(plain)(*args)))
    jax.effects_barrier()
    assert seen == want if effect.startswith("ordered") else sorted(seen) == sorted(want)


def test_a_predicate_whose_effects_are_in_order_is_asked_once_for_a_batch():
    """Plain JAX takes examples further that have ended: the loop of each is unrolled here."""
    seen = []
    f = jax.vmap(asked("ordered debug", lambda i: seen.append(int(i)), "one"))
    b, ends = jnp.ones((3, 6)), [3, 5, 1]
    _, found, _ = finish(jit(in_place(f))(b, jnp.array(ends)))
    jax.effects_barrier()
    assert len(seen) == 3 * (max(ends) + 1)
    for row, n in zip(found, ends, strict=True):
        np.testing.assert_allclose(row, functools.reduce(fill, range(n), b[0]), rtol=1e-12)


def one_nan(b):
    return lax.fori_loop(0, 4, lambda i, b: b.at[i].set(jnp.log(-b[i])), b)


def one_nan_without_a_loop(b):
    return b.at[1].set(jnp.log(-b[0]))


def one_infinity(b):
    return lax.scan(lambda b, i: (b.at[i].set(b[i] / (b[0] - b[0])), b[i]), b, jnp.arange(1, 4))


def a_nan_in_the_derivative(b):
    return jnp.sqrt(lax.fori_loop(0, 4, lambda i, b: b.at[i].multiply(0), b))


NAN_HUNTS = {
    "value": lambda f: f,
    "jit": jit,
    "vmap": lambda f: lambda b: jax.vmap(f)(b[None]),
    "gradient": lambda f: jax.grad(lambda b: sum(map(jnp.sum, jax.tree.leaves(f(b))))),
    "jit of a gradient": lambda f: jit(jax.grad(lambda b: sum(map(jnp.sum, jax.tree.leaves(f(b)))))),
}


#: One in every order, and the others in one.
HUNTED = [*((one_nan, transform) for transform in NAN_HUNTS), (one_nan_without_a_loop, "value"), (one_infinity, "vmap")]
HUNTED += [(a_nan_in_the_derivative, "value"), (a_nan_in_the_derivative, "jit of a gradient")]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("f", "transform"), HUNTED)
def test_a_nan_is_the_error_of_plain_jax(f, transform):
    def error(f):
        try:
            NAN_HUNTS[transform](f)(jnp.linspace(0.5, 1, 6))
        except FloatingPointError as error:
            return str(error)

    with jax.debug_infs(True) if f is one_infinity else jax.debug_nans(True):
        want, got = error(jit(f)), error(in_place(f))
    if "gradient" in transform:  # the op that has made it may be one of ours
        assert (got is None) == (want is None)
    else:
        assert got == want
        assert (want is None) == (f is a_nan_in_the_derivative)


def test_a_nan_is_found_whatever_the_arguments_are():
    with jax.debug_nans(True):
        for f, args in ((lambda: one_nan(jnp.ones(6)), ()), (lambda b, *_: one_nan(b), (jnp.ones(6), "text", 3, list))):
            with pytest.raises(FloatingPointError, match="invalid value"):
                in_place(f)(*args)


def in_64_bits(f):
    def g(b):
        with jax.enable_x64(True):
            return jax.tree.map(lambda x: jnp.sum(x).astype(jnp.float32), f(b.astype(jnp.float64)))

    return g


def both_widths(b):
    def body(b, i):
        return b.at[i].set(jnp.where(i > 2, 1.5 * b[i - 1] + b.sum(), 0.25)), 2.0 * b[i]

    return lax.scan(body, b.astype(jnp.float32), jnp.arange(1, 6))


@pytest.mark.slow(but=1)
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")  # plain JAX warns too
@pytest.mark.parametrize("residuals", ["auto", "undo"])
def test_a_block_in_64_bits_is_differentiated_outside_of_it(residuals):
    f = in_64_bits(both_widths)
    with jax.enable_x64(False):
        b = jnp.linspace(0.1, 1, 7)
        got, want = (jax.grad(lambda b, g=g: sum(g(b)))(b) for g in (in_place(f, residuals=residuals), jit(f)))
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_named_axes_are_those_outside():
    def f(b):
        return lax.fori_loop(0, 3, lambda i, b: b.at[i].set(lax.psum(b[i], "batch")), b)

    x = jnp.arange(12.0).reshape(3, 4)
    got, want = (jax.vmap(g, axis_name="batch")(x) for g in (in_place(f), f))
    np.testing.assert_array_equal(got, want)


@pytest.fixture(params=[False, True], ids=["as it is", "as it will be"])
def checkpoints_of_jax(request):
    """Under JAX's `jax.checkpoint`, and under the one that JAX_REMAT3 chooses."""
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", request.param)
    yield
    jax.config.update("jax_remat3", before)


def checkpointed(x):
    table = jnp.cos(*rows(200))

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def body(i, b):
        s = lax.fori_loop(0, 3, lambda k, s: s + jnp.sin(b[(i + k) // 2]) * table[i - k], b[i - 1])
        return b.at[i].set(lax.cond(i % 3 == 0, lambda: s, lambda: s * b[i // 3]))

    return jnp.sum(lax.fori_loop(1, len(x), body, x / 9) ** 2)


@pytest.mark.slow(but=1)
@pytest.mark.usefixtures("checkpoints_of_jax")
@pytest.mark.parametrize("order", GRADIENTS)
def test_a_checkpointed_body_keeps_rows(order):
    assert_same_and_in_place(lambda x: checkpointed(x), order)


@pytest.mark.slow
def test_a_checkpoint_of_complex_rows():
    """JAX itself raises an error at a complex value that a policy saves."""
    x = jnp.arange(1, 5) * (0.3 + 0.2j)

    def f(b):
        def inner(b, i):
            return b.at[i].set(jnp.sin(b[i - 1]) * b[0])

        def body(b, i):
            return jax.checkpoint(inner)(b, i), b[i]

        return jnp.real(jnp.sum(jax.checkpoint(lambda b: lax.scan(body, b, jnp.arange(1, 4))[1] ** 2)(b)))

    def read(b):
        return jnp.real(jnp.sum(jax.checkpoint(lambda b: jnp.sin(jnp.sin(ta_read(b, 1))), policy=save_reads)(b)))

    want = jax.grad(f)(x)
    for g in (jax.grad(in_place(f)), in_place(jax.grad(f)), jit(jax.grad(in_place(f, memory=64)))):
        np.testing.assert_allclose(g(x), want, rtol=1e-9)
    np.testing.assert_allclose(jax.grad(read)(x)[1], jax.grad(lambda z: jnp.real(jnp.sin(jnp.sin(z))))(x[1]), rtol=1e-9)


def test_the_policy_of_a_checkpoint_is_kept():
    """What it saves is saved, and the rows that are read besides."""
    policy = jax.checkpoint_policies.save_only_these_names("kept")

    def f(x):
        @functools.partial(jax.checkpoint, policy=policy)
        def body(b, i):
            return b.at[i].set(jnp.sin(checkpoint_name(jnp.cos(b[i // 2]), "kept"))), None

        return jnp.sum(lax.scan(body, x, jnp.arange(len(x)))[0])

    assert_same_and_in_place(f, "grad(in_place)")
    text = str(jax.make_jaxpr(jax.grad(in_place(f)))(*rows(20)))
    assert text.count("cos") == str(jax.make_jaxpr(jax.grad(f))(*rows(20))).count("cos")


@pytest.mark.slow
@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices: see tests/conftest.py")
@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        (AxisType.Auto, (None, "x")),
        (AxisType.Auto, ("x", "y")),
        (AxisType.Explicit, (None, "x")),  # where plain JAX has no slices of divided rows
    ],
)
def test_buffers_may_be_divided_among_devices(kind, spec):
    def f(x):
        def body(b, i):
            new = b.at[i].set(jnp.sin(b[i // 2] + x[i]))
            return jnp.where(i % 3 == 0, b, new), new[i].sum()

        b, ys = lax.scan(body, x, jnp.arange(len(x)))
        return jnp.sum(b**2) + jnp.sum(ys)

    x = jnp.linspace(-1, 1, 64).reshape(8, 8)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        divided = jax.device_put(x, NamedSharding(mesh, P(*spec)))
        orders = jax.grad(f), jax.grad(in_place(f)), in_place(jax.grad(f))
        want, *found = jit(lambda x: [g(x) for g in orders])(divided)
        for got in found:
            np.testing.assert_allclose(got, want, rtol=1e-5)


# --- checkify --------------------------------------------------------------------------------------------------


def each(body):
    """A loop over the first `n` rows, which come after the first one."""
    return lambda n: lambda b: lax.fori_loop(1, n, body, b)


def checked_by_user(i, b):
    checkify.check(i < 9, "i is {i}", i=i)
    return fill(b, i)


CHECKED = {
    "a row": each(lambda i, b: b.at[i].set(jnp.sin(b[i - 1]) + b[i // 2])),
    "a row that is added to": each(lambda i, b: b.at[i].add(b[i // 2], mode="drop")),
    "a slice": each(lambda i, b: lax.dynamic_update_slice(b, lax.dynamic_slice(b, (i, 0), (1, 64)) * 2, (i - 1, 0))),
    "an element": each(lambda i, b: b.at[0, 55 + i].set(b[0, i])),
    "several rows": each(lambda i, b: b.at[jnp.array([0, 1]) + i - 1].set(b[jnp.array([0, 0]) + i])),
    "in a branch": each(lambda i, b: lax.cond(i % 2, lambda: b.at[i - 1].set(b[i]), lambda: b.at[i].set(b[0]))),
    "in an inner loop": each(lambda i, b: lax.fori_loop(0, 2, lambda k, b: b.at[i + k - 1].set(jnp.sin(b[0])), b)),
    "of a table": lambda n: lambda b: b * lax.fori_loop(0, n, lambda i, s: s + b[i], jnp.zeros(64)),
    "while": lambda n: lambda b: lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, fill(c[1], c[0])), (1, b))[1],
    "by the user": each(checked_by_user),
    "nan": each(lambda i, b: b.at[i].set(jnp.log(b[i - 1] - i + 9))),
    "nan of a sum": each(lambda i, b: b.at[i - 1].add(jnp.where(i < 10, 1, -jnp.inf * b[i - 1] * jnp.exp(0.0 * i)))),
}


def errors_of(functions, by=jit):
    """The errors that checkify finds in functions of a buffer, or nothing, without their places."""

    def of_each(x):
        check = functools.partial(checkify.checkify, errors=checkify.all_checks)
        batch = jnp.stack([x, x])
        return {name: jax.vmap(check(f))(batch)[0] if name == "batch" else check(f)(x)[0] for name, f in functions}

    found = {name: error.get() for name, error in by(of_each)(jnp.full((10, 64), 0.5)).items()}
    return {name: text and text.split(" (check")[0] for name, text in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("turn", "name"), list(enumerate(CHECKED)))
def test_checkify_finds_what_it_finds_in_plain_jax(turn, name):
    """The gradients in either order, and batches, are in turn."""
    f, short = CHECKED[name](12), CHECKED[name](9)

    def gradient(f):
        return jax.grad(lambda x: jnp.sum(f(x)))

    plain = {"error": f, "none": short} | ({"batch": f} if turn % 3 == 2 or name == "while" else {})
    ours = {name: in_place(f) for name, f in plain.items()}
    if name in ("a row", "by the user"):
        plain["jit"], ours["jit"] = f, jit(in_place(f))
    if "batch" not in plain:
        plain["gradient"] = gradient(f)
        ours["gradient"] = in_place(gradient(f)) if turn % 3 else gradient(in_place(f))
    want = errors_of(plain.items(), in_numpy)
    names_an_index = "index" in want["error"]
    if names_an_index:
        ours["vmap"] = lambda x: jax.vmap(in_place(f))(jnp.stack([x, x]))
    found = errors_of(ours.items())
    assert want["none"] is None
    assert {name: found[name] for name in want} == want
    if names_an_index:  # JAX names the whole batch
        assert want["error"].split("shape")[0] in found["vmap"]


@jax.custom_jvp
def grown(b):
    return jnp.sin(b) + b[jnp.int32(3)]


grown.defjvp(lambda primals, tangents: (grown(*primals), jnp.cos(*primals) * tangents[0] + tangents[0][3]))


def of_a_rule(n, b):
    return jnp.sum(grown(lax.fori_loop(1, n, lambda i, b: b.at[i].set(jnp.sin(b[i - 1]) + b[i // 2]), b)))


def of_stacked_rows(n, b):
    stack = lax.fori_loop(0, n, lambda i, stack: stack.at[i].set(jnp.sin(b[i])), jnp.zeros((10, 64)))
    return jnp.sum(lax.map(lambda row: row * jnp.sum(row), stack))


def checked(f):
    return checkify.checkify(f, errors=checkify.index_checks | checkify.float_checks)


def jvp_of_checked(f, by, ours):
    (error, out), (_, dot) = jax.jvp(by(ours(f)), (ROWS,), (ROWS,))
    return error, (out, dot)


def grad_of_checked(f, by, ours):
    dot, error = jax.grad(lambda b: by(ours(f))(b)[::-1], has_aux=True)(ROWS)
    return error, dot


ROWS = np.linspace(0.1, 0.9, 640).reshape(10, 64)
ORDERS_OF_CHECKIFY = {
    "jvp": jvp_of_checked,
    "gradient": grad_of_checked,
    "of the gradient of a checkpoint": lambda f, by, ours: by(ours(jax.grad(jax.checkpoint(f))))(ROWS),
    "vmap": lambda f, by, ours: jax.vmap(by(ours(f)))(np.stack([ROWS, ROWS / 2])),
}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS_OF_CHECKIFY.values(), ids=ORDERS_OF_CHECKIFY)
@pytest.mark.parametrize("options", [{}, {"memory": 64}], ids=["", "memory"])
@pytest.mark.parametrize("f", [of_a_rule, of_stacked_rows])
def test_checkify_of_what_has_a_derivative_of_its_own(f, options, order):
    """The values are compared with those of plain JAX without `checkify`.

    Its rule for a `custom_jvp` returns too few errors to a `jit` or a `checkpoint` around.
    """

    def unchecked(f):
        return lambda b: (None, f(b))

    ours = functools.partial(in_place, **options)
    error, got = order(functools.partial(f, 9), checked, ours)
    assert error.get() is None
    _, want = order(functools.partial(f, 9), unchecked, lambda f: f)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9), got, want)
    error, _ = order(functools.partial(f, 12), checked, ours)
    assert "out-of-bounds indexing for array of shape (10, 64)" in error.get()


# --- max_steps -------------------------------------------------------------------------------------------------


def power(x, n):
    return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.sin(c[1]) * x), (0, x))[1]


@pytest.mark.parametrize("most", [0, 5])
@pytest.mark.parametrize(
    "order", [lambda f: f, jax.grad, lambda f: lambda x, n: jax.vmap(f, (0, None))(jnp.full(3, x), n)]
)
def test_more_steps_than_max_steps_are_an_error(order, most):
    f = jax.jit(order(in_place(power, max_steps=most)))
    finish(f(0.5, most))
    text = f"in_place: more than max_steps steps: a lax.while_loop takes more than {most}"
    if jax.__version_info__ >= (0, 11):  # before, the loop has no line
        text += rf" \({Path(__file__).name}:\d+\)"
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=text) as error:
        finish(f(0.5, most + 1))
    assert "index" not in str(error.value)


def test_a_large_result_knows_of_a_step_too_many():
    def f(b, n):
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, fill(c[1], c[0])), (0, b))[1]

    g = jax.jit(in_place(f, max_steps=5))
    np.testing.assert_array_equal(g(jnp.ones(3000), 5), f(jnp.ones(3000), 5))
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="in_place: more than max_steps steps"):
        finish(g(jnp.ones(3000), 6))


def test_a_policy_is_asked_about_a_primitive_with_any_parameters():
    own = Primitive("own")
    own.def_impl(lambda x, prim: x)
    own.def_abstract_eval(lambda x, prim: x)
    ad.deflinear2(own, lambda ct, x, prim: [ct])
    mlir.register_lowering(own, lambda ctx, x, prim: [x])

    def f(b):
        def body(i, b):
            return b.at[i].set(own.bind(jnp.sin(b[i - 1]), prim=0))

        return lax.fori_loop(1, 9, jax.checkpoint(body), b).sum()

    np.testing.assert_allclose(jax.grad(in_place(f))(*rows(9)), jax.grad(f)(*rows(9)), rtol=1e-6)


def test_a_bounded_loop_of_ours_is_differentiated_inside():
    """It closes over what is differentiated, so that the loop of JAX inside looks differentiated too."""

    def f(x):
        def step(c):
            i, b = c
            return i + 1, b.at[i].set(jnp.sin(b[i - 1]) + x[i])

        return jnp.sum(while_loop(lambda c: c[0] < 20, step, (1, jnp.zeros_like(x)), max_steps=30)[1] ** 2)

    x = rows(20)[0]
    np.testing.assert_allclose(jit(in_place(jax.grad(f)))(x), jit(jax.grad(f))(x), rtol=1e-5)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("counts", [False, True])
def test_a_while_loop_of_jax_in_a_loop_of_ours_gets_a_bound(counts, is_inside):
    def f(x):
        def fill(i, b):
            goes_on, step = lambda c: c[0] < i % 4, lambda c: (c[0] + 1, c[1].at[c[0]].multiply(jnp.cos(c[1][3])))
            return jnp.sin(b) + lax.while_loop(goes_on, step, (0, x))[1]

        if counts:
            return jnp.sum(fori_loop(jnp.int32(0), jnp.int32(6), fill, x, max_steps=7))
        step = lambda c: (c[0] + 1, fill(*c))  # noqa: E731
        return jnp.sum(while_loop(lambda c: c[0] < 6, step, (0, x), max_steps=7)[1])

    def ours(most):
        with_bound = functools.partial(in_place, max_steps=most)
        return jit(jax.grad(with_bound(f)) if is_inside else with_bound(jax.grad(f)))

    x = np.array([0.3, -0.4, 0.5, 0.6])
    [expected] = oracle.gradient(f, [x])
    np.testing.assert_allclose(ours(3)(x), expected, rtol=1e-6)
    batch = jax.vmap(ours(3))(np.stack([x, -x]))
    np.testing.assert_allclose(batch, [expected, oracle.gradient(f, [-x])[0]], rtol=1e-6)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=r"a lax\.while_loop takes more than 2"):
        finish(ours(2)(x))


def test_a_number_that_is_added_to_zeros_in_a_loop():
    """JAX adds a number to an array without a broadcast: the sum is not the number."""

    def f(x):
        def step(total, n):
            b = lax.fori_loop(0, 3, lambda i, b: b.at[i].set(x), jnp.zeros((5, 2)) + x * n)
            return total + b, (jnp.zeros(3) + n, n + jnp.zeros(3))

        return lax.scan(step, jnp.zeros((5, 2)), jnp.arange(4.0))

    jax.tree.map(np.testing.assert_allclose, in_place(f)(0.3), f(0.3))


def _sum_before(b, i, x):
    return b.at[i].set(x), jnp.sum(jnp.sin(b))


def _free_places_before(b, i, x):
    """What is small and made of the whole buffer is made in several fusions. Each reads it."""
    free = b > 0.5
    place = jnp.argmax((free & (jnp.cos(b) > 0.7)).reshape(-1))
    return b.at[i].set(x), (jnp.sum(free), place, jnp.sum(jnp.any(free, axis=1)), jnp.where(free, b, 0).max())


def _mean_before_a_loop(b, i, x):
    mean = jnp.mean(b * (b > 0))
    return lax.fori_loop(0, 3, lambda k, b: b.at[(i + k) % len(b)].set(x + b[k]), b), mean


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("one", [_sum_before, _free_places_before, _mean_before_a_loop])
@pytest.mark.parametrize("is_batched", [False, True])
def test_all_of_a_buffer_is_read_before_a_write_that_does_not_depend_on_it(one, is_batched):
    def f(b, xs):
        return lax.scan(lambda b, ix: one(b, *ix), b, (jnp.arange(len(xs)), xs))

    b, xs = np.linspace(0, 1, 100 * 32).reshape(100, 32), np.linspace(0, 2, 50 * 32).reshape(50, 32)
    ours, plain = in_place(f), f
    if is_batched:
        ours, plain, b, xs = jax.vmap(ours), jax.vmap(f), np.stack([b, b[::-1]]), np.stack([xs, xs[::-1]])
    program = compiled(ours, b, xs)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), program(b, xs), in_numpy(plain)(b, xs))
    if barriers_hold("cpu") or one is not _free_places_before:
        assert not hlo_text.copies_in_loops(program.as_text(), b.nbytes)


def test_a_foreign_call_that_updates_a_buffer():
    """A call of somebody else, whose result has the memory of its operand, comes after what reads the operand."""
    name = "an_add_of_somebody_else"
    jax.ffi.register_ffi_target(name, _kernels.modules["cpu"].registrations()["jax_tensorarray_add"], platform="cpu")
    static = {"op": name, "batch_dims": np.int64(0)} | dict.fromkeys(("strict", "masked", "sorted", "reverse"), False)

    def f(b, x):
        def step(b, i):
            row = jnp.sin(b[i // 2])
            call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(b.shape, b.dtype), input_output_aliases={0: 0})
            b = call(b, i.astype(jnp.int32), x, **static)
            return b.at[(i + 1) % len(b)].set(row + x), b[i // 3]

        return lax.scan(step, b, jnp.arange(len(b)))

    args = np.ones((200, 8)), np.linspace(0, 1, 8)
    program = compiled(in_place(f), *args)
    jax.tree.map(np.testing.assert_allclose, program(*args), jax.jit(f)(*args))
    if barriers_hold("cpu"):
        assert_no_whole_buffer_copy(program, args[0])


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("order", "by"), [("grad(in_place)", 0), ("grad(in_place)", 1), ("in_place(grad)", (0, 1)), ("vmap", 0)]
)
def test_a_custom_vjp_that_asks_for_zeros_gets_those_of_plain_jax(by, order):
    asked = []

    def filled(b, s):
        return lax.fori_loop(1, len(b), lambda i, b: b.at[i].set(jnp.sin(b[i - 1]) + b[(3 * i) % len(b)]), b * s)

    @jax.custom_vjp
    def f(b, s, k):
        return filled(b, s), s * 2, k + 1

    def forward(b, s, k):
        asked.append([x.perturbed for x in (b, s, k)])
        rows, pull = jax.vjp(filled, b.value, s.value)
        return (rows, s.value * 2, k.value + 1), (pull, b.perturbed)  # a bool, which is known in the other rule

    def backward(kept, cts):
        asked.append([type(ct) is jax.custom_derivatives.SymbolicZero for ct in cts])
        db, ds = kept[0](cts[0])
        return db if kept[1] else None, ds, None

    f.defvjp(forward, backward, symbolic_zeros=True)

    def loss(b, s):
        return jnp.sum(f(b, s, 3)[0] ** 2)

    of_batch = lambda f, g, by: g(jax.vmap(jax.grad(f, by), (0, None)))  # noqa: E731
    change = of_batch if order == "vmap" else ORDERS[order]
    b, s = jnp.asarray(np.random.default_rng(0).standard_normal((2, 40, 16))), jnp.asarray(0.7)
    b = b if order == "vmap" else b[0]
    want, asked_by_plain = in_numpy(change(loss, lambda f: f, by))(b, s), asked.copy()
    asked.clear()
    program = compiled(change(loss, in_place, by), b, s)
    assert asked == asked_by_plain
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), program(b, s), want)
    assert_no_whole_buffer_copy(program, b)


# --- rules of the user's -----------------------------------------------------------------------------------------

TABLE = jnp.linspace(0.5, 1.5, 32).reshape(2, 16)
KEY = jax.random.key(0)


def filled_by(factor, b):
    return lax.fori_loop(1, len(b), lambda i, b: b.at[i].set(jnp.sin(b[i - 1]) * factor + b[(3 * i) % len(b)]), b)


def with_vjp(factor, **options):
    """A function that closes over an array, as do its rules, each with a loop."""
    f = jax.custom_vjp(lambda b: filled_by(factor, b))

    def forward(b):
        b = b.value if options else b
        return filled_by(factor, b), b

    def backward(b, ct):
        return (lax.fori_loop(1, len(b), lambda i, ct: ct.at[i].add(ct[i - 1] * factor), ct) * jnp.cos(b),)

    f.defvjp(forward, backward, **options)
    return f


def with_key(b):
    def f(b):
        return filled_by(jax.random.uniform(KEY, (16,)), b)

    g = jax.custom_vjp(f)
    g.defvjp(lambda b: (f(b), b), lambda b, ct: (ct * b * jax.random.normal(KEY, (16,)),))
    return g(b)


def with_static_arguments(b):
    f = jax.custom_vjp(lambda n, g, k, b: g(filled_by(TABLE[0], b)) * n + k, nondiff_argnums=(0, 1))
    f.defvjp(lambda n, g, k, b: (f(n, g, k, b), (k, b)), lambda n, g, kept, ct: (None, n * kept[0] * ct * TABLE[1]))
    return f(2, lambda b: b + TABLE[1], jnp.int32(3), b)


#: Random programs have functions that close over a table, with each kind of rule.
CLOSING_OVER = {
    "NumPy": with_vjp(np.linspace(0, 1, 16)),
    "integers": with_vjp(jnp.arange(16) % 3),
    "a key": with_key,
    "asks for zeros": with_vjp(TABLE[0], symbolic_zeros=True),
    "arguments that have no derivatives": with_static_arguments,
    "a cotangent of NumPy's": jax.custom_vjp(lambda b: filled_by(TABLE[0], b)),
}
CLOSING_OVER["a cotangent of NumPy's"].defvjp(
    lambda b: (filled_by(TABLE[0], b), None), lambda _, ct: (np.ones((40, 16)),)
)
ORDERS_OF_RULES = {order: ORDERS[order] for order in (*GRADIENTS, "vmap(grad)")}
ORDERS_OF_RULES["grad(vmap)"] = lambda f, g, by: jax.grad(lambda b: jnp.sum(jax.vmap(g(f))(b)))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("name", "order"), in_turn(CLOSING_OVER, ORDERS_OF_RULES))
def test_rules_of_functions_that_close_over_arrays(name, order):
    """JAX makes what is closed over the first operands of the call, with respect to which no rule has a derivative."""

    def loss(b):
        return jnp.sum(CLOSING_OVER[name](b) ** 2)

    b = jnp.asarray(np.random.default_rng(0).standard_normal((2, 40, 16)))
    b = b if "vmap" in order else b[0]
    ours, plain = (ORDERS_OF_RULES[order](loss, by, 0) for by in (in_place, lambda f: f))
    oracle = jit if name == "a key" else in_numpy
    np.testing.assert_allclose(jit(ours)(b), oracle(plain)(b), rtol=1e-9)


def test_what_a_custom_vjp_closes_over_has_no_derivative():
    def loss(factor):
        return jnp.sum(with_vjp(factor)(jnp.ones((40, 16))))

    def message(f):
        with pytest.raises(Exception, match="with respect to a closed-over value") as error:
            jax.grad(f)(TABLE[0])
        return type(error.value), str(error.value)

    assert message(in_place(loss)) == message(jit(loss))


def beside(c, x):
    """Run a loop with two carries. Only the second one depends on `x`."""

    def step(carry, k):
        c, x = carry
        return (c.at[k].set(jnp.sum(c) / 4), x.at[k].set(jnp.sin(x[k - 1]) * c[k])), None

    return lax.scan(step, (c, x), jnp.arange(len(c)))[0]


def beside_in_a_loop(c, x):
    return lax.scan(lambda carry, _: (beside(*carry), None), (c, x), None, length=2)[0]


beside_by_rule = jax.custom_jvp(beside)


@functools.partial(beside_by_rule.defjvp, symbolic_zeros=True)
def _(primals, tangents):
    c, x = primals
    (c, x), (_, dx) = jax.jvp(functools.partial(beside, c), (x,), (tangents[1],))
    return (c, x), (tangents[0], dx)  # the first one is a `SymbolicZero`


def by_rule_in_a_loop(c, x):
    return lax.scan(lambda carry, _: (beside_by_rule(*carry), None), (c, x), None, length=2)[0]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("loop", "order"),
    [
        (beside, lambda f, ours: jax.vmap(ours(jax.grad(jax.checkpoint(f), 1)))),
        (beside, lambda f, ours: jax.vmap(ours(lambda c, x: jax.jvp(functools.partial(f, c), (x,), (x,))))),
        (beside_in_a_loop, lambda f, ours: jax.vmap(lambda c, x: jax.jvp(functools.partial(ours(f), c), (x,), (x,)))),
        (beside_by_rule, lambda f, ours: jax.vmap(lambda c, x: jax.jvp(functools.partial(ours(f), c), (x,), (x,)))),
        (beside_by_rule, lambda f, ours: jax.vmap(jit(jax.grad(jax.checkpoint(ours(f)), 1)))),
        (by_rule_in_a_loop, lambda f, ours: lambda c, x: jax.jvp(functools.partial(ours(f), c[0]), (x[0],), (x[1],))),
        (by_rule_in_a_loop, lambda f, ours: jax.vmap(ours(jax.grad(f, 1)))),
    ],
    ids=[
        "checkpoint",
        "jvp",
        "a loop in a loop",
        "a rule with symbolic zeros",
        "such a rule in a checkpoint",
        "such a rule in a loop",
        "its gradient",
    ],
)
def test_a_custom_vjp_of_a_carry_without_a_tangent(loop, order):
    """An array of zeros as the tangent is an error: JAX would differentiate the `custom_vjp` in forward mode."""
    doubled = jax.custom_vjp(lambda c: 2 * c)
    doubled.defvjp(lambda c: (2 * c, c), lambda c, ct: (2 * ct,))

    def loss(c, x):
        c, x = loop(c, x)
        return jnp.sum(jnp.sin(doubled(c)) * x)

    args = np.random.default_rng(0).standard_normal((2, 3, 16))
    got = order(loss, functools.partial(in_place, memory=64))(*args)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9), got, order(loss, lambda f: f)(*args))


@pytest.mark.slow(but=1)
@pytest.mark.skipif(not hasattr(jax.custom_vjp, "defvjp_with_logs"), reason="new in jax 0.12")
@pytest.mark.parametrize(("residuals", "inside"), [("auto", False), ("undo", True), ("checkpoint", False)])
def test_logs_of_a_backward_pass_are_those_of_plain_jax(residuals, inside):
    def logging(name):
        run, options = jax.custom_vjp(lambda b: filled_by(TABLE[0, :3], b)), {"symbolic_zeros": name == "asking"}

        def forward(b):
            b = b.value if name == "asking" else b
            return run(b), b

        def backward(b, ct):
            return (ct * jnp.cos(b),), {name: {"norm": jnp.sum(ct**2), "ct": ct[0]}}

        run.defvjp_with_logs(forward, backward, **options)
        return run

    def whole(carry, i):  # "auto" and the others do not keep what JAX keeps of a step
        buffer, b = carry
        buffer = buffer.at[i].set(jnp.sin(0.01 * buffer.sum(0)) + b[0, 0])
        return (buffer, 0.5 * logging("in a scan")(b) + 0.1 * buffer[i, :3]), None

    def f(b):
        b = logging("asking")(b) + jax.checkpoint(logging("in a checkpoint"))(b)
        b = lax.cond(b[0, 0] > 1e9, lambda b: b, logging("in a branch"), b)
        b = jnp.sum(jax.vmap(logging("batched"))(jnp.stack([b, 2 * b])), 0)
        return lax.scan(whole, (jnp.linspace(0, 1, 64 * 32).reshape(64, 32), b), jnp.arange(30))[0][1]

    def logs(f, b):
        return jax.vjp(f, b)[1].with_logs(jnp.ones_like(b))

    b = jnp.asarray(np.random.default_rng(0).standard_normal((8, 3)))
    repaired = functools.partial(in_place, residuals=residuals)
    got = repaired(lambda b: logs(f, b))(b) if inside else logs(repaired(f), b)
    want = in_numpy(lambda b: logs(f if inside else jit(f), b))(b)
    assert set(want[1]) == {"asking", "in a checkpoint", "in a branch", "batched", "in a scan"}
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-9), got, want)


def test_a_select_by_a_known_bool_is_the_array_that_it_selects():
    """Libraries stop with `jnp.where(False, old, new)` where an option is off."""

    def f(b, is_known):
        def body(i, b):
            stops = False if is_known else i > len(b)
            return jnp.where(stops, b, b.at[i].set(jnp.sin(b[i // 2])))

        return lax.fori_loop(0, len(b), body, b)

    b = jnp.linspace(-1, 1, 60 * 4).reshape(60, 4)
    ours = in_place(functools.partial(f, is_known=True))
    np.testing.assert_allclose(jax.jit(ours)(b), in_numpy(lambda b: f(b, False))(b), rtol=1e-12)
    text = str(jax.make_jaxpr(ours)(b))
    assert "f64[60,4] = select_n" not in text
    [operands] = re.findall(r"ta_write\[[^\]]*\] (.*)", text)
    assert len(operands.split()) == 3  # and no mask


MINIMA = {
    "rows": lambda b, i, x: b.at[i // jnp.array([1, 2, 1])].min(x),
    "out of range": lambda b, i, x: b.at[jnp.array([i, 3 * i, i])].min(x, mode="drop"),
    "clipped": lambda b, i, x: b.at[jnp.array([i, 3 * i, i])].min(x, mode="clip"),
    "columns": lambda b, i, x: b.T.at[:, i // jnp.array([1, 2, 1])].min(x.T).T,
    "elements": lambda b, i, x: b.at[i // jnp.array([1, 2, 1]), jnp.array([0, 1, 0])].min(x[:, 0]),
    "integers": lambda b, i, x: b + 0 * b.astype(int).at[i // jnp.array([1, 2, 1])].min(x.astype(int))[0, 0],
}

#: The same in plain JAX. Before 0.12 its derivative is NaN with mode="clip".
PLAIN_MINIMA = MINIMA | {"clipped": lambda b, i, x: b.at[jnp.minimum(jnp.array([i, 3 * i, i]), len(b) - 1)].min(x)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "order"),
    [
        *itertools.product(["rows", "clipped"], ["forward", "in_place(grad)", "in_place(vmap(grad))"]),
        *itertools.product(["out of range", "elements"], ["grad(in_place)", "vmap(grad)"]),
    ],
)
def test_the_minimum_of_rows_that_may_be_the_same_has_a_derivative_by_rows(name, order):
    """It is that of JAX: the elements that attain the minimum share it."""

    def f(minima, b, x):
        def body(b, i):
            new = jnp.stack([jnp.sin(b[i // 2]), x * jnp.cos(b[i // 3]), jnp.sin(b[i // 2])])  # equal rows
            return minima[name](b, i, new), None

        return jnp.sum(jnp.sin(lax.scan(body, b, jnp.arange(len(b)))[0]) ** 2)

    ours, plain = (functools.partial(f, minima) for minima in (MINIMA, PLAIN_MINIMA))

    def args_of(length):
        b = jnp.sin(jnp.arange(8.0 * length)).reshape(length, 8).at[::5].set(0.25).at[3::7].set(-0.0)
        x = jnp.linspace(-1, 1, 8)
        return (jnp.stack([b, 2 * b]), jnp.stack([x, -x])) if "vmap" in order else (b, x)

    by = ORDERS[order]
    program = (assert_in_place if order != "forward" else compiled_for)(by(ours, in_place, (0, 1)), args_of, 120)
    got, want = program(*args_of(120)), jit(by(plain, lambda f: f, (0, 1)))(*args_of(120))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12), got, want)


def compiled_for(f, args_of, length):
    return compiled(f, *args_of(length))


@pytest.mark.slow
@pytest.mark.parametrize("name", MINIMA)
def test_minima_have_derivatives_of_second_order_and_keep_nan(name):
    def f(minima, b):
        def body(b, i):
            new = jnp.stack([jnp.sin(b[i // 2]), jnp.cos(b[i // 3]), jnp.sin(b[i // 4])])
            return minima[name](b, i, new), None

        return lax.scan(body, b, jnp.arange(len(b)))[0]

    ours, plain = (functools.partial(f, minima) for minima in (MINIMA, PLAIN_MINIMA))
    b = jnp.sin(jnp.arange(21.0)).reshape(7, 3)
    ones = jnp.ones_like(b)
    of_nan = b.at[5, 1].set(jnp.nan)
    np.testing.assert_allclose(jit(in_place(ours))(of_nan), jit(plain)(of_nan), rtol=1e-12)

    def second(f):
        return jax.jvp(jax.grad(lambda b: jnp.sum(jnp.sin(f(b)) ** 2)), (b,), (ones,))

    want = jit(lambda: second(plain))()
    for got in (jit(lambda: second(in_place(ours)))(), in_place(lambda: second(ours))()):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12), got, want)


QUOTIENTS = {
    "rows": lambda b, i, x: b.at[i // jnp.array([1, 2, 1])].divide(x),
    "powers": lambda b, i, x: b.at[i // jnp.array([1, 2, 1])].power(x / 3),
    "out of range": lambda b, i, x: b.at[jnp.array([i, 3 * i, i])].divide(x, mode="drop"),
    "clipped": lambda b, i, x: b.at[jnp.array([i, 3 * i, 2 * i])].divide(x, mode="clip"),
    "elements": lambda b, i, x: b.at[i // jnp.array([1, 2, 1]), jnp.array([0, 1, 0])].divide(x[:, 0]),
    "columns": lambda b, i, x: b.at[:, jnp.array([1, i % 3, 1])].divide(x[:, 0]),
    "two axes": lambda b, i, x: b.at[i // jnp.array([[1, 2], [1, 3]])].divide(x[:2, None]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "order"),
    [*zip(QUOTIENTS, itertools.cycle(["forward", "grad(in_place)", "in_place(vmap)", "in_place(grad)", "vmap(grad)"]))],
)
def test_rows_that_may_be_the_same_are_divided_by_the_product_of_their_factors(name, order):
    """Bit by bit as in plain JAX, but for derivatives of powers, and as NumPy computes it."""

    def f(b):
        def body(b, i):
            x = 2 + jnp.sin(i + jnp.arange(24.0).reshape(3, 8)) + 0.1 * jnp.sin(lax.stop_gradient(b[i // 3]))
            return QUOTIENTS[name](b, i, x), None

        return lax.scan(body, b, jnp.arange(len(b)))[0]

    ours, plain = (ORDERS[order](f, by, 0) for by in (in_place, lambda f: f))

    def args_of(length):
        b = 1.5 + jnp.sin(jnp.arange(8.0 * length)).reshape(length, 8)
        return (jnp.stack([b, b + 1]),) if "vmap" in order else (b,)

    with gates("open", "COMPARED_SHARE"):
        program = (compiled_for if order == "in_place(vmap)" else assert_in_place)(ours, args_of, 120)
    got, want = program(*args_of(120)), jit(plain)(*args_of(120))
    if name == "powers" and "grad" in order:  # XLA fuses their logarithms differently before jax 0.12
        np.testing.assert_allclose(got, want, rtol=1e-12)
    else:
        oracle.assert_same_bits(got, want)
    np.testing.assert_allclose(got, in_numpy(plain)(*args_of(120)), rtol=1e-9)


@pytest.mark.parametrize("transform", [lambda f: jax.grad(in_place(f)), lambda f: in_place(jax.grad(f))])
def test_factors_of_rows_that_may_be_the_same_have_no_derivative_as_in_plain_jax(transform):
    def f(x):
        return jnp.sum(lax.fori_loop(0, 9, lambda i, b: b.at[i // jnp.array([1, 2])].divide(x), jnp.ones((4096, 2))))

    with pytest.raises(NotImplementedError, match="unique_indices"):
        transform(f)(2.0)


def test_old_rows_are_put_back_from_the_last_to_the_first():
    """Both updates are of one row, and a read of the newest version decides."""

    def f(b, xs):
        def body(b, ix):
            i, x = ix
            new = b.at[i].set(x)
            newest = new.at[i].set(jnp.sin(x) + new[i - 1])
            keeps = newest[i, 0] > 0
            return jnp.where(keeps, newest, b), keeps

        return lax.scan(body, b, (jnp.arange(1, len(xs) + 1), xs))

    args = np.ones((9, 4)), np.linspace(-3, 2, 32).reshape(8, 4)
    found, wanted = jit(in_place(f))(*args), in_numpy(f)(*args)
    assert 0 < np.sum(wanted[1]) < 8
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9), found, wanted)
