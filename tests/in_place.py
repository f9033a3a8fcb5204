"""Proof that a loop works in place: no copy of the buffer in its HLO, and time that grows linearly."""

import time

import jax

from jax_tensorarray import _hlo


def compiled(f, *args):
    return jax.jit(f).lower(*args).compile()


def assert_in_place(f, args_of, length=2000):
    """Both proofs, of `f(*args_of(length))`; the buffers are as large as its first argument."""
    short = compiled(f, *args_of(length))
    assert_no_whole_buffer_copy(short, args_of(length)[0])
    assert_linear_time(short, compiled(f, *args_of(4 * length)), args_of, length)


def assert_no_whole_buffer_copy(program, buffer):
    """No loop body of a compiled program copies, or otherwise makes anew, an array as large as `buffer`."""
    hlo = program.as_text()
    size = buffer.size * buffer.dtype.itemsize
    copies = _hlo.loop_copies(hlo, size)
    assert not copies, f"copies of the whole buffer in a loop: {copies}"
    others = _hlo.loop_whole_buffer_operations(hlo, size)
    assert not others, f"operations on the whole buffer in a loop: {others}"


def assert_linear_time(short, long, args_of, length, limit=6.0, attempts=12):
    """Four times the steps take at most `limit` times as long; a quadratic loop takes sixteen times as long.

    Each size is timed several times in turn and its minimum counts. The whole measurement is repeated if another
    process got in its way: a quadratic loop fails every time.
    """
    ratios = []
    for _ in range(attempts):
        few, many = _minimum_times((short, args_of(length)), (long, args_of(4 * length)))
        ratios.append(many / few)
        if ratios[-1] < limit:
            return
    raise AssertionError(f"4 times the steps took {ratios} times as long, at {length} steps")


def _minimum_times(*calls):
    times = [[] for _ in calls]
    for f, args in calls:
        jax.block_until_ready(f(*args))
    for _ in range(7):
        for (f, args), measured in zip(calls, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(f(*args))
            measured.append(time.perf_counter() - start)
    return [min(measured) for measured in times]
