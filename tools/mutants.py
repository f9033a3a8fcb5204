"""Break the package in one place at a time, and see which random programs and which tests notice.

    python tools/mutants.py                                 # each mutant below; a minute to half an hour each
    python tools/mutants.py accumulator mask                # those with one of these in their name
    python tools/mutants.py --most 150                      # no more than so many random programs for each
    python tools/mutants.py --file in_place/test_masks.py   # no programs: which mutants these tests notice
    python tools/mutants.py --file "in_place/test_catalogue.py -k masks"
    python tools/mutants.py --save ...                      # write what was found into the page for developers
    python tools/mutants.py --unchanged 1000                # no mutant: so many programs, and none may fail

A mutant is a copy of the package in which a text is replaced: by what it was before a repair, or by a likely mistake.
The random programs are those of the tests, with other seeds, in turn under every transformation that is named. Where
they notice nothing, the files of tests that are named run, with all slow tests. The exit code is 1 if one survives.
"""

import argparse
import contextlib
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
PAGE = ROOT / "docs" / "developers" / "mutants.md"
BEGIN, END = "<!-- table -->", "<!-- end -->"

#: How many programs may pass before a mutant has survived them.
MOST = 2000


class Mutant(NamedTuple):
    """Replacements in files of the package, the programs that should notice, and the tests that do."""

    edits: tuple[tuple[str, str, str], ...]
    programs: tuple[str, ...] = ()  #: `ops`, `plain` or `passes`, perhaps with the names of some transformations
    by: str = "numpy"  #: what evaluates the programs; "": what does so in the tests
    files: tuple[str, ...] = ()  #: in `tests/`, perhaps with options of pytest


EVERYTHING = ("ops", "plain")
CATALOGUE = "in_place/test_catalogue.py"  # with `-k` and the name of a family

MUTANTS = {
    "an accumulator in two operands is taken twice": Mutant(
        (
            (
                "_compat/transposes.py",
                "first = {k: next(j for j in hot if args[j] is args[k]) for k in hot}",
                "first = {k: k for k in hot}",
            ),
        ),
        EVERYTHING,
    ),
    "a predicate is evaluated twice a step": Mutant(
        (
            (
                "_in_place/control.py",
                "            return step(carry, is_active(carry) if shape else None)",
                "            active = is_active(carry)\n            return step(carry, active if shape else None)",
            ),
        ),
        ("plain:value", "ops:jit"),
        "",
    ),
    "a conditional is moved before operands that its branches ignore": Mutant(
        (
            (
                "_lowering/ordering.py",
                "        return [(n, v) for n, v in enumerate(atoms) if not isinstance(v, Literal)]\n",
                "        found = [(n, v) for n, v in enumerate(atoms) if not isinstance(v, Literal)]\n"
                '        if k < self.end and self.eqns[k].primitive.name == "cond":\n'
                "            from jax_tensorarray._lowering.branches import _used_arguments\n\n"
                '            used = set().union(*map(_used_arguments, self.eqns[k].params["branches"]))\n'
                "            found = [(n, v) for n, v in found if n == 0 or n - 1 in used]\n"
                "        return found\n",
            ),
            ("_lowering/branches.py", "    if len(used) == len(operands):\n", "    if True:\n"),
        ),
        ("passes:forward",),
    ),
    "a box that is out of range is moved into range": Mutant(
        (("_in_place/rows.py", '"drop" if self.drops else "clip"', '"clip"'),), ("plain",)
    ),
    "loops that choose, and checkpoints, are a custom_jvp of JAX": Mutant(
        (
            (
                "_jaxprs/custom_jvp.py",
                "    outs: list[Array] = ta_custom_jvp_p.bind(*operands, call_jaxpr=jaxpr, rule=rule)\n"
                "    return outs\n",
                "    def derivative(primals, tangents):\n"
                "        outs, dots = _jvp(primals, tangents, call_jaxpr=jaxpr, rule=rule)\n"
                "        return outs, list(map(ad.instantiate_zeros, dots))\n\n"
                "    of_jax = jax.custom_jvp(jaxprs.function(jaxpr))\n"
                "    of_jax.defjvp(derivative, symbolic_zeros=True)\n"
                "    return of_jax(*operands)\n",
            ),
        ),
        ("ops:grad of vmap|jvp of grad of vmap",),
    ),
    "a custom_vjp is differentiated in what it closes over": Mutant(
        (
            (
                "_jaxprs/registry.py",
                "has_tangent = [x.value for x in args], [x.perturbed for x in args]",
                "has_tangent = [x.value for x in args], [True for x in args]",
            ),
        ),
        EVERYTHING,
    ),
    "a cotangent gets the dtype of its result": Mutant(
        (
            (
                "_jaxprs/registry.py",
                "        has_ct = [not is_any_zero(ct) for ct in cts]\n",
                "        has_ct = [not is_any_zero(ct) for ct in cts]\n"
                "        for ct, v in zip(cts, eqn.outvars):\n"
                "            assert is_any_zero(ct) or ct.dtype == v.aval.dtype\n",
            ),
        ),
        ("plain", "ops"),
    ),
    "abs of the least integer is an index": Mutant(
        (
            (
                "_lowering/program.py",
                '    Pass("absolute", lambda jaxpr, to: absolute.write_out(jaxpr), lambda to: to.is_known),\n',
                "",
            ),
        ),
        ("ops:jit",),  # outside of loops, where it is compiled as it is
        "",
    ),
    "a batch is not divided by spmd_axis_name": Mutant(
        (("_ops/primitive.py", "x if d is None else _compat.varying_over_batches(x)", "x"),), ("plain:devices",), ""
    ),
    "rules run in another mesh": Mutant(
        (
            (
                "_in_place/repair.py",
                "with _compat.at_source_of(eqn), eqn.ctx.manager, jaxprs.with_types_of(eqn):",
                "with _compat.at_source_of(eqn), jaxprs.with_types_of(eqn):",
            ),
        ),
        ("plain:auto axes",),
        "",
    ),
    "64 bits become 32": Mutant(
        (("_jaxprs/jaxprs.py", "    return jax.enable_x64(True)", "    return contextlib.nullcontext()"),),
        ("plain:64 bits inside",),
        "",
    ),
    "a NaN is looked for among tracers": Mutant(
        (("_in_place/api.py", "if not _compat.records_equations():", "if False:"),), ("plain:debug nans",), ""
    ),
    "memory is not initialised while NaNs are looked for": Mutant(
        # Memory that nobody has written to is often zero by luck. So that it never is, it is filled with NaNs here.
        (
            ("_ops/empty.py", " if debugs_nans()", " if False"),
            ("_ops/empty.py", "_uninitialised(ctx, effect=effect)", "_zeros(ctx, aval=aval)"),
            (
                "_ops/empty.py",
                "def _in_plain_jax(*, aval: Any, **_: Any) -> Array:\n    return jnp.zeros(aval.shape, aval.dtype)\n",
                "def _in_plain_jax(*, aval: Any, **_: Any) -> Array:\n"
                "    fill = jnp.nan if jnp.issubdtype(aval.dtype, jnp.inexact) else 0\n"
                "    return jnp.full(aval.shape, fill, aval.dtype)\n",
            ),
        ),
        ("plain:debug nans",),
        "",
    ),
    "a token is asked for its dtype": Mutant(
        (("_in_place/rows.py", 'if not hasattr(aval, "dtype"):', "if False:"),), ("plain:token",), ""
    ),
    "a token is asked whether its type is weak": Mutant(
        (("_in_place/values.py", 'getattr(jax.typeof(x.array), "weak_type", weak)', "jax.typeof(x.array).weak_type"),),
        ("plain:token",),
        "",
    ),
    "max_steps of in_place is forgotten": Mutant(
        (("_in_place/api.py", 'Request(options["max_steps"], strategy', "Request(None, strategy"),), ("plain:grad",)
    ),
    # Masks.
    "a mask that is true for no row writes a row all the same": Mutant(
        (
            (
                "_in_place/masks.py",
                "rows.box_address(of, taken, batch, axes, drops=True)",
                "rows.box_address(of, taken, batch, axes, drops=False)",
            ),
        ),
        ("plain",),
        files=(f"{CATALOGUE} -k masks",),
    ),
    "a mask of several places writes one": Mutant(
        (
            (
                "_in_place/masks.py",
                "    for located in found:\n        update",
                "    for located in found[:1]:\n        update",
            ),
        ),
        files=(f"{CATALOGUE} -k masks",),
    ),
    "an inverted mask selects as it is": Mutant(
        (("_in_place/masks.py", "no, yes = reversed(cases) if mask.inverted else cases", "no, yes = cases"),),
        ("plain",),
        files=(f"{CATALOGUE} -k masks",),
    ),
    "the conditions of a mask are ignored": Mutant(
        (
            (
                "_in_place/masks.py",
                "return _Location(address, address.index_of(starts), where)",
                "return _Location(address, address.index_of(starts), None)",
            ),
        ),
        files=(f"{CATALOGUE} -k masks",),
    ),
    "a sum by a mask that is true for no row has a row": Mutant(
        (
            (
                "_in_place/masks.py",
                "        return jnp.where(inside, lax.reshape(found, shape), jnp.zeros((), found.dtype))",
                "        return lax.reshape(found, shape)",
            ),
        ),
        ("plain",),
        files=(f"{CATALOGUE} -k masks",),
    ),
    # Parts of a buffer that are put back.
    "a part is put back at another place": Mutant(
        (
            ("_in_place/parts.py", "if box and m and m.equals(own.map):", "if box and m:"),
            ("_in_place/parts.py", "if put is None or not put.equals(part.map, boxes.puts_back):", "if put is None:"),
        ),
        files=("in_place/test_parts.py",),
    ),
    "a part that is out of range is put back": Mutant(
        (("_in_place/parts.py", "    if box.drops and box.starts.keys() - known:", "    if False:"),),
        files=(f"{CATALOGUE} -k rows_of_rows",),
    ),
    "a changed part that is out of range is read from the buffer": Mutant(
        (
            (
                "_in_place/parts.py",
                "return not self.fills and not (self.changes and any(start.drops for start in self.map.starts))",
                "return not self.fills",
            ),
        ),
        files=(f"{CATALOGUE} -k rows_of_rows",),
    ),
    # Maps: views of a buffer, and row ops on them.
    "a digit of a start has the digits above it": Mutant(
        (
            (
                "_in_place/maps.py",
                "value = lax.rem(lax.div(value, np.int32(low)), np.int32(size))",
                "value = lax.div(value, np.int32(low))",
            ),
        ),
        files=("in_place/test_maps.py",),
    ),
    "a reversed view starts where it started": Mutant(
        (("_in_place/maps.py", "digit.start.moved(digit.size - digit.seen, factor=-1)", "digit.start.moved(0)"),),
        files=("in_place/test_maps.py",),
    ),
    "views that interleave are apart": Mutant(
        (
            (
                "_in_place/maps.py",
                "if any(a.max() < b.min() or b.max() < a.min() for a, b in pairs):",
                "if any(a.min() < b.min() or b.min() < a.min() for a, b in pairs):",
            ),
        ),
        files=("in_place/test_maps.py",),
    ),
    "a rotated view begins one row late": Mutant(
        (("_in_place/access.py", "jnp.where(at < np.int32(k), low, high)", "jnp.where(at <= np.int32(k), low, high)"),),
        files=("in_place/test_maps.py",),
    ),
    "a set of indices with gaps is a range": Mutant(
        (
            (
                "_in_place/access.py",
                "return self if self.order.max() + 1 == self.size else self.as_indices()",
                "return self",
            ),
        ),
        files=("in_place/test_maps.py",),
    ),
    "a version that is discarded is made in place": Mutant(
        (("_in_place/repair.py", "if self._is_of_discarded(eqn):", "if False:"),),
        files=("in_place/test_views.py",),
    ),
    "a choice by place is no version": Mutant(
        (("_in_place/views.py", " or (is_choice and is_of_places[0])", ""),),
        files=("in_place/test_views.py -k computed_alone",),
    ),
    "rows of a view are written in the order in which they are read": Mutant(
        (("_in_place/access.py", "own = np.argsort(flat) if is_inverse else flat", "own = flat"),),
        files=("in_place/test_maps.py",),
    ),
    "a buffer that a step reads as a whole is emptied by slices": Mutant(
        (
            (
                "_lowering/choice.py",
                "is_whole=if_any or (may_replace and _is_read_whole(scope, buffer))",
                "is_whole=if_any",
            ),
        ),
        files=("in_place/test_plain_programs.py -k moves_no_more",),
    ),
    "a guard hides its operand from the passes": Mutant(
        (("_lowering/expand.py", "elif eqn.primitive is ta_guard_p:", "elif False:"),),
        files=("in_place/test_plain_programs.py -k moves_no_more",),
    ),
    "reads of a step are not added": Mutant(
        (
            (
                "_loops/choosing.py",
                "unread -= bytes_of([eqn.outvars[0].aval])",
                "unread *= bytes_of([eqn.outvars[0].aval]) < unread",
            ),
        ),
        files=("in_place/test_gradient_memory.py -k part_by_part",),
    ),
    "rows that share the index of their example are apart": Mutant(
        (("_lowering/choice.py", "_axes_together(of_examples, batch_dims, shared) if is_one_box else 0", "0"),),
        files=("lowering/test_slices.py -k a_column_of_all_rows",),
    ),
    "rows of an example are together, whatever its mask": Mutant(
        (("_lowering/choice.py", "for x in (index, mask_of(eqn)) if x is not None]", "for x in (index,)]"),),
        files=("lowering/test_slices.py -k a_column_of_all_rows",),
    ),
    # Selects that put old rows back.
    "old rows are put back for the examples that keep the new ones": Mutant(
        (
            (
                "_in_place/selects.py",
                "return _undone(versions[0], versions, active.inverted(), became=",
                "return _undone(versions[0], versions, active, became=",
            ),
        ),
        ("plain",),
        files=(f"{CATALOGUE} -k parts",),
    ),
    "old rows are put back from the first to the last": Mutant(
        (
            (
                "_in_place/selects.py",
                "    for v in versions:\n        newest = newest.updated(v.update.undone",
                "    for v in reversed(versions):\n        newest = newest.updated(v.update.undone",
            ),
        ),
        ("plain",),
        files=("in_place/test_in_place_transform.py",),
    ),
    # States that start again.
    "the examples that go on start again": Mutant(
        (
            (
                "_in_place/selects.py",
                "for buffer, other, active in ((no, yes, predicate), (yes, no, predicate.inverted())):",
                "for buffer, other, active in ((no, yes, predicate.inverted()), (yes, no, predicate)):",
            ),
        ),
        files=(f"{CATALOGUE} -k starting_again",),
    ),
    "a buffer is emptied for the examples that keep it": Mutant(
        (
            (
                "_in_place/selects.py",
                "_written_over(buffer, other, active.inverted()) if is_kept",
                "_written_over(buffer, other, active) if is_kept",
            ),
        ),
        files=(f"{CATALOGUE} -k starting_again",),
    ),
    "a part of a cotangent has the derivative of the other branch": Mutant(
        (("_in_place/sums.py", "active.mask, has_derivative, has_own", "active.mask, has_own, has_derivative"),),
        files=("in_place/test_starting_again.py -k derivative_of_its_branch",),
    ),
    "a masked write of all rows has no index": Mutant(
        (
            (
                "_lowering/choice.py",
                "is_all = shape == () and tuple(window) == tuple(sizes) and not drops",
                "is_all = not drops",
            ),
        ),
        files=("lowering/test_slices.py -k all_rows_are_written",),
    ),
    # Indices that are computed again.
    "equations of other operands make the same index": Mutant(
        (
            ("_in_place/parts.py", "self.number(name, params, *own)", "self.number(name, params)"),
            (
                "_in_place/indices.py",
                "return are_alike and all(is_same(v, w, compared) for v, w in pairs)",
                "return are_alike",
            ),
        ),
        files=("in_place/test_rows_of_rows.py", "in_place/test_random_steps.py"),
    ),
    # Views.
    "a transposed view has the inverse permutation": Mutant(
        (
            (
                "_in_place/views.py",
                'm.transposed(eqn.params["permutation"])',
                'm.transposed(tuple(map(eqn.params["permutation"].index, range(len(of)))))',
            ),
        ),
        files=(f"{CATALOGUE} -k views",),
    ),
    # Rings.
    "a row past the end of a ring buffer is not wrapped": Mutant(
        (
            (
                "_in_place/access.py",
                "return jnp.where(place >= n, place - np.int32(n), place)",
                "return jnp.where(place > n, place - np.int32(n), place)",
            ),
        ),
        files=("in_place/test_maps.py", f"{CATALOGUE} -k registers"),
    ),
    "rows that have moved within a ring buffer stay where they were": Mutant(
        (
            (
                "_in_place/rings.py",
                "stays = _is_same(piece.of, best.of) and (piece.first - q - best.first + at) % ring.n == 0",
                "stays = _is_same(piece.of, best.of)",
            ),
        ),
        files=(f"{CATALOGUE} -k registers",),
    ),
    "a select of ring buffers keeps the start of the first": Mutant(
        (
            (
                "_in_place/rings.py",
                "    if all(x.start is rings[0].start for x in rings):\n        return",
                "    if True:\n        return",
            ),
        ),
        files=(f"{CATALOGUE} -k registers", "in_place/test_random_steps.py"),
    ),
    # Layouts.
    "rows of a permuted buffer have the inverse permutation": Mutant(
        (("_in_place/layouts.py", ".transposed(self.order)", ".transposed(self.back)"),),
        files=(f"{CATALOGUE} -k layouts",),
    ),
    "a buffer begins in the inverse layout": Mutant(
        (("_in_place/layouts.py", "return jnp.transpose(x, self.back)", "return jnp.transpose(x, self.order)"),),
        files=(f"{CATALOGUE} -k layouts",),
    ),
    # Twins.
    "carries that begin equal stay equal": Mutant(
        (("_in_place/twins.py", "_firsts(list(zip(first, after, strict=False))), _Step", "first, _Step"),),
        ("plain",),
        files=("in_place/test_twins.py",),
    ),
    "equal equations with effects run once": Mutant(
        (
            (
                "_in_place/twins.py",
                "if eqn.effects or not all(key in self.made for key in keys):",
                "if not all(key in self.made for key in keys):",
            ),
        ),
        files=("in_place/test_twins.py",),
    ),
    # Stacks.
    "all examples update the slice of the first": Mutant(
        (
            (
                "_in_place/stacks.py",
                "examples = [lax.broadcasted_iota(np.int32, shape, k) for k in range(b)]",
                "examples = [lax.full(shape, 0, np.int32) for k in range(b)]",
            ),
        ),
        files=(f"{CATALOGUE} -k stacks",),
    ),
    # Undo and tapes.
    "a buffer is restored from a place that it does not have before the step": Mutant(
        (("_loops/undo.py", "if r in slots and s in slot_of}, None", "}, None"),),
        ("ops", "plain"),
        files=("loops/test_residuals.py",),
    ),
    "a row that a step of an inner loop overwrites first is not put back": Mutant(
        (("_loops/log.py", "for n in reversed(self.of_carry[k]):", "for n in reversed(self.of_carry[k][1:]):"),),
        files=("in_place/test_gradient_memory.py -k put_back",),
    ),
    "rows are put back by the branches that have not run": Mutant(
        (("_loops/log.py", "        has_entry, *rows = rows\n", "        has_entry, *rows = ~rows[0], *rows[1:]\n"),),
        files=("in_place/test_gradient_memory.py -k put_back",),
    ),
    "rows of one update are put back in the order in which they were written": Mutant(
        (("_loops/log.py", '{"reverse": not params["reverse"]}', '{"reverse": params["reverse"]}'),),
        files=("in_place/test_gradient_memory.py -k put_back",),
    ),
    "a log has zeros of NumPy for a branch that has not run": Mutant(
        (
            (
                "_loops/log.py",
                "*(jnp.zeros(t.shape, t.dtype) for t in self.types)",
                "*(jnp.asarray(np.zeros(t.shape, t.dtype)) for t in self.types)",
            ),
            ("_loops/log.py", "import jax.numpy as jnp\n", "import jax.numpy as jnp\nimport numpy as np\n"),
        ),
        files=("loops/test_loops_in_loops.py -k keys",),  # NumPy has no random keys
    ),
    "tapes are filled with zeros": Mutant(
        (("_loops/tapes.py", "else empty_like(aval) for", "else jnp.zeros(aval.shape, aval.dtype) for"),),
        files=("loops/test_loops_in_place.py -k memory",),
    ),
    "a tape of a tape gets all rows of it": Mutant(
        (("_loops/tapes.py", "residual, largest(residuals[n]))", "residual, jnp.int32(residual.shape[0]))"),),
        files=("loops/test_loops_in_place.py -k memory",),
    ),
    # Batching rules.
    "all examples have the index of the first": Mutant(
        (
            (
                "_ops/primitive.py",
                "    operands = map(to_front, args, dims, sizes)\n    out = primitive.bind(*operands",
                "    buffer, index, *rest = map(to_front, args, dims, sizes)\n"
                "    out = primitive.bind(buffer, index[:1], *rest",
            ),
        ),
        ("ops:vmap",),
        files=("ops/test_starts.py",),
    ),
    "rows of a shared buffer come with the examples last": Mutant(
        (
            (
                "_ops/read.py",
                "**batched_params(params, dims[1], new_axes=0)), at",
                "**batched_params(params, dims[1], new_axes=0)), -1",
            ),
        ),
        ("ops:vmap",),
        files=("ops/test_starts.py",),
    ),
    "the batch axis of an operand is taken for the first": Mutant(
        (("_ops/primitive.py", "if dim is None else jnp.moveaxis(x, dim, 0)", "if dim is None else x"),),
        files=("ops/test_starts.py",),
    ),
    # Plain JAX, and ops without an index.
    "plain JAX reads the first row where there is none": Mutant(
        (
            (
                "_ops/reference.py",
                "return jnp.where(is_inside, buffer[at], jnp.zeros((), buffer.dtype))",
                "return buffer[at]",
            ),
        ),
        files=("ops/test_reference.py", "ops/test_starts.py -k plain_jax"),
    ),
    "plain JAX visits positions forward in reverse": Mutant(
        (("_ops/reference.py", "buffer, flat, reverse=reverse)", "buffer, flat)"),),
        files=("ops/test_reference.py", "ops/test_starts.py -k plain_jax"),
    ),
    "plain JAX keeps the row at the size": Mutant(
        (
            (
                "_ops/reference.py",
                "keep = jnp.arange(buffer.shape[0]) < _bound",
                "keep = jnp.arange(buffer.shape[0]) <= _bound",
            ),
        ),
        files=("ops/test_clear.py -k magnitude", "ops/test_starts.py -k plain_jax"),
    ),
    "plain JAX clears the row at the end, too": Mutant(
        (
            (
                "_ops/reference.py",
                "lax.fori_loop(first[batch], last[batch], clear_row, rows)",
                "lax.fori_loop(first[batch], last[batch] + 1, clear_row, rows)",
            ),
        ),
        files=("ops/test_clear.py -k magnitude", "ops/test_starts.py -k plain_jax"),
    ),
    "a bound is narrowed before it is compared": Mutant(
        (
            (
                "_ops/reference.py",
                "row = jnp.clip(at, 0, min(size, jnp.iinfo(at.dtype).max))",
                "row = jnp.clip(at.astype(jnp.int32), 0, size)",
            ),
        ),
        files=("ops/test_clear.py -k magnitude",),
    ),
    "rows past the size get a cotangent": Mutant(
        (("_ops/stack.py", "return [ta_stack_p.bind(ct, size, **params), None]", "return [ct, None]"),),
        files=("ops/test_starts.py -k transpose",),
    ),
    "rows that are cleared get a cotangent": Mutant(
        (
            (
                "_ops/clear.py",
                "return [ta_clear_p.bind(ct, start, stop, **params), None, None]",
                "return [ct, None, None]",
            ),
        ),
        files=("ops/test_starts.py -k transpose",),
    ),
    "a value is broadcast from its first axis": Mutant(
        (
            (
                "_ops/arguments.py",
                "    return jnp.broadcast_to(array, shape)\n",
                "    return jnp.broadcast_to(array.reshape(*array.shape, *[1] * (len(shape) - array.ndim)), shape)\n",
            ),
        ),
        files=("ops/test_addressing.py -k numpy_says --all",),
    ),
    "a loop without steps raises what one step would": Mutant(
        (
            (
                "_lowering/record.py",
                '"op": "record", "ops": ops, "effect": True}',
                '"op": "record", "ops": ops, "effect": False}',
            ),
        ),
        files=("ops/test_index_errors.py -k no_steps",),
    ),
    # Loops, branches and rules of a batch, whose examples end or branch by themselves.
    "an example that has ended a loop takes a branch in it": Mutant(
        (("_loops/masking.py", "Masker(self.active & (index == b))", "Masker(index == b)"),),
        files=(f"{CATALOGUE} -k left_one_by_one",),
    ),
    "an example that has ended runs what is the same in every step, and raises": Mutant(
        (("_loops/masking.py", "if is_once and not jaxprs.may_raise(eqn)", "if is_once"),),
        files=("loops/test_under_vmap.py -k does_not_raise",),
    ),
    "a mask makes each step run a loop that is the same in all": Mutant(
        (("_loops/masking.py", "if eqn.effects or not all(x.is_invariant for x in operands):", "if True:"),),
        files=("loops/test_under_vmap.py -k same_in_every_step_runs",),
    ),
    "a mask of `in_place` makes each step run a loop that is the same in all": Mutant(
        (("_in_place/repair.py", "self.of_loop() if is_same else self", "self"),),
        files=("loops/test_under_vmap.py -k same_in_every_step_runs",),
    ),
    "a mask makes each step run an update that is the same in all": Mutant(
        (("_loops/masking.py", " or updates_rows(eqn.primitive)\n        run", "\n        run"),),
        files=("in_place/test_starting_again.py -k same_in_every_step",),
    ),
    "a sum of all rows takes an update that XLA makes before the loop": Mutant(
        (("_in_place/sums.py", "(some.is_invariant or _is_padded(whole))", "_is_padded(whole)"),),
        files=("in_place/test_starting_again.py -k same_in_every_step",),
    ),
    "a buffer that goes on is written over with another": Mutant(
        (("_in_place/selects.py", "        if buffer.is_needed:\n            continue\n", ""),),
        files=("in_place/test_starting_again.py -k goes_on",),
    ),
    "an update is fused with the arithmetic before it": Mutant(
        (("_lowering/slices.py", "if not how.at_once and buffer in self.computed:", "if False:"),),
        files=("lowering/test_slices.py -k not_fused_with",),
    ),
    "arithmetic is done again for the row that an update reads": Mutant(
        (
            (
                "_lowering/slices.py",
                "self.computed.update(eqn.outvars)\n            self.duplicated.update(eqn.outvars)",
                "pass",
            ),
        ),
        files=("in_place/test_whole_arrays.py -k done_again",),
    ),
    "a call is given arithmetic": Mutant(
        (("_lowering/slices.py", "rewriter.set_apart(eqn)\n", "pass\n"),),
        files=("in_place/test_whole_arrays.py -k done_again",),
    ),
    "a long step updates several rows by slices": Mutant(
        (("_lowering/choice.py", "most = 1 if needs_threads else most", "pass"),),
        files=("lowering/test_slices.py -k threads",),
    ),
    "a large step updates several rows of small floats by slices": Mutant(
        (("_lowering/choice.py", "<= self.most_slices and not needs_threads)", "<= self.most_slices)"),),
        files=("lowering/test_slices.py -k threads",),
    ),
    "a short call stays": Mutant(
        (("_lowering/expand.py", "_FEW = 10", "_FEW = 0"),),
        files=("lowering/test_slices.py -k what_computes",),
    ),
    "only the common functions are arithmetic": Mutant(
        (
            (
                "_jaxprs/kinds.py",
                "COMPUTES = ARITHMETIC | (FUSED - MOVES - FILLS - UNINITIALISED - WHOLE)",
                "COMPUTES = ARITHMETIC",
            ),
        ),
        files=("lowering/test_slices.py -k what_computes",),
    ),
    "a large step computes in its own jaxpr only": Mutant(
        (
            (
                "_lowering/choice.py",
                'if eqn.primitive.name == "while" else inner_scopes(at, eqn)',
                "if True else inner_scopes(at, eqn)",
            ),
        ),
        files=("lowering/test_slices.py -k threads",),
    ),
    "a checkpoint returns no operand": Mutant(
        (("_in_place/repair.py", "if self.returns_operands else ()", "if False else ()"),),
        files=("in_place/test_whole_arrays.py -k unchanged",),
    ),
    "each reshape of a buffer has parts of its own": Mutant(
        (("_in_place/views.py", "else in_parts[out]", "else 0"),),
        files=("in_place/test_catalogue.py -k second",),
    ),
    "what is transposed twice is an updated part": Mutant(
        (("_in_place/parts.py", "and (buffer.is_updated or not buffer.map.is_whole)", ""),),
        files=("in_place/test_parts.py -k twice",),
    ),
    "updates are fused with the arithmetic after them": Mutant(
        (("_lowering/slices.py", "self._is_fused_with_reader(eqn, x)", "False"),),
        files=("lowering/test_slices.py -k no_fusion",),
    ),
    "a small array is updated again where it is read": Mutant(
        (("_lowering/slices.py", "x.aval.size >= _gates.APART_ELEMENTS if self.is_on_cpu else ", ""),),
        files=("lowering/test_slices.py -k updated_once",),
    ),
    "updates of examples are fused with the arithmetic after them": Mutant(
        (("_lowering/slices.py", "is_one and _has_whole_rows(update)", "_has_whole_rows(update)"),),
        files=("in_place/test_whole_arrays.py -k no_fusion",),
    ),
    "columns of zeros are fused with the arithmetic after them": Mutant(
        (("_lowering/slices.py", "is_one and _has_whole_rows(update)", "is_one"),),
        files=("lowering/test_slices.py -k few_whole_rows",),
    ),
    "many rows of zeros are fused with the arithmetic after them": Mutant(
        (("_lowering/slices.py", "_gates.FUSED_UPDATES if are_rows else 1", "math.inf if are_rows else 1"),),
        files=("lowering/test_slices.py -k few_whole_rows",),
    ),
    "a read of an updated buffer makes the update wait for its own rows": Mutant(
        (("_lowering/uses.py", "self.barriers_hold and use.eqn.primitive is ta_read_p", "False"),),
        files=("lowering/test_slices.py -k column_is_read",),
    ),
    "the parts of a rolled array have a cotangent each": Mutant(
        (("_in_place/repair.py", "Left() if _only_moves(inner, operands) else ", ""),),
        files=("in_place/test_whole_arrays.py -k rolled",),
    ),
    "rows are added to what a step pads": Mutant(
        (("_in_place/sums.py", "(some.is_invariant or _is_padded(whole))", "some.is_invariant"),),
        files=("in_place/test_whole_arrays.py -k driven",),
    ),
    "a part behind the end of a line has a negative length": Mutant(
        (
            (
                "_in_place/rings.py",
                "(min(max(k - at, 0), piece.length) for k in (first, first + length))",
                "(max(first - at, 0), min(first + length - at, piece.length))",
            ),
        ),
        files=("in_place/test_registers.py -k stencil",),
    ),
    "an update of zeros is stored before a row of it is read": Mutant(
        (("_lowering/slices.py", "(not is_of_one_number or (several and self.is_on_cpu))", "True"),),
        files=("lowering/test_slices.py -k one_hot",),
    ),
    "a loop that is the same in all steps waits for a read": Mutant(
        (("_lowering/ordering.py", "if scope.is_invariant(block.eqns[owner]):", "if False:"),),
        files=("lowering/test_ordering.py -k same_in_every_step",),
    ),
    "branches of examples hand on no buffer": Mutant(
        (
            (
                "_loops/masking.py",
                "    agreed = [v.pop() if len(v) == 1 else None for v in numbers]",
                "    agreed = [None for v in numbers]",
            ),
        ),
        files=("loops/test_under_vmap.py -k in_place",),
    ),
    "buffers that a scan exchanges are versions of themselves": Mutant(
        (("_loops/masking.py", "[x.carry if change.carries[k] == k else None for", "[x.carry for"),),
        files=("loops/test_under_vmap.py -k exchanges",),
    ),
    "a carry that no result depends on is differentiated": Mutant(
        (("_loops/while_.py", "    if not options.strategy.tapes:\n        params", "    if True:\n        params"),),
        ("ops:grad",),
    ),
    # Transposes.
    "exchanges are undone first to last": Mutant(
        (("_ops/swap.py", '{"reverse": not params["reverse"]}', '{"reverse": params["reverse"]}'),),
        ("ops:grad",),
        files=("ops/test_starts.py",),
    ),
    "the first of several writes of a row gets the gradient": Mutant(
        (("_ops/write.py", '{"reverse": not params["reverse"]}', '{"reverse": params["reverse"]}'),),
        ("ops:grad",),
        files=("ops/test_starts.py",),
    ),
    "values that share a maximum get all of the gradient each": Mutant(
        (("_ops/max.py", "/ ties.astype(dot.dtype)", "/ jnp.ones_like(ties).astype(dot.dtype)"),),
        ("ops:grad",),
        files=("ops/test_max.py",),
    ),
    # Bounds of indices.
    "a remainder is never negative": Mutant(
        (
            (
                "_lowering/bounds.py",
                "(0, min(x[1], y[1] - 1)) if x[0] >= 0 and y[0] > 0 else None",
                "(0, min(x[1], y[1] - 1)) if y[0] > 0 else None",
            ),
        ),
        ("passes:forward",),
        files=("lowering/test_bounds.py",),
    ),
    "a counter after the last step is what it was in that step": Mutant(
        (("_lowering/bounds.py", "by * max(most - in_step, 0)", "by * max(most - 1, 0)"),),
        ("passes:forward",),
        files=("lowering/test_bounds.py",),
    ),
    "a number that wraps has the bounds of one that does not": Mutant(
        (
            (
                "_lowering/bounds.py",
                "return bounds if bounds is not None and info.min <= bounds[0] and bounds[1] <= info.max else None",
                "return bounds",
            ),
        ),
        files=("lowering/test_bounds.py",),
    ),
    "a kept value of half precision is rounded only in memory": Mutant(
        (("_loops/undo.py", "_rounded(x) if v in rounded else x", "x"),),
        files=("in_place/test_gradient_memory.py",),
    ),
    # Arrays.
    "a scatter of rows of different shapes ignores its mask": Mutant(
        (("_array/ragged.py", "where if where is None else where[k], mode", "None, mode"),),
        files=("array/test_tensorarray_machine.py",),
    ),
    "a masked pop changes the size": Mutant(
        (
            (
                "_array/stacked.py",
                'new_size = at if where is None and mode != "drop" else jnp.where(at < 0, size, at)',
                "new_size = at",
            ),
        ),
        files=("array/test_tensorarray.py",),
    ),
    "a loop makes room for one row of each step": Mutant(
        (
            (
                "_array/in_loops.py",
                "else steps * max(new - old, 0) + max(most - max(new, old), 0)",
                "else steps + max(most - max(new, old), 0)",
            ),
        ),
        files=("array/test_sizes.py",),
    ),
    "rows from before a loop have no room in it": Mutant(
        (("_array/in_loops.py", "min(x._rows.live() + more,", "min(more,"),),
        files=("array/test_sizes.py",),
    ),
    # Loops that are run again.
    "a step of a reversed scan that is run again is that of another": Mutant(
        (
            (
                "_loops/as_while.py",
                "return (n + 1, *f(steps - 1 - n if reverse else n, *carry))",
                "return (n + 1, *f(n, *carry))",
            ),
        ),
        files=("loops/test_loops_in_loops.py",),
    ),
    "a checkpoint says that it is of the step after": Mutant(
        (("_loops/checkpoint.py", "[start + by, *carry]", "[start + by + 1, *carry]"),),
        files=("loops/test_loops_in_loops.py",),
    ),
    # Order of reads, and the record of indices.
    "an update waits for no read before it": Mutant(
        (("_lowering/ordering.py", "                readers.append(k)\n", "                pass\n"),),
        files=("lowering/test_passes.py -k rows_are_read",),
    ),
    "a loop that updates a buffer gets no fence": Mutant(
        (
            (
                "_lowering/ordering.py",
                "                    block.fence(owner, value, results)\n",
                "                    pass\n",
            ),
        ),
        files=("lowering/test_ordering.py -k fence",),
    ),
    "a buffer that a branch returns is read without a barrier": Mutant(
        (
            (
                "_lowering/ordering.py",
                "        if not isinstance(self.scope.role, int):\n            return False\n",
                "        return False\n",
            ),
        ),
        files=(f"{CATALOGUE} -k histories",),
    ),
    "a factor that grows stays by rows": Mutant(
        (("_lowering/columns.py", "    if not jaxprs.any_equation(jaxpr, _solves):\n", "    if True:\n"),),
        files=(f"{CATALOGUE} -k factor",),
    ),
    "the last index out of range is said": Mutant(
        (("_lowering/record.py", "lax.bitwise_and(outside, lax.eq(record[0], np.int64(0)))", "outside"),),
        files=("lowering/test_passes.py -k is_said",),
    ),
    "an index that is masked is out of range": Mutant(
        (("_lowering/record.py", "(rest[0], rest[1:]) if masked", "(None, rest[1:]) if masked"),),
        files=("lowering/test_passes.py -k is_said",),
    ),
    # Slices.
    "a slice ignores its mask": Mutant(
        (
            (
                "_lowering/slicing.py",
                "new = new if access.mask is None else lax.select(access.mask, new, old)",
                "new = new",
            ),
        ),
        ("passes",),
    ),
    "slices of positions that are visited in reverse go forward": Mutant(
        (
            (
                "_lowering/slicing.py",
                "for access in reversed(accesses) if how.reverse else accesses",
                "for access in accesses",
            ),
        ),
        ("passes",),
    ),
    "a scatter of many rows ignores its mask": Mutant(
        (("_lowering/slicing.py", "if self.mask is not None:  # XLA skips", "if False:  # XLA skips"),),
        files=("ops/test_starts.py",),
    ),
    "a scatter of many rows goes forward in reverse": Mutant(
        (
            (
                "_lowering/slicing.py",
                "        if how.reverse:\n            start = lax.rev",
                "        if False:\n            start = lax.rev",
            ),
        ),
        files=("ops/test_starts.py",),
    ),
    # Indices that are checked.
    "a checked index of an example is never an error": Mutant(
        (
            (
                "_ops/check.py",
                "mode = batched_mode(mode, is_batched=any(d is not None for d in dims[:2]))",
                'mode = "drop" if any(d is not None for d in dims[:2]) else mode',
            ),
        ),
        files=("ops/test_index_errors.py",),
    ),
    # Effects, batches, transposes, tapes on the host.
    "the effects of a bounded loop are forgotten": Mutant(
        (
            (
                "_loops/while_.py",
                "*([steps] if options.returns_steps else [])], _effects(cond, body)",
                "*([steps] if options.returns_steps else [])], set()",
            ),
        ),
        files=("loops/test_loops_beside_jax.py",),
    ),
    "rows of a shared buffer come by the first axis in a batch of batches": Mutant(
        (("_ops/read.py", 'at = params["batch_dims"]\n', "at = 0\n"),),
        files=("ops/test_starts.py",),
    ),
    "a masked row that is not read gets a cotangent": Mutant(
        (
            (
                "_ops/read.py",
                "return ta_add_p.bind(running, index, ct, *where, **params)",
                "return ta_add_p.bind(running, index, ct, **params)",
            ),
        ),
        files=("ops/test_starts.py",),
    ),
    "the tangent of a row on the host is that of the first row": Mutant(
        (
            (
                "_loops/host.py",
                "return out, ta_host_read(tangents[0], step, **params)",
                "return out, ta_host_read(tangents[0], step * 0, **params)",
            ),
        ),
        files=("loops/test_loops_in_loops.py",),
    ),
    # The doctor.
    "the branches of a conditional are not searched for copies": Mutant(
        (
            (
                "_hlo/text.py",
                "return [*_CALLED.findall(self.attributes), *branches]",
                "return _CALLED.findall(self.attributes)",
            ),
        ),
        files=("doctor/test_hlo.py -k copies_are",),
    ),
    "an update of an array of zeros is in place": Mutant(
        (("_hlo/text.py", 'return i.opcode == "parameter" and updates > 0', "return updates > 0"),),
        files=("doctor/test_hlo.py -k zeros",),
    ),
    "a choice of each example is taken for one of the program": Mutant(
        (
            (
                "doctor/_copies.py",
                'return "batched-choice" if any("vmap(" in name for name in names) else "whole-select"',
                'return "whole-select"',
            ),
        ),
        files=("doctor/test_messages.py -k batched-choice",),
    ),
    "a buffer that is carried twice is said to change places": Mutant(
        (
            (
                "_hlo/buffers.py",
                'place = "carried-twice" if finding.buffer in twice else',
                'place = "changes-places" if finding.buffer in twice else',
            ),
        ),
        files=("doctor/test_messages.py -k carried-twice",),
    ),
    "a line is listed for every program that has it": Mutant(
        (("doctor/_report.py", "seen |= {finding.key for finding in new if finding.file}", "seen |= set()"),),
        files=("doctor/test_arguments.py -k listed_once",),
    ),
    "the line of a primitive is in the library that binds it": Mutant(
        (
            (
                "doctor/_copies.py",
                "lines[next(itertools.chain(from_outside, ",
                "lines[0 * next(itertools.chain(from_outside, ",
            ),
        ),
        files=("doctor/test_loop_copies.py -k primitive_of_a_library",),
    ),
    "an argument that changes as a whole is said to be copied": Mutant(
        (("_hlo/arguments.py", "version.changed < _FEW * size", "version.changed <= 2 * size"),),
        files=("doctor/test_arguments.py -k something_else",),
    ),
    "a loop from 1 to n has a quarter of n steps": Mutant(
        (("doctor/_quarter.py", "return n - self.steps + self.steps // 4", "return self.steps // 4"),),
        files=("doctor/test_growth.py -k quarter_of",),
    ),
    "a gradient keeps all steps in each step": Mutant(
        (("doctor/_kept.py", "shape=aval.shape[1:],", "shape=aval.shape,"),),
        files=("doctor/test_growth.py -k rows_that",),
    ),
}


def main(args: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of the names of mutants")
    parser.add_argument("--file", action="append", default=[], help="run this file or folder of tests/, no programs")
    parser.add_argument("--most", type=int, default=MOST, help=f"of random programs for a mutant; {MOST} if not given")
    parser.add_argument("--save", action="store_true", help=f"write what was found into {PAGE.relative_to(ROOT)}")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--unchanged", type=int, metavar="N", help="run N programs on the package as it is")
    parser.add_argument("--programs", nargs="*", default=EVERYTHING, help="as in MUTANTS, for --unchanged")
    parser.add_argument("--by", default="numpy", help="as in MUTANTS, for --unchanged")
    given = parser.parse_args(args)
    if given.unchanged is not None:
        found = by_programs(Mutant((), tuple(given.programs), given.by), given.seed, given.unchanged)
        print(found)
        return int(found["noticed"])
    stored = read()
    survived, alone = list[str](), list[str]()
    for name, mutant in MUTANTS.items():
        if given.names and not any(part in name for part in given.names):
            continue
        found = stored.setdefault(name, {"files": {}})
        noticed = False
        if mutant.programs and not given.file:
            found["programs"] = by_programs(mutant, given.seed, given.most)
            noticed = found["programs"]["noticed"]
            print(f"{name}: {found['programs']}", flush=True)
        for file in given.file or ([] if noticed else mutant.files):
            found["files"][file] = test = by_tests(mutant, file)
            noticed |= bool(test)
            print(f"{name}: {file}: {test or 'notices nothing'}", flush=True)
        survived += [] if noticed else [name]
        alone += [name] if noticed and not found.get("programs", {}).get("noticed", False) else []
        if given.save:
            save(stored)
    for what, names in (("noticed, but not by random programs", alone), ("survived", survived)):
        print(f"{what}: {'; '.join(names) or 'none'}")
    return int(bool(survived))


# --- what is stored ----------------------------------------------------------------------------------------------


def read() -> dict[str, Any]:
    """Return for each mutant what has noticed it, as far as it was looked for."""
    stored: dict[str, Any] = json.loads(RESULTS.read_text())["mutants"] if RESULTS.exists() else {}
    return {name: stored[name] for name in MUTANTS if name in stored}


def save(stored: Mapping[str, Any]) -> None:
    import jax

    made = {"jax": jax.__version__, "cores": os.cpu_count(), "date": str(datetime.date.today()), "cpu": None}
    ordered = {name: stored[name] for name in MUTANTS if name in stored}
    RESULTS.write_text(json.dumps({**made, "mutants": ordered}, indent=1) + "\n")
    PAGE.write_text(written(PAGE.read_text(), ordered))


def is_noticed(found: Mapping[str, Any]) -> bool:
    """Return whether a random program or a test has noticed a mutant."""
    return found.get("programs", {}).get("noticed", False) or any(found["files"].values())


def written(page: str, stored: Mapping[str, Any]) -> str:
    """Return the page with the table of what has noticed each mutant."""
    before, _, rest = page.partition(BEGIN)
    lines = ["| mutant | in | random programs | tests |", "|---|---|--:|---|"]
    for name, found in stored.items():
        programs = found.get("programs")
        after = "" if programs is None else f"{'' if programs['noticed'] else 'none of '}{programs['number']}"
        tests = [f"`{file}`" for file, test in found["files"].items() if test]
        files = ", ".join(dict.fromkeys(f"`{file}`" for file, _, _ in MUTANTS[name].edits))
        lines.append(f"| {name} | {files} | {after} | {', '.join(tests)} |")
    table = "\n".join(lines)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}"


# --- a mutant, and what notices it -------------------------------------------------------------------------------


@contextlib.contextmanager
def mutated(mutant: Mutant) -> Iterator[Path]:
    """Give a folder with the package as the mutant has it, and with all that tests need beside it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in ROOT.iterdir():
            if path.name in ("jax_tensorarray", "tests"):
                shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
            elif path.is_file():
                shutil.copy(path, folder)
            elif not path.name.startswith(".") and path.name != "build":
                (folder / path.name).symlink_to(path)
        for file, old, new in mutant.edits:
            path = folder / "jax_tensorarray" / file
            text = path.read_text()
            if old not in text:
                raise SystemExit(f"mutants: {file} has no {old!r} any more")
            path.write_text(text.replace(old, new))
        yield folder


def by_programs(mutant: Mutant, seed: int, most: int) -> dict[str, Any]:
    """Return how many random programs ran until one has noticed the mutant, and whether one has."""
    with mutated(mutant) as folder:
        call = f"import mutants; mutants.run({str(folder)!r}, {mutant.programs!r}, {seed}, {most})"
        env = os.environ | {"PYTHONPATH": str(ROOT / "tools")} | ({"RANDOM_PROGRAMS": mutant.by} if mutant.by else {})
        done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, env=env)
    if done.returncode < 0:
        return {"number": None, "noticed": True, "how": f"the process was ended by signal {-done.returncode}"}
    if done.returncode:
        raise SystemExit(f"mutants: the programs could not be run: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def by_tests(mutant: Mutant, file: str) -> str:
    """Return the first test of a file or a folder that fails with a mutant, "" if none does."""
    with mutated(mutant) as folder:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "--no-header", "--tb=no"]
        command += ["-p", "no:cacheprovider", *f"tests/{file}".split()]
        paths = [str(folder), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env)
    if done.returncode == 0:
        return ""
    if done.returncode < 0:
        return f"the process was ended by signal {-done.returncode}"
    failed = re.search(r"^(?:FAILED|ERROR) \S*?::(\w+)", done.stdout, re.MULTILINE)
    if failed is None:
        raise SystemExit(f"mutants: {file} could not be run: {done.stdout[-2000:]} {done.stderr[-2000:]}")
    return failed[1]


# --- in a process of its own -------------------------------------------------------------------------------------


def run(folder: str, programs: Sequence[str], seed: int, most: int) -> None:
    """Run random programs with the package in a folder until one fails, and print how many."""
    sys.path[:0] = [folder, *(f"{folder}/tests/{name}" for name in ("support", "ops", "in_place", "lowering"))]
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1")
    import logging
    import warnings

    import jax

    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_num_cpu_devices", 8)
    warnings.simplefilter("error")
    logging.disable(logging.CRITICAL)

    checks, count, failures = list(_checks(programs)), 0, list[str]()
    while count < most and not failures:
        for name, check in checks:
            for example in _examples(seed):
                count += 1
                try:
                    check(*example)
                except Exception as error:
                    failures.append(f"{name}: {type(error).__name__} {' '.join(str(error).split())[:150]}\n{example}")
                    break
            seed += 1
            if failures or count >= most:
                break
        jax.clear_caches()  # after each round: programs that are kept fill the memory
    if failures:
        print(failures[0], file=sys.stderr)
    how = failures[0].splitlines()[0] if failures else ""
    print(json.dumps({"number": count, "noticed": bool(failures), "how": how}))


def _checks(programs: Sequence[str]) -> Iterator[tuple[str, Callable[..., None]]]:
    files = {"ops": "test_random_programs", "plain": "test_plain_programs", "passes": "test_passes"}
    modules = {kind: import_module(name) for kind, name in files.items()}
    gates = import_module("gates")
    for text in programs:
        kind, _, chosen = text.partition(":")
        module = modules[kind]
        every = module.ORDERS if kind == "plain" else module.TRANSFORMATIONS
        for name in chosen.split("|") if chosen else every:
            if os.environ.get("RANDOM_PROGRAMS") == "numpy" and (kind, name) in _ONLY_COMPILED:
                continue

            # In every other program of ops an index that is out of range is dropped.
            def check(
                program: Any,
                differ: Any,
                axis: int,
                setting: str,
                module: Any = module,
                name: str = name,
                is_of_ops: bool = kind == "ops",
            ) -> None:
                with gates.gates(setting):
                    module.check(name, program, *differ, axis, *([program.start % 2 == 0] if is_of_ops else []))

            yield f"{kind}, {name}", check


#: What NumPy cannot evaluate.
_ONLY_COMPILED = {
    *(("ops", name) for name in ("eager", "donation")),
    *(("plain", name) for name in ("token", "devices", "auto axes", "debug nans", "64 bits inside")),
}


def _examples(seed: int) -> list[Any]:
    checks, programs, gates = map(import_module, ("random_checks", "random_programs", "gates"))
    sampled = programs.st.sampled_from
    found: list[Any] = programs.examples(
        seed, programs.programs(), checks.BATCHES, sampled([0, 1, 2]), sampled(gates.SETTINGS)
    )
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
