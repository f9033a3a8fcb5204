"""Proof that a loop works in place: its HLO, the memory that XLA reserves, or time that grows linearly.

A reader of HLO may overlook an operation. The size of XLA's temporaries is a second judge, which is not ours.
"""

import re
import time

import jax

from jax_tensorarray._hlo import text as hlo_text


def compiled(f, *args):
    return jax.jit(f).lower(*args).compile()


def assert_in_place(f, args_of, length=2000):
    """No loop of `f(*args_of(length))` makes anything that is as large as its first argument. Return the program."""
    args = args_of(length)
    program = compiled(f, *args)
    assert_no_whole_buffer_copy(program, args[0])
    assert_linear_memory(program, compiled(f, *args_of(4 * length)))
    return program


def assert_linear_memory(short, long, slack=1.25):
    """Of a program of four times the steps, XLA's temporaries are at most four times as large.

    With a buffer for every step they would be sixteen times as large.
    """
    few, many = (program.memory_analysis().temp_size_in_bytes for program in (short, long))
    assert many <= 4 * slack * few + 4096, f"4 times the steps need {many} bytes of memory, and not {few}"


def whole_buffer_operations(hlo, num_bytes):
    """Return the operations in loops of a text of optimised HLO that copy, or otherwise make anew, that many bytes."""
    copies = hlo_text.copies_in_loops(hlo, num_bytes)
    return {op.name: op for op in [*copies, *hlo_text.whole_buffer_operations_in_loops(hlo, num_bytes)]}


def whole_buffer_operations_per_step(hlo, num_bytes):
    """Return how many of these one step of each loop runs at most, for all loops together.

    Of a conditional that is the branch with most of them. Where most steps take the other branch, a program is better.
    """
    program, found = hlo_text.Hlo(hlo), whole_buffer_operations(hlo, num_bytes)

    def most(computation):
        operations = program.computations.get(computation, {}).values()
        branches = [max(map(most, i.callees()), default=0) for i in operations if i.opcode == "conditional"]
        calls = [most(name) for i in operations if i.opcode == "call" for name in i.callees()]
        return sum(i.name in found for i in operations) + sum(branches) + sum(calls)

    return sum(map(most, program.loops))


def fusions_that_update(hlo, shape):
    """For each fusion that updates an array of float64 of a shape, such as "20,24": does it compute with all of it?"""
    fusions = re.findall(r"(?m)^%fused_computation[^{]*\{\n(.*?)^\}", hlo, re.DOTALL)
    update, arithmetic = (
        re.compile(rf"= f64\[{shape}\]\S* ({names})\(")
        for names in ("dynamic-update-slice", "exponential|add|multiply|subtract")
    )
    return [arithmetic.search(text) is not None for text in fusions if update.search(text)]


def loops_in_loops(program):
    """Return how many loops a compiled program has in the steps of other loops. XLA itself makes some of scatters."""
    hlo = hlo_text.Hlo(program.as_text())
    return sum(inner in hlo.loops for body in hlo.loops for inner in hlo.reachable([body]) if inner != body)


def assert_moves_no_more(ours, plain, args, num_bytes):
    """A step of a function's loops makes a whole buffer anew at most as often as a step of the same in plain JAX."""
    moved = whole_buffer_operations_per_step(compiled(ours, *args).as_text(), num_bytes)
    if moved:  # most programs make none, and then there is nothing to compare with
        most = whole_buffer_operations_per_step(compiled(plain, *args).as_text(), num_bytes)
        assert moved <= most, f"{moved} operations on whole buffers in a step, and {most} in plain JAX"


def assert_no_whole_buffer_operation(hlo, num_bytes):
    found = whole_buffer_operations(hlo, num_bytes)
    assert not found, f"operations on the whole buffer in a loop: {found}"


def assert_no_whole_buffer_copy(program, buffer):
    """The same of a compiled program and an array as large as `buffer`."""
    num_bytes = buffer.size * buffer.dtype.itemsize
    assert_no_whole_buffer_operation(program.as_text(), num_bytes)
    reserved = program.memory_analysis().temp_size_in_bytes
    most = max(8, max(buffer.shape) // 2) * num_bytes  # half of what a buffer for every step would take
    assert reserved < most, f"{reserved} bytes of temporaries beside a buffer of {num_bytes}"


def assert_linear_time(short, long, args_of, length, limit=6.0, attempts=12):
    """Four times the steps take at most `limit` times as long; a quadratic loop takes sixteen times as long.

    The short program is run four times in a row, so that both are equally likely to be interrupted. Time is that of
    this process alone. It is measured several times in turn, and the minimum counts. The whole measurement is repeated
    if another process got in its way all the same: a quadratic loop fails every time.
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
    start = time.process_time()
    for _ in range(runs):
        jax.block_until_ready(f(*args))
    return time.process_time() - start
