"""What all ops of the package share: how they are bound, batched, divided among devices and lowered."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from decay_row import _ffi
from decay_row._compat import varying_alike

#: From how the buffer is divided among devices, an entry for each axis, and the number of batch axes, to how all
#: operands and all results are. The buffer is the first operand.
Division = Callable[[Sequence[Any], int], tuple[Sequence[PartitionSpec], Sequence[PartitionSpec]]]

# --- operands --------------------------------------------------------------------------------------------------


def bind(primitive: Primitive, division: Division, *operands: Any, batch_dims: int) -> Any:
    """Bind a primitive to operands that may be divided among devices in different ways."""
    operands = varying_alike(*_put_alike(primitive, division, *operands, batch_dims=batch_dims))
    return primitive.bind(*operands, batch_dims=batch_dims)


def _put_alike(primitive: Primitive, division: Division, *operands: Any, batch_dims: int) -> Any:
    """On a mesh with explicit axes, put all operands where the buffer is. The transpose of this puts them back."""
    mesh = next((m for x in operands if not (m := jax.typeof(x).sharding.mesh).empty), None)
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        return operands
    spec = spec_of(jax.typeof(operands[0]))
    if spec[batch_dims] is not None:
        raise ValueError(
            f"{primitive}: the rows of the buffer are divided among devices ({PartitionSpec(*spec)}), but a call "
            "needs all of them on one: divide another axis, for example by jax.sharding.reshard"
        )
    wanted, _ = division(spec, batch_dims)
    return [
        x if spec_of(jax.typeof(x)) == list(spec) else jax.sharding.reshard(x, NamedSharding(mesh, spec))
        for x, spec in zip(operands, wanted, strict=True)
    ]


def spec_of(aval: Any) -> list[Any]:
    """Return how an array is divided among devices: for each axis the axes of the mesh, or None."""
    return [*aval.sharding.spec, *[None] * aval.ndim][: aval.ndim]


# --- batching --------------------------------------------------------------------------------------------------


def _batch(bind: Callable[..., Any], operands: Any, dims: Any, *, batch_dims: int) -> Any:
    """Add a batch axis in front of all operands, which the kernels take as it is: no loop, and still one call."""
    mapped = [(x, d) for x, d in zip(operands, dims, strict=True) if d is not None]
    size, axes = next((x.shape[d], spec_of(jax.typeof(x))[d]) for x, d in mapped)  # alike for all that are mapped
    operands = [
        _repeated(x, size, axes, jax.typeof(mapped[0][0]).sharding.mesh) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(operands, dims, strict=True)
    ]
    results = bind(*operands, batch_dims=batch_dims + 1)
    return results, [0] * len(results)


def _repeated(x: Any, size: int, axes: Any, mesh: Any) -> Any:
    """Return an operand for each example, divided among devices as the examples are."""
    sharding = None if axes is None else NamedSharding(mesh, PartitionSpec(axes, *spec_of(jax.typeof(x))))
    return lax.broadcast(x, (size,), out_sharding=sharding)


# --- lowering --------------------------------------------------------------------------------------------------


def _in_shards(lower: Any, primitive: Primitive, division: Division) -> Any:
    """Return the lowering rule for operands that a mesh with explicit axes divides: each device calls for its part.

    XLA knows nothing of a kernel but its name. It would gather what is divided, and call the kernel for all of it.
    """

    def rule(ctx: Any, *operands: Any, batch_dims: int) -> Any:
        buffer = ctx.avals_in[0]
        mesh, spec = buffer.sharding.mesh, spec_of(buffer)
        if all(axes is None for axes in spec):
            return lower(ctx, *operands, batch_dims=batch_dims)
        in_specs, out_specs = division(spec, batch_dims)
        explicit = {n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}
        part = jax.shard_map(
            functools.partial(primitive.bind, batch_dims=batch_dims),
            mesh=mesh,
            in_specs=tuple(in_specs),
            out_specs=list(out_specs),
            axis_names=explicit,
        )
        return mlir.lower_fun(part, multiple_results=True)(ctx, *operands)

    return rule


def _call(target: str, aliases: dict[int, int], scratch: Any, fallback: Any) -> Any:
    """Return the lowering rule that calls a kernel.

    If an update by XLA has made what the kernel updates, such as `buffer.at[i].set(x)`, XLA would fuse that update into
    a copy of the buffer. A barrier keeps it in place.
    """
    barrier = mlir.lower_fun(lax.optimization_barrier, multiple_results=False)

    def rule(ctx: Any, *given: Any, batch_dims: int) -> Any:
        if ctx.avals_in[0].dtype not in (jnp.float32, jnp.float64):
            return fallback(ctx, *given, batch_dims=batch_dims)
        results = [*ctx.avals_out, *scratch(*ctx.avals_in, batch_dims=batch_dims)]
        operands = list(given)
        for k in aliases:
            (operands[k],) = barrier(ctx.replace(avals_in=[ctx.avals_in[k]], avals_out=[ctx.avals_in[k]]), operands[k])
        call = jax.ffi.ffi_lowering(target, operand_output_aliases=aliases)
        called = call(ctx.replace(avals_out=results), *operands, batch_dims=np.int64(batch_dims))
        return called[: len(ctx.avals_out)]

    return rule


# --- registration ----------------------------------------------------------------------------------------------


def register(
    name: str,
    *,
    target: str,
    bind: Callable[..., Any],
    division: Division,
    abstract_eval: Callable[..., Any],
    jvp: Callable[..., Any],
    plain_jax: Callable[..., Any],
    transpose: Callable[..., Any] | None = None,
    aliases: dict[int, int] | None = None,
    scratch: Callable[..., Sequence[Any]] = lambda *operands, batch_dims: (),
) -> Primitive:
    """Make a primitive with several results, whose operands all begin with `batch_dims` batch axes.

    Args:
        name: what jaxprs and messages call it.
        target: the kernel that is called, one of `_ffi.targets`.
        bind: binds the primitive, by way of `bind` above.
        division: how operands and results are divided among devices.
        abstract_eval: gives the types of the results.
        jvp: gives the results and their tangents.
        plain_jax: the meaning of the op, and its lowering where there is no kernel.
        transpose: gives the cotangents of the linear operands. Without it the JVP must not bind the primitive.
        aliases: from the number of an operand to that of the result which takes its memory.
        scratch: gives the types of results that only the kernel uses.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(abstract_eval)
    ad.primitive_jvps[primitive] = jvp
    if transpose is not None:
        ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = functools.partial(_batch, bind)
    fallback = mlir.lower_fun(plain_jax, multiple_results=True)
    mlir.register_lowering(primitive, _in_shards(fallback, primitive, division))
    kernel = _in_shards(_call(target, aliases or {}, scratch, fallback), primitive, division)
    for platform in _ffi.platforms:
        mlir.register_lowering(primitive, kernel, platform=platform)
    return primitive
