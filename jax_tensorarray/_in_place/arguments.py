"""Partition the leaves of arguments and results into those that JAX traces and static ones, which pass by JAX.

JAX gets a `Given` instead of an argument with a static leaf, and a `Results` from the function. Both are nodes of a
pytree whose children are the arrays. The static leaves are in the data of the node, so JAX compares them when it looks
for a compiled program. The pytree of the user is only ever rebuilt from its own leaves.
"""

import functools
import inspect
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from jax_tensorarray import _faults
from jax_tensorarray._in_place import changes

#: Containers in which a float is traced. A named tuple is one too.
_CONTAINERS = (list, tuple, dict, OrderedDict, defaultdict, type(None))

#: The types of arrays that have been seen.
_ARRAYS: set[type] = set()

_NUMBERS = (float, complex)


def is_array(x: Any) -> bool:
    """Return whether `x` is an array. A bool, an int and a Python number with a fraction are not."""
    if type(x) in _ARRAYS:
        return True
    if isinstance(x, int | str | jax.ShapeDtypeStruct) or _is_number(x):
        return False
    if isinstance(x, jax.core.Tracer | jax.Array):
        _ARRAYS.add(type(x))
        return True
    if hasattr(x, "__jax_array__"):  # JAX makes it an array where it is used, but not as an argument
        return False
    try:
        jax.typeof(x)
    except TypeError:
        return False
    return True


def is_tracer(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


def _is_number(x: Any) -> bool:
    return isinstance(x, float | complex) and not isinstance(x, np.generic)


@functools.lru_cache(maxsize=128)
def _in_containers(tree: Any) -> tuple[bool, ...]:
    """Return of each leaf of a pytree whether only lists, tuples and dicts are around it."""

    def visit(tree: Any, inside: bool) -> Iterator[bool]:
        data = tree.node_data()
        if data is None:
            yield inside
            return
        kind = data[0]
        inside = inside and (kind in _CONTAINERS or (issubclass(kind, tuple) and hasattr(kind, "_fields")))
        for child in tree.children():
            yield from visit(child, inside)

    return tuple(visit(tree, True))


class _Same(int):
    """Stands for a leaf that is the same array as the leaf of this number."""


class Fixed:
    """The structure of a pytree, and its leaves that are not traced, each with its number.

    Two are equal if JAX may use a program that it has compiled for one of them for the other.
    """

    __slots__ = ("_hash", "_key", "forwards", "leaves", "tree")

    def __init__(
        self,
        tree: Any,
        leaves: Sequence[tuple[int, Any]],
        objects: Mapping[int, int] = MappingProxyType({}),
        forwards: tuple[tuple[int, int], ...] = (),
    ) -> None:
        self.tree, self.leaves, self.forwards = tree, leaves, forwards
        key = tuple((k, objects[k]) if k in objects else (k, *_value_of(x)) for k, x in leaves)
        self._key = tree, key, forwards
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fixed) and self._hash == other._hash and self._key == other._key

    def all_leaves(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the leaves of the pytree with these arrays."""
        found = list(arrays)
        for k, x in self.leaves:
            found.insert(k, arrays[x] if type(x) is _Same else x)
        return found

    def filled(self, arrays: Sequence[Any]) -> Any:
        """Return the pytree with these arrays."""
        return self.tree.unflatten(self.all_leaves(arrays))


class _Path(tuple[Any, ...]):
    """Several keys of a pytree as one."""

    def __str__(self) -> str:
        return jax.tree_util.keystr(self)


def _value_of(x: Any) -> tuple[type, Any]:
    """Return what tells a leaf from others: True is not 1, -0.0 is not 0.0, and nan is nan."""
    return type(x), repr(x) if _is_number(x) else x


class _Node:
    """A pytree of which JAX sees the arrays."""

    __slots__ = ("arrays", "fixed")

    def __init__(self, arrays: Sequence[Any], fixed: Fixed) -> None:
        self.arrays, self.fixed = arrays, fixed

    def flattened(self) -> tuple[Sequence[Any], Fixed]:
        return self.arrays, self.fixed

    def with_keys(self) -> tuple[list[tuple[Any, Any]], Fixed]:
        return list(zip(self.names(), self.arrays, strict=True)), self.fixed

    def names(self) -> Sequence[Any]:
        """Return the key of each array in the pytree of the user, for JAX's messages."""
        raise NotImplementedError


class Given(_Node):
    """Stands for an argument. It becomes the argument as soon as JAX builds the tree again."""

    __slots__ = ()

    def names(self) -> Sequence[Any]:
        paths, _ = jax.tree_util.tree_flatten_with_path(self.fixed.filled(self.arrays))
        fixed = {k for k, _ in self.fixed.leaves}
        return [_Path(path) for k, (path, _) in enumerate(paths) if k not in fixed]


class Results(_Node):
    """The result of a function, and its changes of the arguments.

    A result that was passed in is in `fixed.forwards`, with its number among the leaves of the arguments.
    """

    __slots__ = ("_names",)

    def __init__(self, arrays: Sequence[Any], fixed: Fixed, names: Sequence[Any] | None = None) -> None:
        super().__init__(arrays, fixed)
        self._names = names

    @classmethod
    def of(cls, result: Any, given: Sequence[Any], changed: Sequence[changes.Mutation] = ()) -> "Results":
        """Split what was returned. `given` are the leaves of the arguments.

        An int that was not passed in becomes an array, as for `jax.jit`, and so does a float in a list, tuple or dict;
        a closure is an error, as it may hold tracers.
        """
        paths, tree = jax.tree_util.tree_flatten_with_path((result, list(changed)))
        number, in_containers = {id(x): j for j, x in enumerate(given)}, _in_containers(tree)
        arrays: list[Any] = []
        places: dict[int, int] = {}
        names: list[_Path] = []
        kept: list[tuple[int, Any]] = []
        forwards: list[tuple[int, int]] = []
        for k, (path, x) in enumerate(paths):
            j = number.get(id(x))
            if j is not None and (not is_array(x) or getattr(x.aval, "weak_type", False)):
                forwards.append((k, j))
            if j is not None and not is_array(x):
                kept.append((k, None))
            elif _stays(x) or (_is_number(x) and not in_containers[k]):
                kept.append((k, x))
            elif path[0].idx and id(x) in places:  # a change that is returned too is one array
                kept.append((k, _Same(places[id(x)])))
            else:
                places[id(x)] = len(arrays)
                arrays.append(x)
                names.append(_Path(path[1:]))
        return cls(arrays, Fixed(tree, kept, forwards=tuple(forwards)), names)

    def names(self) -> Sequence[Any]:
        return self._names or list(map(jax.tree_util.SequenceKey, range(len(self.arrays))))

    def filled(self, given: Sequence[Any]) -> tuple[Any, list[changes.Mutation]]:
        """Return the result and the changes, with what was passed in."""
        leaves = self.fixed.all_leaves(self.arrays)
        for k, j in self.fixed.forwards:
            if not is_array(given[j]):
                leaves[k] = given[j]
        return self.fixed.tree.unflatten(leaves)

    def finished(self, call: "Call", args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of the function, and make its changes in the arguments of the call."""
        result, changed = self.filled(call.leaves() if self.fixed.forwards else ())
        if changed:
            changes.make(changed, args, kwargs)
        return result


class Shaped(_Node):
    """The result of a function that is traced or lowered and not called. JAX builds the pytree of the user from it."""

    __slots__ = ()

    @classmethod
    def of(cls, results: Results, given: Sequence[Any]) -> Any:
        """Return the result. It is as it is unless it has leaves that are not arrays."""
        result, _ = results.filled(given)
        if all(map(is_array, jax.tree.leaves(result))):
            return result
        leaves, tree = jax.tree.flatten(result)
        fixed = [(k, x) for k, x in enumerate(leaves) if not is_array(x)]
        return cls(list(filter(is_array, leaves)), Fixed(tree, fixed))

    def names(self) -> Sequence[Any]:
        return list(map(jax.tree_util.SequenceKey, range(len(self.arrays))))


def _register(kind: type[_Node], unflatten: Callable[[Fixed, Any], Any]) -> None:
    jax.tree_util.register_pytree_with_keys(kind, kind.with_keys, unflatten, kind.flattened)


_register(Given, lambda fixed, arrays: fixed.filled(arrays))
_register(Shaped, lambda fixed, arrays: fixed.filled(arrays))
_register(Results, lambda fixed, arrays: Results(arrays, fixed))


def _is_constant(x: Any) -> bool:
    """Return whether `x` is a value that can be hashed, a function, a class or a module.

    Any other object may be changed between two calls.
    """
    owner = getattr(x, "__self__", x)  # of a method
    if hasattr(owner, "__name__"):
        return True
    own_hash: Any = type(owner).__hash__
    if own_hash is None or own_hash is object.__hash__:
        return False
    try:
        hash(owner)
    except TypeError:
        return False
    return True


def _stays(x: Any) -> bool:
    """Return whether a result is a constant that cannot hold a tracer."""
    return (
        not is_array(x)
        and not isinstance(x, int | float | complex)
        and _is_constant(x)
        and getattr(x, "__closure__", None) is None
    )


class _Contents:
    """Collects all that an object of Python consists of, if that is little and can be compared."""

    def __init__(self) -> None:
        self.room = 200
        self.found: dict[int, int] = {}

    def of(self, x: Any) -> Hashable:
        """Return a value that is the same as long as the object is. Raise TypeError if there is no such value."""
        self.room -= 1
        if id(x) in self.found:
            return "again", self.found[id(x)]
        if isinstance(x, jax.Array | jax.core.Tracer | np.ndarray) or not self.room:
            raise TypeError
        if isinstance(x, type(None) | bool | int | float | complex | str | bytes):
            return _value_of(x)
        self.found[id(x)] = len(self.found)
        if type(x) in (list, tuple):
            return type(x), tuple(map(self.of, x))
        if type(x) is dict:
            return type(x), tuple((self.of(k), self.of(v)) for k, v in x.items())
        if type(x) in (set, frozenset):
            return type(x), frozenset(x)
        if isinstance(x, functools.partial) and type(x) is functools.partial:
            return type(x), self.of(x.func), self.of(x.args), self.of(x.keywords), self.of(vars(x))
        if isinstance(x, types.MethodType):
            return type(x), self.of(x.__self__), x.__func__
        if _is_constant(x):
            return type(x), x
        if not all(_is_plain(kind) for kind in type(x).__mro__[:-1]):
            raise TypeError
        return type(x), self.of(vars(x))


#: As CPython has it: a class that a program makes, and not one that is compiled.
_IS_MADE_BY_PROGRAM = 1 << 9


def _is_plain(kind: type) -> bool:
    """Return whether all that an instance has of this class is in its `__dict__`."""
    return bool(kind.__flags__ & _IS_MADE_BY_PROGRAM) and not vars(kind).get("__slots__")


class Call:
    """The arguments of a call as JAX gets them."""

    def __init__(self) -> None:
        self.args: list[Any] = []
        self.kwargs: dict[str, Any] = {}
        self.objects: list[Any] = []  #: those among the leaves that may be changed before the next call
        self._fixed: list[Fixed] = []
        self._leaves: dict[int | str, list[Any]] = {}  #: of the arguments that have been flattened

    def leaves(self) -> list[Any]:
        """Return the leaves of the arguments, in JAX's order."""
        given = [*enumerate(self.args), *sorted(self.kwargs.items())]
        own = [self._leaves[name] if name in self._leaves else jax.tree.leaves(x) for name, x in given]
        return [leaf for leaves in own for leaf in leaves]

    def add(self, name: int | str, x: Any, is_traced: Callable[[Any], bool]) -> Any:
        """Return an argument as JAX gets it."""
        if type(x) in _ARRAYS or type(x) in _NUMBERS:
            return x
        leaves, tree = jax.tree.flatten(x)
        self._leaves[name] = leaves
        kinds = set(map(type, leaves))
        if kinds <= _ARRAYS:
            return x
        in_containers = () if kinds.isdisjoint(_NUMBERS) else _in_containers(tree)
        kept: list[tuple[int, Any]] = []
        objects: dict[int, int] = {}
        for k, leaf in [(k, x) for k, x in enumerate(leaves) if type(x) not in _ARRAYS]:
            if in_containers[k] if in_containers and _is_number(leaf) else is_traced(leaf):
                continue
            kept.append((k, leaf))
            if not _is_constant(leaf):
                objects[k] = len(self.objects)
                self.objects.append(leaf)
        if not kept:
            return x
        arrays = list(leaves)
        for k, _ in reversed(kept):
            del arrays[k]
        fixed = Fixed(tree, kept, objects)
        if objects:
            self._fixed.append(fixed)
        return Given(arrays, fixed)

    def contents(self) -> Hashable | None:
        """Return a value that is the same as long as the objects are, or None."""
        contents = _Contents()
        try:
            return tuple(map(contents.of, self.objects))
        except (TypeError, RecursionError):
            return None

    def forget(self) -> None:
        """Drop the objects, which JAX's caches would keep."""
        for fixed in self._fixed:
            fixed.leaves = ()


class Static:
    """The arguments that `jax.jit` takes as static, by position and by name. They pass through in any case."""

    def __init__(self, fun: Callable[..., Any], argnums: Any, argnames: Any) -> None:
        given = {"static_argnums": argnums, "static_argnames": argnames}
        self.options: dict[str, Any] = {name: x for name, x in given.items() if x is not None and x != ()}
        self.nums = {argnums} if isinstance(argnums, int) else set(argnums or ())
        self.names = {argnames} if isinstance(argnames, str) else set(argnames or ())
        if len(self.options) != 1:
            return
        try:  # JAX infers each from the other
            parameters = list(inspect.signature(fun).parameters.values())
        except (TypeError, ValueError):
            return
        for k, parameter in enumerate(parameters):
            is_static = {k, k - len(parameters)} & self.nums or parameter.name in self.names
            if is_static and parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
                self.nums.add(k)
                self.names.add(parameter.name)

    def split(self, is_traced: Callable[[Any], bool], args: Sequence[Any], kwargs: dict[str, Any]) -> Call:
        """Return the call in which JAX sees the leaves that are traced, and floats in built-in containers."""
        call, size = Call(), len(args)
        call.args = [x if {k, k - size} & self.nums else call.add(k, x, is_traced) for k, x in enumerate(args)]
        call.kwargs = {name: x if name in self.names else call.add(name, x, is_traced) for name, x in kwargs.items()}
        return call


def named_as(fun: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a function the name, signature and docstring of `fun`, any callable."""
    names = ("__module__", "__name__", "__qualname__", "__doc__")
    return functools.wraps(fun, [name for name in names if hasattr(fun, name)])


def with_results(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with `Results`, which include its changes of the arguments."""

    @named_as(fun)
    def f(*args: Any, **kwargs: Any) -> Results:
        given = jax.tree.leaves((args, kwargs))
        watch = changes.Watch(fun, args, kwargs)
        result = _faults.call_user(fun, *args, **kwargs)
        return Results.of(result, given, watch.changes())

    return f
