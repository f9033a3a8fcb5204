"""Run a function that `jax.jit` has traced again, under `in_place`, and name the line that does so for good."""

import ast
import contextlib
import inspect
import io
import linecache
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr

from jax_tensorarray import _compat, in_place
from jax_tensorarray._compat import JittedFunction
from jax_tensorarray.doctor._text import SourceLine

# --- the trial -------------------------------------------------------------------------------------------------


class Flat(NamedTuple):
    """A function of arrays, and the types of these arrays. `donated` are the numbers of those to donate."""

    function: Callable[..., Any]
    types: Sequence[Any]
    donated: Set[int]


def under_in_place(function: JittedFunction, jaxpr: Jaxpr, donated: Set[int]) -> Flat | None:
    """Return a jitted function under `in_place`, as a function of its arrays.

    `donated` are numbers of inputs of `jaxpr`, the compiled program, which lacks the unused arguments. None if the
    names of the arguments are not known.
    """
    leaves, tree = jax.tree.flatten((_without(function.args, function.static), _named(function, is_static=False)))
    program_names = _compat.names_of_arguments(jaxpr)
    if len(leaves) != len(function.names) or len(program_names) != len(jaxpr.in_avals):
        return None
    numbers = {name: k for k, name in enumerate(function.names)}
    constants = {k: function.args[k] for k in function.static if k < len(function.args)}
    named_constants = _named(function, is_static=True)

    def of_arrays(*arrays: Any) -> Any:
        args, kwargs = jax.tree.unflatten(tree, arrays)

        def of_traced(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            given = [constants.get(k, x) for k, x in enumerate(args)]
            with _context_of(function.fun):
                return function.fun(*given, **kwargs, **named_constants)

        return in_place(of_traced)(args, kwargs)

    return Flat(of_arrays, leaves, {numbers[program_names[k]] for k in donated})


def _without(args: Sequence[Any], static: Sequence[int]) -> tuple[Any, ...]:
    return tuple(None if k in static else x for k, x in enumerate(args))


def _named(function: JittedFunction, *, is_static: bool) -> dict[str, Any]:
    return {name: x for name, x in function.kwargs.items() if (name in function.static_names) == is_static}


def _context_of(fun: Any) -> contextlib.AbstractContextManager[Any]:
    """Return the context that a function has when it is called. `nnx.jit` merges modules in one of its own."""
    tag = getattr(fun, "ctxtag", None)
    has_tag = tag is not None and _is_of(fun, "flax.nnx")
    return sys.modules["flax.nnx"].update_context(tag) if has_tag else contextlib.nullcontext()


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Drop the texts that a function prints while the doctor traces it once more."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


# --- the line --------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """The code that keeps what was tried, and a sentence about it."""

    said: str
    code: tuple[str, ...]


#: How each framework compiles a function, by the module of the function that it gives to `jax.jit`.
_COMPILERS = {"flax.nnx": "nnx.jit", "equinox": "eqx.filter_jit"}

#: Functions of a framework that stand for a function of the user, and how users write them.
_METHODS = {"haiku": "f.apply", "flax.linen": "model.apply"}


def line_for(function: JittedFunction, donated: Sequence[str] = ()) -> Line:
    """Return how to put `in_place` under the `jit` of a function. `donated` are the names of arguments to donate."""
    compiler = next((jit for module, jit in _COMPILERS.items() if _is_of(function.fun, module)), "jax.jit")
    fun = _of_the_user(function)
    options = _donation(donated) if compiler == "jax.jit" else ""
    decorated = _decorated(fun, compiler, options)
    also = f" and donate {' and '.join(sorted(map(_argument, donated)))}" if options else ""
    if decorated is not None:
        return Line(f"To keep this, put @in_place under @{compiler}{also}{_defined(fun)}:", decorated)
    code = f"{compiler}(in_place({_expression(fun)}){options and ', '}{options})"
    return Line(f"To keep this, put in_place inside of {compiler}{also}{_defined(fun)}:", (code,))


def _defined(fun: Any) -> str:
    """Return where the function that is transformed is defined, in parentheses. Empty if it is none of the user."""
    transformation, inner = _compat.transformation_of(fun)
    if transformation:
        return _defined(inner)
    if not isinstance(fun, types.FunctionType) or any(_is_of(fun, module) for module in (*_METHODS, *_COMPILERS)):
        return ""
    name = "" if fun.__name__.startswith("<") else f"{fun.__name__}, "
    return f" ({name}{SourceLine(fun.__code__.co_filename, fun.__code__.co_firstlineno).place})"


def _is_of(fun: Any, module: str) -> bool:
    """Return whether a framework has made a callable, or is the class that it is a method of."""
    owner = getattr(fun, "__self__", None)
    names = {type(fun).__module__, *(kind.__module__ for kind in type(owner).__mro__)}
    if isinstance(fun, types.FunctionType):
        names.add(fun.__module__)
    return any(f"{name}.".startswith(f"{module}.") for name in names if isinstance(name, str))


def _of_the_user(function: JittedFunction) -> Any:
    """Return the function of the user that a framework has wrapped, if it can be found."""
    fun = function.fun
    if not any(_is_of(fun, module) for module in _COMPILERS):
        return fun
    name = getattr(fun, "__name__", None)

    def function_in(x: Any, depth: int = 0) -> Any:
        if isinstance(x, types.FunctionType):
            return x if x.__name__ == name else None
        parts = x if isinstance(x, tuple | list) and depth < 6 else ()
        return next((y for part in parts if (y := function_in(part, depth + 1)) is not None), None)

    static = [function.args[k] for k in function.static if k < len(function.args)]
    return function_in(static) or getattr(fun, "__wrapped__", fun)


def _expression(fun: Any) -> str:
    """Return a function as its user may have written it."""
    transformation, inner = _compat.transformation_of(fun)
    if transformation:
        return f"{transformation}({_expression(inner)})"
    method = next((method for module, method in _METHODS.items() if _is_of(fun, module)), None)
    name = method or getattr(fun, "__name__", "") or "f"
    if name == "<lambda>":
        with contextlib.suppress(TypeError, ValueError):
            return f"lambda {', '.join(inspect.signature(fun).parameters)}: ..."
    return "f" if name.startswith("<") else name


def _donation(names: Sequence[str]) -> str:
    """Return the option of `jax.jit` that donates these arguments, by JAX's names, such as "state['h']"."""
    arguments = sorted({_argument(name) for name in names})
    numbers = [int(name[5:-1]) for name in arguments if name.startswith("args[")]
    if numbers and len(numbers) == len(arguments):
        return f"donate_argnums={numbers[0] if len(numbers) == 1 else tuple(sorted(numbers))}"
    quoted = ", ".join(f'"{name}"' for name in arguments)
    return f"donate_argnames={quoted if len(arguments) < 2 else f'({quoted})'}" if arguments else ""


def _argument(name: str) -> str:
    """Return the argument that an array is a part of."""
    match = re.match(r"args\[\d+\]|\w+", name)
    return match.group(0) if match else name


def _decorated(fun: Any, compiler: str, options: str) -> tuple[str, ...] | None:
    """Return the decorators of a function with `@in_place` under the one that compiles, and its first line.

    None if no decorator compiles the function, or if its source cannot be read.
    """
    if not isinstance(fun, types.FunctionType) or fun.__name__ == "<lambda>" or _compat.transformation_of(fun)[0]:
        return None
    lines = linecache.getlines(fun.__code__.co_filename)[fun.__code__.co_firstlineno - 1 :]
    try:
        tree = ast.parse(textwrap.dedent("".join(inspect.getblock(lines))))
    except (SyntaxError, IndexError, ValueError):
        return None
    definition = next((node for node in tree.body if isinstance(node, ast.FunctionDef)), None)
    if definition is None:
        return None
    decorators = [ast.unparse(each) for each in definition.decorator_list]
    number = next((k for k, text in enumerate(decorators) if re.search(rf"\b{compiler.split('.')[-1]}\b", text)), None)
    if number is None:
        return None
    if options:
        jit = decorators[number]
        partial = f"{jit[:-1]}, " if jit.endswith(")") else f"functools.partial({jit}, "
        decorators[number] = f"{partial}{options})"
    decorators.insert(number + 1, "in_place")
    return *(f"@{text}" for text in decorators), f"def {definition.name}({ast.unparse(definition.args)}):"
