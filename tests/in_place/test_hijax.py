"""HiJAX primitives and refs bound to gradients in the body of a loop: the answers of an unrolled loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_numpy import in_numpy
from jax import lax
from jax.experimental import hijax

from jax_tensorarray import doctor, fori_loop, in_place, ta_read, ta_write
from jax_tensorarray.residuals import Checkpoint

T = 40
HiPrim = getattr(hijax, "HiPrim" if hasattr(hijax, "HiPrim") else "VJPHiPrimitive")  # the name until 0.10


class Sine(HiPrim):
    """Without `lin`: it has a derivative under `jax.jvp` and `jax.vjp`, and none under `jax.linearize`."""

    def __init__(self, x):
        self.in_avals, self.out_aval, self.params = (x,), x, {}
        super().__init__()

    def expand(self, x):
        return jnp.sin(x)

    def vjp_fwd(self, nonzero, x):
        return self(x), x

    def vjp_bwd_retval(self, x, ct):
        return (ct * jnp.cos(x),)

    def jvp(self, primals, tangents):
        return self(*primals), tangents[0] * jnp.cos(primals[0])

    def batch(self, axis_data, args, dims):
        return Sine(jax.typeof(args[0]))(*args), dims[0]


def sine(x):
    return Sine(jax.typeof(x))(x)


def rows():
    return jnp.sin(jnp.arange(T * 64.0)).reshape(T, 64)  # larger than what is not worth a choice


def unrolled(x):
    for i in range(1, T):
        x = x.at[i].set(jnp.sin(x[i - 1] + x[i]))
    return x


@functools.cache
def of_unrolled():
    """For `rows()`, the value, and the gradients of the sums of the squares and of the elements."""
    sums = lambda x: jnp.sum(unrolled(x) ** 2), lambda x: jnp.sum(unrolled(x))
    return [in_numpy(f)(rows()) for f in (unrolled, *map(jax.grad, sums))]


def plain(x):
    return lax.fori_loop(1, T, lambda i, b: b.at[i].set(sine(b[i - 1] + b[i])), x)


def in_a_branch(x):
    def body(i, b):
        return lax.cond(i > 0, lambda b: b.at[i].set(sine(b[i - 1] + b[i])), lambda b: b * 2.0, b)

    return lax.fori_loop(1, T, body, x)


def ours(x, **options):
    return fori_loop(1, T, lambda i, b: ta_write(b, i, sine(ta_read(b, i - 1) + ta_read(b, i))), x, **options)


LOOPS = {
    "plain": in_place(plain),
    "in a branch": in_place(in_a_branch),
    "tape": ours,
    "checkpoints": lambda x: ours(x, residuals=Checkpoint(2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_hijax_primitive_in_a_body(loop):
    def loss(f):
        return lambda x: jnp.sum(f(x) ** 2)

    x, many = rows(), jnp.stack([rows(), 2 * rows()])
    value, want, _ = of_unrolled()
    np.testing.assert_allclose(loop(x), value, atol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.grad(loss(loop)))(x), want, atol=1e-4)
    np.testing.assert_allclose(in_place(jax.grad(loss(loop)))(x), want, atol=1e-4)
    np.testing.assert_allclose(jax.jvp(loss(loop), (x,), (x,))[1], np.sum(want * x), rtol=1e-4)
    np.testing.assert_allclose(jax.vmap(jax.grad(loss(loop)))(many)[0], want, atol=1e-4)


def test_the_name_of_a_hijax_primitive_that_takes_a_buffer_is_said():
    def f(x):
        return lax.fori_loop(1, T, lambda i, b: b.at[i].set(sine(b)[i - 1]), x)

    [left] = [x for x in doctor.explain(f)(rows()) if x.reason == "foreign-primitive"]
    assert left.op == "Sine" and "`Sine`" in left.text


LATER = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="new in jax 0.12")


@pytest.mark.slow(but=1)
@LATER
@pytest.mark.parametrize("loop", [plain, *LOOPS.values()], ids=["of JAX", *LOOPS])
def test_the_gradient_is_added_to_a_ref(loop):
    def accumulated(x):
        gradient = jax.new_ref(jnp.ones_like(x))
        for _ in range(2):
            _, pull = jax.vjp(loop, x)
            pull.with_refs(gradient)(jnp.ones_like(x))
        return jax.freeze(gradient)

    x = rows()
    want = 1 + 2 * of_unrolled()[2]
    np.testing.assert_allclose(accumulated(x), want, atol=1e-4)
    np.testing.assert_allclose(jax.jit(in_place(accumulated))(x), want, atol=1e-4)


@LATER
def test_a_pinned_ref_stays_pinned():
    """No CPU has such memory, and JAX reads and writes it by kernels only: what is compiled is compared."""

    def f(x):
        ref = jax.new_ref(x[:3], pin=True)
        return plain(x), jax.freeze(ref)

    before, after = (jax.jit(g).lower(rows()).as_text("hlo") for g in (f, in_place(f)))
    assert [after.count(x) for x in ('"Pin"', '"Unpin"')] == [before.count(x) for x in ('"Pin"', '"Unpin"')] == [1, 1]
