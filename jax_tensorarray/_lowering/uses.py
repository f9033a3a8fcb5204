"""Find the row ops that need no order: reads that feed only the next update, or whose buffer is never updated.

    row = ta_read(b, i)                row = ta_read(b, i, unordered)
    b = ta_write(b, j, f(row))         b = ta_write(b, j, f(row), unordered)

XLA cannot read a row after an update that uses the row. So the two need neither a barrier nor a branch between them,
and XLA may fuse them.

The pass is worth its code even if barriers hold. We measured 55 programs and gradients of `benchmarks.harm`, drawn at
random from those that the pass changes. Without it, two take more than 1.1 times as long as plain JAX that did not
before, 1.2 and 1.5 times, and seven others 1.2 to 2.2 times as long as with it (jax 0.12). It must know the operations
that XLA never duplicates (`kinds.ONCE`): they change 29 of 376 programs. Without them `delay_line` takes 1.4 times as
long as plain JAX instead of 1.0 times, on 0.10.2 as well, and `two_fields_in_one_array_64` 1.4 instead of 0.95 times
(29 November 2026).
"""

from collections.abc import Iterator
from typing import Any

from jax_tensorarray import _gates
from jax_tensorarray._jaxprs import kinds
from jax_tensorarray._jaxprs.uses import Use
from jax_tensorarray._lowering import slicing
from jax_tensorarray._lowering.equations import Block
from jax_tensorarray._lowering.ordering import num_bytes
from jax_tensorarray._lowering.ownership import Ownership, operands_of, updates
from jax_tensorarray._lowering.scopes import Scope, home_of, index_number, inner_scopes, is_strict, rebuilt
from jax_tensorarray._ops.primitive import ROW_OPS
from jax_tensorarray._ops.read import ta_read_p
from jax_tensorarray._ops.write import ta_write_p
from jax_tensorarray._types import Equation


def mark_unordered(jaxpr: Any, platform: str | None, barriers_hold: bool) -> Any:
    """Flag every read and update that needs no order as `unordered`.

    On a CPU a read also needs no order if, apart from the update, its row feeds only operations that XLA runs once and
    before the update: XLA duplicates a read only into a fusion with cheap operations.
    """
    needs = OrderNeeds(is_on_cpu=platform == "cpu", barriers_hold=barriers_hold)

    def mark(scope: Scope, eqn: Equation, block: Block) -> Equation | None:
        is_free = eqn.primitive is ta_read_p and needs.is_for_update(scope, eqn)
        if updates(eqn):  # one that is the same in every step runs before the loop
            is_free = scope.is_invariant(eqn) or needs.reads_feed_only_next_update(scope, eqn.invars[0])
        if is_free:
            eqn = eqn.replace(params=eqn.params | {"unordered": True})
        if not any((scope, v) in needs.made_first for v in eqn.outvars):
            return eqn
        block.add(eqn)
        block.rename(eqn.outvars, block.call(slicing.barrier, eqn.outvars, eqn))
        return None

    return rebuilt(Scope(jaxpr), mark)


class OrderNeeds:
    """Answers which row ops need an order. Each method takes a value with the scope of its variable."""

    def __init__(self, *, is_on_cpu: bool = False, barriers_hold: bool = False) -> None:
        self.ownership = Ownership()
        self.is_on_cpu, self.barriers_hold = is_on_cpu, barriers_hold
        self.made_once = kinds.ONCE if is_on_cpu else frozenset[str]()
        self.for_itself: dict[tuple[Scope, Any], bool] = {}
        #: Arrays that an update writes and other equations use. Behind a barrier XLA computes them once, before the
        #: update.
        self.made_first = set[tuple[Scope, Any]]()

    def all_uses(self, scope: Scope, value: Any) -> Iterator[tuple[Scope, Use]]:
        """Yield the uses of a value with their scopes, and enter the branches of conditionals."""
        for use in scope.uses.of(value):
            if _enters_branches(use):
                for inner in scope.branches(use.eqn):
                    yield from self.all_uses(inner, inner.jaxpr.invars[use.operand - 1])
            else:
                yield scope, use

    # --- updates -----------------------------------------------------------------------------------------

    def is_updated_in(self, scope: Scope, value: Any) -> bool:
        """Return whether an equation of a jaxpr, or one inside it, updates a value."""
        return value in self.ownership.values(scope.jaxpr, self.ownership.owns)

    def is_never_updated(self, scope: Scope, value: Any) -> bool:
        """Return whether nothing updates a value after a read in its jaxpr.

        XLA runs an update that is the same in every step before the loop, on a copy.
        """
        owners = self._owners(scope, value)
        if owners and all(at.is_invariant(use.eqn) for at, use in owners):
            return True
        if self.is_updated_in(scope, value):
            return False
        if scope.maker(value) is not None:
            return not scope.is_whole or value not in scope.jaxpr.outvars  # else a caller may update it
        at, value = home_of(scope, value)
        if at.maker(value) is not None:
            return False
        if at.is_whole:
            return at is scope or not self.is_updated_in(at, value)
        if at.role == "condition" or at.role == "body":
            number = at.carried(value)
            return number is None or number in self.ownership.invariants(at.eqn)
        return False

    def is_for_update(self, scope: Scope, read: Equation) -> bool:
        """Return whether a read feeds only the next update of its buffer, or the buffer is never updated."""
        return self.reads_feed_only_next_update(scope, read.invars[0]) or self.is_never_updated(scope, read.invars[0])

    def reads_feed_only_next_update(self, scope: Scope, buffer: Any) -> bool:
        """Return whether every read of a version of a buffer feeds only the next update, or runs before it.

        This may need a barrier behind an array: see `made_first`.
        """
        key = scope, buffer
        if key not in self.for_itself:
            owners = self._owners(scope, buffer)
            self.for_itself[key] = len(owners) == 1 and self._is_for(*owners[0], scope)
        return self.for_itself[key]

    def _owners(self, scope: Scope, value: Any) -> list[tuple[Scope, Use]]:
        """Return the uses of a value that update it, with their scopes."""
        return [(at, use) for at, use in self.all_uses(*home_of(scope, value)) if self._is_owner(use)]

    def _is_owner(self, use: Use) -> bool:
        return use.eqn is not None and self.ownership.owns(use.eqn, use.operand)

    def _is_for(self, at: Scope, use: Use, scope: Scope) -> bool:
        eqn = use.eqn
        if at is not scope or (updates(eqn) and len(eqn.outvars) > 1):
            return False  # "swap" gives the old row to others
        buffer, written = eqn.invars[use.operand], None
        if not self._reach_only(scope, buffer, eqn):
            written = self._written_by(scope, eqn)
            if written is None or not self._reach_only(scope, buffer, eqn, written):
                return False
        if updates(eqn) and not all(self._goes_on(use) for _, use in self.all_uses(scope, eqn.outvars[0])):
            return False  # XLA would fuse the update with an operation on the whole buffer, into another array
        maker = scope.maker(buffer)  # None for an argument of a branch, and XLA fuses nothing with that
        # Without barriers, XLA would duplicate the update that made this version into other fusions that read it.
        is_updated = maker is not None and updates(maker) and not self.barriers_hold
        if is_updated and len(list(self.all_uses(scope, buffer))) > 1:
            return False
        self.made_first.update([] if written is None else [(scope, written)])
        return True

    def _written_by(self, scope: Scope, update: Equation) -> Any:
        """Return the large array that an update writes, if the program computes it from rows as large, else None.

        An example is a time step of a wave: `new = stencil(b[t]) - b[t - 1]; b = b.at[t + 1].set(new)`. A barrier
        behind the rows would materialise them. With one behind `new`, XLA computes `new` from the buffer itself.
        """
        if not self.is_on_cpu or not self.barriers_hold or not scope.is_in_loop or update.primitive is not ta_write_p:
            return None
        written = operands_of(update)[2]
        while (maker := scope.maker(written, "reshape", "squeeze", "broadcast_in_dim")) is not None:
            if num_bytes(maker.invars[0]) != num_bytes(written):
                break
            written = maker.invars[0]
        reads = (use.eqn for _, use in self.all_uses(*home_of(scope, update.invars[0])) if use.eqn is not None)
        rows = [num_bytes(eqn.outvars[0]) for eqn in reads if eqn.primitive is ta_read_p]
        least, maker = min(num_bytes(written), max(rows, default=0)), scope.maker(written)
        is_made = maker is not None and not inner_scopes(scope, maker)
        return written if is_made and least >= _gates.ORDERED_BYTES else None

    def _goes_on(self, use: Use) -> bool:
        """Return whether a use returns a version of a buffer from the jaxpr, or updates it.

        On a CPU where barriers hold, one is put before a read of rows of it.
        """
        if use.eqn is None or self._is_owner(use):
            return True
        return self.is_on_cpu and self.barriers_hold and use.eqn.primitive is ta_read_p

    def _reach_only(self, scope: Scope, buffer: Any, update: Equation, first: Any = None) -> bool:
        """Return whether all values that depend on a buffer feed only `update`, or are computed before it.

        The array `first` is computed before it.
        """
        home = home_of(scope, buffer)
        starts = [v for v in scope.jaxpr.invars if home_of(scope, v) == home] if buffer in scope.numbers else [buffer]
        stack, seen = list(starts), set()
        while stack:
            value = stack.pop()
            for use in scope.uses.of(value) if value is not first else ():
                eqn = use.eqn
                if eqn is None:
                    return False  # the jaxpr returns it
                if value not in starts and _is_checked(scope, use):
                    return False  # the program records whether this index is in range
                if eqn is update or id(eqn) in seen:
                    continue
                seen.add(id(eqn))
                is_once = eqn.primitive.name in self.made_once and not _is_sum_of_few(scope, eqn)
                if is_once and self._reaches(scope, eqn, update):
                    continue
                stack.extend(self._results_of(eqn, value))
        return True

    def _results_of(self, eqn: Equation, value: Any) -> list[Any]:
        """Return the results that depend on a value: a loop returns some carries unchanged."""
        if eqn.primitive.name != "while":
            return list(eqn.outvars)
        same, first = self.ownership.invariants(eqn), len(eqn.invars) - len(eqn.outvars)
        return [v for k, v in enumerate(eqn.outvars) if k not in same or eqn.invars[first + k] is value]

    def _reaches(self, scope: Scope, eqn: Equation, update: Equation) -> bool:
        """Return whether `update` depends on `eqn`."""
        stack, seen = [eqn], {id(eqn)}
        while stack:
            for result in stack.pop().outvars:
                for use in scope.uses.of(result):
                    if use.eqn is update:
                        return True
                    if use.eqn is not None and id(use.eqn) not in seen:
                        seen.add(id(use.eqn))
                        stack.append(use.eqn)
        return False


def _enters_branches(use: Use) -> bool:
    return use.eqn is not None and use.eqn.primitive.name == "cond" and use.operand > 0


def _is_checked(scope: Scope, use: Use) -> bool:
    """Return whether a use is as an index that may raise."""
    if _enters_branches(use):
        inner = ((branch, branch.jaxpr.invars[use.operand - 1]) for branch in scope.branches(use.eqn))
        return any(_is_checked(branch, u) for branch, v in inner for u in branch.uses.of(v))
    return use.eqn is not None and is_strict(use.eqn) and index_number(use.eqn) == use.operand


def _is_sum_of_few(scope: Scope, eqn: Equation) -> bool:
    """Return whether an equation reduces rows of a read or a concatenation, or axes of size 1.

    XLA turns a reduction of few rows into a sum of slices, and one along axes of size 1 into nothing.
    """
    axes = eqn.params.get("axes")
    if not eqn.primitive.name.startswith(("reduce", "arg")) or axes is None:
        return False
    value = eqn.invars[0]
    if all(value.aval.shape[k] == 1 for k in axes):
        return True
    while (maker := scope.maker(value)) is not None:
        if maker.primitive.name not in ("reshape", "squeeze", "transpose"):
            return maker.primitive.name == "concatenate" or maker.primitive in ROW_OPS
        value = maker.invars[0]
    return False
