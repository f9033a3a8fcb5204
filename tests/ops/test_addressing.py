"""Rows along another axis, elements, and windows of rows: what NumPy's indexing says, in place.

Their derivatives are the same ops at the same index: `test_starts.py` has those of random boxes.
"""

import re

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import ops
import oracle
import pytest
from hypothesis import given, settings
from in_place import assert_in_place
from jax import jit, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ops import OURS, assert_same
from waiting import finish

import jax_tensorarray as ta
from jax_tensorarray import _compat
from jax_tensorarray.export import disabled_checks

OPS = ("read", "write", "add", "max", "swap")


# --- against NumPy ---------------------------------------------------------------------------------------------


@st.composite
def addresses(draw):
    """A buffer's shape, an axis, the parts of an index (their values and dtypes), a length or None, and a mask.

    Last come the axes that the value and the mask leave to broadcasting, in bits. Now and then a buffer is empty.
    """
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    if draw(st.integers(0, 9)) == 9:
        shape = (*shape[:-1], 0)
    axis = draw(st.integers(0, len(shape) - 1))
    count = draw(st.integers(1, len(shape) - axis))
    common = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
    parts = []
    for size in shape[axis : axis + count]:
        keep = draw(st.integers(0, len(common)))
        own = tuple(n if draw(st.booleans()) else 1 for n in common[keep:])
        dtype = draw(st.sampled_from(["int8", "uint8", "int32", "uint32", "int64"]))
        low = 0 if dtype[0] == "u" else -2
        values = draw(st.lists(st.integers(low, size + 1), min_size=int(np.prod(own)), max_size=int(np.prod(own))))
        parts.append(np.array(values, dtype).reshape(own))
    length = draw(st.one_of(st.none(), st.integers(0, shape[axis + count - 1])))
    where = draw(st.one_of(st.none(), st.integers(0, 2**9 - 1)))
    return shape, axis, parts, length, where, draw(st.sampled_from([0, 1, 2, 6, 33, 35, 63]))


def given_as(x, bits):
    """`x` with axes of size 1 for broadcasting, as the first bits say, and without those in front if the last does."""
    for d in range(x.ndim):
        if bits >> d & 1:
            x = x.take([0], d) if x.shape[d] else x
    while bits >> 5 & 1 and x.ndim and x.shape[0] == 1:
        x = x[0]
    return x


def cells(shape, axis, parts, length, where, bits):
    """`[*I]` arrays: the coordinates along the addressed axes, and which positions take part."""
    common = np.broadcast_shapes(*(p.shape for p in parts))
    mask = np.full(common, True) if where is None else np.array([where >> k & 1 for k in range(9)], bool)
    mask = mask if where is None else np.broadcast_to(given_as(np.resize(mask, common), bits), common)
    at = [np.broadcast_to(p, common).astype(np.int64) for p in parts]
    if length is not None:
        at, mask = [a[..., None] + np.zeros(length, int) for a in at], mask[..., None] & np.full(length, True)
        at[-1] = at[-1] + np.arange(length)
    sizes = shape[axis : axis + len(parts)]
    inside = np.all([(a >= 0) & (a < n) for a, n in zip(at, sizes, strict=True)], 0) & mask
    return at, inside


def one_by_one(op, buffer, value, axis, at, inside):
    """One position after the other."""
    buffer, lead = buffer.copy(), (slice(None),) * axis
    rows = np.zeros((*buffer.shape[:axis], *inside.shape, *buffer.shape[axis + len(at) :]), buffer.dtype)
    for k in np.ndindex(inside.shape):
        if not inside[k]:
            continue
        cell, position = (*lead, *(int(a[k]) for a in at)), (*lead, *k)
        rows[position] = buffer[cell]
        if op != "read":
            new = {"add": np.add, "max": np.maximum}.get(op, lambda old, new: new)
            buffer[cell] = new(buffer[cell], value[position])
    return {"read": (rows,), "swap": (buffer, rows)}.get(op, (buffer,))


def call(op, buffer, parts, value, mask, axis, length, **options):
    index = tuple(parts) if len(parts) > 1 else parts[0]
    values = () if op == "read" else (value,)
    out = getattr(ta, f"ta_{op}")(buffer, index, *values, axis=axis, length=length, where=mask, **options)
    return out if isinstance(out, tuple) else (out,)


HOW = {
    "known": lambda f, buffer, parts, value, mask: f(buffer, parts, value, mask),
    "traced": lambda f, *args: jax.jit(f)(*args),
    "of many": lambda f, *args: nth(1, jit(jax.vmap(f))(*jax.tree.map(three, args))),
    "of one buffer": lambda f, buffer, *rest: nth(
        2, jit(jax.vmap(f, (None, *[0] * len(rest))))(buffer, *jax.tree.map(three, rest))
    ),
    "by one index": lambda f, buffer, parts, value, mask: nth(
        1, jit(jax.vmap(f, (0, None, 0, None)))(three(buffer), parts, three(value), mask)
    ),
    "in a loop": lambda f, buffer, parts, value, mask: in_a_loop(f, buffer, parts, value, mask),
}


def nth(n, results):
    return jax.tree.map(lambda x: np.asarray(x)[n], results)


def three(x):
    return np.stack([x] * 3)


def in_a_loop(f, buffer, parts, value, mask):
    """By a loop of one step, where ops are slices."""

    def run(buffer, parts, value, mask):
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(f, buffer, parts, value, mask))
        is_read = zeros[0].shape != buffer.shape
        start = zeros if is_read else (buffer, *zeros[1:])
        return lax.fori_loop(0, 1, lambda k, c: f(buffer if is_read else c[0], parts, value, mask), start)

    return jit(run)(buffer, parts, value, mask)


@pytest.mark.parametrize("how", HOW)
@settings(max_examples=2 * settings().max_examples // 5)
@given(address=addresses(), op=st.sampled_from(OPS), lowering=st.sampled_from(["auto", "xla", "ffi"]))
def test_an_op_is_what_numpy_says(how, address, op, lowering):
    shape, axis, parts, length, where, bits = address
    at, inside = cells(*address)
    rng = np.random.default_rng(3)
    buffer = rng.normal(size=shape)
    rows = (*shape[:axis], *inside.shape, *shape[axis + len(parts) :])
    value, mask = given_as(rng.normal(size=rows), bits), None
    if where is not None:
        common = np.broadcast_shapes(*(p.shape for p in parts))
        mask = given_as(np.resize(np.array([where >> k & 1 for k in range(9)], bool), common), bits)
    want = one_by_one(op, buffer, np.broadcast_to(value, rows), axis, at, inside)

    def f(buffer, parts, value, mask):
        return call(op, buffer, parts, value, mask, axis, length, mode="drop", lowering=lowering)

    got = HOW[how](f, buffer, parts, value, mask)
    for x, y in zip(got, want, strict=True):
        oracle.assert_same_bits(x, y)


INDICES = [2, np.int8(2), np.uint64(2), np.array(2), [2, 0, 2], [[0], [1]], [np.int8(1), 2], [], range(3)]
MASKS = [True, False, np.bool_(False), [True, False, True], [[True], [False]]]


@pytest.mark.parametrize("op", [ops.OPS["ta_read"], ops.OPS["ta_swap"]], ids=str)
def test_an_index_and_a_mask_may_be_of_python_or_numpy(op):
    rng = np.random.default_rng(1)
    buffer, value = rng.normal(size=(4, 2)), rng.normal(size=(2, 3, 2))
    many = np.array([[0, 1, 2], [3, 3, 3]])
    for index, value, where in [*((i, 7.0, None) for i in INDICES), *((many, value, w) for w in MASKS)]:
        operands = [index, *[value] * ("value" in op.operands), where]
        found = op(OURS, jnp.asarray(buffer), *operands, mode=None)
        operands[0] = np.asarray(index, int)
        assert_same(found, op(oracle, buffer, *operands))
    np.testing.assert_array_equal(ta.ta_read([1.0, 2.0, 3.0], [2, 0]), [3.0, 1.0])  # a list is a buffer too


# --- what is wrong ---------------------------------------------------------------------------------------------

BUFFER = jnp.zeros((3, 4, 5))


#: `test_arguments.py` has what is wrong with a single argument.
INTEGERS = "must be an integer or an array of integers, got"
AXES_OF = r"than there are axes in a buffer of shape \(3, 4, 5\)"
ARGUMENTS = [
    ((1, 2.0), {}, TypeError, rf"ta_read\(axis=1\): index {INTEGERS} 2.0"),
    ((1, (2,)), {}, TypeError, rf"ta_read\(axis=1\): index {INTEGERS} \(2,\)"),
    ((0, 0, 0, 0), {}, IndexError, f"index has 4 parts, more {AXES_OF}$"),
    ((0, 0), {"axis": 2}, IndexError, f"has 2 parts, more {AXES_OF} from axis 2 on"),
    (([0, 1], [0, 1, 2]), {}, ValueError, r"index has parts of shapes \(2,\) and \(3,\), which do not fit"),
    ((1, 4), {}, IndexError, r"ta_read\(axis=1\): index 4 is out of range for a buffer of size 4"),
    ((-1, 4), {}, IndexError, r"ta_read\(axis=0\): index -1 is out of range for a buffer of size 3"),
    (4, {"axis": 1}, IndexError, r"ta_read\(axis=1\): index 4 is out of range for a buffer of size 4"),
    (2, {"length": 2}, IndexError, "ta_read: index 3 is out of range for a buffer of size 3"),
    (2**40, {"length": 2}, IndexError, "ta_read: index 1099511627776 is out of range"),
    ((0, 3), {"length": 2}, IndexError, r"ta_read\(axis=1\): index 4 is out of range for a buffer of size 4"),
]


@pytest.mark.parametrize(("index", "keywords", "error", "text"), ARGUMENTS)
def test_an_argument_that_is_wrong_says_so(index, keywords, error, text):
    with pytest.raises(error, match=text):
        ta.ta_read(BUFFER, index, **keywords)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("in_a_loop", [False, True])
@pytest.mark.parametrize(
    ("f", "stray", "size"),
    [
        (lambda i: ta.ta_read(BUFFER, (i, 1)), (3, r"\(axis=0\)"), 3),
        (lambda i: ta.ta_read(BUFFER, (1, i)), (-1, r"\(axis=1\)"), 4),
        (lambda i: ta.ta_read(BUFFER, i, axis=2), (5, r"\(axis=2\)"), 5),
        (lambda i: ta.ta_read(BUFFER, i, axis=-1, length=2), (4, r"\(axis=2\)"), 5),
        (lambda i: ta.ta_read(BUFFER, i, length=2), (2, ""), 3),
        (lambda i: ta.ta_read(BUFFER, i.astype(jnp.uint32), length=2), (2**32 - 1, ""), 3),
    ],
)
def test_an_index_that_is_out_of_range_while_running_names_its_axis(f, stray, size, in_a_loop):
    index, where = stray
    # Of a window the first row that there is not.
    said = size if index < size and index >= 0 else index
    said = min(said, 2**31 - 1) if in_a_loop else said  # a loop records an int32

    def program(i):
        return lax.fori_loop(0, 2, lambda k, s: s + jnp.sum(f(i)), 0.0) if in_a_loop else f(i)

    with pytest.raises(
        (ValueError, jax.errors.JaxRuntimeError), match=f"ta_read{where}: index {said} is out of .*{size}"
    ):
        finish(jax.jit(program)(np.int64(index)))


def test_a_tuple_needs_integers_for_the_rows_of_each_axis():
    """Their product may be larger: kernels count in 64 bits."""
    with jax.enable_x64(False):
        square = jax.ShapeDtypeStruct((2**16, 2**16), jnp.int8)
        assert jax.eval_shape(lambda b: ta.ta_read(b, (1, 2)), square).shape == ()
        long = jax.ShapeDtypeStruct((2, 2**32), jnp.int8)
        with pytest.raises(OverflowError, match=r"addresses axes of the sizes \(2, 4294967296\) .*enable_x64"):
            jax.eval_shape(lambda b: ta.ta_read(b, (1, 2)), long)


def test_an_unsigned_window_does_not_wrap_to_the_first_rows():
    def f(i, mode):
        return ta.ta_write(jnp.zeros(5), i, jnp.ones(3), length=3, mode=mode)

    mapped = jax.jit(jax.vmap(f, (0, None)), static_argnums=1)
    got = mapped(np.array([2**32 - 1, 3, 1], np.uint32), "drop")
    np.testing.assert_array_equal(got, [[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 1, 1, 1, 0]])
    for mode in (None, "error"):
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=f"index {2**32 - 1} is out of range"):
            finish(mapped(np.array([1, 2**32 - 1], np.uint32), mode))


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("first", [1, -1, 3, 2**70, -(2**70), np.uint64(1), np.uint64(2**64 - 1)], ids=str)
@pytest.mark.parametrize("of_elements", [False, True])
def test_a_known_window_may_start_anywhere(first, of_elements):
    buffer = np.arange(1.0, 17.0).reshape(4, 4)
    rows = buffer[2] if of_elements else buffer
    want = [rows[int(first) + k] if 0 <= int(first) + k < 4 else rows[0] * 0 for k in range(2)]
    index = (2, first) if of_elements else first
    np.testing.assert_array_equal(ta.ta_read(buffer, index, length=2, mode="drop"), want)
    masked = jax.jit(lambda on: ta.ta_read(buffer, index, length=2, where=on))
    np.testing.assert_array_equal(masked(False), np.zeros_like(want))
    if of_elements:
        np.testing.assert_array_equal(ta.ta_read(buffer, index, mode="drop"), want[0])


@pytest.mark.parametrize("transform", ["forward", "vmap of grad"])
def test_a_loop_has_one_number_for_each_window(transform):
    """Whose rows no operation counts: it is moved as a whole."""
    f = TRANSFORMS[transform](windows)
    text = jax.jit(f).lower(jnp.ones((3, 40), jnp.float32), jnp.float32(0.5)).as_text()
    assert not [line for line in text.splitlines() if "stablehlo.iota" in line and "tensor<4x" in line]


# --- in place --------------------------------------------------------------------------------------------------


def elements(b, w):
    rows, steps = b.shape

    def body(c, i):
        b, s = c
        s = jnp.tanh(s + ta.ta_read(b, (i % rows, (7 * i) % steps)) * w)
        return (ta.ta_write(b, (i % rows, i), s), s), None

    return jnp.sum(lax.scan(body, (b, w), jnp.arange(steps))[0][0])


def columns(b, w):
    steps = b.shape[1]

    def body(c, i):
        b, s = c
        s = jnp.tanh(s + ta.ta_read(b, (7 * i) % steps, axis=1) * w)
        return (ta.ta_write(b, i, s, axis=1), s), None

    return jnp.sum(lax.scan(body, (b, b[:, 0]), jnp.arange(steps))[0][0])


def windows(b, w, length=4):
    b = b.T
    steps = len(b)

    def body(c, i):
        b, s = c
        s = jnp.tanh(s + ta.ta_read(b, (7 * i) % (steps - length + 1), length=length) * w)
        return (ta.ta_add(b, jnp.minimum(i, steps - length), s, length=length), s), None

    return jnp.sum(lax.scan(body, (b, b[:length]), jnp.arange(steps))[0][0])


def window_after_row(b, w):
    """A window is read of what a row has just been written into."""
    b = b.T
    steps = len(b)

    def body(b, i):
        b = ta.ta_write(b, i, jnp.sin(ta.ta_read(b, i // 2)) * w)
        return ta.ta_add(b, i // 3, jnp.full((3, 3), jnp.cos(w)), length=3), None

    return jnp.sum(lax.scan(body, b, jnp.arange(steps))[0])


LOOPS = {"elements": elements, "columns": columns, "windows": windows, "window_after_row": window_after_row}
TRANSFORMS = {
    "forward": lambda f: f,
    "grad": lambda f: jax.grad(f, (0, 1)),
    "vmap of grad": lambda f: lambda b, w: jax.vmap(jax.grad(f), (0, None))(jnp.stack([b] * 3), w),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("name", "transform"),
    [*((name, "grad") for name in LOOPS), ("window_after_row", "forward"), ("windows", "forward")]
    + [(name, "vmap of grad") for name in ("elements", "columns", "windows")],
)
def test_a_loop_is_in_place(name, transform):
    f = TRANSFORMS[transform](LOOPS[name])
    assert_in_place(f, lambda steps: (jnp.ones((3, steps), jnp.float32), jnp.float32(0.5)))


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("name", LOOPS if _compat.barriers_hold("cpu") else ["elements", "columns"])
def test_ops_in_a_loop_are_slices(name):
    """Also where each example has an index of its own. (Where branches order them, rows of some bytes stay calls.)"""
    args = jnp.ones((4, 3, 100), jnp.float32), jnp.ones(4, jnp.float32)
    text = jax.jit(jax.vmap(LOOPS[name])).lower(*args).compile().as_text()
    assert set(re.findall(r'custom_call_target="jax_tensorarray_(\w+)"', text)) <= {"check"}


def test_a_stored_function_has_elements_and_windows():
    def f(b, i):
        return ta.ta_add(b, (i, 1), ta.ta_read(b, i, axis=1)[0] + ta.ta_read(b, 0, length=2)[1, 1])

    args = jnp.arange(12.0).reshape(3, 4), jnp.int32(2)
    stored = jax.export.export(jax.jit(f), disabled_checks=disabled_checks())(*args).serialize()
    want = np.arange(12.0).reshape(3, 4)
    want[2, 1] += want[0, 2] + want[1, 1]
    np.testing.assert_array_equal(jax.export.deserialize(stored).call(*args), want)


# --- divided among devices ---------------------------------------------------------------------------------------

SPECS = [("x", None, None), (None, "x", None), (None, None, "x"), ("x", None, "y")]
DIVIDED = {
    "elements": ((jnp.array([5, 0, 9, 5]), jnp.array([3, 1, 0, 3])), {}),
    "rows along an axis": (jnp.array([3, 0, 3]), {"axis": 1}),
    "elements along axes": ((2, jnp.array([1, 7])), {"axis": 1}),
    "windows": (jnp.array([1, 4]), {"length": 3}),
}


@pytest.mark.slow
@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices: see tests/conftest.py")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_buffer_may_be_divided(kind):
    """Also along the axes that are addressed."""
    buffer = np.random.default_rng(0).normal(size=(8, 4, 8))

    def f(b):
        found = {("read", what): ta.ta_read(b, i, mode="drop", **how) for what, (i, how) in DIVIDED.items()}
        for n, (what, (i, how)) in enumerate(DIVIDED.items()):
            op = (ta.ta_add, ta.ta_swap)[n % 2]
            found["update", what] = op(b, i, 2.0, mode="drop", **how)
        return found

    want = jit(f)(buffer)
    for spec in SPECS if kind == AxisType.Auto else SPECS[-1:]:
        mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)
        with jax.set_mesh(mesh):
            found = jit(f)(jax.device_put(jnp.asarray(buffer), NamedSharding(mesh, P(*spec))))
            for what in want:
                assert_same(found[what], want[what])


@pytest.mark.parametrize("index, stray", [(2, False), (3, True), ((1, 4), True), ((1, 3), False)])
def test_a_stray_index_is_an_error_before_an_axis_without_elements(index, stray):
    """A random program found that no handler had seen the index: it was repeated for each of no buffers."""
    buffer, run = jnp.zeros((5, 0, 3, 4)), jax.jit(lambda b, i: ta.ta_write(b, i, ta.ta_read(b, i, axis=2), axis=2))
    assert jax.jit(lambda b, i: ta.ta_read(b, i, axis=2, mode="drop"))(buffer, index).shape[:2] == (5, 0)
    if not stray:
        assert_same(run(buffer, index), buffer)
        return
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="out of range"):
        finish(run(buffer, index))
