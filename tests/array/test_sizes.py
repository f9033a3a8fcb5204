"""Arrays that grow, against Python lists: they have the list's rows, or raise where it is longer than its bound."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from array_machines import Library
from array_programs import Array, Body, Index, Lists, Loop, Op, Parity, Program, inputs, loss, made, run, weighted
from arrays import RUNTIME_ERRORS
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from in_numpy import in_numpy
from jax import lax

from jax_tensorarray import TensorArray, fori_loop, growing, tf, while_loop

pytestmark = pytest.mark.slow(but=2)

MOST = 40


def new(**options):
    return TensorArray(jnp.float64, size=0, dynamic_size=True, element_shape=(), **options)


# --- histories -------------------------------------------------------------------------------------------------
#
# Ops on one array before a loop that ends when the data say so, in each of its steps, and after it.

past, at_step = (
    made(lambda kind, n: Index(kind, n, 1, "raw", "int"), st.just(kind), st.integers(0, 2)) for kind in ("size", "step")
)


def done(method, *at, where=None):
    where = st.none() if where is None else where
    return made(lambda at, row, where: Op(method, 0, at, row, where), st.tuples(*at), st.integers(0, 2), where)


append, pop = done("append"), done("pop")
OPS = weighted(
    {append: 3, pop: 2, done("write", past): 2, done("write", at_step): 2, done("scatter", at_step, at_step): 1}
)
masked = done("append", where=made(Parity, st.just("step"), st.integers(0, 1)))
#: The first two numbers are those of the steps of an example, of which there are two.
HISTORIES = made(
    lambda how, n, other, before, step, after: Program(
        *("float64", (), False, ((n, *[0] * 4), (other, *[0] * 4))),
        (Array(0, True, True, True, 0), *before, Loop(how, 6, 0, False, (0,), Body(tuple(step), (None,))), *after),
    ),
    st.sampled_from(["tf.while_loop", "tf.while_loop", "fori_loop", "while_loop"]),
    *[st.integers(0, 5)] * 2,
    st.lists(OPS, max_size=3),
    st.lists(weighted({OPS: 8, masked: 1}), min_size=1, max_size=2),
    st.lists(OPS, max_size=1),
)


class Grown(Library):
    """Also says which bound the array has at last."""

    def ends(self, scope):
        self.bound = scope.arrays[-1].value._rows.spec.max_size
        return super().ends(scope)


@pytest.mark.parametrize("how", ["given", "found", "known", "growing"])
@settings(max_examples=max(settings.default.max_examples // 5, 3))  # XLA compiles each
@given(program=HISTORIES, most=st.integers(0, 12))
def test_a_history_gives_the_rows_of_a_list_or_raises_where_it_is_too_long(how, program, most):
    if looping := {"known": "python", "growing": "tf.while_loop"}.get(
        how
    ):  # the latter has no bound of its steps there
        loops = [s._replace(how=looping) if isinstance(s, Loop) else s for s in program.statements]
        program = program._replace(statements=tuple(loops))
    args, numbers = inputs(program, 0), np.asarray(program.numbers, np.int32)
    machine = Grown(program, most if how == "given" else None, MOST, has_bounds=how != "growing")

    def value(args, numbers):
        results = run(machine, program, numbers, *args)
        return loss(machine, results), results

    bound = most if how == "given" else MOST
    if how == "found":
        try:
            jax.eval_shape(value, args, numbers[0])
        except (IndexError, ValueError):  # after the loop it grows no further than what the loop has found, if it has
            assume(False)
        bound = MOST if machine.bound is None else machine.bound

    def by_list(k):
        """What is wrong, and else the values and the gradient."""
        lists = Lists(program, jnp, bound, MOST)

        def f(args):
            results = run(lists, program, program.numbers[k], *args)
            return loss(lists, [*results]), results

        found = in_numpy(jax.value_and_grad(f, has_aux=True))(args)
        return lists.failures, found

    def compiled(f):
        return growing(f, initial_bound=8) if how == "growing" else jax.jit(f)

    def judged(run, failures, wanted):
        if any(failures):
            with pytest.raises((*RUNTIME_ERRORS, IndexError)):
                jax.block_until_ready(run())
        else:
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9), run(), wanted)

    derivative = jax.value_and_grad(value, has_aux=True)
    (failures, wanted), (of_other, other) = by_list(0), by_list(1)
    if how == "known":
        judged(lambda: compiled(lambda args: derivative(args, program.numbers[0]))(args), [failures], wanted)
        return
    judged(lambda: compiled(derivative)(args, numbers[0]), [failures], wanted)
    if failures:  # also if nobody looks at a row
        judged(lambda: compiled(lambda args, numbers: value(args, numbers)[1][-1])(args, numbers[0]), [failures], None)
    both = None if failures or of_other else jax.tree.map(lambda *x: np.stack(x), wanted, other)
    judged(lambda: compiled(jax.vmap(derivative, (None, 0)))(args, numbers), [failures, of_other], both)


# --- where a bound comes from ----------------------------------------------------------------------------------


def as_counted(s):
    return s._replace(method=s.method if s.method == "pop" else "append", at=(), where=None) if isinstance(s, Op) else s


#: Each operation adds or takes one row, so the number of operations bounds the number of rows.
COUNTED = HISTORIES.map(
    lambda program: program._replace(
        statements=tuple(
            s._replace(body=s.body._replace(statements=tuple(map(as_counted, s.body.statements))))
            if isinstance(s, Loop)
            else as_counted(s)
            for s in program.statements
        )
    )
)


@settings(max_examples=4 * settings.default.max_examples)
@given(COUNTED)
def test_a_loop_finds_room_for_all_that_its_steps_append(program):
    sizes, _, *statements = [0], *program.statements
    for s in statements:
        for op in s.body.statements * s.steps if isinstance(s, Loop) else [s]:
            sizes.append(sizes[-1] + (1 if op.method == "append" else -1))
        if isinstance(s, Loop):
            needed = max(sizes)
    assume(min(sizes) >= 0)
    machine = Grown(program, None, MOST)
    jax.eval_shape(lambda numbers, args: run(machine, program, numbers, *args), np.int32([6] * 5), inputs(program, 0))
    assert machine.bound is None or machine.bound >= needed


def test_a_loop_finds_the_rows_that_each_step_appends():
    @jax.jit
    def three_a_step():
        def body(i, ta):
            return i + 1, ta.append(1.0 * i).append(2.0 * i).append(3.0 * i)

        return tf.while_loop(lambda i, _: i < 2, body, (0, new().write(0, 9.0)), maximum_iterations=4)[1]

    ta = three_a_step()
    assert ta.stack().tolist() == [9, 0, 0, 0, 1, 2, 3]
    assert ta.stack(pad=True).shape == (1 + 3 * 4,)


def test_after_a_loop_of_jax_it_grows_again():
    @jax.jit
    def f(x):
        ta = lax.fori_loop(0, 3, lambda i, ta: ta.write(0, ta.read(0) + 1.0), new().append(x))
        ta = lax.cond(x > 0, lambda ta: ta, lambda ta: ta.write(0, x), ta.append(x))
        ta = lax.scan(lambda ta, _: (ta, None), ta.append(2.0), None, 2)[0]
        return ta.append(3.0).stack()

    assert f(1.0).tolist() == [4, 1, 2, 3]


def test_both_branches_of_a_conditional_may_append():
    f = jax.jit(lambda p, ta: lax.cond(p, lambda: ta.append(1.0), lambda: ta.append(2.0)).stack())
    assert f(False, new().append(5.0)).tolist() == [5, 2]


@pytest.mark.parametrize(
    "loop",
    [
        lambda ta, write: tf.while_loop(lambda i, _: i < 3, lambda i, ta: (i + 1, write(i, ta)), (0, ta)),
        lambda ta, write: jax.jit(lambda n: fori_loop(0, n, write, ta))(3),
        lambda ta, write: while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, write(*c)), (0, ta)),
    ],
    ids=["tf.while_loop", "fori_loop", "while_loop"],
)
@pytest.mark.parametrize(
    "write",
    [lambda i, ta: ta.write(i, 1.0), lambda i, ta: ta.write(ta.size(), 1.0), lambda i, ta: ta.append(1.0)],
    ids=["write", "write_at_size", "append"],
)
def test_a_loop_without_a_bound_says_which_bounds_there_are(loop, write):
    with pytest.raises(ValueError, match=r"no further than max_size: give TensorArray\(\.\.\., max_size=n\)") as e:
        loop(new(), write)
    assert "maximum_iterations" in str(e.value) and "growing(f)" in str(e.value)
    with jax.disable_jit():  # a loop of Python needs none
        assert jax.tree.leaves(loop(new(), write), is_leaf=lambda x: isinstance(x, TensorArray))[-1].size() == 3


# --- rows that there are ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["stack", "concat"])
def test_without_pad_there_are_as_many_rows_as_were_written_or_an_error(method):
    def two(n):
        ta = TensorArray(jnp.float64, size=0, dynamic_size=True, element_shape=[2], max_size=3)
        return fori_loop(0, n, lambda i, ta: ta.append(jnp.full(2, 1.0 + i)), ta)

    with pytest.raises(TypeError) as e:
        jax.jit(lambda n: getattr(two(n), method)())(2)
    for part in (f"TensorArray.{method}: ", "up to 3", f"{method}(pad=True)", "mask()", "where="):
        assert part in str(e.value)
    rows = [[1, 1], [2, 2], [0, 0]]
    as_shown = np.array if method == "stack" else np.concatenate
    padded = jax.jit(lambda n: getattr(two(n), method)(pad=True))(2)
    np.testing.assert_array_equal(padded, as_shown(rows))
    for ta in (two(2), jax.jit(two)(2)):
        np.testing.assert_array_equal(getattr(ta, method)(), as_shown(rows[:2]))
    with pytest.raises(TypeError, match=rf"TensorArray\.{method}: pad must be True or False, got 1"):
        getattr(two(2), method)(pad=1)


def test_the_mask_of_every_kind_of_array():
    assert TensorArray(jnp.float64, size=2).mask().tolist() == [True, True]
    assert TensorArray(jnp.float64, size=2, element_shape=()).write(0, 1.0).mask().tolist() == [True, True]
    assert new().append(1.0).append(2.0).append(3.0).pop()[0].mask().tolist() == [True, True]
    assert new(max_size=3).append(1.0).mask().tolist() == [True, False, False]
    assert TensorArray(jnp.float64, 1, True, max_size=3).mask().tolist() == [True, False, False]
    ragged = TensorArray(jnp.float64, 0, True, infer_shape=False).append(jnp.ones(1)).append(jnp.ones(2))
    assert ragged.mask().tolist() == [True, True]
    masks = jax.jit(jax.vmap(lambda n: fori_loop(0, n, lambda i, ta: ta.append(1.0), new(max_size=3)).mask()))
    assert masks(jnp.array([0, 2])).tolist() == [[False] * 3, [True, True, False]]


def test_rows_of_one_shape_that_are_kept_one_by_one_are_padded_too():
    ta = TensorArray(jnp.float64, 0, True, infer_shape=False, max_size=3).append(jnp.ones(2))
    assert ta.stack().shape == (1, 2)
    assert ta.stack(pad=True).tolist() == [[1, 1], [0, 0], [0, 0]]
    assert ta.concat(pad=True).shape == (6,)
    with pytest.raises(ValueError, match="no padding of rows of different shapes"):
        ta.append(jnp.ones(1)).concat(pad=True)


# --- texts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        lambda i, ta: ta.append(sum(ta.read(k) for k in range(ta.size()))),
        lambda i, ta: ta.append(ta.stack(pad=True)[:i].sum()),
        lambda i, ta: ta.append(ta.gather(jnp.arange(0, i + 1)).sum()),
    ],
    ids=["range", "slice", "arange"],
)
def test_a_traced_size_that_is_used_as_a_shape_is_the_error_of_jax_and_says_what_to_write(body):
    with pytest.raises((TypeError, IndexError)) as e:
        tf.while_loop(lambda i, _: i < 3, lambda i, ta: (i + 1, body(i, ta)), (0, new(max_size=4).append(1.0)))
    assert type(e.value).__module__.startswith(("jax", "builtins"))
    assert "`fori_loop(0, ta.size(), ...)`" in str(e.value) and "`ta.mask()`" in str(e.value)


def test_other_errors_of_a_loop_stay_as_they_are():
    with pytest.raises(TypeError) as e:
        while_loop(lambda i: i < 3, lambda i: i + len(range(i)), 0)
    assert "ta.size()" not in str(e.value)
    with pytest.raises(IndexError) as e:
        tf.while_loop(lambda i, ta: i < 3, lambda i, ta: [ta][int(ta.dynamic_size) + 1], (0, new(max_size=4)))
    assert "ta.size()" not in str(e.value)


def test_two_branches_whose_arrays_differ_are_told_apart():
    def array(**options):
        return TensorArray(jnp.float64, size=2, element_shape=(), **options)

    for one, other, texts in (
        (array(), array(dynamic_size=True), ("a fixed size", "dynamic_size=True without max_size")),
        (array(dynamic_size=True, max_size=2), array(dynamic_size=True, max_size=3), ("max_size=2", "max_size=3")),
    ):
        with pytest.raises(TypeError) as e:
            lax.cond(True, lambda one=one: one, lambda other=other: other)
        assert all(text in str(e.value) for text in texts)


def test_unknown_shapes_in_a_loop_and_infer_shape():
    ta = TensorArray(jnp.float64, size=2, infer_shape=False)
    with pytest.raises(TypeError, match="If all rows have one shape, leave infer_shape=False out"):
        tf.while_loop(lambda i, ta: i < 2, lambda i, ta: (i + 1, ta.write(i, 1.0)), (0, ta))


def test_an_index_of_another_library_is_named():
    class Tensor:
        dtype, shape, ndim = "int32", (), 0

    with pytest.raises(TypeError, match=r"TensorArray\.read: index must be an integer, got \w+\.Tensor of int32"):
        TensorArray.from_array(jnp.arange(3.0)).read(Tensor())
