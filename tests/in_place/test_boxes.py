"""Boxes of a buffer are read and written where they are: tiles, `k[l, :, t]`, slices with steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_numpy import in_numpy as oracle
from in_place import assert_no_whole_buffer_copy, compiled
from jax import lax

from jax_tensorarray import in_place
from jax_tensorarray._compat import barriers_hold

pytestmark = pytest.mark.slow(but=2)

STEPS, EXAMPLES = 30, 3

#: name -> the shape of a buffer, and the sizes of a box in it
BOXES = {
    "a tile": ((40, 12), (4, 5)),
    "a column of elements": ((40, 12), (6, 1)),
    "more rows than int8 has": ((200, 12), (4, 5)),
    "axes apart": ((3, 5, 40, 4), (1, 5, 1, 4)),
    "elements of axes apart": ((10, 3, 9), (1, 3, 1)),
    "a batch in front": ((2, 40, 12), (2, 4, 5)),
    "whole rows": ((30, 12, 3), (4, 5, 3)),
    "three axes": ((10, 9, 8), (2, 3, 4)),
}
DTYPES = (np.int32, np.int8, np.int64, np.uint8)


def sliced(b, at, to, x, sizes):
    box = lax.dynamic_slice(b, list(at), sizes)
    return box, lax.dynamic_update_slice(b, jnp.sin(box) + x, list(to))


def gathered(b, at, to, x, sizes, *, mode, update=lax.scatter):
    axes = tuple(range(b.ndim))
    dims = lax.GatherDimensionNumbers(offset_dims=axes, collapsed_slice_dims=(), start_index_map=axes)
    box = lax.gather(b, at, dims, sizes, mode=mode, fill_value=0.5)
    dims = lax.ScatterDimensionNumbers(axes, (), axes)
    return box, update(b, to, jnp.sin(box) + x, dims, mode=mode)


#: name -> what a step does, and where a box is that starts out of range: moved, left out, or counted from the end
KINDS = {
    "slice": (sliced, "wrap"),
    "drop": (functools.partial(gathered, mode="drop"), "drop"),
    "clip": (functools.partial(gathered, mode="clip"), "clip"),
    "add": (functools.partial(gathered, mode="drop", update=lax.scatter_add), "drop"),
}


def place(shape, sizes, start, kind):
    """The part of an array of a shape that is a box, None for none."""
    start = [int(s) + n if kind == "wrap" and s < 0 else int(s) for s, n in zip(start, shape, strict=True)]
    inside = [min(max(s, 0), n - m) for s, n, m in zip(start, shape, sizes, strict=True)]
    return None if kind == "drop" and inside != start else tuple(map(slice, inside, np.add(inside, sizes)))


def in_numpy(b, at, to, x, sizes, name):
    b, boxes, (_, kind) = b.copy(), [], KINDS[name]
    for k in range(STEPS):
        of = place(b.shape, sizes, at[k], kind)
        boxes.append(np.full(sizes, 0.5) if of is None else b[of].copy())
        of = place(b.shape, sizes, to[k], kind)
        if of is not None:
            b[of] = np.sin(boxes[-1]) + x[k] + (b[of] if name == "add" else 0)
    return b, np.stack(boxes)


def program(name, sizes):
    def f(b, at, to, x):
        def step(b, s):
            box, b = KINDS[name][0](b, *s, sizes)
            return b, box

        return lax.scan(step, b, (at, to, x))

    return f


def loss(f):
    return lambda *args: sum(jnp.sum(jnp.sin(x)) for x in f(*args))


def arguments(shape, dtype, seed):
    """A buffer, where boxes are read and written, some of them out of range, and numbers."""
    random = np.random.default_rng(seed)
    most = 127 if max(shape) > 127 else 40
    least = 0 if max(shape) > 127 or dtype == np.uint8 else -4
    places = random.integers(-4, np.add(shape, 3), (2, EXAMPLES, STEPS, len(shape)))
    at, to = np.clip(places, least, most).astype(dtype)
    return random.normal(size=(EXAMPLES, *shape)), at, to, random.normal(size=(EXAMPLES, STEPS))


def checked(f, args, buffer):
    """What a program returns; none of its loops makes as much anew as a buffer has."""
    run = compiled(f, *args)
    if barriers_hold("cpu"):
        assert_no_whole_buffer_copy(run, buffer)
    return run(*args)


#: Each box with two of the kinds, so that each kind has four of the boxes.
PAIRS = [(box, list(KINDS)[(k + j) % 4]) for k, box in enumerate(BOXES) for j in (0, 1)]


@pytest.mark.parametrize(("box", "kind"), PAIRS)
def test_boxes_are_read_and_written_where_they_are(box, kind):
    (shape, sizes), seed = BOXES[box], list(BOXES).index(box) + list(KINDS).index(kind)
    args, f = arguments(shape, DTYPES[seed % 4], seed), program(kind, sizes)
    want = [in_numpy(*(x[k] for x in args), sizes, kind) for k in range(EXAMPLES)]
    first = [x[0] for x in args]
    if seed % 2:
        close(checked(in_place(f), first, first[0]), want[0])
    else:
        close(checked(jax.vmap(in_place(f)), args, args[0]), [np.stack(x) for x in zip(*want, strict=True)])


@pytest.mark.parametrize("box", BOXES)
def test_gradients_of_boxes(box):
    (shape, sizes), seed = BOXES[box], list(BOXES).index(box)
    f = loss(program(list(KINDS)[seed % 4], sizes))
    args = arguments(shape, np.int32, seed)
    plain, ours = jax.grad(f, (0, 3)), [jax.grad(in_place(f), (0, 3)), in_place(jax.grad(f, (0, 3)))][seed // 2 % 2]
    if seed % 2:
        plain, ours = jax.vmap(plain), jax.vmap(ours)
    else:
        args = [x[0] for x in args]
    close(checked(ours, args, args[0]), oracle(plain)(*args))


#: name -> the box that a step reads of a buffer `[N, 12]`, of a view of it, or of parts that are not next to each other
READS = {
    "every second row": lambda b, i: b[1:8:2],
    "rows in reverse": lambda b, i: b[6:1:-1],
    "rows and columns with steps": lambda b, i: b[0:9:4, 3:12:3],
    "elements with steps": lambda b, i: b[i, ::2],
    "a known box": lambda b, i: b[2:6, 3:7],
    "a tile of the transposed": lambda b, i: lax.dynamic_slice(b.T, (i % 7, i), (3, 4)),
    "an element of the transposed": lambda b, i: b.T[i % 12, i],
    "a tile of scaled columns": lambda b, i: lax.dynamic_slice(b * jnp.arange(12.0), (i, i % 5), (3, 4)),
    "a tile, dropped, of the transposed": lambda b, i: gathered(
        b.T, jnp.stack([i % 12, i]), jnp.stack([i % 12, i]), 0.0, (3, 4), mode="fill"
    )[0],
    "tiles": lambda b, i: jax.vmap(lambda k: lax.dynamic_slice(b, (i + 2 * k, i % 5), (3, 4)))(jnp.arange(5)),
    "a tile, if a row is large": lambda b, i: jnp.where(b[i, 0] > 0, lax.dynamic_slice(b, (i, 2), (2, 3)), 0),
}


def reads(read):
    def f(b):
        def step(b, i):
            box = jnp.sin(read(b, i))
            return b.at[(7 * i) % len(b)].add(jnp.sum(box)), jnp.sum(box)

        return lax.scan(step, b, jnp.arange(STEPS))

    return f


@pytest.mark.parametrize("name", READS)
def test_parts_that_become_boxes(name):
    f = reads(READS[name])
    b = np.random.default_rng(0).normal(size=(40, 12))
    ours = (jax.grad(in_place(loss(f))), in_place(jax.grad(loss(f))))[list(READS).index(name) % 2]
    close(checked(lambda b: (*in_place(f)(b), ours(b)), (b,), b), oracle(lambda b: (*f(b), jax.grad(loss(f))(b)))(b))


@pytest.mark.parametrize("column", [0, 2, -1, -3])
def test_an_axis_of_one_element_has_stray_indices_too(column):
    """It is taken as a whole, so the row op does not start along it."""

    def f(b, j):
        return lax.fori_loop(0, 3, lambda i, b: b.at[i, j].add(jnp.cos(b[i, 0]) + b[i + 1, 0]), b)

    b = np.arange(5.0)[:, None]
    assert "ta_add[" in str(jax.make_jaxpr(in_place(f))(b, column))
    found, want = jax.jit(in_place(f))(b, column), jax.jit(f)(b, column)
    np.testing.assert_array_equal(found, want)
    assert bool(jnp.all(want == b)) == (column in (2, -3))


def close(got, want):
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-11)
