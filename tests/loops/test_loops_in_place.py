"""The loops cost what the steps taken cost: nothing as large as a buffer, or as long as `max_steps`, in a step."""

import functools
import subprocess
import sys
import textwrap
import time

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


def few_of_many(x, n, max_steps):
    """Steps of a microsecond or two, next to which the first use of the memory of a large tape is nothing."""
    w = jnp.outer(x, jnp.cos(x))
    return jnp.sum(
        while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, w @ jnp.sin(c[1])), (0, x), max_steps=max_steps)[1]
    )


def seconds(f, *args, runs=3):
    start = time.process_time()
    for _ in range(runs):
        jax.block_until_ready(f(*args))
    return time.process_time() - start


MANY = {
    "grad": lambda f: jax.grad(f),
    "grad of vmap": lambda f: (
        lambda x, n: jax.grad(lambda xs: jnp.sum(jax.vmap(f)(xs, jnp.stack([n, n // 2]))))(jnp.stack([x, x]))
    ),
    "hessian": lambda f: lambda x, n: jax.jvp(jax.grad(lambda x: f(x, n)), (x,), (x,))[1],
}


def few_of_many_inside(x, n, max_steps):
    """Three steps of an inner loop in every step of one: its tape is a residual of the outer one."""

    def body(c):
        i, y = c
        return i + 1, jax.jit(few_of_many_whole, static_argnums=2)(y * x, 3, max_steps)

    return jnp.sum(while_loop(lambda c: c[0] < n // 5, body, (0, x), max_steps=200)[1])


def few_of_many_whole(x, n, max_steps):
    return while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.sin(c[1] * x)), (0, x), max_steps=max_steps)[1]


#: A loop, the largest number of its steps, many times that, and how many times as long it may take then. The tape of
#: an inner loop has room for that many in every step of the outer one, so each of these begins on a page of its own.
CASES = [
    *((few_of_many, 500, 500_000, transform, 1.5) for transform in ("grad", "hessian")),
    (few_of_many_inside, 3, 10_000, "grad of vmap", 4),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("f", "few", "many", "transform", "allowed"), CASES, ids=lambda x: getattr(x, "__name__", str(x))
)
def test_time_does_not_depend_on_max_steps(f, few, many, transform, allowed):
    x, n = jnp.linspace(0.1, 0.9, 64), 500
    short, long = (
        compiled(MANY[transform](functools.partial(f, max_steps=max_steps)), x, n) for max_steps in (few, many)
    )
    ratios = []
    for _ in range(12):
        times = [(seconds(short, x, n), seconds(long, x, n)) for _ in range(7)]
        ratios.append(min(b for _, b in times) / min(a for a, _ in times))
        if ratios[-1] < allowed:
            return
        if ratios[-1] > 10:  # no other process is to blame
            break
    raise AssertionError(f"the same steps of at most {many} took {ratios} times as long as of at most {few}")


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
    import resource
    import jax, jax.numpy as jnp
    from jax_tensorarray import while_loop

    def f(x, n):
        def body(c):
            i, y = c
            return i + 1, jnp.sin(y * x)
        return jnp.sum(while_loop(lambda c: c[0] < n, body, (0, x), max_steps=50_000_000)[1])

    transforms = {
        "grad": jax.jit(lambda x, ns: jax.grad(f)(x[0], ns[0])),
        "eager grad": lambda x, ns: jax.grad(f)(x[0], ns[0]),
        "grad of vmap": jax.jit(jax.grad(lambda x, ns: jnp.sum(jax.vmap(f)(x, ns)))),
        "vmap of grad": jax.jit(jax.vmap(jax.grad(f))),
    }
    x, ns = jnp.ones((2, 4)), jnp.array([10, 1])
    for g in transforms.values():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        jax.block_until_ready(g(x, ns))
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.slow
def test_memory_is_that_of_the_steps_taken():
    """Of a process of its own, whose largest resident set nothing else has raised."""
    run = [sys.executable, "-c", textwrap.dedent(PEAKS)]
    out = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    megabytes = dict(zip(("grad", "eager grad", "grad of vmap", "vmap of grad"), map(float, out.split()), strict=True))
    assert all(m < 150 for m in megabytes.values()), megabytes  # a tape of 50 million rows has 800 or more


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
