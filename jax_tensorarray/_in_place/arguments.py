"""Which arguments and results of a function are traced, and which pass through as they are.

Constants travel in the trees of the arguments, as nodes without leaves. So JAX sees arrays only, under the names that
they have for the user, and compares the constants when it looks for what it has compiled.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

_Arguments = tuple[Sequence[Any], dict[str, Any]]


class _Constant:
    """A node of a pytree without leaves. When JAX builds the tree again, the value is in its place.

    The type of the value is compared too: True is not 1.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


jax.tree_util.register_pytree_node(
    _Constant, lambda node: ((), (type(node.value), node.value)), lambda type_and_value, _: type_and_value[1]
)


class _Place(int):
    """The number of a value that is not a constant, in the place of that value."""


#: The types whose values are all traced, as far as such values have been seen.
_ARRAYS: set[type] = {float, complex}


def are_arrays(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether all leaves are traced. Decide it by their types where that is possible, which is fast."""
    if not kwargs and _ARRAYS.issuperset(map(type, args)):
        return True
    leaves = jax.tree.leaves((args, kwargs))
    return _ARRAYS.issuperset(map(type, leaves)) or all(map(is_array, leaves))


def is_array(x: Any) -> bool:
    """Return whether `x` is traced: an array, or a Python number with a fraction. A bool and an int are not."""
    if type(x) in _ARRAYS:
        return True
    if isinstance(x, int | str | jax.ShapeDtypeStruct):
        return False
    if isinstance(x, jax.core.Tracer | jax.Array | float | complex):
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

    def map(self, f: Callable[[Any], Any], args: Sequence[Any], kwargs: dict[str, Any]) -> _Arguments:
        """Map the leaves of the arguments that are not static."""
        size = len(args)
        return (
            [x if {k, k - size} & self.nums else jax.tree.map(f, x) for k, x in enumerate(args)],
            {name: x if name in self.names else jax.tree.map(f, x) for name, x in kwargs.items()},
        )

    def split(self, is_traced: Callable[[Any], bool], *arguments: Any) -> tuple[_Arguments, list[Any]]:
        """Return the arguments with nodes for what is not traced, and the values for which only places are in them."""
        changing: list[Any] = []

        def fixed(x: Any) -> Any:
            if is_traced(x):
                return x
            if _is_constant(x):
                return _Constant(x)
            changing.append(x)
            return _Constant(_Place(len(changing) - 1))

        return self.map(fixed, *arguments), changing

    def filled(self, fun: Callable[..., Any], values: Sequence[Any]) -> Callable[..., Any]:
        """Return the function with the values in their places."""

        @named_as(fun)
        def f(*args: Any, **kwargs: Any) -> Any:
            given, named = self.map(lambda x: values[x] if isinstance(x, _Place) else x, args, kwargs)
            return fun(*given, **named)

        return f


def named_as(fun: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a function the name, signature and docstring of `fun`, any callable."""
    names = ("__module__", "__name__", "__qualname__", "__doc__")
    return functools.wraps(fun, [name for name in names if hasattr(fun, name)])


def with_constants(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with nodes for constants in its results, so that these may be of the same kinds as its
    arguments.

    What has been passed in stays what it is. Other numbers become arrays, as for `jax.jit`, and a closure is an error,
    as it may hold tracers.
    """

    @named_as(fun)
    def f(*args: Any, **kwargs: Any) -> Any:
        given = set(map(id, jax.tree.leaves((args, kwargs))))

        def fixed(x: Any) -> Any:
            if is_array(x) or not _is_constant(x):
                return x
            is_known = not isinstance(x, int) and getattr(x, "__closure__", None) is None
            return _Constant(x) if is_known or id(x) in given else x

        return jax.tree.map(fixed, fun(*args, **kwargs))

    return f
