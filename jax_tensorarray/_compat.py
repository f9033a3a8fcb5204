"""Every use of JAX's private API and every branch on its version, each with its reason.

Each function says what happens where the private name is missing: results never depend on it, only speed does.
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Literal, Primitive  # type: ignore[attr-defined]
from jax.extend.core import primitives as jax_primitives
from jax.interpreters import ad, mlir

# Neither has a public name. `hlo` makes operations of StableHLO, for lowering rules that are not made of JAX's own
# calls; `xla_client` is where XLA takes the rules by which it divides our calls among devices.
from jaxlib import xla_client
from jaxlib.mlir.dialects import stablehlo as hlo

Array = Any


def ffi_api_version() -> tuple[int, int] | None:
    """Return (major, minor) of XLA's FFI in the installed jaxlib, read from the header it ships."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or spec.origin is None:
        return None
    header = Path(spec.origin).parent / "include" / "xla" / "ffi" / "api" / "c_api.h"
    try:
        text = header.read_text()
    except OSError:
        return None
    found = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    if found[0] is None or found[1] is None:
        return None
    return int(found[0].group(1)), int(found[1].group(1))


def _private(module: str, *names: str) -> list[Any] | None:
    """Return those private names of JAX, or None if this version lacks one."""
    try:
        found = importlib.import_module(f"jax._src.{module}")
        return [getattr(found, name) for name in names]
    except (ImportError, AttributeError):
        return None


def cached(function: Callable[..., Any]) -> Callable[..., Any]:
    """Remember the results of a function of a jaxpr and hashable values, for as long as the jaxpr lives.

    JAX wraps its own transformations of jaxprs in this: it knows the settings that tracing depends on. Without it,
    derivatives of loops outside of jit are compiled in every call.
    """
    private = _private("util", "weakref_lru_cache")
    return function if private is None else private[0](function)


# --- in-place accumulation of cotangents -----------------------------------------------------------------------
#
# The transpose of a read adds one row to the cotangent of the buffer. An ordinary transpose rule returns a dense
# cotangent, which JAX adds to the running one: O(buffer) a read. `fancy_transposes` hands a rule the accumulators
# themselves. Without it the ordinary rule is used, and a loop that reads is quadratic under grad, as in plain JAX.


def register_accumulating_transpose(
    primitive: Primitive, accumulate: Callable[..., Array], dense: Callable[..., Sequence[Array | None]]
) -> None:
    """Transpose `primitive`, linear in its first operand, by updating the cotangent that is already there.

    `accumulate(running, ct, *rest, **params)` returns the running cotangent with this equation's share in it.
    """
    ad.primitive_transposes[primitive] = dense
    private = _private("interpreters.ad", "fancy_transposes", "ValAccum", "RefAccum")
    if private is None:
        return
    table: Any
    ValAccum: Any
    table, ValAccum, RefAccum = private

    class Deferred(ValAccum):  # type: ignore[misc]
        """An accumulator that has only rows so far: they wait for a dense cotangent to be added to, if one comes."""

        val: Any
        pending: list[Callable[[Array], Array]]

        def accum(self, x: Any) -> None:
            super().accum(x)
            if type(self.val) is not ad.Zero:
                self._settle()

        def freeze(self) -> Any:
            self._settle()
            return self.val

        def _settle(self) -> None:
            self.__class__ = ValAccum
            self.val = functools.reduce(lambda running, add: add(running), self.pending, ad.instantiate_zeros(self.val))
            del self.pending

    def transpose(ct: Array, target: Any, *rest: Array, **params: Any) -> None:
        if type(ct) is ad.Zero:
            return

        def add(running: Array) -> Array:
            return accumulate(running, ct, *rest, **params)

        if isinstance(target, RefAccum):
            ref = target.inst().ref
            ref[...] = add(ref[...])
        elif isinstance(target, ValAccum) and type(target.val) is not ad.Zero:
            target.val = add(target.val)
        elif isinstance(target, ValAccum):
            if not isinstance(target, Deferred):
                target.__class__ = Deferred
                target.pending = []
            target.pending.append(add)

    table[primitive] = transpose
    _accumulating.add(primitive)


_accumulating: set[Primitive] = set()


# Control flow transposes its body with fresh accumulators and adds the dense results to the running ones: again
# O(buffer) for a read inside a nested jit, a cond branch or an inner scan. The remedy needs no new transpose:
# a body that also *returns* a buffer it reads has a transpose that *starts* from that output's cotangent. So the
# rules below forward such inputs as extra outputs and pass the running cotangent as the cotangent of those.
# Without `fancy_transposes` they are not installed.


def opened(jaxpr: Any) -> Any:
    """Return the jaxpr without its consts: control flow of 0.10 holds a ClosedJaxpr; later ones are both in one."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def replaced(jaxpr: Any, **changes: Any) -> Any:
    """Return the jaxpr, closed or not, with other equations, inputs or outputs."""
    new = opened(jaxpr).replace(**changes)
    return new if opened(jaxpr) is jaxpr else jaxpr.replace(jaxpr=new)


def closed(jaxpr: Any) -> Any:
    """Return the jaxpr with its consts: before 0.11 some equations hold one without, and have no place for them."""
    return jaxpr if hasattr(jaxpr, "consts") else ClosedJaxpr(jaxpr, ())


def lifted(jaxpr: Any) -> tuple[Any, list[Array]]:
    """Return the jaxpr that takes its consts as its first inputs, and those consts."""
    inner = opened(jaxpr)
    if not jaxpr.consts:
        return jaxpr, []
    consts = list(jaxpr.consts)
    return closed(inner.replace(constvars=[], invars=[*inner.constvars, *inner.invars])), consts


def lowers_its_bodies(primitive: Primitive) -> None:
    """Say that the jaxprs in the parameters of `primitive` are lowered with it, as `mlir.lower_fun` does.

    Since 0.11 functions such as `jnp.searchsorted` are primitives that JAX takes apart before it lowers. It refuses a
    primitive with such functions in its parameters if the primitive does not say how. Earlier versions have no such
    primitives.
    """
    primitive.is_high = lambda *_, **__: False  # type: ignore[method-assign]


@cached
def known_part(jaxpr: Any, unknown: Sequence[bool], forced: Sequence[bool] = ()) -> tuple[Any, list[bool]]:
    """Return the jaxpr of what does not depend on unknown inputs, and which outputs it lacks: the `forced` ones too.

    Public since 0.11. Without it everything is unknown, and loops may demand a max_steps that they do not need.
    """
    private = _private("interpreters.partial_eval", "partial_eval_jaxpr_nounits")
    if private is None:
        return jaxpr, [True] * len(jaxpr.out_avals)
    known, _, unknown_outs, *_ = private[0](jaxpr, list(unknown), list(forced) or False)
    inner = opened(known)
    outvars = inner.outvars[: len(unknown_outs) - sum(unknown_outs)]  # the others are for the unknown part
    return replaced(known, outvars=outvars, debug_info=inner.debug_info.with_unknown_names()), list(unknown_outs)


def checked_as(primitive: Primitive, run: Callable[..., Any]) -> None:
    """Let `checkify` look for errors in what `primitive` runs: `run(*operands, **params)`.

    There is no public way to say so. Without it checkify finds no error in our loops.
    """
    private = _private("checkify", "error_checks", "checkify_jaxpr")
    if private is None:
        return
    rules, check = private

    def rule(*args: Any, **params: Any) -> Any:
        # Before the operands come the error and what is enabled, and since 0.11 the numbers of errors before these.
        first = 1 + next(k for k, x in enumerate(args) if isinstance(x, frozenset))
        *numbers, error, enabled = args[:first]
        jaxpr = jax.make_jaxpr(functools.partial(run, **params))(*map(jax.typeof, args[first:]))
        return check(*numbers, jaxpr, enabled, error, *args[first:])

    rules[primitive] = rule


_source_info = _private("source_info_util", "user_context", "current_name_stack", "current")


def at_source_of(eqn: Any) -> Any:
    """Return a context in which what is traced has the place in the source of an equation.

    Private. Without it the result of a loop or `in_place` seems to come from where these are called.
    """
    if _source_info is None:
        return contextlib.nullcontext()
    user_context, current_name_stack, _ = _source_info
    info = eqn.source_info
    return user_context(info.traceback, name_stack=current_name_stack() + info.name_stack)


def source_here() -> Callable[[], Any]:
    """Remember where the user is: return a function that gives a context for tracing at that place in the source.

    JAX keeps the innermost frames of a stack: deep in a loop, none of the user's. Private. Without it a loop has no
    line.
    """
    if _source_info is None:
        return contextlib.nullcontext
    user_context, _, current = _source_info
    return functools.partial(user_context, current().traceback)


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Return (number of consts, number of carries) of a scan; 0.11 and later keep them as the shapes of trees."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def _bodies(eqn: Any) -> list[tuple[Any, int]]:
    """Return (jaxpr, position of its first input in eqn.invars) of each body whose transpose forwards accumulators."""
    if eqn.primitive is jax_primitives.cond_p:
        return [(opened(branch), 1) for branch in eqn.params["branches"]]
    if eqn.primitive in (jax_primitives.jit_p, jax_primitives.scan_p, jax_primitives.remat_p):
        return [(opened(eqn.params["jaxpr"]), 0)]
    return []


def _accumulated_inputs(jaxpr: Any) -> frozenset[int]:
    """Return the positions of the inputs of `jaxpr` into whose cotangent an accumulating primitive adds in place."""
    position = {id(v): k for k, v in enumerate(jaxpr.invars)}
    found = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive in _accumulating:
            found.add(position.get(id(eqn.invars[0])))
        for body, first in _bodies(eqn):
            found |= {position.get(id(eqn.invars[k + first])) for k in _accumulated_inputs(body)}
    return frozenset(found - {None})  # type: ignore[arg-type]


def _forwarding(jaxpr: Any, inputs: Sequence[int]) -> Any:
    """Return `jaxpr` with those inputs returned as further outputs."""
    inner = opened(jaxpr)
    outvars = [*inner.outvars, *(inner.invars[k] for k in inputs)]
    return replaced(jaxpr, outvars=outvars, debug_info=inner.debug_info.with_unknown_names())


def install_forwarding_transposes() -> None:
    """Let reads inside nested jit, cond, scan and checkpoint accumulate into the cotangent outside."""
    private = _private("interpreters.ad", "fancy_transposes", "ValAccum")
    caching = _private("util", "weakref_lru_cache")
    unspecified = _private("sharding_impls", "UNSPECIFIED")
    if private is None or caching is None or unspecified is None:
        return
    table, ValAccum = private
    (weakref_lru_cache,) = caching
    (UNSPECIFIED,) = unspecified

    accumulated_inputs = weakref_lru_cache(_accumulated_inputs)
    # The transposed bodies are cached by jaxpr identity, so the augmented jaxpr must be the same object each time.
    forwarding = weakref_lru_cache(_forwarding)

    def seeds(cts: Sequence[Any], args: Sequence[Any], inputs: Sequence[int]) -> list[int]:
        """Return the inputs whose running cotangent is a value to start from, unless there is nothing to transpose."""
        if all(type(ct) is ad.Zero for ct in cts):
            return []
        return [k for k in inputs if isinstance(args[k], ValAccum) and type(args[k].val) is not ad.Zero]

    def take(args: Sequence[Any], hot: Sequence[int]) -> list[Any]:
        taken = [args[k].val for k in hot]
        for k in hot:
            args[k].val = ad.Zero(args[k].aval)
        return taken

    def wrap_call(primitive: Primitive, extend: Callable[[dict[str, Any], int], dict[str, Any]]) -> None:
        original = table[primitive]

        def transpose(cts: Sequence[Array], *args: Any, jaxpr: Any, **params: Any) -> Any:
            hot = seeds(cts, args, sorted(accumulated_inputs(opened(jaxpr))))
            if hot:
                jaxpr, params = forwarding(jaxpr, tuple(hot)), extend(params, len(hot))
                cts = [*cts, *take(args, hot)]
            return original(cts, *args, jaxpr=jaxpr, **params)

        table[primitive] = transpose

    def extend_jit(params: dict[str, Any], n: int) -> dict[str, Any]:
        return params | {
            "out_shardings": (*params["out_shardings"], *[UNSPECIFIED] * n),
            "out_layouts": (*params["out_layouts"], *[None] * n),
        }

    def wrap_cond() -> None:
        original = table[jax_primitives.cond_p]

        def transpose(cts: Sequence[Array], *args: Any, branches: Sequence[Any], **params: Any) -> Any:
            read = frozenset().union(*(accumulated_inputs(opened(b)) for b in branches))
            hot = seeds(cts, args, sorted(k + 1 for k in read))
            if hot:
                branches = tuple(forwarding(b, tuple(k - 1 for k in hot)) for b in branches)
                cts = [*cts, *take(args, hot)]
            return original(cts, *args, branches=branches, **params)

        table[jax_primitives.cond_p] = transpose

    def const_to_carry(jaxpr: Any, hot: tuple[int, ...], num_consts: int, num_carry: int) -> Any:
        """Return the body of a scan with those consts as its last carries, returned unchanged."""
        inner = opened(jaxpr)
        moved = [inner.invars[k] for k in hot]
        consts = [v for k, v in enumerate(inner.invars[:num_consts]) if k not in hot]
        carry, xs = inner.invars[num_consts : num_consts + num_carry], inner.invars[num_consts + num_carry :]
        outs, ys = inner.outvars[:num_carry], inner.outvars[num_carry:]
        return replaced(
            jaxpr,
            invars=[*consts, *carry, *moved, *xs],
            outvars=[*outs, *moved, *ys],
            debug_info=inner.debug_info.with_unknown_names(),
        )

    cached_const_to_carry = weakref_lru_cache(const_to_carry)

    def rescan(params: dict[str, Any], args: Sequence[Any], moved: int) -> dict[str, Any]:
        """Return the parameters of a scan that has `moved` of its consts as carries instead."""
        num_consts, num_carry = scan_counts(params)
        if "num_consts" in params:
            return params | {"num_consts": num_consts - moved, "num_carry": num_carry + moved}
        from jax._src import flattree as ft  # there since 0.11, with ft_in

        num_ys = len(opened(params["jaxpr"]).outvars) - num_carry
        num_xs = len(args) - num_consts - num_carry
        return params | {
            "ft_in": ft.pack((ft.nones(num_consts - moved), ft.nones(num_carry + moved), ft.nones(num_xs))),
            "ft_out": ft.pack((ft.nones(num_carry + moved), ft.nones(num_ys))),
        }

    def wrap_scan() -> None:
        original = table[jax_primitives.scan_p]

        def transpose(cts: Sequence[Array], *args: Any, **params: Any) -> Any:
            num_consts, num_carry = scan_counts(params)
            inner = opened(params["jaxpr"])
            hot = seeds(cts, args, sorted(k for k in accumulated_inputs(inner) if k < num_consts))
            if not hot:
                return original(cts, *args, **params)
            jaxpr = cached_const_to_carry(params["jaxpr"], tuple(hot), num_consts, num_carry)
            cts = [*cts[:num_carry], *take(args, hot), *cts[num_carry:]]
            rest = [a for k, a in enumerate(args) if k not in hot]
            split = num_consts - len(hot) + num_carry
            moved = [*rest[:split], *(args[k] for k in hot), *rest[split:]]
            return original(cts, *moved, **rescan(params, args, len(hot)) | {"jaxpr": jaxpr})

        table[jax_primitives.scan_p] = transpose

    wrap_call(jax_primitives.jit_p, extend_jit)
    wrap_call(jax_primitives.remat_p, lambda params, n: params)
    wrap_cond()
    wrap_scan()


# --- a pass over the lowered module ----------------------------------------------------------------------------


def can_rewrite_modules() -> bool:
    """Return whether `run_after_lowering` does what it says."""
    return _private("interpreters.mlir", "lower_jaxpr_to_module") is not None


def run_after_lowering(rewrite: Callable[[mlir.ir.Module, Sequence[str], bool], None]) -> None:
    """Call `rewrite` on every module that JAX lowers, before it is compiled or exported.

    Its further arguments are the platforms that the module is for, and whether JAX compiles it next.

    A lowering rule sees one operation of one function; the order of reads and writes of a buffer is a matter of
    whole modules. Without this hook, a write that does not depend on an earlier read copies the buffer.
    """
    private = _private("interpreters.mlir", "lower_jaxpr_to_module")
    if private is None:
        return
    (original,) = private

    @functools.wraps(original)
    def lower(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        exported = getattr(kwargs.get("lowering_parameters"), "for_export", True)
        rewrite(result.module, kwargs.get("platforms", ()), not exported)
        return result

    importlib.import_module("jax._src.interpreters.mlir").lower_jaxpr_to_module = lower  # type: ignore[attr-defined]


#: Who wants to know of what JAX compiles, and what has been put aside for that.
_watchers: list[Callable[[str, Any, Any], None]] = []
_unwatched: list[tuple[Any, str, Any]] = []
_watching = threading.Lock()


@contextlib.contextmanager
def compilations(seen: Callable[[str, Any, Any], None]) -> Iterator[None]:
    """Call `seen(name, jaxpr, executable)` for every program that JAX compiles meanwhile, in any thread.

    There is no public way to look at what other code has compiled. Without these names it raises NotImplementedError.
    The jaxpr is None where JAX had lowered the program before.
    """
    with _watching:
        if not _watchers:
            _watch_compilations()
        _watchers.append(seen)
    try:
        yield
    finally:
        with _watching:
            _watchers.remove(seen)
            while _unwatched and not _watchers:
                setattr(*_unwatched.pop())


def _watch_compilations() -> None:
    lowering, compiling = (importlib.import_module(f"jax._src.{name}") for name in ("interpreters.mlir", "compiler"))
    lower = getattr(lowering, "lower_jaxpr_to_module", None)
    compile_ = getattr(compiling, "compile_or_get_cached", None)
    if lower is None or compile_ is None:
        raise NotImplementedError(f"jax {jax.__version__} does not tell what it compiles")
    lowered: dict[int, tuple[Any, Any]] = {}  # with the module, so that no other one gets its number

    @functools.wraps(lower)
    def lower_and_keep(name: str, jaxpr: Any, *args: Any, **kwargs: Any) -> Any:
        result = lower(name, jaxpr, *args, **kwargs)
        lowered[id(result.module)] = (result.module, jaxpr)
        return result

    @functools.wraps(compile_)
    def compile_and_tell(backend: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        executable = compile_(backend, module, *args, **kwargs)
        name = mlir.ir.StringAttr(module.operation.attributes["sym_name"]).value
        _, jaxpr = lowered.pop(id(module), (None, None))
        for seen in tuple(_watchers):
            seen(name, None if jaxpr is None else closed(jaxpr), executable)
        return executable

    for owner, name, wrapped in (
        (lowering, "lower_jaxpr_to_module", lower_and_keep),
        (compiling, "compile_or_get_cached", compile_and_tell),
    ):
        _unwatched.append((owner, name, getattr(owner, name)))
        setattr(owner, name, wrapped)


def barriers_hold(platform: str) -> bool:
    """Return whether XLA keeps optimization barriers until memory is assigned, so that they order reads and writes.

    Before jaxlib 0.12 the CPU compiler drops them first. The compilers for GPUs and TPUs have kept them since 0.10.2 at
    least.
    """
    return platform in ("cuda", "rocm", "tpu") or (platform == "cpu" and jaxlib.version.__version_info__ >= (0, 12))


# --- types -----------------------------------------------------------------------------------------------------


def varying_axes(x: Any) -> frozenset[Any]:
    """Return the manual axes of a mesh, in `shard_map`, over which `x` differs from device to device.

    The attribute of the type is documented, its name is not. Without it, `shard_map` needs `check_vma=False`.
    """
    manual = getattr(jax.typeof(x), "mat", None)
    return getattr(manual, "varying", frozenset())


# --- refs ------------------------------------------------------------------------------------------------------


def makes_refs(x: Any) -> bool:
    """Return whether a jaxpr or an equation makes and drops refs. Private. Without it `in_place` leaves them."""
    private = _private("core", "InternalMutableArrayEffect")
    return private is not None and any(isinstance(effect, private[0]) for effect in x.effects)


def discharged(jaxpr: Any) -> Any:
    """Return the same closed jaxpr with those refs as arrays, as JAX has it before it compiles.

    Private. Without it `in_place` leaves refs.
    """
    private = _private("state.discharge", "discharge_state")
    return jaxpr if private is None else private[0](jaxpr, should_discharge=False, lower=False)


def writes_refs(eqn: Any) -> list[bool]:
    """Return which operands of an equation are refs that it writes. The names in its effects are private."""
    written = {effect.input for effect in eqn.effects if getattr(effect, "name", "") in ("Write", "Accum")}
    return [not isinstance(v, Literal) and v in written for v in eqn.invars]


# --- where we are ----------------------------------------------------------------------------------------------


def hide_own_frames() -> None:
    """Have JAX pass over the frames of this package as over its own: in source locations and in tracebacks.

    Our hooks are below every program that is lowered, and would be the innermost line of each of its functions. Without
    the second, private name our frames stay in the tracebacks that JAX filters.
    """
    package = os.path.dirname(__file__)
    source_info_util.register_exclusion(package + os.sep)
    private = _private("traceback_util", "register_exclusion")
    if private is not None:
        private[0](package)


def is_differentiated(x: Any) -> bool:
    """Return whether a derivative is being taken right now with respect to `x`, or to a value that `x` is made of.

    The tracer of reverse mode is private. Without it `in_place` repairs loops only after they have been differentiated
    in reverse, and leaves some of the loops that differentiation makes.
    """
    return isinstance(x, ad.JVPTracer if _linearize_tracer is None else (ad.JVPTracer, *_linearize_tracer))


_linearize_tracer = _private("interpreters.ad", "LinearizeTracer")


def executes_eagerly() -> bool:
    """Return whether an operation on concrete arrays is run right now, rather than recorded by a transformation.

    Only then may a TensorArray be updated in place outside of `jit`. Without this knowledge such writes copy.
    """
    return _trace_state_clean is not None and bool(_trace_state_clean[0]())


_trace_state_clean = _private("core", "trace_state_clean")


def flattened_by_control_flow() -> bool:
    """Return whether `lax.scan`, `while_loop`, `cond` or one of their kin called the pytree rule that calls this.

    It serves an error message only: otherwise users would read of two pytrees that differ in their metadata.
    """
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith((__package__, "jax._src.tree_util", "jax._src.flattree", "jax._src.api_util")):
            return module.startswith("jax._src.lax.control_flow")
        frame = frame.f_back
    return False


__all__ = [
    "barriers_hold",
    "cached",
    "checked_as",
    "closed",
    "compilations",
    "executes_eagerly",
    "ffi_api_version",
    "flattened_by_control_flow",
    "hide_own_frames",
    "hlo",
    "install_forwarding_transposes",
    "is_differentiated",
    "known_part",
    "lifted",
    "lowers_its_bodies",
    "opened",
    "register_accumulating_transpose",
    "run_after_lowering",
    "scan_counts",
    "varying_axes",
    "xla_client",
]
