"""Functions under `in_place` inside of Haiku's `hk.transform`."""

import sys
from typing import Any

import jax


def is_initialising() -> bool:
    """Return whether Haiku is making parameters now. It makes them where they are, so nothing is compiled."""
    return _is_running() and bool(sys.modules["haiku"].running_init())


def state() -> list[Any]:
    """Return parameters, state and random keys of the `hk.transform` that is running. None is running: nothing."""
    if not _is_running():
        return []
    haiku = sys.modules["haiku"]
    return jax.tree.leaves((haiku.get_params(), haiku.get_current_state(), haiku.maybe_get_rng_sequence_state()))


def _is_running() -> bool:
    haiku = sys.modules.get("haiku")
    if haiku is None:
        return False
    try:
        haiku.running_init()
    except ValueError:  # not inside of hk.transform
        return False
    return True
