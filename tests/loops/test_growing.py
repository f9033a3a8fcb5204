"""`growing`: a function whose loops and arrays have no bound gives what it gives with one that is large enough."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_tensorarray import TensorArray, fori_loop, growing, tf, while_loop

pytestmark = pytest.mark.slow(but=4)


def new(dtype=jnp.int32):
    return TensorArray(dtype, size=0, dynamic_size=True, element_shape=())


def collatz(n):
    """The numbers from n on, half of an even one and three times an odd one plus 1, until it is 1."""

    def step(carry):
        n, ta = carry
        return jnp.where(n % 2, 3 * n + 1, n // 2), ta.append(n)

    return while_loop(lambda carry: carry[0] != 1, step, (jnp.int32(n), new()))[1]


def in_python(n):
    found = []
    while n != 1:
        found.append(n)
        n = 3 * n + 1 if n % 2 else n // 2
    return found


def root(a):
    return while_loop(lambda x: abs(x * x - a) > 1e-9 * a, lambda x: (x + a / x) / 2, a)


def test_a_bound_doubles_as_often_as_needed_and_is_compiled_for_once():
    traced = []

    def f(n):
        traced.append(n)
        return collatz(n)

    g = growing(f, initial_bound=8)
    for n, bound in ((6, 8), (7, 16), (1, 16), (27, 128), (6, 128), (27, 128)):
        ta = g(jnp.int32(n))
        assert ta.stack().tolist() == in_python(n)
        assert g.bound == bound
        assert ta.append(5).stack().tolist() == [*in_python(n), 5]  # it has no bound outside
    assert len(traced) == 5


def test_derivatives_and_batches():
    slope = growing(jax.value_and_grad(root), initial_bound=1)
    for a in (2.0, 1e8, 3.0):
        np.testing.assert_allclose(slope(a), (a**0.5, 0.5 / a**0.5), rtol=1e-6)
    assert slope.bound == 32
    slopes = growing(jax.vmap(jax.grad(root)), initial_bound=2)
    a = np.array([2.0, 1e8])
    np.testing.assert_allclose(slopes(a), 0.5 / a**0.5, rtol=1e-6)
    power = growing(jax.grad(lambda x, n: fori_loop(2, n, lambda i, y: x * y, 1.0)), initial_bound=4)
    for n in (-1, 2, 6, 7, 20):
        np.testing.assert_allclose(power(1.5, n), max(n - 2, 0) * 1.5 ** (n - 3))
    assert power.bound == 32
    sizes = growing(jax.vmap(lambda n: collatz(n).size()), initial_bound=4)
    assert sizes(jnp.array([6, 1, 27])).tolist() == [8, 0, 111]
    many = growing(jax.vmap(collatz), initial_bound=16)(jnp.array([6, 7]))
    assert jax.tree.map(lambda x: x[1], many).stack().tolist() == in_python(7)


def test_loops_of_jax_in_which_an_array_grows():
    def every_other(n):
        def body(s):
            return s[0] + 1, s[1].write(s[0] * 2, s[0] + 1)

        return lax.while_loop(lambda s: s[0] < n, body, (jnp.int32(0), new()))[1]

    f = growing(every_other, initial_bound=4)
    for n in (0, 2, 9):
        assert f(n).stack().tolist() == [x for k in range(n) for x in (0, k + 1)][1:]
    assert f.bound == 32


@pytest.mark.parametrize("loop", ["tf.while_loop", "scan", "known"])
def test_bounds_that_are_given_hold(loop):
    def f(x):
        if loop == "tf.while_loop":
            return tf.while_loop(lambda i, _: i < 9, lambda i, y: (i + 1, y * x), (0, 1.0), maximum_iterations=5)[1]
        if loop == "scan":
            return lax.scan(lambda y, _: (y * x, None), 1.0, None, 5)[0]
        return fori_loop(0, 5, lambda i, y: y * x, 1.0)

    g = growing(jax.grad(f), initial_bound=2)
    np.testing.assert_allclose(g(1.5), 5 * 1.5**4)
    assert g.bound == 2


def test_what_is_known_while_tracing_may_need_more_too():
    rows = jnp.arange(9, dtype=jnp.int32)
    for f in (
        lambda x: new().write(8, x).stack(),
        lambda x: TensorArray.from_array(rows, dynamic_size=True).stack(),
        lambda x: new().unstack(rows).stack(),
        lambda x: new().write(x, 1, mode="drop").stack(pad=True)[:9],
        lambda x: TensorArray(jnp.int32, 9, True, element_shape=()).stack(),
        lambda x: TensorArray(jnp.int32, x + 1, True, element_shape=()).stack(pad=True)[:9],
    ):
        g = growing(f, initial_bound=2)
        assert g(jnp.int32(8)).shape == (9,)
        assert g.bound == 16
    assert growing(lambda x: new().write(x, 1, mode="drop").size(), initial_bound=2)(-1) == 0


def test_past_the_largest_bound_the_error_names_it():
    f = growing(collatz, initial_bound=8, max_bound=20)
    assert len(f(7)) == 16
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=r"the loop takes more steps .* max_bound=20"):
        f(27)
    assert f.bound == 20 and len(f(7)) == 16
    with pytest.raises(ValueError, match=r"9 rows .*max_bound=4"):
        growing(lambda x: new().unstack(x).size(), initial_bound=1, max_bound=4)(jnp.arange(9, dtype=jnp.int32))


def test_errors_of_the_function_are_its_own():
    f = growing(lambda i: TensorArray.from_array(jnp.arange(3)).read(i), initial_bound=1)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="index 5 is out of range"):
        f(5)
    with pytest.raises(ZeroDivisionError):
        growing(lambda x: 1 / 0)(1)
    assert f.bound == 1 and f(2) == 2


def test_effects_of_a_call_that_is_repeated_happen_again():
    seen = []

    def count(n):
        def body(i):
            jax.debug.callback(lambda i: seen.append(int(i)), i, ordered=True)
            return i + 1

        return while_loop(lambda i: i < n, body, 0)

    f = growing(count, initial_bound=2)
    assert f(3) == 3
    jax.effects_barrier()
    assert seen == [0, 1, 0, 1, 2]
    assert f(3) == 3
    jax.effects_barrier()
    assert seen[5:] == [0, 1, 2]


def test_static_arguments_keys_and_keywords():
    def f(n, kind, *, key):
        assert isinstance(kind, str)
        return while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, jax.random.split(c[1])[0]), (0, key))[1]

    def expected(n, key):
        for _ in range(n):
            key = jax.random.split(key)[0]
        return jax.random.key_data(key)

    key = jax.random.key(3)
    for g in (growing(f, initial_bound=4, static_argnames="kind"), growing(f, initial_bound=4, static_argnums=1)):
        np.testing.assert_array_equal(jax.random.key_data(g(9, "a kind", key=key)), expected(9, key))
    assert growing(root).__name__ == "root"


def test_where_no_mask_reaches_nothing_is_lost():
    def f(n):
        def printing():
            jax.debug.callback(lambda: None)
            return collatz(n).size()

        return lax.cond(n > 2, printing, lambda: jnp.int32(-1))

    assert growing(jax.vmap(f), initial_bound=4)(jnp.array([6, 1, 7])).tolist() == [8, -1, 16]


def test_inside_of_another_transformation_it_says_why_not():
    f = growing(root)
    for around in (jax.jit, jax.grad, jax.vmap):
        with pytest.raises(TypeError, match=r"root is called inside of jit, grad, vmap .*growing\(jax.grad\(fun\)\)"):
            around(f)(np.ones(2) if around is jax.vmap else 2.0)
    with jax.disable_jit():
        np.testing.assert_allclose(f(2.0), 2**0.5)


@pytest.mark.parametrize(
    ("kind", "make", "text"),
    [
        (TypeError, lambda: growing(3), "fun must be a function, got 3"),
        (TypeError, lambda: growing(root, initial_bound=1.5), "initial_bound must be an integer, got 1.5"),
        (TypeError, lambda: growing(root, initial_bound=True), "initial_bound must be an integer, got True"),
        (TypeError, lambda: growing(root, max_bound="x"), "max_bound must be an integer, got 'x'"),
        (ValueError, lambda: growing(root, initial_bound=0), "initial_bound must be at least 1, got 0"),
        (
            ValueError,
            lambda: growing(root, initial_bound=8, max_bound=4),
            "max_bound must be at least initial_bound, 8, got",
        ),
    ],
)
def test_bad_arguments(kind, make, text):
    with pytest.raises(kind, match=f"growing: {text}"):
        make()
