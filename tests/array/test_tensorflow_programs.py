"""Programs of TensorArrays give in TensorFlow the values of Python lists, but for defects listed by name.

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
import oracle
import pytest
from array_programs import Cond, Lists, Loop, compiled, inputs, loss, programs, pruned, run
from hypothesis import given, note
from in_numpy import in_numpy
from random_programs import weighted

import jax_tensorarray as jt

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
    """tf.function. Indices that repeat have no right gradient, and a scatter makes no array longer: see DEFECTS."""

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


# --- where TensorFlow answers something else ---------------------------------------------------------------------

X = np.array([1.0, 2.0, 3.0])


def new(ta, size=3, dynamic=False, **options):
    """An array of float64: `ta` is TensorFlow's class or ours."""
    return ta("float64", size, dynamic, clear_after_read=False, **options)


class Defect(NamedTuple):
    """A program on which TensorFlow differs: `ta` is the class, `x` the input; and where it does."""

    program: Any
    answer: Any  #: value, from NumPy
    where: str  #: "eager", "graph" or "XLA"
    what: str  #: "value", "gradient" or "error"


DEFECTS = {
    "gather of a row twice: the gradient has one of the two": Defect(
        lambda ta, x: new(ta).unstack(x).gather([0, 0, 1]), lambda x: x[[0, 0, 1]], "graph", "gradient"
    ),
    "scatter of two rows to one place: both get its gradient": Defect(
        lambda ta, x: new(ta).scatter([1, 1], x[:2]).stack(), lambda x: [0 * x[0], x[1], 0 * x[0]], "graph", "gradient"
    ),
    "scatter past the end of an array of dynamic size": Defect(
        lambda ta, x: new(ta, 1, True, max_size=4).scatter([0, 3], x[:2]).stack(),
        lambda x: [x[0], 0 * x[0], 0 * x[0], x[1]],
        "graph",
        "error",
    ),
    "a row over one of another shape": Defect(
        lambda ta, x: new(ta, 2, infer_shape=False).split(x, [1, 2]).write(1, x[:1]).concat(),
        lambda x: x[[0, 0]],
        "graph",
        "error",
    ),
    "a write changes the old version": Defect(
        lambda ta, x: (lambda old: old.write(0, x[1]).read(0) + 10 * old.read(0))(new(ta).unstack(x)),
        lambda x: x[1] + 10 * x[0],
        "eager",
        "value",
    ),
    "stack of rows past the first size": Defect(
        lambda ta, x: new(ta, 1, True, element_shape=(), max_size=3).write(0, x[0]).write(2, x[2]).stack(),
        lambda x: [x[0], 0 * x[0], x[2]],
        "XLA",
        "value",
    ),
    "scatter": Defect(
        lambda ta, x: new(ta, element_shape=()).scatter([2, 0], x[:2]).stack(),
        lambda x: [x[1], 0 * x[0], x[0]],
        "XLA",
        "error",
    ),
    "split into rows of different lengths": Defect(
        lambda ta, x: new(ta, 2, infer_shape=False).split(x, [1, 2]).concat(), lambda x: x, "XLA", "error"
    ),
}


def tensorflow_array(*args, max_size=None, **options):
    return tf.TensorArray(*args, **options)


def answer_of_tensorflow(defect):
    """Value, and gradient of its sum weighted with 1, 2, ... unless the value is wrong already; or the error."""

    def f(x):
        if defect.what == "value":
            return tf.convert_to_tensor(defect.program(tensorflow_array, x)), x
        with tf.GradientTape() as tape:
            tape.watch(x)
            out = tf.convert_to_tensor(defect.program(tensorflow_array, x))
            total = tf.reduce_sum(out * tf.cast(tf.reshape(1 + tf.range(tf.size(out)), tf.shape(out)), out.dtype))
        return out, tape.gradient(total, x, unconnected_gradients="zero")

    if defect.where != "eager":
        f = tf.function(f, autograph=False, jit_compile=defect.where == "XLA")
    try:
        return [t.numpy() for t in f(tf.constant(X))]
    except tf.errors.OpError as error:
        return error


def weighted(out):
    return (out * (1 + np.arange(np.size(out))).reshape(np.shape(out))).sum()


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", DEFECTS)
def test_our_answer_is_right_where_tensorflow_differs(name, jit):
    program, answer, *_ = DEFECTS[name]

    def f(x):
        out = program(jt.TensorArray, x)
        return weighted(out), out

    gradient, out = (jax.jit if jit else lambda f: f)(jax.grad(f, has_aux=True))(jnp.asarray(X))
    np.testing.assert_array_equal(out, answer(X))
    (expected,) = oracle.gradient(lambda x: weighted(np.asarray(answer(x))), [X])
    np.testing.assert_allclose(gradient, expected, atol=1e-8)


@pytest.mark.parametrize("name", DEFECTS)
def test_tensorflow_still_differs(name):
    defect = DEFECTS[name]
    got = answer_of_tensorflow(defect)
    if defect.what == "error":
        assert isinstance(got, tf.errors.OpError)
        return
    value, gradient = got
    right = np.asarray(defect.answer(X))
    if defect.what == "value":
        assert value.shape != right.shape or np.any(value != right)
    else:
        np.testing.assert_array_equal(value, right)
        (expected,) = oracle.gradient(lambda x: weighted(np.asarray(defect.answer(x))), [X])
        assert np.abs(gradient - expected).max() > 0.5
