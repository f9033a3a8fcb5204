"""Programs of this library that are traced and never compiled: NumPy evaluates their jaxprs.

A traced program holds all that the rules of the library have made of it: derivatives, batches, loops that are undone,
and what `in_place` has changed. So random programs judge these without XLA, which takes most of the time to compile.
What is not judged is the way from a jaxpr to XLA. Memory that is not initialised holds NaNs here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from in_numpy import in_numpy

from jax_tensorarray._loops import replay, while_


def library_in_numpy(
    f: Callable[..., Any], rewrite: Callable[[Any], Any] = lambda closed: closed
) -> Callable[..., Any]:
    """`f`, which must not need the values of its arguments while it is traced. A stray index is a ValueError.

    With `rewrite`, passes over the program are judged: an index that they take to be in range has to be.
    """
    expanded: dict[int, tuple[Any, Any]] = {}

    def loop(eqn: Any, evaluate: Any, *operands: np.ndarray) -> Any:
        """A loop of the library, as what it is lowered to."""
        if id(eqn) not in expanded:
            run = _LOOPS[eqn.primitive.name]
            traced = jax.make_jaxpr(lambda *args: run(*args, **eqn.params))(*(v.aval for v in eqn.invars))
            expanded[id(eqn)] = eqn, traced  # the equation is kept, and with it its number
        return evaluate(expanded[id(eqn)][1], operands)

    return in_numpy(f, {**_RULES, **dict.fromkeys(_LOOPS, loop)}, rewrite)


_LOOPS = {"ta_while": while_._run, "ta_replay": replay._run}


# --- row ops -----------------------------------------------------------------------------------------------------


class Rows:
    """The positions of an index, in each example of a batch, and the boxes of rows that start there."""

    def __init__(self, params: Any, buffer: np.ndarray, index: np.ndarray, where: np.ndarray | None) -> None:
        self.params, b, d = params, params["batch_dims"], params["index_dims"]
        self.batch, self.sizes, self.elem = buffer.shape[:b], buffer.shape[b : b + d], buffer.shape[b + d :]
        if params.get("settled"):  # a kernel counts the rows of all axes together
            self.sizes, d = (int(np.prod(self.sizes)),), 1
        index = np.asarray(index).astype(object if index.dtype == np.uint64 else np.int64)  # an error names it as it is
        index = index if d > 1 else index[..., None]
        self.positions = index.shape[b:-1]
        self.starts = self._for_each(index, d)
        self.where = None if where is None else self._for_each(where)
        self.box = (*[1] * (d - len(params["window"])), *params["window"])

    def _for_each(self, x: np.ndarray, *last: int) -> np.ndarray:
        count = int(np.prod(self.positions, dtype=int))
        return np.broadcast_to(x, (*self.batch, *x.shape[len(self.batch) :])).reshape(*self.batch, count, *last)

    def in_order(self, example: tuple[int, ...]) -> list[tuple[int, int]]:
        """The places of all rows that take part, in the order in which they are visited, and what each is in values."""
        found, boxes = [], int(np.prod(self.box, dtype=int))
        for k, start in enumerate(self.starts[example]):
            if self.where is not None and not self.where[example][k]:
                continue
            if self.params["mode"] == "clip":
                start = np.clip(start, 0, np.subtract(self.sizes, self.box))
            elif self.params["whole"] and not self._has(start, start + self.box - 1):
                continue
            for n, offset in enumerate(np.ndindex(*self.box)):
                if self._has(row := start + offset, row):
                    found.append((k * boxes + n, int(np.ravel_multi_index(row.astype(int), self.sizes))))
                elif (checked := self.params.get("checked")) == "in range":
                    raise AssertionError(f"row {row} of {self.sizes} was taken to be in range")
                elif self.params["mode"] not in ("drop", "clip") and checked != "recorded":
                    raise ValueError(f"index {row[0]} is out of range for a buffer of size {self.sizes[0]}")
        return found[::-1] if self.params["reverse"] else found

    def _has(self, first: np.ndarray, last: np.ndarray) -> bool:
        return bool(np.all(first >= 0) and np.all(last < self.sizes))

    def flat(self, buffer: np.ndarray) -> np.ndarray:
        return buffer.reshape(*self.batch, int(np.prod(self.sizes, dtype=int)), *self.elem)

    def values(self, x: np.ndarray) -> np.ndarray:
        rows = int(np.prod((*self.positions, *self.box), dtype=int))
        return x.reshape(*self.batch, rows, *self.elem)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is read."""
        return (*self.batch, *self.positions, *self.params["window"], *self.elem)


def _read(eqn: Any, _: Any, buffer: np.ndarray, index: np.ndarray, *where: np.ndarray) -> list[np.ndarray]:
    rows = Rows(eqn.params, buffer, index, *(where or [None]))
    out, flat = np.zeros(rows.shape, buffer.dtype), rows.flat(buffer)
    values = rows.values(out)
    for example in np.ndindex(*rows.batch):
        for k, row in rows.in_order(example):
            values[example][k] = flat[example][row]
    return [values.reshape(out.shape)]


def _update(combine: Callable[[Any, Any], Any], results: int = 1) -> Callable[..., list[np.ndarray]]:
    def rule(
        eqn: Any, _: Any, buffer: np.ndarray, index: np.ndarray, value: np.ndarray, *where: np.ndarray
    ) -> list[np.ndarray]:
        rows = Rows(eqn.params, buffer, index, *(where or [None]))
        flat, new, old = rows.flat(buffer).copy(), rows.values(value), np.zeros(value.shape, value.dtype)
        olds = rows.values(old)
        for example in np.ndindex(*rows.batch):
            for k, row in rows.in_order(example):
                olds[example][k] = flat[example][row]
                flat[example][row] = combine(flat[example][row], new[example][k])
        return [flat.reshape(buffer.shape), olds.reshape(old.shape)][:results]

    return rule


# --- what goes with them -----------------------------------------------------------------------------------------


def _each(batch_dims: int, f: Callable[..., Any]) -> Callable[..., list[np.ndarray]]:
    """A function of one example, for each of a batch."""

    def of_batch(*operands: np.ndarray) -> list[np.ndarray]:
        batch = operands[0].shape[:batch_dims]
        outs = [f(*(x[k] for x in operands)) for k in np.ndindex(*batch)]
        if not outs:
            return [operands[0]]
        return [np.stack(outs).reshape((*batch, *np.shape(outs[0])))]

    return of_batch


def _by_example(f: Callable[..., Any]) -> Callable[..., list[np.ndarray]]:
    return lambda eqn, _, *operands: _each(eqn.params["batch_dims"], f)(*operands)


def _cleared(buffer: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    out = buffer.copy()
    out[max(int(start), 0) : max(int(stop), 0)] = 0
    return out


def _check(eqn: Any, _: Any, index: np.ndarray, size: np.ndarray, *where: np.ndarray) -> list[np.ndarray]:
    def one(index: np.ndarray, size: np.ndarray, *where: np.ndarray) -> np.ndarray:
        takes_part = where[0] if where else np.ones(index.shape, bool)
        found, checked = takes_part & (index >= 0) & (index < size), eqn.params.get("checked")
        assert checked != "in range" or np.all(found == takes_part), f"{index} of {size} was taken to be in range"
        if eqn.params["mode"] != "drop" and checked != "recorded" and np.any(takes_part & ~found):
            raise ValueError(f"index {index[takes_part & ~found][0]} is out of range for a buffer of size {size}")
        return np.where(found, index.astype(np.int64), -1).astype(np.int32)

    return _each(eqn.params["batch_dims"], one)(index, size, *where)


def _empty(eqn: Any, _: Any) -> list[np.ndarray]:
    aval = eqn.outvars[0].aval
    if aval.dtype == bool:
        return [np.ones(aval.shape, bool)]
    is_float = np.issubdtype(aval.dtype, np.inexact)
    return [np.full(aval.shape, np.nan if is_float else np.iinfo(aval.dtype).min // 3 + 7, aval.dtype)]


def _host_read(eqn: Any, _: Any, tape: np.ndarray, step: np.ndarray) -> list[np.ndarray]:
    axis = eqn.params["batch_dims"]
    if not tape.shape[axis]:  # what is sent before the first of no steps
        return [_unknown(np.empty(eqn.outvars[0].aval.shape, tape.dtype))]
    return [np.take(tape, min(max(int(step), 0), tape.shape[axis] - 1), axis)]


def _host_write(eqn: Any, _: Any, tape: np.ndarray, step: np.ndarray, value: np.ndarray) -> list[np.ndarray]:
    out = tape.copy()
    out[(slice(None),) * eqn.params["batch_dims"] + (int(step),)] = value
    return [out]


def _written(buffer: np.ndarray, index: np.ndarray, value: np.ndarray, parts: np.ndarray) -> np.ndarray:
    out, n = buffer.copy(), int(parts)
    if 0 <= index < len(out):
        out[int(index), :n] = value[:n]
    return out


def _part(buffer: np.ndarray, index: np.ndarray, parts: np.ndarray) -> np.ndarray:
    out, n = _unknown(buffer[0]), int(parts)
    if 0 <= index < len(buffer):
        out[:n] = buffer[int(index), :n]
    return out


def _unknown(row: np.ndarray) -> np.ndarray:
    return np.full(row.shape, np.nan if np.issubdtype(row.dtype, np.inexact) else 77, row.dtype)


RULES: dict[str, Callable[..., Sequence[Any]]] = {
    "ta_custom_jvp": lambda eqn, evaluate, *operands: evaluate(eqn.params["call_jaxpr"], operands),
    "ta_read": _read,
    "ta_write": _update(lambda old, new: new),
    "ta_add": _update(np.add),
    "ta_max": _update(np.maximum),
    "ta_swap": _update(lambda old, new: new, results=2),
    "ta_stack": _by_example(lambda buffer, size: _cleared(buffer, size, len(buffer))),
    "ta_clear": _by_example(_cleared),
    "ta_check": _check,
    "ta_empty": _empty,
    "ta_guard": lambda eqn, _, active, x: [x],
    "ta_noted": lambda eqn, _, *indices: indices,
    "ta_read_part": _by_example(_part),
    "ta_write_part": _by_example(_written),
    "ta_host_read": _host_read,
    "ta_host_write": _host_write,
    "ta_host_empty": _empty,
    "ta_place": lambda eqn, _, x: [x],
    "ta_fence": lambda eqn, _, buffer, *values: [buffer],
    "ta_raise": lambda eqn, _, *values: [0],
    "ta_zero": lambda eqn, _, code: [code],
}


def _without_waiting(rule: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    """What a call is only waiting for is there, and has to be in memory, which is all that is asked of it."""

    def of_own(eqn: Any, evaluate: Any, *operands: Any) -> Sequence[Any]:
        return rule(eqn, evaluate, *operands[: len(operands) - eqn.params.get("waits", 0)])

    return of_own


_RULES = {name: _without_waiting(rule) for name, rule in RULES.items()}
