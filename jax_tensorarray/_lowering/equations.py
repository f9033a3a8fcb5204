"""Make equations of a jaxpr without tracing all of it: change other equations, or inline a function traced before.

JAX traces one equation in the time in which it lowers five. So a pass keeps the equations that it does not change, and
we trace a function once for each type of its operands.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Literal
from jax.sharding import AbstractMesh, AxisType, use_abstract_mesh

from jax_tensorarray import _compat
from jax_tensorarray._jaxprs import jaxprs, kinds
from jax_tensorarray._types import Equation

Atom = Any  #: a variable or a literal


class Block:
    """Builds a jaxpr from the equations of another one, and shares its variables."""

    def __init__(self, like: Any) -> None:
        self.like = like
        inner = _compat.opened(like)
        self.eqns: list[Equation] = []
        self.constvars, self.consts = list(inner.constvars), list(getattr(like, "consts", ()))
        self.names: dict[Any, Atom] = {}  #: the atom that replaces a variable from now on

    def read(self, atom: Atom) -> Atom:
        """Return the atom that replaces a variable, or a literal itself."""
        return atom if isinstance(atom, Literal) else self.names.get(atom, atom)

    def add(self, eqn: Equation, **changes: Any) -> Equation:
        """Add an equation, with its operands replaced."""
        if "invars" not in changes and self.names:
            changes["invars"] = [self.read(v) for v in eqn.invars]
        eqn = eqn.replace(**changes) if changes else eqn
        self.eqns.append(eqn)
        return eqn

    def rename(self, variables: Iterable[Any], atoms: Iterable[Atom]) -> None:
        self.names.update((v, x) for v, x in zip(variables, atoms, strict=True) if v is not x)

    def inlined(
        self,
        jaxpr: Any,
        operands: Sequence[Atom],
        at: Equation,
        visit: Callable[[Equation], Any],
        name: str = "",
        *,
        has_lines: bool = True,
    ) -> list[Atom]:
        """Visit the equations of a closed jaxpr with new variables. Return the atoms of its results.

        With `has_lines` the equations keep their own source lines, else they get the line of the equation `at`.
        """
        inner = _compat.opened(jaxpr)
        new: dict[Any, Atom] = dict(zip(inner.invars, operands, strict=True))
        for v, value in zip(inner.constvars, getattr(jaxpr, "consts", ()), strict=True):
            new[v] = _compat.new_variable(v.aval)
            self.constvars.append(new[v])
            self.consts.append(value)

        def of(atom: Atom) -> Atom:
            return atom if isinstance(atom, Literal) else new[atom]

        for eqn in inner.eqns:
            outvars = [v if _compat.is_drop(v) else _compat.new_variable(v.aval) for v in eqn.outvars]
            new.update(zip(eqn.outvars, outvars, strict=True))
            visit(
                eqn.replace(
                    invars=[of(v) for v in eqn.invars],
                    outvars=outvars,
                    source_info=_compat.within(eqn, at, name, has_line=has_lines),
                )
            )
        return [self.read(of(v)) for v in inner.outvars]

    def call(self, f: Callable[..., Any], operands: Sequence[Atom], at: Equation, **options: Any) -> list[Atom]:
        """Add the equations of a function of arrays instead of an equation. Its options are hashable.

        Profiles show them under the name of the op of ours that they replace.
        """
        jaxpr = traced(f, tuple(_type(x) for x in operands), tuple(options.items()))
        name = at.primitive.name if jaxprs.is_of_ours(at) else ""
        return self.inlined(jaxpr, operands, at, self.eqns.append, name, has_lines=False)

    def jaxpr(self, invars: Sequence[Any] | None = None, outvars: Sequence[Atom] | None = None) -> Any:
        """Return the closed jaxpr."""
        inner = _compat.opened(self.like)
        invars = inner.invars if invars is None else invars
        outvars = [self.read(v) for v in inner.outvars] if outvars is None else outvars
        return _compat.made_jaxpr(self.like, invars, outvars, self.eqns, self.constvars, self.consts)


def equation_at(at: Equation, primitive: Any, operands: Iterable[Atom], result: Any, **params: Any) -> Equation:
    """Return an equation with the source line of another one."""
    return at.replace(primitive=primitive, params=params, invars=list(operands), outvars=[result], effects=set())


def without_consts(jaxpr: Any) -> Any:
    """Open a closed jaxpr, with its consts as literals: the body of a `shard_map` cannot have consts."""
    inner, block = _compat.opened(jaxpr), Block(jaxpr)
    if not block.constvars:
        return inner
    block.rename(block.constvars, [Literal(x, v.aval) for v, x in zip(block.constvars, block.consts, strict=True)])
    block.constvars, block.consts = [], []
    for eqn in inner.eqns:
        block.add(eqn)
    return _compat.opened(block.jaxpr())


def _type(x: Atom) -> Any:
    return x.aval


@functools.lru_cache(maxsize=1024)
def traced(f: Callable[..., Any], types: tuple[Any, ...], options: tuple[tuple[str, Any], ...] = ()) -> Any:
    """Return the closed jaxpr of a function of arrays of these types. Numbers may have 64 bits.

    We remove explicit shardings from the types. With them, each mask made here would need the sharding of the rows,
    which XLA finds by itself. Inside a `shard_map` we set the mesh of the types, because another mesh is set where JAX
    runs the body eagerly.
    """
    meshes = [getattr(getattr(x, "sharding", None), "mesh", NO_MESH) for x in types]
    divided = [_divides(mesh) for mesh in meshes]
    manual = [mesh for mesh in meshes if AxisType.Manual in mesh.axis_types]
    with contextlib.ExitStack() as around:
        around.enter_context(jax.enable_x64(True))
        if any(divided) or manual:
            around.enter_context(use_abstract_mesh(NO_MESH if any(divided) else manual[0]))
        undivided = [x.update(sharding=None) if each else x for x, each in zip(types, divided, strict=True)]
        return jax.make_jaxpr(functools.partial(f, **dict(options)))(*undivided)


NO_MESH = AbstractMesh((), ())


def _divides(mesh: AbstractMesh) -> bool:
    return not mesh.empty and AxisType.Manual not in mesh.axis_types


def is_of_numbers(type: Any) -> bool:
    """Return whether a type is that of an array of numbers: not a token, a key, or a ref, pinned or not."""
    return isinstance(type, ShapedArray) and isinstance(type.dtype, np.dtype)


def is_static(type: Any) -> bool:
    """Return whether all sizes of an array are numbers: `jax.export` may leave some symbolic."""
    return all(isinstance(n, int) for n in type.shape)


def computes_elements(eqn: Equation) -> bool:
    """Return whether an equation computes each element of an array from one of its operands, as `jnp.sin` does."""
    if eqn.primitive.name not in kinds.COMPUTES or len(eqn.outvars) > 1:
        return False
    of, *operands = (v.aval for v in (*eqn.outvars, *eqn.invars))
    if not all(map(is_static, (of, *operands))) or all(x.shape != of.shape for x in operands):
        return False
    return all(not x.shape or all(n in (1, m) for n, m in zip(x.shape, of.shape, strict=True)) for x in operands)


def has_type_of(x: Atom, y: Atom) -> bool:
    """Return whether two values have the same shape and dtype."""
    return bool(x.aval.shape == y.aval.shape and x.aval.dtype == y.aval.dtype)


def hashable(atom: Atom) -> Any:
    """Return a dictionary key for an atom: a literal has no hash."""
    return id(atom) if isinstance(atom, Literal) else atom
