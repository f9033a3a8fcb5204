"""Programs of TensorArrays give in TensorFlow the values of Python lists.

Without loops and branches they give the gradients, too. So the lists, against which this library is tested, mean what
TensorFlow means.

TENSORFLOW_PROGRAMS=1000 pytest tests/array/test_tensorflow_programs.py    runs more of them than usual
"""

import functools
import os
import warnings
from types import SimpleNamespace
from typing import Any, NamedTuple

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from array_programs import Cond, Lists, Loop, compiled, inputs, loss, programs, pruned, run
from hypothesis import given, note
from in_numpy import in_numpy
from random_programs import weighted

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    tf = pytest.importorskip("tensorflow", reason="pip install 'jax-tensorarray[tensorflow]'")

#: By nine, since hypothesis begins to vary programs when there are more.
SEEDS = range(int(os.environ.get("TENSORFLOW_PROGRAMS", "150")) // 9)


# --- programs --------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """A tf.TensorArray. Its updates are of this class, too."""

    ta: Any

    def __getattr__(self, name):
        def method(*args):
            found = getattr(self.ta, name)(*args)
            return self._replace(ta=found) if isinstance(found, tf.TensorArray) else found

        if name.startswith("_") or not callable(getattr(tf.TensorArray, name, None)):
            raise AttributeError(name)
        return method


class OneByOne(Rows):
    """Rows of a gather or scatter are read or written by themselves."""

    def gather(self, indices):
        return tf.stack([self.ta.read(i) for i in tf.unstack(indices)])

    def scatter(self, indices, rows):
        return functools.reduce(lambda ta, k: ta.write(indices[k], rows[k]), range(rows.shape[0]), self)


class TensorFlow(Lists):
    """tf.function. Indices that repeat have no right gradient there, and a scatter makes no array longer."""

    errors = ()

    def __init__(self, program, has_gradient):
        names = ("sin", "tanh", "reshape", "maximum", "zeros", "zeros_like")
        math = SimpleNamespace(**{name: getattr(tf, name) for name in names}, sum=tf.reduce_sum)
        super().__init__(program, math)
        self.has_gradient = has_gradient

    def array(self, spec):
        shape = self.program.elem if spec.shaped else None
        options = {"clear_after_read": False, "infer_shape": spec.infer_shape, "element_shape": shape}
        ta = tf.TensorArray(tf.as_dtype(self.program.dtype), spec.size, spec.dynamic, **options)
        return (OneByOne if self.has_gradient or spec.dynamic else Rows)(ta)

    def shaped(self, value, shape):
        return tf.ensure_shape(value, shape)

    def again(self, ta, how):
        return ta.identity()

    def index(self, n, dtype):
        return n

    def at_least_one(self, n):
        return tf.maximum(n, 1)

    def vector(self, xs):
        return tf.stack(xs)

    def padded(self, rows, count):
        more = tf.maximum(count - tf.shape(rows)[0], 0)
        return tf.ensure_shape(tf.pad(rows, [[0, more], *[[0, 0]] * (len(rows.shape) - 1)]), (count, *rows.shape[1:]))

    def mask(self, entry):
        return tf.range(self.rows_of(entry)) < entry.value.size()

    def loop(self, s, trips, once, carry):
        return tf.while_loop(lambda i, _: i < trips, lambda i, c: (i + 1, once(i, c)), (tf.constant(0), carry))[1]

    def cond(self, how, test, branches, carry, seen):
        return tf.cond(test, *[lambda f=f: f(carry, seen) for f in branches])


def in_tensorflow(program, has_gradient):
    """Everything that a program has made, and the gradient of its loss."""

    @tf.function(autograph=False)
    def f(numbers, args):
        machine = TensorFlow(program, has_gradient)
        if not has_gradient:
            return run(machine, program, tf.unstack(numbers), *args), []
        with tf.GradientTape() as tape:
            tape.watch(args)
            results = run(machine, program, tf.unstack(numbers), *args)
            total = loss(machine, results)
        return results, tape.gradient(total, args, unconnected_gradients="zero")

    args = tf.constant(program.numbers[0]), tuple(map(tf.constant, inputs(program, 0)))
    return tf.nest.map_structure(lambda x: x.numpy(), f(*args))


def by_lists(args, program):
    machine = Lists(program, jnp)
    results = run(machine, program, program.numbers[0], *args)
    return loss(machine, results), results


def has_branches(node):
    """Whether there is a loop or a branch: TensorFlow 2.21 does not always finish to trace the gradient of one."""
    return isinstance(node, tuple) and (isinstance(node, Loop | Cond) or any(map(has_branches, node)))


def compare(program):
    note(program := pruned(program))
    args = inputs(program, 0)
    assert_equal(in_tensorflow(program, False)[0], run(Lists(program), program, program.numbers[0], *args))
    if program.dtype == "float64" and not has_branches(program):
        gradient, values = in_numpy(jax.grad(functools.partial(by_lists, program=program), has_aux=True))(args)
        assert_equal(in_tensorflow(program, True), (values, gradient))


def assert_equal(found, wanted):
    """Equal in shapes, dtypes and values: floats within 1e-12 of the largest, others exactly."""
    found, wanted = jax.tree.leaves(found), jax.tree.leaves(wanted)
    assert len(found) == len(wanted)
    for k, (x, y) in enumerate(zip(found, wanted, strict=True)):
        assert np.shape(x) == np.shape(y), k
        is_float = getattr(y, "dtype", None) == np.float64
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-12 * max(1, np.abs(y).max(initial=0)) if is_float else 0)


def of_depth(depth):
    statements = compiled(depth, masked=False, strays=False)
    return programs(statements, 6, 9, ("float64", "float64", "int32", "bool"), trees=0, is_portable=True)


PROGRAMS = weighted({of_depth(depth): 1 for depth in range(3)})


@pytest.mark.parametrize("seed", SEEDS)
def test_random_programs_give_in_tensorflow_what_they_give_with_lists(seed):
    hypothesis.seed(seed)(hypothesis.settings(max_examples=9)(given(PROGRAMS)(compare)))()
