"""Find the row ops that need no order: reads that feed the next update only, or of a buffer that no op updates.

    row = ta_read(b, i)                row = ta_read(b, i, unordered)
    b = ta_write(b, j, f(row))         b = ta_write(b, j, f(row), unordered)

XLA cannot read a row after an update that is made of the row. So neither a barrier nor a branch has to be between the
two, and XLA may fuse them.

The pass is worth its code also where a barrier can be around every read. We measured 55 programs and gradients of
`benchmarks.harm`, drawn at random from those that the pass changes. Without it, two take more than 1.1 times as long as
plain JAX that did not before, 1.2 and 1.5 times, and seven others 1.2 to 2.2 times as long as with it (jax 0.12). It
has to know the operations that XLA runs once (`kinds.ONCE`): they change 29 of 376 programs. Without them `delay_line`
takes 1.4 times as long as plain JAX instead of 1.0 times, on 0.10.2 as well, and `two_fields_in_one_array_64` 1.4
instead of 0.95 times (29 November 2026).
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

    On a CPU a row needs none either if everything that is made of it, apart from the update, goes through an operation
    that XLA runs once, before the update: XLA repeats a read only in a fusion with cheap operations.
    """
    needs = OrderNeeds(kinds.ONCE if platform == "cpu" else frozenset(), barriers_hold=barriers_hold)

    def mark(scope: Scope, eqn: Equation, block: Block) -> Equation | None:
        is_read = eqn.primitive is ta_read_p and needs.is_for_update(scope, eqn)
        if is_read or (updates(eqn) and needs.reads_feed_only_next_update(scope, eqn.invars[0])):
            eqn = eqn.replace(params=eqn.params | {"unordered": True})
        if not any((scope, v) in needs.made_first for v in eqn.outvars):
            return eqn
        block.add(eqn)
        block.rename(eqn.outvars, block.call(slicing.barrier, eqn.outvars, eqn))
        return None

    return rebuilt(Scope(jaxpr), mark)


class OrderNeeds:
    """Answers which row ops need an order. A value is asked for in the scope whose variable it is."""

    def __init__(self, made_once: frozenset[str] = frozenset(), *, barriers_hold: bool = False) -> None:
        self.ownership = Ownership()
        self.made_once, self.barriers_hold = made_once, barriers_hold
        self.for_itself: dict[tuple[Scope, Any], bool] = {}
        #: Arrays that an update writes and others use: a barrier has XLA make them once, before the update.
        self.made_first = set[tuple[Scope, Any]]()

    def all_uses(self, scope: Scope, value: Any) -> Iterator[tuple[Scope, Use]]:
        """Yield the uses of a value with their scopes: those in the branches of a conditional instead of its own."""
        for use in scope.uses.of(value):
            if _enters_branches(use):
                for inner in scope.branches(use.eqn):
                    yield from self.all_uses(inner, inner.jaxpr.invars[use.operand - 1])
            else:
                yield scope, use

    # --- what is updated -----------------------------------------------------------------------------------------

    def is_updated_in(self, scope: Scope, value: Any) -> bool:
        """Return whether an equation of a jaxpr updates a value of it, itself or inside of it."""
        return value in self.ownership.values(scope.jaxpr, self.ownership.owns)

    def is_never_updated(self, scope: Scope, value: Any) -> bool:
        """Return whether nothing updates a value after it has been read in its jaxpr."""
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
        """Return whether a row is read for the next update of the buffer only, or the buffer is never updated."""
        return self.reads_feed_only_next_update(scope, read.invars[0]) or self.is_never_updated(scope, read.invars[0])

    def reads_feed_only_next_update(self, scope: Scope, buffer: Any) -> bool:
        """Return whether every read of a buffer's version feeds only its next update, or what is made before that.

        The answer may need a barrier behind an array: see `made_first`.
        """
        key = scope, buffer
        if key not in self.for_itself:
            uses = self.all_uses(*home_of(scope, buffer))
            owners = [(at, use) for at, use in uses if self._is_owner(use)]
            self.for_itself[key] = len(owners) == 1 and self._is_for(*owners[0], scope)
        return self.for_itself[key]

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
            return False  # XLA would fuse the update with what takes all of the buffer, into an array of its own
        maker = scope.maker(buffer)  # without one it is from outside of a branch, and XLA fuses nothing with that
        # Where no barrier holds, XLA would make this version again in each other fusion that reads it.
        is_updated = maker is not None and updates(maker) and not self.barriers_hold
        if is_updated and len(list(self.all_uses(scope, buffer))) > 1:
            return False
        self.made_first.update([] if written is None else [(scope, written)])
        return True

    def _written_by(self, scope: Scope, update: Equation) -> Any:
        """Return the large array that an update writes and that is made of rows as large. None for any other.

        An example is a time step of a wave: `new = stencil(b[t]) - b[t - 1]; b = b.at[t + 1].set(new)`. A barrier
        behind the rows would make arrays of them; with one behind `new`, XLA computes `new` of the buffer itself.
        """
        if not self.made_once or not self.barriers_hold or not scope.is_in_loop or update.primitive is not ta_write_p:
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
        return written if is_made and least >= _gates.ORDERED_BYTES_OF_ALL else None

    def _goes_on(self, use: Use) -> bool:
        """Return whether a version of a buffer leaves the jaxpr there, or is updated."""
        return use.eqn is None or self._is_owner(use)

    def _reach_only(self, scope: Scope, buffer: Any, update: Equation, first: Any = None) -> bool:
        """Return whether all that is made of a buffer in the jaxpr of `update` is for `update`, or made before it.

        The array `first` is made before it.
        """
        home = home_of(scope, buffer)
        starts = [v for v in scope.jaxpr.invars if home_of(scope, v) == home] if buffer in scope.numbers else [buffer]
        stack, seen = list(starts), set()
        while stack:
            value = stack.pop()
            for use in scope.uses.of(value) if value is not first else ():
                eqn = use.eqn
                if eqn is None:
                    return False  # it leaves the jaxpr
                if value not in starts and _is_checked(scope, use):
                    return False  # it is recorded whether this index is in range
                if eqn is update or id(eqn) in seen:
                    continue
                seen.add(id(eqn))
                is_once = eqn.primitive.name in self.made_once and not _is_sum_of_few(scope, eqn)
                if is_once and self._reaches(scope, eqn, update):
                    continue
                stack.extend(self._made_of(eqn, value))
        return True

    def _made_of(self, eqn: Equation, value: Any) -> list[Any]:
        """Return the results that are made of a value: a loop passes some carries on as they are."""
        if eqn.primitive.name != "while":
            return list(eqn.outvars)
        same, first = self.ownership.invariants(eqn), len(eqn.invars) - len(eqn.outvars)
        return [v for k, v in enumerate(eqn.outvars) if k not in same or eqn.invars[first + k] is value]

    def _reaches(self, scope: Scope, eqn: Equation, update: Equation) -> bool:
        """Return whether `update` is made of a result of `eqn`."""
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
    """Return whether a value is an index that may raise."""
    if _enters_branches(use):
        inner = ((branch, branch.jaxpr.invars[use.operand - 1]) for branch in scope.branches(use.eqn))
        return any(_is_checked(branch, u) for branch, v in inner for u in branch.uses.of(v))
    return use.eqn is not None and is_strict(use.eqn) and index_number(use.eqn) == use.operand


def _is_sum_of_few(scope: Scope, eqn: Equation) -> bool:
    """Return whether an equation reduces rows that are read, or joined: a few become sums of slices in XLA.

    One along axes of size 1 becomes no operation at all.
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
