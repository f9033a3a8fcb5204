"""What the kernels and the loops take on a GPU. Adds its figures to a JSON file; `gpu.sh` runs all parts.

python benchmarks/gpu.py --part ops programs training --seconds 60 --output FILE.json
"""

import argparse
import json
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_tensorarray as ta
from jax_tensorarray._ops import sorting
from jax_tensorarray.doctor._header import versions
from tests.support.row_programs import ours, plain, programs

try:
    import equinox.internal as eqxi
except ImportError:
    eqxi = None
try:
    import optax
except ImportError:
    optax = None

MIB = 2**20
parts = {}


def part(f):
    parts[f.__name__] = f
    return f


class Report:
    """Figures as they come, and how much time there is for more."""

    def __init__(self, seconds, quick):
        self.end, self.quick, self.results = time.monotonic() + seconds, quick, []

    def has_time(self):
        return time.monotonic() < self.end

    def add(self, **figure):
        self.results.append(figure)
        print(", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in figure.items()), flush=True)


def seconds_a_call(f, *args, longest=0.3):
    """The least of some means over calls that are dispatched one after the other; `f` gives its first argument anew."""
    x, *rest = args
    x = jax.block_until_ready(f(x, *rest))
    start = time.perf_counter()
    x = jax.block_until_ready(f(x, *rest))
    calls = int(np.clip(longest / 5 / max(time.perf_counter() - start, 1e-6), 1, 200))
    means = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            x = f(x, *rest)
        jax.block_until_ready(x)
        means.append((time.perf_counter() - start) / calls)
    return min(means)


# --- single ops against a copy of the same bytes ---------------------------------------------------------------


def donating(f):
    return jax.jit(f, donate_argnums=0)


#: name -> (bytes moved for each byte of the rows, a function that gives its first argument anew)
OPS = {
    "read": (2, donating(lambda rows, buffer, index, value: ta.ta_read(buffer, index, mode="drop"))),
    "write": (2, donating(lambda buffer, index, value: ta.ta_write(buffer, index, value, mode="drop"))),
    "swap": (4, donating(lambda pair, index: ta.ta_swap(pair[0], index, pair[1], mode="drop"))),
    "add": (3, donating(lambda buffer, index, value: ta.ta_add(buffer, index, value, mode="drop"))),
}


def arguments(op, count, row, dtype):
    buffer, value = jnp.ones((count, row), dtype), jnp.ones((count, row), dtype)
    index = jnp.asarray(np.random.default_rng(0).permutation(count), jnp.int32)
    return {"read": (value, buffer, index, value), "swap": ((buffer, value), index)}.get(op, (buffer, index, value))


@part
def ops(report):
    """Bandwidth of each op, as a share of that of a device-to-device copy of as many bytes."""
    copy = jax.jit(jnp.copy)
    sizes = (1, 4) if report.quick else (1, 16, 64, 256)
    for mib in sizes:
        of_copy = 2 * mib * MIB / seconds_a_call(copy, jnp.ones(mib * MIB // 4, jnp.float32))
        report.add(part="ops", op="copy", MiB=mib, GB_per_s=of_copy / 1e9)
        for row in (64, 1024, 65536):  # many narrow rows, which are sorted first, to few wide ones
            for op, (factor, f) in OPS.items():
                count = mib * MIB // (4 * row)
                if count == 0 or not report.has_time():
                    continue
                rate = factor * mib * MIB / seconds_a_call(f, *arguments(op, count, row, jnp.float32))
                report.add(
                    part="ops", op=op, MiB=mib, row=row, count=count, GB_per_s=rate / 1e9, of_copy=rate / of_copy
                )


@part
def dtypes(report):
    """Bandwidth of ta_add by dtype: few wide rows."""
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64, jnp.complex64, jnp.int32, jnp.int8):
        if report.has_time():
            mib = 1 if report.quick else 64
            row = mib * MIB // 64 // jnp.dtype(dtype).itemsize
            rate = 3 * mib * MIB / seconds_a_call(OPS["add"][1], *arguments("add", 64, row, dtype))
            report.add(part="dtypes", op="add", dtype=jnp.dtype(dtype).name, MiB=mib, GB_per_s=rate / 1e9)


@part
def duplicates(report):
    """Microseconds of an op on many narrow rows, many of them the same, and of plain JAX's scatter."""
    count = 10_000 if report.quick else 1_000_000
    for distinct in (1, 1000, count):
        index = jnp.asarray(np.random.default_rng(0).integers(0, distinct, count), jnp.int32)
        value, buffer = jnp.ones((count, 4), jnp.float32), jnp.ones((distinct, 4), jnp.float32)
        for op in ("write", "add"):
            if report.has_time():
                us = 1e6 * seconds_a_call(OPS[op][1], buffer, index, value)
                buffer = jnp.ones_like(value[:distinct])
                report.add(part="duplicates", op=op, count=count, distinct=distinct, microseconds=us)
        scatter = donating(lambda b, i, v: b.at[i].add(v))
        us = 1e6 * seconds_a_call(scatter, jnp.ones_like(buffer), index, value)
        report.add(part="duplicates", op="plain add", count=count, distinct=distinct, microseconds=us)


@part
def threshold(report):
    """From how many positions on sorting pays: what `sorting.SCANNED` should be."""
    set_to = sorting.SCANNED
    for row in (16, 1024):
        for count in (32, 128, 512) if report.quick else (32, 64, 128, 256, 512, 1024, 4096):
            for scanned in (0, 2**31):
                if not report.has_time():
                    continue
                sorting.SCANNED = scanned
                f = donating(lambda b, i, v: ta.ta_add(b, i, v, mode="drop"))  # a function of its own: compiled anew
                us = 1e6 * seconds_a_call(f, *arguments("add", count, row, jnp.float32), longest=0.1)
                way = "scanned" if scanned else "sorted"
                report.add(part="threshold", op="add", row=row, count=count, way=way, microseconds=us)
    sorting.SCANNED = set_to


# --- loops -----------------------------------------------------------------------------------------------------


def stacked_outputs(x):
    """What `write` does, as outputs of lax.scan: the nearest thing to a limit."""
    return jnp.sum(lax.scan(lambda _, row: (None, jnp.sin(row)), None, x)[1] ** 2)


def in_equinox(x):
    """What `write` does, in Equinox's checkpointed loop with buffers."""

    def body(carry):
        i, b = carry
        return i + 1, b.at[i].set(jnp.sin(x[i]))

    start = (jnp.int32(0), jnp.zeros_like(x))
    options = {"max_steps": len(x), "kind": "checkpointed", "buffers": lambda carry: carry[1]}
    return jnp.sum(eqxi.while_loop(lambda c: c[0] < len(x), body, start, **options)[1] ** 2)


def others():
    """name -> (function of x, the program it stands beside)"""
    known = {"scan outputs": stacked_outputs}
    return known | ({"Equinox": in_equinox} if eqxi else {})


def step_time(report, f, shape, **labels):
    if not report.has_time():
        return
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape) * 0.5, jnp.float32)
    compiled = jax.jit(f).lower(x).compile()
    jax.block_until_ready(compiled(x))
    times = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(compiled(x))
        times.append(time.perf_counter() - start)
        if times[-1] > 1 or not report.has_time():
            break
    report.add(**labels, T=shape[0], row=shape[1], microseconds_a_step=1e6 * min(times) / shape[0])


def both(f):
    return {"forward": f, "gradient": jax.grad(f)}


@part
def loops(report):
    """Microseconds a step of every program: plain JAX and ours, forward and gradient, as T grows."""
    for length in (200,) if report.quick else (1000, 10_000, 100_000):
        for name, program in programs.items():
            if length > 10_000 and name not in ("write", "read_then_write", "swap", "many_rows"):
                continue
            for side, library in (("plain", plain), ("ours", ours)):
                for derivative, f in both(program.with_ops(library)).items():
                    step_time(report, f, (length, 64), part="loops", name=name, side=side, derivative=derivative)
        for side, f in others().items():
            for derivative, g in both(f).items():
                step_time(report, g, (length, 64), part="loops", name="write", side=side, derivative=derivative)


@part
def rows(report):
    """The same for the width of a row."""
    for row in (64, 256) if report.quick else (64, 1024, 8192, 65536):
        for name in ("read_then_write", "three_reads"):
            for side, library in (("plain", plain), ("ours", ours)):
                for derivative, f in both(programs[name].with_ops(library)).items():
                    length = 100 if report.quick else 1000
                    step_time(report, f, (length, row), part="rows", name=name, side=side, derivative=derivative)


# --- training --------------------------------------------------------------------------------------------------


def lstm_decoder(params, tokens, library):
    """An LSTM whose every step attends to one earlier state, which it reads from a buffer of all of them."""
    steps, _ = tokens.shape
    width = params["out"].shape[0]

    def body(carry, step):
        hidden, cell, states = carry
        i, token = step
        seen = library.read(states, i // 2)
        gates = jnp.concatenate([token, hidden, seen]) @ params["gates"]
        forget, take, new, out = jnp.split(gates, 4)
        cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(take) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(out) * jnp.tanh(cell)
        return (hidden, cell, library.write(states, i, hidden)), None

    start = (jnp.zeros(width), jnp.zeros(width), jnp.zeros((steps, width)))
    states = lax.scan(body, start, (jnp.arange(steps), tokens))[0][2]
    return jnp.mean((states @ params["out"] - jnp.roll(tokens, -1, axis=0)) ** 2)


@part
def training(report):
    """Steps a second of training an LSTM decoder with Adam."""
    if optax is None:
        report.add(part="training", left_out="optax is not installed")
        return
    width, features, batch = (32, 8, 2) if report.quick else (256, 64, 16)
    rng = np.random.default_rng(0)
    params = {
        "gates": jnp.asarray(rng.standard_normal((features + 2 * width, 4 * width)) * 0.05, jnp.float32),
        "out": jnp.asarray(rng.standard_normal((width, features)) * 0.05, jnp.float32),
    }
    for length in (50,) if report.quick else (500, 2000):
        data = jnp.asarray(rng.standard_normal((batch, length, features)), jnp.float32)
        for side, library in (("plain", plain), ("ours", ours)):
            if not report.has_time():
                return
            optimiser = optax.adam(1e-3)

            def loss(params, data, library=library):
                return jnp.mean(jax.vmap(lambda tokens: lstm_decoder(params, tokens, library))(data))

            @jax.jit
            def train(state, data, optimiser=optimiser, loss=loss):
                params, moments = state
                gradient = jax.grad(loss)(params, data)
                updates, moments = optimiser.update(gradient, moments, params)
                return optax.apply_updates(params, updates), moments

            state = (params, optimiser.init(params))
            seconds = seconds_a_call(train, state, data, longest=2.0)
            report.add(part="training", side=side, T=length, batch=batch, width=width, steps_per_s=1 / seconds)


# --- the file --------------------------------------------------------------------------------------------------


def driver():
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--seconds", type=float, default=60, help="no figure is begun after this time")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--label", default="", help="what to call this run, such as the flags of XLA it is made with")
    parser.add_argument("--output", type=Path, required=True, help="JSON file, which is added to")
    arguments = parser.parse_args()
    report = Report(arguments.seconds, arguments.quick)
    for name in arguments.part:
        parts[name](report)
        if not report.has_time():
            report.add(part=name, left_out="what follows, for lack of time")
            break
    ta.check_errors()
    runs = json.loads(arguments.output.read_text()) if arguments.output.exists() else []
    runs.append(
        {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "label": arguments.label,
            "versions": versions(),
            "devices": [f"{d.platform}:{d.id} ({d.device_kind})" for d in jax.devices()],
            "driver": driver(),
            "results": report.results,
        }
    )
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
