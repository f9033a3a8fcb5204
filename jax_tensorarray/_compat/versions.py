"""Warn once if JAX is newer than the newest tested version."""

import warnings

import jax

from jax_tensorarray import _environment, _faults

#: The newest minor version of JAX with which the tests pass.
NEWEST_TESTED = (0, 12)

VARIABLE = "JAX_TENSORARRAY_UNTESTED_JAX"

_has_looked = False


def warn_if_untested() -> None:
    """Warn if JAX is newer than `NEWEST_TESTED`, once per process.

    Private names of JAX may be missing there. Then loops may be slow again: `_compat` says so for each name. The
    warning comes at the first use and not at import, because a program may import this library and not use it.

    Raises:
        ValueError: the variable `JAX_TENSORARRAY_UNTESTED_JAX` has an unknown value.
    """
    global _has_looked
    if _has_looked:
        return
    choice = _environment.value_of(VARIABLE, ("warn", "ignore"), "warn")
    _has_looked = True
    if choice == "warn" and jax.__version_info__[:2] > NEWEST_TESTED:
        newest = ".".join(map(str, NEWEST_TESTED))
        warnings.warn(
            f"jax_tensorarray has been tested with jax up to {newest}, and this is jax {jax.__version__}. Results are "
            "as before, but some loops may be slow, and some errors may read differently. Install jax "
            f"{newest}, or set {VARIABLE}=ignore to silence this warning.",
            RuntimeWarning,
            stacklevel=_faults.level_of_user(),
        )
