"""Row ops that XLA does with slices of its own: which these are, in place as well.

Their values: `test_passes.py`, `tests/ops/test_starts.py`. Every dtype: `tests/ops/test_dtypes.py`.
"""

import functools
import os
import re
import subprocess
import sys
from collections import Counter

import in_place
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import jit, lax
from row_programs import ours, programs

import jax_tensorarray as jt
from benchmarks.harm.programs.whole_arrays import column_and_row
from jax_tensorarray import _compat, ta_add, ta_read, ta_swap, ta_write
from jax_tensorarray._lowering import program
from jax_tensorarray._lowering.slices import use_slices
from jax_tensorarray._ops.calls import LOWERINGS
from jax_tensorarray.primitives import ta_add_p, ta_read_p, ta_swap_p, ta_write_p

T = 7
OPS = {"read": jt.ta_read, "write": jt.ta_write, "add": jt.ta_add, "swap": jt.ta_swap}


def calls(f, *args):
    """The kernels that a lowered program calls, in order, but for the one with which a record begins."""
    lines = jax.jit(f).lower(*args).as_text().splitlines()
    found = [re.search(r"custom_call @jax_tensorarray_(\w+)", line) for line in lines if 'op = "record"' not in line]
    return [match.group(1) for match in found if match]


def random(dtype, *shape):
    return oracle.random_bits(np.random.default_rng(0), shape, dtype)


def over_scan(op, at, lowering, mode=None, masked=False):
    """A scan that does an op in each step, on one buffer: the buffer at the end, and what the steps took out of it."""

    def body(buffer, step):
        i, value, where = step
        options = {"where": where} if masked else {}
        values = () if op == "read" else (value,)
        out = OPS[op](buffer, at(i), *values, mode=mode, lowering=lowering, **options)
        return (out[0], out[1]) if op == "swap" else (buffer, out) if op == "read" else (out, value)

    def f(buffer, values, where):
        return lax.scan(body, buffer, (jnp.arange(T), values, where))

    return f


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_the_gradient_of_an_op_is_lowered_as_it_is(lowering):
    def f(x):
        def body(b, ix):
            i, row = ix
            b = ta_write(b, i, jnp.tanh(ta_read(b, i // 2, lowering=lowering) + row), lowering=lowering)
            b, old = ta_swap(b, (i + 1) % T, row, lowering=lowering)
            return b, old

        return lax.scan(body, jnp.zeros_like(x), (jnp.arange(T), x))

    def loss(x):
        return sum(jnp.sum(y**2) for y in f(x))

    x = jnp.ones((T, 3))
    if lowering == "ffi":
        assert sorted(calls(jax.grad(loss), x)) == ["add", "read", "swap", "swap", "swap", "write"]
    else:
        assert calls(jax.grad(loss), x) == []


# --- which it is -----------------------------------------------------------------------------------------------


def buffers(*lengths):
    return [np.zeros((n, 3), np.float32) for n in lengths]


def in_loop(found):
    """Without the calls that raise after the loop what was out of range in it."""
    return [name for name in found if name != "check"]


def test_a_write_or_read_is_a_slice_in_every_version():
    for op in ("write", "read"):
        for index, behind in ((lambda i: i, []), (lambda i: i + 1, ["check"])):
            assert calls(over_scan(op, index, "auto"), *buffers(T, T), np.ones(T, bool)) == behind


def test_an_index_that_is_in_the_program_needs_no_check():
    assert calls(over_scan("write", lambda i: 3, "auto"), *buffers(T, T), np.ones(T, bool)) == []
    assert calls(lambda b: ta_read(b, 3), *buffers(T)) == []


def test_out_of_loops_an_op_raises_by_itself_or_is_asked_to_be_a_slice():
    assert calls(lambda b, i: ta_read(b, i), *buffers(T), 3) == ["read"]
    assert calls(lambda b, i: ta_read(b, i, mode="drop"), *buffers(T), 3) == []
    assert calls(lambda b, i: ta_read(b, i, lowering="xla"), *buffers(T), 3) == ["check"]


def test_ffi_makes_calls_of_all():
    for op in OPS:
        assert calls(over_scan(op, lambda i: 0, "ffi"), *buffers(T, T), np.ones(T, bool)) == [op]


@pytest.mark.parametrize("examples", [2, 30])
@pytest.mark.parametrize("own", [False, True], ids=["one index for all", "an index each"])
def test_rows_are_slices_or_one_scatter(own, examples):
    """All examples in one where they share an index; else as many slices as examples, or one scatter for many."""

    def f(buffer, k, values, where):
        return over_scan("write", lambda i: (i + k) % T, "auto")(buffer, values, where)

    # Rows of all examples that are short enough for a slice in every version.
    args = np.zeros((examples, T, 1), np.float16), np.arange(examples), np.zeros((T, 1), np.float16), np.ones(T, bool)
    g, args = jax.vmap(f, (0, 0 if own else None, None, None)), (args[0], args[1] if own else 0, *args[2:])
    few = 4 if jax.__version_info__ >= (0, 12) else 1
    assert in_loop(calls(g, *args)) == []
    assert jit(g).lower(*args).as_text().count('"stablehlo.scatter"') == (own and examples > few)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("masked", ["nothing", "examples", "rows"])
@pytest.mark.parametrize("examples", [3, 9])
@pytest.mark.parametrize("op", OPS)
def test_a_column_of_all_rows_has_one_index_per_example(op, examples, masked):
    """The rows of an example are in one slice or window, unless each has a mask: no array has an index for each row."""
    rows, columns = 11, 5
    r = np.random.default_rng(0)
    buffer, values = r.normal(size=(examples, rows, columns)), r.normal(size=(T, examples, rows))
    index, where = r.integers(0, columns, (T, examples)), r.random((T, examples, rows if masked == "rows" else 1)) < 0.5

    def of_row(b, i, x, p):
        options = {} if masked == "nothing" else {"where": p}
        if op == "read":
            return 0.5 * b, ta_read(b, i, **options)
        out = OPS[op](b, i, x, **options)
        return out if op == "swap" else (out, x)

    def f(buffer, *xs):
        step = jax.vmap(jax.vmap(of_row, (0, None, 0, 0 if masked == "rows" else None)))
        return lax.scan(lambda b, x: step(b, *x), buffer, xs)

    args = buffer, index, values, where if masked == "rows" else where[..., 0]
    b, want = buffer.copy(), []
    for t in range(T):
        y = values[t].copy() if op in ("write", "add") else np.zeros((examples, rows))
        for e in range(examples):
            some = np.flatnonzero(np.broadcast_to(where[t, e] | (masked == "nothing"), rows))
            old = b[e, some, index[t, e]].copy()
            if op != "read":
                b[e, some, index[t, e]] = values[t, e, some] + (old if op == "add" else 0)
            if op in ("read", "swap"):
                y[e, some] = old
        want.append(y)
        b = 0.5 * b if op == "read" else b
    program = jit(f).lower(*args).compile()
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), program(*args), (b, np.stack(want)))
    indices = re.findall(r"s(?:32|64)\[([\d,]+)\]", program.as_text())
    largest = max((np.prod([*map(int, of.split(","))]) for of in indices), default=0)
    is_call = op == "swap" and not _compat.barriers_hold("cpu")  # a call takes an index for each row
    assert largest < examples * rows or masked == "rows" or is_call


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("op", "shape"),
    [
        ("write", (50,)),
        ("write", "batch"),
        ("add", (50, 3)),
        ("add", (10, 5, 3)),
        ("max", (10, 5, 3)),
        ("max", "batch"),
    ],
    ids=str,
)
def test_many_rows_are_updated_by_one_scatter(op, shape):
    """Their values: `test_starts.py`."""
    batch, shape = ((4,), (50, 3)) if shape == "batch" else ((), shape)
    elem = shape[2:] if len(shape) == 3 else shape[1:]
    dims = len(shape) - len(elem)
    index = np.zeros((T, *batch, 24, *[dims] * (dims > 1)), int)
    where, values = np.ones((T, *batch, 24), bool), np.ones((T, *batch, 24, *elem), np.float32)
    params = {"mode": "drop", "index_dims": dims, "batch_dims": len(batch), "window": (), "whole": False, "op": op}
    bind = functools.partial(getattr(jt.primitives, f"ta_{op}_p").bind, **params, lowering="auto", is_tape=False)

    def steps(buffer):
        def step(b, x):
            i, p, v = x
            return bind(bind(b, i, v, reverse=False), i, v, p, reverse=True), None

        return lax.scan(step, buffer, (index, where, values))[0]

    assert in_loop(calls(steps, np.zeros((*batch, *shape), np.float32))) == []


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("batch", [(), (9,)])
@pytest.mark.parametrize("starts", [1, 6])
def test_windows_of_rows_are_slices_or_one_gather_and_one_scatter(starts, batch, masked):
    """Along the last of several axes. Their values: `test_starts.py`."""
    first, where = np.zeros((T, *batch, starts, 2), np.int32), np.ones((T, *batch, starts), bool)
    values = np.ones((T, *batch, starts, 3, 2), np.float32)
    params = {"mode": "drop", "index_dims": 2, "batch_dims": len(batch), "window": (3,), "op": "windows"}
    params |= {"lowering": "auto", "reverse": False, "whole": True, "is_tape": False}

    def steps(buffer):
        def step(b, x):
            i, p, v = x
            masks = [p] if masked else []
            rows = ta_read_p.bind(b, i, *masks, **params)
            b = ta_write_p.bind(b, i, v + 1, *masks, **params)
            return ta_add_p.bind(b, i, rows, *masks, **params), rows

        return lax.scan(step, buffer, (first, where, values))

    assert in_loop(calls(steps, np.zeros((*batch, 6, 8, 2), np.float32))) == []


@pytest.mark.parametrize("shape", [(300,), (300, 2), (20, 15, 2), "batch"], ids=str)
def test_many_rows_of_a_buffer_that_nobody_updates_are_one_gather(shape):
    """XLA fuses it with what uses the rows. Their values: `test_starts.py`."""
    batch = shape == "batch"
    shape = (40, 300, 2) if batch else shape

    def read(buffer, i, p):
        if len(shape) == 3 and not batch:
            i = (i // 15, i % 15)
        return jt.ta_read(buffer, i, mode="drop"), jt.ta_read(buffer, i, where=p, mode="drop")

    def over_scan(buffer, index, where):
        step = jax.vmap(read) if batch else read
        return lax.scan(lambda c, x: (c, jax.tree.map(jnp.sin, step(buffer, *x))), 0, (index, where))[1]

    args = np.zeros(shape, np.float32), np.zeros((T, 40), np.int32), np.ones((T, 40), bool)
    assert in_loop(calls(over_scan, *args)) == []
    assert jax.jit(over_scan).lower(*args).as_text().count('"stablehlo.gather"') == 2


def test_an_index_out_of_range_among_many_is_an_error():
    def f(buffer, index):
        return lax.scan(lambda c, i: (c + jt.ta_read(buffer, i), None), jnp.zeros(30), index)[0]

    index = np.arange(60).reshape(2, 30)
    np.testing.assert_array_equal(jax.jit(f)(np.arange(60.0), index), index[0] + index[1])
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="ta_read: index 59 is out of range"):
        jax.block_until_ready(jax.jit(f)(np.arange(59.0), index))


@pytest.mark.parametrize("rows", [4, 1 << 14])
def test_all_rows_are_written_where_the_index_says_also_with_a_mask(rows):
    """A masked write of all rows may be a select of all of the buffer if no index says which row goes where."""
    b, index, mask = np.zeros((4, rows)), np.array([2, 0, 3, 1]), np.array([True, False, True, True])
    row = np.arange(1.0, rows + 1)

    def f(b, index, row):
        return lax.fori_loop(0, 3, lambda k, b: ta_write(b, index, jnp.broadcast_to(row, b.shape), where=mask), b)

    want = b.copy()
    want[index[mask]] = row
    np.testing.assert_array_equal(jit(f)(b, index, row), want)


def test_a_buffer_is_for_slices_or_for_calls():
    """A call would demand a layout of what a barrier has passed, and XLA copy the buffer for it."""

    def loop(size):
        def body(b, i):
            b = ta_write(b, i, ta_read(b, i // 2) + 1)
            return ta_swap(b, (i + jnp.arange(size)) % T, 1.0)[0] if size else b, None

        return lambda b: lax.scan(body, b, jnp.arange(T))[0]

    assert in_loop(calls(loop(0), *buffers(T))) == []
    assert in_loop(calls(loop(2), *buffers(T))) == []
    assert in_loop(calls(loop(20), *buffers(T))) == ["read", "write", "swap"]


def test_after_a_loop_of_slices_the_buffer_may_be_read_by_a_call():
    def f(b, at):
        b, _ = lax.scan(lambda b, i: (ta_write(b, i, ta_read(b, i // 2) + 1), None), b, jnp.arange(T))
        return ta_read(b, at)

    assert in_loop(calls(f, *buffers(T), np.arange(20))) == ["read"]


def test_exported_programs_have_calls(tmp_path):
    """An exported program may run on another platform, and with an XLA that does not keep barriers."""
    f = over_scan("write", lambda i: i, "auto")
    exported = jax.export.export(jit(f), disabled_checks=jt.export.disabled_checks())(*buffers(T, T), np.ones(T, bool))
    assert "jax_tensorarray_write" in exported.mlir_module()


def test_a_buffer_that_is_divided_among_devices_is_for_calls():
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    f = over_scan("write", lambda i: i, "auto")
    assert calls(f, jax.device_put(np.zeros((8, 3), np.float32), rows), *buffers(T), np.ones(T, bool)) == ["write"]


@pytest.mark.parametrize("value", ["ffi", "xla"])
def test_the_environment_says_what_auto_is(value, monkeypatch):
    f = over_scan("write", lambda i: i, "auto")
    g = over_scan("write", lambda i: i, "ffi" if value == "xla" else "xla")
    monkeypatch.setenv("JAX_TENSORARRAY_LOWERING", value)
    args = *buffers(T - 1, T), np.ones(T, bool)
    assert calls(f, *args) == ["write" if value == "ffi" else "check"]
    assert calls(g, *args) == ["write" if value == "xla" else "check"]  # a call's own choice counts


def test_an_empty_variable_counts_as_not_set(monkeypatch):
    f, args = over_scan("write", lambda i: i, "auto"), (*buffers(T - 1, T), np.ones(T, bool))
    want = calls(f, *args)
    monkeypatch.setenv("JAX_TENSORARRAY_LOWERING", "")
    assert calls(over_scan("write", lambda i: i, "auto"), *args) == want


def test_another_value_is_an_error(monkeypatch):
    for op in OPS:
        with pytest.raises(ValueError, match=f'ta_{op}: lowering must be "auto", "ffi" or "xla", got \'llvm\''):
            over_scan(op, lambda i: i, "llvm")(*buffers(T, T), np.ones(T, bool))
    monkeypatch.setenv("JAX_TENSORARRAY_LOWERING", "llvm")
    with pytest.raises(ValueError, match="JAX_TENSORARRAY_LOWERING must be one of auto, ffi, xla, got 'llvm'"):
        jax.jit(over_scan("write", lambda i: i, "auto")).lower(*buffers(T, T), np.ones(T, bool))


def test_the_choice_is_a_parameter_of_the_primitives():
    for op, primitive in (("read", ta_read_p), ("write", ta_write_p), ("add", ta_add_p), ("swap", ta_swap_p)):
        jaxpr = jax.make_jaxpr(lambda b, op=op: OPS[op](b, 0, *([] if op == "read" else [1.0]), lowering="xla"))
        (eqn,) = [e for e in jaxpr(buffers(T)[0]).eqns if e.primitive is primitive]
        assert eqn.params["lowering"] == "xla"


def unrolled(steps, start):
    """A loop of Python. Nothing is large but the number of its operations."""

    def f(b, i):
        i = i * start
        for _ in range(steps):
            b = ta_write(b, i % 8, ta_read(b, i % 8) + 1)
            i = i + 1
        return b

    return f


@pytest.mark.slow
@pytest.mark.parametrize("start", [0, 1], ids=["known", "unknown"])
def test_to_choose_takes_work_in_proportion_to_the_program(start, monkeypatch):
    """By the number of functions that Python calls for it."""
    called = Counter()

    def counted(jaxpr, **kwargs):
        sys.setprofile(lambda frame, event, argument: called.update([steps] if event in ("call", "c_call") else []))
        try:
            return use_slices(jaxpr, **kwargs)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(program, "use_slices", counted)
    for steps in (30, 120):
        jax.jit(unrolled(steps, start)).lower(np.zeros((8, 2), np.float32), 3)
    assert 0 < called[30] < called[120] < 5 * called[30]


def test_a_long_way_to_an_index_is_no_error():
    def f(b, i):
        for k in range(3000):
            i = i + k
        return ta_read(b, i, mode="drop"), ta_read(b, jnp.clip(i, 0, T - 1))

    assert calls(f, *buffers(T), 3) == ["read"]


# --- in place --------------------------------------------------------------------------------------------------

#: tests/gpu has all programs by calls, as a GPU gets them.
BY_CALLS = ["three_reads", "read_old_after_write", "cross", "exchange", "swap", "add", "predicated", "branches"]
BY_CALLS += ["read_beside_cond", "closed_over_cond", "closed_over_scan", "inner_writes", "many_rows", "checkpointed"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lowering"), [(name, "ffi") for name in BY_CALLS] + [(n, "xla") for n in ("branches", "swap", "many_rows")]
)
def test_no_loop_copies_a_buffer_in_any_lowering(name, lowering, monkeypatch):
    """Forward and backward. That of "auto" is what all other tests look at."""
    monkeypatch.setenv("JAX_TENSORARRAY_LOWERING", lowering)
    f = jax.value_and_grad(programs[name].with_ops(ours))
    in_place.assert_in_place(f, lambda length: (jnp.ones((length, 8), jnp.float32),))


#: Updates of three rows, whose places and masks depend on what is in the buffer.
OF_THREE = {
    "write": lambda b, at, where: ta_write(b, at, jnp.sin(at.astype(b.dtype))[:, None] * jnp.ones(8), mode="drop"),
    "add": lambda b, at, where: ta_add(b, at, jnp.ones(8), mode="drop"),
    "swap": lambda b, at, where: ta_swap(b, at, b[0] + jnp.arange(3.0)[:, None], mode="drop")[0],
    "elements": lambda b, at, where: ta_write(b, (at, jnp.arange(3)), jnp.ones(3), mode="drop"),
    "where": lambda b, at, where: ta_add(b, jnp.arange(3), jnp.ones(8), where=where),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", OF_THREE)
def test_places_that_depend_on_the_buffer_are_made_before_it_is_updated(name):
    """XLA would make them again for each of the rows, of the buffer as it was."""

    def f(b):
        def step(b, i):
            i = i + jnp.int32(b[i // 2, 0] > 1)
            return OF_THREE[name](b, i - jnp.arange(3, dtype=i.dtype), b[i // 3, :3] > 0.5), None

        return lax.scan(step, b, jnp.arange(len(b), dtype=jnp.int32))[0]

    def args_of(length):
        return (jnp.linspace(0.0, 2.0, 8 * length).reshape(length, 8),)

    program = in_place.assert_in_place(f, args_of, 200)
    (b,), (want,) = args_of(200), map(np.array, args_of(200))
    for i in range(200):
        i += int(want[i // 2, 0] > 1)
        at, where = i - np.arange(3), want[i // 3, :3] > 0.5
        new = {"swap": want[0] + np.arange(3.0)[:, None], "write": np.sin(at)[:, None] * np.ones(8)}.get(name)
        for k in range(3):
            if name == "where":
                want[k] += where[k]
            elif 0 <= at[k] < 200:
                if name == "elements":
                    want[at[k], k] = 1
                else:
                    want[at[k]] = want[at[k]] + 1 if new is None else new[k]
    np.testing.assert_allclose(program(b), want, rtol=1e-12)


# --- indices that XLA believes something false of ----------------------------------------------------------------

ABSOLUTE = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax
import jax_tensorarray as jt

def clamped(b, i):
    row = lax.dynamic_slice(b, (i,), (1,), allow_negative_indices=False)
    return lax.dynamic_update_slice(b, 2 * row, (i,), allow_negative_indices=False)

ops = [jt.ta_read, jt.ta_write, jt.ta_add, jt.ta_max, jt.ta_swap]
b = jnp.arange(1.0, 6.0)

def results(index, n):
    two = jnp.stack([n, n])
    for op in ops:
        more = () if op is jt.ta_read else (7.0,)
        f = lambda b, n: jax.tree.leaves(op(b, index(n), *more, mode="drop"))
        yield f(b, n)
        yield f(b, two)
        yield jax.vmap(f, (None, 0))(b, two)
        yield jax.grad(lambda b: sum(map(jnp.sum, f(b, n))))(b)
        yield lax.scan(lambda b, n: (f(b, n)[0] if more else b, f(b, n)), b, two)
    yield jt.in_place(clamped)(b, index(n))
    yield jax.grad(lambda b: jnp.sum(jt.in_place(clamped)(b, index(n)) ** 2))(b)

def expected(op):
    # No row is there: zeros are read, and nothing is written.
    rows, row = [] if op is jt.ta_read else [np.array(b)], [0.0] * (op in (jt.ta_read, jt.ta_swap))
    one = [*rows, *row]
    several = [*rows, *(np.zeros(2) for _ in row)]
    both = [np.stack([x, x]) for x in one]
    return [one, several, both, np.full(5, float(bool(rows))), (np.array(b), both)]

absolute = [jnp.abs, jax.jit(lambda n: jnp.abs(jnp.abs(n))), lambda n: jnp.where(n >= 0, n, -n)]
for dtype in (np.int8, np.int32, np.int64):
    n = dtype(np.iinfo(dtype).min)
    for got in jax.jit(lambda n: [list(results(f, n)) for f in absolute])(n):
        *of_ops, moved, slope = got  # an index of a slice moves to the first row
        jax.tree.map(np.testing.assert_array_equal, of_ops, [x for op in ops for x in expected(op)])
        np.testing.assert_array_equal(moved, [2, 2, 3, 4, 5])
        np.testing.assert_array_equal(slope, [8, 4, 6, 8, 10])
"""


@pytest.mark.slow
def test_an_absolute_value_that_is_negative_is_out_of_range():
    """That of the least integer. XLA takes it for a number in range: without care the process ends."""
    environment = os.environ | {"JAX_ENABLE_X64": "1"}
    run = subprocess.run([sys.executable, "-c", ABSOLUTE], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, (run.returncode, run.stderr[-2000:])


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("of", ["row", "loop", "branch"])
def test_a_row_that_has_been_written_is_read_in_the_same_step(of):
    """Where no barrier holds, XLA would write it once more, into an array of its own, for the one who reads it."""

    def read(b, i):
        if of == "loop":
            return lax.fori_loop(0, 3, lambda k, x: x + jnp.mean(ta_read(b, (i + k) % len(b))), 0.0)
        if of == "branch":
            return lax.cond(i % 3 > 0, lambda: jnp.mean(ta_read(b, i)), lambda: 2.0)
        return jnp.mean(ta_read(b, i)) + 2 * jnp.mean(ta_read(b, i // 3))

    def f(b):
        def step(carry, i):
            b, total = carry
            b = ta_write(b, i, jnp.sin(ta_read(b, i // 2) + total))
            return (b, jnp.cos(read(b, i))), None

        return lax.scan(step, (b, 0.5), jnp.arange(len(b)))[0]

    def args_of(rows):
        return (jnp.linspace(-1, 1, rows * 64).reshape(rows, 64),)

    program = in_place.assert_in_place(f, args_of, 60)
    want, total = np.array(args_of(60)[0]), 0.5
    for i in range(60):
        want[i] = np.sin(want[i // 2] + total)
        if of == "loop":
            total = np.cos(sum(np.mean(want[(i + k) % 60]) for k in range(3)))
        elif of == "branch":
            total = np.cos(np.mean(want[i]) if i % 3 > 0 else 2.0)
        else:
            total = np.cos(np.mean(want[i]) + 2 * np.mean(want[i // 3]))
    np.testing.assert_allclose(program(*args_of(60))[0], want, rtol=1e-9, atol=1e-12)


@pytest.mark.skipif(not _compat.barriers_hold("cpu"), reason="where no barrier holds, XLA fuses the two")
@pytest.mark.parametrize("num_updates", [1, 3])
@pytest.mark.parametrize("begins", ["carried", "computed", "used later"])
@pytest.mark.parametrize("after", [lambda b, c: b + jnp.exp(c), lambda b, _: 0.9 * b], ids=["exp", "decay"])
def test_updates_are_in_no_fusion_with_the_arithmetic_after_them(after, begins, num_updates):
    """XLA computes that fusion without vectors."""

    def f(b, c, x):
        def step(b, i):
            new = 0.5 * b + 1 if begins == "computed" else b
            for k in range(num_updates):
                new = ta_write(new, i + k, x * i + k)
            new = after(new, c - i)
            return jnp.where(i % 2 == 0, new, b) if begins == "used later" else new, None

        return lax.scan(step, b, jnp.arange(5))

    b, c, x = np.ones((20, 24)), np.linspace(-1, 1, 480).reshape(20, 24), np.linspace(0, 1, 24)
    compiled = jax.jit(f).lower(b, c, x).compile()
    assert not any(in_place.fusions_that_update(compiled.as_text(), "20,24"))
    want = b.copy()
    for i in range(5):
        new = 0.5 * want + 1 if begins == "computed" else want.copy()
        for k in range(num_updates):
            new[i + k] = x * i + k
        if begins != "used later" or i % 2 == 0:
            want = np.array(after(new, c - i))
    np.testing.assert_allclose(compiled(b, c, x)[0], want, rtol=1e-12)


@pytest.mark.skipif(not _compat.barriers_hold("cpu"), reason="where no barrier holds, XLA fuses all")
@pytest.mark.parametrize(("num_updates", "axis"), [(2, 0), (5, 0), (2, 1)])
def test_only_a_few_whole_rows_of_zeros_are_in_a_fusion_with_arithmetic(num_updates, axis):
    def f(b, xs):
        def step(b, x):
            k, x = x
            rows = jnp.zeros_like(b)
            for n in range(num_updates):
                at = (slice(None),) * axis + (3 * k + n,)
                rows = rows.at[at].set(x)
            return b - 0.5 * rows, None

        return lax.scan(step, b, (jnp.arange(len(xs)), xs))[0]

    b, xs = np.sin(np.arange(400.0)).reshape(20, 20), np.arange(20 * 4.0).reshape(4, 20)
    compiled = in_place.compiled(jt.in_place(f), b, xs)
    assert any(in_place.fusions_that_update(compiled.as_text(), "20,20")) == (num_updates < 5 and axis == 0)
    want = b.copy()
    for k, x in enumerate(xs):
        for n in range(num_updates):
            (want if axis == 0 else want.T)[3 * k + n] -= 0.5 * x
    np.testing.assert_allclose(compiled(b, xs), want, rtol=1e-12)


@pytest.mark.skipif(not _compat.barriers_hold("cpu"), reason="where no barrier holds, XLA fuses the two")
@pytest.mark.parametrize("size", [40, 4000])
@pytest.mark.parametrize("read", [lambda b, c: c + b, lambda b, c: c + jnp.sum(b * b)], ids=["add", "sum"])
def test_an_array_is_updated_once_though_it_is_also_read(read, size):
    def f(b, places):
        def step(carry, i):
            b, c = carry
            b = b.at[i].set(0.5 * i)
            return (b, read(b, c)), None

        return lax.scan(step, (b, jnp.zeros_like(b)), places)[0]

    b, places = np.sin(np.arange(float(size))), np.array([3, 0, 39, 3])
    compiled = in_place.compiled(jt.in_place(f), b, places)
    assert len(re.findall(rf"= f64\[{size}\]\S* dynamic-update-slice\(", compiled.as_text())) == 1
    want, total = b.copy(), np.zeros_like(b)
    for i in places:
        want[i] = 0.5 * i
        total = np.array(read(want, total))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), compiled(b, places), (want, total))


@pytest.mark.skipif(not _compat.barriers_hold("cpu"), reason="a branch reads the column")
@pytest.mark.parametrize("examples", [0, 3])
def test_a_column_is_read_where_it_is_updated_though_a_row_is_read_after(examples):
    f, args = column_and_row, (np.ones((40, 16)), np.array([3, 39, 0, 3, 7]), np.linspace(1, 2, 5))
    if examples:
        f, args = jax.vmap(f), [np.stack([x + 0 * k for k in range(examples)]) for x in args]
    compiled = in_place.compiled(jt.in_place(f), *args)
    assert not re.search(r"= f64\[(3,)?40\]\S* fusion\(", compiled.as_text())  # the columns alone
    sums = 0.01 * np.cumsum(args[2], -1)
    want = args[0].copy()
    want[..., 2] += sums[..., -1:]
    end, found = compiled(*args)
    np.testing.assert_allclose(end, want, rtol=1e-12)
    np.testing.assert_allclose(found, 16 + sums, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.skipif(not _compat.barriers_hold("cpu"), reason="where no barrier holds, a call is needed")
def test_zeros_that_loops_begin_with_again_are_passed_by_no_call():
    """A call there would make calls of all updates in the loops, which XLA compiles as one function without."""

    def f(x):
        zeros = jnp.zeros((10, x.size))

        def again(k, x):
            def step(i, s):
                b, x = s
                b = lax.cond(i % 2 == 0, lambda: ta_write(b, i, jnp.sin(x)), lambda: b)
                return b, x + ta_read(b, i // 2)

            return lax.fori_loop(0, k, step, (zeros, x))[1]

        return lax.fori_loop(0, 5, again, x)

    x = np.linspace(-1, 1, 64)
    assert calls(lambda x: lax.fori_loop(0, 4, lambda _, x: f(x), x), x) == []
    want = x
    for k in range(5):
        b = np.zeros((10, 64))
        for i in range(k):
            if i % 2 == 0:
                b[i] = np.sin(want)
            want = want + b[i // 2]
    np.testing.assert_allclose(jit(f)(x), want, rtol=1e-12)


@pytest.mark.skipif(not _compat.barriers_hold("cpu"), reason="no barrier separates the two")
@pytest.mark.parametrize("examples", [0, 3])
def test_an_update_is_not_fused_with_the_arithmetic_before_it(examples):
    """XLA computes the fusion without vectors."""

    def f(b, k, values):
        def step(b, value):
            return jnp.sin(ta_write(0.5 * b + value, k, value)) - value, None

        return lax.scan(step, b, values)[0]

    args = np.sin(np.arange(600.0)), np.int32(7), np.cos(np.arange(4.0))
    if examples:
        f, args = jax.vmap(f), [np.stack([x + 0 * k for k in range(examples)]) for x in args]
    compiled = in_place.compiled(f, *args)
    hlo = in_place.hlo_text.Hlo(compiled.as_text())
    updated = [
        operations[i.operands[0]].opcode
        for operations in hlo.computations.values()
        for i in operations.values()
        if i.opcode == "dynamic-update-slice" and i.num_bytes >= 600 * 8
    ]
    assert updated and set(updated) <= {"parameter", "dynamic-update-slice"}
    want = args[0]
    for step in range(4):
        value = args[2][..., step : step + 1]
        want = 0.5 * want + value
        want[..., 7] = value[..., 0]
        want = np.sin(want) - value
    np.testing.assert_allclose(compiled(*args), want, rtol=1e-12)


@pytest.mark.skipif(
    not _compat.barriers_hold("cpu"), reason="before jax 0.12 no loop of more than 1 KiB is one function"
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("in_branch", ["nothing", "the update", "the arithmetic"])
@pytest.mark.parametrize("num_bytes", [1 << 10, 1 << 18])
def test_arithmetic_that_plain_jax_does_in_threads_is_in_no_function_of_the_loop(num_bytes, in_branch, dtype):
    """XLA for CPUs compiles a loop without a scatter or call as one function, which has one thread."""

    def f(b, i, values):
        def step(b, value):
            def perhaps(what, change, b):
                return lax.cond(value[0] > 0, change, lambda b: b, b) if in_branch == what else change(b)

            b = perhaps("the arithmetic", lambda b: 0.5 * b, b)
            return perhaps("the update", lambda b: b.at[i].add(value), b), None

        return lax.scan(step, b, values)[0]

    size = num_bytes // jnp.dtype(dtype).itemsize
    args = [np.linspace(0.5, 1, size).astype(dtype), np.array([3, 7]), np.array([[0.5, 2], [-1, 2]], dtype)]
    compiled, plain = (in_place.compiled(g, *args) for g in (jt.in_place(f), f))
    is_one, plain_is = ("xla_cpu_small_call" in x.as_text() for x in (compiled, plain))
    assert not plain_is and is_one == (num_bytes < 1 << 18)
    assert dtype == "bfloat16" or "jax_tensorarray" not in compiled.as_text()  # a scatter is enough
    np.testing.assert_array_equal(compiled(*args), plain(*args))


@pytest.mark.skipif(not _compat.barriers_hold("cpu"), reason="no barrier separates the two")
@pytest.mark.parametrize(
    "compute",
    [
        pytest.param(jax.nn.relu, id="a call with a derivative of its own"),
        pytest.param(lambda b: -b, id="cheap"),
        pytest.param(lambda b: lax.clamp(-1.0, b, 1.0), id="of three operands"),
        pytest.param(lambda b: b / jnp.sum(b), id="by a number of each example"),
    ],
)
def test_an_update_of_examples_is_apart_from_what_computes_its_array(compute):
    def f(b, rows):
        return lax.scan(lambda b, i: (compute(b).at[i].multiply(2.0), None), b, rows)[0]

    args = [np.linspace(0, 9, 4 * 4000).reshape(4, 4000), np.arange(4 * 7).reshape(4, 7)]
    compiled, plain = (in_place.compiled(g, *args) for g in (jt.in_place(jax.vmap(f)), jax.vmap(f)))
    moved, most = (in_place.whole_buffer_operations_per_step(x.as_text(), args[0].nbytes) for x in (compiled, plain))
    assert moved <= most
    np.testing.assert_array_equal(compiled(*args), plain(*args))


@pytest.mark.parametrize("reads", [True, False])
def test_a_one_hot_vector_that_a_step_reads_is_not_stored(reads):
    is_behind_branch = reads and not _compat.barriers_hold("cpu")  # then XLA stores what the branch reads

    def f(b, places):
        def step(b, place):
            here = jnp.zeros(len(b)).at[place].set(1)
            return 0.9 * b + here, here[place // 2] if reads else b[place]

        return lax.scan(step, b, places)

    places, b = np.array([3, 0, 500, 599, 1]), np.sin(np.arange(600.0))
    compiled = in_place.compiled(jt.in_place(f), b, places)
    moved, most = (
        in_place.whole_buffer_operations_per_step(x.as_text(), b.nbytes)
        for x in (compiled, in_place.compiled(f, b, places))
    )
    assert moved <= most + is_behind_branch
    end, out = compiled(b, places)
    for k, place in enumerate(places):
        assert out[k] == (place // 2 == place if reads else b[place])
        b = 0.9 * b
        b[place] += 1
    np.testing.assert_allclose(end, b)
