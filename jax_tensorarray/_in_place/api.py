"""The decorator."""

import functools
import importlib
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, Self, TypeVar, get_args, overload

import jax

from jax_tensorarray import _compat, _faults
from jax_tensorarray._in_place import (
    arguments,
    checking,
    explained,
    log,
    nnx,
    off,
    pickling,
    strictness,
    surroundings,
    switch,
)
from jax_tensorarray._in_place.repair import Repair, Request
from jax_tensorarray._jaxprs import jaxprs, refs, registry
from jax_tensorarray._loops.api import strategy_within
from jax_tensorarray._loops.choosing import repairs_first
from jax_tensorarray._loops.from_jax import check_max_steps
from jax_tensorarray._loops.strategy import Strategy
from jax_tensorarray._ops.primitive import hunting, hunts_nans

P = ParamSpec("P")
Q = ParamSpec("Q")
T = TypeVar("T")
S = TypeVar("S")

#: What `residuals` may be by name.
Names = Literal["auto", "tape", "recompute", "undo", "checkpoint"]
Residuals = Names | Strategy

#: Libraries with primitives of their own. The module of that name has rules for them.
RULES_OF_LIBRARIES = {"equinox"}

#: For so many different contents of objects a function stays compiled.
_KEPT = 8

#: JAX's own, even where another function stands in its place.
_jit = jax.jit


class Decorator(Protocol):
    """What `in_place` returns if it is given options only."""

    def __call__(self, fun: Callable[P, T], /) -> "InPlace[P, T]": ...


@overload
def in_place(
    fun: Callable[P, T],
    *,
    max_steps: int | None = None,
    residuals: Residuals = "auto",
    memory: int | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    enabled: bool = True,
    check: bool = False,
    strict: bool = False,
) -> "InPlace[P, T]": ...


@overload
def in_place(
    fun: None = None,
    *,
    max_steps: int | None = None,
    residuals: Residuals = "auto",
    memory: int | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    enabled: bool = True,
    check: bool = False,
    strict: bool = False,
) -> Decorator: ...


def in_place(
    fun: Callable[P, T] | None = None,
    *,
    max_steps: int | None = None,
    residuals: Residuals = "auto",
    memory: int | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    enabled: bool = True,
    check: bool = False,
    strict: bool = False,
) -> "InPlace[P, T] | Decorator":
    """Return the same function with the loops in it made linear, as they are written.

    A loop of plain JAX that reads and writes rows of a buffer copies all of it in every step in three cases: if a read
    and a write are unordered, if a whole buffer is selected, as by `jnp.where` and `jax.vmap`, and under `jax.grad`.
    `in_place` finds the reads and writes of rows in `fun` (`b[i]`, `b[:, i]`, `b[i, j]`, `.at[].set`, `.at[].add`,
    `lax.dynamic_slice` and so on) and replaces them by this library's ops. The results are the same; indices out of
    range mean what they mean in JAX.

    Any other operation stays as it was. `jax_tensorarray.doctor.explain(fun)(...)` says why, and
    `jax_tensorarray.doctor.loop_copies(in_place(fun), ...)` lists what still copies.

    Of the leaves of the arguments, `in_place` traces arrays (NumPy's too). It traces a float or a complex number that
    is an argument or stands in a list, a tuple or a dict, as `jax.jit` does; in any other node, such as a module of
    Equinox, the number stays what it is, as under `eqx.filter_jit`. `fun` gets all others as they are: bools and
    integers, strings, functions, any object. Outside of `jit` the function is compiled, once for all numbers that are
    traced, and once for each of the others that `==` tells apart. An object that compares by identity may change, so
    its contents are compared; if they cannot be, `fun` is compiled anew in each call. Functions and classes are taken
    to stay the same. Give a counter that takes many values as `jnp.int32(i)`, or call the function under `jax.jit`.

    If `fun` changes an argument, which may be a list, a dict, an object, a ref or a module of Flax NNX, so does the
    result. A traced array that `fun` stores anywhere else is an error. The function can be pickled if `fun` can. If
    `in_place` fails at a program, the program runs as it is written, with a warning.

    Args:
        fun: a function that JAX can trace. It may differentiate, batch and compile inside, and the result may be
            differentiated, batched and compiled. Without it, a decorator is returned.
        max_steps: None, or an upper bound on the steps of every `lax.while_loop` inside. With a bound these loops are
            differentiable in reverse mode.
        residuals: what reverse mode keeps of each step of a loop that updates a buffer by rows, and reads all of it:

            - "auto": the rows that the step overwrites, and what cannot be computed again, if JAX would keep a whole
              buffer, or values computed from one. Otherwise what JAX keeps.
            - "tape": what JAX keeps.
            - "undo": the rows that are overwritten, even where this takes more.
            - "checkpoint": a few carries for the whole loop, from which it runs on as often as it must.

            Or an object like `Undo()` or `Checkpoint(16)`, as for `while_loop`.
        memory: for "auto" and "checkpoint", how many bytes a loop may keep for all of its steps, as for `Auto`.
        static_argnums: as for `jax.jit`: arguments that `fun` gets as they are, floats and pytrees too. They must be
            hashable, and are compared by `==`.
        static_argnames: likewise.

    Returns:
        A function with the signature of `fun`, and with `lower`, `trace` and `eval_shape`, which trace every number as
        `jax.jit` does, and change no argument. Numbers in its results become arrays, unless they have been passed in or
        are floats in a module. A result that is not an array is a constant, or has been passed in, and comes back as it
        is.

    Raises:
        TypeError: `fun` is not callable, `max_steps` is not an integer, or (in a call) `fun` stores a traced array
            outside of its arguments.
        ValueError: `max_steps` is negative, or `residuals` or `memory` is none of these.
        jax.errors.JaxRuntimeError, ValueError: a loop takes more than `max_steps` steps (while running; on a GPU later,
            see `check_errors`).

    >>> import jax, jax.numpy as jnp
    >>> from jax import lax
    >>> def f(b):
    ...     body = lambda i, b: b.at[i].set(jnp.sin(b[i - 1]))
    ...     return lax.fori_loop(1, len(b), body, b).sum()
    >>> jax.grad(in_place(f))(jnp.ones(4))
    Array([2.16485, 0.     , 0.     , 0.     ], dtype=float32)
    """
    options = {
        "max_steps": max_steps,
        "residuals": residuals,
        "memory": memory,
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "enabled": enabled,
        "check": check,
        "strict": strict,
    }
    _check_options(options)
    if fun is None:
        return functools.partial(in_place, **options)  # type: ignore[return-value]
    if not callable(fun):
        raise TypeError(f"in_place: fun must be callable, got {fun!r}")
    return InPlace(fun, **options)


def _check_options(options: dict[str, Any]) -> None:
    for name in ("enabled", "check", "strict"):
        if not isinstance(options[name], bool):
            raise TypeError(f"in_place: {name} must be True or False, got {options[name]!r}")
    check_max_steps("in_place", options["max_steps"])
    residuals, names = options["residuals"], get_args(Names)
    if residuals not in names if isinstance(residuals, str) else not isinstance(residuals, Strategy):
        known = ", ".join(map(repr, names))
        raise ValueError(
            f"in_place: residuals must be one of {known}, or an object of jax_tensorarray.residuals such as Undo(); "
            f"got {residuals!r}"
        )


class InPlace(Generic[P, T]):
    """A function with its loops rewritten. Like what `jax.jit` returns, it can be traced, lowered and exported.

    It is not a Python function, since JAX copies the attributes of one to what it makes of it, such as its gradient.
    """

    __slots__ = ("__dict__", "__weakref__", "_for_objects", "_fun", "_made", "_options", "_request", "_static")

    def __init__(self, fun: Callable[P, T], **options: Any) -> None:
        self._fun, self._options = fun, options
        strategy = strategy_within("in_place", options["residuals"], options["memory"])
        self._request = Request(options["max_steps"], strategy, options["strict"])
        self._static = arguments.Static(fun, options["static_argnums"], options["static_argnames"])
        #: What JAX compiles, by what has turned `in_place` off.
        self._made: dict[tuple[str, bool], Any] = {}
        #: Likewise, for the objects in a call and their contents.
        self._for_objects: OrderedDict[tuple[str, Hashable], Any] = OrderedDict()
        arguments.named_as(fun)(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        if jax.config.jax_disable_jit or (hunts_nans() and _compat.looks_for_nans()):
            return self._fun(*args, **kwargs)
        if surroundings.are_being_made(self._fun, (args, kwargs)):
            return self._fun(*args, **kwargs)
        if nnx.has_modules((args, kwargs)):
            found: T = nnx.call(self._of_pure, args, kwargs)
            return found
        call = self._static.split(arguments.is_array, args, kwargs)
        with hunting():
            try:
                results = self._compiled_for(call)(*call.args, **call.kwargs)
            except _faults.Fault as error:
                return _faults.instead(error, lambda: self._fun(*args, **kwargs), strict=self._request.strict)
            finally:
                call.forget()
        finished: T = results.finished(args, kwargs)
        return finished

    def _compiled_for(self, call: arguments.Call) -> Any:
        """Return the function that JAX compiles for the objects in a call. Those of the last few are kept."""
        why_off = switch.why_off(self._options["enabled"])
        if not call.objects:
            return self._compiled(why_off)
        contents = call.contents()
        if contents is None:  # it is traced anew in each call, by a function that is dropped with all that is cached
            return self._new(why_off)
        key = why_off, contents
        if key in self._for_objects:
            self._for_objects.move_to_end(key)
        else:
            self._for_objects[key] = self._new(why_off)
            while len(self._for_objects) > _KEPT:
                self._for_objects.popitem(last=False)
        return self._for_objects[key]

    def _compiled(self, why_off: str, *, is_called: bool = True) -> Any:
        key = why_off, is_called
        if key not in self._made:
            self._made[key] = self._new(why_off, is_called=is_called)
        return self._made[key]

    def _new(self, why_off: str, *, is_called: bool = True) -> Any:
        options = {"why_off": why_off, "checks": self._options["check"], "is_called": is_called}
        return compiled(self._fun, self._request, self._static, **options)

    @property
    def _traced(self) -> Any:
        return self._compiled(switch.why_off(self._options["enabled"]), is_called=False)

    @functools.cached_property
    def _of_pure(self) -> "InPlace[..., Any]":
        """The same for modules of Flax NNX: a function of their states, which returns these too."""
        return InPlace(nnx.pure(self._fun), **self._options)

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Self: ...

    @overload
    def __get__(self: "InPlace[Concatenate[S, Q], T]", instance: S, owner: Any = None) -> Callable[Q, T]: ...

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<in_place of {self._fun!r}>"

    def __reduce__(self) -> Any:
        return pickling.reduced(self, in_place, self._fun, self._options)

    # With the arguments of `jax.jit`, which traces numbers of any kind.

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        return self._traced.trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        return self._traced.lower(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        return self._traced.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Drop all programs that this function has been compiled to."""
        for made in (*self._made.values(), *self._for_objects.values()):
            made.clear_cache()
        self._for_objects.clear()


def compiled(
    fun: Callable[..., Any],
    request: Request,
    static: arguments.Static,
    *,
    why_off: str = "",
    checks: bool = False,
    is_called: bool = True,
) -> Any:
    """Return the function, jitted, with its loops rewritten. If it is called, it returns `arguments.Results`.

    If `why_off` says that something has turned `in_place` off, no loop is rewritten.
    """
    # Inlined: within another jit it is as if the equations stood there.
    jit = functools.partial(_jit, inline=True, **static.options)
    plain = jit(arguments.with_results(fun))

    def operands(traced: Any, given: list[Any], named: dict[str, Any]) -> list[Any] | None:
        """Return the operands of a traced jaxpr, None if JAX does not tell them."""
        arrays = filter(arguments.is_tracer, jax.tree.leaves((given, named)))
        found = [*_compat.closed_over(traced), *arrays]
        return found if len(found) == len(traced.jaxpr.in_avals) else None

    def rewritten(given: list[Any], named: dict[str, Any], log_as: Callable[[Any], None]) -> arguments.Results:
        for library in RULES_OF_LIBRARIES & sys.modules.keys():
            importlib.import_module(f"jax_tensorarray._in_place.{library}")
        with strictness.marked(fun, request.strict), repairs_first(request):
            traced = plain.trace(*given, **named)
            log_as(traced.jaxpr)
            jaxpr = refs.as_arrays(traced.jaxpr)
            # A function without loops is treated as the body of a loop.
            has_loops = jaxprs.any_equation(jaxpr, lambda eqn: registry.entry_of(eqn).kind == "loop")
            repair = Repair(request, in_loop=not has_loops)
            arrays = operands(traced, given, named)
            if arrays is None or not repair.finds(jaxpr):
                explained.skipped_as_a_whole(repair, jaxpr)
                return plain(*given, **named)

        def run(*arrays: Any) -> list[Any]:
            with strictness.marked(fun, request.strict):
                return repair.function(jaxpr, is_whole=True)(*arrays)

        try:
            outs = compared(run, traced, arrays, given, named) if checks else run(*arrays)
        except Exception as error:
            return _faults.instead(error, lambda: plain(*given, **named), strict=request.strict)
        return jax.tree.unflatten(traced.out_tree, outs)

    def compared(run: Any, traced: Any, arrays: list[Any], given: list[Any], named: dict[str, Any]) -> list[Any]:
        with off.of_while_loops(request.max_steps, "check=True runs the function as it is written, too"):
            as_written = plain.trace(*given, **named)  # anew: the other one has its derivatives rewritten
        return checking.compared(
            fun,
            run,
            as_written.jaxpr,
            arrays,
            operands(as_written, given, named) or arrays,
            checking.names_of_arguments(fun, given, named, arguments.is_tracer),
            checking.names_of_results(traced.out_info),
            differentiates=request.max_steps is None or not off.has_while(as_written.jaxpr),
        )

    def as_written(args: Sequence[Any], kwargs: dict[str, Any]) -> arguments.Results:
        """Return the results of the function if `in_place` is off."""
        log.is_off(fun, why_off)
        if request.max_steps is None:
            return arguments.with_results(fun)(*args, **kwargs)
        with off.of_while_loops(request.max_steps, f"in_place is off ({why_off})") as text:
            traced = plain.trace(*args, **kwargs)
        arrays = operands(traced, list(args), kwargs)
        if arrays is None or not off.has_while(traced.jaxpr):
            return plain(*args, **kwargs)
        outs = off.explaining_gradients(traced.jaxpr, text)(*arrays)
        return jax.tree.unflatten(traced.out_tree, outs)

    @arguments.named_as(fun)
    def f(*args: Any, **kwargs: Any) -> Any:
        if not _compat.records_equations():
            # JAX looks for the operation that has made a NaN: it calls what it has compiled, one operation at a time.
            args, kwargs = jax.tree.map(lambda x: x, (args, kwargs))  # a `Given` becomes what it stands for
            return fun(*args, **kwargs)
        if not why_off:
            _compat.first_use()
        call = static.split(arguments.is_tracer, args, kwargs)
        try:
            if why_off:
                results = as_written(call.args, call.kwargs)
            else:
                with log.tracing(fun) as log_as:
                    results = rewritten(call.args, call.kwargs, log_as)
        finally:
            call.forget()
        return results if is_called else arguments.Shaped.of(results, jax.tree.leaves((args, kwargs)))

    return jit(f)
