"""A donated state that holds TensorArrays is updated where it lies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_tensorarray import TensorArray, ta_read, ta_write, while_loop

ROW = 16
LARGE = 1_000_000
MANY = 10

#: name -> step of a state, which has the weights "w", the number of rows seen so far and the buffers "seen".
STEPS = {}


def step(f):
    STEPS[f.__name__] = f
    return f


def new_row(state, k=0):
    i = state["steps"] + k
    return {"x": jnp.full(ROW, 1.0, jnp.float32) * jnp.cos(i), "reward": jnp.sin(i).astype(jnp.float32)}


def at(state, k=0):
    return (state["steps"] + k) % len(state["seen"])


def after(state, **changes):
    return {**state, "steps": state["steps"] + MANY, **changes}


@step
def write_in_a_cond(state):
    i = at(state)
    seen = lax.cond(i % 20 == 0, lambda ta: ta.write(i, new_row(state)), lambda ta: ta, state["seen"])
    return after(state, seen=seen)


@step
def loop_of_this_library(state):
    def body(carry):
        k, ta = carry
        return k + 1, lax.cond(k % 3 < 2, lambda ta: ta.write(at(state, k), new_row(state, k)), lambda ta: ta, ta)

    _, seen = while_loop(lambda carry: carry[0] < MANY, body, (0, state["seen"]), max_steps=MANY)
    return after(state, seen=seen)


def value(w, row):
    return jnp.sum(jnp.tanh(w @ row["x"])) - row["reward"]


@step
def gradient_of_a_replay(state):
    """A row is stored and some are drawn again to learn from."""
    seen = state["seen"].write(at(state), new_row(state))
    drawn = seen.gather((at(state) * 7 + jnp.arange(8)) % (at(state) + 1))
    grad = jax.grad(lambda w: jnp.mean(jax.vmap(value, (None, 0))(w, drawn) ** 2))(state["w"])
    return after(state, seen=seen, w=state["w"] - 0.01 * grad)


def gradient_through(loop):
    """A loss whose loop reads the buffer and stores what came out, which nothing is learned from."""

    def f(state):
        def loss(w, seen):
            def body(carry, k):
                seen, total = carry
                row = seen.read((at(state, k) + 5) % len(seen))
                y = jnp.tanh(w @ row["x"])
                seen = seen.write(at(state, k), {"x": lax.stop_gradient(y), "reward": row["reward"]})
                return (seen, total + jnp.sum(y**2))

            seen, total = loop(body, (seen, jnp.float32(0)))
            return total, seen

        grad, seen = jax.grad(loss, has_aux=True)(state["w"], state["seen"])
        return after(state, seen=seen, w=state["w"] - 0.01 * grad)

    return f


STEPS["gradient_through_lax_fori_loop"] = gradient_through(
    lambda body, init: lax.fori_loop(0, MANY, lambda k, c: body(c, k), init)
)
STEPS["gradient_through_while_loop"] = gradient_through(
    lambda body, init: while_loop(
        lambda c: c[0] < MANY, lambda c: (c[0] + 1, body(c[1], c[0])), (0, init), max_steps=MANY
    )[1]
)


def new_state(size):
    return {
        "w": jnp.eye(ROW, dtype=jnp.float32),
        "steps": jnp.int32(0),
        "seen": TensorArray.like({"x": jnp.zeros(ROW, jnp.float32), "reward": jnp.float32(0)}, size),
    }


def pointers(ta):
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(ta)]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", STEPS)
def test_a_donated_state_stays_where_it_is(name):
    f, state = jax.jit(STEPS[name], donate_argnums=0), new_state(50)
    program = f.lower(new_state(LARGE)).compile()
    assert program.memory_analysis().temp_size_in_bytes < LARGE  # of rows with ROW numbers there is no second copy
    wanted = plain = new_state(50)
    before = pointers(state["seen"])
    for _ in range(7):
        state, plain = f(state), jax.jit(STEPS[name])(plain)
        assert pointers(state["seen"]) == before
    jax.tree.map(np.testing.assert_array_equal, state, plain)
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(wanted), strict=True))


def test_an_array_that_grows_stays_where_it_is():
    f = jax.jit(lambda ta, x: ta.append(x), donate_argnums=0)
    ta = f(TensorArray(jnp.float32, size=0, dynamic_size=True, max_size=8, element_shape=()), 0.0)
    before = jax.tree.leaves(ta)[0].unsafe_buffer_pointer()
    for x in (1.0, 2.0, 3.0):
        ta = f(ta, x)
    assert jax.tree.leaves(ta)[0].unsafe_buffer_pointer() == before
    np.testing.assert_array_equal(ta.stack(), [0, 1, 2, 3])


# --- the array that was donated --------------------------------------------------------------------------------

LIMITED = {"size": 0, "dynamic_size": True, "max_size": 4, "element_shape": ()}


def ragged():
    ta = TensorArray(jnp.float32, size=0, dynamic_size=True, infer_shape=False)
    return ta.append([1.0, 2.0]).append([3.0])


DONATED = {
    "static": lambda: TensorArray.from_array(jnp.arange(4.0)),
    "limited": lambda: TensorArray(jnp.float32, **LIMITED).append(1.0).append(2.0),
    "limited, its size on the device": lambda: jax.jit(DONATED["limited"])(),
    "ragged": ragged,
}

add_one = jax.jit(lambda ta, i: ta.write(0, ta.read(0) + 1), donate_argnums=0)


@pytest.mark.parametrize("kind", DONATED)
def test_a_donated_array_says_that_it_is_gone(kind):
    ta = DONATED[kind]()
    twin, first = ta.identity(), DONATED[kind]().read(0)
    found = add_one(ta, 0)
    np.testing.assert_array_equal(found.read(0), first + 1)
    uses = [lambda: ta.read(0), lambda: list(ta), lambda: ta.gather([0]), lambda: twin.read(0)]
    if kind != "ragged":  # its rows are donated one by one
        uses += [ta.stack, lambda: ta.write(0, 1.0)]
    if "limited" in kind:
        uses += [ta.pop, lambda: ta.append(1.0)]
    if "on the device" in kind:
        uses += [ta.size, lambda: len(ta)]
    for use in uses:
        with pytest.raises(
            RuntimeError, match="the rows of this TensorArray are gone: it was donated to a jitted func"
        ):
            use()
    assert "TensorArray(" in repr(ta)
    with pytest.raises((RuntimeError, ValueError), match="has been deleted"):  # by JAX itself
        add_one(ta, 0)


def out_of_range(buffer, i):
    return ta_write(buffer, i, ta_read(buffer, 0) + 1)


def outside(ta, i):
    return ta.write(i, ta.read(0) + 1)


@pytest.mark.parametrize(("f", "make"), [(outside, DONATED["static"]), (out_of_range, lambda: jnp.arange(4.0))])
def test_after_a_runtime_error_the_donated_input_is_gone(f, make):
    step = jax.jit(f, donate_argnums=0)
    state = make()
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="index 4 is out of range"):
        jax.block_until_ready(step(state, 4))
    with pytest.raises(RuntimeError, match=r"donated to a jitted function|has been deleted"):
        state.read(0) if isinstance(state, TensorArray) else state + 1
    (found,) = jax.tree.leaves(step(make(), 3))
    np.testing.assert_array_equal(found, [0, 1, 2, 1])


@pytest.mark.parametrize("kind", ["static", "ragged"])
def test_after_an_error_while_tracing_the_donated_input_is_still_there(kind):
    ta = DONATED[kind]()
    with pytest.raises(IndexError):
        jax.jit(lambda ta: ta.write(-1, ta.read(0)), donate_argnums=0)(ta)
    with pytest.raises(TypeError):
        jax.jit(lambda ta: ta.write(0, np.int8(3)), donate_argnums=0)(ta)
    np.testing.assert_array_equal(ta.read(0), DONATED[kind]().read(0))
