"""Alias analysis of optimised HLO: find the operations in loops that rewrite all of a carried buffer.

A *buffer* is an array that a loop carries and that something in the loop reads or updates by rows. An array that a
loop carries and computes as a whole, such as the state of a recurrent network, is not a buffer. The versions of a
buffer are a class of a union-find over the arrays of the program.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

from jax_tensorarray._hlo import text as hlo_text
from jax_tensorarray._hlo.text import SHARED, UPDATES, Hlo, Instruction
from jax_tensorarray._union_find import UnionFind

#: An array of the result of an instruction: (computation, instruction, which).
Array = tuple[str, str, int]

_SAME = {"bitcast", "copy", "copy-start", "copy-done", "opt-barrier", "reshape", "transpose"}
_FRESH = {"broadcast", "constant", "iota"}
_READS = {"dynamic-slice", "gather"}
_MOVES_ROWS = {*UPDATES, *_READS, "conditional", "get-tuple-element", "tuple", "while"}

# Operations that take a whole buffer because the program computes with it, or that only name another one's result.
_NO_MATTER = SHARED | UPDATES | {"all-reduce-done", "convolution", "dot", "reduce", "sort"}


class BufferOp(NamedTuple):
    """An operation on a whole buffer; `buffer` is the same for all versions of one.

    `at` are instructions that tell the line of Python, the best first. `whole` are instructions that compute something
    else from all rows of the copied buffer. `transposed` means that the copy has another order of axes in memory.
    `steps` is how often it happens in one run of the program, if XLA knows. `carried` is "changes-places" if a copied
    buffer changes its place in the carry, "carried-twice" if a buffer is in several places, and else empty.
    """

    kind: str
    instruction: Instruction
    array: str
    buffer: Array
    at: list[Instruction]
    whole: Sequence[Instruction] = ()
    transposed: bool = False
    steps: int | None = None
    carried: str = ""


def findings(hlo: str) -> Iterator[BufferOp]:
    """Yield the operations of loop bodies that rewrite all of a buffer, or put it whole into another array."""
    return _Buffers(hlo).findings()


def trip_counts(hlo: str) -> list[int | None]:
    """Return how many steps each loop takes whenever it runs, None where XLA does not know."""
    return [hlo_text.trip_count(line) for line in hlo.splitlines() if " while(" in line]


class _Buffers(Hlo):
    """A compiled program, and which of its arrays are versions of one buffer."""

    def __init__(self, hlo: str) -> None:
        super().__init__(hlo)
        self.users: dict[str, dict[str, list[Instruction]]] = {}
        for c, found in self.computations.items():
            users = self.users[c] = {}
            for i in found.values():
                for name in dict.fromkeys(i.operands if i.opcode != "parameter" else ()):
                    users.setdefault(name, []).append(i)
        self.buffers: UnionFind[Array] = UnionFind()
        self.by_rows: set[Array] = set()
        self.selects: list[tuple[Array, list[Array]]] = []
        self.loops_in = {body: self._loops_in(body) for body in self.loops}
        self.invariant = {body: self._invariant(body) for body in self.loops}
        self.in_loops = set(self.reachable(self.loops))
        for computation, found in self.computations.items():
            for instruction in found.values():
                self._join_arrays_of(computation, instruction)
        self._look_behind_selects()

    def _buffer(self, computation: str, name: str, k: int = 0) -> Array:
        """Return the buffer that an array of the result of an instruction is a version of."""
        return self.buffers.find((computation, name, k))

    def _steps(self, body: str) -> int | None:
        """Return how many steps a loop takes in total, over all steps of the loops around it."""
        here = self.loops[body].trip_count
        around = next((b for b, inside in self.loops_in.items() if body in inside), None)
        outside = 1 if around is None else self._steps(around)
        return None if here is None or outside is None else here * outside

    def _loops_in(self, body: str) -> set[str]:
        """Return the loops directly inside another."""
        here = {i.name for name in self.reachable([body], into_loops=False) for i in self.computations[name].values()}
        return {inner for inner, loop in self.loops.items() if loop.name in here and inner != body}

    def _parameters(self, computation: str) -> list[Instruction]:
        found = [i for i in self.computations[computation].values() if i.opcode == "parameter"]
        return sorted(found, key=lambda i: int(i.operands[0]))

    def _slot(self, computation: str, name: str) -> int | None:
        """Return which entry of the carry `name` is, seen through copies."""
        made = self._made(computation, name)
        if made is None or made.opcode != "get-tuple-element":
            return None
        return made.element if self.computations[computation][made.operands[0]].opcode == "parameter" else None

    def _made(self, computation: str, name: str, through: Set[str] = _SAME) -> Instruction | None:
        """Return the instruction that made an array, seen through these."""
        made = self.computations[computation].get(name)
        while made is not None and made.opcode in through:
            made = self.computations[computation].get(made.operands[0])
        return made

    def _last_opcode(self, i: Instruction) -> str:
        """Return the opcode of an instruction, of a fusion that of its root."""
        return self.root(i.callees()[0]).opcode if i.opcode == "fusion" else i.opcode

    def _parts(self, i: Instruction) -> list[Instruction]:
        """Return the instructions in a fusion; any other is its only part."""
        return list(self.computations[i.callees()[0]].values()) if i.opcode == "fusion" else [i]

    def _invariant(self, body: str) -> set[int]:
        """Return the entries of the carry that a loop only passes on."""
        root = self.root(body)
        if root.opcode != "tuple":
            return set()
        return {
            k
            for k, name in enumerate(root.operands)
            if self.computations[body][name].opcode == "get-tuple-element" and self._slot(body, name) == k
        }

    # --- which arrays are versions of one buffer ---

    def _join_all(self, computation: str, one: Instruction, where: str, other: Instruction) -> None:
        for k in range(min(len(one.arrays), len(other.arrays))):
            self.buffers.join((computation, one.name, k), (where, other.name, k))

    def _join_arrays_of(self, computation: str, i: Instruction) -> None:
        names, here = self.computations[computation], (computation, i.name, 0)
        operands = [names[name] for name in i.operands if name in names]
        if i.opcode in _SAME:
            if not (i.opcode.startswith("copy") and self._starts_afresh(computation, i)):
                self.buffers.join(here, (computation, i.operands[0], 0))
        elif i.opcode == "get-tuple-element":
            self.buffers.join(here, (computation, i.operands[0], i.element))
        elif i.opcode == "tuple":
            for k, name in enumerate(i.operands):
                self.buffers.join((computation, i.name, k), (computation, name, 0))
        elif i.opcode in UPDATES:
            self.buffers.join(here, (computation, i.operands[0], 0))
            update = operands[1 if i.opcode == "dynamic-update-slice" else 2]
            self._moves_rows(computation, operands[0], update.arrays[0])
        elif i.opcode in _READS:
            self._moves_rows(computation, operands[0], i.arrays[0])
        elif i.opcode == "select":
            self.selects.append((here, [(computation, case.name, 0) for case in operands[1:]]))
        elif i.opcode == "custom-call":
            self._join_call(computation, i)
        elif i.opcode == "while":
            for callee in i.callees():
                (parameter,) = self._parameters(callee)
                if callee in self.loops:
                    self._join_all(callee, self.root(callee), callee, parameter)
                if computation in self.in_loops:  # outside of loops, one array of zeros may start several buffers
                    self._join_all(computation, operands[0], callee, parameter)
                    self._join_all(computation, i, callee, parameter)
        elif i.opcode in ("call", "fusion", "conditional"):
            for k, callee in enumerate(i.callees()):
                given = operands[k + 1 : k + 2] if i.opcode == "conditional" else operands
                for operand, parameter in zip(given, self._parameters(callee), strict=False):
                    self._join_all(computation, operand, callee, parameter)
                self._join_all(computation, i, callee, self.root(callee))

    def _starts_afresh(self, computation: str, copy: Instruction) -> bool:
        """Return whether a copy starts a new buffer, rather than a version of one, since its source never changes."""
        source = self._made(computation, copy.operands[0])
        return source is not None and (
            self._last_opcode(source) in _FRESH
            or self._slot(computation, source.name) in self.invariant.get(computation, ())
        )

    def _join_call(self, computation: str, i: Instruction) -> None:
        for output, operand in i.aliased.items():
            self.buffers.join((computation, i.name, output), (computation, i.operands[operand], 0))
        if 'custom_call_target="jax_tensorarray_' in i.attributes and i.operands:
            self.by_rows.add((computation, i.operands[0], 0))

    def _moves_rows(self, computation: str, buffer: Instruction, rows: str) -> None:
        if hlo_text.array_bytes(rows) < hlo_text.array_bytes(buffer.arrays[0]):
            self.by_rows.add((computation, buffer.name, 0))

    def _look_behind_selects(self) -> None:
        """Count the cases of a select as read by rows, if its result is: `select(p, b, 0)[i]` reads a row of `b`.

        The transpose of a select does so. The cases need not be versions of one buffer, so they are not joined.
        """
        self.by_rows = {self.buffers.find(array) for array in self.by_rows}
        found: set[Array] | None = None
        while found is None or not found <= self.by_rows:
            self.by_rows |= found or set()
            selected = (cases for result, cases in self.selects if self.buffers.find(result) in self.by_rows)
            found = {self.buffers.find(case) for cases in selected for case in cases}

    # --- what is done to them ---

    def findings(self) -> Iterator[BufferOp]:
        seen: set[str] = set()
        for body, loop in self.loops.items():
            (parameter,) = self._parameters(body)
            slots = {k: self._buffer(body, parameter.name, k) for k in range(len(parameter.arrays))}
            carried = set(slots.values()) & self.by_rows
            changing = Counter(buffer for k, buffer in slots.items() if k not in self.invariant[body])
            moving = {buffer for buffer, places in changing.items() if places > 1}
            twice = moving & self._twice(body)
            steps = self._steps(body)
            for computation in self.reachable([body], into_loops=False):
                if computation not in seen:
                    seen.add(computation)
                    for instruction in self.computations[computation].values():
                        for finding in self._of(computation, instruction, carried):
                            is_moved = finding.kind == "copy" and finding.buffer in moving
                            place = "carried-twice" if finding.buffer in twice else "changes-places" * is_moved
                            yield finding._replace(at=[*finding.at, loop], steps=steps, carried=place)

    def _of(self, computation: str, i: Instruction, carried: set[Array]) -> Iterator[BufferOp]:
        if self._is_copy(i):
            source = self._buffer(computation, i.operands[0])
            if {source, self._buffer(computation, i.name)} & carried and not self._starts_a_loop(computation, i):
                at = [*self._updates_of(computation, i), *self._maker(computation, i.operands[0]), i]
                whole = self._whole_uses(computation, source)
                is_moved = self._is_transposed(computation, i)
                yield BufferOp("copy", i, i.arrays[0], source, at, whole, is_moved)
            return
        if self._is_broadcast(computation, i):
            source = self._buffer(computation, i.operands[0])
            if source in carried and self._buffer(computation, i.name) in self.by_rows:
                yield BufferOp("broadcast", i, i.arrays[0], source, [i])
                return
        where = i.callees()[0] if i.opcode == "fusion" else computation
        for part in self._parts(i):
            if (put := self._buffer_put(where, part)) is not None and self.buffers.find(put) in carried:
                array = self.computations[where][put[1]].arrays[0]
                yield BufferOp("save", i, array, self.buffers.find(put), [part, i])
        if i.opcode in _NO_MATTER:
            return
        for k, (array, is_updated) in enumerate(zip(i.arrays, self.in_place(i), strict=False)):
            buffer = self._buffer(computation, i.name, k)
            if is_updated:
                continue
            if self._adds_rows_as_a_whole(computation, i, k):
                yield BufferOp("sum", i, array, buffer, [i])
            elif buffer in carried:
                selects = any(part.opcode == "select" and part.arrays == (array,) for part in self._parts(i))
                yield BufferOp("select" if selects else "anew", i, array, buffer, [i])

    def _is_copy(self, i: Instruction) -> bool:
        """Return whether `i` is a copy, or a fusion of nothing else."""
        opcodes = {part.opcode for part in self._parts(i)}
        return opcodes <= {"copy", "copy-start"} or (
            i.opcode == "fusion" and opcodes <= {"copy", "bitcast", "transpose", "parameter"}
        )

    def _is_transposed(self, computation: str, copy: Instruction) -> bool:
        """Return whether a copy changes the order of the axes in memory."""
        if copy.opcode == "fusion":
            return any(part.opcode == "transpose" for part in self._parts(copy))
        source = self.computations[computation].get(copy.operands[0])
        return source is not None and source.layout != copy.layout

    def _twice(self, body: str) -> set[Array]:
        """Return the buffers that a loop, or a branch in it, returns in several places: `return new, new`."""
        found: set[Array] = set()
        for computation in self.reachable([body], into_loops=False):
            root, names = self.root(computation), self.computations[computation]
            inner = [names[name] for name in root.operands if name in names]  # on a TPU branches return a tuple in one
            for returned in (i for i in (root, *inner) if i.opcode == "tuple"):
                made = Counter(made.name for name in returned.operands if (made := self._made(computation, name)))
                found |= {self._buffer(computation, name) for name, times in made.items() if times > 1}
        return found

    def _is_broadcast(self, computation: str, i: Instruction) -> bool:
        """Return whether `i` repeats an array, or is a fusion that does nothing else."""
        opcodes = {part.opcode for part in self._parts(i)} - {"bitcast", "parameter"}
        return opcodes == {"broadcast"} and i.operands[0] in self.computations[computation]

    def _whole_uses(self, computation: str, buffer: Array) -> list[Instruction]:
        """Return the instructions that compute something else from all rows of a buffer, such as a product."""
        versions = [
            i.name for i in self.computations[computation].values() if self._buffer(computation, i.name) == buffer
        ]
        uses = [use for name in versions for use in self._computed_from(computation, name)]
        return [i for where, i in uses if self._buffer(where, i.name) != buffer]

    def _computed_from(self, computation: str, name: str) -> Iterator[tuple[str, Instruction]]:
        """Yield the instructions that compute with an array as a whole, each with its computation."""
        for user in self._users(computation, name):
            if user.opcode in ("call", "fusion"):
                for callee in user.callees():
                    given = zip(user.operands, self._parameters(callee), strict=False)
                    for parameter in (parameter for operand, parameter in given if operand == name):
                        yield from self._computed_from(callee, parameter.name)
            elif user.opcode in _SAME:
                yield from self._computed_from(computation, user.name)
            elif user.opcode not in _MOVES_ROWS and 'custom_call_target="jax_tensorarray_' not in user.attributes:
                yield computation, user

    def _users(self, computation: str, name: str) -> list[Instruction]:
        return self.users[computation].get(name, [])

    def _updates_of(self, computation: str, copy: Instruction) -> list[Instruction]:
        """Return the users of a copy, updates of it first."""
        found = [self._users(computation, copy.name)]
        while any(user.opcode in _SAME for user in found[-1]):
            found.append([u for same in found[-1] if same.opcode in _SAME for u in self._users(computation, same.name)])
        passing = _SAME | {"tuple", "while", "get-tuple-element"}
        users = [u for users in found for u in users if u.opcode not in passing]
        buffer = self._buffer(computation, copy.name)

        def is_other(user: Instruction) -> bool:
            return all(self._buffer(computation, user.name, k) != buffer for k in range(len(user.arrays)))

        return sorted(users, key=is_other)

    def _maker(self, computation: str, name: str) -> list[Instruction]:
        """Return the instruction that made an array; empty if it is an entry of the carry."""
        found = self._made(computation, name, _SAME | {"get-tuple-element"})
        return [] if found is None or found.opcode == "parameter" else [found]

    def _starts_a_loop(self, computation: str, copy: Instruction) -> bool:
        """Return whether a copy only serves as the initial carry of a loop inside of this one, in every step."""
        users = self._users(computation, copy.name)
        loops = [u for t in users if t.opcode == "tuple" and not t.is_root for u in self._users(computation, t.name)]
        return (
            self._starts_afresh(computation, copy)
            and bool(loops)
            and all(u.opcode == "tuple" and not u.is_root for u in users)
            and all(u.opcode in ("while", "call") for u in loops)
        )

    def _adds_rows_as_a_whole(self, computation: str, i: Instruction, k: int) -> bool:
        """Return whether `i` adds to an entry of the carry an array with only a few rows set.

        Such an array comes from a branch, from a short loop, or from an update of zeros, perhaps through a select.
        """
        here = self._buffer(computation, i.name, k)
        versions = [name for name in i.operands if self._buffer(computation, name) == here]
        others = [name for name in i.operands if name not in versions]
        if versions and self._has_rows_in_zeros(computation, others, hlo_text.array_bytes(i.arrays[k])):
            return True
        if all(self._slot(computation, name) is None for name in versions):
            return False
        for name in i.operands:
            operand = self.computations[computation][name]
            rows = self._buffer(computation, name)
            if operand.arrays != (i.arrays[k],) or rows == here or rows not in self.by_rows:
                continue
            for maker in self._maker(computation, name):
                if maker.opcode == "call":
                    maker = self.root(maker.callees()[0])
                steps = maker.trip_count
                whole = steps is not None and steps >= _length(i.arrays[k])
                if maker.opcode == "conditional" or (maker.opcode == "while" and not whole):
                    return True
        return False

    def _has_rows_in_zeros(self, computation: str, names: Sequence[str], least: float) -> bool:
        """Return whether one of some arrays, of `least` bytes or more, was made in this step by updating a constant."""
        todo, seen = list(names), set()
        while todo:
            name = todo.pop()
            made = self.computations[computation][name]
            if name in seen or self._slot(computation, name) is not None or made.num_bytes < least:
                continue
            seen.add(name)
            if self._last_opcode(made) in UPDATES and self._is_constant(computation, made.operands[0]):
                return True
            todo += made.operands if made.opcode in ("fusion", "select", "reduce", *_SAME) else ()
        return False

    def _is_constant(self, computation: str, name: str) -> bool:
        """Return whether an array has one value everywhere."""
        made = self._made(computation, name)
        return made is not None and self._last_opcode(made) in _FRESH

    def _buffer_put(self, computation: str, i: Instruction) -> Array | None:
        """Return the array that an update writes into another one."""
        if i.opcode == "dynamic-update-slice":
            value = computation, self._new_rows(computation, i), 0
        elif i.opcode == "custom-call" and 'custom_call_target="jax_tensorarray_write' in i.attributes:
            value = computation, i.operands[2], 0
        else:
            return None
        return value if self.buffers.find(value) != self._buffer(computation, i.name) else None

    def _new_rows(self, computation: str, update: Instruction) -> str:
        """Return what an update writes. If its index may be out of range, it selects between that and the old rows."""
        target, value, *_ = update.operands
        made = self._made(computation, value)
        if made is None or made.opcode != "select":
            return value

        def is_old(name: str) -> bool:
            case = self._made(computation, name)
            return case is not None and case.opcode == "dynamic-slice" and case.operands[0] == target

        new = [name for name in made.operands[1:] if not is_old(name)]
        return new[0] if len(new) == 1 else value


def _length(array: str) -> int:
    """Return the length of the first axis."""
    match = re.search(r"\[(\d+)", array)
    return int(match.group(1)) if match else 1
