"""TensorArrays in the carries of loops: what a loop finds out about them before it begins, and undoes when it ends."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jax_tensorarray._array.stacked import Undecided
from jax_tensorarray._array.tensorarray import TensorArray, is_array


def entering_loop(step: Callable[[Any], Any], carry: Any, max_steps: Any) -> Any:
    """Return a carry in which each array knows what a loop needs: the shape of a row, and how many there may be.

    If an array lacks either, the step is traced to find out. An array that the step writes gets the shape of the rows
    that are written. One that grows gets room for a row a step, or for the rows that a loop inside of the step adds.
    An array that nobody writes needs neither.
    """
    leaves, tree = jax.tree.flatten(carry, is_leaf=is_array)
    incomplete = [is_array(x) and (isinstance(x._rows, Undecided) or x._rows.has_no_bound()) for x in leaves]
    if not any(incomplete):
        return carry
    steps = 0 if max_steps is None else int(max_steps)

    def bounded(rows: list[int]) -> list[Any]:
        each = zip(leaves, rows, incomplete, strict=True)
        return [_bounded(x, steps * n) if n and flag and x._rows.has_no_bound() else x for x, n, flag in each]

    entering, after, is_traced = leaves, None, True
    try:
        after = _leaves_after(step, tree, leaves, incomplete)
    except Exception:  # an array that must have a bound to be written, or the user's own
        is_traced = False
    if not is_traced:
        entering = bounded([1] * len(leaves))
        try:
            after = _leaves_after(step, tree, entering, incomplete)
        except Exception:
            if jax.config.jax_disable_jit:  # it may be a program that cannot be traced
                return carry
            raise
    if after is None:
        return carry
    if is_traced and any(added := [_added(x, y) for x, y in zip(leaves, after, strict=True)]):
        if max_steps is None:
            raise ValueError(
                "a TensorArray grows in a loop inside of one whose number of steps has no bound: give "
                "TensorArray(..., max_size=n), the largest number of rows it may have, or the outer loop max_steps or "
                "maximum_iterations"
            )
        entering = bounded(added)
    if max_steps is None:
        entering = leaves

    def completed(before: Any, x: Any, y: Any) -> Any:
        if not is_array(y):
            return x
        old, new = x._rows, y._rows
        if old.spec.by_loop and type(new.size) is int and new.size == old.size:
            x, old = before, before._rows  # it did not grow
        if isinstance(new, Undecided):
            return TensorArray._of(Undecided(replace(old.spec, is_unused=True), old.size))
        return TensorArray._of(old.of_shape(new.shapes[0])) if isinstance(old, Undecided) else x

    each = zip(leaves, entering, after, incomplete, strict=True)
    return jax.tree.unflatten(tree, [completed(before, x, y) if flag else x for before, x, y, flag in each])


def _leaves_after(step: Callable[[Any], Any], tree: Any, leaves: list[Any], closed: list[bool]) -> list[Any] | None:
    """Return the leaves of the carry after a step, with some leaves closed over. None if their number has changed."""
    found: list[list[Any]] = []

    def traced(*known: Any) -> None:
        given = iter(known)
        args = [x if flag else next(given) for x, flag in zip(leaves, closed, strict=True)]
        found.append(jax.tree.leaves(step(jax.tree.unflatten(tree, args)), is_leaf=is_array))

    jax.eval_shape(traced, *(x for x, flag in zip(leaves, closed, strict=True) if not flag))
    return found[-1] if len(found[-1]) == len(leaves) else None


def _added(x: Any, y: Any) -> int:
    """Return how many rows a loop inside of a step may add to an array that was not bounded before it."""
    grew = is_array(x) and is_array(y) and x._rows.has_no_bound() and y._rows.spec.by_loop
    return y._rows.spec.max_size - x._rows.live() if grew else 0


def _bounded(x: TensorArray, more: int) -> TensorArray:
    """Return an array with the same rows and room for `more`."""
    return TensorArray._of(x._rows.bounded(min(x._rows.live() + more, np.iinfo(np.int32).max)))


def leaving_loop(carry: Any) -> Any:
    """Return a carry in which the arrays that the loop bounded may grow again, where their size is known."""
    leaves, tree = jax.tree.flatten(carry, is_leaf=is_array)
    return jax.tree.unflatten(tree, [TensorArray._of(x._rows.unbounded()) if is_array(x) else x for x in leaves])
