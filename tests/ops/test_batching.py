"""`jax.vmap` over every combination of in_axes, against a Python loop over the examples."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.extend.core import jaxprs_in_params

import jax_tensorarray as ta

OPERANDS = {
    "ta_read": ("buffer", "index", "where"),
    "ta_write": ("buffer", "index", "value", "where"),
    "ta_add": ("buffer", "index", "value", "where"),
    "ta_swap": ("buffer", "index", "value", "where"),
    "ta_stack": ("buffer", "size"),
}
ROW_OPS = ["ta_read", "ta_write", "ta_add", "ta_swap"]
SHAPES = {"buffer": (4, 2), "index": (3,), "value": (3, 2), "where": (3,), "size": ()}
BATCH = 3


def call(lib, op, *operands, mode="drop"):
    """The results of one op as a tuple; of a row op, the last operand is `where`."""
    if op == "ta_stack":
        return (lib.ta_stack(*operands),)
    results = getattr(lib, op)(*operands[:-1], where=operands[-1], mode=mode)
    return results if isinstance(results, tuple) else (results,)


def operand(name, rng, in_axes=(None,)):
    """A random operand with a batch axis for every vmap, innermost last. Indices may be out of range."""
    shape = SHAPES[name]
    for axis in reversed(in_axes):
        if axis is not None:
            shape = np.insert(np.array(shape, int), axis if axis >= 0 else len(shape) + 1 + axis, BATCH)
    shape = tuple(map(int, shape))
    if name in ("index", "size"):
        return rng.integers(-1, 5, shape)
    return rng.random(shape) < 0.7 if name == "where" else rng.normal(size=shape)


def loop(f, in_axes):
    """What `jax.vmap(f, in_axes)` means, in NumPy."""

    def mapped(*operands):
        outs = []
        for k in range(BATCH):
            outs.append(f(*(x if a is None else np.take(x, k, a) for x, a in zip(operands, in_axes, strict=True))))
        return tuple(np.stack(out) for out in zip(*outs, strict=True))

    return mapped


def combinations(op, axes=(None, 0, -1)):
    """All in_axes of the op, but for those that map nothing; a scalar has no axis -1 beside 0."""
    return [c for c in itertools.product(axes, repeat=len(OPERANDS[op])) if any(a is not None for a in c)]


def assert_all_same(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        oracle.assert_same_bits(a, e)


def axes_id(in_axes):
    return ",".join("-" if a is None else str(a) for a in in_axes)


@pytest.mark.parametrize(
    ("op", "in_axes"),
    [(op, c) for op in OPERANDS for c in combinations(op)],
    ids=lambda x: x if isinstance(x, str) else axes_id(x),
)
def test_every_combination_of_axes(op, in_axes):
    rng = np.random.default_rng(0)
    operands = [operand(name, rng, (axis,)) for name, axis in zip(OPERANDS[op], in_axes, strict=True)]
    found = jax.vmap(functools.partial(call, ta, op), in_axes)(*map(jnp.asarray, operands))
    assert_all_same(found, loop(functools.partial(call, oracle, op), in_axes)(*operands))


@pytest.mark.parametrize("op", OPERANDS)
def test_every_combination_of_mapped_operands_under_jit(op):
    rng = np.random.default_rng(1)
    cases = [
        (c, [operand(n, rng, (a,)) for n, a in zip(OPERANDS[op], c, strict=True)]) for c in combinations(op, (None, 0))
    ]

    @jax.jit
    def f(operands):
        return [jax.vmap(functools.partial(call, ta, op), c)(*xs) for (c, _), xs in zip(cases, operands, strict=True)]

    found = f([[jnp.asarray(x) for x in operands] for _, operands in cases])
    for out, (in_axes, operands) in zip(found, cases, strict=True):
        assert_all_same(out, loop(functools.partial(call, oracle, op), in_axes)(*operands))


def nested_combinations(op):
    """Pairs of in_axes of an outer and an inner vmap: all of them for one op of each batching rule, else some."""
    outer = combinations(op, (None, 0))
    if op in ("ta_read", "ta_write", "ta_stack"):
        return [(a, b) for a in outer for b in outer]
    return [(a, outer[(7 * k + 3) % len(outer)]) for k, a in enumerate(outer)]


@pytest.mark.parametrize(
    ("op", "outer"),
    [(op, c) for op in OPERANDS for c in combinations(op, (None, 0))],
    ids=lambda x: x if isinstance(x, str) else axes_id(x),
)
def test_nested_vmaps(op, outer):
    rng = np.random.default_rng(2)
    inners = [inner for o, inner in nested_combinations(op) if o == outer]
    for inner in inners:
        # Alternate the ends at which an axis is mapped.
        inner = tuple(a if a is None else (0, -1)[k % 2] for k, a in enumerate(inner))
        operands = [operand(name, rng, (o, i)) for name, o, i in zip(OPERANDS[op], outer, inner, strict=True)]
        f = functools.partial(call, ta, op)
        found = jax.vmap(jax.vmap(f, inner), outer)(*map(jnp.asarray, operands))
        assert_all_same(found, loop(loop(functools.partial(call, oracle, op), inner), outer)(*operands))


@pytest.mark.parametrize("op", ROW_OPS)
def test_three_nested_vmaps(op):
    rng = np.random.default_rng(3)
    axes = [(0, None, 0, None), (None, -1, 0, -1), (-1, 0, None, None)]
    if op == "ta_read":
        axes = [(a[0], a[1], a[3]) for a in axes]
    operands = [operand(name, rng, levels) for name, *levels in zip(OPERANDS[op], *axes, strict=True)]
    found, expected = functools.partial(call, ta, op), functools.partial(call, oracle, op)
    for in_axes in reversed(axes):
        found, expected = jax.vmap(found, in_axes), loop(expected, in_axes)
    assert_all_same(found(*map(jnp.asarray, operands)), expected(*operands))


@pytest.mark.parametrize("out_axes", [1, -1])
def test_results_go_where_out_axes_says(out_axes):
    rng = np.random.default_rng(4)
    buffer, index = operand("buffer", rng), operand("index", rng, (0,))
    found = jax.vmap(lambda i: ta.ta_read(buffer, i), out_axes=out_axes)(jnp.asarray(index))
    oracle.assert_same_bits(found, np.moveaxis(oracle.ta_read(buffer, index), 0, out_axes))


def test_a_batch_of_no_examples():
    buffer, index = jnp.zeros((0, 4, 2)), jnp.zeros((0, 3), int)
    assert jax.vmap(ta.ta_read)(buffer, index).shape == (0, 3, 2)
    assert jax.vmap(lambda b, i: ta.ta_write(b, i, 1.0))(buffer, index).shape == (0, 4, 2)
    assert jax.vmap(lambda i: ta.ta_read(buffer.reshape(0, 2), i, mode="drop"))(index).shape == (0, 3, 2)


@pytest.mark.parametrize("op", ROW_OPS)
def test_vmap_without_where(op):
    rng = np.random.default_rng(5)
    names = [n for n in OPERANDS[op] if n != "where"]
    for in_axes in combinations(op, (None, 0)):
        if in_axes[-1] is not None or not any(a is not None for a in in_axes[:-1]):
            continue
        operands = [operand(n, rng, (a,)) for n, a in zip(names, in_axes[:-1], strict=True)]
        found = jax.vmap(lambda *xs: call(ta, op, *xs, None), in_axes[:-1])(*map(jnp.asarray, operands))
        assert_all_same(found, loop(lambda *xs: call(oracle, op, *xs, None), in_axes[:-1])(*operands))


# --- loops -----------------------------------------------------------------------------------------------------


def test_a_vmapped_scan_writes_every_example():
    rng = np.random.default_rng(6)
    buffers, index, value = (
        rng.normal(size=(BATCH, 4, 2)),
        rng.integers(0, 4, (BATCH, 5)),
        rng.normal(size=(BATCH, 5, 2)),
    )

    def f(buffer, index, value):
        return jax.lax.scan(lambda b, x: ta.ta_swap(b, x[0], x[1]), buffer, (index, value))

    found = jax.jit(jax.vmap(f))(buffers, index, value)
    for k in range(BATCH):
        for a, e in zip(found, oracle.ta_swap(buffers[k], index[k], value[k]), strict=True):
            oracle.assert_same_bits(a[k], e)


def test_a_vmapped_while_loop_stops_every_example_at_its_own_time():
    counts = np.array([2, 0, 4])

    def f(count):
        def step(carry):
            k, buffer = carry
            return k + 1, ta.ta_write(buffer, k, k + 1.0)  # past its end for an example that has finished

        return jax.lax.while_loop(lambda c: c[0] < count, step, (0, jnp.zeros(4)))[1]

    found = jax.jit(jax.vmap(f))(jnp.asarray(counts))
    np.testing.assert_array_equal(found, [[1, 2, 0, 0], [0, 0, 0, 0], [1, 2, 3, 4]])


def test_a_vmapped_cond_writes_only_in_the_branch_each_example_takes():
    def f(taken, index):
        return jax.lax.cond(taken, lambda b: ta.ta_write(b, index, 1.0), lambda b: ta.ta_add(b, 0, 2.0), jnp.zeros(3))

    found = jax.jit(jax.vmap(f))(jnp.array([True, False, True]), jnp.array([1, 9, 2]))
    np.testing.assert_array_equal(found, [[0, 1, 0], [2, 0, 0], [0, 0, 1]])


# --- derivatives -----------------------------------------------------------------------------------------------


DIFFERENTIABLE = {"ta_read": (0,), "ta_write": (0, 2), "ta_add": (0, 2), "ta_swap": (0, 2), "ta_stack": (0,)}


def loss(lib, xp, op, *operands):
    """A nonlinear scalar of one example."""
    outs = call(lib, op, *(xp.sin(x) if k in DIFFERENTIABLE[op] else x for k, x in enumerate(operands)))
    total = sum((xp.asarray(np.cos(np.arange(o.size))).reshape(o.shape) * o * o).sum() for o in outs)
    return total + 0.25 * total**2


@pytest.mark.parametrize("op", OPERANDS)
def test_grad_of_vmap_and_vmap_of_grad_for_every_combination(op):
    rng = np.random.default_rng(7)
    places = DIFFERENTIABLE[op]
    f = functools.partial(loss, ta, jnp, op)
    cases = [
        (c, [operand(n, rng, (a,)) for n, a in zip(OPERANDS[op], c, strict=True)]) for c in combinations(op, (None, 0))
    ]
    weights = rng.normal(size=BATCH)

    def grad_of_vmap(in_axes, operands):
        return jax.grad(lambda *xs: (weights * jax.vmap(f, in_axes)(*xs)).sum(), argnums=places)(*operands)

    def vmap_of_grad(in_axes, operands):
        return jax.vmap(jax.grad(f, argnums=places), in_axes)(*operands)

    @jax.jit
    def derivatives(operands):
        return [(grad_of_vmap(c, xs), vmap_of_grad(c, xs)) for (c, _), xs in zip(cases, operands, strict=True)]

    found = derivatives([[jnp.asarray(x) for x in operands] for _, operands in cases])
    for (of_sum, of_each), (in_axes, operands) in zip(found, cases, strict=True):

        def by_oracle(*xs, operands=operands):
            full = list(operands)
            for k, x in zip(places, xs, strict=True):
                full[k] = x
            return full

        def one(*xs):
            return (loss(oracle, np, op, *xs),)

        def summed(*xs, in_axes=in_axes, by_oracle=by_oracle):
            return float((weights * loop(one, in_axes)(*by_oracle(*xs))[0]).sum())

        expected = oracle.gradient(summed, [operands[k] for k in places])
        for a, e in zip(of_sum, expected, strict=True):
            np.testing.assert_allclose(a, e, rtol=1e-6, atol=1e-7, err_msg=f"grad of vmap, {in_axes}")
        for example in range(BATCH):
            mine = [x if a is None else np.take(x, example, a) for x, a in zip(operands, in_axes, strict=True)]

            def single(*xs, mine=mine):
                full = list(mine)
                for k, x in zip(places, xs, strict=True):
                    full[k] = x
                return loss(oracle, np, op, *full)

            for a, e in zip(of_each, oracle.gradient(single, [mine[k] for k in places]), strict=True):
                np.testing.assert_allclose(a[example], e, rtol=1e-6, atol=1e-7, err_msg=f"vmap of grad, {in_axes}")


@pytest.mark.parametrize("op", OPERANDS)
def test_jacobians_of_both_modes_are_those_of_finite_differences(op):
    rng = np.random.default_rng(8)
    operands = [operand(n, rng) for n in OPERANDS[op]]
    places = DIFFERENTIABLE[op]

    def f(lib, xp, *xs):
        full = list(map(xp.asarray, operands))
        for k, x in zip(places, xs, strict=True):
            full[k] = xp.sin(x)
        return xp.concatenate([out.reshape(-1) for out in call(lib, op, *full)])

    args = [operands[k] for k in places]
    ours = functools.partial(f, ta, jnp)
    found = jax.jit(lambda *xs: [j(ours, argnums=tuple(range(len(xs))))(*xs) for j in (jax.jacfwd, jax.jacrev)])(*args)
    length = f(oracle, np, *args).size
    for row in range(length):
        expected = oracle.gradient(lambda *xs, row=row: f(oracle, np, *xs)[row], args)
        for jacobian in found:
            for a, e in zip(jacobian, expected, strict=True):
                np.testing.assert_allclose(a[row], e, rtol=1e-6, atol=1e-8)


def test_hessians_of_both_modes_agree_with_finite_differences_under_vmap():
    rng = np.random.default_rng(9)
    buffers, index = rng.normal(size=(2, 3)), np.array([[2, 0, 2], [1, 1, 5]])

    def f(lib, xp, buffer, index):
        swapped, old = lib.ta_swap(xp.sin(buffer), index, buffer * buffer, mode="drop")
        return (xp.sin(swapped) * swapped).sum() + (old**3).sum()

    ours = functools.partial(f, ta, jnp)
    found = jax.jit(
        lambda b, i: [
            jax.vmap(h)(b, i)
            for h in (
                jax.jacfwd(jax.jacrev(ours)),
                jax.jacrev(jax.jacfwd(ours)),
                jax.jacrev(jax.jacrev(ours)),
                jax.jacfwd(jax.jacfwd(ours)),
            )
        ]
    )(buffers, index)
    unit = np.eye(3)
    for hessian in found:
        for k, m, n in itertools.product(range(2), range(3), range(3)):
            expected = oracle.derivative(
                lambda b, k=k: f(oracle, np, b, index[k]), [buffers[k]], [[unit[m]], [unit[n]]]
            )
            np.testing.assert_allclose(hessian[k, m, n], expected, rtol=1e-5, atol=1e-6)


# --- a shared buffer is not broadcast --------------------------------------------------------------------------


def shapes_in(jaxpr):
    """Shapes of all results, in nested jaxprs too."""
    for eqn in jaxpr.eqns:
        yield from (v.aval.shape for v in eqn.outvars)
        for inner in jaxprs_in_params(eqn.params):
            yield from shapes_in(inner)


LENGTH, WIDTH = 11, 7


def whole_buffers(f, *operands):
    """Shapes of those results of `f` that hold more than one buffer of LENGTH rows of WIDTH."""
    closed = jax.make_jaxpr(f)(*operands)
    return [
        s for s in shapes_in(closed.jaxpr) if (s[-2:] == (LENGTH, WIDTH) and len(s) > 2) or np.prod(s) > LENGTH * WIDTH
    ]


@pytest.mark.parametrize(
    "in_axes", [(None, 0, None), (None, 0, 0), (None, 1, 0), (None, -1, -1), (None, None, 0)], ids=axes_id
)
def test_a_gather_from_a_shared_buffer_is_no_broadcast(in_axes):
    buffer = jnp.arange(float(LENGTH * WIDTH)).reshape(LENGTH, WIDTH)
    rng = np.random.default_rng(10)
    index, where = (operand(n, rng, (a,)) for n, a in zip(("index", "where"), in_axes[1:], strict=True))

    def f(buffer, index, where):
        return jax.vmap(lambda b, i, w: ta.ta_read(b, i, where=w, mode="drop"), in_axes)(buffer, index, where)

    operands = buffer, jnp.asarray(index), jnp.asarray(where)
    assert not whole_buffers(f, *operands)
    assert not whole_buffers(lambda b, *rest: jax.jvp(lambda b: f(b, *rest), (b,), (b,)), *operands)
    assert not whole_buffers(jax.grad(lambda *xs: jnp.sin(f(*xs)).sum()), *operands)


def test_a_gather_from_a_shared_buffer_under_two_vmaps_is_no_broadcast():
    buffer = jnp.arange(float(LENGTH * WIDTH)).reshape(LENGTH, WIDTH)
    index = jnp.array([[0, 3], [10, 5], [3, 3]])

    def f(buffer, index):
        return jax.vmap(jax.vmap(lambda i: ta.ta_read(buffer, i)))(index)

    assert not whole_buffers(f, buffer, index)
    assert not whole_buffers(jax.grad(lambda b, i: jnp.sin(f(b, i)).sum()), buffer, index)
    oracle.assert_same_bits(f(buffer, index), oracle.ta_read(buffer, index))


def test_a_gather_in_a_vmapped_scan_is_no_broadcast():
    buffer = jnp.arange(float(LENGTH * WIDTH)).reshape(LENGTH, WIDTH)
    index = jnp.array([[0, 3], [10, 5], [3, 3]])

    def f(buffer, index):
        def one(i):
            return jax.lax.scan(lambda total, k: (total + ta.ta_read(buffer, k), None), jnp.zeros(WIDTH), i)[0]

        return jax.vmap(one)(index)

    assert not whole_buffers(f, buffer, index)
    assert not whole_buffers(jax.grad(lambda b, i: jnp.sin(f(b, i)).sum()), buffer, index)
    np.testing.assert_allclose(f(buffer, index), oracle.ta_read(buffer, index).sum(1), rtol=1e-15)


def test_batched_buffers_that_share_an_inner_vmap_are_not_broadcast_again():
    buffers = jnp.arange(float(2 * LENGTH * WIDTH)).reshape(2, LENGTH, WIDTH)
    index = jnp.array([[[0], [3], [10]], [[5], [1], [1]]])

    def f(buffers, index):
        return jax.vmap(lambda b, i: jax.vmap(lambda j: ta.ta_read(b, j))(i))(buffers, index)

    shapes = list(shapes_in(jax.make_jaxpr(f)(buffers, index).jaxpr))
    assert shapes
    assert all(np.prod(s) < 3 * LENGTH * WIDTH for s in shapes)
    oracle.assert_same_bits(
        f(buffers, index), np.stack([oracle.ta_read(b, i) for b, i in zip(buffers, index, strict=True)])
    )
