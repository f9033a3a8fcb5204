"""`in_place_package`: an import hook that puts under `in_place` what one package jits."""

import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Sequence
from typing import Any, Self

from jax_tensorarray._in_place.jit import jit, jit_in_place
from jax_tensorarray._in_place.source import OURS, replaced


def in_place_package(name: str) -> "PackageHook":
    """Put under `in_place` what a package jits, from its import on. Call this before anything imports the package.

    Functions that the package jits, by `@jax.jit`, `functools.partial(jax.jit, ...)`, `from jax import jit` and so on,
    when it is imported or later, are compiled as `jax.jit(in_place(f))` would be. This holds for all of its modules,
    whenever they are imported. Nothing else changes: not `jax.jit`, not functions that the package does not jit, and
    not functions that other packages jit for it, as `equinox.filter_jit` does. If `in_place` cannot take a function,
    that function runs as it is. `disable_in_place` and `JAX_TENSORARRAY_IN_PLACE=0` turn it off for all programs that
    JAX traces from then on.

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
        """Return the value of a name `jit` in the package: our `jit` instead of JAX's."""
        if value is not jit and value is not jit_in_place:
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
        return compile(replaced(source, path), path, "exec", dont_inherit=True)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module)[OURS] = self.hook.ours
        super().exec_module(module)


#: Loaders of what has no code in Python, or has been seen to already.
_WITHOUT_JITS = (importlib.machinery.ExtensionFileLoader, importlib.machinery.NamespaceLoader, _Loader)
