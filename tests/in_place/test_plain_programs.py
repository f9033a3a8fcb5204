"""Random programs in plain JAX give under `in_place` what NumPy says, in every order of the transformations."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gates import SETTINGS, gates
from hypothesis import example, given, settings
from in_place import assert_moves_no_more
from jax import jit, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from orders import ORDERS as ORDERS_OF_IN_PLACE
from random_checks import (
    BATCHES,
    CARRIES_TOKENS,
    FLOATS,
    Batch,
    along,
    batched_state,
    close,
    computed,
    gradients,
    hessian,
    judged_in_numpy,
    logged_in,
    on_state,
    precision_along_parameters,
    same_batch,
    same_state,
    total,
)
from random_machines import THETA, Functions, InJax, expected, initial, kinds
from random_programs import (
    BATCH,
    ROW_OF,
    STATE,
    At,
    Block,
    Call,
    Cond,
    Index,
    Loop,
    Places,
    Predicate,
    Program,
    Read,
    Update,
    programs,
)

from jax_tensorarray import in_place
from jax_tensorarray._compat import barriers_hold

MOST_STEPS = 6


class InPlainJax(InJax):
    """Programs as those write them who do not know this library. What is out of range is dropped."""

    def __init__(self, **options):
        super().__init__(dropping=True, **options)
        self.divides = options.get("reverse_mode") is False  # JAX has no derivative by factors of rows that may repeat

    def cells(self, places: Places):
        """What to index the buffer with."""
        buffer, (first, *_), form = places.buffer, places.parts, places.at.form

        def index(i, size):
            i = i.astype(jnp.int64)
            return jnp.where((i < 0) | (i >= size), size, i)  # a negative index would count from the end

        if form == "window":
            limits = jnp.iinfo(first.dtype)
            if limits.min == 0:
                first = jnp.minimum(first, min(len(buffer), limits.max))
            return (index(first.astype(jnp.int64) + jnp.arange(places.count), len(buffer)),)
        axis = 1 if form == "column" else 0
        parts = [index(p, buffer.shape[axis]) for p in places.parts]
        rows = jnp.stack(parts) if len(parts) > 1 else parts[0]
        if form == "element":
            return rows, index(places.column, buffer.shape[1])
        return (slice(None), rows) if form == "column" else (rows,)

    def mask(self, places):
        """A mask that is true for one row, column or element, for those who write `jnp.where`. None for the others."""
        if places.at.lowering != "xla" or places.count != 1 or places.at.form == "window":
            return None
        axes = {"rows": (0,), "column": (1,), "element": (0, 1)}[places.at.form]
        here, cells, shape = True, self.cells(places)[-len(axes) :], places.buffer.shape
        for axis, cell in zip(axes, cells, strict=True):
            here &= lax.broadcasted_iota(jnp.int64, shape, axis) == cell.reshape(())
        return here

    def rows(self, places):
        """Columns are rows of what is transposed, and floats are half of what is twice as large."""
        buffer, cells = places.buffer, self.cells(places)
        is_float = jnp.issubdtype(buffer.dtype, jnp.floating)
        if places.at.form == "column":
            buffer, cells = jnp.swapaxes(buffer, 0, 1), cells[1:]
        if (mask := self.mask(places)) is not None and places.at.form == "rows" and buffer.ndim == places.buffer.ndim:
            if jnp.issubdtype(buffer.dtype, jnp.integer) and len(buffer) % 2:
                hot = jnp.arange(len(buffer)) == cells[0].reshape(())
                rows = jnp.tensordot(hot.astype(buffer.dtype), buffer, 1)
            else:
                rows = jnp.where(mask, 2 * buffer if is_float else buffer, 0).sum(0, dtype=buffer.dtype)
        else:
            rows = (2 * buffer if is_float else buffer).at[cells].get(mode="fill", fill_value=0)
        if places.at.form == "column":
            rows = jnp.moveaxis(rows, cells[0].ndim, 0)
        rows = 0.5 * rows if is_float else rows
        return rows if places.where is None else jnp.where(places.where, rows, jnp.zeros_like(rows))

    def read(self, tag, places):
        return self.row(tag, self.rows(places), places)

    def update(self, op, tag, values, places):
        buffer = places.buffer
        if places.at.form != "window" and places.count == 1:
            value = values[0]
        else:
            value = jnp.stack(values) if values else jnp.zeros((0, *buffer.shape[1:]))
        value = value.astype(buffer.dtype)
        if op == "mul":
            new = self.times(places, value)
        elif (mask := self.mask(places)) is not None and op != "max":
            new = jnp.where(mask, buffer + value if op == "add" else value, buffer)
        else:
            update = buffer.at[self.cells(places)]
            new = (update.add if op == "add" else update.set)(value, mode="drop")
        old = self.row(tag, self.rows(places), places) if op == "swap" else None
        return new if places.where is None else jnp.where(places.where, new, buffer), old

    def times(self, places, value):
        buffer = places.buffer
        if self.divides and places.at.lowering == "ffi" and jnp.issubdtype(buffer.dtype, jnp.floating):
            by = 1 / (0.5 * value)
            by = by.T if places.at.form == "column" and by.ndim > 1 else by
            return buffer.at[self.cells(places)].divide(by, mode="drop")
        for place, factor in self.one_by_one(places, value):
            buffer = buffer.at[self.cells(place)].multiply(factor, mode="drop", unique_indices=True)
        return buffer

    functions = Functions(lambda b, i: b[i], lambda b, i, x: b.at[i].set(x))

    def call(self, kind, f, state):
        return jax.checkpoint(f)(*state) if kind == "checkpoint" else jax.jit(f)(*state)

    def loop(self, s, trips, goes_on, step, state):
        kind = {"fori_loop": "while_loop"}.get(s.kind, s.kind.removeprefix("lax."))
        if s.kind == "fori_loop":
            trips, goes_on = jnp.minimum(trips, s.steps), None
        return Plain.loop(self, s._replace(kind="lax." + kind), trips, goes_on, step, state)

    def leapfrog(self, a, b, steps, trips):
        def forward(k, ab):
            a, b = ab
            a = a + 0.5 * jnp.sin(b)
            return jnp.where(k < trips, a, ab[0]), jnp.where(k < trips, b - 0.5 * jnp.sin(a), b)

        return lax.fori_loop(0, steps, forward, (a, b))


class Plain(InJax):
    """Whose while loops are those of lax, also in reverse mode."""

    def loop(self, s, *args):
        self.reverse_mode = False
        return InJax.loop(self, s, *args)


def plainer(node):
    """The same program without what plain JAX has no derivatives for, or other ones."""
    if isinstance(node, Update) and node.op == "max":
        node = node._replace(op="mul")
    if isinstance(node, Update) and node.op == "swap":  # one row after the other, where plain JAX reads them all first
        node = node._replace(at=node.at._replace(parts=node.at.parts[:1]))
    if isinstance(node, Program):
        node = node._replace(sizes=tuple(n or 2 for n in node.sizes))  # of no rows plain JAX reads none
    if isinstance(node, tuple):
        parts = map(plainer, node)
        return type(node)(*parts) if hasattr(node, "_fields") else tuple(parts)
    return node


repaired = functools.partial(in_place, max_steps=MOST_STEPS)


def values_of(program, **options):
    return on_state(program, InPlainJax(reverse_mode=False, **options))


def value(program, *_):
    want, log = expected(program, dropping=True), []
    with logged_in(want) as ref:
        got = computed(in_place(values_of(program, log=log, ref=ref)))(*start_of(program))
        same_state(got, want.state)
        jax.effects_barrier()
        assert log == want.logged


def start_of(program):
    return initial(program, jnp.asarray(THETA), jnp.int32(program.start), jnp)


def with_token(program, *_):
    """A loop of one step carries a token beside the program."""
    f = values_of(program)

    def step(c):
        after = jax.tree.map(lambda x, old: lax.convert_element_type(x, old.dtype), f(*c[2]), c[2])
        return True, lax.after_all(c[1]), after

    def once(token, *state):
        if not CARRIES_TOKENS:
            return f(*state), lax.after_all(token)
        _, token, state = lax.while_loop(lambda c: ~c[0], step, (False, token, state))
        return state, token

    got, token = in_place(once)(lax.create_token(), *start_of(program))
    assert type(token) is type(lax.create_token())
    same_state(got, expected(program, dropping=True).state)


def divided(program, *batch):
    """The examples of a batch are divided among devices. Each runs programs of its own for them."""
    batch = Batch(program, *batch)
    mesh = jax.make_mesh((BATCH, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[: 2 * BATCH])
    f = values_of(program)
    shared = jax.shard_map(lambda *state: f(*state), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    got = jit(jax.vmap(in_place(shared), batch.axes, batch.out, spmd_axis_name="x"))(*batch.states)
    same_batch(got, batch)


def with_auto_axes(program, *_):
    with jax.set_mesh(jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])):
        f = jax.sharding.auto_axes(values_of(program), out_sharding=P())
        got = in_place(lambda *state: f(*state))(*start_of(program))
        same_state(got, expected(program, dropping=True).state)


def finding_nans(program, *_):
    """A NaN is an error, and memory that nobody has written to is none."""
    f = values_of(program)
    with jax.debug_nans(True):
        same_state(in_place(f)(*start_of(program)), expected(program, dropping=True).state)
        with pytest.raises(FloatingPointError):
            in_place(lambda *state: [jnp.log(-1 - x * x) for x in f(*state)[1:2]])(*start_of(program))
        # Outside of jit, so that tapes are results.
        got = jax.grad(repaired(total(program, InPlainJax())))(jnp.asarray(THETA), jnp.int32(program.start))
        close(got, expected(program, dropping=True).loss.d, "gradient")


def in_64_bits_inside(program, *_):
    f = values_of(program)
    theta = THETA.astype(np.float32)

    def inside(start, theta):
        with jax.enable_x64(True):
            return f(*initial(program, theta.astype(float), start, jnp))

    with jax.enable_x64(False):
        got = in_place(inside)(jnp.int32(program.start), jnp.asarray(theta))
    same_state(got, expected(program, theta.astype(float), dropping=True).state)


def derivative(part, order, precision=lambda program: 1e-8):
    def check(program, *_):
        got = computed(order(total(program, InPlainJax())))(THETA, jnp.int32(program.start))
        close(got, getattr(expected(program, dropping=True).loss, part), part, precision(program))

    return check


def batched(order):
    return lambda program, *batch: batched_state(program, order(values_of(program)), *batch)


def batched_gradient(order):
    return lambda program, *batch: gradients(program, on_state(program, InPlainJax()), order, *batch)


ORDERS = {
    "value": value,
    "grad": derivative("d", lambda f: jax.grad(repaired(f))),
    "grad inside": derivative("d", lambda f: in_place(jax.grad(repaired(f)))),
    "checkpoint": derivative("d", lambda f: jax.grad(jax.checkpoint(repaired(f)))),
    "jvp": derivative("e", lambda f: along(in_place(f))),
    "jvp inside": derivative("e", lambda f: in_place(along(f))),
    "jacfwd": derivative("d", lambda f: jax.jacfwd(in_place(f))),
    "jvp of grad": derivative("de", lambda f: along(jax.grad(repaired(f)))),
    "hessian": derivative("de", lambda f: hessian(repaired(f)), precision_along_parameters),
    "token": with_token,
    "devices": divided,
    "auto axes": with_auto_axes,
    "debug nans": finding_nans,
    "64 bits inside": in_64_bits_inside,
    "vmap": batched(lambda f: lambda axes, out_axes: jax.vmap(in_place(f), axes, out_axes)),
    "vmap inside": batched(lambda f: lambda axes, out_axes: in_place(jax.vmap(f, axes, out_axes))),
    "vmap of grad": batched_gradient(lambda f, *axes: jax.vmap(jax.grad(repaired(f), FLOATS), *axes)),
    "vmap of grad inside": batched_gradient(
        lambda f, *axes: in_place(jax.vmap(jax.grad(repaired(f), FLOATS), *axes), max_steps=MOST_STEPS)
    ),
}

#: They differentiate functions in forward mode, which some functions do not have.
FORWARD = ("jvp", "jvp inside", "jacfwd")


#: XLA compiles programs in these orders. NumPy evaluates them in all others.
BY_XLA = ("value", "grad", "vmap", "token", "devices", "auto axes", "debug nans", "64 bits inside")


def check(order, program, *batch):
    program = plainer(program)
    if order in FORWARD and "vjp" in kinds(program):
        return
    with judged_in_numpy(order not in BY_XLA):
        ORDERS[order](program, *batch)


def differentiable(node):
    """The same program with as many steps as its loops take at most: plain JAX differentiates no other loop."""
    if isinstance(node, Loop) and not node.kind.endswith("scan"):
        node = node._replace(kind="lax.fori_loop")
    if isinstance(node, tuple):
        parts = map(differentiable, node)
        return type(node)(*parts) if hasattr(node, "_fields") else tuple(parts)
    return node


def choosing(ref):
    """A loop that puts a buffer in the place of another one, where the number of the step is below the integer."""
    own = (None,) * len(STATE)
    test = Predicate("lt", 1, 0)
    taken = tuple(ref if k == len(STATE) - 3 else None for k in range(len(STATE)))  # for the second S
    choice = Cond(test, (Block((), taken), Block((), own)))
    loop = Loop("lax.scan", 5, 0, None, False, "tape", 1, Block((choice,), own))
    return Program((8, 8, 8), "int64", 4, Block((loop,), own))


#: The numbers of two of the buffers S that a branch sees: the other one of the step, and the same one.
OTHER, ITSELF = 3, 2


def trying():
    """A loop that adds to an element by a mask, reads three elements of the result, and goes on with what was before.

    It also exchanges the two buffers.
    """
    own = (None,) * len(STATE)
    indices = (Index(5, -1, -3, "clip"), Index(3, 1, -3, "clip"), Index(0, 2, 8, "abs"))
    place = At((Index(3, 50, -3, "mod"),), "int8", Predicate("large", 5, 2), None, "xla", "rows", Index(0, 1, 3, "raw"))
    places = At(indices, "int16", Predicate("lt", 1, 3), "drop", "xla", "rows", Index(0, 2, -3, "raw"))
    tried = Block((Update("add", "S", 1, place, (3, 4, 0)), Read("S", 0, places)), (None, 0, None, 2, 1, None, None))
    loop = Loop("lax.fori_loop", 3, 2, None, False, "memory", 2, Block((Call("jit", tried, False),), own), True, None)
    return Program((50, 10, 50), "int64", -1, Block((loop,), own))


@pytest.mark.slow
@pytest.mark.skipif(not barriers_hold("cpu"), reason="where no barrier holds, XLA makes the update again")
@settings(max_examples=settings.default.max_examples // 5)
@given(program=programs(), order=st.sampled_from([*ORDERS_OF_IN_PLACE]), scale=st.sampled_from([200, 2000]))
@example(trying(), "forward", 200)
@example(choosing(ITSELF), "in_place(vmap(grad))", 200)
@example(choosing(OTHER), "in_place(vmap(grad))", 125)
@example(choosing(OTHER), "in_place(vmap(grad))", 200)
@example(choosing(OTHER), "in_place(vmap(grad))", 2000)
def test_a_random_plain_program_moves_no_more_than_in_plain_jax(program, order, scale):
    """Of buffers that are large enough for it to matter."""
    program = plainer(program)
    program = program._replace(sizes=tuple(scale * n if n < 128 else n for n in program.sizes))
    machine = InPlainJax(reverse_mode="grad" in order)
    f = on_state(differentiable(program) if "grad" in order else program, machine)
    args = start_of(program)
    if "vmap" in order:
        args = [jnp.stack([x, x]) for x in args]
    ours, plain = (ORDERS_OF_IN_PLACE[order](f, by, FLOATS) for by in (in_place, lambda f: f))
    smallest = min(x.nbytes for x, tag in zip(args, STATE, strict=True) if tag in ROW_OF)
    assert_moves_no_more(ours, plain, args, smallest)


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=settings.default.max_examples // 5)  # each order has programs of its own
@given(program=programs(), setting=st.sampled_from(SETTINGS), differ=BATCHES, axis=st.sampled_from([0, 1, 2]))
def test_a_random_plain_program(order, program, setting, differ, axis):
    with gates(setting):
        check(order, program, *differ, axis)
