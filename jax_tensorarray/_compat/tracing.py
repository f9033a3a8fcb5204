"""Tracers, their types, and the current trace of JAX."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.core import AbstractValue
from jax.interpreters import ad

from jax_tensorarray._compat.private import private_names
from jax_tensorarray._types import Array


def varying_axes(x: Any) -> frozenset[Any]:
    """Return the manual axes of a mesh, in `shard_map`, over which `x`, an array or a type, varies.

    The documentation mentions the attribute, but not its name. Without it, `shard_map` needs `check_vma=False`.
    """
    manual = getattr(x if isinstance(x, AbstractValue) else jax.typeof(x), "mat", None)  # a ref has a type too
    return getattr(manual, "varying", frozenset())


def varying_over_batches(x: Array) -> Array:
    """Make a batched operand of a batching rule vary over the axes of `spmd_axis_name` of a `vmap`.

    JAX's own rules do the same. Private. Without it a `shard_map` under such a `vmap` needs `check_vma=False`.
    """
    return x if _insert_pvary is None else _insert_pvary[0](x)[0]


_insert_pvary = private_names("interpreters.batching", "spmd_names_insert_pvary")


def can_name_axes() -> bool:
    """Return whether we can trace the body of a `shard_map` alone. Private. Without it our passes skip the body."""
    return _extend_axis_env is not None and _check_vma is not None


@contextlib.contextmanager
def naming_axes(params: dict[str, Any]) -> Iterator[None]:
    """Name the axes of a `shard_map` with these parameters, like JAX when it lowers the body."""
    extend, check = _extend_axis_env[0], _check_vma[0]  # type: ignore[index]
    with extend(params["mesh"], set(params["newly_manual_axes"])), check(params["check_vma"]):
        yield


_extend_axis_env = private_names("shard_map", "_extend_axis_env")
_check_vma = private_names("config", "_check_vma")


def is_differentiated(x: Any) -> bool:
    """Return whether JAX is differentiating with respect to `x`, or a value on which `x` depends.

    The tracer of reverse mode is private. Without it `in_place` rewrites loops only after differentiation in reverse,
    and does not rewrite some of the loops that differentiation makes.
    """
    return isinstance(x, ad.JVPTracer if _linearize_tracer is None else (ad.JVPTracer, *_linearize_tracer))


_linearize_tracer = private_names("interpreters.ad", "LinearizeTracer")


def maker_of(x: Any) -> Any:
    """Return the equation that makes a traced array, or None if it is unknown.

    Private. Without it `in_place` does not see that two arrays of zeros are equal, nor that a mask selects one row if a
    differentiated loop closes over `jnp.arange`.
    """
    return getattr(x, "parent", None) if isinstance(x, _jit_tracer) else None


def operands_of(maker: Any) -> list[Any]:
    """Return the operands of an equation from `maker_of`: arrays, and numbers unchanged."""
    return [x.full_lower() for x in maker.in_tracers]


_jit_tracer = tuple(private_names("interpreters.partial_eval", "DynamicJaxprTracer") or ())


def executes_eagerly() -> bool:
    """Return whether an operation on concrete arrays runs eagerly, and no transformation records it.

    Only then may a write update a TensorArray in place outside of `jit`. Without this knowledge such writes copy.
    """
    return _trace_state_clean is not None and bool(_trace_state_clean[0]())


_trace_state_clean = private_names("core", "trace_state_clean")


def traced_as_a_whole(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `f(*args, **kwargs)`. After an interrupt, end the traces that it has begun.

    JAX ends a trace in Python (`SetCurrentTraceContextManager.__exit__`). If an interrupt comes there, every later
    operation of this thread returns a tracer. The function that ends all traces is private. Without it this may happen
    in the first call of an op outside of jit, as in plain JAX.
    """
    is_outside = executes_eagerly()
    try:
        return f(*args, **kwargs)
    except BaseException:
        if is_outside and _reset_trace_state is not None:
            _reset_trace_state[0]()
        raise


_reset_trace_state = private_names("core", "reset_trace_state")


def records_equations() -> bool:
    """Return whether operations become equations of a jaxpr, as when JAX traces for `jax.jit`.

    Private. Without it `jax.debug_nans` does not report a NaN in a function under `in_place` as in plain JAX.
    """
    return _trace_context is None or _jit_trace is None or isinstance(_trace_context[0].trace, _jit_trace)


_trace_context = private_names("core", "trace_ctx")
_jit_trace = tuple(private_names("interpreters.partial_eval", "DynamicJaxprTrace") or ()) or None


def looks_for_nans() -> bool:
    """Return whether JAX runs a function again, operation by operation, to find the source of a NaN.

    The name of the function is private. Without it JAX searches twice in `jax.jit(in_place(f))`, and says so.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "maybe_recursive_nan_check":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
