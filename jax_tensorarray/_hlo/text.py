"""Read optimised HLO: find operations of loop bodies that touch a whole buffer, and the lines of Python behind them."""

import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

_BITS = {"pred": 8, "bf16": 16, "f8e4m3fn": 8, "f8e5m2": 8, "token": 0}
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^\s*(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_OPERATION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(")
_FIRST_OPERAND = re.compile(r"(?:[a-z]\w*\[[^%]*)?%?([\w.\-]+)")
_CALLED = re.compile(r"\b(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")

# The result shares memory with an operand, or comes from a computation that is examined separately.
_IN_PLACE = {
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


class Operation(NamedTuple):
    """One line of HLO."""

    opcode: str
    name: str
    num_bytes: float
    text: str


def optimized_hlo(f: Callable[..., Any], *args: Any) -> str:
    """Return the HLO that XLA compiles `f` to."""
    return jax.jit(f).lower(*args).compile().as_text() or ""


def array_bytes(shape: str) -> float:
    """Return the size of the largest array in an HLO shape."""
    sizes = [0.0]
    for dtype, dims in _SHAPE.findall(shape):
        digits = re.search(r"\d+", dtype)
        bits = _BITS.get(dtype, int(digits.group()) if digits else 0)
        sizes.append(bits / 8 * math.prod(int(d) for d in dims.split(",") if d))
    return max(sizes)


def _computations(hlo: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    lines: list[str] | None = None
    for line in hlo.splitlines():
        if match := _COMPUTATION.match(line):
            lines = found.setdefault(match.group(1), [])
        elif line.startswith("}"):
            lines = None
        elif lines is not None:
            lines.append(line)
    return found


def _callees(line: str) -> Iterator[str]:
    yield from _CALLED.findall(line)
    for group in _BRANCHES.findall(line):
        yield from (name.strip().lstrip("%") for name in group.split(","))


def operations_in_loops(hlo: str) -> Iterator[Operation]:
    """Yield every operation that runs once an iteration of some loop; a fusion counts as one operation."""
    computations = _computations(hlo)
    stack = [m for lines in computations.values() for line in lines for m in re.findall(r"\bbody=%?([\w.\-]+)", line)]
    seen: set[str] = set()
    while stack:
        name = stack.pop()
        if name in seen:
            continue
        seen.add(name)
        for line in computations.get(name, []):
            match = _OPERATION.match(line)
            if match is None:
                continue
            shape, opcode = match.group(2), match.group(3)
            if opcode == "fusion-start":  # ((operands), results, context)
                shape, opcode = shape.partition("), ")[2], "fusion"
            if opcode not in ("fusion", "reduce", "sort", "scatter", "map"):
                stack.extend(_callees(line))
            num_bytes = array_bytes(shape)
            if opcode == "fusion" and (left := _not_in_place(computations, line)) < num_bytes:
                opcode, num_bytes = ("fusion", left) if left else ("dynamic-update-slice", num_bytes)
            yield Operation(opcode, match.group(1), num_bytes, line.strip())


def _not_in_place(computations: dict[str, list[str]], line: str) -> float:
    """Return how many bytes of the results of a fusion are not slices of an operand updated in place."""
    found = 0.0
    for name in _callees(line):
        matches = ((_OPERATION.match(at), at) for at in computations.get(name, []))
        producers = {match.group(1): (match, at) for match, at in matches if match}
        root = next((key for key, (_, at) in producers.items() if at.lstrip().startswith("ROOT")), "")
        results = [root]
        if root in producers and producers[root][0].group(3) == "tuple":
            match, at = producers[root]
            results = re.findall(r"%([\w.\-]+)", at[match.end() : _operands_end(at, match.end())])
        found += sum(
            array_bytes(producers[key][0].group(2)) for key in results if not _updates_a_parameter(producers, key)
        )
    return found


def _updates_a_parameter(producers: dict[str, tuple[re.Match[str], str]], name: str) -> bool:
    """Return whether a value is a parameter with slices updated, perhaps by a call that updates an operand in place."""
    updates = 0
    while name in producers:
        match, at = producers[name]
        opcode = match.group(3)
        if opcode not in ("bitcast", "dynamic-update-slice", "scatter", "custom-call", "get-tuple-element"):
            return opcode == "parameter" and updates > 0
        if opcode == "custom-call" and not re.search(r"output_to_operand_aliasing=\{\{0?\}: \(0, ", at):
            return False
        updates += opcode not in ("bitcast", "get-tuple-element")
        first = _FIRST_OPERAND.match(at, match.end())
        name = first.group(1) if first else ""
    return False


class Instruction(NamedTuple):
    """One line of HLO, parsed. `arrays` are the arrays of its result: one, or several for a tuple."""

    name: str
    opcode: str
    arrays: tuple[str, ...]
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def op_name(self) -> str:
        """The name that JAX gave to its origin, such as `jit(f)/transpose(jvp())/while/body/scatter`."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match.group(1) if match else ""

    def callees(self) -> list[str]:
        """Return the computations that this instruction runs."""
        return list(_callees(self.attributes))


def _operands_end(line: str, start: int) -> int:
    """Return the position at which the parenthesis open at `start` closes."""
    depth = 1
    for at in range(start, len(line)):
        depth += (line[at] == "(") - (line[at] == ")")
        if depth == 0:
            return at
    return len(line)


def instructions(hlo: str) -> dict[str, list[Instruction]]:
    """Return the computations of a module, each as a list of instructions in which operands come before their users."""
    found: dict[str, list[Instruction]] = {}
    for name, lines in _computations(hlo).items():
        found[name] = []
        for line in lines:
            if match := _OPERATION.match(line):
                end = _operands_end(line, match.end())
                inside = line[match.end() : end]
                opcode = match.group(3)
                operands = re.findall(r"%([\w.\-]+)", inside) if opcode != "parameter" else [inside]
                arrays = tuple(f"{dtype}[{dims}]" for dtype, dims in _SHAPE.findall(match.group(2)))
                is_root = line.lstrip().startswith("ROOT ")
                found[name].append(
                    Instruction(match.group(1), opcode, arrays, tuple(operands), line[end + 1 :], is_root)
                )
    return found


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


def copies_in_loops(hlo: str, num_bytes: float) -> list[Operation]:
    """Return the copies of at least `num_bytes` inside loop bodies."""
    return [op for op in operations_in_loops(hlo) if op.opcode in ("copy", "copy-start") and op.num_bytes >= num_bytes]


def whole_buffer_operations_in_loops(hlo: str, num_bytes: float) -> list[Operation]:
    """Return the operations inside loop bodies that make a result of at least `num_bytes` and are not in place."""
    return [op for op in operations_in_loops(hlo) if op.opcode not in _IN_PLACE and op.num_bytes >= num_bytes]
