"""The class against TensorFlow's, in one process: the same loops, forward and with their gradient.

python benchmarks/tensorarray.py --json results.json
"""

import argparse
import json
import os
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf
from jax import lax
from programs import machine

import jax_tensorarray as jt
from jax_tensorarray.__main__ import versions

#: A side stops at the first T where one run takes longer (s), and before one that is predicted to, in proportion to T.
LONGEST = 5.0

SIDES = ("jax_tensorarray", "TensorFlow", "TensorFlow, XLA")


class InJAX:
    """What the programs below are made of."""

    sum, tanh, matmul = staticmethod(jnp.sum), staticmethod(jnp.tanh), staticmethod(jnp.matmul)

    @staticmethod
    def array(x, size, dynamic=False):
        limit = {"max_size": x.shape[0]} if dynamic else {}
        return jt.TensorArray(x.dtype, size, dynamic, clear_after_read=False, element_shape=x.shape[1:], **limit)

    @staticmethod
    def loop(start, stop, body, carry):
        return lax.fori_loop(start, stop, lambda i, c: body(i, *c), carry)


class InTensorFlow:
    sum, tanh = staticmethod(tf.reduce_sum), staticmethod(tf.tanh)

    @staticmethod
    def matmul(a, w):
        return tf.linalg.matvec(w, a, transpose_a=True)

    @staticmethod
    def array(x, size, dynamic=False):
        return tf.TensorArray(x.dtype, size, dynamic, clear_after_read=False, element_shape=x.shape[1:])

    @staticmethod
    def loop(start, stop, body, carry):
        return tf.while_loop(
            lambda i, *_: i < stop,
            lambda i, *c: (i + 1, *body(i, *c)),
            (tf.constant(start), *carry),
            maximum_iterations=stop - start,
        )[1:]


# --- programs: from x of shape [T, row] and w of shape [row, row] to a scalar ------------------------------------


def write(xp, x, w):
    ta = xp.array(x, x.shape[0])
    value = x[0] * 0.5
    (ta,) = xp.loop(0, x.shape[0], lambda i, ta: (ta.write(i, value),), (ta,))
    out = ta.stack()
    return xp.sum(out * out)


def read_earlier_then_write(xp, x, w):
    ta = xp.array(x, x.shape[0]).write(0, x[0])
    (ta,) = xp.loop(1, x.shape[0], lambda i, ta: (ta.write(i, ta.read(i // 2) * 0.9 + 0.1),), (ta,))
    out = ta.stack()
    return xp.sum(out * out)


def read_beside_write(xp, x, w):
    def body(i, ta, total):
        new = ta.write(i, total * 0.5)
        return new, total * 0.5 + ta.read((i * 7 + 3) % x.shape[0])

    ta, total = xp.loop(0, x.shape[0], body, (xp.array(x, x.shape[0]).unstack(x), x[0]))
    out = ta.stack()
    return xp.sum(out * out) + xp.sum(total)


def decoder(xp, x, w):
    def body(i, ta):
        return (ta.write(i, xp.tanh(xp.matmul(ta.read(i - 1), w))),)

    (ta,) = xp.loop(1, x.shape[0], body, (xp.array(x, x.shape[0]).write(0, x[0]),))
    out = ta.stack()
    return xp.sum(out * out)


def dynamic_append(xp, x, w):
    ta = xp.array(x, 0, dynamic=True)
    value = x[0] * 0.5
    (ta,) = xp.loop(0, x.shape[0], lambda i, ta: (ta.write(ta.size(), value),), (ta,))
    out = ta.stack()
    return xp.sum(out * out)


def unstack_map_stack(xp, x, w):
    rows = xp.array(x, x.shape[0]).unstack(x)
    (ta,) = xp.loop(0, x.shape[0], lambda i, ta: (ta.write(i, xp.tanh(rows.read(i))),), (xp.array(x, x.shape[0]),))
    out = ta.stack()
    return xp.sum(out * out)


PROGRAMS = (write, read_earlier_then_write, read_beside_write, decoder, dynamic_append, unstack_map_stack)


# --- sides -----------------------------------------------------------------------------------------------------


def in_jax(program, gradient, x, w):
    def f(x, w):
        return program(InJAX, x, w)

    compiled = jax.jit(jax.value_and_grad(f, (0, 1)) if gradient else f)
    x, w = jnp.asarray(x), jnp.asarray(w)
    return lambda: jax.tree.leaves(jax.block_until_ready(compiled(x, w)))


def in_tensorflow(program, gradient, x, w, **options):
    @tf.function(autograph=False, **options)
    def f(x, w):
        if not gradient:
            return [program(InTensorFlow, x, w)]
        with tf.GradientTape() as tape:
            tape.watch((x, w))
            total = program(InTensorFlow, x, w)
        return [total, *tape.gradient(total, (x, w), unconnected_gradients="zero")]

    x, w = tf.constant(x), tf.constant(w)
    return lambda: [t.numpy() for t in f(x, w)]


def runner(side, program, gradient, x, w):
    if side == "jax_tensorarray":
        return in_jax(program, gradient, x, w)
    return in_tensorflow(program, gradient, x, w, **({"jit_compile": True} if side == "TensorFlow, XLA" else {}))


def seconds_of(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compare(program, gradient, sizes, row, repeat, longest):
    """Medians of interleaved runs of each side at each T, or a note why there is none."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((row, row), dtype=np.float32) / np.float32(row**0.5)
    notes, previous = {}, {}
    for T in sizes:
        x = rng.standard_normal((T, row), dtype=np.float32)
        runs, answers = {}, {}
        for side in SIDES:
            if side in notes:
                continue
            if previous.get(side, (0, 0))[0] * (T / max(previous.get(side, (0, 1))[1], 1)) > longest:
                notes[side] = f"> {longest:g} s"
                continue
            run = runner(side, program, gradient, x, w)
            try:
                answers[side] = run()
                once = seconds_of(run)
            except (tf.errors.OpError, ValueError) as error:
                notes[side] = "not supported" if "nsupported" in str(error) else type(error).__name__
                continue
            if once > longest:
                notes[side] = f"> {longest:g} s"
                continue
            runs[side], previous[side] = run, (once, T)
        for side, answer in answers.items():
            for a, b in zip(answer, answers["jax_tensorarray"], strict=True):
                scale = max(1e-6, np.abs(b).max())
                if np.abs(np.asarray(a) - b).max() > 1e-3 * scale:
                    notes[side] = "wrong"
                    runs.pop(side, None)
        times = {side: [] for side in runs}
        for _ in range(repeat):
            for side, run in runs.items():
                if sum(times[side]) < longest:
                    times[side].append(seconds_of(run))
        for side in SIDES:
            yield side, T, times.get(side), notes.get(side)


def eager(sizes, row, repeat, longest):
    """A Python loop of writes without any compilation."""

    def ours(T, value):
        ta = jt.TensorArray(jnp.float32, T, element_shape=(row,))
        for i in range(T):
            ta = ta.write(i, value)
        return np.asarray(ta.stack())

    def theirs(T, value):
        ta = tf.TensorArray(tf.float32, T, clear_after_read=False, element_shape=(row,))
        for i in range(T):
            ta = ta.write(i, value)
        return ta.stack().numpy()

    value = np.arange(row, dtype=np.float32)
    sides = {"jax_tensorarray": (ours, jnp.asarray(value)), "TensorFlow": (theirs, tf.constant(value))}
    slow, before = set(), {}
    for T in sizes:
        times = {}
        for side, (f, v) in sides.items():
            if side in slow or before.get(side, 0) > longest:
                slow.add(side)
                continue
            np.testing.assert_array_equal(f(min(T, 100), v), np.tile(value, (min(T, 100), 1)))
            times[side] = []
        for _ in range(repeat):
            for side in times:
                f, v = sides[side]
                if sum(times[side]) < longest:
                    times[side].append(seconds_of(lambda f=f, v=v, T=T: f(T, v)))
        for side in sides:
            before[side] = times[side][-1] if side in times else np.inf
            yield side, T, times.get(side), f"> {longest:g} s" if side in slow else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [program.__name__ for program in PROGRAMS]
    parser.add_argument("--programs", nargs="+", choices=[*names, "eager"], default=[*names, "eager"], metavar="NAME")
    parser.add_argument("--sizes", nargs="+", type=int, default=[1000, 10_000, 100_000], metavar="T")
    parser.add_argument("--row", type=int, default=64, metavar="N", help="floats in a row")
    parser.add_argument("--repeat", type=int, default=7, help="runs timed of each case")
    parser.add_argument(
        "--longest", type=float, default=LONGEST, help="a side goes no further in T after such a run (s)"
    )
    parser.add_argument("--json", type=Path, help="where to write the results as well")
    arguments = parser.parse_args()

    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions() | {"TensorFlow": tf.__version__},
        "machine": machine(),
        "row": arguments.row,
        "results": [],
    }
    print(f"Microseconds a step, median of {arguments.repeat}; rows of {arguments.row} float32.\n")
    print(f"{'program':24} {'':9} {'T':>7}" + "".join(f"{side:>18}" for side in SIDES))
    limits = arguments.sizes, arguments.row, arguments.repeat, arguments.longest
    for name in arguments.programs:
        for what in ("forward", "gradient") if name != "eager" else ("forward",):
            if name == "eager":
                cases = eager(*limits)
            else:
                cases = compare(PROGRAMS[names.index(name)], what == "gradient", *limits)
            line = {}
            for side, T, seconds, note in cases:
                if T not in line:
                    print(f"\n{name:24} {what:9} {T:7}" if line else f"{name:24} {what:9} {T:7}", end="", flush=True)
                    line[T] = True
                shown = note if not seconds else f"{statistics.median(seconds) / T * 1e6:.2f}"
                print(f"{shown or '':>18}", end="", flush=True)
                case = {"program": name, "derivative": what, "side": side, "T": T, "seconds": seconds, "note": note}
                report["results"].append(case)
            print()
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
        print(f"Wrote {arguments.json}.")


if __name__ == "__main__":
    main()
