"""Find the arguments of a compiled program that it copies as a whole, outside of loops, to change a few rows.

The entry computation is evaluated in *versions* (abstract interpretation). A version is an argument with some rows
updated. An array that is computed from all of an argument is not a version of it. A program that returns a version is a
step, which the caller runs again on the result. If the argument is donated, and nothing copies it, a call costs only
what it changes.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from jax_tensorarray._hlo import text as hlo_text
from jax_tensorarray._hlo.text import UPDATES, Hlo, Instruction

_SAME = {"bitcast", "copy-done", "get-tuple-element", "opt-barrier"}
_MOVES = {"copy", "copy-start", "reshape", "transpose"}

#: So many updates of an argument are remembered: the lines of a few will do.
_KEPT = 8

#: An update of this part of an array, or of more, touches all of it in any case.
_FEW = 0.5


class ArgumentVersion(NamedTuple):
    """An argument, or a carry of a loop, after updates of `changed` bytes in all.

    `moves` are the operations that have rewritten all of it, and `updates` those of its rows. `stays` says that a
    branch leaves it as it is.
    """

    of: int
    changed: float = 0.0
    moves: tuple[Instruction, ...] = ()
    updates: tuple[Instruction, ...] = ()
    stays: bool = False

    def updated(self, by: Instruction, num_bytes: float) -> "ArgumentVersion":
        return self._replace(changed=self.changed + num_bytes, updates=(*self.updates, by)[:_KEPT])

    def after(self, other: "ArgumentVersion", steps: float = 1) -> "ArgumentVersion":
        """Return the composition: self as a version of `other`, which is a version of its argument."""
        changed = other.changed + (self.changed * steps if self.changed else 0)
        updates = (*other.updates, *self.updates)[:_KEPT]
        return ArgumentVersion(other.of, changed, other.moves, updates, other.stays or self.stays)


class CopiedArgument(NamedTuple):
    """An argument that is copied as a whole, by `moves`.

    `at` are instructions that tell the line of Python, the best first. `exchanged` says that it comes back in the
    memory of another argument.
    """

    name: str
    number: int
    array: str
    is_donated: bool
    exchanged: bool
    moves: Sequence[Instruction]
    at: Sequence[Instruction]


Versions = list[ArgumentVersion | None]


def copied_arguments(hlo: str, min_bytes: float) -> list[CopiedArgument]:
    """Return the arguments of at least `min_bytes` that a program copies in order to change less than half of them."""
    header = hlo.partition("\n")[0]
    if not _may_be_a_step(header, min_bytes):
        return []
    return _Entry(hlo).copied(*_donated(header), min_bytes)


def donated(hlo: str) -> set[int]:
    """Return the numbers of the arguments that are donated to a program."""
    aliases, donors = _donated(hlo.partition("\n")[0])
    return {*aliases.values(), *donors}


def _donated(header: str) -> tuple[dict[int, int], set[int]]:
    """Return the arguments that alias results, by the numbers of the results, and those that XLA may choose from."""
    aliases = re.search(r"input_output_alias=\{(.*?\)) \}", header)
    donors = re.search(r"buffer_donor=\{(.*?\)) \}", header)
    found = re.findall(r"\{(\d*)\}: \((\d+)", aliases.group(1)) if aliases else []
    free = re.findall(r"\((\d+),", donors.group(1)) if donors else []
    return {int(output or 0): int(number) for output, number in found}, {int(number) for number in free}


def _may_be_a_step(header: str, min_bytes: float) -> bool:
    """Return whether a program returns an array of the type of an argument. Most do not, and need not be parsed."""
    given, _, returned = header.partition("entry_computation_layout=")[2].partition("->")
    types = {f"{dtype}[{dims}]" for dtype, dims in hlo_text.SHAPE.findall(given)}
    types &= {f"{dtype}[{dims}]" for dtype, dims in hlo_text.SHAPE.findall(returned)}
    return any(hlo_text.array_bytes(array) >= min_bytes for array in types)


class _Entry(Hlo):
    """Evaluates the entry computation of a compiled program in versions of its arguments."""

    def copied(self, aliases: dict[int, int], donors: set[int], min_bytes: float) -> list[CopiedArgument]:
        parameters = {int(i.operands[0]): i for i in self.computations[self.entry].values() if i.opcode == "parameter"}
        root = self.root(self.entry)
        found = []
        for output, version in enumerate(
            self._returned(self.entry, [[ArgumentVersion(k)] for k in range(len(parameters))])
        ):
            if version is None or not version.moves or not (version.changed or version.stays):
                continue
            k, array = version.of, root.arrays[output]
            size = hlo_text.array_bytes(array)
            if parameters[k].arrays == (array,) and size >= min_bytes and version.changed < _FEW * size:
                name = parameters[k].op_name.replace("\\'", "'") or f"number {k}"
                is_donated = k in donors or k in aliases.values()
                exchanged = aliases.get(output, k) != k
                at = (*version.updates, *version.moves)
                found.append(CopiedArgument(name, k, array, is_donated, exchanged, version.moves, at))
        return found

    def _returned(self, computation: str, given: Sequence[Versions]) -> Versions:
        """Evaluate a computation in versions, and return those that its root makes."""
        values: dict[str, Versions] = {}
        for i in self.computations[computation].values():
            if i.opcode == "parameter":
                values[i.name] = given[int(i.operands[0])] if int(i.operands[0]) < len(given) else []
            else:
                operands = [values.get(name, []) for name in i.operands]
                # Most of a program has nothing to do with large arguments.
                values[i.name] = self._made(computation, i, operands) if any(map(any, operands)) else []
            if i.is_root:
                return values[i.name]
        return []

    def _made(self, computation: str, i: Instruction, operands: Sequence[Versions]) -> Versions:
        first = operands[0]
        if i.opcode == "get-tuple-element":
            return first[i.element : i.element + 1]
        if i.opcode in _SAME:
            return first
        if i.opcode == "tuple":
            return [versions[0] if versions else None for versions in operands]
        if i.opcode in _MOVES:
            return [v and v._replace(moves=(*v.moves, i)[:_KEPT]) for v in first[:1]]
        if i.opcode in UPDATES:
            update = self.computations[computation][i.operands[1 if i.opcode == "dynamic-update-slice" else -1]]
            return [v and v.updated(i, update.num_bytes) for v in first[:1]]
        if i.opcode in ("fusion", "call"):
            return self._returned(i.callees()[0], operands)
        if i.opcode == "custom-call":
            return self._called(computation, i, operands)
        if i.opcode == "select":
            return [_either(i, [(operands[k] or [None])[0] for k in (1, 2)], moves=(i,))]
        if i.opcode == "conditional":
            branches = [
                self._returned(branch, [given]) for branch, given in zip(i.callees(), operands[1:], strict=False)
            ]
            length = min(map(len, branches), default=0)
            return [_either(i, [branch[k] for branch in branches]) for k in range(length)]
        if i.opcode == "while":
            return self._after_loop(i, first)
        return []

    def _called(self, computation: str, i: Instruction, operands: Sequence[Versions]) -> Versions:
        """Return the versions that a call makes in place. It updates as many bytes as its largest other operand has."""
        made: Versions = [None] * len(i.arrays)
        for output, operand in i.aliased.items():
            others = [self.computations[computation][name] for name in i.operands if name != i.operands[operand]]
            v = (operands[operand] or [None])[0]
            made[output] = v and v.updated(i, max((other.num_bytes for other in others), default=0))
        return made

    def _after_loop(self, loop: Instruction, init: Versions) -> Versions:
        """Return the versions of the carries after a loop. `buffers` finds the copies in its steps."""
        body = next(name for name, i in self.loops.items() if i.name == loop.name)
        steps = loop.trip_count
        after = self._returned(body, [[ArgumentVersion(k) for k in range(len(init))]])
        return [
            now.after(before, float("inf") if steps is None else steps)
            if now is not None and before is not None and now.of == k
            else None
            for k, (before, now) in enumerate(zip(init, after, strict=False))
        ]


def _either(
    i: Instruction, versions: Sequence[ArgumentVersion | None], moves: tuple[Instruction, ...] = ()
) -> ArgumentVersion | None:
    """Return the version that `i` makes if it selects one of several versions of an argument."""
    known = [v for v in versions if v is not None]
    if not known or len(known) < len(versions) or len({v.of for v in known}) > 1:
        return None
    return ArgumentVersion(
        known[0].of,
        max(v.changed for v in known),
        (*dict.fromkeys(move for v in known for move in v.moves), *moves),
        (*dict.fromkeys(update for v in known for update in v.updates), i)[:_KEPT],
        any(not v.changed for v in known),
    )
