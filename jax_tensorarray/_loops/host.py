"""`ta_host_read` and `ta_host_write`: rows of a tape in host memory. `ta_place` moves rows there and back.

Internal: the tapes of `Tape(offload=True)`. The type of a tape has its memory (`jax.memory.Space.Host`). XLA moves only
slices between the two memories, not gathers or scatters, so all examples of a batch use the same row.

`ta_place` is `jax.device_put`, but its transpose moves the cotangent to the memory of the operand. JAX's own transpose
does not move it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from jax_tensorarray import _compat
from jax_tensorarray._ops.empty import empty_like
from jax_tensorarray._ops.primitive import (
    NOOP_OPERANDS,
    is_zero,
    like_buffer,
    nonzero_transpose,
    row_of,
    to_front,
    using,
    zero_tangent,
)
from jax_tensorarray._types import Array

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def is_on_host(aval: Any) -> bool:
    """Return whether a type is that of an array in host memory."""
    return getattr(aval, "memory_space", DEVICE) == HOST


def on_host(aval: Any) -> Any:
    """Return the type in host memory."""
    return aval.update(memory_space=HOST)


def place(x: Array, space: Any) -> Array:
    """Move `x` to a memory space."""
    return x if jax.typeof(x).memory_space == space else ta_place_p.bind(x, space=space, moves=_MOVES)


def placed_as(x: Array, aval: Any) -> Array:
    """Move `x` to the memory of a type."""
    return place(x, HOST if is_on_host(aval) else DEVICE)


def zeros(aval: Any) -> Array:
    """Return zeros of a type, in its memory."""
    return placed_as(ad.instantiate_zeros(ad.Zero(aval)), aval)


def ta_host_empty(aval: Any) -> Array:
    """Return an unwritten tape of that type. The device holds no part of it.

    >>> import jax, jax.numpy as jnp
    >>> jax.typeof(ta_host_empty(on_host(jax.typeof(jnp.zeros((3, 2))))))
    ShapedArray(float32<host>[3,2])
    """
    return ta_host_empty_p.bind(aval=aval)


def ta_host_read(tape: Array, step: Array, *, batch_dims: int = 0, space: Any = DEVICE) -> Array:
    """Return the row of a step, `[*batch, *elem]`, of a tape `[*batch, T, *elem]` on the host, in a memory space.

    `step` is a scalar in `[0, T)`. The derivative adds the row to the running cotangent of the tape.
    """
    return ta_host_read_p.bind(tape, step, batch_dims=batch_dims, space=space)


def ta_host_write(tape: Array, step: Array, value: Array, *, batch_dims: int = 0) -> Array:
    """Write `value` as the row of a step of a tape `[*batch, T, *elem]` on the host, in place.

    No step writes twice.
    """
    return ta_host_write_p.bind(tape, step, placed_as(value, jax.typeof(tape)), batch_dims=batch_dims)


def _check(op: str, tape: Any, step: Any, batch_dims: int) -> None:
    if not is_on_host(tape) or tape.ndim <= batch_dims or step.shape:
        raise TypeError(f"{op}: {tape.str_short()} and {step.str_short()} are not a tape on the host and a step")


def _read_abstract_eval(tape: Any, step: Any, *, batch_dims: int, space: Any) -> Any:
    _check("ta_host_read", tape, step, batch_dims)
    return row_of(tape, batch_dims).update(memory_space=space)


def _write_abstract_eval(tape: Any, step: Any, value: Any, *, batch_dims: int) -> Any:
    _check("ta_host_write", tape, step, batch_dims)
    row = row_of(tape, batch_dims)
    if value.shape != row.shape or value.dtype != row.dtype or not is_on_host(value):
        raise TypeError(f"ta_host_write: value {value.str_short()} is not a row {row.str_short()} on the host")
    return like_buffer(tape)


# --- derivatives -----------------------------------------------------------------------------------------------


def _read_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    tape, step = primals
    out = ta_host_read(tape, step, **params)
    if is_zero(tangents[0]):
        return out, zero_tangent(out)
    return out, ta_host_read(tangents[0], step, **params)


def _write_jvp(primals: Any, tangents: Any, *, batch_dims: int) -> Any:
    tape, step, value = primals
    out = ta_host_write(tape, step, value, batch_dims=batch_dims)
    if is_zero(tangents[0]) and is_zero(tangents[2]):
        return out, zero_tangent(out)
    tape_dot, value_dot = (zeros(t.aval) if is_zero(t) else t for t in (tangents[0], tangents[2]))
    return out, ta_host_write(tape_dot, step, value_dot, batch_dims=batch_dims)


def _accumulate(running: Array, ct: Array, step: Array, *, batch_dims: int, space: Any) -> Array:
    row = ta_host_read(running, step, batch_dims=batch_dims) + place(ct, DEVICE)
    return ta_host_write(running, step, row, batch_dims=batch_dims)


def _read_transpose(ct: Any, tape: Any, step: Array, *, batch_dims: int, space: Any) -> Any:
    return [ta_host_write(zeros(tape.aval), step, ct, batch_dims=batch_dims), None]


def _write_transpose(ct: Any, tape: Any, step: Array, value: Any, *, batch_dims: int) -> Any:
    has_tape, has_value = ad.is_undefined_primal(tape), ad.is_undefined_primal(value)
    # Each row of a tape is written once, so nobody reads the cotangent of its old value, which is 0. A write of these
    # zeros beside the read would copy the tape.
    row = ta_host_read(ct, step, batch_dims=batch_dims, space=HOST) if has_value else None
    return [ct if has_tape else None, None, row]


# --- batching --------------------------------------------------------------------------------------------------


def _same_for_all(step: Array, dim: int | None) -> Array:
    """Return the step of a batch: the largest one, because examples that have ended stay behind."""
    return step if dim is None else jnp.max(step, axis=dim)


def _batch(primitive: Primitive, args: Any, dims: Any, *, batch_dims: int, **params: Any) -> Any:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    tape, step, *value = args
    step = _same_for_all(step, dims[1])
    if all(d is None for d in (dims[0], *dims[2:])):
        return primitive.bind(tape, step, *value, batch_dims=batch_dims, **params), None
    tape = to_front(tape, dims[0], size)
    value = [to_front(v, d, size) for v, d in zip(value, dims[2:], strict=True)]
    return primitive.bind(tape, step, *value, batch_dims=batch_dims + 1, **params), 0


def _batch_place(args: Any, dims: Any, **params: Any) -> Any:
    # The tape has its batch axis in front. XLA transposes on the device, not on the host.
    return ta_place_p.bind(jnp.moveaxis(args[0], dims[0], 0), **params), 0


# --- lowering --------------------------------------------------------------------------------------------------


def _empty(*, aval: Any) -> Array:
    # If slices overwrite the zeros, XLA only allocates them.
    return jax.device_put(jnp.zeros(aval.shape, aval.dtype), HOST)


def _empty_on_cpu(*, aval: Any) -> Array:
    return jax.device_put(empty_like(aval.update(memory_space=DEVICE)), HOST)


def _read(tape: Array, step: Array, *, batch_dims: int, space: Any) -> Array:
    row = lax.dynamic_index_in_dim(tape, step, batch_dims, keepdims=False)
    return row if space == HOST else jax.device_put(row, DEVICE)


def _write(tape: Array, step: Array, value: Array, *, batch_dims: int) -> Array:
    return lax.dynamic_update_index_in_dim(tape, value, step, batch_dims)


def _primitive(name: str, abstract_eval: Any, meaning: Any) -> Primitive:
    primitive = Primitive(name)
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(using(abstract_eval))
    mlir.register_lowering(primitive, mlir.lower_fun(meaning, multiple_results=False))
    return primitive


def _place(x: Array, *, space: Any, moves: Any) -> Array:
    return jax.device_put(x, space)


#: JAX looks at memory spaces only in programs with a `device_put` to one.
_MOVES = jax.make_jaxpr(lambda x: jax.device_put(x, HOST))(0)

ta_place_p = _primitive("ta_place", lambda x, *, space, moves: x.update(memory_space=space), _place)
ad.deflinear2(ta_place_p, lambda ct, x, *, space, moves: [placed_as(ct, x.aval)])
batching.primitive_batchers[ta_place_p] = _batch_place

ta_host_empty_p = _primitive("ta_host_empty", lambda *, aval: aval, _empty)
mlir.register_lowering(ta_host_empty_p, mlir.lower_fun(_empty_on_cpu, multiple_results=False), platform="cpu")

ta_host_read_p = _primitive("ta_host_read", _read_abstract_eval, _read)
ad.primitive_jvps[ta_host_read_p] = _read_jvp
batching.primitive_batchers[ta_host_read_p] = functools.partial(_batch, ta_host_read_p)
_compat.register_accumulating_transpose(ta_host_read_p, _accumulate, nonzero_transpose(_read_transpose))

ta_host_write_p = _primitive("ta_host_write", _write_abstract_eval, _write)
ad.primitive_jvps[ta_host_write_p] = _write_jvp
ad.primitive_transposes[ta_host_write_p] = nonzero_transpose(_write_transpose)
batching.primitive_batchers[ta_host_write_p] = functools.partial(_batch, ta_host_write_p)
NOOP_OPERANDS[ta_host_write_p] = lambda _, *operands: operands  # nobody reads the row
