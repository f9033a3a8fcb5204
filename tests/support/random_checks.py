"""Compare random programs with their oracle."""

import contextlib
import contextvars
import os
import re

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from library_in_numpy import library_in_numpy
from random_machines import DIRECTION, THETA, expected, jets, loss, outputs
from random_programs import BATCH, PARAMETERS, STATE, Arithmetic, run, statements
from waiting import finish

#: Which slots are floats.
FLOATS = tuple(k for k, tag in enumerate(STATE) if tag not in "iI")

#: Before, loops of JAX carry no tokens.
CARRIES_TOKENS = jax.__version_info__ >= (0, 12)


_in_numpy = contextvars.ContextVar("whether NumPy evaluates what JAX has traced", default=False)


@contextlib.contextmanager
def judged_in_numpy(is_wanted):
    """NumPy evaluates what JAX has traced, instead of XLA: several times as many programs in the same time.

    With RANDOM_PROGRAMS=numpy or =xla all programs are evaluated so.
    """
    wanted = {"numpy": True, "xla": False}.get(os.environ.get("RANDOM_PROGRAMS"), is_wanted)
    token = _in_numpy.set(wanted)
    try:
        yield
    finally:
        _in_numpy.reset(token)


def computed(f):
    if not _in_numpy.get():
        return jax.jit(f)
    return library_in_numpy(f, _rewrite.get())


_rewrite = contextvars.ContextVar("what passes make of a program", default=lambda closed: closed)
_raises = contextvars.ContextVar("whether a stray index is an error", default=True)


@contextlib.contextmanager
def judged_after(rewrite, *, raises=True):
    """NumPy evaluates what passes make of a program. Where nothing `raises`, a stray index means nothing."""
    tokens = _rewrite.set(rewrite), _raises.set(raises)
    try:
        with judged_in_numpy(True):
            yield
    finally:
        _rewrite.reset(tokens[0])
        _raises.reset(tokens[1])


@contextlib.contextmanager
def logged_in(want):
    """A ref for what a program writes down. NumPy knows none."""
    ref = None if _in_numpy.get() else jax.new_ref(jnp.int32(0))
    yield ref
    if ref is not None and not want.strays:
        assert int(ref[...]) == want.in_ref, "what is written down in a ref"


def raising(f, strays):
    """The results of `f()`, or None if it has raised an error that says which index is out of range."""
    if strays and not _raises.get():
        return None
    try:
        return finish(f())
    except (jax.errors.JaxRuntimeError, ValueError, IndexError) as error:  # the last one while it is traced
        found = re.search(r"index (-?\d+) is out of range for a (?:buffer|TensorArray) of size (\d+)", str(error))
        if found is None or tuple(map(int, found.groups())) not in {tuple(s) for s in strays}:
            raise
        return None


def total(program, machine):
    return lambda theta, start: loss(outputs(program, machine, theta, start), jnp)


def on_state(program, machine):
    return lambda *state: run(machine, program.block, None, state)


def along(f):
    return lambda theta, start: jax.jvp(lambda t: f(t, start), (theta,), (jnp.asarray(DIRECTION),))[1]


def hessian(f):
    """Along one direction."""
    return lambda theta, start: jax.jacfwd(jax.grad(f))(theta, start) @ DIRECTION


def precision_along_parameters(program):
    """How far a sum of derivatives along parameters may be from that along a direction, which is rounded once."""
    rounds = any(isinstance(s, Arithmetic) and s.kind == "vjp narrow" for s in statements(program))
    return 1e-6 if rounds else 1e-8


def close(got, want, what, rtol=1e-8):
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, what
    assert not np.isnan(want).any(), f"{what}: an index out of range that the program needs, and no error"
    scale = max(1.0, np.max(np.abs(want), initial=0.0))
    np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol / 10 * scale, err_msg=what)


def same_state(got, want):
    for k, (x, y) in enumerate(zip(got, want, strict=True)):
        close(x, y, f"slot {k}, {STATE[k]}")


class Batch:
    """States that differ in parameters, starts or both, each with its batch axis where `axis` says.

    A stray index is dropped whatever its mode says, or it is an error, which is one of those of each example alone.
    """

    def __init__(self, program, own_starts, own_thetas, axis, dropping=True):
        thetas = [THETA * (1 + 0.25 * k * own_thetas) for k in range(BATCH)]
        starts = [program.start + 2 * k * own_starts for k in range(BATCH)]
        self.want = [expected(program, *x, dropping=dropping) for x in zip(thetas, starts, strict=True)]
        self.strays = [stray for want in self.want for stray in want.strays]
        self.jets = [jets(program, *x) for x in zip(thetas, starts, strict=True)]
        states = [[np.int32(start), *(x.x for x in floats), ints] for start, *floats, ints in self.jets]
        differs = [own_starts if tag == "i" else own_thetas and tag != "I" for tag in STATE]
        ndims = [np.ndim(x) + 1 for x in states[0]]
        #: Where states have their batch axis, and where results do.
        self.axes = tuple(
            (axis + k) % n if own else None for k, (n, own) in enumerate(zip(ndims, differs, strict=True))
        )
        self.out = tuple((axis + 1 + k) % n for k, n in enumerate(ndims))
        self.own_thetas = own_thetas
        self.states = self.stacked(states, self.axes)
        self.dots = self.stacked([[x.e for x in floats] for _, *floats, _ in self.jets], self.axes[1:-1])

    def stacked(self, examples, axes):
        each = zip(axes, zip(*examples, strict=True), strict=True)
        return [xs[0] if axis is None else np.stack(xs, axis) for axis, xs in each]

    def computed(self, f, *args):
        """The results of a function, or None if it has raised one of the errors of the examples."""
        return raising(lambda: computed(f)(*args), self.strays)

    def has_derivatives(self):
        """Whether all that the derivatives need is there: a read of no rows has none, so nothing needs it."""
        return all(stray.size for stray in self.strays)

    def pulled(self, cts, axes):
        """The cotangents of the parameters of each example, or of all, from those of the floats of the states."""
        total = []
        for k, (_, *floats, _) in enumerate(self.jets):
            own = (
                x if axis is None else np.take(x, k, axis) for x, axis in zip(map(np.asarray, cts), axes, strict=True)
            )
            total.append(sum((x.d * ct).reshape(PARAMETERS, -1).sum(1) for x, ct in zip(floats, own, strict=True)))
        return np.stack(total) if None not in axes else total[0]


def batched_state(program, vmapped, *batch):
    """`vmapped` maps axes of arguments and results to the function of a batch of states."""
    batch = Batch(program, *batch)
    got = batch.computed(vmapped(batch.axes, batch.out), *batch.states)
    if got is not None:
        same_batch(got, batch)


def same_batch(got, batch):
    got = [np.moveaxis(np.asarray(x), axis, 0) for x, axis in zip(got, batch.out, strict=True)]
    same_state(got, [np.stack(x) for x in zip(*(w.state for w in batch.want), strict=True)])


def gradients(program, f, vmap_of_grad, *batch):
    """`vmap_of_grad(loss, axes, out_axes)` is the gradient by the floats of a state, for every example."""
    batch = Batch(program, *batch)
    out = batch.out[1:-1]
    got = batch.computed(vmap_of_grad(lambda *state: loss(f(*state), jnp), batch.axes, out), *batch.states)
    if got is not None and batch.has_derivatives():
        close(batch.pulled(got, out), np.stack([w.loss.d for w in batch.want]), "gradients of a batch")


def grad_of_vmap(program, f, *batch, second=False):
    """The gradient of a sum over a batch or, with `second`, its derivative along a direction."""
    batch = Batch(program, *batch)
    start, *floats, ints = batch.states
    start = jnp.asarray(start)  # a number of NumPy is known while tracing, and raises in steps that are never taken

    def summed(*floats):
        return jnp.sum(jax.vmap(lambda *state: loss(f(*state), jnp), batch.axes)(start, *floats, ints))

    gradient = jax.grad(summed, range(len(floats)))
    if second:
        got = batch.computed(lambda dots, *floats: jax.jvp(gradient, floats, dots)[1], tuple(batch.dots), *floats)
    else:
        got = batch.computed(gradient, *floats)
    if got is None or not batch.has_derivatives():
        return
    want = [w.loss.de if second else w.loss.d for w in batch.want]
    want = np.stack(want) if batch.own_thetas else sum(want)
    close(batch.pulled(got, batch.axes[1:-1]), want, "derivative of the sum over a batch")


BATCHES = st.sampled_from([(True, False), (False, True), (True, True)])
