"""The doctor finds arguments that a program copies in every call, and says which and why. Others it leaves alone."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from jax_tensorarray import _compat, in_place
from jax_tensorarray._hlo import arguments as hlo_arguments
from jax_tensorarray.doctor import _trace, forbid_copies, loop_copies, watch
from jax_tensorarray.doctor._report import html

N, AT = 20_000, np.int32(3)
CALLS = 3


def state():
    return jnp.ones(N, jnp.float32)


def step(state, i):
    return state.at[i].add(1.0)


def reads_beside(state, i):
    return state.at[i].add(1.0), state[i]


def stays(state, i):
    return lax.cond(i % 2 == 0, lambda s: s.at[i].set(1.0), lambda s: s, state), state[0]


def two_of_three(state, i):
    return {"h": state["h"].at[i].set(state["g"][0]), "c": state["c"].at[i].set(0.0), "g": state["g"] * 2}


def exchanged(state, i):
    a, b = state
    return b.at[i].set(a[i]), a


def chosen(state, i):
    return jnp.where(i > 2, state.at[i].set(1.0), state)


def layers(state, i):
    cache = state.reshape(10, 50, 40)

    def layer(k, cache):
        return cache.at[k, i].set(jnp.sin(cache[k, i - 1]))

    return lax.fori_loop(0, 10, layer, cache).reshape(-1)


def called(f, state, donated=False, calls=CALLS):
    """Call a function in a loop, each time with what it has returned."""

    @functools.partial(jax.jit, donate_argnums=0 if donated else ())
    @functools.wraps(f)
    def jitted(state, i):
        return f(state, i)

    for _ in range(calls):
        out = jitted(state, AT)
        state = out if jax.tree.structure(out) == jax.tree.structure(state) else out[0]


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(
    ("f", "given", "donated", "says", "tried"),
    [
        (step, state, False, "step: state is not donated, and copied in every call: 234 KiB in 3 calls", "donated"),
        (chosen, state, False, "chosen: state is not donated, and copied in every call", "donated"),
        (layers, state, False, "layers: state is not donated, and copied in every call", "donated"),
        (
            two_of_three,
            lambda: {"h": state(), "c": state(), "g": jnp.ones(9, jnp.float32)},
            False,
            r"two_of_three: state\['\w'\] and 1 more are not donated, and copied in every call",
            "donated",
        ),
        (
            reads_beside,
            state,
            True,
            "reads_beside: state is donated, but copied in every call all the same",
            "under in_place",
        ),
        (stays, state, True, "stays: state is donated, but copied in every call all the same", "under in_place"),
        (stays, state, False, "stays: state is not donated, and copied in every call", "donated, under in_place"),
    ],
)
def test_the_first_line_says_which_argument_is_copied_and_why(f, given, donated, says, tried):
    with watch() as report:
        called(f, given(), donated)
    report.try_in_place(timed=f is reads_beside)  # on fresh arrays: those that the program donates are gone
    (case,) = report.cases
    assert (case.trial.left, case.trial.how) == (0, tried)
    assert f is not reads_beside or case.trial.before > 0 < case.trial.after
    text = str(report)
    assert re.search(rf"^1\. {says}", text.replace("\n", " ").partition("call. ")[2].strip()), text
    assert max(map(len, text.splitlines())) <= 79
    for copy in case.copies.arguments:
        assert (copy.calls, copy.file) == (CALLS, __file__)
        assert re.search(r"\.at\[|lax\.cond", copy.code)
    page = html(report, "a page")
    assert "copied in every call" in page and tried in page


def test_an_argument_that_comes_back_in_another_place_is_named():
    with watch() as report:
        called(exchanged, (state(), state() + 1), donated=True)
    (copy,) = report.cases[0].copies.arguments
    assert (copy.name, copy.donated, copy.cause) == ("state[1]", True, "exchanged")
    assert "1. exchanged: state[1] comes back at another position, and is copied" in " ".join(str(report).split())
    assert "at the position of another argument" in copy.advice


def test_updates_outside_of_jit_are_named():
    array = jnp.ones(N + 1, jnp.float32)
    with watch() as report:
        for _ in range(CALLS):
            array = array.at[AT].set(1.0)
    (case,) = report.cases
    (copy,) = case.copies.arguments
    assert copy.code == "array = array.at[AT].set(1.0)"
    assert "an update outside of jit copies the whole array in every call" in " ".join(str(report).split())


@pytest.mark.slow
def test_programs_that_compute_something_else_or_are_called_once_are_not_listed():
    optimizer = optax.adam(1e-3)

    def train(state, _):
        params, moments = state
        grads = jax.grad(lambda p: jnp.sum((p["w"] @ p["w"]) ** 2) + jnp.sum(p["rows"][3]))(params)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments

    params = {"w": jnp.ones((80, 80)), "rows": jnp.ones((500, 20))}
    with watch() as report:
        called(train, (params, optimizer.init(params)))
        called(lambda x, _: x @ x, jnp.eye(80))
        called(lambda x, _: jnp.sort(x), state())
        called(lambda x, _: x + 1, state())
        called(lambda x, _: jnp.roll(x, 1), state())
        called(lambda x, _: jnp.zeros_like(x).at[0].set(1.0) + x, state())
        called(lambda x, _: x.at[::2].set(0.0), state())  # half of it
        called(lambda x, i: lax.cond(i > 2, jnp.sin, lambda x: x, x), state())
        called(lambda x, _: jnp.copy(x), state())
        called(lambda x, _: x.reshape(100, -1).T.reshape(-1), state())
        called(lambda x, _: lax.fori_loop(1, N, lambda i, b: b.at[i].set(b[i - 1]), x), state())
        called(step, state(), donated=True)
        called(in_place(reads_beside), state(), donated=True)
        called(lambda x, i: x.at[i].set(2.0), state(), calls=1)
        called(lambda x, i: x.at[i].set(3.0), jnp.ones(9), calls=9)  # small
        jnp.zeros(N).at[0].set(1.0)
    assert report.cases == []
    assert report.unread == 0


def test_calls_are_counted_by_function_and_type_and_the_count_ends_with_the_block():
    def other(state, i):
        return state.at[i].add(2.0)

    (hook,) = _compat.private_names("api", "_post_hook_state")
    before = hook.get_global(), hook.value
    with watch() as outer:
        with watch() as inner:
            called(step, state(), calls=4)
            assert hook.value is not before[1]
            with jax.debug_nans(False):
                pass
        called(other, jnp.ones((N, 2), jnp.float32), calls=5)
        called(step, jnp.ones((N, 3), jnp.float32), calls=2)
        called(lambda state, i: state.at[i].set(4.0), state(), calls=6)
        called(lambda state, i: state.at[i].set(5.0), state(), calls=7)
    assert (hook.get_global(), hook.value) == before
    found = {(case.program, copy.shape, copy.calls) for case in outer.cases for copy in case.copies.arguments}
    alike = {("_lambda", (N,), 6), ("_lambda", (N,), 7)}
    assert found == {("step", (N,), 4), ("other", (N, 2), 5), ("step", (N, 3), 2), *alike}
    assert [case.program for case in inner.cases] == ["step"]


def test_nans_are_found_while_calls_are_counted():
    @jax.jit
    def divides(state, i):
        return state.at[i].set(0.0 / state[i])

    with jax.debug_nans(True), watch() as report:
        called(step, state())
        with pytest.raises(FloatingPointError):
            divides(jnp.zeros(N), AT)
    assert report.unread == 0


def test_arguments_that_are_alike_are_told_of_once():
    def step(state, i):
        kept = jax.random.uniform(state["key"]) < 2
        return state | {"rows": [jnp.where(kept, rows.at[i].set(1.0), rows) for rows in state["rows"]]}

    with watch() as report:
        called(step, {"rows": [jnp.ones((2000, 8), jnp.float32) for _ in range(7)], "key": jax.random.key(0)})
    report.try_in_place()
    trial = report.cases[0].trial
    assert trial.left == 0 and trial.before > 0 and trial.after > 0
    argument = report.as_json()["cases"][0]["arguments"][0]
    assert argument["name"] == "state['rows'][0]"
    assert argument["cost"] == 4 * 2000 * 8 * argument["times"] * CALLS
    text = " ".join(str(report).split())
    assert "state['rows'][0] and 6 more are not donated" in text
    assert "2 more are copied there. The program changes a few rows" in text
    assert text.count("Without donation") == 1


def test_an_argument_is_listed_once_for_the_shape_that_costs_most():
    with watch() as report:
        for n in (N, 2 * N):
            called(step, jnp.ones(n, jnp.float32))
    for shown in (str(report), html(report, "a page")):
        text = " ".join(shown.split())
        assert "1. step: state is not donated" in text and "2. step" not in text
        assert f"float32[{2 * N}]" in text and f"float32[{N}]" not in text
        assert text.count("It is compiled 2 times.") == 1


def test_a_trace_has_the_programs_that_copy_an_argument(tmp_path):
    with _trace.recorded() as programs, watch() as report:
        called(step, state())
    _trace.write(tmp_path, programs, report, "x")
    assert "ENTRY" in (tmp_path / "01_step" / "loops_before.hlo").read_text()
    assert "step: state is not donated" in (tmp_path / "report.txt").read_text()


def test_copied_arguments_are_no_loops_that_copy():
    with forbid_copies():
        called(step, state())


def test_loop_copies_knows_what_a_jitted_function_donates():
    types = jax.ShapeDtypeStruct((N,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    assert loop_copies(step)(*types).arguments == ()  # whoever jits it may donate
    found = loop_copies(jax.jit(reads_beside, donate_argnums=0))(*types)
    assert found == []
    (copy,) = found.arguments
    assert (copy.name, copy.donated, copy.calls) == ("state", True, None)
    assert "\n\n" in str(found) and "a copy of the argument state" in str(found)
    assert loop_copies(jax.jit(step, donate_argnums=0))(*types).arguments == []


def test_the_first_line_of_a_program_tells_what_is_donated():
    header = "HloModule jit_f, input_output_alias={ {0}: (2, {}, may-alias), {1}: (0, {}, must-alias) }, x={1}\n"
    assert hlo_arguments.donated(header) == {0, 2}
    assert hlo_arguments.donated("HloModule jit_f, buffer_donor={ (1, {}), (4, {}) }, is_scheduled=true") == {1, 4}
    assert hlo_arguments.donated("HloModule jit_f, is_scheduled=true\n input_output_alias={ {0}: (2, {}) }") == set()
