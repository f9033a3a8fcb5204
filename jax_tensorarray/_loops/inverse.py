"""The carry before a step, from the carry after it, by an inverse of the body that the user gives."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jax_tensorarray._jaxprs import jaxprs
from jax_tensorarray._loops.replay import Replay, Strategy, all_batched, counted, live_carries, primal_body
from jax_tensorarray._loops.rules import Axis
from jax_tensorarray._loops.tapes import largest

Array = Any


@dataclass(frozen=True)
class Inverse(Strategy):
    """Finds the carry before a step by the user's inverse from the carry after it. `extra` is the carry at the end."""

    body: Any  #: maps *consts, *carry to the carry before, and takes which examples are active as the loop's body does
    own_consts: int  #: how many consts at the end of the loop's are the inverse's
    tolerance: float | None  #: how far from the carry at the start the inverse may lead, if that is checked
    source: str  #: where the loop is, for the message

    batches_all = True

    def extra(self, outs: list[Array]) -> list[Array]:
        return outs

    def batched(
        self, axis: Axis, pred_batched: bool, consts_batched: Sequence[bool], consts: Any, init: Any
    ) -> "Inverse":
        m = len(consts) - self.own_consts
        types = map(jax.typeof, [*consts[m:], *init])
        return replace(self, body=all_batched(axis, self.body, pred_batched, consts_batched[m:], types))

    def pull_back(
        self, loop: Replay, steps: Array, consts: Any, init: Any, extra: Any, const_cts: Any, carry_cts: Any
    ) -> tuple[list[Array], list[Array]]:
        n, m = loop.num_carry, len(consts)
        nonzero = (*loop.nonzero_consts[m - self.own_consts :], *loop.nonzero_carry)
        back = jaxprs.function(primal_body(self.body, nonzero))

        def step(k: Array, steps: Array, *rest: Array) -> list[Array]:
            consts, carry, cts = rest[:m], rest[m + 1 : m + 1 + n], rest[m + 1 + n :]
            before = back(*loop.leading(k, steps), *consts[m - self.own_consts :], *carry)
            const_cts_, carry_cts_ = loop.pull_back(
                k, steps, consts, before, cts[: len(const_cts)], cts[len(const_cts) :]
            )
            return [k == 0, *before, *const_cts_, *carry_cts_]

        never = largest(steps) < 0
        at_start, *outs = counted(loop, step, steps, consts, [never, *extra, *const_cts, *carry_cts], True)
        if self.tolerance is not None:
            for k, (live, start, found) in enumerate(zip(live_carries(loop.body), init, outs, strict=False)):
                if live:
                    jax.debug.callback(functools.partial(self.compare, k), at_start, start, found)
        cts = outs[n:]
        return cts[: len(const_cts)], cts[len(const_cts) :]

    def compare(self, k: int, at_start: Array, start: Array, found: Array) -> None:
        """Raise ValueError if the inverse did not lead back to the start of the loop.

        An example that has already ended in an outer loop takes no step back: its values have no meaning.
        """
        start, found = np.asarray(start), np.asarray(found)
        tolerance = self.tolerance or 0.0
        if not at_start or np.allclose(found, start, tolerance, tolerance, equal_nan=True):
            return
        off = np.max(np.abs(found - start)) if np.issubdtype(start.dtype, np.number) else "another value"
        raise ValueError(
            f"the loop at {self.source}: inverse is not the inverse of body_fun. Carried back from the end of the loop "
            f"to its start, carry number {k}, {start.dtype}{list(start.shape)}, is off by {off}"
        )
