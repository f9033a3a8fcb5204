"""Find the function of JAX that flattens or unflattens a pytree.

JAX does not tell a pytree rule, so the rule looks at the frames of its callers. The names of JAX's modules are private.
If one changes, the answers become False. The docstrings say what this costs.
"""

import inspect
from types import FrameType

from jax_tensorarray._compat.tracing import executes_eagerly


def flattened_by_control_flow() -> bool:
    """Return whether `lax.scan`, `while_loop`, `cond` or the like calls the pytree rule that calls this.

    A TensorArray with rows of unknown shape then raises. If the answer is wrongly False, it enters the loop. A loop
    that writes its first row then gets JAX's error for two pytrees with different metadata.
    """
    frame = _frame_that_flattens()
    return frame is not None and frame.f_globals["__name__"].startswith("jax._src.lax.control_flow")


def unflattened_by_control_flow() -> bool:
    """Return whether the pytree rule that calls this makes an argument of a body of a loop, or of a branch, of JAX.

    A TensorArray without `max_size` then raises if a write does not fit into its buffers. If the answer is wrongly
    False, it grows. JAX then raises for different shapes before and after a step, or in two branches.
    """
    first, later = _frame_that_flattens(), _frame_that_flattens(_TRACING)
    is_result = first is later  # without tracing between the two
    return not is_result and later is not None and later.f_globals["__name__"].startswith("jax._src.lax.control_flow")


_TRACING = ("jax._src.linear_util", "jax._src.interpreters", "jax._src.profiler")


def flattened_by_grad() -> bool:
    """Return whether `jax.grad` or the like calls the pytree rule that calls this, and refuses integers.

    This serves an error message only: otherwise users would read of an int32 that is not theirs. JAX flattens the
    differentiated arguments in these functions.
    """
    frame = _frame_that_flattens()
    if frame is None or frame.f_globals["__name__"] != "jax._src.api":
        return False
    names = frame.f_locals
    is_before = "vjp_py" not in names and "y" not in names  # later it flattens results
    return frame.f_code.co_name in ("value_and_grad_f", "jacfun") and is_before and not names.get("allow_int", False)


def flattened_by(library: str) -> bool:
    """Return whether a library flattens the pytree, directly or by calls, and not in a traced function."""
    if not executes_eagerly():
        return False
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == library:
            return True
        frame = frame.f_back
    return False


def _frame_that_flattens(others: tuple[str, ...] = ()) -> FrameType | None:
    """Return the frame that calls the pytree rule that calls this, without JAX's functions for pytrees and `others`."""
    frame = inspect.currentframe()
    skipped = ("jax_tensorarray", "jax._src.tree_util", "jax._src.flattree", "jax._src.api_util", *others)
    while frame is not None and frame.f_globals.get("__name__", "jax_tensorarray").startswith(skipped):
        frame = frame.f_back
    return frame
