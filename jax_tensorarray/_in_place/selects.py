"""Selects between two versions of a buffer: of rows, where they are known to be all in which the two differ.

Where nobody has looked at the version that may not be selected, the updates are made anew, masked. Else that version is
there already, and the rows that should not be different are put back.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jax_tensorarray._in_place.values import Part, Predicate, Value
from jax_tensorarray._loops import bodies


def select_n(eqn: Any, operands: Sequence[Value]) -> list[Value] | None:
    which, *cases = operands
    if len(cases) != 2 or not cases[0].shape:
        return None
    no, yes = cases
    if no is yes:
        return [no]
    predicate = predicate_of(which)
    if predicate is None:
        return None
    selected = select(predicate, no, yes)
    if selected is None and () in (no.only, yes.only):
        (array,) = bodies.bind(eqn, [x.array for x in operands])
        part = Part(no, predicate.inverted()) if yes.only == () else Part(yes, predicate)
        selected = Value(array, part=part)
    return None if selected is None else [selected]


def predicate_of(which: Value) -> Predicate | None:
    if not which.is_bool:
        return None
    return which.repeated or (None if which.shape else Predicate(jnp.asarray(which.array)))


def select(predicate: Predicate, no: Value, yes: Value) -> Value | None:
    """The one or the other for each example, None if that takes all rows."""
    if no is yes:
        return no
    before = set(map(id, no.versions()))
    base = next((v for v in yes.versions() if id(v) in before), None)
    if base is None:
        return None
    of_no, of_yes = (list(_until(base, x)) for x in (no, yes))
    if any(v.update.params["batch_dims"] < predicate.mask.ndim for v in (*of_no, *of_yes)):
        return None
    sides = [(of_yes, predicate), (of_no, predicate.inverted())]
    if not any(v.is_used for v in (*of_no, *of_yes)):
        for versions, active in sides:
            for v in reversed(versions):
                base = base.updated(v.update, active)
        return base
    if of_no and of_yes:
        return None
    versions, active = sides[0] if of_yes else sides[1]
    newest = versions[0]
    for v in versions:
        newest = newest.updated(v.update.undone(v.before.array), active.inverted())
    return newest


def _until(base: Value, newest: Value) -> Any:
    for v in newest.versions():
        if v is base:
            return
        yield v


# --- predicates that are repeated ------------------------------------------------------------------------------


def broadcast_in_dim(eqn: Any, operands: Sequence[Value]) -> list[Value] | None:
    """Of bools: those of the first axes are repeated along the others."""
    mask, dims = operands[0], eqn.params["broadcast_dimensions"]
    of = eqn.outvars[0].aval.shape
    if not mask.is_bool or tuple(dims) != tuple(range(len(dims))):
        return None
    source = mask.repeated or Predicate(jnp.asarray(mask.array))
    while source.mask.ndim and source.mask.shape[-1] == 1 and of[source.mask.ndim - 1] != 1:
        source = Predicate(source.mask[..., 0])
    if source.mask.shape != of[: source.mask.ndim]:
        return None
    return _repeated(eqn, operands, source)


def reshape(eqn: Any, operands: Sequence[Value]) -> list[Value] | None:
    """Of bools: axes of size 1 are put behind, or taken away there."""
    (mask,), of = operands, eqn.outvars[0].aval.shape
    if not mask.is_bool:
        return None
    source = mask.repeated or Predicate(jnp.asarray(mask.array))
    n = source.mask.ndim
    is_longer = of[:n] == source.mask.shape and set(of[n:]) <= {1} and set(mask.shape[n:]) <= {1}
    return _repeated(eqn, operands, source) if is_longer else None


def elementwise(eqn: Any, operands: Sequence[Value]) -> list[Value] | None:
    """Of bools that are repeated alike."""
    if any(not x.is_bool or x.repeated is None for x in operands):
        return None
    masks = [x.repeated.mask for x in operands]
    if len({m.shape for m in masks}) > 1:
        return None
    return _repeated(eqn, operands, Predicate(bodies.bind(eqn, masks)[0]))


def _repeated(eqn: Any, operands: Sequence[Value], source: Predicate) -> list[Value]:
    return [Value(bodies.bind(eqn, [x.array for x in operands])[0], repeated=source)]


RULES = {
    "select_n": select_n,
    "broadcast_in_dim": broadcast_in_dim,
    "reshape": reshape,
    **dict.fromkeys(["and", "or", "not", "xor"], elementwise),
}
