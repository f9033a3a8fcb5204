"""SPMD partitioning of our calls: by batch, by elements of the row, and by rows, without gathering a buffer.

    row = ta_read(b, i)                                # `b` has its rows on several devices, `n` on each
    # becomes, on device `d`
    row = all_reduce(ta_read(b, i - d * n, mode="drop"))

Every dimension of every operand and result has a label. Dimensions with the same label are divided alike. Shardy gets
the labels as the sharding rule of each call (`label`, in the lowering of the call). XLA's partitioner calls
`_Partitioner` for the program of one device.

If the rows of a buffer are divided, each device works on its own rows, with indices relative to its first row. It drops
other indices. A read returns zeros on all devices but one, and a collective sums the results.

We write the StableHLO of that program ourselves. `jax.experimental.custom_partitioning` traces it from a function of
arrays, and keeps aliasing: a loop that writes rows divided among four devices copies nothing (jax 0.10.2 and 0.12). But
JAX cannot export such a program: "serialization of host_callbacks is not yet implemented". A `shard_map` in the
lowering, as in the template, needs the shardings of the operands. For a mesh with explicit axes they are in the types.
For other meshes, XLA chooses them after the lowering.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jax.interpreters.mlir import dtype_to_ir_type, ir

from jax_tensorarray._compat import xla_client
from jax_tensorarray._ops.calls import PREFIX, SIGNATURES, Config, Operation, config, target

HloSharding = Any
Shape = Any

Label = tuple[str, int] | None


@dataclass(frozen=True)
class Roles:
    """The meaning of each part of one call."""

    name: str
    batch_dims: int
    index_dims: int
    operands: tuple[str, ...]
    results: tuple[str, ...]

    def labels(self, role: str, rank: int, index_rank: int) -> list[Label]:
        """Label each dimension of a value: batch, rows, positions of the index, or elements of a row.

        A dimension has no label if every device needs all of it. Each dimension of a reader has a label of its own.
        """
        batch: list[Label] = [("batch", k) for k in range(min(self.batch_dims, rank))]
        rest = rank - len(batch)
        if role == "buffer":
            parts: list[Label] = [None] if self.name.endswith("_part") else []
            # Only the outermost of several axes may be divided, so that the rows of a device are consecutive.
            rows: list[Label] = [("rows", 0), *[None] * (self.index_dims - 1)] if rest else []
            return [*batch, *rows, *parts, *_elements(rest - len(rows) - len(parts))]
        if role == "parts of a row":
            return [*batch, None, *_elements(rest - 1)]
        if role in ("index", "where"):
            return [*batch, *self._positions(rest)]
        if role == "value":
            positions = index_rank - len(batch)
            return [*batch, *self._positions(positions), *_elements(rest - positions)]
        if role in ("bound", "parts", "order"):
            return [*batch, *[None] * rest]
        return [(role, k) for k in range(rank)]  # a reader may be divided in any way

    def _positions(self, n: int) -> list[Label]:
        """Label the positions of an index.

        Reads and checks need no order, so each device may do some positions. Updates of one buffer have an order.
        """
        return [("position", k) if self.name in ("read", "check") else None for k in range(n)]

    def all(self, operand_ranks: Sequence[int], result_ranks: Sequence[int]) -> tuple[list[Any], list[Any]]:
        """Return the labels of all operands and of all results."""
        index_rank = next((r for r, role in zip(operand_ranks, self.operands, strict=True) if role == "index"), 0)
        return (
            [self.labels(role, r, index_rank) for role, r in zip(self.operands, operand_ranks, strict=True)],
            [self.labels(role, r, index_rank) for role, r in zip(self.results, result_ranks, strict=True)],
        )


def _elements(n: int) -> list[Label]:
    return [("element", k) for k in range(n)]


def _roles(name: str, facts: Config, operand_ranks: Sequence[int]) -> Roles:
    operands, results, _ = SIGNATURES[name]
    if operands[-1:] == ("where",) and not facts.masked:
        operands = operands[:-1]
    batch_dims = facts.batch_dims
    if batch_dims is None:
        batch_dims = operand_ranks[1] if name == "check" else 0
    if facts.sorted:
        operands = (*operands, "order")
    readers = [f"reader {k}" for k in range(len(operand_ranks) - len(operands))]
    return Roles(name, batch_dims, facts.index_dims or 1, (*operands, *readers), results)


# --- the rule for Shardy ---------------------------------------------------------------------------------------


def label(op: Operation) -> None:
    """Add the sharding rule to a call of ours, in a module for several devices."""
    is_ours = op.name == "stablehlo.custom_call" and op.attributes["call_target_name"].value.startswith(PREFIX)
    rule = _sharding_rule(op) if is_ours and len(op.operands) else None
    if rule is not None:
        op.attributes["sdy.sharding_rule"] = ir.Attribute.parse(rule)


def _sharding_rule(op: Operation) -> str | None:
    types = [[ir.RankedTensorType(v.type) for v in values] for values in (op.operands, op.results)]
    if not all(t.has_static_shape for side in types for t in side):
        return None
    name = target(op)
    ranks = [[t.rank for t in side] for side in types]
    sides = _roles(name, config(op), ranks[0]).all(*ranks)
    factors: dict[Any, tuple[str, int]] = {}
    whole = []

    def factor(label: Label, size: int) -> str:
        key = len(factors) if label is None else label
        if key not in factors:
            factors[key] = _letter(len(factors)), size
            if label is None:
                whole.append(factors[key][0])
        return factors[key][0]

    def mapping(labels: Sequence[Label], t: Any) -> str:
        return "[" + ", ".join(factor(label, size) for label, size in zip(labels, t.shape, strict=True)) + "]"

    texts = [
        "(" + ", ".join(mapping(labels, t) for labels, t in zip(side, ts, strict=True)) + ")"
        for side, ts in zip(sides, types, strict=True)
    ]
    sizes = ", ".join(f"{letter}={size}" for letter, size in factors.values())
    replicated = f" need_replication={{{', '.join(whole)}}}" if whole else ""
    return f"#sdy.op_sharding_rule<{texts[0]}->{texts[1]} {{{sizes}}}{replicated}, custom>"


def _letter(n: int) -> str:
    """Return the name of a factor in Shardy: i, j, ..., z, z_1, z_2, ..."""
    last = ord("z") - ord("i")
    return chr(ord("i") + n) if n <= last else f"z_{n - last}"


# --- the program of one device ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Division:
    """How an array is divided: the number of devices along each label, and the part of each device."""

    labels: tuple[Label, ...]
    devices: Any  #: array with an axis for each label, then axes for groups of devices
    group_types: tuple[Any, ...]  #: the types of these groups

    @classmethod
    def of(cls, sharding: HloSharding, labels: Sequence[Label]) -> "Division | None":
        if sharding is None or not sharding.is_tiled():
            return None
        devices = np.reshape(sharding.tile_assignment_devices(), sharding.tile_assignment_dimensions())
        proto = sharding.to_proto()
        types = tuple(proto.last_tile_dims)
        if proto.replicate_on_last_tile_dim:
            types = (xla_client.OpSharding.Type.REPLICATED,)
        return cls(tuple(labels), devices, types)

    def parts(self, label: Label) -> int:
        return self.devices.shape[self.labels.index(label)] if label is not None and label in self.labels else 1

    def sharding(self, labels: Sequence[Label]) -> HloSharding:
        """Return the sharding of an array with those labels."""
        n = len(self.labels)
        axes = [self.labels.index(x) if x is not None and x in self.labels else None for x in labels]
        rest = [k for k in range(n) if k not in axes]
        groups = list(range(n, self.devices.ndim))
        order = [k for k in axes if k is not None] + groups + rest
        moved = self.devices.transpose(order)
        tiles = [1 if k is None else self.devices.shape[k] for k in axes]
        group_shape = [self.devices.shape[k] for k in groups]
        copies = math.prod(self.devices.shape[k] for k in rest)
        if math.prod(tiles) == 1 and not any(t == xla_client.OpSharding.Type.MANUAL for t in self.group_types):
            return xla_client.HloSharding.replicate()
        proto = xla_client.OpSharding()
        proto.type = xla_client.OpSharding.Type.OTHER
        proto.tile_assignment_dimensions = [*tiles, *group_shape, copies]
        proto.tile_assignment_devices = [int(d) for d in moved.reshape(-1)]
        proto.last_tile_dims = [*self.group_types, xla_client.OpSharding.Type.REPLICATED]
        return xla_client.HloSharding.from_proto(proto)

    def along(self, label: Label) -> Any:
        """Return an array of devices whose last axis belongs to that label."""
        return np.moveaxis(self.devices, self.labels.index(label), -1).reshape(-1, self.parts(label))


def _shapes(shape: Shape) -> list[Shape]:
    return list(shape.tuple_shapes()) if shape.is_tuple() else [shape]


def _shardings(sharding: HloSharding, n: int) -> list[HloSharding]:
    elements = sharding.tuple_elements() if sharding is not None else []
    return list(elements) if elements else [sharding] * n


def _packed(shape: Shape, shardings: Sequence[HloSharding]) -> HloSharding:
    return xla_client.HloSharding.tuple_sharding(shape, list(shardings)) if shape.is_tuple() else shardings[0]


class _Partitioner:
    """The callbacks for one of our calls."""

    def __init__(self, name: str) -> None:
        self.name = name

    def propagate(self, sharding: HloSharding, shape: Shape, config: bytes) -> HloSharding:
        return sharding

    def infer(
        self, arg_shapes: Sequence[Shape], arg_shardings: Sequence[HloSharding], shape: Shape, config: bytes
    ) -> HloSharding:
        results = _shapes(shape)
        labels = self._labels(Config.parse(config.decode()), arg_shapes, results)[1:]
        division = self._division(labels, arg_shardings, [None] * len(results))
        return _packed(shape, [_like(division, x) for x in labels[1]])

    def partition(
        self,
        arg_shapes: Sequence[Shape],
        arg_shardings: Sequence[HloSharding],
        shape: Shape,
        sharding: HloSharding,
        config: bytes,
    ) -> tuple[bytes, list[HloSharding], HloSharding]:
        results = _shapes(shape)
        facts = Config.parse(config.decode())
        roles, operand_labels, result_labels = self._labels(facts, arg_shapes, results)
        outs = _shardings(sharding, len(results))
        division = self._division((operand_labels, result_labels), arg_shardings, outs)
        ins = list(arg_shardings)
        if not any(
            x is not None and x.is_manual() for x in [*ins, *outs]
        ):  # inside a shard_map all arrays are divided already
            for k, (role, labels) in enumerate(zip(roles.operands, operand_labels, strict=True)):
                ins[k] = ins[k] if role.startswith("reader") else _like(division, labels)
            outs = [_like(division, labels) for labels in result_labels]
        local = _Program(roles, facts)
        text = local.write(
            [_tiled(s, x) for s, x in zip(arg_shapes, ins, strict=True)],
            [_tiled(s, x) for s, x in zip(results, outs, strict=True)],
            arg_shapes[0].dimensions() if arg_shapes else (),
            division,
        )
        return text.encode(), ins, _packed(shape, outs)

    def _labels(self, facts: Config, arg_shapes: Sequence[Shape], results: Sequence[Shape]) -> tuple[Roles, Any, Any]:
        ranks = [[len(s.dimensions()) for s in side] for side in (arg_shapes, results)]
        roles = _roles(self.name, facts, ranks[0])
        return roles, *roles.all(*ranks)

    def _division(self, labels: Any, *shardings: Sequence[HloSharding]) -> Division | None:
        """Return the division of the buffer or, if it is not divided, of the first other result or operand."""
        sides = [*zip(labels[1], shardings[1], strict=True), *zip(labels[0], shardings[0], strict=True)]
        if self.name in ("read", "read_part"):
            sides = [sides[1], *sides]
        for labels_of_side, sharding in sides:
            division = Division.of(sharding, labels_of_side)
            if division is not None and any(division.parts(label) > 1 for label in labels_of_side):
                return division
        return None


def _like(division: Division | None, labels: Sequence[Label]) -> HloSharding:
    return xla_client.HloSharding.replicate() if division is None else division.sharding(labels)


class _Type(NamedTuple):
    """The type of an operand or a result. Its text is that of StableHLO."""

    shape: tuple[int, ...]
    dtype: Any

    def __str__(self) -> str:
        return _tensor(self.shape, _element(np.dtype(self.dtype)))

    @property
    def layout(self) -> str:
        """The text of the row-major layout."""
        axes = ", ".join(map(str, reversed(range(len(self.shape)))))
        return f"dense<{f'[{axes}]' if axes else ''}> : tensor<{len(self.shape)}xindex>"


def _tiled(shape: Shape, sharding: HloSharding) -> _Type:
    tile = shape if sharding is None or not sharding.is_tiled() else sharding.tile(shape)
    return _Type(tuple(tile.dimensions()), shape.numpy_dtype())


class _Program:
    """The StableHLO of a call on one device."""

    def __init__(self, roles: Roles, facts: Config) -> None:
        self.roles, self.facts = roles, facts
        self.lines: list[str] = []

    def add(self, text: str) -> str:
        name = f"%v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return name

    def write(self, types: list[_Type], outs: Sequence[_Type], whole: Sequence[int], division: Division | None) -> str:
        """Return the text of the program. `whole` is the shape of the first operand before partitioning."""
        result_types = ", ".join(map(str, outs))
        operands = [f"%a{k}" for k in range(len(types))]
        arguments = ", ".join(f"{x}: {t}" for x, t in zip(operands, types, strict=True))
        rows = ("rows", 0)
        divided = division is not None and division.parts(rows) > 1 and self.roles.name not in ("fence", "empty")
        if divided:
            self._count_from_own_rows(operands, types, whole, division)
        call = self._call(self.roles.name, operands, types, outs, self.facts)
        results = [call] if len(outs) == 1 else [f"{call}#{k}" for k in range(len(outs))]
        if divided:
            for k, role in enumerate(self.roles.results):
                if role != "buffer":
                    results[k] = self._sum(results[k], outs[k], division.along(rows))  # type: ignore[union-attr]
        body = "\n    ".join(self.lines)
        returned = f"return {', '.join(results)} : {result_types}"
        return (
            f"module {{\n  func.func public @main({arguments}) -> ({result_types}) {{\n"
            f"    {body}\n    {returned}\n  }}\n}}\n"
        )

    def _call(
        self, name: str, operands: Sequence[str], types: Sequence[_Type], results: Sequence[_Type], facts: Config
    ) -> str:
        side_effect = facts.strict or name in ("empty", "raise")
        aliases = ""
        if SIGNATURES[name].in_place:
            index = "0" if len(results) > 1 else ""
            aliases = (
                ", output_operand_aliases = [#stablehlo.output_operand_alias<output_tuple_indices = "
                f"[{index}], operand_index = 0, operand_tuple_indices = []>]"
            )
        layouts = (
            f", operand_layouts = [{', '.join(t.layout for t in types)}], result_layouts = "
            f"[{', '.join(t.layout for t in results)}]"
        )
        out = f"({', '.join(map(str, results))})" if len(results) != 1 else results[0]
        text = (
            f'"stablehlo.custom_call"({", ".join(operands)}) <{{api_version = 4 : i32, backend_config = '
            f'{facts}, call_target_name = "{PREFIX}{name}", has_side_effect = '
            f"{'true' if side_effect else 'false'}{aliases}{layouts}}}> : ({', '.join(map(str, types))}) -> {out}"
        )
        if len(results) == 1:
            return self.add(text)
        name = f"%v{len(self.lines)}"
        self.lines.append(f"{name}:{len(results)} = {text}")
        return name

    def _count_from_own_rows(
        self, operands: list[str], types: list[_Type], whole: Sequence[int], division: Any
    ) -> None:
        """Make indices and bounds relative to the first row of the device."""
        axes = slice(self.roles.batch_dims, self.roles.batch_dims + self.roles.index_dims)
        size, local_size = math.prod(whole[axes]), math.prod(types[0].shape[axes])
        devices = division.along(("rows", 0))
        first_row = np.zeros(devices.size, np.int64)
        for part in range(devices.shape[1]):
            first_row[devices[:, part]] = part * local_size
        table = f"dense<[{', '.join(map(str, first_row))}]> : tensor<{first_row.size}xi64>"
        at = self.add("stablehlo.partition_id : tensor<ui32>")
        start = self.add(
            f"stablehlo.dynamic_slice {self.add(f'stablehlo.constant {table}')}, {at}, sizes = [1] : "
            f"(tensor<{first_row.size}xi64>, tensor<ui32>) -> tensor<1xi64>"
        )
        start = self.add(f"stablehlo.reshape {start} : (tensor<1xi64>) -> tensor<i64>")
        for k, role in enumerate(self.roles.operands):
            # The row of an op on parts has the shape of a bound, but is an index.
            is_index = role == "index" or (role == "bound" and self.roles.name.endswith("_part"))
            if not is_index and role != "bound":
                continue
            wide = types[k]._replace(dtype=np.int64)
            if is_index:
                masked = "where" in self.roles.operands
                where = operands[self.roles.operands.index("where")] if masked else None
                checked = self._checked(operands[k], types[k], where, size)
                value = self.add(f"stablehlo.convert {checked} : ({types[k]._replace(dtype=np.int32)}) -> {wide}")
            else:
                value = self._clamped(operands[k], types[k], size)
            first = self.add(f"stablehlo.broadcast_in_dim {start}, dims = [] : (tensor<i64>) -> {wide}")
            operands[k] = self.add(f"stablehlo.subtract {value}, {first} : {wide}")
            types[k] = wide
        if self.facts.strict:
            self.facts = self.facts._replace(strict=False)

    def _checked(self, index: str, t: _Type, where: str | None, size: int) -> str:
        """Return the index as an int32, -1 where it is out of range. This call also raises."""
        if where is not None:
            zero = self.add(f"stablehlo.constant dense<0> : {t}")
            index = self.add(f"stablehlo.select {where}, {index}, {zero} : {t._replace(dtype=np.bool_)}, {t}")
        sizes = _Type(t.shape[: self.roles.batch_dims], np.int32)
        rows = self.add(f"stablehlo.constant dense<{size}> : {sizes}")
        facts = Config(op=self.facts.op or "ta_read", strict=bool(self.facts.strict))
        return self._call("check", [index, rows], [t, sizes], [t._replace(dtype=np.int32)], facts)

    def _clamped(self, bound: str, t: _Type, size: int) -> str:
        """Return a bound as an int64 in [0, size]."""
        limits = 0, min(size, np.iinfo(t.dtype).max)
        low, high = (self.add(f"stablehlo.constant dense<{x}> : {t}") for x in limits)
        clamped = self.add(f"stablehlo.clamp {low}, {bound}, {high} : {t}")
        return self.add(f"stablehlo.convert {clamped} : ({t}) -> {t._replace(dtype=np.int64)}")

    def _sum(self, value: str, t: _Type, groups: Any) -> str:
        """Sum a value over the devices that divide the rows. All devices but one have 0.

        We sum the bits as integers, so the sum is the value bit for bit. For complex numbers we sum the numbers, and a
        part that is -0 becomes 0.
        """
        bits = _bits(t.dtype)
        u, one = _tensor(t.shape, bits), f"tensor<{bits}>"
        cast = u != str(t)
        if cast:
            value = self.add(f"stablehlo.bitcast_convert {value} : ({t}) -> {u}")
        op = "or" if bits == "i1" else "add"
        table = ", ".join("[" + ", ".join(map(str, g)) + "]" for g in groups.tolist())
        value = self.add(
            f'"stablehlo.all_reduce"({value}) <{{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, '
            f"replica_groups = dense<[{table}]> : tensor<{groups.shape[0]}x{groups.shape[1]}xi64>, "
            f"use_global_device_ids}}> ({{ ^bb0(%x: {one}, %y: {one}): %z = stablehlo.{op} %x, %y : {one} "
            f"stablehlo.return %z : {one} }}) : ({u}) -> {u}"
        )
        return self.add(f"stablehlo.bitcast_convert {value} : ({u}) -> {t}") if cast else value


def _tensor(shape: Sequence[int], element: str) -> str:
    return f"tensor<{''.join(f'{d}x' for d in shape)}{element}>"


@functools.cache
def _element(dtype: Any) -> str:
    with ir.Context():
        return str(dtype_to_ir_type(dtype))


def _bits(dtype: Any) -> str:
    """Return the integer type with the width of a dtype, or the complex type itself, which has none."""
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return "i1"
    return _element(dtype) if dtype.kind == "c" else f"ui{8 * dtype.itemsize}"


def register() -> None:
    """Register the callbacks of XLA's partitioner for our calls."""
    for name in SIGNATURES:
        p = _Partitioner(name)
        xla_client.register_custom_call_partitioner(
            PREFIX + name, p.propagate, p.partition, p.infer, can_side_effecting_have_replicated_sharding=True
        )
