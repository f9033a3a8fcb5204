"""This library, and what JAX and Equinox have instead: ways to hold rows, and loops over them."""

import functools
import math
import platform
import time
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
from jax import lax

import jax_tensorarray as jt
from benchmarks.inputs import BATCH, inputs, permutation
from benchmarks.rivals import Prepared, Unsupported
from benchmarks.rivals import programs as texts
from jax_tensorarray import TensorArray, _selfcheck
from jax_tensorarray._hlo import text as hlo_text
from tests.support.row_programs import ours, plain, programs

try:
    import equinox
    import equinox.internal as eqxi
except ImportError:
    equinox = None


def versions():
    found = {
        "Python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "jax_tensorarray": jt.__version__,
        "numpy": np.__version__,
    }
    return found | ({"equinox": equinox.__version__} if equinox else {})


# --- rows: `unstack(array)`, and then read, write, append, dense ---------------------------------------------------


@jax.tree_util.register_pytree_node_class
class ArrayRows:
    """An array, updated by `.at[].set`. Equinox's buffers take the same calls."""

    def __init__(self, array, size=None):
        self.array, self.size = array, size

    def tree_flatten(self):
        return (self.array, self.size), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)

    def read(self, i):
        return self.array[i]

    def write(self, i, value, where=None):
        pred = {} if where is None else {"pred": where}  # Equinox's
        return ArrayRows(self.array.at[i].set(value, **pred), self.size)

    def add(self, i, value):
        return ArrayRows(self.array.at[i].add(value), self.size)

    def append(self, value):
        return ArrayRows(self.array.at[self.size].set(value), self.size + 1)

    def dense(self):
        return self.array[:]


@jax.tree_util.register_pytree_node_class
class RefRows:
    """A mutable array. A loop closes over it, so a carry has no leaf for it."""

    def __init__(self, ref):
        self.ref = ref

    def tree_flatten(self):
        return (), self

    @classmethod
    def tree_unflatten(cls, self, _):
        return self

    def read(self, i):
        return self.ref[i]

    def write(self, i, value, where=None):
        self.ref[i] = value if where is None else jnp.where(where, value, self.ref[i])
        return self

    def add(self, i, value):
        self.ref[i] += value
        return self

    def dense(self):
        return self.ref[...]


class OurRows:
    """The calls above on a `TensorArray`, which has other names for some."""

    @staticmethod
    def read(ta, i):
        return ta.gather(i) if jnp.ndim(i) else ta.read(i)

    @staticmethod
    def write(ta, i, value, where=None):
        return ta.scatter(i, value) if jnp.ndim(i) else ta.write(i, value, where=where)

    @staticmethod
    def add(ta, i, value):
        return ta.write(i, ta.read(i) + value)


def _unstack_ours(array):
    return TensorArray.from_array(array, dynamic_size=False)


# --- loops -------------------------------------------------------------------------------------------------------


def _fori(start, stop, body, carry):
    return lax.fori_loop(start, stop, body, carry)


def equinox_while(kind):
    def while_loop(cond, body, carry, max_steps):
        if equinox is None:
            raise Unsupported("Equinox is not installed")
        leaves, tree = jax.tree.flatten(carry, is_leaf=lambda leaf: isinstance(leaf, ArrayRows))
        is_rows = [isinstance(leaf, ArrayRows) for leaf in leaves]

        def buffers(carry):
            return [rows.array for rows, is_one in zip(tree.flatten_up_to(carry), is_rows, strict=True) if is_one]

        return eqxi.while_loop(cond, body, carry, max_steps=max_steps, kind=kind, buffers=buffers)

    return while_loop


def _counted(while_loop):
    """A loop of a known number of steps from one of an unknown number."""

    def fori(start, stop, body, carry):
        steps = stop - start
        carry = (jnp.int32(start), carry)
        return while_loop(lambda c: c[0] < stop, lambda c: (c[0] + 1, body(c[0], c[1])), carry, steps)[1]

    return fori


def _nested_scans(cond, body, carry, max_steps, base=16):
    """`bounded_while_loop` of https://github.com/jax-ml/jax/issues/8239."""

    def level(depth, carry):
        if depth == 0:
            return body(carry)
        call = jax.checkpoint(lambda carry: level(depth - 1, carry))

        def step(carry, _):
            return lax.cond(cond(carry), call, lambda carry: carry, carry), None

        return lax.scan(step, carry, None, length=base)[0]

    return level(math.ceil(math.log(max_steps, base) - 1e-9), carry)


def whole_scan(cond, body, carry, max_steps):
    """`lax.scan` over all steps that there might be: right where that is how many there are."""
    return lax.scan(lambda carry, _: (body(carry), None), carry, None, length=max_steps)[0]


def _lax_while(cond, body, carry, max_steps):
    return lax.while_loop(cond, body, carry)


def ours_while(residuals):
    def while_loop(cond, body, carry, max_steps):
        return jt.while_loop(cond, body, carry, max_steps=max_steps, residuals=residuals)

    return while_loop


class InJAX:
    """What the programs are made of. `unstack` is how this rival holds rows."""

    sum, tanh, sin, cos, exp = (staticmethod(f) for f in (jnp.sum, jnp.tanh, jnp.sin, jnp.cos, jnp.exp))
    sigmoid, log_softmax = staticmethod(jax.nn.sigmoid), staticmethod(jax.nn.log_softmax)
    concat, ravel, matmul = staticmethod(jnp.concatenate), staticmethod(jnp.ravel), staticmethod(jnp.matmul)
    top_k, array = staticmethod(lax.top_k), staticmethod(jnp.array)

    def __init__(self, unstack, fori=_fori, while_loop=None):
        self.unstack, self.fori, self.while_loop = unstack, fori, while_loop

    def zeros(self, x):
        return self.unstack(jnp.zeros_like(x))

    def ones(self, x):
        return self.unstack(jnp.ones_like(x))

    def empty(self, size, shape, integer=False):
        return self.unstack(jnp.zeros((size, *shape), jnp.int32 if integer else jnp.float32))

    def growing(self, x):
        if self.unstack is _unstack_ours:
            return TensorArray(x.dtype, 0, dynamic_size=True, max_size=len(x), element_shape=x.shape[1:])
        if self.unstack is not ArrayRows:
            raise Unsupported("no array that grows")
        return ArrayRows(jnp.zeros_like(x), jnp.int32(0))

    @staticmethod
    def dense(rows):
        return rows.stack(pad=True) if isinstance(rows, TensorArray) else rows.dense()

    def loop(self, stop, body, carry, start=0):
        return self.fori(start, stop, lambda i, carry: tuple(body(i, *carry)), carry)

    @staticmethod
    def matvec(w, v, transpose=False):
        return v @ w if transpose else w @ v

    @staticmethod
    def take(rows, index):
        return rows[index]

    @staticmethod
    def part(v, start, size):
        return lax.dynamic_slice(v, (start,), (size,))

    @staticmethod
    def cast(i):
        return jnp.asarray(i, jnp.float32)

    @staticmethod
    def zeros_of(shape, integer=False):
        return jnp.zeros(shape, jnp.int32 if integer else jnp.float32)


_CHECKPOINTED, _BOUNDED = equinox_while("checkpointed"), equinox_while("bounded")

#: How each rival holds rows, and its loops.
DIALECTS = {
    "ours": InJAX(_unstack_ours, while_loop=ours_while("auto")),
    "ours_recompute": InJAX(_unstack_ours, while_loop=ours_while("recompute")),
    "ours_tape": InJAX(_unstack_ours, while_loop=ours_while("tape")),
    "ours_class": InJAX(_unstack_ours),
    "plain": InJAX(ArrayRows, while_loop=whole_scan),
    "lax_while": InJAX(ArrayRows, while_loop=_lax_while),
    "nested_scans": InJAX(ArrayRows, while_loop=_nested_scans),
    "new_ref": InJAX(lambda array: RefRows(jax.new_ref(array)), while_loop=whole_scan),
    "eqx_checkpointed": InJAX(ArrayRows, _counted(_CHECKPOINTED), _CHECKPOINTED),
    "eqx_bounded": InJAX(ArrayRows, _counted(_BOUNDED), _BOUNDED),
}


def _called(name):
    """A method of rows as a function. What the programs close over is an array, and read as one."""

    def call(rows, i, *args, **options):
        if isinstance(rows, jax.Array):
            return rows[i]
        method = getattr(OurRows, name) if isinstance(rows, TensorArray) else getattr(type(rows), name)
        return method(rows, i, *args, **options)

    return call


def _swap(rows, i, value):
    old = _METHODS.read(rows, i)
    return _METHODS.write(rows, i, value), old


#: The ops of `tests.support.row_programs` on these rows.
_METHODS = SimpleNamespace(**{name: _called(name) for name in ("read", "write", "add")}, swap=_swap, policy=ours.policy)


def _by_methods(program, xp):
    """A program of `_programs`, in which the buffers of the carry are held as `xp` holds rows."""

    def over_steps(body, carry, x):
        leaves, tree = jax.tree.flatten(carry)
        carry = jax.tree.unflatten(tree, [xp.unstack(leaf) if leaf.shape == x.shape else leaf for leaf in leaves])
        if xp.fori is _fori:
            carry, _ = lax.scan(lambda carry, ix: (body(carry, ix), None), carry, (jnp.arange(len(x)), x))
        else:
            carry = xp.fori(0, len(x), lambda i, carry: body(carry, (i, x[i])), carry)
        held = tree.flatten_up_to(carry)
        return jax.tree.unflatten(tree, [leaf if isinstance(leaf, jax.Array) else xp.dense(leaf) for leaf in held])

    def loss(x):
        with mock.patch.object(_selfcheck, "over_steps", over_steps):
            return program.loss(_METHODS, x)

    return loss


def _stacked(case):
    """The limit for loops that only write: rows are outputs of `lax.scan`, each written once by XLA itself."""
    rows = {
        "write": lambda i, row: jnp.sin(row),
        "issue_15906": lambda i, row: row * i**0.5,
        "map_rows": lambda i, row: jnp.tanh(row),
    }[case]
    power = 1 if case == "issue_15906" else 2

    def loss(x):
        ys = lax.scan(lambda _, ix: (None, rows(*ix)), None, (jnp.arange(len(x)), x))[1]
        return jnp.sum(ys**power)

    return loss


def _loss(case, rival, T):
    """The case as a function of its inputs."""
    if rival == "stacked":
        return _stacked(case)
    if case in programs:
        if rival in ("ours", "plain"):
            return programs[case].with_ops(ours if rival == "ours" else plain)
        if case == "issue_15906":  # has a loop of its own
            return functools.partial(texts.issue_15906, DIALECTS[rival])
        return _by_methods(programs[case], DIALECTS[rival])
    xp = DIALECTS[rival]
    if case == "while_vmapped":
        one = functools.partial(texts.while_read_earlier, xp, rows=T, max_steps=T)
        return lambda xs, n: jnp.sum(jax.vmap(lambda x, n: one(x, n=n))(xs, n))
    if _is_dynamic(case):
        text = getattr(texts, case.removesuffix("_loose"))
        loose = {"while_write_loose": 1000, "while_read_earlier_loose": 20}.get(case, 1)
        return lambda *args: text(xp, *args[:-1], n=args[-1], rows=T, max_steps=loose * T)
    return functools.partial(getattr(texts, case), xp)


def _is_dynamic(case):
    return case.startswith("while_") or case == "triangular"


def _arguments(case, T, row):
    """Arrays to differentiate by, and, where only they know it, the number of steps."""
    args = [jnp.asarray(a) for a in inputs(case, T, row)]
    if case == "while_vmapped":
        return args, [jnp.linspace(T // 4, T, BATCH).astype(jnp.int32)]
    return args, [jnp.int32(T)] if _is_dynamic(case) else []


def _derivative(f, derivative, count):
    every = tuple(range(count))
    if derivative == "forward":
        return f
    if derivative == "gradient":
        return jax.value_and_grad(f, every)
    return lambda *args: jax.jvp(jax.grad(f, every), args, args)


def _arrays(output):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(output)]


def prepare(case, rival, derivative, T, row):
    if case in OPS:
        return _prepare_op(case, rival, T, row)
    if case == "eager_write":
        return _prepare_eager(T, row)
    floats, steps = _arguments(case, T, row)
    args = floats + steps

    def build():
        f = _derivative(_loss(case, rival, T), derivative, len(floats))
        start = time.perf_counter()
        compiled = jax.jit(f).lower(*args).compile()
        return compiled, time.perf_counter() - start

    def compile_anew():
        jax.clear_caches()
        return build()[1]

    compiled, seconds = build()
    hlo = compiled.as_text()
    whole = max(4 * T * row, 1)
    return Prepared(
        run=lambda: jax.block_until_ready(compiled(*args)),
        answer=_arrays,
        compile=compile_anew,
        compile_seconds=seconds,
        temp_bytes=compiled.memory_analysis().temp_size_in_bytes,
        copies=len(hlo_text.copies_in_loops(hlo, whole)),
    )


# --- single ops, against a copy of the same bytes ------------------------------------------------------------------

#: name -> (ours, plain JAX's)
#: Each gives its first argument anew, which is donated: nothing is allocated and no buffer is copied on the side.
OPS = {
    "gather": (lambda out, b, i, v: jt.ta_read(b, i), lambda out, b, i, v: b[i]),
    "scatter": (lambda b, i, v: jt.ta_write(b, i, v), lambda b, i, v: b.at[i].set(v)),
    "scatter_add": (lambda b, i, v: jt.ta_add(b, i, v), lambda b, i, v: b.at[i].add(v)),
    "stack": (lambda b, n: jt.ta_stack(b, n), lambda b, n: _masked(b, n)),
    "large_read": (lambda out, b, i: jt.ta_read(b, i), lambda out, b, i: b[i]),
    "large_write": (lambda b, i, v: jt.ta_write(b, i, v), lambda b, i, v: b.at[i].set(v)),
}


def _masked(b, n):
    return jnp.where((jnp.arange(len(b)) < n)[:, None], b, 0)


def _prepare_op(case, rival, T, row):
    rng = np.random.default_rng(0)
    if case.startswith("large"):  # the second of two rows is moved
        shape, buffer_shape, index = (row,), (2, row), np.int32(1)
    else:  # all rows are, in an order of no pattern
        shape, buffer_shape, index = (T, row), (T, row), permutation(T)
    buffer = rng.standard_normal(buffer_shape, dtype=np.float32)
    value = rng.standard_normal(shape, dtype=np.float32)
    if rival == "memcpy":
        source = {"stack": buffer[T // 2 :], "large_read": buffer[1]}.get(case, value)
        target = np.empty_like(source)

        def copy():
            np.copyto(target, source)

        return Prepared(copy, lambda _: [], resident=False)
    mine, theirs = OPS[case]
    first = np.zeros_like(value)
    args = {
        "gather": (first, buffer, index, value),
        "scatter": (buffer, index, value),
        "scatter_add": (buffer, index, value),
        "stack": (buffer, np.int32(T // 2)),
        "large_read": (first, buffer, index),
        "large_write": (buffer, index, value),
    }[case]
    state, *rest = (jnp.asarray(a) for a in args)
    step = jax.jit(mine if rival == "ours" else theirs, donate_argnums=0, keep_unused=True)
    start = time.perf_counter()
    compiled = step.lower(state, *rest).compile()
    seconds = time.perf_counter() - start

    def run():
        nonlocal state
        state = jax.block_until_ready(compiled(state, *rest))
        return state

    return Prepared(run, _arrays, compile_seconds=seconds, resident=False)


def _prepare_eager(T, row):
    """A Python loop of writes outside of `jit`."""
    value = jnp.arange(row, dtype=jnp.float32)

    def run():
        ta = TensorArray(jnp.float32, T, element_shape=(row,))
        for i in range(T):
            ta = ta.write(i, value)
        return jax.block_until_ready(ta.stack())

    return Prepared(run, _arrays)
