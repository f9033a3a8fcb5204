"""What JAX has under one name or another, or only in private."""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, NamedTuple

import jax
import jaxlib.version
from jax.core import ShapedArray
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Literal, Primitive, primitives  # type: ignore[attr-defined]
from jax.interpreters import ad, mlir

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


def private_names(module: str, *names: str) -> list[Any] | None:
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
    private = private_names("util", "weakref_lru_cache")
    return function if private is None else private[0](function)


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


def closed_over(traced: Any) -> list[Array]:
    """Return the tracers that a traced function has closed over, which are its first operands.

    No public name gives them. Without it `in_place` leaves such a function as it is.
    """
    return list(getattr(traced, "_consts", ()))


def lowers_its_bodies(primitive: Primitive) -> None:
    """Say that the jaxprs in the parameters of `primitive` are lowered with it, as `mlir.lower_fun` does.

    Since 0.11 functions such as `jnp.searchsorted` are primitives that JAX takes apart before it lowers. It refuses a
    primitive with such functions in its parameters if the primitive does not say how. Earlier versions have no such
    primitives.
    """
    primitive.is_high = lambda *_, **__: False  # type: ignore[method-assign]


class Traceable(NamedTuple):
    """A function that JAX traces when it lowers a primitive."""

    fun: Callable[..., Any]
    multiple_results: bool

    def traced(self, *args: Any, **params: Any) -> list[Any]:
        outs = self.fun(*args, **params)
        return list(outs) if self.multiple_results else [outs]


def traceable_lowerings(primitive: Primitive) -> dict[str, Traceable | None]:
    """Return what JAX traces when it lowers a primitive, by platform; "" is any other platform.

    It is None if the rule of a platform is not made by `mlir.lower_fun`. There is nothing if the primitive has rules
    besides those for derivatives, batches and lowering. Where JAX keeps these rules, and a rule its function, is
    private. Without it `in_place` does not look into primitives of other libraries.
    """
    if _tables_of_lowerings is None or type(primitive) is not Primitive:
        return {}
    common, of_platforms, uncacheable = _tables_of_lowerings
    if primitive in uncacheable or any(primitive in table for table in _further_rules):
        return {}
    tables = {"": common, **of_platforms}
    return {name: _traced_by(table[primitive]) for name, table in tables.items() if primitive in table}


def _traced_by(entry: Any) -> Traceable | None:
    rule = getattr(entry, "rule", None)
    if not isinstance(rule, FunctionType) or rule.__code__ is not getattr(_made_by_lower_fun, "__code__", None):
        return None
    cells = (cell.cell_contents for cell in rule.__closure__ or ())
    held = dict(zip(rule.__code__.co_freevars, cells, strict=True))
    return Traceable(**held) if held.keys() == set(Traceable._fields) else None


#: Looked up once: this is asked of every equation that `in_place` has no rule for.
_tables_of_lowerings = private_names(
    "interpreters.mlir", "_lowerings", "_platform_specific_lowerings", "_uncacheable_primitives"
)

_made_by_lower_fun: Any = mlir.lower_fun(lambda: ())

#: The tables of rules that few primitives have.
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


@cached
def known_part(jaxpr: Any, unknown: Sequence[bool], forced: Sequence[bool] = ()) -> tuple[Any, list[bool]]:
    """Return the jaxpr of what does not depend on unknown inputs, and which outputs it lacks: the `forced` ones too.

    Public since 0.11. Without it everything is unknown, and loops may demand a max_steps that they do not need.
    """
    private = private_names("interpreters.partial_eval", "partial_eval_jaxpr_nounits")
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
    private = private_names("checkify", "error_checks", "checkify_jaxpr")
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


def checked_besides(
    primitive: Primitive,
    checks: Callable[..., None],
    params_then: Callable[[Any, Sequence[Array], Any], Any] = lambda enabled, operands, params: params,
) -> None:
    """Let `checkify` look for errors in what `checks(enabled, *operands, **params)` runs, whose results are not used.

    `enabled` is what the user has it look for. The primitive itself is bound with what `params_then(enabled, operands,
    params)` returns. There is no public way to say so. Without it checkify finds no index that is out of range.
    """
    private = private_names("checkify", "error_checks", "checkify_jaxpr")
    if private is None:
        return
    rules, check = private

    def rule(*args: Any, **params: Any) -> Any:
        first = 1 + next(k for k, x in enumerate(args) if isinstance(x, frozenset))
        (*numbers, error, enabled), operands = args[:first], args[first:]
        run = functools.partial(checks, enabled, **params)
        jaxpr = jax.make_jaxpr(lambda *operands: run(*operands))(*map(jax.typeof, operands))
        error, _ = check(*numbers, jaxpr, enabled, error, *operands)
        return error, primitive.bind(*operands, **params_then(enabled, operands, params))

    rules[primitive] = rule


def expanded_as(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Let `jax.experimental.jet` expand `primitive` by `rule(primals, series, **params)`.

    The module is public, its table of rules is not documented. Without it jet knows none of our ops.
    """
    if _jet_rules is not None:
        _jet_rules[primitive] = rule


try:
    from jax.experimental import jet as _jet

    _jet_rules: dict[Primitive, Any] | None = getattr(_jet, "jet_rules", None)
except ImportError:
    _jet_rules = None


# --- checkpoints -----------------------------------------------------------------------------------------------


def asks_policies(primitive: Primitive) -> None:
    """Have `jax.checkpoint` ask its policy whether to save the results of `primitive`.

    What JAX will use for it next, and uses now if JAX_REMAT3 is set, asks only about primitives that have a rule in
    a private table. Without it `save_reads` saves nothing under that setting, and each step keeps whole buffers.
    """
    private = private_names("interpreters.remat", "rules", "reduce_precision")
    merging = private_names("ad_checkpoint", "primal_left_tangent_right")
    if private is None or merging is None:
        return
    rules, reduce_precision = private
    (with_tangent_of,) = merging

    def rule(trace: Any, *operands: Array, **params: Any) -> Any:
        run = functools.partial(primitive.bind, **params)
        results = run(*operands)
        policy = getattr(trace, "policy", trace)  # 0.10 passes the policy itself
        decision = policy is not None and policy(primitive, *map(jax.typeof, operands), **params)
        kept: Any = ()
        if decision is True or type(decision).__name__ == "SaveableType":
            kept = results = jax.tree.map(reduce_precision, results)

        def again(kept: Any, *operands: Array) -> Any:
            made = run(*operands)
            return made if isinstance(kept, tuple) and not kept else jax.tree.map(with_tangent_of, kept, made)

        if jax.__version_info__ < (0, 12):
            return results, functools.partial(again, kept)
        return results, kept, again

    rules[primitive] = rule


#: The name of the primitive that `jax.checkpoint` makes. Under JAX_REMAT3 it is "call_hi_primitive", for others too.
CHECKPOINT = primitives.remat_p.name


def checkpoint_of(params: dict[str, Any]) -> tuple[Any, Any, bool | tuple[bool, ...]] | None:
    """Return the jaxpr, the policy and `prevent_cse` of a checkpoint from its parameters; None if it is none.

    Under JAX_REMAT3 they are attributes of an object, which has no `prevent_cse` before 0.11.
    """
    params = vars(params["_prim"]) if "_prim" in params else params
    if "jaxpr" not in params or "policy" not in params:
        return None
    return params["jaxpr"], params["policy"], params.get("prevent_cse", True)


class CustomVJPRules:
    """The rules of a `custom_vjp` call. Zeros are `SymbolicZero`s for those that ask what has derivatives.

    `jax.vjp` of the call would refuse cotangents of another dtype than the results', which JAX passes on between rules.

    Private: how JAX calls them. Without it such a call stays as it is.
    """

    def __init__(self, eqn: Any) -> None:
        params = eqn.primitive.get_bind_params(eqn.params)
        (_, self._forward, self._backward), self._trees = params["subfuns"], params["out_trees"]

    def forward(self, primals: Sequence[Array], has_tangent: Sequence[bool]) -> tuple[list[Array], list[Array]]:
        """Return the results and what `backward` is to have."""
        found = list(self._forward.call_wrapped(*itertools.chain(*zip(primals, has_tangent, strict=True))))
        _, tree, passed_on = self._trees()
        num_made = tree.num_leaves - sum(k is not None for k in passed_on)
        made, outs = iter(found[:num_made]), found[num_made:]
        return outs, [next(made) if k is None else primals[k] for k in passed_on]

    def backward(self, kept: Sequence[Array], cts: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return the cotangents of the operands, and what the rule logs. Some of the cotangents are symbolic zeros."""
        found = self._backward.call_wrapped(*kept, *cts)
        cts, log = found if isinstance(found, tuple) else (found, None)  # from 0.11 on a log follows them
        return list(cts), log


def custom_vjp_rules(eqn: Any) -> CustomVJPRules | None:
    """Return the rules of a `custom_vjp` call; None if JAX calls them in another way."""
    try:
        rules = CustomVJPRules(eqn)
    except (AttributeError, KeyError, ValueError):
        return None
    # A rule that is given accumulators is also a function of cotangents, but as such does not know which are wanted.
    takes_accumulators = hasattr(getattr(rules._backward, "f", None), "call_with_accums")
    return None if takes_accumulators and eqn.params["symbolic_zeros"] else rules


def define_vjp(f: Any, forward: Callable[..., Any], backward: Callable[..., tuple[Any, Any]]) -> None:
    """Set the rules of a `custom_vjp`, which ask what has derivatives. `backward` returns cotangents and a log.

    JAX has such logs since 0.12.
    """
    if hasattr(f, "defvjp_with_logs"):
        f.defvjp_with_logs(forward, backward, symbolic_zeros=True)
    else:
        f.defvjp(forward, lambda *args: backward(*args)[0], symbolic_zeros=True)


def log_of(pull: Any, cts: Any) -> dict[str, Any]:
    """Return what rules of `custom_vjp`s log while `pull`, made by `jax.vjp`, is applied. JAX has logs since 0.12."""
    return dict(pull.with_logs(cts)[1]) if hasattr(pull, "with_logs") else {}


_source_info = private_names("source_info_util", "user_context", "current_name_stack", "current", "is_user_filename")


def at_source_of(eqn: Any) -> Any:
    """Return a context in which what is traced has the place in the source of an equation.

    In the functions that JAX jits itself, such as `jnp.where`, equations have no line of the user's. They keep that of
    the call, which is where we are. Private. Without it the result of a loop or `in_place` seems to come from where
    these are called.
    """
    if _source_info is None:
        return contextlib.nullcontext()
    user_context, current_name_stack, current, is_users = _source_info
    info = eqn.source_info
    codes, _ = info.traceback.raw_frames() if info.traceback else ((), ())
    is_known = any(is_users(code.co_filename) for code in codes)
    return user_context(
        info.traceback if is_known else current().traceback, name_stack=current_name_stack() + info.name_stack
    )


def source_here() -> Callable[[], Any]:
    """Remember where the user is: return a function that gives a context for tracing at that place in the source.

    JAX keeps the innermost frames of a stack: deep in a loop, none of the user's. Private. Without it a loop has no
    line.
    """
    if _source_info is None:
        return contextlib.nullcontext
    user_context, _, current, _ = _source_info
    return functools.partial(user_context, current().traceback)


# --- a pass over the lowered module ----------------------------------------------------------------------------


def can_rewrite_modules() -> bool:
    """Return whether `run_after_lowering` does what it says."""
    return private_names("interpreters.mlir", "lower_jaxpr_to_module") is not None


def run_after_lowering(rewrite: Callable[[mlir.ir.Module, Sequence[str], bool], None]) -> None:
    """Call `rewrite` on every module that JAX lowers, before it is compiled or exported.

    Its further arguments are the platforms that the module is for, and whether JAX compiles it next.

    A lowering rule sees one operation of one function; the order of reads and writes of a buffer is a matter of
    whole modules. Without this hook, a write that does not depend on an earlier read copies the buffer.
    """
    private = private_names("interpreters.mlir", "lower_jaxpr_to_module")
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


def name_of_function(jaxpr: Any) -> str:
    """Return the name of the function that was traced, which is not documented. Without it the result is empty."""
    return getattr(getattr(opened(jaxpr), "debug_info", None), "func_name", None) or ""


#: Who counts calls, and what was there before they did.
_callers: list[Callable[[Any, Any, Any], None]] = []
_hook_before: list[Any] = []


def each_call(called: Callable[[Any, Any, Any], None]) -> Callable[[], None]:
    """Call `called(function, args, kwargs)` after every call of a compiled function, until the result is called.

    The first call of each program, which compiles it, is left out. JAX makes the others without Python, and has a hook
    behind them for its own search for NaNs, which is private. It takes less than a microsecond. Without it nothing is
    counted. To ask again puts the hook back that `jax.debug_nans` has replaced.
    """
    private = private_names("api", "_post_hook_state")
    if private is None or not all(hasattr(private[0], f"{x}_{y}") for x in ("get", "set") for y in ("global", "local")):
        return lambda: None
    (hook,) = private

    def end() -> None:
        with _watching:
            if called in _callers:
                _callers.remove(called)
            if not _callers and _hook_before:
                hook.set_global(_hook_before.pop())
                if hook.get_local() is _tell_of_call:
                    hook.set_local(None)

    with _watching:
        if called not in _callers:
            _callers.append(called)
        if not _hook_before:
            _hook_before.append(hook.get_global())
            hook.set_global(_tell_of_call)
        if hook.get_local() is None:  # a thread that has left `jax.debug_nans` has this, which hides the global one
            hook.set_local(_tell_of_call)
    return end


def _tell_of_call(function: Any, args: Any, kwargs: Any, results: Any) -> None:
    for caller in _callers:
        try:  # noqa: SIM105  # the program goes on; `contextlib.suppress` would take longer than all else
            caller(function, args, kwargs)
        except Exception:
            pass
    if _hook_before and _hook_before[0] is not None:
        _hook_before[0](function, args, kwargs, results)


def barriers_hold(platform: str) -> bool:
    """Return whether XLA keeps optimization barriers until memory is assigned, so that they order reads and writes.

    Before jaxlib 0.12 the CPU compiler drops them first. The compilers for GPUs and TPUs have kept them since 0.10.2 at
    least.
    """
    return platform in ("cuda", "rocm", "tpu") or (platform == "cpu" and jaxlib.version.__version_info__ >= (0, 12))


def small_loops_are_quadratic() -> bool:
    """Return whether XLA for CPUs makes a whole buffer anew in every step of a small loop (jax#40101)."""
    is_avoided = "xla_cpu_small_while_loop_byte_threshold=" in os.environ.get("XLA_FLAGS", "")
    return jaxlib.version.__version__ == "0.11.1" and not is_avoided


# --- types -----------------------------------------------------------------------------------------------------


def varying_axes(x: Any) -> frozenset[Any]:
    """Return the manual axes of a mesh, in `shard_map`, over which `x`, or an array of this type, differs.

    The attribute of the type is documented, its name is not. Without it, `shard_map` needs `check_vma=False`.
    """
    manual = getattr(x if isinstance(x, ShapedArray) else jax.typeof(x), "mat", None)
    return getattr(manual, "varying", frozenset())


def varying_over_batches(x: Array) -> Array:
    """Return a batched operand of a batching rule, varying over the axes of `spmd_axis_name` of a `vmap`.

    JAX's own rules do so in private. Without it a `shard_map` under such a `vmap` needs `check_vma=False`.
    """
    return x if _insert_pvary is None else _insert_pvary[0](x)[0]


_insert_pvary = private_names("interpreters.batching", "spmd_names_insert_pvary")


# --- effects ---------------------------------------------------------------------------------------------------


def has_callbacks(jaxpr: Any) -> bool:
    """Return whether evaluating a jaxpr once more would be seen: it has effects other than those on its refs.

    The types of effects are private; those of refs say which input they belong to, and those of named axes are none.
    """
    return any(not hasattr(e, "input") and type(e).__name__ != "NamedAxisEffect" for e in jaxpr.effects)


def has_ordered_effects(jaxpr: Any) -> bool:
    """Return whether a jaxpr has effects that happen in their order. Only the name of an effect says so in public."""
    return any(str(effect).startswith("Ordered") for effect in jaxpr.effects)


# --- refs ------------------------------------------------------------------------------------------------------


def makes_refs(x: Any) -> bool:
    """Return whether a jaxpr or an equation makes and drops refs. Private. Without it `in_place` leaves them."""
    private = private_names("core", "InternalMutableArrayEffect")
    return private is not None and any(isinstance(effect, private[0]) for effect in x.effects)


def discharged(jaxpr: Any) -> Any:
    """Return the same closed jaxpr with those refs as arrays, as JAX has it before it compiles.

    Private. Without it `in_place` leaves refs.
    """
    private = private_names("state.discharge", "discharge_state")
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
    package = os.path.dirname(os.path.dirname(__file__))
    source_info_util.register_exclusion(package + os.sep)
    private = private_names("traceback_util", "register_exclusion")
    if private is not None:
        private[0](package)


def is_differentiated(x: Any) -> bool:
    """Return whether a derivative is being taken right now with respect to `x`, or to a value that `x` is made of.

    The tracer of reverse mode is private. Without it `in_place` repairs loops only after they have been differentiated
    in reverse, and leaves some of the loops that differentiation makes.
    """
    return isinstance(x, ad.JVPTracer if _linearize_tracer is None else (ad.JVPTracer, *_linearize_tracer))


_linearize_tracer = private_names("interpreters.ad", "LinearizeTracer")


def maker_of(x: Any) -> Any:
    """Return the equation that has made a traced array, None if that is not known.

    It is private. Without it two arrays of zeros are not seen to be equal.
    """
    return getattr(x, "parent", None) if isinstance(x, _jit_tracer) else None


def operands_of(maker: Any) -> list[Any]:
    """Return the operands of an equation that `maker_of` has found: arrays, and numbers as they are."""
    return [x.full_lower() for x in maker.in_tracers]


_jit_tracer = tuple(private_names("interpreters.partial_eval", "DynamicJaxprTracer") or ())


def executes_eagerly() -> bool:
    """Return whether an operation on concrete arrays is run right now, rather than recorded by a transformation.

    Only then may a TensorArray be updated in place outside of `jit`. Without this knowledge such writes copy.
    """
    return _trace_state_clean is not None and bool(_trace_state_clean[0]())


_trace_state_clean = private_names("core", "trace_state_clean")


def records_equations() -> bool:
    """Return whether operations become equations of a jaxpr right now, as they do while JAX traces for `jax.jit`.

    Private. Without it a NaN in a function under `in_place` is not reported by `jax.debug_nans` as in plain JAX.
    """
    return _trace_context is None or _jit_trace is None or isinstance(_trace_context[0].trace, _jit_trace)


_trace_context = private_names("core", "trace_ctx")
_jit_trace = tuple(private_names("interpreters.partial_eval", "DynamicJaxprTrace") or ()) or None


def flattened_by_control_flow() -> bool:
    """Return whether `lax.scan`, `while_loop`, `cond` or one of their kin called the pytree rule that calls this.

    It serves an error message only: otherwise users would read of two pytrees that differ in their metadata.
    """
    frame = _frame_that_flattens()
    return frame is not None and frame.f_globals["__name__"].startswith("jax._src.lax.control_flow")


def unflattened_by_control_flow() -> bool:
    """Return whether the pytree rule that calls this makes an argument of the body of a loop, or of a branch, of JAX.

    It serves an error message only: otherwise users would read of shapes that differ before and after a step.
    """
    first, later = _frame_that_flattens(), _frame_that_flattens(_TRACING)
    is_result = first is later  # which no tracing is between
    return not is_result and later is not None and later.f_globals["__name__"].startswith("jax._src.lax.control_flow")


_TRACING = ("jax._src.linear_util", "jax._src.interpreters", "jax._src.profiler")


def flattened_by_grad() -> bool:
    """Return whether `jax.grad` or one of its kin called the pytree rule that calls this, and refuses integers.

    It serves an error message only: otherwise users would read of an int32 that they have not given. JAX flattens what
    it differentiates in these functions, and then hands it to others.
    """
    frame = _frame_that_flattens()
    if frame is None or frame.f_globals["__name__"] != "jax._src.api":
        return False
    known = frame.f_locals
    is_before = "vjp_py" not in known and "y" not in known  # later it flattens results
    return frame.f_code.co_name in ("value_and_grad_f", "jacfun") and is_before and not known.get("allow_int", False)


def _frame_that_flattens(others: tuple[str, ...] = ()) -> FrameType | None:
    """Return the frame that called the pytree rule that calls this, past JAX's functions for pytrees, and others."""
    frame = inspect.currentframe()
    skipped = ("jax_tensorarray", "jax._src.tree_util", "jax._src.flattree", "jax._src.api_util", *others)
    while frame is not None and frame.f_globals.get("__name__", "jax_tensorarray").startswith(skipped):
        frame = frame.f_back
    return frame
