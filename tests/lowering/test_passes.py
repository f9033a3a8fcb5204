"""What the passes make of a random program is that program still: NumPy runs what each leaves, without XLA."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_passes import ALL, TARGETS, by_passes, passes_for, raises
from gates import SETTINGS, gates
from hypothesis import given
from jax import lax
from jax.extend.core import Literal
from library_in_numpy import library_in_numpy
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

from jax_tensorarray import _compat, ta_add, ta_read, ta_swap, ta_write
from jax_tensorarray._jaxprs import jaxprs

SOME = hypothesis.settings(max_examples=hypothesis.settings.default.max_examples * 2)
MANY = hypothesis.settings(max_examples=hypothesis.settings.default.max_examples * 6)


#: After how many passes a program is judged, and for which target.
PASSED = st.tuples(st.integers(1, ALL), st.sampled_from([*TARGETS]))


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


TRANSFORMATIONS = {f.__name__: f for f in (forward, gradient, batch, gradient_of_batch)}


def check(transformation, program, *batch, passed=(ALL, "cpu")):
    """Judge a program. The batch is whether its examples differ, and perhaps its axis, which is always the first."""
    with judged_after(by_passes(*passed), raises=raises(passed[1])):
        TRANSFORMATIONS[transformation](program, *batch[:2])


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@SOME
@given(program=programs(), setting=st.sampled_from(SETTINGS), differ=BATCHES, passed=PASSED)
def test_a_program_after_passes(transformation, program, setting, differ, passed):
    with gates(setting):
        check(transformation, program, *differ, passed=passed)


# --- which index is said to be out of range ----------------------------------------------------------------------

ROWS = {4: jnp.arange(1.0, 5.0), 6: jnp.arange(1.0, 7.0)}

#: An op, the number of rows, and how it addresses one: masked, with the next one, or in each example of a batch.
OPS = st.tuples(
    st.sampled_from(["read", "write", "add", "swap"]),
    st.sampled_from([*ROWS]),
    st.sampled_from(["alone", "alone", "masked", "rows", "vmap"]),
)


def _larger(inner):
    several = st.tuples(st.just("then"), inner, inner)
    loops = st.tuples(st.sampled_from(["for", "scan", "jit"]), inner, st.integers(0, 3))
    branches = st.tuples(st.just("cond"), inner, inner)
    return several | loops | branches | st.tuples(st.just("until"), inner)


NODES = st.recursive(OPS, _larger, max_leaves=6)


class Stray(Exception):
    pass


def in_python(node, state, data):
    """State: a sum, and how many numbers of the data have been taken as an index."""
    x, k = state
    kind, *rest = node
    if kind in OF_ROWS:
        size, how = rest
        here, is_on = int(data[k % len(data)]), how != "masked" or data[(k + 1) % len(data)] % 2 == 0
        for j in ([here, here + 1] if how == "rows" else [here]) if is_on else []:
            if not 0 <= j < size:
                raise Stray(f"index {j} is out of range for a buffer of size {size}")
            x += float(ROWS[size][j]) * (1 if kind == "read" else 2)
        return x, k + 1
    if kind == "then":
        return in_python(rest[1], in_python(rest[0], state, data), data)
    if kind == "cond":
        return in_python(rest[int(data[k % len(data)]) % 2], state, data)
    if kind == "until":
        goal = x + 5
        while state[0] < goal and state[1] < k + 40:
            state = in_python(rest[0], (state[0] + 0.25, state[1]), data)
        return state
    for _ in range(1 if kind == "jit" else rest[1]):
        state = in_python(rest[0], state, data)
    return state


def sum_read(rows, **at):
    return jnp.sum(ta_read(rows, **at))


def sum_added(update):
    """What an update adds to the sum of the rows: twice those that it is about."""
    return lambda rows, **at: jnp.sum(update(rows, 2 * ta_read(rows, **at), at) - rows)


OF_ROWS = {
    "read": sum_read,
    "write": sum_added(lambda rows, more, at: ta_write(rows, value=1.5 * more, **at)),
    "add": sum_added(lambda rows, more, at: ta_add(rows, value=more, **at)),
    "swap": sum_added(lambda rows, more, at: ta_swap(rows, value=1.5 * more, **at)[0]),
}


def in_jax(node, state, data):
    x, k = state
    kind, *rest = node
    n = len(data)
    if kind in OF_ROWS:
        (size, how), j = rest, data[k % n]
        index = jnp.stack([j, j + 1]) if how == "rows" else j
        where = data[(k + 1) % n] % 2 == 0 if how == "masked" else None
        f = functools.partial(OF_ROWS[kind], index=index, where=where)
        return x + (jax.vmap(f)(jnp.stack([ROWS[size]] * 2))[0] if how == "vmap" else f(ROWS[size])), k + 1
    if kind == "then":
        return in_jax(rest[1], in_jax(rest[0], state, data), data)
    if kind == "cond":
        return lax.cond(data[k % n] % 2 == 0, *(lambda s, a=a: in_jax(a, s, data) for a in rest), state)
    if kind == "until":
        goal = x + 5
        step = lambda s: in_jax(rest[0], (s[0] + 0.25, s[1]), data)  # noqa: E731
        return lax.while_loop(lambda s: (s[0] < goal) & (s[1] < k + 40), step, state)
    if kind == "jit":
        return jax.jit(lambda s: in_jax(rest[0], s, data))(state)
    if kind == "scan":
        return lax.scan(lambda s, _: (in_jax(rest[0], s, data), s[0]), state, length=rest[1])[0]
    return lax.fori_loop(0, rest[1], lambda _, s: in_jax(rest[0], s, data), state)


@MANY
@given(node=NODES, data=st.lists(st.integers(-1, 6), min_size=3, max_size=7))
def test_the_first_index_out_of_range_is_said(node, data):
    f = library_in_numpy(lambda data: in_jax(("for", node, 2), (0.0, jnp.int32(0)), data), by_passes(ALL))
    try:
        want = in_python(("for", node, 2), (0.0, 0), data)
    except Stray as stray:
        with pytest.raises(ValueError, match=str(stray)):
            f(np.array(data, np.int32))
    else:
        found = f(np.array(data, np.int32))
        np.testing.assert_allclose(np.array([*found], float), np.array([*want], float))


# --- order -------------------------------------------------------------------------------------------------------

UPDATES = frozenset(("ta_write", "ta_add", "ta_max", "ta_swap", "ta_clear", "ta_stack", "ta_fence", "ta_write_part"))


def updated_by(eqn):
    """The operands of an equation that it updates in place, itself or in a loop or a branch."""
    name, params = eqn.primitive.name, eqn.params
    if name in UPDATES:
        return eqn.invars[:1]
    if name == "while":
        body, carry = _compat.opened(params["body_jaxpr"]), len(eqn.outvars)
        pairs = zip(eqn.invars[-carry:], body.invars[-carry:], body.outvars, strict=True)
        return [x for x, before, after in pairs if before is not after]
    if name == "cond":
        inner = [_compat.opened(branch) for branch in params["branches"]]
        owned = [{v for e in jaxpr.eqns for v in hashable(updated_by(e))} for jaxpr in inner]
        return [
            x
            for jaxpr, own in zip(inner, owned, strict=True)
            for x, v in zip(eqn.invars[1:], jaxpr.invars, strict=True)
            if v in own
        ]
    return []


def hashable(atoms):
    return [x for x in atoms if not isinstance(x, Literal)]


def reads_without_order(jaxpr):
    """Reads of rows that XLA may do before or after the last update of their buffer, as it likes."""
    inner, found = _compat.opened(jaxpr), []
    makers = {v: k for k, eqn in enumerate(inner.eqns) for v in eqn.outvars}
    needed = []  # by each equation: the equations that its operands are made by, and theirs
    for eqn in inner.eqns:
        direct = {makers[v] for v in hashable(eqn.invars) if v in makers}
        needed.append(direct.union(*(needed[k] for k in direct)))
    for k, eqn in enumerate(inner.eqns):
        found += [read for p in jaxprs.jaxprs_in(eqn.params) for read in reads_without_order(p)]
        if eqn.primitive.name != "ta_read" or eqn.params.get("unordered"):
            continue
        buffer, rows = eqn.invars[0], eqn.outvars[0]
        owners = [m for m, other in enumerate(inner.eqns) if any(v is buffer for v in hashable(updated_by(other)))]
        if owners and 2 * rows.aval.size <= buffer.aval.size and not {k, owners[-1]} <= {k} | needed[k]:
            found += [eqn] if k not in needed[owners[-1]] else []
    return found


@pytest.mark.parametrize("transformation", [lambda f: f, jax.grad], ids=["forward", "gradient"])
@MANY
@given(program=programs(), name=st.sampled_from(["cpu", "cpu, by branches", "cuda"]))
def test_rows_are_read_before_their_buffer_is_updated(transformation, program, name):
    f = transformation(total(program, InJax()))
    before_slices = by_passes([each.name for each in passes_for(TARGETS[name][0])].index("slices"), name)
    found = before_slices(jax.make_jaxpr(f)(THETA, jnp.int32(program.start)))
    assert reads_without_order(found) == []
