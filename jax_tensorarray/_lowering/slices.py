"""Rewrite row ops as XLA's own slices if these also run in place: XLA fuses slices with other operations on the row.

    row = ta_read(b, i)              row = dynamic_slice(b, i)
                                     b, row = optimization_barrier(b, row)
    b = ta_write(b, j, x)            b = dynamic_update_slice(b, x, j)

A call of ours is never fused and costs a fixed time; a loop without calls may even become one function of machine code.
But a call always raises and updates in place, and a slice does neither by itself. So a slice replaces a call under two
conditions:

- The index is one row, or a few except on a GPU, and it need not be in range or is checked already (`record`). On a
  CPU, more rows in a loop are one gather or one scatter.
- All reads of the buffer come before its update by data dependence. This holds if the rows feed only the update.
  Otherwise an optimization barrier around the buffer and the row orders the two, in versions of XLA that keep barriers
  until they have assigned memory. In older versions we put the read into a `cond` that is always taken, but XLA does
  not know that. The `cond` also returns a 0, which we add to the index of the update, so the update depends on the
  read. Either way, XLA cannot read the row a second time after the update.

With `lowering="auto"` we choose slices as above, with "ffi" calls everywhere, and with "xla" slices also outside of
loops, where a separate call then raises.
"""

import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from jax_tensorarray import _gates
from jax_tensorarray._jaxprs import kinds
from jax_tensorarray._jaxprs.uses import updates
from jax_tensorarray._lowering import slicing
from jax_tensorarray._lowering.agreement import Rewrites, agreed
from jax_tensorarray._lowering.choice import Chooser, Rewrite, repeated_by
from jax_tensorarray._lowering.equations import (
    Atom,
    Block,
    computes_elements,
    has_type_of,
    hashable,
    is_of_numbers,
    is_static,
)
from jax_tensorarray._lowering.ordering import num_bytes
from jax_tensorarray._lowering.ownership import mask_of, operands_of, readers_of, waits_of
from jax_tensorarray._lowering.scopes import (
    Scope,
    addresses_rows,
    all_scopes,
    inner_scopes,
    is_strict,
    joined_columns,
    with_bodies,
)
from jax_tensorarray._lowering.slicing import How
from jax_tensorarray._lowering.source_lines import SourceLines
from jax_tensorarray._ops.check import ta_check_p
from jax_tensorarray._ops.empty import ta_empty_p
from jax_tensorarray._ops.fence import ta_fence_p, ta_zero_p
from jax_tensorarray._ops.primitive import KERNEL_OPS, ROW_OPS, may_raise
from jax_tensorarray._ops.read import ta_read_p
from jax_tensorarray._ops.starts import positions_of, sizes_of
from jax_tensorarray._types import Equation


def use_slices(jaxpr: Any, *, platform: str | None, divided: bool, outside: Any) -> Any:
    """Rewrite ops as slices if these are as good as calls, and prepare the others as calls.

    Args:
        jaxpr: a closed jaxpr in which `ordering` has put readers before updates.
        platform: the only platform of the program, if that is known and the program is for one device: slices of a
            buffer with divided rows would gather it. In other programs only tapes become slices.
        divided: whether a program without kernels is for several devices. A slice for each example would gather.
        outside: the source line that calls the program.
    """
    program = Scope(jaxpr)
    chooser = Chooser(program, platform, divided)
    chosen = {scope: [(e, chooser.choose(scope, e)) for e in scope.jaxpr.eqns] for scope in all_scopes(program)}
    return Rewriter(agreed(chosen), chooser, SourceLines(outside)).jaxpr(program, frozenset())


class Rewriter:
    """Rewrites the chosen ops, and gives the others the parameters of their calls."""

    def __init__(self, chosen: dict[Scope, Rewrites], chooser: Chooser, lines: SourceLines) -> None:
        self.chosen, self.lines = chosen, lines
        self.barriers_hold = chooser.barriers_hold
        self.is_on_cpu = chooser.platform == "cpu"

    def jaxpr(self, scope: Scope, duplicated: frozenset[Any]) -> Any:
        """Return the rewritten closed jaxpr.

        `duplicated` are the arguments of a branch that XLA would compute again in a fusion that reads them.
        """
        changed, rewriter = False, _JaxprRewriter(scope, self.barriers_hold, duplicated, is_on_cpu=self.is_on_cpu)
        for eqn, rewrite in self.chosen[scope]:
            if eqn.primitive is ta_zero_p:
                rewriter.block.rename(eqn.outvars, map(rewriter.block.read, eqn.invars))
                rewriter.zero = rewriter.block.read(eqn.invars[0])
                changed = True
                continue
            if rewrite is not None:
                rewriter.rewrite(eqn, rewrite)
                changed = True
                continue
            if inner_scopes(scope, eqn):
                new = self._with_bodies(scope, eqn, rewriter)
            elif eqn.primitive in KERNEL_OPS or eqn.primitive in (ta_check_p, ta_empty_p):
                new = self._settled(scope, eqn, rewriter)
            else:
                new = eqn
                changed |= rewriter.materialize(eqn)
            changed |= new is not eqn
            rewriter.add(new)
        return rewriter.block.jaxpr() if changed else scope.closed

    def _with_bodies(self, scope: Scope, eqn: Equation, rewriter: "_JaxprRewriter") -> Equation:
        """Return a loop or branches with rewritten jaxprs."""
        old = inner_scopes(scope, eqn)
        if eqn.primitive.name == "cond":
            captured = [zip(eqn.invars[1:], inner.jaxpr.invars, strict=True) for inner in old]
            duplicated = [frozenset(v for x, v in pairs if rewriter.is_duplicated(x)) for pairs in captured]
        else:
            duplicated = [frozenset()] * len(old)
        return with_bodies(eqn, [self.jaxpr(*each) for each in zip(old, duplicated, strict=True)])

    def _settled(self, scope: Scope, eqn: Equation, rewriter: "_JaxprRewriter") -> Equation:
        """Return an op with the parameters and operands of its kernel.

        An op that raises gets its source line. If it raises or allocates in a loop, it gets an effect: XLA must not
        hoist it as loop-invariant, because it would then raise in a loop of no steps.
        """
        changes: dict[str, Any] = {}
        raises = addresses_rows(eqn) and may_raise(eqn.params) and eqn.params.get("checked") != "recorded"
        if is_strict(eqn):
            changes["place"] = self.lines.of(eqn)
        if scope.is_in_loop and (eqn.primitive is ta_empty_p or raises):
            changes["effect"] = True
        if eqn.primitive in ROW_OPS and is_static(eqn.invars[0].aval) and is_static(eqn.invars[1].aval):
            rewriter.set_apart(eqn)
            eqn = rewriter.flat(eqn)
        return eqn.replace(params=eqn.params | changes) if changes else eqn


class _JaxprRewriter:
    """Replaces the ops of one jaxpr by slices, in order.

    An optimization barrier keeps reads of a buffer before its update, and returns the buffer as another value. On CPUs
    before jaxlib 0.12, we instead add a 0 that depends on the reads to the index of the update.
    """

    def __init__(self, scope: Scope, barriers_hold: bool, duplicated: frozenset[Any], *, is_on_cpu: bool) -> None:
        self.scope, self.block, self.barriers_hold = scope, Block(scope.closed), barriers_hold
        self.is_on_cpu = is_on_cpu
        self.zero: Atom | None = None
        self.duplicated = set(duplicated)  #: values that XLA would compute again in a fusion that reads them
        self.computed = set[Any]()  #: values that XLA would fuse with the update that writes to them
        self.of_several_slices = set[Any]()  #: the results of updates that became several slices
        self.read_before: dict[Any, set[Any]] = {}  #: by buffer: the rows read before it
        self.tokens: dict[Any, Atom] = {}
        self.named: dict[Any, list[Any]] = {}  #: by value: the variables that it replaces

    def add(self, eqn: Equation) -> None:
        self.block.add(eqn)
        if self._is_computed_for_update(eqn):
            self.computed.update(eqn.outvars)
            self.duplicated.update(eqn.outvars)
        elif eqn.primitive.name == "dynamic_update_slice" or self._is_computed_for_carry(eqn):
            self.duplicated.update(eqn.outvars)

    def materialize(self, eqn: Equation) -> bool:
        """Put barriers before an operation that reads whole updated buffers. Return whether there are such.

        Otherwise XLA duplicates the update into the fusion that reads, and copies the old buffer for it. Without other
        uses of the updated buffer, XLA computes the update in that fusion only. On a CPU all of that fusion has no
        vectors, because the update may replace any element:

            b = dynamic_update_slice(b, x, i)        b = dynamic_update_slice(b, x, i)
            b = dynamic_update_slice(b, y, j)        b = dynamic_update_slice(b, y, j)
            b = mul(b, 0.9)                          b = optimization_barrier(b)
                                                     b = mul(b, 0.9)

        The barrier saves up to nine tenths of the time (jax 0.12; 64 to 65536 floats, one to three updates), and loses
        none.
        """
        changed = False
        if not self.barriers_hold or not self.scope.is_in_loop:
            return changed
        for x in eqn.invars:
            if not self.is_duplicated(x) or not self._is_large(x):
                continue
            if len(self.scope.uses.of(x)) > 1 or (self.is_on_cpu and self._is_fused_with_reader(eqn, x)):
                buffer, changed = self.block.read(x), True
                self._pass_on(buffer, *self.block.call(slicing.barrier, [buffer], eqn))
        return changed

    def _is_large(self, x: Any) -> bool:
        """Return whether a barrier takes less time than an update that XLA computes twice, once without vectors."""
        return x.aval.size >= _gates.APART_ELEMENTS if self.is_on_cpu else num_bytes(x) >= _gates.ORDERED_BYTES_OF_ALL

    def is_duplicated(self, atom: Atom) -> bool:
        return not isinstance(current := self.block.read(atom), Literal) and current in self.duplicated

    def rewrite(self, eqn: Equation, rewrite: Rewrite) -> None:
        primitive = eqn.primitive
        if primitive is ta_read_p:
            results = [self._read(eqn, rewrite)]
        elif primitive in ROW_OPS:
            results = self._update(eqn, rewrite.how)
        elif primitive is ta_check_p:
            results = self.block.call(slicing.check, self._operands(eqn), eqn, drops=rewrite.how.drops)
        elif primitive is ta_fence_p:
            results = [self._fence(eqn)]
        else:
            (buffer,), token = self._after(eqn)
            results = self.block.call(slicing.clear, [buffer, *self._operands(eqn)[1:], *token], eqn)
        for v, new in zip(eqn.outvars, results, strict=True):
            self._name(v, new)

    def set_apart(self, eqn: Equation) -> None:
        """Put a barrier between a call and the arithmetic that makes its buffer: XLA would do it for each call."""
        buffer = self.block.read(eqn.invars[0])
        if not isinstance(buffer, Literal) and buffer in self.computed:
            self._pass_on(buffer, *self.block.call(slicing.barrier, [buffer], eqn))

    def flat(self, eqn: Equation) -> Equation:
        """Return a row op with the operands of its kernel: the numbers of all rows, and a mask over them."""
        params = eqn.params
        buffer, index, *rest = operands_of(eqn)
        signature, mask = ROW_OPS[eqn.primitive], mask_of(eqn)
        is_in_range, whole = params.get("checked") == "in range", params["whole"]
        clips = whole and params["mode"] == "clip"
        how = How(
            batch_dims=params["batch_dims"],
            sizes=sizes_of(buffer.aval, params),
            window=params["window"],
            masked=mask is not None,
            drops=not is_in_range and not clips,
            clips=clips and not is_in_range,
            by_windows=whole and bool(params["window"]),
        )
        masks = [] if mask is None else [self.block.read(mask)]
        with_all = [self.block.read(buffer), *self._starts(index, len(how.sizes), eqn), *masks]
        numbers = self.block.call(slicing.flat, with_all, eqn, how=how)
        value = [self.block.read(x) for x in rest[: signature.takes_value]]
        waits = [self.block.read(x) for x in eqn.invars[len(eqn.invars) - waits_of(eqn) :]]
        mode = "drop" if whole or how.clips else params["mode"]
        return eqn.replace(
            invars=[self.block.read(buffer), numbers[0], *value, *numbers[1:], *waits],
            params=params | {"window": (), "whole": False, "mode": mode, "settled": True},
        )

    # --- operands

    def _operands(self, eqn: Equation) -> list[Atom]:
        return [self.block.read(x) for x in operands_of(eqn)]

    def _starts(self, index: Atom, axes: int, eqn: Equation) -> list[Atom]:
        """Return an index, or the columns that the program concatenates to it."""
        columns = joined_columns(self.scope, index, axes) if axes > 1 else []
        starts, shape = [self.block.read(x) for x in columns or [index]], (*index.aval.shape[:-1], 1)
        if columns and columns[0].aval.shape != shape:
            return [x for column in starts for x in self.block.call(slicing.shaped, [column], eqn, shape=shape)]
        return starts

    def _name(self, variable: Any, atom: Atom) -> None:
        """Replace a variable by a value from now on."""
        self.block.names[variable] = atom
        if not isinstance(atom, Literal):
            self.named.setdefault(atom, []).append(variable)

    def _pass_on(self, old: Atom, new: Any) -> None:
        """Replace a value by the result of a barrier, under all its names."""
        if not isinstance(old, Literal):
            for variable in [old, *self.named.pop(old, [])]:
                self.block.names[variable] = new

    # --- order

    def _after(self, eqn: Equation, more: Sequence[Atom] = ()) -> tuple[list[Atom], list[Atom]]:
        """Return the buffer and `more` values of an op behind a barrier with the values that it waits for.

        Without barriers, also return a 0 for the index of an update, which depends on those values.
        """
        buffer, *more = map(self.block.read, [eqn.invars[0], *more])
        before = self.read_before.get(hashable(buffer), set())
        readers = [x for x in (*map(self.block.read, readers_of(eqn)), *more) if not isinstance(x, Literal)]
        waited = [x for x in dict.fromkeys(readers) if x not in before]
        if not waited:
            return [buffer, *more], []
        if self.barriers_hold:
            (new_buffer, *results) = self.block.call(slicing.barrier, [buffer, *waited], eqn)
            for old, new in zip([buffer, *waited], [new_buffer, *results], strict=True):
                self._pass_on(old, new)
            self.read_before[new_buffer] = before.union(results)
            behind = dict(zip(waited, results, strict=True))
            return [new_buffer, *(x if isinstance(x, Literal) else behind.get(x, x) for x in more)], []
        tokens = [self._token_of(r, eqn) for r in waited if 0 not in r.aval.shape]
        return [buffer, *more], self.block.call(slicing.sum_of, tokens, eqn) if tokens else []

    def _token_of(self, value: Any, eqn: Equation) -> Atom:
        if value in self.tokens:
            return self.tokens[value]
        (token,) = self.block.call(slicing.token_of, [self.zero, value], eqn)
        return token

    def _is_made_of(self, atom: Atom, buffer: Any) -> bool:
        """Return whether a value is computed from an array of the type of a buffer."""
        seen, stack = set[Any](), [atom]
        while stack:
            v = stack.pop()
            if isinstance(v, Literal) or v in seen:
                continue
            if is_of_numbers(v.aval) and has_type_of(v, buffer):
                return True
            seen.add(v)
            maker = self.scope.maker(v)
            stack += [] if maker is None else maker.invars
        return False

    def _is_computed_for_carry(self, eqn: Equation) -> bool:
        """Return whether a step of a loop computes a large carry elementwise."""
        if self.scope.role != "body" or eqn.primitive.name not in kinds.ARITHMETIC:
            return False
        (v,) = eqn.outvars
        return num_bytes(v) >= _gates.ORDERED_BYTES_OF_ALL and any(v is x for x in self.scope.jaxpr.outvars)

    def _is_computed_for_update(self, eqn: Equation) -> bool:
        """Return whether XLA would fuse arithmetic of a whole array with the update of its result.

        XLA computes that fusion without vectors. If rows of the result are read first, XLA does the arithmetic again
        for these, and copies its operand. Apart from rows nothing of the result is used, so it is updated in place.
        """
        if not self.barriers_hold or not self.is_on_cpu or not computes_elements(eqn):
            return False
        (v,) = eqn.outvars
        is_large = v.aval.size >= _gates.APART_ELEMENTS
        users = [use.eqn if use.operand == 0 else None for use in self.scope.uses.of(v)]
        are_rows = all(x is not None and x.primitive in ROW_OPS for x in users)
        return is_large and are_rows and any(x is not None and updates(x) for x in users)

    # --- ops

    def _read(self, eqn: Equation, rewrite: Rewrite) -> Atom:
        how, buffer = rewrite.how, self.block.read(eqn.invars[0])
        # XLA would duplicate an update into the fusion that reads, from the old buffer. If a step computes all of a
        # carry, XLA would also repeat a slice of it, and read the old carry after its memory is needed. XLA never
        # duplicates a gather.
        if self.barriers_hold and self.is_duplicated(eqn.invars[0]):
            how = how._replace(is_duplicated=how.ordered or rewrite.passes_on or not how.at_once)
        _, index, *mask = operands_of(eqn)
        zero = [self.zero] if how.by_branch else []
        operands = [*zero, buffer, *self._starts(index, len(how.sizes), eqn), *map(self.block.read, mask)]
        results = self.block.call(slicing.read, operands, eqn, how=how)
        if how.is_duplicated or (how.ordered and self.barriers_hold):
            new_buffer, row = results
            before = self.read_before.get(hashable(buffer), set()) if not how.is_duplicated else set()
            self._pass_on(buffer, new_buffer)
            if how.ordered:
                self.read_before[new_buffer] = before | {row}
            return row
        if how.ordered:
            row, self.tokens[row] = results
            return row
        return results[0]

    def _update(self, eqn: Equation, how: How) -> list[Atom]:
        _, index, value, *mask = operands_of(eqn)
        # With several slices, XLA would compute values that depend on rows of this buffer again for each slice. So they
        # pass a barrier before the first update. If nothing else waits for the rows, all of them pass it.
        several = not how.at_once and self.barriers_hold and _num_slices(eqn, how) > 1
        needs_all = several and bool(eqn.params.get("unordered"))
        behind = [value] if needs_all else []
        others = (x for x in (index, value, *mask) if several and x not in behind)
        behind += [x for x in others if self._is_made_of(x, eqn.invars[0])]
        (buffer, *_), token = self._after(eqn, behind)
        if not how.at_once and buffer in self.computed:
            (buffer,) = self.block.call(slicing.barrier, [buffer], eqn)
        is_duplicated = self.barriers_hold and how.does_both and buffer in self.duplicated
        how = how._replace(is_duplicated=is_duplicated and (how.ordered or not how.at_once), tokens=bool(token))
        zero = [self.zero] if how.by_branch else []
        if how.is_whole:
            return self._replace(buffer, value, *mask, *token, eqn=eqn, if_any=how.if_any)
        index = [self.block.read(index)] if index in behind else self._starts(index, len(how.sizes), eqn)
        rest = [self.block.read(x) for x in (value, *mask)]
        results = self.block.call(slicing.update, [*zero, buffer, *index, *rest, *token], eqn, how=how)
        if several:
            self.of_several_slices.add(eqn.outvars[0])
        is_of_one_number = not repeated_by(self.scope, eqn.invars[0])[0].aval.ndim  # XLA copies nothing to do it again
        if not how.at_once and (not is_of_one_number or (several and self.is_on_cpu)):
            self.duplicated.add(results[0])
        return results

    def _is_fused_with_reader(self, eqn: Equation, updated: Any) -> bool:
        """Return whether XLA fuses updates with the one operation that reads the result, without vectors.

        An array of one number would be stored for the updates. So one slice of it stays in the fusion: XLA may update
        the other operand instead. A few whole rows stay too: between these, XLA computes with vectors.
        """
        if eqn.primitive.name not in kinds.FUSED or [v.aval.size for v in eqn.outvars] != [updated.aval.size]:
            return False
        count, are_rows = 0, True
        while (update := self.scope.maker(updated)) is not None and _is_slice(update):
            is_one = updated not in self.of_several_slices
            count += 1 if is_one else 2
            are_rows &= is_one and _has_whole_rows(update)
            updated = update.invars[0]
        is_stored = repeated_by(self.scope, updated)[0] is updated
        return is_stored or count > (_gates.FUSED_UPDATES if are_rows else 1)

    def _replace(self, buffer: Atom, value: Atom, mask: Atom, *token: Atom, eqn: Equation, if_any: bool) -> list[Atom]:
        """Replace all rows where a mask is true. With `if_any`, a branch repeats the value to all rows."""
        source, dims = repeated_by(self.scope, value)
        operands = [buffer, self.block.read(source), self.block.read(mask), *token]
        return self.block.call(slicing.replace, operands, eqn, dims=dims, if_any=if_any)

    def _fence(self, eqn: Equation) -> Atom:
        (buffer,), token = self._after(eqn)
        if self.barriers_hold:
            return buffer if readers_of(eqn) else self.block.call(slicing.barrier, [buffer], eqn)[0]
        (fenced,) = self.block.call(slicing.fence, [self.zero, buffer, *token], eqn)
        return fenced


def _is_slice(eqn: Equation) -> bool:
    """Return whether an equation updates slices of its first operand, in this library or in JAX."""
    return updates(eqn) or eqn.primitive.name == "dynamic_update_slice"


def _has_whole_rows(update: Equation) -> bool:
    """Return whether an update has whole rows along the last axis of its array."""
    shape, params = update.invars[0].aval.shape, update.params
    if update.primitive in ROW_OPS:
        return bool(params["batch_dims"] + params["index_dims"] < len(shape))
    return len(shape) > 1 and update.invars[1].aval.shape[-1:] == shape[-1:]


def _num_slices(eqn: Equation, how: How) -> int:
    """Return the number of slices that an op becomes."""
    index, shape = eqn.invars[1].aval, eqn.invars[0].aval.shape
    positions = positions_of(index, eqn.params["index_dims"])[how.batch_dims :]
    return math.prod((*shape[how.shared : how.outer_dims], *positions, *(() if how.by_windows else how.window)))
