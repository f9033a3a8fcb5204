"""Proof that a loop works in place: no copy of the buffer in its HLO, and time that grows linearly."""

import time

import jax

from jax_tensorarray._hlo import text as hlo_text


def compiled(f, *args):
    return jax.jit(f).lower(*args).compile()


def assert_in_place(f, args_of, length=2000):
    """Both proofs, of `f(*args_of(length))`; the buffers are as large as its first argument."""
    short = compiled(f, *args_of(length))
    assert_no_whole_buffer_copy(short, args_of(length)[0])
    long = compiled(f, *args_of(4 * length))
    try:
        assert_linear_time(short, long, args_of, length)
    except AssertionError:  # four times as long a buffer may be too large for a cache, but then so is the next
        assert_linear_time(long, compiled(f, *args_of(16 * length)), args_of, 4 * length)


def assert_no_whole_buffer_operation(hlo, num_bytes):
    """No loop body in a text of optimised HLO copies, or otherwise makes anew, that many bytes."""
    touched = [*hlo_text.copies_in_loops(hlo, num_bytes), *hlo_text.whole_buffer_operations_in_loops(hlo, num_bytes)]
    assert not touched, f"operations on the whole buffer in a loop: {touched}"


def assert_no_whole_buffer_copy(program, buffer):
    """No loop body of a compiled program copies, or otherwise makes anew, an array as large as `buffer`."""
    hlo = program.as_text()
    size = buffer.size * buffer.dtype.itemsize
    copies = hlo_text.copies_in_loops(hlo, size)
    assert not copies, f"copies of the whole buffer in a loop: {copies}"
    others = hlo_text.whole_buffer_operations_in_loops(hlo, size)
    assert not others, f"operations on the whole buffer in a loop: {others}"


def assert_linear_time(short, long, args_of, length, limit=6.0, attempts=12):
    """Four times the steps take at most `limit` times as long; a quadratic loop takes sixteen times as long.

    The short program is run four times in a row, so that both are equally likely to be interrupted. Each is timed
    several times in turn and the minimum counts. The whole measurement is repeated if another process got in its way
    all the same: a quadratic loop fails every time.
    """
    ratios = []
    few, many = args_of(length), args_of(4 * length)
    for _ in range(attempts):
        times = [(_seconds(short, few, 4) / 4, _seconds(long, many, 1)) for _ in range(7)]
        ratios.append(min(t for _, t in times) / min(t for t, _ in times))
        if ratios[-1] < limit:
            return
    raise AssertionError(f"4 times the steps took {ratios} times as long, at {length} steps")


def _seconds(f, args, runs):
    start = time.perf_counter()
    for _ in range(runs):
        jax.block_until_ready(f(*args))
    return time.perf_counter() - start
