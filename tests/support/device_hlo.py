"""Programs compiled for a device that is not there: on none may a step of a loop touch a whole buffer.

`test_gpu_hlo.py` and `test_tpu.py` compile each of `CASES` and prove that of its HLO.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import loop_steps as loops
import pytest
from catalogue import plain_loops, reported
from catalogue.loop import ORDERS, arguments
from in_place import assert_no_whole_buffer_operation
from jax import lax
from row_programs import ours, plain, programs

from jax_tensorarray import TensorArray, in_place, ta_max, ta_read, ta_write
from jax_tensorarray._hlo import ahead


def along_itself(f):
    return lambda x: jax.jvp(f, (x,), (x,))[1]


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "forward": lambda f: f,
    "gradient": jax.grad,
    "second order": lambda f: along_itself(jax.grad(f)),
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x + 1])),
    "vmap of gradient": lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, x + 1])),
}


class Case(NamedTuple):
    """A function and its arguments. The first is as large as the buffers of all examples together."""

    f: Callable[..., Any]
    args: tuple[jax.Array, ...]
    examples: int = 1


def buffer(length=1000, row=64):
    return jnp.zeros((length, row), jnp.float32)


def maxima(x):
    def body(b, i):
        return ta_max(b, i // 2, jnp.sin(ta_read(b, i))), None

    return jnp.sum(lax.scan(body, x, jnp.arange(len(x)))[0] ** 2)


def tensorarray(x):
    def body(i, array):
        return array.write(i, jnp.sin(array.read(i - 1)) + x[i])

    array = TensorArray(jnp.float32, size=len(x), element_shape=x.shape[1:]).write(0, x[0])
    return jnp.sum(lax.fori_loop(1, len(x), body, array).stack() ** 2)


def made_before_two_loops(x):
    """From a row: XLA would rather make the buffer in each step of the outer loop than keep it."""
    source = x[0] * jnp.cos(jnp.arange(len(x), dtype=x.dtype))[:, None]

    def body(i, b):
        row = lax.fori_loop(0, 5, lambda k, s: s + jnp.sin(ta_read(source, (i * k) % len(x))), jnp.zeros_like(x[0]))
        return ta_write(b, i, row)

    return jnp.sum(lax.fori_loop(0, len(x), body, x) ** 2)


def our_loop(name, transform):
    return Case(TRANSFORMS[transform](functools.partial(loops.run, name)), (buffer(200, loops.ROW),))


def batched(name, transform):
    f = functools.partial(loops.BATCHED[transform], functools.partial(loops.run, name))
    return Case(f, (loops.batch(200), jnp.zeros(3, jnp.int32)), loops.BATCH)


def of_catalogue(loop, args=None):
    order = loop.orders[0]
    args = tuple(map(jnp.asarray, args or arguments(loop, order)))
    return Case(ORDERS[order](loop.f, in_place, loop.by), args)


#: Beside `programs`: kind, name and transform -> a case, made in 32 bits.
CASES: dict[tuple[str, str, str], Callable[[], Case]] = {
    **{
        ("loop", f.__name__, transform): lambda f=f, transform=transform: Case(
            TRANSFORMS[transform](functools.partial(f)), (buffer(),)
        )
        for f in (maxima, tensorarray, made_before_two_loops)
        for transform in TRANSFORMS
    },
    # Each loop has a gradient, and is transformed in one other way.
    **{("our loop", name, "gradient"): functools.partial(our_loop, name, "gradient") for name in loops.STEPS},
    **{
        ("our loop", name, by): functools.partial(batched if by in loops.BATCHED else our_loop, name, by)
        for name, by in zip(loops.STEPS, itertools.cycle(["forward", *loops.BATCHED]), strict=False)
    },
    # "divided" is among CPUs.
    **{
        ("plain loop", name, "in_place"): functools.partial(of_catalogue, loop, plain_loops.rows(1000))
        for name, loop in plain_loops.LOOPS.items()
        if name != "divided"
    },
    **{("reported", name, "in_place"): functools.partial(of_catalogue, loop) for name, loop in reported.LOOPS.items()},
}


def assert_no_loop_touches_a_whole_buffer(platform, case):
    with jax.enable_x64(False):
        f, args, examples = CASES[case]()
        text = ahead.compiled_for(platform, f, *args).as_text()
    assert_no_whole_buffer_operation(text, args[0].nbytes // examples)


@functools.cache
def hlo(platform, name, transform, library, lowering="auto"):
    """The HLO of one of `programs`, in "ours" or in "plain" JAX."""
    with jax.enable_x64(False), pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_TENSORARRAY_LOWERING", lowering)
        f = programs[name].with_ops({"ours": ours, "plain": plain}[library])
        return ahead.compiled_for(platform, TRANSFORMS[transform](f), buffer()).as_text()


def assert_the_proof_fails_for_plain_jax(platform):
    with pytest.raises(AssertionError, match="whole buffer in a loop"):
        assert_no_whole_buffer_operation(hlo(platform, "read_then_write", "gradient", "plain"), buffer().nbytes)
