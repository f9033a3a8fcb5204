"""What is said of the integers of a program is true of every run, and enough to prove the indices that people write."""

import os
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_tensorarray as jt
from jax_tensorarray import ta_empty, ta_read, ta_swap, ta_write
from jax_tensorarray._lowering.mlir import PREFIX, operation, target, walk
from jax_tensorarray._lowering.ranges import Interval, Ranges

T = 12
CALLS = (PREFIX + "read", PREFIX + "write", PREFIX + "add", PREFIX + "swap")


@pytest.fixture(autouse=True)
def calls_stay(monkeypatch):
    monkeypatch.setenv("JAX_TENSORARRAY_LOWERING", "ffi")


def intervals(f, *args, of=CALLS):
    """The intervals of the indices of the row ops in `f(*args)` but those on tapes, in the order of the program."""
    module = jax.jit(f).lower(*args).compiler_ir()
    with module.context:
        functions = {
            op.attributes["sym_name"].value: op
            for op in map(operation, module.body.operations)
            if op.name == "func.func"
        }
        ranges = Ranges(functions)
        calls = [op for function in functions.values() for op in walk(function) if target(op) in of]
        return [ranges.of(op.operands[1]) for op in calls]


def observed_and_claimed(f, *args):
    """The indices with which `f` reads rows, its second result, and what is said of them. The first needs the rows."""
    (claimed,) = intervals(f, *args, of=CALLS[:1])
    return np.asarray(jax.jit(f)(*args)[1]), claimed


BUFFER = np.zeros((T, 2), np.float32)


def over_scan(index):
    """The indices `index(i, x)` of a scan over i = 0, 1, ..., T - 1 and some x of [0, T)."""

    def body(total, ix):
        at = index(*ix)
        return total + ta_read(BUFFER, at, mode="drop")[0], at

    def f(x):
        return lax.scan(body, jnp.float32(0), (jnp.arange(T), x % T))

    return f


X = np.random.default_rng(0).integers(0, 1000, T, dtype=np.int32)

EXACT = {
    "the step": (lambda i, x: i, 0, T - 1),
    "backwards": (lambda i, x: T - 1 - i, 0, T - 1),
    "floor division": (lambda i, x: i // 3, 0, (T - 1) // 3),
    "floor division of something negative": (lambda i, x: (i - 5) // 3, -2, (T - 6) // 3),
    "remainder": (lambda i, x: (7 * i + 3) % T, 0, T - 1),
    "remainder of something negative": (lambda i, x: (i - 5) % T, 0, T - 1),
    "of an unknown number": (lambda i, x: x, 0, T - 1),
    "before": (lambda i, x: jnp.maximum(i - 1, 0), 0, T - 2),
    "behind": (lambda i, x: jnp.minimum(i + 1, T - 1), 1, T - 1),
    "clipped": (lambda i, x: jnp.clip(2 * i - 3, 1, 7), 1, 7),
    "chosen": (lambda i, x: jnp.where(i > 4, i - 5, i + 5), 0, 9),
    "wrapped by hand": (lambda i, x: jnp.where(i - 3 < 0, i - 3 + T, i - 3), 0, T - 1),
    "a bit": (lambda i, x: x & 1, 0, 1),
    "a bool": (lambda i, x: (x > 3).astype(jnp.int32), 0, 1),
    "from a table": (lambda i, x: jnp.asarray([5, 3, 8])[i % 3], 3, 8),
    "of a permutation": (lambda i, x: jnp.argsort(-jnp.arange(T))[i], 0, T - 1),
    "narrow": (lambda i, x: i.astype(jnp.int8), 0, T - 1),
    "unsigned": (lambda i, x: i.astype(jnp.uint32), 0, T - 1),
    "the sign": (lambda i, x: jnp.sign(x), 0, 1),
}


@pytest.mark.parametrize("name", EXACT)
def test_indices_that_people_write(name):
    index, low, high = EXACT[name]
    observed, claimed = observed_and_claimed(over_scan(index), X)
    assert claimed.holds(Interval(observed.min(), observed.max()))
    assert claimed == Interval(low, high)


def test_nothing_is_said_of_arguments():
    observed, claimed = observed_and_claimed(lambda i: (ta_read(BUFFER, i, mode="drop"), i), jnp.int32(3))
    assert observed == 3 and claimed == Interval(-(2**31), 2**31 - 1)


def counting(start, step, cond):
    """The indices of a while_loop with a counter, in the steps that it takes; -1000 for the others."""

    def f(limit):
        def body(carry):
            n, k, total, found = carry
            total += ta_read(BUFFER, k, mode="drop")[0]
            return n + 1, step(k), total, found.at[n].set(k)

        first = jnp.int32(0), jnp.int32(start), jnp.float32(0), jnp.full(50, -1000)
        return lax.while_loop(lambda c: cond(c[1], limit), body, first)[2:]

    return f


COUNTERS = {
    "up": (counting(0, lambda k: k + 1, lambda k, n: k < T), 0, T - 1),
    "up to and with": (counting(0, lambda k: k + 1, lambda k, n: k <= 7), 0, 7),
    "by threes": (counting(1, lambda k: k + 3, lambda k, n: k < T), 1, 10),
    "down": (counting(T - 1, lambda k: k - 1, lambda k, n: k >= 0), 0, T - 1),
    "down, mirrored": (counting(T - 1, lambda k: k - 1, lambda k, n: k > -1), 0, T - 1),
    "up to a limit known only to the program": (counting(0, lambda k: k + 1, lambda k, n: (k < n) & (k < T)), 0, T - 1),
    "doubled": (counting(1, lambda k: 2 * k, lambda k, n: k < T), 1, T - 1),
    "at its own pace": (counting(0, lambda k: k + jnp.where(k % 2 == 0, 1, 2), lambda k, n: k < T), 0, T - 1),
    "now and then": (counting(0, lambda k: jnp.where(k % 3 == 0, k + 2, k + 1), lambda k, n: k < T), 0, T - 1),
    "the larger": (counting(2, lambda k: jnp.maximum(k + 1, 5), lambda k, n: k < T), 2, T - 1),
    "round and round": (
        counting(5, lambda k: (k + 7) % T, lambda k, n: k != 0),
        0,
        T - 1,
    ),
}


@pytest.mark.parametrize("name", COUNTERS)
def test_counters(name):
    f, low, high = COUNTERS[name]
    observed, claimed = observed_and_claimed(f, jnp.int32(9))
    assert claimed.holds(Interval(observed[observed > -1000].min(), observed.max()))
    assert claimed == Interval(low, high)


def test_a_limit_that_is_not_known_bounds_nothing():
    f = counting(0, lambda k: k + 1, lambda k, n: k < n)
    assert intervals(f, jnp.int32(9)) == [Interval(0, 2**31 - 2)]


def test_a_counter_that_may_wrap_is_everything():
    def body(c):
        n, k, total = c
        return n + 1, k + 2**30, total + ta_read(BUFFER, k, mode="drop")[0]

    def f():
        return lax.while_loop(lambda c: c[0] < 4, body, (0, jnp.int32(0), jnp.float32(0)))[2]

    (claimed,) = intervals(f)
    assert claimed.holds(Interval(-(2**31), 2**30))


def test_a_case_of_this_step_says_nothing_of_the_last_one():
    """Where `k < 3`, `j` is what `k` was before, which may be 3."""

    def f():
        def body(c, k):
            j, total = c
            at = jnp.where(k < 3, j, 0)
            return (k, total + ta_read(BUFFER, at, mode="drop")[0]), at

        ks = jnp.arange(T, dtype=jnp.int32)
        return lax.scan(body, (jnp.int32(0), jnp.float32(0)), ks, reverse=True)

    observed, claimed = observed_and_claimed(f)
    assert observed.max() == 3 and claimed.holds(Interval(0, 3))


@pytest.mark.parametrize(
    ("start", "step"),
    [(0, lambda k: jnp.minimum(k + (2**31 - 9), k + 1)), (-5, lambda k: jnp.maximum(k - (2**31 - 1), k - 1))],
    ids=["min", "max"],
)
def test_a_choice_between_two_of_which_one_wraps(start, step):
    def f():
        def body(c, _):
            k, total = c
            return (step(k), total + ta_read(BUFFER, k, mode="drop")[0]), k

        return lax.scan(body, (jnp.int32(start), jnp.float32(0)), None, length=T)

    observed, claimed = observed_and_claimed(f)
    assert claimed.holds(Interval(int(observed.min()), int(observed.max())))


def test_nothing_is_said_of_rows_that_nobody_has_written():
    def f():
        return ta_read(BUFFER, ta_read(ta_empty(3, (), jnp.int32), 1), mode="drop")

    assert Interval(-(2**31), 2**31 - 1) in intervals(f)


def test_constants_of_all_kinds():
    for value in (np.uint8(255), np.int8(-1), np.uint32(2**32 - 1), np.array([200, 3], np.uint8), np.int64(-(2**40))):
        (claimed,) = intervals(lambda x, v=value: ta_read(x, jnp.asarray(v), lowering="ffi", mode="drop"), BUFFER)
        assert claimed == Interval(int(value.min()), int(value.max()))


def test_two_counters_of_which_the_condition_bounds_one():
    def body(c):
        n, k, total = c
        return n + 1, k + 2, total + ta_read(BUFFER, k, mode="drop")[0]

    def f():
        return lax.while_loop(lambda c: c[0] < 5, body, (0, jnp.int32(1), jnp.float32(0)))[2]

    assert intervals(f) == [Interval(1, 9)]


def test_the_size_of_an_array_that_grows_with_every_step():
    def f(x):
        def body(carry):
            x, ys = carry
            return jnp.tanh(x), ys.append(x)

        ys = jt.TensorArray(jnp.float32, 0, dynamic_size=True, max_size=T, element_shape=2)
        return jt.while_loop(lambda c: jnp.sum(c[0]) < 9.0, body, (x, ys), max_steps=T)[1].stack()

    assert intervals(f, jnp.ones(2, jnp.float32)) == [Interval(0, T - 1)]


def test_indices_from_a_tape():
    """Reverse mode finds the index of a step on a tape, on which it was written in that step."""

    def f(x):
        def body(carry):
            k, x, ys = carry
            return k + 1, jnp.tanh(x + ta_read(ys, k // 2)), ta_write(ys, k, x)

        ys = jnp.zeros((T, 2), jnp.float32)
        _, x, ys = jt.while_loop(lambda c: jnp.sum(c[1]) < 9.0, body, (jnp.int32(0), x, ys), max_steps=T)
        return jnp.sum(x) + jnp.sum(ys)

    claimed = [c for c in intervals(jax.grad(f), jnp.ones(2, jnp.float32)) if c.low > -100]
    # read and write, forward; add and swap, backward
    assert sorted(claimed) == [Interval(0, (T - 1) // 2)] * 2 + [Interval(0, T - 1)] * 2


def reversed_where(a, b, c):
    """The second of two where the first is small: a case of one element is none of the other."""
    pair = jnp.stack([jnp.int32(a), jnp.int32(b)])
    return jnp.where(pair < c, pair[::-1], 0)[0]


def swapped(a, b):
    pair = jnp.stack([jnp.int32(a), jnp.int32(b)])
    return ta_swap(jnp.zeros(2, jnp.int32), jnp.array([1, 1]), pair, lowering="ffi")[1][1]


def _expression(rng, depth):
    """A random function of integers, and what it says."""
    if depth == 0 or rng.random() < 0.15:
        return rng.choice(
            [
                (lambda i, x, j, h: i, "i"),
                (lambda i, x, j, h: x, "x"),
                (lambda i, x, j, h: j, "j"),
                (lambda i, x, j, h: h, "h"),
                *((lambda i, x, j, h, c=c: jnp.int32(c), str(c)) for c in (-3, 0, 1, 5, 2**31 - 9)),
            ]
        )
    (a, said_a), (b, said_b) = _expression(rng, depth - 1), _expression(rng, depth - 1)
    c = rng.choice([-5, -2, 2, 3, 7])
    return rng.choice(
        [
            (lambda *v: a(*v) + b(*v), f"({said_a} + {said_b})"),
            (lambda *v: a(*v) - b(*v), f"({said_a} - {said_b})"),
            (lambda *v: a(*v) * b(*v), f"({said_a} * {said_b})"),
            (lambda *v: a(*v) // c, f"({said_a} // {c})"),
            (lambda *v: a(*v) % c, f"({said_a} % {c})"),
            (lambda *v: lax.div(jnp.int32(a(*v)), jnp.int32(c)), f"div({said_a}, {c})"),
            (lambda *v: lax.rem(jnp.int32(a(*v)), jnp.int32(c)), f"rem({said_a}, {c})"),
            (lambda *v: a(*v) // b(*v), f"({said_a} // {said_b})"),
            (lambda *v: jnp.minimum(a(*v), b(*v)), f"min({said_a}, {said_b})"),
            (lambda *v: jnp.maximum(a(*v), b(*v)), f"max({said_a}, {said_b})"),
            (lambda *v: jnp.where(a(*v) < b(*v), a(*v), b(*v) + c), f"where({said_a} < {said_b}, .., .. + {c})"),
            (lambda *v: jnp.where(a(*v) == c, b(*v), a(*v)), f"where({said_a} == {c}, {said_b}, ..)"),
            (lambda *v: jnp.abs(a(*v)), f"abs({said_a})"),
            (lambda *v: -a(*v), f"-{said_a}"),
            (lambda *v: jnp.sign(a(*v)) * b(*v), f"sign({said_a}) * {said_b}"),
            (lambda *v: a(*v) & b(*v), f"({said_a} & {said_b})"),
            (lambda *v: a(*v) | b(*v), f"({said_a} | {said_b})"),
            (lambda *v: jnp.clip(a(*v), -4, c + 9), f"clip({said_a}, -4, {c + 9})"),
            (lambda *v: reversed_where(a(*v), b(*v), c), f"where(pair < {c}, pair[::-1], 0)[0] of {said_a}, {said_b}"),
            (lambda *v: swapped(a(*v), b(*v)), f"what a second swap takes out of {said_a}, {said_b}"),
            (lambda *v: a(*v).astype(jnp.int8).astype(jnp.int32), f"int8({said_a})"),
            (lambda *v: a(*v).astype(jnp.uint16).astype(jnp.int32), f"uint16({said_a})"),
        ]
    )


@pytest.mark.parametrize("seed", range(int(os.environ.get("RANGE_PROGRAMS", "30"))))
def test_what_is_said_is_true(seed):
    rng = random.Random(seed)
    (index, said), (of_j, said_of_j), (of_h, said_of_h) = (_expression(rng, depth) for depth in (3, 2, 2))

    def f(x):
        def body(c, ix):
            j, h, total = c
            at = index(*ix, j, h)
            total += ta_read(BUFFER, at, mode="drop")[0]
            return (jnp.int32(of_j(*ix, j, h)), jnp.int32(of_h(*ix, j, h)), total), at

        steps = jnp.arange(T, dtype=jnp.int32)
        return lax.scan(body, (jnp.int32(2), jnp.int32(-1), jnp.float32(0)), (steps, x % 9 - 4), reverse=seed % 2 == 1)

    observed, claimed = observed_and_claimed(f, X)
    seen = Interval(int(observed.min()), int(observed.max()))
    assert claimed.holds(seen), f"{said} where j = {said_of_j}, h = {said_of_h}"
