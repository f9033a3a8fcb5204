"""Evaluate a jaxpr in which some values have another representation than one array.

A shift register is a circular buffer, a buffer has permuted axes, a slice is a part of a stack. For each representation
there is an `Evaluator` with rules for the equations that can use it. If a held value is a view of the array that stores
it, reads and updates of its rows become row ops on the array. Any other equation gets arrays. If making them costs what
the representation is meant to save, the evaluator notes it, and the loop stays as it is.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from jax_tensorarray import _compat
from jax_tensorarray._in_place import access, explained, rows
from jax_tensorarray._in_place.values import Left, Origin, Taken, Update, Value, as_written
from jax_tensorarray._jaxprs import jaxprs, kinds, registry
from jax_tensorarray._ops.primitive import Params
from jax_tensorarray._types import Array, Equation

Held = Any  #: a value in the representation, or another one, by default an array

#: From the evaluator, an equation and its operands to the results. It returns None if the equation is to get arrays.
Rule = Callable[[Any, Any, list[Held]], list[Held] | None]


def roots_of(values: Iterable[Held]) -> frozenset[int]:
    """Return the carries that these held values may be versions of."""
    return frozenset[int]().union(*(x.roots for x in values))


class Stored(Taken):
    """A buffer that an evaluator holds, as a view of the array that stores it: see `values.Taken`."""

    def __init__(self, evaluator: "Evaluator", held: Held) -> None:
        self.evaluator, self.held = evaluator, held
        self.shape, self.dtype = held.map.shape, held.array.dtype

    def array(self) -> Array:
        return self.evaluator.array(self.held)

    def read(self, index: Array, where: Array | None, params: Params) -> Array | None:
        at = access.access(self.held.map, self.dtype, index, where, params)
        return at and at.read(Value(self.held.array))

    def updated(self, update: Update) -> "Stored | None":
        own = access.updated(self.held.map, self.dtype, update)
        return own and Stored(self.evaluator, self.held._replace(array=own.apply(self.held.array)))


class Evaluator:
    """Evaluates a jaxpr that holds some values in another representation: those of the types `held`."""

    held: ClassVar[tuple[type, ...]]
    enters: ClassVar[type]  #: the one of them that branches and checkpoints take and return; it is a pytree of arrays
    rules: ClassVar[Mapping[str, Rule]]  #: by the name of a primitive, for equations with operands that are held
    is_view: ClassVar[bool] = True  #: whether a held value has the map of a view of its array
    with_options: ClassVar[bool] = False  #: whether the evaluator inlines a `jit` that has options, too

    def __init__(self) -> None:
        self.needed: dict[int, Any] = {}  #: the carries that an equation has needed as arrays, and which equation
        self.eqn: Equation | None = None  #: the equation that is evaluated, None after the last one
        self.jaxpr: Any = None  #: where it is
        self.remarks: list[explained.Remark] = []  #: what became of reads and writes of rows of held values

    # --- what a representation says ---

    def array(self, x: Held) -> Array:
        """Return a value as an array."""
        raise NotImplementedError

    def common(self, outs: Sequence[Held]) -> Held | None:
        """Return a held value in a form that a result of all branches can have, None if it must be an array."""
        raise NotImplementedError

    def like(self, x: Held, kind: Held, inputs: Sequence[Held] = ()) -> Held:
        """Return the result of one branch in the representation of `kind`. `inputs` are those of the branch."""
        return x

    def slices(self, x: Held) -> Callable[[Array], Array] | None:
        """Return the function from the number of a step to the slice of a scan's `xs`, None if `xs` is an array."""
        return None

    # --- values of other kinds: rings overrides these ---

    def known(self, x: Array) -> Held:
        """Return the value of an array."""
        return x

    def literal(self, v: Any) -> Held:
        """Return the value of a literal."""
        return v.val

    def as_value(self, x: Held) -> Value:
        """Return a value as one of `Repair`."""
        return Value(self.array(x))

    def written(self, operands: Iterable[Held]) -> list[Array]:
        """Return the operands to bind an unchanged equation with."""
        return as_written(list(map(self.as_value, operands)))

    def without_rule(self, eqn: Equation, operands: list[Held]) -> list[Held]:
        """Return the results of an equation that gets arrays."""
        return list(map(self.known, jaxprs.bind(eqn, self.written(operands))))

    # --- the walk ---

    def evaluate(self, jaxpr: Jaxpr, inputs: Sequence[Held]) -> list[Held]:
        around, self.jaxpr = self.jaxpr, _compat.opened(jaxpr)
        outs = jaxprs.interpret(jaxpr, inputs, self.equation, self.known, literal=self.literal)
        self.jaxpr = around
        return outs

    def equation(self, eqn: Equation, operands: list[Held]) -> list[Held]:
        if any(isinstance(x, self.held) for x in operands):
            inner = registry.inlined(eqn, with_options=self.with_options)
            if inner is not None:
                return self.evaluate(inner, operands)
            self.eqn = eqn
            enters = registry.entry_of(eqn).kind in ("branches", "checkpoint")
            rule = Evaluator.enter if enters else self.rules.get(eqn.primitive.name)
            results = None if rule is None else rule(self, eqn, operands)
            results = self.by_rows(eqn, operands) if results is None else results
            if results is not None:
                return results
        return self.without_rule(eqn, operands)

    def by_rows(self, eqn: Equation, operands: list[Held]) -> list[Held] | None:
        """Read or write rows of a held buffer as rows of the array that stores it, None if it has no such rows."""
        buffer, *rest = operands
        if not (self.is_view and isinstance(buffer, self.enters) and (kinds.is_read(eqn) or kinds.is_update(eqn))):
            return None
        values = [Value(None, lens=Stored(self, buffer), origin=Origin.BEFORE), *map(self.as_value, rest)]
        results = rows.RULES[eqn.primitive.name](eqn, values)
        if isinstance(results, Left):
            return None
        if (kind := explained.KINDS.get(eqn.primitive.name)) is not None:
            self.remark(kind, explained.row_op_of(kind, values, results), eqn.invars[0].aval)
        return [x.taken.held if isinstance(x.taken, Stored) else self.known(x.array) for x in results]

    def needs(self, roots: Iterable[int]) -> None:
        """Note that versions of these carries are needed as arrays."""
        for k in roots:
            self.needed.setdefault(k, self.eqn)

    def remark(self, kind: str, became: str, aval: Any) -> None:
        """Note what became of a read or write of rows, for when the trial of the loop succeeds."""
        if self.eqn is not None:
            self.remarks += explained.of_held(self.jaxpr, self.eqn, kind, became, aval)

    def enter(self, eqn: Equation, operands: list[Held]) -> list[Held] | None:
        """Run branches or a checkpoint whose operands and results may be held."""
        given = [x if isinstance(x, self.enters) else self.written([x])[0] for x in operands]
        results = registry.entry_of(eqn).rebuild(eqn, given, _Entered(self))
        return None if results is None else list(map(self.value, results))

    def value(self, x: Any) -> Held:
        """Return the value of an array, or one that is held already."""
        return x if isinstance(x, self.enters) else self.known(x)

    def loop(self, eqn: Equation, operands: list[Held]) -> list[Held] | None:
        """Run a loop of JAX whose consts and `xs` may be held. Its carries are arrays."""
        entry = registry.entry_of(eqn)
        [loop] = entry.bodies(eqn.params)
        n = loop.first + loop.num_consts
        consts, start = operands[:n], self.written(operands[n : n + loop.num_carry])
        slices: list[Callable[[Array], Array] | None] = [None] * len(start)
        xs = []
        for x in operands[n + loop.num_carry :]:
            slices.append(self.slices(x) if isinstance(x, self.held) else None)
            is_array = slices[-1] is None
            xs.append(self.written([x])[0] if is_array else jnp.arange(eqn.params["length"], dtype=jnp.int32))
        after = entry.rebuild(eqn, [*consts, *start, *xs], _Looped(self, slices))
        return None if after is None else list(map(self.known, after))


class _Entered(registry.Change):
    """Evaluates branches or a checkpoint. Their values are held in a form that all branches can return, or arrays."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator, self.last = evaluator, list[Equation | None]()

    def body(self, jaxpr: Jaxpr, *args: Any) -> list[Any]:
        own = self.evaluator
        outs = own.evaluate(jaxpr, list(map(own.value, args)))
        self.last.append(own.eqn)
        return [x if isinstance(x, own.enters) else own.array(x) for x in outs]

    def join(self, results: Sequence[list[Any]]) -> Callable[[int, list[Any], list[Any]], list[Any]]:
        kinds = [self.evaluator.common(outs) for outs in zip(*results, strict=True)]

        def alike(branch: int, outs: list[Any], operands: list[Any]) -> list[Any]:
            own = self.evaluator
            own.eqn = self.last[branch]

            def result(x: Held, kind: Held | None) -> Any:
                if kind is None:
                    return own.array(x)
                return jax.tree.unflatten(jax.tree.structure(kind), jax.tree.leaves(own.like(x, kind, operands)))

            return list(map(result, map(own.value, outs), kinds))

        return alike


class _Looped(registry.Change):
    """Rebuilds a loop whose consts may be held. `slices` has an entry for each carry and each of `xs`."""

    def __init__(self, evaluator: Evaluator, slices: Sequence[Callable[[Array], Array] | None]) -> None:
        self.evaluator, self.slices = evaluator, slices

    def body(self, jaxpr: Jaxpr, *args: Any) -> list[Array]:
        first = len(args) - len(self.slices)
        arrays = [x if f is None else f(x) for x, f in zip(args[first:], self.slices, strict=True)]
        inputs = [*args[:first], *map(self.evaluator.known, arrays)]
        return list(map(self.evaluator.array, self.evaluator.evaluate(jaxpr, inputs)))
