"""What the examples compute with, in TensorFlow."""

from typing import Any

import tensorflow as tf

matmul, tanh, repeat, softmax, take = tf.matmul, tf.tanh, tf.repeat, tf.nn.softmax, tf.gather
expand_dims, zeros_like, int32, float32, asarray = (
    *(lambda x: tf.expand_dims(x, -1), tf.zeros_like, tf.int32, tf.float32),
    tf.convert_to_tensor,
)
TensorArray, TensorShape, total, transpose, where = (
    *(tf.TensorArray, tf.TensorShape, tf.reduce_sum, tf.transpose),
    tf.where,
)
in_xla = False


def reverse(x: Any, axis: int) -> Any:
    return tf.reverse(x, [axis])


def argmax(x: Any) -> Any:
    return tf.argmax(x, -1, output_type=tf.int32)


def cond(pred: Any, true_fn: Any, false_fn: Any) -> Any:
    return (true_fn() if pred else false_fn()) if isinstance(pred, bool) else tf.cond(pred, true_fn, false_fn)


def gradient(f: Any) -> Any:
    def derived(x: dict[str, Any]) -> dict[str, Any]:
        x = {name: tf.convert_to_tensor(value) for name, value in x.items()}
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        return {
            name: tf.convert_to_tensor(dx) for name, dx in tape.gradient(y, x, unconnected_gradients="zero").items()
        }

    return derived
