"""`tf.TensorArray` in `tf.function`, with and without XLA."""

import os
import platform

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from benchmarks.inputs import inputs
from benchmarks.rivals import Prepared
from benchmarks.rivals import programs as texts


def versions():
    return {"Python": platform.python_version(), "tensorflow": tf.__version__, "numpy": np.__version__}


class Rows:
    """A `tf.TensorArray` with `append`. TensorFlow's loops cannot carry it, so they carry the array inside."""

    def __init__(self, ta):
        self.ta = ta

    def read(self, i):
        return self.ta.read(i)

    def write(self, i, value):
        return Rows(self.ta.write(i, value))

    def append(self, value):
        return Rows(self.ta.write(self.ta.size(), value))


class Input:
    """The rows of `x`. They are read from a TensorArray, since each `x[i]` has a gradient of the size of `x`."""

    def __init__(self, x):
        self.tensor, self.shape = x, x.shape
        self.ta = tf.TensorArray(x.dtype, x.shape[0], clear_after_read=False, element_shape=x.shape[1:]).unstack(x)

    def __getitem__(self, i):
        return self.ta.read(i)


class InTensorFlow:
    sum, tanh, sin, cos = (staticmethod(f) for f in (tf.reduce_sum, tf.tanh, tf.sin, tf.cos))
    sigmoid, log_softmax = staticmethod(tf.sigmoid), staticmethod(tf.nn.log_softmax)
    matmul, take, array = staticmethod(tf.matmul), staticmethod(tf.gather), staticmethod(tf.constant)

    @staticmethod
    def _array(size, shape, dtype=tf.float32, dynamic_size=False):
        return tf.TensorArray(dtype, size, dynamic_size, clear_after_read=False, element_shape=shape)

    @staticmethod
    def unstack(x):
        return Rows(x.ta)

    @staticmethod
    def zeros(x):
        return Rows(Input(tf.zeros_like(x.tensor)).ta)

    @staticmethod
    def ones(x):
        return Rows(Input(tf.ones_like(x.tensor)).ta)

    @classmethod
    def empty(cls, size, shape, integer=False):
        return Rows(cls._array(size, shape, tf.int32 if integer else tf.float32))

    @classmethod
    def growing(cls, x):
        return Rows(cls._array(0, x.shape[1:], dynamic_size=True))

    @staticmethod
    def dense(rows):
        return rows.ta.stack()

    @staticmethod
    def loop(stop, body, carry, start=0):
        is_rows = [isinstance(c, Rows) for c in carry]

        def inside(carry):
            return [c.ta if isinstance(c, Rows) else c for c in carry]

        def outside(carry):
            return [Rows(c) if is_one else c for c, is_one in zip(carry, is_rows, strict=True)]

        return outside(
            tf.while_loop(
                lambda i, *_: i < stop,
                lambda i, *c: (i + 1, *inside(body(i, *outside(c)))),
                (tf.constant(start), *inside(carry)),
                maximum_iterations=stop - start,
            )[1:]
        )

    @staticmethod
    def matvec(w, v, transpose=False):
        return tf.linalg.matvec(w, v, transpose_a=transpose)

    @staticmethod
    def concat(parts):
        return tf.concat(parts, 0)

    @staticmethod
    def ravel(x):
        return tf.reshape(x, [-1])

    @staticmethod
    def top_k(x, k):
        return tuple(tf.math.top_k(x, k))

    @staticmethod
    def cast(i):
        return tf.cast(i, tf.float32)

    @staticmethod
    def zeros_of(shape, integer=False):
        return tf.zeros(shape, tf.int32 if integer else tf.float32)


def _eager_write(T, row):
    """A Python loop of writes without any compilation."""
    value = tf.range(row, dtype=tf.float32)

    def run():
        ta = tf.TensorArray(tf.float32, T, clear_after_read=False, element_shape=(row,))
        for i in range(T):
            ta = ta.write(i, value)
        return ta.stack()

    return Prepared(run, lambda stacked: [stacked.numpy()])


def prepare(case, rival, derivative, T, row):
    if case == "eager_write":
        return _eager_write(T, row)
    program = getattr(texts, case)
    args = [tf.constant(a) for a in inputs(case, T, row)]

    def loss(x, *weights):
        return program(InTensorFlow, Input(x), *weights)

    @tf.function(autograph=False, jit_compile=rival == "tf_xla")
    def f(*args):
        if derivative == "forward":
            return [loss(*args)]
        with tf.GradientTape() as tape:
            tape.watch(args)
            total = loss(*args)
        return [total, *tape.gradient(total, args, unconnected_gradients="zero")]

    def run():
        found = f(*args)
        found[0].numpy()  # the values are there
        return found

    return Prepared(run, lambda found: [t.numpy() for t in found], compiles_on_call=True)
