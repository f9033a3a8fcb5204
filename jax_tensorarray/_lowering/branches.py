"""Rewrite conditionals whose branches update buffers to a form that XLA before 0.12 runs in place.

    b = switch(i, [write, read, add], b)

    x = cond(i == 1, keep, read, b)    # first the branches that only read
    b = cond(i == 0, keep, write, b)
    b = cond(i == 2, keep, add, b)

Before jaxlib 0.12, XLA's copy insertion takes the branches of a conditional for steps that run one after the other. A
branch that updates a buffer in place then seems to destroy what a later branch still needs, and XLA copies the buffer
in every execution. Only an update in the last branch is safe. So of two branches the one that updates becomes the last.
Any other conditional whose earlier branches update buffers becomes a chain of two-way conditionals. Each of them either
passes the results so far on or, as its last branch, runs one of the original branches. Exactly one does the latter.

The pass runs only before jaxlib 0.12, where it is worth its code. It changes 12 of 471 programs and gradients of
`benchmarks.harm`. Without it, 11 of the 12 touch whole buffers 2 to 18 times per step, and nine take 2.6 to 43 times as
long as with it, about as long as in plain JAX (jax 0.10.2, 29 November 2026, buffers of 4 and 16 KB). On 0.12, none of
43 random conditionals in loops has one copy more without the pass, and a chain takes longer: 1.2 times for the gradient
of a switch of three branches. One program of `benchmarks` has more copies on 0.12 without the pass: `nelder_mead` makes
four of 4 KB per step, as in plain JAX, instead of two. It takes 1.04 times as long as in plain JAX.

We also remove operands that no branch uses. Otherwise the next pass, `ordering`, would take the conditional for a
reader of such a buffer.
"""

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.extend.core import Literal

from jax_tensorarray import _compat
from jax_tensorarray._jaxprs.uses import Uses
from jax_tensorarray._lowering.equations import Atom, Block, has_type_of, is_of_numbers, is_static
from jax_tensorarray._lowering.ownership import Ownership
from jax_tensorarray._lowering.scopes import bodies_of, with_bodies
from jax_tensorarray._types import Equation


def split_updating_branches(jaxpr: Any) -> Any:
    """Rewrite every conditional: at most its last branch updates an outer buffer in place, no operand is unused."""
    return _split_in(jaxpr, Ownership())


def _split_in(jaxpr: Any, ownership: Ownership) -> Any:
    block, changed = Block(_compat.closed(jaxpr)), False
    for eqn in _compat.opened(jaxpr).eqns:
        new = with_bodies(eqn, [_split_in(x, ownership) for x in bodies_of(eqn)])
        if eqn.primitive.name == "cond":
            new = _without_unused_operands(new)
            if (results := _split(block, new, ownership)) is not None:
                block.rename(eqn.outvars, results)
                changed = True
                continue
        changed |= new is not eqn
        block.add(new)
    return block.jaxpr() if changed else jaxpr


def _split(block: Block, eqn: Equation, ownership: Ownership) -> Sequence[Atom] | None:
    """Add the conditionals that replace one, and return their results. Return None if the conditional stays."""
    branches, (index, *operands) = eqn.params["branches"], map(block.read, eqn.invars)
    owned = [_owned_operands(branch, operands, ownership) for branch in branches]
    updating = [k for k, values in enumerate(owned) if values]
    if not updating or updating == [len(branches) - 1] or not all(map(_is_plain, eqn.outvars)):
        return None
    if eqn.params.get("branches_platforms"):  # JAX leaves out the branches of other platforms by their order
        return None
    if len(branches) == 2 and updating == [0]:
        # We swap the two. With three branches, 0.10 copies if the two others return different values.
        return _cond(block, eqn, _is_run(block, eqn, index, 0, 2), operands, branches[::-1], eqn.outvars)
    buffers = _updated_buffers(eqn, operands, dict.fromkeys(v for values in owned for v in values))
    results = [buffers.get(j) or _zeros(block, eqn, v) for j, v in enumerate(eqn.outvars)]
    for k in sorted(range(len(branches)), key=lambda k: k in updating):
        versions = {id(v): results[j] for j, v in buffers.items()}
        is_run, current = _is_run(block, eqn, index, k, len(branches)), [versions.get(id(x), x) for x in operands]
        results = _run_if(block, eqn, is_run, branches[k], current, results)
    return results


def _is_plain(v: Any) -> bool:
    return is_of_numbers(v.aval) and is_static(v.aval)


def _cond(
    block: Block, eqn: Equation, index: Atom, operands: Sequence[Atom], branches: Sequence[Any], like: Sequence[Any]
) -> list[Any]:
    """Add a conditional whose results have the types of the variables `like`, and return them.

    Its effects are those of its branches: JAX refuses to lower a conditional with other effects.
    """
    results = [_compat.new_variable(v.aval) for v in like]
    params = eqn.params | {"branches": tuple(branches)}
    effects = set().union(*(_compat.opened(x).effects for x in branches)) & {*eqn.effects}
    new = eqn.replace(invars=[index, *operands], outvars=results, params=params, effects=effects)
    block.eqns.append(_without_unused_operands(new))
    return results


def _without_unused_operands(eqn: Equation) -> Equation:
    """Remove the operands that no branch uses."""
    index, *operands = eqn.invars
    used = sorted(set().union(*map(_used_arguments, eqn.params["branches"])))
    if len(used) == len(operands):
        return eqn
    branches = []
    for branch in eqn.params["branches"]:
        block, inner = Block(branch), _compat.opened(branch)
        block.eqns = list(inner.eqns)
        branches.append(block.jaxpr([inner.invars[k] for k in used]))
    return eqn.replace(invars=[index, *(operands[k] for k in used)], params=eqn.params | {"branches": tuple(branches)})


@_compat.cached
def _used_arguments(branch: Any) -> set[int]:
    """Return the numbers of the arguments that a branch uses."""
    inner = _compat.opened(branch)
    used = {v for eqn in inner.eqns for v in eqn.invars if not isinstance(v, Literal)}
    used |= {v for v in inner.outvars if not isinstance(v, Literal)}
    return {k for k, v in enumerate(inner.invars) if v in used}


def _owned_operands(branch: Any, operands: Sequence[Atom], ownership: Ownership) -> list[Any]:
    """Return the operands that a branch updates in place."""
    owned = ownership.values(branch, ownership.owns)
    invars = _compat.opened(branch).invars
    return [x for x, v in zip(operands, invars, strict=True) if v in owned and not isinstance(x, Literal)]


def _updated_buffers(eqn: Equation, operands: Sequence[Atom], owned: dict[Any, None]) -> dict[int, Any]:
    """Map each result that is an updated outer buffer, by number, to that buffer."""
    buffers: dict[int, Any] = {}
    unmatched = dict(owned)
    for branch in eqn.params["branches"]:
        inner = _compat.opened(branch)
        uses = Uses(inner)
        outer = dict(zip(inner.invars, operands, strict=True))
        for j, v in enumerate(inner.outvars):
            source = _source(v, outer, owned, uses)
            if j not in buffers and source is not None and source in unmatched:
                buffers[j] = source
                del unmatched[source]
    for j, result in enumerate(eqn.outvars):
        same = [v for v in unmatched if _are_plain_and_alike(v, result)]
        if j not in buffers and same:
            buffers[j] = same[0]
            del unmatched[same[0]]
    return buffers


def _source(value: Atom, outer: dict[Any, Atom], owned: dict[Any, None], uses: Uses) -> Any:
    """Follow a value back to an owned buffer: result `k` may update operand `k` if both have the same type."""
    while not isinstance(value, Literal):
        if value in outer:
            buffer = outer[value]
            return None if isinstance(buffer, Literal) or buffer not in owned else buffer
        eqn = uses.maker(value)
        if eqn is None or eqn.primitive.name == "cond":
            return None
        k = eqn.outvars.index(value)
        k += len(eqn.invars) - len(eqn.outvars) if eqn.primitive.name == "while" else 0
        if k >= len(eqn.invars) or not _are_plain_and_alike(eqn.invars[k], value):
            return None
        value = eqn.invars[k]
    return None


def _are_plain_and_alike(x: Atom, y: Atom) -> bool:
    return _is_plain(x) and _is_plain(y) and has_type_of(x, y)


def _run_if(
    block: Block, eqn: Equation, is_run: Atom, branch: Any, operands: Sequence[Atom], results: Sequence[Atom]
) -> list[Atom]:
    """Add a conditional that runs a branch or returns the results so far. Return the results after it.

    A result that the branch also returns unchanged bypasses the conditional. Otherwise XLA allocates another buffer for
    it, and copies.
    """
    inner = _compat.opened(branch)
    outer = dict(zip(inner.invars, operands, strict=True))
    changed = [
        j
        for j, (v, x) in enumerate(zip(inner.outvars, results, strict=True))
        if isinstance(v, Literal) or outer.get(v) is not x
    ]
    if not changed and not inner.eqns:
        return list(results)
    changed = changed or list(range(len(results)))  # JAX drops a conditional without results, also its effects
    more = {id(results[j]): results[j] for j in changed}
    for x in operands:
        more.pop(id(x), None)
    arguments = [*operands, *more.values()]
    variables = [_compat.new_variable(x.aval) for x in arguments]
    passed = dict(zip(map(id, arguments), variables, strict=True))
    keep, run = Block(branch), Block(branch)
    keep.constvars, keep.consts, run.eqns = [], [], list(inner.eqns)
    both = [
        keep.jaxpr(variables, [passed[id(results[j])] for j in changed]),
        run.jaxpr([*inner.invars, *variables[len(operands) :]], [inner.outvars[j] for j in changed]),
    ]
    new = _cond(block, eqn, is_run, arguments, both, [eqn.outvars[j] for j in changed])
    after = dict(zip(changed, new, strict=True))
    return [after.get(j, x) for j, x in enumerate(results)]


def _zeros(block: Block, eqn: Equation, like: Any) -> Atom:
    (result,) = block.call(_made_of_zeros, [], eqn, shape=like.aval.shape, dtype=like.aval.dtype)
    return result


def _made_of_zeros(*, shape: tuple[int, ...], dtype: Any) -> Any:
    return [lax.full(shape, 0, dtype)]


def _is_run(block: Block, eqn: Equation, index: Atom, k: int, count: int) -> Atom:
    """Return 1 if a conditional of `count` branches would run branch `k` for `index`, else 0."""
    (flag,) = block.call(_runs, [index], eqn, k=k, count=count)
    return flag


def _runs(index: Any, *, k: int, count: int) -> Any:
    def number(n: int) -> Any:
        return index.dtype.type(n)

    # An index out of range runs the last branch.
    is_last = k == count - 1
    runs = lax.bitwise_or(lax.lt(index, number(0)), lax.ge(index, number(k))) if is_last else lax.eq(index, number(k))
    return [lax.convert_element_type(runs, index.dtype)]
