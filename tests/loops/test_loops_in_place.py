"""The loops cost what the steps taken cost: nothing as large as a buffer, or as long as `max_steps`, in a step."""

import functools
import json
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest
from in_place import assert_no_whole_buffer_copy, compiled
from loop_steps import BATCH, BATCHED, STEPS, batch, rows, run

from jax_tensorarray import TensorArray, ta_read, while_loop

TRANSFORMS = {"forward": lambda f: f, "grad": jax.grad}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", STEPS)
def test_no_step_touches_a_whole_buffer(name):
    """Of the gradient, which runs the loop forward too."""
    f = jax.grad(functools.partial(run, name))
    assert_no_whole_buffer_copy(compiled(f, rows(200)), rows(200))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ["overwrite", "branch", "inner_while_loop"])
def test_no_step_touches_a_whole_buffer_where_residuals_are_recomputed(name):
    f = jax.grad(functools.partial(run, name, residuals="recompute"))
    assert_no_whole_buffer_copy(compiled(f, rows(200)), rows(200))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["branch", "inner_while_loop"])
def test_no_step_of_a_second_derivative_touches_a_whole_buffer(name):
    f = functools.partial(run, name)
    product = compiled(lambda x: jax.jvp(jax.grad(f), (x,), (jnp.cos(x),))[1], rows(200))
    assert_no_whole_buffer_copy(product, rows(200))


# --- a TensorArray in the carry --------------------------------------------------------------------------------


def appended(xs):
    def body(array):
        last = array.read(array.size() - 1)
        return array.append(jnp.sin(last * ta_read(xs, array.size())))

    start = TensorArray.like(xs[0], 0, dynamic_size=True, max_size=len(xs)).append(xs[0])
    n = jnp.sum(xs[:, 0] < 99)
    array = while_loop(lambda array: array.size() < n, body, start, max_steps=len(xs))
    return jnp.sum(array.stack(pad=True) ** 2)


def popped(xs):
    def body(c):
        array, y = c
        array, row = array.pop()
        return array, jnp.sin(y * row)

    start = TensorArray.from_array(xs, dynamic_size=True, max_size=len(xs))
    return jnp.sum(while_loop(lambda c: c[0].size() > 0, body, (start, xs[0]), max_steps=len(xs))[1])


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("f", [appended, popped])
def test_no_step_touches_a_whole_tensorarray(f, transform):
    assert_no_whole_buffer_copy(compiled(TRANSFORMS[transform](f), rows(200)), rows(200))


# --- vmap with trip counts of its own for every example --------------------------------------------------------


#: Each step is differentiated in one order.
OF_GRAD = ("write", "read_beside_write", "branch", "branch_of_three", "inner_fori_loop", "call", "tensorarray")
GRAD_OF = (
    *("overwrite", "swap_and_add", "branch_that_may_do_nothing", "inner_while_loop", "inner_scan", "checkpoint"),
    "branch_in_an_inner_loop",
)


def test_each_step_of_a_batch_is_differentiated_in_one_order():
    assert sorted(OF_GRAD + GRAD_OF) == sorted(STEPS)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("name", "transform"),
    [
        *((name, "vmap of grad") for name in OF_GRAD),
        *((name, "grad of vmap") for name in GRAD_OF),
        ("branch_of_three", "vmap"),
    ],
)
def test_no_step_of_a_batch_touches_or_selects_a_whole_buffer(name, transform):
    def f(xs, ns):
        return BATCHED[transform](functools.partial(run, name), xs, ns)

    # A buffer of one example would be too large already.
    assert_no_whole_buffer_copy(compiled(f, batch(200), jnp.array([200, 0, 7])), rows(200))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("transform", BATCHED)
@pytest.mark.parametrize("f", [appended, popped])
def test_no_step_of_a_batch_of_tensorarrays_touches_or_selects_one(f, transform):
    xs = batch(200).at[1, 50:].set(100.0)  # `appended` ends there
    program = compiled(lambda xs, ns: BATCHED[transform](lambda xs, _: f(xs), xs, ns), xs, jnp.zeros(BATCH))
    assert_no_whole_buffer_copy(program, rows(200))


# --- max_steps costs nothing -----------------------------------------------------------------------------------


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("update", "residuals"),
    [
        ("write", "undo"),
        ("write_where_data_say", "recompute"),
        ("write_where_data_say", "undo"),
        ("write_in_a_jit", "recompute"),
        ("write_in_a_jit", "undo"),
        ("append", "recompute"),
        ("append_some", "tape"),
        ("append_some", "undo"),
    ],
)
def test_a_buffer_that_is_only_written_is_not_copied_on_the_way_back(update, residuals):
    """The step that is done again writes in vain: what it overwrites is the buffer before the step, still in use."""
    n = 64

    def loss(x, index):
        appends = update.startswith("append")
        rows = TensorArray.like(x, 0 if appends else n, dynamic_size=appends, max_size=n if appends else None)

        def body(c):
            i, x, rows = c
            y = jnp.cos(x)
            if appends:
                rows = rows.append(y, where=(jnp.sum(y) > 0 if update == "append_some" else None))
            else:
                write = jax.jit(TensorArray.write) if update == "write_in_a_jit" else TensorArray.write
                rows = write(rows, i if update == "write" else ta_read(index, i), y)
            return i + 1, y, rows

        rows = while_loop(lambda c: c[0] < 40, body, (0, x, rows), max_steps=n, residuals=residuals)[2]
        return jnp.sum(rows.stack(pad=True))

    x = jnp.ones(4)
    assert_no_whole_buffer_copy(compiled(jax.grad(loss), x, jnp.arange(n)), jnp.zeros((n, 4)))


PEAKS = """
    import json, resource
    import jax, jax.numpy as jnp
    from jax_tensorarray import while_loop

    def f(x, n, most=50_000_000):
        def body(c):
            i, y = c
            return i + 1, jnp.sin(y * x)
        return jnp.sum(while_loop(lambda c: c[0] < n, body, (0, x), max_steps=most)[1])

    def nested(x, n):  # its tape has room for the tape of the inner loop in each of its steps
        def body(c):
            i, y = c
            return i + 1, y * f(x * y, 3, 1_000_000)
        return jnp.sum(while_loop(lambda c: c[0] < n, body, (0, x), max_steps=20)[1])

    def along(x, n):
        return jax.jvp(lambda x: jax.grad(f)(x, n, 20_000_000), (x,), (x,))[1]

    transforms = {
        "grad": jax.jit(lambda x, ns: jax.grad(f)(x[0], ns[0])),
        "eager grad": lambda x, ns: jax.grad(f)(x[0], ns[0]),
        "grad of vmap": jax.jit(jax.grad(lambda x, ns: jnp.sum(jax.vmap(f)(x, ns)))),
        "vmap of grad": jax.jit(jax.vmap(jax.grad(f))),
        "jvp of grad": jax.jit(lambda x, ns: along(x[0], ns[0])),
        "loop in a loop": jax.jit(lambda x, ns: jax.grad(nested)(x[0], ns[0])),
        "loop in a loop, grad of vmap": jax.jit(jax.grad(lambda x, ns: jnp.sum(jax.vmap(nested)(x, ns)))),
    }
    x, ns, megabytes = jnp.ones((2, 4)), jnp.array([10, 1]), {}
    for name, g in transforms.items():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        jax.block_until_ready(g(x, ns))
        megabytes[name] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(json.dumps(megabytes))
"""


@pytest.mark.slow
def test_memory_is_that_of_the_steps_taken():
    """Of a process of its own, whose largest resident set nothing else has raised."""
    run = [sys.executable, "-c", textwrap.dedent(PEAKS)]
    megabytes = json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
    assert all(m < 150 for m in megabytes.values()), megabytes  # a tape that is filled has 300 or more


# --- how often a body is traced --------------------------------------------------------------------------------

TRACED = {
    "value": lambda f: f,
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "hessian": jax.hessian,
    "vmap of grad": lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, x])),
}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("transform", TRACED)
def test_the_functions_of_the_user_are_traced_once(transform):
    calls = []

    def cond_fun(c):
        calls.append("cond")
        return c[0] < 3

    def body_fun(c):
        calls.append("body")
        return c[0] + 1, jnp.sin(c[1])

    f = TRACED[transform](lambda x: while_loop(cond_fun, body_fun, (0, x), max_steps=5)[1])
    f(jnp.arange(1.0, 2.0)[0])
    assert sorted(calls) == ["body", "cond"]
