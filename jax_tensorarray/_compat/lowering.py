"""The lowering rules of primitives, and a hook that rewrites every program before JAX lowers it."""

import functools
import importlib
import threading
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_tensorarray._compat.first_use import Replacement
from jax_tensorarray._compat.private import private_names


def lowers_its_bodies(primitive: Primitive) -> None:
    """Declare that the lowering of `primitive`, by `mlir.lower_fun`, lowers the jaxprs in its parameters.

    Since 0.11 functions such as `jnp.searchsorted` are primitives that JAX expands before the lowering. JAX refuses a
    primitive with such functions in its parameters without this declaration. Earlier versions have no such primitives.
    """
    primitive.is_high = lambda *_, **__: False  # type: ignore[method-assign]


def taken_apart(jaxpr: Any) -> Any:
    """Return a closed jaxpr without the primitives that JAX expands before the lowering, and without refs.

    `mlir.lower_fun` does the same with the jaxprs that it traces. Private. Without it JAX cannot lower such primitives
    and refs in a loop of this library.
    """
    if _lower_jaxpr and getattr(jaxpr.jaxpr, "is_high", False):
        jaxpr = _lower_jaxpr[0](jaxpr)
    if _discharge and _of_refs and any(isinstance(effect, _of_refs[0]) for effect in jaxpr.effects):
        jaxpr = _discharge[0](jaxpr)
    return jaxpr


_lower_jaxpr = private_names("interpreters.partial_eval", "lower_jaxpr2")
_discharge = private_names("interpreters.pxla", "_discharge_internal_refs")
_of_refs = private_names("core", "InternalMutableArrayEffect")


class Traceable(NamedTuple):
    """A function that JAX traces in the lowering of a primitive."""

    fun: Callable[..., Any]
    multiple_results: bool

    def traced(self, *args: Any, **params: Any) -> list[Any]:
        outs = self.fun(*args, **params)
        return list(outs) if self.multiple_results else [outs]


def traceable_lowerings(primitive: Primitive) -> dict[str, Traceable | None]:
    """Return the functions that JAX traces in the lowering of a primitive, by platform; "" is any other platform.

    The entry is None if the rule of a platform is not from `mlir.lower_fun`. The result is empty if the primitive has
    rules besides those for derivatives, batches and lowering. The tables of these rules are private, and so is the
    function in a rule. Without them `in_place` does not rewrite primitives of other libraries.
    """
    if _tables_of_lowerings is None or type(primitive) is not Primitive:
        return {}
    common, of_platforms, uncacheable = _tables_of_lowerings
    if primitive in uncacheable or any(primitive in table for table in _further_rules):
        return {}
    tables = {"": common, **of_platforms}
    return {name: _traced_by(table[primitive]) for name, table in tables.items() if primitive in table}


def traced_lowering(primitive: Primitive) -> Traceable | None:
    """Return the function that JAX traces in the lowering of a primitive on all platforms, or None without such."""
    if _tables_of_lowerings is None:
        return None
    common, of_platforms, _ = _tables_of_lowerings
    is_one = primitive in common and not any(primitive in table for table in of_platforms.values())
    return _traced_by(common[primitive]) if is_one else None


def _traced_by(entry: Any) -> Traceable | None:
    rule = getattr(entry, "rule", None)
    if not isinstance(rule, FunctionType) or rule.__code__ is not getattr(_made_by_lower_fun, "__code__", None):
        return None
    cells = (cell.cell_contents for cell in rule.__closure__ or ())
    values = dict(zip(rule.__code__.co_freevars, cells, strict=True))
    return Traceable(**values) if values.keys() == set(Traceable._fields) else None


#: Looked up once, because `in_place` needs it for every equation without a rule.
_tables_of_lowerings = private_names(
    "interpreters.mlir", "_lowerings", "_platform_specific_lowerings", "_uncacheable_primitives"
)

_made_by_lower_fun: Any = mlir.lower_fun(lambda: ())

#: The tables of rarer rules.
_further_rules = [
    table
    for module, *names in (
        ("interpreters.ad", "fancy_transposes"),
        ("interpreters.ad", "primitive_linearizations"),
        ("interpreters.ad", "reducing_transposes"),
        ("interpreters.partial_eval", "custom_partial_eval_rules"),
        ("interpreters.partial_eval", "partial_eval_jaxpr_custom_rules"),
        ("interpreters.partial_eval", "dce_rules"),
        ("interpreters.partial_eval", "const_fold_rules"),
        ("interpreters.partial_eval", "forwarding_rules"),
        ("interpreters.partial_eval", "custom_staging_rules"),
        ("interpreters.remat", "rules"),
        ("checkify", "error_checks"),
        ("state.discharge", "_discharge_rules"),
        ("core", "custom_typechecks"),
    )
    for table in private_names(module, *names) or ()
]


class _Lowering(threading.local):
    """The program that a thread lowers."""

    is_divided = False


_now = _Lowering()


def is_divided() -> bool:
    """Return whether the program that is being lowered now is for several devices."""
    return _now.is_divided


#: Maps a program to the one that JAX lowers instead.
Rewrite = Callable[[Any, Sequence[str], bool, bool, Sequence[Any] | None], Any]


def before_lowering(rewritten: Rewrite) -> list[Replacement]:
    """Return the patch that rewrites every program before JAX lowers it.

    `rewritten` gets the program, its platforms, whether JAX compiles it next, whether it is for several devices, and
    the shardings of the results, as far as JAX knows them.

    A lowering rule sees one operation of one function, but the order of reads and writes is a property of the whole
    program. Without this hook, a write that does not depend on an earlier read copies the buffer.
    """
    private = private_names("interpreters.mlir", "lower_jaxpr_to_module")
    if private is None:
        return []
    (original,) = private

    @functools.wraps(original)
    def lower(name: str, jaxpr: Any, **kwargs: Any) -> Any:
        exported = getattr(kwargs.get("lowering_parameters"), "for_export", True)
        divided, shardings = kwargs.get("num_partitions", 1) > 1, kwargs.get("result_shardings")
        was_divided, _now.is_divided = _now.is_divided, divided
        try:
            jaxpr = rewritten(jaxpr, kwargs.get("platforms", ()), not exported, divided, shardings)
            return original(name, jaxpr, **kwargs)
        finally:
            _now.is_divided = was_divided

    return [Replacement(importlib.import_module("jax._src.interpreters.mlir"), "lower_jaxpr_to_module", lower)]
