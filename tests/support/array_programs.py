"""Programs over TensorArrays: one grammar, its interpreter, and the machine of Python lists that says what they mean.

A program is plain data, so hypothesis can shrink it, and a failure is kept as it was printed. `run` interprets it on a
machine: Python lists here; this library outside of `jit` (test_tensorarray_machine.py), in it, differentiated and
batched (array_machines.py); and TensorFlow (test_tensorflow_programs.py).

Statements name arrays, rows and blocks of rows by how new they are, and 0 is the newest. An index or a predicate may
depend on numbers that are arguments of a compiled program. They differ among the examples of a batch, and so do sizes.
`pruned` leaves out what is an error.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np
from list_model import ListArray
from random_programs import weighted

#: Most rows of an array with dynamic_size=True, where there is a limit.
LIMIT = 7
BATCH, NUMBERS = 3, 5
#: Dtypes in which NumPy and XLA round sums and products differently.
ROUNDED = ("bfloat16", "complex64", "complex128")

# --- the grammar -----------------------------------------------------------------------------------------------


class Index(NamedTuple):
    """An integer of some kind, as a dtype: as it is, or brought below the size or below the most rows."""

    kind: str  # "known": n; "number": one of the numbers; "step": a * step + n; "size": n past the last row
    n: int
    a: int
    guard: str  # "raw", "size" or "limit"
    dtype: str


class Parity(NamedTuple):
    """Whether a number is even: `n` itself, one of the numbers, or that of the step of a loop and n."""

    kind: str  # "known", "number" or "step"
    n: int


class Array(NamedTuple):
    """A new array, and how many rows it begins with, if any."""

    size: int
    dynamic: bool
    infer_shape: bool
    shaped: bool  # whether element_shape is given
    filled: int


class Op(NamedTuple):
    """A method of an array: where it reads or writes, which row or block it takes, and how it cuts that."""

    method: str
    array: int
    at: tuple[Index, ...] = ()
    source: int = 0
    where: tuple[Parity, ...] | Parity | None = None
    mode: str | None = None
    cuts: tuple[int, ...] = ()


class Mix(NamedTuple):
    """A row made of two others."""

    how: str
    a: int
    b: int


class Body(NamedTuple):
    """What a loop or branch does. Each carried array becomes its newest version, or another one of its type."""

    statements: tuple[Any, ...]
    results: tuple[int | None, ...]


class Loop(NamedTuple):
    how: str
    steps: int
    trips: int | None  # the number that says how many steps there are, if not all
    reverse: bool
    arrays: tuple[int, ...]
    body: Body


class Cond(NamedTuple):
    how: str  # "closure", "operands" or "switch"
    test: Parity
    arrays: tuple[int, ...]
    bodies: tuple[Body, Body]


class Call(NamedTuple):
    """A body that is jitted, under jax.checkpoint, or a function with a rule of its own."""

    how: str
    arrays: tuple[int, ...]
    body: Body


class Program(NamedTuple):
    dtype: str
    elem: tuple[int, ...]
    is_tree: bool  # whether rows are pytrees, here
    numbers: tuple[tuple[int, ...], ...]  # of each example
    statements: tuple[Any, ...]
    #: Whether it avoids what TensorFlow does otherwise: fewer rows than a fixed size, a row over one of another shape.
    is_portable: bool = False


# --- what is drawn ---------------------------------------------------------------------------------------------


def made(f: Callable[..., Any], *parts: Any) -> st.SearchStrategy[Any]:
    """`st.builds`, which would take minutes to print a program."""
    return st.tuples(*parts).map(lambda parts: f(*parts))


refs = weighted({st.just(0): 3, st.integers(0, 9): 2})
modes = st.sampled_from([None, None, None, "error", "drop", "drop"])


def _tests(kinds: Sequence[str]) -> st.SearchStrategy[Parity]:
    return made(Parity, st.sampled_from(kinds), st.integers(0, 9))


masks = weighted({st.none(): 2, _tests(["known"]): 1})


def op(method: str, **given: Any) -> st.SearchStrategy[Op]:
    """A method at the newest array or another, with what is given of `Op`."""
    parts = {"at": st.just(()), "where": st.none(), "mode": st.none(), "cuts": st.just(())} | given
    return made(
        lambda *parts: Op(method, *parts), refs, parts["at"], refs, *[parts[k] for k in ("where", "mode", "cuts")]
    )


def _arrays(size: Any, shape: Any, filled: Any) -> Any:
    def array(size: int, dynamic: bool, shape: tuple[int, int], filled: int) -> Array:
        return Array(size if dynamic else max(size, 1), dynamic, *map(bool, shape), filled)

    return made(array, size, st.booleans(), shape, filled)


def of_shapes(*shapes: tuple[int, int]) -> st.SearchStrategy[Array]:
    """Arrays of which the first row says what shape all have, or not, and whose shape is given, or not."""
    return _arrays(st.integers(0, 5), st.sampled_from(shapes), st.integers(0, 5))


any_array, ragged = of_shapes((1, 1), (1, 1), (0, 1), (1, 0), (0, 0), (0, 0)), of_shapes((0, 0))


#: Ways to the same array.
AGAIN = ("identity", "copy", "leaves", "deepcopy", "pickle", "host")


def simple(kinds: Sequence[str], *, masked: bool = True, strays: bool = True, dtypes: Sequence[str] = ("int",)) -> Any:
    """Statements without a body, whose indices and predicates are of these kinds."""
    guards = ["size"] * 3 + ["limit"] * 2 + ["raw"] * (2 * strays)
    index = made(Index, *map(st.sampled_from, (kinds, range(-1, LIMIT + 2), (1, 2, 3), guards, dtypes)))
    one, many = (st.lists(index, min_size=1, max_size=k).map(tuple) for k in (1, 3))
    some: dict[str, Any] = {}
    several: dict[str, Any] = {}
    if masked:
        test = _tests([kind for kind in kinds if kind != "size"])
        some = {"where": weighted({st.none(): 1, test: 1}), "mode": modes}
        several = {"where": st.one_of(some["where"], st.tuples(test, test, test)), "mode": modes}
    choices = {
        any_array: 1,
        op("write", at=one, **some): 5,
        op("read", at=one, **some): 4,
        op("gather", at=many, **several): 2,
        op("scatter", at=many, **several): 2,
        op("unstack", cuts=st.tuples(st.integers(1, 5))): 1,
        op("split", cuts=st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)): 3,
        op("stack"): 1,
        made(Op, st.sampled_from(["concat", "size"]), refs): 1,
        made(Op, st.sampled_from(AGAIN), refs): 1,
        made(Mix, st.sampled_from(["sin", "product", "difference"]), refs, refs): 2,
    }
    return weighted(choices | ({op("append", **some): 4, op("pop", **some): 3} if masked else {}))


LOOPS = ("lax.fori_loop", "lax.scan", "fori_loop", "while_loop", "scan", "tf.while_loop")
CALLS = ("jit", "checkpoint", "save_reads", "custom_vjp", "custom_jvp")


def compiled(depth: int = 2, in_loop: bool = False, **options: Any) -> Any:
    """Statements of a compiled program. Those without a body are most of them."""
    statement = simple(("known", "number", "number", "size") + ("step",) * (4 * in_loop), **options)
    if not depth:
        return statement

    def bodies(looping: bool) -> st.SearchStrategy[Body]:
        inner = st.lists(compiled(depth - 1, in_loop or looping, **options), min_size=2, max_size=5).map(tuple)
        return made(Body, inner, st.tuples(*[weighted({st.none(): 4, st.integers(0, 5): 1})] * 2))

    arrays = st.lists(refs, min_size=1, max_size=2).map(tuple)
    trips = st.one_of(st.none(), st.integers(0, 9))
    test = made(Parity, st.sampled_from(["number", "step"] if in_loop else ["number"]), st.integers(0, 9))
    hows = st.sampled_from(["closure", "operands", "switch"])
    loop = made(Loop, st.sampled_from(LOOPS), st.integers(1, 4), trips, st.booleans(), arrays, bodies(True))
    cond = made(Cond, hows, test, arrays, st.tuples(bodies(False), bodies(False)))
    return weighted({statement: 12, loop: 2, cond: 2, made(Call, st.sampled_from(CALLS), arrays, bodies(False)): 2})


def programs(
    statements: Any,
    least: int,
    most: int,
    dtypes: Sequence[str] = ("float64",),
    elems: Any = ((2,), (), (2, 3)),
    trees: int = 1,
    newest: Any = any_array,
    **options: Any,
) -> Any:
    """Programs of these statements: an eighth, or as many as `trees` says, with rows that are pytrees."""

    def program(dtype: str, elem: Any, is_tree: bool, numbers: Any, arrays: Any, more: Any) -> Program:
        return Program(dtype, elem, is_tree and dtype == "float64", numbers, (*arrays, *more), **options)

    return made(
        program,
        st.sampled_from(dtypes),
        st.sampled_from(elems),
        st.integers(0, 7).map(lambda n: n >= 8 - trees),
        st.tuples(*[st.tuples(*[st.integers(0, LIMIT - 1)] * NUMBERS)] * BATCH),
        st.tuples(_arrays(st.integers(1, 5), st.just((1, 1)), st.integers(1, 5)), newest),
        st.lists(statements, min_size=least, max_size=most),
    )


def pruned(program: Program) -> Program:
    """The program without statements that are an error in one of the examples."""
    while True:
        machines = [Judge(program) for _ in range(BATCH)]
        for k, m in enumerate(machines):
            run(m, program, program.numbers[k], *inputs(program, k))
        failed = {id(s) for m in machines for s, _ in m.failures}
        if not failed:
            return program
        program = _without(program, failed)


def _without(node: Any, failed: set[int]) -> Any:
    if not isinstance(node, tuple):
        return node
    kept = [_without(x, failed) for x in node if id(x) not in failed]
    return type(node)(*kept) if hasattr(node, "_fields") else tuple(kept)


def inputs(program: Program, example: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A row and two blocks."""
    rng = np.random.default_rng(example)
    shapes = program.elem, (5, *program.elem), (3, *program.elem)
    if program.dtype.startswith("float"):
        return tuple(np.asarray(rng.standard_normal(shape), program.dtype) for shape in shapes)  # type: ignore[return-value]
    high, factor = 2 if program.dtype == "bool" else 100, 1 - 1j if program.dtype.startswith("complex") else 1
    return tuple((rng.integers(0, high, shape) * factor).astype(program.dtype) for shape in shapes)  # type: ignore[return-value]


# --- the interpreter -------------------------------------------------------------------------------------------


class Inapplicable(Exception):
    """There is nothing that the statement could be about."""


class Entry(NamedTuple):
    """An array, and what is known of it on every machine."""

    value: Any
    spec: Array
    size: int | None  # None if it is dynamic
    is_shaped: bool
    slot: int | None

    @property
    def is_ragged(self) -> bool:
        return not self.spec.infer_shape and not self.spec.shaped


class Scope:
    """What a program or a body has so far, oldest first."""

    def __init__(self, arrays: Any, rows: Any, blocks: Any, numbers: Any, i: Any) -> None:
        self.arrays: list[Entry] = [*arrays]
        self.rows, self.blocks, self.others = [*rows], [*blocks], []  # and results that no statement uses
        self.numbers, self.i = numbers, i

    def entry(self, ref: int) -> Entry:
        if not self.arrays:
            raise Inapplicable
        return self.arrays[-1 - ref % len(self.arrays)]

    def row(self, ref: int) -> Any:
        return self.rows[-1 - ref % len(self.rows)]

    def block(self, ref: int) -> Any:
        return self.blocks[-1 - ref % len(self.blocks)]

    def add(self, old: Entry, value: Any, size: int | None = None) -> None:
        """Add a version that a statement has written."""
        size = old.size if size is None or old.spec.dynamic else size
        self.arrays.append(old._replace(value=value, size=size, is_shaped=old.is_shaped or not old.is_ragged))


def run(m: Any, program: Program, numbers: Any, y: Any, x: Any, z: Any) -> list[Any]:
    """Everything that a program has made, on a machine."""
    scope = Scope([], [x[3], x[0], y], [z, x], numbers, None)
    execute(m, program.statements, scope)
    return [*scope.rows[3:], *scope.blocks[2:], *scope.others, *m.ends(scope)]


def execute(m: Any, statements: Sequence[Any], scope: Scope) -> None:
    for s in statements:
        try:
            step(m, s, scope)
        except Inapplicable:
            pass
        except m.errors as error:
            m.failures.append((s, error))


def step(m: Any, s: Any, scope: Scope) -> None:
    if isinstance(s, Array):
        s = s._replace(infer_shape=True, shaped=True) if m.program.is_tree else s
        value = m.array(s)
        size = None if s.dynamic else s.size
        entry = Entry(value, s._replace(size=0, filled=0), size, s.shaped, None)
        scope.arrays.append(entry)
        rows = scope.block(s.filled)[: s.filled if s.dynamic else min(s.filled, s.size)]
        if rows.shape[0] and may_hold(m, entry, rows):
            scope.add(entry, value.unstack(m.fresh(rows)), rows.shape[0])
        return
    if isinstance(s, Mix):
        scope.rows.append(mix(m, s.how, scope.row(s.a), scope.row(s.b)))
        return
    if isinstance(s, Loop | Cond | Call):
        control(m, s, scope)
        return
    entry = scope.entry(s.array)
    if isinstance(s, Op):
        method(m, s, entry, scope)
    else:
        m.special(s, entry, scope)


def method(m: Any, s: Op, entry: Entry, scope: Scope) -> None:
    ta, elem, block, options = entry.value, m.program.elem, scope.block(s.source), {}
    others = scope.others if entry.is_ragged else None
    if m.program.is_portable and entry.is_ragged and s.method in ("write", "scatter"):
        raise Inapplicable
    at = s.at[: block.shape[0]] if s.method == "scatter" else s.at
    indices = [position(m, p._replace(dtype=at[0].dtype), entry, scope) for p in at]
    if (mode := m.mode_of(s)) is not None:
        options["mode"] = mode
    if s.where is not None:
        tests = [s.where] if isinstance(s.where, Parity) else s.where[: len(at)]
        if entry.is_ragged and m.is_compiled and any(test.kind == "number" for test in tests):
            raise Inapplicable
        found = [holds(m, test, scope) for test in tests]
        options["where"] = found[0] if isinstance(s.where, Parity) else m.vector(found)
    match s.method:
        case "write":
            scope.add(entry, ta.write(*indices, cut(s, entry, scope, elem), **options))
        case "append":
            scope.add(entry, ta.append(cut(s, entry, scope, elem), **options))
        case "scatter":
            scope.add(entry, ta.scatter(m.vector(indices), block[: len(at)], **options))
        case "pop":
            value, row = ta.pop(**options)
            scope.arrays.append(entry._replace(value=value))
            (scope.rows if others is None else others).append(row)
        case "read":
            row = ta.read(*indices, **options)
            (scope.rows if others is None else others).append(row if others is not None else m.shaped(row, elem))
        case "gather":
            rows = ta.gather(m.vector(indices), **options)
            shape = len(at), *elem
            (scope.blocks if others is None else others).append(rows if others is not None else m.shaped(rows, shape))
        case "unstack":
            value = block[: s.cuts[0]]
            if not may_hold(m, entry, value):
                raise Inapplicable
            scope.add(entry, ta.unstack(m.fresh(value)), value.shape[0])
        case "split":
            if not elem:
                raise Inapplicable
            value = block[: 5 if entry.size is None else entry.size]
            count, total = value.shape[0], value.shape[0] * elem[0]
            lengths = [elem[0]] * count
            if entry.is_ragged:
                ends = sorted(c % (total + 1) for c in [*s.cuts, *s.cuts, *s.cuts][: count - 1])
                lengths = np.diff([0, *ends, total]).tolist()
            scope.add(entry, ta.split(m.math.reshape(value, (total, *elem[1:])), lengths), count)
        case "stack":
            (scope.blocks if others is None else others).append(m.stack(entry))
        case "concat":
            scope.others.append(m.concat(entry))
        case "size":
            scope.others.append(ta.size())
        case _:
            scope.arrays.append(entry._replace(value=m.again(ta, s.method)))


def may_hold(m: Any, entry: Entry, rows: Any) -> bool:
    return not m.program.is_portable or entry.size in (None, rows.shape[0])


def cut(s: Op, entry: Entry, scope: Scope, elem: tuple[int, ...]) -> Any:
    """A row, or the beginning of one if rows may differ in length."""
    row = scope.row(s.source)
    return row[: s.source % (elem[0] + 1)] if entry.is_ragged and elem else row


def position(m: Any, p: Index, entry: Entry, scope: Scope) -> Any:
    size = entry.value.size()
    n = size + p.n if p.kind == "size" else number(p.kind, p.n, p.a, scope)
    if p.guard != "raw":
        n = n % m.at_least_one(size if p.guard == "size" else LIMIT if entry.size is None else entry.size)
    if entry.is_ragged and m.is_compiled and (p.kind == "number" or scope.i is not None):
        raise Inapplicable
    return m.index(n, p.dtype)


def holds(m: Any, test: Parity, scope: Scope) -> Any:
    return number(test.kind, test.n, 1, scope) % 2 == 0


def number(kind: str, n: int, a: int, scope: Scope) -> Any:
    match kind:
        case "number":
            return scope.numbers[n % NUMBERS]
        case "step" if scope.i is not None:
            return scope.i * a + n
    return n


def mix(m: Any, how: str, a: Any, b: Any) -> Any:
    dtype = m.program.dtype
    if dtype == "bool":
        return a ^ b
    if dtype in ROUNDED:
        return -b
    if not dtype.startswith("float"):
        return a * 3 - b
    match how:
        case "sin":
            return m.math.sin(a) + 0.5 * b
        case "product":
            return m.math.tanh(a) * b
    return 0.75 * a - b


def all_in_one(m: Any, row: Any, rows: Sequence[Any], blocks: Sequence[Any]) -> Any:
    """A row that depends on everything that a body has made."""
    dtype = m.program.dtype
    for k, block in enumerate(blocks):
        if block.shape[0] and dtype.startswith("float"):
            weights = np.cos(k + np.arange(1.0, block.shape[0] + 1)).reshape(-1, *[1] * len(m.program.elem))
            rows = [*rows, m.math.sum(block * weights, 0)]
        elif block.shape[0]:
            rows = [*rows, block[0]]
    for k, other in enumerate(rows, 1):
        row = mix(m, "sin", row, other) if not dtype.startswith("float") else 0.75 * row + np.cos(k) * m.math.sin(other)
    return row


def control(m: Any, s: Any, scope: Scope) -> None:
    """A loop, a branch or a call, which carries some arrays and the newest row, and sees the others."""
    fit = [k for k, e in enumerate(scope.arrays) if e.is_shaped and not e.is_ragged]
    if not fit:
        raise Inapplicable
    chosen = sorted({fit[-1 - ref % len(fit)] for ref in s.arrays})
    carried, others = [scope.arrays[k] for k in chosen], [scope.arrays[k] for k in fit if k not in chosen]

    def inside(body: Body, i: Any, carry: Any, seen: Any) -> Any:
        arrays, row = carry
        values, rows, blocks, numbers = seen
        own = [e._replace(value=v, slot=k) for k, (e, v) in enumerate(zip(carried, arrays, strict=True))]
        outer = [e._replace(value=v, slot=None) for e, v in zip(others, values, strict=True)]
        inner = Scope([*outer, *own], [*rows, row], blocks, numbers, i)
        execute(m, body.statements, inner)
        after = []
        for k, (e, ref) in enumerate(zip(carried, [*body.results, *body.results], strict=False)):
            like = [x for x in inner.arrays if (x.spec, x.size) == (e.spec, e.size) and x.is_shaped]
            versions = [x for x in like if x.slot == k]
            after.append((versions[-1] if ref is None else like[-1 - ref % len(like)]).value)
        return tuple(after), all_in_one(m, row, inner.rows[len(rows) + 1 :], inner.blocks[len(blocks) :])

    seen = [e.value for e in others], scope.rows, scope.blocks, scope.numbers
    carry = tuple(e.value for e in carried), scope.row(0)
    match s:
        case Loop():
            trips = s.steps if s.trips is None else scope.numbers[s.trips % NUMBERS] % (s.steps + 1)

            def once(i: Any, carry: Any) -> Any:
                i = s.steps - 1 - i if s.reverse else i
                return inside(s.body, i if scope.i is None else i + 2 * scope.i, carry, seen)

            carry = m.loop(s, trips, once, carry)
        case Cond():
            branches = [lambda carry, seen, body=body: inside(body, scope.i, carry, seen) for body in s.bodies]
            carry = m.cond(s.how, holds(m, s.test, scope), branches, carry, seen)
        case Call():
            carry = m.call(s.how, lambda i, carry, seen: inside(s.body, i, carry, seen), scope.i, carry, seen)
    scope.arrays += [e._replace(value=v) for e, v in zip(carried, carry[0], strict=True)]
    scope.rows.append(carry[1])


def loss(m: Any, results: Sequence[Any]) -> Any:
    """A scalar of the floats among some results, whose derivatives of order one and two do not vanish."""
    total = 0.0
    for k, x in enumerate(results):
        if "float" in str(getattr(x, "dtype", "")):
            weights = np.cos(1.0 + k + np.arange(np.prod(x.shape, dtype=int))).reshape(x.shape)
            total += m.math.sum(weights * m.math.sin(x))
    return total + 0.25 * total * total


# --- Python lists ----------------------------------------------------------------------------------------------


class Lists:
    """What programs mean. Rows are arrays of NumPy, or of JAX to be differentiated; other numbers are Python's."""

    errors: tuple[type[Exception], ...] = (IndexError, ValueError)
    is_compiled = True

    def __init__(self, program: Program, math: Any = np, limit: float = LIMIT, room: int = LIMIT) -> None:
        self.program, self.math, self.limit, self.room = program, math, limit, room
        self.failures: list[tuple[Any, Exception]] = []

    def array(self, spec: Array) -> Any:
        ragged = not spec.infer_shape and not spec.shaped
        zero = self.math.zeros(self.program.elem, self.program.dtype) if spec.shaped else None
        return ListArray((None,) * spec.size, zero, spec.dynamic, self.limit, ragged, self.math)

    def fresh(self, value: Any) -> Any:
        return value

    def shaped(self, value: Any, shape: tuple[int, ...]) -> Any:
        assert value.shape == shape
        return value

    def again(self, ta: Any, how: str) -> Any:
        return ta

    def index(self, n: int, dtype: str) -> int:
        return max(n, 0) if dtype.startswith("u") else n

    def at_least_one(self, n: int) -> int:
        return max(n, 1)

    def vector(self, xs: Sequence[Any]) -> Any:
        return xs

    def padded(self, rows: Any, count: int) -> Any:
        """So many rows, zeros past those that there are."""
        more = max(count - len(rows), 0)
        return self.math.concatenate([rows[:count], self.math.zeros((more, *rows.shape[1:]), rows.dtype)])

    def stack(self, entry: Entry) -> Any:
        rows = entry.value.stack()
        return rows if entry.is_ragged else self.padded(rows, self.rows_of(entry))

    def concat(self, entry: Entry) -> Any:
        rows = entry.value.concat()
        return rows if entry.is_ragged else self.padded(rows, self.rows_of(entry) * self.program.elem[0])

    def mode_of(self, s: Op) -> str | None:
        return s.mode

    def rows_of(self, entry: Entry) -> int:
        """How many rows a padded stack has."""
        return self.room if entry.size is None else entry.size

    def ends(self, scope: Scope) -> list[Any]:
        """All arrays at the end: their rows, which of them there are, and how many."""
        ends: list[Any] = []
        for e in scope.arrays:
            if e.is_shaped and not e.is_ragged:
                ends += [self.stack(e), self.mask(e), e.value.size()]
        return ends

    def mask(self, entry: Entry) -> Any:
        return np.arange(self.rows_of(entry)) < entry.value.size()

    def loop(self, s: Loop, trips: int, once: Callable[..., Any], carry: Any) -> Any:
        for i in range(trips):
            carry = once(i, carry)
        return carry

    def cond(self, how: str, test: Any, branches: Sequence[Callable[..., Any]], carry: Any, seen: Any) -> Any:
        return branches[0 if test else 1](carry, seen)

    def call(self, how: str, f: Callable[..., Any], *operands: Any) -> Any:
        return f(*operands)


class Judge(Lists):
    """Lists that also try what does not run in this example but is traced: other branches, and steps of no loop."""

    is_tried = False

    def mode_of(self, s: Op) -> str | None:
        """An index that only a running program knows is an error only if it runs."""
        is_traced = self.is_tried and s.at and all(p.kind == "number" for p in s.at)
        return "drop" if is_traced else super().mode_of(s)

    def tried(self, f: Callable[..., Any], *args: Any) -> None:
        before, self.is_tried = self.is_tried, True
        f(*args)
        self.is_tried = before

    def loop(self, s: Loop, trips: int, once: Callable[..., Any], carry: Any) -> Any:
        if not trips:
            self.tried(once, 0, carry)
        return super().loop(s, trips, once, carry)

    def cond(self, how: str, test: Any, branches: Sequence[Callable[..., Any]], carry: Any, seen: Any) -> Any:
        self.tried(branches[1 if test else 0], carry, seen)
        return super().cond(how, test, branches, carry, seen)
