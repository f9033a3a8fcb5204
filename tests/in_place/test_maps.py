"""The algebra of maps, by brute force: random chains of views of small arrays, against NumPy."""

import itertools
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tensorarray._in_place import access, maps
from jax_tensorarray._in_place.values import Value
from jax_tensorarray._ops.primitive import row_params
from jax_tensorarray._ops.write import ta_write_p

KINDS = ["transpose", "reshape", "slice", "index", "reverse", "roll", "parts", "stack", "halo"]

SHAPES = [(24,), (4, 6), (2, 3, 4), (6, 1, 4), (2, 2, 2, 3)]


def divided(rnd, n):
    """Sizes whose product is n."""
    sizes = []
    while n > 1:
        size = rnd.choice([k for k in range(2, n + 1) if n % k == 0])
        sizes.append(size)
        n //= size
    for _ in range(rnd.randrange(2)):
        sizes.insert(rnd.randrange(len(sizes) + 1), 1)
    return sizes or [1]


def view(rnd, m, x):
    """A random view of `x`, and its map or None. Starts are known, or numbers of the run."""
    kind, rank = rnd.choice(KINDS), x.ndim
    axis = rnd.randrange(rank)
    if kind == "transpose":
        order = rnd.sample(range(rank), rank)
        return m.transposed(order), x.transpose(order)
    if kind == "reshape":
        shape = divided(rnd, x.size)
        return m.reshaped(shape), x.reshape(shape)
    if kind == "slice":
        sizes = [rnd.randint(1, n) for n in x.shape]
        at = [rnd.randint(0, n - size) for n, size in zip(x.shape, sizes, strict=True)]
        steps = [rnd.choice([1, 1, 2, 3]) for _ in sizes]
        sizes = [-(-size // step) for size, step in zip(sizes, steps, strict=True)]
        ends = [a + (size - 1) * step + 1 for a, size, step in zip(at, sizes, steps, strict=True)]
        return m.sliced(at, sizes, steps), x[tuple(map(slice, at, ends, steps))]
    if kind == "index":
        size = rnd.choice([1, 1, 1, rnd.randint(1, x.shape[axis])])
        start = rnd.randint(0, x.shape[axis] - size)
        at = [maps.Start(object(), jnp.int32(start)) if d == axis else 0 for d in range(rank)]
        sizes = [size if d == axis else n for d, n in enumerate(x.shape)]
        return m.sliced(at, sizes), np.take(x, range(start, start + size), axis)
    if kind == "reverse":
        axes = rnd.sample(range(rank), rnd.randint(1, rank))
        return m.reversed(axes), np.flip(x, axes)
    n = x.shape[axis]
    cuts = sorted({0, n, *(rnd.randint(0, n) for _ in range(2))})
    ranges = list(itertools.pairwise(cuts))
    if kind == "halo":  # elements at both ends are there twice
        width = rnd.randint(1, n)
        ranges = [(n - width, n), (0, n), (0, width)]
    pieces = [
        (
            m.sliced(
                [a if d == axis else 0 for d in range(rank)], [b - a if d == axis else k for d, k in enumerate(x.shape)]
            ),
            x.take(range(a, b), axis),
        )
        for a, b in ranges
    ]
    if kind == "roll":
        pieces = pieces[1:] + pieces[:1]
    elif kind == "stack":
        rnd.shuffle(pieces)
    found = [p for p, _ in pieces]
    joined = maps.joined(found, axis) if all(p is not None for p in found) else None
    return joined, np.concatenate([p for _, p in pieces], axis)


def chain(seed):
    """A map, what it is a view of, and the view. The buffer may be stored rotated."""
    rnd = random.Random(seed)
    shape = rnd.choice(SHAPES)
    buffer = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    m, x = maps.Map.whole(shape), buffer
    if rnd.random() < 0.3:
        axis, start = rnd.randrange(len(shape)), rnd.randrange(max(shape))
        start %= shape[axis]
        m, x = m.stored_rotated(axis, maps.Start(object(), jnp.int32(start))), np.roll(x, -start, axis)
    for _ in range(rnd.randint(1, 4)):
        found, seen = view(rnd, m, x)
        if found is not None:
            m, x = found, seen
    return rnd, m, buffer, x


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("block", range(60))
def test_a_chain_of_views_is_one_map(block):
    for seed in range(10 * block, 10 * block + 10):
        _, m, buffer, seen = chain(seed)
        assert m.shape == seen.shape
        np.testing.assert_array_equal(access.view_of(m, Value(jnp.asarray(buffer))), seen, err_msg=str(seed))
        assert m.equals(m.normalized())
        assert m.is_whole == (np.array_equal(seen, buffer) and not m.starts and seen.shape == buffer.shape), seed
        assert m.contains(m) and not m.is_apart(m)


def test_most_views_have_a_map():
    rnd = random.Random(0)
    found = [view(rnd, maps.Map.whole(s), np.zeros(s))[0] for s in SHAPES for _ in range(100)]
    assert sum(m is not None for m in found) > 0.9 * len(found)


@pytest.mark.parametrize("block", range(10))
def test_sets_of_elements(block):
    """Two views of a buffer that are apart have no element in common, and one that contains another has all of it."""
    for seed in range(60 * block, 60 * block + 60):
        rnd, m, _, seen = chain(seed)
        one, other = (view(rnd, m, seen) for _ in range(2))
        if one[0] is not None and other[0] is not None:
            a, b = set(one[1].ravel().tolist()), set(other[1].ravel().tolist())
            if one[0].is_apart(other[0]):
                assert not a & b, seed
            if one[0].contains(other[0]):
                assert a >= b, seed


def boxes(view, axis, sizes, at, mode):
    """Where NumPy finds each box of a view, None if it is dropped."""
    for starts in at:
        ends = [n - size for n, size in zip(view.shape[axis:], sizes, strict=False)]
        inside = all(0 <= a <= end for a, end in zip(starts, ends, strict=True))
        low = [min(max(a, 0), end) for a, end in zip(starts, ends, strict=True)]
        whole = (slice(None),) * axis + tuple(slice(a, a + size) for a, size in zip(low, sizes, strict=True))
        yield whole if inside or mode == "clip" else None


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("block", range(48))
def test_a_row_op_on_a_view_is_one_on_the_buffer(block):
    done = 0
    for seed in range(10 * block, 10 * block + 10):
        rnd, m, buffer, seen = chain(seed)
        axis = rnd.randrange(seen.ndim)
        count = min(rnd.choice([1, 1, 2]), seen.ndim - axis)
        box = [rnd.choice([1, 1, rnd.randint(1, seen.shape[axis + k])]) for k in range(count)]
        window = tuple(itertools.dropwhile(lambda n: n == 1, box))
        mode = rnd.choice(["clip", "drop"])
        params = row_params("in_place", mode, batch_dims=axis, index_dims=count, window=window, whole=True)
        positions = rnd.choice([(), (), (2,), (1, 2)])
        batch = rnd.randint(0, axis)  # so many of the first axes have an index for each example
        examples, each = seen.shape[:batch], math.prod(positions)
        along = [(n, size == n) for n, size in zip(seen.shape[axis:], box, strict=False)]
        numbers = [
            0 if is_all else rnd.randint(-2, n + 1) for _ in range(each * math.prod(examples)) for n, is_all in along
        ]
        at = np.array(numbers, np.int32).reshape(*examples, each, count)
        index = at.reshape(*examples, *[1] * (axis - batch), *positions, count)
        index = index[..., 0] if count == 1 else index
        rest = seen.shape[axis + count :]
        shape = (*seen.shape[:axis], *positions, *window, *rest)

        def read(buffer, index, m=m, params=params):
            at = access.access(m, buffer.dtype, index, None, {**params, "mode": "clip"})
            return at and at.read(Value(buffer))

        def write(buffer, index, new, m=m, params=params):
            at = access.access(m, buffer.dtype, index, None, params, is_update=True)
            if at is None:
                return None
            out = ta_write_p.bind(buffer, at.index, at.rows_of_buffer(new), **at.params)
            return out, access.view_of(m, Value(out))

        if (got := jax.jit(read)(buffer, index)) is not None:
            done += 1
            want = [
                np.stack([seen[e][place] for place in boxes(seen[e], axis - batch, box, at[e], "clip")], axis - batch)
                for e in np.ndindex(examples)
            ]
            np.testing.assert_array_equal(got, np.stack(want).reshape(shape), err_msg=str(seed))
        new = -1 - np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
        if (got := jax.jit(write)(buffer, index, new)) is not None:
            done += 1
            assert len(np.unique(seen)) == seen.size, seed
            want, rows = seen.copy(), new.reshape(*seen.shape[:axis], each, *box, *rest)
            for e in np.ndindex(examples):
                for k, place in enumerate(boxes(seen[e], axis - batch, box, at[e], mode)):
                    if place is not None:
                        want[e][place] = rows[e].take(k, axis - batch)
            np.testing.assert_array_equal(got[1], want, err_msg=str(seed))
            outside = np.setdiff1d(buffer, seen)
            np.testing.assert_array_equal(np.asarray(got[0]).ravel()[outside], outside, err_msg=str(seed))
    assert done > 4


@pytest.mark.parametrize("window", [(), (2,)])
@pytest.mark.parametrize("index", [[1], [3, 6, -1]], ids=["shared", "of each example"])
def test_examples_that_are_stored_rotated_by_numbers_of_their_own(index, window):
    buffer, starts, index = np.arange(60.0).reshape(3, 5, 4), np.array([2, 0, 4], np.int32), np.array(index, np.int32)
    seen = np.stack([np.roll(b, -start, 0) for b, start in zip(buffer, starts, strict=True)])
    m = maps.Map.whole(buffer.shape).stored_rotated(1, maps.Start(object(), jnp.asarray(starts)))
    params = row_params("in_place", "drop", batch_dims=1, window=window, whole=True)
    count, places = math.prod(window), [*np.broadcast_to(index, 3)]
    read = access.access(m, buffer.dtype, index, None, {**params, "mode": "clip"})
    want = np.stack([b[k : k + count] for b, k in zip(seen, np.clip(places, 0, 5 - count), strict=True)])
    rows = np.array(read.read(Value(jnp.asarray(buffer))))
    np.testing.assert_array_equal(rows, want.reshape(3, *window, 4))
    write = access.access(m, buffer.dtype, index, None, params, is_update=True)
    written = ta_write_p.bind(jnp.asarray(buffer), write.index, write.rows_of_buffer(-1 - rows), **write.params)
    for b, k, row in zip(seen, places, rows, strict=True):
        if 0 <= k <= 5 - count:
            b[k : k + count] = -1 - row.reshape(count, 4)
    np.testing.assert_array_equal(access.view_of(m, Value(written)), seen)
