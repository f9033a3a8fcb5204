"""The values of the interpreter: an array, and facts about how it was made, which the rules use."""

import abc
import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.extend.core import primitives as jax_primitives

from jax_tensorarray._jaxprs import jaxprs
from jax_tensorarray._ops.guard import ta_guard
from jax_tensorarray._ops.primitive import Params
from jax_tensorarray._ops.read import ta_read_p
from jax_tensorarray._ops.starts import along_axes, joined, positions_of
from jax_tensorarray._ops.write import ta_write_p
from jax_tensorarray._types import Array, Equation


class Left(NamedTuple):
    """The answer of a rule that leaves an equation as it is."""

    reason: str = "no-rule"  #: a heading of `docs/reference/messages.md`

    @property
    def is_known(self) -> bool:
        """Whether the rule is for such equations: another rule may have a better reason."""
        return self != Left()


class Update(NamedTuple):
    """An update of rows of a buffer by the op `primitive`, with its operands after the buffer."""

    primitive: Primitive
    index: Any  #: an array; a tuple has a method of this name
    rows: Array
    where: Array | None
    params: Params
    is_window: bool = False  #: the positions are one row or consecutive ones
    is_zero: bool = False  #: the rows are zeros

    def apply(self, buffer: Array) -> Array:
        """Return the buffer after the update."""
        masks = [] if self.where is None else [self.where]
        return self.primitive.bind(buffer, self.index, self.rows, *masks, **self.params)

    def masked(self, active: "Predicate") -> "Update":
        """Return the same update, masked to where `active` is true."""
        where = active.at_positions(self.index, self.params["index_dims"])
        return self._replace(where=where if self.where is None else where & self.where)

    def where_true(self, condition: Array) -> "Update":
        """Return the same update, left out in the examples `[*batch]` in which a condition does not hold."""
        first, *others = along_axes(self.index, self.params["index_dims"])
        condition = lax.expand_dims(condition, range(condition.ndim, first.ndim))
        starts = jnp.broadcast_arrays(jnp.where(condition, first, -1), *others)
        return self._replace(index=joined(starts), params={**self.params, "mode": "drop"})

    def repeated(self, shape: tuple[int, ...]) -> "Update":
        """Return the same update for examples along new first axes."""
        new = range(len(shape))
        index, where = (None if x is None else lax.expand_dims(x, new) for x in (self.index, self.where))
        rows = jnp.broadcast_to(self.rows, (*shape, *self.rows.shape))
        params: Params = {**self.params, "batch_dims": self.params["batch_dims"] + len(shape)}
        return self._replace(index=index, rows=rows, where=where, params=params)

    def undone(self, old: "Value") -> "Update":
        """Return the update that puts back the rows of an older version."""
        rows = None if old.taken is None else old.taken.read(self.index, self.where, self.params)
        if rows is None:
            masks = [] if self.where is None else [self.where]
            rows = ta_read_p.bind(old.array, self.index, *masks, **self.params)
        params: Params = {**self.params, "reverse": not self.params["reverse"]}
        return Update(ta_write_p, self.index, rows, self.where, params)


class Predicate(NamedTuple):
    """Bools that are constant along all but the first `mask.ndim` axes of the array they apply to."""

    mask: Array
    of: Array | None = None  #: the mask that this one inverts

    def is_opposite(self, other: "Predicate") -> bool:
        return self.of is other.mask or other.of is self.mask

    def over(self, shape: tuple[int, ...]) -> Array:
        """Return the mask, repeated along further axes."""
        return lax.broadcast_in_dim(self.mask, shape, range(self.mask.ndim))

    def at_positions(self, index: Array, index_dims: int) -> Array:
        """Return the mask for the positions of an index, which examples may share."""
        return self.over((*self.mask.shape, *positions_of(index, index_dims)[self.mask.ndim :]))

    def inverted(self) -> "Predicate":
        return Predicate(~self.mask, self.mask)

    def select(self, no: Array, yes: Array) -> Array:
        """Return one array or the other for each example, as a whole."""
        return lax.select_n(self.over(no.shape), no, yes)


class Difference(NamedTuple):
    """A loop or branches have changed the version before, but only where `mask` is true."""

    mask: Array


class Guard(NamedTuple):
    """A version that differs from the one before in its derivative: there is none where `active` is false."""

    active: Predicate


# --- what its elements are ---------------------------------------------------------------------------------------


class Broadcast(NamedTuple):
    """The elements of another value, repeated along new axes: `axes` in front of its own, and all others behind."""

    source: "Value"
    axes: int = 0


class Stopped(NamedTuple):
    """The elements of another value, without their derivative."""

    source: "Value"


class Selected(NamedTuple):
    """The elements of a buffer where `active` is true, elsewhere zeros, and the updates since then."""

    whole: "Value"
    active: Predicate
    updates: tuple[Update, ...] = ()
    select: Callable[[], Array] | None = None  #: makes the select, if the next version is another array: see `elements`


class SparseRows(NamedTuple):
    """Zeros, and all updates of them."""

    updates: tuple[Update, ...]


class LastCarry(NamedTuple):
    """A carry at the end of a loop, and what it was before."""

    source: "Value"


Form = Broadcast | Stopped | Selected | SparseRows | LastCarry


# --- where its rows are ------------------------------------------------------------------------------------------


class View(NamedTuple):
    """The result of an equation that is elementwise, or moves elements, with the operands of the equation."""

    eqn: Equation
    operands: "tuple[Value, ...]"
    shape: tuple[int, ...]
    rows: Callable[..., Array | None]  #: returns the rows of an index at an address, or None
    is_made: bool = False  #: whether it is an array anyway: one box of the operand

    @property
    def dtype(self) -> Any:
        return self.eqn.outvars[0].aval.dtype

    def array(self) -> Array:
        """Return all of the result."""
        return jaxprs.bind(self.eqn, as_written(self.operands))[0]

    @property
    def is_of_box(self) -> bool:
        """Whether it is a box that has been read, or is computed from one: making all of it costs little."""
        return self.is_made or any(x.view is not None and x.view.is_of_box for x in self.operands)


class Taken(abc.ABC):
    """A part of a buffer that is put back into it later: see `parts`."""

    shape: tuple[int, ...]
    dtype: Any

    @abc.abstractmethod
    def array(self) -> Array:
        """Return the part as an array."""

    @abc.abstractmethod
    def read(self, index: Array, where: Array | None, params: Params) -> Array | None:
        """Return rows of the part, None if they are no rows of the buffer."""

    @abc.abstractmethod
    def updated(self, update: Update) -> "Taken | None":
        """Return the part after an update, None if its rows are no rows of the buffer."""


# --- values -------------------------------------------------------------------------------------------------------


class Origin(enum.Enum):
    """Since when a value exists."""

    STEP = enum.auto()  #: the evaluated jaxpr makes it
    BEFORE = enum.auto()  #: it, or the version that it was made from, existed before the evaluated jaxpr
    CONSTANT = enum.auto()  #: it existed before, and is the same in every step of the loop


class Value:
    """A value: an array, and how it was made, if a rule can use that.

    Attributes:
        array: the array. That of a view is made when it is asked for.
        became: the text of `doctor.explain` for the rule that made it, if that is more than one row op; else empty.
        before: the previous version, if there is one; `change` is the difference: an `Update` of rows, a `Difference`
            or a `Guard`.
        form: what its elements are: `Broadcast`, `Stopped`, `Selected`, `SparseRows` or `LastCarry`; else None.
        is_computed_with: whether a step computes with all of it, so that its cotangent is made as a whole in any case.
        is_consumed: whether anything but reads of rows has used it.
        is_invariant: whether it is certain that it is the same in every step of the loop.
        is_made_whole: whether rows were read of it, and it cannot be computed row by row.
        is_needed: whether more than one update, choice or result goes on with it.
        is_used: whether anything but the next update uses it.
        lens: where its rows are: a `View`, a part of a buffer, or, see `parts.Version`, a buffer that has such parts.
        literal: the Python number that it is; else None.
        made_by: the equation that made it in this step, see `indices`; None if it was given.
        origin: since when it exists.
        pattern: how its elements depend on their place, see `patterns`; None if nothing is known.
    """

    __slots__ = (
        "_array",
        "_mask",
        "became",
        "before",
        "change",
        "form",
        "is_computed_with",
        "is_consumed",
        "is_invariant",
        "is_made_whole",
        "is_needed",
        "is_used",
        "lens",
        "literal",
        "made_by",
        "origin",
        "pattern",
    )

    def __init__(
        self,
        array: Any,  # None for a lens, and a Python number for a literal
        *,
        before: "Value | None" = None,
        change: Update | Difference | Guard | None = None,
        form: Form | None = None,
        lens: Any = None,
        became: str = "",
        origin: Origin = Origin.STEP,
    ) -> None:
        self.literal = array if isinstance(array, complex | float | int) else None
        self._array: Any = array if self.literal is None else np.asarray(array, jnp.result_type(array))
        self._mask: Array | None = None
        self.before, self.change, self.form, self.lens, self.became = before, change, form, lens, became
        self.origin = Origin.BEFORE if before is not None and before.is_given else origin
        self.made_by: Any = None  # an `indices.Definition`
        self.pattern: Any = None
        self.is_used = self.is_consumed = self.is_made_whole = self.is_needed = self.is_computed_with = False
        self.is_invariant = self.literal is not None or origin is Origin.CONSTANT

    @classmethod
    def given(cls, array: Array, *, is_constant: bool = False) -> "Value":
        return cls(array, origin=Origin.CONSTANT if is_constant else Origin.BEFORE)

    @property
    def array(self) -> Array:
        if self._array is None:
            self._array = self.lens.array()
        return self._array

    @array.setter
    def array(self, array: Array) -> None:
        self._array = array

    @classmethod
    def of_literal(cls, v: Any) -> "Value":
        value = cls(np.asarray(v.val, v.aval.dtype))
        if v.aval.dtype != jax.dtypes.float0:  # a tangent of an integer, which cannot be compared with a number
            value.literal = v.val
        value.is_invariant = True
        return value

    @property
    def mask(self) -> Array:
        """The predicate that an array of bools or of 0 and 1 is. It is the same object on every access."""
        if self._mask is None:
            x = jnp.asarray(self.array)
            self._mask = x if x.dtype == np.bool_ else x != 0
        return self._mask

    @property
    def shape(self) -> tuple[int, ...]:
        return getattr(self._array, "shape", ()) if self._array is not None else self.lens.shape  # a token has none

    @property
    def dtype(self) -> Any:
        return jax.typeof(self._array).dtype if self._array is not None else self.lens.dtype

    @property
    def may_select(self) -> bool:
        """Whether its dtype can choose between cases."""
        return self.dtype in (np.bool_, np.int32)

    @property
    def is_given(self) -> bool:
        """Whether it, or the version that it was made from, existed before the evaluated jaxpr."""
        return self.origin is not Origin.STEP

    @property
    def is_constant(self) -> bool:
        """Whether it is the same in every step of the loop."""
        return self.origin is Origin.CONSTANT

    @property
    def update(self) -> Update | None:
        """The update of rows of the version before."""
        return self.change if isinstance(self.change, Update) else None

    @property
    def view(self) -> View | None:
        return self.lens if isinstance(self.lens, View) else None

    @property
    def taken(self) -> Taken | None:
        return self.lens if isinstance(self.lens, Taken) else None

    @property
    def source(self) -> "Value":
        """The value that it repeats along further axes, or itself."""
        return self.form.source if isinstance(self.form, Broadcast) and not self.form.axes else self

    @property
    def shared(self) -> "Value | None":
        """The value that it repeats for all examples along new first axes."""
        return self.form.source if isinstance(self.form, Broadcast) and self.form.axes else None

    @property
    def sparse_updates(self) -> tuple[Update, ...] | None:
        """All updates of an array of zeros, None if it is another array."""
        if isinstance(self.form, SparseRows):
            return self.form.updates
        is_zero = isinstance(self.form, Broadcast) and self.form.source.literal == 0 and self.dtype != np.bool_
        return () if is_zero else None

    def updated(self, update: Update, active: Predicate | None = None, *, became: str = "") -> "Value":
        """Return the next version."""
        if active is not None:
            update = update.masked(active)
        if self.taken is not None and (taken := self.taken.updated(update)) is not None:
            return Value(None, lens=taken, before=self, change=update, became=became)
        return Value(update.apply(self.array), before=self, change=update, became=became)

    def guarded(self, active: Predicate) -> "Value":
        """Return the same buffer with a derivative in the active examples only."""
        return Value(ta_guard(active.mask, self.array), before=self, change=Guard(active))

    def versions(self) -> "Iterator[Value]":
        """Yield this version and all before it, newest first."""
        value: Value | None = self
        while value is not None:
            yield value
            value = value.before


def arrays(values: Sequence[Value]) -> list[Array]:
    """Return the arrays, and mark all values as used, with those that they repeat or have without a derivative."""
    for x in values:
        x.is_used = True
        while isinstance(x.form, Stopped | Broadcast):
            x = x.form.source
            x.is_used = True
    return [x.array for x in values]


def elements(values: Sequence[Value]) -> list[Any]:
    """Return the operands of an equation that is bound unchanged, and makes no version of a buffer.

    A buffer that is emptied in some examples is a select there, which XLA fuses with the equation. The masked write
    changes the buffer that the select reads, so XLA would copy it if the next step does not begin with the result.
    """
    operands = as_written(values)
    for k, x in enumerate(values):
        if isinstance(x.form, Selected) and not x.form.updates and x.form.select is not None:
            operands[k] = x.form.select()
    return operands


def as_written(values: Sequence[Value]) -> list[Any]:
    """Return the operands to bind an unchanged equation with: literals stay Python numbers, which are weakly typed."""
    return [x if value.literal is None else value.literal for x, value in zip(arrays(values), values, strict=True)]


def with_type(x: Value, *, weak: bool) -> Value:
    """Return a value with a weak type, as plain JAX makes it of Python numbers, or without."""
    if getattr(jax.typeof(x.array), "weak_type", weak) != weak:  # a token has no type that could be weak
        of = {"new_dtype": x.array.dtype, "weak_type": weak, "sharding": None}
        x.array = jax_primitives.convert_element_type_p.bind(x.array, **of)
    return x


def is_weak(aval: Any) -> bool:
    """Return whether a type is weak: not that of a token or a ref."""
    return getattr(aval, "weak_type", False)
