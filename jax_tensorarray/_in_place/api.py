"""The decorator `in_place`, and the object that it returns, which compiles the rewritten function."""

import functools
import importlib
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, Self, TypeVar, get_args, overload

import jax

from jax_tensorarray import _compat, _contexts, _faults
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
from jax_tensorarray._loops.from_jax import check_max_steps
from jax_tensorarray._loops.strategy import Strategy
from jax_tensorarray._ops.primitive import debugging_nans, debugs_nans

P = ParamSpec("P")
Q = ParamSpec("Q")
T = TypeVar("T")
S = TypeVar("S")

#: What `residuals` may be by name.
Names = Literal["auto", "tape", "recompute", "undo", "checkpoint"]
Residuals = Names | Strategy

#: Libraries with primitives of their own. The module of that name has rules for them.
RULES_OF_LIBRARIES = {"equinox"}

#: A function stays compiled for the last contents of objects, at most so many.
_KEPT = 8

#: JAX's own `jit`, even if another function replaces it later.
_jit = jax.jit


class Decorator(Protocol):
    """The decorator that `in_place` returns if it is given options only."""

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
    """Return `fun` with its loops rewritten, so that they update buffers in place.

    A loop of plain JAX that reads and writes rows of a buffer may copy the whole buffer in every step. This happens in
    three cases: if XLA cannot order a read and a write, if the loop selects between whole buffers, as `jnp.where` and
    `jax.vmap` do, and under `jax.grad`. `in_place` finds the reads and writes of rows in `fun` (`b[i]`, `b[:, i]`,
    `b[i, j]`, `.at[].set`, `.at[].add`, `lax.dynamic_slice` and so on) and replaces them by this library's ops. The
    results are the same, except that sums of floats may be added up in another order. An index out of range means what
    it means in JAX.

    **Where to put it.** Outermost around pure code; with Flax NNX around the loss. Outermost means directly inside of
    your jit (`jax.jit`, `eqx.filter_jit`, `nnx.jit`), as far out as the code is pure: `jax.jit(in_place(train_step))`
    rewrites the gradient too. With Flax NNX write `nnx.value_and_grad(in_place(loss))` inside of `nnx.jit`. If `fun`
    itself takes modules of Flax NNX, `in_place` updates them as `nnx.jit` does, so it may also stand around the step.

    All other operations stay as they are. `jax_tensorarray.doctor.explain(fun)(...)` says why, and
    `jax_tensorarray.doctor.loop_copies(in_place(fun))(...)` lists the copies that remain. The logger `jax_tensorarray`
    says at level INFO, in one line per trace, how many reads and writes `in_place` has rewritten. Level DEBUG has the
    details.

    **Arguments.** `in_place` traces arrays (NumPy's too). It traces a float or a complex number if this is an argument
    or stands in a list, a tuple or a dict, as `jax.jit` does. In any other node, such as a module of Equinox, the
    number stays as it is, as under `eqx.filter_jit`. All other leaves reach `fun` unchanged: bools, integers, strings,
    functions, any object. Outside of `jit` the function is compiled once for all traced numbers, and once for each of
    the other leaves that `==` tells apart. An object that compares by identity may change, so `in_place` compares its
    contents. If it cannot, each call compiles `fun` again. `in_place` takes functions and classes to stay the same.
    Give a counter with many values as `jnp.int32(i)`, or call the function under `jax.jit`.

    If `fun` changes an argument, so does the result. The argument may be a list, a dict, an object, a ref or a module
    of Flax NNX. If `fun` stores a traced array anywhere else, this is an error. The function can be pickled if `fun`
    can.

    **If something goes wrong.** If a rewrite fails, the program runs as it is written, with one `RuntimeWarning`.
    `enabled=False`, the block `with jax_tensorarray.disable_in_place():` and the environment variable
    `JAX_TENSORARRAY_IN_PLACE=0` turn `in_place` off. The function then is `jax.jit(fun)` with the same treatment of
    arguments. JAX reads the variable when it traces, and keeps programs from inside and outside of the block apart.

    Args:
        fun: a function that JAX can trace. It may differentiate, batch and compile inside, and the result may be
            differentiated, batched and compiled. Without it, `in_place` returns a decorator.
        max_steps: None, or an upper bound on the steps of every `lax.while_loop` inside. With a bound these loops are
            differentiable in reverse mode.
        residuals: what reverse mode keeps of each step of a loop that updates a buffer by rows, and reads all of it:

            - "auto": the rows that the step overwrites, and the values that cannot be recomputed, if JAX would keep a
              whole buffer, or values computed from one. Otherwise what JAX keeps, and also if that is at most
              2 MiB for all steps and takes long to compute again.
            - "tape": what JAX keeps.
            - "recompute": the carry of each step. The backward pass recomputes the rest.
            - "undo": the rows that are overwritten, even if this takes more memory.
            - "checkpoint": a few carries for the whole loop. The backward pass runs the loop again from these.

            Or an object like `Undo()` or `Checkpoint(16)` of `jax_tensorarray.residuals`.
        memory: for "auto" and "checkpoint", how many bytes a loop may keep for all of its steps, as for `Auto`.
        static_argnums: as for `jax.jit`: arguments that `fun` gets as they are, floats and pytrees too. They must be
            hashable, and are compared by `==`.
        static_argnames: likewise.
        enabled: whether to rewrite anything. If it is False, an `in_place` around `fun` still rewrites `fun`.
        check: whether to run `fun` as it is written, too, and raise an error at the first result that differs. The
            comparison is a part of the program, so it also happens under `jax.jit` and `jax.vmap`. In forward mode it
            includes the tangents of the results, and in reverse mode the gradients of the arguments, to any order. The
            error names the place in the pytree, both values and the tolerance. Integers, bools and keys must be equal.
            Floats may differ by the square root of the machine epsilon (3.5e-4 for float32), relative to the largest
            element of the array. NaN equals NaN. Effects such as `jax.debug.print` happen once. A callback that returns
            a value must be a `jax.pure_callback`. If `max_steps` is given and there is a `lax.while_loop`, only values
            are compared, since plain JAX has no gradient. Use it for tests: it takes the time and the memory of both
            programs.
        strict: whether to raise an error if the compiled program still copies a buffer of at least 4 KiB in a loop of
            `fun`, or of its derivatives. The error comes when JAX compiles the program, which may be a `jax.jit` around
            `fun`, and names lines and reasons. If a rewrite fails, that is an error too, and not a warning. The first
            strict function of a process has JAX report each program that it compiles.

    Returns:
        A function with the signature of `fun`, and with `lower`, `trace` and `eval_shape`, which trace every number as
        `jax.jit` does, and change no argument. Numbers in its results become arrays, unless they have been passed in or
        are floats in a module. A result that is not an array is a constant, or has been passed in, and comes back as it
        is.

    Raises:
        TypeError: `fun` is not callable, `max_steps` is not an integer, or `enabled`, `check` or `strict` is not a
            bool. In a call: `fun` stores a traced array outside of its arguments, or `check` meets an effect that
            returns a value.
        ValueError: `max_steps` is negative, `residuals` or `memory` is none of these, or the environment variable has
            an unknown value (in a call).
        jax.errors.JaxRuntimeError, ValueError: a loop takes more than `max_steps` steps, or `check` finds a difference
            (while running; on a GPU later, see `check_errors`).
        jax_tensorarray.doctor.LoopCopyError: `strict` finds a copy (when JAX compiles the program).

    >>> import jax, jax.numpy as jnp
    >>> from jax import lax
    >>> def f(b):
    ...     body = lambda i, b: b.at[i].set(jnp.sin(b[i - 1]))
    ...     return lax.fori_loop(1, len(b), body, b).sum()
    >>> jax.grad(in_place(f))(jnp.ones(4))
    Array([2.16485, 0.     , 0.     , 0.     ], dtype=float32)
    >>> jax.grad(in_place(f, check=True, strict=True))(jnp.ones(4))
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

    It is not a Python function: JAX would copy the attributes of a function to its gradient and other transformations.
    """

    __slots__ = ("__dict__", "__weakref__", "_for_objects", "_fun", "_made", "_options", "_request", "_static")

    def __init__(self, fun: Callable[P, T], **options: Any) -> None:
        self._fun, self._options = fun, options
        strategy = strategy_within("in_place", options["residuals"], options["memory"])
        self._request = Request(options["max_steps"], strategy, options["strict"])
        self._static = arguments.Static(fun, options["static_argnums"], options["static_argnames"])
        #: The functions that JAX compiles, by the text of `switch.why_off`.
        self._made: dict[tuple[str, bool], Any] = {}
        #: Likewise, for the objects in a call and their contents.
        self._for_objects: OrderedDict[tuple[str, Hashable], Any] = OrderedDict()
        arguments.named_as(fun)(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        if jax.config.jax_disable_jit or (debugs_nans() and _compat.looks_for_nans()):
            return self._fun(*args, **kwargs)
        if surroundings.are_being_made(self._fun, (args, kwargs)):
            return self._fun(*args, **kwargs)
        if nnx.has_modules((args, kwargs)):
            found: T = nnx.call(self._of_pure, args, kwargs)
            return found
        call = self._static.split(arguments.is_array, args, kwargs)
        with debugging_nans():
            try:
                results = self._compiled_for(call)(*call.args, **call.kwargs)
            except _faults.Fault as error:
                return _faults.instead(error, lambda: self._fun(*args, **kwargs), strict=self._request.strict)
            finally:
                call.forget()
        finished: T = results.finished(call, args, kwargs)
        return finished

    def _compiled_for(self, call: arguments.Call) -> Any:
        """Return the function that JAX compiles for the objects in a call. The last few of such functions are kept."""
        why_off = switch.why_off(self._options["enabled"])
        if not call.objects:
            return self._compiled(why_off)
        contents = call.contents()
        if contents is None:  # each call traces again, by a function that is dropped with all that JAX caches for it
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
    # Inlined: another jit gets the equations, without a call.
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
        with strictness.marked(fun, request.strict), _contexts.repairs_first(request):
            traced = plain.trace(*given, **named)
            log_as(traced.jaxpr)
            jaxpr = refs.as_arrays(traced.jaxpr)
            # A function without loops is treated as the body of a loop.
            has_loops = jaxprs.any_equation(jaxpr, lambda eqn: registry.entry_of(eqn).kind == "loop")
            repair = Repair(request, in_loop=not has_loops)
            arrays = operands(traced, given, named)
            # With `check` the comparison is needed: `early` may have rewritten gradients while they were traced.
            if arrays is None or not (checks or repair.finds(jaxpr)):
                explained.skipped_as_a_whole(repair, jaxpr)
                return plain(*given, **named)

        def run(*arrays: Any) -> list[Any]:
            with strictness.marked(fun, request.strict):
                return repair.function(jaxpr, is_whole=True)(*arrays)

        try:
            outs = compared(run, traced, arrays, given, named) if checks else run(*arrays)
            if checks:
                log.is_checked(fun)
        except Exception as error:
            return _faults.instead(error, lambda: plain(*given, **named), strict=request.strict)
        return jax.tree.unflatten(traced.out_tree, outs)

    def compared(run: Any, traced: Any, arrays: list[Any], given: list[Any], named: dict[str, Any]) -> list[Any]:
        with off.of_while_loops(request.max_steps, "check=True runs the function as it is written, too"):
            as_written = plain.trace(*given, **named)  # `traced` has rewritten derivatives
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

    def as_written(call: arguments.Call, args: Sequence[Any], kwargs: dict[str, Any]) -> arguments.Results:
        """Return the results of the function if `in_place` is off."""
        log.is_off(fun, why_off)
        if request.max_steps is None:
            return arguments.with_results(fun)(*args, **kwargs)
        given, named = call.args, call.kwargs
        with off.of_while_loops(request.max_steps, f"in_place is off ({why_off})") as text:
            traced = plain.trace(*given, **named)
        arrays = operands(traced, given, named)
        if arrays is None or not off.has_while(traced.jaxpr):
            return plain(*given, **named)
        outs = off.explaining_gradients(traced.jaxpr, text)(*arrays)
        return jax.tree.unflatten(traced.out_tree, outs)

    @arguments.named_as(fun)
    def f(*args: Any, **kwargs: Any) -> Any:
        if not _compat.records_equations():
            # JAX searches for the operation that has made a NaN: it runs the function again, one operation at a time.
            args, kwargs = jax.tree.map(lambda x: x, (args, kwargs))  # a `Given` becomes the argument
            return fun(*args, **kwargs)
        if not why_off:
            _compat.first_use()
        call = static.split(arguments.is_tracer, args, kwargs)
        try:
            if why_off:
                results = as_written(call, args, kwargs)
            else:
                with log.tracing(fun) as log_as:
                    results = rewritten(call.args, call.kwargs, log_as)
        finally:
            call.forget()
        return results if is_called else arguments.Shaped.of(results, jax.tree.leaves((args, kwargs)))

    return jit(f)
