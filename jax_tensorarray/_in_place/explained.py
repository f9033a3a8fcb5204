"""What becomes of each read, write and select of rows, and why, for `inspect.explain`.

The rules say why they leave an equation, by names, and `Repair` what became of it. Unless there is a listener, nothing
is kept and nothing more is looked at.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax.extend import core as jex
from jax.extend import source_info_util
from jax.extend.core import primitives as jax_primitives

from jax_tensorarray import _compat
from jax_tensorarray._in_place.values import Value
from jax_tensorarray._jaxprs import jaxprs, registry
from jax_tensorarray._ops.primitive import ROW_OPS


class Remark(NamedTuple):
    """What became of an equation, or why it stays."""

    jaxpr: Any  #: where the equation is
    eqn: Any
    place: str  #: in the source, as JAX writes it
    kind: str  #: "read", "write", "select" and so on
    aval: Any  #: the type of the buffer
    became: str  #: empty if it stays
    reason: str  #: the name of the reason; empty if there is nothing to say
    facts: dict[str, Any]


class Listener:
    """Keeps notes, and what the rules say of the equation that they are asked about."""

    def __init__(self) -> None:
        self.notes: list[Remark] = []
        self.ask(None)

    def ask(self, eqn: Any) -> None:
        self.eqn, self.refusals, self.what, self.is_done = eqn, list[tuple[str, dict[str, Any]]](), "", False

    def why(self) -> tuple[str, dict[str, Any]]:
        """Return the first reason that a rule gave: the next rules are for other cases."""
        return self.refusals[0] if self.refusals else ("no-rule", {})


#: The listener. It is a part of the key in JAX's caches, so everything is traced anew and all rules are asked.
listening = jax.make_user_context(None)

KINDS = {
    **dict.fromkeys(("slice", "dynamic_slice", "gather", "get"), "read"),
    **dict.fromkeys(("dynamic_update_slice", "swap", "addupdate"), "write"),
    **{f"scatter{kind}": "write" for kind in ("", "-add", "-sub", "-mul", "-min", "-max")},
    "select_n": "select",
}

_OF_REFS = ("get", "swap", "addupdate")

#: JAX's own primitives that have a public name, and others that may be met in loops.
_OF_JAX = {x.name for x in vars(jax_primitives).values() if isinstance(x, jex.Primitive)}.union(
    ["broadcast_to", "debug_callback", "debug_print", "layout_constraint", "optimization_barrier", "pvary"],
    ["ragged_dot_general", "random_unwrap", "random_wrap", "reshard", "split", "stack", "tile", "unstack"],
)


def left(reason: str, **facts: Any) -> Any:
    """Say why a rule leaves the equation that it is asked about. Return None."""
    listener = listening.value
    if listener is not None:
        listener.refusals.append((reason, facts))


def became(what: str) -> None:
    """Say what a rule makes of the equation that it is asked about, if that is not what it makes of most."""
    listener = listening.value
    if listener is not None:
        listener.what = what


def asked(eqn: Any) -> None:
    """Say that rules are asked about an equation."""
    listener = listening.value
    if listener is not None:
        listener.ask(eqn)


def done(eqn: Any, what: str = "") -> None:
    """Say that a rule did not leave the equation."""
    listener = listening.value
    if listener is not None:
        listener.eqn, listener.is_done, listener.what = eqn, True, what or listener.what


def why() -> str:
    """Return the name of the reason that a rule gave."""
    listener = listening.value
    return "" if listener is None else listener.why()[0]


def met(repair: Any, jaxpr: Any, eqn: Any, operands: Sequence[Value], results: Sequence[Value]) -> None:
    """Note what became of an equation of a jaxpr."""
    listener = listening.value
    if listener is None:
        return
    name = eqn.primitive.name
    kind, is_asked = KINDS.get(name), listener.eqn is eqn
    (reason, facts), refusals = listener.why(), [name for name, _ in listener.refusals]
    what, is_done = listener.what, is_asked and listener.is_done
    listener.ask(None)
    if name in _OF_REFS:
        listener.notes.append(_note(jaxpr, eqn, kind, "", "ref"))
    elif kind == "select" and not _is_of_buffers(jaxpr, eqn, operands, results[0], is_done):
        pass
    elif kind is not None and not (kind == "read" and reason == "made-in-the-step" and not is_done):
        if is_done:
            whole = "whole-view" if "whole-view" in refusals else ""
            listener.notes.append(_note(jaxpr, eqn, kind, what or _made(kind, results), whole))
        else:
            listener.notes.append(_note(jaxpr, eqn, kind, "", reason, facts))
    elif registry.entry_of(eqn).kind == "branches":
        if is_done:
            listener.notes.append(_note(jaxpr, eqn, "select", what or "a masked write"))
        elif repair.in_loop:
            listener.notes += _of_branches(jaxpr, eqn)
    elif name == "while":
        listener.notes += _of_while(jaxpr, eqn, repair.request.max_steps)
    elif name not in registry.ENTRIES and eqn.primitive not in ROW_OPS and not is_done:
        _skip_inside(listener, _Left(repair, "foreign-primitive", {"by": eqn}), eqn)
        if repair.in_loop and name not in _OF_JAX and not name.startswith("ta_"):
            for v, x in zip(eqn.invars, operands, strict=True):
                if x.is_given and not x.is_constant and x.shape:
                    note = Remark(jaxpr, eqn, _place(eqn), "use", v.aval, "", "foreign-primitive", {"by": eqn})
                    listener.notes.append(note)


def _note(
    jaxpr: Any, eqn: Any, kind: Any, became: str, reason: str = "", facts: dict[str, Any] | None = None
) -> Remark:
    buffer = eqn.outvars[0] if kind == "select" else eqn.invars[0]
    return Remark(jaxpr, eqn, _place(eqn), kind, buffer.aval, became, reason, facts or {})


def _place(eqn: Any) -> str:
    """Return where an equation is in the source, or else the equation around it, which is where we are.

    A loop that is differentiated is not an equation yet, and has no place of its own.
    """
    own = source_info_util.summarize(eqn.source_info) if hasattr(eqn, "source_info") else ""
    return own or source_info_util.summarize(source_info_util.current())


def _made(kind: str, results: Sequence[Value]) -> str:
    if kind == "read":
        return "ta_read"
    update = results[0].update
    if kind == "write" and update is not None:
        return str(update.primitive.name)
    return "a masked write" if update is not None else "a part of a sum of rows"


def _is_of_buffers(jaxpr: Any, eqn: Any, operands: Sequence[Value], chosen: Value, is_done: bool) -> bool:
    """Return whether a select has a buffer to choose: one that a loop carries, or a version of it."""
    _, *cases = operands
    if not cases[0].shape or chosen.guard is not None:  # JAX stops the derivative of what branches do not take
        return False
    if is_done or any(x.update is not None for x in cases):
        return True
    if len(cases[0].shape) == 1:  # mostly a number for each example of a batch
        return False
    # An index is not a buffer. JAX adds the length of the axis to those that are negative.
    maker = next((e for e in jaxpr.eqns if eqn.invars[0] in e.outvars), eqn)
    is_index = maker.primitive.name == "lt" and maker.invars[0] is eqn.invars[1]
    return not is_index and any(x.is_given and not x.is_constant for x in cases)


def _of_branches(jaxpr: Any, eqn: Any) -> Iterable[Remark]:
    """Yield a note for each result of branches that is a version of a buffer in some and not in others."""
    bodies = [_compat.opened(body.jaxpr) for body in registry.entry_of(eqn).bodies(eqn.params)]
    for number, v in enumerate(eqn.outvars):
        if getattr(v.aval, "shape", ()) and _size(v.aval) > 1:
            roots = [_root(body, body.outvars[number]) for body in bodies]
            if len(set(roots)) > 1 and any(k is not None for k in roots):
                reason = "made-in-the-step" if None in roots else "another-buffer"
                yield Remark(jaxpr, eqn, _place(eqn), "select", v.aval, "", reason, {})


def _size(aval: Any) -> int:
    return getattr(aval, "size", 0)


def _root(jaxpr: Any, v: Any) -> int | None:
    """Return the number of the input that a variable is a version of."""
    makers = {w: eqn for eqn in jaxpr.eqns for w in eqn.outvars}
    while not isinstance(v, jex.Literal) and v in makers:
        eqn = makers[v]
        inner = registry.inlined(eqn)
        if inner is not None:
            number = _root(_compat.opened(inner), _compat.opened(inner).outvars[eqn.outvars.index(v)])
            if number is None:
                return None
            v = eqn.invars[number]
        elif KINDS.get(eqn.primitive.name) == "write" or eqn.primitive in ROW_OPS:
            v = eqn.invars[0]
        else:
            return None
    return jaxpr.invars.index(v) if not isinstance(v, jex.Literal) and v in jaxpr.invars else None


def _of_while(jaxpr: Any, eqn: Any, max_steps: int | None) -> list[Remark]:
    floats = [v for v in eqn.outvars if jaxprs.is_inexact(v.aval)]
    if max_steps is not None or not floats:
        return []
    aval = max(floats, key=lambda v: _size(v.aval)).aval
    return [Remark(jaxpr, eqn, _place(eqn), "loop", aval, "no derivative in reverse mode", "no-bound", {})]


def skipped(repair: Any, eqn: Any, reason: str = "") -> Any:
    """Note that what is in an equation stays, for one reason or for those that `repair` says. Return None."""
    listener = listening.value
    if listener is not None:
        _skip_inside(listener, _Left(repair, reason), eqn)


def skipped_as_a_whole(repair: Any, jaxpr: Any) -> None:
    """Note that all of a jaxpr stays."""
    listener = listening.value
    if listener is not None:
        _skip(listener, _Left(repair), _compat.opened(jaxpr))


class _Left(NamedTuple):
    """Why equations stay that rules are not asked about."""

    repair: Any
    reason: str = ""  #: if it is empty, `repair` says why
    facts: Mapping[str, Any] = MappingProxyType({})
    is_divided: bool = False  #: whether they are divided among devices, and cannot be traced here

    def inside(self, eqn: Any) -> "_Left":
        kind, name = registry.entry_of(eqn).kind, eqn.primitive.name
        repair = self.repair.of_loop() if kind == "loop" else self.repair
        is_ours = kind == "loop" and name not in ("scan", "while")
        reason = "library-loop" if is_ours else "symbolic-shape" if jaxprs.has_symbolic_shapes(eqn) else ""
        return _Left(repair, self.reason or reason, self.facts, self.is_divided or kind == "divided")


def _skip_inside(listener: Listener, left_as_is: _Left, eqn: Any) -> None:
    within = left_as_is.inside(eqn)
    for jaxpr in jaxprs.jaxprs_in(eqn.params):
        _skip(listener, within, jaxpr)


def _skip(listener: Listener, left_as_is: _Left, jaxpr: Any) -> None:
    repair = left_as_is.repair
    for eqn in jaxpr.eqns:
        name, kind, of_bodies = eqn.primitive.name, KINDS.get(eqn.primitive.name), registry.entry_of(eqn).kind
        if name in _OF_REFS:
            listener.notes.append(_note(jaxpr, eqn, kind, "", "ref"))
        elif kind in ("read", "write"):
            listener.ask(eqn)
            if left_as_is.reason:
                left(left_as_is.reason, **left_as_is.facts)
            else:
                repair.say_why(eqn)
            if listener.refusals:  # otherwise some rule does not leave it, and has been asked already
                listener.notes.append(_note(jaxpr, eqn, kind, "", *listener.why()))
        elif kind is None:
            if name == "while":
                listener.notes += _of_while(jaxpr, eqn, repair.request.max_steps)
            if of_bodies == "loop" and not left_as_is.is_divided:
                repair.say_why(eqn)
            if of_bodies == "branches" and repair.in_loop:
                listener.notes += _of_branches(jaxpr, eqn)
            _skip_inside(listener, left_as_is, eqn)


def output(loop: Any, jaxpr: Any, number: int, kind: str, became: str, reason: str = "", **facts: Any) -> None:
    """Note what became of an output of the jaxpr of a loop, on the line that makes it or that of the loop."""
    listener = listening.value
    if listener is not None:
        inner = _compat.opened(jaxpr)
        v = inner.outvars[number]
        maker = next((eqn for eqn in inner.eqns if not isinstance(v, jex.Literal) and v in eqn.outvars), loop)
        listener.notes.append(Remark(inner, maker, _place(maker), kind, v.aval, became, reason, facts))


def before_the_loop(jaxpr: Any, eqn: Any) -> None:
    """Note that an equation of the body is computed before the loop."""
    listener, kind = listening.value, KINDS.get(eqn.primitive.name)
    if listener is not None and kind in ("read", "write"):
        listener.notes.append(_note(jaxpr, eqn, kind, "computed once, before the loop"))
