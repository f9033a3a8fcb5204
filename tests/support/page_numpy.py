"""NumPy in the clothes of JAX and of this library: stand-ins that evaluate a program of `page_programs` as it is read.

Every operation is one of NumPy's, every loop one of Python's, every derivative a fourth-order finite difference, and
every transformation that changes no result is the identity. The meaning of each name is the one of the public pages.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np


class Near(Exception):
    """A comparison or a maximum is too close to call, so rounding might decide it: the program is not judged."""


class OutOfRange(IndexError):
    """The error that the index rule asks for."""


class State:
    exact = 0  # in a finite difference all floats have 64 bits
    dry = 0  # a body that only shows the shapes of its results
    frames: tuple = ()  # the finite differences around a `stop_gradient`


def real_dtype(dtype):
    dtype = np.dtype(dtype)
    if State.exact and jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(np.complex128)
    return np.dtype(np.float64) if State.exact and jnp.issubdtype(dtype, jnp.floating) else dtype


def wide(x):
    """Return a copy, in a finite difference of 64 bits."""
    return np.array(x, real_dtype(np.asarray(x).dtype))


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.inexact)


class A(np.ndarray):
    """An array of NumPy with the methods, and the indices, of JAX's."""

    at = property(lambda self: At(self))

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        if not any(is_index(i) for i in index):
            return arr(super().__getitem__(index))
        return arr(super().__getitem__(tuple(clamped(index, self.shape)[0])))

    def astype(self, dtype):
        return arr(np.asarray(self).astype(real_dtype(dtype)))

    def sum(self, axis=None, **_):
        return arr(np.sum(np.asarray(self), axis, dtype=self.dtype))

    def __array_wrap__(self, x, context=None, return_scalar=False):
        return arr(x)

    def transpose(self, *axes):
        return arr(np.transpose(np.asarray(self), axes))

    def reshape(self, *shape):
        return arr(np.asarray(self).reshape(*shape))

    def __iter__(self):
        return (self[i] for i in range(len(self)))


def operator(name):
    def apply(self, other):
        if isinstance(other, (int, float)) and not isinstance(other, bool):
            other = np.asarray(other, np.result_type(self.dtype, other) if self.dtype.kind != "V" else self.dtype)
        if name in ("__gt__", "__lt__", "__ge__", "__le__", "__eq__", "__ne__"):
            apart(self, other)
        return arr(getattr(np.ndarray, name)(self, other))

    return apply


for _name in [
    "add",
    "sub",
    "mul",
    "truediv",
    "pow",
    "gt",
    "lt",
    "ge",
    "le",
    "eq",
    "ne",
    "radd",
    "rsub",
    "rmul",
    "floordiv",
    "mod",
    "and",
    "or",
    "xor",
    "matmul",
]:
    setattr(A, f"__{_name}__", operator(f"__{_name}__"))
A.__hash__ = None


def arr(x):
    return np.asarray(x).view(A)


def apart(a, b):
    a, b = np.asarray(a), np.asarray(b)
    if not State.dry and jnp.issubdtype(a.dtype, jnp.inexact) and np.size(a - b):
        few = a.dtype.itemsize < 4
        if np.min(np.abs((a - b).astype(np.complex128))) < (0.2 if few else 0.02):
            raise Near


def is_index(i):
    return isinstance(i, (int, np.integer, np.ndarray))


def clamped(index, shape):
    """Return an index of NumPy's with negative integers counted from the end, and which positions were in range."""
    if Ellipsis in [i for i in index if not is_index(i)]:
        where = [not is_index(i) and i is Ellipsis for i in index].index(True)
        index = index[:where] + (slice(None),) * (len(shape) - len(index) + 1) + index[where + 1 :]
    result, fine, axis = [], True, 0
    for i in index:
        if i is None:
            result.append(i)
            continue
        if is_index(i):
            i = np.asarray(i).astype(np.int64)
            i = np.where(i < 0, i + shape[axis], i)
            fine = fine & (i >= 0) & (i < shape[axis])
            i = np.asarray(np.clip(i, 0, max(shape[axis] - 1, 0)))
        result.append(i)
        axis += 1
    return result, np.asarray(fine)


class At:
    """`array.at[index]`: an update out of range is dropped."""

    def __init__(self, array, index=None):
        self.array, self.index = array, index

    def __getitem__(self, index):
        return At(self.array, index if isinstance(index, tuple) else (index,))

    def get(self, mode=None, fill_value=None, **_):
        rows = self.array[self.index]
        if mode != "fill":
            return rows
        fine = clamped(self.index, self.array.shape)[1]
        fine = fine.reshape(fine.shape + (1,) * (rows.ndim - fine.ndim))
        return arr(np.where(fine, rows, np.asarray(fill_value, rows.dtype)))

    def update(self, f, value, **_):
        new = wide(self.array)
        index, fine = clamped(self.index, new.shape)
        if any(is_index(i) for i in self.index):
            order = np.broadcast_shapes(*[np.shape(i) for i in index if isinstance(i, np.ndarray)])
            before = [isinstance(i, np.ndarray) for i in index].index(True)
            value = np.broadcast_to(np.asarray(value).astype(new.dtype), new[tuple(index)].shape)
            for p in np.ndindex(order):
                at = tuple(np.broadcast_to(i, order)[p] if isinstance(i, np.ndarray) else i for i in index)
                if np.broadcast_to(fine, order)[p]:
                    new[at] = f(new[at], value[(slice(None),) * before + p])
        else:
            new[tuple(index)] = f(new[tuple(index)], np.asarray(value).astype(new.dtype))
        return arr(new)


for _name, _f in {
    "set": lambda old, new: new,
    "add": lambda a, b: a | b if a.dtype == bool else a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b,
    "max": lambda a, b: (apart(a, b), np.maximum(a, b))[1],
    "min": lambda a, b: (apart(a, b), np.minimum(a, b))[1],
}.items():
    setattr(At, _name, lambda self, value, _f=_f, **options: self.update(_f, value, **options))


def wrapped(f):
    return lambda *args, **kwargs: arr(f(*args, **kwargs))


def maximum(f):
    def apply(a, b):
        apart(a, b)
        return arr(f(a, b))

    return apply


def argmax(x, axis=None):
    ordered = np.sort(np.asarray(x).astype(float), axis)
    if axis is None and np.size(x) > 1:
        apart(ordered[-1], ordered[-2])
    return arr(np.argmax(x, axis))


def with_dtype(f, position):
    def apply(*args, **kwargs):
        args = list(args)
        if len(args) > position and args[position] is not None:
            args[position] = real_dtype(args[position])
        if "dtype" in kwargs:
            kwargs["dtype"] = real_dtype(kwargs["dtype"])
        return arr(f(*args, **kwargs))

    return apply


fake_jnp = types.SimpleNamespace(
    **{
        name: getattr(jnp, name).dtype.type
        for name in ["float64", "float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64"]
    },
    **{name: getattr(jnp, name).dtype.type for name in ["complex64", "complex128", "bool_"]},
    **{
        name: wrapped(getattr(np, name))
        for name in ["sin", "cos", "tanh", "exp", "sqrt", "where", "roll", "flip", "square", "stack", "zeros_like"]
    },
    **{
        name: wrapped(getattr(np, name))
        for name in ["concatenate", "conj", "real", "imag", "take", "cumsum", "outer", "logical_not"]
    },
    **{
        name: wrapped(getattr(np, name))
        for name in ["broadcast_to", "logical_and", "logical_or", "einsum", "transpose"]
    },
    **{
        name: with_dtype(getattr(np, name), p)
        for name, p in {"zeros": 1, "ones": 1, "full": 2, "asarray": 1, "array": 1}.items()
    },
    **{name: with_dtype(getattr(np, name), 9) for name in ("arange", "sum", "mean", "eye")},
    maximum=maximum(np.maximum),
    minimum=maximum(np.minimum),
    argmax=argmax,
    inexact=jnp.inexact,
    newaxis=None,
    issubdtype=jnp.issubdtype,
    ndarray=np.ndarray,
)

# Control flow.


def tree(f, *trees):
    return jax.tree.map(f, *trees)


def as_arrays(x):
    return tree(lambda leaf: arr(leaf) if isinstance(leaf, (int, float, complex, np.generic, np.ndarray)) else leaf, x)


def fori_loop(lower, upper, body, init, **_):
    carry = as_arrays(init)
    for i in range(int(lower), int(upper)):
        carry = body(arr(np.int64(i)), carry)
    return carry


def while_loop(cond, body, init, *, max_steps=None, on_limit="raise", residuals="auto", return_steps=False):
    carry, taken, limit = as_arrays(init), 0, 10**4 if max_steps is None else max_steps
    while taken < limit and bool(cond(carry)):
        carry, taken = body(carry), taken + 1
    if taken == 10**4:
        raise Near
    return (carry, (arr(np.int64(taken)), arr(bool(cond(carry))))) if return_steps else carry


def scan(f, init, xs=None, length=None, reverse=False, unroll=1, residuals="auto"):
    leaves = jax.tree.leaves(xs)
    length = len(leaves[0]) if leaves else length
    carry, ys = as_arrays(init), []
    for t in range(length)[:: -1 if reverse else 1]:
        carry, y = f(carry, tree(lambda x, t=t: x[t], xs))
        ys.append(as_arrays(y))
    if not length:
        State.dry += 1
        y = f(carry, tree(lambda x: arr(np.zeros(x.shape[1:], x.dtype)), xs))[1]
        State.dry -= 1
        return carry, tree(lambda leaf: arr(np.zeros((0, *leaf.shape), leaf.dtype)), as_arrays(y))
    return carry, tree(lambda *rows: arr(np.stack(rows)), *(ys[::-1] if reverse else ys))


def cond(p, yes, no, *operands):
    return yes(*operands) if bool(p) else no(*operands)


def dynamic_slice(b, starts, sizes):
    starts = [int(i) + n if i < 0 else int(i) for i, n in zip(starts, b.shape, strict=True)]
    starts = [min(max(i, 0), n - k) for i, n, k in zip(starts, b.shape, sizes, strict=True)]
    return arr(np.asarray(b)[tuple(slice(i, i + k) for i, k in zip(starts, sizes, strict=True))])


def dynamic_update_slice(b, value, starts):
    starts = [int(i) + n if i < 0 else int(i) for i, n in zip(starts, b.shape, strict=True)]
    starts = [min(max(i, 0), n - k) for i, n, k in zip(starts, b.shape, value.shape, strict=True)]
    new = wide(b)
    new[tuple(slice(i, i + k) for i, k in zip(starts, value.shape, strict=True))] = value
    return arr(new)


def along(b, i, axis):
    return [i if a == axis else 0 for a in range(b.ndim)]


def dynamic_index_in_dim(b, i, axis=0, keepdims=True):
    rows = dynamic_slice(b, along(b, i, axis), [1 if a == axis else n for a, n in enumerate(b.shape)])
    return rows if keepdims else arr(np.squeeze(rows, axis))


def stop_gradient(x):
    def one(x):
        for frame in State.frames:
            if frame.replays:
                x = frame.values[frame.position]
                break
        for frame in State.frames:
            if frame.replays:
                frame.position += 1
            else:
                frame.values.append(x)
        return x

    return tree(one, x)


fake_lax = types.SimpleNamespace(
    fori_loop=fori_loop,
    while_loop=while_loop,
    scan=scan,
    cond=cond,
    map=lambda f, xs: scan(lambda c, x: (c, f(x)), None, xs)[1],
    switch=lambda i, branches, *operands: branches[int(np.clip(i, 0, len(branches) - 1))](*operands),
    select=lambda p, a, b: arr(np.where(p, a, b)),
    dynamic_slice=dynamic_slice,
    dynamic_update_slice=dynamic_update_slice,
    dynamic_index_in_dim=dynamic_index_in_dim,
    dynamic_update_index_in_dim=lambda b, x, i, axis: dynamic_update_slice(
        b, np.expand_dims(x, axis) if x.ndim < b.ndim else x, along(b, i, axis)
    ),
    dynamic_slice_in_dim=lambda b, i, n, axis=0: dynamic_slice(
        b, along(b, i, axis), [n if a == axis else k for a, k in enumerate(b.shape)]
    ),
    stop_gradient=stop_gradient,
)

# Transformations.


def vmap(f, in_axes=0, out_axes=0):
    def batched(*args):
        axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
        sizes = [jax.tree.leaves(x)[0].shape[a] for x, a in zip(args, axes, strict=True) if a is not None]
        examples = []
        for k in range(sizes[0]):
            one = [
                x if a is None else tree(lambda x, k=k, a=a: arr(np.take(x, k, a)), x)
                for x, a in zip(args, axes, strict=True)
            ]
            examples.append(as_arrays(f(*one)))
        return tree(lambda *xs: arr(np.stack(xs, out_axes)), *examples)

    return batched


def jvp(f, primals, tangents):
    """Differentiate along a direction: (f(x - 2h) - 8 f(x - h) + 8 f(x + h) - f(x + 2h)) / 12 h."""
    out = f(*primals)
    frame, h = types.SimpleNamespace(values=[], replays=False, position=0), 1e-3
    State.exact += 1
    State.frames += (frame,)
    try:
        start = tree(lambda x: x.astype(x.dtype) if isinstance(x, A) else x, list(primals))
        f(*start)
        frame.replays, total = True, None
        for k, weight in ((-2, 1), (-1, -8), (1, 8), (2, -1)):
            frame.position = 0
            moved = tree(lambda x, t, k=k: arr(x + k * h * np.asarray(t)) if is_float(x) else x, start, list(tangents))
            part = tree(lambda x, w=weight: np.asarray(x) * (w / 12 / h) if is_float(x) else x, f(*moved))
            total = part if total is None else tree(lambda a, b: a + b if is_float(b) else b, total, part)
    finally:
        State.exact -= 1
        State.frames = State.frames[:-1]
    return out, tree(lambda o, t: arr(t).astype(o.dtype), as_arrays(out), total)


def columns(f, x):
    """Yield a place in `x`, a pytree, and the derivative of `f` with respect to it."""
    leaves, structure = jax.tree.flatten(x)
    for n, leaf in enumerate(leaves):
        for at in np.ndindex(leaf.shape):
            for unit in (1, 1j) if np.iscomplexobj(leaf) else (1,):
                ts = [np.zeros(y.shape, np.complex128 if np.iscomplexobj(y) else float) for y in leaves]
                ts[n][at] = unit
                yield n, at, unit, jvp(f, (x,), (structure.unflatten(ts),))[1]


def pulled_back(f, x, cts):
    leaves, structure = jax.tree.flatten(x)
    result = [np.zeros(y.shape, np.complex128 if np.iscomplexobj(y) else float) for y in leaves]
    for n, at, unit, column in columns(f, x):
        pairs = zip(jax.tree.leaves(column), jax.tree.leaves(cts), strict=True)
        total = np.real(sum(np.sum(np.asarray(c).astype(complex) * np.asarray(ct).astype(complex)) for c, ct in pairs))
        result[n][at] += total if unit == 1 else -1j * total
    return structure.unflatten([arr(r).astype(y.dtype) for r, y in zip(result, leaves, strict=True)])


def value_and_grad(f, argnums=0):
    def apply(*args):
        chosen = argnums if isinstance(argnums, tuple) else (argnums,)

        def g(xs):
            return f(*[xs[chosen.index(n)] if n in chosen else x for n, x in enumerate(args)])

        grads = pulled_back(g, tuple(args[n] for n in chosen), np.float64(1))
        return f(*args), grads if isinstance(argnums, tuple) else grads[0]

    return apply


def jacobian(f):
    def apply(x):
        out = f(x)
        result = tree(lambda o: np.zeros(o.shape + x.shape), out)
        for _, at, _, column in columns(f, x):
            for r, c in zip(jax.tree.leaves(result), jax.tree.leaves(column), strict=True):
                r[(..., *at)] = c
        return tree(lambda r, o: arr(r).astype(o.dtype), result, out)

    return apply


class Custom:
    """A function with a custom rule, which is taken to be its derivative."""

    def __init__(self, f, nondiff_argnums=()):
        self.f = f

    def __call__(self, *args):
        return self.f(*args)

    def defjvp(self, *_, **__):
        pass

    defvjp = defjvps = defjvp


class Ref:
    def __init__(self, x):
        self.x = arr(np.array(x))

    def __getitem__(self, index):
        return arr(np.array(self.x[index]))

    def __setitem__(self, index, value):
        self.x = self.x.at[index].set(value)


def random_bits(name):
    """Keys are 64-bit integers here; JAX's own functions, one call at a time, say what becomes of them."""

    def apply(key, *args):
        data = np.asarray(key).astype(np.uint64)
        words = np.stack([data >> np.uint64(32), data & np.uint64(2**32 - 1)], -1).astype(np.uint32)
        args = [np.asarray(a) if isinstance(a, np.ndarray) else a for a in args]
        return as_keys(getattr(jax.random, name)(jax.random.wrap_key_data(jnp.asarray(words)), *args))

    return apply


def as_keys(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        words = np.asarray(jax.random.key_data(x)).astype(np.uint64)
        return arr((words[..., 0] << np.uint64(32)) | words[..., 1])
    return arr(np.asarray(x))


same = lambda f=None, **_: f if callable(f) else same  # noqa: E731
fake_jax = types.SimpleNamespace(
    jit=lambda f, **_: lambda *args: f(*as_arrays(list(args))),
    checkpoint=same,
    vmap=vmap,
    grad=lambda f, argnums=0: lambda *args: value_and_grad(f, argnums)(*args)[1],
    value_and_grad=value_and_grad,
    jvp=jvp,
    vjp=lambda f, *xs: (f(*xs), lambda ct: pulled_back(lambda xs: f(*xs), xs, ct)),
    linearize=lambda f, *xs: (f(*xs), lambda *ts: jvp(f, xs, ts)[1]),
    jacfwd=jacobian,
    jacrev=jacobian,
    hessian=lambda f: jacobian(lambda x: pulled_back(f, x, np.float64(1))),
    custom_jvp=Custom,
    custom_vjp=Custom,
    eval_shape=lambda f, *args: f(*args),
    tree=jax.tree,
    new_ref=Ref,
    nn=types.SimpleNamespace(one_hot=lambda i, n, dtype: arr(np.arange(n) == np.asarray(i)[..., None]).astype(dtype)),
    random=types.SimpleNamespace(
        key=lambda seed: as_keys(jax.random.key(seed)),
        **{name: random_bits(name) for name in ("fold_in", "split", "uniform", "bits", "randint")},
    ),
    debug=types.SimpleNamespace(callback=lambda f, *args, ordered=False: State.dry or f(*args)),
    effects_barrier=lambda: None,
)

# This library.


def placed(op, b, index, axis, length, where, mode):
    """Return the shape of the rows, and for each position that is not skipped where it is in the rows and in `b`."""
    index = np.broadcast_arrays(*[np.asarray(i) for i in (index if isinstance(index, tuple) else (index,))])
    order, sizes, rest = index[0].shape, b.shape[axis : axis + len(index)], (slice(None),) * axis
    places = []
    for p in np.ndindex(order):
        at = tuple(int(i[p]) for i in index)
        if not np.broadcast_to(True if where is None else where, order)[p]:
            continue
        if all(j >= 0 and j + (length or 1) <= n for j, n in zip(at, sizes, strict=True)):
            places.append((rest + p, rest + (at if length is None else (slice(at[0], at[0] + length),))))
        elif mode != "drop" and not State.dry:
            raise OutOfRange(f"{op}: index {at[0]} is out of range for a buffer of size {sizes[0]}")
    return b.shape[:axis] + order + (() if length is None else (length,)) + b.shape[axis + len(index) :], places


def op(name, combine, swaps=False):
    def apply(buffer, index, value=None, *, axis=0, length=None, where=None, mode=None, lowering="auto"):
        buffer = wide(buffer)
        shape, places = placed(name, buffer, index, axis, length, where, mode)
        new, rows = np.array(buffer), np.zeros(shape, buffer.dtype)
        value = None if value is None else np.broadcast_to(np.asarray(value).astype(buffer.dtype), shape)
        for p, at in places:
            rows[p] = new[at]
            if combine:
                new[at] = combine(new[at], value[p])
        return (arr(new), arr(rows)) if swaps else arr(new if combine else rows)

    return apply


def stack(buffer, size=None):
    live = np.arange(len(buffer)) < (len(buffer) if size is None else size)
    return arr(np.where(live.reshape(-1, *[1] * (buffer.ndim - 1)), buffer, np.zeros((), buffer.dtype)))


class List:
    """`TensorArray` as a list of rows."""

    def __init__(self, dtype, size=None, dynamic_size=False, element_shape=None, max_size=None, **_):
        self.dtype, self.shape, self.grows, self.most = real_dtype(dtype), element_shape, dynamic_size, max_size
        self.rows = [None] * int(size)

    @classmethod
    def from_array(cls, value, dynamic_size=False, max_size=None):
        return cls(value.dtype, len(value), dynamic_size, value.shape[1:], max_size).with_rows(list(as_arrays(value)))

    @classmethod
    def like(cls, x, size=None, dynamic_size=False, max_size=None):
        return cls(as_arrays(x).dtype, size, dynamic_size, np.shape(x), max_size)

    def with_rows(self, rows):
        shape = rows[0].shape if rows and self.shape is None and rows[0] is not None else self.shape
        return List(self.dtype, 0, self.grows, shape, self.most).set_rows(rows)

    def set_rows(self, rows):
        self.rows = rows
        return self

    def row(self, i):
        return arr(np.zeros(self.shape, self.dtype)) if self.rows[i] is None else self.rows[i]

    def skips(self, op, i, size, where, mode):
        if (where is not None and not bool(where)) or State.dry:
            return True
        if not 0 <= i < size and mode != "drop":
            raise OutOfRange(f"{op}: index {int(i)} is out of range for a TensorArray of size {size}")
        return not 0 <= i < size

    def read(self, i, where=None, mode=None):
        skips = self.skips("ta_read", i, len(self.rows), where, mode)
        return arr(np.zeros(self.shape, self.dtype)) if skips else self.row(int(i))

    __getitem__ = read

    def write(self, i, value, where=None, mode=None):
        value = arr(np.asarray(value).astype(self.dtype))
        self.shape = value.shape if self.shape is None else self.shape
        room = len(self.rows) if not self.grows else 10**6 if self.most is None else self.most
        if self.skips("ta_write", i, room, where, mode):
            return self
        rows = self.rows + [None] * (int(i) + 1 - len(self.rows))
        rows[int(i)] = value
        return self.with_rows(rows)

    def append(self, value, where=None, mode=None):
        return self.write(len(self.rows), value, where, mode)

    def pop(self, where=None, mode=None):
        i = len(self.rows) - 1
        skips = self.skips("ta_read", i, len(self.rows), where, mode)
        row = arr(np.zeros(self.shape, self.dtype)) if skips else self.row(i)
        return (self if skips else self.with_rows(self.rows[:-1])), row

    def gather(self, indices, where=None, mode=None):
        indices = np.asarray(indices)
        rows, mask = (
            np.zeros((*indices.shape, *self.shape), self.dtype),
            np.broadcast_to(where is None or where, indices.shape),
        )
        for p in np.ndindex(indices.shape):
            rows[p] = self.read(indices[p], mask[p], mode)
        return arr(rows)

    def scatter(self, indices, value, where=None, mode=None):
        result, mask = self, np.broadcast_to(where is None or where, np.shape(indices))
        for k, i in enumerate(np.asarray(indices)):
            result = result.write(i, value[k], mask[k], mode)
        return result

    def stack(self, pad=False):
        rows = [self.row(i) for i in range(len(self.rows))]
        missing = (self.most or 0) - len(rows) if pad else 0
        return (
            arr(np.stack(rows + [np.zeros(self.shape, self.dtype)] * missing))
            if rows or missing
            else arr(np.zeros((0, *self.shape), self.dtype))
        )

    def concat(self, pad=False):
        rows = self.stack(pad)
        return rows.reshape(-1, *rows.shape[2:])

    def mask(self):
        return arr(np.arange(len(self.rows) if self.most is None else self.most) < len(self.rows))

    def unstack(self, value):
        return self.with_rows(list(as_arrays(value)))

    def split(self, value, lengths):
        return self.with_rows([arr(x) for x in np.split(np.asarray(value), np.cumsum(lengths)[:-1])])

    def size(self):
        return arr(np.int32(len(self.rows)))

    identity = lambda self: self  # noqa: E731
    __len__ = lambda self: len(self.rows)  # noqa: E731


def tf_while_loop(cond, body, loop_vars, *, maximum_iterations=None, max_steps=None, back_prop=True, **_):
    limits = [int(n) for n in (maximum_iterations, max_steps) if n is not None]
    start = loop_vars if back_prop else stop_gradient(loop_vars)
    result = while_loop(lambda c: cond(*c), lambda c: tuple(body(*c)), start, max_steps=min(limits, default=None))
    return result


def fold(elems, init, reverse):
    elems = elems[::-1] if reverse else elems
    return (elems[0], elems[1:]) if init is None else (as_arrays(init), elems)


def foldl(fn, elems, initializer=None, reverse=False, **_):
    init, elems = fold(elems, initializer, reverse)
    return scan(lambda a, x: (fn(a, x), None), init, elems)[0]


def tf_scan(fn, elems, initializer=None, reverse=False):
    init, rest = fold(elems, initializer, reverse)
    ys = scan(lambda a, x: (fn(a, x),) * 2, init, rest)[1] if len(rest) else None
    rows = ([init] if initializer is None else []) + (list(ys) if len(rest) else [])
    return arr(np.stack(rows[::-1] if reverse else rows))


fake_tas = types.SimpleNamespace(
    ta_read=op("ta_read", None),
    ta_write=op("ta_write", lambda old, new: new),
    ta_add=op("ta_add", lambda a, b: a | b if a.dtype == bool else a + b),
    ta_max=op("ta_max", lambda a, b: (apart(a, b), np.maximum(a, b))[1]),
    ta_swap=op("ta_swap", lambda old, new: new, swaps=True),
    ta_stack=stack,
    ta_empty=lambda size, element_shape=(), dtype=np.float32: arr(
        np.zeros((size, *np.atleast_1d(np.array(element_shape, int))), real_dtype(dtype))
    ),
    TensorArray=List,
    **{name: globals()[name] for name in ("fori_loop", "while_loop", "scan")},
    tf=types.SimpleNamespace(
        while_loop=tf_while_loop,
        scan=tf_scan,
        foldl=foldl,
        foldr=functools.partial(foldl, reverse=True),
        map_fn=fake_lax.map,
    ),
    in_place=same,
    growing=lambda f, **_: f,
    checkpoint_policies=types.SimpleNamespace(save_reads=None),
    residuals=types.SimpleNamespace(
        **{name: lambda *_, **__: "auto" for name in ("Tape", "Recompute", "Undo", "Checkpoint", "Inverse", "Auto")}
    ),
)
