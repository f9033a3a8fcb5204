"""Boxes of a buffer are read and written where they are: tiles, `k[l, :, t]`, slices with steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .loop import EXAMPLES, Loop

STEPS = 30

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


#: name -> what a step does with a box. One that starts out of range is moved, left out, or counted from the end.
KINDS = {
    "slice": sliced,
    "drop": functools.partial(gathered, mode="drop"),
    "clip": functools.partial(gathered, mode="clip"),
    "add": functools.partial(gathered, mode="drop", update=lax.scatter_add),
}


def program(kind, sizes):
    def f(b, at, to, x):
        def step(b, s):
            box, b = KINDS[kind](b, *s, sizes)
            return b, box

        return lax.scan(step, b, (at, to, x))

    return f


def arguments(shape, dtype, seed):
    """A buffer, where boxes are read and written, some of them out of range, and numbers."""
    random = np.random.default_rng(seed)
    most = 127 if max(shape) > 127 else 40
    least = 0 if max(shape) > 127 or dtype == np.uint8 else -4
    places = random.integers(-4, np.add(shape, 3), (2, EXAMPLES, STEPS, len(shape)))
    at, to = np.clip(places, least, most).astype(dtype)
    return random.normal(size=(EXAMPLES, *shape)), at, to, random.normal(size=(EXAMPLES, STEPS))


def _loop(box, kind, orders):
    (shape, sizes), seed = BOXES[box], list(BOXES).index(box) + list(KINDS).index(kind)
    batch = arguments(shape, DTYPES[seed % 4] if "vmap" in orders else np.int32, seed)
    args = tuple(x[0] for x in batch)
    return Loop(program(kind, sizes), args, args[0], orders, by=(0, 3), batch=batch, is_for_barriers=True)


ORDERS = ("forward", "vmap", "grad(in_place)", "vmap(grad)", "in_place(grad)")
#: Each box with two of the kinds, so that each kind has four of the boxes, and a gradient of one of them.
LOOPS = {
    f"{box}, {kind}": _loop(box, kind, ORDERS[:2])
    for k, box in enumerate(BOXES)
    for kind in [list(KINDS)[(k + j) % 4] for j in (0, 1)]
}
LOOPS |= {f"{box}, by gradients": _loop(box, list(KINDS)[k % 4], ORDERS[2:]) for k, box in enumerate(BOXES)}

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


B = np.random.default_rng(0).normal(size=(40, 12))
LOOPS |= {
    name: Loop(reads(read), (B,), B, ("grad(in_place)", "in_place(grad)", "forward"), is_for_barriers=True)
    for name, read in READS.items()
}
