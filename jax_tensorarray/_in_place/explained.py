"""Optimization remarks: what became of each read, write and select of rows, or why it stays, for `doctor.explain`.

A rule returns the values that it has made, or `Left` with the name of the reason. `Repair` shows both to this module.
Without a listener, this module keeps nothing and looks at nothing more.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend import source_info_util
from jax.extend.core import Jaxpr

from jax_tensorarray import _compat, _contexts
from jax_tensorarray._in_place import patterns
from jax_tensorarray._in_place.values import Difference, Guard, Left, Value
from jax_tensorarray._jaxprs import jaxprs, kinds, registry
from jax_tensorarray._jaxprs.uses import Uses
from jax_tensorarray._ops.primitive import ROW_OPS
from jax_tensorarray._types import Equation


class Remark(NamedTuple):
    """A remark about an equation: the row op that it became, or the reason why it stays."""

    jaxpr: Jaxpr  #: where the equation is
    eqn: Equation
    place: str  #: in the source, as JAX writes it
    kind: str  #: "read", "write", "select" and so on
    aval: Any  #: the type of the buffer
    became: str  #: empty if it stays
    reason: str  #: the name of the reason; empty if there is nothing to say
    facts: Mapping[str, Any]


class Listener:
    """Keeps remarks."""

    def __init__(self) -> None:
        self.notes: list[Remark] = []


#: The listener of the log. It causes no trace, so no cache needs to know it.
_hearing: contextvars.ContextVar[Listener | None] = contextvars.ContextVar("hearing", default=None)


@contextlib.contextmanager
def hearing() -> Iterator[list["Remark"]]:
    """Collect the remarks that are made in a block."""
    listener = Listener()
    token = _hearing.set(listener)
    try:
        yield listener.notes
    finally:
        _hearing.reset(token)


def is_asked() -> bool:
    """Return whether `doctor.explain` asks: then rules also try what would not help, to say why it does not."""
    return _contexts.listening.value is not None


def _listener() -> Any:
    """Return the listener, None if there is none."""
    return _contexts.listening.value or _hearing.get()


#: The kinds of equations of the program. Row ops have none: they replace equations, or the user wrote them.
KINDS = {
    **dict.fromkeys(kinds.READS.union(("slice", "get")).difference(op.name for op in ROW_OPS), "read"),
    **dict.fromkeys(kinds.UPDATES.union(("swap", "addupdate")).difference(op.name for op in ROW_OPS), "write"),
    "select_n": "select",
}


def remark(
    repair: Any, jaxpr: Jaxpr, eqn: Equation, operands: Sequence[Value], results: Sequence[Value], left: Left | None
) -> None:
    """Note what became of an equation of a jaxpr: the results that a rule made, or `left`, the reason why it stays."""
    if _listener() is None:
        return
    name = eqn.primitive.name
    kind, is_made = KINDS.get(name), left is None
    if name in kinds.OF_REFS:
        _note(jaxpr, eqn, "", "ref")
    elif kind == "select" and not _is_of_buffers(jaxpr, eqn, operands, results[0], is_made):
        pass
    elif kind is not None:
        if left is None:
            whole = "whole-view" if _is_made_whole(operands[0]) else ""
            _note(jaxpr, eqn, row_op_of(kind, operands, results), whole)
        elif kind != "read" or left.reason != "made-in-the-step":
            _note(jaxpr, eqn, "", left.reason)
    elif registry.entry_of(eqn).kind == "branches":
        is_select = results and all(x.before is not None or any(x is y for y in operands) for x in results)
        if is_select and not any(isinstance(x.change, Difference) for x in results):
            became = next((x.became for x in reversed(results) if x.became), "a masked write")
            _add(jaxpr, eqn, "select", eqn.outvars[0].aval, became)
        elif repair.in_loop:
            _note_branches(jaxpr, eqn)
    elif name == "while":
        _note_while(repair, jaxpr, eqn)
    elif name in patterns.PRODUCTS and not is_made and patterns.is_masked(operands):
        _note_operands(jaxpr, eqn, operands, "product", "mask-product")
    elif not registry.entry_of(eqn).bodies(eqn.params) and eqn.primitive not in ROW_OPS and not is_made:
        _skip_inside(repair, eqn, "foreign-primitive", by=eqn)
        if repair.in_loop and name not in kinds.OF_JAX and not jaxprs.is_of_ours(eqn):
            _note_operands(jaxpr, eqn, operands, "use", "foreign-primitive", by=eqn)


def of_held(jaxpr: Jaxpr, eqn: Equation, kind: str, became: str, aval: Any) -> list[Remark]:
    """Return the remark about a read or write of rows that are stored in another way, if there is a listener."""
    return [] if _listener() is None else [Remark(jaxpr, eqn, _place(eqn), kind, aval, became, "", {})]


def add(remarks: Sequence[Remark]) -> None:
    """Note what became of the equations of a loop whose trial has succeeded."""
    if (listener := _listener()) is not None:
        listener.notes.extend(remarks)


def _add(jaxpr: Jaxpr, eqn: Equation, kind: str, aval: Any, became: str, reason: str = "", **facts: Any) -> None:
    _listener().notes.append(Remark(jaxpr, eqn, _place(eqn), kind, aval, became, reason, facts))


def _note(jaxpr: Jaxpr, eqn: Equation, became: str, reason: str = "", **facts: Any) -> None:
    """Note what became of a read, a write or a select."""
    kind = KINDS[eqn.primitive.name]
    buffer = eqn.outvars[0] if kind == "select" else eqn.invars[0]
    _add(jaxpr, eqn, kind, buffer.aval, became, reason, **facts)


def _note_operands(
    jaxpr: Jaxpr, eqn: Equation, operands: Sequence[Value], kind: str, reason: str, **facts: Any
) -> None:
    """Note which of the operands were there before the step: these are used as a whole."""
    for v, x in zip(eqn.invars, operands, strict=True):
        if x.is_given and not x.is_constant and _size(v.aval) > 1:
            _add(jaxpr, eqn, kind, v.aval, "", reason, **facts)


def _place(eqn: Equation) -> str:
    """Return where an equation is in the source, or else the equation around it, which is where we are.

    A loop that is differentiated is not an equation yet, and has no place of its own.
    """
    own = source_info_util.summarize(eqn.source_info) if hasattr(eqn, "source_info") else ""
    return own or source_info_util.summarize(source_info_util.current())


def row_op_of(kind: str, operands: Sequence[Value], results: Sequence[Value]) -> str:
    """Describe the row op that a rule made of a read, a write or a select."""
    value, update = results[0], results[0].update
    if value.view is not None and not value.view.is_made:
        return "a select of the rows that are read"
    if value.taken is not None and kind == "read":
        return "a part of the buffer that is put back in its place"
    if kind == "read":
        of_view = operands[0].view is not None and not operands[0].is_made_whole
        return "a read of rows of what it is computed from" if of_view else "ta_read"
    if any(value is x for x in operands):
        return "what it writes: it is all of the array" if kind == "write" else "the buffer itself: both cases are one"
    if value.became or update is None:
        return value.became or "a part of a sum of rows"
    return str(update.primitive.name) if kind == "write" else "a masked write"


def _is_made_whole(x: Value) -> bool:
    """Return whether a read of rows of a value has made all of it, or of a view that it is a view of."""
    return x.is_made_whole or (x.view is not None and any(map(_is_made_whole, x.view.operands)))


def _is_of_buffers(jaxpr: Jaxpr, eqn: Equation, operands: Sequence[Value], chosen: Value, is_made: bool) -> bool:
    """Return whether a select has a buffer to choose: one that a loop carries, or a version of it."""
    _, *cases = operands
    if not cases[0].shape or isinstance(chosen.change, Guard):  # JAX stops the derivative of what branches do not take
        return False
    if is_made or any(x.update is not None for x in cases):
        return True
    if len(cases[0].shape) == 1:  # mostly a number for each example of a batch
        return False
    # An index is not a buffer. JAX adds the length of the axis to those that are negative.
    maker = Uses(jaxpr).maker(eqn.invars[0]) or eqn
    is_index = maker.primitive.name == "lt" and maker.invars[0] is eqn.invars[1]
    return not is_index and any(x.is_given and not x.is_constant for x in cases)


def _note_branches(jaxpr: Jaxpr, eqn: Equation) -> None:
    """Note each result of branches that is a version of a buffer in some and not in others."""
    bodies = [Uses(body.jaxpr) for body in registry.entry_of(eqn).bodies(eqn.params)]
    for number, v in enumerate(eqn.outvars):
        if getattr(v.aval, "shape", ()) and _size(v.aval) > 1:
            roots = [body.root(body.jaxpr.outvars[number]) for body in bodies]
            if len(set(roots)) > 1 and any(k is not None for k in roots):
                _add(jaxpr, eqn, "select", v.aval, "", "made-in-the-step" if None in roots else "another-buffer")


def _size(aval: Any) -> int:
    return getattr(aval, "size", 0)


def _note_while(repair: Any, jaxpr: Jaxpr, eqn: Equation) -> None:
    floats = [v.aval for v in eqn.outvars if jaxprs.is_inexact(v.aval)]
    if repair.request.max_steps is None and floats:
        _add(jaxpr, eqn, "loop", max(floats, key=_size), "no derivative in reverse mode", "no-bound")


def skipped(repair: Any, eqn: Equation, reason: str = "") -> None:
    """Note that the body of an equation stays as it is, for one reason or for those that `repair` finds."""
    if _listener() is not None:
        _skip_inside(repair, eqn, reason)


def skipped_as_a_whole(repair: Any, jaxpr: Jaxpr) -> None:
    """Note that all of a jaxpr stays."""
    if _listener() is not None:
        _skip(repair, _compat.opened(jaxpr), "")


def _skip_inside(repair: Any, eqn: Equation, reason: str, **facts: Any) -> None:
    is_loop = registry.entry_of(eqn).kind == "loop"
    if not reason and is_loop and eqn.primitive.name not in ("scan", "while"):
        reason = "library-loop"
    elif not reason and jaxprs.has_symbolic_shapes(eqn):
        reason = "symbolic-shape"
    for jaxpr in jaxprs.jaxprs_in(eqn.params):
        _skip(repair.of_loop() if is_loop else repair, jaxpr, reason, **facts)


def _skip(repair: Any, jaxpr: Jaxpr, reason: str, **facts: Any) -> None:
    for eqn in jaxpr.eqns:
        name, kind = eqn.primitive.name, KINDS.get(eqn.primitive.name)
        if name in kinds.OF_REFS:
            _note(jaxpr, eqn, "", "ref")
        elif kind in ("read", "write"):
            left = Left(reason) if reason else repair.why_left(eqn)
            if reason == "library-loop" and _is_of_a_derivative(jaxpr, eqn):
                continue
            if left is not None and (left.is_known or reason):  # otherwise a rule has been asked already
                _note(jaxpr, eqn, "", left.reason, **facts)
        elif kind is None:
            if name == "while":
                _note_while(repair, jaxpr, eqn)
            if registry.entry_of(eqn).kind == "branches" and repair.in_loop:
                _note_branches(jaxpr, eqn)
            _skip_inside(repair, eqn, reason, **facts)


def _is_of_a_derivative(jaxpr: Jaxpr, eqn: Equation) -> bool:
    """Return whether a read or write in a loop of this library is from the derivative of a loop of the user.

    That loop has been repaired before. So a rule has been asked, and there is a note, unless the array is made in the
    step.
    """
    if Uses(jaxpr).root(eqn.invars[0]) is None:
        return True
    place, kind, notes = _place(eqn), KINDS[eqn.primitive.name], _listener().notes
    return any(note.place == place and note.kind == kind and note.reason != "library-loop" for note in notes)


def output(loop: Any, jaxpr: Jaxpr, number: int, kind: str, became: str, reason: str = "", **facts: Any) -> None:
    """Note what became of an output of the jaxpr of a loop, on the line that makes it or that of the loop."""
    if _listener() is not None:
        inner = _compat.opened(jaxpr)
        v = inner.outvars[number]
        _add(inner, Uses(inner).maker(v) or loop, kind, v.aval, became, reason, **facts)


def before_the_loop(jaxpr: Jaxpr, eqn: Equation) -> None:
    """Note that an equation of the body is hoisted out of the loop."""
    if _listener() is not None and KINDS.get(eqn.primitive.name) in ("read", "write"):
        _note(jaxpr, eqn, "computed once, before the loop")
