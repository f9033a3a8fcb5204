"""Random keys (`jax.random.key`) in row ops, in arrays and in loops. `test_loops_in_loops.py` has their derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import random as custom

from jax_tensorarray import TensorArray, fori_loop, growing, in_place, scan, ta_read, ta_swap, ta_write, tf, while_loop
from jax_tensorarray.residuals import explain

T, N = 7, 3
X = jnp.linspace(-1.0, 1.0, T * N).reshape(T, N)
IMPLEMENTATIONS = ["threefry2x32", "rbg", "unsafe_rbg"]
every_implementation = pytest.mark.parametrize("impl", IMPLEMENTATIONS)


def numbers(tree):
    """A tree with the data of its keys."""

    def of(x):
        return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)

    return jax.tree.map(of, tree)


def check(found, expected, tolerance=1e-5):
    same = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    jax.tree.map(same, numbers(found), numbers(expected))


def keys_of(shape, impl="threefry2x32"):
    return jax.random.split(jax.random.key(1, impl=impl), shape)


@pytest.mark.slow
def test_the_tangent_of_keys_has_no_numbers():
    def f(x, keys, loop=lax.scan):
        def body(carry, i):
            b, keys = carry
            row = jnp.sin(b[i - 1] + jax.random.normal(keys[i], (N,)) * b[i])
            return (b.at[i].set(row), keys.at[(i + 1) % T].set(jax.random.fold_in(keys[0], i))), None

        (b, keys), _ = loop(body, (x, keys), jnp.arange(1, T))
        return jnp.sum(b**2) + jnp.sum(jax.vmap(jax.random.uniform)(keys) @ b)

    args, tangents = (X, keys_of(T)), (X, np.zeros(T, jax.dtypes.float0))
    for loop in (functools.partial(scan, residuals="undo"), lax.scan):
        ours = jax.jit(in_place(functools.partial(f, loop=loop)))
        _, pull = jax.vjp(ours, *args)
        of_x, of_keys = pull(1.0)
        check(of_x, jax.grad(f)(*args))
        assert (of_keys.shape, of_keys.dtype) == ((T,), jax.dtypes.float0)
        check(jax.jvp(ours, args, tangents), jax.jvp(jax.jit(f), args, tangents))


def test_the_bytes_of_keys_are_counted():
    def f(x, keys, wrap):
        @jax.checkpoint
        def body(h, key):
            return jnp.tanh(h * jax.random.normal(wrap(key), (N,))), None

        return jnp.sum(lax.scan(body, x[0], keys)[0])

    def kept(keys, wrap):
        return [choice.tape_bytes for choice in explain(functools.partial(f, wrap=wrap))(X, keys)]

    keys = keys_of(T)
    assert kept(keys, lambda key: key) == kept(jax.random.key_data(keys), jax.random.wrap_key_data)


# --- row ops ---------------------------------------------------------------------------------------------------


@pytest.mark.slow(but=1)
@every_implementation
@pytest.mark.parametrize("lowering", ["auto", "ffi", "xla"])
def test_row_ops_move_keys(impl, lowering):
    keys, at, new = keys_of((T, 2), impl), jnp.array([4, 1]), keys_of(2, impl)
    check(ta_read(keys, at, lowering=lowering), keys[at])
    check(ta_read(keys, (3, 1), lowering=lowering), keys[3, 1])
    check(ta_read(keys, 1, axis=1, lowering=lowering), keys[:, 1])
    check(ta_read(keys, 2, length=3, lowering=lowering), keys[2:5])
    check(ta_write(keys, at, new, lowering=lowering), keys.at[at].set(new))
    check(ta_swap(keys, 3, new, lowering=lowering), (keys.at[3].set(new), keys[3]))
    shared = jax.vmap(lambda i: ta_read(keys, i, lowering=lowering))(at)
    check(shared, keys[at])


def test_keys_that_are_not_read_have_data_of_zeros():
    keys = keys_of(T)
    rows = ta_read(keys, jnp.array([1, T, 2]), where=jnp.array([True, True, False]), mode="drop")
    check(rows, jnp.stack([keys[1], jax.random.key(0), jax.random.key(0)]))


def test_keys_whose_implementation_is_the_users():
    def seed(number):
        return jnp.full(3, number, jnp.uint32)

    def split(data, shape):
        return data[..., None, :] + jnp.arange(np.prod(shape), dtype=jnp.uint32).reshape(*shape, 1)

    def bits(data, width, shape):
        return jnp.broadcast_to(jnp.sum(data), shape).astype(f"uint{width}")

    impl = custom.define_prng_impl(
        key_shape=(3,), seed=seed, split=split, random_bits=bits, fold_in=lambda data, number: data * 3 + number
    )
    keys = jax.random.wrap_key_data(jnp.arange(3 * T, dtype=jnp.uint32).reshape(T, 3), impl=impl)

    def body(i, keys):
        return keys.at[i % T].set(jax.random.fold_in(keys[(i * 3) % T], i))

    expected = numbers(keys).copy()
    for i in range(2 * T):
        expected[i % T] = expected[(i * 3) % T] * 3 + i
    check(jax.jit(in_place(lambda keys: lax.fori_loop(0, 2 * T, body, keys)))(keys), expected)


@pytest.mark.slow
def test_in_place_writes_the_rows_of_a_buffer_of_keys():
    def f(keys):
        def body(i, keys):
            return keys.at[i].set(jax.random.fold_in(keys[i - 1], i))

        return lax.fori_loop(1, T, body, keys)

    assert "ta_write" in str(jax.make_jaxpr(in_place(f))(keys_of(T)))
    check(jax.jit(in_place(f), donate_argnums=0)(keys_of(T)), f(keys_of(T)))


# --- arrays of keys --------------------------------------------------------------------------------------------


def drawn(key, count):
    """The keys that a loop draws from a key."""
    found = []
    for _ in range(count):
        key, now = jax.random.split(key)
        found.append(now)
    return jnp.stack(found)


@pytest.mark.slow
@every_implementation
def test_a_loop_appends_keys_to_an_array(impl):
    def f(key):
        def body(_, carry):
            key, ta = carry
            key, now = jax.random.split(key)
            return key, ta.append(now)

        _, ta = fori_loop(0, 5, body, (key, TensorArray(key.dtype, size=0, dynamic_size=True, max_size=T)))
        return ta.gather([4, 0]), ta.stack(pad=True), ta.size()

    key = jax.random.key(3, impl=impl)
    expected = drawn(key, 5)
    padded = jnp.concatenate([expected, jnp.zeros(2, key.dtype)])
    for run in (f, jax.jit(f)):
        check(run(key), (expected[jnp.array([4, 0])], padded, np.int32(5)))


@pytest.mark.slow
def test_an_array_of_keys_in_a_batch():
    def f(keys):
        ta = TensorArray.from_array(keys)
        ta = lax.fori_loop(1, T, lambda i, ta: ta.write(i, jax.random.fold_in(ta.read(i - 1), i)), ta)
        return ta.stack()

    keys = keys_of((2, T))
    check(jax.jit(jax.vmap(f))(keys), jnp.stack([f(keys[0]), f(keys[1])]))
    expected = [keys[0, 0]]
    for i in range(1, T):
        expected.append(jax.random.fold_in(expected[-1], i))
    check(f(keys[0]), jnp.stack(expected))


@pytest.mark.slow
def test_a_growing_array_of_keys():
    def f(key):
        def body(carry):
            ta, key, total = carry
            key, now = jax.random.split(key)
            return ta.append(now), key, total + jax.random.uniform(now)

        start = TensorArray(key.dtype, size=0, dynamic_size=True, element_shape=()), key, 0.0
        return while_loop(lambda carry: carry[2] < 4, body, start)[0]

    ta = growing(f)(jax.random.key(2))
    expected = drawn(jax.random.key(2), int(ta.size()))
    totals = np.cumsum([jax.random.uniform(key) for key in expected])
    assert (totals < 4).tolist() == [True] * (len(totals) - 1) + [False]
    check(ta.stack(), expected)


@pytest.mark.slow
def test_loops_of_tensorflow_go_through_keys():
    keys = keys_of(5)
    check(
        tf.map_fn(lambda key: jax.random.fold_in(key, 1), keys), jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys)
    )
    check(tf.foldl(lambda a, key: a + jax.random.normal(key), keys, 0.0), jnp.sum(jax.vmap(jax.random.normal)(keys)))
    _, key = tf.while_loop(lambda i, _: i < 3, lambda i, key: (i + 1, jax.random.split(key)[1]), (0, keys[0]))
    expected = keys[0]
    for _ in range(3):
        expected = jax.random.split(expected)[1]
    check(key, expected)
