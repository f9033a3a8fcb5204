"""Watch what JAX compiles, and which compiled functions it calls."""

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr
from jax.interpreters import mlir

from jax_tensorarray._compat.first_use import first_use
from jax_tensorarray._compat.jaxprs import closed
from jax_tensorarray._compat.private import private_names


class _Watcher(NamedTuple):
    seen: Callable[[str, Any, Any], None]
    needs_lines: Callable[[Any], bool]


#: Who wants to know of what JAX compiles, and what has been put aside for that.
_watchers: list[_Watcher] = []
_unwatched: list[tuple[Any, str, Any]] = []
_watching = threading.Lock()

#: So many programs are kept from when they are lowered until they are compiled.
_LOWERED = 256


@contextlib.contextmanager
def compilations(
    seen: Callable[[str, Any, Any], None], needs_lines: Callable[[Any], bool] = lambda jaxpr: False
) -> Iterator[None]:
    """Call `seen(name, jaxpr, executable)` for every program that JAX compiles meanwhile, in any thread.

    For programs with a jaxpr that `needs_lines`, JAX's persistent cache distinguishes source lines and scopes.

    There is no public way to look at what other code has compiled. Without these names it raises NotImplementedError.
    The jaxpr is None where JAX had lowered the program before.
    """
    watcher = _Watcher(seen, needs_lines)
    with _watching:
        if not _watchers:
            _watch_compilations()
        _watchers.append(watcher)
    try:
        yield
    finally:
        with _watching:
            _watchers.remove(watcher)
            while _unwatched and not _watchers:
                setattr(*_unwatched.pop())


def _watch_compilations() -> None:
    first_use()  # which replaces the same function, for good
    lowering, compiling = (importlib.import_module(f"jax._src.{name}") for name in ("interpreters.mlir", "compiler"))
    lower = getattr(lowering, "lower_jaxpr_to_module", None)
    compile_ = getattr(compiling, "compile_or_get_cached", None)
    if lower is None or compile_ is None:
        raise NotImplementedError(f"jax {jax.__version__} does not tell what it compiles")
    lowered: dict[int, tuple[Any, Any]] = {}  # with the module, so that no other one gets its number

    @functools.wraps(lower)
    def lower_and_keep(name: str, jaxpr: Jaxpr, *args: Any, **kwargs: Any) -> Any:
        result = lower(name, jaxpr, *args, **kwargs)
        lowered[id(result.module)] = (result.module, jaxpr)
        while len(lowered) > _LOWERED:  # a program may be lowered and never compiled
            lowered.pop(next(iter(lowered)), None)
        return result

    @functools.wraps(compile_)
    def compile_and_tell(backend: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        _, jaxpr = lowered.pop(id(module), (None, None))
        jaxpr = None if jaxpr is None else closed(jaxpr)
        watchers = tuple(_watchers)
        with lines_of_today(any(watcher.needs_lines(jaxpr) for watcher in watchers)):
            executable = compile_(backend, module, *args, **kwargs)
        name = mlir.ir.StringAttr(module.operation.attributes["sym_name"]).value
        for watcher in watchers:
            watcher.seen(name, jaxpr, executable)
        return executable

    for owner, name, wrapped in (
        (lowering, "lower_jaxpr_to_module", lower_and_keep),
        (compiling, "compile_or_get_cached", compile_and_tell),
    ):
        _unwatched.append((owner, name, getattr(owner, name)))
        setattr(owner, name, wrapped)


@contextlib.contextmanager
def lines_of_today(needed: bool = True) -> Iterator[None]:
    """Make JAX's persistent cache distinguish programs that differ only in their source lines and scopes."""
    name = "jax_compilation_cache_include_metadata_in_key"
    if not needed or getattr(jax.config, name):
        yield
        return
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, False)


#: Who counts calls, and what was there before they did.
_callers: list[Callable[[Any, Any, Any], None]] = []
_hook_before: list[Any] = []


def each_call(called: Callable[[Any, Any, Any], None]) -> Callable[[], None]:
    """Call `called(function, args, kwargs)` after every call of a compiled function, until the result is called.

    The first call of each program, which compiles it, is left out. JAX makes the others without Python, and has a hook
    behind them for its own search for NaNs, which is private. It takes less than a microsecond. Without it nothing is
    counted. To ask again puts the hook back that `jax.debug_nans` has replaced.
    """
    private = private_names("api", "_post_hook_state")
    if private is None or not all(hasattr(private[0], f"{x}_{y}") for x in ("get", "set") for y in ("global", "local")):
        return lambda: None
    (hook,) = private

    def end() -> None:
        with _watching:
            if called in _callers:
                _callers.remove(called)
            if not _callers and _hook_before:
                hook.set_global(_hook_before.pop())
                if hook.get_local() is _tell_of_call:
                    hook.set_local(None)

    with _watching:
        if called not in _callers:
            _callers.append(called)
        if not _hook_before:
            _hook_before.append(hook.get_global())
            hook.set_global(_tell_of_call)
        if hook.get_local() is None:  # a thread that has left `jax.debug_nans` has this, which hides the global one
            hook.set_local(_tell_of_call)
    return end


def _tell_of_call(function: Any, args: Any, kwargs: Any, results: Any) -> None:
    for caller in _callers:
        try:  # noqa: SIM105  # the program goes on; `contextlib.suppress` would take longer than all else
            caller(function, args, kwargs)
        except Exception:
            pass
    if _hook_before and _hook_before[0] is not None:
        _hook_before[0](function, args, kwargs, results)
