"""Evaluate a jaxpr in which some values have another representation than one array.

A shift register is a circular buffer, a buffer has permuted axes, a slice is a part of a stack. For each representation
there is an `Evaluator` with rules for the equations that can use it. Any other equation gets arrays. If making them
costs what the representation is meant to save, the evaluator notes it, and the loop stays as it is.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from jax_tensorarray import _compat
from jax_tensorarray._jaxprs import jaxprs, registry
from jax_tensorarray._types import Equation

Array = jax.Array
Held = Any  #: a value in the representation, or another one, by default an array

#: From the evaluator, an equation and its operands to the results. It returns None if the equation is to get arrays.
Rule = Callable[[Any, Any, list[Held]], list[Held] | None]


def roots_of(values: Iterable[Held]) -> frozenset[int]:
    """Return the carries that these held values may be versions of."""
    return frozenset[int]().union(*(x.roots for x in values))


class Evaluator:
    """Evaluates a jaxpr that holds some values in another representation: those of the types `held`."""

    held: ClassVar[tuple[type, ...]]
    enters: ClassVar[type]  #: the one of them that branches and checkpoints take and return; it is a pytree of arrays
    rules: ClassVar[Mapping[str, Rule]]  #: by the name of a primitive, for equations with operands that are held
    with_options: ClassVar[bool] = False  #: whether the evaluator inlines a `jit` that has options, too

    def __init__(self) -> None:
        self.needed: dict[int, Any] = {}  #: the carries that an equation has needed as arrays, and which equation
        self.eqn: Equation | None = None  #: the equation that is evaluated, None after the last one

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

    def written(self, operands: Iterable[Held]) -> list[Array]:
        """Return the operands to bind an unchanged equation with."""
        return list(map(self.array, operands))

    def without_rule(self, eqn: Equation, operands: list[Held]) -> list[Held]:
        """Return the results of an equation that gets arrays."""
        return list(map(self.known, jaxprs.bind(eqn, self.written(operands))))

    # --- the walk ---

    def evaluate(self, jaxpr: Jaxpr, inputs: Sequence[Held]) -> list[Held]:
        return jaxprs.interpret(jaxpr, inputs, self.equation, self.known, literal=self.literal)

    def equation(self, eqn: Equation, operands: list[Held]) -> list[Held]:
        if any(isinstance(x, self.held) for x in operands):
            inner = registry.inlined(eqn, with_options=self.with_options)
            if inner is not None:
                return self.evaluate(inner, operands)
            self.eqn = eqn
            enters = registry.entry_of(eqn).kind in ("branches", "checkpoint")
            rule = Evaluator.enter if enters else self.rules.get(eqn.primitive.name)
            results = None if rule is None else rule(self, eqn, operands)
            if results is not None:
                return results
        return self.without_rule(eqn, operands)

    def needs(self, roots: Iterable[int]) -> None:
        """Note that versions of these carries are needed as arrays."""
        for k in roots:
            self.needed.setdefault(k, self.eqn)

    def enter(self, eqn: Equation, operands: list[Held]) -> list[Held] | None:
        """Run branches or a checkpoint whose operands and results may be held."""
        entry = registry.entry_of(eqn)
        bodies = entry.bodies(eqn.params)
        if not bodies:
            return None
        first = bodies[0].first
        given: list[Any] = [x if isinstance(x, self.enters) else self.written([x])[0] for x in operands]
        flat, tree = jax.tree.flatten(given[first:])
        # The first array of a held value is an operand at the place of the value. Its other arrays follow all operands.
        is_first = [k == 0 for x in given[first:] for k in range(len(jax.tree.leaves(x)))]
        own, rest = jaxprs.partition(flat, is_first)
        distinct = {id(x): x for x in rest}  # values may share one
        more = list(distinct.values())
        types = list(map(jax.typeof, [*own, *more]))

        def inputs_of(args: Sequence[Array]) -> list[Held]:
            of_own, inside = iter(args[: len(own)]), dict(zip(distinct, args[len(own) :], strict=True))
            places = zip(is_first, flat, strict=True)
            inputs = jax.tree.unflatten(tree, [next(of_own) if flag else inside[id(x)] for flag, x in places])
            return [x if isinstance(x, self.enters) else self.known(x) for x in inputs]

        def run(jaxpr: Jaxpr, *args: Array) -> list[Held]:
            return self.evaluate(_compat.closed(jaxpr), inputs_of(args))

        traced = [_Traced(self, functools.partial(run, body.jaxpr), types) for body in bodies]
        kinds = [self.common(outs) for outs in zip(*(of.outs for of in traced), strict=True)]
        passed: list[list[int | None]] = []  # for each array of a result, the operand that every branch returns for it

        def look(*args: Array) -> list[Array]:
            inputs = inputs_of(args)
            for outs, kind in zip(zip(*(of.run(args) for of in traced), strict=True), kinds, strict=True):
                held = [] if kind is None else [jax.tree.leaves(self.like(x, kind, inputs)) for x in outs]
                passed.append([_place(of, args) for of in zip(*held, strict=True)] if held else [None])
            return []

        jax.make_jaxpr(look)(*types)
        of_bodies = {id(_compat.opened(body.jaxpr)): of for body, of in zip(bodies, traced, strict=True)}
        results = entry.rebuild(eqn, [*given[:first], *own], _Entered(self, of_bodies, inputs_of, kinds, passed, more))
        if results is None:
            return None
        made, outs = iter(results), list[Held]()
        for kind, of_kind in zip(kinds, passed, strict=True):
            arrays = [next(made) if k is None else [*own, *more][k] for k in of_kind]
            outs.append(self.known(*arrays) if kind is None else jax.tree.unflatten(jax.tree.structure(kind), arrays))
        return outs

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


def _place(arrays: Sequence[Array], args: Sequence[Array]) -> int | None:
    """Return the number of the argument that each of these arrays is, None if there is none."""
    return next((k for k, x in enumerate(args) if all(y is x for y in arrays)), None)


class _Traced:
    """A body that is traced once with held values: a second trace would double the time with each branch inside."""

    def __init__(self, evaluator: Evaluator, f: Callable[..., list[Held]], types: Sequence[Any]) -> None:
        self.evaluator = evaluator

        def flat(*args: Array) -> list[Array]:
            self.outs = f(*args)
            held = [x if isinstance(x, evaluator.enters) else evaluator.array(x) for x in self.outs]
            leaves, self.tree = jax.tree.flatten(held)
            return leaves

        self.jaxpr, self.eqn = jax.make_jaxpr(flat)(*types), evaluator.eqn

    def run(self, args: Sequence[Array]) -> list[Held]:
        """Return the results, as arrays unless they are held in the form that branches return."""
        self.evaluator.eqn = self.eqn
        outs = jax.tree.unflatten(self.tree, jaxprs.function(self.jaxpr)(*args))
        return [x if isinstance(x, self.evaluator.enters) else self.evaluator.known(x) for x in outs]


class _Entered(registry.Change):
    """Rebuilds branches or a checkpoint with held values as their arrays."""

    def __init__(
        self,
        evaluator: Evaluator,
        bodies: Mapping[int, _Traced],
        inputs_of: Callable[[Sequence[Array]], list[Held]],
        kinds: Sequence[Held | None],
        passed: Sequence[list[int | None]],
        after: Sequence[Array],
    ) -> None:
        self.evaluator, self.bodies, self.inputs_of = evaluator, bodies, inputs_of
        self.kinds, self.passed, self.after = kinds, passed, after

    def body(self, jaxpr: Jaxpr, *args: Array) -> list[Array]:
        outs = []
        found, inputs = self.bodies[id(_compat.opened(jaxpr))].run(args), self.inputs_of(args)
        for x, kind, passed in zip(found, self.kinds, self.passed, strict=True):
            held = self.evaluator.array(x) if kind is None else self.evaluator.like(x, kind, inputs)
            outs += [y for y, k in zip(jax.tree.leaves(held), passed, strict=True) if k is None]
        return outs


class _Looped(registry.Change):
    """Rebuilds a loop whose consts may be held. `slices` has an entry for each carry and each of `xs`."""

    def __init__(self, evaluator: Evaluator, slices: Sequence[Callable[[Array], Array] | None]) -> None:
        self.evaluator, self.slices = evaluator, slices

    def body(self, jaxpr: Jaxpr, *args: Any) -> list[Array]:
        first = len(args) - len(self.slices)
        arrays = [x if f is None else f(x) for x, f in zip(args[first:], self.slices, strict=True)]
        inputs = [*args[:first], *map(self.evaluator.known, arrays)]
        return list(map(self.evaluator.array, self.evaluator.evaluate(jaxpr, inputs)))
