"""Make a JAX primitive from the rules of an op.

A rule is an ordinary function; this module registers it with JAX. All row ops have the operands
`buffer, index[, value][, where]` and the parameters `Params`, so they share one batching rule and one lowering. If
examples share an index or a mask, it has size 1 along their batch axis. Only kernels need one per example: the lowering
repeats it for their calls. Other ops have operands and parameters of their own.
"""

import contextlib
import functools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NotRequired, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.experimental import checkify
from jax.extend import source_info_util
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla
from jax.sharding import PartitionSpec

from jax_tensorarray import _compat, _kernels
from jax_tensorarray._ops import sorting
from jax_tensorarray._ops.calls import PREFIX, TEXT, Signature, declare, op_attribute
from jax_tensorarray._ops.partition import label
from jax_tensorarray._ops.starts import counting, numbers_of_rows, positions_of, sizes_of
from jax_tensorarray._types import Array


class Params(TypedDict):
    """The parameters of a row op."""

    batch_dims: int  #: number of leading axes of all operands, of size 1 in an index or a mask that examples share
    index_dims: int  #: number of axes after these along which an index is the start of a box, see `starts`
    window: tuple[int, ...]  #: sizes of the box along the last of these axes. It has one row along the others
    whole: bool  #: a box is in range as a whole, otherwise each of its rows by itself
    #: The treatment of an index out of range. "error": raise, along one axis and for each row. "drop": skip the row, or
    #: the whole box. "clip": move the box into range. None: "error", or "drop" under a vmap without masks.
    mode: str | None
    reverse: bool  #: visit the positions of the index from last to first
    op: str  #: the public op that the user called, for messages
    lowering: str  #: "auto", "ffi" or "xla", see `_lowering.slices`
    is_tape: bool  #: the buffer is a tape, see `_ops.calls.TAPE_PARAM`
    #: Set by passes only. "in range": the index is in range; "recorded": `_lowering.record` checks it.
    checked: NotRequired[str]
    unordered: NotRequired[bool]  #: set by passes only: reads and updates need no order, see `_lowering.uses`
    waits: NotRequired[int]  #: set by passes only: the number of further operands that the op waits for
    #: Set by passes only: the index has the numbers of all rows of each example, for a kernel.
    settled: NotRequired[bool]
    effect: NotRequired[bool]  #: set by passes only: XLA must not move the call
    place: NotRequired[str]  #: set by passes only: the source line of `op`, see `_lowering.source_lines`
    deferred: NotRequired[bool]  #: set by passes only: the program raises at its end, see `_lowering.deferred`


def row_params(
    op: str,
    mode: str | None,
    *,
    lowering: str = "auto",
    batch_dims: int = 0,
    index_dims: int = 1,
    window: tuple[int, ...] = (),
    whole: bool = False,
    reverse: bool = False,
    is_tape: bool = False,
) -> Params:
    """Return the parameters with which the public op `op` binds a primitive."""
    return {
        "batch_dims": batch_dims,
        "index_dims": index_dims,
        "window": window,
        "whole": whole,
        "mode": mode,
        "reverse": reverse,
        "op": op,
        "lowering": lowering,
        "is_tape": is_tape,
    }


def may_raise(params: Mapping[str, Any]) -> bool:
    """Return whether an index out of range is an error. An op without an index has no mode."""
    return params.get("mode", "drop") in ("error", None)


def once_checked(params: Params) -> Params:
    """Return the parameters of an op after another one has checked its index."""
    return params | {"mode": "drop"} if may_raise(params) else params


#: Signatures of the calls of row ops, which a `RowKernel` lowers.
ROW_OPS: dict[Primitive, Signature] = {}

#: Signatures of all ops that lower to one call with their own operands, row ops included.
KERNEL_OPS: dict[Primitive, Signature] = {}

#: For other ops on a few rows: a function `(active, *operands) -> operands`. With the new operands, an inactive example
#: reads and writes nothing that matters. If the result has the type of the first operand, the op updates it.
NOOP_OPERANDS: dict[Primitive, Callable[..., Sequence[Array]]] = {}


def updates_rows(primitive: Primitive) -> bool:
    """Return whether a primitive is a row op that updates its first operand in place."""
    return primitive in ROW_OPS and ROW_OPS[primitive].in_place


class RowPrimitive(Primitive):
    """A primitive whose operands vary over the same axes of a `shard_map`, like JAX's own primitives."""

    def bind(self, *operands: Any, **params: Any) -> Any:
        return super().bind(*varying_alike(operands), **params)


def varying_alike(operands: Sequence[Any]) -> Sequence[Any]:
    """Make each operand vary over all manual axes over which any of them varies."""
    if jax.sharding.get_abstract_mesh().empty:
        return operands
    everywhere = frozenset().union(*map(_compat.varying_axes, operands))
    return [varying_over(x, everywhere) for x in operands]


def varying_over(x: Any, axes: frozenset[Any]) -> Any:
    """Make `x` vary over these manual axes, too."""
    more = axes - _compat.varying_axes(x)
    return lax.pcast(x, tuple(sorted(more, key=str)), to="varying") if more else x


def make_primitive(
    name: str,
    *,
    abstract_eval: Callable[..., Any],
    linear_in: Sequence[int] = (),
    jvp: Callable[..., Any] | None = None,
    transpose: Callable[..., Any] | None = None,
    batch: Callable[..., Any] | None = None,
    reference: Callable[..., Any],
    kernel: Callable[..., Any] | None = None,
    noop_operands: Callable[..., Sequence[Array]] | None = None,
    checks: Callable[..., Any] | None = None,
    multiple_results: bool = False,
) -> Primitive:
    """Make a primitive with all its rules, and register it with the passes and loops of the library.

    If an op is jointly linear in the operands `linear_in`, it needs no `jvp`. `transpose` gets cotangents that are not
    all zero. `reference` is the op in plain JAX or in other ops, and the lowering if there is no kernel. `kernel`
    lowers to a call of a kernel on a `platform`. `noop_operands` is the entry of `NOOP_OPERANDS`. `checks` is a
    function that `checkify` runs after its check of the index.
    """
    primitive = RowPrimitive(name)
    primitive.multiple_results = multiple_results
    primitive.def_impl(functools.partial(_run, primitive))
    primitive.def_abstract_eval(using(abstract_eval))
    if linear_in:
        jvp = functools.partial(_linear_jvp, primitive, linear_in)
    if jvp is not None:
        ad.primitive_jvps[primitive] = jvp
        _compat.expanded_as(primitive, functools.partial(_taylor, primitive))
    if transpose is not None:
        ad.primitive_transposes[primitive] = nonzero_transpose(transpose)
    if batch is not None:
        batching.primitive_batchers[primitive] = functools.partial(_batch, batch, primitive)
    if noop_operands is not None:
        NOOP_OPERANDS[primitive] = noop_operands
    if isinstance(kernel, RowKernel):
        reference = _on_one_axis(reference, kernel.signature)
    fallback = mlir.lower_fun(_after_waiting(reference), multiple_results=multiple_results)
    mlir.register_lowering(primitive, fallback)
    if kernel is None:
        return primitive
    if isinstance(kernel, RowKernel | SimpleKernel):
        KERNEL_OPS[primitive] = kernel.signature
    for platform in sorted(_kernels.modules):
        lower = functools.partial(_lower, functools.partial(kernel, platform=platform), fallback)
        mlir.register_lowering(primitive, lower, platform=platform)
    if isinstance(kernel, RowKernel):
        ROW_OPS[primitive] = kernel.signature
        _compat.checked_besides(primitive, functools.partial(_check, checks, kernel.signature), _params_when_checked)
    return primitive


def using(abstract_eval: Callable[..., Any]) -> Callable[..., Any]:
    """Extend the abstract eval of an op by the first use of the library: JAX calls this rule before all others."""

    @functools.wraps(abstract_eval)
    def rule(*avals: Any, **params: Any) -> Any:
        _compat.first_use()
        return abstract_eval(*avals, **params)

    return rule


#: Whether `jax.debug_nans` or `jax.debug_infs` is on. They are no keys of JAX's caches of programs, but this is.
_debugging_nans = jax.make_user_context(False)


def debugs_nans() -> bool:
    """Return whether a NaN or an infinity is an error. Then no array may be uninitialised."""
    return bool(jax.config.jax_debug_nans or jax.config.jax_debug_infs)


def debugging_nans() -> contextlib.AbstractContextManager[Any]:
    """Return a context for running programs. Under `jax.debug_nans` it excludes programs with uninitialised arrays."""
    return _debugging_nans(True) if debugs_nans() else contextlib.nullcontext()


def run_alone(primitive: Primitive, *operands: Any, **params: Any) -> Any:
    """Run one primitive outside of jit. Its program is cached."""
    with debugging_nans():
        return _compat.traced_as_a_whole(xla.apply_primitive, primitive, *operands, **params)


_OF_INDEX = r"index -?\d+ is out of range for a (?:buffer|TensorArray) of size \d+"


def _run(primitive: Primitive, *operands: Any, **params: Any) -> Any:
    """Run one op outside of jit. All lines that call it share one program, so the error gets the line here."""
    try:
        return run_alone(primitive, *operands, **params)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        text, where = str(error), source_info_util.summarize(source_info_util.current())
        op = params.get("op", "")
        message = re.search(re.escape(op.removeprefix(TEXT)) if op.startswith(TEXT) else _OF_INDEX, text)
        frame = re.match(r"(.+?):(\d+)", where)
        if message is None or frame is None:
            raise
        end = message.end()
        text = f"{text[:end]} ({os.path.basename(frame[1])}:{frame[2]}){text[end:]}"
        raise type(error)(text).with_traceback(error.__traceback__) from None


# --- abstract eval ---------------------------------------------------------------------------------------------


def check_operands(buffer: Any, index: Any, rest: Sequence[Any], takes_value: bool, **params: Unpack[Params]) -> None:
    """Check the operands of a bind. Those from public functions fit; others may bind by hand."""
    op, batch_dims, index_dims = params["op"], params["batch_dims"], params["index_dims"]
    axes_of_index = _axes_of_index(params)
    batch, positions = buffer.shape[:batch_dims], positions_of(index, axes_of_index)[batch_dims:]
    if buffer.ndim <= batch_dims or not _is_for(batch, index):
        raise ValueError(f"{op}: buffer {buffer.shape} and index {index.shape} do not share {batch_dims} batch axes")
    if not 0 < index_dims <= buffer.ndim - batch_dims:
        raise ValueError(f"{op}: buffer {buffer.shape} with {batch_dims} batch axes has no rows of {index_dims} axes")
    if axes_of_index > 1 and index.shape[batch_dims:][-1:] != (index_dims,):
        raise ValueError(f"{op}: index {index.shape} does not end with its {index_dims} starts")
    if may_raise(params) and (axes_of_index > 1 or params["whole"]):
        raise ValueError(f"{op}: an index raises along one axis only, and for each row; got mode {params['mode']!r}")
    sizes, window = sizes_of(buffer, params), params["window"]
    if (params["mode"] == "clip" or (window and index_dims > 1)) and not params["whole"]:
        raise ValueError(f"{op}: a box along several axes, or one that is moved into range, is whole")
    if len(window) > index_dims or any(n > size for n, size in zip(window[::-1], sizes[::-1], strict=False)):
        raise ValueError(f"{op}: a window of {window} rows does not fit into {sizes}")
    if not jnp.issubdtype(index.dtype, jnp.integer):
        raise TypeError(f"{op}: index must have an integer dtype, got {index.dtype}")
    rest = rest[: len(rest) - params.get("waits", 0)]
    value, where = (rest[:1], rest[1:]) if takes_value else ((), rest)
    rows = (*batch, *positions, *params["window"], *buffer.shape[batch_dims + index_dims :])
    for v in value:
        if v.shape != rows or v.dtype != buffer.dtype:
            raise TypeError(f"{op}: value {v.str_short()} does not fit rows {rows} of {buffer.dtype}")
    for w in where:
        if not _is_for(batch, w) or w.shape[batch_dims:] != positions or w.dtype != jnp.bool_:
            raise TypeError(f"{op}: where {w.str_short()} must be bool{(*batch, *positions)}")


def _axes_of_index(params: Any) -> int:
    """Return along how many axes an index has a start: one if a pass has replaced it by numbers of rows."""
    return 1 if params.get("settled") else params["index_dims"]


def _is_for(batch: Sequence[Any], x: Any) -> bool:
    """Return whether an index or a mask has these batch axes, or axes of size 1."""
    return x.ndim >= len(batch) and all(n in (1, size) for n, size in zip(x.shape, batch, strict=False))


def like_buffer(buffer: Any) -> ShapedArray:
    """Return the type of the updated buffer."""
    return buffer.update(weak_type=False)


def rows_of(buffer: Any, index: Any, **params: Unpack[Params]) -> ShapedArray:
    """Return the type of the rows that `index` addresses: `[*batch, *I, *window, *elem]`."""
    batch_dims, index_dims = params["batch_dims"], params["index_dims"]
    rows = (*positions_of(index, _axes_of_index(params))[batch_dims:], *params["window"])
    elem = range(batch_dims + index_dims, buffer.ndim)
    shape = [*buffer.shape[:batch_dims], *rows, *(buffer.shape[d] for d in elem)]
    return type_like(buffer, shape, [*range(batch_dims), *[None] * len(rows), *elem])


def row_of(buffer: Any, batch_dims: int) -> ShapedArray:
    """Return the type of one row of a buffer `[*batch, T, *elem]`: `[*batch, *elem]`."""
    dims = [d for d in range(buffer.ndim) if d != batch_dims]
    return type_like(buffer, [buffer.shape[d] for d in dims], dims)


def type_like(aval: Any, shape: Sequence[int], dims: Sequence[int | None], dtype: Any = None) -> ShapedArray:
    """Return the type of an array whose axes come from `aval` or are new (None), sharded as `aval` is."""
    spec = [*aval.sharding.spec, *[None] * aval.ndim]
    sharding = aval.sharding.update(spec=PartitionSpec(*(None if d is None else spec[d] for d in dims)))
    return aval.update(shape=tuple(shape), dtype=dtype or aval.dtype, weak_type=False, sharding=sharding)


def with_axis(aval: Any, size: int) -> ShapedArray:
    """Return the type with one more axis in front."""
    return type_like(aval, (size, *aval.shape), [None, *range(aval.ndim)])


# --- differentiation -------------------------------------------------------------------------------------------


def is_zero(x: Any) -> bool:
    """Return whether a tangent or cotangent is symbolically zero."""
    return type(x) is ad.Zero


def zero_tangent(out: Array) -> Any:
    """Return the symbolic zero that is the tangent of a constant `out`."""
    return ad.Zero(jax.typeof(out).to_tangent_aval())


def _linear_jvp(primitive: Primitive, linear_in: Sequence[int], primals: Any, tangents: Any, **params: Any) -> Any:
    """Return the op of the primals, and the op of the tangents of the operands that it is linear in."""
    out = primitive.bind(*primals, **params)
    if all(is_zero(tangents[k]) for k in linear_in):
        return out, [zero_tangent(x) for x in out] if primitive.multiple_results else zero_tangent(out)
    operands = list(primals)
    for k in linear_in:
        operands[k] = ad.instantiate_zeros(tangents[k])
    return out, primitive.bind(*operands, **params)


def _taylor(primitive: Primitive, primals: Sequence[Array], series: Sequence[Sequence[Array]], **params: Any) -> Any:
    """Return the op of the primals, and the tangents of the coefficients of their Taylor series.

    Every op is linear or, like the maximum, piecewise linear in its differentiable operands.
    """
    flags = [jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in primals]

    def op(*some: Array) -> Any:
        rest = iter(some)
        return primitive.bind(*(next(rest) if flag else x for x, flag in zip(primals, flags, strict=True)), **params)

    def like(out: Array, dot: Array) -> Array:
        return jnp.zeros_like(out) if dot.dtype == jax.dtypes.float0 else dot

    outs, push = jax.linearize(op, *(x for x, flag in zip(primals, flags, strict=True) if flag))
    of_operands = [terms for terms, flag in zip(series, flags, strict=True) if flag]
    tangents = [jax.tree.map(like, outs, push(*terms)) for terms in zip(*of_operands, strict=True)]
    return outs, [list(terms) for terms in zip(*tangents, strict=True)] if primitive.multiple_results else tangents


def nonzero_transpose(transpose: Callable[..., Any]) -> Callable[..., Any]:
    """Extend a transpose to cotangents that are all symbolically zero."""

    def rule(cts: Any, *operands: Any, **params: Any) -> Any:
        if all(map(is_zero, cts if isinstance(cts, Sequence) else [cts])):
            return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in operands]
        return transpose(cts, *operands, **params)

    return rule


# --- batching --------------------------------------------------------------------------------------------------


def _batch(
    batch: Callable[..., Any], primitive: Primitive, args: Sequence[Array], dims: Sequence[int | None], **params: Any
) -> Any:
    # A literal bool of a jaxpr is a Python bool.
    arrays = (np.bool_(x) if isinstance(x, bool) else x for x in args)
    varying = [x if d is None else _compat.varying_over_batches(x) for x, d in zip(arrays, dims, strict=True)]
    return batch(primitive, varying, dims, **params)


def to_front(x: Array, dim: int | None, size: int) -> Array:
    """Return `x` with its batch axis first. Add the axis if it has none."""
    return jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)


def all_to_front(args: Sequence[Array], dims: Sequence[int | None]) -> list[Array]:
    """Return the operands with their batch axes first. Add the axis to operands without one."""
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    return [to_front(x, d, size) for x, d in zip(args, dims, strict=True)]


def batch_operands(primitive: Primitive, args: Sequence[Array], dims: Sequence[int | None], *, batch_dims: int) -> Any:
    """Batch an op without an index: add one more native batch axis at the front of all operands."""
    return primitive.bind(*all_to_front(args, dims), batch_dims=batch_dims + 1), 0


def batch_rows(
    primitive: Primitive, args: Sequence[Array], dims: Sequence[int | None], **params: Unpack[Params]
) -> Any:
    """Batch any row op: add a native batch axis at the front of all operands, of size 1 for a shared index."""
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    sizes = [1 if role in ("index", "where") else size for role in ROW_OPS[primitive].operands]
    operands = map(to_front, args, dims, sizes)
    out = primitive.bind(*operands, **batched_params(params, dims[1]))
    return (out, [0] * len(out)) if primitive.multiple_results else (out, 0)


def batched_params(params: Params, index_dim: int | None, new_axes: int = 1) -> Params:
    """Return the parameters under vmap."""
    mode = batched_mode(params["mode"], is_batched=index_dim is not None)
    return params | {"batch_dims": params["batch_dims"] + new_axes, "mode": mode}


#: Whether ops under `jax.vmap` may run for inactive examples without a mask.
_is_unmasked = jax.make_user_context(False)


def no_mask_reaches() -> contextlib.AbstractContextManager[Any]:
    """Return a context for ops under `jax.vmap` that JAX runs for all examples before it selects some results.

    An index of an inactive example means nothing, so it is no error in this context.
    """
    return _is_unmasked(True)


def batched_mode(mode: str | None, *, is_batched: bool) -> str | None:
    """Return the mode of an op under vmap. `is_batched` says whether the index has the batch axis."""
    return "drop" if mode is None and is_batched and _is_unmasked.value else mode


# --- checkify --------------------------------------------------------------------------------------------------


def _finds_index(enabled: frozenset[Any], buffer: Any, params: Params) -> bool:
    """Return whether `checkify` checks the index of an op. JAX does not index a buffer without rows."""
    return may_raise(params) and checkify.index_checks <= enabled and buffer.shape[params["batch_dims"]] > 0


def _params_when_checked(enabled: frozenset[Any], operands: Sequence[Array], params: Params) -> Params:
    """Return the parameters to bind: the op need not raise for an index that `checkify` checks."""
    return once_checked(params) if _finds_index(enabled, operands[0], params) else params


def _indexed(buffer: Array, index: Array) -> Array:
    return buffer.at[index].get(mode="clip", wrap_negative_indices=False)


def _check(
    checks: Callable[..., Any] | None,
    signature: Signature,
    enabled: frozenset[Any],
    *operands: Array,
    **params: Unpack[Params],
) -> None:
    """Index the buffer by JAX's own operation, in which `checkify` finds errors."""
    buffer, index, *rest = operands
    if _finds_index(enabled, buffer, params):
        if len(operands) == len(signature.operands):
            index = jnp.where(rest[-1], index, 0)
        (index,) = numbers_of_rows(buffer, index, **params)
        if index.dtype.itemsize < 4:
            index = index.astype(jnp.int32)  # JAX compares it with the size in its own dtype
        read: Callable[..., Array] = _indexed
        for _ in range(params["batch_dims"]):
            read = jax.vmap(read)
        read(buffer, index)
    if checks is not None:
        checks(*operands, **params)


# --- lowering --------------------------------------------------------------------------------------------------


def _on_one_axis(reference: Callable[..., Any], signature: Signature) -> Callable[..., Any]:
    """Extend `reference`, a function for one axis and single rows, to several axes and windows."""

    def meaning(buffer: Array, index: Array, *rest: Array, **params: Unpack[Params]) -> Any:
        batch_dims, index_dims = params["batch_dims"], params["index_dims"]
        batch, sizes, elem = (buffer.shape[a:b] for a, b in pairwise([0, batch_dims, batch_dims + index_dims, None]))
        merged = buffer if index_dims == 1 else buffer.reshape(*batch, math.prod(sizes), *elem)
        value, where = rest[: signature.takes_value], rest[signature.takes_value :]
        with counting(buffer, params):
            numbers, *masks = numbers_of_rows(buffer, index, *where, **params)
            out = reference(merged, numbers, *value, *masks, batch_dims=batch_dims, reverse=params["reverse"])
        if index_dims == 1 or not signature.in_place:
            return out
        if len(signature.results) == 1:
            return out.reshape(buffer.shape)
        return (out[0].reshape(buffer.shape), *out[1:])

    return meaning


def _after_waiting(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Extend `reference` to operands that it only waits for: its first operand passes a barrier with them."""

    def meaning(*operands: Array, waits: int = 0, unordered: bool = False, effect: bool = False, **params: Any) -> Any:
        if waits:
            count = len(operands) - waits
            first, *_ = lax.optimization_barrier((operands[0], *operands[count:]))
            operands = (first, *operands[1:count])
        return reference(*operands, **params)

    return meaning


def _lower(kernel: Callable[..., Any], fallback: Callable[..., Any], ctx: Any, *operands: Any, **params: Any) -> Any:
    """Lower to a kernel, or to plain JAX for packed dtypes: kernels address whole bytes."""
    packed = any(is_packed(aval.dtype) for aval in (*ctx.avals_in, *ctx.avals_out))
    if packed:
        return fallback(ctx, *operands, **params)
    results = kernel(ctx, *operands, **params)
    maker = results[0].owner
    if _compat.is_divided() and not isinstance(
        maker, mlir.ir.Block
    ):  # an argument of a block is an operand, which the kernel returns
        label(getattr(maker, "operation", maker))
    return results


def simple_kernel(name: str, operands: tuple[str, ...], results: tuple[str, ...]) -> "SimpleKernel":
    """Declare the kernel of an op that is not a row op, and return the lowering to it."""
    return SimpleKernel(name, declare(name, operands, results))


@dataclass(frozen=True)
class SimpleKernel:
    """A lowering to a call of all operands."""

    name: str
    signature: Signature

    def __call__(self, ctx: Any, *operands: Any, batch_dims: int | None = None, effect: bool = False, **_: Any) -> Any:
        attributes = {} if batch_dims is None else {"batch_dims": np.int64(batch_dims)}
        aliases = {0: 0} if self.signature.in_place else {}
        rule = jax.ffi.ffi_lowering(PREFIX + self.name, operand_output_aliases=aliases, has_side_effect=effect)
        return rule(ctx, *operands, **attributes)


def is_packed(dtype: Any) -> bool:
    """Return whether elements of a dtype are smaller than a byte."""
    limits = (
        jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else None
    )
    return limits is not None and limits(dtype).bits < 8


def row_kernel(
    name: str, operands: tuple[str, ...], results: tuple[str, ...], combine: Callable[[Any, Any], Any] | None = None
) -> "RowKernel":
    """Return the lowering of a row op to its kernel.

    The operands are `buffer`, `index`, perhaps `value`, and `where`. An op whose first result is `buffer` updates
    it in place. `combine` is a function of the old row and the value that returns the new row, in `jax.lax`.
    """
    return RowKernel(name, declare(name, operands, results, combine))


@dataclass(frozen=True)
class RowKernel:
    """A lowering to a call, unless `_lowering.slices` has replaced the op by XLA's own slices."""

    name: str
    signature: Signature

    def __call__(self, ctx: Any, *operands: Any, platform: str, **params: Unpack[Params]) -> Any:
        num_operands = len(operands) - params.get("waits", 0)
        in_place, masked = self.signature.in_place, num_operands == len(self.signature.operands)
        batch_dims, index_dims, window = params["batch_dims"], params["index_dims"], params["window"]
        buffer, index, *_ = ctx.avals_in
        sizes = sizes_of(buffer, params)
        count = math.prod((*positions_of(index, _axes_of_index(params))[batch_dims:], *window))
        is_sorted = in_place and sorting.is_sorted(platform, math.prod(sizes), count)
        typed = list(zip(operands[:num_operands], ctx.avals_in[:num_operands], strict=True))
        waited = list(zip(operands[num_operands:], ctx.avals_in[num_operands:], strict=True))
        order = self._of_index(sorting.visiting_order, typed, ctx, params) if is_sorted else []
        if not params.get("settled"):  # a size is symbolic, or no pass has run
            numbers, *where = self._of_index(numbers_of_rows, typed, ctx, params)
            typed = [typed[0], numbers, *typed[2 : 2 + self.signature.takes_value], *where]
        typed += [*order, *waited]
        # XLA removes a call whose results have no elements, but the call must still check its indices.
        checked = params.get("checked", "")
        strict = may_raise(params) and checked != "recorded"
        checks = strict and not all(math.prod(aval.shape) for aval in ctx.avals_out)
        has_effect = checks or params.get("effect", False)
        rule = jax.ffi.ffi_lowering(
            PREFIX + self.name, operand_output_aliases={0: 0} if in_place else {}, has_side_effect=has_effect
        )
        return rule(
            ctx.replace(avals_in=[aval for _, aval in typed]),
            *(x for x, _ in typed),
            op=op_attribute(params),
            batch_dims=np.int64(batch_dims),
            strict=strict,
            masked=masked,
            sorted=is_sorted,
            reverse=params["reverse"],
            **({} if index_dims == 1 else {"index_dims": np.int64(index_dims)}),
        )

    def _of_index(
        self, f: Callable[..., Sequence[Array]], typed: Sequence[tuple[Any, Any]], ctx: Any, params: Params
    ) -> list[tuple[Any, Any]]:
        """Lower a function of the type of the buffer, the index and the mask. Return its results with their types."""
        (_, buffer), index, *rest = typed
        values, avals = zip(index, *rest[self.signature.takes_value :], strict=True)
        f = functools.partial(f, buffer, **params)
        with counting(buffer, params):
            types = [ShapedArray(x.shape, x.dtype) for x in jax.eval_shape(f, *avals)]
            results = mlir.lower_fun(f)(ctx.replace(avals_in=avals, avals_out=types), *values)
        return list(zip(results, types, strict=True))
