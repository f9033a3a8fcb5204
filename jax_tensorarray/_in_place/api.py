"""The decorator."""

import functools
import importlib
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, overload

import jax

from jax_tensorarray import _compat, _faults
from jax_tensorarray._in_place import arguments, explained, nnx, pickling, surroundings
from jax_tensorarray._in_place.repair import Repair, Request
from jax_tensorarray._jaxprs import jaxprs, refs, registry
from jax_tensorarray._loops.api import strategy_within
from jax_tensorarray._loops.choosing import repairs_first
from jax_tensorarray._loops.from_jax import check_max_steps
from jax_tensorarray._loops.strategy import Strategy
from jax_tensorarray._ops.primitive import hunting, hunts_nans

#: Libraries with primitives of their own. The module of that name has rules for them.
RULES_OF_LIBRARIES = {"equinox"}

#: For so many different contents of objects a function stays compiled.
_KEPT = 8

#: JAX's own, even where another function stands in its place.
_jit = jax.jit


@overload
def in_place(
    fun: Callable[..., Any],
    *,
    max_steps: int | None = None,
    residuals: str | Strategy = "auto",
    memory: int | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Callable[..., Any]: ...


@overload
def in_place(
    fun: None = None,
    *,
    max_steps: int | None = None,
    residuals: str | Strategy = "auto",
    memory: int | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...


def in_place(
    fun: Callable[..., Any] | None = None,
    *,
    max_steps: int | None = None,
    residuals: str | Strategy = "auto",
    memory: int | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Any:
    """Return the same function with the loops in it made linear, as they are written.

    A loop of plain JAX that reads and writes rows of a buffer copies all of it in every step in three cases: if a read
    and a write are unordered, if a whole buffer is selected, as by `jnp.where` and `jax.vmap`, and under `jax.grad`.
    `in_place` finds the reads and writes of rows in `fun` (`b[i]`, `b[:, i]`, `b[i, j]`, `.at[].set`, `.at[].add`,
    `lax.dynamic_slice` and so on) and replaces them by this library's ops. The results are the same; indices out of
    range mean what they mean in JAX.

    Any other operation stays as it was. `jax_tensorarray.doctor.explain(fun)(...)` says why, and
    `jax_tensorarray.doctor.loop_copies(in_place(fun))(...)` lists what still copies.

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
    if fun is None:
        return functools.partial(
            in_place,
            max_steps=max_steps,
            residuals=residuals,
            memory=memory,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
        )
    if not callable(fun):
        raise TypeError(f"in_place: fun must be callable, got {fun!r}")
    check_max_steps("in_place", max_steps)
    return _InPlace(
        fun,
        max_steps=max_steps,
        residuals=residuals,
        memory=memory,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
    )


class _InPlace:
    """A function with its loops repaired. Like what `jax.jit` returns, it can be traced, lowered and exported.

    It is not a Python function, since JAX copies the attributes of one to what it makes of it, such as its gradient.
    """

    __slots__ = ("__dict__", "__weakref__", "_compiled", "_for_objects", "_fun", "_options", "_request", "_static")

    def __init__(self, fun: Callable[..., Any], **options: Any) -> None:
        self._fun, self._options = fun, options
        strategy = strategy_within("in_place", options["residuals"], options["memory"])
        self._request = Request(options["max_steps"], strategy)
        self._static = arguments.Static(fun, options["static_argnums"], options["static_argnames"])
        self._compiled = compiled(fun, self._request, self._static)
        self._for_objects: OrderedDict[Any, Any] = OrderedDict()
        arguments.named_as(fun)(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if jax.config.jax_disable_jit or (hunts_nans() and _compat.looks_for_nans()):
            return self._fun(*args, **kwargs)
        if surroundings.are_being_made(self._fun, (args, kwargs)):
            return self._fun(*args, **kwargs)
        if nnx.has_modules((args, kwargs)):
            return nnx.call(self._of_pure, args, kwargs)
        call = self._static.split(arguments.is_array, args, kwargs)
        with hunting():
            try:
                results = self._compiled_for(call)(*call.args, **call.kwargs)
            except _faults.Fault as error:
                return _faults.instead(error, lambda: self._fun(*args, **kwargs))
            finally:
                call.forget()
        return results.finished(args, kwargs)

    def _compiled_for(self, call: arguments.Call) -> Any:
        """Return the function that JAX compiles for the objects in a call. Those of the last few are kept."""
        if not call.objects:
            return self._compiled
        contents = call.contents()
        if contents is None:  # it is traced anew in each call, by a function that is dropped with all that is cached
            return compiled(self._fun, self._request, self._static)
        if contents in self._for_objects:
            self._for_objects.move_to_end(contents)
        else:
            self._for_objects[contents] = compiled(self._fun, self._request, self._static)
            while len(self._for_objects) > _KEPT:
                self._for_objects.popitem(last=False)
        return self._for_objects[contents]

    @functools.cached_property
    def _of_pure(self) -> Callable[..., Any]:
        """The same for modules of Flax NNX: a function of their states, which returns these too."""
        return _InPlace(nnx.pure(self._fun), **self._options)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<in_place of {self._fun!r}>"

    def __reduce__(self) -> Any:
        return pickling.reduced(self, in_place, self._fun, self._options)

    # With the arguments of `jax.jit`, which traces numbers of any kind.

    @functools.cached_property
    def _traced(self) -> Any:
        return compiled(self._fun, self._request, self._static, is_called=False)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        return self._traced.trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        return self._traced.lower(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        return self._traced.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        self._for_objects.clear()
        self._compiled.clear_cache()
        self._traced.clear_cache()


def compiled(fun: Callable[..., Any], request: Request, static: arguments.Static, *, is_called: bool = True) -> Any:
    """Return the function, jitted, with its loops repaired. If it is called, it returns `arguments.Results`."""
    # Inlined: within another jit it is as if the equations stood there.
    jit = functools.partial(_jit, inline=True, **static.options)
    plain = jit(arguments.with_results(fun))

    def repaired(given: list[Any], named: dict[str, Any]) -> arguments.Results:
        for library in RULES_OF_LIBRARIES & sys.modules.keys():
            importlib.import_module(f"jax_tensorarray._in_place.{library}")
        with repairs_first(request):
            traced = plain.trace(*given, **named)
            jaxpr = refs.as_arrays(traced.jaxpr)
            # A function without loops is treated as the body of a loop.
            has_loops = jaxprs.any_equation(jaxpr, lambda eqn: registry.entry_of(eqn).kind == "loop")
            repair = Repair(request, in_loop=not has_loops)
            arrays = list(filter(arguments.is_tracer, jax.tree.leaves((given, named))))
            arrays = [*_compat.closed_over(traced), *arrays]
            if len(arrays) != len(jaxpr.in_avals) or not repair.finds(jaxpr):
                explained.skipped_as_a_whole(repair, jaxpr)
                return plain(*given, **named)
        try:
            outs = repair.function(jaxpr, is_whole=True)(*arrays)
        except Exception as error:
            return _faults.instead(error, lambda: plain(*given, **named))
        return jax.tree.unflatten(traced.out_tree, outs)

    @arguments.named_as(fun)
    def f(*args: Any, **kwargs: Any) -> Any:
        if not _compat.records_equations():
            # JAX looks for the operation that has made a NaN: it calls what it has compiled, one operation at a time.
            args, kwargs = jax.tree.map(lambda x: x, (args, kwargs))  # a `Given` becomes what it stands for
            return fun(*args, **kwargs)
        _compat.first_use()
        call = static.split(arguments.is_tracer, args, kwargs)
        try:
            results = repaired(call.args, call.kwargs)
        finally:
            call.forget()
        return results if is_called else arguments.Shaped.of(results, jax.tree.leaves((args, kwargs)))

    return jit(f)
