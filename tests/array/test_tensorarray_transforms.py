"""Every method of TensorArray under every transformation, against a Python list of rows."""

import functools
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_numpy import in_numpy
from jax import jit, lax
from list_model import ListArray

from jax_tensorarray import TensorArray, checkpoint_policies

pytestmark = pytest.mark.slow

STEPS, SIZE, MAX_SIZE, BATCH = 3, 4, 8, 3

_rng = np.random.default_rng(0)
#: One example for each k of the first axis: the rows at the start, and the values that the steps take.
ROWS = _rng.normal(size=(BATCH, SIZE, 2))
VALUES = _rng.normal(size=(BATCH, STEPS, 2))
DIRECTION = [_rng.normal(size=a.shape) for a in (ROWS, VALUES)]
WHERE = np.array([[True, False, True], [False, False, True], [True, True, True]])
READS = np.array([[2, 0, 2], [1, 1, 3], [3, 2, 0]])  # of rows that are there from the start
WRITES = {False: np.array([[1, 3, 1], [0, 2, 3], [2, 2, 2]]), True: np.array([[5, 6, 6], [4, 5, 0], [7, 2, 7]])}


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
    return {"a": x[..., None] * jnp.array([1.0, -2.0, 0.5], x.dtype), "b": [(x > 0).astype(jnp.int32)]}


def start(kind, lib, rows):
    """The array before the first step."""
    rows, max_size = as_rows(kind, rows), MAX_SIZE if kind.dynamic else None
    if lib is ListArray:
        return ListArray.from_array(rows, max_size, kind.dynamic)
    if not kind.pytree:
        return TensorArray.from_array(rows, dynamic_size=kind.dynamic, max_size=max_size)
    row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows)
    return TensorArray.like(row, SIZE, dynamic_size=kind.dynamic, max_size=max_size).unstack(rows)


def vector(*xs):
    """Indices or predicates, known if each is."""
    known = all(isinstance(x, int | np.integer | np.bool_) for x in xs)
    return np.array(xs) if known else jnp.stack([jnp.asarray(x) for x in xs])


def varied(v, k):
    """Another row."""
    return jnp.cos(v * k)


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
    return ta, (ta.gather(vector(i, 0, i), where=vector(w, True, w)), ta.gather(vector(i, 0, i), where=w, mode="drop"))


def scatter_masked(kind, ta, i, v, w):
    ta = ta.scatter(vector(i, 0, i), three(kind, v), where=vector(w, True, False))
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
    return newer, (ta.read(0), newer.read(0), newest.read(0), ta.stack(pad=True))


#: name -> (kind, array, index, value, where) -> (array, what came out). Each is done in every step.
METHODS: dict[str, Any] = {
    "write": lambda kind, ta, i, v, w: (ta.write(i, as_rows(kind, v)), ()),
    "write_where": lambda kind, ta, i, v, w: (ta.write(i, as_rows(kind, v), where=w), ()),
    "write_drop": lambda kind, ta, i, v, w: (ta.write(i, as_rows(kind, v), mode="drop"), ()),
    "read": lambda kind, ta, i, v, w: (ta, ta.read(i)),
    "read_masked": lambda kind, ta, i, v, w: (ta, (ta.read(i, where=w), ta.read(i, mode="drop"))),
    "stack": lambda kind, ta, i, v, w: (ta.write(i, as_rows(kind, v)), (ta.stack(pad=True), ta.mask())),
    "concat": lambda kind, ta, i, v, w: (ta.write(i, as_rows(kind, v)), ta.concat(pad=True)),
    "gather": lambda kind, ta, i, v, w: (ta, ta.gather(vector(i, 0, i))),
    "gather_masked": gather_masked,
    "scatter": lambda kind, ta, i, v, w: (ta.scatter(vector(i, 0, i), three(kind, v)), ()),
    "scatter_masked": scatter_masked,
    "unstack": lambda kind, ta, i, v, w: (ta.unstack(many(kind, v)), ()),
    "split": split,
    "append": lambda kind, ta, i, v, w: (ta.append(as_rows(kind, v)), jnp.asarray(ta.size())),
    "append_where": lambda kind, ta, i, v, w: (ta.append(as_rows(kind, v), where=w), jnp.asarray(ta.size())),
    "append_drop": append_drop,
    "pop": lambda kind, ta, i, v, w: ta.pop(),
    "pop_masked": pop_masked,
    "pop_append": lambda kind, ta, i, v, w: (ta.pop()[0].append(as_rows(kind, v)), ta.pop()[1]),
    # Rows that were taken away are zeros again, and have no gradient, if a row past them is written.
    "pop_write": lambda kind, ta, i, v, w: (ta.pop()[0].pop()[0].write(i, as_rows(kind, v)), ()),
    "identity": identity,
    "old_version": old_version,
}
GROWING = ["append", "append_where", "append_drop", "pop", "pop_masked", "pop_append", "pop_write"]
READING = ["read", "read_masked", "gather", "gather_masked"]
FILLING = ["unstack", "split"]
MASKED = ["write_where", "write_drop", "read_masked", "gather_masked", "scatter_masked"]


def methods(kind):
    return [m for m in METHODS if kind.dynamic or m not in GROWING]


def indices(kind, method):
    found = READS if method in READING else WRITES[kind.dynamic]
    return np.where(WHERE, found, [99, -1, MAX_SIZE]) if method in MASKED else found


# --- loops of steps --------------------------------------------------------------------------------------------


def at(k, xs):
    return jax.tree.map(lambda x: x[k], xs)


def loop_in_python(step, ta, i, v, w):
    outs = []
    for k in range(STEPS):
        ta, out = step(ta, *at(k, (i, v, w)))
        outs.append(out)
    return ta, jax.tree.map(lambda *xs: jnp.stack(xs), *outs)


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


def while_loop(step, *operands):
    """JAX has no reverse mode of it."""
    body, carry = loop_body(step, *operands)
    start = (jnp.zeros((), jnp.int32), carry)
    return lax.while_loop(lambda c: c[0] < STEPS, lambda c: (c[0] + 1, body(*c)), start)[1]


def checkpointed_scan(step, *operands):
    return scan(jax.checkpoint(step, policy=checkpoint_policies.save_reads, prevent_cse=False), *operands)


def run(kind, loop, names, rows, values, i, w, lib=TensorArray):
    """For each method: all rows of an array of its own, padded, the number of them, and what the steps gave.

    `rows`, `values` and the indices `i` are dicts with one entry for each of them.
    """

    def step(tas, i, v, w):
        done = {m: METHODS[m](kind, tas[m], i[m], v[m], w) for m in names}
        return {m: ta for m, (ta, _) in done.items()}, {m: out for m, (_, out) in done.items()}

    tas, outs = loop(step, {m: start(kind, lib, rows[m]) for m in names}, i, values, w)
    return {m: (tas[m].stack(pad=True), jnp.asarray(tas[m].size()), outs[m]) for m in names}


def scalar_of(results):
    """A scalar whose derivatives of order one and two do not vanish."""
    flat = jnp.concatenate([x.reshape(-1) for x in jax.tree.leaves(results) if jnp.issubdtype(x.dtype, jnp.inexact)])
    total = jnp.sum(np.cos(1.0 + np.arange(flat.size)) * jnp.sin(flat))
    return total + 0.25 * total**2


def program(kind, loop, names, i, w, lib=TensorArray):
    """A function of the inputs that are differentiated: a scalar of what `run` gives, and that itself.

    The scalar is a sum over the methods, so that the derivatives by the inputs of one are its own.
    """

    def f(rows, values):
        results = run(kind, loop, names, rows, values, i, w, lib)
        return sum(map(scalar_of, results.values())), results

    return f


def product(gradient, tangents):
    leaves = zip(*map(jax.tree.leaves, (gradient, tangents)), strict=True)
    return sum(jnp.vdot(g, t).real for g, t in leaves)


def values_and_derivatives(f, order, args, tangents):
    """The results of `f`, which gives its scalar too, and {name: derivative}."""
    gradient = jax.grad(f, (0, 1), has_aux=True)
    if order == "forward over reverse":
        first, second, values = jax.jvp(gradient, args, tangents, has_aux=True)
        return values, {"gradient": first, "second": second}
    first, values = gradient(*args)
    if order == "first":
        return values, {"gradient": first}
    assert order == "reverse over reverse"
    return values, {"second": jax.grad(lambda *args: product(gradient(*args)[0], tangents), (0, 1))(*args)}


def inputs(names, k):
    """Rows and values of example `k`, the same for every method, and a direction."""
    return tuple(tuple(dict.fromkeys(names, x[k]) for x in xs) for xs in ((ROWS, VALUES), DIRECTION))


@functools.cache
def expected(kind, k):
    """Results of every method and derivatives of the loss, for example `k`: by the list of rows in plain jnp."""
    names = methods(kind)
    i, w = {m: indices(kind, m)[k] for m in names}, WHERE[k]
    f = program(kind, loop_in_python, names, i, w, ListArray)
    args, tangents = inputs(names, k)

    @in_numpy
    def everything(args):
        gradient = jax.grad(f, (0, 1), has_aux=True)
        if k or kind != KINDS["dynamic"]:  # of these only the gradient is compared
            found, values = gradient(*args)
            return values, {"gradient": found}
        found, second, values = jax.jvp(gradient, args, tangents, has_aux=True)
        return values, {"gradient": found, "second": second}

    return jax.tree.map(np.asarray, everything(args))


def expected_of(kind, names):
    """`expected` of the first example for some of the methods."""
    values, derived = expected(kind, 0)
    derived = {name: tuple({m: part[m] for m in names} for part in d) for name, d in derived.items()}
    return {m: values[m] for m in names}, derived


def assert_close(actual, wanted, rtol=1e-10, atol=1e-11, what=""):
    paths, structure = jax.tree_util.tree_flatten_with_path(wanted)
    assert jax.tree.structure(actual) == structure
    for a, (path, e) in zip(jax.tree.leaves(actual), paths, strict=True):
        where = f"{what} {jax.tree_util.keystr(path)}"
        assert (a.shape, a.dtype) == (e.shape, e.dtype), where
        if jnp.issubdtype(e.dtype, jnp.inexact):
            np.testing.assert_allclose(a, e, rtol=rtol, atol=atol, err_msg=where)
        else:
            np.testing.assert_array_equal(a, e, err_msg=where)


def of_kind(*names):
    return pytest.mark.parametrize("kind", [pytest.param(KINDS[n], id=n) for n in names or KINDS])


# --- one example -----------------------------------------------------------------------------------------------

#: A share is a third of the methods. What is in no loop is below, and so are all methods of a second derivative.
IN_LOOPS = [
    ("dynamic", scan, "forward over reverse", 0),
    ("dynamic", scan, "reverse over reverse", 1),
    ("dynamic", checkpointed_scan, "first", 2),
    ("dynamic_pytree", fori_loop, "first", 1),
    ("static", fori_loop, "first", 2),
    ("static_pytree", checkpointed_scan, "first", 0),
]


@pytest.mark.parametrize(("kind", "loop", "order", "share"), IN_LOOPS)
def test_values_and_derivatives_of_every_method(kind, loop, order, share):
    kind, names = KINDS[kind], methods(KINDS[kind])[share::3]
    args, tangents = inputs(names, 0)

    @jit
    def everything(i, w, args, tangents):
        return values_and_derivatives(program(kind, loop, names, i, w), order, args, tangents)

    values, derived = everything({m: indices(kind, m)[0] for m in names}, WHERE[0], args, tangents)
    wanted, wanted_derived = expected_of(kind, names)
    assert_close(values, wanted, what="values")
    for name, value in derived.items():
        assert_close(value, wanted_derived[name], what=name)


# --- many examples ---------------------------------------------------------------------------------------------


def test_vmap_of_a_while_loop_and_of_its_derivative():
    """With indices that differ. Gradients of batches are those of random programs."""
    kind = KINDS["dynamic"]
    names = methods(kind)
    each = [inputs(names, k) for k in range(BATCH)]
    args, tangents = jax.tree.map(lambda *xs: np.stack(xs), *each)

    def of_one(i, w, args, tangents):
        return jax.jvp(program(kind, while_loop, names, i, w), args, tangents, has_aux=True)[1:]

    found, values = jit(jax.vmap(of_one))({m: indices(kind, m) for m in names}, WHERE, args, tangents)
    for k in range(BATCH):
        wanted, derived = expected(kind, k)
        assert_close(at(k, values), wanted, what=f"example {k}")
        assert_close(found[k], product(derived["gradient"], each[k][1]), what=f"derivative, example {k}")


@pytest.mark.parametrize("branch", ["cond", "where"])
def test_examples_that_take_different_branches_have_different_sizes(branch):
    kind = KINDS["dynamic"]

    def f(rows, values, w):
        def step(ta, v, w):
            if branch == "where":
                return ta.append(v, where=w), ta.size()
            return lax.cond(w, lambda ta: (ta.append(v), ta.size()), lambda ta: (ta, ta.size()), ta)

        ta, sizes = lax.scan(lambda ta, x: step(ta, *x), start(kind, TensorArray, rows), (values, w))
        return scalar_of(ta.stack(pad=True)), (ta.stack(pad=True), sizes)

    gradient, (found, sizes) = jit(jax.vmap(jax.grad(f, (0, 1), has_aux=True)))(ROWS, VALUES, WHERE)
    np.testing.assert_array_equal(sizes, SIZE + np.cumsum(WHERE, 1) - WHERE)
    for k in range(BATCH):

        def by_model(rows, values, k=k):
            ta = start(kind, ListArray, rows)
            for v, w in zip(values, WHERE[k], strict=True):
                ta = ta.append(v, where=w)
            return scalar_of(ta.stack(pad=True)), ta.stack(pad=True)

        wanted_gradient, wanted = in_numpy(jax.grad(by_model, (0, 1), has_aux=True))(ROWS[k], VALUES[k])
        assert_close(found[k], wanted)
        assert_close(at(k, gradient), wanted_gradient)


def test_a_vmapped_while_loop_grows_every_array_to_its_own_size():
    counts = np.array([2, 0, 4])

    def f(count):
        ta = TensorArray(jnp.float64, size=0, dynamic_size=True, max_size=4, element_shape=())
        ta = lax.while_loop(lambda ta: ta.size() < count, lambda ta: ta.append(ta.size() + jnp.float64(1)), ta)
        return ta.stack(pad=True), ta.size()

    rows, sizes = jit(jax.vmap(f))(counts)
    np.testing.assert_array_equal(rows, [[1, 2, 0, 0], [0, 0, 0, 0], [1, 2, 3, 4]])
    np.testing.assert_array_equal(sizes, counts)


# --- a TensorArray as an argument ------------------------------------------------------------------------------


def use(ta):
    """A scalar of an array with pytree rows: row 1 is overwritten, so it has no gradient; row 2 counts twice."""
    new = ta.write(1, jax.tree.map(jnp.sin, ta.read(2)))
    leaves = jax.tree.leaves((new.stack(), new.read(3), new.gather([0, 0])))
    return sum(k * jnp.sum(jnp.sin(x)) for k, x in enumerate(leaves, 1))


def test_the_gradient_with_respect_to_an_array_is_an_array():
    """A step of gradient descent makes an array of it."""
    rows = {"a": ROWS, "b": (ROWS[..., :1], np.cos(ROWS).astype(np.float32))}
    wanted = [in_numpy(jax.grad(lambda rows: use(ListArray.from_array(rows))))(at(k, rows)) for k in range(BATCH)]
    ta, gradient = TensorArray.from_array(jax.tree.map(jnp.asarray, at(0, rows))), jax.grad(use)

    @jit
    def everything(ta, rows):
        of_batch = jax.vmap(lambda ta: gradient(ta).stack())(jax.vmap(TensorArray.from_array)(rows))
        return gradient(ta), of_batch

    found, of_batch = everything(ta, rows)
    assert isinstance(found, TensorArray)
    assert_close(found.stack(), wanted[0], rtol=1e-5, atol=1e-5)
    for k in range(BATCH):
        assert_close(at(k, of_batch), wanted[k], rtol=1e-5, atol=1e-5)
    moved = jax.tree.map(lambda x, g: x - 0.5 * g, ta, found)
    assert_close(moved.stack(), jax.tree.map(lambda x, g: x - 0.5 * g, at(0, rows), wanted[0]), rtol=1e-5, atol=1e-5)


def test_the_gradient_of_an_array_with_a_size_has_all_possible_rows():
    """Its size has none, and JAX is told so: otherwise it says that it was given an int32."""

    def f(ta):
        return jnp.sum(ta.append(2 * ta.read(1)).stack(pad=True) ** 2)

    ta = TensorArray.from_array(jnp.asarray(ROWS[0, :3]), dynamic_size=True, max_size=5)
    wanted = np.concatenate([2 * ROWS[0, :3], np.zeros((2, *ROWS.shape[2:]), np.float32)])
    wanted[1] += 8 * ROWS[0, 1]
    gradient = jax.grad(f, allow_int=True)
    for found in (gradient(ta), jit(gradient)(ta), jax.vjp(f, ta)[1](jnp.ones_like(f(ta)))[0]):
        np.testing.assert_allclose(found.stack(), wanted, rtol=1e-6)
        assert jax.tree.leaves(found)[1].dtype == jax.dtypes.float0
    for transform in (jax.grad, jax.value_and_grad, jax.jacrev, jax.jacfwd):
        with pytest.raises(
            TypeError, match=r"TensorArray: with max_size, the size is a leaf .* allow_int=True.* here 5"
        ):
            transform(f)(ta)
    np.testing.assert_array_equal(jax.grad(lambda x, ta: f(ta) * x)(1.0, ta), f(ta))


def test_derivatives_of_arrays_are_arrays_and_so_are_directions():
    def f(ta):
        return ta.write(0, ta.read(1) ** 2)

    ta, other = (TensorArray.from_array(jnp.asarray(x)) for x in (ROWS[0], ROWS[1]))
    value, direction = jax.jvp(f, (ta,), (other,))
    np.testing.assert_allclose(value.stack(), [ROWS[0, 1] ** 2, *ROWS[0, 1:]])
    np.testing.assert_allclose(direction.stack(), [2 * ROWS[0, 1] * ROWS[1, 1], *ROWS[1, 1:]])
    (cotangent,) = jax.vjp(f, ta)[1](other)
    row = ROWS[1, 1] + 2 * ROWS[0, 1] * ROWS[1, 0]
    np.testing.assert_allclose(cotangent.stack(), [np.zeros(2), row, *ROWS[1, 2:]])


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
        np.testing.assert_array_equal(found, expected)
        padding = np.zeros((MAX_SIZE - SIZE if kind.dynamic else 0, 2))
        np.testing.assert_array_equal(jax.vmap(lambda ta: ta.stack(pad=True))(tas)[k], [*found, *padding])


def test_an_array_is_what_scan_iterates_over():
    tas = jax.vmap(TensorArray.from_array)(jnp.asarray(ROWS))
    _, found = lax.scan(lambda c, ta: (c, ta.read(2)), None, tas)
    np.testing.assert_array_equal(found, ROWS[:, 2])


def test_everything_works_with_jit_disabled():
    kind = KINDS["dynamic"]
    names = methods(kind)[::2]
    args, _ = inputs(names, 0)
    i, w = {m: jnp.asarray(indices(kind, m)[0]) for m in names}, jnp.asarray(WHERE[0])
    with jax.disable_jit():
        _, found = program(kind, scan, names, i, w)(*jax.tree.map(jnp.asarray, args))
    assert_close(found, expected_of(kind, names)[0])


# --- random programs -------------------------------------------------------------------------------------------

LENGTH = 8


def zeros_of(step, *operands):
    out = jax.eval_shape(lambda: step(*operands)[1])
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out)


def is_true(v):
    """True, but known only at run time."""
    return v.sum() < 1e6


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


def switch(step):
    def wrapped(ta, i, v, w):
        zeros = zeros_of(step, ta, i, v, w)
        others = [lambda ta: (ta, zeros), lambda ta: (ta.write(0, ta.read(1, mode="drop")), zeros)]
        return lax.switch(1 + is_true(v), [*others, lambda ta: step(ta, i, v, w)], ta)

    return wrapped


def nested_jit(step):
    return jax.jit(lambda *outer: jax.jit(step)(*outer))


def custom_vjp(step):
    wrapped = jax.custom_vjp(step)
    wrapped.defvjp(lambda *args: (step(*args), args), lambda args, ct: jax.vjp(step, *args)[1](ct))
    return wrapped


def custom_jvp(step):
    wrapped = jax.custom_jvp(step)
    wrapped.defjvp(lambda primals, tangents: jax.jvp(step, primals, tangents))
    return wrapped


#: The places where JAX lets a program put a step; half of them have nothing around them.
WRAPS = [cond_operand, cond_closure, switch, nested_jit, jax.checkpoint, custom_vjp, custom_jvp]
WRAPS += [lambda step: step] * len(WRAPS)


class Step(NamedTuple):
    method: str
    version: int  # which of the arrays so far it is done to: the oldest may be used again
    wrap: Any
    index: np.ndarray  # [BATCH, 3]
    where: np.ndarray  # [BATCH]
    known: bool  # whether index and where are known while tracing, if there is one example only


def random_program(seed):
    """Steps that are right for BATCH examples, which have indices of their own and so sizes of their own."""
    rng = np.random.default_rng(seed)
    kind = list(KINDS.values())[rng.choice(4, p=[0.35, 0.45, 0.1, 0.1])]
    limit = MAX_SIZE if kind.dynamic else SIZE
    sizes, steps = [np.full(BATCH, SIZE)], []
    while len(steps) < LENGTH:
        method = str(rng.choice([m for m in methods(kind) if m not in ("pop_append", "pop_write", "old_version")]))
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
        steps.append(Step(method, version, WRAPS[rng.integers(len(WRAPS))], index, where, rng.random() < 0.4))
        if method in ("write", "identity", "stack", "concat"):
            size = np.maximum(size, index[:, 0] + 1)
        elif method in ("write_where", "write_drop"):
            size = np.where(where, np.maximum(size, index[:, 0] + 1), size)
        elif method == "scatter_masked":
            size = np.maximum(np.where(where, np.maximum(size, index[:, 0] + 1), size), 2)
        elif method == "scatter":
            size = np.maximum(size, index.max(1) + 1)
        elif method in FILLING:
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


def execute(kind, steps, i, w, rows, values, lib=TensorArray, wrapped=False, pad=True):
    """All that came out of the steps, and all versions at the end. `rows` may be an array already."""
    tas, outs = [rows if isinstance(rows, TensorArray) else start(kind, lib, rows)], []
    hand = jnp.zeros(2)
    for k, step in enumerate(steps):
        f = step_of(kind, step.method)
        ta, out = (step.wrap(f) if wrapped else f)(tas[step.version], i[k], jnp.sin(values[k] + hand), w[k])
        if step.method in ("read", "pop"):
            hand = hand + (out["a"][:, 0] if kind.pytree else out)
        tas.append(ta)
        outs.append(out)
    return outs, [(ta.stack(pad=pad), ta.mask(), jnp.asarray(ta.size())) for ta in tas]


def arguments(seed):
    rng = np.random.default_rng(1000 + seed)
    return rng.normal(size=(BATCH, SIZE, 2)), rng.normal(size=(BATCH, LENGTH, 2))


def numbers(steps):
    return np.stack([s.index for s in steps], 1), np.stack([s.where for s in steps], 1)


def by_model(seed, k, pad=True):
    kind, steps = random_program(seed)
    return functools.partial(execute, kind, steps, *at(k, numbers(steps)), lib=ListArray, pad=pad)


#: Together they have most methods in most places, each in arrays of either size, and much of what may follow it.
SEEDS = [120, 215, 3522, 1196, 99, 1794, 4154, 4421, 883, 694, 1903, 226, 1112, 3294, 4837, 2793]
#: These have every method and every place. The axes are those of indices, of rows and of values.
BATCHED = {1923: (0, 0, 0), 530: (0, None, None), 2683: (None, 0, None), 1460: (None, None, -1)}
if os.environ.get("HYPOTHESIS_PROFILE") == "night":
    SEEDS, BATCHED = [*range(2000)], dict.fromkeys(range(0, 2000, 5), (0, 0, 0)) | BATCHED


def values_and_gradient(f, *args):
    def scalar(*args):
        values = f(*args)
        return scalar_of(values), values

    gradient, values = jax.grad(scalar, (0, 1), has_aux=True)(*args)
    return values, gradient


@pytest.mark.parametrize("seed", SEEDS)
def test_random_program_and_its_gradient(seed):
    kind, steps = random_program(seed)

    @jit
    def everything(traced, args):
        known = [(step.index[0], step.where[0]) for step in steps]
        i, w = zip(*(known[k] if step.known else at(k, traced) for k, step in enumerate(steps)), strict=True)
        return values_and_gradient(functools.partial(execute, kind, steps, i, w, wrapped=True), *args)

    args = at(0, arguments(seed))
    found = everything(at(0, numbers(steps)), args)
    wanted = in_numpy(lambda *args: values_and_gradient(by_model(seed, 0), *args))(*args)
    assert_close(found, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("seed", BATCHED)
def test_random_program_outside_of_jit(seed):
    kind, steps = random_program(seed)
    convert = (int, np.int64, jnp.int32)[seed % 3]
    index, where = at(0, numbers(steps))
    i = [[convert(n) for n in three] for three in index]
    w = [bool(x) if convert is int else jnp.asarray(x) for x in where]
    args = jax.tree.map(jnp.asarray, at(0, arguments(seed)))
    f = functools.partial(execute, kind, steps, i, w, pad=False)
    wanted, wanted_gradient = in_numpy(lambda *args: values_and_gradient(by_model(seed, 0, pad=False), *args))(*args)
    assert_close(f(*args), wanted)
    assert_close(values_and_gradient(f, *args), (wanted, wanted_gradient))


def at_axis(x, axis):
    return x[0] if axis is None else np.moveaxis(x, 0, axis)


@pytest.mark.parametrize(("seed", "axes"), BATCHED.items())
def test_random_program_batched_and_differentiated_twice(seed, axes):
    """Where only some operands differ among the examples, and gradients by the others are summed."""
    (kind, steps), (of_index, of_rows, of_values) = random_program(seed), axes
    i, w = (at_axis(x, of_index) for x in numbers(steps))
    args = [at_axis(x, axis) for x, axis in zip(arguments(seed), axes[1:], strict=True)]

    @jit
    def everything(i, w, *args):
        def value(i, w, *args):
            results = execute(kind, steps, i, w, *args, wrapped=True)
            return scalar_of(results), results

        def second(i, w, *args):
            gradient = jax.grad(functools.partial(value, i, w), (0, 1), has_aux=True)
            return jax.jvp(gradient, args, args, has_aux=True)

        def summed(rows, values):
            """Of arrays that are arguments, so that each has a size of its own."""
            make = functools.partial(start, kind, TensorArray)
            tas = make(rows) if of_rows is None else jax.vmap(make, of_rows)(rows)
            of_arrays = None if of_rows is None else 0
            return jax.vmap(value, (of_index, of_index, of_arrays, of_values))(i, w, tas, values)[0].sum()

        return jax.vmap(second, (of_index, *axes))(i, w, *args), jax.grad(summed, (0, 1))(*args)

    (gradient, second, values), of_sum = everything(i, w, *args)
    sums = [np.zeros_like(x) for x in args]
    for k in range(BATCH):
        of_example = [0 if axis is None else k for axis in axes]

        @in_numpy
        def model(*mine, f=by_model(seed, of_example[0])):  # noqa: B008
            gradient = jax.grad(lambda *mine: scalar_of(f(*mine)), (0, 1))
            return f(*mine), jax.jvp(gradient, mine, mine)

        wanted, derived = model(*(x[n] for x, n in zip(arguments(seed), of_example[1:], strict=True)))
        assert_close(at(k, values), wanted, rtol=1e-12)
        assert_close(at(k, (gradient, second)), derived, rtol=1e-9, atol=1e-9)
        for total, axis, part in zip(sums, axes[1:], derived[0], strict=True):
            (total if axis is None else np.moveaxis(total, axis, 0)[k])[...] += part
    assert_close(list(of_sum), sums, rtol=1e-9, atol=1e-9)
