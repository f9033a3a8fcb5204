"""Put reads before updates by data dependence, so XLA updates every buffer in place.

    row = ta_read(b, i)           row = ta_read(b, i)
    b = ta_write(b, j, x)         b = ta_write(b, j, x, row, waits=1)

XLA copies a buffer before an in-place operation if a reader of the old value might run later: nothing orders an update
after an earlier read that it does not depend on. This pass makes the order explicit. Each value has readers and one
last owner: the equation that updates it in place, or the loop or the conditional that contains the update. The results
of the readers become operands of the owner, which ignores them. If the owner is not one of our calls, we put a fence in
front of it: an in-place identity that takes those operands. If a reader follows its owner and does not depend on it, we
move the reader in front of the owner. If the operands of the reader may not move, we move the owner after the reader.

Equations that XLA would fuse with a reader of a whole buffer also read that buffer, so the owner waits for them too.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from jax_tensorarray import _compat, _gates
from jax_tensorarray._jaxprs import jaxprs, kinds
from jax_tensorarray._lowering.equations import Block, equation_at, is_of_numbers, is_static
from jax_tensorarray._lowering.ownership import Ownership, updates
from jax_tensorarray._lowering.scopes import Scope, home_of, inner_scopes, with_bodies
from jax_tensorarray._ops.fence import ta_fence_p
from jax_tensorarray._types import Equation


def order_readers(jaxpr: Any, *, sinks: bool = False, barriers_hold: bool = True) -> Any:
    """Put the readers of every value before its last owner, in all jaxprs.

    `sinks` says that XLA moves an elementwise operation into a loop if its result is larger than its operands, as for a
    TPU.
    """
    return _Orderer(sinks, barriers_hold).ordered(Scope(jaxpr))


class _Orderer:
    def __init__(self, sinks: bool, barriers_hold: bool) -> None:
        self.ownership, self.sinks, self.barriers_hold = Ownership(), sinks, barriers_hold

    def ordered(self, scope: Scope) -> Any:
        """Return the jaxpr of a scope, ordered, with ordered jaxprs in it."""
        ordered, block = self._order(scope), Block(scope.closed)
        for k in ordered.order[:-1]:
            bodies = [self.ordered(x) for x in inner_scopes(scope, scope.jaxpr.eqns[k])]
            block.eqns += [*ordered.fences.get(k, ()), with_bodies(ordered.eqns[k], bodies)]
        is_same = len(block.eqns) == ordered.end and all(map(operator.is_, block.eqns, scope.jaxpr.eqns))
        return scope.closed if is_same else block.jaxpr()

    def _order(self, scope: Scope) -> "_Block":
        """Put the equations of a jaxpr into an order that XLA must keep."""
        ownership, block = self.ownership, _Block(scope, self.barriers_hold)
        uses: dict[Any, list[tuple[int, int]]] = {}  # by which equation, and as which operand
        owning: dict[Any, set[int]] = {}
        for k in range(len(block.eqns) + 1):
            for number, value in block.operands(k):
                uses.setdefault(value, []).append((k, number))
                if k < len(block.eqns) and ownership.owns(block.eqns[k], number):
                    owning.setdefault(value, set()).add(k)
        pinned = set().union(*owning.values())

        def may_move(moved: set[int]) -> bool:
            return not moved & pinned and all(_may_move(block.eqns[m]) for m in moved)

        pending: dict[int, list[tuple[Any, list[int]]]] = {}
        for value, candidates in owning.items():
            is_buffer = (k < block.end and ownership.holds(block.eqns[k], n) for k, n in uses[value])
            if num_bytes(value) < _gates.ORDERED_BYTES and not any(is_buffer):
                continue  # a small array that is no buffer of a call of ours
            # Only the last of several owners can update the buffer itself. The others must copy it anyway.
            owner = block.last(candidates)
            if scope.is_invariant(block.eqns[owner]):
                continue
            readers = []
            for k in sorted({k for k, _ in uses[value]} - candidates - {block.end}):
                since, group = block.rank[owner], block.fusion_group(k, value)
                together = set().union(*(block.ancestors(m, since) for m in group))
                if may_move(together):
                    block.move_before(together, owner)
                elif self.barriers_hold and owner not in together and _sink(block, owner, block.last(group), owning):
                    pass  # the owner has been moved after everything that XLA may fuse with the reader
                elif block.rank[k] > since:
                    moved = block.ancestors(k, since)
                    if may_move(moved):
                        block.move_before(moved, owner)
                    elif owner in moved or not _sink(block, owner, k, owning):
                        continue  # the reader depends on the owner, or neither may move: XLA has to copy
                readers.append(k)
            if readers:
                pending.setdefault(owner, []).append((value, readers))

        for owner, values in sorted(pending.items(), key=lambda item: -block.rank[item[0]]):
            for value, readers in values:
                ancestors = block.ancestors(owner, min(block.rank[k] for k in readers))
                has_barriers = self.barriers_hold and num_bytes(value) >= _gates.ORDERED_BYTES
                if has_barriers and block.is_read_as_it_leaves(owner):
                    ancestors = set()
                results = [x for k in readers if k not in ancestors for x in block.waited_for(owner, k, value)]
                if has_barriers and block.has_barrier(owner):
                    results += [x for k in readers if k in ancestors for x in block.fused_with(owner, k, value)]
                if not results:
                    continue
                eqn = block.eqns[owner]
                if updates(eqn) and eqn.invars[0] is value:
                    block.add_operands(owner, results)
                else:
                    block.fence(owner, value, results)

        for k, eqn in enumerate(scope.jaxpr.eqns):
            for number in self._buffers_to_fence(scope, eqn):
                value = block.eqns[k].invars[number]
                if num_bytes(value) >= _gates.ORDERED_BYTES:
                    block.fence(k, value, [])
        return block

    def _buffers_to_fence(self, scope: Scope, eqn: Equation) -> list[int]:
        """Return which buffers of a loop or conditional need a fence although nothing else reads them.

        XLA rematerializes a splat in each step of a loop instead of carrying it. Since 0.12, if a conditional in a
        branch updates an argument of that branch, XLA copies the argument.
        """
        if eqn.primitive.name == "while":
            first, same = len(eqn.invars) - len(eqn.outvars), self.ownership.invariants(eqn)
            constant = [k for k in range(len(eqn.invars)) if k < first or k - first in same]
            buffers = (k for k in constant if self.ownership.holds(eqn, k))
            return [k for k in buffers if self._is_rematerialized(scope, eqn.invars[k])]
        if eqn.primitive.name == "cond" and isinstance(scope.role, int) and self.barriers_hold:
            return [k for k, v in enumerate(eqn.invars) if scope.operand(v) is not None and self.ownership.owns(eqn, k)]
        return []

    def _is_rematerialized(self, scope: Scope, value: Any) -> bool:
        """Return whether XLA would compute this array in every step of a loop instead of carrying it."""
        return _is_splat(scope, value) or (self.sinks and _is_computed(scope, value))


# --- the equations of one jaxpr --------------------------------------------------------------------------------


class _Block:
    """The equations of one jaxpr in their current order. The last number stands for the end, which uses the results."""

    def __init__(self, scope: Scope, barriers_hold: bool) -> None:
        self.scope, self.eqns, self.barriers_hold = scope, list(scope.jaxpr.eqns), barriers_hold
        self.end = len(self.eqns)
        self.order = list(range(self.end + 1))
        self.rank = list(self.order)
        self.made_by = {v: k for k, eqn in enumerate(self.eqns) for v in eqn.outvars}
        self.used_by: dict[Any, list[int]] = {}
        for k in self.order:
            for _, v in self.operands(k):
                self.used_by.setdefault(v, []).append(k)
        self.fences: dict[int, list[Equation]] = {}
        self.waited: dict[int, list[Any]] = {}  #: by equation

    def operands(self, k: int) -> Iterable[tuple[int, Any]]:
        """Return the operands of an equation that are variables, with their numbers.

        Each must be defined before the equation, even if the equation ignores it.
        """
        atoms = self.scope.jaxpr.outvars if k == self.end else self.scope.jaxpr.eqns[k].invars
        return [(n, v) for n, v in enumerate(atoms) if not isinstance(v, Literal)]

    def _producers(self, k: int) -> list[int]:
        waited = self.waited.get(k, ())
        return [self.made_by[v] for v in (*(v for _, v in self.operands(k)), *waited) if v in self.made_by]

    def ancestors(self, k: int, since: int) -> set[int]:
        """Return the equations of rank `since` or more that equation `k` depends on, itself included."""
        ancestors, stack = set(), [k]
        while stack:
            at = stack.pop()
            if at in ancestors or self.rank[at] < since:
                continue
            ancestors.add(at)
            stack.extend(self._producers(at))
        return ancestors

    def descendants(self, k: int, until: int) -> set[int]:
        """Return the equations before equation `until` that depend on equation `k`, itself included."""
        descendants = {k}
        for m in self.order[self.rank[k] + 1 : self.rank[until]]:
            if any(p in descendants for p in self._producers(m)):
                descendants.add(m)
        return descendants

    def users(self, value: Any) -> list[int]:
        """Return the equations that use a value, except for fences, and the end if the value is a result."""
        return self.used_by.get(value, [])

    def used_after(self, owner: int, result: Any, limit: float) -> Any:
        """Return a result, or a value computed from it, that the owner or a later equation uses.

        XLA removes an operand of a barrier that is not used later, and then nothing waits for it.
        """
        values, seen = [result], {result}
        for value in values:
            users = self.users(value)
            if any(self.rank[k] >= self.rank[owner] for k in users) and num_bytes(value) <= limit:
                return value
            values += self._made_before(owner, users, seen)
        return result

    def _made_before(self, owner: int, users: Sequence[int], seen: set[Any]) -> list[Any]:
        """Return the results of the users before the owner that are not in `seen`, and add them to `seen`."""
        results = [x for k in users if self.rank[k] < self.rank[owner] for x in _results(self.eqns[k])]
        new = [x for x in dict.fromkeys(results) if x not in seen]
        seen.update(new)
        return new

    def fusion_group(self, reader: int, buffer: Any) -> list[int]:
        """Return a whole-buffer reader and every consumer of its large results, except the end and their updates."""
        group = [reader]
        if num_bytes(buffer) < _gates.ORDERED_BYTES_OF_ALL or not is_fused(self.eqns[reader]):
            return group
        for k in group:
            large = [x for x in self.eqns[k].outvars if num_bytes(x) > num_bytes(buffer) / 2]
            users = {m for x in large for m in self.users(x) if not self._takes(m, x)}
            group += sorted(users.difference(group))
        return group

    def waited_for(self, owner: int, reader: int, buffer: Any) -> list[Any]:
        """Return the values that an owner waits for, to come after a reader of its buffer."""
        eqn, limit = self.eqns[reader], num_bytes(buffer) / 2
        results = _results(eqn)
        if is_fused(eqn) and num_bytes(buffer) >= _gates.ORDERED_BYTES_OF_ALL:
            return self.fused_with(owner, reader, buffer)
        # The row of a read of ours already has a barrier.
        results = [x for x in results if num_bytes(x) <= limit]
        return results if jaxprs.is_of_ours(eqn) else [self.used_after(owner, x, limit) for x in results]

    def fused_with(self, owner: int, reader: int, buffer: Any) -> list[Any]:
        """Return the values that XLA may fuse with the reader: the owner waits for them, too."""
        eqn, limit = self.eqns[reader], num_bytes(buffer) / 2
        waited = (x for result in _results(eqn) for x in self._made_of(owner, result, limit)) if is_fused(eqn) else ()
        return list(dict.fromkeys(waited))

    def _made_of(self, owner: int, result: Any, limit: float) -> list[Any]:
        """Return the results that XLA may fuse a reader into.

        Return nothing if the owner or a later equation uses a large one: waiting for it would materialise it.
        """
        waited, values, seen = [], [result], {result}
        for value in values:
            if not is_fused(self.eqns[self.made_by[value]]):
                last = self.used_after(owner, value, limit)
                waited += [last] if num_bytes(last) <= limit else []
                continue
            users = self.users(value)
            if any(self.rank[k] >= self.rank[owner] for k in users):
                if num_bytes(value) > limit and not self._is_materialized(value):
                    return []
                waited.append(value)
            values += self._made_before(owner, users, seen)
        return waited

    def _is_materialized(self, value: Any) -> bool:
        """Return whether XLA materialises an array because the jaxpr returns or updates it."""
        return self.barriers_hold and any(self._takes(k, value) for k in self.users(value))

    def _takes(self, k: int, value: Any) -> bool:
        """Return whether an equation updates a value, or is the end, which returns it."""
        return k == self.end or (self.barriers_hold and updates(self.eqns[k]) and self.eqns[k].invars[0] is value)

    def is_read_as_it_leaves(self, owner: int) -> bool:
        """Return whether a branch returns a result of an equation, and also uses it otherwise.

        Then XLA copies the buffer twice, even if the equation depends on all reads before it. A barrier prevents that.
        """
        if not isinstance(self.scope.role, int):
            return False
        users_of_results = [set(self.users(v)) for v in self.eqns[owner].outvars]
        return any(self.end in users and len(users) > 1 for users in users_of_results)

    def has_barrier(self, owner: int) -> bool:
        """Return whether a buffer may pass a barrier before an update of ours.

        Behind a barrier XLA no longer sees that the operands of the update are computed from the buffer. It fuses a
        slice of the buffer with the update, and copies the buffer for that.
        """
        eqn = self.eqns[owner]
        return updates(eqn) and not eqn.params.get("unordered")

    def last(self, some: Iterable[int]) -> int:
        return max(some, key=lambda k: self.rank[k])

    def move_before(self, moved: set[int], k: int) -> None:
        if not moved:
            return
        in_order = [m for m in self.order if m in moved]
        rest = [m for m in self.order if m not in moved]
        at = rest.index(k)
        self.order = [*rest[:at], *in_order, *rest[at:]]
        for r, m in enumerate(self.order):
            self.rank[m] = r

    def add_operands(self, k: int, extra: Sequence[Any]) -> None:
        """Make a call of ours wait for more operands."""
        eqn = self.eqns[k]
        waits = eqn.params.get("waits", 0) + len(extra)
        self.eqns[k] = eqn.replace(invars=[*eqn.invars, *extra], params=eqn.params | {"waits": waits})
        self.waited.setdefault(k, []).extend(extra)
        for v in extra:
            self.used_by.setdefault(v, []).append(k)

    def fence(self, k: int, value: Any, readers: Sequence[Any]) -> None:
        """Give an equation the value through an in-place identity that waits for the readers."""
        eqn, fenced = self.eqns[k], _compat.new_variable(value.aval)
        fence = equation_at(eqn, ta_fence_p, [value, *readers], fenced, waits=len(readers))
        self.fences.setdefault(k, []).append(fence)
        self.waited.setdefault(k, []).extend(readers)
        self.eqns[k] = eqn.replace(invars=[fenced if v is value else v for v in eqn.invars])


def _results(eqn: Equation) -> list[Any]:
    """Return the results of an equation that another one can wait for."""
    return [v for v in eqn.outvars if not _compat.is_drop(v) and is_of_numbers(v.aval)]


def num_bytes(value: Any) -> float:
    """Return the size of an array in bytes: infinity if it is symbolic, and 0 for tokens, keys and refs."""
    aval = value.aval
    if not is_of_numbers(aval):
        return 0
    if not is_static(aval):
        return np.inf
    return float(np.prod(aval.shape, dtype=float) * aval.dtype.itemsize)


def _sink(block: _Block, owner: int, reader: int, owning: dict[Any, set[int]]) -> bool:
    """Move an owner, and the equations that depend on it, after a reader. Return whether that is possible."""
    moved = block.descendants(owner, reader)
    between = {k for k in block.order[block.rank[owner] : block.rank[reader] + 1] if k not in moved}
    for k in moved:
        if not _may_move(block.eqns[k]) and not updates(block.eqns[k]):
            return False
        if any(owning.get(value, set()) & between for _, value in block.operands(k)):
            return False  # another equation updates its operand between the two
    block.move_before(moved, block.order[block.rank[reader] + 1])
    return True


def _may_move(eqn: Equation) -> bool:
    """Return whether running an equation at another point of its jaxpr changes no result.

    If two equations raise, the user may see the other error.
    """
    if jaxprs.is_of_ours(eqn):
        return eqn.primitive.name in _PURE
    if eqn.effects or eqn.primitive.name == "rng_uniform":
        return False
    return all(_may_move(inner) for jaxpr in jaxprs.jaxprs_in(eqn.params) for inner in jaxpr.eqns)


#: Ops of ours that update nothing.
_PURE = frozenset(("ta_read", "ta_read_part", "ta_check", "ta_zero"))


def is_fused(eqn: Equation) -> bool:
    """Return whether XLA may repeat an equation in each fusion that uses its results."""
    if eqn.primitive.name in kinds.FUSED:
        return True
    inner = list(jaxprs.jaxprs_in(eqn.params)) if eqn.primitive.name in kinds.CALLS else []
    return bool(inner) and all(is_fused(e) for jaxpr in inner for e in jaxpr.eqns)


def _is_splat(scope: Scope, value: Any) -> bool:
    """Return whether an array is one repeated number, or a constant."""
    maker = _maker(scope, value)
    if maker is not None:
        return maker.primitive.name in ("broadcast_in_dim", *kinds.UNINITIALISED)
    scope, value = home_of(scope, value)
    return not isinstance(value, Literal) and value in scope.jaxpr.constvars


def _is_computed(scope: Scope, value: Any) -> bool:
    """Return whether the equation that computes an array is one that XLA may move into a loop."""
    maker = _maker(scope, value)
    return maker is not None and maker.primitive.name in kinds.FUSED | kinds.ALONE


def _maker(scope: Scope, value: Any) -> Equation | None:
    if isinstance(value, Literal):
        return None
    scope, value = home_of(scope, value)
    return scope.maker(value)
