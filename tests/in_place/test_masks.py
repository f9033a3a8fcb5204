"""A select by a mask that is true for one row is a row op: `jnp.where((jnp.arange(T) == i)[:, None], row, b)`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_place import assert_in_place, assert_no_whole_buffer_copy, compiled
from jax import export, jit, lax
from jax.sharding import AxisType, PartitionSpec
from jax.test_util import check_grads
from orders import ORDERS, assert_as_in_numpy, in_turn

from jax_tensorarray import in_place
from jax_tensorarray.doctor import explain

pytestmark = pytest.mark.slow

T, D, STEPS = 160, 8, 40
places = jnp.arange(T)


def onto(x):
    """Repeat what is true of a row along it."""
    return jnp.expand_dims(x, -1)


def hot(i, dtype=bool):
    return jax.nn.one_hot(i, T, dtype=dtype)


#: name -> what a step makes of a buffer `[T, D]`, a number and a row; and which rows it writes, of those there are
WRITES = {
    "a number of a row": (lambda b, i, x: jnp.where(onto(jnp.arange(T) == i), x, b), lambda i: [i]),
    "closed-over numbers": (lambda b, i, x: jnp.where(onto(places == i), x, b), lambda i: [i]),
    "the other way round": (lambda b, i, x: jnp.where(onto(i != jnp.arange(T)), b, x), lambda i: [i]),
    "one hot": (lambda b, i, x: jnp.where(onto(hot(i)), x, b), lambda i: [i]),
    "one hot, numbers": (lambda b, i, x: jnp.where(onto(hot(i, jnp.int32)) > 0, x, b), lambda i: [i]),
    "one hot, as bools": (lambda b, i, x: jnp.where(onto(hot(i, jnp.float32).astype(bool)), x, b), lambda i: [i]),
    "iota": (
        lambda b, i, x: lax.select(lax.broadcasted_iota(i.dtype, (T, D), 0) == i, jnp.broadcast_to(x, (T, D)), b),
        lambda i: [i],
    ),
    "out of range": (lambda b, i, x: jnp.where(onto(jnp.arange(T) == 9 * i - 20), x, b), lambda i: [9 * i - 20]),
    "a small dtype": (
        lambda b, i, x: jnp.where(onto(jnp.arange(T) == (9 * i - 20).astype(jnp.int8)), x, b),
        lambda i: [int(np.array(9 * i - 20).astype(np.int8))],
    ),
    "numbers that wrap": (
        lambda b, i, x: jnp.where(onto(lax.iota(jnp.int8, T) == i.astype(jnp.int8)), x, b),
        lambda i: [i],
    ),
    "two": (
        lambda b, i, x: jnp.where(onto((places == i) | (places == i // 2 * 2)), x, b),
        lambda i: [i, i // 2 * 2],
    ),
    "all but two": (
        lambda b, i, x: jnp.where(onto(~((places == i) | (places == 9 * i))), b, x),
        lambda i: [i, 9 * i],
    ),
    "the same twice": (
        lambda b, i, x: jnp.where(onto((places == i) & (places == i // 2 * 2)), x, b),
        lambda i: [i][i % 2 :],
    ),
    "a condition": (lambda b, i, x: jnp.where(onto((places == i) & (i % 3 > 0)), x, b), lambda i: [i][: i % 3]),
    "or a condition": (lambda b, i, x: jnp.where(onto((places != i) | (i % 3 == 0)), b, x), lambda i: [i][: i % 3]),
    "rows of an array": (
        lambda b, i, x: jnp.where(onto(places == i), jnp.broadcast_to(x, b.shape) * 1.0, b),
        lambda i: [i],
    ),
    "one after the other": (
        lambda b, i, x: jnp.where(onto(places == i), x, jnp.where(onto(places == 9 * i), x, b)),
        lambda i: [i, 9 * i],
    ),
}


def filled(write, read):
    """A loop that reads a row, and writes one that is made of it."""

    def f(b, x, first):
        def step(c, x):
            b, i = c
            b = write(b, i, x + jnp.sin(read(b, i // 2)))
            return (b, i + 1), b[i // 3, 0]

        return lax.scan(step, (b, first), x)

    return f


def a_row(b, i):
    return b[i]


def in_numpy(written, b, x, first):
    b, ys = b.copy(), []
    for i, row in enumerate(x, first):
        new = row + np.sin(b[i // 2])
        for k in written(i):
            if 0 <= k < len(b):
                b[k] = new
        ys.append(b[i // 3, 0])
    return b, np.array(ys)


def arguments(length=STEPS, rows=T):
    b = np.sin(np.arange(1.0 * rows * D)).reshape(rows, D)
    return b, np.cos(np.arange(1.0 * length * D)).reshape(length, D), jnp.int32(3)


@pytest.mark.parametrize("name", WRITES)
def test_a_mask_of_one_row_writes_it(name):
    write, written = WRITES[name]
    b, x, first = arguments()
    b[-1] = np.inf, np.nan, -np.inf, -0.0, 0, 1, 2, 3  # rows that are not written stay as they are
    program = compiled(in_place(filled(write, a_row)), b, x, first)
    (found, _), ys = program(b, x, first)
    want, of_steps = in_numpy(written, b, x, int(first))
    np.testing.assert_allclose(found, want, rtol=1e-12)
    np.testing.assert_allclose(ys, of_steps, rtol=1e-12)
    assert ("ta_write" in str(jax.make_jaxpr(in_place(filled(write, a_row)))(b, x, first))) == (
        name != "numbers that wrap"
    )


@pytest.mark.parametrize("name", ["a number of a row", "one hot", "two", "a condition"])
def test_each_example_writes_a_row_of_its_own(name):
    write, written = WRITES[name]
    b, x, first = (np.stack([a, 0.5 * a, 0.2 * a]) for a in arguments())
    first = np.array([3, 7, T - 20], np.int32)  # the last one leaves the buffer: its mask is true nowhere
    (found, _), _ = jit(jax.vmap(in_place(filled(write, a_row))))(b, x, first)
    want = [in_numpy(written, *of)[0] for of in zip(b, x, first, strict=True)]
    np.testing.assert_allclose(found, want, rtol=1e-12)


READS = {
    "a row": a_row,
    "a sum": lambda b, i: jnp.where(onto(places_of(b) == i), b, 0).sum(0),
    "a sum of some": lambda b, i: jnp.sum(b, 0, where=onto(jax.nn.one_hot(i, len(b), dtype=bool))),
    "a sum of larger floats": lambda b, i: jnp.where(onto(places_of(b) == i), b.astype(jnp.float32), 0).sum(0),
    "a sum of elements": lambda b, i: jnp.where(onto(places_of(b) == i), b, 0).sum() * jnp.ones(D),
    "a sum or none": lambda b, i: jnp.where(onto((places_of(b) == i) & (i % 3 > 0)), b, 0).sum(0),
    "a sum of none": lambda b, i: b[i] + jnp.where(onto(places_of(b) == i - len(b)), b, 0).sum(0),
}


def places_of(b):
    return jnp.arange(len(b))


UPDATES = {
    "a row": lambda b, i, x: jnp.where(onto(places_of(b) == i), x, b),
    "a sum": lambda b, i, x: b + jnp.where(onto(places_of(b) == i), x, 0),
    "a row of the buffer": lambda b, i, x: jnp.where(onto(places_of(b) == i), 0.5 * b + x, b),
    "an element": lambda b, i, x: jnp.where(onto(places_of(b) == i) & (jnp.arange(D) == i % D), x, b),
}


#: Each with an order in turn: random steps have masks, too.
OF_BOTH = [*((name, "a row") for name in READS), *(("a row", name) for name in UPDATES if name != "a row")]
IN_TURN = ["grad(in_place)", "in_place(grad)", "vmap(grad)", "forward"]


@pytest.mark.parametrize(("both", "order"), in_turn(OF_BOTH, IN_TURN))
def test_what_a_mask_chooses_is_moved_by_rows(both, order):
    read, write = both

    def f(b, x):
        return filled(UPDATES[write], READS[read])(b, x, jnp.int32(1))

    def args_of(length):
        b, x, _ = arguments(length - 1, length)
        return (b[None], x[None]) if order.startswith("vmap") else (b, x)

    assert_in_place(ORDERS[order](f, in_place, (0, 1)), args_of, length=200)
    assert_as_in_numpy(f, args_of(200), order, by=(0, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("read", "write"), [("a row", "a sum"), ("a sum", "an element")])
def test_gradients_are_those_of_finite_differences(read, write):
    f = in_place(filled(UPDATES[write], READS[read]))
    b, x, _ = arguments(5, T)
    check_grads(lambda b, x: f(b, x, jnp.int32(1))[1], (b, x), order=2, modes=("fwd", "rev"), rtol=1e-4)


def test_integers_are_multiplied_by_a_mask():
    def f(b):
        def body(i, b):
            here = onto(jax.nn.one_hot(i, len(b), dtype=b.dtype))
            return b * (1 - here) + here * (b[i - 1] * 3 + i)

        return lax.fori_loop(1, 60, body, b)

    b = np.arange(T * D, dtype=np.int32).reshape(T, D)
    want = b.copy()
    for i in range(1, 60):
        want[i] = want[i - 1] * 3 + i
    np.testing.assert_array_equal(jit(in_place(f))(b), want)
    assert_in_place(in_place(f), lambda length: (np.ones((length, D), np.int32),), length=T)


PRODUCTS = {
    "a vector and a matrix": lambda c, i: jax.nn.one_hot(i, len(c), dtype=c.dtype) @ c,
    "a matrix and a vector": lambda c, i: c.T @ jax.nn.one_hot(i, len(c), dtype=c.dtype),
    "einsum": lambda c, i: jnp.einsum("td,t->d", c, jax.nn.one_hot(i, len(c), dtype=jnp.int8)),
    "a condition": lambda c, i: ((places_of(c) == i) & (i % 3 > 0)).astype(c.dtype) @ c,
    "none": lambda c, i: c[i] + jax.nn.one_hot(i - len(c), len(c), dtype=c.dtype) @ c,
}


@pytest.mark.parametrize("order", ["forward", "vmap(in_place)", "in_place(vmap)", "one buffer for all"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_of_integers_with_a_mask_reads_a_row(name, order):
    """What is multiplied by 0 is 0, so the sum has no other row in it."""

    def f(c, start):
        def body(i, c):
            row = PRODUCTS[name](c, (i + start) // 2)
            return c.at[i].set(row * 3 % 97 + i) if order != "one buffer for all" else c.at[i].set(c[i] + row)

        return lax.fori_loop(1, len(c), body, c)

    def expected(c, start):
        c = c.copy()
        for i in range(1, len(c)):
            k = (i + start) // 2
            row = c[k] * (k % 3 > 0) if name == "a condition" else c[k]
            c[i] = row * 3 % 97 + i if order != "one buffer for all" else c[i] + row
        return c

    batched = {
        "forward": in_place(f),
        "vmap(in_place)": jax.vmap(in_place(f)),
        "in_place(vmap)": in_place(jax.vmap(f)),
        "one buffer for all": in_place(jax.vmap(f, in_axes=(None, 0))),
    }[order]

    def args_of(length):
        c = np.arange(length * D, dtype=np.int32).reshape(length, D) * 7919 % 101
        starts = np.array([0, 1, 3], np.int32)
        if order == "forward":
            return c, starts[1]
        return (c, starts) if order == "one buffer for all" else (np.stack([c, c + 1, 2 * c]), starts)

    c, starts = args_of(T)
    if name == "a matrix and a vector" and order in ("in_place(vmap)", "one buffer for all"):
        program = jit(batched)  # the matrix is transposed in each example, and no view reads a column of that
    else:
        program = assert_in_place(batched, args_of, length=T)
        assert "dot_general" not in str(jax.make_jaxpr(batched)(c, starts))
    examples = [(c, starts)] if order == "forward" else [(c if c.ndim == 2 else c[k], starts[k]) for k in range(3)]
    got = program(c, starts)[None] if order == "forward" else program(c, starts)
    np.testing.assert_array_equal(got, [expected(*each) for each in examples])


def test_a_loop_that_does_nothing_else_is_found():
    def alone(b, x):
        return lax.scan(lambda b, x: (UPDATES["a row"](b, x[0].astype(int), READS["a sum"](b, 3) + x), None), b, x)[0]

    b, x, _ = arguments()
    program = compiled(in_place(alone), b, np.abs(x) * (T - 1))
    assert_no_whole_buffer_copy(program, b)
    want = b.copy()
    for row in np.abs(x) * (T - 1):
        want[int(row[0])] = want[3] + row
    np.testing.assert_allclose(program(b, np.abs(x) * (T - 1)), want, rtol=1e-12)


def test_floats_that_are_multiplied_stay_with_a_reason():
    """0 times infinity is no number, so all rows change."""

    def f(b):
        def body(i, b):
            here = onto(hot(i, b.dtype))
            return b * (1 - here) + here * (jnp.sin(b[i - 1]) + hot(i // 2, b.dtype) @ b)

        return lax.fori_loop(1, 60, body, b)

    b = np.full((T, D), np.inf)
    np.testing.assert_array_equal(jit(in_place(f))(b), jit(f)(b))
    found = [(x.kind, x.op) for x in explain(f)(b) if x.reason == "mask-product"]
    assert found == [("product", "mul"), ("product", "dot_general")]


def test_an_axis_of_one_is_no_place():
    """`arange(1) == i` decides whether there is a row, not which one."""

    def f(b):
        return lax.fori_loop(0, 5, lambda i, b: jnp.where(onto(jnp.arange(1) == i - 2), 3.0 * i, b), b)

    b = np.ones((1, 500))
    np.testing.assert_array_equal(jit(in_place(f))(b), np.full((1, 500), 6.0))


def test_a_diagonal_is_no_row():
    def f(b):
        eye = jnp.arange(40)[:, None] == jnp.arange(40)
        return lax.fori_loop(0, 5, lambda i, b: jnp.where(eye, b[i], b), b)

    b, want = np.sin(np.arange(1600.0)).reshape(40, 40), np.sin(np.arange(1600.0)).reshape(40, 40)
    for i in range(5):
        want = np.where(np.eye(40, dtype=bool), want[i], want)
    np.testing.assert_array_equal(jit(in_place(f))(b), want)


def test_a_size_may_be_a_symbol():
    def f(b):
        return lax.fori_loop(0, 5, lambda i, b: jnp.where(onto(jnp.arange(b.shape[0]) == i), 3.0 * i, b), b)

    (n,) = export.symbolic_shape("n")
    exported = export.export(jit(in_place(f)))(jax.ShapeDtypeStruct((n, D), jnp.float64))
    want = np.ones((T, D))
    want[:5] = 3.0 * np.arange(5)[:, None]
    np.testing.assert_array_equal(exported.call(np.ones((T, D))), want)


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices: see tests/conftest.py")
def test_a_mask_inside_of_auto_axes():
    def step(b, i):
        return jnp.where((jnp.arange(len(b)) == i)[:, None], jnp.sin(b[i - 1]), b)

    def loop(step):
        return lambda b: lax.fori_loop(1, len(b), lambda i, b: step(b, i), b)

    b = jnp.arange(1.0, 9).reshape(4, 2)
    with jax.set_mesh(jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])):
        got = in_place(loop(jax.sharding.auto_axes(step, out_sharding=PartitionSpec())))(b)
    np.testing.assert_allclose(got, loop(step)(b), rtol=1e-12)
