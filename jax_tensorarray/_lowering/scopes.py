"""Use-def chains of an expanded program: the equation that makes a value, and the outer value of an argument."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from jax_tensorarray import _compat
from jax_tensorarray._jaxprs import jaxprs
from jax_tensorarray._jaxprs.uses import Uses
from jax_tensorarray._lowering.equations import Atom, Block, without_consts
from jax_tensorarray._ops.check import ta_check_p
from jax_tensorarray._ops.primitive import ROW_OPS, may_raise
from jax_tensorarray._types import Equation


class Scope:
    """A jaxpr with its context: the program, the condition or the body of a loop, a branch, or a call."""

    def __init__(self, jaxpr: Any, outer: "Scope | None" = None, eqn: Any = None, role: Any = None) -> None:
        self.closed, self.jaxpr = jaxpr, _compat.opened(jaxpr)
        self.outer, self.eqn, self.role = outer, eqn, role
        self.numbers = {v: k for k, v in enumerate(self.jaxpr.invars)}
        self._inner: dict[Any, Scope] = {}

    @functools.cached_property
    def uses(self) -> Uses:
        """The definitions and uses of the variables of the jaxpr."""
        return Uses(self.jaxpr)

    def maker(self, atom: Atom, *names: str) -> Any:
        """Return the equation that makes a value, if it has one of these names. A literal has none."""
        eqn = self.uses.maker(atom)
        return eqn if eqn is not None and (not names or eqn.primitive.name in names) else None

    def operands(self, atom: Atom, *names: str) -> list[Atom]:
        """Return the operands of the equation of one of these names that makes a value, or nothing."""
        eqn = self.maker(atom, *names)
        return [] if eqn is None else list(eqn.invars)

    def within(self, eqn: Equation, role: Any, jaxpr: Any) -> "Scope":
        """Return the scope of a jaxpr of an equation."""
        key = id(eqn), role
        if key not in self._inner:
            self._inner[key] = Scope(jaxpr, self, eqn, role)
        return self._inner[key]

    def body(self, loop: Equation) -> "Scope":
        return self.within(loop, "body", loop.params["body_jaxpr"])

    def condition(self, loop: Equation) -> "Scope":
        return self.within(loop, "condition", loop.params["cond_jaxpr"])

    def branches(self, eqn: Equation) -> list["Scope"]:
        return [self.within(eqn, k, branch) for k, branch in enumerate(eqn.params["branches"])]

    def scopes_in(self, eqn: Equation) -> Iterator["Scope"]:
        """Yield the scopes of the jaxprs of a loop or of branches."""
        name = eqn.primitive.name
        if name == "while":
            yield self.condition(eqn)
            yield self.body(eqn)
        elif name == "cond":
            yield from self.branches(eqn)

    @property
    def is_whole(self) -> bool:
        """Whether this is the program, or the jaxpr of a `shard_map` or a call, not of a loop or a branch."""
        return self.role in (None, "call", "shard")

    @property
    def is_in_loop(self) -> bool:
        """Whether this is the condition or the body of a loop, or inside of one."""
        return self.role in ("condition", "body") or (self.outer is not None and self.outer.is_in_loop)

    def operand(self, atom: Atom) -> Atom | None:
        """Return the outer value that is bound to this argument. Return None if the argument varies, like a carry."""
        number = None if isinstance(atom, Literal) else self.numbers.get(atom)
        if number is None or self.outer is None:
            return None
        eqn, params = self.eqn, self.eqn.params
        if self.role == "condition":
            return eqn.invars[number] if number < params["cond_nconsts"] else None
        if self.role == "body":
            return eqn.invars[params["cond_nconsts"] + number] if number < params["body_nconsts"] else None
        if isinstance(self.role, int):
            return eqn.invars[number + 1]
        return eqn.invars[number] if self.role == "call" else None

    def carried(self, atom: Atom) -> int | None:
        """Return which carry an argument of a body or condition is, or None."""
        number = None if isinstance(atom, Literal) else self.numbers.get(atom)
        if number is None or self.role not in ("condition", "body"):
            return None
        first = self.eqn.params["cond_nconsts" if self.role == "condition" else "body_nconsts"]
        return number - first if number >= first else None

    def is_invariant(self, eqn: Equation) -> bool:
        """Return whether an equation does the same in every step of the loop that this scope is in.

        XLA runs it once, before the loop, unless it waits for what differs from step to step.
        """
        return all(v in self._invariants for v in eqn.outvars)

    @functools.cached_property
    def _invariants(self) -> set[Any]:
        if not self.is_in_loop:
            return set()
        invariants = {*self.jaxpr.constvars, *filter(self._is_invariant_argument, self.jaxpr.invars)}
        for eqn in self.jaxpr.eqns:
            if not eqn.effects and all(isinstance(v, Literal) or v in invariants for v in eqn.invars):
                invariants.update(eqn.outvars)
        return invariants

    def _is_invariant_argument(self, v: Any) -> bool:
        if self.role in ("condition", "body"):
            number = self.carried(v)
            return number is None or (self.role == "body" and self._source(self.jaxpr.outvars[number]) is v)
        outer_value = self.operand(v)
        return isinstance(outer_value, Literal) or (self.outer is not None and outer_value in self.outer._invariants)

    def _source(self, atom: Atom) -> Atom:
        """Return the value that loops and branches have returned as it was."""
        while (eqn := self.maker(atom, "while", "cond")) is not None:
            number = eqn.outvars.index(atom)
            if eqn.primitive.name == "while":
                body = self.body(eqn)
                is_passed = body._source(body.jaxpr.outvars[number]) is argument(eqn, number)
                passed = [init_of(eqn, number) if is_passed else None]
            else:
                passed = [x.operand(x._source(x.jaxpr.outvars[number])) for x in self.branches(eqn)]
            if passed[0] is None or any(v is not passed[0] for v in passed):
                break
            atom = passed[0]
        return atom

    def constant(self, atom: Atom) -> int | None:
        """Return the number that all elements of an integer array equal, or None: constant propagation."""
        if isinstance(atom, Literal):
            value = np.asarray(atom.val)
            return int(value) if value.dtype.kind in "iub" and not value.ndim else None
        eqn = self.maker(atom)
        if eqn is None:
            outer_value = self.operand(atom)
            return None if outer_value is None else self.outer.constant(outer_value)  # type: ignore[union-attr]
        name = eqn.primitive.name
        if name == "broadcast_in_dim" or (name == "convert_element_type" and atom.aval.dtype.kind in "iu"):
            number = self.constant(eqn.invars[0])
            return number if number is None or name == "broadcast_in_dim" else _converted(number, atom.aval.dtype)
        return None


def _converted(number: int, dtype: Any) -> int | None:
    info = np.iinfo(dtype)
    return number if info.min <= number <= info.max else None


def home_of(scope: Scope, value: Any) -> tuple[Scope, Any]:
    """Follow an argument of branches to the variable outside of them. Return that with its scope."""
    while isinstance(scope.role, int) and not isinstance(value, Literal) and value in scope.numbers:
        outer = scope.operand(value)
        if isinstance(outer, Literal):
            break
        scope, value = scope.outer, outer  # type: ignore[assignment]
    return scope, value


def init_of(loop: Equation, number: int) -> Atom:
    """Return the initial value of a carry."""
    return loop.invars[loop.params["cond_nconsts"] + loop.params["body_nconsts"] + number]


def argument(loop: Equation, number: int) -> Any:
    """Return the variable of a carry in the body of a loop."""
    return _compat.opened(loop.params["body_jaxpr"]).invars[loop.params["body_nconsts"] + number]


def added_by_step(scope: Scope, loop: Equation, number: int) -> int | None:
    """Return the constant that a step adds to a carried number, or None if it does anything else."""
    body, added = scope.body(loop), 0
    carried, after = argument(loop, number), body.jaxpr.outvars[number]
    while after is not carried:
        operands = body.operands(after, "add")
        if not operands:
            return None
        if (by := body.constant(operands[1])) is not None:
            after, added = operands[0], added + by  # a step may add several times if the loop is unrolled
        elif (by := body.constant(operands[0])) is not None:
            after, added = operands[1], added + by
        else:
            return None
    return added


def addresses_rows(eqn: Equation) -> bool:
    """Return whether an equation has an index of rows."""
    return eqn.primitive in ROW_OPS or eqn.primitive is ta_check_p


def index_number(eqn: Equation) -> int:
    """Return which operand of that equation is the index."""
    return int(eqn.primitive is not ta_check_p)


def is_strict(eqn: Equation) -> bool:
    """Return whether an equation raises for an index out of range, and no pass has checked the index."""
    return addresses_rows(eqn) and may_raise(eqn.params) and not eqn.params.get("checked")


def joined_columns(scope: Scope, index: Atom, count: int) -> list[Atom]:
    """Return the `count` columns that the program concatenates to an array along its last axis, or nothing.

    The array may have leading axes of size 1 that the columns lack, for a batch that shares its index.
    """
    eqn = scope.maker(index, "concatenate")
    if (wider := scope.maker(index, "broadcast_in_dim")) is not None:
        (inner,), dims, ndim = wider.invars[:1], wider.params["broadcast_dimensions"], index.aval.ndim
        is_same = dims == tuple(range(ndim - len(dims), ndim)) and inner.aval.size == index.aval.size
        return joined_columns(scope, inner, count) if is_same else []
    if eqn is None or eqn.params["dimension"] != index.aval.ndim - 1:
        return []
    return list(eqn.invars) if [x.aval.shape[-1] for x in eqn.invars] == [1] * count else []


#: A function that returns the scopes of an equation to enter.
Entered = Callable[[Scope, Equation], Iterable[Scope]]


def bodies_of(eqn: Equation) -> list[Any]:
    """Return the jaxprs of a loop, of branches, of a `shard_map`, and of a `jit` with ops of ours."""
    name, params = eqn.primitive.name, eqn.params
    if name == "while":
        return [params["cond_jaxpr"], params["body_jaxpr"]]
    if name == "cond":
        return list(params["branches"])
    is_entered = name == "shard_map" or (name == "jit" and jaxprs.has_ours(params["jaxpr"]))
    return [params["jaxpr"]] if is_entered else []


def inner_scopes(scope: Scope, eqn: Equation) -> list[Scope]:
    """Return the scopes of the jaxprs that `bodies_of` returns."""
    if eqn.primitive.name in ("while", "cond"):
        return list(scope.scopes_in(eqn))
    role = "shard" if eqn.primitive.name == "shard_map" else "call"
    return [scope.within(eqn, role, jaxpr) for jaxpr in bodies_of(eqn)]


def all_scopes(scope: Scope) -> Iterator[Scope]:
    """Yield a scope and those in it."""
    yield scope
    for eqn in scope.jaxpr.eqns:
        for inner in inner_scopes(scope, eqn):
            yield from all_scopes(inner)


def all_equations(scope: Scope, entered: Entered = inner_scopes) -> Iterator[tuple[Scope, Equation]]:
    """Yield the equations of a scope and of those in it, with their scopes."""
    for eqn in scope.jaxpr.eqns:
        yield scope, eqn
        for inner in entered(scope, eqn):
            yield from all_equations(inner, entered)


def with_bodies(eqn: Equation, new: Sequence[Any]) -> Equation:
    """Return that equation with other jaxprs, or itself if `new` are its own."""
    if all(a is b for a, b in zip(new, bodies_of(eqn), strict=False)):
        return eqn
    name, new = eqn.primitive.name, list(map(_compat.closed, new))
    if name == "cond":
        return eqn.replace(params=eqn.params | {"branches": tuple(new)})
    if name == "while":
        return eqn.replace(params=eqn.params | {"cond_jaxpr": new[0], "body_jaxpr": new[1]})
    body = without_consts(new[0]) if name == "shard_map" else new[0]
    return eqn.replace(params=eqn.params | {"jaxpr": body})


def rebuilt(
    scope: Scope, change: Callable[[Scope, Equation, Block], Equation | None], entered: Entered = inner_scopes
) -> Any:
    """Return the jaxpr of a scope with each equation changed, also in loops and branches.

    `change` gets the old scope and equation. It returns the new equation, or None if it has added other equations to
    the block instead.
    """
    block, changed = Block(scope.closed), False
    for eqn in scope.jaxpr.eqns:
        bodies = [rebuilt(x, change, entered) for x in entered(scope, eqn)]
        new = change(scope, eqn, block)
        if new is None:
            changed = True
            continue
        new = with_bodies(new, bodies)
        changed |= new is not eqn
        block.add(new)
    return block.jaxpr() if changed else scope.closed
