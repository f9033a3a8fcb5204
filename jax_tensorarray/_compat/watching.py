"""Watch JAX's compilations and its calls of compiled functions."""

import contextlib
import functools
import importlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr
from jax.interpreters import mlir

from jax_tensorarray._compat.first_use import first_use
from jax_tensorarray._compat.jaxprs import closed, opened
from jax_tensorarray._compat.private import private_names


class _Watcher(NamedTuple):
    notify: Callable[[str, Any, Any], None]
    needs_lines: Callable[[Any], bool]
    needs_functions: bool


#: The watchers of compilations, and the functions of JAX that are replaced meanwhile.
_watchers: list[_Watcher] = []
_unwatched: list[tuple[Any, str, Any]] = []
_watching = threading.Lock()

#: We store at most so many lowered programs until JAX compiles them.
_LOWERED = 256


@contextlib.contextmanager
def compilations(
    notify: Callable[[str, Any, Any], None],
    needs_lines: Callable[[Any], bool] = lambda jaxpr: False,
    needs_functions: bool = False,
) -> Iterator[None]:
    """Call `notify(name, jaxpr, executable)` for every program that JAX compiles in the block, in any thread.

    For programs with a jaxpr that `needs_lines`, JAX's persistent cache distinguishes source lines and scopes. If the
    caller `needs_functions`, `function_of` finds functions in the block, which keeps them and their constants alive.

    JAX has no public way to watch the compilations of other code. Without these names it raises NotImplementedError.
    The jaxpr is None if JAX has lowered the program before.
    """
    watcher = _Watcher(notify, needs_lines, needs_functions)
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
            if not any(other.needs_functions for other in _watchers):
                _traced.clear()


def _watch_compilations() -> None:
    first_use()  # it replaces the same function permanently
    lowering, compiling = (importlib.import_module(f"jax._src.{name}") for name in ("interpreters.mlir", "compiler"))
    lower = getattr(lowering, "lower_jaxpr_to_module", None)
    compile_ = getattr(compiling, "compile_or_get_cached", None)
    if lower is None or compile_ is None:
        raise NotImplementedError(f"jax {jax.__version__} does not tell what it compiles")
    lowered: dict[int, tuple[Any, Any]] = {}  # the module keeps its id from being reused

    @functools.wraps(lower)
    def lower_and_keep(name: str, jaxpr: Jaxpr, *args: Any, **kwargs: Any) -> Any:
        result = lower(name, jaxpr, *args, **kwargs)
        lowered[id(result.module)] = (result.module, jaxpr)
        while len(lowered) > _LOWERED:  # JAX may never compile a lowered program
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
            watcher.notify(name, jaxpr, executable)
        return executable

    tracing = importlib.import_module("jax._src.pjit")
    trace = getattr(tracing, "_trace_for_jit", None)

    def trace_and_remember(fun: Any, info: Any, *rest: Any) -> Any:
        params = trace(fun, info, *rest)  # type: ignore[misc]
        if any(watcher.needs_functions for watcher in tuple(_watchers)):
            with contextlib.suppress(Exception):  # the program goes on
                args, kwargs = rest[-2:]
                _remember(fun, info, args, kwargs, params)
        return params

    for owner, name, wrapped in (
        (lowering, "lower_jaxpr_to_module", lower_and_keep),
        (compiling, "compile_or_get_cached", compile_and_tell),
        *([] if trace is None else [(tracing, "_trace_for_jit", trace_and_remember)]),
    ):
        _unwatched.append((owner, name, getattr(owner, name)))
        setattr(owner, name, wrapped)


@contextlib.contextmanager
def lines_of_today(applies: bool = True) -> Iterator[None]:
    """Make JAX's persistent cache distinguish programs that differ only in their source lines and scopes."""
    name = "jax_compilation_cache_include_metadata_in_key"
    if not applies or getattr(jax.config, name):
        yield
        return
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, False)


class JittedFunction(NamedTuple):
    """A Python function that JAX has traced for `jax.jit`, with the types of its arguments.

    `args` and `kwargs` are the arguments of the call, with a `jax.ShapeDtypeStruct` for each array or number that JAX
    traces. The arguments numbered `static` are constants, and so are the arguments by the names `static_names`. `names`
    are JAX's names of the traced arrays, such as "state['h']".
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    static: Sequence[int]
    static_names: Sequence[str]
    names: Sequence[str]


#: We store so many functions between their tracing and their compilation.
_REMEMBERED = 64


#: The functions that JAX has traced while we watch, with their sources.
_traced: deque[tuple[Any, JittedFunction]] = deque(maxlen=_REMEMBERED)


def function_of(jaxpr: Jaxpr) -> JittedFunction | None:
    """Return the function of a program that JAX has compiled in a block of `compilations`, if `jax.jit` has traced it.

    JAX has no public way from a program to its function. The jaxpr has the source and the names of the arguments, and
    we return the last function with both. Without the private names the result is None. A program that JAX derives from
    a jitted function, such as its gradient, has no names of arguments, so the result is None.
    """
    info: Any = getattr(opened(jaxpr), "debug_info", None)
    names = names_of_arguments(jaxpr)
    if not names or None in names:
        return None
    for source, function in reversed(_traced):
        if source == info.func_src_info and set(names) <= set(function.names):
            return function
    return None


def names_of_arguments(jaxpr: Jaxpr) -> Sequence[str]:
    """Return JAX's names of the arguments of a jaxpr. They are not documented. Without them the result is empty."""
    return getattr(getattr(opened(jaxpr), "debug_info", None), "arg_names", None) or ()


def _remember(fun: Any, info: Any, args: Any, kwargs: Any, params: Any) -> None:
    """Store a function that `jax.jit` has traced for a call outside of all transformations.

    Outside of `jit`, JAX jits its own operations to run them. They are no functions of the user.
    """
    leaves = jax.tree.leaves((args, kwargs))
    if fun.__module__ == "jax._src.dispatch" or any(isinstance(x, jax.core.Tracer) for x in leaves):
        return
    static, static_names = info.static_argnums, info.static_argnames
    types = tuple(x if k in static else _types(x) for k, x in enumerate(args))
    types_by_name = {name: x if name in static_names else _types(x) for name, x in kwargs.items()}
    source = opened(params.params["jaxpr"]).debug_info.func_src_info
    _traced.append((source, JittedFunction(fun, types, types_by_name, static, static_names, params.arg_names)))


def _types(tree: Any) -> Any:
    """Return a pytree with the types of its arrays and numbers."""

    def of(x: Any) -> jax.ShapeDtypeStruct:
        aval = jax.typeof(x)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))

    return jax.tree.map(of, tree)


#: The functions that transformations of JAX return, by the names in their code.
_TRANSFORMATIONS = {"grad_f": "jax.grad", "value_and_grad_f": "jax.value_and_grad", "vmap_f": "jax.vmap"}


def transformation_of(fun: Any) -> tuple[str, Any]:
    """Return the transformation of JAX that made a function, such as "jax.grad", and its argument.

    Only the code of the function shows it. For any other function the text is empty, and the argument is `fun`.
    """
    inner, code = getattr(fun, "__wrapped__", None), getattr(fun, "__code__", None)
    if inner is None or code is None or not _is_of_jax(code):
        return "", fun
    contents = [cell.cell_contents for cell in fun.__closure__ or ()]  # JAX wraps the function, for tracebacks
    codes = [code, *filter(None, (getattr(content, "__code__", None) for content in contents))]
    named = (_TRANSFORMATIONS[each.co_name] for each in codes if _is_of_jax(each) and each.co_name in _TRANSFORMATIONS)
    name = next(named, "")
    return name, inner if name else fun


def _is_of_jax(code: Any) -> bool:
    return code.co_filename.replace("\\", "/").rpartition("/")[0].endswith("jax/_src")


@contextlib.contextmanager
def results(notify: Callable[[Any, Any], None]) -> Iterator[None]:
    """Call `notify(function, results)` after every call of a jitted function in a block.

    The first call of each program runs in Python inside of JAX. The hook of `each_call` sees the others. Without the
    private names we miss the first calls.
    """
    module = importlib.import_module("jax._src.pjit")
    run = getattr(module, "_run_python_pjit", None)

    def called(function: Any, args: Any, kwargs: Any, results: Any) -> None:
        notify(function, results)

    def run_and_tell(params: Any, args_flat: Any, fun: Any, *rest: Any) -> Any:
        outs = run(params, args_flat, fun, *rest)  # type: ignore[misc]
        each_call(called)  # JAX may have left `debug_nans` in the trace of the function
        with contextlib.suppress(Exception):  # the program goes on
            if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(outs[0])):
                notify(fun, outs[0])
        return outs

    if run is not None:
        module._run_python_pjit = run_and_tell  # type: ignore[attr-defined]
    end = each_call(called)
    try:
        yield
    finally:
        end()
        if run is not None:
            module._run_python_pjit = run  # type: ignore[attr-defined]


#: The functions to call after each call, and the hook before ours.
_callers: list[Callable[[Any, Any, Any, Any], None]] = []
_hook_before: list[Any] = []


def each_call(called: Callable[[Any, Any, Any, Any], None]) -> Callable[[], None]:
    """Call `called(function, args, kwargs, results)` after every call of a compiled function.

    Return a function that ends this.

    It does not see the first call of each program, which compiles the program. JAX makes the other calls without
    Python, but calls a private hook after them, for its own search for NaNs. The hook takes less than a microsecond.
    Without it we see no calls. A second `each_call` restores the hook if `jax.debug_nans` has replaced it.
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
        if hook.get_local() is None:  # after `jax.debug_nans`, None hides the global hook
            hook.set_local(_tell_of_call)
    return end


def _tell_of_call(function: Any, args: Any, kwargs: Any, results: Any) -> None:
    for caller in _callers:
        try:  # noqa: SIM105  # the program continues; `contextlib.suppress` is too slow
            caller(function, args, kwargs, results)
        except Exception:
            pass
    if _hook_before and _hook_before[0] is not None:
        _hook_before[0](function, args, kwargs, results)
