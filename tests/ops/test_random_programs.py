"""Random programs give what NumPy says, under every transformation."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from gates import SETTINGS, WAYS, gates
from hypothesis import given
from random_checks import (
    BATCHES,
    FLOATS,
    along,
    batched_state,
    close,
    computed,
    grad_of_vmap,
    gradients,
    hessian,
    judged_in_numpy,
    logged_in,
    on_state,
    precision_along_parameters,
    raising,
    same_state,
    total,
)
from random_machines import DIRECTION, THETA, InJax, expected, initial, kinds, outputs
from random_programs import (
    STATE,
    At,
    Block,
    Call,
    Cond,
    Index,
    Loop,
    Predicate,
    Program,
    Read,
    Switch,
    Update,
    programs,
    run,
)

from jax_tensorarray import _gates

# --- transformations: what each gives, and what NumPy says it should ---------------------------------------------


def values(program, evaluate):
    want, log = expected(program), []
    with logged_in(want) as ref:
        machine = InJax(reverse_mode=False, log=log, ref=ref)
        got = raising(lambda: evaluate(program, machine), want.strays)
        if got is not None:
            same_state(got, want.state)
            jax.effects_barrier()
            assert want.strays or log == want.logged


def jitted(program, machine):
    return computed(lambda *args: outputs(program, machine, *args))(THETA, jnp.int32(program.start))


def eager(program, machine):
    return outputs(program, machine, jnp.asarray(THETA), jnp.int32(program.start))


def donated(program, machine):
    state = initial(program, jnp.asarray(THETA), jnp.int32(program.start), jnp)
    state = jax.tree.map(jnp.copy, state)  # no two are one array
    return jax.jit(lambda state: run(machine, program.block, None, state), donate_argnums=0)(state)


def derivatives(program, part, differentiated, rtol=1e-8):
    want = expected(program)
    f = differentiated(total(program, InJax()))
    got = raising(lambda: computed(f)(THETA, jnp.int32(program.start)), want.strays)
    # A read of no rows has no derivative, so nothing of the program needs it.
    if got is not None and all(stray.size for stray in want.strays):
        close(got, getattr(want.loss, part), part, rtol)


def transposed(f):
    def g(theta, start):
        tangent = lambda dot: jax.jvp(lambda t: f(t, start), (theta,), (dot,))[1]  # noqa: E731
        return jax.linear_transpose(tangent, theta)(1.0)[0]

    return g


def linearized(f):
    return lambda theta, start: jax.linearize(lambda t: f(t, start), theta)[1](DIRECTION)


def twice_reverse(f):
    return lambda theta, start: jax.grad(lambda t: jax.grad(f)(t, start) @ DIRECTION)(theta)


def checkpointed(f):
    return jax.grad(jax.checkpoint(f))


def of_example(program, dropping, **options):
    return on_state(program, InJax(dropping=dropping, **options))


def vmap(program, *batch):
    f = of_example(program, batch[-1], reverse_mode=False)
    batched_state(program, lambda axes, out_axes: jax.vmap(f, axes, out_axes), *batch)


def vmap_of_grad(program, *batch):
    f = of_example(program, batch[-1])
    gradients(program, f, lambda f, *axes: jax.vmap(jax.grad(f, FLOATS), *axes), *batch)


#: name -> (what it does with a program, whether it takes functions that have no forward-mode derivative)
TRANSFORMATIONS = {
    "jit": (lambda p, *_: values(p, jitted), True),
    "eager": (lambda p, *_: values(p, eager), True),
    "donation": (lambda p, *_: values(p, donated), True),
    "grad": (lambda p, *_: derivatives(p, "d", jax.grad), True),
    "grad of checkpoint": (lambda p, *_: derivatives(p, "d", checkpointed), True),
    "jvp": (lambda p, *_: derivatives(p, "e", along), False),
    "linearize": (lambda p, *_: derivatives(p, "e", linearized), False),
    "linear_transpose": (lambda p, *_: derivatives(p, "d", transposed), False),
    "jvp of grad": (lambda p, *_: derivatives(p, "de", lambda f: along(jax.grad(f))), True),
    "grad of grad": (lambda p, *_: derivatives(p, "de", twice_reverse), False),
    "hessian": (lambda p, *_: derivatives(p, "de", hessian, precision_along_parameters(p)), True),
    "jacfwd": (lambda p, *_: derivatives(p, "d", jax.jacfwd), False),
    "vmap": (vmap, True),
    "vmap of grad": (vmap_of_grad, True),
    "grad of vmap": (lambda p, *batch: grad_of_vmap(p, of_example(p, batch[-1]), *batch), True),
    "jvp of grad of vmap": (
        lambda p, *batch: grad_of_vmap(p, of_example(p, batch[-1]), *batch, second=True),
        True,
    ),
}


#: XLA compiles programs under these. Each goes another way to it. NumPy evaluates them under all others.
BY_XLA = ("jit", "eager", "donation", "grad", "vmap", "vmap of grad")


def check(transformation, program, *args):
    f, any_function = TRANSFORMATIONS[transformation]
    if not any_function and "vjp" in kinds(program):
        return
    with judged_in_numpy(transformation not in BY_XLA):
        f(program, *args)


#: Of the examples of the profile, for each transformation.
SHARE = hypothesis.settings(max_examples=hypothesis.settings.default.max_examples * 8 // 25)


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@SHARE
@given(
    program=programs(),
    setting=st.sampled_from(SETTINGS),
    differ=BATCHES,
    axis=st.sampled_from([0, 1, 2]),
    dropping=st.booleans(),
)
def test_a_random_program(transformation, program, setting, differ, axis, dropping):
    """The last ones are of a batch: whether its examples differ in where they start, and in their parameters."""
    with gates(setting):
        check(transformation, program, *differ, axis, dropping)


def test_every_gate_is_opened_and_shut():
    """So the random programs reach what is behind each, and what is before it."""
    assert set(WAYS) == {name for name in vars(_gates) if name.isupper()}


# --- programs that once failed ---------------------------------------------------------------------------------

OWN = (None,) * len(STATE)  # every slot gets its own buffer back


def loop(kind, *statements):
    return Loop(kind, 4, 0, None, False, "tape", 1, Block(statements, OWN))


def update(op, *, dtype="int32", guard="mod", mode=None, lowering="auto"):
    return Update(op, "S", 1, At((Index(0, 1, 0, guard),), dtype, None, mode, lowering), (0, 0, 0))


def each_in_a_loop(dtype):
    updates = [update(op, dtype=dtype, mode=mode) for op in ("write", "add", "max", "swap") for mode in (None, "drop")]
    return Block(tuple(loop("lax.fori_loop", u) for u in updates), OWN)


def two_versions():
    """One branch passes two buffers on, the other returns a new version of the first in both places but one."""
    crossing = Block((update("write"),), (None, None, None, None, 2, None, None))
    return Block((loop("while_loop", Cond(Predicate("odd", 0, 0), (Block((), OWN), crossing))),), OWN)


def exchanged():
    """One branch exchanges two buffers, one writes a row of a version that nothing else uses."""
    at = At((Index(0, 1, 0, "mod"),), "int32", None, None, "auto")
    aside = Call("jit", Block((update("write"), Read("S", 0, at)), (None, 0, None, 2, 1, None, None)))
    branches = Block((), OWN), Block((update("write"),), OWN), Block((), (*OWN[:3], 0, 1, *OWN[5:]))
    return Block((aside, Switch(0, branches)), OWN)


ONCE = {
    "a start whose dtype has no value for the last row": (
        ("jit", "grad"),
        [
            Program((rows, 3, 3), "int32", 1, each_in_a_loop(dtype))
            for rows, dtype in ((129, "int8"), (300, "int8"), (257, "uint8"))
        ],
    ),
    "a check of a buffer of one row, where XLA needs no index": (
        ("jit",),
        [Program((1, 3, 3), "int32", 7, Block((update("write", guard="raw", lowering="xla"),), OWN))],
    ),
    "two versions of a buffer from one branch": (
        ("vmap", "vmap of grad", "grad of vmap"),
        [Program((5, 3, 3), "int32", 1, two_versions())],
    ),
    "a conditional in front of an operand that its branches ignore": (
        ("jit",),
        [Program((3, 3, 3), "int32", 0, exchanged())],
    ),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("what", ONCE)
def test_a_program_that_once_failed(what):
    transformations, found = ONCE[what]
    for transformation in transformations:
        for program in found:
            check(transformation, program, True, False, 0, False)
