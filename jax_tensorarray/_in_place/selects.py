"""Predicate updates instead of selecting between versions of a buffer: only the rows that may differ are touched.

    new = b.at[i].set(x)
    b = jnp.where(keep, b, new)
    # becomes
    b = ta_write(b, i, x, where=~keep, mode="drop")

If the version that may not be selected is unused, its updates are repeated with a mask. Otherwise that version exists
already, and the rows that should not differ are put back. An array that was there before the step, or zeros, may be
selected instead of a buffer: `jnp.where(done, first, state)`. Then a masked write puts it over all rows of the buffer,
in the examples that select it.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jax.extend.core import Jaxpr

from jax_tensorarray import _compat, _gates
from jax_tensorarray._in_place.rows import has_rows
from jax_tensorarray._in_place.values import (
    Broadcast,
    Difference,
    Form,
    LastCarry,
    Left,
    Predicate,
    Selected,
    SparseRows,
    Stopped,
    Update,
    Value,
    arrays,
)
from jax_tensorarray._jaxprs import jaxprs, registry
from jax_tensorarray._jaxprs.kinds import LOGIC, is_update
from jax_tensorarray._ops.primitive import row_params
from jax_tensorarray._ops.write import ta_write_p
from jax_tensorarray._types import Equation


@_compat.cached
def used_in(jaxpr: Jaxpr) -> frozenset[Any]:
    """Return the variables that a jaxpr uses for more than the next update or a choice, here or in what it inlines.

    A select is a choice, and so are branches that compute nothing. XLA makes a version that is used in this way, even
    if the use comes after the choice. Outputs of a jaxpr are no uses.
    """
    found = set[Any]()
    for eqn in jaxpr.eqns:
        used = eqn.invars
        if (inner := registry.inlined(eqn)) is not None:
            body = _compat.opened(inner)
            within = used_in(body)
            used = [v for v, own in zip(used, body.invars, strict=True) if own in within]
        elif eqn.primitive.name == "select_n" or _is_choice(eqn):
            used = used[:1]
        elif is_update(eqn):
            used = used[1:]
        found.update(v for v in used if not isinstance(v, jex.Literal))
    return frozenset(found)


@_compat.cached
def needed_in(jaxpr: Jaxpr) -> frozenset[Any]:
    """Return the variables that more than one update, choice, loop or result of a jaxpr goes on with."""
    return frozenset(v for v, count in _users(jaxpr).items() if count > 1)


@_compat.cached
def _users(jaxpr: Jaxpr) -> Mapping[Any, int]:
    """Return how many updates, choices, loops and results go on with each variable. To read it does not count.

    `jax.vmap` gives each branch the operands with or without a derivative: that is no choice.
    """
    users = Counter(v for v in jaxpr.outvars if not isinstance(v, jex.Literal))
    stopped = {eqn.outvars[0]: eqn.invars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "stop_gradient"}
    for eqn in reversed(jaxpr.eqns):
        operands = list[Any]()
        if is_update(eqn):
            operands = eqn.invars[:1]
        elif eqn.primitive.name == "select_n":
            cases = [v for v in eqn.invars[1:] if not isinstance(v, jex.Literal)]
            is_same = len({stopped.get(v, v) for v in cases}) == 1
            operands = [v for v in cases if not is_same or (v not in stopped and eqn.outvars[0] in users)]
        elif eqn.primitive.name in ("scan", "while"):
            [loop] = registry.ENTRIES[eqn.primitive.name].bodies(eqn.params)
            operands = loop.split(loop.inputs(eqn.invars, None))[1]
        else:
            for inner in map(_compat.opened, jaxprs.jaxprs_in(eqn.params)):
                own = zip(reversed(eqn.invars), reversed(inner.invars), strict=False)
                operands += [v for v, argument in own if argument in _users(inner)]
        users.update({v for v in operands if not isinstance(v, jex.Literal)})
    return users


def _is_choice(eqn: Equation) -> bool:
    """Return whether these are branches that compute nothing."""
    entry = registry.entry_of(eqn)
    return entry.kind == "branches" and not any(_compat.opened(b.jaxpr).eqns for b in entry.bodies(eqn.params))


def select_n(eqn: Equation, operands: Sequence[Value]) -> list[Value] | Left:
    which, *cases = operands
    if not cases[0].shape:
        return Left()
    if which.literal is not None:
        return [cases[int(which.array)]]
    if len(cases) > 2:
        return _of_many(which, cases)
    predicate, (no, yes) = predicate_of(which), cases
    if predicate is None:
        return [no] if no is yes else Left("mask-of-elements")
    return select_rows(predicate, no, yes, lambda: jaxprs.bind(eqn, [x.array for x in operands])[0])


def select_rows(predicate: Predicate, no: Value, yes: Value, whole: Callable[[], Any]) -> list[Value] | Left:
    """Select only rows, unless that takes all of them. `whole` selects all."""
    if no is yes:
        return [no]
    if (few := _of_few_rows(predicate, no, yes, whole)) is not None:
        return [few]
    selected = select(predicate, no, yes)
    if isinstance(selected, Left):
        other = _special(predicate, no, yes, whole) or _of_whole_examples(predicate, no, yes)
        return selected if other is None else [other]
    return [selected]


def _of_many(which: Value, cases: Sequence[Value]) -> list[Value] | Left:
    """Select between versions of a buffer one after another, as `jax.vmap` of `lax.switch` needs it."""
    if not _chooses_examples(which):
        return Left("mask-of-elements")
    chosen = select_one(which.source, cases)
    return chosen if isinstance(chosen, Left) else [chosen]


def select_one(which: Value, cases: Sequence[Value]) -> Value | Left:
    """Return the version of that number, unless selecting it takes all rows."""
    number, chosen = which.array, cases[0]
    for k, case in enumerate(cases[1:], 1):
        selected = select(Predicate(number == k), chosen, case)
        if isinstance(selected, Left):
            return selected
        chosen = selected
    return chosen


def _of_few_rows(predicate: Predicate, no: Value, yes: Value, whole: Callable[[], Any]) -> Value | None:
    """Select between two arrays of zeros and some rows; the result is one, too."""
    if no.sparse_updates is None or yes.sparse_updates is None:
        return None
    if any(update.params["batch_dims"] < predicate.mask.ndim for update in (*no.sparse_updates, *yes.sparse_updates)):
        return None
    masked = [update.masked(predicate.inverted()) for update in no.sparse_updates]
    return Value(whole(), form=SparseRows((*masked, *(update.masked(predicate) for update in yes.sparse_updates))))


def _special(predicate: Predicate, no: Value, yes: Value, whole: Callable[[], Any]) -> Value | None:
    """Select between a buffer and zeros, or between a buffer and itself without a derivative.

    The result records that for other rules: of a cotangent the parts that two selects have taken become one again. A
    large buffer of the carry is emptied by a masked write: this takes 0.01 to 0.4 times as long as the select (CPU, jax
    0.12, 4 to 250 KiB, rows of 1, 16 and 64 floats).
    """
    for other, buffer, active in ((no, yes, predicate), (yes, no, predicate.inverted())):
        if other.sparse_updates == () and jnp.issubdtype(other.dtype, jnp.inexact):
            is_kept = _is_large(buffer, active.mask.ndim) and is_of_carry(buffer) and not buffer.is_needed
            emptied = _written_over(buffer, other, active.inverted()) if is_kept else None
            form = Selected(buffer, active)
            if emptied is None:
                return Value(whole(), form=form)
            emptied.form = form._replace(select=whole)
            return emptied
        if isinstance(other.form, Stopped) and other.form.source is buffer:
            if not jnp.issubdtype(buffer.dtype, jnp.inexact):  # integers have no derivative anyway
                return buffer
            return buffer.guarded(active)
    return None


def _of_whole_examples(predicate: Predicate, no: Value, yes: Value) -> Value | None:
    """Select between a buffer and another array that is in memory: some examples start again.

    The other one is there before the step, or it is large and its own rows have been written.
    """
    axis = predicate.mask.ndim
    for buffer, other, active in ((no, yes, predicate), (yes, no, predicate.inverted())):
        if buffer.is_needed:
            continue
        source = other if other.shared is None else other.shared
        is_there = source.is_given and source.before is None and (source.is_constant or buffer.before is not None)
        is_there = is_there and buffer.is_given and not buffer.is_constant
        is_there = is_there or (_is_large(buffer, axis) and is_of_carry(buffer) and _is_made(source))
        if is_there and (written := _written_over(buffer, other, active)) is not None:
            return written
    return None


def _written_over(buffer: Value, other: Value, active: Predicate) -> Value | None:
    """Return a buffer with all rows of another one in some examples, None if it has no rows."""
    axis = active.mask.ndim
    if not has_rows(buffer) or len(buffer.shape) <= axis:
        return None
    params = row_params("in_place", "clip", batch_dims=axis, window=(buffer.shape[axis],), whole=True)
    # XLA repeats a shared array in a fusion, if all examples have one index.
    batch = active.mask.shape if other.shared is None else (1,) * axis
    index, (rows,) = np.zeros(batch, np.int32), arrays([other])
    update = Update(ta_write_p, index, rows, active.mask, params, is_window=True, is_zero=other.sparse_updates == ())
    return buffer.updated(update, became="a masked write of all rows")


def _is_made(x: Value) -> bool:
    """Return whether a value is in memory, but in no carry: a loop has carried it, or rows of it have been written.

    Zeros of integers count as well: none of them is a part of a sum of cotangents.
    """
    if isinstance(x.form, Stopped):
        return _is_made(x.form.source)
    is_zeros = x.sparse_updates == () and not jnp.issubdtype(x.dtype, jnp.inexact)
    return is_zeros or ((isinstance(x.form, LastCarry) or x.update is not None) and not is_of_carry(x))


def is_of_carry(x: Value) -> bool:
    """Return whether a value is a version of a buffer that the loop carries, perhaps through loops inside."""
    *_, first = x.versions()
    if first.is_given:
        return not first.is_constant
    return isinstance(first.form, Stopped | LastCarry) and is_of_carry(first.form.source)


def _is_large(x: Value, axis: int) -> bool:
    """Return whether the part of an example takes longer to copy than to decide whether to copy it."""
    return math.prod(x.shape[axis:]) * x.dtype.itemsize >= _gates.EXAMPLE_BYTES


def predicate_of(which: Value) -> Predicate | None:
    return Predicate(which.source.mask) if _chooses_examples(which) else None


def _chooses_examples(which: Value) -> bool:
    """Return whether a number or a bool is the same for all elements of an example."""
    return which.may_select and (which.source is not which or not which.shape)


def stop_gradient(eqn: Equation, operands: Sequence[Value]) -> list[Value] | Left:
    if not operands[0].shape:
        return Left()
    (array,) = jaxprs.bind(eqn, [operands[0].array])
    return [Value(array, form=Stopped(operands[0]))]


def select(predicate: Predicate, no: Value, yes: Value) -> Value | Left:
    """Return one version or the other for each example, unless that takes all rows."""
    if no is yes:
        return no
    before = set(map(id, no.versions()))
    base = next((v for v in yes.versions() if id(v) in before), None)
    if base is None:
        are_there = no.is_given and yes.is_given
        return Left("another-buffer" if are_there else "made-in-the-step")
    of_no, of_yes = ([v for v in _until(base, x) if v.update is not None] for x in (no, yes))
    if any(v.update.params["batch_dims"] < predicate.mask.ndim for v in (*of_no, *of_yes)):
        return Left("mask-of-elements")
    masks = [v.change.mask for x in (no, yes) for v in _until(base, x) if isinstance(v.change, Difference)]
    if masks:  # the results of loops, which cannot be repeated
        if of_no or any(isinstance(v.change, Difference) for v in _until(base, no)):
            return Left()
        if any(mask is not predicate.mask for mask in masks):
            return Left()
        return _undone(yes, of_yes, predicate.inverted())
    sides = [(of_yes, predicate), (of_no, predicate.inverted())]
    if not any(v.is_used for v in (*of_no, *of_yes)):
        for versions, active in sides:
            for v in reversed(versions):
                base = base.updated(v.update, active)
        return base
    if of_no and of_yes:
        return Left("read-before-the-choice")
    versions, active = sides[0] if of_yes else sides[1]
    return _undone(versions[0], versions, active.inverted(), became="a write that puts the old rows back")


def _undone(newest: Value, versions: Sequence[Any], active: Predicate, *, became: str = "") -> Value:
    """Return a version with what the updates of others have changed put back."""
    for v in versions:
        newest = newest.updated(v.update.undone(v.before), active, became=became)
    return newest


def _until(base: Value, newest: Value) -> Any:
    for v in newest.versions():
        if v is base:
            return
        yield v


def copy(eqn: Equation, operands: Sequence[Value]) -> list[Value] | Left:
    """Return the operand itself: XLA makes copies where they are needed."""
    return list(operands)


def convert_element_type(eqn: Equation, operands: Sequence[Value]) -> list[Value] | Left:
    """Return an array of that dtype itself: only the weakness of its type would change. Convert a predicate."""
    own, of = jax.typeof(operands[0].array), eqn.outvars[0].aval
    is_same = own.shape and own.update(weak_type=of.weak_type) == of
    return list(operands) if is_same else elementwise(eqn, operands)


# --- what is repeated -------------------------------------------------------------------------------------------


def broadcast_in_dim(eqn: Equation, operands: Sequence[Value]) -> list[Value] | Left:
    """Broadcast a number, a buffer to all examples of a batch, or a predicate of each example to its elements."""
    of, x = eqn.outvars[0].aval.shape, operands[0]
    form = _broadcast(x, eqn.params["broadcast_dimensions"], of) if of else None
    return Left() if form is None else [Value(jaxprs.bind(eqn, [x.array for x in operands])[0], form=form)]


def _broadcast(x: Value, dims: Sequence[int], shape: tuple[int, ...]) -> Form | None:
    """Return the form of a value whose axes become the axes `dims` of a shape, None if no rule uses that."""
    new = len(shape) - len(dims)
    is_for_examples = tuple(dims) == tuple(range(new, len(shape))) and x.shape == shape[new:]
    if x.literal in (0, 1):  # zeros, to which no row has been added so far, and ones
        return Broadcast(x)
    if x.sparse_updates == ():
        return x.form
    if x.sparse_updates:
        return SparseRows(tuple(u.repeated(shape[:new]) for u in x.sparse_updates)) if is_for_examples else None
    if new and is_for_examples and has_rows(x):
        return Broadcast(x, new)
    if not x.may_select or tuple(dims) != tuple(range(len(dims))):
        return None
    source = x.source
    n = len(source.shape)
    while n and source.shape[n - 1] == 1 and shape[n - 1] != 1:
        n -= 1
    if source.shape[:n] != shape[:n]:
        return None
    return Broadcast(source if n == len(source.shape) else Value(source.array.reshape(shape[:n])))


def reshape(eqn: Equation, operands: Sequence[Value]) -> list[Value] | Left:
    """Reshape a predicate: axes of size 1 are added or removed at the end."""
    (mask, *_), of = operands, eqn.outvars[0].aval.shape
    if not mask.may_select:
        return Left()
    source = mask.source
    n = len(source.shape)
    is_longer = of[:n] == source.shape and set(of[n:]) <= {1} and set(mask.shape[n:]) <= {1}
    return _repeated(eqn, operands, source) if is_longer else Left()


def elementwise(eqn: Equation, operands: Sequence[Value]) -> list[Value] | Left:
    """Combine predicates elementwise: if all operands are repeated alike, so is the result."""
    sources = [x.source for x in operands if x.shape]
    if not all(x.may_select for x in operands) or all(x.source is x for x in operands):
        return Left()
    if len({x.shape for x in sources}) > 1 or eqn.outvars[0].aval.dtype not in (np.bool_, np.int32):
        return Left()
    (array,) = jaxprs.bind(eqn, [x.source.array for x in operands])
    return _repeated(eqn, operands, Value(array))


def _repeated(eqn: Equation, operands: Sequence[Value], source: Value) -> list[Value]:
    return [Value(jaxprs.bind(eqn, [x.array for x in operands])[0], form=Broadcast(source))]


RULES = {
    "select_n": select_n,
    "broadcast_in_dim": broadcast_in_dim,
    "reshape": reshape,
    "stop_gradient": stop_gradient,
    "copy": copy,
    **dict.fromkeys(LOGIC, elementwise),
    "convert_element_type": convert_element_type,
}
