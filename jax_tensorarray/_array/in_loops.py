"""TensorArrays in the carries of loops: find their shape and bound before a loop, and drop the bound after it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jax_tensorarray import _compat
from jax_tensorarray._array import checks
from jax_tensorarray._array.pytree import is_array
from jax_tensorarray._array.stacked import Undecided
from jax_tensorarray._array.tensorarray import TensorArray


def entering_loop(step: Callable[[Any], Any], carry: Any, max_steps: Any) -> Any:
    """Return a carry in which each array has a row shape and a bound on its size.

    If an array lacks one of them, we trace the step. If the step writes rows, the array gets their shape. If the array
    grows, it gets room for the rows that each step, or a loop in it, appends: one row per step at traced indices.
    Without writes the array needs neither.
    """
    leaves, tree = jax.tree.flatten(carry, is_leaf=is_array)
    incomplete = list(map(_is_incomplete, leaves))
    if not any(incomplete):
        return carry
    steps, is_bounded = 1 if max_steps is None else int(max_steps), False
    try:
        after = _leaves_after(step, tree, leaves, incomplete)
    except Exception as error:  # ours or the user's, perhaps because of a size that is not the bound
        if max_steps is None and isinstance(error, checks.NeedsMaxSizeError) and not jax.config.jax_disable_jit:
            raise
        is_bounded = True
    if is_bounded:
        bounded = [_bounded(x, max(steps, 1)) if flag else x for x, flag in zip(leaves, incomplete, strict=True)]
        try:
            after = _leaves_after(step, tree, bounded, incomplete)
        except Exception:
            if jax.config.jax_disable_jit:  # tracing the program may be impossible
                return carry
            raise
    if after is None:
        return carry
    room = [_room(x, y, steps, is_bounded) for x, y in zip(leaves, after, strict=True)]
    if max_steps is None and any(room):
        if jax.config.jax_disable_jit:
            return carry
        raise checks.needs_max_size("a TensorArray grows in a loop without a bound")

    def completed(x: Any, y: Any, more: int | None) -> Any:
        x = x if more is None else _bounded(x, more)
        if isinstance(x._rows, Undecided) and is_array(y):
            if isinstance(y._rows, Undecided):
                return TensorArray._of(Undecided(replace(x._rows.spec, is_unused=True), x._rows.size))
            return TensorArray._of(x._rows.of_shape(y._rows.shapes[0]))
        return x

    each = zip(leaves, after, room, incomplete, strict=True)
    return jax.tree.unflatten(tree, [completed(x, y, more) if flag else x for x, y, more, flag in each])


def needs_to_look(carry: Any) -> bool:
    """Return whether a loop must trace a step because of the arrays that it carries."""
    return any(map(_is_incomplete, jax.tree.leaves(carry, is_leaf=is_array)))


def _is_incomplete(x: Any) -> bool:
    return is_array(x) and (isinstance(x._rows, Undecided) or x._rows.has_no_bound())


def _leaves_after(step: Callable[[Any], Any], tree: Any, leaves: list[Any], closed: list[bool]) -> list[Any] | None:
    """Return the leaves of the carry after a step, with some leaves closed over. None if their number has changed."""
    results: list[list[Any]] = []

    @_compat.placed_as(step)
    def traced(*carry: Any) -> None:
        args = [_begun(x) if flag else y for x, y, flag in zip(leaves, carry, closed, strict=True)]
        results.append(jax.tree.leaves(step(jax.tree.unflatten(tree, args)), is_leaf=is_array))

    jax.eval_shape(traced, *(None if flag else x for x, flag in zip(leaves, closed, strict=True)))
    return results[-1] if len(results[-1]) == len(leaves) else None


def _begun(x: TensorArray) -> TensorArray:
    """Return the same array without a record of other sizes."""
    rows = x._rows
    return TensorArray._of(type(rows)(rows.spec, rows.size, rows.version))


def _room(x: Any, y: Any, steps: int, is_bounded: bool) -> int | None:
    """Return how many more rows an array needs in a loop, from the array before and after a step, or None for no bound.

    `is_bounded` says that the array had a bound only for the trace.
    """
    if not (is_array(x) and is_array(y) and x._rows.has_no_bound()):
        return None
    old, new = x._rows.live(), y._rows.size
    new = y._rows.live() if new is None else new
    if type(new) is not int:
        return steps * (1 if is_bounded else y._rows.spec.max_size - old)
    most = y._rows.most
    return None if new == old and most <= old else steps * max(new - old, 0) + max(most - max(new, old), 0)


def _bounded(x: TensorArray, more: int) -> TensorArray:
    """Return an array with the same rows and room for `more`, unless it has a bound."""
    if not x._rows.has_no_bound():
        return x
    return TensorArray._of(x._rows.bounded(min(x._rows.live() + more, np.iinfo(np.int32).max)))


def leaving_loop(carry: Any) -> Any:
    """Remove the bound of a loop from arrays of constant size, which may then grow again."""
    leaves, tree = jax.tree.flatten(carry, is_leaf=is_array)
    return jax.tree.unflatten(tree, [TensorArray._of(x._rows.unbounded()) if is_array(x) else x for x in leaves])
