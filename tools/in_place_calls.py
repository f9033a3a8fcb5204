"""Put everything that a process jits, differentiates, batches and loops under `in_place`, and compare each call.

`install` replaces functions of `jax` and `jax.lax` by ones that do so. It comes before the import of what is tested.
Each call from outside of all transformations then runs twice: as it is, and under `in_place`. Within the first run
everything is plain, within the second everything is under `in_place`. A difference is written down, unless

- the program does the same under `jax.jit`, alone or wherever the second run is under `in_place`, which compiles: "as
  jit",
- another run of the plain program differs too, with or without another trace: "impure",
- inputs that differ in their last digit, or another level of optimisation, make as much of a difference: "rounding".

What has effects runs once, under `in_place`, and the tests judge it.
"""

import atexit
import functools
import json
import os
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from jax_tensorarray import _compat, in_place

#: What JAX compiles, it keeps under this value too: no plain run finds what another one has traced.
_state = jax.make_user_context("")

#: Calls of one function with arguments of one type that are compared in one test.
_OFTEN = 6

#: Of the errors that a function raises if it looks at values while JAX traces it: only run as it is, it can be run.
_OF_TRACING = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.UnexpectedTracerError,
)

#: How much numbers may differ, of the largest in their array.
_TOLERANCES = {8: 1e-9, 4: 1e-4, 2: 0.02, 1: 0.3}


class _Judge:
    """What `install` was told, and what has been found."""

    def __init__(self) -> None:
        self.compares, self.output, self.test, self.state = False, os.devnull, "", ""
        self.calls: Counter[str] = Counter()
        self.seen: Counter[Any] = Counter()

    def write(self, *line: Any) -> None:
        with open(self.output, "a") as file:
            print(json.dumps(line), file=file)

    def begin(self) -> None:
        """Notice that another test runs."""
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        if test != self.test:
            self.test = test
            self.seen.clear()
            self.end()

    def end(self) -> None:
        self.write("calls", dict(self.calls))


judge = _Judge()


def install(way: str, output: str = os.devnull, *, compares: bool = True, state: str = "") -> None:
    """Replace `jax.jit` or, if `way` is "all", transformations and loops too. Write what differs to `output`.

    With the `state` "jit" everything is under `jax.jit` in place of `in_place`.
    """
    judge.compares, judge.output, judge.state = compares, output, state
    atexit.register(judge.end)
    jax.jit = _jit_in_place
    setattr(export, "export", _exported)  # noqa: B010 - its type is narrower
    if way == "all":
        for name in _TRANSFORMATIONS:
            setattr(jax, name, _transformation(getattr(jax, name)))
        for name, arity in _CALLED_AT_ONCE.items():
            module = jax if hasattr(jax, name) else lax
            setattr(module, name, _called_at_once(getattr(module, name), arity))


def collected() -> None:
    """In JAX's own tests, which have been imported, replace `jit` where their checks find it.

    `test_util` is private, and there is no way around it: it compiles by the `jit` of its `api`. It keeps the standard
    output that it finds when it is imported, so it must not be imported before pytest has its own.
    """
    test_util: Any = sys.modules.get("jax._src.test_util")
    if test_util is not None:
        test_util.api = types.SimpleNamespace(**vars(test_util.api) | {"jit": _jit_in_place})


def _is_own() -> bool:
    """Return whether this library calls what calls this."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("jax_tensorarray.")


# --- jit --------------------------------------------------------------------------------------------------------

_jit = jax.jit


class _Jitted:
    """What the replaced `jax.jit` returns: the function as JAX compiles it, and as it compiles it under `in_place`."""

    def __init__(self, fun: Callable[..., Any], options: dict[str, Any]) -> None:
        self._plain = _jit(fun, **options)  # raises what is wrong with the arguments
        static = {name: options[name] for name in ("static_argnums", "static_argnames") if name in options}
        self._ours = _jit(_kept(fun, f"jit {static}", lambda: in_place(fun, **static)), **options)
        self._donates = any(options.get(name) not in (None, ()) for name in ("donate_argnums", "donate_argnames"))
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            if hasattr(fun, name):
                setattr(self, name, getattr(fun, name))
        self.__wrapped__ = fun

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = Call("jit", self.__wrapped__, self._plain, {"jit(in_place(f))": self._ours}, self._donates)
        return call(args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name in ("_plain", "_ours", "__wrapped__"):
            raise AttributeError(name)
        return getattr(self._plain if _state.value.startswith("plain") else self._ours, name)


@functools.wraps(_jit)
def _jit_in_place(*fun: Any, **options: Any) -> Any:
    if not fun and "fun" not in options:
        return functools.partial(_jit_in_place, **options)
    given = fun[0] if fun else options["fun"]
    if _is_own() or not callable(given):
        return _jit(*fun, **options)
    options.pop("fun", None)
    return _Jitted(given, options)


_export = export.export


@functools.wraps(_export)
def _exported(fun: Any, *args: Any, **kwargs: Any) -> Any:
    """Take what the replaced `jax.jit` returns: JAX exports its own only."""
    return _export(fun._ours if isinstance(fun, _Jitted) else fun, *args, **kwargs)


def _kept(fun: Callable[..., Any], what: str, made: Callable[[], Any]) -> Any:
    """Return what was made of a function before, or make it: JAX compiles anew what is another object."""
    name = f"__peers_{what}__"
    attributes = vars(fun) if isinstance(fun, types.FunctionType | functools.partial) else {}
    of, kept = attributes.get(name, (None, None))
    if of is not fun:  # `functools.wraps` copies attributes to other functions
        kept = made()
        attributes[name] = (fun, kept)
    return kept


# --- transformations and loops ------------------------------------------------------------------------------------

#: They take a function, and return one.
_TRANSFORMATIONS = ("grad", "value_and_grad", "vmap", "jacfwd", "jacrev", "jacobian", "hessian")

#: They take functions and are called at once; how many arguments are functions, or stay as they are.
_CALLED_AT_ONCE = {"scan": 1, "while_loop": 2, "fori_loop": 3, "map": 1, "associative_scan": 1, "jvp": 1}


def _transformation(usual: Callable[..., Any]) -> Callable[..., Any]:
    what = usual.__name__

    @functools.wraps(usual)
    def transformation(*fun: Any, **options: Any) -> Any:
        if _is_own() or not fun or not callable(fun[0]):
            return usual(*fun, **options)
        f, *others = fun
        plain = usual(f, *others, **options)

        def variants() -> dict[str, Callable[..., Any]]:
            return {
                f"in_place({what}(f))": in_place(usual(f, *others, **options)),
                f"{what}(in_place(f))": usual(in_place(f), *others, **options),
            }

        ours = _kept(f, f"{what} {others} {options}", variants)

        @functools.wraps(plain)
        def transformed(*args: Any, **kwargs: Any) -> Any:
            return Call(what, f, plain, ours)(args, kwargs)

        return transformed

    return transformation


def _called_at_once(usual: Callable[..., Any], arity: int) -> Callable[..., Any]:
    what = usual.__name__

    @functools.wraps(usual)
    def called(*args: Any, **kwargs: Any) -> Any:
        functions = args[:arity]
        if _is_own() or not any(map(callable, functions)):
            return usual(*args, **kwargs)
        named = {name: kwargs.pop(name) for name in list(kwargs) if name not in ("init", "xs", "init_val", "elems")}
        # New functions: JAX has traced the others.
        plain = functools.partial(usual, *functions, **named)
        ours: dict[str, Callable[..., Any]] = {
            f"in_place({what}(f))": in_place(functools.partial(usual, *functions, **named))
        }
        f = next(filter(callable, functions))
        return Call(what, f, plain, ours)(args[arity:], kwargs)

    return called


# --- one call ---------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What a call returns or raises."""

    value: Any = None
    error: Exception | None = None


class Call(NamedTuple):
    """A function, what makes a program of it, and the same under `in_place`."""

    what: str
    function: Callable[..., Any]
    plain: Callable[..., Any]
    ours: dict[str, Callable[..., Any]]
    donates: bool = False

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        state = _state.value or judge.state
        if state.startswith("plain"):
            return self.plain(*args, **kwargs)
        first = self._compiled() if state == "jit" else next(iter(self.ours.values()))
        leaves = jax.tree.leaves((args, kwargs))
        is_outermost = not state and judge.compares and _compat.executes_eagerly()
        if not is_outermost or any(isinstance(x, jax.core.Tracer) for x in leaves):
            with _state(state or "ours"):
                try:
                    return first(*args, **kwargs)
                except _OF_TRACING:
                    # `in_place` traces floats and NumPy's arrays, and `vmap` does not if their axis is None.
                    if not any(isinstance(x, float | complex | np.ndarray | np.generic) for x in leaves):
                        raise
                    return self.plain(*args, **kwargs)
        judge.begin()
        code = getattr(self.function, "__code__", type(self.function))
        key = (self.what, code, str([_type_of(x) for x in leaves]))
        judge.seen[key] += 1
        if judge.seen[key] > _OFTEN:
            judge.calls["again"] += 1
            with _state("plain"):
                return self.plain(*args, **kwargs)
        with _state("plain"):
            effects, error = self._effects(args, kwargs)
        if isinstance(error, _OF_TRACING):
            judge.calls["untraceable"] += 1
            with _state("plain"):
                return self.plain(*args, **kwargs)
        if effects or any(isinstance(x, jax.Ref) for x in leaves):
            judge.calls["effects"] += 1
            with _state("ours"):
                return first(*args, **kwargs)
        return self._compared(args, kwargs)

    def _compiled(self) -> Callable[..., Any]:
        return self.plain if isinstance(self.plain, _COMPILED) else functools.partial(_under_jit, self.plain)

    def _effects(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Exception | None]:
        try:
            if isinstance(self.plain, _COMPILED):
                return self.plain.trace(*args, **kwargs).jaxpr.effects, None
            f, arrays = _of_arrays(self.plain, args, kwargs)
            return jax.make_jaxpr(f)(*arrays).effects, None
        except Exception as error:
            return (), error

    def _compared(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        spare = (lambda: _copied((args, kwargs))) if self.donates else (lambda: (args, kwargs))
        kept = spare()

        def again() -> tuple[Any, Any]:
            return _copied(kept) if self.donates else kept

        with jax.transfer_guard("allow"):
            return self._judged(args, kwargs, again)

    def _judged(self, args: Sequence[Any], kwargs: dict[str, Any], again: Callable[[], tuple[Any, Any]]) -> Any:
        expected = self._run(self.plain, "plain", again())
        judge.calls["compared"] += 1
        found = None
        for how, ours in self.ours.items():
            found = self._run(ours, "ours", (args, kwargs))
            differences = list(_differences(expected, found))
            if not differences:
                continue
            try:
                reason = self._reason(again, expected, found)
            except Exception as error:  # of this file: it must not fail the test, which is run again without it
                reason, differences = "", [("not judged", repr(error)), *differences]
            judge.calls[reason or "differ"] += 1
            if not reason:
                kind, detail = differences[0]
                judge.write("differs", judge.test, how, _name_of(self.function), kind, detail)
            found = expected
            break
        if expected.error is not None:
            raise expected.error
        return found.value if found is not None else expected.value

    def _run(self, run: Callable[..., Any], state: str, arguments: tuple[Any, Any]) -> Outcome:
        args, kwargs = arguments
        try:
            with _state(state):
                return Outcome(jax.block_until_ready(run(*args, **kwargs)))
        except Exception as error:
            return Outcome(error=error)

    def _reason(self, again: Callable[[], tuple[Any, Any]], expected: Outcome, found: Outcome) -> str:
        """Return why a difference is none, or an empty string."""
        for state in ("plain", "plain, traced again"):
            if next(_differences(expected, self._run(self.plain, state, again())), None):
                return "impure"
        f, arrays = _of_arrays(self.plain, *again())
        compiled = self._run(_jit(f), "plain", (arrays, {}))
        everywhere = self._run(self._compiled(), "jit", again())
        if any(next(_differences(each, found), None) is None for each in (compiled, everywhere)):
            return "as jit"
        if compiled.error or found.error or not _is_of_values(compiled, found):
            return ""
        size = _distance(expected, found)
        for seed in range(3):
            changed = self._run(f, "plain", ([_changed(x, seed + k) for k, x in enumerate(arrays)], {}))
            if changed.error is None and _distance(expected, changed) > size / 10:
                return "rounding"
        for level in (0, 1):
            options = {"xla_backend_optimization_level": level, "xla_cpu_enable_fast_math": bool(level)}
            other = self._run(_jit(f, compiler_options=options), "plain", (arrays, {}))
            if other.error is None and _distance(expected, other) > size / 10:
                return "rounding"
        return "" if _distance(compiled, expected) < size / 10 else "rounding"


_COMPILED = type(_jit(lambda: None))


def _name_of(fun: Any) -> str:
    fun = getattr(fun, "__wrapped__", fun)
    code = getattr(fun, "__code__", None)
    place = f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code else ""
    return f"{getattr(fun, '__qualname__', type(fun).__name__)}{place}"


def _type_of(x: Any) -> str:
    return f"{x.dtype}{x.shape}" if isinstance(x, jax.Array | np.ndarray | np.generic) else type(x).__name__


def _is_number(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float | complex)


def _of_arrays(fun: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Callable[..., Any], list[Any]]:
    """Return a function of the arrays among the arguments, which returns those among the results, and the arrays."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    is_given = [_is_number(x) and not isinstance(x, int) for x in leaves]

    def f(*arrays: Any) -> Any:
        rest = iter(arrays)
        given = [next(rest) if flag else x for flag, x in zip(is_given, leaves, strict=True)]
        args, kwargs = jax.tree.unflatten(tree, given)
        return list(filter(_is_number, jax.tree.leaves(fun(*args, **kwargs))))

    return f, [x for flag, x in zip(is_given, leaves, strict=True) if flag]


def _under_jit(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function under `jax.jit`, which takes and returns things besides arrays."""
    traced: list[Any] = []

    def f(*args: Any, **kwargs: Any) -> Any:
        found, tree = jax.tree.flatten(fun(*args, **kwargs))
        traced[:] = found, tree
        return found

    of_arrays, arrays = _of_arrays(f, args, kwargs)
    results = iter(_jit(of_arrays)(*arrays))
    found, tree = traced
    return jax.tree.unflatten(tree, [next(results) if _is_number(x) else x for x in found])


def _copied(tree: Any) -> Any:
    def copied(x: Any) -> Any:
        return jax.device_put(x, may_alias=False) if isinstance(x, jax.Array) and not x.is_deleted() else x

    return jax.tree.map(copied, tree)


def _changed(x: Any, seed: int) -> Any:
    """Return numbers that differ in their last digit."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    if isinstance(x, float | complex) and not isinstance(x, np.generic):
        return x * (1 + (-1) ** seed * float(np.finfo(np.float32).eps))
    array = np.asarray(x)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return x
    signs = np.random.default_rng(seed).choice([-1, 1], array.shape)
    changed = (array * (1 + signs * float(jnp.finfo(array.dtype).eps))).astype(array.dtype)
    return jnp.asarray(changed) if isinstance(x, jax.Array) else changed


# --- what differs -----------------------------------------------------------------------------------------------


def _differences(expected: Outcome, found: Outcome) -> Iterator[tuple[str, str]]:
    """Yield (kind, detail) of what differs."""
    if expected.error is not None or found.error is not None:
        types_ = [f"{type(x.error).__name__}: {x.error}"[:300] if x.error else "no error" for x in (expected, found)]
        if type(expected.error) is not type(found.error):
            yield "error", f"{types_[0]!r} and {types_[1]!r}"
        return
    leaves = [list(filter(_is_number, jax.tree.leaves(x.value))) for x in (expected, found)]
    if len(leaves[0]) != len(leaves[1]):
        trees = [str(jax.tree.structure(x.value))[-300:] for x in (expected, found)]
        yield "structure", f"{len(leaves[0])} and {len(leaves[1])} leaves, {trees[0]} and {trees[1]}"
        return
    for k, (x, y) in enumerate(zip(*leaves, strict=True)):
        where = f"result {k} of {len(leaves[0])}"
        both_arrays = isinstance(x, jax.Array) and isinstance(y, jax.Array)
        if np.shape(x) != np.shape(y):
            yield "shape", f"{where}: {np.shape(x)} and {np.shape(y)}"
            continue
        if both_arrays and x.dtype != y.dtype:
            yield "dtype", f"{where}: {x.dtype} and {y.dtype}"
            continue
        if both_arrays and x.weak_type != y.weak_type:
            yield "weak type", f"{where}: {jax.typeof(x)}, {x.weak_type} and {y.weak_type}"
        if detail := _unlike(x, y):
            yield "values", f"{where}: {detail}"


def _numbers(x: Any) -> Any:
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    array = np.asarray(x)
    if array.dtype == bool or array.dtype == object:
        return array
    if not np.issubdtype(array.dtype, np.number):  # of ml_dtypes
        return array.astype(np.float64 if jnp.issubdtype(array.dtype, jnp.floating) else np.int64)
    return array


def _unlike(x: Any, y: Any) -> str:
    """Return how two arrays of one shape differ, or an empty string."""
    a, b = _numbers(x), _numbers(y)
    if a.dtype == object or not a.size:
        return ""
    with np.errstate(all="ignore"):
        same = (a == b) | ((a != a) & (b != b))
        if np.issubdtype(a.dtype, np.inexact):
            parts = 2 if np.issubdtype(a.dtype, np.complexfloating) else 1
            tolerance = _TOLERANCES[min(8, max(1, np.asarray(x).dtype.itemsize // parts))]
            sizes = np.abs(a)
            largest = np.max(sizes, where=np.isfinite(sizes), initial=0)
            same |= np.abs(a - b) <= tolerance * (sizes + largest)
    if np.all(same):
        return ""
    at = np.unravel_index(np.argmin(same), same.shape)
    return f"{np.sum(~same)} of {a.size} numbers, {jax.typeof(x)}: at {tuple(map(int, at))} {a[at]} and {b[at]}"


def _is_of_values(expected: Outcome, found: Outcome) -> bool:
    return all(kind == "values" for kind, _ in _differences(expected, found))


def _distance(expected: Outcome, found: Outcome) -> float:
    """Return the largest difference of the numbers, relative to the largest in their array."""
    largest = 0.0
    leaves = [list(filter(_is_number, jax.tree.leaves(x.value))) for x in (expected, found)]
    for x, y in zip(*leaves, strict=False):
        a, b = _numbers(x), _numbers(y)
        if a.shape != b.shape or a.dtype == object or not a.size:
            continue
        if a.dtype == bool:
            a, b = a.astype(float), b.astype(float)
        with np.errstate(all="ignore"):
            wide = complex if np.issubdtype(a.dtype, np.complexfloating) else float
            off = np.abs(a.astype(wide) - b.astype(wide))
            off = np.where(np.isfinite(off), off, np.inf)
            off = np.where((a == b) | ((a != a) & (b != b)), 0, off)
            scale = np.abs(a[np.isfinite(a)]).max(initial=0) or 1
            largest = max(largest, float(np.max(off) / scale))
    return largest
