"""Loops whose tapes are in the memory of the host: what only these have, and the HLO for accelerators.

Their derivatives: `test_loops_in_loops.py`.
A CPU is its own host, but has the memory kind, so that types and programs are those of accelerators.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_place import assert_no_whole_buffer_copy, compiled
from jax import jit, lax
from jax.ad_checkpoint import checkpoint_name

from jax_tensorarray import fori_loop, scan, while_loop
from jax_tensorarray._hlo import ahead
from jax_tensorarray._hlo import text as hlo_text
from jax_tensorarray._loops import host
from jax_tensorarray._loops.host import ta_host_empty, ta_host_read, ta_host_write
from jax_tensorarray.residuals import Tape

pytestmark = pytest.mark.slow(but=1)

X = np.random.default_rng(0).standard_normal((4, 3))


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


@pytest.mark.usefixtures("every_array_is_sent")
def test_it_runs_outside_of_jit():
    def power(x):
        body = lambda s: (s[0] + 1, s[1] * x)  # noqa: E731
        return jnp.sum(while_loop(lambda s: s[0] < 5, body, (0, x), max_steps=9, residuals=Tape(offload=True))[1])

    np.testing.assert_allclose(jax.grad(power)(jnp.asarray(X[0])), 6 * X[0] ** 5, rtol=1e-12)


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
