"""What is known of our calls in StableHLO: their operands and results by role, and the attributes that passes set."""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.interpreters.mlir import ir

from jax_tensorarray._lowering.mlir import Operation, Value, constant, operation

PREFIX = "jax_tensorarray_"


class Call(NamedTuple):
    """The operands and results of a call of ours, without the readers that may follow (see `partition`)."""

    operands: tuple[str, ...]
    results: tuple[str, ...]
    combine: Callable[[Any, Any], Any] | None  #: makes the new row of the old one and the value, for `slices`

    @property
    def takes_value(self) -> bool:
        """Whether there are rows between the index and the mask."""
        return "value" in self.operands

    @property
    def in_place(self) -> bool:
        """Whether the first operand is updated, and is the first result."""
        return self.operands[:1] == self.results[:1] == ("buffer",)


#: Our calls by name. Every op declares its own.
CALLS: dict[str, Call] = {}


#: The targets of the calls that update their first operand in place.
UPDATING: set[str] = set()


def declare(
    name: str,
    operands: tuple[str, ...],
    results: tuple[str, ...],
    combine: Callable[[Any, Any], Any] | None = None,
) -> Call:
    """Declare the operands and results of a call, and how it combines two rows if it does."""
    CALLS[name] = call = Call(operands, results, combine)
    if call.in_place:
        UPDATING.add(PREFIX + name)
    return call


#: Attribute of a module into which one of our calls has been lowered.
MARK = "jax_tensorarray.lowered"


#: What a row op may be asked to lower to, see `slices`.
LOWERINGS = ("auto", "ffi", "xla")


#: Attribute of a call that was asked for with another `lowering` than "auto".
LOWERING = "jax_tensorarray.lowering"


#: Attribute of an op whose index is checked elsewhere, so that it does not raise itself; see `record`.
CHECKED = "jax_tensorarray.checked"


#: Attribute of an op whose index is in range, see `bounds`.
IN_RANGE = "jax_tensorarray.in_range"


#: Attribute of an op whose reads and updates of the buffer need no order, see `uses`.
UNORDERED = "jax_tensorarray.unordered"


#: Attribute of a row op whose index says where boxes start, for examples that may share it: the sizes of the boxes
#: along the last of the axes. A kernel takes the numbers of all rows in each example, see `build.flatten`.
WINDOW = "jax_tensorarray.window"


#: Attribute of a row op whose boxes are in range as a whole or not at all: "clip" if the op moves the others into
#: range, "drop" if it leaves them out.
WHOLE = "jax_tensorarray.whole"


#: Platforms that call no kernels. Row ops become operations of XLA's own there, see `fallback`.
WITHOUT_KERNELS = frozenset({"tpu"})


#: Attribute of a call that stands for a function of XLA's own operations: its name.
FALLBACK = "jax_tensorarray.fallback"


#: Attribute of a call whose buffer is the tape of a loop of this library. Each step writes a row of a tape and never
#: reads it, or the other way round, and the number of the row is the number of the step.
TAPE = "jax_tensorarray.tape"


#: Attribute of a call that holds the attributes of its kernel.
CONFIG = "mhlo.backend_config"


#: Parameter of a row op whose buffer is the tape of a loop of this library.
TAPE_PARAM = "is_tape"


def set_facts(call: Operation, checked: str) -> None:
    """Tell the passes over a module what those over the program have found."""
    for name, fact in ((IN_RANGE, "in range"), (CHECKED, "recorded")):
        if checked == fact:
            call.attributes[name] = ir.UnitAttr.get()


def mark(module: ir.Module) -> None:
    """Mark `module` for the pass, which need not look through the others."""
    module.operation.attributes[MARK] = ir.UnitAttr.get(module.context)


class Config(NamedTuple):
    """The attributes that a kernel is called with. None is an attribute that the call does not have."""

    batch_dims: int | None = None
    index_dims: int | None = None
    masked: bool | None = None
    op: str | None = None
    reverse: bool | None = None
    sorted: bool | None = None
    strict: bool | None = None

    @classmethod
    def of(cls, attributes: Any) -> "Config":
        """Return what a dictionary of MLIR attributes says."""
        return cls(**{name: attributes[name].value for name in cls._fields if name in attributes})

    @classmethod
    def parse(cls, text: str) -> "Config":
        """Return what the text of such a dictionary says, which is the form that XLA has."""
        with ir.Context():
            return cls.of(ir.DictAttr(ir.Attribute.parse(text or "{}")))

    def __str__(self) -> str:
        given = {name: value for name, value in self._asdict().items() if value is not None}
        return "{" + ", ".join(f"{name} = {_written(value)}" for name, value in given.items()) + "}"


def _written(value: bool | int | str) -> str:
    """Return the text of an attribute."""
    if isinstance(value, str):
        return '"' + value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\0A") + '"'
    return str(value).lower() if isinstance(value, bool) else f"{value} : i64"


def config(call: Operation) -> Config:
    """Return the attributes with which a kernel is called."""
    return _config(call.attributes[CONFIG]) if CONFIG in call.attributes else Config()


_config = functools.cache(Config.of)


def with_config(call: Operation, **changed: bool | str) -> ir.Attribute:
    """Return the attributes of its kernel, some of them changed."""
    attributes = {item.name: item.attr for item in call.attributes[CONFIG]}
    for name, value in changed.items():
        attributes[name] = ir.StringAttr.get(value) if isinstance(value, str) else ir.BoolAttr.get(value)
    return ir.DictAttr.get(attributes)


@contextlib.contextmanager
def configs_read_once() -> Iterator[None]:
    """Read equal attributes once: every pass asks for them, and to read them takes a tenth of its time.

    Attributes keep the MLIR context of their module alive, so they are forgotten at the end.
    """
    try:
        yield
    finally:
        _config.cache_clear()


def target(op: Operation) -> str:
    return op.attributes["call_target_name"].value if op.name == "stablehlo.custom_call" else ""


def is_ours(op: Operation) -> bool:
    """Return whether `op` is a call of one of our kernels."""
    return target(op).startswith(PREFIX)


_ALIAS = re.compile(r"output_tuple_indices = \[(\d*)\], operand_index = (\d+)")


def aliased(op: Operation) -> list[tuple[int, int]]:
    """Return the operands that share the memory of a result in a call that is not ours, each with the result."""
    if not target(op) or is_ours(op) or "output_operand_aliases" not in op.attributes:
        return []
    return [(int(k), int(n or 0)) for n, k in _ALIAS.findall(str(op.attributes["output_operand_aliases"]))]


def addresses_rows(op: Operation) -> bool:
    """Return whether `op` is a call of ours with an index that has to be in range."""
    return is_ours(op) and config(op).strict is not None


def index_and_size(op: Operation) -> tuple[Value, int | None]:
    """Return the index of such a call along one axis, and the number of rows unless the program computes it."""
    index = op.operands[index_number(op)]
    return index, constant(op.operands[1]) if target(op) == PREFIX + "check" else index_sizes(op)[0]


def index_number(op: Operation) -> int:
    """Return which operand of such a call the index is. It may be the buffer as well."""
    return int(target(op) != PREFIX + "check")


def window_of(op: Operation) -> tuple[int, ...]:
    """Return the sizes of the boxes of a row op along the last axes, () if they are single rows."""
    return tuple(ir.DenseI64ArrayAttr(op.attributes[WINDOW])) if WINDOW in op.attributes else ()


def box_of(op: Operation) -> list[int]:
    """Return how many rows a box has along each axis."""
    return box_along(index_sizes(op), window_of(op))


def box_along(sizes: Sequence[int], window: Sequence[int]) -> list[int]:
    """Return how many rows a box has along axes of these sizes: those of a window along the last ones, one before."""
    return [*[1] * (len(sizes) - len(window)), *window]


def clips(op: Operation) -> bool:
    """Return whether a row op moves boxes into range, as a slice and a gather of XLA do."""
    return WHOLE in op.attributes and op.attributes[WHOLE].value == "clip"


def steps_along(sizes: Sequence[int]) -> list[int]:
    """Return by how much the number of a row grows along each of the axes together, the last one fastest."""
    return [math.prod(map(int, sizes[k + 1 :])) for k in range(len(sizes))]


def index_sizes(op: Operation) -> list[int]:
    """Return the sizes of the axes along which a row op starts. Calls of kernels count the rows of all together."""
    facts = config(op)
    batch_dims = facts.batch_dims or 0
    sizes: list[int] = op.operands[0].type.shape[batch_dims : batch_dims + (facts.index_dims or 1)]
    return sizes if WINDOW in op.attributes else [math.prod(sizes)]


def mask_of(op: Operation) -> Value | None:
    """Return the mask of a row op, if it has one."""
    return op.operands[CALLS[target(op).removeprefix(PREFIX)].operands.index("where")] if config(op).masked else None


def may_raise(op: Operation) -> bool:
    """Return whether such a call raises if its index is out of range, and the index may be so."""
    return bool(config(op).strict) and IN_RANGE not in op.attributes


def lowering_of(op: Operation, default: str) -> str:
    """Return the `lowering` of a call of ours, which says what it may become (see `slices`)."""
    name: str = op.attributes[LOWERING].value if LOWERING in op.attributes else default
    return name


def opaque_zero_at(op: Operation) -> Value | None:
    """Return a number that is 0 while nothing is wrong, and that XLA cannot know, if there is one at `op`."""
    while op.name != "func.func":
        block = op.block
        for _, first in zip(range(200), block.operations, strict=False):
            if target(operation(first)) == PREFIX + "zero":
                return first.operands[0]
        op = operation(block.owner)
    return None
