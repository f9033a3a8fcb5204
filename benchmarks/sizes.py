"""What it costs that an array grows, and that nobody knows how far.

python -m benchmarks.sizes [--steps 2000] [--batches 24] [--output FILE.md]

The first table times a decoder whose arrays grow by `write` or `append` beside one of a fixed size. The second
differentiates a decoder on batches of very different lengths: by `growing`, with a `max_size` for the longest one, and
in TensorFlow, if it is installed.
"""

import argparse
import contextlib
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jax_tensorarray import TensorArray, growing, while_loop
from jax_tensorarray._hlo import ahead

ROW = 64

# --- write, append, and a fixed size ---------------------------------------------------------------------------

PUTS = {
    "a fixed size, `write(i, x)`": lambda ta, i, x: ta.write(i, x),
    "growing, `append(x)`": lambda ta, i, x: ta.append(x),
    "growing, `write(ta.size(), x)`": lambda ta, i, x: ta.write(ta.size(), x),
    "growing, `write(i, x)`": lambda ta, i, x: ta.write(i, x),
    "growing, `write(i, x, where=p)`": lambda ta, i, x: ta.write(i, x, where=x[0] < 2),
}


def decoder(way, steps, *, row=ROW):
    """A function of a matrix and a start: each step reads two earlier rows, and writes the next one."""

    def decode(w, start):
        if way.startswith("growing"):
            ta = TensorArray(jnp.float32, 0, dynamic_size=True, element_shape=[row], max_size=steps + 1)
        else:
            ta = TensorArray(jnp.float32, steps + 1, element_shape=[row])

        def step(carry):
            i, ta, score = carry
            x = jnp.tanh(0.5 * ta.read(i) + w * ta.read(i // 2))
            return i + 1, PUTS[way](ta, i + 1, x), score + x[0]

        _, ta, score = while_loop(lambda c: c[0] < steps, step, (0, ta.write(0, start), 0.0), max_steps=steps)
        return score + jnp.sum(ta.stack(pad=True) ** 2)

    return decode


def least(runs, seconds):
    """The shortest time of each of some functions, which take turns."""
    times = {name: [] for name in runs}
    until = time.perf_counter() + seconds
    while not all(times.values()) or time.perf_counter() < until:
        for name, run in runs.items():
            begin = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(time.perf_counter() - begin)
    return {name: min(found) for name, found in times.items()}


def growth_table(steps, seconds):
    w, start = jnp.full(ROW, 0.3, jnp.float32), jnp.ones(ROW, jnp.float32)
    found = {}
    for kind, derivative in (("forward", lambda f: f), ("gradient", jax.grad)):
        runs = {way: jax.jit(derivative(decoder(way, steps))) for way in PUTS}
        answers = [np.asarray(run(w, start)) for run in runs.values()]
        for answer in answers:
            np.testing.assert_allclose(answer, answers[0], rtol=1e-3)
        found[kind] = least({way: lambda run=run: run(w, start) for way, run in runs.items()}, seconds)
    first, *_ = PUTS
    yield f"Microseconds a step of {steps}, rows of {ROW} float32, and how many times those of a fixed size."
    yield ""
    yield "| array | forward | | gradient | |"
    yield "|---|--:|--:|--:|--:|"
    for way in PUTS:
        cells = (f"{1e6 * of[way] / steps:.2f} | {of[way] / of[first]:.2f}" for of in found.values())
        yield f"| {way} | {' | '.join(cells)} |"


# --- batches of different lengths ------------------------------------------------------------------------------

BATCH = 8


def lengths(batches):
    """The numbers of tokens of the examples of each batch: most are short, and one batch in eight has a long one."""
    rng = np.random.default_rng(0)
    return [
        np.minimum(rng.geometric(1 / (400 if k % 8 == 7 else 25), BATCH), 2000).astype(np.int32) for k in range(batches)
    ]


def loss_of(most):
    """The loss of a batch. With `most` None nobody has said how many steps there may be."""

    def of_example(w, x, n):
        bound = {} if most is None else {"max_size": most + 1}
        ta = TensorArray(jnp.float32, 0, dynamic_size=True, element_shape=[ROW], **bound).write(0, x)

        def step(carry):
            i, ta = carry
            return i + 1, ta.append(jnp.tanh(w @ ta.read(i) + ta.read(i // 2)))

        _, ta = while_loop(lambda carry: carry[0] < n, step, (0, ta), max_steps=most)
        return jnp.sum(ta.read(ta.size() - 1) ** 2)

    return lambda w, xs, ns: jnp.sum(jax.vmap(of_example, (None, 0, 0))(w, xs, ns))


def reserved(f, *args):
    """Megabytes that a function of `jax.jit` reserves on an H100, where its compiler is installed, and on a CPU."""
    of = {"CPU": f.lower(*args).compile().memory_analysis().temp_size_in_bytes}
    if not ahead.why_not("cuda"):
        of["H100"] = ahead.compiled_for("cuda", f, *args).memory_analysis().temp_size_in_bytes
    return ", ".join(f"{size / 1e6:.3g} ({name})" for name, size in of.items())


def in_tensorflow(w, xs, batches):
    """The gradients of all batches, one example after another, since a TensorArray of TensorFlow is of one example."""
    import tensorflow as tf

    @tf.function(
        input_signature=[tf.TensorSpec(s, t) for s, t in (((ROW, ROW), "float32"), ((ROW,), "float32"), ((), "int32"))]
    )
    def gradient(w, x, n):
        with tf.GradientTape() as tape:
            tape.watch(w)
            ta = tf.TensorArray(tf.float32, 0, dynamic_size=True, clear_after_read=False, element_shape=[ROW])

            def body(i, ta):
                return i + 1, ta.write(i + 1, tf.tanh(tf.linalg.matvec(w, ta.read(i)) + ta.read(i // 2)))

            _, ta = tf.while_loop(lambda i, _: i < n, body, (0, ta.write(0, x)))
            loss = tf.reduce_sum(ta.read(ta.size() - 1) ** 2)
        return tape.gradient(loss, w)

    def run():
        return [sum(gradient(w, x, n).numpy() for x, n in zip(xs, ns, strict=True)) for ns in batches]

    return run


def lengths_table(batches, seconds=3):
    rng = np.random.default_rng(1)
    w = (rng.standard_normal((ROW, ROW)) / ROW**0.5 / 2).astype(np.float32)
    xs, every = rng.standard_normal((BATCH, ROW)).astype(np.float32), lengths(batches)
    longest = int(max(ns.max() for ns in every))

    def of(f):
        def run():
            return [np.asarray(f(w, xs, ns)) for ns in every]

        return run

    grows, bounded = growing(jax.grad(loss_of(None))), jax.jit(jax.grad(loss_of(longest)))
    runs = {"`growing`": of(grows), "`max_size` of the longest": of(bounded)}
    with contextlib.suppress(ImportError):
        runs["TensorFlow, one example at a time"] = in_tensorflow(w, xs, every)
    first, answers = {}, {}
    for name, run in runs.items():
        begin = time.perf_counter()
        answers[name] = run()
        first[name] = time.perf_counter() - begin
    for found in answers.values():
        for a, b in zip(found, answers["`growing`"], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3)
    again = least(runs, seconds)
    sizes = {
        "`growing`": f"{reserved(jax.jit(jax.grad(loss_of(64))), w, xs, every[0])} for a short batch, "
        f"{reserved(jax.jit(jax.grad(loss_of(grows.bound))), w, xs, every[0])} once a long one has come",
        "`max_size` of the longest": reserved(bounded, w, xs, every[0]),
    }
    median = statistics.median(ns.max() for ns in every)
    yield f"Gradients of {batches} batches of {BATCH} examples of 1 to {longest} tokens, rows of {ROW} float32. The"
    yield f"longest example of the median batch has {median:.0f}. Seconds for all batches, the first time with"
    yield "compilation; megabytes that XLA reserves: a CPU touches only what is written."
    yield ""
    yield "| how | first time | later | reserved |"
    yield "|---|--:|--:|---|"
    for name in runs:
        yield f"| {name} | {first[name]:.2f} | {again[name]:.2f} | {sizes.get(name, '')} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=4, help="for each column of the first table")
    parser.add_argument("--output", type=Path, help="a file for the tables")
    arguments = parser.parse_args()
    lines = [f"jax {jax.__version__}, on a CPU.", "", *growth_table(arguments.steps, arguments.seconds), ""]
    lines += lengths_table(arguments.batches)
    print(*lines, sep="\n")
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
