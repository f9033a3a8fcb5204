"""Random programs over buffers: one grammar, with an interpreter in NumPy and one in this library.

A program is plain data, so hypothesis can shrink it, and a failure is kept as it was printed. Its state has a slot for
each of `STATE`: an integer, rows, and buffers of them. A block is a list of statements. Each adds values to
those that there are; then every slot gets one of these back: its newest, or any other of its type, so that buffers
cross, and old versions live on. Inner blocks see the values of the outer ones, which makes them closures.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import numpy as np

# --- the grammar -----------------------------------------------------------------------------------------------

#: Types of the slots: an integer, rows of shape () and (2,), and buffers of these. Ints are int32, floats are float64.
STATE = ("i", "s", "v", "S", "S", "V", "I")
ROW_OF = {"S": "s", "V": "v", "I": "i"}
PARAMETERS = 4
PAGES = 40
LARGE = 0.123  # which no number is by design
LEAST = -(2**31)  # whose absolute value is negative
BATCH = 3


class Index(NamedTuple):
    """`(a * ref + b)`, brought into range or not, as a dtype."""

    ref: int
    a: int
    b: int
    guard: str  # "mod", "clip", "raw", or "abs": the absolute value of `ref`, or of `LEAST` if it is not below `b`


class At(NamedTuple):
    """Where an op goes, and how."""

    parts: tuple[Index, ...]  # one: a scalar
    dtype: str
    where: Any  # None or a Predicate
    mode: str | None
    lowering: str
    form: str = (
        "rows"  # or a window from the first part on; elements (part, column) or columns of a buffer of rows (2,)
    )
    column: Index = Index(0, 1, 0, "mod")


class Predicate(NamedTuple):
    """`a < b`, whether an integer is odd, or whether a number is large."""

    kind: str
    a: int
    b: int


class Arithmetic(NamedTuple):
    kind: str
    tag: str
    a: int
    b: int


class Convert(NamedTuple):
    """A row of the other shape."""

    tag: str
    a: int


class IntArithmetic(NamedTuple):
    kind: str
    a: int
    b: int
    c: int


class Read(NamedTuple):
    tag: str
    buffer: int
    at: At


class Update(NamedTuple):
    op: str
    tag: str
    buffer: int
    at: At
    rows: tuple[int, ...]


class Scale(NamedTuple):
    """All rows at once, by a number."""

    tag: str
    buffer: int
    a: int


class Whole(NamedTuple):
    """A row made of all rows, or of those up to one."""

    tag: str
    buffer: int
    upto: int | None


class Page(NamedTuple):
    """A program of the other grammar, as a function of a row whose derivative is zero."""

    tag: str
    a: int
    number: int


class Block(NamedTuple):
    statements: tuple[Any, ...]
    results: tuple[int | None, ...]  # None: the newest version of the slot


# With `same`, one buffer is given in both places S.


class Cond(NamedTuple):
    test: Predicate
    blocks: tuple[Block, Block]
    same: bool = False


class Switch(NamedTuple):
    index: int
    blocks: tuple[Block, ...]
    same: bool = False


class Call(NamedTuple):
    """A block in a nested jit, or under `jax.checkpoint`."""

    kind: str
    block: Block
    same: bool = False


class Loop(NamedTuple):
    kind: str  # the library, and the loop
    steps: int  # at most, as far as known while tracing
    trips: int  # reference to an integer that says how many, if the loop looks at it
    test: Predicate | None  # what a while loop looks at besides
    reverse: bool
    residuals: str
    checkpoints: int
    block: Block
    same: bool = False
    logs: str | None = None  # the test has an effect: it writes down the integer of the state, as `Log.by` says


class Leapfrog(NamedTuple):
    """A reversible loop, of two rows."""

    a: int
    b: int
    steps: int
    trips: int


class Log(NamedTuple):
    """An effect: an integer is written down, by Python or in a ref."""

    a: int
    by: str = "python"


class Program(NamedTuple):
    sizes: tuple[int, int, int]  # of S, V and I
    ints: str  # dtype of I
    start: int
    block: Block


def weighted(choices: dict[Any, int]) -> st.SearchStrategy[Any]:
    """One of these strategies, each so many times as likely as another: `one_of` takes equal ones for one."""
    return st.sampled_from([s for s, n in choices.items() for _ in range(n)]).flatmap(lambda s: s)


_refs = st.integers(0, 5)
_outer = st.integers(-2, -1)  # which the block closes over
_same = weighted({st.just(False): 4, st.just(True): 1})
_small = st.integers(-3, 9)
_rows = st.sampled_from(["s", "s", "v"])
#: The last ones are functions with rules of their own, which may close over an array.
ARITHMETIC = (
    *("sin", "sin", "mul", "mul", "add", "add"),
    *("jvp", "vjp", "jvp table", "vjp table", "gradient table", "vjp narrow"),
)
LOGS = ("python", "ref")
RESIDUALS = ("auto", "tape", "recompute", "checkpoint", "undo", "offload", "memory")
LOOPS = ("lax.fori_loop", "lax.scan", "lax.while_loop", "fori_loop", "scan", "while_loop", "while_loop")

_tests = st.builds(Predicate, st.sampled_from(["lt", "odd", "large"]), _refs, _refs)
_indices = st.builds(
    Index,
    _refs,
    st.sampled_from([1, 2, -1, 50]),
    _small,
    weighted({st.just("mod"): 6, st.just("clip"): 4, st.just("raw"): 2, st.just("abs"): 1}),
)
_others = {
    st.builds(Arithmetic, st.sampled_from(ARITHMETIC), _rows, _refs, _refs): 18,
    st.builds(
        IntArithmetic, st.sampled_from(["add", "mul", "mod", "sub", "where", "abs", "least"]), _refs, _refs, _small
    ): 6,
    st.builds(Convert, _rows, _refs): 6,
    st.builds(Scale, st.sampled_from(["S", "V"]), _refs, _refs): 6,
    st.builds(Whole, st.sampled_from(["S", "S", "V"]), _refs, st.one_of(st.none(), _refs)): 12,
    st.builds(Log, _refs, st.sampled_from(LOGS)): 6,
    st.builds(Page, _rows, _refs, st.integers(0, PAGES - 1)): 1,
}
_leapfrogs = st.builds(Leapfrog, _refs, _refs, st.integers(0, 4), _refs)

#: Mostly each slot gets back its own buffer. Else they cross.
_results = weighted(
    {
        st.just((None,) * len(STATE)): 2,
        st.tuples(*[weighted({st.none(): 4, _refs: 1, _outer: 1})] * len(STATE)): 1,
    }
)


def _of_rows(dtypes: Sequence[str]) -> tuple[st.SearchStrategy[Any], st.SearchStrategy[Any]]:
    """Updates and reads."""
    ats = st.builds(
        At,
        weighted({st.tuples(_indices): 3, st.tuples(_indices, _indices, _indices): 1}),
        st.sampled_from(dtypes),
        weighted({st.none(): 3, _tests: 1}),
        st.sampled_from([None, "drop", "drop", "error"]),
        st.sampled_from(["auto", "auto", "xla", "ffi"]),
        st.sampled_from(["rows", "rows", "rows", "window", "element", "column"]),
        _indices,
    )
    ops, buffers = (
        st.sampled_from(["write", "write", "add", "swap", "max", "mul"]),
        st.sampled_from(["S", "S", "S", "V", "I"]),
    )
    updates = st.builds(Update, ops, buffers, _refs, ats, st.tuples(_refs, _refs, _refs))
    return updates, st.builds(Read, buffers, _refs, ats)


def _blocks(simple: st.SearchStrategy[Any], depth: int) -> st.SearchStrategy[Block]:
    statement = simple
    if depth:
        inner = _blocks(simple, depth - 1)
        choices = {
            simple: 12,
            _loops(inner): 3,
            st.builds(Cond, _tests, st.tuples(inner, inner), _same): 3,
            st.builds(Switch, _refs, st.tuples(inner, inner, inner), _same): 1,
            st.builds(Call, st.sampled_from(["jit", "checkpoint", "save_reads"]), inner, _same): 2,
            _leapfrogs: 1,
        }
        statement = weighted(choices)
    return st.builds(Block, st.lists(statement, min_size=1, max_size=3).map(tuple), _results)


def _loops(inner: st.SearchStrategy[Block]) -> st.SearchStrategy[Loop]:
    return st.builds(
        _loop,
        weighted({st.none(): 2, st.tuples(_refs, st.one_of(st.none(), _tests)): 1}),
        st.sampled_from(LOOPS),
        st.sampled_from([3, 4, 2, 5, 1, 0]),
        _refs,
        weighted({st.none(): 3, _tests: 1}),
        st.booleans(),
        st.sampled_from(RESIDUALS),
        st.integers(1, 3),
        inner,
        _same,
        st.sampled_from([None, None, *LOGS]),
    )


def _loop(twins: tuple[int, Predicate | None] | None, *args: Any) -> Loop:
    """A loop, perhaps over twins, in a branch or not: they begin as one buffer, and a step returns one for both."""
    loop = Loop(*args)
    if twins is None:
        return loop
    (ref, test), own = twins, (None,) * len(STATE)
    results = tuple(ref if tag == "S" else of for tag, of in zip(STATE, loop.block.results, strict=True))
    block = loop.block._replace(results=results)
    block = block if test is None else Block((Cond(test, (block, Block((), own))),), own)
    return loop._replace(same=True, block=block)


def _shared(
    simple: st.SearchStrategy[Any], updates: st.SearchStrategy[Update], reads: st.SearchStrategy[Read]
) -> st.SearchStrategy[Block]:
    """A buffer that is two operands: what runs it updates the one, reads the other, and the buffer is read again."""

    def made(before: Any, how: Any, update: Update, read: Read, after: Any, whole: bool, older: int) -> Block:
        # In a body the operand that is the older slot is the second newest buffer, and then so is the other one.
        body = Block((_of_s(update, 1), _of_s(read, 1), *after), _NEWEST)
        own = Block((), (None,) * len(STATE))
        again = Whole("S", older, None) if whole else _of_s(read, older)
        return Block((*before, how(body, own), again), _NEWEST)

    some = st.lists(simple, max_size=1).map(tuple)
    hows = st.builds(
        lambda kind, test, ref, i: {
            "cond": lambda body, own: Cond(test, (body, own), True),
            "switch": lambda body, own: Switch(ref, tuple(body if k == i else own for k in range(3)), True),
        }.get(kind, lambda body, own: Call(kind, body, True)),
        st.sampled_from(["cond", "cond", "switch", "jit", "checkpoint"]),
        _tests,
        _refs,
        st.integers(0, 2),
    )
    return st.builds(made, some, hows, updates, reads, some, st.booleans(), st.sampled_from([2, 3, 3]))


def _exchanged(
    simple: st.SearchStrategy[Any], updates: st.SearchStrategy[Update], reads: st.SearchStrategy[Read]
) -> st.SearchStrategy[Block]:
    """Branches exchange two buffers, return one twice, or update one by a row read before. Not all results are used.

    The row is one of a version that nothing else uses: the block goes on with the buffers as they were.
    """
    aside = st.builds(
        lambda update, read: Call("jit", Block((_of_s(update, 1), _of_s(read, 0)), _pair(2, 1, row=0))), updates, reads
    )
    by_row = st.builds(lambda update, buffer: _of_s(update, buffer)._replace(rows=(0, 1, 2)), updates, _refs)
    pairs = st.sampled_from([(None, None), (0, 1), (0, 0), (1, 1)]) | st.tuples(_refs, _refs)
    branch = st.builds(lambda some, pair: Block(some, _pair(*pair)), st.lists(by_row, max_size=1).map(tuple), pairs)
    branches = st.sampled_from([2, 3, 3, 4]).flatmap(lambda n: st.tuples(*[branch] * n))
    hows = st.builds(
        lambda blocks, test, ref, same: Cond(test, blocks, same) if len(blocks) == 2 else Switch(ref, blocks, same),
        branches,
        _tests,
        _refs,
        _same,
    )
    used = st.builds(_pair, st.sampled_from([None, None, 1]), st.sampled_from([None, 0]))
    before = st.lists(simple, max_size=1).map(tuple)
    return st.builds(lambda some, row, how, used: Block((*some, row, how), used), before, aside, hows, used)


#: The results of a block that returns its newest row, so that something depends on what is read.
_NEWEST = (None, 0, *(None,) * (len(STATE) - 2))


def _pair(first: int | None, second: int | None, row: int | None = None) -> tuple[int | None, ...]:
    """The results of a block that returns these in the places S, and this row."""
    pair = iter((first, second))
    return tuple(next(pair) if tag == "S" else row if tag == "s" else None for tag in STATE)


def _of_s(s: Any, buffer: int) -> Any:
    """An update or a read of one of the buffers S."""
    form = "rows" if s.at.form in ("element", "column") else s.at.form
    return s._replace(tag="S", buffer=buffer, at=s.at._replace(form=form))


def _around(statement: st.SearchStrategy[Any], simple: st.SearchStrategy[Any]) -> st.SearchStrategy[Block]:
    """A block in which there is surely such a statement."""
    some = st.lists(simple, max_size=2).map(tuple)
    return st.builds(lambda before, s, after, to: Block((*before, s, *after), to), some, statement, some, _results)


def _programs(sizes: Sequence[int], dtypes: Sequence[str]) -> st.SearchStrategy[Program]:
    updates, reads = _of_rows(dtypes)
    simple = weighted({updates: 8, reads: 4, **_others})
    in_loop = _loops(_blocks(simple, 0))
    in_checkpoint = st.builds(Call, st.sampled_from(["checkpoint", "save_reads"]), _around(in_loop, simple), _same)
    shared, exchanged = _shared(simple, updates, reads), _exchanged(simple, updates, reads)
    in_loops = weighted({in_loop: 2, in_checkpoint: 1})
    loops = {
        _loops(_blocks(simple, 1)): 3,
        _loops(_around(in_loops, simple)): 3,
        _loops(shared): 1,
        _loops(exchanged): 1,
    }
    block = _around(weighted(loops), simple)
    ints = st.sampled_from(["int32", "int8", "uint8", "int64"])
    return st.builds(Program, st.tuples(*[st.sampled_from(sizes)] * 3), ints, st.integers(-2, 6), block)


def programs() -> st.SearchStrategy[Program]:
    """There is a loop in every program. Some have more rows than the dtype of an index has values."""
    every = ("int32", "int8", "uint8", "int16", "uint16", "int64", "uint32", "uint64")
    return weighted(
        {_programs((3, 5, 1, 8, 0), every): 2, _programs((129, 128, 130, 257, 300), ("int8", "uint8", "int32")): 1}
    )


def examples(seed: int, *strategies: st.SearchStrategy[Any]) -> list[tuple[Any, ...]]:
    """Eight examples of these strategies, the same for a seed."""
    found: list[tuple[Any, ...]] = []
    few = hypothesis.settings(
        max_examples=8,
        database=None,
        derandomize=False,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    given = hypothesis.given(st.tuples(*strategies))
    hypothesis.seed(seed)(few(given(lambda example: found.append(example))))()
    return found


def statements(node: Any) -> Any:
    """Everything in a program."""
    if isinstance(node, tuple):
        if hasattr(node, "_fields"):
            yield node
        for x in node:
            yield from statements(x)


# --- the meaning of a program, but for what the machines do -----------------------------------------------------


class Value(NamedTuple):
    value: Any
    slot: int | None


class Scope:
    """The values that there are, by type, oldest first."""

    def __init__(self, outer: "Scope | None", state: Sequence[Any]) -> None:
        self.values: dict[str, list[Value]] = {tag: [] for tag in {*STATE}}
        if outer is not None:
            for tag, values in outer.values.items():
                self.values[tag] = [Value(x.value, None) for x in values]
        self.put(state)

    def put(self, state: Sequence[Any]) -> None:
        for slot, (tag, value) in enumerate(zip(STATE, state, strict=True)):
            self.add(tag, value, slot)

    def add(self, tag: str, value: Any, slot: int | None = None) -> None:
        self.values[tag].append(Value(value, slot))

    def get(self, tag: str, ref: int) -> Any:
        return self.entry(tag, ref).value

    def entry(self, tag: str, ref: int) -> Value:
        """The values are counted from the newest, and with -1 from the oldest."""
        values = self.values[tag]
        return values[-1 - ref % len(values)]

    def own(self, slot: int) -> Any:
        return next(x.value for x in reversed(self.values[STATE[slot]]) if x.slot == slot)

    def state(self) -> tuple[Any, ...]:
        return tuple(self.own(slot) for slot in range(len(STATE)))


def run(m: Any, block: Block, outer: Scope | None, state: Sequence[Any], counter: Any = None) -> tuple[Any, ...]:
    """The state after a block, on a machine."""
    scope = Scope(outer, state)
    if counter is not None:
        scope.add("i", counter)
    for s in block.statements:
        step(m, s, scope)
    return tuple(
        scope.own(slot) if ref is None else scope.get(STATE[slot], ref) for slot, ref in enumerate(block.results)
    )


def step(m: Any, s: Any, scope: Scope) -> None:
    get = scope.get
    if isinstance(s, Arithmetic):
        scope.add(s.tag, m.arithmetic(s.kind, get(s.tag, s.a), get(s.tag, s.b)))
    elif isinstance(s, Page):
        scope.add(s.tag, m.page(s.number, get(s.tag, s.a)))
    elif isinstance(s, Convert):
        scope.add(s.tag, m.convert(s.tag, get("v" if s.tag == "s" else "s", s.a)))
    elif isinstance(s, IntArithmetic):
        scope.add("i", m.integer(s.kind, get("i", s.a), get("i", s.b), s.c))
    elif isinstance(s, Scale):
        buffer, slot = scope.entry(s.tag, s.buffer)
        scope.add(s.tag, m.scale(buffer, get("s", s.a)), slot)
    elif isinstance(s, Whole):
        upto = None if s.upto is None else get("i", s.upto)
        scope.add(ROW_OF[s.tag], m.whole(get(s.tag, s.buffer), upto))
    elif isinstance(s, Log):
        m.log(get("i", s.a), s.by)
    elif isinstance(s, Read):
        tag, row = tags(s)
        scope.add(row, m.read(tag, where_to(m, s.at, scope, get(tag, s.buffer))))
    elif isinstance(s, Update):
        tag, row = tags(s)
        buffer, slot = scope.entry(tag, s.buffer)
        places = where_to(m, s.at, scope, buffer)
        rows = [get(row, r) for r in s.rows[: places.count]]
        new, old = m.update(s.op, tag, rows, places)
        scope.add(tag, new, slot)
        if old is not None:
            scope.add(row, old)
    elif isinstance(s, Leapfrog):
        trips = m.integer("mod", get("i", s.trips), 0, s.steps)
        a, b = m.leapfrog(get("s", s.a), get("s", s.b), s.steps, trips)
        scope.add("s", a)
        scope.add("s", b)
    else:
        scope.put(control(m, s, scope))


def tags(s: Any) -> tuple[str, str]:
    """The type of the buffer that a statement is about, and that of what it reads or writes there."""
    return ("V", "s") if s.at.form in ("element", "column") else (s.tag, ROW_OF[s.tag])


def control(m: Any, s: Any, scope: Scope) -> tuple[Any, ...]:
    state = scope.state()
    if s.same:
        state = tuple(state[STATE.index(tag)] if tag == "S" else x for tag, x in zip(STATE, state, strict=True))
    if isinstance(s, Cond):
        yes, no = ((lambda *x, b=b: run(m, b, scope, x)) for b in s.blocks)
        return m.cond(test(m, s.test, scope), yes, no, state)
    if isinstance(s, Switch):
        branches = [lambda *x, b=b: run(m, b, scope, x) for b in s.blocks]
        return m.switch(scope.get("i", s.index), branches, state)
    if isinstance(s, Call):
        return m.call(s.kind, lambda *x: run(m, s.block, scope, x), state)
    trips = m.integer("mod", scope.get("i", s.trips), 0, s.steps + 1)

    # JAX has no loop whose test and body write to one ref.
    in_body = {by for x in statements(s.block) for by in (getattr(x, "by", None), getattr(x, "logs", None))}
    by = "python" if "ref" in in_body else s.logs

    def goes_on(*x: Any) -> Any:
        here = Scope(None, x)
        if s.logs:
            m.log(here.get("i", 0), by)
        return test(m, s.test, here)

    results, more = m.loop(
        s, trips, goes_on if s.test else None, lambda k, *x: run(m, s.block, scope, x, counter=k), state
    )
    for x in more:
        scope.add("s", x)
    return results


def test(m: Any, t: Predicate, scope: Scope) -> Any:
    tag = "s" if t.kind == "large" else "i"
    return m.test(t.kind, scope.get(tag, t.a), scope.get(tag, t.b))


class Jet(NamedTuple):
    """A number, its derivatives by the parameters, that in one direction, and those of that."""

    x: np.ndarray
    d: np.ndarray  # [PARAMETERS, *shape]
    e: np.ndarray
    de: np.ndarray


class Places(NamedTuple):
    """Where a machine goes."""

    buffer: Any
    at: At
    parts: list[Any]  # of the index
    column: Any
    where: Any
    count: int  # of positions


def where_to(m: Any, at: At, scope: Scope, buffer: Any) -> Places:
    shape = (buffer.x if isinstance(buffer, Jet) else buffer).shape

    def index(p: Index, axis: int) -> Any:
        return m.index(p, scope.get("i", p.ref), at.dtype, shape[axis])

    parts = [index(p, 1 if at.form == "column" else 0) for p in at.parts]
    column = index(at.column, 1) if at.form == "element" else None
    where = None if at.where is None else test(m, at.where, scope)
    return Places(buffer, at, parts, column, where, min(3, shape[0]) if at.form == "window" else len(parts))
