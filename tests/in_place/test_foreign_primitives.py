"""Primitives of other libraries that are lowered by tracing a function: `in_place` repairs that, and keeps their rules.

The rules of these primitives are wrong on purpose, each by a factor of its own: that shows which rule was used.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_place import assert_no_whole_buffer_copy, compiled
from jax import export, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval, xla

from jax_tensorarray import in_place
from jax_tensorarray._hlo import text as hlo_text
from jax_tensorarray._jaxprs import jaxprs
from jax_tensorarray.doctor import explain
from jax_tensorarray.export import disabled_checks

ROWS, SIZE = 200, 16
X = np.linspace(-1, 1, ROWS * SIZE).reshape(ROWS, SIZE)


def summed(x, shift, *, stride):
    """Add rows to later ones: one read and one write of rows that nothing orders, which XLA copies for."""

    def step(i, b):
        row = b[i // stride]
        b = b.at[i].add(0.1 * row + shift)
        return b.at[(i + 1) % len(b)].add(0.1 * row)

    return lax.fori_loop(1, len(x), step, x)


def primitive(name, function, *, multiple_results=False, platform=None, rule=mlir.lower_fun):
    """Return a primitive as libraries make them, which is `function`."""
    new = Primitive(name)
    new.multiple_results = multiple_results
    new.def_impl(functools.partial(xla.apply_primitive, new))

    def abstract_eval(*operands, **params):
        outs = jax.make_jaxpr(functools.partial(function, **params))(*operands).out_avals
        return outs if multiple_results else outs[0]

    new.def_abstract_eval(abstract_eval)
    mlir.register_lowering(new, rule(function, multiple_results=multiple_results), platform=platform)
    return new


# --- one result, linear in the first operand --------------------------------------------------------------------

sum_p = primitive("rows_summed", summed)
back_p = primitive("rows_summed_back", lambda x, *, stride: summed(x, 0.0, stride=stride)[::-1])


def _jvp(primals, tangents, **params):
    (x, shift), (x_dot, shift_dot) = primals, tangents
    out = sum_p.bind(x, shift, **params)
    if type(x_dot) is ad.Zero:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    dot = 3 * sum_p.bind(x_dot, jnp.zeros_like(shift), **params)
    return out, dot if type(shift_dot) is ad.Zero else dot + 5 * shift_dot


def _transpose(ct, x, shift, **params):
    return [7 * back_p.bind(ct, **params), None]


def _batch(operands, dims, **params):
    (x, shift), (of_x, of_shift) = operands, dims
    size = x.shape[of_x] if of_x is not None else shift.shape[of_shift]
    x = jnp.broadcast_to(x, (size, *x.shape)) if of_x is None else jnp.moveaxis(x, of_x, 0)
    shift = shift if of_shift is not None else jnp.full(size, shift)
    outs = [sum_p.bind(*one, **params) for one in zip(x, shift, strict=True)]
    return 11 * jnp.stack(outs, axis=1), 1


ad.primitive_jvps[sum_p], ad.primitive_transposes[sum_p] = _jvp, _transpose
batching.primitive_batchers[sum_p] = _batch
ad.deflinear2(back_p, lambda ct, x, **params: [13 * sum_p.bind(ct, jnp.zeros((), ct.dtype), **params)])
batching.primitive_batchers[back_p] = lambda operands, dims, **params: (
    17 * jnp.stack([back_p.bind(x, **params) for x in jnp.moveaxis(operands[0], dims[0], 0)]),
    0,
)


def of_one(x, shift=0.25):
    return jnp.sin(sum_p.bind(2 * x, jnp.asarray(shift, x.dtype), stride=2))


def loss(x, shift=0.25):
    return jnp.sum(of_one(x, shift) * jnp.cos(x))


MANY = np.stack([X, X[::-1], 2 * X])
SHIFTS = np.array([0.1, 0.2, 0.3])
ORDERS = {
    "forward": (lambda by: by(of_one), (X,)),
    "jvp": (lambda by: lambda x, s: jax.jvp(by(of_one), (x, s), (x[::-1], s)), (X, 0.5)),
    "jvp inside": (lambda by: by(lambda x, s: jax.jvp(of_one, (x, s), (x[::-1], s))), (X, 0.5)),
    "jvp of one": (lambda by: lambda x: jax.jvp(lambda s: by(of_one)(x, s), (0.5,), (1.0,)), (X,)),
    "grad": (lambda by: jax.grad(by(loss)), (X,)),
    "grad inside": (lambda by: by(jax.grad(loss)), (X,)),
    "vmap": (lambda by: jax.vmap(by(of_one)), (MANY, SHIFTS)),
    "vmap inside": (lambda by: by(jax.vmap(of_one)), (MANY, SHIFTS)),
    "vmap of shifts": (lambda by: jax.vmap(by(of_one), (None, 0)), (X, SHIFTS)),
    "vmap of grad": (lambda by: jax.vmap(jax.grad(by(loss))), (MANY, SHIFTS)),
    "grad of vmap": (lambda by: jax.grad(lambda x, s: jnp.sum(jax.vmap(by(loss))(x, s))), (MANY, SHIFTS)),
    "grad of grad": (lambda by: jax.grad(lambda x: jnp.sum(jnp.sin(jax.grad(by(loss))(x)))), (X,)),
    "twice": (lambda by: by(by(of_one)), (X,)),
    "checkpoint": (lambda by: jax.grad(jax.checkpoint(by(loss))), (X,)),
    "checkpoint inside": (lambda by: by(jax.grad(jax.checkpoint(loss))), (X,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_the_rules_of_the_library_are_used_in_every_order(order):
    make, args = ORDERS[order]
    plain, program = (compiled(make(by), *args) for by in (lambda f: f, in_place))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-11), program(*args), plain(*args))
    assert hlo_text.copies_in_loops(plain.as_text(), X.nbytes)
    assert_no_whole_buffer_copy(program, X)


# --- several results --------------------------------------------------------------------------------------------


def walked(x, y, *, table):
    """Return a buffer, the numbers of its rows, and one that has nothing to do with the first operand."""

    def step(i, c):
        b, numbers = c
        return b.at[i].add(jnp.sin(b[(i * table[0]) % len(b)])), numbers.at[i].set(i)

    b, numbers = lax.fori_loop(1, len(x), step, (x, jnp.zeros(len(x), jnp.int32)))
    return b, numbers, 2 * y


walk_p = primitive("walked", walked, multiple_results=True)


def _walk_jvp(primals, tangents, **params):
    outs = walk_p.bind(*primals, **params)
    dot, other = tangents
    zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in outs]
    if type(dot) is not ad.Zero:
        zeros[0] = jax.jvp(lambda x: walked(x, primals[1], **params)[0], primals[:1], (dot,))[1]
    if type(other) is not ad.Zero:
        zeros[2] = 5 * other
    return outs, zeros


ad.primitive_jvps[walk_p] = _walk_jvp


def _walk_batch(axis, operands, dims, **params):
    def moved(x, dim):
        return jnp.broadcast_to(x, (axis.size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)

    xs, ys = map(moved, operands, dims)
    outs = jax.vmap(functools.partial(walked, **params), out_axes=(1, None, 0))(xs, ys)
    return outs, [1, None, 0]


batching.fancy_primitive_batchers[walk_p] = _walk_batch


@pytest.mark.slow
def test_several_results_with_derivatives_or_without():
    def f(x, y):
        b, numbers, other = walk_p.bind(x, y, table=(3,))
        return jnp.sum(b**2) + jnp.sum(numbers) * jnp.sum(other)

    y = np.arange(4.0)
    for make, args in (
        (lambda by: by(f), (X, y)),
        (lambda by: jax.value_and_grad(by(f), (0, 1)), (X, y)),
        (lambda by: by(jax.value_and_grad(f, (0, 1))), (X, y)),
        (lambda by: jax.grad(by(f), 1), (X, y)),
        (lambda by: jax.vmap(by(f), (0, None)), (MANY, y)),
        (lambda by: jax.vmap(jax.grad(by(f), 1), (None, 0)), (X, np.stack([y, 2 * y]))),
        (lambda by: lambda x, y: jax.jvp(by(f), (x, y), (x, y)), (X, y)),
    ):
        want, program = jax.jit(make(lambda f: f))(*args), compiled(make(in_place), *args)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-11), program(*args), want)
        assert_no_whole_buffer_copy(program, X)


def test_what_depends_on_no_tangent_has_none():
    """A tangent of zeros would be work, and would ask rules that say they have no derivative."""

    @jax.custom_jvp
    def undifferentiated(x):
        return x

    @undifferentiated.defjvp
    def _(primals, tangents):
        raise AssertionError

    def f(x, y):
        b, _, other = walk_p.bind(x, y, table=(3,))
        return jnp.sum(undifferentiated(b)) + jnp.sum(other)

    y = np.arange(4.0)
    assert np.all(jax.grad(in_place(f), 1)(X, y) == 5)


# --- inside of loops, and stored --------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_in_a_loop():
    def f(x):
        def step(b, k):
            row = sum_p.bind(b * 0.5, jnp.asarray(0.1, b.dtype), stride=2)[k]
            return b.at[k].set(row), row[0]

        return lax.scan(step, x, jnp.arange(5))

    for make, args in (
        (lambda by: by(f), (X,)),
        (lambda by: jax.grad(lambda x: jnp.sum(by(f)(x)[0])), (X,)),
        (lambda by: by(jax.grad(lambda x: jnp.sum(f(x)[0]))), (X,)),
        (lambda by: by(jax.jacfwd(lambda s: f(s * X)[1])), (0.5,)),
    ):
        want = jax.jit(make(lambda f: f))(*args)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-11), jax.jit(make(in_place))(*args), want)


def test_one_that_is_stored():
    stored = export.export(jax.jit(in_place(of_one)), disabled_checks=disabled_checks())(X).serialize()
    np.testing.assert_allclose(export.deserialize(bytearray(stored)).call(X), of_one(X), rtol=1e-11)


# --- what stays as it is ----------------------------------------------------------------------------------------


def kept(function, *args):
    """Return whether the primitives of a function are those of the library under `in_place`."""
    found = []
    jaxprs.any_equation(jax.make_jaxpr(in_place(function))(*args), lambda eqn: found.append(eqn.primitive))
    (mine,) = [p for p in found if p.name.startswith("rows_")]
    return mine in (sum_p, back_p, *OTHERS)


OTHERS = []


def other(name, *args, **options):
    OTHERS.append(primitive(f"rows_{name}", lambda x: summed(x, 0.0, stride=2), *args, **options))
    return OTHERS[-1]


@pytest.mark.slow
def test_one_that_is_lowered_for_each_platform_in_its_own_way():
    here, elsewhere = other("here", platform="cpu"), other("elsewhere", platform="tpu")
    mlir.register_lowering(here, mlir.lower_fun(lambda x: (x + 1,)))
    mlir.register_lowering(elsewhere, mlir.lower_fun(lambda x: (summed(x, 1.0, stride=2),)))
    for p in (here, elsewhere):
        assert not kept(p.bind, X)
        np.testing.assert_allclose(jax.jit(in_place(p.bind))(X), jax.jit(p.bind)(X), rtol=1e-12)
        assert_no_whole_buffer_copy(compiled(in_place(p.bind), X), X)
        how = {"platforms": ["cpu", "tpu"], "disabled_checks": disabled_checks()}
        exported = [export.export(jax.jit(f), **how)(X) for f in (in_place(p.bind), lambda x, p=p: p.bind(x))]
        np.testing.assert_allclose(*(x.call(X) for x in exported), rtol=1e-12)


def by_hand(function, multiple_results):
    rule = mlir.lower_fun(function, multiple_results=multiple_results)
    return lambda ctx, *operands, **params: rule(ctx, *operands, **params)


def test_primitives_that_are_lowered_by_hand_stay():
    one = other("by_hand", rule=by_hand)
    assert kept(one.bind, X)
    mlir.register_lowering(one, mlir.lower_fun(lambda x: (summed(x, 0.0, stride=2),)), platform="tpu")
    assert kept(one.bind, X)
    np.testing.assert_allclose(in_place(one.bind)(X), jax.jit(one.bind)(X))


def test_primitives_with_rules_that_are_not_known_stay():
    one = other("eliminated")
    assert not kept(one.bind, X)
    partial_eval.dce_rules[one] = lambda used, eqn: ([True], eqn)
    assert kept(one.bind, X)


def test_primitives_whose_function_cannot_be_traced_or_gives_something_else_stay():
    def raises(x):
        raise NotImplementedError

    for function in (raises, lambda x: (summed(x, 0.0, stride=2)[1:],)):
        one = other("wrong")
        mlir.register_lowering(one, mlir.lower_fun(function))
        assert kept(one.bind, X)


def test_one_without_rules_raises_what_jax_raises():
    one = other("bare")

    def messages(f):
        for g in (jax.grad(lambda x: jnp.sum(f(x))), lambda x: jax.vmap(f)(x[None])):
            with pytest.raises(NotImplementedError) as error:
                g(X)
            yield str(error.value)

    assert list(messages(in_place(one.bind))) == list(messages(one.bind))
    ad.primitive_jvps[one] = lambda primals, tangents: (one.bind(*primals), one.bind(*tangents))
    assert np.array_equal(*(jax.jvp(f, (X,), (X,))[1] for f in (in_place(one.bind), jax.jit(one.bind))))


def test_explain_looks_inside():
    text = str(explain(lambda x: sum_p.bind(x, 0.5, stride=2))(X))
    assert "ta_read" in text and "foreign-primitive" not in text
