"""The interpreter of `in_place`: evaluate a jaxpr by rules that make row ops of operations on rows.

A rule maps an equation and the values of its operands to the values of its results. Parts that are put back and
discarded versions come before the rules (`parts`, `views.discarded`). If no rule applies, the result may be a view
whose rows are read (`views.view`). Else the equation stays as it is.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core as jex
from jax.extend.core import Jaxpr

from jax_tensorarray import _compat, _contexts
from jax_tensorarray._in_place import (
    explained,
    factors,
    indices,
    layouts,
    masks,
    off,
    parts,
    patterns,
    registers,
    rows,
    selects,
    sums,
    twins,
    views,
)
from jax_tensorarray._in_place.values import (
    Difference,
    Left,
    Predicate,
    Value,
    arrays,
    as_written,
    elements,
    is_weak,
    with_type,
)
from jax_tensorarray._jaxprs import foreign, jaxprs, kinds, refs, registry
from jax_tensorarray._loops import choosing
from jax_tensorarray._loops.strategy import Strategy, Tape
from jax_tensorarray._ops.primitive import ROW_OPS
from jax_tensorarray._types import Array, Equation
from jax_tensorarray.checkpoint_policies import save_reads

Rule = Callable[[Any, Sequence[Value]], list[Value] | Left]

#: Loops of JAX by the rules for them, which `control` adds. A rule removes from `added` the sums that it performs.
LOOPS: "dict[str, Callable[[Repair, Any, Sequence[Value], dict[int, Value]], list[Value]]]" = {}

#: By primitive, the rules to try, in this order.
RULES: dict[str, list[Rule]] = {}
for family in (rows.RULES, masks.RULES, selects.RULES, sums.RULES, factors.RULES):
    for name, rule in family.items():
        RULES.setdefault(name, []).append(rule)


class Request(NamedTuple):
    """The options of `in_place`."""

    max_steps: int | None
    residuals: Strategy
    strict: bool = False  #: whether faults of this library are errors


class Repair:
    """An evaluator of jaxprs. Rows matter in loops, where work on all of them is repeated in every step.

    Examples whose `active` is false have finished the loop around them: the values that they compute do not matter.
    """

    def __init__(self, request: Request, *, in_loop: bool = False, active: Array | None = None) -> None:
        self.request, self.in_loop, self.active = request, in_loop, active
        #: See `parts.put_together`: variables of what is evaluated, and of what it inlines.
        self.put_together: dict[Any, parts.Step] = {}
        #: See `views.discarded`: versions of a buffer, here and in what is inlined, that XLA need not make.
        self.discarded = set[Any]()

    def evaluate(self, jaxpr: Jaxpr, inputs: Sequence[Value], known: Mapping[Any, Value] | None = None) -> list[Value]:
        """Return the outputs, given the inputs and perhaps what is known of other variables."""
        inner = _compat.opened(jaxpr)
        values = dict(zip(inner.constvars, map(Value.given, jaxpr.consts), strict=True))
        for x in (*values.values(), *(known or {}).values()):
            x.is_invariant = True
        values.update(zip(inner.invars, inputs, strict=True))
        values.update(known or {})
        moved = sums.moved_into(inner) if self.in_loop else {}
        viewed = views.viewed(inner, patterns.masks_among(inner.invars, inputs)) if self.in_loop else set()
        used = selects.used_in(inner) if self.in_loop else frozenset()
        needed = selects.needed_in(inner) if self.in_loop else frozenset()
        computed_with = views.computed_with(inner) if self.in_loop else frozenset()
        for v, x in zip(inner.invars, inputs, strict=True):
            x.is_needed |= v in needed
            x.is_computed_with |= v in computed_with
        if self.in_loop:
            self.put_together.update(parts.put_together(inner))
            self.discarded |= views.discarded(inner)

        def read(v: Any) -> Value:
            return Value.of_literal(v) if isinstance(v, jex.Literal) else values[v]

        for eqn in inner.eqns:
            if eqn.outvars and all(v in values for v in eqn.outvars):
                continue  # known, or a sum that is done inside of another equation
            added = {s.number: read(s.other) for s in moved.get(id(eqn), ())}
            is_viewed = any(v in viewed for v in eqn.outvars)
            operands = [read(v) for v in eqn.invars]
            with _compat.at_source_of(eqn), eqn.ctx.manager, jaxprs.with_types_of(eqn):
                results, left, done = self._equation(eqn, operands, added, is_viewed)
                patterns.note(eqn, operands, results)
                is_same = not eqn.effects and all(x.is_invariant for x in operands)
                for v, x in zip(eqn.outvars, results, strict=True):
                    x.is_used |= v in used and x.update is not None
                    x.is_needed |= v in needed
                    x.is_computed_with |= v in computed_with
                    x.is_invariant |= is_same
                if self.in_loop:
                    indices.note(eqn, operands, results, is_kept=left is not None)
            explained.remark(self, inner, eqn, operands, results, left)
            values.update(zip(eqn.outvars, results, strict=True))
            values.update((s.eqn.outvars[0], results[s.number]) for s in moved.get(id(eqn), ()) if s.number in done)
        return [read(v) for v in inner.outvars]

    def function(
        self,
        jaxpr: Jaxpr,
        added: Mapping[int, Value] | None = None,
        *,
        is_whole: bool = False,
        known: Mapping[Any, Value] | None = None,
        constants: Sequence[Value] = (),
        ends: Callable[[list[Value], list[Value]], list[Value]] = lambda inputs, outs: outs,
    ) -> Callable[..., list[Array]]:
        """Return a repaired jaxpr as a function of arrays, with `added` added to some of its results.

        The first arguments are `constants` of the loop. `ends` maps its inputs and results to results. Unless it is a
        whole program, arrays among the results are not of weak types: versions of a buffer have one.
        """
        closed = refs.as_arrays(_compat.closed(jaxpr))

        def f(*args: Array) -> list[Array]:
            inputs = [Value.given(x, is_constant=k < len(constants)) for k, x in enumerate(args)]
            patterns.copy(constants, inputs)
            outs = ends(inputs, self.evaluate(closed, inputs, known))
            for number, value in (added or {}).items():
                found = sums.total(outs[number], value)
                outs[number] = Value(lax.add(*arrays([outs[number], value]))) if found is None else found
            types = [v.aval for v in closed.jaxpr.outvars]
            return [
                with_type(x, weak=is_weak(of) and (is_whole or not of.shape)).array
                for x, of in zip(outs, types, strict=True)
            ]

        return f

    def call(self, f: Callable[..., Any], *args: Any, then: "Repair | None" = None) -> Any:
        """Call a function, with its loops repaired before it differentiates them, and the rest by `then`."""
        _compat.first_use()
        with _contexts.repairs_first(self.request):
            jaxpr, out = jax.make_jaxpr(f, return_shape=True)(*args)
        outs = (then or self).function(jaxpr, is_whole=True)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out), outs)

    def of_loop(self, active: Array | None = None) -> "Repair":
        """Return the evaluator for the body of a loop."""
        return Repair(self.request, in_loop=True, active=active)

    def of_lowering(self) -> "Repair":
        """Return the evaluator for jaxprs that are lowered and no longer differentiated."""
        return Repair(Request(None, Tape()), in_loop=self.in_loop)

    def has_choice(self, eqn: Equation) -> bool:
        """Return whether a scan chooses its residuals."""
        return choosing.has_choice(eqn.params, [v.aval for v in eqn.invars], self.request.residuals)

    def finds(self, jaxpr: Jaxpr) -> bool:
        """Return whether there is something to repair in a jaxpr."""
        if any(map(self.finds_in, _compat.opened(jaxpr).eqns)):
            return True
        return self.in_loop and patterns.chooses_rows(jaxpr, by_products=explained.is_asked())

    def finds_in(self, eqn: Equation) -> bool:
        """Return whether there is something to repair in an equation."""
        name = eqn.primitive.name
        if jaxprs.has_symbolic_shapes(eqn):
            return False
        if name in LOOPS:
            if (name == "scan" and self.has_choice(eqn)) or (name == "while" and self.request.max_steps is not None):
                return True
            [loop] = registry.ENTRIES[name].bodies(eqn.params)
            if registers.may_be_in(loop) or layouts.may_be_in(loop):
                return True
            within = jaxprs.jaxprs_in(eqn.params)
            return any(map(self.of_loop().finds, within)) or twins.has_twins(loop, loop.inputs(eqn.invars, None))
        kind, inner = registry.entry_of(eqn).kind, list(jaxprs.jaxprs_in(eqn.params))
        if kind == "loop":  # one of this library stays, unless a `while_loop` of JAX in its body has to get a bound
            bodies = registry.entry_of(eqn).bodies(eqn.params)
            return self.request.max_steps is not None and any(off.has_while(body.jaxpr) for body in bodies)
        if kind == "":
            is_access = eqn.primitive not in ROW_OPS and rows.is_of_rows(eqn)
            return (self.in_loop and is_access) or self._finds_in_lowering(eqn)
        # A `custom_jvp` or `custom_vjp` with row ops has been repaired before; its derivative rules may be plain still.
        if kind == "rules" and any(map(choosing.chooses, inner)):
            inner = [body for jaxpr in inner for eqn in jaxpr.eqns for body in jaxprs.jaxprs_in(eqn.params)]
            return any(map(self.of_loop().finds, inner))
        return any(map(self.finds, inner)) or (kind == "rules" and any(map(jaxprs.has_row_ops, inner)))

    def _finds_in_lowering(self, eqn: Equation) -> bool:
        """Return whether there is something to repair in the lowering of a primitive of another library."""
        if eqn.primitive.name in RULES or eqn.primitive in ROW_OPS:
            return False
        return any(map(self.of_lowering().finds, foreign.lowered_as(eqn).values()))

    def _equation(
        self, eqn: Equation, operands: list[Value], added: dict[int, Value], is_viewed: bool
    ) -> tuple[list[Value], Left | None, Iterable[int]]:
        """Return the results, why the equation stays if it does, and which results already contain their sums.

        A rule removes from `added` the sums that it performs. Each other sum is left to its own equation.
        """
        if self._is_of_discarded(eqn):
            return [Value(x) for x in jaxprs.bind(eqn, as_written(operands))], Left("discarded-version"), ()
        if any(v in self.put_together for v in eqn.outvars):
            taken = parts.equation(eqn, operands, self.put_together.get(eqn.outvars[0], parts.Step()))
            if taken is not None:
                return taken, None, ()
        wanted = set(added)
        results = self._repaired(eqn, operands, added)
        if not isinstance(results, Left):
            views.note(eqn, operands, results)
            return results, None, wanted - set(added)
        if is_viewed and (viewed := views.view(eqn, operands)) is not None:
            return viewed, None, ()
        makes_version = eqn.primitive.name in registry.ENTRIES or kinds.is_update(eqn)
        passed = as_written(operands) if makes_version else elements(operands)
        return [Value(x) for x in jaxprs.bind(eqn, passed)], results, ()

    def _is_of_discarded(self, eqn: Equation) -> bool:
        """Return whether an equation makes a version of a buffer that is discarded, or reads rows of it."""
        if registry.inlined(eqn) is not None:
            return False
        return any(v in self.discarded for v in (eqn.invars[:1] if kinds.is_read(eqn) else eqn.outvars))

    def _repaired(self, eqn: Equation, operands: list[Value], added: dict[int, Value]) -> list[Value] | Left:
        name = eqn.primitive.name
        if name in registry.ENTRIES:
            inner = registry.inlined(eqn)
            if self.in_loop and inner is not None:  # it may contain nothing but a select
                return Left() if _only_moves(inner, operands) else self.evaluate(inner, operands)
            if self.in_loop and (chosen := _chosen(eqn, operands)) is not None:
                return chosen
            if not self.finds_in(eqn):
                explained.skipped(self, eqn)
                return Left()
            # XLA runs a loop that is the same in every step once, unless a mask that differs is in it.
            is_same = self.active is not None and all(x.is_invariant for x in operands)
            repair = self.of_loop() if is_same else self
            if name in LOOPS:
                return LOOPS[name](repair, eqn, operands, added)
            if registry.entry_of(eqn).kind == "loop":  # of this library
                body = eqn.params["body"]
                repaired = jax.make_jaxpr(self.of_loop().function(body, is_whole=True))(*body.in_avals)
                return list(map(Value, eqn.primitive.bind(*as_written(operands), **eqn.params | {"body": repaired})))
            if inner is not None:
                return self.evaluate(inner, operands)
            arrays = as_written(operands)
            change = _Repaired(repair, eqn, arrays, added)
            outs = registry.ENTRIES[name].rebuild(eqn, arrays, change)
            if outs is None:
                explained.skipped(self, eqn, "no-rule")
                return Left()
            added.clear()
            return change.values(outs, operands)
        if self._finds_in_lowering(eqn):
            arrays = as_written(operands)
            return list(map(Value, foreign.rebuild(eqn, arrays, _Lowered(self, eqn, arrays, {}))))
        if not self.in_loop:
            return Left("not-in-a-loop")
        if jaxprs.has_symbolic_shapes(eqn):
            return Left("symbolic-shape")
        if name == "slice" and operands[0].is_computed_with:
            return Left("made-in-the-step")  # its cotangent is, too; reports leave out such reads
        why = Left()
        for rule in RULES.get(name, ()):
            results = rule(eqn, operands)
            if not isinstance(results, Left):
                return results
            why = why if why.is_known else results
        return why

    def why_left(self, eqn: Equation) -> Left | None:
        """Return why a read or write stays that no rule has been asked about. None if a rule may apply to it."""
        if jaxprs.has_symbolic_shapes(eqn):
            return Left("symbolic-shape")
        return rows.why_left(eqn) if self.in_loop else Left("not-in-a-loop")


class _Repaired(registry.Change):
    """The jaxprs in an equation, repaired, and with `added` added to some of their results."""

    def __init__(self, repair: Repair, eqn: Equation, operands: Sequence[Array], added: Mapping[int, Value]) -> None:
        self.repair = repair if repair.active is None else repair.of_loop()
        self.places, self.after = list(added), as_written(list(added.values()))
        kind = registry.entry_of(eqn).kind
        self.is_whole, self.first = kind == "rules", int(kind == "branches")
        own = operands[self.first :]
        # The rules of a `custom_jvp` would have to be masked as well, and its derivative is not that of an operand.
        self.returns_operands = kind in ("branches", "checkpoint")
        active = repair.active if self.returns_operands else None
        self.before = [] if active is None or not _may_keep(eqn, active) else [active]
        self.same: list[list[int | None]] = []  #: by jaxpr: for each result, the operand that it is
        self.kept: list[list[int | None]] = []  #: the operand that it equals off the mask
        # Only the caller of an inner loop sees that carries of it begin equal.
        self.firsts = list(range(len(own))) if kind == "divided" else twins.equal_operands(own)

    def body(self, jaxpr: Jaxpr, *args: Array) -> list[Array]:
        mask, args = args[: len(self.before)], args[len(self.before) :]
        n = len(args) - len(self.places)
        added = dict(zip(self.places, map(Value, args[n:]), strict=True))
        own = [args[k] for k in self.firsts] if n == len(self.firsts) else args[:n]
        ends = functools.partial(self.ends, mask[0] if mask else None)
        repair = self.repair.of_loop(mask[0]) if mask else self.repair
        return repair.function(jaxpr, added, is_whole=self.is_whole, ends=ends)(*own)

    def ends(self, active: Array | None, inputs: list[Value], outs: list[Value]) -> list[Value]:
        """Note which results are operands. Return the results, equal to operands off the mask if there is one.

        A result stays as it is if that takes more than putting rows back.
        """
        self.same.append([None if k in self.places or x not in inputs else inputs.index(x) for k, x in enumerate(outs)])
        if active is None:
            return outs
        after = list(outs)
        kept: list[int | None] = [None] * len(outs)
        for k, new in enumerate(outs):
            *_, first = new.versions()
            if k in self.places or new.shape[: active.ndim] != active.shape or first not in inputs:
                continue
            found = selects.select(Predicate(active), first, new)
            if not isinstance(found, Left):
                after[k], kept[k] = found, inputs.index(first)
        self.kept.append(kept)
        return after

    def values(self, outs: Sequence[Array], operands: Sequence[Value]) -> list[Value]:
        """Return the results as values outside of the equation."""
        own = operands[self.first :]
        results = list(map(Value, outs))
        for k, number in enumerate(_agreed(self.kept)):
            if number is not None:
                results[k] = Value(outs[k], before=own[number], change=Difference(self.before[0]))
        for k, number in enumerate(_agreed(self.same) if self.returns_operands else ()):
            if number is not None:
                results[k] = own[number]
        return results

    def policy(self, policy: Any) -> Any:
        """Return a policy that also saves rows that are read: else a step saves the buffers that it reads."""
        if policy in (None, jax.checkpoint_policies.nothing_saveable):
            return save_reads  # by its own name, which undo knows

        def keeps(prim: Any, /, *args: Any, **params: Any) -> Any:
            return policy(prim, *args, **params) or save_reads(prim, *args, **params)

        return keeps

    def call(self, f: Callable[..., Any], *args: Any) -> Any:
        return self.repair.call(f, *args)

    def jvp(self, f: Callable[..., Any], primals: list[Array], dots: list[Array], nonzero: list[bool]) -> Any:
        # Primals and tangents are in one loop, of which JAX takes the linear part by partial evaluation. A scan that
        # chooses its residuals would be unknown as a whole.
        without_choice = Repair(self.repair.request._replace(residuals=Tape()), in_loop=self.repair.in_loop)
        return self.repair.call(f, primals, dots, then=without_choice)


def _agreed(numbers: Sequence[Sequence[int | None]]) -> list[int | None]:
    """Return for each result the number that all jaxprs give, None if these differ."""
    return [each[0] if len({*each}) == 1 else None for each in zip(*numbers, strict=True)]


class _Lowered(_Repaired):
    """The jaxprs that a primitive of another library is lowered as, and its rules, repaired."""

    def body(self, jaxpr: Jaxpr, *args: Array) -> list[Array]:
        return self.repair.of_lowering().function(jaxpr, is_whole=True)(*args)


def _may_keep(eqn: Equation, active: Array) -> bool:
    """Return whether a result has the type of an operand, and more than one number for each example of the mask."""
    n, given = active.ndim, {(v.aval.shape, v.aval.dtype) for v in eqn.invars if rows.has_rows(v.aval)}
    results = [v.aval for v in eqn.outvars if rows.has_rows(v.aval)]
    return any(t.shape[:n] == active.shape != t.shape and (t.shape, t.dtype) in given for t in results)


def _only_moves(jaxpr: Jaxpr, operands: Sequence[Value]) -> bool:
    """Return whether a call moves elements of arrays that the step computes with, as `jnp.roll` does.

    The derivative of the call is one array. XLA adds it faster than one array after the other for each of the parts.
    """
    names = {eqn.primitive.name for eqn in _compat.opened(jaxpr).eqns}
    return names <= {"slice", "concatenate"} and all(x.is_computed_with for x in operands)


def _chosen(eqn: Equation, operands: Sequence[Value]) -> list[Value] | None:
    """Return the results of branches that compute nothing, but choose between versions of buffers."""
    if registry.entry_of(eqn).kind != "branches" or not all(getattr(v.aval, "shape", ()) for v in eqn.outvars):
        return None
    bodies = [_compat.opened(body.jaxpr) for body in registry.entry_of(eqn).bodies(eqn.params)]
    if any(body.eqns or not all(any(v is x for x in body.invars) for v in body.outvars) for body in bodies):
        return None
    index, *rest = operands
    results = []
    for outs in zip(*(body.outvars for body in bodies), strict=True):
        cases = [rest[body.invars.index(v)] for body, v in zip(bodies, outs, strict=True)]
        found = selects.select_one(index, cases)
        if isinstance(found, Left):
            return None
        results.append(found)
    return results
