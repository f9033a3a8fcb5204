"""Choose which row ops become slices of XLA's own, and how. `slices` explains when slices are as good as calls.

The platform and the number of rows decide first: `_gates.SLICES`, `_gates.SLICES_ON_CPU`, `_gates.SLICES_OF_UPDATES`,
and `sorting` for a GPU. The other conditions are of two kinds. For some ops XLA's own operations differ from ours:
small floats, packed types, an index that raises, and examples that are divided among devices. For the others we
measured a program, which `_gates` names.

Before jaxlib 0.12 no barrier holds on a CPU, and a branch puts reads before updates instead. We measured what this is
worth. With calls where an order is needed, 290 of 471 programs and gradients of `benchmarks.harm` are compiled to
something else. We drew 56 of these at random. 15 then take more than 1.1 times as long as plain JAX, but did not
before: `heap_sort` 12.7 instead of 0.2 times, `bubble_sort` 5.6 instead of 0.06 times (29 November 2026, jax 0.10.2).
With calls alone, 46 of the first 71 do, and histograms take 100 times as long.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_tensorarray import _compat, _gates
from jax_tensorarray._environment import value_of
from jax_tensorarray._jaxprs import kinds
from jax_tensorarray._lowering.equations import Atom, computes_elements, is_static
from jax_tensorarray._lowering.ordering import num_bytes
from jax_tensorarray._lowering.ownership import mask_of, operands_of, readers_of, updates
from jax_tensorarray._lowering.scopes import Scope, all_equations, all_scopes, inner_scopes, is_strict
from jax_tensorarray._lowering.slicing import SCATTERS, How
from jax_tensorarray._lowering.uses import OrderNeeds
from jax_tensorarray._ops import sorting
from jax_tensorarray._ops.calls import LOWERINGS, TAPE_PARAM, WITHOUT_KERNELS
from jax_tensorarray._ops.check import ta_check_p
from jax_tensorarray._ops.clear import ta_clear_p
from jax_tensorarray._ops.fence import ta_fence_p, ta_zero_p
from jax_tensorarray._ops.primitive import ROW_OPS, is_packed, may_raise, rows_of
from jax_tensorarray._ops.read import ta_read_p
from jax_tensorarray._ops.starts import positions_of, sizes_of
from jax_tensorarray._ops.swap import ta_swap_p
from jax_tensorarray._ops.write import ta_write_p
from jax_tensorarray._types import Equation

#: The default of `lowering`.
VARIABLE = "JAX_TENSORARRAY_LOWERING"


class Rewrite(NamedTuple):
    """How an op is rewritten."""

    how: How = How()
    passes_on: bool = False  #: later equations use the same buffer


class Chooser:
    def __init__(self, program: Scope, platform: str | None, divided: bool) -> None:
        self.needs = OrderNeeds()
        self.default, self.platform, self.divided = default_lowering(), platform, divided
        self.in_threads: dict[Scope, bool] = {}
        self.most_slices = _gates.SLICES if platform == "cpu" or platform in WITHOUT_KERNELS else 1
        self.barriers_hold = platform is not None and _compat.barriers_hold(platform)
        self.checks_outside = any(
            eqn.primitive is ta_check_p and is_strict(eqn) and not eqn.params.get("effect")
            for scope in all_scopes(program)
            if not scope.is_in_loop
            for eqn in scope.jaxpr.eqns
        )

    def choose(self, scope: Scope, eqn: Equation) -> Rewrite | None:
        """Return how to rewrite an equation, or None if it stays."""
        primitive = eqn.primitive
        is_row_op = primitive in ROW_OPS
        if not is_row_op and primitive not in _OTHERS:
            return None
        is_tape = primitive in (ta_read_p, ta_write_p) and bool(eqn.params[TAPE_PARAM])
        lowering = eqn.params.get("lowering", "auto")
        if not is_tape and ((self.default if lowering == "auto" else lowering) == "ffi" or self.platform is None):
            return None
        if primitive is ta_fence_p:
            how = How(ordered=True, barriers_hold=self.barriers_hold)
            # A barrier without readers still keeps XLA from rematerializing the buffer. A branch would not.
            has_effect = (len(eqn.invars) > 1 or self.barriers_hold) and _has_elements(eqn.invars[0].aval)
            return Rewrite(how, passes_on=True) if has_effect and self._can_order(scope) else None
        if primitive is ta_check_p:
            return None if is_strict(eqn) else Rewrite(How(drops=self._needs_mask(eqn)))
        if primitive is ta_clear_p:
            # On a GPU each step of an inner loop would wait for the host.
            are_usual = all(x.aval.shape == () and x.aval.dtype == np.int32 for x in eqn.invars[1:3])
            is_faster = self.platform == "cpu" and scope.is_in_loop and are_usual
            how = How(ordered=True, barriers_hold=self.barriers_hold)
            is_possible = _has_elements(eqn.invars[0].aval) and self._can_order(scope)
            return Rewrite(how, passes_on=True) if is_faster and is_possible else None
        of_row = self._choose_row(scope, eqn, is_tape)
        if of_row is None or not of_row.how.ordered or self.barriers_hold:
            return of_row
        return of_row if self._can_order(scope) and not _is_long(eqn, of_row.how) else None

    def _slices_on_cpu(self, only_updates: bool) -> int:
        """Return the largest number of rows that an op may have to become slices in a loop on a CPU."""
        if not self.barriers_hold:
            return 1
        return _gates.SLICES_OF_UPDATES if only_updates else _gates.SLICES_ON_CPU

    def _can_order(self, scope: Scope) -> bool:
        """Return whether reads can come before updates: by a barrier, or by a number that is 0."""
        return self.barriers_hold or zero_of(scope) is not None

    def _choose_row(self, scope: Scope, eqn: Equation, is_tape: bool) -> Rewrite | None:
        primitive, params = eqn.primitive, eqn.params
        buffer, index, *rest = operands_of(eqn)
        types, batch_dims = (buffer.aval, index.aval), params["batch_dims"]
        if not all(is_static(t) for t in types) or not isinstance(buffer.aval.dtype, np.dtype):
            return None
        sizes, window = sizes_of(buffer.aval, params), params["window"]
        if 0 in buffer.aval.shape[: batch_dims + len(sizes)] or is_packed(buffer.aval.dtype):
            return None
        # XLA converts the small floats to larger ones and back, which changes some.
        element = buffer.aval.dtype.name
        if element.startswith("float8") or (is_strict(eqn) and not is_tape):
            return None
        if element == "bfloat16" and primitive.name == "ta_max":  # XLA turns the smallest of these into 0
            return None
        is_read, is_write, is_swap = (primitive is p for p in (ta_read_p, ta_write_p, ta_swap_p))
        combine = ROW_OPS[primitive].combine
        if not (is_read or is_write or is_swap or combine):
            return None
        raises, clips = may_raise(params), params["whole"] and params["mode"] == "clip"
        # An example that has finished its loop has a step number that is no row of its tape.
        in_range = is_tape and raises
        drops = not in_range and not clips and self._needs_mask(eqn)
        masked = mask_of(eqn) is not None
        shared = _shared_axes(index.aval, batch_dims)
        by_windows = bool(window) and (params["whole"] or not drops)
        shape = positions_of(index.aval, params["index_dims"])[batch_dims:]
        of_examples = [x.aval for x in (index, mask_of(eqn)) if x is not None]
        is_one_box = shape == () and (by_windows or not window)
        together = _axes_together(of_examples, batch_dims, shared) if is_one_box else 0
        outer_dims = batch_dims - together
        positions = [*buffer.aval.shape[shared:outer_dims], *shape, *(() if by_windows else window)]
        if self.divided and shared < batch_dims:
            return None
        # A GPU visits many positions in a sorted order. The positions of one slice need not be sorted.
        count, each = math.prod(positions), math.prod(positions[outer_dims - shared :])
        is_box = by_windows and len(window) > 1
        only_updates = shared == batch_dims and not (is_read or is_swap or masked or drops)
        most = self._slices_on_cpu(only_updates) if self.platform == "cpu" else self.most_slices
        if self.platform == "cpu" and is_write and 1 < count <= most and _is_vectorised(scope, rest[0]):
            most = 1
        needs_threads = self.platform == "cpu" and not is_read and count > 1 and self._computes_in_threads(scope)
        most = 1 if needs_threads else most
        at_once = count > most and not is_tape and self._can_be_at_once(scope, eqn, element, each, is_box)
        is_sorted = not is_read and self._is_sorted(sizes, math.prod((*shape, *window)))
        if (is_sorted and not (by_windows and count == 1) and not at_once) or not (
            at_once or (0 < count <= self.most_slices and not needs_threads)
        ):
            return None
        does_both = is_swap if at_once else not is_read and (not is_write or masked or drops)
        is_all = shape == () and tuple(window) == tuple(sizes) and not drops
        # A GPU would wait for the host to know whether the mask is true anywhere.
        may_replace = is_write and masked and is_all and scope.is_in_loop and self.platform == "cpu"
        if_any = may_replace and self._may_ask(scope, buffer, rest[0])
        how = How(
            batch_dims=batch_dims,
            sizes=sizes,
            window=window,
            rows=rows_of(buffer.aval, index.aval, **params).shape,
            masked=masked,
            reverse=bool(params["reverse"]),
            combine=combine,
            takes=is_swap,
            drops=drops,
            clips=clips and params.get("checked") != "in range",
            does_both=does_both,
            shared=shared,
            together=together,
            by_windows=by_windows,
            at_once=at_once,
            is_whole=if_any or (may_replace and _is_read_whole(scope, buffer)),
            if_any=if_any,
            barriers_hold=self.barriers_hold,
        )
        if is_tape:
            return Rewrite(how)
        if self.checks_outside and not scope.is_in_loop:
            # XLA may know the result of a slice without the index, and then nobody checks the index.
            return None
        unordered = bool(params.get("unordered"))
        if is_read:
            updated = not self.needs.is_never_updated(scope, buffer)
            # XLA never duplicates a gather. An update after it either uses its rows or needs a barrier.
            of_older = scope.maker(buffer) is None or not self.needs.is_updated_in(scope, buffer)
            in_order = at_once and self.platform == "cpu" and of_older and not _is_waited_for(scope, eqn)
            is_ordered = updated and not in_order and not unordered
            is_ordered |= not at_once and self._is_duplicated(scope, buffer)
            return Rewrite(how._replace(ordered=is_ordered), passes_on=updated)
        is_ordered = not unordered and (does_both or bool(readers_of(eqn)))
        return Rewrite(how._replace(ordered=is_ordered), passes_on=True)

    def _computes_in_threads(self, scope: Scope) -> bool:
        """Return whether a step of a loop computes with an array so large that XLA for CPUs does it in several threads.

        It does not since jax 0.12 if the loop is one function, as one is without a scatter or call. In plain JAX an
        update of several rows is a scatter.
        """
        if not scope.is_in_loop:
            return False
        while scope.role not in ("body", "condition") and scope.outer is not None:
            scope = scope.outer
        if scope not in self.in_threads:
            entered = lambda at, eqn: [] if eqn.primitive.name == "while" else inner_scopes(at, eqn)  # noqa: E731
            arrays = (x.outvars[0] for _, x in all_equations(scope, entered) if computes_elements(x))
            self.in_threads[scope] = any(num_bytes(array) >= _gates.THREADED_BYTES for array in arrays)
        return self.in_threads[scope]

    def _may_ask(self, scope: Scope, buffer: Atom, value: Atom) -> bool:
        """Return whether a branch on `any(mask)` takes less time than a select over all of a buffer.

        Rows that a step computes take as long as the buffer.
        """
        source = repeated_by(scope, value)[0]
        is_cheap = scope.maker(source) is None or 4 * num_bytes(source) <= num_bytes(buffer)
        return is_cheap and num_bytes(buffer) >= _gates.REPLACED_BYTES

    def _is_duplicated(self, scope: Scope, buffer: Atom) -> bool:
        """Return whether XLA may duplicate the update that made this version into a fusion that reads a row.

        Such a fusion reads the version before, and XLA copies that version if the update may come first: always if the
        fusion reads the updated row. Where barriers hold, `slices` puts one in front of the read.
        """
        maker = scope.maker(buffer)
        return (
            not self.barriers_hold
            and scope.is_in_loop
            and maker is not None
            and updates(maker)
            and num_bytes(buffer) >= _gates.ORDERED_BYTES
        )

    def _is_sorted(self, sizes: Sequence[int], count: int) -> bool:
        platforms = sorting.PLATFORMS if self.platform is None else (self.platform,)
        return any(sorting.is_sorted(platform, math.prod(sizes), count) for platform in platforms)

    def _can_be_at_once(self, scope: Scope, eqn: Equation, element: str, each: int, is_box: bool) -> bool:
        """Return whether a gather or a scatter does the same as a call with `each` positions per example.

        A call would move a box by single elements. So one box per example is moved as in plain JAX on every platform.
        """
        is_read, is_write, is_swap = (eqn.primitive is p for p in (ta_read_p, ta_write_p, ta_swap_p))
        if not scope.is_in_loop:
            return False
        if self.platform != "cpu" and not (is_box and (each == 1 or is_read)):
            return False
        if is_swap:
            return each == 1  # a position might take out the row that another one puts in
        # XLA adds small floats through larger ones, and before jaxlib 0.12 converts all of a bfloat16 buffer.
        if element == "bfloat16" and not self.barriers_hold:
            return is_read and self.needs.is_never_updated(scope, eqn.invars[0])
        if not is_read and ROW_OPS[eqn.primitive].combine not in SCATTERS:
            return False
        return is_read or is_write or element not in ("bfloat16", "float16")

    def _needs_mask(self, eqn: Equation) -> bool:
        """Return whether the index of an op may be out of range and users can see the result.

        If the index is recorded, a CPU raises before it returns anything. A GPU returns arrays and raises later.
        """
        checked = eqn.params.get("checked")
        return checked != "in range" and (checked != "recorded" or self.platform != "cpu")


def repeated_by(scope: Scope, value: Atom) -> tuple[Atom, tuple[int, ...]]:
    """Strip broadcasts: return the operand of the first one, or the value itself, and which axes it becomes."""
    axes = tuple(range(value.aval.ndim))
    while (maker := scope.maker(value, "broadcast_in_dim")) is not None and len(maker.invars) == 1:
        axes = tuple(axes[d] for d in maker.params["broadcast_dimensions"])
        value = maker.invars[0]
    return value, axes


#: The ops besides row ops that may be rewritten.
_OTHERS = frozenset({ta_fence_p, ta_check_p, ta_clear_p})


def _is_read_whole(scope: Scope, buffer: Atom) -> bool:
    """Return whether a step also reads all of a buffer elementwise: then a select of all of it costs no more."""
    users = (use.eqn for use in scope.uses.of(buffer) if use.eqn is not None)
    return any(x.primitive.name in kinds.FUSED and num_bytes(x.outvars[0]) >= num_bytes(buffer) for x in users)


def zero_of(scope: Scope) -> Atom | None:
    """Return a number of a jaxpr, or None, that is 0 unless an index is out of range. XLA does not know it is 0."""
    return next((eqn.outvars[0] for eqn in scope.jaxpr.eqns if eqn.primitive is ta_zero_p), None)


def _is_long(eqn: Equation, how: How) -> bool:
    """Return whether a call takes less time than branches around the reads of an op that reads what it updates.

    A call would move a box by single elements.
    """
    is_box = how.by_windows and len(how.window) > 1
    return how.does_both and not is_box and num_bytes(eqn.invars[2]) > _gates.SLICED_BYTES


def _has_elements(aval: Any) -> bool:
    return is_static(aval) and bool(aval.ndim) and 0 not in aval.shape


def _is_vectorised(scope: Scope, rows: Atom) -> bool:
    """Return whether rows are computed by functions that XLA vectorises on a CPU, many times faster."""
    values = [rows]
    for value in values:
        eqn = scope.maker(value)
        if eqn is None or len(values) > _FAR:
            break
        if eqn.primitive.name in kinds.VECTORISED and math.prod(value.aval.shape) >= _gates.VECTOR_ELEMENTS:
            return True
        if not inner_scopes(scope, eqn):
            values.extend(v for v in eqn.invars if scope.maker(v) is not None)
    return False


_FAR = 16


def _shared_axes(index: Any, batch_dims: int) -> int:
    """Return how many of the outermost batch axes share one index among all examples."""
    return next((k for k in range(batch_dims) if index.shape[k] != 1), batch_dims)


def _axes_together(operands: Sequence[Any], batch_dims: int, shared: int) -> int:
    """Return how many of the innermost batch axes, after the shared ones, share an index and a mask per example.

    An example is `jax.vmap` of a column that is written in all rows: `b.at[:, i].set(x)`.
    """
    sizes = zip(*(x.shape[shared:batch_dims] for x in operands), strict=True)
    is_one = [set(each) == {1} for each in sizes]
    return next((k for k, flag in enumerate(reversed(is_one)) if not flag), len(is_one))


def _is_waited_for(scope: Scope, read: Equation) -> bool:
    """Return whether an update of the buffer waits for a read, but does not use its row."""
    (row,) = read.outvars
    return any(updates(eqn) and any(v is row for v in readers_of(eqn)) for eqn in scope.jaxpr.eqns)


def default_lowering() -> str:
    """Return the value of `JAX_TENSORARRAY_LOWERING`."""
    return value_of(VARIABLE, LOWERINGS, "auto")
