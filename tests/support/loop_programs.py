"""Programs with loops, run by the library and by Python, and their derivatives."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import unrolled
from in_numpy import in_numpy, one_by_one_in_numpy
from jax import lax

import jax_tensorarray as ta
from jax_tensorarray import ta_add, ta_read, ta_swap, ta_write

MAX = 6  # steps
ROWS = 6

# --- one program, run by the library and by Python -------------------------------------------------------------


def python_while(cond_fun, body_fun, carry, *, max_steps=MAX):
    taken = 0
    while (max_steps is None or taken < max_steps) and cond_fun(carry):
        carry, taken = body_fun(carry), taken + 1
    return carry


def python_fori(lower, upper, body_fun, carry, *, max_steps=MAX):
    for i in range(int(lower), int(upper))[:max_steps]:
        carry = body_fun(i, carry)
    return carry


def library(residuals="auto", checkpoint=jax.checkpoint):
    options = {"max_steps": MAX, "on_limit": "stop", "residuals": residuals}
    return types.SimpleNamespace(
        while_loop=functools.partial(ta.while_loop, **options),
        checkpoint=checkpoint,
        read=ta_read,
        write=ta_write,
        add=ta_add,
        swap=ta_swap,
        select=jnp.where,
        truth=jnp.asarray,
    )


OURS = library()
PYTHON = types.SimpleNamespace(
    while_loop=python_while,
    checkpoint=lambda f: f,
    read=unrolled.ta_read,
    write=unrolled.ta_write,
    add=unrolled.ta_add,
    swap=unrolled.ta_swap,
    select=lambda p, x, y: x if p else y,
    truth=bool,
)

#: name -> function of (lib, p, n) that gives a vector. p is [2 + ROWS], n the number of steps asked for.
#: These are what random programs, and loops in loops, make never or seldom. Arrays have a grammar of their own.
PROGRAMS: dict[str, Any] = {}


def program(f):
    PROGRAMS[f.__name__] = f
    return f


def vector(*arrays):
    return jnp.concatenate([jnp.ravel(jnp.asarray(a, float)) for a in arrays])


def split(p):
    return p[0], p[1], p[2:]


def counted(lib, n, step, *carry):
    """`carry = step(i, *carry)` n times."""
    return lib.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, *step(*c)), (0, *carry))[1:]


@program
def carries_of_every_kind(lib, p, n):
    """A pytree; integers, a bool and a complex number; what is not used, not changed, or has its gradient stopped."""
    x, w, b = split(p)

    def step(i, c, k, flag, z, y, same, unused):
        dead = jnp.exp(unused) + lib.read(c["rows"], i)
        del dead
        stopped = lax.stop_gradient(lib.read(c["rows"], i // 2)) + lax.stop_gradient(y)
        new = {"rows": lib.write(c["rows"], i, c["pair"][0]), "pair": (c["pair"][1] * w, [jnp.sin(c["pair"][0])][0])}
        z = z * jnp.exp(1j * w) + y
        y = lib.select(flag, y * jnp.real(z), jnp.sin(jnp.imag(z)) * k) * same + stopped
        return new | {"none": None}, (3 * k + i) % 7, lib.truth(k % 2 == 0), z, y, same, unused + y

    start = {"rows": b, "pair": (x, w), "none": None}, 1, lib.truth(True), x + 1j * b[0], w, x, 0.0
    c, k, flag, z, y, _, _ = counted(lib, n, step, *start)
    return vector(c["rows"], *c["pair"], k, flag, jnp.real(z), jnp.imag(z), y)


@program
def a_loop_that_depends_on_the_data_in_a_loop(lib, p, n):
    x, w, b = split(p)

    def step(i, y):
        z = lib.while_loop(lambda z: jnp.abs(z) < 0.5 + 0.2 * i, lambda z: z * 1.5 + w * y, y)
        return (jnp.cos(z) * lib.read(b, i),)

    return vector(*counted(lib, n, step, x))


@program
def a_checkpointed_loop(lib, p, n):
    """And a checkpointed body, which reads two versions of a buffer."""

    def step(i, w, x, y, b):
        new, old = lib.swap(b, i, y * lib.read(b, i))
        return jnp.sin(old * w + lib.read(b, i) + lib.read(new, i // 2)) * x, lib.add(new, 1, old)

    def loop(x, w, b):
        return counted(lib, n, lambda i, y, b: lib.checkpoint(functools.partial(step, i))(w, x, y, b), x, b)

    return vector(*lib.checkpoint(loop)(*split(p)))


# --- derivatives ----------------------------------------------------------------------------------------------

_rng = np.random.default_rng(0)
POINT = _rng.uniform(0.3, 0.9, 2 + ROWS)
DIRECTION = _rng.normal(size=POINT.shape)
STEPS = (0, 4, MAX, MAX + 3)  # none, some, all, cut short
TOLERANCE = 1e-12


def weights(k):
    return jnp.asarray(np.linspace(-1.0, 1.2, k))


def evaluated(f, *args):
    """`f(*args)` by NumPy, one operation after the other if it branches on what it computes."""
    try:
        return in_numpy(f)(*args)
    except jax.errors.TracerBoolConversionError:
        with one_by_one_in_numpy():
            return f(*map(jnp.asarray, args))


@functools.cache
def _expected(name, n, order, point):
    f = functools.partial(PROGRAMS[name], PYTHON, n=n)
    for _ in range(order):
        f = jax.jacfwd(f)
    return np.asarray(evaluated(f, np.asarray(point)))


def expected(name, n, order, point=POINT):
    """The derivative of an order, of the loop unrolled: [outputs, inputs, ...]."""
    return _expected(name, int(n), order, tuple(map(float, point)))


def weighted(d):
    """The derivative of the weighted sum of the outputs."""
    return np.tensordot(weights(len(d)), d, 1)


def loss(f):
    def weighted_sum(p, *args):
        y = f(p, *args)
        return jnp.vdot(weights(len(y)), y)

    return weighted_sum


def gradient(f):
    return jax.grad(loss(f))


def assert_close(found, wanted, message=""):
    scale = max(1.0, np.max(np.abs(wanted), initial=0.0))
    np.testing.assert_allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE * scale, err_msg=message)


def pushed(f):
    return lambda p: jax.jvp(f, (p,), (jnp.asarray(DIRECTION),))[1]


def along(d):
    return d @ DIRECTION


def weighted_along(d):
    return weighted(d) @ DIRECTION


BATCH_STEPS = np.array([4, 0, MAX + 3, 1])
POINTS = POINT + 0.05 * _rng.normal(size=(4, 2 + ROWS))


def up_to(n):
    return lambda c: c[0] < n
