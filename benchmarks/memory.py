"""The memory and the time of a gradient through T steps, for every way of keeping what it needs, and for rivals.

python -m benchmarks.memory [--steps 1000 10000 100000] [--whole 1000] [--output FILE.md]

The time and the resident memory are a CPU's, of a process for each figure. For an H100 and a TPU v5e it is what XLA
says that the compiled program needs besides its arguments, where its compiler is installed.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax

import jax_tensorarray as jt
from benchmarks import whole_reads
from benchmarks.rivals import in_jax
from jax_tensorarray._hlo import ahead

ROW = 256
LARGEST = 4e9  # bytes that a program may need to be run


def chain(while_loop, T):
    """x = tanh(w x). Nothing but the last is asked for."""

    def loss(x, w, n):
        def body(s):
            return s[0] + 1, jnp.tanh(w @ s[1])

        return jnp.sum(while_loop(lambda s: s[0] < n, body, (jnp.int32(0), x), T)[1])

    return loss


def rows(while_loop, T):
    """A row is read, and the next one written."""

    def loss(x, w, n):
        def body(s):
            i, b = s
            row = jnp.tanh(w @ jt.ta_read(b, i // 2, mode="drop"))
            return i + 1, jt.ta_write(b, i + 1, row, mode="drop")

        b = jt.ta_write(jnp.zeros((T + 1, ROW)), 0, x)
        return jnp.sum(while_loop(lambda s: s[0] < n, body, (jnp.int32(0), b), T)[1] ** 2)

    return loss


PROGRAMS = {"chain": chain, "rows": rows}


def with_checkpoints(cond, body, start, T):
    return jt.while_loop(cond, body, start, max_steps=T, residuals=jt.residuals.Checkpoint(max(1, math.isqrt(2 * T))))


def nested_scans(cond, body, start, T):
    """Two, of about the same length, the outer one of checkpointed steps."""
    inner = math.isqrt(T)

    def some(s, _):
        # Steps past the last are not taken.
        return lax.scan(lambda s, _: (lax.cond(cond(s), body, lambda s: s, s), None), s, None, length=inner)[0], None

    return lax.scan(jax.checkpoint(some), start, None, length=-(-T // inner))[0]


WAYS = {
    "tape": in_jax.ours_while("tape"),
    "recompute": in_jax.ours_while("recompute"),
    "checkpoint": with_checkpoints,
    "undo": in_jax.ours_while("undo"),
    "offload": in_jax.ours_while(jt.residuals.Tape(offload=True)),
    "memory=1e6": in_jax.ours_while(jt.residuals.Auto(memory=1_000_000)),
    "lax.scan": in_jax.whole_scan,
    "nested scans": nested_scans,
}
if in_jax.equinox is not None:
    WAYS |= {f"Equinox {kind}": in_jax.equinox_while(kind) for kind in ("checkpointed", "bounded")}


def whole_loops(way):
    """The loops of JAX as a rival writes them, for the programs of `whole_reads`."""

    def fori_loop(low, high, step, x):
        return scan(lambda x, i: (step(i, x), None), x, jnp.arange(low, high))[0]

    def scan(f, start, xs):
        if way == "jax.checkpoint":
            return lax.scan(jax.checkpoint(f), start, xs)
        checkpoints = max(1, math.isqrt(2 * len(jax.tree.leaves(xs)[0])))
        return in_jax.eqxi.scan(f, start, xs, kind="checkpointed", checkpoints=checkpoints)

    return SimpleNamespace(scan=scan, fori_loop=fori_loop, cond=lax.cond)


def whole_gradient(program, way, T):
    f, args = whole_reads.PROGRAMS[program](T)
    numbers = tuple(range(len(args)))
    if way in WHOLE:
        return WHOLE[way](f, numbers), args

    def gradient(*args):
        with mock.patch.object(whole_reads, "lax", whole_loops(way)):
            return jax.grad(f, numbers)(*args)

    return gradient, args


#: Ways for the programs of `whole_reads`, as they are written.
WHOLE = {"plain JAX": jax.grad, "in_place": lambda f, numbers: jt.in_place(jax.grad(f, numbers))}
WHOLE_WAYS = ("plain JAX", "jax.checkpoint", *["Equinox checkpointed"] * (in_jax.equinox is not None), "in_place")


def resident():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def one(program, way, T, seconds):
    """The figures of one gradient, in this process."""
    if program in whole_reads.PROGRAMS:
        gradient, args = whole_gradient(program, way, T)
    else:
        gradient = jax.grad(PROGRAMS[program](WAYS[way], T), (0, 1))
        args = jnp.linspace(-1, 1, ROW), jnp.eye(ROW) + 0.1 / ROW, jnp.int32(T)
    found = {}
    for platform in ("cuda", "tpu"):
        if not ahead.why_not(platform):
            memory = ahead.compiled_for(platform, gradient, *args).memory_analysis()
            found[platform] = memory.temp_size_in_bytes
    compiled = jax.jit(gradient).lower(*args).compile()
    found["cpu"] = compiled.memory_analysis().temp_size_in_bytes
    if found["cpu"] > LARGEST:
        return found
    before, start = resident(), time.perf_counter()
    out = jax.block_until_ready(compiled(*args))
    took = [time.perf_counter() - start]
    found["resident"] = resident() - before
    while sum(took) < seconds and len(took) < 5:
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        took.append(time.perf_counter() - start)
    return found | {"microseconds": 1e6 * min(took) / T, "answer": float(jnp.linalg.norm(out[-1]))}


def measure(program, way, T, limit):
    """Those figures by a process of its own, or why there are none."""
    command = [sys.executable, "-m", "benchmarks.memory", "--one", program, way, str(T)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return f"> {limit} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return "out of memory" if "memory" in lines[-1].lower() or done.returncode < 0 else lines[-1][:40]
    return json.loads(done.stdout.splitlines()[-1])


def readable(num_bytes):
    return "" if num_bytes is None else f"{num_bytes / 1e6:.3g}"


def rows_of(program, ways, T, limit):
    """The figures of a program, a line for each way. All have to give the same gradient."""
    answer = None
    for way in ways:
        found = measure(program, way, T, limit)
        if isinstance(found, str):
            yield f"| {way} | {T} | | | | | {found} |"
            continue
        answer = found.get("answer", answer) if answer is None else answer
        if "answer" in found and not math.isclose(found["answer"], answer, rel_tol=1e-2):
            raise AssertionError(f"{program}, {way}, {T}: {found['answer']} is not {answer}")
        sizes = " | ".join(readable(found.get(key)) for key in ("cuda", "tpu", "cpu", "resident"))
        took = f"{found['microseconds']:.2f}" if "answer" in found else "too large"
        yield f"| {way} | {T} | {sizes} | {took} |"


def tables(programs, ways, steps, limit):
    for program, f in programs.items():
        yield from ("", f"## {program}: {f.__doc__}", "")
        yield from ("| way | T | H100 | TPU | CPU | resident | us a step |", "|---|--:|--:|--:|--:|--:|--:|")
        for T in steps:
            for line in rows_of(program, ways, T, limit):
                print(line, flush=True)
                yield line


def table(steps, whole, limit):
    lines = [
        f"jax {jax.__version__}. A gradient through T steps on rows of {ROW} float32: megabytes that XLA needs for it",
        "on an H100, on a TPU v5e (besides its vector memory) and on a CPU, megabytes that become resident on a CPU,",
        f"and microseconds a step there, in {limit:.0f} seconds for each way. The first six are this library's.",
    ]
    lines += tables(PROGRAMS, WAYS, steps, limit)
    lines += ["", "The programs below read all of what they have written; rows as in `benchmarks/whole_reads.py`."]
    lines += tables(whole_reads.PROGRAMS, WHOLE_WAYS, whole, limit)
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="*", default=[1000, 10_000, 100_000])
    parser.add_argument(
        "--whole", type=int, nargs="*", default=[1000], help="steps of programs that read whole buffers"
    )
    parser.add_argument("--limit", type=float, default=120, help="seconds for each figure")
    parser.add_argument("--output", type=Path, help="a file for the table")
    parser.add_argument("--one", nargs=3, metavar=("PROGRAM", "WAY", "STEPS"), help="one figure, by this process")
    arguments = parser.parse_args()
    if arguments.one:
        program, way, T = arguments.one
        print(json.dumps(one(program, way, int(T), 2)))
        return
    text = table(arguments.steps, arguments.whole, arguments.limit)
    if arguments.output:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
