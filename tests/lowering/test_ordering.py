"""The pass that orders reads, where it has nothing to do; loops, branches and effects.

`test_passes.py` has random programs: their values, and that rows are read before their buffer is updated.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_place import compiled, loops_in_loops
from jax import lax
from jax.experimental import io_callback

from benchmarks.harm.programs.reports import decaying_sums
from jax_tensorarray import in_place, ta_add, ta_empty, ta_max, ta_read, ta_swap, ta_write, while_loop

SIZE, ROW = 7, 3


def calls(f, *args, target):
    """The lowered calls of one of our kernels: (text of operands, has_side_effect)."""
    text = jax.jit(f).lower(*args).as_text()
    lines = [line for line in text.splitlines() if f"@jax_tensorarray_{target}(" in line]
    return [(line.split("(", 1)[1].split(")", 1)[0].split(", "), "has_side_effect = true" in line) for line in lines]


def operands(f, *args, target):
    return [len(names) for names, _ in calls(f, *args, target=target)]


B = jnp.ones((SIZE, ROW))
I = jnp.int32(2)  # noqa: E741


def test_a_write_that_depends_on_the_read_needs_no_further_operand():
    assert operands(lambda b, i: ta_write(b, 1, ta_read(b, i)), B, I, target="write") == [3]


def test_a_loop_that_writes_gets_a_fence_for_a_read_in_front_of_it():
    def f(b, i):
        return ta_read(b, i, lowering="ffi"), lax.fori_loop(0, 3, lambda k, b: ta_write(b, k, 1.0, lowering="ffi"), b)

    assert operands(f, B, I, target="fence") == [2]


def test_a_buffer_nobody_updates_gets_nothing():
    def f(b, i):
        return ta_read(b, i), ta_read(b, i + 1)

    assert operands(f, B, I, target="read") == [2, 2]
    assert operands(f, B, I, target="fence") == []


def test_a_module_without_our_ops_is_left_alone():
    def f(b):
        return lax.fori_loop(0, 3, lambda i, b: b.at[i].set(b[0]), b)

    assert "jax_tensorarray" not in jax.jit(f).lower(B).as_text()


def test_the_mark_for_the_pass_does_not_stay_in_the_module():
    assert "jax_tensorarray" not in jax.jit(lambda b: ta_read(b, 1)).lower(B).as_text().splitlines()[0]


@pytest.mark.parametrize(
    "op",
    [
        lambda b, i: ta_read(b, i, lowering="ffi"),
        lambda b, i: ta_write(b, i, 1.0, lowering="ffi")[0],
        lambda b, i: ta_add(b, i, 1.0, lowering="ffi")[0],
        lambda b, i: ta_swap(b, i, 1.0, lowering="ffi")[1],
    ],
)
def test_an_op_that_may_raise_is_pinned_to_its_loop(op):
    def pinned(f):
        names = ("read", "write", "add", "swap")
        return [effect for target in names for _, effect in calls(f, B, I, target=target)]

    def invariant(b, i):
        return lax.fori_loop(0, i, lambda k, c: c + op(b, i), jnp.zeros(ROW))

    def varying(b, i):
        return lax.fori_loop(0, i, lambda k, c: c + op(b, k), jnp.zeros(ROW))

    def nested(b, i):
        return lax.fori_loop(0, i, lambda k, c: lax.fori_loop(0, i, lambda _, c: c + op(b, k), c), jnp.zeros(ROW))

    assert pinned(invariant) == [True]
    assert pinned(varying) == [True]
    assert pinned(nested) == [True]
    assert pinned(lambda b, i: jax.jit(lambda n: invariant(b, n))(i)) == [True]
    assert pinned(lambda b, i: lax.fori_loop(0, i, lambda k, c: jax.jit(lambda c: c + op(b, k))(c), B[0])) == [True]
    assert pinned(op) == [False]


def test_an_empty_buffer_is_allocated_in_each_iteration_of_its_loop():
    def f(b, i):
        return lax.fori_loop(0, i, lambda k, c: c + jnp.sum(ta_write(ta_empty(4), jnp.arange(4), 1.0)), 0.0)

    assert [effect for _, effect in calls(f, B, I, target="empty")] == [True]
    assert jax.jit(f)(B, jnp.int32(3)) == 12.0


def test_a_switch_with_updates_runs_the_branch_that_jax_runs():
    @jax.jit
    def f(index, b, row):
        branches = [
            lambda b, row: (ta_write(b, 0, row), row, jnp.int8(1), True, jnp.complex64(1j)),
            lambda b, row: (b, ta_read(b, 1) * 2, jnp.int8(2), False, jnp.complex64(2j)),
            lambda b, row: (*ta_swap(b, 2, row), jnp.int8(3), True, jnp.complex64(3j)),
            lambda b, row: (ta_add(b, 3, row), row + 1, jnp.int8(4), False, jnp.complex64(4j)),
        ]
        return lax.switch(index, branches, b, row)

    b, row = np.arange(SIZE * ROW, dtype=np.float32).reshape(SIZE, ROW), np.full(ROW, 50.0, np.float32)
    written, added = b.copy(), b.copy()
    written[0], added[3] = row, b[3] + row
    swapped = b.copy()
    swapped[2] = row
    results = [(written, row), (b, b[1] * 2), (swapped, b[2]), (added, row + 1)]
    for index in (-5, -1, 0, 1, 2, 3, 4, 99):
        k = min(max(index, 0), 3)
        expected = (*results[k], k + 1, k % 2 == 0, (k + 1) * 1j)
        jax.tree.map(np.testing.assert_array_equal, f(index, b, row), expected)


def exchanged_beside_two_writes(p, q, i):
    exchange, write = (lambda p, q: (q, p)), (lambda p, q: (p, ta_write(q, 2, 7.0)))
    return lax.switch(i, [exchange, write, write], p, ta_write(p, 1, 5.0))


def value_of_a_swap_beside_one_buffer_twice(p, q, i):
    x = 2 * ta_swap(q, i, 5.0)[1]
    return lax.switch(i, [lambda p, q: (p, p), lambda p, q: (p, ta_write(q, 0, x)), lambda p, q: (p, q)], p, q)


def branch_result_that_nothing_uses(p, q, i):
    def step(c):
        k, p = c
        x = 2 * ta_max(p, 1, 5.0)[1]
        return k + 1, lax.cond(k > 0, lambda p, q: (p, ta_write(p, 0, x)), lambda p, q: (ta_add(q, k, 1.0), q), p, q)[0]

    return while_loop(lambda c: c[0] < i, step, (0, p), max_steps=3, residuals="undo")[1], q


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (exchanged_beside_two_writes, [([0, 5, 2], [0, 1, 2]), ([0, 1, 2], [0, 5, 7]), ([0, 1, 2], [0, 5, 7])]),
        (
            value_of_a_swap_beside_one_buffer_twice,
            [([0, 1, 2], [0, 1, 2]), ([0, 1, 2], [16, 8, 9]), ([0, 1, 2], [7, 8, 9])],
        ),
        (branch_result_that_nothing_uses, [([0, 1, 2], [7, 8, 9]), ([8, 8, 9], [7, 8, 9]), ([8, 8, 9], [7, 8, 9])]),
    ],
)
def test_a_conditional_stays_behind_operands_that_no_branch_uses(f, expected):
    """`branches` made such conditionals. They were moved before their operands, which was a KeyError."""
    p, q = jnp.arange(3.0), jnp.arange(7.0, 10.0)
    for i, want in enumerate(expected):
        jax.tree.map(np.testing.assert_array_equal, jax.jit(f)(p, q, i), tuple(map(np.array, want)))


def test_a_write_waits_for_no_conditional_whose_branches_ignore_its_buffer():
    """The switch becomes two conditionals. Only that of the branch with the read gives the write an operand."""

    def f(b, small, i):
        branches = [
            lambda b, small: ta_write(small, i, ta_read(b, i)[0]),
            lambda b, small: ta_write(small, i, 2.0),
            lambda b, small: small,
        ]
        value = lax.switch(i, branches, b, small)
        return ta_write(b, i, 5.0), value

    assert operands(f, B, jnp.ones(SIZE), I, target="write")[-1] == 4


def test_a_switch_whose_branches_update_has_the_effects_of_the_one_that_runs():
    def noted(b):
        io_callback(lambda x: log.append(float(x)), None, b[0], ordered=True)
        return b

    @jax.jit
    def f(b, i):
        branches = [
            lambda b: ta_write(b, 0, 7.0),
            noted,
            lambda b: ta_add(b, 1, 5.0),
            lambda b: noted(ta_write(b, 2, 9.0)),
        ]
        return lax.switch(i, branches, b)

    log = []
    for i, want in enumerate([[7, 1, 2], [3, 1, 2], [3, 6, 2], [3, 1, 9]]):
        log.clear()
        np.testing.assert_array_equal(f(jnp.array([3.0, 1.0, 2.0]), i), want)
        jax.effects_barrier()
        assert log == ([3.0] if i % 2 else [])


@pytest.mark.parametrize("is_in_branch", [False, True])
def test_a_loop_that_is_the_same_in_every_step_waits_for_no_read(is_in_branch):
    """XLA runs it once, before the loop around it."""

    def f(xs, length, steps):
        def step(state):
            k, total = state
            if is_in_branch:
                sums = lax.cond(length > 0, decaying_sums, lambda xs, _: xs, xs, length)
            else:
                sums = decaying_sums(xs, length)
            return k + 1, 0.9 * total + sums[k % len(xs)] * xs[(k + 1) % len(xs)]

        return lax.while_loop(lambda state: state[0] < steps, step, (0, 0.0))[1]

    xs, length, steps = np.sin(np.arange(300.0)), 200, 20
    program, of_jax = (compiled(g, xs, length, steps) for g in (in_place(f), f))
    assert loops_in_loops(program) == loops_in_loops(of_jax) == 0
    sums, total = xs.copy(), 0.0
    for i in range(1, length):
        sums[i] = 0.9 * sums[i - 1] + xs[i]
    for k in range(steps):
        total = 0.9 * total + sums[k] * xs[k + 1]
    np.testing.assert_allclose(program(xs, length, steps), total)
