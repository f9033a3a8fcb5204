"""An index is checked unless it is in range whatever the data: random expressions of integers, against NumPy."""

import re
from typing import Any, NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_passes import ALL, by_passes
from hypothesis import given, settings
from jax import jit, lax
from library_in_numpy import library_in_numpy

from jax_tensorarray import ta_read
from jax_tensorarray._lowering import bounds, program
from jax_tensorarray._lowering.scopes import Scope, addresses_rows
from jax_tensorarray._ops.calls import PREFIX

#: Data, so that nothing is known of it: as many numbers as a loop has steps at most, some of them large.
DATA = np.array([3, 0, -2, 7, 2**31 - 1, 1, -(2**31)], np.int32)

int32 = jnp.int32

# --- expressions: k is the number of a step, c what the loop carries, x a number of the data -------------------

LEAVES = st.sampled_from([("k",), ("c",), ("x",), ("c",), ("k",)]) | st.tuples(st.just("number"), st.integers(-3, 6))
COMPARED = ["less", "less_equal", "greater", "greater_equal"]
PAIRS = ["add", "subtract", "multiply", "maximum", "minimum", "floor_divide", "remainder", "fmod", "where", *COMPARED]


def larger(inner):
    pairs = st.tuples(st.sampled_from(PAIRS), inner, inner)
    dtypes = st.sampled_from(["int8", "uint8", "int16", "uint32", "int64", "bool"])
    others = st.tuples(st.sampled_from(["jit", "joined", "strided", "sign", "up", "down", "switch"]), inner)
    clamped = st.tuples(st.just("clamp"), inner, inner, inner)
    return pairs | pairs | st.tuples(st.just("as"), dtypes, inner) | others | clamped


EXPRESSIONS = st.recursive(LEAVES, larger, max_leaves=5)

one_more = jax.jit(lambda x: x + jnp.int32(1))  # one function, wherever it is called


def value(xp, e, k, c, x):
    """An int32. Sums wrap as those of NumPy's arrays do."""
    kind, *parts = e
    if kind in ("k", "c", "x"):
        return {"k": k, "c": c, "x": x}[kind]
    if kind == "number":
        return xp.asarray(parts[0], xp.int32)
    if kind == "as":
        return value(xp, parts[1], k, c, x).astype(parts[0]).astype(xp.int32)
    first, *others = (value(xp, part, k, c, x) for part in parts)
    if kind == "jit":
        return first + xp.int32(1) if xp is np else one_more(first)
    if kind == "joined":
        return xp.concatenate([xp.stack([first, k])[::-1], xp.arange(3, dtype=xp.int32)])[xp.abs(x % 5)]
    if kind == "strided":  # the first part of what is joined would fit
        parts = xp.arange(2, dtype=xp.int32), xp.stack([first, k])
        joined = xp.concatenate(parts)
        return (joined[::2] if xp is np else lax.slice(joined, (0,), (4,), (2,)))[xp.abs(x % 2)]
    if kind == "clamp":  # XLA's upper bound is the stronger one
        return (
            np.minimum(np.maximum(first, others[0]), others[1]) if xp is np else lax.clamp(others[0], first, others[1])
        )
    if kind in ("up", "down"):
        by = 2 if kind == "up" else -2
        if xp is np:
            return first + np.int32(3 * by)
        return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] + by), (0, first))[1]
    if kind == "switch":
        return [first, k, c][x % 3] if xp is np else lax.switch(x % 3, [lambda: first, lambda: k, lambda: c])
    if kind in ("where", *COMPARED):
        return xp.where(x % 2 == 0 if kind == "where" else getattr(xp, kind)(first, others[0]), first, others[0] + 1)
    if kind in ("floor_divide", "remainder", "fmod"):
        others = [xp.where(others[0] == 0, xp.int32(3), others[0])]
    return getattr(xp, kind)(first, *others)


#: kind of a loop -> the numbers of its steps, given where it begins and how many steps it takes at most
LOOPS = {
    "fori": lambda start, n: range(start, start + n),
    "scan": lambda start, n: range(start, start + n),
    "reverse": lambda start, n: range(start + n - 1, start - 1, -1),
    "while": lambda start, n: range(start, start + 2 * n, 2),  # while c does not exceed 20
    "inner": lambda start, n: [start + i + j for i in range(n) for j in range(2)],
}


class Program(NamedTuple):
    """A loop that in each step reads the rows `index` and `behind`, and carries the latter next."""

    loop: str
    start: int
    n: int  #: the number of steps, or more than that
    first: int
    index: Any
    behind: Any


def in_numpy(p):
    """The rows that are read, in order."""
    c, found = np.int32(p.first), []
    with np.errstate(over="ignore"):
        for step, k in enumerate(LOOPS[p.loop](p.start, p.n)):
            if p.loop == "while" and c > 20:
                break
            at = np.asarray(k, np.int32), c, DATA[step // 2 if p.loop == "inner" else step]
            index, c = (np.asarray(value(np, e, *at), np.int32)[()] for e in (p.index, p.behind))
            found += [int(index), int(c)]
    return found


def in_jax(p, read, read_behind, read_again):
    """The sum of what these give of them, the last of the first of each step after a scan."""
    data = jnp.asarray(DATA)

    def body(c, total, k, x):
        index, behind = (value(jnp, e, k, c, x) for e in (p.index, p.behind))
        return behind, total + read(index) + read_behind(behind), index

    carry, start, end = (int32(p.first), 0.0), int32(p.start), int32(p.start + p.n)
    if p.loop == "fori":
        return lax.fori_loop(start, end, lambda k, s: body(*s, k, data[k - p.start])[:2], carry)[1]
    if p.loop == "while":

        def goes_on(s):
            return (s[0] < p.start + 2 * p.n - 1) & (s[1] <= 20)

        def one(s):
            return s[0] + int32(2), *body(*s[1:], s[0], data[(s[0] - p.start) // 2])[:2]

        return lax.while_loop(goes_on, one, (start, *carry))[2]
    if p.loop == "inner":

        def outer(i, s):
            return lax.fori_loop(int32(0), int32(2), lambda j, s: body(*s, p.start + i + j, data[i])[:2], s)

        return lax.fori_loop(int32(0), int32(p.n), outer, carry)[1]

    def step(s, kx):
        c, total, index = body(*s, *kx)
        return (c, total), index

    reverse = p.loop == "reverse"
    xs = jnp.arange(p.start, p.start + p.n, dtype=int32), data[: p.n][::-1] if reverse else data[: p.n]
    (_, total), kept = lax.scan(step, carry, xs, reverse=reverse)
    return total + lax.scan(lambda t, i: (t + read_again(i), None), 0.0, kept)[0]  # as a gradient does


def programs(loop):
    numbers = st.integers(-2, 3), st.integers(0, 5), st.integers(-1, 4)
    return st.builds(Program, st.just(loop), *numbers, EXPRESSIONS, EXPRESSIONS)


@pytest.mark.parametrize("loop", LOOPS)
@settings(max_examples=6 * settings().max_examples // 5)
@given(data=st.data())
def test_bounds_hold_whatever_an_index_is(loop, data):
    p, claimed, of = data.draw(programs(loop)), [], bounds.BoundsOf()

    def visit(scope):
        for eqn in scope.jaxpr.eqns:
            if addresses_rows(eqn):
                claimed.append((of(scope, eqn.invars[1]), eqn.invars[0].aval.shape[0]))
            for inner in scope.scopes_in(eqn):
                visit(inner)

    def listen(jaxpr, **_):
        visit(Scope(jaxpr))
        return jaxpr

    reads = [jax.jit(lambda i, n=n: ta_read(jnp.arange(n), i)) for n in (3.0, 4.0, 5.0)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "mark_those_in_range", listen)
        jax.jit(lambda: in_jax(p, *reads)).lower()
    rows = in_numpy(p)
    assert claimed or not rows
    for found, size in claimed if rows else []:
        own = rows[int(size == 4) :: 2]
        assert found is None or found[0] <= min(own) <= max(own) <= found[1]


def passed(f):
    """What the passes make of a function, run by NumPy."""
    return library_in_numpy(f, by_passes(ALL))


@pytest.mark.parametrize("loop", LOOPS)
@settings(max_examples=settings().max_examples // 3)
@given(data=st.data(), near=st.sampled_from([(0, 0), (0, -1), (-1, 0), (1, 0)]), is_wide=st.booleans())
def test_an_index_out_of_range_is_found_whatever_it_is(loop, data, near, is_wide):
    stray_is_found(jit, loop, data, near, is_wide)


@pytest.mark.parametrize("loop", LOOPS)
@settings(max_examples=settings().max_examples * 4)
@given(data=st.data(), near=st.sampled_from([(0, 0), (0, -1), (-1, 0), (1, 0)]), is_wide=st.booleans())
def test_passes_leave_an_index_out_of_range_whatever_it_is(loop, data, near, is_wide):
    stray_is_found(passed, loop, data, near, is_wide)


def stray_is_found(compiled, loop, data, near, is_wide):
    """`near` says how many rows more or less there are than are read, at the beginning and at the end.

    Unless an index is made of another dtype first, the pass also writes it by fewer operations.
    """
    p = data.draw(programs(loop))
    want = in_numpy(p)
    size = min(max(max(want, default=0) - min(want, default=0) + 1 + sum(near), 1), 40)
    shift = near[0] - min(want, default=0)

    if not is_wide:
        shift = int(np.clip(shift, -(2**31), 2**31 - 1))
    moved = [i + shift for i in want] if is_wide else [(i + shift + 2**31) % 2**32 - 2**31 for i in want]

    def read(index):
        return ta_read(jnp.arange(float(size)), index.astype(jnp.int64) + shift if is_wide else index + shift)

    f = compiled(lambda: in_jax(p, read, read, read))
    if strays := [i for i in moved if not 0 <= i < size]:
        name = "ta_read: " if compiled is jit else ""
        told = np.clip(strays[0], -(2**31), 2**31 - 1)  # as the record of a loop has it
        text = f"{name}index {told} is out of range for a buffer of size {size}"
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=text):
            jax.block_until_ready(f())
    else:
        assert f() == sum(moved) + (sum(moved[::2]) if p.loop in ("scan", "reverse") else 0)


TWO = np.zeros(2, np.int32)


def simplified(write):
    """The sum of the rows 0 to 9 that are read at `write(j)` in the steps 0 to 9."""
    return lambda: lax.fori_loop(int32(0), int32(10), lambda j, x: x + ta_read(jnp.arange(10.0), write(j)).sum(), 0.0)


@pytest.mark.parametrize(
    ("write", "want"),
    [
        (lambda j: lax.clamp(int32(0), int32(7), j), 42),  # the upper limit is what varies
        (lambda j: lax.clamp(j, int32(7), int32(9)), 73),  # the lower one
        (lambda j: lax.clamp(int32(0), j, int32(9)), 45),
        (lambda j: lax.slice(jnp.concatenate([jnp.arange(2, dtype=int32), j + TWO]), (0,), (4,), (2,)), 45),
    ],
)
def test_an_index_that_is_written_by_fewer_operations_is_the_same(write, want):
    assert jit(simplified(write))() == want


# --- what needs no check ---------------------------------------------------------------------------------------


def checks(f, *args):
    return re.search(f"{PREFIX}check.*strict = true", jax.jit(f).lower(*args).as_text()) is not None


B = jnp.zeros(8)


def in_pairs(b, pairs):
    """Count and read twice in each step, as a loop does whose buffers change places."""
    step = lambda s: (s[0] + 1, s[1] + ta_read(b, s[0]))  # noqa: E731
    return lax.fori_loop(0, pairs, lambda _, s: step(step(s)), (0, 0.0))[1]


FREE = {
    "the number of a step": lambda b: lax.fori_loop(0, 8, lambda i, x: x + ta_read(b, i), 0.0),
    "from the end": lambda b: lax.fori_loop(0, 8, lambda i, x: x + ta_read(b, len(b) - 1 - i), 0.0),
    "arange": lambda b: lax.scan(lambda x, i: (x + ta_read(b, i), None), 0.0, jnp.arange(8))[0],
    "near a step": lambda b: lax.fori_loop(0, 8, lambda i, x: x + ta_read(b, jnp.maximum(i - 1, 0)), 0.0),
    "several rows": lambda b: lax.fori_loop(0, 6, lambda i, x: x + ta_read(b, i + jnp.arange(3)).sum(), 0.0),
    "loop in a loop": lambda b: lax.fori_loop(
        0, 4, lambda i, x: lax.fori_loop(0, 5, lambda j, x: x + ta_read(b, i + j), x), 0.0
    ),
    "a function": lambda b: lax.fori_loop(0, 8, lambda i, x: x + jax.jit(ta_read)(b, i), 0.0),
    "one condition of two": lambda b: lax.while_loop(
        lambda s: (s[0] < 8) & (s[1] < 3), lambda s: (s[0] + 1, s[1] + ta_read(b, s[0])), (0, 0.0)
    )[1],
    "under vmap": jax.vmap(lambda x: lax.fori_loop(0, 8, lambda i, x: x + ta_read(B, i), x)),
    "two steps in one": lambda b: in_pairs(b, 4),
    "quotient": lambda b: lax.fori_loop(0, 16, lambda i, x: x + ta_read(b, i // 2), 0.0),
    "ring": lambda b: lax.fori_loop(0, 16, lambda i, x: x + ta_read(b, (i * 3 + 1) % 8), 0.0),
    "gradient": jax.grad(lambda b: lax.scan(lambda x, i: (jnp.sin(x * ta_read(b, i)), None), 1.0, jnp.arange(8))[0]),
}
CHECKED = {
    "two steps more, in one": lambda b: in_pairs(b, 5),
    "one step more": lambda b: lax.fori_loop(0, 9, lambda i, x: x + ta_read(b, i), 0.0),
    "a start below": lambda b: lax.fori_loop(-1, 7, lambda i, x: x + ta_read(b, i), 0.0),
    "data": lambda b: lax.fori_loop(0, 8, lambda i, x: x + ta_read(b, b[i].astype(int)), 0.0),
    "a remainder below 0": lambda b: lax.fori_loop(-4, 4, lambda i, x: x + ta_read(b, lax.rem(i, 8)), 0.0),
    "a dtype too small": lambda b: lax.fori_loop(0, 300, lambda i, x: x + ta_read(b, i.astype("int8") % 8), 0.0),
    "a number that wraps before it is large enough": lambda b: lax.while_loop(
        lambda s: (s[0] < 127) & (s[1] < 100),
        lambda s: (s[0] + jnp.int8(2), s[1] + ta_read(b, s[0] // 16)),
        (jnp.int8(0), 1.0),
    )[1],
    **{
        f"almost a quotient, {what}": lambda b, x=x, y=y, sign=sign: lax.fori_loop(
            0, 8, lambda i, t: t + ta_read(b, jnp.where((jnp.sign(x(i)) != sign) & (lax.rem(y(i), 2) != 0), 8, 0)), 0.0
        )
        for what, x, y, sign in (
            ("of two numbers", lambda i: i, lambda i: i + 1, 1),
            ("of a number below 0", lambda i: i - 1, lambda i: i - 1, 1),
            ("of another sign", lambda i: i, lambda i: i, 0),
        )
    },
}


def test_what_is_checked():
    assert {what for what, f in (FREE | CHECKED).items() if checks(f, B)} == set(CHECKED)
