"""Single ops: where boxes start, with all parameters that go together, and what has no index. Each in every lowering,
transposed, and batched."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from library_in_numpy import library_in_numpy

from jax_tensorarray import primitives
from jax_tensorarray._ops.primitive import row_params

DTYPES = [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64]
ROW_OPS = "read", "write", "swap", "add", "max"


def random_case(rng, is_many):
    """An op, its parameters, and its operands as numbers from -4 to 3. Many positions are updated by one scatter."""

    def some(low, high, shape=None):
        """Numbers below `high`; now and then there is nothing of a kind."""
        return rng.integers(low * (rng.random() > 0.07), high, shape)

    op, batch, dtype = str(rng.choice([*ROW_OPS * 2, "stack", "clear", "check"])), some(1, 4, rng.integers(3)), None
    axes, elem = int(rng.integers(1, 4)), some(1, 3, rng.choice(3, p=[0.5, 0.4, 0.1]))
    sizes, positions = (
        some(1, 6, axes),
        (24,) if is_many else [(), (1,), (3,), (2, 2), (0,)][rng.choice(5, p=[0.24] * 4 + [0.04])],
    )
    dtype = rng.choice(DTYPES)

    def integers(low, high, shape):
        """Of an unsigned dtype, some are large. Now and then one is the first or the last of its dtype."""
        found = np.asarray(rng.integers(low, high, shape).astype(dtype))
        if found.size and rng.random() < 0.2:
            found.flat[rng.integers(found.size)] = [np.iinfo(dtype).min or 2**7, np.iinfo(dtype).max][rng.integers(2)]
        return found

    if op not in ROW_OPS:
        buffer = rng.integers(-4, 4, (*batch, *sizes[:1], *elem))
        params = {"batch_dims": len(batch)}
        if op != "check":
            return op, params, [buffer, *[integers(-2, 8, batch) for _ in range(1 if op == "stack" else 2)]]
        where = [rng.random((*batch, *positions)) < 0.7] * int(rng.integers(2))
        size = rng.integers(-1, 6, batch).astype(np.int32)
        return op, params | {"mode": "drop", "op": "a"}, [integers(-2, 8, (*batch, *positions)), size, *where]
    window = tuple(int(some(1, n + 1)) if n else 0 for n in sizes[axes - int(rng.integers(axes + 1)) :])
    whole = bool(rng.random() < 0.5) or (axes > 1 and bool(window))
    params = row_params(
        f"ta_{op}",
        str(rng.choice(["drop", "clip"])) if whole and all(sizes) else "drop",
        batch_dims=len(batch),
        index_dims=axes,
        window=window,
        whole=whole,
        reverse=bool(rng.random() < 0.4) and op not in ("read", "max"),
    )

    def some_shared():
        return [1 if rng.random() < 0.4 else n for n in batch]

    starts = [integers(-2, size + 2, (*some_shared(), *positions)) for size in sizes]
    starts = [np.broadcast_to(x, np.broadcast_shapes(*(x.shape for x in starts))) for x in starts]
    index = np.stack(starts, axis=-1) if axes > 1 else starts[0]
    value = [] if op == "read" else [rng.integers(-4, 4, (*batch, *positions, *window, *elem))]
    where = [rng.random((*some_shared(), *positions)) < 0.7] * int(rng.integers(2))
    return op, params, [rng.integers(-4, 4, (*batch, *sizes, *elem)), index, *value, *where]


def run(cases, dtype, lowering, *, in_loop=False):
    def f(operands):
        found = []
        for (op, params, _), (buffer, *rest) in zip(cases, operands, strict=True):
            primitive = getattr(primitives, f"ta_{op}_p")
            options = params | ({"lowering": lowering} if op in ROW_OPS else {})
            buffer = buffer if op == "check" else buffer.astype(dtype)
            rest = [x.astype(dtype) if op in ROW_OPS[1:] and n == 1 else x for n, x in enumerate(rest)]

            def step(buffer, op=op, primitive=primitive, options=options, rest=rest):
                out = primitive.bind(buffer, *rest, **options)
                return (buffer, out) if op in ("read", "check") else out if op == "swap" else (out, ())

            if in_loop:
                new, outs = lax.scan(lambda b, _, step=step: step(b), buffer, length=1)
                outs = jax.tree.map(lambda x: x[0], outs)
            else:
                new, outs = step(buffer)
            found.append((() if op == "check" else new, outs))
        return found

    return f


@pytest.mark.parametrize("seed", range(4))
def test_the_transpose_of_a_linear_op_is_its_adjoint_and_has_the_op_as_its_transpose(seed):
    """By products of complex numbers in NumPy. An op is a function of its buffer, its value, or both."""
    rng = np.random.default_rng(10 + seed)

    def normal(shape):
        return rng.normal(size=shape) + 1j * rng.normal(size=shape)

    cases = [case for case in (random_case(rng, k % 4 == 0) for k in range(26)) if case[0] not in ("max", "check")]
    inputs = []
    for op, _, (buffer, _, *rest) in cases:
        has_both = {"buffer": normal(buffer.shape)}
        if op in ROW_OPS[1:]:
            has_both["value"] = normal(rest[0].shape)
        chosen = [*has_both][:: rng.choice([1, 2, -2])]  # both, or the first, or the last
        inputs.append({name: has_both[name] for name in chosen})

    def linear(*inputs):
        operands = []
        for (op, _, (buffer, index, *rest)), given in zip(cases, inputs, strict=True):
            value = [given.get("value", np.zeros(rest[0].shape))] if op in ROW_OPS[1:] else []
            operands.append([given.get("buffer", np.zeros(buffer.shape)), index, *value, *rest[len(value) :]])
        return run(cases, jnp.complex128, "ffi")(operands)

    results = library_in_numpy(linear)(*inputs)
    cotangents = jax.tree.map(lambda x: normal(x.shape), results)

    def transposed(cts):
        return jax.linear_transpose(linear, *inputs)(cts)

    adjoints = library_in_numpy(transposed)(cotangents)
    (again,) = library_in_numpy(lambda xs: jax.linear_transpose(transposed, cotangents)(xs))(tuple(inputs))
    jax.tree.map(np.testing.assert_array_equal, again, results)
    for case, *pairs in zip(cases, inputs, adjoints, results, cotangents, strict=True):
        x, x_ct, y, y_ct = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]) for tree in pairs)
        np.testing.assert_allclose(x @ x_ct, y @ y_ct, rtol=1e-9, atol=1e-9, err_msg=str(case[:2]))


def run_one(case, *operands):
    return run([case], jnp.int32, "ffi")([operands])[0]


def of_each(f, levels, operands):
    """Compute in NumPy what nested vmaps with these in_axes do, the outermost first."""
    if not levels:
        return f(*operands)
    axes, *inner = levels
    each = [[x if a is None else np.take(x, k, a) for x, a in zip(operands, axes, strict=True)] for k in range(3)]
    return jax.tree.map(lambda *outs: np.stack(outs), *[of_each(f, inner, xs) for xs in each])


def batched(rng, operand, axes):
    """Three examples along each axis that is not None, the innermost last."""
    for axis in reversed(axes):
        if axis is not None:
            others = [rng.permuted(operand, axis=0) if operand.ndim else operand + k for k in range(2)]
            operand = np.stack([operand, *[x.astype(operand.dtype) for x in others]], axis)
    return operand


@pytest.mark.parametrize("seed", range(4))
def test_a_batch_of_an_op_is_that_of_each_example(seed):
    """Under one or two vmaps, in NumPy."""
    rng = np.random.default_rng(20 + seed)
    for case in [random_case(rng, False) for _ in range(40)]:
        levels = []
        while len(levels) < 1 + seed % 2:
            axes = [[None, None, 0, -1][k] for k in rng.integers(0, 4, len(case[2]))]
            levels += [axes] if any(axis is not None for axis in axes) else []
        operands = [batched(rng, x, axes) for x, axes in zip(case[2], zip(*levels, strict=True), strict=True)]
        one = mapped = functools.partial(run_one, case)
        for axes in reversed(levels):
            mapped = jax.vmap(mapped, axes)
        found, wanted = library_in_numpy(mapped)(*operands), of_each(library_in_numpy(one), levels, operands)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(x, y, err_msg=f"{case[:2]}, {levels}")


@pytest.mark.slow
@pytest.mark.parametrize("is_many", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_a_kernel_slices_and_plain_jax_do_what_numpy_does(seed, is_many):
    """For packed integers plain JAX is run. In loops few rows are slices, and many are a gather and a scatter."""
    rng = np.random.default_rng(seed)
    cases = [random_case(rng, is_many) for _ in range(10)]
    operands = [xs for _, _, xs in cases]
    wanted = library_in_numpy(run(cases, jnp.int32, "ffi"))(operands)
    ways = {
        "kernels": run(cases, jnp.int32, "ffi"),
        "slices": run(cases, jnp.int32, "auto", in_loop=True),
        "plain": run(cases, jnp.int4, "auto"),
    }
    for name, f in ways.items():
        found = jax.jit(f)(operands)
        for case, got, want in zip(cases, found, wanted, strict=True):
            for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                is_packed = name == "plain" and case[0] != "check"
                want_of = (y + 8) % 16 - 8 if is_packed else y  # sums of packed integers wrap earlier
                np.testing.assert_array_equal(np.asarray(x).astype(np.int32), want_of, err_msg=f"{name}: {case[:2]}")
