"""The machines that run random programs: NumPy, with derivatives, and the library.

A `Jet` is a number of NumPy's with derivatives: by all parameters, in one direction, and by both.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import page_bodies
from jax import lax
from jax.experimental import io_callback
from random_programs import (
    LARGE,
    LEAST,
    PARAMETERS,
    STATE,
    Arithmetic,
    Index,
    Jet,
    Loop,
    Places,
    Program,
    run,
    statements,
)

import jax_tensorarray as ta

# --- NumPy -----------------------------------------------------------------------------------------------------


def constant(x: Any) -> Jet:
    x = np.asarray(x, np.float64)
    zeros = np.zeros((PARAMETERS, *x.shape))
    return Jet(x, zeros, np.zeros(x.shape), zeros)


def each(f: Callable[..., Any], *jets: Jet) -> Jet:
    """A linear function of arrays whose last axes are those of the jets, for all parts alike."""
    parts = [f(*xs) for xs in zip(*jets, strict=True)]
    return Jet(*parts)


def chain(j: Jet, f0: Any, f1: Any, f2: Any) -> Jet:
    """An elementwise function, given by its values and two derivatives."""
    return Jet(f0, f1 * j.d, f1 * j.e, f1 * j.de + f2 * j.d * j.e)


def times(a: Jet, b: Jet) -> Jet:
    return Jet(a.x * b.x, a.d * b.x + a.x * b.d, a.e * b.x + a.x * b.e, a.de * b.x + a.d * b.e + a.e * b.d + a.x * b.de)


def halved(j: Jet) -> Jet:
    return each(lambda x: 0.5 * x, j)


def sine(j: Jet) -> Jet:
    return chain(j, np.sin(j.x), np.cos(j.x), -np.sin(j.x))


def wrapped(x: int) -> int:
    return (x + 2**31) % 2**32 - 2**31


class Stray(NamedTuple):
    index: int
    size: int


def poisoned(j: Jet) -> Jet:
    return each(lambda x: np.full_like(x, np.nan), j)


def added_to(log: Any, a: Any) -> Any:
    """Numbers that are written down in one, in an order that matters."""
    return wrapped(31 * log + a + 1) if isinstance(log, int) else 31 * log + a + 1


class InNumPy:
    """Programs, one operation after the other.

    What a stray index that is an error reads or updates becomes NaN. A program that has some in its results cannot have
    done without it, and must have raised.
    """

    def __init__(self, dropping: bool = False) -> None:
        self.strays: list[Stray] = []
        self.logged: list[int] = []
        self.in_ref = 0
        self.dropping = dropping  # whatever the mode says

    def arithmetic(self, kind: str, a: Jet, b: Jet) -> Jet:
        if kind == "vjp narrow":
            single = each(lambda x: x.astype(np.float32).astype(np.float64), a)
            return chain(a, single.x, 2.0, 0.0)._replace(e=single.e)  # as of those below
        kind = rules_of(kind)
        if kind == "mul":
            return halved(times(a, b))
        if kind == "add":
            return each(lambda x, y: x + 0.5 * y, a, b)
        if kind == "sin":
            return sine(a)
        # Rules of their own, by which the derivative by the parameters is twice what it should be. The other, along
        # one direction, is taken of what the rules say: that of a custom_vjp's function is the true one.
        x, first, second = np.sin(a.x), 2 * np.cos(a.x), -2 * np.sin(a.x)
        found = chain(a, x, first, second)
        return found if kind == "jvp" else found._replace(e=np.cos(a.x) * a.e)

    def page(self, number: int, a: Jet) -> Jet:
        return constant(np.full(a.x.shape, page_bodies.in_numpy(number, np.sin(a.x).sum())))

    def convert(self, tag: str, a: Jet) -> Jet:
        if tag == "s":
            return each(lambda x: x[..., 0] - 0.5 * x[..., 1], a)
        return each(lambda x: np.stack([x, -0.5 * x], -1), a)

    def integer(self, kind: str, a: int, b: int, c: int) -> int:
        found = {"add": a + c, "mul": a * c, "sub": a - b, "mod": a % (abs(c) + 1), "where": a if a < b else c}
        found |= {"abs": abs(a), "least": abs(LEAST if a >= c else a)}
        return wrapped(found[kind])

    def test(self, kind: str, a: Any, b: Any) -> bool:
        if kind == "large":
            return bool(a.x > LARGE)
        return a < b if kind == "lt" else a % 2 == 1

    def scale(self, buffer: Jet, a: Jet) -> Jet:
        return times(buffer, each(lambda x: x.reshape(*x.shape, *[1] * buffer.x.ndim), sine(a)))

    def whole(self, buffer: Jet, upto: int | None) -> Jet:
        count = len(buffer.x) if upto is None else min(max(upto + 1, 0), len(buffer.x))
        taken = sine(each(lambda x: x[:, :count] if x.ndim > buffer.x.ndim else x[:count], buffer))
        product = times(taken, each(lambda x: 0.5 * x, taken))
        return sine(each(lambda x: x.sum(x.ndim - buffer.x.ndim), product))

    def index(self, p: Index, ref: int, dtype: str, size: int) -> int:
        i = wrapped(wrapped(ref * p.a) + p.b)
        absolute = wrapped(abs(LEAST if ref >= p.b else ref))
        guarded = {"mod": i % max(size, 1), "clip": min(max(i, 0), max(size - 1, 0)), "raw": i, "abs": absolute}
        i = guarded[p.guard]
        return int(np.array(i, np.int64).astype(dtype))

    def log(self, a: int, by: str) -> None:
        if by == "python":
            self.logged.append(a)
        else:
            self.in_ref = added_to(self.in_ref, a)

    def cells(self, places: Places) -> list[tuple[Any, ...] | None]:
        """What each position is in the buffer, None for those that are skipped."""
        (size, *rest), form = (x.shape if isinstance(x := places.buffer, np.ndarray) else x.x.shape), places.at.form
        if form == "window":
            found = [((places.parts[0] + k,), (size,)) for k in range(places.count)]
        elif form == "element":
            found = [((i, places.column), (size, *rest)) for i in places.parts]
        else:
            found = [((i,), (*rest,) if form == "column" else (size,)) for i in places.parts]
        cells: list[tuple[Any, ...] | None] = []
        for place, sizes in found:
            strays = [Stray(i, n) for i, n in zip(place, sizes, strict=True) if not 0 <= i < n]
            masked = places.where is not None and not places.where
            cells.append(None if masked or strays else (..., *place) if form == "column" else place)
            if strays and not masked and places.at.mode != "drop" and not self.dropping:
                self.strays.extend(strays)
        return cells

    def read(self, tag: str, places: Places) -> Any:
        buffer, before = places.buffer, len(self.strays)
        cells = self.cells(places)
        if tag == "I":
            return wrapped(sum(0 if cell is None else int(buffer[cell]) for cell in cells))
        total = self.sum_of([None if cell is None else row_of(buffer, cell) for cell in cells], shape_of(tag, places))
        return total if len(self.strays) == before else poisoned(total)

    def sum_of(self, rows: list[Jet | None], shape: tuple[int, ...]) -> Jet:
        """One row of several, as `InJax.row`."""
        total = constant(np.zeros(shape))
        for k, row in enumerate(rows):
            if row is not None:
                row = folded(row) if row.x.shape != shape else row
                total = each(lambda t, x, k=k: t + 0.5**k * x, total, row)
        return total

    def update(self, op: str, tag: str, values: list[Any], places: Places) -> tuple[Any, Any]:
        buffer, before = places.buffer, len(self.strays)
        cells = self.cells(places)
        if tag == "I":
            return self.update_ints(op, buffer, values, cells)
        shape = shape_of(tag, places)
        if len(self.strays) > before:
            return poisoned(buffer), poisoned(constant(np.zeros(shape))) if op == "swap" else None
        if places.at.form == "column":
            values = [each(lambda x: np.repeat(x[..., None], len(buffer.x), -1), v) for v in values]
        if op == "max":
            return self.maximum(buffer, values, cells), None
        olds: list[Jet | None] = []
        for cell, value in zip(cells, values, strict=True):
            old = None if cell is None else row_of(buffer, cell)
            olds.append(old)
            if old is not None:
                combine = {"add": lambda a, b: each(np.add, a, b), "mul": lambda a, b: halved(times(a, b))}
                new = combine[op](old, value) if op in combine else value
                buffer = with_row(buffer, cell, new)
        return buffer, self.sum_of(olds, shape) if op == "swap" else None

    def maximum(self, buffer: Jet, values: list[Jet], cells: list[Any]) -> Jet:
        """Those that attain the maximum share its derivative."""
        for cell in {cell for cell in cells if cell is not None}:
            choices = [row_of(buffer, cell), *(v for v, at in zip(values, cells, strict=True) if at == cell)]
            top = np.max([c.x for c in choices], axis=0)
            weights = [(c.x == top) / sum(c.x == top for c in choices) for c in choices]

            def shared(*parts: Any, weights: Any = weights) -> Any:
                return sum(w * p for w, p in zip(weights, parts, strict=True))

            buffer = with_row(buffer, cell, each(shared, *choices)._replace(x=top))
        return buffer

    def update_ints(self, op: str, buffer: Any, values: list[int], cells: list[Any]) -> tuple[Any, Any]:
        buffer, olds = buffer.copy(), 0
        for r, value in zip(cells, values, strict=True):
            if r is None:
                continue
            x = np.array(value, np.int64).astype(buffer.dtype)
            olds += int(buffer[r])
            with np.errstate(over="ignore"):
                combine = {"add": np.add, "mul": np.multiply, "max": np.maximum}.get(op, lambda old, new: new)
                buffer[r] = combine(buffer[r], x)
        return buffer, wrapped(olds) if op == "swap" else None

    def cond(self, predicate: bool, yes: Any, no: Any, state: Any) -> Any:
        return (yes if predicate else no)(*state)

    def switch(self, index: int, branches: Any, state: Any) -> Any:
        return branches[min(max(index, 0), len(branches) - 1)](*state)

    def call(self, kind: str, f: Any, state: Any) -> Any:
        return f(*state)

    def loop(self, s: Loop, trips: int, goes_on: Any, body: Any, state: Any) -> Any:
        if s.kind == "lax.while_loop" or s.kind == "while_loop":
            for k in itertools.count():
                before = self.in_ref
                more = goes_on is None or goes_on(*state)
                if not (more and k < trips and k < s.steps):
                    self.in_ref = before  # JAX drops what the last predicate has written into a ref
                    return state, []
                state = body(k, *state)
        if s.kind == "fori_loop":
            for k in range(min(trips, s.steps)):
                state = body(k, *state)
            return state, []
        ys = {}
        for k in reversed(range(s.steps)) if s.kind.endswith("scan") and s.reverse else range(s.steps):
            state = body(k, *state)
            ys[k] = state[1]
        if not s.kind.endswith("scan"):
            return state, []
        total = constant(0.0)
        for k in range(s.steps):
            total = each(lambda t, y, k=k: t + 0.5**k * y, total, ys[k])
        return state, [total]

    def leapfrog(self, a: Jet, b: Jet, steps: int, trips: int) -> Any:
        for _ in range(min(trips, steps)):
            a = each(lambda x, y: x + 0.5 * y, a, sine(b))
            b = each(lambda x, y: x - 0.5 * y, b, sine(a))
        return a, b


def row_of(buffer: Jet, cell: tuple[Any, ...]) -> Jet:
    lead = (slice(None), *cell)
    return Jet(buffer.x[cell], buffer.d[lead], buffer.e[cell], buffer.de[lead])


def with_row(buffer: Jet, cell: Any, row: Jet) -> Jet:
    x, d, e, de = (part.copy() for part in buffer)
    lead = (slice(None), *cell)
    x[cell], d[lead], e[cell], de[lead] = row
    return Jet(x, d, e, de)


def folded(column: Jet) -> Jet:
    """A number for a column: its sum, in which each element has a weight of its own."""
    return each(lambda x: x @ 0.5 ** np.arange(len(column.x)), column)


def shape_of(tag: str, places: Places) -> tuple[int, ...]:
    """The shape of what is read or written at a place."""
    return () if places.at.form in ("element", "column") else places.buffer.x.shape[1:]


# --- the library -----------------------------------------------------------------------------------------------


class Functions:
    """The sine, whose derivative is doubled by rules of its own. Some have a loop over rows, which reads a table."""

    def __init__(self, read: Callable[..., Any], write: Callable[..., Any]) -> None:
        table = jnp.array([0.75, -0.5, 0.75])  # closed over; it sums to one

        def by_rows(x: Any) -> Any:
            """`x`, as the sum of its shares."""
            step = lambda k, b: write(b, k + 1, read(b, k) + table[k] * x)  # noqa: E731
            return read(lax.fori_loop(0, len(table), step, jnp.zeros((len(table) + 1, *x.shape), x.dtype)), len(table))

        self.of_kind = {}
        for kind, itself in (("", lambda x: x), (" table", by_rows)):
            self.of_kind |= {f"{name}{kind}": made(itself) for name, made in _DOUBLED.items()}
        self.of_kind["vjp narrow"] = _narrow(read, write)


def _by_jvp(part: Callable[..., Any]) -> Any:
    f = jax.custom_jvp(lambda x: part(jnp.sin(x)))
    f.defjvp(lambda primals, dots: (f(*primals), 2 * part(jnp.cos(primals[0])) * dots[0]))
    return f


def _by_vjp(part: Callable[..., Any]) -> Any:
    f = jax.custom_vjp(lambda x: part(jnp.sin(x)))
    f.defvjp(lambda x: (part(jnp.sin(x)), x), lambda x, ct: (2 * part(jnp.cos(x)) * ct,))
    return f


def _narrow(read: Callable[..., Any], write: Callable[..., Any]) -> Any:
    """Rounds to single precision. The next function gives the result a cotangent of double precision, as JAX allows."""

    def rows(x: Any) -> Any:
        step = lambda k, b: write(b, k + 1, read(b, k))  # noqa: E731
        return read(lax.fori_loop(0, 2, step, write(jnp.zeros((3, *x.shape), x.dtype), 0, x)), 2)

    single = jax.custom_vjp(rows)
    single.defvjp(lambda x: (rows(x), None), lambda _, ct: (2 * ct,))
    double = jax.custom_vjp(lambda x: x.astype(jnp.float64))
    double.defvjp(lambda x: (x.astype(jnp.float64), None), lambda _, ct: (ct,))
    return lambda x: double(single(x.astype(jnp.float32)))


def _by_gradient(part: Callable[..., Any]) -> Any:
    return jax.custom_gradient(lambda x: (part(jnp.sin(x)), lambda ct: 2 * part(jnp.cos(x)) * ct))


_DOUBLED = {"jvp": _by_jvp, "vjp": _by_vjp, "gradient": _by_gradient}


class InJax:
    """Programs as a user writes them."""

    def __init__(
        self, *, dropping: bool = False, reverse_mode: bool = True, log: list[int] | None = None, ref: Any = None
    ) -> None:
        self.dropping, self.reverse_mode, self.logged, self.ref = dropping, reverse_mode, log, ref

    def arithmetic(self, kind: str, a: Any, b: Any) -> Any:
        if kind == "mul":
            return 0.5 * (a * b)
        if kind == "add":
            return a + 0.5 * b
        return jnp.sin(a) if kind == "sin" else self.functions.of_kind[kind](a)

    functions = Functions(ta.ta_read, ta.ta_write)

    def page(self, number: int, a: Any) -> Any:
        return jnp.full(a.shape, page_bodies.in_jax(number, jnp.sum(jnp.sin(a))))

    def convert(self, tag: str, a: Any) -> Any:
        return a[0] - 0.5 * a[1] if tag == "s" else jnp.stack([a, -0.5 * a])

    def integer(self, kind: str, a: Any, b: Any, c: int) -> Any:
        if kind == "where":
            return jnp.where(a < b, a, c)
        if kind in ("abs", "least"):
            return jnp.abs(a if kind == "abs" else jnp.where(a >= c, jnp.int32(LEAST), a))
        return {"add": lambda: a + c, "mul": lambda: a * c, "sub": lambda: a - b, "mod": lambda: a % (abs(c) + 1)}[
            kind
        ]()

    def test(self, kind: str, a: Any, b: Any) -> Any:
        if kind == "large":
            return a > LARGE
        return a < b if kind == "lt" else a % 2 == 1

    def scale(self, buffer: Any, a: Any) -> Any:
        return buffer * jnp.sin(a)

    def whole(self, buffer: Any, upto: Any) -> Any:
        taken = jnp.sin(buffer)
        if upto is not None:
            shown = jnp.arange(len(buffer)) <= upto
            taken = jnp.where(shown.reshape(-1, *[1] * (buffer.ndim - 1)), taken, 0.0)
        return jnp.sin(jnp.einsum("k...,k...->...", taken, 0.5 * taken))

    def index(self, p: Index, ref: Any, dtype: str, size: int) -> Any:
        i = ref * p.a + p.b
        if p.guard == "abs":
            i = jnp.abs(jnp.where(ref >= p.b, jnp.int32(LEAST), ref))
        elif p.guard == "mod":
            i = i % max(size, 1)
        elif p.guard == "clip":
            i = jnp.clip(i, 0, max(size - 1, 0))
        return i.astype(dtype)

    def log(self, a: Any, by: str) -> None:
        if by == "ref" and self.ref is not None:
            self.ref[...] = added_to(self.ref[...], a)
        if by == "python" and self.logged is not None:
            io_callback(lambda x: self.logged.append(int(x)), None, a, ordered=True)

    def options(self, places: Places) -> tuple[Any, dict[str, Any]]:
        at, parts = places.at, places.parts
        keywords = {"where": places.where, "mode": "drop" if self.dropping else at.mode, "lowering": at.lowering}
        if at.form == "window":
            return parts[0], keywords | {"length": places.count}
        index = jnp.stack(parts) if len(parts) > 1 else parts[0]
        if at.form == "element":
            return (index, places.column), keywords
        return index, keywords | ({"axis": 1} if at.form == "column" else {})

    def read(self, tag: str, places: Places) -> Any:
        index, keywords = self.options(places)
        return self.row(tag, ta.ta_read(places.buffer, index, **keywords), places)

    def row(self, tag: str, rows: Any, places: Places) -> Any:
        """One row of several: their sum, in which each has a weight of its own."""
        if places.at.form == "column":
            rows = jnp.tensordot(0.5 ** jnp.arange(len(rows)), rows, 1)
        if places.at.form != "window" and places.count == 1:
            rows = rows[None]
        if tag == "I":
            return jnp.sum(rows.astype(jnp.int32), 0, dtype=jnp.int32)
        return jnp.tensordot(0.5 ** jnp.arange(places.count), rows, 1)

    def update(self, op: str, tag: str, values: list[Any], places: Places) -> tuple[Any, Any]:
        (index, keywords), buffer = self.options(places), places.buffer
        if places.at.form != "window" and places.count == 1:
            value = values[0]
        else:
            value = jnp.stack(values) if values else jnp.zeros((0, *buffer.shape[1:]))
        if op == "mul":
            return self.times(places, value.astype(buffer.dtype)), None
        result = getattr(ta, f"ta_{op}")(buffer, index, value.astype(buffer.dtype), **keywords)
        if op != "swap":
            return result, None
        return result[0], self.row(tag, result[1], places)

    def times(self, places: Places, value: Any) -> Any:
        buffer = places.buffer
        for place, factor in self.one_by_one(places, value):
            index, keywords = self.options(place)
            buffer = ta.ta_write(buffer, index, ta.ta_read(buffer, index, **keywords) * factor, **keywords)
        return buffer

    def one_by_one(self, places: Places, value: Any) -> list[tuple[Places, Any]]:
        """The positions, each with its factor, since a row may be there twice."""
        factors = value * jnp.asarray(0.5 if jnp.issubdtype(value.dtype, jnp.floating) else 1, value.dtype)
        if places.at.form == "window" or places.count == 1:
            return [(places, factors)]
        return [(places._replace(parts=[part], count=1), factors[k]) for k, part in enumerate(places.parts)]

    def cond(self, predicate: Any, yes: Any, no: Any, state: Any) -> Any:
        return lax.cond(predicate, yes, no, *state)

    def switch(self, index: Any, branches: Any, state: Any) -> Any:
        return lax.switch(index, branches, *state)

    def call(self, kind: str, f: Any, state: Any) -> Any:
        if kind == "jit":
            return jax.jit(f)(*state)
        policy = ta.checkpoint_policies.save_reads if kind == "save_reads" else None
        return jax.checkpoint(f, policy=policy)(*state)

    def loop(self, s: Loop, trips: Any, goes_on: Any, step: Any, state: Any) -> Any:
        # An error that no result depends on goes with the state. Its derivative is infinite.
        def body(k: Any, *state: Any) -> Any:
            after = step(jnp.asarray(k, jnp.int32), *state[:-1])
            return *after, jnp.sqrt(0.0 * after[1])

        state = *state, jnp.zeros_like(state[1])
        kind = "while_loop" if s.kind == "lax.while_loop" and self.reverse_mode else s.kind
        objects = {
            "checkpoint": ta.residuals.Checkpoint(s.checkpoints),
            "offload": ta.residuals.Tape(offload=True),
            "memory": ta.residuals.Auto(memory=100 * s.checkpoints),
        }
        options: dict[str, Any] = {"residuals": objects.get(s.residuals, s.residuals)}
        limit = {"max_steps": s.steps, "on_limit": "stop"}
        if kind.endswith("while_loop"):

            def more(carry: Any) -> Any:
                k, state = carry
                here = k < trips if goes_on is None else (k < trips) & goes_on(*state[:-1])
                return here if kind == "while_loop" else here & (k < s.steps)

            def next_carry(carry: Any) -> Any:
                return carry[0] + 1, body(carry[0], *carry[1])

            start = (jnp.int32(0), state)
            if kind == "while_loop":
                return ta.while_loop(more, next_carry, start, **limit, **options)[1][:-1], []
            return lax.while_loop(more, next_carry, start)[1][:-1], []
        if kind.endswith("fori_loop"):
            if kind == "fori_loop":
                return ta.fori_loop(0, trips, lambda k, x: body(k, *x), state, **limit, **options)[:-1], []
            return lax.fori_loop(0, s.steps, lambda k, x: body(k, *x), state)[:-1], []

        def scanned(x: Any, k: Any) -> Any:
            after = body(k, *x)
            return after, after[1]

        ks = jnp.arange(s.steps, dtype=jnp.int32)
        scan = functools.partial(ta.scan, **options) if kind == "scan" else lax.scan
        state, ys = scan(scanned, state, ks, reverse=s.reverse)
        return state[:-1], [jnp.dot(0.5 ** jnp.arange(s.steps), ys)]

    def leapfrog(self, a: Any, b: Any, steps: int, trips: Any) -> Any:
        def forward(carry: Any) -> Any:
            k, a, b = carry
            a = a + 0.5 * jnp.sin(b)
            return k + 1, a, b - 0.5 * jnp.sin(a)

        def back(carry: Any) -> Any:
            k, a, b = carry
            b = b + 0.5 * jnp.sin(a)
            return k - 1, a - 0.5 * jnp.sin(b), b

        start = (jnp.int32(0), a, b)
        how = {"on_limit": "stop", "residuals": ta.residuals.Inverse(back, check=1e-6)}
        return ta.while_loop(lambda c: c[0] < trips, forward, start, max_steps=steps, **how)[1:]


# --- a program as a function ------------------------------------------------------------------------------------


@functools.cache
def _numbers(n: int) -> np.ndarray:
    return np.random.default_rng(n).uniform(-1, 1, n)


THETA = np.array([0.3, -0.8, 1.1, 0.6])
DIRECTION = np.array([0.7, -0.4, 0.2, 0.9])
INTS = np.array([3, 0, 1, 5, 2, 7, -1, 4])


def coefficients(program: Program) -> list[np.ndarray]:
    """The floats of a state, each as a matrix to multiply the parameters by: a row depends on one of these."""
    s, v, _ = program.sizes
    of_rows = np.arange(s) % PARAMETERS, np.arange(2 * v).reshape(v, 2) % PARAMETERS
    rows = [
        (1.0, np.array(0)),
        (1.0, np.array([1, 2])),
        (_numbers(s), of_rows[0]),
        (_numbers(s)[::-1], of_rows[0]),
        (_numbers(2 * v).reshape(v, 2), of_rows[1]),
    ]
    return [np.asarray(x)[..., None] * np.eye(PARAMETERS)[which] for x, which in rows]


def initial(program: Program, theta: Any, start: Any, xp: Any) -> tuple[Any, ...]:
    """The state before a program, in JAX or as jets."""
    matrices = coefficients(program)
    ints = np.resize(INTS, program.sizes[2]).astype(program.ints)
    if xp is np:
        floats = [each(lambda x, m=m: np.tensordot(x, m, (-1, -1)), theta) for m in matrices]
        return (start, *floats, ints)
    every = jnp.dot(np.concatenate([m.reshape(-1, PARAMETERS) for m in matrices]), theta)
    ends = np.cumsum([m.size // PARAMETERS for m in matrices])
    shapes = [m.shape[:-1] for m in matrices]
    parts = [lax.slice(every, (end - math.prod(shape),), (end,)) for end, shape in zip(ends, shapes, strict=True)]
    return (start, *(lax.reshape(x, shape) for x, shape in zip(parts, shapes, strict=True)), jnp.asarray(ints))


def outputs(program: Program, machine: InJax, theta: Any, start: Any) -> tuple[Any, ...]:
    return run(machine, program.block, None, initial(program, theta, start, jnp))


def loss(state: Sequence[Any], xp: Any) -> Any:
    """A number that depends on every element, by way of a function that is not linear."""
    floats = [x for tag, x in zip(STATE, state, strict=True) if tag not in "iI"]
    total = 0.0 if xp is jnp else constant(0.0)
    for n, x in enumerate(floats):
        if xp is jnp:
            total += jnp.sum(jnp.asarray(weights(n, x.shape)) * jnp.sin(x))
        else:
            w = weights(n, x.x.shape)
            axes = tuple(range(-w.ndim, 0))
            total = each(lambda t, p, w=w, axes=axes: t + np.sum(w * p, axis=axes), total, sine(x))
    return total


def weights(n: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.cos(1.0 + n + np.arange(np.prod(shape, dtype=int))).reshape(shape)


class Expected(NamedTuple):
    state: tuple[Any, ...]  # of NumPy arrays
    loss: Jet
    strays: list[Stray]
    logged: list[int]
    in_ref: int


def jets(program: Program, theta: Any, start: int) -> tuple[Any, ...]:
    """The state before a program, with its derivatives."""
    zeros = np.zeros((PARAMETERS, PARAMETERS))
    return initial(program, Jet(np.asarray(theta), np.eye(PARAMETERS), DIRECTION, zeros), start, np)


def expected(program: Program, theta: Any = THETA, start: int | None = None, dropping: bool = False) -> Expected:
    """What NumPy says of a program."""
    m = InNumPy(dropping)
    with np.errstate(invalid="ignore", divide="ignore"):
        state = run(m, program.block, None, jets(program, theta, program.start if start is None else start))
        total = loss(state, np)
    return Expected(
        tuple(x.x if isinstance(x, Jet) else np.asarray(x) for x in state), total, m.strays, m.logged, m.in_ref
    )


def kinds(program: Program) -> set[str]:
    """Of arithmetic: what the rules of a program's functions do not allow depends on them."""
    return {rules_of(s.kind) for s in statements(program) if isinstance(s, Arithmetic)}


def rules_of(kind: str) -> str:
    """What the rules of a function are: those of a `custom_gradient` are those of a `custom_vjp`."""
    return kind.split()[0].replace("gradient", "vjp")
