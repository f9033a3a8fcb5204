"""The line of the user's source that an op is on, for index errors: `... of size 4 (train.py:12)`.

An error has only the name of the file, and not its path. The line is an attribute of the call, and JAX's persistent
compilation cache finds programs by their attributes. Folders differ between machines, and for cells of notebooks
between processes.
"""

import os
from typing import Any

from jax_tensorarray import _compat
from jax_tensorarray._types import Equation


class Places:
    """The places of the ops of one program."""

    def __init__(self, outside: Any) -> None:
        # The stack outside of the jitted function. If an op has no frame inside, the op itself has been jitted: JAX
        # does so outside of jit. What it has compiled also runs when it is called from another line.
        self.outside = outside

    def of(self, eqn: Equation) -> str:
        if "place" in eqn.params:
            return str(eqn.params["place"])
        frame = _compat.frame_of(eqn.source_info)
        return "" if frame is None or frame == self.outside else f"{os.path.basename(frame[0])}:{frame[1]}"
