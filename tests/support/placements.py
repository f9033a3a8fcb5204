"""Compare a program with itself under `in_place`, at one place after the other.

A program is a function of `at`, an `At`. The program marks the places where people would write `in_place`, runs, and
returns its results. Objects that are compared by identity, such as an optimizer in a train state, are made outside:

    @placed("loss", "grad", *STEP)
    def test_a_step(at):
        loss = at("loss", plain_loss)
        step = at.step(lambda w, x: w - at("grad", jax.grad(loss))(w, x))
        return step(jnp.ones(3), jnp.ones(3))

`placed` makes a test for each place, and one for all of them at once. The test compares the results, effects and errors
with those of the program without `in_place`.
"""

import functools
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tensorarray import in_place
from jax_tensorarray._in_place.repair import Repair

#: The places that `At.step` marks: `jit(in_place(f))`, `in_place(jit(f))`, and `in_place(f)` without a jit.
STEP = ("in jit", "around jit", "instead of jit")

#: The test with `in_place` at each place but "instead of jit", one within the other.
EVERYWHERE = "everywhere"

#: The largest difference between two floats, relative to the largest value of their array, in units of the last place.
#: `in_place` may add rows in another order.
UNITS = 200


def waves(*shape: int) -> np.ndarray:
    """Return an array of smooth numbers, in single precision whatever the default is."""
    return np.sin(np.arange(np.prod(shape)), dtype=np.float32).reshape(shape)


class At:
    """The places of one run of a program, and the values that its callbacks have noted."""

    def __init__(self, chosen: tuple[str, ...] = ()) -> None:
        self.chosen, self.marked, self.notes = chosen, set(), []

    def __call__(self, place: str, fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Return `in_place(fun)` if this place is chosen, and `fun` otherwise."""
        self.marked.add(place)
        return in_place(fun, **options) if place in self.chosen else fun

    def step(self, fun: Callable[..., Any], jit: Callable[..., Any] = jax.jit) -> Callable[..., Any]:
        """Return the jitted function, with `in_place` inside, outside or instead of the `jit` of a framework."""
        self.marked.update(STEP)
        if "instead of jit" in self.chosen:
            return in_place(fun)
        return self("around jit", jit(self("in jit", fun)))

    def note(self, *values: Any) -> None:
        """Write values down, as a callback of the program."""
        self.notes.append(values)


def placed(
    *places: str, raises: type[Exception] | None = None, is_ordered: bool = True, repairs: bool = True
) -> Callable[[Callable[[At], Any]], Callable[..., None]]:
    """Make a test with a case for each place of a program.

    Args:
        places: of those that the program marks. A program that takes long to compile has few.
        raises: the type of the error that the plain program raises, if it does.
        is_ordered: whether JAX promises an order of the effects.
        repairs: whether `in_place` finds something to repair.
    """
    cases = [*places, pytest.param(EVERYWHERE, marks=pytest.mark.slow)] if len(places) > 1 else places

    def decorator(program: Callable[[At], Any]) -> Callable[..., None]:
        plain = functools.cache(lambda: _outcome(program, At()))
        repaired = []  # JAX keeps repaired loops in its cache of traces, so some places only use those of others

        @pytest.mark.parametrize("place", cases)
        def test(place: str) -> None:
            wanted, notes = plain()
            chosen = (place,) if place != EVERYWHERE else tuple(p for p in places if p != "instead of jit")
            at = At(chosen)
            with mock.patch.object(Repair, "function", autospec=True, side_effect=Repair.function) as repair:
                found, found_notes = _outcome(program, at)
            repaired.append(repair.called)
            if raises is None:
                for outcome in (wanted, found):
                    if isinstance(outcome, Exception):
                        raise outcome
                assert set(chosen) <= at.marked, "the program does not mark this place"
                assert any(repaired) == repairs, "`in_place` is expected to repair something, or nothing"
            assert_same(found, wanted)
            if not is_ordered:
                notes, found_notes = sorted(notes, key=str), sorted(found_notes, key=str)
            assert_same(found_notes, notes)
            assert raises is None or type(wanted) is raises, repr(wanted)

        for name in ("__module__", "__name__", "__qualname__", "__doc__"):  # without the signature, for pytest
            setattr(test, name, getattr(program, name))
        test.pytestmark += getattr(program, "pytestmark", [])
        return test

    return decorator


def assert_same_or_refused(program: Callable[[At], Any], place: str, *names: str) -> None:
    """Compare a program that changes objects with itself under `in_place`. An error with these names is fine, too."""
    try:
        found = program(At((place,)))
    except (TypeError, ValueError) as error:
        assert all(name in str(error) for name in names), error
    else:
        assert_same(found, program(At()))


def _outcome(program: Callable[[At], Any], at: At) -> tuple[Any, list[Any]]:
    """Return the results of the program, or its error, and its effects."""
    try:
        result = jax.block_until_ready(program(at))
    except Exception as error:
        result = error
    jax.effects_barrier()
    return result, at.notes


def assert_same(found: Any, wanted: Any) -> None:
    """Compare trees, types, dtypes, weak types, shardings and values, or errors without the stacks that they quote."""
    if isinstance(wanted, Exception) or isinstance(found, Exception):
        found_text, wanted_text = (re.sub(r"^ .*\n", "", str(error), flags=re.MULTILINE) for error in (found, wanted))
        assert (type(found), found_text) == (type(wanted), wanted_text)
        return
    found_tree, wanted_tree = map(jax.tree.structure, (found, wanted))
    assert found_tree == wanted_tree, f"found {found_tree}, wanted {wanted_tree}"
    for (path, a), (_, b) in zip(*map(jax.tree.leaves_with_path, (found, wanted)), strict=True):
        name = jax.tree_util.keystr(path)
        assert type(a) is type(b), name
        if not isinstance(b, jax.Array | np.ndarray | np.generic | float | complex):
            assert a is b or a == b, name
            continue
        if isinstance(b, jax.Array):
            assert jax.typeof(a) == jax.typeof(b), name
            assert getattr(a, "weak_type", None) == getattr(b, "weak_type", None), name  # keys have none
            assert a.sharding == b.sharding, name
            if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
                a, b = map(jax.random.key_data, (a, b))
        a, b = map(np.asarray, (a, b))
        assert a.dtype == b.dtype, name
        if jnp.issubdtype(b.dtype, jnp.inexact):
            assert_close(a, b, name)
        else:
            np.testing.assert_array_equal(a, b, name)


def assert_close(found: np.ndarray, wanted: np.ndarray, name: str) -> None:
    """Compare floats up to the order of sums."""
    least = UNITS * float(jnp.finfo(wanted.dtype).eps)
    kind = np.complex128 if np.issubdtype(wanted.dtype, np.complexfloating) else np.float64
    found, wanted = found.astype(kind), wanted.astype(kind)
    largest = np.max(np.abs(wanted), initial=0.0, where=np.isfinite(wanted))
    np.testing.assert_allclose(found, wanted, rtol=least, atol=least * largest, err_msg=name)
