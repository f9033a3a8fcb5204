"""Programs of TensorArrays in this library: compiled, differentiated and batched, or outside of all that."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from array_programs import LIMIT, Entry, Lists, Loop, Program
from jax import lax

import jax_tensorarray as jt
from jax_tensorarray import checkpoint_policies

FACTORS = np.array([1.0, -2.0, 0.5])


def tree_of(row: Any) -> Any:
    """A row as a pytree, in which an integer has no derivative."""
    return {"a": row[..., None] * FACTORS.astype(row.dtype), "b": [(row > 0).astype(jnp.int32)]}


def row_of(tree: Any) -> Any:
    """The row again; NaN if the leaves are of different ones."""
    math = jnp if isinstance(tree["a"], jax.core.Tracer) else np
    row = math.sum(math.asarray(tree["a"]) * (FACTORS / [2, 16, 1]).astype(tree["a"].dtype), -1)
    return math.where((row > 0) == math.asarray(tree["b"][0]), row, math.nan)


class OfTrees(NamedTuple):
    """An array whose rows are pytrees, with the methods of one whose rows are arrays."""

    ta: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not callable(getattr(jt.TensorArray, name, None)):
            raise AttributeError(name)

        def method(*args: Any, **options: Any) -> Any:
            given = [tree_of(x) if "float" in str(getattr(x, "dtype", "")) else x for x in args]
            return _unwrapped(getattr(self.ta, name)(*given, **options))

        return method


def _unwrapped(found: Any) -> Any:
    if isinstance(found, tuple):
        return tuple(map(_unwrapped, found))
    if isinstance(found, jt.TensorArray):
        return OfTrees(found)
    return row_of(found) if isinstance(found, dict) else found


class Library(Lists):
    """This library. What is known while tracing are Python's numbers, or NumPy's; all other numbers are traced."""

    errors = ()

    def __init__(
        self,
        program: Program,
        max_size: int | None = LIMIT,
        room: int = LIMIT,
        forward: bool = False,
        vjp: bool = True,
        has_bounds: bool = True,
    ) -> None:
        super().__init__(program, jnp, room=room)
        self.max_size, self.forward, self.has_vjp, self.has_bounds = max_size, forward, vjp, has_bounds

    def array(self, spec: Any) -> Any:
        elem, max_size = self.program.elem, self.max_size if spec.dynamic else None
        if self.program.is_tree:
            row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree_of(jnp.zeros(elem)))
            return OfTrees(jt.TensorArray.like(row, spec.size, dynamic_size=spec.dynamic, max_size=max_size))
        shape = elem if spec.shaped else None
        more = {"infer_shape": spec.infer_shape, "element_shape": shape, "max_size": max_size}
        return jt.TensorArray(self.program.dtype, spec.size, spec.dynamic, bool(spec.size % 2), **more)

    def again(self, ta: Any, how: str) -> Any:
        match how:
            case "copy":
                return copy.copy(ta)
            case "leaves":
                return jax.tree.map(lambda x: x, ta)
        return ta.identity()

    def index(self, n: Any, dtype: str) -> Any:
        if isinstance(n, jax.core.Tracer):
            dtype = "int32" if dtype == "int" else dtype
            return (jnp.maximum(n, 0) if dtype.startswith("u") else n).astype(dtype)
        n = super().index(int(n), dtype)
        return n if dtype == "int" else np.dtype(dtype).type(n)

    def at_least_one(self, n: Any) -> Any:
        return jnp.maximum(n, 1) if isinstance(n, jax.core.Tracer) else max(int(n), 1)

    def vector(self, xs: Sequence[Any]) -> Any:
        return (
            jnp.stack([jnp.asarray(x) for x in xs]) if any(isinstance(x, jax.core.Tracer) for x in xs) else np.array(xs)
        )

    def padded(self, rows: Any, count: int) -> Any:
        return jnp.concatenate([rows[:count], jnp.zeros((max(count - len(rows), 0), *rows.shape[1:]), rows.dtype)])

    def stack(self, entry: Entry) -> Any:
        rows = entry.value.stack(pad=not entry.is_ragged)
        return rows if entry.is_ragged else self.padded(rows, self.rows_of(entry))

    def concat(self, entry: Entry) -> Any:
        rows = entry.value.concat(pad=not entry.is_ragged)
        return rows if entry.is_ragged else self.padded(rows, self.rows_of(entry) * self.program.elem[0])

    def mask(self, entry: Entry) -> Any:
        return self.padded(entry.value.mask(), self.rows_of(entry))

    def loop(self, s: Loop, trips: Any, once: Callable[..., Any], carry: Any) -> Any:
        """JAX's own loops have no reverse mode if the number of steps is traced: they do all of them, with a branch."""
        step = once
        if s.how.startswith("lax") and not self.forward and isinstance(trips, jax.core.Tracer):
            trips, step = s.steps, lambda i, carry, n=trips: lax.cond(i < n, lambda: once(i, carry), lambda: carry)
        match s.how:
            case "python":
                return super().loop(s, trips, once, carry)
            case "lax.scan" | "scan" if not isinstance(trips, jax.core.Tracer) and trips:
                scan = lax.scan if s.how == "lax.scan" else jt.scan
                return scan(lambda c, i: (step(i, c), None), carry, jnp.arange(trips))[0]
            case "lax.fori_loop" | "lax.scan":
                return lax.fori_loop(0, trips, step, carry)
            case "tf.while_loop":
                loop = (lambda i, _: i < trips), (lambda i, c: (i + 1, once(i, c))), (jnp.int32(0), carry)
                return jt.tf.while_loop(*loop, maximum_iterations=s.steps if self.has_bounds else None)[1]
            case "while_loop":
                loop = (lambda c: c[0] < trips), (lambda c: (c[0] + 1, once(*c))), (jnp.int32(0), carry)
                return jt.while_loop(*loop, max_steps=s.steps)[1]
        return jt.fori_loop(0, trips, once, carry, max_steps=s.steps)

    def cond(self, how: str, test: Any, branches: Sequence[Callable[..., Any]], carry: Any, seen: Any) -> Any:
        match how:
            case "closure":
                return lax.cond(test, *[lambda f=f: f(carry, seen) for f in branches])
            case "operands":
                return lax.cond(test, *branches, carry, seen)
        unused = lambda carry, seen: jax.tree.map(jnp.zeros_like, carry)  # noqa: E731
        return lax.switch(2 - jnp.asarray(test).astype(int), [unused, *branches], carry, seen)

    def call(self, how: str, f: Callable[..., Any], *operands: Any) -> Any:
        match how:
            case "jit":
                return jax.jit(lambda *operands: jax.jit(f)(*operands))(*operands)
            case "checkpoint":
                return jax.checkpoint(f)(*operands)
            case "save_reads":
                return jax.checkpoint(f, policy=checkpoint_policies.save_reads, prevent_cse=False)(*operands)
            case "custom_vjp" if self.has_vjp and not self.forward:
                rule = jax.custom_vjp(f)
                rule.defvjp(lambda *args: (f(*args), args), lambda args, ct: jax.vjp(f, *args)[1](ct))
                return rule(*operands)
        rule = jax.custom_jvp(f)
        rule.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
        return rule(*operands)
