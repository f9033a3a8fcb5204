"""Make equations of a jaxpr without tracing them: by a change of others, or by a function that was traced before.

To trace an equation takes JAX as long as to lower five. So a pass keeps those that it does not change, and a function
is traced once for each type of its operands.
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
from jax_tensorarray._jaxprs import jaxprs
from jax_tensorarray._types import Equation

Atom = Any  #: a variable or a literal


class Block:
    """A jaxpr that is being made of the equations of another one: it uses variables of both."""

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

        Unless it `has_lines` of the user's, its equations have that of the equation in whose place they are.
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

        What takes the place of an op of ours has the name of the op in profiles.
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


def without_consts(jaxpr: Any) -> Any:
    """Return a closed jaxpr opened, with its consts as literals: JAX has no consts for the body of a `shard_map`."""
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

    Its types do not say how arrays are divided among devices: a number or a mask that is made here would have to be
    divided as the rows are, and XLA finds that by itself. Inside of a `shard_map` the mesh is that of the types, also
    where JAX runs the body eagerly, and another mesh is set.
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
    """Return whether a type is that of an array of numbers: neither a token, a key, a ref nor a ref that is pinned."""
    return isinstance(type, ShapedArray) and isinstance(type.dtype, np.dtype)


def is_static(type: Any) -> bool:
    """Return whether the sizes of an array are known, where `jax.export` may leave some open."""
    return all(isinstance(n, int) for n in type.shape)


def has_type_of(x: Atom, y: Atom) -> bool:
    """Return whether two values have the same shape and dtype."""
    return bool(x.aval.shape == y.aval.shape and x.aval.dtype == y.aval.dtype)


def hashable(atom: Atom) -> Any:
    """Return what stands for an atom among the keys of a dictionary."""
    return id(atom) if isinstance(atom, Literal) else atom
