"""Find the line of the user's source that an op is on, for index errors: `... of size 4 (train.py:12)`.

An error shows the name of the file, not its path. The line is an attribute of the call, and attributes are part of the
key of JAX's persistent compilation cache. Folders differ between machines, and for cells of notebooks between
processes.
"""

import os
from typing import Any

from jax_tensorarray import _compat
from jax_tensorarray._types import Equation


class SourceLines:
    """Source lines of the ops of one program."""

    def __init__(self, outside: Any) -> None:
        # The frame that calls the jitted function. An op with this frame is called outside of `jit`, and JAX jits it
        # alone. The compiled op also runs when another line calls it, so an error must not show this line.
        self.outside = outside

    def of(self, eqn: Equation) -> str:
        if "place" in eqn.params:
            return str(eqn.params["place"])
        frame = _compat.frame_of(eqn.source_info)
        return "" if frame is None or frame == self.outside else f"{os.path.basename(frame[0])}:{frame[1]}"
