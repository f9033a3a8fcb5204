"""What the passes make of a random program is that program still: NumPy runs what each leaves, without XLA."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from gates import SETTINGS, gates
from hypothesis import given
from random_checks import (
    BATCHES,
    FLOATS,
    batched_state,
    close,
    computed,
    gradients,
    judged_after,
    on_state,
    raising,
    same_state,
    total,
)
from random_machines import THETA, InJax, expected, outputs
from random_programs import programs

from jax_tensorarray._lowering import program as passes

CPU = passes.Target("cpu", divided=False, calls_nothing=False, outside=None)
FEW = hypothesis.settings(max_examples=hypothesis.settings.default.max_examples * 8 // 25)


def after(count):
    """What the first passes make of a program."""

    def rewrite(jaxpr):
        if not passes.needs_passes(jaxpr):
            return jaxpr
        for each in [each for each in passes.PASSES if each.applies_to(CPU)][:count]:
            jaxpr = each.run(jaxpr, CPU)
        return jaxpr

    return judged_after(rewrite)


def forward(program, *_):
    want, machine = expected(program), InJax(reverse_mode=False)
    f = computed(lambda *args: outputs(program, machine, *args))
    got = raising(lambda: f(THETA, jnp.int32(program.start)), want.strays)
    if got is not None:
        same_state(got, want.state)


def gradient(program, *_):
    want = expected(program)
    got = raising(lambda: computed(jax.grad(total(program, InJax())))(THETA, jnp.int32(program.start)), want.strays)
    if got is not None and all(stray.size for stray in want.strays):
        close(got, want.loss.d, "d")


def batch(program, *differ):
    f = on_state(program, InJax(dropping=False, reverse_mode=False))
    batched_state(program, lambda axes, out_axes: jax.vmap(f, axes, out_axes), *differ, 0, False)


def gradient_of_batch(program, *differ):
    f = on_state(program, InJax(dropping=False))
    gradients(program, f, lambda f, *axes: jax.vmap(jax.grad(f, FLOATS), *axes), *differ, 0, False)


@pytest.mark.parametrize("count", range(1, 1 + sum(each.applies_to(CPU) for each in passes.PASSES)))
@pytest.mark.parametrize("transformation", [forward, gradient, batch, gradient_of_batch])
@FEW
@given(program=programs(), setting=st.sampled_from(SETTINGS), differ=BATCHES)
def test_a_program_after_passes(transformation, count, program, setting, differ):
    with gates(setting), after(count):
        transformation(program, *differ)
