"""Put what is jitted under `in_place`: all of it, for the doctor, or what one package jits, by an import hook."""

import ast
import functools
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax

from jax_tensorarray._in_place.api import in_place
from jax_tensorarray._in_place.arguments import named_as

_jit = jax.jit

#: The attribute of a function that keeps it under `in_place`, so that JAX knows it when it is jitted again.
_KEPT = "__jax_tensorarray_in_place__"

#: The name by which a module that is hooked finds `PackageHook.ours`.
_OURS = "__jax_tensorarray_jit__"


@functools.wraps(_jit)
def jit_in_place(*fun: Any, **options: Any) -> Any:
    """Be `jax.jit`, but put the function under `in_place`."""
    if not fun:
        return functools.partial(jit_in_place, **options)
    if not callable(fun[0]):
        return _jit(*fun, **options)
    jitted: Any = _jit(_under_in_place(fun[0]), *fun[1:], **options)
    jitted.__wrapped__ = fun[0]
    return jitted


def _under_in_place(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function under `in_place`: the same one each time, or JAX would compile it each time.

    The function itself keeps it. Other objects are callable too, but may have no room for it.
    """
    attributes = vars(fun) if isinstance(fun, types.FunctionType | functools.partial) else {}
    kept = attributes.get(_KEPT)
    if kept is None or kept.__wrapped__ is not fun:  # `functools.wraps` copies attributes to other functions
        kept = attributes[_KEPT] = _made_under_in_place(fun)
    return kept


def _made_under_in_place(fun: Callable[..., Any]) -> Callable[..., Any]:
    @named_as(fun)
    def healed(*args: Any, **kwargs: Any) -> Any:
        if jax.config.jax_disable_jit:
            return fun(*args, **kwargs)
        given = [*args, *kwargs.values()]
        # The rest are static: constants of any type, which stay as they are.
        traced = [k for k, arg in enumerate(given) if any(isinstance(x, jax.Array) for x in jax.tree.leaves(arg))]

        def of_traced(*arrays: Any) -> Any:
            for k, arg in zip(traced, arrays, strict=True):
                given[k] = arg
            return fun(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))

        try:
            return in_place(of_traced)(*(given[k] for k in traced))
        except Exception:  # run it unchanged: if the error is its own, it raises it again
            return fun(*args, **kwargs)

    if isinstance(fun, functools.partial):  # JAX calls it by the name of the function inside
        healed.__name__ = getattr(fun.func, "__name__", healed.__name__)
    return healed


# --- one package ------------------------------------------------------------------------------------------------


def in_place_package(name: str) -> "PackageHook":
    """Put under `in_place` what a package jits, from its import on. Call this before anything imports the package.

    Functions that the package jits, by `@jax.jit`, `functools.partial(jax.jit, ...)`, `from jax import jit` and so on,
    when it is imported or later, are compiled as `jax.jit(in_place(f))` would be. This holds for all of its modules,
    whenever they are imported. Nothing else changes: not `jax.jit`, not what the package does not jit, and not what
    other packages jit, even for this one, as `equinox.filter_jit` does. What `in_place` cannot take runs as it is.

    Args:
      name: of the package or module, as you import it: `"ott"`, and not `"ott-jax"`. A part of a package, such as
        `"mctx._src.search"`, is possible.

    Returns:
      An import hook. It stays until `uninstall()`, or, as a context manager, until the end of the block. Modules that
      have been imported by then stay under `in_place`.

    Raises:
      TypeError: `name` is not a string.
      ValueError: `name` cannot be the name of a module.
      RuntimeError: the package is imported already.

    >>> from jax_tensorarray import in_place_package
    >>> with in_place_package("wave"):  # stands for a package that uses JAX
    ...     import wave
    """
    if not isinstance(name, str):
        raise TypeError(
            f"in_place_package: the name of the package must be a string, not {type(name).__name__}. "
            'Write in_place_package("mctx") before `import mctx`.'
        )
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(
            f'in_place_package: {name!r} is not the name of a package. Give the name that follows "import", '
            "which may differ from the one that pip has."
        )
    if name in sys.modules:
        raise RuntimeError(
            f"in_place_package: {name!r} is imported already, so what it has jitted would stay as it is. Call "
            f"in_place_package({name!r}) first: at the top of the program, before anything that imports it. In a "
            "notebook, restart the kernel."
        )
    hook = PackageHook(name)
    sys.meta_path.insert(0, hook)
    return hook


class PackageHook(importlib.abc.MetaPathFinder):
    """The import hook of `in_place_package`.

    Attributes:
      name: of the package.
      found: whether the package has used `jax.jit` since.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.found = False

    def __repr__(self) -> str:
        return f"<in_place_package of {self.name!r}>"

    def uninstall(self) -> None:
        """Leave as they are the modules that are imported from now on."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.uninstall()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module of the package as Python would, and have `_Loader` load it."""
        if not f"{fullname}.".startswith(f"{self.name}."):
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None:
            if type(spec.loader) is importlib.machinery.SourceFileLoader:
                spec.loader = _Loader(spec.loader.name, spec.loader.path, self)
            elif spec.loader is not None and not isinstance(spec.loader, _WITHOUT_JITS):
                warnings.warn(
                    f"in_place_package: what {fullname} jits stays as it is, since this module is not a source "
                    f"file, or another import hook changes it: its loader is {type(spec.loader).__name__}",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return spec

    def ours(self, value: Any) -> Any:
        """Return what a name `jit` stands for in the package: if it is JAX's, ours."""
        if value is not _jit and value is not jit_in_place:
            return value
        self.found = True
        return jit_in_place


class _Loader(importlib.machinery.SourceFileLoader):
    """Compile a module with `jax.jit` replaced. What it compiles is not stored, so other programs never see it."""

    def __init__(self, fullname: str, path: str, hook: PackageHook) -> None:
        super().__init__(fullname, path)
        self.hook = hook

    def get_code(self, fullname: str) -> types.CodeType | None:
        path = self.get_filename(fullname)
        source = self.get_data(path)
        if b"jit" not in source:
            return super().get_code(fullname)  # which Python has compiled before
        tree = _Replaced().visit(ast.parse(source, path))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module)[_OURS] = self.hook.ours
        super().exec_module(module)


#: Loaders of what has no code in Python, or has been seen to already.
_WITHOUT_JITS = (importlib.machinery.ExtensionFileLoader, importlib.machinery.NamespaceLoader, _Loader)


class _Replaced(ast.NodeTransformer):
    """Put a call of `ours` around each attribute `jit` that is read, and each `jit` that is imported. No line moves."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        return _call_of_ours(node) if node.attr == "jit" and isinstance(node.ctx, ast.Load) else node

    def visit_MatchValue(self, node: ast.MatchValue) -> ast.MatchValue:
        return node  # a call cannot stand there

    def visit_ImportFrom(self, node: ast.ImportFrom) -> list[ast.stmt]:
        names = [alias.asname or alias.name for alias in node.names if alias.name == "jit"]
        read, stored = ast.Load(), ast.Store()
        assigned = (ast.Assign([ast.Name(name, stored)], _call_of_ours(ast.Name(name, read))) for name in names)
        return [node, *(ast.copy_location(ast.fix_missing_locations(new), node) for new in assigned)]


def _call_of_ours(value: ast.expr) -> ast.expr:
    call = ast.Call(ast.Name(_OURS, ast.Load()), [value], [])
    return ast.copy_location(call, value) if hasattr(value, "lineno") else call
