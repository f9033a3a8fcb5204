"""The undo log of a step: the rows that it overwrites in the buffers of the carry.

    b = ta_write(b, i, x)
    # becomes
    b, old = ta_swap(b, i, x)             # `old` and `i` are an entry of the log
    b = ta_write(b, i, old)               # undoes the step, later

We follow each buffer of the carry through the jaxpr of a step, into branches and inner loops too. An equation that
updates rows of it returns a newer version, and adds an entry to the log. A conditional logs a slot for each branch, and
masks the slots of branches not taken. An inner loop logs the entries of each of its steps on a tape of its own.
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
from jax_tensorarray._loops.recording import recorded
from jax_tensorarray._loops.strategy import Tape
from jax_tensorarray._loops.tapes import largest, play_back
from jax_tensorarray._loops.while_ import Loop, count, counter, results, ta_while_p, taped
from jax_tensorarray._ops.guard import ta_guard_p
from jax_tensorarray._ops.primitive import once_checked, updates_rows
from jax_tensorarray._ops.read import ta_read_p
from jax_tensorarray._ops.starts import positions_of
from jax_tensorarray._ops.swap import ta_swap_p
from jax_tensorarray._ops.write import ta_write_p
from jax_tensorarray._types import Array, Equation


class BufferVersion(NamedTuple):
    """A version of an input: the number of the input, and the entries of the log since then."""

    root: int
    since: tuple[int, ...] = ()
    #: Whether some branch returns a dummy instead: JAX fills residuals of branches not taken. Nobody reads it.
    has_holes: bool = False

    def after(self, *entries: int) -> "BufferVersion":
        return self._replace(since=(*self.since, *entries))


#: A dummy, which JAX returns for each residual of the branches that are not taken.
_HOLE = BufferVersion(-1)

#: Puts rows back into a newer version of a buffer. The last argument is None, or a bool for whether to do so.
PutBack = Callable[[Array, Sequence[Array], Any], Array]


class LoggedRows(NamedTuple):
    """Rows of the log, and the function that puts them back."""

    root: int
    rows: list[Array]
    put_back: PutBack
    key: Any = None  #: entries of two branches with equal keys have the same `put_back`
    of_loop: bool = False  #: whether these are rows of all steps of a loop


_Value = tuple[Array, BufferVersion | None]
_Versions = Sequence[BufferVersion | None]  #: of the operands of an equation, or of the inputs of a jaxpr


class Log:
    """Evaluates jaxprs, follows the versions of their inputs, and logs overwritten rows."""

    def __init__(self) -> None:
        self.entries: list[LoggedRows] = []
        self.versions: list[tuple[Array, BufferVersion]] = []  #: all of them

    def evaluate(self, jaxpr: Jaxpr, inputs: Sequence[_Value]) -> list[_Value]:
        return jaxprs.interpret(jaxpr, inputs, self.equation, lambda x: (x, None))

    def equation(self, eqn: Equation, inputs: list[_Value]) -> list[_Value]:
        outs = list(self.evaluated(eqn, inputs))
        self.versions += [(x, v) for x, v in outs if v is not None and v is not _HOLE]
        return outs

    def evaluated(self, eqn: Equation, inputs: list[_Value]) -> Iterable[_Value]:
        p, operands, versions_in = eqn.primitive, [x for x, _ in inputs], [v for _, v in inputs]
        if p is ta_guard_p:
            return [(p.bind(*operands, **eqn.params), versions_in[1])]
        if p is lax.optimization_barrier_p:
            return zip(jaxprs.bind(eqn, operands), versions_in, strict=True)
        if _fills(eqn, versions_in):
            return [(x, _HOLE) for x in jaxprs.bind(eqn, operands)]
        versions_in = [None if v is None or v.has_holes or v is _HOLE else v for v in versions_in]
        if updates_rows(p) and versions_in[0] is not None:
            return self.update(p, eqn.params, operands, versions_in[0])
        if any(v is not None for v in versions_in):
            outs = self.run(eqn, operands, versions_in)
            if outs is not None:
                return outs
        return [(x, None) for x in jaxprs.bind(eqn, operands)]

    def add(self, entry: LoggedRows) -> int:
        self.entries.append(entry)
        return len(self.entries) - 1

    def update(self, p: Any, params: Any, operands: list[Array], version: BufferVersion) -> list[_Value]:
        buffer, index, value, *where = operands
        if p in (ta_write_p, ta_swap_p):
            new, old = ta_swap_p.bind(buffer, index, value, *where, **params)
            outs = [new, old] if p is ta_swap_p else [new]
        else:
            old = ta_read_p.bind(buffer, index, *where, **params | {"reverse": False})
            outs = [p.bind(buffer, index, value, *where, **params)]
        # Put rows back in the opposite order: for duplicates, the row that the first one overwrote stays.
        back = once_checked(params) | {"reverse": not params["reverse"]}
        rows = [index, old, *where]

        def put_back(buffer: Array, rows: Sequence[Array], active: Any) -> Array:
            index, old, *where = rows
            if active is not None:
                here = jnp.broadcast_to(active, positions_of(index, params["index_dims"]))
                where = [here & where[0] if where else here]
            return ta_write_p.bind(buffer, index, old, *where, **back)

        key = (*sorted(back.items()), *((jnp.shape(x), jax.typeof(x).dtype) for x in rows))
        n = self.add(LoggedRows(version.root, rows, put_back, key))
        return [(x, None if k else version.after(n)) for k, x in enumerate(outs)]

    def run(self, eqn: Equation, operands: list[Array], versions_in: _Versions) -> Iterable[_Value] | None:
        """Run an equation and follow buffers into its jaxprs. Return None if we cannot."""
        entry, p = registry.entry_of(eqn), eqn.primitive
        inner = registry.inlined(eqn, with_options=True)
        if inner is not None:
            return self.evaluate(inner, list(zip(operands, versions_in, strict=True)))
        if entry.kind == "branches":
            return self.branches(eqn, operands, versions_in)
        if entry.kind == "checkpoint" or p in (jax_primitives.custom_jvp_call_p, ta_custom_jvp_p):
            return self.straight(entry, eqn, operands, versions_in)
        if p is jax_primitives.scan_p:
            return self.scan(eqn, operands, versions_in)
        if p is ta_while_p and taped(eqn.params["options"].max_steps):
            return self.while_(eqn, operands, versions_in)
        return None

    def straight(self, entry: registry.Entry, eqn: Equation, operands: Any, versions_in: Any) -> list[_Value] | None:
        change = _Straight(versions_in)
        outs = entry.rebuild(eqn, operands, change)
        if outs is None:
            return None
        n, rows = len(change.versions), iter(outs[len(change.versions) :])
        numbers = []
        for of_rows in change.log.entries:
            version = versions_in[of_rows.root]
            assert version is not None
            numbers.append(self.add(of_rows._replace(root=version.root, rows=[next(rows) for _ in of_rows.rows])))
        return list(zip(outs[:n], [_outside(v, versions_in, numbers) for v in change.versions], strict=True))

    def branches(self, eqn: Equation, operands: list[Array], versions_in: _Versions) -> list[_Value]:
        versions_in, n, change = versions_in[1:], len(eqn.outvars), _Branches(versions_in[1:])
        arrays = registry.entry_of(eqn).rebuild(eqn, operands, change)
        assert arrays is not None
        slots = change.slots
        versions = [slots.version(o, of_branches) for o, of_branches in enumerate(zip(*change.versions, strict=True))]
        rows, numbers = iter(arrays[n:]), []
        for slot in slots.all:
            version, of_slot = versions_in[slot.root], [next(rows) for _ in range(slot.num_rows)]
            assert version is not None  # only versions have entries inside
            numbers.append(self.add(LoggedRows(version.root, of_slot, slot.put_back, of_loop=slot.of_loop)))
        return list(zip(arrays[:n], [_outside(v, versions_in, numbers) for v in versions], strict=True))

    def scan(self, eqn: Equation, operands: list[Array], versions_in: _Versions) -> list[_Value] | None:
        params, entry = eqn.params, registry.ENTRIES["scan"]
        [loop] = entry.bodies(params)
        _, of_carry, _ = loop.split(versions_in)
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

    def while_(self, eqn: Equation, operands: list[Array], versions_in: _Versions) -> list[_Value] | None:
        cond, body, options = (eqn.params[name] for name in ("cond", "body", "options"))
        _, _, of_carry = options.split(versions_in)
        if not any(of_carry):
            return None
        cond_consts, consts, carry = options.split(operands)
        if not options.strategy.tapes:  # other strategies do not record a log
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
        """Run a loop that updates none of the buffers, without a log."""
        back = followed.back_by_tapes(0, True)  # no rows
        return self.after_loop(followed, of_carry, jaxprs.bind(eqn, operands), [], [], back)

    def after_loop(
        self,
        followed: "_Followed",
        of_carry: _Versions,
        outs: Sequence[Array],
        rows: Sequence[Array],
        more: list[Array],
        put_back: Callable[[int], PutBack],
    ) -> list[_Value]:
        """Return the results of a loop with their versions. `rows` are those of all steps, and come after `more`."""
        values: list[_Value] = [(x, None) for x in outs]
        for k, version in enumerate(of_carry):
            if version is not None and followed.is_followed[k]:
                entries = []
                if followed.positions[k]:
                    of_carry_rows = [*more, *(rows[n] for n in followed.positions[k])]
                    entries = [self.add(LoggedRows(version.root, of_carry_rows, put_back(k), of_loop=True))]
                values[k] = (outs[k], version.after(*entries))
        return values


def _fills(eqn: Equation, versions_in: _Versions) -> bool:
    """Return whether an equation may return a dummy: zeros, or an uninitialised array."""
    if eqn.primitive.name.startswith("empty"):
        return True
    if eqn.primitive is not lax.broadcast_in_dim_p:
        return False
    x = eqn.invars[0]
    return versions_in[0] is _HOLE or (isinstance(x, jex.Literal) and not x.val)


def _inside(versions_in: _Versions) -> list[BufferVersion | None]:
    return [None if v is None else BufferVersion(k) for k, v in enumerate(versions_in)]


def _outside(version: BufferVersion | None, versions_in: _Versions, numbers: Sequence[int]) -> BufferVersion | None:
    """Convert a version inside of an equation to one outside, from the versions of the operands and the new entries."""
    if version is None or version.root < 0:
        return version
    before = versions_in[version.root]
    assert before is not None
    return before.after(*(numbers[n] for n in version.since))._replace(has_holes=version.has_holes)


class _Traced:
    """A jaxpr, traced once with its log, from the versions of its inputs."""

    def __init__(self, jaxpr: Jaxpr, types: Sequence[Any], versions_in: _Versions) -> None:
        log = Log()
        self.entries, self.versions = log.entries, list[BufferVersion | None]()

        def f(*args: Array) -> tuple[list[Array], list[list[Array]]]:
            outs = log.evaluate(jaxpr, list(zip(args, versions_in, strict=True)))
            self.versions += [v for _, v in outs]
            return [x for x, _ in outs], [entry.rows for entry in log.entries]

        #: Returns the outputs of the jaxpr, and the rows of each entry of its log.
        self.run = jaxprs.Traced(f, types)


def followed(jaxpr: Jaxpr, versions_in: _Versions) -> list[BufferVersion | None]:
    """Return the versions of the outputs of a jaxpr. Each input that has a version becomes the root of a new one."""
    return _Traced(jaxpr, list(jaxpr.in_avals), _inside(versions_in)).versions


class _Followed(registry.Change):
    """The body of a loop that also returns its log: the rows overwritten in the carries that have a version."""

    def __init__(self, body: Any, num_before: int, of_carry: _Versions) -> None:
        after = len(body.in_avals) - num_before - len(of_carry)
        versions_in = _inside([*[None] * num_before, *of_carry, *[None] * after])
        self.of_step = _Traced(_compat.closed(body), list(body.in_avals), versions_in)
        self.entries: dict[int, LoggedRows] = {}
        self.of_carry: dict[int, tuple[int, ...]] = {}
        self.positions: dict[int, list[int]] = {}
        self.types: list[Any] = []
        self.is_followed = []
        for k, version in enumerate(self.of_step.versions[: len(of_carry)]):
            self.is_followed.append(version is not None and version.root == num_before + k and not version.has_holes)
            if version is not None and self.is_followed[k]:
                self.of_carry[k], self.positions[k] = version.since, []
                for n in version.since:
                    self.entries[n] = self.of_step.entries[n]
                    rows = [jax.typeof(x) for x in self.entries[n].rows]
                    self.positions[k] += range(len(self.types), len(self.types) + len(rows))
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
            types = [self.types[n] for n in self.positions[k]]

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
    """Changes the jaxpr of an equation to return its log after its results."""

    def __init__(self, versions_in: _Versions) -> None:
        self.versions_in = _inside(versions_in)

    def body(self, jaxpr: Jaxpr, *args: Array) -> list[Array]:
        self.jaxpr, self.log = jaxpr, Log()
        outs = self.log.evaluate(jaxpr, list(zip(args, self.versions_in, strict=True)))
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
    """Changes branches to return their slots of the log after their results."""

    def __init__(self, versions_in: _Versions) -> None:
        self.versions_in, self.slots = _inside(versions_in), _Slots()
        self.versions: list[list[BufferVersion | None]] = []  #: of the results of each branch

    def body(self, jaxpr: Jaxpr, *args: Array) -> list[Any]:
        log = Log()
        outs = log.evaluate(jaxpr, list(zip(args, self.versions_in, strict=True)))
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
    """A slot in the log of a conditional, for an entry of one branch or of several."""

    def __init__(self, entry: LoggedRows, outputs: frozenset[int]) -> None:
        self.root, self.key, self.outputs, self.inner_put_back = entry.root, entry.key, outputs, entry.put_back
        self.of_loop = entry.of_loop
        self.types = [jax.typeof(x) for x in entry.rows]
        self.members: dict[int, int] = {}  #: the numbers of the entries, by branch
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
        has_entry, *rows = rows
        return self.inner_put_back(buffer, rows, has_entry if active is None else has_entry & active)


class _Slots:
    """The slots of a conditional. Their order agrees with that of the entries of each branch."""

    def __init__(self) -> None:
        self.all: list[_Slot] = []

    def add(self, branch: int, entries: Sequence[LoggedRows], outs: _Versions) -> None:
        at = 0
        for n, entry in enumerate(entries):
            outputs = frozenset(o for o, v in enumerate(outs) if v is not None and n in v.since)
            if not outputs:
                continue
            number = next((k for k in range(at, len(self.all)) if self.all[k].takes(entry, outputs)), None)
            if number is None:
                number = len(self.all)
                self.all.append(_Slot(entry, outputs))
            self.all[number].members[branch] = n
            at = number + 1

    def version(self, output: int, choices: _Versions) -> BufferVersion | None:
        """Return the version of an output from its versions in all branches. `since` are numbers of slots."""
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
