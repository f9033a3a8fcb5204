"""Every method of TensorArray under every transformation, against a Python list of rows."""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from in_numpy import in_numpy
from jax import lax
from list_model import ListArray
from quick import jit

from jax_tensorarray import TensorArray, checkpoint_policies

STEPS, SIZE, MAX_SIZE, BATCH = 3, 4, 8, 3

_rng = np.random.default_rng(0)
#: One example for each k of the first axis: the rows at the start, and the values that the steps take.
ROWS = _rng.normal(size=(BATCH, SIZE, 2))
VALUES = _rng.normal(size=(BATCH, STEPS, 2))
DIRECTION = [_rng.normal(size=a.shape) for a in (ROWS, VALUES)]
WHERE = np.array([[True, False, True], [False, False, True], [True, True, True]])
READS = np.array([[2, 0, 2], [1, 1, 3], [3, 2, 0]])  # of rows that are there from the start
WRITES = {False: np.array([[1, 3, 1], [0, 2, 3], [2, 2, 2]]), True: np.array([[1, 6, 1], [4, 5, 0], [7, 2, 7]])}


# --- the methods -----------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    dynamic: bool
    pytree: bool


KINDS = {
    "static": Kind(False, False),
    "dynamic": Kind(True, False),
    "static_pytree": Kind(False, True),
    "dynamic_pytree": Kind(True, True),
}


def as_rows(kind, x):
    """Rows made of arrays `[..., 2]`: those arrays, or pytrees in which an integer has no derivative."""
    if not kind.pytree:
        return x
    return {"a": x, "b": [x[..., None] * jnp.array([1.0, -2.0, 0.5], x.dtype), (jnp.real(x) > 0).astype(jnp.int32)]}


def start(kind, lib, rows, max_size=MAX_SIZE):
    """The array before the first step."""
    rows = as_rows(kind, rows)
    max_size = max_size if kind.dynamic else None
    if lib is ListArray:
        return ListArray.from_array(rows, max_size, kind.dynamic)
    if not kind.pytree:
        return TensorArray.from_array(rows, dynamic_size=kind.dynamic, max_size=max_size)
    row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows)
    return TensorArray.like(row, SIZE, dynamic_size=kind.dynamic, max_size=max_size).unstack(rows)


def vector(*indices):
    known = all(isinstance(i, int | np.integer) for i in indices)
    return np.array(indices) if known else jnp.stack([jnp.asarray(i, jnp.int32) for i in indices])


def flags(*wheres):
    known = all(isinstance(w, bool | np.bool_) for w in wheres)
    return np.array(wheres) if known else jnp.stack([jnp.asarray(w) for w in wheres])


def varied(v, k):
    """Another row of the dtype of `v`."""
    return jnp.cos(v * k) if jnp.issubdtype(v.dtype, jnp.inexact) else (v + k).astype(v.dtype)


def three(kind, v):
    return as_rows(kind, jnp.stack([v, varied(v, 1), varied(v, 2)]))


def many(kind, v):
    """As many rows as a static array has, or one more."""
    return as_rows(kind, jnp.stack([v, *[varied(v, k) for k in range(1, SIZE + kind.dynamic)]]))


def split(kind, ta, i, v, w):
    pieces = many(kind, v)
    lengths = [2] * jax.tree.leaves(pieces)[0].shape[0]
    return ta.split(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), pieces), lengths), ()


def gather_masked(kind, ta, i, v, w):
    """The index is looked at where `w` is True, and dropped."""
    return ta, (ta.gather(vector(i, 0, i), where=flags(w, True, w)), ta.gather(vector(i, 0, i), where=w, mode="drop"))


def scatter_masked(kind, ta, i, v, w):
    ta = ta.scatter(vector(i, 0, i), three(kind, v), where=flags(w, True, False))
    return ta.scatter(vector(1, i, i), three(kind, varied(v, 3)), mode="drop"), ()


def append_drop(kind, ta, i, v, w):
    """More rows than there is room for."""
    return ta.append(as_rows(kind, v), mode="drop").append(as_rows(kind, varied(v, 1)), mode="drop"), ()


def pop_masked(kind, ta, i, v, w):
    """More rows than there are."""
    ta, maybe = ta.append(as_rows(kind, v)).pop(where=w)
    ta, last = ta.pop(mode="drop")[0].pop(mode="drop")
    return ta, (maybe, last)


def identity(kind, ta, i, v, w):
    same = ta.identity()
    return same.write(i, as_rows(kind, v)), (ta.read(0), same.read(0))


def old_version(kind, ta, i, v, w):
    newer = ta.write(i, as_rows(kind, v))
    newest = newer.write(0, as_rows(kind, v * v))
    return newer, (ta.read(0), newer.read(0), newest.read(0), ta.stack())


#: name -> (kind, array, index, value, where) -> (array, what came out). Each is done in every step.
METHODS: dict[str, Any] = {
    "write": lambda kind, ta, i, v, w: (ta.write(i, as_rows(kind, v)), ()),
    "write_where": lambda kind, ta, i, v, w: (ta.write(i, as_rows(kind, v), where=w), ()),
    "write_drop": lambda kind, ta, i, v, w: (ta.write(i, as_rows(kind, v), mode="drop"), ()),
    "read": lambda kind, ta, i, v, w: (ta, ta.read(i)),
    "read_masked": lambda kind, ta, i, v, w: (ta, (ta.read(i, where=w), ta.read(i, mode="drop"))),
    "getitem": lambda kind, ta, i, v, w: (ta, ta[i]),
    "stack": lambda kind, ta, i, v, w: (ta.write(i, as_rows(kind, v)), ta.stack()),
    "concat": lambda kind, ta, i, v, w: (ta.write(i, as_rows(kind, v)), ta.concat()),
    "gather": lambda kind, ta, i, v, w: (ta, ta.gather(vector(i, 0, i))),
    "gather_masked": gather_masked,
    "scatter": lambda kind, ta, i, v, w: (ta.scatter(vector(i, 0, i), three(kind, v)), ()),
    "scatter_masked": scatter_masked,
    "unstack": lambda kind, ta, i, v, w: (ta.unstack(many(kind, v)), ()),
    "split": split,
    "append": lambda kind, ta, i, v, w: (ta.append(as_rows(kind, v)), ()),
    "append_where": lambda kind, ta, i, v, w: (ta.append(as_rows(kind, v), where=w), ()),
    "append_drop": append_drop,
    "pop": lambda kind, ta, i, v, w: ta.pop(),
    "pop_masked": pop_masked,
    "pop_append": lambda kind, ta, i, v, w: (ta.pop()[0].append(as_rows(kind, v)), ta.pop()[1]),
    "size": lambda kind, ta, i, v, w: (ta.write(i, as_rows(kind, v)), jnp.asarray(ta.size())),
    "identity": identity,
    "old_version": old_version,
}
GROWING = ["append", "append_where", "append_drop", "pop", "pop_masked", "pop_append"]
READING = ["read", "read_masked", "getitem", "gather", "gather_masked"]
MASKED = ["write_where", "write_drop", "read_masked", "gather_masked", "scatter_masked"]


def methods(kind):
    return [m for m in METHODS if kind.dynamic or m not in GROWING]


def indices(kind, method, where=WHERE):
    found = READS if method in READING else WRITES[kind.dynamic]
    return np.where(where, found, [99, -1, MAX_SIZE]) if method in MASKED else found


# --- the places where JAX lets a program put a step ------------------------------------------------------------


def at(k, xs):
    return jax.tree.map(lambda x: x[k], xs)


def loop_in_python(step, ta, i, v, w):
    outs = []
    for k in range(STEPS):
        ta, out = step(ta, *at(k, (i, v, w)))
        outs.append(out)
    return ta, jax.tree.map(lambda *xs: jnp.stack(xs), *outs)


def each_step(wrap):
    """The context in which every step is wrapped on its own."""
    return lambda step, *operands: loop_in_python(wrap(step), *operands)


def scan(step, ta, i, v, w):
    return lax.scan(lambda ta, x: step(ta, *x), ta, (i, v, w))


def loop_body(step, ta, i, v, w):
    """A step for fori_loop and while_loop, and what it starts from."""
    out = jax.eval_shape(lambda: step(ta, *at(0, (i, v, w)))[1])
    outs = jax.tree.map(lambda x: jnp.zeros((STEPS, *x.shape), x.dtype), out)

    def body(k, carry):
        ta, outs = carry
        ta, out = step(ta, *at(k, (i, v, w)))
        return ta, jax.tree.map(lambda xs, x: xs.at[k].set(x), outs, out)

    return body, (ta, outs)


def fori_loop(step, *operands):
    body, carry = loop_body(step, *operands)
    return lax.fori_loop(0, STEPS, body, carry)


def while_loop(step, ta, i, v, w):
    body, carry = loop_body(step, ta, i, v, w)
    start = (jnp.zeros((), jnp.int32), carry)
    return lax.while_loop(lambda c: c[0] < STEPS, lambda c: (c[0] + 1, body(*c)), start)[1]


def zeros_of(step, *operands):
    out = jax.eval_shape(lambda: step(*operands)[1])
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out)


def is_true(v):
    """True, but known only at run time."""
    return jnp.real(jax.tree.leaves(v)[0]).sum() < 1e6


def cond_operand(step):
    def wrapped(ta, i, v, w):
        zeros = zeros_of(step, ta, i, v, w)
        return lax.cond(is_true(v), step, lambda ta, i, v, w: (ta, zeros), ta, i, v, w)

    return wrapped


def cond_closure(step):
    def wrapped(ta, i, v, w):
        zeros = zeros_of(step, ta, i, v, w)
        return lax.cond(is_true(v), lambda: step(ta, i, v, w), lambda: (ta, zeros))

    return wrapped


def overwritten(tas):
    return {m: ta.write(0, ta.read(1)) for m, ta in tas.items()}


def switch(step):
    def wrapped(ta, i, v, w):
        zeros = zeros_of(step, ta, i, v, w)
        others = [lambda ta: (ta, zeros), lambda ta: (overwritten(ta), zeros)]
        return lax.switch(1 + is_true(v), [*others, lambda ta: step(ta, i, v, w)], ta)

    return wrapped


def nested_jit(step):
    return jax.jit(lambda *outer: jax.jit(step)(*outer))


def tree_map(step):
    return lambda ta, i, v, w: step(jax.tree.map(lambda x: x, ta), i, v, w)


def custom_vjp(step):
    wrapped = jax.custom_vjp(step)
    wrapped.defvjp(lambda *args: (step(*args), args), lambda args, ct: jax.vjp(step, *args)[1](ct))
    return wrapped


def custom_jvp(step):
    wrapped = jax.custom_jvp(step)
    wrapped.defjvp(lambda primals, tangents: jax.jvp(step, primals, tangents))
    return wrapped


def checkpointed_scan(step, ta, i, v, w):
    return scan(jax.checkpoint(step, policy=checkpoint_policies.save_reads, prevent_cse=False), ta, i, v, w)


#: name -> (step, array, indices, values, wheres) -> (array, outs)
CONTEXTS: dict[str, Any] = {
    "direct": loop_in_python,
    "scan": scan,
    "fori_loop": fori_loop,
    "while_loop": while_loop,
    "cond_operand": each_step(cond_operand),
    "cond_closure": each_step(cond_closure),
    "switch": each_step(switch),
    "nested_jit": each_step(nested_jit),
    "checkpoint": each_step(jax.checkpoint),
    "checkpointed_scan": checkpointed_scan,
    "custom_vjp": each_step(custom_vjp),
    "custom_jvp": each_step(custom_jvp),
    "tree_map": each_step(tree_map),
}
FORWARD_ONLY = ["while_loop"]  # JAX has no reverse mode of it
REVERSE_ONLY = ["custom_vjp"]  # and no forward mode of this
FIRST_ORDER = ["custom_vjp", "custom_jvp", "tree_map", "cond_closure"]


def run(kind, context, names, rows, values, i, w, lib=TensorArray):
    """For each method: all rows of an array of its own, the number of them, and what the steps gave.

    `rows`, `values` and the indices `i` are dicts with one entry for each of them.
    """

    def step(tas, i, v, w):
        done = {m: METHODS[m](kind, tas[m], i[m], v[m], w) for m in names}
        return {m: ta for m, (ta, _) in done.items()}, {m: out for m, (_, out) in done.items()}

    tas, outs = CONTEXTS[context](step, {m: start(kind, lib, rows[m]) for m in names}, i, values, w)
    return {m: (tas[m].stack(), jnp.asarray(tas[m].size()), outs[m]) for m in names}


def scalar_of(results):
    """A scalar whose derivatives of order one and two do not vanish."""
    leaves = [x.reshape(-1) for x in jax.tree.leaves(results) if jnp.issubdtype(x.dtype, jnp.inexact)]
    parts = [y.astype(jnp.float64) for x in leaves for y in ([x.real, x.imag] if jnp.iscomplexobj(x) else [x])]
    flat = jnp.concatenate(parts)
    total = jnp.sum(np.cos(1.0 + np.arange(flat.size)) * jnp.sin(flat))
    return total + 0.25 * total**2


def loss(*args, **kwargs):
    """The sum over the methods, so that the derivatives by the inputs of one are its own."""
    return sum(map(scalar_of, run(*args, **kwargs).values()))


def program(f, kind, context, names, i, w, lib=TensorArray):
    """`f` of the inputs that are differentiated."""
    return lambda rows, values: f(kind, context, names, rows, values, i, w, lib)


def product(gradient, tangents):
    leaves = zip(*map(jax.tree.leaves, (gradient, tangents)), strict=True)
    return sum(jnp.vdot(g, t).real for g, t in leaves)


def derivatives(f, context, args, tangents, first_order=False, reverse_over_reverse=False):
    """{name: derivative of `f`} of orders one and two, in the modes that JAX has of the context."""
    gradient = jax.grad(f, (0, 1))
    if context in FORWARD_ONLY and first_order:
        return {"directional": jax.jvp(f, args, tangents)[1]}
    if context in FORWARD_ONLY:
        once, twice = jax.jvp(lambda *args: jax.jvp(f, args, tangents)[1], args, tangents)
        return {"directional": once, "second directional": twice}
    found = {}
    if first_order:
        found["gradient"] = gradient(*args)
    else:
        found["gradient"], found["second"] = jax.jvp(gradient, args, tangents)
    if context not in REVERSE_ONLY:
        found["directional"] = jax.jvp(f, args, tangents)[1]
    if reverse_over_reverse:
        second = jax.grad(lambda *args: product(gradient(*args), tangents), (0, 1))(*args)
        found["second, reverse over reverse"] = second
    return found


def inputs(names, k):
    """Rows and values of example `k`, the same for every method, and a direction."""
    return tuple(tuple(dict.fromkeys(names, x[k]) for x in xs) for xs in ((ROWS, VALUES), DIRECTION))


@functools.cache
def expected(kind, k):
    """Results of every method and derivatives of the loss, for example `k`: by the list of rows in plain jnp."""
    names = methods(kind)
    i, w = {m: indices(kind, m)[k] for m in names}, WHERE[k]
    f = program(loss, kind, "direct", names, i, w, ListArray)
    args, tangents = inputs(names, k)

    @in_numpy
    def everything(args):
        values = program(run, kind, "direct", names, i, w, ListArray)(*args)
        if k or kind.pytree:  # of these only the gradient is compared
            gradient = jax.grad(f, (0, 1))(*args)
            return values, {"gradient": gradient, "directional": product(gradient, tangents)}
        gradient, second = jax.jvp(jax.grad(f, (0, 1)), args, tangents)
        return values, {
            "gradient": gradient,
            "directional": product(gradient, tangents),
            "second": second,
            "second, reverse over reverse": second,
            "second directional": product(second, tangents),
        }

    return jax.tree.map(np.asarray, everything(args))


def assert_close(actual, wanted, rtol=1e-10, atol=1e-11, what=""):
    paths, structure = jax.tree_util.tree_flatten_with_path(wanted)
    assert jax.tree.structure(actual) == structure
    for a, (path, e) in zip(jax.tree.leaves(actual), paths, strict=True):
        where = f"{what} {jax.tree_util.keystr(path)}"
        assert (a.shape, a.dtype) == (e.shape, e.dtype), where
        if jnp.issubdtype(e.dtype, jnp.inexact):
            wide = np.complex128 if jnp.iscomplexobj(e) else np.float64
            np.testing.assert_allclose(
                np.asarray(a).astype(wide), np.asarray(e).astype(wide), rtol=rtol, atol=atol, err_msg=where
            )
        else:
            np.testing.assert_array_equal(a, e, err_msg=where)


def of_kind(*names):
    return pytest.mark.parametrize("kind", [pytest.param(KINDS[n], id=n) for n in names or KINDS])


def assert_as_expected(kind, found, k, what=""):
    values, derived = expected(kind, k)
    assert_close(found[0], values, what=f"{what} values")
    assert found[1]
    for name, value in found[1].items():
        assert_close(value, derived[name], what=f"{what} {name}")


# --- one example -----------------------------------------------------------------------------------------------


SIMPLE = ["static", "dynamic"]
IN_CONTEXTS = [
    *(("static", c) for c in CONTEXTS),
    *(("dynamic", c) for c in ("direct", "scan", "while_loop", "cond_operand")),
    ("static_pytree", "fori_loop"),
]


REVERSE_OVER_REVERSE = ["scan", "custom_vjp"]


@pytest.mark.parametrize(("kind", "context"), IN_CONTEXTS)
def test_values_and_derivatives_of_every_method(kind, context):
    kind, names = KINDS[kind], methods(KINDS[kind])
    args, tangents = inputs(names, 0)

    @jit
    def everything(i, w, args, tangents):
        derived = derivatives(
            program(loss, kind, context, names, i, w),
            context,
            args,
            tangents,
            first_order=context in FIRST_ORDER or kind.pytree,
            reverse_over_reverse=context in REVERSE_OVER_REVERSE and not kind.pytree,
        )
        return program(run, kind, context, names, i, w)(*args), derived

    found = everything({m: indices(kind, m)[0] for m in names}, WHERE[0], args, tangents)
    assert_as_expected(kind, found, 0)


@of_kind()
def test_values_of_every_method_outside_of_jit(kind):
    names = methods(kind)
    args, _ = inputs(names, 0)
    for convert in (int, np.int64, jnp.int32):
        for m in names:
            i = {m: [convert(x) for x in indices(kind, m)[0]]}
            w = [bool(x) if convert is int else jnp.asarray(x) for x in WHERE[0]]
            one = [{m: jnp.asarray(a[m])} for a in args]
            ta, outs = start(kind, TensorArray, one[0][m]), []
            for k in range(STEPS):
                ta, out = METHODS[m](kind, ta, i[m][k], one[1][m][k], w[k])
                outs.append(out)
            found = ta.stack(), jnp.asarray(ta.size()), jax.tree.map(lambda *xs: jnp.stack(xs), *outs)
            assert_close(found, expected(kind, 0)[0][m], what=m)


@of_kind("static", "dynamic")
def test_gradients_outside_of_jit_need_no_jit(kind):
    names = methods(kind)
    args, _ = inputs(names, 0)
    i, w = {m: jnp.asarray(indices(kind, m)[0]) for m in names}, jnp.asarray(WHERE[0])
    found = jax.grad(program(loss, kind, "direct", names, i, w), (0, 1))(*jax.tree.map(jnp.asarray, args))
    assert_close(found, expected(kind, 0)[1]["gradient"])


@of_kind("static", "dynamic_pytree")
def test_indices_known_while_tracing(kind):
    names = methods(kind)
    args, _ = inputs(names, 0)
    f = program(loss, kind, "direct", names, {m: indices(kind, m)[0] for m in names}, WHERE[0])
    assert_close(jit(jax.grad(f, (0, 1)))(*args), expected(kind, 0)[1]["gradient"])


@of_kind("static", "dynamic")
def test_the_gradient_is_that_of_finite_differences(kind):
    names = methods(kind)
    i, w = {m: indices(kind, m)[0] for m in names}, WHERE[0]
    compiled = jit(program(run, kind, "direct", names, i, w))
    for m in names:

        def f(rows, values, m=m):
            args, _ = inputs(names, 0)
            rows, values = {**args[0], m: rows}, {**args[1], m: values}
            return scalar_of(jax.tree.map(jnp.asarray, compiled(rows, values)[m]))

        found = [g[m] for g in expected(kind, 0)[1]["gradient"]]
        for a, e in zip(found, oracle.gradient(f, (ROWS[0], VALUES[0])), strict=True):
            np.testing.assert_allclose(a, e, rtol=1e-6, atol=1e-7, err_msg=m)


# --- many examples ---------------------------------------------------------------------------------------------


BATCHED = ["direct", "while_loop"]


@pytest.mark.parametrize(("kind", "context"), [(k, c) for k in SIMPLE for c in BATCHED])
def test_vmap_with_indices_that_differ(kind, context):
    kind, names = KINDS[kind], methods(KINDS[kind])
    examples = [inputs(names, k)[0] for k in range(BATCH)]
    args = jax.tree.map(lambda *xs: np.stack(xs), *examples)
    weights = np.array([1.0, -2.0, 0.5])

    @jit
    def everything(i, w, args):
        def of_one(i, w, *args):
            return program(loss, kind, context, names, i, w)(*args)

        def of_all(*args):
            return (weights * jax.vmap(of_one)(i, w, *args)).sum()

        values = jax.vmap(lambda i, w, *args: program(run, kind, context, names, i, w)(*args))(i, w, *args)
        if context in FORWARD_ONLY:
            return values, None, None
        return values, jax.vmap(jax.grad(of_one, (2, 3)))(i, w, *args), jax.grad(of_all, (0, 1))(*args)

    values, of_each, of_sum = everything({m: indices(kind, m) for m in names}, WHERE, args)
    for k in range(BATCH):
        wanted, derived = expected(kind, k)
        assert_close(at(k, values), wanted, what=f"example {k}")
        if of_each is not None:
            assert_close(at(k, of_each), derived["gradient"], what=f"vmap of grad, example {k}")
            scaled = jax.tree.map(lambda x, k=k: weights[k] * x, derived["gradient"])
            assert_close(at(k, of_sum), scaled, what=f"grad of vmap, example {k}")


def one_step(kind, names, ta, i, v):
    done = {m: METHODS[m](kind, ta, i[m], v, True) for m in names}
    return {m: (ta.stack(), jnp.asarray(ta.size()), out) for m, (ta, out) in done.items()}


def first_indices(kind):
    return {m: indices(kind, m, where=True)[:, 0] for m in methods(kind)}


@functools.cache
def one_step_by_model(kind, k):
    """Results, and derivatives of their scalar, of one step at the indices of example `k`."""
    i = at(k, first_indices(kind))

    def f(rows, v):
        found = one_step(kind, methods(kind), start(kind, ListArray, rows), i, v)
        return scalar_of(found), found

    return jit(jax.grad(f, (0, 1), has_aux=True))


AXES = [c for c in itertools.product([None, 0], [None, 0], [None, 0]) if any(a is not None for a in c)]


@pytest.mark.parametrize(
    "in_axes", [*AXES, (0, 0, -1)], ids=lambda c: ",".join("-" if a is None else str(a) for a in c)
)
@of_kind("static", "dynamic")
def test_vmap_over_every_combination_of_array_index_and_value(kind, in_axes):
    of_array, of_index, of_value = in_axes

    def at_axis(x, axis):
        return x[0] if axis is None else np.moveaxis(x, 0, axis)

    @jit
    def everything(i, rows, v):
        def f(rows, v):
            make = functools.partial(start, kind, TensorArray)
            tas = make(rows) if of_array is None else jax.vmap(make)(rows)
            found = jax.vmap(functools.partial(one_step, kind, methods(kind)), in_axes)(tas, i, v)
            return jax.vmap(scalar_of)(found).sum(), found

        return jax.grad(f, (0, 1), has_aux=True)(rows, v)

    rows, v = at_axis(ROWS, of_array), at_axis(VALUES[:, 0], of_value)
    gradient, found = everything({m: at_axis(x, of_index) for m, x in first_indices(kind).items()}, rows, v)
    wanted_gradient = [np.zeros_like(rows), np.zeros_like(v)]
    for k in range(BATCH):
        of_k = [0 if axis is None else k for axis in in_axes]
        (of_rows, of_v), wanted = one_step_by_model(kind, of_k[1])(ROWS[of_k[0]], VALUES[of_k[2], 0])
        assert_close(at(k, found), wanted, what=f"example {k}")
        for g, axis, part in zip(wanted_gradient, (of_array, of_value), (of_rows, of_v), strict=True):
            (g if axis is None else np.moveaxis(g, axis, 0)[k])[...] += part
    assert_close(gradient, tuple(wanted_gradient), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("branch", ["cond", "where"])
def test_examples_that_take_different_branches_have_different_sizes(branch):
    kind = KINDS["dynamic"]

    def f(rows, values, w):
        def step(ta, v, w):
            if branch == "where":
                return ta.append(v, where=w), ta.size()
            return lax.cond(w, lambda ta: (ta.append(v), ta.size()), lambda ta: (ta, ta.size()), ta)

        ta, sizes = lax.scan(lambda ta, x: step(ta, *x), start(kind, TensorArray, rows), (values, w))
        return ta.stack(), sizes

    def value(rows, values, w):
        return scalar_of(f(rows, values, w))

    found, sizes = jit(jax.vmap(f))(ROWS, VALUES, WHERE)
    gradient = jit(jax.vmap(jax.grad(value, (0, 1))))(ROWS, VALUES, WHERE)
    np.testing.assert_array_equal(sizes, SIZE + np.cumsum(WHERE, 1) - WHERE)
    for k in range(BATCH):

        def by_model(rows, values, k=k):
            ta = start(kind, ListArray, rows)
            for v, w in zip(values, WHERE[k], strict=True):
                ta = ta.append(v, where=w)
            return ta.stack()

        args = jnp.asarray(ROWS[k]), jnp.asarray(VALUES[k])
        assert_close(found[k], by_model(*args))
        wanted = jax.grad(lambda *args: scalar_of(by_model(*args)), (0, 1))(*args)
        assert_close(at(k, gradient), wanted)


def test_a_vmapped_while_loop_grows_every_array_to_its_own_size():
    counts = np.array([2, 0, 4])

    def f(count):
        ta = TensorArray(jnp.float64, size=0, dynamic_size=True, max_size=4, element_shape=())
        ta = lax.while_loop(lambda ta: ta.size() < count, lambda ta: ta.append(ta.size() + jnp.float64(1)), ta)
        return ta.stack(), ta.size()

    rows, sizes = jit(jax.vmap(f))(counts)
    np.testing.assert_array_equal(rows, [[1, 2, 0, 0], [0, 0, 0, 0], [1, 2, 3, 4]])
    np.testing.assert_array_equal(sizes, counts)


# --- dtypes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.complex128, jnp.int32, jnp.bool_])
@of_kind("static", "dynamic")
def test_values_and_gradients_of_every_dtype(kind, dtype):
    names = methods(kind)
    inexact = jnp.issubdtype(dtype, jnp.inexact)
    rng = np.random.default_rng(1)
    draw = rng.normal if inexact else functools.partial(rng.integers, 0, 2 if dtype == jnp.bool_ else 100)
    x, y = draw(size=(SIZE, 2)), draw(size=(STEPS, 2))
    if dtype == jnp.complex128:
        x, y = x + 1j * draw(size=x.shape), y - 1j * draw(size=y.shape)
    rows, values = (dict.fromkeys(names, jnp.asarray(a, dtype)) for a in (x, y))

    def everything(context, lib):
        def f(i, rows, values):
            p = functools.partial(program, kind=kind, context=context, names=names, i=i, w=WHERE[0], lib=lib)
            gradient = jax.grad(p(loss), (0, 1))(rows, values) if inexact else ()
            return p(run)(rows, values), gradient

        return f

    i = {m: indices(kind, m)[0] for m in names}
    found, gradient = jit(everything("scan", TensorArray))(i, rows, values)
    wanted, wanted_gradient = in_numpy(functools.partial(everything("direct", ListArray), i))(rows, values)
    eps = float(jnp.finfo(dtype).eps) if inexact else 0
    assert_close(found, wanted, rtol=4 * eps, atol=4 * eps)
    scale = max([1.0, *(float(jnp.abs(g).max()) for g in jax.tree.leaves(wanted_gradient))])
    assert_close(gradient, wanted_gradient, rtol=8 * eps, atol=8 * eps * scale)


# --- a TensorArray as an argument ------------------------------------------------------------------------------


def use(ta):
    """A scalar of an array with pytree rows: row 1 is overwritten, so it has no gradient; row 2 counts twice."""
    new = ta.write(1, jax.tree.map(jnp.sin, ta.read(2)))
    return scalar_of((new.stack(), new.read(3), new.gather([0, 0])))


def float_rows(x):
    return {"a": x, "b": (x[..., :1], jnp.cos(x).astype(jnp.float32))}


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint, jax.vmap])
def test_the_gradient_with_respect_to_an_array_is_an_array(transform):
    rows = jax.vmap(float_rows)(jnp.asarray(ROWS))
    wanted = jax.vmap(jax.grad(lambda rows: use(ListArray.from_array(rows))))(rows)
    gradient = jax.grad(use)
    if transform is jax.vmap:
        found = jax.vmap(lambda ta: gradient(ta).stack())(jax.vmap(TensorArray.from_array)(rows))
    else:
        found = transform(gradient)(TensorArray.from_array(at(0, rows)))
        assert isinstance(found, TensorArray)
        found, wanted = found.stack(), at(0, wanted)
    assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_arrays_are_trees_for_a_step_of_gradient_descent():
    rows = float_rows(jnp.asarray(ROWS[0]))
    ta = TensorArray.from_array(rows)
    moved = jax.tree.map(lambda x, g: x - 0.5 * g, ta, jax.grad(use)(ta))
    gradient = jax.grad(lambda rows: use(ListArray.from_array(rows)))(rows)
    assert_close(moved.stack(), jax.tree.map(lambda x, g: x - 0.5 * g, rows, gradient), rtol=1e-5, atol=1e-5)
    assert_close(ta.stack(), rows)


def test_jvp_takes_and_gives_arrays():
    ta, tangent = (TensorArray.from_array(jnp.asarray(x)) for x in (ROWS[0], ROWS[1]))
    value, direction = jax.jvp(lambda ta: ta.write(0, ta.read(1) ** 2), (ta,), (tangent,))
    np.testing.assert_allclose(value.stack(), [ROWS[0, 1] ** 2, *ROWS[0, 1:]])
    np.testing.assert_allclose(direction.stack(), [2 * ROWS[0, 1] * ROWS[1, 1], *ROWS[1, 1:]])


def test_vjp_takes_a_cotangent_that_is_an_array():
    ta, cotangent = (TensorArray.from_array(jnp.asarray(x)) for x in (ROWS[0], ROWS[1]))
    (found,) = jax.vjp(lambda ta: ta.write(0, ta.read(1) ** 2), ta)[1](cotangent)
    row = ROWS[1, 1] + 2 * ROWS[0, 1] * ROWS[1, 0]
    np.testing.assert_allclose(found.stack(), [np.zeros(2), row, *ROWS[1, 2:]])


def test_a_rule_of_custom_vjp_may_write_its_cotangent_into_an_array():
    @jax.custom_vjp
    def reversed_gradient(ta, index):
        return ta.read(index)

    def backward(residuals, cotangent):
        ta, index = residuals
        return jax.tree.map(jnp.zeros_like, ta).write(index, -cotangent), None

    reversed_gradient.defvjp(lambda ta, index: (ta.read(index), (ta, index)), backward)
    f = jit(jax.grad(lambda ta: jnp.sum(reversed_gradient(ta, 2) ** 2)))
    expected = np.zeros((SIZE, 2))
    expected[2] = -2 * ROWS[0, 2]
    np.testing.assert_allclose(f(TensorArray.from_array(jnp.asarray(ROWS[0]))).stack(), expected)


@of_kind("static", "dynamic")
def test_scan_stacks_the_arrays_that_its_steps_give(kind):
    ta = start(kind, TensorArray, jnp.asarray(ROWS[0]))
    _, tas = lax.scan(lambda ta, v: (ta.write(1, v), ta), ta, jnp.asarray(VALUES[0]))
    for k in range(STEPS):
        expected = ROWS[0] if k == 0 else np.stack([ROWS[0, 0], VALUES[0, k - 1], *ROWS[0, 2:]])
        found = at(k, tas).stack()
        np.testing.assert_array_equal(found[:SIZE], expected)
        np.testing.assert_array_equal(jax.vmap(lambda ta: ta.stack())(tas)[k], found)


def test_an_array_is_what_scan_iterates_over():
    tas = jax.vmap(TensorArray.from_array)(jnp.asarray(ROWS))
    _, found = lax.scan(lambda c, ta: (c, ta.read(2)), None, tas)
    np.testing.assert_array_equal(found, ROWS[:, 2])


@of_kind("static", "dynamic")
def test_everything_works_with_jit_disabled(kind):
    names = methods(kind)
    args, _ = inputs(names, 0)
    i, w = {m: jnp.asarray(indices(kind, m)[0]) for m in names}, jnp.asarray(WHERE[0])
    with jax.disable_jit():
        found = program(run, kind, "scan", names, i, w)(*jax.tree.map(jnp.asarray, args))
    assert_close(found, expected(kind, 0)[0])


# --- random programs -------------------------------------------------------------------------------------------

LENGTH = 6
WRAPS = [*[lambda step: step] * 6, nested_jit, cond_operand, jax.checkpoint]


class Step(NamedTuple):
    method: str
    version: int  # which of the arrays so far it is done to: the oldest may be used again
    wrap: Any
    index: np.ndarray  # [BATCH, 3]
    where: np.ndarray  # [BATCH]


def random_program(seed):
    """Steps that are right for BATCH examples, which have indices of their own and so sizes of their own."""
    rng = np.random.default_rng(seed)
    kind = list(KINDS.values())[rng.choice(4, p=[0.35, 0.45, 0.1, 0.1])]
    limit = MAX_SIZE if kind.dynamic else SIZE
    sizes, steps = [np.full(BATCH, SIZE)], []
    while len(steps) < LENGTH:
        method = str(rng.choice([m for m in methods(kind) if m not in ("pop_append", "size", "old_version")]))
        version = len(sizes) - 1 if rng.random() < 0.6 else int(rng.integers(len(sizes)))
        size = sizes[version]
        if (method in ("append", "append_where", "pop_masked") and size.max() == MAX_SIZE) or (
            method in ("pop", *READING, "identity") and not size.min()
        ):
            continue
        where = rng.random(BATCH) < 0.6
        below = np.where(size > 0, size, 1) if method in READING else np.full(BATCH, limit)
        index = rng.integers(0, below[:, None], (BATCH, 3))
        if method in MASKED:
            index = np.where(where[:, None], index, rng.choice([-1, MAX_SIZE, 99], (BATCH, 3)))
        steps.append(Step(method, version, WRAPS[rng.integers(len(WRAPS))], index, where))
        if method in ("write", "identity", "stack", "concat"):
            size = np.maximum(size, index[:, 0] + 1)
        elif method in ("write_where", "write_drop"):
            size = np.where(where, np.maximum(size, index[:, 0] + 1), size)
        elif method == "scatter_masked":
            size = np.maximum(np.where(where, np.maximum(size, index[:, 0] + 1), size), 2)
        elif method == "scatter":
            size = np.maximum(size, index.max(1) + 1)
        elif method in ("unstack", "split"):
            size = np.full(BATCH, SIZE + kind.dynamic)
        elif method == "append_drop":
            size = np.minimum(size + 2, MAX_SIZE)
        elif method.startswith("append"):
            size = size + np.where(where | (method == "append"), 1, 0)
        elif method == "pop":
            size = size - 1
        elif method == "pop_masked":
            size = np.maximum(size + 1 - where - 2, 0)
        sizes.append(size)
    return kind, steps


def step_of(kind, method):
    """One step, at three indices."""
    many_rows = {
        "scatter": lambda ta, i, v: (ta.scatter(vector(*i), three(kind, v)), ()),
        "gather": lambda ta, i, v: (ta, ta.gather(vector(*i))),
        # Of the rows only the first is known to be there.
        "identity": lambda ta, i, v: (ta.identity().write(i[0], as_rows(kind, v)), ta.read(0)),
    }
    if method in many_rows:
        return lambda ta, i, v, w: many_rows[method](ta, i, v)
    return lambda ta, i, v, w: METHODS[method](kind, ta, i[0], v, w)


def execute(kind, steps, i, w, rows, values, lib=TensorArray, max_size=MAX_SIZE, wrapped=False):
    """All that came out of the steps, and all versions at the end."""
    tas, outs = [start(kind, lib, rows, max_size)], []
    hand = jnp.zeros(2)
    for k, step in enumerate(steps):
        f = step_of(kind, step.method)
        ta, out = (step.wrap(f) if wrapped else f)(tas[step.version], i[k], jnp.sin(values[k] + hand), w[k])
        if step.method in ("read", "getitem", "pop"):
            hand = hand + (out["a"] if kind.pytree else out)
        tas.append(ta)
        outs.append(out)
    return outs, [(ta.stack(), jnp.asarray(ta.size())) for ta in tas]


def arguments(seed):
    rng = np.random.default_rng(1000 + seed)
    return rng.normal(size=(BATCH, SIZE, 2)), rng.normal(size=(BATCH, LENGTH, 2))


def numbers(steps):
    return np.stack([s.index for s in steps], 1), np.stack([s.where for s in steps], 1)


def by_model(seed, k, max_size=MAX_SIZE):
    kind, steps = random_program(seed)
    index, where = at(k, numbers(steps))
    return functools.partial(execute, kind, steps, index, where, lib=ListArray, max_size=max_size)


@pytest.mark.parametrize("seed", range(0, 100, 16))
def test_random_program_outside_of_jit(seed):
    kind, steps = random_program(seed)
    index, where = at(0, numbers(steps))
    rows, values = (jnp.asarray(x[0]) for x in arguments(seed))
    for max_size in (MAX_SIZE, None) if kind.dynamic else (None,):
        found = execute(kind, steps, index, where.tolist(), rows, values, max_size=max_size)
        assert_close(found, by_model(seed, 0, max_size)(rows, values), rtol=1e-12)


def values_and_gradient(f, *args):
    def scalar(*args):
        values = f(*args)
        return scalar_of(values), values

    gradient, values = jax.grad(scalar, (0, 1), has_aux=True)(*args)
    return values, gradient


@pytest.mark.parametrize("seeds", [range(k, k + 5) for k in range(0, 60, 5)], ids=lambda s: f"{s[0]}-{s[-1]}")
def test_random_programs_and_their_gradients(seeds):
    programs = {seed: random_program(seed) for seed in seeds}

    @jit
    def everything(traced, args):
        found = {}
        for seed, (kind, steps) in programs.items():
            f = functools.partial(execute, kind, steps, *traced[seed], wrapped=True)
            found[seed] = values_and_gradient(f, *args[seed])
        return found

    @in_numpy
    def everything_by_model(args):
        return {seed: values_and_gradient(by_model(seed, 0), *args[seed]) for seed in seeds}

    args = {seed: at(0, arguments(seed)) for seed in seeds}
    found = everything({seed: at(0, numbers(steps)) for seed, (_, steps) in programs.items()}, args)
    assert_close(found, everything_by_model(args), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("seed", range(0, 100, 16))
def test_random_program_batched_and_differentiated_twice(seed):
    kind, steps = random_program(seed)
    args = arguments(seed)

    @jit
    def everything(i, w, *args):
        def value(i, w, *args):
            return scalar_of(execute(kind, steps, i, w, *args, wrapped=True))

        def second(i, w, *args):
            return jax.jvp(jax.grad(functools.partial(value, i, w), (0, 1)), args, args)

        def summed(*args):
            return jax.vmap(value)(i, w, *args).sum()

        values = jax.vmap(functools.partial(execute, kind, steps))(i, w, *args)
        return values, jax.vmap(second)(i, w, *args), jax.grad(summed, (0, 1))(*args)

    values, (gradient, second), of_sum = everything(*numbers(steps), *args)
    for k in range(BATCH):

        @in_numpy
        def model(*mine, k=k):
            f = by_model(seed, k)
            gradient = jax.grad(lambda *mine: scalar_of(f(*mine)), (0, 1))
            return f(*mine), jax.jvp(gradient, mine, mine)

        wanted, derived = model(*at(k, args))
        assert_close(at(k, values), wanted, rtol=1e-12)
        assert_close(at(k, (gradient, second)), derived, rtol=1e-9, atol=1e-9)
        assert_close(at(k, of_sum), derived[0], rtol=1e-9, atol=1e-9)
