"""Loops that are differentiated in reverse with a trip count known at run time: ours against Equinox's and JAX's.

pip install equinox
python benchmarks/loops.py --json results.json
"""

import argparse
import gc
import json
import math
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path

import equinox
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from programs import machine

import jax_tensorarray as jt
from jax_tensorarray.__main__ import versions

#: A side goes no further after a run that takes longer (s), and does not start one that is predicted to.
LONGEST = 5.0

ROW = 64


# --- the loops, as one function of (cond, body, carry, max_steps) ----------------------------------------------


def ours(cond, body, carry, max_steps):
    return jt.while_loop(cond, body, carry, max_steps=max_steps)


def recompute(cond, body, carry, max_steps):
    return jt.while_loop(cond, body, carry, max_steps=max_steps, residuals="recompute")


def tape(cond, body, carry, max_steps):
    return jt.while_loop(cond, body, carry, max_steps=max_steps, residuals="tape")


def nested_scans(cond, body, carry, max_steps, base=16):
    """`bounded_while_loop` of https://github.com/jax-ml/jax/issues/8239."""

    def level(depth, carry):
        if depth == 0:
            return body(carry)
        call = jax.checkpoint(lambda carry: level(depth - 1, carry))

        def step(carry, _):
            return lax.cond(cond(carry), call, lambda carry: carry, carry), None

        return lax.scan(step, carry, None, length=base)[0]

    return level(math.ceil(math.log(max_steps, base) - 1e-9), carry)


def equinox_loop(kind):
    def loop(cond, body, carry, max_steps):
        return eqxi.while_loop(cond, body, carry, max_steps=max_steps, kind=kind, buffers=lambda carry: carry[2])

    return loop


def lax_scan(cond, body, carry, max_steps):
    return lax.scan(lambda carry, _: (body(carry), None), carry, None, length=max_steps)[0]


def lax_while(cond, body, carry, max_steps):
    return lax.while_loop(cond, body, carry)


# --- programs: carries are (k, x, ys), and ys[k] = x is written in step k --------------------------------------


def empty(rows, x, by_rows):
    """Buffers for the sides: a TensorArray for ours, an array for the others, zeros in both."""
    return jt.TensorArray(x.dtype, rows, element_shape=x.shape) if by_rows else jnp.zeros((rows, *x.shape), x.dtype)


def dense(ys):
    return ys.stack() if isinstance(ys, jt.TensorArray) else ys


def put(ys, k, x):
    return ys.write(k, x) if isinstance(ys, jt.TensorArray) else ys.at[k].set(x)


def get(ys, k):
    return ys.read(k) if isinstance(ys, jt.TensorArray) else ys[k]


def write(loop, by_rows, rows, max_steps):
    """x = tanh(w x), kept in every step."""

    def f(w, x, n):
        def body(carry):
            k, x, ys = carry
            x = jnp.tanh(w @ x)
            return k + 1, x, put(ys, k, x)

        _, x, ys = loop(lambda carry: carry[0] < n, body, (jnp.int32(0), x, empty(rows, x, by_rows)), max_steps)
        return jnp.sum(dense(ys) ** 2) + jnp.sum(x)

    return f


def read_earlier(loop, by_rows, rows, max_steps):
    """x = tanh(0.9 x + ys[k // 2]): a row is written and an earlier one is read in every step. There is no w."""

    def f(w, x, n):
        def body(carry):
            k, x, ys = carry
            ys = put(ys, k, x)
            return k + 1, jnp.tanh(0.9 * x + get(ys, k // 2)), ys

        _, x, ys = loop(lambda carry: carry[0] < n, body, (jnp.int32(0), x, empty(rows, x, by_rows)), max_steps)
        return jnp.sum(dense(ys) ** 2) + jnp.sum(x)

    return f


def triangular(loop, by_rows, rows, max_steps):
    """y[k] = tanh(sum over j < k of v[k - j] y[j] + x[0]): in every step all results so far are used."""

    def f(v, x, n):
        def body(carry):
            k, x, ys = carry
            y = jnp.tanh(jnp.dot(lax.dynamic_slice(v, (rows - k,), (rows,)), dense(ys)) + x[0])
            return k + 1, x, put(ys, k, y)

        _, _, ys = loop(lambda carry: carry[0] < n, body, (jnp.int32(0), x, empty(rows, x[0], by_rows)), max_steps)
        return jnp.sum(dense(ys) ** 2)

    return f


def layers(loop, by_rows, rows, max_steps):
    """Six layers of different kinds in a step, for the time of compilation."""

    def f(w, x, n):
        def body(carry):
            k, x, ys = carry
            before = get(ys, k // 2)
            for activation in (jnp.tanh, jax.nn.gelu, jax.nn.softmax, jax.nn.sigmoid, jax.nn.silu, jnp.sin):
                x = activation(w @ x + before)
            return k + 1, x, put(ys, k, x)

        _, x, ys = loop(lambda carry: carry[0] < n, body, (jnp.int32(0), x, empty(rows, x, by_rows)), max_steps)
        return jnp.sum(dense(ys) ** 2) + jnp.sum(x)

    return f


def inputs(row=ROW):
    rng = np.random.default_rng(0)
    w = rng.standard_normal((row, row), dtype=np.float32) / np.float32(row**0.5)
    return jnp.asarray(w), jnp.asarray(rng.standard_normal(row, dtype=np.float32))


# --- measuring -------------------------------------------------------------------------------------------------


def seconds_of(run):
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


class Side:
    """A compiled function with its arguments, or a note why it has none."""

    def __init__(self, f, *args):
        self.note, self.seconds, self.answer = None, [], None
        try:
            start = time.perf_counter()
            self.compiled = jax.jit(f).lower(*args).compile()
            self.compile_seconds = time.perf_counter() - start
            self.temp_bytes = self.compiled.memory_analysis().temp_size_in_bytes
        except Exception as error:  # what another library cannot do is a result, not a failure
            self.note = f"{type(error).__name__}"
        self.run = lambda: self.compiled(*args)


def time_interleaved(sides, repeat, longest):
    """Fill in the seconds of the sides, after all their answers have been found equal."""
    for side in sides.values():
        if side.note is None:
            try:
                side.answer = jax.device_get(side.run())
                once = seconds_of(side.run)
            except Exception as error:
                side.note = type(error).__name__
                continue
            if once > longest:
                side.seconds, side.note = [once], "one run"
    answers = [side.answer for side in sides.values() if side.answer is not None]
    for side in sides.values():
        if side.answer is None:
            continue
        for a, b in zip(jax.tree.leaves(side.answer), jax.tree.leaves(answers[0]), strict=True):
            if not np.abs(a - b).max() <= 1e-3 * max(1e-6, np.abs(b).max()):  # a NaN is wrong too
                side.note, side.seconds = "wrong", []
    timed = [side for side in sides.values() if side.note is None]
    for _ in range(repeat):
        for side in timed:
            if sum(side.seconds) < longest:
                side.seconds.append(seconds_of(side.run))


def peak_resident(loop, T):
    """Bytes that a fresh process grows by, at most, in its first run of a loop of part (b). (Linux; None elsewhere.)"""
    status = Path("/proc/self/status")
    w, x = inputs()
    side = Side(memory_case(loop, T), w, x, jnp.int32(T))
    try:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
        before = int(status.read_text().split("VmRSS:")[1].split()[0])
        jax.block_until_ready(side.run())
        return 1024 * (int(status.read_text().split("VmHWM:")[1].split()[0]) - before)
    except OSError:
        return None


def in_fresh_process(f, *args):
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(f, *args).result()


def shown(value, digits=2):
    return value if isinstance(value, str) else "" if value is None else f"{value:.{digits}f}"


def table(title, head, lines):
    print(f"\n{title}\n")
    print(" | ".join(head))
    print(" | ".join("---" if n == 0 else "--:" for n in range(len(head))))
    for line in lines:
        print(" | ".join(line), flush=True)


class Report:
    def __init__(self):
        self.results = []

    def add(self, part, name, side, **case):
        self.results.append({"part": part, "side": name} | case | {"seconds": side.seconds or None, "note": side.note})


def median(side, scale=1e3):
    return statistics.median(side.seconds) * scale if side.seconds else side.note


# --- the parts ------------------------------------------------------------------------------------------------


def bounds(report, steps, max_steps, repeat, longest):
    """(a) value_and_grad against max_steps."""
    loops = {
        "ours": (ours, True),
        "ours, recompute": (recompute, True),
        "nested scans": (nested_scans, False),
        "Equinox checkpointed": (equinox_loop("checkpointed"), False),
        "Equinox bounded": (equinox_loop("bounded"), False),
    }
    w, x = inputs()
    slow, lines = {}, []
    for n in steps:
        for limit in max_steps:
            sides = {}
            for name, (loop, by_rows) in loops.items():
                if (name, n) in slow:
                    continue
                f = jax.value_and_grad(write(loop, by_rows, max(steps), limit), (0, 1))
                sides[name] = Side(f, w, x, jnp.int32(n))
            time_interleaved(sides, repeat, longest)
            for name, side in sides.items():
                report.add("bounds", name, side, steps=n, max_steps=limit)
                if side.note:
                    slow[name, n] = side.note
            lines.append([str(n), f"{limit:,}", *(shown(median(sides[s])) if s in sides else "" for s in loops)])
    head = ["steps", "max_steps", *loops]
    table(f"(a) Milliseconds of value_and_grad; x = tanh(w x), rows of {ROW} written.", head, lines)


MEMORY_LOOPS = {
    "ours": (ours, True, 1),
    "ours, max_steps = 20 T": (ours, True, 20),
    "ours, recompute": (recompute, True, 1),
    "Equinox checkpointed": (equinox_loop("checkpointed"), False, 1),
    "lax.scan": (lax_scan, False, 1),
}


def memory_case(name, T):
    loop, by_rows, factor = MEMORY_LOOPS[name]
    return jax.value_and_grad(read_earlier(loop, by_rows, T, factor * T), 1)


def sizes_and_memory(report, sizes, repeat, longest):
    """(b) time and memory of a loop that writes a row and reads an earlier one."""
    loops = MEMORY_LOOPS
    w, x = inputs()
    stopped, last, times, memory = set(), {}, [], []
    for T in sizes:
        sides = {}
        for name in loops:
            if name in last and last[name][0] * (T / last[name][1]) ** 2 > 4 * longest:
                stopped.add(name)
            if name not in stopped:
                sides[name] = Side(memory_case(name, T), w, x, jnp.int32(T))
        time_interleaved(sides, repeat, longest)
        for name, side in sides.items():
            resident = None
            if side.answer is not None:
                resident = in_fresh_process(peak_resident, name, T)
                last[name] = (min(side.seconds) if side.seconds else longest, T)
            report.add("sizes", name, side, T=T, temp_bytes=getattr(side, "temp_bytes", None), resident_bytes=resident)
            side.resident = resident
            if side.note:
                stopped.add(name)
        row = [sides.get(name) for name in loops]
        times.append([f"{T:,}", *(shown(median(s, 1e6 / T) if s and s.seconds else "-") for s in row)])
        memory.append(
            [
                f"{T:,}",
                *(
                    f"{s.temp_bytes / 2**20:.1f} / {shown(s.resident and s.resident / 2**20, 1)}"
                    if s and s.answer is not None
                    else "-"
                    for s in row
                ),
            ]
        )
    head = ["T", *loops]
    table(f"(b) Microseconds a step of value_and_grad; rows of {ROW}, one written and one read.", head, times)
    table("    MiB: temporary memory of the compiled function / what a fresh process grows by.", head, memory)


def row_sizes(report, rows, repeat, longest, T=1000):
    """(e) rows of different sizes: what a call of a kernel costs beside the work of a step."""
    loops = {
        "ours": (ours, True),
        "ours, recompute": (recompute, True),
        "Equinox checkpointed": (equinox_loop("checkpointed"), False),
        "lax.scan": (lax_scan, False),
    }
    lines = []
    for program in (write, read_earlier):
        for row in rows:
            w, x = inputs(row)
            sides = {}
            for name, (loop, by_rows) in loops.items():
                f = jax.value_and_grad(program(loop, by_rows, T, T), (0, 1) if program is write else 1)
                sides[name] = Side(f, w, x, jnp.int32(T))
            time_interleaved(sides, repeat, longest)
            for name, side in sides.items():
                report.add("rows", name, side, program=program.__name__, row=row, T=T)
            lines.append([program.__name__, str(row), *(shown(median(side, 1e6 / T)) for side in sides.values())])
    title = f"(e) Microseconds a step of value_and_grad, T = {T}; write multiplies a matrix by a vector of that size."
    table(title, ["program", "row", *loops], lines)


TRIANGULAR_LOOPS = {
    "ours": (ours, True),
    "ours, tape": (tape, True),
    "Equinox checkpointed": (equinox_loop("checkpointed"), False),
    "lax.scan": (lax_scan, False),
}


def triangular_case(name, T):
    loop, by_rows = TRIANGULAR_LOOPS[name]
    return jax.value_and_grad(triangular(loop, by_rows, T, T), (0, 1))


def triangular_sizes(report, sizes, repeat, longest):
    """(f) a body that uses a whole buffer in every step."""
    stopped, last, lines = set(), {}, []
    _, x = inputs()
    for T in sizes:
        v = jnp.concatenate([jnp.zeros(T), 1 / jnp.arange(1.0, T + 1) ** 2 * jnp.cos(jnp.arange(T))]).astype(x.dtype)
        sides = {}
        for name in TRIANGULAR_LOOPS:
            if name in last and last[name][0] * (T / last[name][1]) ** 2 > 4 * longest:
                stopped.add(name)
            if name not in stopped:
                sides[name] = Side(triangular_case(name, T), v, x, jnp.int32(T))
        time_interleaved(sides, repeat, longest)
        for name, side in sides.items():
            report.add("triangular", name, side, T=T, temp_bytes=getattr(side, "temp_bytes", None))
            if side.seconds:
                last[name] = (min(side.seconds), T)
            if side.note:
                stopped.add(name)
        row = [sides.get(name) for name in TRIANGULAR_LOOPS]
        cells = [
            f"{shown(median(s, 1e6 / T))} / {s.temp_bytes / 2**20:.1f}" if s and s.seconds else (s.note if s else "-")
            for s in row
        ]
        lines.append([f"{T:,}", *cells])
    title = "(f) Microseconds a step of value_and_grad / MiB of temporary memory; y[k] from a dot with all y before."
    table(title, ["T", *TRIANGULAR_LOOPS], lines)


def batches(report, sizes, repeat, longest, batch=16):
    """(c) vmap over examples with trip counts of their own."""
    loops = {
        "ours, forward": (ours, True, False),
        "lax.while_loop, forward": (lax_while, False, False),
        "ours, gradient": (ours, True, True),
        "Equinox checkpointed, gradient": (equinox_loop("checkpointed"), False, True),
    }
    w, x = inputs(16)
    xs = x * jnp.linspace(0.5, 1.5, batch)[:, None]
    stopped, last, lines = set(), {}, []
    for T in sizes:
        trips = jnp.linspace(T // 4, T, batch).astype(jnp.int32)
        total = int(trips.sum())
        found = {}
        for gradient in (False, True):
            sides = {}
            for name, (loop, by_rows, is_gradient) in loops.items():
                if name in last and last[name][0] * (T / last[name][1]) ** 2 > 4 * longest:
                    stopped.add(name)
                if name in stopped or gradient != is_gradient:
                    continue
                f = read_earlier(loop, by_rows, T, T)
                f = jax.value_and_grad(f, 1) if gradient else f
                sides[name] = Side(jax.vmap(f, (None, 0, 0)), w, xs, trips)
            time_interleaved(sides, repeat, longest)
            for name, side in sides.items():
                report.add("vmap", name, side, T=T, batch=batch, total_steps=total)
                if side.note:
                    stopped.add(name)
                if side.seconds:
                    last[name] = (min(side.seconds), T)
            found |= sides
        cells = [found.get(s) for s in loops]
        lines.append([str(T), *(shown(median(s, 1e6 / total) if s else "-") for s in cells)])
    title = f"(c) Microseconds a step and example; vmap over {batch} examples with T/4 to T steps, rows of 16."
    table(title, ["T", *loops], lines)


def compilation(report, repeat):
    """(d) time to lower and compile."""
    w, x = inputs()
    lines = []
    for program in (write, read_earlier, layers):

        def grad(f):
            return jax.value_and_grad(f, (0, 1))

        cases = {
            "forward": (lambda f: f, ours, True),
            "lax.while_loop": (lambda f: f, lax_while, True),
            "lax.while_loop, arrays": (lambda f: f, lax_while, False),
            "gradient": (grad, ours, True),
            "lax.scan, gradient": (grad, lax_scan, True),
            "lax.scan, gradient, arrays": (grad, lax_scan, False),
            "Equinox, gradient": (grad, equinox_loop("checkpointed"), False),
        }
        sides = {}
        for _ in range(repeat):
            for name, (of, loop, by_rows) in cases.items():
                jax.clear_caches()
                side = Side(of(program(loop, by_rows, 1000, 1000)), w, x, jnp.int32(1000))
                first = sides.setdefault(name, side)
                if side.note is None:
                    first.seconds.append(side.compile_seconds)
        for name, side in sides.items():
            report.add("compile", name, side, program=program.__name__)
        m = {name: median(side) for name, side in sides.items()}

        shared = {"forward": "lax.while_loop", "gradient": "lax.scan, gradient"}
        cells = []
        for name, base in shared.items():
            cells += [shown(m[n], 0) for n in (name, base, f"{base}, arrays")]
            cells.append("-" if isinstance(m[name], str) or isinstance(m[base], str) else shown(m[name] / m[base]))
        lines.append([program.__name__, *cells, shown(m["Equinox, gradient"], 0)])
    head = ["body", "ours, forward", "lax.while_loop", "with arrays", "ratio"]
    head += ["ours, gradient", "lax.scan, gradient", "with arrays", "ratio", "Equinox, gradient"]
    title = (
        "(d) Milliseconds to lower and compile; lax's loops with the same body (TensorArray), and with arrays instead."
    )
    table(title, head, lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["bounds", "sizes", "vmap", "compile", "rows", "triangular"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, metavar="PART", help=", ".join(parts))
    parser.add_argument("--steps", nargs="+", type=int, default=[8, 500], metavar="N")
    parser.add_argument("--max-steps", nargs="+", type=int, default=[500, 5_000, 50_000, 500_000], metavar="N")
    parser.add_argument("--sizes", nargs="+", type=int, default=[1000, 3000, 10_000, 30_000], metavar="T")
    parser.add_argument("--vmap-sizes", nargs="+", type=int, default=[250, 1000, 4000], metavar="T")
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 64, 256, 512], metavar="N", help="floats in a row")
    parser.add_argument("--triangular-sizes", nargs="+", type=int, default=[1000, 3000, 10_000], metavar="T")
    parser.add_argument("--repeat", type=int, default=9, help="runs timed of each case")
    parser.add_argument("--longest", type=float, default=LONGEST, help="time limit of a run, and of a case (s)")
    parser.add_argument("--json", type=Path, help="where to write the results as well")
    arguments = parser.parse_args()

    report = Report()
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions() | {"Equinox": equinox.__version__},
        "machine": machine(),
        "row": ROW,
    }
    print(f"Medians of {arguments.repeat} interleaved runs; float32.")
    limits = arguments.repeat, arguments.longest
    if "bounds" in arguments.parts:
        bounds(report, arguments.steps, arguments.max_steps, *limits)
    if "sizes" in arguments.parts:
        sizes_and_memory(report, arguments.sizes, *limits)
    if "vmap" in arguments.parts:
        batches(report, arguments.vmap_sizes, *limits)
    if "compile" in arguments.parts:
        compilation(report, arguments.repeat)
    if "rows" in arguments.parts:
        row_sizes(report, arguments.rows, *limits)
    if "triangular" in arguments.parts:
        triangular_sizes(report, arguments.triangular_sizes, *limits)
    if arguments.json:
        arguments.json.write_text(json.dumps(about | {"results": report.results}, indent=1) + "\n")
        print(f"Wrote {arguments.json}.")


if __name__ == "__main__":
    main()
