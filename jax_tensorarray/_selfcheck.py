"""The main job, `python -m jax_tensorarray`: show what is installed, and check and time four loops.

Each loop maps `x` of shape `[T, *elem]` to a scalar. It is written once: `ops` has the functions that read and write
rows, of plain JAX or of this library.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tensorarray._array.tensorarray import TensorArray
from jax_tensorarray._hlo import text as hlo_text
from jax_tensorarray._in_place.api import in_place
from jax_tensorarray._ops.read import ta_read
from jax_tensorarray._ops.write import ta_write
from jax_tensorarray._types import Array
from jax_tensorarray.doctor._header import header
from jax_tensorarray.doctor._text import wrapped

Step = tuple[Array, Array]  #: its number, and the row of `x`

#: Numbers of steps, and that of `--quick`.
SIZES, QUICK = (125, 2000), (16,)

#: Plain JAX, as people write it today.
plain = SimpleNamespace(
    read=lambda buffer, index: buffer[index],
    write=lambda buffer, index, value: buffer.at[index].set(value),
    array=lambda size, row: jnp.zeros((size, *row.shape), row.dtype),
    get=lambda ta, index: ta[index],
    put=lambda ta, index, row: ta.at[index].set(row),
    stack=lambda ta: ta,
)

#: The same with this library.
ours = SimpleNamespace(
    read=ta_read,
    write=ta_write,
    array=lambda size, row: TensorArray.like(row, 0, dynamic_size=True, max_size=size),
    get=TensorArray.read,
    put=TensorArray.write,
    stack=lambda ta: ta.stack(pad=True),
)


class Program(NamedTuple):
    """A loop: its name, what it does in a few words, and the function `(ops, x) -> scalar`."""

    name: str
    about: str
    loss: Callable[[Any, Array], Array]

    def with_ops(self, ops: Any) -> Callable[[Array], Array]:
        """Return the program as a function of `x` alone."""
        return partial(self.loss, ops)


# --- the loops ---------------------------------------------------------------------------------------------------


def over_steps(body: Callable[[Any, Step], Any], carry: Any, x: Array) -> Any:
    """Return the carry after `body(carry, (i, x[i]))` for every row of `x`."""
    return lax.scan(lambda c, step: (body(c, step), None), carry, (jnp.arange(len(x)), x))[0]


def _issue_15906(ops: Any, x: Array) -> Array:
    def body(c: tuple[Any, Array], _: None) -> tuple[tuple[Any, Array], None]:
        i, ys = c
        return (i + 1, ops.write(ys, i, ops.read(x, i) * i**0.5)), None

    return jnp.sum(lax.scan(body, (0, jnp.zeros_like(x)), None, length=len(x))[0][1])


def _tensorarray(ops: Any, x: Array) -> Array:
    def body(c: tuple[Any, Any, Array], step: Step) -> tuple[Any, Any, Array]:
        (states, tokens, score), (i, row) = c, step
        state = jnp.tanh(row + ops.get(states, i) - ops.get(states, i // 2))
        chances = jax.nn.log_softmax(state.reshape(-1))
        token = jnp.argmax(chances).astype(jnp.int32)
        return ops.put(states, i + 1, state), ops.put(tokens, i, token), score + chances[token]

    states, tokens = ops.array(len(x) + 1, x[0]), ops.array(len(x), jnp.int32(0))
    states, tokens, score = over_steps(body, (ops.put(states, 0, x[0]), tokens, jnp.zeros(())), x)
    return score + jnp.sum(ops.stack(states) ** 2) + jnp.sum(ops.stack(tokens))


def _read_then_write(ops: Any, x: Array) -> Array:
    def body(b: Array, step: Step) -> Array:
        i, row = step
        return ops.write(b, i, jnp.tanh(ops.read(b, i // 2) + row))

    return jnp.sum(over_steps(body, jnp.zeros_like(x), x) ** 2)


def _branches(ops: Any, x: Array) -> Array:
    def body(c: tuple[Array, Array], step: Step) -> tuple[Array, Array]:
        (b, hand), (i, row) = c, step
        return lax.cond(
            row.reshape(-1)[0] > 0,
            lambda b, hand: (ops.write(b, i, jnp.sin(row) + hand), hand),
            lambda b, hand: (b, hand + jnp.cos(ops.read(b, i // 2))),
            b,
            hand,
        )

    b, hand = over_steps(body, (jnp.ones_like(x), jnp.zeros_like(x[0])), x)
    return jnp.sum(b**2) + jnp.sum(hand)


programs = (
    Program("issue_15906", "jax issue 15906: test_scan", _issue_15906),
    Program("tensorarray", "a decoder with two growing TensorArrays", _tensorarray),
    Program("read_then_write", "read an earlier row, write the next", _read_then_write),
    Program("branches", "cond: write in one branch, read in the other", _branches),
)

# --- runs --------------------------------------------------------------------------------------------

PLAIN = "plain JAX"
#: As people write it, the same under `in_place`, and with row ops or a TensorArray.
SIDES: dict[str, Callable[[Program], Callable[[Array], Array]]] = {
    PLAIN: lambda program: program.with_ops(plain),
    "in_place": lambda program: in_place(program.with_ops(plain)),
    "jax_tensorarray": lambda program: program.with_ops(ours),
}


class Key(NamedTuple):
    """A loop on one side, of T steps."""

    program: Program
    side: str
    T: int

    def x(self) -> np.ndarray[Any, Any]:
        return np.random.default_rng(0).standard_normal((self.T, 64), dtype=np.float32)


class Measured(NamedTuple):
    """Microseconds per step at each T, and the operations on whole buffers in the loops at the largest T."""

    times: list[float]
    copies: int
    others: int

    @property
    def growth(self) -> float:
        return self.times[-1] / self.times[0]


def compiled(keys: Sequence[Key]) -> dict[Key, Any]:
    """Return values and gradients, compiled. XLA compiles in two threads while this one traces and lowers."""
    waiting: dict[Key, Future[Any]] = {}
    with ThreadPoolExecutor(2) as pool:
        for key in keys:
            f = jax.jit(jax.value_and_grad(SIDES[key.side](key.program)))
            waiting[key] = pool.submit(f.lower(key.x()).compile)
            _progress(f"compiling {key.program.name}, T = {key.T}")
    return {key: future.result() for key, future in waiting.items()}


def check(program: Program, T: int, executables: dict[Key, Any]) -> str:
    """Return a line that says whether value and gradient are those of plain JAX."""
    results = {side: executables[key](key.x()) for side in SIDES for key in [Key(program, side, T)]}
    expected, worst = results.pop(PLAIN), 0.0
    for side, actual in results.items():
        for what, a, e in zip(("value", "gradient"), actual, expected, strict=True):
            size, difference = float(np.max(np.abs(e))), float(np.max(np.abs(a - e)))
            if not np.allclose(a, e, rtol=1e-3, atol=1e-4 * size, equal_nan=True):
                return (
                    f"FAIL  {program.name}: the {what} of {side} differs from plain JAX's by {difference:.2g}. "
                    f"The largest entry is {size:.2g} (T = {T})."
                )
            worst = max(worst, difference / (size or 1.0))
    how = "are exactly as in plain JAX" if worst == 0 else f"agree with plain JAX to {worst:.0e}"
    return f"ok    {program.name}: the value and the gradient {how}."


def measured(program: Program, side: str, sizes: Sequence[int], executables: dict[Key, Any]) -> Measured:
    """Return the shortest times of several runs at each T, and the counts of whole-buffer operations in the loops."""
    times: list[float] = []
    for key in [Key(program, side, T) for T in sizes]:
        _progress(f"timing {program.name}, T = {key.T}")
        x, runs = jax.device_put(key.x()), list[float]()
        while len(runs) < 3 or (sum(runs) < 0.05 and len(runs) < 50):
            start = time.perf_counter()
            jax.block_until_ready(executables[key](x))
            runs.append(time.perf_counter() - start)
        times.append(min(runs) / key.T * 1e6)
    hlo = executables[key].as_text()
    copies = hlo_text.copies_in_loops(hlo, x.nbytes)
    others = set(hlo_text.whole_buffer_operations_in_loops(hlo, x.nbytes)) - set(copies)
    return Measured(times, len(copies), len(others))


def _progress(text: str) -> None:
    """Show the next task on the last line of a terminal."""
    if sys.stderr.isatty():
        print("\r" + text[:79].ljust(79), end="" if text else "\r", file=sys.stderr, flush=True)


# --- output ---------------------------------------------------------------------------------------------


def table(results: dict[Program, dict[str, Measured]], sizes: Sequence[int]) -> Iterator[str]:
    """Yield the meaning of the columns, a line for each loop, and a summary."""
    factor = sizes[-1] // sizes[0]
    meaning = {
        f"T={sizes[-1]}": f"microseconds per step in a loop of {sizes[-1]} steps, for its value and its gradient",
        "grows": f"the same divided by that at T={sizes[0]}: about 1 if the time of the loop is linear in T, about "
        f"{factor} if it is quadratic",
        "copies": "copies of a whole buffer in the loops that XLA compiled; +n: n other operations that make one",
        "faster": "time of plain JAX divided by this time",
    }
    for name, text in meaning.items():
        yield from wrapped(text + ".", name.ljust(8))
    first = f"T={sizes[-1]}".rjust(7) + " grows copies"
    heads = {side: first if side == PLAIN else first + " faster" for side in SIDES}
    yield ("\n" + " " * 15 + "".join(" |" + side.center(len(head)) for side, head in heads.items())).rstrip()
    yield "program".ljust(15) + "".join(" |" + head for head in heads.values())
    yield "-" * 16 + "".join("+" + "-" * (len(head) + 1) for head in heads.values())
    for program, sides in results.items():
        theirs = sides[PLAIN].times[-1]
        line = program.name.ljust(15)
        for side, m in sides.items():
            copies = f"{m.copies}+{m.others}" if m.others else str(m.copies)
            line += f" |{m.times[-1]:7.2f}{m.growth:6.1f}{copies:>7}"
            line += "" if side == PLAIN else f"{theirs / m.times[-1]:7.1f}"
        yield line
    growth, speedup, operations = (
        [f(side) for side in SIDES]
        for f in (
            lambda side: statistics.median(m[side].growth for m in results.values()),
            lambda side: statistics.median(m[PLAIN].times[-1] / m[side].times[-1] for m in results.values()),
            lambda side: sum(m[side].copies + m[side].others for m in results.values()),
        )
    )
    yield ""
    yield from wrapped(
        f"With {factor} times as many steps, one step takes {growth[0]:.1f} times as long in plain JAX, "
        f"{growth[1]:.1f} times under in_place and {growth[2]:.1f} times with row ops. At T={sizes[-1]}, in_place is "
        f"{speedup[1]:.1f} times as fast as plain JAX, and row ops are {speedup[2]:.1f} times as fast. These are "
        f"medians of {len(results)} gradients. The loops of plain JAX make a whole buffer in {operations[0]} places, "
        f"those under in_place in {operations[1]}, and those with row ops in {operations[2]}."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the main job, and return its exit code: 1 if a check fails."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_tensorarray",
        description="Show the versions, devices and kernels of this installation. Then run a few loops that update an\n"
        "array row by row: compare their values and gradients with plain JAX, and time them. The exit code\n"
        "is 1 if a check fails.",
        epilog="\n".join(["loops:", *(f"  {p.name:15}  {p.about}" for p in programs)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help=f"only check, with T = {QUICK[0]} steps, and time nothing")
    sizes = QUICK if parser.parse_args(argv).quick else SIZES
    print(*header(), sep="\n", flush=True)
    executables = compiled([Key(program, side, T) for T in sizes for program in programs for side in SIDES])
    checks = [check(program, sizes[0], executables) for program in programs]
    _progress("")
    print("\nChecks: each loop in plain JAX, the same loop under in_place, and with row ops")
    print(*("  " + text for text in checks), sep="\n", flush=True)
    if failed := sum(text.startswith("FAIL") for text in checks):
        print(f"{failed} of {len(checks)} checks failed, so nothing was timed.", file=sys.stderr)
    elif len(sizes) > 1:
        results = {p: {side: measured(p, side, sizes, executables) for side in SIDES} for p in programs}
        _progress("")
        print("", *table(results, sizes), sep="\n", flush=True)
    return int(failed > 0)
