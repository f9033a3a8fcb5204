"""What is measured: programs, their rivals, and at which sizes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tests.support.row_programs import programs

#: rival -> (its environment, its name in tables). Ours is first: with it the others are compared.
RIVALS = {
    "ours": ("jax", "ours"),
    "ours_class": ("jax", "ours, TensorArray"),
    "ours_recompute": ("jax", "ours, recompute"),
    "ours_tape": ("jax", "ours, tape"),
    "plain": ("jax", "plain JAX"),
    "lax_while": ("jax", "lax.while_loop"),
    "new_ref": ("jax", "jax.new_ref"),
    "stacked": ("jax", "scan outputs"),
    "nested_scans": ("jax", "nested scans"),
    "eqx_checkpointed": ("jax", "Equinox checkpointed"),
    "eqx_bounded": ("jax", "Equinox bounded"),
    "memcpy": ("jax", "memcpy"),
    "tf": ("tensorflow", "TensorFlow"),
    "tf_xla": ("tensorflow", "TensorFlow, XLA"),
    "torch_rows": ("torch", "PyTorch, in place"),
    "torch_stack": ("torch", "PyTorch, list"),
}

#: These are this library too.
OURS = {rival for rival in RIVALS if rival.startswith("ours")}

DERIVATIVES = ("forward", "gradient", "second order")

SIZES = (1000, 3000, 8000, 30_000, 100_000)
FEW_SIZES = (1000, 8000)
LARGE_ROW = 2**18  # floats: 1 MiB
MOST_FLOATS = 2**26  # of a buffer: 256 MiB


class Case(NamedTuple):
    """A program, who does it, and at which sizes."""

    name: str
    group: str
    about: str
    rivals: tuple[str, ...]
    grid: Mapping[int, tuple[int, ...]]  # floats of a row -> T
    derivatives: tuple[str, ...] = ("forward", "gradient")
    fixed: bool = False  # the sizes are what the case is about


class Point(NamedTuple):
    """A case with one derivative, at one size of its rows: what the rivals go through together, T by T."""

    case: Case
    derivative: str
    row: int
    sizes: tuple[int, ...]


_IN_JAX = ("ours", "ours_class", "plain", "new_ref", "stacked", "eqx_checkpointed", "eqx_bounded")
_ELSEWHERE = ("tf", "tf_xla", "torch_rows", "torch_stack")
_LOOPS = ("ours", "ours_recompute", "plain", "lax_while", "new_ref", "eqx_checkpointed", "eqx_bounded", "nested_scans")

#: The programs that `rivals/programs.py` has for the frameworks other than JAX too.
PORTED = {
    *("write", "read_then_write", "read_beside_write", "read_new_after_write", "three_reads", "cross", "overwrite"),
    *("exchange", "swap", "add", "closed_over", "issue_15906"),
}
#: Those that `lax.scan` can do with outputs that it stacks.
STACKED = {"write", "issue_15906", "map_rows"}
SECOND_ORDER = {"write", "read_then_write", "read_beside_write"}
TO_A_MILLION = {"write", "read_then_write", "map_rows"}


def _rivals(name: str, in_jax: Sequence[str] = _IN_JAX) -> tuple[str, ...]:
    return tuple(rival for rival in in_jax if rival != "stacked" or name in STACKED)


def _cases() -> Iterator[Case]:
    for name, program in programs.items():
        more = (1_000_000,) if name in TO_A_MILLION else ()
        yield Case(
            name,
            "programs",
            program.about,
            _rivals(name) + (_ELSEWHERE if name in PORTED else ()),
            {64: SIZES + more, 1: FEW_SIZES + more, 1024: FEW_SIZES, LARGE_ROW: (16, 64)},
            DERIVATIVES if name in SECOND_ORDER else DERIVATIVES[:2],
        )

    models = {
        "decoder": ("an input and an earlier output are read in every step, and a matrix multiplied", SIZES),
        "append": ("an array that grows by a row in every step", SIZES),
        "map_rows": ("unstack, read, write, stack", (*SIZES, 1_000_000)),
        "lstm": ("an LSTM decoder whose every step reads an earlier state", SIZES[:4]),
        "beam_search": ("four hypotheses of 32 letters per step, followed back to the start", SIZES[:4]),
    }
    for name, (about, sizes) in models.items():
        in_jax = tuple(rival for rival in _rivals(name) if rival != "ours_class")  # which ours is, there
        yield Case(name, "models", about, in_jax + _ELSEWHERE, {64: sizes})
    yield Case(
        *("eager_write", "models", "a Python loop of writes, without any compilation", ("ours", *_ELSEWHERE)),
        *({64: (1000, 10_000)}, ("forward",)),
    )

    read_earlier = "a row is written and an earlier one read, the number of steps known at run time"
    yield Case("while_write", "loops", "x = tanh(w x), each x kept", _LOOPS, {64: SIZES[:4]})
    exact = ("plain", "new_ref")  # these take `max_steps` steps, so they must be as many as there are
    loose = tuple(rival for rival in _LOOPS if rival not in exact)
    yield Case(
        *("while_write_loose", "loops", "the same, with max_steps a thousand times the steps taken", loose),
        *({64: (8, 500)}, ("gradient",), True),
    )
    yield Case("while_read_earlier", "loops", read_earlier, _LOOPS, {64: SIZES, 1: FEW_SIZES, 1024: FEW_SIZES})
    yield Case(
        *("while_read_earlier_loose", "loops", "the same, with max_steps 20 times the steps taken", loose),
        *({64: (1000, 10_000)}, ("gradient",), True),
    )
    yield Case("while_vmapped", "loops", "16 examples that take T/4 to T steps", loose, {16: (250, 1000, 4000)})
    yield Case("while_layers", "loops", "six layers in a step, for the time of compilation", _LOOPS, {64: (1000,)})
    yield Case(
        *("triangular", "loops", "all results so far are used in every step", ("ours_tape", *_LOOPS)),
        *({1: (1000, 3000, 10_000)}, ("forward", "gradient"), True),
    )

    sides, forward = ("ours", "plain", "memcpy"), ("forward",)
    bulk = {64: (2**20 // 4, 2**14), 1024: (2**14,), LARGE_ROW: (64,)}
    for name, about in {
        "gather": "all rows of 64 MiB (and of 4), in an order of no pattern",
        "scatter": "the same, written",
        "scatter_add": "the same, added",
        "stack": "the dense array of as many rows, with the second half zeroed, where it lies",
    }.items():
        yield Case(name, "ops", about, sides, bulk, forward, True)
    one = {LARGE_ROW: (1,), 2**24: (1,)}
    yield Case("large_read", "ops", "one row of 1 MiB, and one of 64", sides, one, forward, True)
    yield Case("large_write", "ops", "the same, written", sides, one, forward, True)


CASES = {case.name: case for case in _cases()}


def rivals_of(point: Point) -> list[str]:
    """Who takes part, ours first. PyTorch's gradient in place takes long: rows of 64 say enough."""
    skipped = set(_ELSEWHERE) if point.derivative == "second order" else set()
    if point.derivative == "gradient" and point.row != 64:
        skipped = {"torch_rows"}
    return [rival for rival in RIVALS if rival in point.case.rivals and rival not in skipped]


def points(
    names: Sequence[str] = (),
    derivatives: Sequence[str] = (),
    sizes: Sequence[int] = (),
    rows: Sequence[int] = (),
) -> Iterator[Point]:
    """All there is to measure, or what is left of it when it is narrowed to names of cases or groups and the like."""
    for case in CASES.values():
        if names and not {case.name, case.group} & set(names):
            continue
        for derivative in case.derivatives:
            if derivatives and derivative not in derivatives:
                continue
            for row in case.grid if case.fixed or not rows else rows:
                if case.fixed and rows and row not in rows:
                    continue
                own = case.grid.get(row, FEW_SIZES)
                found = own if case.fixed or not sizes else tuple(T for T in sizes if T * row <= MOST_FLOATS)
                yield Point(case, derivative, row, found)
