"""The gates of the package, opened or shut: the programs of tests are so small that many would stay shut."""

import contextlib
import math

import pytest

from jax_tensorarray import _gates

#: What opens each gate, and what shuts it.
WAYS = {
    "ROWS_SHARE": (math.inf, 0),
    "ELEMENTS_SHARE": (math.inf, 0),
    "BOX_SHARE": (math.inf, 0),
    "COMPARED_SHARE": (math.inf, 0),
    "KNOWN_SHARE": (math.inf, 0),
    "READ_SHARE": (0, math.inf),
    "COUNTED": (math.inf, 0),
    "REGISTER_BYTES": (0, math.inf),
    "EXAMPLE_BYTES": (0, math.inf),
    "RING_STEPS": (0, math.inf),
    "MASKED_BYTES": (0, math.inf),
    "MASKED_BYTES_OF_EXAMPLES": (0, math.inf),
    "ROUND_STEPS": (math.inf, 1),
    "LOGGED_BYTES": (0, math.inf),
    "KEPT_BYTES": (0, math.inf),
    "RECOMPUTED_SHARE": (0, math.inf),
    "REPEATED_WORK": (math.inf, 0),
    "TAPE_BYTES": (0, math.inf),
    "UNDONE_WORK": (math.inf, 0),
    "OPENED_SHARE": (math.inf, 0),
    "SENT_BYTES": (16, math.inf),
    "SLICES": (64, 0),  # hundreds of slices take XLA minutes
    "SLICES_ON_CPU": (64, 0),
    "SLICES_OF_UPDATES": (64, 0),
    "SLICED_BYTES": (math.inf, 0),
    "REPLACED_BYTES": (0, math.inf),
    "VECTOR_ELEMENTS": (0, math.inf),
    "THREADED_BYTES": (0, math.inf),
    "APART_ELEMENTS": (0, math.inf),
    "FUSED_UPDATES": (0, math.inf),
    "ORDERED_BYTES": (0, math.inf),
    "ORDERED_BYTES_OF_ALL": (0, math.inf),
    "SCANNED_POSITIONS": (math.inf, 0),
}

#: How random programs find the gates: most often open, since their buffers are small.
SETTINGS = ("open", "open", "shut", "as they are")


@contextlib.contextmanager
def gates(setting, *names):
    """All gates, or those named, are open, or shut, or as they are."""
    with pytest.MonkeyPatch.context() as patch:
        for name, (opens, shuts) in WAYS.items() if setting != "as they are" else ():
            if not names or name in names:
                patch.setattr(_gates, name, opens if setting == "open" else shuts)
        yield
