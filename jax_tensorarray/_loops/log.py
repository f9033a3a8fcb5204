"""The undo log of a step: the rows that it overwrites in the buffers of the carry.

    b = ta_write(b, i, x)
    # becomes
    b, old = ta_swap(b, i, x)             # `old` and `i` are an entry of the log
    b = ta_write(b, i, old)               # undoes the step, later

A buffer of the carry is followed through the jaxpr of a step, into branches and inner loops too. Each equation that
updates rows of it makes a newer version, and an entry of the log. A conditional logs a slot for each branch; slots of
branches not taken are masked. An inner loop logs its entries of every step on a tape of its own.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex
from jax.extend.core import Jaxpr
from jax.extend.core import primitives as jax_primitives

from jax_tensorarray import _compat
from jax_tensorarray._jaxprs import jaxprs, registry
from jax_tensorarray._jaxprs.custom_jvp import ta_custom_jvp_p
from jax_tensorarray._jaxprs.jaxprs import flagged, merge
from jax_tensorarray._loops.guard import ta_guard_p
from jax_tensorarray._loops.recording import recorded
from jax_tensorarray._loops.strategy import Tape
from jax_tensorarray._loops.tapes import largest, play_back
from jax_tensorarray._loops.while_ import Loop, count, counter, results, ta_while_p, taped
from jax_tensorarray._ops.primitive import once_checked, updates_rows
from jax_tensorarray._ops.read import ta_read_p
from jax_tensorarray._ops.starts import positions_of
from jax_tensorarray._ops.swap import ta_swap_p
from jax_tensorarray._ops.write import ta_write_p
from jax_tensorarray._types import Equation

Array = jax.Array


class BufferVersion(NamedTuple):
    """The version of an input that an array is, by the entries of the log that lead to it."""

    root: int
    since: tuple[int, ...] = ()
    #: Whether some branch returns a dummy instead: JAX fills residuals of branches not taken. Nobody reads it.
    has_holes: bool = False

    def after(self, *entries: int) -> "BufferVersion":
        return self._replace(since=(*self.since, *entries))


#: A dummy, as JAX returns one for each residual of the branches that are not taken.
_HOLE = BufferVersion(-1)

#: Puts rows back into a newer version of a buffer; with a bool, only if it is true.
PutBack = Callable[[Array, Sequence[Array], Any], Array]


class LoggedRows(NamedTuple):
    """Rows of the log, and how they are put back."""

    root: int
    rows: list[Array]
    put_back: PutBack
    key: Any = None  #: entries of two branches with equal keys are put back alike
    of_loop: bool = False  #: whether these are rows of all the steps of a loop


_Value = tuple[Array, BufferVersion | None]


class Log:
    """Evaluates jaxprs, follows the versions of their inputs, and keeps the rows that are overwritten."""

    def __init__(self) -> None:
        self.entries: list[LoggedRows] = []
        self.versions: list[tuple[Array, BufferVersion]] = []  #: all that were made

    def evaluate(self, jaxpr: Jaxpr, inputs: Sequence[_Value]) -> list[_Value]:
        return jaxprs.interpret(jaxpr, inputs, self.equation, lambda x: (x, None))

    def equation(self, eqn: Equation, inputs: list[_Value]) -> list[_Value]:
        outs = list(self.evaluated(eqn, inputs))
        self.versions += [(x, v) for x, v in outs if v is not None and v is not _HOLE]
        return outs

    def evaluated(self, eqn: Equation, inputs: list[_Value]) -> Iterable[_Value]:
        p, operands, held = eqn.primitive, [x for x, _ in inputs], [v for _, v in inputs]
        if p is ta_guard_p:
            return [(p.bind(*operands, **eqn.params), held[1])]
        if p is lax.optimization_barrier_p:
            return zip(jaxprs.bind(eqn, operands), held, strict=True)
        if _fills(eqn, held):
            return [(x, _HOLE) for x in jaxprs.bind(eqn, operands)]
        held = [None if v is None or v.has_holes or v is _HOLE else v for v in held]
        if updates_rows(p) and held[0] is not None:
            return self.update(p, eqn.params, operands, held[0])
        if any(v is not None for v in held):
            outs = self.run(eqn, operands, held)
            if outs is not None:
                return outs
        return [(x, None) for x in jaxprs.bind(eqn, operands)]

    def add(self, entry: LoggedRows) -> int:
        self.entries.append(entry)
        return len(self.entries) - 1

    def update(self, p: Any, params: Any, operands: list[Array], held: BufferVersion) -> list[_Value]:
        buffer, index, value, *where = operands
        if p in (ta_write_p, ta_swap_p):
            new, old = ta_swap_p.bind(buffer, index, value, *where, **params)
            outs = [new, old] if p is ta_swap_p else [new]
        else:
            old = ta_read_p.bind(buffer, index, *where, **params | {"reverse": False})
            outs = [p.bind(buffer, index, value, *where, **params)]
        # Rows are put back in the opposite order: for duplicates, what the first one overwrote stays.
        back = once_checked(params) | {"reverse": not params["reverse"]}
        rows = [index, old, *where]

        def put_back(buffer: Array, rows: Sequence[Array], active: Any) -> Array:
            index, old, *where = rows
            if active is not None:
                here = jnp.broadcast_to(active, positions_of(index, params["index_dims"]))
                where = [here & where[0] if where else here]
            return ta_write_p.bind(buffer, index, old, *where, **back)

        key = (*sorted(back.items()), *((jnp.shape(x), jax.typeof(x).dtype) for x in rows))
        n = self.add(LoggedRows(held.root, rows, put_back, key))
        return [(x, None if k else held.after(n)) for k, x in enumerate(outs)]

    def run(
        self, eqn: Equation, operands: list[Array], held: Sequence[BufferVersion | None]
    ) -> Iterable[_Value] | None:
        """Run an equation with jaxprs in which buffers are followed. Return None for any other."""
        entry, p = registry.entry_of(eqn), eqn.primitive
        inner = registry.inlined(eqn, with_options=True)
        if inner is not None:
            return self.evaluate(inner, list(zip(operands, held, strict=True)))
        if entry.kind == "branches":
            return self.branches(eqn, operands, held)
        if entry.kind == "checkpoint" or p in (jax_primitives.custom_jvp_call_p, ta_custom_jvp_p):
            return self.straight(entry, eqn, operands, held)
        if p is jax_primitives.scan_p:
            return self.scan(eqn, operands, held)
        if p is ta_while_p and taped(eqn.params["options"].max_steps):
            return self.while_(eqn, operands, held)
        return None

    def straight(self, entry: registry.Entry, eqn: Equation, operands: Any, held: Any) -> list[_Value] | None:
        change = _Straight(held)
        outs = entry.rebuild(eqn, operands, change)
        if outs is None:
            return None
        n, rows = len(change.versions), iter(outs[len(change.versions) :])
        numbers = []
        for of_rows in change.log.entries:
            version = held[of_rows.root]
            assert version is not None
            numbers.append(self.add(of_rows._replace(root=version.root, rows=[next(rows) for _ in of_rows.rows])))
        return list(zip(outs[:n], [_outside(v, held, numbers) for v in change.versions], strict=True))

    def branches(self, eqn: Equation, operands: list[Array], held: Sequence[BufferVersion | None]) -> list[_Value]:
        held, n, change = held[1:], len(eqn.outvars), _Branches(held[1:])
        arrays = registry.entry_of(eqn).rebuild(eqn, operands, change)
        assert arrays is not None
        slots = change.slots
        versions = [slots.version(o, of_branches) for o, of_branches in enumerate(zip(*change.versions, strict=True))]
        rows, numbers = iter(arrays[n:]), []
        for slot in slots.all:
            version, mine = held[slot.root], [next(rows) for _ in range(slot.num_rows)]
            assert version is not None  # inside, only what is followed has entries
            numbers.append(self.add(LoggedRows(version.root, mine, slot.put_back, of_loop=slot.of_loop)))
        return list(zip(arrays[:n], [_outside(v, held, numbers) for v in versions], strict=True))

    def scan(self, eqn: Equation, operands: list[Array], held: Sequence[BufferVersion | None]) -> list[_Value] | None:
        params, entry = eqn.params, registry.ENTRIES["scan"]
        [loop] = entry.bodies(params)
        _, of_carry, _ = loop.split(held)
        if not any(of_carry):
            return None
        followed = _Followed(loop.jaxpr, loop.num_consts, of_carry)
        if not followed.num_rows:
            return self.unchanged_loop(followed, of_carry, eqn, operands)
        outs = entry.rebuild(eqn, operands, followed)
        assert outs is not None

        def put_back(k: int) -> PutBack:
            def run(buffer: Array, rows: Sequence[Array], active: Any) -> Array:
                def back(buffer: Array, rows: list[Array]) -> tuple[Array, None]:
                    return followed.put_back(k, buffer, rows, active), None

                return lax.scan(back, buffer, list(rows), params["length"], not params["reverse"])[0]

            return run

        n = len(outs) - followed.num_rows
        return self.after_loop(followed, of_carry, outs[:n], outs[n:], [], put_back)

    def while_(self, eqn: Equation, operands: list[Array], held: Sequence[BufferVersion | None]) -> list[_Value] | None:
        cond, body, options = (eqn.params[name] for name in ("cond", "body", "options"))
        _, _, of_carry = options.split(held)
        if not any(of_carry):
            return None
        cond_consts, consts, carry = options.split(operands)
        if not options.strategy.tapes:  # it would have to know of the log
            options = replace(options, strategy=Tape())
        loop = Loop(cond_consts, consts, carry, cond, body, options)
        followed = _Followed(body, len(options.leading) + len(consts), of_carry)
        if not followed.num_rows:
            return self.unchanged_loop(followed, of_carry, eqn, operands)
        with eqn.ctx.manager:
            more = jax.make_jaxpr(functools.partial(followed.body, body))(*body.in_avals)
            outs, steps, taken, tapes = recorded(loop, more, len(body.out_avals))
        put_back = followed.back_by_tapes(options.max_steps, not options.reverse)
        versions = self.after_loop(followed, of_carry, outs, tapes, [taken], put_back)
        return [*versions, *((x, None) for x in results([], steps))]

    def unchanged_loop(
        self, followed: "_Followed", of_carry: Any, eqn: Equation, operands: list[Array]
    ) -> list[_Value]:
        """Run a loop that updates none of the buffers as it is."""
        back = followed.back_by_tapes(0, True)  # of nothing
        return self.after_loop(followed, of_carry, jaxprs.bind(eqn, operands), [], [], back)

    def after_loop(
        self,
        followed: "_Followed",
        of_carry: Sequence[BufferVersion | None],
        outs: Sequence[Array],
        rows: Sequence[Array],
        more: list[Array],
        put_back: Callable[[int], PutBack],
    ) -> list[_Value]:
        """Return the results of a loop as versions. `rows` are those of all steps, and `more` is put before them."""
        values: list[_Value] = [(x, None) for x in outs]
        for k, version in enumerate(of_carry):
            if version is not None and followed.is_followed[k]:
                mine = [*more, *(rows[n] for n in followed.places[k])]
                changed = (
                    [self.add(LoggedRows(version.root, mine, put_back(k), of_loop=True))] if followed.places[k] else []
                )
                values[k] = (outs[k], version.after(*changed))
        return values


def _fills(eqn: Equation, held: Sequence[BufferVersion | None]) -> bool:
    """Return whether an equation may make a dummy: an array of zeros, or one that is not initialised."""
    if eqn.primitive.name.startswith("empty"):
        return True
    if eqn.primitive is not lax.broadcast_in_dim_p:
        return False
    x = eqn.invars[0]
    return held[0] is _HOLE or (isinstance(x, jex.Literal) and not x.val)


def _inside(held: Sequence[BufferVersion | None]) -> list[BufferVersion | None]:
    return [None if v is None else BufferVersion(k) for k, v in enumerate(held)]


def _outside(
    version: BufferVersion | None, held: Sequence[BufferVersion | None], numbers: Sequence[int]
) -> BufferVersion | None:
    """Return a version inside of an equation, of the operands `held`, as one outside. `numbers` has the new entries."""
    if version is None or version.root < 0:
        return version
    before = held[version.root]
    assert before is not None
    return before.after(*(numbers[n] for n in version.since))._replace(has_holes=version.has_holes)


class _Traced:
    """A jaxpr that is traced once with its log. Each input in `held` is followed."""

    def __init__(self, jaxpr: Jaxpr, types: Sequence[Any], held: Sequence[BufferVersion | None]) -> None:
        log = Log()
        self.entries, self.versions = log.entries, list[BufferVersion | None]()

        def f(*args: Array) -> tuple[list[Array], list[list[Array]]]:
            outs = log.evaluate(jaxpr, list(zip(args, held, strict=True)))
            self.versions += [v for _, v in outs]
            return [x for x, _ in outs], [entry.rows for entry in log.entries]

        #: Returns the outputs of the jaxpr, and the rows of each entry of its log.
        self.run = jaxprs.Traced(f, types)


def followed(jaxpr: Jaxpr, held: Sequence[BufferVersion | None]) -> list[BufferVersion | None]:
    """Return what the outputs of a jaxpr are versions of. Each input in `held` is the version of itself."""
    return _Traced(jaxpr, list(jaxpr.in_avals), _inside(held)).versions


class _Followed(registry.Change):
    """The body of a loop that returns its log, too: the rows overwritten in the flagged carries."""

    def __init__(self, body: Any, num_before: int, of_carry: Sequence[BufferVersion | None]) -> None:
        after = len(body.in_avals) - num_before - len(of_carry)
        held = _inside([*[None] * num_before, *of_carry, *[None] * after])
        self.of_step = _Traced(_compat.closed(body), list(body.in_avals), held)
        self.entries: dict[int, LoggedRows] = {}
        self.of_carry: dict[int, tuple[int, ...]] = {}
        self.places: dict[int, list[int]] = {}
        self.types: list[Any] = []
        self.is_followed = []
        for k, version in enumerate(self.of_step.versions[: len(of_carry)]):
            self.is_followed.append(version is not None and version.root == num_before + k and not version.has_holes)
            if version is not None and self.is_followed[k]:
                self.of_carry[k], self.places[k] = version.since, []
                for n in version.since:
                    self.entries[n] = self.of_step.entries[n]
                    rows = [jax.typeof(x) for x in self.entries[n].rows]
                    self.places[k] += range(len(self.types), len(self.types) + len(rows))
                    self.types += rows
        self.num_rows = len(self.types)

    def body(self, jaxpr: Jaxpr, *args: Array) -> list[Array]:
        outs, rows = self.of_step.run(*args)
        return [*outs, *(x for since in self.of_carry.values() for n in since for x in rows[n])]

    def put_back(self, k: int, buffer: Array, rows: Sequence[Array], active: Any) -> Array:
        """Return the buffer of carry `k` before a step."""
        end = len(rows)
        for n in reversed(self.of_carry[k]):
            entry = self.entries[n]
            buffer = entry.put_back(buffer, rows[end - len(entry.rows) : end], active)
            end -= len(entry.rows)
        return buffer

    def back_by_tapes(self, max_steps: int, reverse: bool) -> Callable[[int], PutBack]:
        def of(k: int) -> PutBack:
            types = [self.types[n] for n in self.places[k]]

            def run(buffer: Array, rows: Sequence[Array], active: Any) -> Array:
                steps, *tapes = rows
                steps = largest(steps) if active is None else jnp.where(active, largest(steps), 0)

                def step(n: Array, *args: Array) -> list[Array]:
                    here = play_back(args[:-1], n, [None] * len(tapes), types)
                    return [self.put_back(k, args[-1], here, None)]

                body = jax.make_jaxpr(step)(counter(steps), *map(jax.typeof, [*tapes, buffer]))
                [buffer] = count(steps, tapes, [buffer], body=body, max_steps=max_steps, reverse=reverse)
                return buffer

            return run

        return of


class _Straight(registry.Change):
    """A jaxpr in an equation, which returns its log after its results."""

    def __init__(self, held: Sequence[BufferVersion | None]) -> None:
        self.held = _inside(held)

    def body(self, jaxpr: Jaxpr, *args: Array) -> list[Array]:
        self.jaxpr, self.log = jaxpr, Log()
        outs = self.log.evaluate(jaxpr, list(zip(args, self.held, strict=True)))
        self.versions = [v for _, v in outs]
        return [*(x for x, _ in outs), *(x for entry in self.log.entries for x in entry.rows)]

    def jvp(self, f: Callable[..., Any], primals: list[Array], dots: list[Array], nonzero: list[bool]) -> Any:
        outs, tangents = f(primals, dots)

        def rows(*some: Array) -> tuple[list[Array], list[Array]]:
            log = self.body(self.jaxpr, *merge(some, nonzero, primals))[len(outs) :]
            return flagged(log, registry.are_inexact(log)), log

        _, of_rows, log = jax.jvp(rows, flagged(primals, nonzero), dots, has_aux=True)
        return [*outs, *log], [*tangents, *of_rows]


class _Branches(registry.Change):
    """Branches that return their log after their results: a slot has rows of those that have such an entry."""

    def __init__(self, held: Sequence[BufferVersion | None]) -> None:
        self.held, self.slots = _inside(held), _Slots()
        self.versions: list[list[BufferVersion | None]] = []  #: of the results of each branch

    def body(self, jaxpr: Jaxpr, *args: Array) -> list[Any]:
        log = Log()
        outs = log.evaluate(jaxpr, list(zip(args, self.held, strict=True)))
        versions = [v for _, v in outs]
        self.slots.add(len(self.versions), log.entries, versions)
        self.versions.append(versions)
        return [*(x for x, _ in outs), [entry.rows for entry in log.entries]]

    def join(self, results: Sequence[list[Any]]) -> Callable[[int, list[Any], list[Any]], list[Any]]:
        def joined(branch: int, outs: list[Any], operands: list[Any]) -> list[Any]:
            *results_of_branch, rows = outs
            return [*results_of_branch, *(x for slot in self.slots.all for x in slot.rows_of(branch, rows))]

        return joined


class _Slot:
    """A place in the log of a conditional, for an entry of one branch or of several."""

    def __init__(self, entry: LoggedRows, outputs: frozenset[int]) -> None:
        self.root, self.key, self.outputs, self.inner_put_back = entry.root, entry.key, outputs, entry.put_back
        self.of_loop = entry.of_loop
        self.types = [jax.typeof(x) for x in entry.rows]
        self.members: dict[int, int] = {}  # the numbers of the entries, by branch
        self.num_rows = 1 + len(self.types)

    def takes(self, entry: LoggedRows, outputs: frozenset[int]) -> bool:
        return entry.key is not None and (entry.root, entry.key, outputs) == (self.root, self.key, self.outputs)

    def rows_of(self, branch: int, entries: Sequence[Sequence[Array]]) -> list[Array]:
        """Return whether the branch has an entry, and its rows. `entries` are those of the branch."""
        if branch not in self.members:
            return [jnp.asarray(False), *(jnp.zeros(t.shape, t.dtype) for t in self.types)]
        rows = entries[self.members[branch]]
        return [jnp.asarray(True), *(lax.convert_element_type(x, jnp.result_type(x)) for x in rows)]

    def put_back(self, buffer: Array, rows: Sequence[Array], active: Any) -> Array:
        taken, *rows = rows
        return self.inner_put_back(buffer, rows, taken if active is None else taken & active)


class _Slots:
    """The log of a conditional: the entries of its branches, each branch's in order."""

    def __init__(self) -> None:
        self.all: list[_Slot] = []

    def add(self, branch: int, entries: Sequence[LoggedRows], outs: Sequence[BufferVersion | None]) -> None:
        at = 0
        for n, entry in enumerate(entries):
            outputs = frozenset(o for o, v in enumerate(outs) if v is not None and n in v.since)
            if not outputs:
                continue
            place = next((k for k in range(at, len(self.all)) if self.all[k].takes(entry, outputs)), None)
            if place is None:
                place = len(self.all)
                self.all.append(_Slot(entry, outputs))
            self.all[place].members[branch] = n
            at = place + 1

    def version(self, output: int, choices: Sequence[BufferVersion | None]) -> BufferVersion | None:
        """Return what an output is a version of, given what it is in each branch; `since` are places of the log."""
        if any(v is None for v in choices):
            return None
        versions = [v for v in choices if v is not None and v.root >= 0]
        if not versions:
            return _HOLE
        root = versions[0].root
        if any(v.root != root for v in versions):
            return None
        since = tuple(k for k, slot in enumerate(self.all) if slot.root == root and output in slot.outputs)
        return BufferVersion(root, since, len(versions) < len(choices) or any(v.has_holes for v in versions))
