"""An interrupt before any instruction of a file, as a signal handler raises it."""

import sys
from collections.abc import Callable


class Interrupt(KeyboardInterrupt):
    """One that no other code raises."""


def interrupted(f: Callable[[], object], file: str, at: int) -> tuple[bool, object]:
    """Whether `f()` was interrupted before the `at`-th instruction that it runs in `file`, and else its result."""
    count = 0

    def instruction(frame, event, _):
        nonlocal count
        if event == "opcode":
            count += 1
            if count > at:
                sys.settrace(None)
                raise Interrupt
        return instruction

    def call(frame, event, _):
        if frame.f_code.co_filename != file:
            return None
        frame.f_trace_opcodes = True
        return instruction

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks at settrace whether any frame asks for instructions
    sys.settrace(call)
    try:
        return False, f()
    except Interrupt:
        return True, None
    finally:
        sys.settrace(before)
