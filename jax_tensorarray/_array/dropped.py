"""Warn of `ta.write(i, x)` instead of `ta = ta.write(i, x)`: nobody uses the array that a method or a loop returns.

CPython deletes an unused object at once. If the current instruction of the caller ends an expression statement, nobody
has used the array. We read the bytecode, because Python does not tell an object whether its value is used, and a linter
does not know that `ta` is a TensorArray. Other Pythons, and a CPython with other names of instructions, give no
warning. Nothing else depends on this file. A test of the warning fails with such a CPython.
"""

import dis
import warnings
from types import FrameType

_METHODS = frozenset({"append", "scatter", "split", "unstack", "write"})
_LOOPS = frozenset({"foldl", "foldr", "fori_loop", "scan", "while_loop"})
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_LOADING = (*_ATTRIBUTE, "LOAD_DEREF", "LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME")


def warn_if_dropped(frame: FrameType) -> None:
    """Warn if a frame has just called a method of an array, or a loop, and drops the result."""
    code, end = frame.f_code, frame.f_lasti
    if end < 0 or dis.opname[code.co_code[end]] != "POP_TOP":
        return
    instructions = [x for x in dis.get_instructions(code) if x.offset < end and x.opname != "CACHE"]
    if not instructions or not instructions[-1].opname.startswith("CALL"):
        return
    begin = _begin(instructions[-1])
    # The expression of the called function begins where the call does. Other functions give no warning.
    loads = [x for x in instructions if x.opname.startswith(_LOADING) and _begin(x) == begin]
    if begin == (None, None) or not loads:
        return
    name, is_of_tensorflow = loads[-1].argval, "tf" in [x.argval for x in loads[:-1]]
    if loads[-1].opname.startswith(_ATTRIBUTE) and name in _METHODS:
        text = f"TensorArray.{name}: the array that it returns is dropped"
        text += f", and the old one is unchanged. Write `ta = ta.{name}(...)`."
    elif name in _LOOPS:
        name = f"tf.{name}" if is_of_tensorflow else name
        text = f"{name}: the TensorArray that it returns is dropped, and the one that it began with is unchanged. "
        text += f"Write `..., ta = {name}(...)`."
    else:
        return
    warnings.warn(text, UserWarning, stacklevel=3)


def _begin(instruction: dis.Instruction) -> tuple[int | None, int | None]:
    positions = instruction.positions
    return (None, None) if positions is None else (positions.lineno, positions.col_offset)
