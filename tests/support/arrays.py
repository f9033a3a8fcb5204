"""Small arrays, and what is said of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tensorarray import TensorArray

f64 = jnp.float64

#: JAX raises the former from the first call of a compiled function, and the latter from its fast path.
RUNTIME_ERRORS = (jax.errors.JaxRuntimeError, ValueError)


def out_of_range(method):
    """What the error at run time says. What makes an array grow may need a larger `max_size`."""
    grows = method in ("write", "scatter", "append")
    more = r" \(max_size=\d+; give a larger one for more rows\)" if grows else ""
    return rf"TensorArray\.{method}{more}: index -?\d is out of range"


eagerly_and_compiled = pytest.mark.parametrize(
    "run", [lambda f, *args: f(*args), lambda f, *args: jax.jit(f)(*args)], ids=["eager", "jit"]
)


def fixed(size=3, **options):
    return TensorArray(f64, size=size, **options)


def static(size=3, element_shape=(2,)):
    return fixed(size, element_shape=element_shape)


def growing(**kwargs):
    return TensorArray(f64, size=0, dynamic_size=True, **kwargs)


def of_size(n):
    return TensorArray(f64, size=n, dynamic_size=True, max_size=5, element_shape=())


def ragged(lengths=(2, 0, 3)):
    value = jnp.arange(float(sum(lengths)))
    return fixed(len(lengths), infer_shape=False).split(value, list(lengths))


def rows(ta):
    return np.asarray(ta.stack())
