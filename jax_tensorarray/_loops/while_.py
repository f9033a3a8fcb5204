"""`ta_while`: the loop of this library. Its trip count depends on data or, in a counted loop, is an operand.

    y, steps = ta_while[cond body] x              # a user's loop: it goes on while `cond` is true
    dy = ta_while[body, counted] steps dx         # its derivative, which has a transpose

A user's loop counts its steps, so its trip count is known to its derivatives. These are counted loops.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive, Var

from jax_tensorarray import _compat
from jax_tensorarray._jaxprs import jaxprs, registry
from jax_tensorarray._jaxprs.axis import Axis, axes
from jax_tensorarray._jaxprs.jaxprs import flagged
from jax_tensorarray._loops import linearize, masking, rules
from jax_tensorarray._loops.host import ta_host_read, ta_host_read_p
from jax_tensorarray._loops.rules import Pruned, with_batch_axis
from jax_tensorarray._loops.strategy import Strategy, Tape
from jax_tensorarray._loops.tapes import TapeType, avals_of, batched_tapes, largest, make
from jax_tensorarray._ops.calls import TEXT
from jax_tensorarray._ops.check import ta_check
from jax_tensorarray._ops.fence import after_check
from jax_tensorarray._ops.primitive import type_like, varying_alike, varying_over
from jax_tensorarray._types import Array, Equation

# Operands: *cond_consts, *body_consts, *carry. Results: *carry and, if the loop `returns_steps`, steps. `cond` maps
# *cond_consts, *carry to a bool, and `body` *body_consts, *carry to *carry. The last carries may be `tapes`, which are
# no operands.
#
# A counted loop has no `cond`. Its only cond_const is the number of steps, at most `max_steps`. The body first takes
# the number of its step, k = 0, 1, ..., steps - 1 or, with `reverse`, k = steps - 1, ..., 0.
#
# Under vmap every example may end at another step. Then the predicate is batched: `cond` and the number of steps have
# an element per example, the body first takes the flags of active examples, and the loop goes on while any is active.
#
# The number of steps has the dtype `steps_dtype`. It stays at the largest number of this dtype.
ta_while_p = Primitive("ta_while")


class Bound(NamedTuple):
    """The user's name for `max_steps`, for messages."""

    name: str = "max_steps"
    loop: str = "while_loop(cond_fun, body_fun, init_val, "
    #: Whether the carry must have the types of JAX's loop, because the program around is traced with them.
    has_types_of_jax: bool = False


OF_WHILE_LOOP, OF_JAX = Bound(), Bound(has_types_of_jax=True)


@dataclass(frozen=True)
class WhileOptions:
    """The parameters of a loop besides its condition and body."""

    max_steps: int | None  #: the largest number of steps
    source: str  #: the line of the loop, for messages
    cond_nconsts: int = 0
    body_nconsts: int = 0
    batch_dims: int = 0  #: how many batch axes the predicate has
    strategy: Strategy = field(default_factory=Tape)  #: of reverse mode
    tapes: tuple[TapeType, ...] = ()
    returns_steps: bool = True  #: whether the number of steps is a result
    error: str = ""  #: the error of a loop that needs more than `max_steps` steps. If empty, the loop stops there
    bound: Bound = OF_WHILE_LOOP
    is_counted: bool = False  #: whether the number of steps is an operand
    reverse: bool = False  #: whether a counted loop begins with the last step

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Split values of the operands into those of cond_consts, of body_consts, and of the carry without tapes."""
        n = self.cond_nconsts + self.body_nconsts
        return list(operands[: self.cond_nconsts]), list(operands[self.cond_nconsts : n]), list(operands[n:])

    @property
    def room(self) -> int:
        """The number of steps that tapes have room for, in a loop that is `taped`."""
        assert self.max_steps is not None
        return self.max_steps

    @property
    def leading(self) -> list[bool]:
        """A False for each input of the body before its consts: it has no tangent, batch axis or dependency."""
        return [False] * (self.is_counted or self.batch_dims > 0)


class Loop(NamedTuple):
    """A `ta_while` with its operands. A counted loop has None for `cond`."""

    cond_consts: Sequence[Array]
    body_consts: Sequence[Array]
    carry: Sequence[Array]
    cond: Any
    body: Any
    options: WhileOptions

    def run(self) -> tuple[list[Array], Any]:
        """Return the carry after the loop, and the number of steps taken, or None if the loop does not return it."""
        outs = self.bind()
        return (outs[:-1], outs[-1]) if self.options.returns_steps else (outs, None)

    def bind(self) -> list[Array]:
        """Return the results of the primitive."""
        operands = [*self.cond_consts, *self.body_consts, *self.carry]
        options = replace(self.options, cond_nconsts=len(self.cond_consts), body_nconsts=len(self.body_consts))
        # Refs have no derivatives here, so a loop with refs is JAX's own.
        bind = ta_while_p.bind if all(isinstance(jax.typeof(x), ShapedArray) for x in operands) else _run
        outs: list[Array] = bind(*operands, cond=self.cond, body=self.body, options=options)
        return outs


def count(
    steps: Array,
    consts: Sequence[Array],
    carry: Sequence[Array],
    *,
    body: Any,
    max_steps: int,
    reverse: bool,
    tapes: Sequence[TapeType] = (),
) -> list[Array]:
    """Run a counted loop with a body from k, *consts, *carry to *carry. Return the carry after it."""
    options = WhileOptions(
        max_steps, "a derivative of a loop", tapes=tuple(tapes), returns_steps=False, is_counted=True, reverse=reverse
    )
    return Loop([steps], consts, carry, None, body, options).bind()


def counter(steps: Array) -> Any:
    """Return the type of the step number of a counted loop."""
    return jax.typeof(steps).update(weak_type=False)


def results(outs: list[Array], steps: Any) -> list[Array]:
    return outs if steps is None else [*outs, steps]


def steps_dtype(max_steps: int | None) -> Any:
    """Return the dtype of the number of steps: int32 if it holds `max_steps`, else JAX's widest."""
    narrow = max_steps is not None and max_steps <= jnp.iinfo(jnp.int32).max
    return jnp.dtype(jnp.int32) if narrow else jax.dtypes.canonicalize_dtype(jnp.int64)


def bounded(max_steps: int | None) -> bool:
    """Return whether the dtype of the number of steps holds `max_steps`."""
    return max_steps is not None and max_steps <= jnp.iinfo(steps_dtype(max_steps)).max


def taped(max_steps: int | None) -> bool:
    """Return whether a tape for `max_steps` steps is possible."""
    return bounded(max_steps) and steps_dtype(max_steps) != jnp.int64


def needs_max_steps(options: WhileOptions) -> ValueError:
    max_steps, bound = options.max_steps, options.bound
    few = "" if max_steps is None else f" of at most {jnp.iinfo(steps_dtype(0)).max}, not {max_steps}"
    return ValueError(
        f"the loop at {options.source} is differentiated in reverse, so it needs {bound.name}{few}, the largest number "
        f"of steps it may take: {bound.loop}{bound.name}=...). Memory is only used for the steps taken. (jax.jvp and "
        f"jax.jacfwd need no {bound.name}.)"
    )


def _abstract_eval(*avals: Any, cond: Any, body: Any, options: WhileOptions) -> Any:
    if options.error:  # the lowering has a check, which is an op
        _compat.first_use()
    if options.is_counted:
        return [a.update(weak_type=False) if hasattr(a, "weak_type") else a for a in body.out_avals], body.effects
    (active,) = cond.out_avals
    steps = type_like(active, active.shape, range(active.ndim), steps_dtype(options.max_steps))
    return [*body.out_avals, *([steps] if options.returns_steps else [])], _effects(cond, body)


def _run(*operands: Array, cond: Any, body: Any, options: WhileOptions) -> Any:
    cond_consts, body_consts, carry = options.split(operands)
    max_steps, returns_steps, pred_batched = options.max_steps, options.returns_steps, options.batch_dims > 0
    carry = [*carry, *make(options.tapes)]
    if options.is_counted:
        return _run_counted(cond_consts[0], body_consts, carry, body, options.reverse)
    predicate, call = jaxprs.function(cond), jaxprs.function(body)
    if pred_batched and not jax.sharding.get_abstract_mesh().empty:
        carry = list(_varying_as_predicate(predicate, cond_consts, carry))

    def goes_on(carry: Sequence[Array]) -> Array:
        (active,) = predicate(*cond_consts, *carry)
        return active

    if not returns_steps and (not pred_batched or _is_evaluated_twice(cond)):  # JAX's own loop does the same

        def step_of_all(carry: Sequence[Array]) -> list[Array]:
            return call(*([goes_on(carry)] if pred_batched else []), *body_consts, *carry)

        return lax.while_loop(
            lambda carry: jnp.any(goes_on(carry)) if pred_batched else goes_on(carry), step_of_all, carry
        )
    dtype, limit = steps_dtype(max_steps), max_steps if bounded(max_steps) else None

    def more(k: Array, carry: Sequence[Array]) -> Array:
        return goes_on(carry) if limit is None else goes_on(carry) & (k < limit)

    def after(k: Array, taken: Any = 1) -> Array:
        return k + taken if limit is not None else lax.select(k < jnp.iinfo(dtype).max, k + taken, k)

    start, error = jnp.zeros((), dtype), "" if limit is None else options.error
    if not pred_batched and (not error or _may_be_repeated(cond)):
        taken, outs = lax.while_loop(
            lambda state: more(*state),
            lambda state: (after(state[0]), call(*body_consts, *state[1])),
            (start, carry),
        )
        active = predicate(*map(copied, cond_consts), *outs)[0] if error else jnp.bool_(False)
    else:

        def step(state: Any) -> Any:
            k, active, taken, carry = state
            carry = call(*([active] if pred_batched else []), *body_consts, *carry)
            k, taken = after(k), after(taken, active.astype(dtype)) if pred_batched else taken
            return k, active & goes_on(carry) if pred_batched else goes_on(carry), taken, carry

        def is_any_active(state: Any) -> Array:
            some = jnp.any(state[1])
            return some if limit is None else some & (state[0] < limit)

        active = goes_on(carry)
        state = (start, *varying_alike([active, jnp.zeros(active.shape, dtype)]), carry)
        k, active, taken, outs = lax.while_loop(is_any_active, step, state)
        taken = taken if pred_batched else k
    if error:
        number = len(outs) - len(options.tapes)
        taken, *checked = unless_cut(error, active, [taken, *outs[:number]])
        outs = [*checked, *outs[number:]]  # nobody reads tapes beyond the steps taken
    return [*outs, taken] if returns_steps else outs


def _run_counted(steps: Array, consts: Sequence[Array], carry: Sequence[Array], body: Any, reverse: bool) -> Any:
    """Run a counted loop. Each step fetches the rows of tapes on the host for the next one."""
    fetched = _reads_of_host(body, len(consts))

    def number(n: Array) -> Array:
        return steps - 1 - n if reverse else n

    def fetch(n: Array) -> list[Array]:
        # After the last step, nobody uses the fetched row.
        return [ta_host_read(consts[k], number(n), **params) for k, params in fetched.values()]

    def step(state: Any) -> Any:
        n, rows, carry = state
        row_of = dict(zip(fetched, rows, strict=True))

        def equation(eqn: Equation, operands: list[Array]) -> list[Array]:
            is_fetched = eqn.outvars and eqn.outvars[0] in row_of
            return [row_of[eqn.outvars[0]]] if is_fetched else jaxprs.bind(eqn, operands)

        args = [number(n), *consts, *carry]
        outs = jaxprs.interpret(body, args, equation) if fetched else jaxprs.function(body)(*args)
        return n + 1, fetch(n + 1), outs

    start = steps * 0  # of the type of `steps`, which may differ from device to device
    return lax.while_loop(lambda state: state[0] < steps, step, (start, fetch(start), carry))[2]


def _reads_of_host(body: Any, num_consts: int) -> dict[Any, tuple[int, dict[str, Any]]]:
    """Map each row that a body reads from a tape on the host to the number of the const, and to the parameters."""
    inner = _compat.opened(body)
    step, *consts = inner.invars[: 1 + num_consts]
    return {
        eqn.outvars[0]: (consts.index(eqn.invars[0]), eqn.params)
        for eqn in inner.eqns
        if eqn.primitive is ta_host_read_p and eqn.invars[0] in consts and eqn.invars[1] is step
    }


def copied(x: Any) -> Any:
    """Copy a ref: JAX's loop drops the writes of the last evaluation of its condition."""
    return jax.new_ref(x[...]) if isinstance(x, jax.Ref) else x


def _may_be_repeated(cond: Any) -> bool:
    """Return whether we may evaluate a condition once more after the loop: it takes no time, or writes to refs."""
    if _compat.has_callbacks(cond):
        return False
    if not all(isinstance(t, ShapedArray) for t in cond.in_avals):
        return True
    eqns = _compat.opened(cond).eqns
    return not any(getattr(v.aval, "ndim", 0) for eqn in eqns for v in (*eqn.invars, *eqn.outvars))


def unless_cut(error: str, active: Array, results: Sequence[Any]) -> list[Any]:
    """Return the results of a loop behind a check that raises if the loop needs more steps.

    On a TPU, which cannot raise, they are the results after the steps taken.
    """
    checked = ta_check(jnp.where(jnp.any(active), 1, 0), 1, mode="error", op=TEXT + error)
    return [after_check(checked, x) for x in results]


def _varying_as_predicate(predicate: Any, consts: Sequence[Array], carry: Sequence[Array]) -> Sequence[Array]:
    """Make the carry vary over all axes of a mesh over which the predicate varies, because that selects the carry."""

    def step(axes: frozenset[Any]) -> tuple[frozenset[Any], Sequence[Array]]:
        varying = [varying_over(x, axes) for x in carry]
        (active,) = jax.make_jaxpr(predicate)(*map(jax.typeof, [*consts, *varying])).out_avals
        return axes | _compat.varying_axes(active), varying

    return jaxprs.fixed_point(frozenset(), step)[1]


def _is_evaluated_twice(cond: Any) -> bool:
    """Return whether to evaluate a batched condition, with its callbacks, twice per step, like JAX's own loop."""
    if _compat.has_callbacks(cond):
        return not _compat.has_ordered_effects(cond)
    return not jaxprs.has_row_ops(cond)


# An operand is unknown only if its tangent is deferred, for reverse mode or jax.linearize. With max_steps the tangents
# are already another loop. Without max_steps the loop runs again with the tangents. It has no transpose, but perhaps
# the program needs none. As for JAX's own loop, the known results come from a loop of the known carries.


def _effects(cond: Any, body: Any) -> set[Any]:
    return {*(() if cond is None else cond.effects), *body.effects}


def _part(operands: Sequence[bool], carry: Sequence[bool], cond: Any, body: Any, options: WhileOptions) -> Pruned:
    """Return the loop of the carries flagged in `carry`, tapes last, and of the consts flagged in `operands`."""
    cond_consts, consts, _ = options.split(operands)
    n = len(carry) - len(options.tapes)
    tapes = tuple(flagged(options.tapes, carry[n:]))
    fewer = replace(options, cond_nconsts=sum(cond_consts), body_nconsts=sum(consts), tapes=tapes)
    params = {"cond": cond, "body": body, "options": fewer}
    results = [*carry, *[True] * options.returns_steps]
    return Pruned([*cond_consts, *consts, *carry[:n]], results, params, _effects(cond, body))


def _known_part(unknown: Sequence[bool], cond: Any, body: Any, options: WhileOptions) -> Pruned | None:
    """Return the loop of the carries that do not depend on unknown operands.

    Return None if the condition depends on them, without a tape, and for a counted loop: its tangents are another loop.
    """
    if options.is_counted or not options.strategy.tapes:  # other strategies use the whole carry
        return None
    cond_consts, consts, carry = options.split(unknown)
    consts, carry = [*options.leading, *consts], [*carry, *[False] * len(options.tapes)]
    carry = jaxprs.after_any_steps(carry, lambda carry: _compat.known_part(body, (*consts, *carry))[1])
    cond, (end_is_unknown,) = _compat.known_part(cond, (*cond_consts, *carry))
    if end_is_unknown:
        return None
    body, _ = _compat.known_part(body, (*consts, *carry), tuple(carry))
    return _part([not x for x in unknown], [not x for x in carry], cond, body, options)


def _pruned_for(live: Sequence[bool], num_operands: int, cond: Any, body: Any, options: WhileOptions) -> Pruned:
    """Return the loop of the carries on which the live results and the condition depend: all without a tape."""
    if not options.strategy.tapes:
        params = {"cond": cond, "body": body, "options": options}
        return Pruned([True] * num_operands, [True] * len(live), params, _effects(cond, body))
    a, m, first, num_carry = options.cond_nconsts, options.body_nconsts, len(options.leading), len(body.out_avals)
    read = [True, *[False] * num_carry] if options.is_counted else jaxprs.part_of(cond, (True,))[1]
    inputs = jaxprs.read_for(body, [x or y for x, y in zip(live[:num_carry], read[a:], strict=True)])
    consts, carry = inputs[first : first + m], inputs[first + m :]
    operands = [*read[:a], *consts, *carry[: len(carry) - len(options.tapes)]]
    if not options.is_counted:
        cond, _ = jaxprs.part_of(cond, (True,), (*read[:a], *carry))
    body, _ = jaxprs.part_of(body, tuple(carry), (*[True] * first, *consts, *carry))
    return _part(operands, carry, cond, body, options)


def _batch(
    axis: Axis, args: Sequence[Array], batched: Sequence[bool], *, cond: Any, body: Any, options: WhileOptions
) -> Any:
    cond_consts, consts, carry = options.split(args)
    cond_consts_batched, consts_batched, init_batched = options.split(batched)
    ends_differ = options.is_counted and cond_consts_batched[0]
    if ends_differ:
        (steps,) = cond_consts
        body = _ending_early(body, [*consts_batched, *[True] * len(body.out_avals)])
        cond_consts, consts, consts_batched = [largest(steps)], [steps, *consts], [True, *consts_batched]
    init_batched += [False] * len(options.tapes)
    of_consts = [*options.leading, *consts_batched]
    carry_batched = jaxprs.after_any_steps(init_batched, lambda carry: axis.batched_outputs(body, [*of_consts, *carry]))
    if ends_differ or options.strategy.batches_all:
        carry_batched = [True] * len(carry_batched)
    pred_batched = cond is not None and axis.batched_outputs(cond, [*cond_consts_batched, *carry_batched])[0]
    if pred_batched:
        _check_effects(cond, body)
        carry_batched = [True] * len(carry_batched)
    carry = with_batch_axis(carry, init_batched, carry_batched, axis.size)
    tapes = batched_tapes(options.tapes, carry_batched[len(carry) :], axis.size)
    strategy = options.strategy.batched(axis, pred_batched, consts_batched, consts, carry)
    options = replace(options, batch_dims=options.batch_dims + pred_batched, tapes=tapes, strategy=strategy)
    types = [*map(jax.typeof, [*consts, *carry]), *avals_of(tapes)]
    body = masking.batched_body(axis, body, pred_batched, consts_batched, carry_batched, types)
    if cond is not None:
        of_cond = axes([*cond_consts_batched, *carry_batched])
        predicate = axis.vmap(jaxprs.function(cond), of_cond, 0 if pred_batched else None)
        cond = jax.make_jaxpr(predicate)(*map(jax.typeof, [*cond_consts, *carry]), *avals_of(tapes))
    outs = Loop(cond_consts, consts, carry, cond, body, options).bind()
    return outs, [*carry_batched, *[pred_batched] * options.returns_steps]


def _ending_early(body: Any, batched: Sequence[bool]) -> Any:
    """Return the body of a counted loop for an example that ends earlier than others.

    Its first const is the number of steps of the example. `batched` flags the inputs after `k` with a batch axis.
    """
    k, *types = body.in_avals
    num_consts = len(types) - len(body.out_avals)

    def step(k: Array, steps: Array, *rest: Array) -> list[Array]:
        consts, carry = (k, *rest[:num_consts]), rest[num_consts:]
        return masking.step_of_active(body, k < steps, consts, carry, [False, *batched])

    return jax.make_jaxpr(step)(k, k, *types)


def _check_effects(cond: Any, body: Any) -> None:
    """Raise the error of JAX's loop for effects, which an example that has ended must not have."""
    if _compat.has_unordered_io(cond) or _compat.has_unordered_io(body):
        raise NotImplementedError("Unordered IO effects not supported in while_loop with batched predicate")


def _bodies(params: dict[str, Any]) -> list[registry.Body]:
    body, options = params["body"], params["options"]
    leading, num_carry = len(options.leading), len(body.out_avals)
    return [registry.Body(body, options.cond_nconsts, leading, options.body_nconsts, num_carry)]


def _masked(
    masked: masking.Masker, operands: list[masking.MaskedValue], cond: Any, body: Any, options: WhileOptions
) -> list[masking.MaskedValue]:
    """Run a loop that takes no step unless `active`."""
    cond_consts, consts, carry = options.split([x.array for x in operands])
    if options.is_counted:
        cond_consts = [jnp.where(masked.active, cond_consts[0], 0)]
    else:
        predicate = jaxprs.function(cond)

        def goes_on(active: Array, *args: Array) -> list[Array]:
            return [active & predicate(*args)[0]]

        cond = jax.make_jaxpr(goes_on)(jax.ShapeDtypeStruct((), jnp.bool_), *cond.in_avals)
        cond_consts = [masked.active, *cond_consts]
    outs = Loop(cond_consts, consts, carry, cond, body, options).bind()
    return masking.results_of_loop(outs, options.split(operands)[2])


def of_jax(params: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the parameters of a `ta_while` from those of JAX's `while`."""
    options = WhileOptions(None, source, params["cond_nconsts"], params["body_nconsts"], returns_steps=False)
    return {"cond": params["cond_jaxpr"], "body": params["body_jaxpr"], "options": options}


def _run_checked(*operands: Array, options: WhileOptions, **params: Any) -> Any:
    if options.batch_dims:
        raise ValueError(
            f"the loop at {options.source} is under checkify-of-vmap-of-while, where examples that have ended would "
            "be checked too. As for JAX's own loop, write vmap-of-checkify-of-while"
        )
    return _run(*operands, options=options, **params)


def _tapes(eqn: Equation) -> tuple[list[Var], Any]:
    """Return the tapes among the results of a loop, and the number of their steps."""
    options, outs = eqn.params["options"], eqn.outvars
    outs, steps = (outs, eqn.invars[0]) if options.is_counted else (outs[:-1], outs[-1])
    return linearize.tapes_among(outs, options.tapes), steps


def _jvp(primals: Sequence[Array], tangents: Sequence[Any], **params: Any) -> Any:
    from jax_tensorarray._loops import derivatives  # made of these loops

    return derivatives.jvp(primals, tangents, **params)


def _transpose(cts: Sequence[Any], *operands: Any, **params: Any) -> Any:
    from jax_tensorarray._loops import derivatives  # made of these loops

    return derivatives.transpose(cts, *operands, **params)


rules.register(
    ta_while_p,
    run=_run,
    abstract_eval=_abstract_eval,
    bodies=_bodies,
    pruned_for=_pruned_for,
    batch=_batch,
    jvp=_jvp,
    transpose=_transpose,
    run_checked=_run_checked,
    known_part=_known_part,
    tapes=_tapes,
    mask=lambda masked, eqn, operands: _masked(masked, operands, **eqn.params),
)
masking.LOOPS["while"] = lambda masked, eqn, operands: _masked(
    masked, operands, **of_jax(eqn.params, "an inner lax.while_loop")
)
