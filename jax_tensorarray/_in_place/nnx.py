"""Modules of Flax NNX as arguments. A function may change them, as under `nnx.jit`.

Such a module is split into its graph and the arrays of its variables, and merged again inside of the function, where it
is one object however often it occurs. The modules that the function has changed or made go back in the same way, and
Flax updates those of the caller. These are the four steps of `nnx.update_context`.

An `nnx.State`, which the user has split off, is a value like any other pytree.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax

_TAG = "jax_tensorarray.in_place"


#: The argument of a pure function in which the graph and the state of the modules are.
_MODULES = "_jax_tensorarray_modules"


@functools.partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["graph", "tree"])
@dataclass(frozen=True)
class _Split:
    """Modules, split. Their state has no variables of Flax in it here, only the arrays."""

    arrays: list[Any]
    graph: Any
    tree: Any

    @classmethod
    def of(cls, graph: Any, state: Any) -> Self:
        arrays, tree = jax.tree.flatten(state)
        return cls(arrays, graph, tree)

    @property
    def parts(self) -> tuple[Any, Any]:
        return self.graph, jax.tree.unflatten(self.tree, self.arrays)


def has_modules(arguments: Any) -> bool:
    """Return whether there is a module or a variable of Flax NNX among the arguments."""
    if "flax.nnx" not in sys.modules:
        return False
    leaves, tree = jax.tree.flatten(arguments)
    try:
        return _has_nodes(tree) or any(map(_is_kind, set(map(type, leaves))))
    except TypeError:  # it cannot be hashed, and JAX says so
        return False


@functools.lru_cache(maxsize=128)
def _has_nodes(tree: Any) -> bool:
    data = tree.node_data()
    if data is None or issubclass(data[0], sys.modules["flax.nnx"].State):
        return False
    return _is_kind(data[0]) or any(map(_has_nodes, tree.children()))


def _is_kind(kind: type) -> bool:
    nnx = sys.modules["flax.nnx"]
    return issubclass(kind, (nnx.Pytree, nnx.Variable))


def is_state(x: Any) -> bool:
    """Return whether `x` is the state of modules, as `nnx.split` returns it."""
    return "flax.nnx" in sys.modules and isinstance(x, sys.modules["flax.nnx"].State)


def call(of_pure: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function that `pure` has made, and update the modules among its arguments."""
    nnx = sys.modules["flax.nnx"]
    with nnx.update_context(_TAG):
        (args, kwargs), modules = _taken_out((tuple(args), kwargs))
        with nnx.split_context(_TAG) as context:
            split = _Split.of(*context.split(modules))
        result, split = of_pure(*args, **kwargs, **{_MODULES: split})
        with nnx.merge_context(_TAG, inner=False) as context:
            _, returned = context.merge(*split.parts)
        return _put_back(result, returned)


def pure(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the states of modules, which also returns what has become of them."""

    @functools.wraps(fun, [name for name in ("__name__", "__doc__") if hasattr(fun, name)])
    def f(*args: Any, **kwargs: Any) -> tuple[Any, _Split]:
        nnx = sys.modules["flax.nnx"]
        with nnx.merge_context(_TAG, inner=True) as context:
            modules = context.merge(*kwargs.pop(_MODULES).parts)
        args, kwargs = _put_back((args, kwargs), modules)
        result, returned = _taken_out(fun(*args, **kwargs))
        with nnx.split_context(_TAG) as context:
            return result, _Split.of(*context.split((modules, returned)))

    return f


@dataclass(frozen=True)
class _Module:
    """Stands for the module of a number. It is a constant for `in_place`."""

    number: int


def _taken_out(tree: Any) -> tuple[Any, list[Any]]:
    """Return a pytree without its modules, and the modules."""
    modules: list[Any] = []

    def of(x: Any) -> Any:
        if not _is_module(x):
            return x
        modules.append(x)
        return _Module(len(modules) - 1)

    return jax.tree.map(of, tree, is_leaf=lambda x: _is_module(x) or is_state(x)), modules


def _put_back(tree: Any, modules: Sequence[Any]) -> Any:
    return jax.tree.map(lambda x: modules[x.number] if type(x) is _Module else x, tree)


def _is_module(x: Any) -> bool:
    return _is_kind(type(x))
