"""Where an op stands in the user's source, which index errors say at their end: `... of size 4 (train.py:12)`.

The attribute `op` of a call that may raise is the name of the op, an `@` and the place. Of the path it has the name of
the file only. Attributes are part of what JAX's persistent compilation cache knows a program by, and folders differ
between machines, and for cells of notebooks between processes.
"""

import os
import re

from jax.interpreters.mlir import ir

from jax_tensorarray._lowering.calls import CONFIG, addresses_rows, config, may_raise, with_config
from jax_tensorarray._lowering.mlir import Operation, entry, terminator, walk

#: The innermost frame in the text of a location: the file in MLIR's quotes, the line, and columns.
_FRAME = re.compile(r'("(?:[^"\\]|\\.)*"):(\d+)(?::[^()]*)?')


class Places:
    """The places of the ops of one module."""

    def __init__(self, functions: dict[str, Operation]) -> None:
        # The stack outside of the jitted function. If an op has no frame inside, the op itself has been jitted: JAX
        # does so outside of jit. What it has compiled also runs when it is called from another line.
        main = functions.get("main")
        self.outside = None if main is None else _frame(terminator(entry(main)))

    def named(self, op: Operation) -> str:
        """Return what the attribute `op` of a call is to be."""
        name, found = config(op).op or "", _frame(op)
        if "@" in name:
            return name
        if found is None or found == self.outside:
            return f"{name}@"
        file, line, _ = found
        path: str = ir.StringAttr(ir.Attribute.parse(file)).value
        return f"{name}@{os.path.basename(path)}:{line}"


def name_places(functions: dict[str, Operation], places: Places) -> None:
    """Add its place to every call that raises by itself."""
    for function in functions.values():
        for op in walk(function):
            if addresses_rows(op) and may_raise(op):
                op.attributes[CONFIG] = with_config(op, op=places.named(op))


def _frame(op: Operation) -> tuple[str, str, str] | None:
    found = _FRAME.search(str(op.location))
    return None if found is None else (found[1], found[2], found[0])
