"""Signatures of the calls of our kernels: the roles of operands and results, and the attributes."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jax.interpreters.mlir import ir

PREFIX = "jax_tensorarray_"

# The types of the bindings differ from version to version.
Operation = Any


class Signature(NamedTuple):
    """The operands and results of a call of ours, without the readers that may follow (see `partition`)."""

    operands: tuple[str, ...]
    results: tuple[str, ...]
    combine: Callable[[Any, Any], Any] | None  #: from the old row and the value to the new row, for slices

    @property
    def takes_value(self) -> bool:
        """Whether the operands have rows between the index and the mask."""
        return "value" in self.operands

    @property
    def in_place(self) -> bool:
        """Whether the call updates its first operand, and returns it as its first result."""
        return self.operands[:1] == self.results[:1] == ("buffer",)


#: Signatures of our calls, by name. Each op declares its own.
SIGNATURES: dict[str, Signature] = {}


def declare(
    name: str,
    operands: tuple[str, ...],
    results: tuple[str, ...],
    combine: Callable[[Any, Any], Any] | None = None,
) -> Signature:
    """Declare the signature of a call, and return it."""
    SIGNATURES[name] = signature = Signature(operands, results, combine)
    return signature


#: The first character of an `op` that is the whole text of an error, without an index.
TEXT = "!"


class Named(NamedTuple):
    """The name of an op in errors."""

    name: str
    place: str | None = None  #: file and line, empty if the op itself is jitted; None without passes

    def __str__(self) -> str:
        return self.name if self.place is None else f"{self.name}@{self.place}"


def op_attribute(params: Mapping[str, Any]) -> str:
    """Return the attribute `op` of a call. `csrc/op_attribute.h` parses it."""
    ops = params.get("ops", (Named(params["op"], params.get("place")),))
    return ">" * params.get("deferred", False) + "\n".join(map(str, ops))


#: The values of `lowering`, see `_lowering.slices`.
LOWERINGS = ("auto", "ffi", "xla")


#: Platforms without kernels. Row ops become XLA's own operations there.
WITHOUT_KERNELS = frozenset({"tpu"})


#: Attribute of a call that holds the attributes of its kernel.
CONFIG = "mhlo.backend_config"


#: Parameter of a row op whose buffer is the tape of a loop of this library. A loop either writes its tape or reads it,
#: at row `k` in step `k`.
TAPE_PARAM = "is_tape"


class Config(NamedTuple):
    """The attributes of the call of a kernel. None is an attribute that the call does not have."""

    batch_dims: int | None = None
    index_dims: int | None = None
    masked: bool | None = None
    op: str | None = None
    reverse: bool | None = None
    sorted: bool | None = None
    strict: bool | None = None

    @classmethod
    def of(cls, attributes: Any) -> "Config":
        """Return the config of a dictionary of MLIR attributes."""
        return cls(**{name: attributes[name].value for name in cls._fields if name in attributes})

    @classmethod
    def parse(cls, text: str) -> "Config":
        """Parse the text of such a dictionary from XLA."""
        with ir.Context():
            return cls.of(ir.DictAttr(ir.Attribute.parse(text or "{}")))

    def __str__(self) -> str:
        attributes = {name: value for name, value in self._asdict().items() if value is not None}
        return "{" + ", ".join(f"{name} = {_written(value)}" for name, value in attributes.items()) + "}"


def _written(value: bool | int | str) -> str:
    """Return the text of an attribute."""
    if isinstance(value, str):
        return '"' + value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\0A") + '"'
    return str(value).lower() if isinstance(value, bool) else f"{value} : i64"


def config(call: Operation) -> Config:
    """Return the attributes of a call."""
    return Config.of(call.attributes[CONFIG]) if CONFIG in call.attributes else Config()


def target(op: Operation) -> str:
    """Return the name of the kernel that an operation calls."""
    name: str = op.attributes["call_target_name"].value
    return name.removeprefix(PREFIX)
