"""Read optimised HLO: find the operations of loop bodies, and the lines of Python that they come from."""

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

_BITS = {"pred": 8, "bf16": 16, "f8e4m3fn": 8, "f8e5m2": 8, "token": 0}

#: An array type: its element type and its dimensions.
SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")

_LAYOUT = re.compile(r"\]\{([\d,]*)")
_COMPUTATION = re.compile(r"^\s*(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_OPERATION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(")
_CALLED = re.compile(r"\b(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")

_BODY = re.compile(r"\bbody=%?([\w.\-]+)")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')

UPDATES = {"dynamic-update-slice", "scatter"}

#: The computations that these run are applied to elements, and part of them.
_SINGLE = {"fusion", "map", "reduce", "scatter", "sort"}

#: The result shares memory with an operand, or comes from a computation that is examined separately.
SHARED = {
    "bitcast",
    "call",
    "conditional",
    "constant",
    "copy-done",
    "custom-call",
    "dynamic-update-slice",
    "fusion-done",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "tuple",
    "while",
}


def array_bytes(shape: str) -> float:
    """Return the size of the largest array in an HLO shape."""
    sizes = [0.0]
    for dtype, dims in SHAPE.findall(shape):
        digits = re.search(r"\d+", dtype)
        bits = _BITS.get(dtype, int(digits.group()) if digits else 0)
        sizes.append(bits / 8 * math.prod(int(d) for d in dims.split(",") if d))
    return max(sizes)


class Instruction(NamedTuple):
    """One line of HLO, parsed. `arrays` are the arrays of its result: one, or several for a tuple.

    `layout` has the axes of the first one, the fastest first, as XLA writes them: `2,1,0`.
    """

    name: str
    opcode: str
    arrays: tuple[str, ...]
    operands: tuple[str, ...]
    attributes: str
    is_root: bool
    layout: str = ""

    @property
    def num_bytes(self) -> float:
        """The size of the largest array of its result."""
        return max(map(array_bytes, self.arrays), default=0.0)

    @property
    def op_name(self) -> str:
        """The name that JAX gave to its origin, such as `jit(f)/transpose(jvp())/while/body/scatter`."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match.group(1) if match else ""

    @property
    def trip_count(self) -> int | None:
        """How many steps a loop takes, None if XLA does not know."""
        return trip_count(self.attributes)

    @property
    def aliased(self) -> dict[int, int]:
        """Which outputs of a call are updates of an operand, by its number."""
        aliases = re.search(r"output_to_operand_aliasing=\{(.*?\)) ?\}", self.attributes)
        pairs = re.findall(r"\{(\d*)\}: \((\d+), ", aliases.group(1) if aliases else "")
        return {int(output or 0): int(operand) for output, operand in pairs}

    @property
    def element(self) -> int:
        """Which element of a tuple a `get-tuple-element` gets."""
        match = re.search(r"index=(\d+)", self.attributes)
        return int(match.group(1)) if match else 0

    def callees(self) -> list[str]:
        """Return the computations that this instruction runs."""
        groups = _BRANCHES.findall(self.attributes)
        branches = [name.strip().lstrip("%") for group in groups for name in group.split(",")]
        return [*_CALLED.findall(self.attributes), *branches]


class Hlo:
    """A compiled program, parsed."""

    def __init__(self, hlo: str) -> None:
        #: The instructions of each computation by name, operands before their users.
        self.computations: dict[str, dict[str, Instruction]] = {}
        #: The computation that the program begins with.
        self.entry = ""
        lines: dict[str, Instruction] | None = None
        for line in hlo.splitlines():
            if match := _COMPUTATION.match(line):
                lines = self.computations.setdefault(match.group(1), {})
                if line.startswith("ENTRY"):
                    self.entry = match.group(1)
            elif line.startswith("}"):
                lines = None
            elif lines is not None and (found := _parsed(line)):
                lines[found.name] = found
        loops = (i for found in self.computations.values() for i in found.values() if i.opcode == "while")
        #: Every loop, by the name of its body.
        self.loops = {match.group(1): i for i in loops if (match := _BODY.search(i.attributes))}

    def reachable(self, start: Iterable[str], into_loops: bool = True, into_single: bool = False) -> Iterator[str]:
        """Yield computations that run together with `start`, `into_single` also those of instructions like fusions."""
        todo, seen = list(start), set()
        while todo:
            name = todo.pop()
            if name in seen or name not in self.computations:
                continue
            seen.add(name)
            yield name
            for i in self.computations[name].values():
                if (into_single or i.opcode not in _SINGLE) and (into_loops or i.opcode != "while"):
                    todo += i.callees()

    def root(self, computation: str) -> Instruction:
        return next(i for i in self.computations[computation].values() if i.is_root)

    def in_place(self, i: Instruction) -> list[bool]:
        """Return, for each array that a fusion makes, whether it is an operand with slices updated."""
        if i.opcode != "fusion":
            return [False] * len(i.arrays)
        (callee,) = i.callees()
        root = self.root(callee)
        return [self._updates(callee, name) for name in (root.operands if root.opcode == "tuple" else [root.name])]

    def _updates(self, computation: str, name: str) -> bool:
        """Return whether a value is a parameter with slices updated, perhaps by a call that updates in place."""
        i, updates = self.computations[computation][name], 0
        while i.opcode in {*UPDATES, "bitcast", "custom-call", "get-tuple-element"}:
            if i.opcode == "custom-call" and i.aliased.get(0) != 0:
                return False
            updates += i.opcode not in ("bitcast", "get-tuple-element")
            i = self.computations[computation][i.operands[0]]
        return i.opcode == "parameter" and updates > 0


def _parsed(line: str) -> Instruction | None:
    match = _OPERATION.match(line)
    if match is None:
        return None
    name, shape, opcode = match.groups()
    if opcode == "fusion-start":  # ((operands), results, context)
        shape, opcode = shape.partition("), ")[2], "fusion"
    end = _operands_end(line, match.end())
    inside = line[match.end() : end]
    operands = re.findall(r"%([\w.\-]+)", inside) if opcode != "parameter" else [inside]
    arrays = tuple(f"{dtype}[{dims}]" for dtype, dims in SHAPE.findall(shape))
    layout = match.group(1) if (match := _LAYOUT.search(shape)) else ""
    is_root = line.lstrip().startswith("ROOT ")
    return Instruction(name, opcode, arrays, tuple(operands), line[end + 1 :], is_root, layout)


def _operands_end(line: str, start: int) -> int:
    """Return the position at which the parenthesis open at `start` closes."""
    depth = 1
    for at in range(start, len(line)):
        depth += (line[at] == "(") - (line[at] == ")")
        if depth == 0:
            return at
    return len(line)


def operations_in_loops(hlo: str) -> Iterator[Instruction]:
    """Yield every instruction that runs once an iteration of some loop; a fusion counts as one.

    A fusion is yielded with the new arrays that it makes, or as an update if it makes none.
    """
    program = Hlo(hlo)
    for name in program.reachable(program.loops):
        for i in program.computations[name].values():
            updated = program.in_place(i)
            if all(updated) and updated:
                i = i._replace(opcode="dynamic-update-slice")
            elif any(updated):
                i = i._replace(arrays=tuple(x for x, is_old in zip(i.arrays, updated, strict=False) if not is_old))
            yield i


def trip_count(line: str) -> int | None:
    """Return how many steps a loop takes, by its line or its attributes. None if XLA does not know."""
    match = _TRIP_COUNT.search(line)
    return int(match.group(1)) if match else None


def of_executable(executable: Any) -> str:
    """Return the optimised HLO of a program that JAX has compiled."""
    return "\n".join(module.to_string() for module in executable.hlo_modules())


def loops_only(hlo: str) -> str:
    """Return the computations that have loops or that loops run, and the tables of lines above, as XLA has written.

    Of a program without loops it is all.
    """
    program = Hlo(hlo)
    if not program.loops:
        return hlo
    kept = {name for name, found in program.computations.items() if any(i.opcode == "while" for i in found.values())}
    callees = [callee for loop in program.loops.values() for callee in loop.callees()]
    kept.update(program.reachable(callees, into_single=True))
    lines, shown = [], True
    for line in hlo.splitlines():
        if match := _COMPUTATION.match(line):
            shown = match.group(1) in kept
        if shown:
            lines.append(line)
    return "\n".join(lines)


class Frame(NamedTuple):
    """A line of Python."""

    file: str
    line: int


_TABLE_ROW = re.compile(r"^(\d+) (?:\"(.*)\"|\{(.*)\})$")


def frames(hlo: str) -> Callable[[str], list[Frame]]:
    """Return a function from the attributes of an instruction to the lines that made it, the innermost first.

    XLA either writes tables of frames above the computations, into which `stack_frame_id` of an instruction points, or
    one `source_file` and `source_line` in the instruction itself.
    """
    tables: dict[str, dict[int, str]] = {}
    rows: dict[int, str] = {}
    for line in hlo.splitlines():
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            rows = tables.setdefault(line, {})
        elif match := _TABLE_ROW.match(line):
            rows[int(match.group(1))] = match.group(2) or match.group(3) or ""
        elif line.startswith(("%", "ENTRY")):
            break
    files, locations, stack = (tables.get(name, {}) for name in ("FileNames", "FileLocations", "StackFrames"))
    # The first frame has no parent. Where that is written as 1 all parents are one too high.
    shift = 1 if _field(stack.get(1, ""), "parent_frame_id") == 1 else 0

    @functools.cache
    def of_frame(number: int) -> tuple[Frame, ...]:
        if number not in stack:
            return ()
        location = locations.get(_field(stack[number], "file_location_id"), "")
        frame = Frame(files.get(_field(location, "file_name_id"), ""), _field(location, "line"))
        parent = _field(stack[number], "parent_frame_id") - shift
        return (frame, *(of_frame(parent) if parent < number else ()))

    def of_attributes(attributes: str) -> list[Frame]:
        if number := _field(attributes, "stack_frame_id"):
            return list(of_frame(number))
        match = re.search(r'source_file="([^"]*)" source_line=(\d+)', attributes)
        return [Frame(match.group(1), int(match.group(2)))] if match else []

    return of_attributes


def _field(text: str, name: str) -> int:
    match = re.search(rf"\b{name}=(\d+)", text)
    return int(match.group(1)) if match else 0


def copies_in_loops(hlo: str, num_bytes: float) -> list[Instruction]:
    """Return the copies of at least `num_bytes` inside loop bodies."""
    return [op for op in operations_in_loops(hlo) if op.opcode in ("copy", "copy-start") and op.num_bytes >= num_bytes]


def whole_buffer_operations_in_loops(hlo: str, num_bytes: float) -> list[Instruction]:
    """Return the operations inside loop bodies that make a result of at least `num_bytes` and are not in place."""
    return [op for op in operations_in_loops(hlo) if op.opcode not in SHARED and op.num_bytes >= num_bytes]
