"""Return the side effects of a function as further results: changes of its arguments, and of objects around it.

    state["n"] += x; return x                # traced with copies of the arguments
    # becomes
    return x, {"n": state["n"] + x}          # every call puts the new contents into the caller's `state`

Lists, dicts and objects among the arguments may change. Objects that the function closes over belong to the program
itself, so an array that is being traced must not stay in one of them: that is an error.
"""

import functools
import types
from collections import deque
from collections.abc import Iterator, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jax_tensorarray._in_place import nnx, surroundings

_one_level = jax.tree_util.default_registry.flatten_one_level

_BUILT_IN = (list, dict, set, deque)

_REST = "Return the new value instead, and store it outside of the function."


@dataclass(frozen=True)
class _TreePath:
    """Where a node is in the arguments: the number of the child, level by level. A leaf for JAX."""

    path: tuple[int, ...]

    def of(self, arguments: Any) -> Any:
        for k in self.path:
            arguments = list(_one_level(arguments)[0])[k]
        return arguments


@dataclass(frozen=True)
class _Names:
    """The keys of a dict, or the names of attributes. A leaf for JAX."""

    names: tuple[Any, ...]


class Mutation(NamedTuple):
    """The new contents of a node.

    They are the items of a list, all values of a dict, or the attributes of an object that have changed.
    """

    place: _TreePath
    names: _Names
    values: list[Any]


class Watch:
    """The objects that a function may change: nodes of its arguments, and what it closes over."""

    def __init__(self, fun: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.fun = fun
        self.arguments = tuple(args), kwargs
        self.leaves: list[Any]
        self.tree: Any
        self.leaves, self.tree = jax.tree.flatten(self.arguments, is_leaf=nnx.is_state)
        self.nodes = [(place, node, _copied(node)) for place, node in _nodes(self.arguments, ())]
        self.around = [(name, x, _copied(x)) for name, x in _around(fun, self.leaves)]
        self.state = surroundings.state(fun, self.leaves)

    def changes(self) -> list[Mutation]:
        """Return what has changed in the arguments. Raise TypeError for what cannot be carried out."""
        self._check_surroundings()
        leaves, tree = jax.tree.flatten(self.arguments, is_leaf=nnx.is_state)
        if tree == self.tree and all(x is y for x, y in zip(leaves, self.leaves, strict=True)):
            return []
        places = {id(node): place for place, node, _ in self.nodes}
        found = []
        for place, node, before in self.nodes:
            now = _contents(node)
            if isinstance(now, dict):
                changed = [k for k in now if k not in before or before[k] is not now[k]]
                names = list(now) if isinstance(node, dict) else changed
                is_same, values = not changed and len(before) == len(now), [now[k] for k in names]
            else:
                is_same = len(before) == len(now) and all(x is y for x, y in zip(before, now, strict=True))
                names, values = [], list(now)
            if not is_same:
                values = [places.get(id(x), x) for x in values]
                found.append(Mutation(place, _Names(tuple(names)), values))
        if not found:
            raise TypeError(f"in_place: {_named(self.fun)} changes one of its arguments inside. {_REST}")
        return found

    def _check_surroundings(self) -> None:
        """Raise TypeError if a traced array is left where the caller does not expect one, and remove it."""
        for name, x, before in self.around:
            now = _contents(x)
            for attribute in now.keys() - before if isinstance(now, dict) and now is not x else ():
                if isinstance(getattr(type(x), attribute, None), functools.cached_property):
                    del now[attribute]  # it is computed again when it is needed
            key = _new_tracer(before, now)
            if key is not None:
                _put(x, before)
                raise TypeError(
                    f"in_place: {_named(self.fun)} stores a traced array in `{name}{_item(x, key)}`, outside of the "
                    f"function. Later calls would not do so, since they run the compiled function. {_REST}"
                )
        for (before, (told, line)), (now, _) in zip(self.state, surroundings.state(self.fun, self.leaves), strict=True):
            if _new_tracer(before, now) is not None:
                raise TypeError(
                    f"in_place: {_named(self.fun)} changes {told}. Put in_place around the whole function instead: "
                    f"{line}."
                )


def make(changes: Sequence[Mutation], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Change the arguments of the caller."""
    arguments = (tuple(args), kwargs)
    nodes = [change.place.of(arguments) for change in changes]
    contents = [[x.of(arguments) if isinstance(x, _TreePath) else x for x in change.values] for change in changes]
    for node, change, values in zip(nodes, changes, contents, strict=True):
        if isinstance(node, list):
            _put(node, values)
        elif isinstance(node, dict):
            _put(node, dict(zip(change.names.names, values, strict=True)))
        else:
            vars(node).update(zip(change.names.names, values, strict=True))


def _nodes(x: Any, path: tuple[int, ...]) -> Iterator[tuple[_TreePath, Any]]:
    """Yield the nodes of a pytree that can be changed."""
    level = _one_level(x)
    if level is None or type(x).__module__.startswith("jax_tensorarray.") or nnx.is_state(x):
        return
    if _contents(x) is not None:
        yield _TreePath(path), x
    for k, child in enumerate(level[0]):
        yield from _nodes(child, (*path, k))


def _contents(x: Any) -> Any:
    """Return what can be changed in an object: a list, or a dict of items or attributes. None if nothing can be."""
    if isinstance(x, MutableSequence | dict | set):
        return x
    return getattr(x, "__dict__", None)


def _copied(x: Any) -> Any:
    contents = _contents(x)
    return dict(contents) if isinstance(contents, dict) else list(contents)


def _put(x: Any, contents: Any) -> None:
    """Give an object the contents of a copy."""
    of = _contents(x)
    of.clear()
    of.extend(contents) if isinstance(of, MutableSequence) else of.update(contents)


def _new_tracer(before: Any, now: Any) -> Any:
    """Return the key of an item in which there is a traced array, if it was not there before. None if there is none."""
    items, known = (dict(x if isinstance(x, dict) else enumerate(x)) for x in (now, before))
    seen = set(map(id, known.values()))
    for key, x in items.items():
        leaves = () if id(x) in seen else jax.tree.leaves(x, is_leaf=_is_odd)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return key
    return None


def _item(x: Any, key: Any) -> str:
    if isinstance(x, dict | list | deque):
        return f"[{key!r}]"
    return "" if isinstance(x, set) else f".{key}"


def _is_odd(x: Any) -> bool:
    """Return whether JAX cannot flatten a node, such as a dict whose keys have no order."""
    try:
        _one_level(x)
    except Exception:
        return True
    return False


def _around(fun: Any, leaves: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield lists, dicts, sets and objects that a function can reach, other than its arguments, with a name of each.

    They are in its closure, in its globals, in the object of a method, and in objects among the leaves of its
    arguments. Other functions and classes of its module are searched in the same way.
    """
    module = _module_of(fun)
    seen: set[int] = set()
    waiting: deque[tuple[str, Any]] = deque([("", fun)])
    waiting.extend((type(x).__name__, x) for x in leaves if _is_object(x, module))
    while waiting and len(seen) < 2000:
        name, x = waiting.popleft()
        if id(x) in seen:
            continue
        seen.add(id(x))
        waiting.extend(_parts(name, x, module))
        if isinstance(x, _BUILT_IN) or _is_object(x, module):
            yield name, x


def _module_of(fun: Any) -> Any:
    while not hasattr(fun, "__module__") or isinstance(fun, functools.partial):
        fun = getattr(fun, "func", None)
    return fun.__module__


def _parts(name: str, x: Any, module: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(x, types.MethodType):
        yield "self", x.__self__
        yield name, x.__func__
    elif isinstance(x, types.FunctionType):
        if x.__module__ == module:
            cells = zip(x.__code__.co_freevars, x.__closure__ or (), strict=True)
            yield from ((free, cell.cell_contents) for free, cell in cells if _is_filled(cell))
            yield from ((k, x.__globals__[k]) for k in _names_in(x.__code__) if k in x.__globals__)
            yield from (("default", y) for y in x.__defaults__ or ())
    elif isinstance(x, functools.partial):
        yield name, x.func
        yield from (("partial", y) for y in (*x.args, *x.keywords.values()))
    elif hasattr(x, "__wrapped__"):
        yield name, x.__wrapped__
    elif _is_object(x, module) or (isinstance(x, type) and x.__module__ == module):
        yield from ((f"{name}.{attribute}", y) for attribute, y in list(vars(x).items()))
    elif isinstance(x, dict):
        yield from ((f"{name}[{key!r}]", y) for key, y in list(x.items()) if not isinstance(y, jax.Array))
    elif isinstance(x, list | tuple):
        yield from ((f"{name}[{k}]", y) for k, y in enumerate(x) if not isinstance(y, jax.Array))


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is cell.cell_contents
    except ValueError:
        return False


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _is_object(x: Any, module: Any) -> bool:
    """Return whether `x` is an instance of a class of this module."""
    return type(x).__module__ == module and hasattr(x, "__dict__") and not isinstance(x, type | types.FunctionType)


def _named(fun: Any) -> str:
    return f"`{getattr(fun, '__name__', type(fun).__name__)}`"
