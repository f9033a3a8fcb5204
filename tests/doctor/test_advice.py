"""What the doctor advises holds: the program as found, and the program as advised, which is as right and in place."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from figures import FREE
from in_place import compiled
from jax import jit, lax
from row_programs import ours, plain

import jax_tensorarray as jta
from jax_tensorarray import checkpoint_policies, in_place, ta_add, ta_read, ta_write
from jax_tensorarray._hlo import text as hlo_text
from jax_tensorarray.doctor import _advice, loop_copies

pytestmark = pytest.mark.slow(but=3)

WIDTH = 16


def rows_of(x):
    return jnp.arange(len(x))


def recurrence(ops, x):
    def body(b, i):
        return ops.write(b, i, jnp.tanh(ops.read(b, i // 2) + x[i])), None

    return jnp.sum(lax.scan(body, jnp.zeros_like(x), rows_of(x))[0] ** 2)


def columns(as_advised, x):
    def body(b, i):
        if as_advised:
            return ta_write(b, i, jnp.tanh(ta_read(b, i // 2, axis=1) + x[i]), axis=1), None
        return b.at[:, i].set(jnp.tanh(b[:, i // 2] + x[i])), None

    return jnp.sum(lax.scan(body, x.T, rows_of(x))[0] ** 2)


def elements(as_advised, x):
    def body(b, i):
        k = i % WIDTH
        if as_advised:
            return ta_write(b, (i, k), jnp.tanh(ta_read(b, (i // 2, k)))), None
        return b.at[i, k].set(jnp.tanh(b[i // 2, k])), None

    return jnp.sum(lax.scan(body, x, rows_of(x))[0] ** 2)


def read_of_the_version_before(as_advised, x):
    """At a place that the new version tells."""

    def body(c, i):
        b, total = c
        value = jnp.sin(x[i])
        new = ta_write(b, i, value)
        place = (100 * jnp.abs((value if as_advised else ta_read(new, i))[0])).astype(int) % len(x)
        return (new, total + jnp.sum(ta_read(b, place))), None

    return lax.scan(body, (jnp.ones_like(x), 0.0), rows_of(x))[0][1]


def read_beside_write(x):
    def body(c, i):
        b, total = c
        seen = b[(i * 7) % len(x)]
        return (b.at[i].set(jnp.sin(x[i])), total + jnp.sum(seen)), None

    return lax.scan(body, (jnp.ones_like(x), 0.0), rows_of(x))[0][1]


def read_beside_write_by_ops(x):
    def body(c, i):
        b, total = c
        seen = ta_read(b, (i * 7) % len(x))
        return (ta_write(b, i, jnp.sin(x[i])), total + jnp.sum(seen)), None

    return lax.scan(body, (jnp.ones_like(x), 0.0), rows_of(x))[0][1]


def select_of_buffers(x):
    def body(b, i):
        new = b.at[i].set(jnp.sin(b[i // 2]))
        return jnp.where(i % 3 == 0, new, b), None

    return jnp.sum(lax.scan(body, x, rows_of(x))[0] ** 2)


def write_where(x):
    def body(b, i):
        return ta_write(b, i, jnp.sin(ta_read(b, i // 2)), where=i % 3 == 0), None

    return jnp.sum(lax.scan(body, x, rows_of(x))[0] ** 2)


def where_of_a_write(as_advised, x):
    """Nothing is read, so that in the gradient XLA makes one fusion of the selects, the row and their sum."""

    def body(b, i):
        if as_advised:
            return ta_write(b, i, jnp.sin(x[i]), where=x[i, 0] > 0), None
        return jnp.where(x[i, 0] > 0, b.at[i].set(jnp.sin(x[i])), b), None

    return jnp.sum(lax.scan(body, jnp.zeros_like(x), rows_of(x))[0] ** 2)


def examples_that_write(ops, x):
    def one(until):
        def body(b, i):
            def write(b):
                return ops.write(b, i, jnp.sin(ops.read(b, i // 2)))

            return lax.cond(i < until, write, lambda b: b, b), None

        return lax.scan(body, x, rows_of(x))[0]

    return jnp.sum(jax.vmap(one)(jnp.arange(3) * len(x) // 3) ** 2)


def examples_that_choose(ops, x):
    """Each writes a row in one of three branches, at an index of its own."""

    def one(which):
        def body(c, i):
            b, at = c

            def write(b, at):
                return ops.write(b, at, jnp.sin(x[i])), at + 1

            b, at = lax.switch((i + which) % 3, [write, lambda b, at: (b, at + 1), lambda b, at: (b, at + 2)], b, at)
            return (b, at % len(x)), None

        return lax.scan(body, (x, 0), rows_of(x))[0][0]

    return jnp.sum(jax.vmap(one)(jnp.arange(3)) ** 2)


def examples_that_read(ops, x):
    """Each example only reads, if it reads at all, from a buffer that they share."""

    def one(until):
        def body(h, i):
            row = lax.cond(i < until, lambda: ops.read(x, i // 2), lambda: jnp.zeros(WIDTH))
            return jnp.sin(h + row), None

        return lax.scan(body, jnp.zeros(WIDTH), rows_of(x))[0]

    return jnp.sum(jax.vmap(one)(jnp.arange(3) * len(x) // 3))


def examples_that_read_in_a_step(ops, x):
    """The examples are those of one step, and share the buffer that it carries."""

    def body(b, i):
        def one(k):
            return lax.cond(k < i % 5, lambda: ops.read(b, (i + k) // 2), lambda: jnp.zeros(WIDTH))

        return ops.write(b, i, jnp.sin(jnp.sum(jax.vmap(one)(jnp.arange(4)), 0) + x[i])), None

    return jnp.sum(lax.scan(body, x, rows_of(x))[0] ** 2)


def exchanged_buffers(x):
    def body(c, i):
        a, b = c
        return (ta_write(b, i, jnp.sin(ta_read(a, i // 2)) + x[i]), a), None

    a, b = lax.scan(body, (x, x), rows_of(x))[0]
    return jnp.sum(a * b)


def buffer_with_two_names(as_advised, x):
    def body(c, i):
        a, b = (c, c) if as_advised else c
        new = b.at[i].set(jnp.sin(a[i // 2]) + 0.5 * b[i // 3] + x[i])
        return (new if as_advised else (new, new)), None

    last = lax.scan(body, x if as_advised else (x, x), rows_of(x))[0]
    return jnp.sum(last if as_advised else last[0] * last[1] / last[1])


def cache(order, x):
    """Attention of two heads in each of two examples, over all that has been written."""
    q = x[:4].reshape(2, 2, WIDTH)
    empty = jnp.zeros([{"b": 2, "l": len(x), "h": 2, "d": WIDTH}[axis] for axis in order])

    def body(c, i):
        k, q = c
        row = jnp.expand_dims(q, order.index("l"))
        k = lax.dynamic_update_slice(k, row, [i if axis == "l" else 0 for axis in order])
        score = jnp.einsum(f"bhd,{order}->bhl", q, k)
        return (k, jnp.tanh(q + jnp.einsum(f"bhl,{order}->bhd", jax.nn.softmax(score), k))), None

    return jnp.sum(lax.scan(body, (empty, q), rows_of(x))[0][1])


def buffers_by_the_number_of_the_step(x):
    def body(c, i):
        a, b = c
        even, odd = i % 2 == 0, i % 2 == 1
        row = jnp.sin(ta_read(a, i // 2, where=even) + ta_read(b, i // 2, where=odd)) + x[i]
        return (ta_write(a, i, row, where=odd), ta_write(b, i, row, where=even)), None

    a, b = lax.scan(body, (x, x), rows_of(x))[0]
    return jnp.sum(a * b)


def checkpointed(ops, policy, x):
    @functools.partial(jax.checkpoint, policy=policy)
    def body(b, i):
        return ops.write(b, i, jnp.tanh(ops.read(b, i // 2) + ops.read(x, i))), None

    return jnp.sum(lax.scan(body, jnp.zeros_like(x), rows_of(x))[0] ** 2)


def attention(write_first, x):
    """To the rows before this one. What is written is not a row that is looked at."""

    def body(c, i):
        b, query = c
        if write_first:
            b = ta_write(b, i, query)
        weights = jax.nn.softmax(jnp.where(rows_of(x) < i, b @ query, -1e9))
        if not write_first:
            b = b.at[i].set(query)
        return (b, jnp.tanh(weights @ b + x[i])), None

    return jnp.sum(lax.scan(body, (x, x[0]), rows_of(x))[0][1])


def conditional_read(ops, x):
    def body(h, i):
        return lax.cond(i % 3 == 0, lambda: jnp.cos(h), lambda: jnp.sin(h + ops.read(x, i // 2))), None

    return jnp.sum(lax.scan(body, x[0], rows_of(x))[0])


def best_column(write_first, x):
    """The largest number so far in a column of the rows before this one."""

    def body(c, i):
        b, best = c
        if write_first:
            b = ta_write(b, i, jnp.sin(x[i] + i))
        best = jnp.maximum(best, jnp.max(jnp.where(rows_of(x) < i, b[:, 0], -1.0)))
        if not write_first:
            b = b.at[i].set(jnp.sin(x[i] + i))
        return (b, best), best

    return jnp.sum(lax.scan(body, (x, -1.0), rows_of(x))[1])


def row_by_where(as_advised, x):
    def body(b, i):
        row = jnp.sin(ta_read(b, i // 2) + x[i])
        return ta_write(b, i, row) if as_advised else jnp.where(rows_of(x)[:, None] == i, row, b), None

    return jnp.sum(lax.scan(body, x, rows_of(x))[0] ** 2)


def row_by_sum(as_advised, x):
    def body(b, i):
        row = jnp.sin(ta_read(b, i // 2) + x[i])
        return ta_add(b, i, row) if as_advised else b + jax.nn.one_hot(i, len(x))[:, None] * row, None

    return jnp.sum(lax.scan(body, x, rows_of(x))[0] ** 2)


def stacked(rows, x):
    def body(b, i):
        b = ta_write(b, i, jnp.sin(ta_read(b, i // 2)))
        return b, ta_read(b, i) if rows else b

    b, history = lax.scan(body, x, rows_of(x))
    return jnp.sum(b * (history if rows else history[rows_of(x), rows_of(x)]))


def product_with(scan):
    def body(b, i):
        return ta_write(b, i, jnp.tanh(b @ ta_read(b, i)) @ b / len(b)), None

    return lambda x: jnp.sum(scan(body, x, rows_of(x))[0])


def product_in_our_loop(residuals, x):
    def body(c):
        i, b = c
        return i + 1, ta_write(b, i, jnp.tanh(b @ ta_read(b, i)) @ b / len(x))

    return jnp.sum(jta.while_loop(lambda c: c[0] < len(x), body, (0, x), max_steps=len(x), residuals=residuals)[1])


def chain(from_data, x, at):
    def body(i, b):
        to, seen = (at[i], at[i - 1]) if from_data else (i, i - 1)
        return ta_write(b, to, jnp.sin(ta_read(b, seen)))

    return jnp.sum(lax.fori_loop(1, len(x), body, x))


class Advice(NamedTuple):
    """A program as found, which gets this advice on the line with this text, and as advised.

    `left` are the kinds of operations on whole buffers that stay, which the advice says.
    """

    found: Callable
    advised: Callable
    line: str
    left: frozenset[str] = frozenset()


def with_ops(f):
    return functools.partial(f, plain), functools.partial(f, ours)


def both(f):
    return functools.partial(f, False), functools.partial(f, True)


def gradients(found, advised):
    return jax.grad(found), jax.grad(advised)


READ, WRITE = "ops.read(", "ops.write("
ANEW = frozenset({"anew"})
exchange = exchanged_buffers, buffers_by_the_number_of_the_step
undo = functools.partial(jta.scan, residuals="undo")

ADVICE = {
    ("gradient", "a recurrence"): Advice(*gradients(*with_ops(recurrence)), WRITE),
    ("gradient", "columns"): Advice(*gradients(*both(columns)), ".at[:, i].set"),
    ("gradient", "elements"): Advice(*gradients(*both(elements)), ".at[i, k].set"),
    ("beside", "a read"): Advice(read_beside_write, read_beside_write_by_ops, ".at[i].set"),
    ("ours", "a read of the version before"): Advice(*both(read_of_the_version_before), "ta_write(b, i"),
    ("select", "a where"): Advice(*gradients(select_of_buffers, write_where), ".at[i].set"),
    ("select", "a where of a write"): Advice(*gradients(*both(where_of_a_write)), ".at[i].set"),
    ("select", "a one-hot where"): Advice(*both(row_by_where), "jnp.where"),
    ("select_vmap", "a cond that writes"): Advice(*with_ops(examples_that_write), "lax.cond"),
    ("select_vmap", "a switch that writes"): Advice(*with_ops(examples_that_choose), "lax.switch"),
    ("select_vmap", "a cond that reads what is shared"): Advice(*with_ops(examples_that_read_in_a_step), "lax.cond"),
    ("twice", "a buffer with two names"): Advice(*both(buffer_with_two_names), ".at[i].set"),
    ("layout", "a cache"): Advice(functools.partial(cache, "blhd"), functools.partial(cache, "bhld"), "lax."),
    ("swapped", "an exchange"): Advice(*exchange, "ta_write("),
    ("swapped", "the gradient of an exchange"): Advice(*gradients(*exchange), "ta_write("),
    ("checkpoint", "a recurrence"): Advice(
        *gradients(
            functools.partial(checkpointed, plain, None),
            functools.partial(checkpointed, ours, checkpoint_policies.save_reads),
        ),
        WRITE,
    ),
    ("whole", "attention"): Advice(*both(attention), ".at[i].set"),
    ("whole", "a maximum"): Advice(*both(best_column), ".at[i].set"),
    ("sum", "a cond"): Advice(*gradients(*with_ops(conditional_read)), "lax.cond"),
    ("sum", "a cond under vmap"): Advice(*gradients(*with_ops(examples_that_read)), READ),
    ("anew", "a one-hot sum"): Advice(*both(row_by_sum), "jax.nn.one_hot"),
    ("save", "a stack of buffers"): Advice(*both(stacked), "lax.scan"),
    ("kept", "a product"): Advice(*gradients(product_with(lax.scan), product_with(undo)), "scan(body", ANEW),
    ("kept", "a product under in_place"): Advice(
        jax.grad(product_with(lax.scan)), in_place(jax.grad(product_with(lax.scan))), "scan(body", ANEW
    ),
    ("kept", "a product in a loop that has residuals="): Advice(
        *gradients(product_with(functools.partial(jta.scan, residuals="tape")), product_with(undo)), "scan(body", ANEW
    ),
    ("tape", "a product"): Advice(
        *gradients(functools.partial(product_in_our_loop, "tape"), functools.partial(product_in_our_loop, "undo")),
        "while_loop(",
        ANEW,
    ),
}


@pytest.mark.usefixtures("fusions_of_users")
@pytest.mark.parametrize(("cause", "program"), ADVICE)
def test_a_program_that_does_what_is_advised_is_as_right_and_in_place(cause, program):
    advice = ADVICE[cause, program]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1000, WIDTH)))
    copies, left = (loop_copies(f)(x) for f in (advice.found, advice.advised))
    text = max(_advice.ADVICE[cause].split("{}"), key=len)
    given = [copy for copy in copies if text in copy.advice and advice.line in copy.code]
    assert given and {copy.file for copy in given} == {__file__}, copies
    assert {copy.kind for copy in left} == advice.left
    assert sum(copy.num_bytes for copy in copies) >= 1.5 * sum(copy.num_bytes for copy in left)  # in each step
    found, advised = (jit(f)(x) for f in (advice.found, advice.advised))
    np.testing.assert_allclose(found, advised, rtol=1e-5, atol=1e-5)


def test_what_a_product_makes_anew_is_left_and_the_copies_beside_it_are_not():
    copies = loop_copies(ADVICE["kept", "a product"].found)(jnp.ones((50, WIDTH)))
    assert {copy.kind for copy in copies} == {"save", "anew", "copy"}
    for copy in copies:
        said = "If you want that, leave it" if copy.kind == "anew" else "Put in_place around the function"
        assert said in copy.advice, copy


@pytest.mark.parametrize("transform", [lambda f: f, jax.grad], ids=["forward", "gradient"])
def test_an_index_from_data_costs_about_as_much_as_one_that_the_loop_counts(transform):
    """In operations an iteration."""
    x, at = jnp.ones((4000, 4), jnp.float32), jnp.arange(4000, dtype=jnp.int32)
    hlo = [compiled(transform(functools.partial(chain, of_data)), x, at).as_text() for of_data in (True, False)]
    from_data, counted = ([op for op in hlo_text.operations_in_loops(text) if op.opcode not in FREE] for text in hlo)
    assert 0 < len(from_data) <= 2 * len(counted), from_data
    assert hlo_text.whole_buffer_operations_in_loops(hlo[0], x.nbytes) == []


@pytest.mark.usefixtures("fusions_of_users")
@pytest.mark.parametrize(("cause", "program"), ADVICE)
def test_in_place_comes_first_where_it_removes_the_cause_and_is_not_promised_where_it_does_not(cause, program):
    found, text = ADVICE[cause, program].found, _advice.ADVICE[cause]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1000, WIDTH)))
    before, after = loop_copies(found)(x), loop_copies(in_place(found))(x)
    has_cause = [any(copy.reason == _advice.NAMES[cause] for copy in copies) for copies in (before, after)]
    is_removed = text.startswith("Put in_place around the function: it ")
    assert ("in_place" in text) == is_removed
    if program != "a product in a loop that has residuals=":  # the loop says what it keeps
        assert has_cause == [True, not is_removed], after


def test_each_advice_is_tried():
    assert {cause for cause, _ in ADVICE} == set(_advice.ADVICE)
