"""The passes over the jaxpr of a program, in order, and the targets that each pass applies to."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend import source_info_util

from jax_tensorarray import _compat, _faults
from jax_tensorarray._jaxprs import jaxprs
from jax_tensorarray._lowering import absolute
from jax_tensorarray._lowering.bounds import mark_those_in_range
from jax_tensorarray._lowering.branches import split_updating_branches
from jax_tensorarray._lowering.choice import default_lowering
from jax_tensorarray._lowering.columns import store_by_columns
from jax_tensorarray._lowering.deferred import raise_at_end
from jax_tensorarray._lowering.expand import expanded
from jax_tensorarray._lowering.fences import without_fences_in_loops
from jax_tensorarray._lowering.ordering import order_readers
from jax_tensorarray._lowering.record import check_by_record, drop_out_of_bounds
from jax_tensorarray._lowering.repeated import read_once
from jax_tensorarray._lowering.slices import use_slices
from jax_tensorarray._lowering.uses import mark_unordered
from jax_tensorarray._ops.calls import WITHOUT_KERNELS


class Target(NamedTuple):
    """The platform and the devices that JAX lowers a program for, as far as they are known."""

    #: The only platform, or None: we know how the installed XLA treats barriers and slices, but no other version.
    platform: str | None
    divided: bool  #: among several devices
    calls_nothing: bool  #: kernels cannot be called
    outside: Any  #: the source line that calls the program
    raises_at_end: bool = False  #: other devices might wait for one that raises before the end
    shardings: Sequence[Any] | None = None  #: how devices divide the results, as far as JAX knows
    platforms: Sequence[str] = ()  #: all platforms of the lowering

    @property
    def is_known(self) -> bool:
        return self.platform is not None

    @property
    def needs_opaque_zero(self) -> bool:
        return self.platform is not None and not _compat.barriers_hold(self.platform)


class Pass(NamedTuple):
    """A pass over a program, and the targets that it applies to."""

    name: str  #: of its file
    run: Callable[[Any, Target], Any]
    applies_to: Callable[[Target], bool] = lambda target: True


PASSES = (
    Pass("expand", lambda jaxpr, to: expanded(jaxpr, with_options=not to.divided, platforms=to.platforms)),
    Pass("fences", lambda jaxpr, to: without_fences_in_loops(jaxpr)),
    Pass("absolute", lambda jaxpr, to: absolute.write_out(jaxpr), lambda to: to.is_known),
    Pass(
        "bounds",
        lambda jaxpr, to: mark_those_in_range(jaxpr, keeps_selects=to.platform in ("cuda", "rocm")),
        lambda to: to.is_known or to.raises_at_end,
    ),
    Pass("repeated", lambda jaxpr, to: read_once(jaxpr), lambda to: to.is_known),
    Pass(
        "uses",
        lambda jaxpr, to: mark_unordered(jaxpr, to.platform, not to.needs_opaque_zero),
        lambda to: to.is_known,
    ),
    Pass("record", lambda jaxpr, to: drop_out_of_bounds(jaxpr), lambda to: to.is_known and to.calls_nothing),
    Pass(
        "record",
        lambda jaxpr, to: check_by_record(jaxpr, default_lowering(), to.outside, to.needs_opaque_zero),
        lambda to: to.is_known and not to.calls_nothing,
    ),
    Pass("branches", lambda jaxpr, to: split_updating_branches(jaxpr), lambda to: _compat.branches_are_steps()),
    Pass(
        "ordering",
        lambda jaxpr, to: order_readers(jaxpr, sinks=to.calls_nothing, barriers_hold=not to.needs_opaque_zero),
    ),
    Pass(
        "slices",
        lambda jaxpr, to: use_slices(jaxpr, platform=to.platform, divided=to.divided, outside=to.outside),
    ),
    Pass(
        "columns",
        lambda jaxpr, to: store_by_columns(jaxpr),
        lambda to: to.platform == "cpu",
    ),
    Pass(
        "deferred",
        lambda jaxpr, to: raise_at_end(jaxpr, to.shardings, to.outside),
        lambda to: to.raises_at_end,
    ),
)


def steps(jaxpr: Any, target: Target) -> Iterator[tuple[str, Any]]:
    """Yield the name of each pass for a target, and the program after the pass."""
    for each in PASSES:
        if each.applies_to(target):
            jaxpr = each.run(jaxpr, target)
            yield each.name, jaxpr


def rewritten(
    jaxpr: Any,
    platforms: Sequence[str] = (),
    is_compiled_next: bool = False,
    divided: bool = False,
    shardings: Sequence[Any] | None = None,
) -> Any:
    """Return the program that JAX then lowers for these platforms: the same one if it has no op of ours.

    If a pass fails, the program also stays the same. JAX then lowers each op to a call by itself, which checks its
    index. If a strict `in_place` is in the program, the failure is an error.
    """
    if not jaxprs.has_ours(jaxpr):
        return jaxpr
    target = target_of(platforms, is_compiled_next, divided, shardings)
    try:
        return [after for _, after in steps(jaxpr, target)][-1]
    except Exception as error:
        from jax_tensorarray._in_place import strictness  # it uses this module

        return _faults.instead(error, lambda: jaxpr, strict=strictness.is_marked(jaxpr))


def target_of(
    platforms: Sequence[str], is_compiled_next: bool, divided: bool = False, shardings: Sequence[Any] | None = None
) -> Target:
    """Return the target of a program that is called here."""
    platform = platforms[0] if len(platforms) == 1 else None
    if platform not in WITHOUT_KERNELS and (divided or not is_compiled_next):
        platform = None
    outside = _compat.frame_of(source_info_util.current())
    calls_nothing = not WITHOUT_KERNELS.isdisjoint(platforms)
    raises_at_end = divided and is_compiled_next and tuple(platforms) == ("cpu",)
    return Target(platform, divided, calls_nothing, outside, raises_at_end, shardings, platforms)
