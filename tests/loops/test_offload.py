"""Loops whose tapes are in the memory of the host: the derivatives of Python's own loops, and the HLO for accelerators.

A CPU is its own host, but has the memory kind, so that types and programs are those of accelerators.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_numpy import in_numpy
from in_place import assert_no_whole_buffer_copy, compiled
from jax import jit, lax
from jax.ad_checkpoint import checkpoint_name

from jax_tensorarray import fori_loop, scan, ta_read, ta_write, while_loop
from jax_tensorarray._hlo import ahead
from jax_tensorarray._hlo import text as hlo_text
from jax_tensorarray._loops import host
from jax_tensorarray._loops.host import ta_host_empty, ta_host_read, ta_host_write
from jax_tensorarray.residuals import Recompute, Tape

pytestmark = pytest.mark.slow(but=1)

MOST = 9
rng = np.random.default_rng(0)
X, W = rng.standard_normal((4, 3)), 0.6 * rng.standard_normal((3, 3))
N = np.array([5, 0, 9, 3])


def in_python(cond, body, carry, most, **_):
    """The loop of known trip count, unrolled: `cond` is only asked for its number."""
    for _ in range(most):
        carry = body(carry)
    return carry


# Each takes a loop `(cond, body, carry, most)`, the number of steps, and operands.


def chain(loop, n, x, w):
    return jnp.sum(loop(lambda s: s[0] < n, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)), (0, x), MOST)[1] ** 2)


def rows(loop, n, x, w):
    def body(s):
        i, b = s
        return i + 1, ta_write(b, i + 1, jnp.sin(ta_read(b, i // 2) @ w) + ta_read(b, i))

    return jnp.sum(loop(lambda s: s[0] < n, body, (0, ta_write(jnp.zeros((MOST + 1, 3)), 0, x)), MOST)[1] ** 2)


def nested(loop, n, x, w):
    def body(s):
        i, y = s
        inner = loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, jnp.sin(s[1] @ w)), (0, y), 2)
        return i + 1, jnp.cos(inner[1]) * y

    return jnp.sum(loop(lambda s: s[0] < n, body, (0, x), MOST)[1] ** 2)


def on_host(cond, body, carry, most):
    return while_loop(cond, body, carry, max_steps=most, residuals=Tape(offload=True))


def recomputed(cond, body, carry, most):
    return while_loop(cond, body, carry, max_steps=most, residuals=Recompute(offload=True))


def by_scan(cond, body, carry, most):
    def step(s, _):
        after = body(s)
        return jax.tree.map(lambda a, b: lax.select(cond(s), a, b), after, jax.tree.map(jnp.asarray, s)), None

    return scan(step, jax.tree.map(jnp.asarray, carry), length=most, residuals=Tape(offload=True))[0]


def by_fori_loop(cond, body, carry, most):
    def step(_, s):
        return jax.tree.map(lambda a, b: lax.select(cond(s), a, b), body(s), jax.tree.map(jnp.asarray, s))

    return fori_loop(0, most, step, jax.tree.map(jnp.asarray, carry), residuals=Tape(offload=True))


def unrolled(program, n):
    def loop(cond, body, carry, most):
        return in_python(cond, body, carry, int(n) if most == MOST else most)

    return functools.partial(program, loop, n)


FIRST = {
    "grad": lambda f, x: jax.grad(f, (0, 1))(x, W),
    "jvp": lambda f, x: jax.jvp(f, (x, W), (jnp.cos(x), jnp.sin(W)))[1],
    "checkpoint": lambda f, x: jax.grad(jax.checkpoint(f), (0, 1))(x, W),
}
SECOND = {
    "forward over reverse": lambda f, x: jax.jvp(lambda x: jax.grad(f, (0, 1))(x, W), (x,), (jnp.cos(x),))[1],
    "reverse over reverse": lambda f, x: jax.grad(lambda x: jnp.sum(jnp.sin(jax.grad(f, 1)(x, W))))(x),
    "reverse over forward": lambda f, x: jax.grad(lambda x: jax.jvp(f, (x, W), (jnp.cos(x), W))[1])(x),
}


#: Every program, every loop and every second derivative. The random programs send rows in all loops too.
CASES = [
    (chain, on_host, "reverse over reverse"),
    (rows, on_host, "forward over reverse"),
    (rows, recomputed, "reverse over forward"),
    (nested, by_scan, "reverse over reverse"),
    (chain, by_fori_loop, "forward over reverse"),
]


def oracle(program):
    """NumPy, unless there are row ops in a program."""
    return jit if program is rows else in_numpy


@functools.cache
def of_python(program):
    names = [*FIRST, *(second for p, _, second in CASES if p is program)]
    return oracle(program)(lambda x: {name: (FIRST | SECOND)[name](unrolled(program, 5), x) for name in names})(X[0])


@pytest.mark.usefixtures("every_array_is_sent")
@pytest.mark.parametrize(("program", "loop", "second"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_derivatives_are_those_of_pythons_loop(program, loop, second):
    names = [*FIRST, second]

    @jit
    def found(x):
        return {name: (FIRST | SECOND)[name](functools.partial(program, loop, 5), x) for name in names}

    want = {name: of_python(program)[name] for name in names}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10), found(X[0]), want)


@pytest.mark.usefixtures("every_array_is_sent")
@pytest.mark.parametrize("transform", [jax.grad, lambda f: jax.vmap(jax.grad(f)), lambda f: jax.jacfwd(jax.grad(f))])
def test_a_loop_may_have_no_steps(transform):
    """Its tape has none either, and its carry is the result."""

    def f(loop, x):
        return jnp.sum(loop(lambda k, y: jnp.sin(y) * jnp.sum(y), x) ** 3)

    def ours(step, x):
        x = fori_loop(0, 0, step, x, residuals=Tape(offload=True))
        return scan(lambda y, k: (step(k, y), y), x, jnp.arange(0), residuals=Tape(offload=True))[0]

    found, want = (transform(functools.partial(f, loop)) for loop in (ours, lambda step, x: x))
    np.testing.assert_allclose(jit(found)(X), jit(want)(X), rtol=1e-12)


BATCHED = {
    "vmap of grad": lambda f, xs, ns: jax.vmap(lambda x, n: jax.grad(lambda x: f(n, x, W))(x))(xs, ns),
    "grad of vmap": lambda f, xs, ns: jax.grad(lambda w: jax.vmap(lambda x, n: f(n, x, w))(xs, ns).sum())(W),
    "vmap of second": lambda f, xs, ns: jax.vmap(lambda x, n: jax.hessian(lambda x: f(n, x, W))(x))(xs, ns),
    "grad of vmap of grad": lambda f, xs, ns: jax.grad(
        lambda w: (jax.vmap(lambda x, n: jax.grad(lambda x: f(n, x, w))(x))(xs, ns) ** 2).sum()
    )(W),
}


@pytest.mark.usefixtures("every_array_is_sent")
@pytest.mark.parametrize(
    ("program", "transforms"),
    [
        (chain, ("vmap of second",)),
        (rows, ("vmap of grad", "grad of vmap of grad")),
        (nested, ("grad of vmap",)),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_every_example_of_a_batch_ends_by_itself(program, transforms):
    @jit
    def ours(xs, ns):
        return [BATCHED[transform](functools.partial(program, on_host), xs, ns) for transform in transforms]

    def of_example(transform, k):
        return BATCHED[transform](lambda n, x, w: unrolled(program, N[k])(x, w), X[k : k + 1], N[:1])

    each = oracle(program)(lambda: [[of_example(transform, k) for k in range(len(N))] for transform in transforms])()
    for transform, got, parts in zip(transforms, ours(X, N), each, strict=True):
        want = sum(parts) if transform.startswith("grad") else np.concatenate(parts)
        np.testing.assert_allclose(got, want, rtol=1e-8, atol=1e-10)


def test_it_runs_outside_of_jit():
    found = jax.grad(functools.partial(chain, on_host, 5))(jnp.asarray(X[0]), W)
    np.testing.assert_allclose(found, jax.grad(unrolled(chain, 5))(jnp.asarray(X[0]), W), rtol=1e-8)


def test_binds_that_do_not_fit():
    tape, one = (ta_host_empty(host.on_host(jax.typeof(jnp.zeros(shape)))) for shape in ((3, 2), ()))
    for other, step in ((jnp.zeros((3, 2)), jnp.int32(0)), (one, jnp.int32(0)), (tape, jnp.zeros(1, jnp.int32))):
        with pytest.raises(TypeError, match=r"ta_host_read: .* are not a tape on the host and a step"):
            ta_host_read(other, step)
    with pytest.raises(TypeError, match=r"ta_host_write: value float64.*\[3\] is not a row float64.*\[2\] on the host"):
        ta_host_write(tape, jnp.int32(0), jnp.zeros(3))


# --- what XLA makes of it --------------------------------------------------------------------------------------

ROW = 256


def gradient(T, transform="grad"):
    def loss(x, w, n):
        def body(s):
            return s[0] + 1, jnp.tanh(w @ s[1])

        return jnp.sum(while_loop(lambda s: s[0] < n, body, (0, x), max_steps=T, residuals=Tape(offload=True))[1])

    f = {
        "grad": jax.grad(loss, (0, 1)),
        "vmap of grad": jax.vmap(jax.grad(loss, (0, 1)), (0, None, 0)),
        "second order": lambda x, w, n: jax.jvp(lambda x: jax.grad(loss)(x, w, n), (x,), (x,))[1],
        "reverse over reverse": jax.grad(lambda x, w, n: jnp.sum(jax.grad(loss)(x, w, n) ** 2)),
    }[transform]
    many = (8,) if transform.startswith("vmap") else ()
    return f, jnp.zeros((*many, ROW), jnp.float32), jnp.zeros((ROW, ROW), jnp.float32), jnp.zeros(many, jnp.int32)


def test_a_cpu_has_no_copy_of_the_tape_in_a_loop():
    f, *args = gradient(1000)
    assert_no_whole_buffer_copy(compiled(f, *args), np.empty((1000, ROW), np.float32))


needs = [
    pytest.param(p, marks=pytest.mark.skipif(bool(ahead.why_not(p)), reason=ahead.why_not(p))) for p in ("cuda", "tpu")
]


@pytest.mark.parametrize("transform", ["grad", "vmap of grad", "second order", "reverse over reverse"])
@pytest.mark.parametrize("platform", needs)
def test_the_device_holds_nothing_of_the_tape(platform, transform):
    with jax.enable_x64(False):
        programs = [ahead.compiled_for(platform, *gradient(T, transform)) for T in (1000, 10_000)]
    short, long = (program.memory_analysis() for program in programs)
    tape = 1000 * ROW * 4
    assert short.host_temp_size_in_bytes >= tape
    assert 9 < long.host_temp_size_in_bytes / short.host_temp_size_in_bytes < 11
    # A number of the second derivative stays: it is smaller than what is sent.
    assert long.temp_size_in_bytes - short.temp_size_in_bytes < 0.3 * tape
    text = programs[0].as_text()
    whole = [line for line in text.splitlines() if re.search(r"\[(8,)?10\d\d,256\]\S* (copy|transpose)\(", line)]
    if "grad" in transform:
        assert not whole, whole
    assert not hlo_text.copies_in_loops(text, tape)
    assert len(re.findall(r"dynamic-update-slice-start\S* = ", text)) >= 2  # sent while something else is done
    assert len(re.findall(r"dynamic-slice-start\S* = ", text)) >= 2


@pytest.mark.parametrize("platform", needs[:1])
def test_a_row_comes_back_while_the_step_after_it_is_computed(platform):
    with jax.enable_x64(False):
        text = ahead.compiled_for(platform, *gradient(1000)).as_text()
    computations = re.split(r"\n(?=\S)", text)
    (back,) = [c for c in computations if " fusion-start(" in c and "dynamic-slice" in c and not c.startswith("ENTRY")]
    lines = [line for line in back.splitlines() if "fusion" in line]
    starts, ends, products = (
        [k for k, line in enumerate(lines) if word in line]
        for word in (" fusion-start(", " fusion-done(", "reduce_fusion =")
    )
    assert starts and max(starts) < min(products) and max(products) < min(ends), back


def address_is_derived(text):
    """Of each read of a row on the host: whether XLA for GPUs derives its address from the count of the loop."""
    computations = {c.partition(" ")[0]: c for c in re.split(r"\n(?=%)", text)}
    reads = re.findall(r"dynamic-slice-start\S* = .*? calls=(%\S+?),", text)
    return ["dynamic_slice_config" in computations[name] for name in reads]


@pytest.mark.parametrize("platform", needs[:1])
def test_no_address_on_the_host_is_derived_from_the_count_of_a_loop(platform):
    """XLA derived wrong ones before jaxlib 0.11.1 (openxla/xla#46231): a policy of JAX gets one, as it should."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["kept"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def by_policy(x):
        step = jax.checkpoint(lambda s, _: (jnp.tanh(checkpoint_name(s, "kept")), None), policy=policy)
        return jnp.sum(lax.scan(step, x, None, length=100)[0])

    with jax.enable_x64(False):
        texts = [
            ahead.compiled_for(platform, f, *args).as_text()
            for f, *args in ((jax.grad(by_policy), jnp.ones(ROW)), gradient(1000), gradient(1000, "second order"))
        ]
    of_policy, *ours = map(address_is_derived, texts)
    assert of_policy == [True]
    assert all(ours)
    assert not any(map(any, ours))
