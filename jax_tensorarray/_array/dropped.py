"""Warn of `ta.write(i, x)` where `ta = ta.write(i, x)` is meant: an array that a method made and nobody took.

CPython ends an object at once. If the instruction that does so is the one that ends an expression statement, nobody has
used the array. Where there are no such instructions, nothing is said.
"""

import dis
import warnings
from types import FrameType

_METHODS = frozenset({"append", "scatter", "split", "unstack", "write"})


def warn_if_dropped(frame: FrameType) -> None:
    """Warn if that frame has just called a method of an array and drops what it returned."""
    code, end = frame.f_code, frame.f_lasti
    if end < 0 or dis.opname[code.co_code[end]] != "POP_TOP":
        return
    done = [x for x in dis.get_instructions(code) if x.offset < end and x.opname != "CACHE"]
    if not done or not done[-1].opname.startswith("CALL"):
        return
    begin = _begin(done[-1])
    # What is called begins where the call does. Another function may return an array, and that is left alone.
    names = [x.argval for x in done if x.opname in ("LOAD_ATTR", "LOAD_METHOD") and _begin(x) == begin]
    if begin != (None, None) and names and names[-1] in _METHODS:
        warnings.warn(
            f"TensorArray.{names[-1]}: the array that it returns is dropped, and the old one stays as it was. Write "
            f"`ta = ta.{names[-1]}(...)`.",
            UserWarning,
            stacklevel=3,
        )


def _begin(instruction: dis.Instruction) -> tuple[int | None, int | None]:
    positions = instruction.positions
    return (None, None) if positions is None else (positions.lineno, positions.col_offset)
