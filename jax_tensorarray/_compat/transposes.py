"""Accumulate cotangents in place, through loops and calls, in JAX's own backward pass.

ct_b = ct_b + zeros.at[i].set(ct)      # the transpose of `ta_read(b, i)` in JAX
# becomes
ct_b = ta_add(ct_b, i, ct)
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Jaxpr, Literal, Primitive
from jax.extend.core import primitives as jax_primitives
from jax.interpreters import ad

from jax_tensorarray._compat.first_use import Replacement
from jax_tensorarray._compat.jaxprs import opened, replaced
from jax_tensorarray._compat.private import private_names
from jax_tensorarray._types import Array

# --- in-place accumulation of cotangents -----------------------------------------------------------------------
#
# The transpose of a read adds one row to the cotangent of the buffer. An ordinary transpose rule returns a dense
# cotangent, which JAX adds to the running one: O(buffer) per read. A rule in `fancy_transposes` gets the accumulators
# themselves. Without it JAX uses the ordinary rule, and a loop that reads is quadratic under grad, as in plain JAX.


def register_accumulating_transpose(
    primitive: Primitive, accumulate: Callable[..., Array], dense: Callable[..., Sequence[Array | None]]
) -> None:
    """Transpose `primitive`, linear in its first operand, by an update of the running cotangent.

    `accumulate(running, ct, *rest, **params)` returns the running cotangent plus that of this equation.
    """
    ad.primitive_transposes[primitive] = dense
    private = private_names("interpreters.ad", "fancy_transposes", "ValAccum", "RefAccum")
    if private is None:
        return
    table: Any
    ValAccum: Any
    table, ValAccum, RefAccum = private

    class Deferred(ValAccum):  # type: ignore[misc]
        """An accumulator that has only rows so far. It adds them to a dense cotangent, or to zeros at the end."""

        val: Any
        dtype: Any  #: of the rows. A rule of a `custom_vjp` may return a cotangent of another dtype than the buffer
        pending: list[Callable[[Array], Array]]

        def accum(self, x: Any) -> None:
            super().accum(x)
            if type(self.val) is not ad.Zero:
                self._settle()

        def freeze(self) -> Any:
            self._settle()
            return self.val

        def _settle(self) -> None:
            self.__class__ = ValAccum
            if type(self.val) is ad.Zero:
                self.val = ad.instantiate_zeros(ad.Zero(self.aval.update(dtype=self.dtype)))
            self.val = functools.reduce(lambda running, add: add(running), self.pending, self.val)
            del self.pending, self.dtype

    def transpose(ct: Array | ad.Zero, target: Any, *rest: Array, **params: Any) -> None:
        if isinstance(ct, ad.Zero):
            return

        def add(running: Array) -> Array:
            return accumulate(running, ct, *rest, **params)

        if isinstance(target, RefAccum):
            ref = target.inst().ref
            ref[...] = add(ref[...])
        elif isinstance(target, ValAccum) and type(target.val) is not ad.Zero:
            target.val = add(target.val)
        elif isinstance(target, ValAccum):
            if not isinstance(target, Deferred):
                target.__class__ = Deferred
                target.pending, target.dtype = [], ct.dtype
            target.pending.append(add)

    table[primitive] = transpose
    _accumulating.add(primitive)


_accumulating: set[Primitive] = set()


# Control flow transposes its body with new accumulators and adds the dense results to the running ones: again O(buffer)
# for a read inside a nested jit, a cond branch or an inner scan. The remedy needs no new transpose: if a body also
# *returns* a buffer that it reads, its transpose *starts* from the cotangent of that output. So the rules below forward
# such inputs as extra outputs, and the running cotangent is the cotangent of these. Without `fancy_transposes` we have
# no such rules.


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Return (number of consts, number of carries) of a scan. Since 0.11 they are in the structures of trees."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def _forwarding(jaxpr: Jaxpr, inputs: Sequence[int]) -> Any:
    """Return `jaxpr` with these inputs as further outputs."""
    inner = opened(jaxpr)
    outvars = [*inner.outvars, *(inner.invars[k] for k in inputs)]
    return replaced(jaxpr, outvars=outvars, debug_info=inner.debug_info.with_unknown_names())


def _merging(jaxpr: Jaxpr, pairs: Sequence[tuple[int, int]]) -> Any:
    """Return `jaxpr` with each use of the second input of a pair replaced by the first."""
    inner = opened(jaxpr)
    merged = {inner.invars[second]: inner.invars[first] for first, second in pairs}

    def renamed(atoms: Sequence[Any]) -> list[Any]:
        return [v if isinstance(v, Literal) else merged.get(v, v) for v in atoms]

    eqns = [eqn.replace(invars=renamed(eqn.invars)) for eqn in inner.eqns]
    return replaced(jaxpr, eqns=eqns, outvars=renamed(inner.outvars))


#: The default of the shardings of a `jit`. Private, and used only for forwarded results.
(UNSPECIFIED,) = private_names("sharding_impls", "UNSPECIFIED") or (None,)


def is_unspecified(sharding: Any) -> bool:
    """Return whether a sharding or layout of a `jit` is unspecified. Only the name of its class shows it."""
    return sharding is None or type(sharding).__name__ == "UnspecifiedValue"


def forwarding_transposes(entries: dict[str, Any]) -> list[Replacement]:
    """Return rules with which reads inside nested jit, cond, scan and checkpoint add to the outer cotangent in place.

    `entries` is the registry of higher-order primitives.
    """
    private = private_names("interpreters.ad", "fancy_transposes", "ValAccum")
    caching = private_names("util", "weakref_lru_cache")
    if private is None or caching is None or UNSPECIFIED is None:
        return []
    table, ValAccum = private
    (weakref_lru_cache,) = caching
    installed = [p for p in table if p is jax_primitives.scan_p or (p.name in entries and entries[p.name].with_bodies)]

    def of_node(primitive: Primitive) -> Primitive:
        """Return the primitive of a node: since 0.12 `jax.vjp` has nodes for higher-order primitives."""
        return getattr(primitive, "prim", primitive)

    def accumulated(jaxpr: Jaxpr) -> frozenset[int]:
        """Return the numbers of the inputs to whose cotangents an accumulating primitive adds in place."""
        position = {id(v): k for k, v in enumerate(jaxpr.invars)}
        positions = {position.get(id(eqn.invars[0])) for eqn in jaxpr.eqns if eqn.primitive in _accumulating}
        for eqn in (eqn for eqn in jaxpr.eqns if of_node(eqn.primitive) in installed):
            positions |= {position.get(id(eqn.invars[k])) for k in read_by(of_node(eqn.primitive), eqn.params)}
        return frozenset(positions - {None})  # type: ignore[arg-type]

    accumulated_inputs = weakref_lru_cache(accumulated)
    # The transposed bodies are cached by jaxpr identity, so a changed jaxpr must be the same object each time.
    forwarding, merging = weakref_lru_cache(_forwarding), weakref_lru_cache(_merging)

    def read_by(primitive: Primitive, params: dict[str, Any]) -> set[int]:
        """Return the numbers of these operands of an equation."""
        bodies = entries[primitive.name].bodies(params)
        return {body.first + k for body in bodies for k in accumulated_inputs(opened(body.jaxpr))}

    def seeds(cts: Sequence[Any], args: Sequence[Any], inputs: Sequence[int]) -> tuple[list[int], dict[int, int]]:
        """Return the inputs with a running cotangent to start from, or none if all cotangents are zero.

        Several operands may have the same accumulator, whose value counts once. So the second result maps its other
        inputs to the first.
        """
        if all(type(ct) is ad.Zero for ct in cts):
            return [], {}
        hot = [k for k in inputs if isinstance(args[k], ValAccum) and type(args[k].val) is not ad.Zero]
        first = {k: next(j for j in hot if args[j] is args[k]) for k in hot}
        return [k for k in hot if first[k] == k], {k: j for k, j in first.items() if j != k}

    def take(args: Sequence[Any], hot: Sequence[int]) -> list[Any]:
        values = [args[k].val for k in hot]
        for k in hot:
            args[k].val = ad.Zero(args[k].aval)
        return values

    def once(jaxpr: Jaxpr, twins: dict[int, int], first: int = 0) -> Any:
        """Merge the inputs of a body with the same accumulator."""
        return merging(jaxpr, tuple((j - first, k - first) for k, j in twins.items())) if twins else jaxpr

    def wrapped(primitive: Primitive) -> Callable[..., Any]:
        original, entry = table[primitive], entries[primitive.name]

        def transpose(cts: Sequence[Array], *args: Any, **params: Any) -> Any:
            hot, twins = seeds(cts, args, sorted(read_by(primitive, params)))
            if hot:
                merged = [(once(body.jaxpr, twins, body.first), body.first) for body in entry.bodies(params)]
                bodies = [forwarding(jaxpr, tuple(k - first for k in hot)) for jaxpr, first in merged]
                params = entry.with_bodies(params, bodies, len(hot))
                cts = [*cts, *take(args, hot)]
            return original(cts, *args, **params)

        return transpose

    def const_to_carry(
        jaxpr: Jaxpr, hot: tuple[int, ...], left_out: tuple[int, ...], num_consts: int, num_carry: int
    ) -> Any:
        """Return the body of a scan with the consts `hot` as its last carries, unchanged, without the `left_out`."""
        inner = opened(jaxpr)
        moved = [inner.invars[k] for k in hot]
        consts = [v for k, v in enumerate(inner.invars[:num_consts]) if k not in (*hot, *left_out)]
        carry, xs = inner.invars[num_consts : num_consts + num_carry], inner.invars[num_consts + num_carry :]
        outs, ys = inner.outvars[:num_carry], inner.outvars[num_carry:]
        return replaced(
            jaxpr,
            invars=[*consts, *carry, *moved, *xs],
            outvars=[*outs, *moved, *ys],
            debug_info=inner.debug_info.with_unknown_names(),
        )

    cached_const_to_carry = weakref_lru_cache(const_to_carry)

    def rescan(params: dict[str, Any], args: Sequence[Any], moved: int, left_out: int) -> dict[str, Any]:
        """Return the parameters of a scan with `moved` consts as carries instead, and without `left_out` consts."""
        num_consts, num_carry = scan_counts(params)
        fewer = num_consts - moved - left_out
        if "num_consts" in params:
            return params | {"num_consts": fewer, "num_carry": num_carry + moved}
        # Since 0.11, with `ft_in`. Without it we cannot change the numbers of operands of a scan.
        from jax._src import flattree as ft

        num_ys = len(opened(params["jaxpr"]).outvars) - num_carry
        num_xs = len(args) - num_consts - num_carry
        return params | {
            "ft_in": ft.pack((ft.nones(fewer), ft.nones(num_carry + moved), ft.nones(num_xs))),
            "ft_out": ft.pack((ft.nones(num_carry + moved), ft.nones(num_ys))),
        }

    def wrapped_scan() -> Callable[..., Any]:
        original = table[jax_primitives.scan_p]

        def transpose(cts: Sequence[Array], *args: Any, **params: Any) -> Any:
            num_consts, num_carry = scan_counts(params)
            reads = sorted(k for k in read_by(jax_primitives.scan_p, params) if k < num_consts)
            hot, twins = seeds(cts, args, reads)
            if not hot:
                return original(cts, *args, **params)
            # If a twin stayed a const, it would have another cotangent: zeros, which JAX adds in the end.
            jaxpr = once(params["jaxpr"], twins)
            jaxpr = cached_const_to_carry(jaxpr, tuple(hot), tuple(twins), num_consts, num_carry)
            cts = [*cts[:num_carry], *take(args, hot), *cts[num_carry:]]
            rest = [a for k, a in enumerate(args) if k not in hot and k not in twins]
            split = num_consts - len(hot) - len(twins) + num_carry
            moved = [*rest[:split], *(args[k] for k in hot), *rest[split:]]
            return original(cts, *moved, **rescan(params, args, len(hot), len(twins)) | {"jaxpr": jaxpr})

        return transpose

    rules = {p: wrapped_scan() if p is jax_primitives.scan_p else wrapped(p) for p in installed}
    for (node_of,) in filter(None, [private_names("interpreters.ad", "vjp_node")]):
        # A node copies the rules of its primitive when JAX makes it, perhaps earlier.
        rules |= {node_of(primitive): rule for primitive, rule in rules.items()}
    return [Replacement(table, primitive, rule) for primitive, rule in rules.items()]
