"""Random programs that use what the public pages promise, judged by NumPy.

`program(seed)` returns the source of a program: plain JAX and this library, as a user writes them. `judge` runs the
source twice. The first run replaces `jax`, `jnp`, `lax` and the names of this library by the stand-ins of `page_numpy`.
The second run is the program itself. The judge compares values, dtypes, shapes, weak types, errors and effects.

    python tests/support/page_programs.py --seeds 0:2000 --shrink
"""

import argparse
import ast
import collections
import contextlib
import functools
import importlib
import itertools
import os
import random
import re
import time
import types

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import jax.numpy as jnp
import numpy as np
from page_numpy import Near, OutOfRange, State, as_arrays, fake_jax, fake_jnp, fake_lax, fake_tas, is_float

import jax_tensorarray as tas

HEADER = """\
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.experimental import io_callback
jax.config.update("jax_enable_x64", True)
import jax_tensorarray as tas
from jax_tensorarray import residuals

def evaluated(f, *args):
    jaxpr = jax.make_jaxpr(f)(*args)
    return jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *args)

def exported(f, *args):
    stored = jax.export.export(jax.jit(f), disabled_checks=tas.export.disabled_checks())(*args).serialize()
    return jax.tree.leaves(jax.export.deserialize(stored).call(*args))

"""

# ---- The grammar ----------------------------------------------------------------------------------------------------

V = collections.namedtuple("V", "name shape kind")  # kind: "D", the dtype of the program, "i" integer, "b" bool
FLOATS = ("float64",) * 6 + ("float32",) * 3 + ("bfloat16", "float16")
OTHERS = ("int32", "int32", "int8", "uint8", "bool_", "complex128", "complex64", "int64")


class Grammar:
    """Writes a program, line by line. `env` are the values in scope."""

    def __init__(self, seed):
        self.r, self.lines, self.depth, self.env, self.count = random.Random(seed), [], 0, [], itertools.count()
        self.outer, self.nested = set(), 0
        self.used = collections.Counter()
        self.n = self.pick(1, 2, 3, 3, 4, 5)
        self.m = self.pick(1, 2, 2, 3)
        self.schema = self.pick(*SCHEMAS, *REVERSE)
        self.derived = self.schema in DERIVED
        self.dtype = self.pick(*FLOATS) if self.derived or self.chance(0.45) else self.pick(*OTHERS)
        if self.derived and "jac" not in self.schema and self.chance(0.06):
            self.dtype = "complex128"
        self.D = f"jnp.{self.dtype}"
        self.real = "float" in self.dtype
        self.is_complex = "complex" in self.dtype
        self.loops, self.inner = 0, 0
        self.wild = self.chance(0.12) and not self.derived  # some index may be out of range
        self.effects = self.schema in ("value", "jit", "donate") and self.chance(0.3)
        self.caching = self.chance(0.3)
        self.python = self.schema in ("value", "jit", "trace", "grad") and self.chance(0.3)  # Python's own numbers
        self.io = self.chance(0.5)  # JAX orders the effects of one kind
        self.bounded = self.schema in REVERSE  # every `while_loop` needs a bound
        self.max_steps = self.pick(None, None, 9) if not self.bounded or self.chance(0.5) else 9

    # Choices and lines.

    def pick(self, *options):
        return self.r.choice(options)

    def chance(self, p):
        return self.r.random() < p

    def use(self, name):
        self.used[name] += 1

    def name(self, prefix):
        return f"{prefix}{next(self.count)}"

    def emit(self, text):
        self.lines += ["    " * self.depth + line for line in text.split("\n")]

    @contextlib.contextmanager
    def block(self, head):
        self.emit(head)
        outer, env, self.env, self.depth = self.outer, self.env, list(self.env), self.depth + 1
        self.outer = {v.name for v in env}
        yield
        self.outer, self.env, self.depth = outer, env, self.depth - 1

    def let(self, prefix, text, shape, kind="D"):
        name = self.name(prefix)
        self.emit(f"{name} = {text}")
        self.env.append(V(name, tuple(shape), kind))
        return name

    # Expressions.

    def of(self, shape, kind="D"):
        return [v.name for v in self.env if v.shape == tuple(shape) and v.kind == kind]

    def buffers(self):
        return [v for v in self.env if v.kind == "D" and v.shape and v.shape[0] == self.n]

    def const(self, shape=()):
        x = {"bool_": self.pick("True", "False")}.get(self.dtype) or (
            f"{self.r.uniform(-1, 1):.2f}" if self.real or self.is_complex else str(self.r.randrange(5))
        )
        return f"jnp.full({tuple(shape)}, {x}, {self.D})"

    def some(self, shape, depth=1):
        """Return an expression of the dtype of the program."""
        names = self.of(shape)
        if depth <= 0 or self.nested > 4 or (names and self.chance(0.25)):
            return self.pick(*names[-4:]) if names else self.const(shape)
        kinds = [self.unary, self.binary, self.read, self.read, self.reduced, self.chosen]
        self.nested += 1
        text = self.pick(*kinds)(tuple(shape), depth - 1 if self.nested < 4 else 0)
        self.nested -= 1
        return text

    def unary(self, shape, depth):
        x = self.some(shape, depth)
        if self.real:
            return self.pick(
                f"jnp.sin({x})", f"jnp.cos({x})", f"jnp.tanh({x})", f"({x} * 0.5)", f"lax.stop_gradient({x})"
            )
        if self.is_complex:
            return self.pick(f"({x} * 0.5)", f"jnp.conj({x})", f"({x} * (0.25 + 0.5j))")
        return self.pick(f"({x} ^ True)") if self.dtype == "bool_" else self.pick(f"({x} + 1)", f"({x} * 3)")

    def binary(self, shape, depth):
        x, y = self.some(shape, depth), self.some(shape, depth)
        if self.real or self.is_complex:
            return self.pick(f"(0.5 * ({x} + {y}))", f"(0.5 * {x} - {y} * 0.25)", f"({x} * {y} * 0.5)")
        return (
            f"({x} {self.pick('|', '&', '^')} {y})"
            if self.dtype == "bool_"
            else f"({x} {self.pick('+', '-', '*')} {y})"
        )

    def chosen(self, shape, depth):
        p, x, y = self.pred(), self.some(shape, depth), self.some(shape, depth)
        return self.pick(f"jnp.where({p}, {x}, {y})", f"lax.cond({p}, lambda: {x}, lambda: {y})")

    def reduced(self, shape, depth):
        wider = [v for v in self.env if v.kind == "D" and v.shape[1:] == shape and v.shape and self.dtype != "bool_"]
        if wider and self.real:
            v = self.pick(*wider).name
            return self.pick(f"jnp.sum({v}, axis=0, dtype={self.D}) * 0.25", f"jnp.mean({v}, axis=0, dtype={self.D})")
        return f"jnp.sum({self.pick(*wider).name}, axis=0, dtype={self.D})" if wider else self.some(shape, depth)

    def pred(self):
        options = [f"{i} % 2 == {self.pick(0, 1)}" for i in self.of((), "i")[-3:]] + self.of((), "b")
        if self.real and self.dtype in ("float64", "float32"):
            options.append(f"{self.some((), 1)} > {self.r.uniform(-0.6, 0.6):.2f}")
        elif self.dtype == "bool_":
            options.append(self.some((), 1))
        elif not self.is_complex and not self.real:
            options.append(f"{self.some((), 1)} % 3 == 1")
        return f"({self.pick(*options)})" if options else "jnp.asarray(True)"

    def index(self, n, may_miss=False):
        """Return an index below n; of JAX's, which clamp and drop, now and then another one."""
        i = self.of((), "i")[-4:]
        x = self.pick(*i) if i else f"jnp.asarray({self.r.randrange(9)})"
        if may_miss and self.chance(0.25) and not self.derived:
            self.use("index out of range")
            return self.pick(f"({x} - {n})", f"({x} + {n - 1})", f"jnp.int32(-{n})", f"jnp.int32({n})")
        options = [f"{x} % {n}", f"({n - 1} - {x} % {n})", f"(({x} * 3 + 1) % {n})", f"({x} // 2 % {n})"]
        if self.of((), "b"):
            options.append(f"jnp.where({self.pick(*self.of((), 'b'))}, 0, {x} % {n})")
        for v in self.env:
            if v.kind == "i" and len(v.shape) == 1 and v.shape[0]:
                options.append(f"{v.name}[{x} % {v.shape[0]}] % {n}")
        if self.dtype in ("float64", "int32") and self.chance(0.3) and self.of((n,)):
            options = [f"jnp.argmax({self.pick(*self.of((n,)))})"]
        if self.chance(0.15):
            return str(self.r.randrange(n))
        return self.pick(*options)

    def indices(self, k, n):
        return f"jnp.stack([{', '.join(f'jnp.asarray({self.index(n)}, jnp.int32)' for _ in range(k))}])"

    def options(self, where=True):
        text = ""
        if where and self.chance(0.25):
            text += f", where={self.pred()}"
            self.use("where=")
        if self.chance(0.25):
            text += self.pick(", mode='drop'", ", mode='error'")
        if self.chance(0.2):
            text += self.pick(", lowering='ffi'", ", lowering='xla'", ", lowering='auto'")
        return text

    def missing(self, n):
        """Return an index for this library, and options: in range, or dropped, or an error that the judge expects."""
        if self.chance(0.15):
            self.use("mode=drop out of range")
            return self.pick(f"({self.index(n)} - {n})", f"({self.index(n)} + {n})", str(n), "-1"), ', mode="drop"'
        if self.wild and self.chance(0.3):
            self.use("an error")
            return self.pick(f"({self.index(n)} + {self.pick(1, n)})", f"({self.index(n)} - 1)"), ""
        return self.index(n), self.options()

    def read(self, shape, depth):
        """Return a read of rows, in one of many spellings."""
        options = []
        for v in self.env:
            if v.kind != "D" or not v.shape or not v.shape[0]:
                continue
            b, n = v.name, v.shape[0]
            if v.shape[1:] == shape:
                i = self.index(n, may_miss=True)
                j, o = self.missing(n)
                options += [f"{b}[{i}]", f"{b}[{i}]", f"tas.ta_read({b}, {j}{o})", f"tas.ta_read({b}, {j}{o})"]
                options += [f"lax.dynamic_index_in_dim({b}, {i}, 0, keepdims=False)", f"{b}.at[{i}].get()"]
                options += [f"tas.ta_swap({b}, {j}, {self.const(shape)}{o})[1]", f"{b}[0]", f"{b}[-1]"]
                options += [f"({b} * {self.const()})[{i}]", f"jnp.flip({b}, 0)[{i}]", f"jnp.roll({b}, 1, axis=0)[{i}]"]
                if self.real or self.is_complex:
                    options.append(f"{b}.at[{self.index(n)}].get(mode='fill', fill_value=0.0)")
                if not shape and self.dtype in ("int32", "int64"):
                    options.append(f"jax.nn.one_hot({self.index(n)}, {n}, dtype={self.D}) @ {b}")
            elif len(v.shape) == 2 and shape == v.shape[:1]:
                j = self.index(v.shape[1])
                options += [f"{b}[:, {j}]", f"{b}.T[{j}]", f"tas.ta_read({b}, {j}, axis=1{self.options()})"]
            elif len(v.shape) == 2 and shape == ():
                i, j = self.index(n), self.index(v.shape[1])
                options += [f"{b}[{i}, {j}]", f"tas.ta_read({b}, ({i}, {j}){self.options()})", f"{b}.reshape(-1)[{i}]"]
            elif shape[1:] == v.shape[1:] and shape and shape[0] <= n:
                k = shape[0]
                options += [f"tas.ta_read({b}, {self.r.randrange(n - k + 1)}, length={k})"]
                options += [f"lax.dynamic_slice_in_dim({b}, {self.index(n)}, {k})", f"{b}[{self.indices(k, n)}]"]
                options += [f"tas.ta_read({b}, {self.indices(k, n)}{self.options(False)})"]
        if not options:
            return self.some(shape, depth)
        text = self.pick(*options)
        self.use("ta_read" if "tas." in text else "plain read")
        return text

    def update(self, v):
        """Return a new version of the buffer `v`."""
        b, n, row = v.name, v.shape[0], v.shape[1:]
        x, ones = self.some(row, 2), ", None" * len(row)
        if self.chance(0.45):
            i, o = self.missing(n)
            op = self.pick("write", "write", "add", "max" if not self.is_complex else "add", "swap")
            self.use(f"ta_{op}")
            tail = "[0]" if op == "swap" else ""
            if row and self.chance(0.15):
                return (
                    f"tas.ta_{op}({b}, {self.index(row[0])}, {self.some(v.shape[:1])}, axis=1{self.options()}){tail}"
                    if len(row) == 1
                    else f"tas.ta_stack({b}, {i})"
                )
            if len(row) == 1 and self.chance(0.15):
                return (
                    f"tas.ta_{op}({b}, ({self.index(n)}, {self.index(row[0])}), {self.some(())}{self.options()}){tail}"
                )
            if self.chance(0.2):
                k = self.pick(1, 2, 3)
                mask = self.pick("", f", where=jnp.asarray({[self.chance(0.7) for _ in range(k)]})")
                value = self.pick(x, f"jnp.stack([{', '.join(self.some(row) for _ in range(k))}])")
                return f"tas.ta_{op}({b}, {self.indices(k, n)}, {value}{mask}{self.options(False)}){tail}"
            if n > 1 and self.chance(0.12):
                at = self.pick(0, n - 2, self.index(n - 1))
                return f"tas.ta_{op}({b}, {at}, {x}, length=2{self.options()}){tail}"
            if self.chance(0.1):
                return (
                    f"tas.ta_stack({b}, {self.pick('', 'size=')}{self.pick(self.index(n), str(n), '-1', f'{n + 2}')})"
                )
            return f"tas.ta_{op}({b}, {i}, {x}{o}){tail}"
        i, kind = self.index(n, may_miss=True), self.r.randrange(17)
        self.use(f"plain update {kind}")
        verb = self.pick(
            "set",
            "set",
            "set" if self.dtype == "bool_" else "add",
            *(["multiply"] if self.real else []),
            *([] if self.is_complex else ["max", "min"]),
        )
        if kind == 1 and row:
            return f"{b}.at[{self.index(n)}, {self.index(row[0], True)}].{verb}({self.some(row[1:])})"
        if kind == 2 and row:
            return f"{b}.at[:, {self.index(row[0], True)}].{verb}({self.some((n, *row[1:]))})"
        if kind == 3:
            starts = ", ".join(f"jnp.int32({at})" for at in [i] + [0] * len(row))
            return f"lax.dynamic_update_slice({b}, ({x})[None], ({starts},))"
        if kind == 4:
            return f"lax.dynamic_update_index_in_dim({b}, {x}, {i}, 0)"
        if kind == 5:
            return f"jnp.where((jnp.arange({n}) == {self.index(n)})[:{ones}], {x}, {b})"
        if kind == 6:
            return f"jnp.where(jax.nn.one_hot({self.index(n)}, {n}, dtype=jnp.bool_)[:{ones}], {x}, {b})"
        if kind == 7:
            return f"jnp.roll({b}, -1, 0).at[-1].set({x})"
        if kind == 8:
            return f"jnp.concatenate([{b}[1:], ({x})[None]])"
        if kind == 9:
            return f"{b}.T.at[{'' if not row else '..., '}{i}].set(jnp.transpose({x})).T"
        if kind == 10:
            return f"jnp.where({self.pred()}, {b}.at[{i}].{verb}({x}), {b})"
        if kind == 11:
            new = self.update(v) if self.chance(0.5) else f"{b}.at[{i}].set({x})"
            return f"lax.cond({self.pred()}, lambda {b}: {new}, lambda {b}: {b}, {b})"
        if kind == 12:
            versions = ", ".join(f"lambda {b}: {b}.at[{self.index(n)}].set({self.some(row)})" for _ in range(2))
            return f"lax.switch({self.index(3)}, [{versions}, lambda {b}: {b}], {b})"
        if kind == 13 and self.dtype != "bool_":
            return f"{b}.at[{self.indices(2, n)}].{self.pick('add', 'add', verb if verb != 'set' else 'add')}({x})"
        if kind == 14:
            return (
                f"{b}.at[{self.index(n)}].set({b}[{self.index(n)}].at[...].set({x}))"
                if row
                else f"{b}.at[{i}].set({x})"
            )
        if kind == 15 and n > 1:
            return f"{b}.at[1:].set({b}[:-1])"
        if kind == 16:
            return f"lax.select({self.pred()}, {self.some(v.shape)}, {b})"
        extra = self.pick("", ", mode='drop'", ", unique_indices=True")
        return f"{b}.at[{i}].{verb}({x}{extra})"

    # Statements.

    def statement(self):
        kinds = (
            [self.new_value] * 2
            + [self.new_version] * 4
            + [self.called, self.custom, self.array, self.special, self.carried]
        )
        kinds += [self.exchanged] * 2 + [self.cached] * (3 if self.caching else 1)
        if self.dtype == "float64" and not self.derived and not self.wild:
            kinds += [self.mixed] * 3
        if self.loops < 2:
            kinds += [self.loop] * (5 if not self.loops else 2)
        if self.effects:
            kinds += [self.effect] * 3
        self.pick(*kinds)()

    def new_value(self):
        shape = self.pick((), (), (self.m,), (self.n,), (self.n, self.m), (2, self.m))
        self.let("x", self.some(shape, 2), shape)

    def mixed(self):
        """Call a program of the other grammar."""
        self.use("mixed")
        self.let("x", f"mixed({self.r.randrange(mixed().COUNT)}, {self.some(())})", ())

    def new_version(self):
        if self.buffers():
            v = self.pick(*self.buffers())
            text = self.update(v)
            if self.chance(0.3) and v.name not in self.outer:  # the same name, as people write
                self.emit(f"{v.name} = {text}")
            else:
                self.let("b", text, v.shape)

    def cached(self):
        """Read and write rows of rows: a cache `[2, n, m]`, in the spellings that the pages list."""
        caches = self.of((2, self.n, self.m))
        n, m = self.n, self.m
        if not caches or self.chance(0.1):
            b = self.pick(*(self.of((n, m)) or [self.const((n, m))]))
            return self.let("c", f"jnp.stack([{b}, {self.some((n, m))}])", (2, n, m))
        c, k, i, j = self.pick(*caches[-2:]), self.index(2), self.index(n, True), self.index(m)
        safe, x, pair = self.index(n), self.some((m,), 2), self.some((2, m), 1)
        verb = self.pick("set", "set", "set" if self.dtype == "bool_" else "add")
        op = self.pick("write", "write", "add")
        self.use("cache")
        if self.chance(0.4):
            text, shape = self.pick(
                (f"{c}[{k}, {i}]", (m,)),
                (f"{c}[{k}][{i}]", (m,)),
                (f"{c}[:, {i}]", (2, m)),
                (f"{c}[{k}, :, {j}]", (n,)),
                (f"{c}[{k}, {i}, {j}]", ()),
                (f"{c}[:, ::2][{k}, 0]", (m,)),
                (f"jnp.take({c}[{k}], {safe}, axis=0)", (m,)),
                (f"{c}.transpose(1, 0, 2)[{i}]", (2, m)),
                (f"lax.dynamic_slice({c}, (jnp.int32({k}), jnp.int32({i}), jnp.int32(0)), (1, 1, {m}))[0, 0]", (m,)),
                (f"lax.dynamic_slice({c}, (jnp.int32({k}), jnp.int32({i}), jnp.int32({j})), (2, 1, 1))[:, 0]", (2, 1)),
                (f"tas.ta_read({c}, ({k}, {safe}))", (m,)),
                (f"tas.ta_read({c}, ({safe}, {j}), axis=1{self.options()})", (2,)),
                (f"tas.ta_read({c}, {self.indices(2, n)}, axis=1)", (2, 2, m)),
                (f"tas.ta_read({c}, 0, axis=1, length={n})", (2, n, m)),
                *(
                    [(f'jnp.einsum("d,hld->hl", {x}, {c}) * 0.5', (2, n))]
                    if self.real and len(self.dtype) == 7 and self.dtype != "float16"
                    else []
                ),
            )
            return self.let("x", text, shape)
        row, plane, column = self.some((m,), 1), self.some((n, m), 1), self.some((n,), 1)
        f, y = self.name("f"), self.name("l")
        text = self.pick(
            f"{c}.at[{k}].set({c}[{k}].at[{i}].{verb}({x}))",
            f"{c}.at[0].set({c}[0].at[{i}].{verb}({x}))",
            f"jnp.stack([{c}[0].at[{i}].{verb}({x}), {c}[1]])",
            f"jnp.concatenate([{c}[:1], {c}[1:].at[0, {i}].{verb}({x})])",
            f"{c}.at[:, {i}].{verb}({pair})",
            f"{c}.at[{k}, {i}].{verb}({x})",
            f"{c}.at[{k}, {i}, {j}].{verb}({self.some(())})",
            f"{c}.at[{k}, :, {j}].{verb}({column})",
            f"{c}.at[{k}].{verb}({plane})",
            f"{c}.at[:, {self.indices(2, n)}].{self.pick(verb, verb) if verb != 'set' else 'set'}({row})",
            f"{c}.reshape({2 * n}, {m}).at[{k} * {n} + {safe}].{verb}({x}).reshape({c}.shape)",
            f"{c}.transpose(1, 0, 2).at[{i}].{verb}({pair}).transpose(1, 0, 2)",
            f"{c}[None].at[0, {k}, {i}].{verb}({x})[0]",
            f"lax.dynamic_update_slice({c}, ({x})[None, None], (jnp.int32({k}), jnp.int32({i}), jnp.int32(0)))",
            f"lax.dynamic_update_slice({c}, ({pair})[:, None], (jnp.int32(0), jnp.int32({i}), jnp.int32(0)))",
            f"jnp.where((jnp.arange({n}) == {safe})[None, :, None], {x}, {c})",
            f"lax.scan(lambda {f}, {y}: ({f}, {y}.at[{i}].{verb}({x})), 0, {c})[1]",
            f"jax.vmap(lambda {y}, {f}: {y}.at[{i}].{verb}({f}), in_axes=(0, 0))({c}, {pair})",
            f"tas.ta_{op}({c}, ({k}, {safe}), {x}{self.options()})",
            f"tas.ta_{op}({c}, {safe}, {pair}, axis=1{self.options()})",
            f"tas.ta_{op}({c}, ({safe}, {j}), {self.some((2,))}, axis=1{self.options()})",
            f"tas.ta_{op}({c}, 0, {c}, axis=1, length={n})",
            f"tas.ta_swap({c}, ({k}, {safe}), {x}{self.options()})[0]",
        )
        if c in self.outer or self.chance(0.4):
            return self.let("c", text, (2, n, m))
        return self.emit(f"{c} = {text}")

    def exchanged(self):
        """Two results that one operation makes."""
        if not self.buffers():
            return
        v = self.pick(*self.buffers())
        others = self.of(v.shape)
        a, b, x = self.name("b"), self.name("b"), self.some(v.shape[1:])
        kind = self.pick("swap", "cond", "cond", "switch", "jit")
        self.use(f"two results of {kind}")
        w = self.pick(*others)
        if kind == "swap":
            i, o = self.missing(v.shape[0])
            self.emit(f"{a}, {b} = tas.ta_swap({v.name}, {i}, {x}{o})")
            self.env += [V(a, v.shape, "D"), V(b, v.shape[1:], "D")]
            return

        def branch():
            """Return the operands in some order, perhaps with a row that is written, or read, in one of them."""
            n, kinds = v.shape[0], self.r.choices(("u", "v", "write", "read", "same"), (4, 4, 3, 2, 1), k=2)
            row = self.some(v.shape[1:])
            new = {
                "write": f"{self.pick('u', 'v')}.at[{self.index(n)}].set({row})",
                "read": f"u.at[{self.index(n)}].set(v[{self.index(n)}])",
                "same": v.name,
            }
            return f"lambda u, v: ({', '.join(new.get(k, k) for k in kinds)})"

        if kind == "cond":
            text = f"lax.cond({self.pred()}, {branch()}, {branch()}, {v.name}, {w})"
        elif kind == "switch":
            text = f"lax.switch({self.index(3)}, [{branch()}, {branch()}, {branch()}], {v.name}, {w})"
        else:
            text = f"{self.pick('jax.jit', 'jax.checkpoint')}({branch()})({v.name}, {w})"
        self.emit(f"{a}, {b} = {text}")
        self.env += [V(a, v.shape, "D"), V(b, v.shape, "D")]

    def effect(self):
        x = self.some(self.pick((), (self.m,)))
        call = "io_callback" if self.io else "jax.debug.callback"
        call += "(log, None, {}, ordered=True)" if self.io else "(log, {}, ordered=True)"
        self.use("effect")
        self.emit(call.format(x))

    def called(self):
        """A function of its own, under a transformation."""
        if not self.buffers():
            return
        v, f, i = self.pick(*self.buffers()), self.name("f"), self.name("i")
        how = self.pick("checkpoint", "policy", "jit", "vmap", "vmap", "grad", "in_place", "ref", "jvp")
        if how in ("grad", "jvp") and (self.dtype != "float64" or self.inner or self.loops or self.schema in DERIVED):
            how = "jit"
        if how == "ref" and self.derived and (self.loops or "jac" in self.schema or self.schema == "hvp"):
            how = "jit"  # "Refs in a body have no reverse mode in loops of this library"
        if how == "vmap" and self.effects:
            how = "checkpoint"
        self.use(f"inner {how}")
        self.inner += how in ("grad", "jvp")
        effects, self.effects = self.effects, self.effects and how in ("jit", "in_place")
        with self.block(f"def {f}({v.name}, {i}):"):
            self.env = [w for w in self.env if w.name != v.name] + [v, V(i, (), "i")]
            for _ in range(self.pick(0, 1, 2)):
                self.statement()
            if how == "ref":
                r = self.name("r")
                self.emit(f"{r} = jax.new_ref({v.name})")
                for _ in range(self.pick(1, 2)):
                    self.emit(f"{r}[{self.index(v.shape[0])}] = {self.some(v.shape[1:])}")
                self.emit(
                    f"return {r}[...]"
                    if self.chance(0.6)
                    else f"return {v.name}.at[0].set({r}[{self.index(v.shape[0])}])"
                )
            elif how in ("grad", "jvp"):
                self.emit(f"return jnp.sum(jnp.sin({self.update(v)}))")
            else:
                self.emit(f"return {self.update(v)}")
        self.inner -= how in ("grad", "jvp")
        self.effects = effects
        at, b = self.index(self.n), v.name
        if how == "vmap":
            axis = self.r.randrange(len(v.shape))
            k = v.shape[axis]
            axes = self.pick("(None, 0)", "(0, None)", "(0, 0)")
            stacked = f"jnp.stack([{b}, {self.some(v.shape)}])" if axes != "(None, 0)" else b
            at = f"jnp.asarray([{at}, {self.index(self.n)}])" if axes != "(0, None)" else at
            self.let("b", f"jax.vmap({f}, in_axes={axes})({stacked}, {at})[{self.pick(0, 1)}]", v.shape)
            return k
        wrap = {
            "checkpoint": f"jax.checkpoint({f})",
            "policy": f"jax.checkpoint({f}, policy=tas.checkpoint_policies.save_reads)",
            "jit": f"jax.jit({f})",
            "in_place": f"tas.in_place({f}, max_steps=9)",
            "grad": f"jax.grad({f})",
            "ref": f,
            "jvp": f"(lambda b, i: {b} * jax.jvp(lambda b: {f}(b, i), (b,), (jnp.ones_like(b),))[1])",
        }[how]
        self.let("b", f"{wrap}({b}, {at})".replace("jnp.ones_like(b)", f"jnp.full({v.shape}, 1.0, {self.D})"), v.shape)
        return None

    def custom(self):
        """A custom rule that is the true derivative."""
        if not (self.real and self.buffers()):
            return
        v, f, i = self.pick(*self.buffers()), self.name("h"), self.index(self.n)
        kind = self.r.randrange(4)
        self.use(f"custom rule {kind}")
        if kind == 0:
            self.emit(f"{f} = jax.custom_jvp(lambda k, x: jnp.sin(x) * k, nondiff_argnums=(0,))")
            self.emit(f"{f}.defjvp(lambda k, p, t: ({f}(k, p[0]), jnp.cos(p[0]) * k * t[0]))")
            self.let("b", f"{f}({self.pick(1, 2)}, {v.name})", v.shape)
        elif kind == 1:
            self.emit(f"{f} = jax.custom_jvp(lambda b, i, x: b.at[i].set(jnp.sin(x)))")
            self.emit(f"{f}.defjvp(lambda p, t: ({f}(*p), t[0].at[p[1]].set(jnp.cos(p[2]) * t[2])))")
            self.let("b", f"{f}({v.name}, {i}, {self.some(v.shape[1:])})", v.shape)
        elif kind == 2:
            if self.schema in ("jvp", "hvp", "jacfwd", "linearize"):
                return
            self.emit(f"{f} = jax.custom_vjp(lambda b, i, x: tas.ta_write(b, i, jnp.sin(x)))")
            self.emit(
                f"{f}.defvjp(lambda b, i, x: ({f}(b, i, x), (i, x)), "
                "lambda r, ct: (ct.at[r[0]].set(0.0), None, ct[r[0]] * jnp.cos(r[1])))"
            )
            self.let("b", f"{f}({v.name}, {i}, {self.some(v.shape[1:])})", v.shape)
        else:
            if self.schema in ("jvp", "hvp", "jacfwd", "linearize"):
                return
            self.emit(f"{f} = jax.custom_vjp(lambda n, x: x * n, nondiff_argnums=(0,))")
            self.emit(f"{f}.defvjp(lambda n, x: (x * n, None), lambda n, r, ct: (ct * n,))")
            self.let("b", f"{f}({self.pick(1, 2)}, {v.name})", v.shape)

    def special(self):
        """What needs a form of its own: joined parts, `Inverse`, uninitialised buffers, empty buffers, keys."""
        kind = self.pick("parts", "inverse", "empty", "zero", "keys", "ys", "dtype")
        self.use(kind)
        if kind == "parts" and self.n > 1 and self.buffers():
            v = self.pick(*self.buffers())
            b, k = v.name, self.r.randrange(1, self.n)
            rest = f"{b}[:{k}].at[{self.index(k)}].set({self.some(v.shape[1:])})"
            self.let("b", f"jnp.concatenate([{rest}, {b}[{k}:]])", v.shape)
        elif kind == "inverse" and self.real and self.dtype in ("float64", "float32") and self.of((self.n,)):
            xs = self.pick(*self.of((self.n,)))
            start = self.some(())
            back = f"residuals.Inverse(lambda s, x: (s - x) / 1.25{self.pick('', ', check=True')})"
            if self.chance(0.3):
                back = f"residuals.Inverse(lambda c: (c[0] - 1, (c[1] - 0.5) / 1.25){self.pick('', ', check=True')})"
                step = f"lambda c: (c[0] + 1, c[1] * 1.25 + 0.5), (0, {start}), max_steps={self.pick(2, 5)}"
                step += f", on_limit='stop', residuals={back}"
                self.let("s", f"tas.while_loop(lambda c: c[0] < {self.pick(0, 2, 3)}, {step})[1]", ())
            else:
                self.let("s", f"tas.scan(lambda s, x: (s * 1.25 + x, None), {start}, {xs}, residuals={back})[0]", ())
        elif kind == "empty":
            row, f, k = self.pick((), (self.m,)), self.name("f"), self.pick(1, 2, 3)
            b = self.name("b")
            with self.block(f"def {f}(i, {b}):"):
                self.env.append(V("i", (), "i"))
                self.emit(f"return tas.ta_write({b}, i, {self.some(row)})")
            lib = self.pick("lax", "tas")
            self.let("e", f"{lib}.fori_loop(0, {k}, {f}, tas.ta_empty({k}, {row}, {self.D}))", (k, *row))
        elif kind == "zero":
            row = self.pick((), (self.m,))
            z = f"jnp.zeros((0, *{row}), {self.D})"
            op = self.pick("write", "add", "max") if not self.is_complex else "write"
            z = f"tas.ta_{op}({z}, {self.index(2)}, {self.some(row)}, mode='drop')"
            text = f"tas.ta_read({z}, {self.index(3)}, mode='drop')"
            self.let("x", text, row)
        elif kind == "keys" and KEYS and self.dtype in ("float64", "float32"):
            k, f, i = self.name("k"), self.name("f"), self.name("i")
            self.emit(f"{k} = jax.random.split(jax.random.key({self.r.randrange(99)}), {self.n})")
            with self.block(f"def {f}({i}, c):"):
                self.env.append(V(i, (), "i"))
                key = f"jax.random.fold_in(c[{self.index(self.n)}], {i})"
                self.emit(f"return c.at[{self.index(self.n)}].set({key})")
            self.emit(f"{k} = {self.pick('lax', 'tas')}.fori_loop(0, {self.pick(1, 2, 3)}, {f}, {k})")
            self.let("x", f"jax.random.uniform({k}[{self.index(self.n)}], ({self.m},), {self.D})", (self.m,))
        elif kind == "ys":
            row = self.pick((), (self.m,))
            lib, f = self.pick("lax.map", "tas.tf.map_fn", "jax.vmap"), self.name("f")
            vs = [v for v in self.env if v.kind == "D" and v.shape]
            if vs:
                v, x = self.pick(*vs), self.name("x")
                with self.block(f"def {f}({x}):"):
                    self.env.append(V(x, v.shape[1:], "D"))
                    self.emit(f"return {self.some(row, 2)}")
                call = f"jax.vmap({f})({v.name})" if lib == "jax.vmap" else f"{lib}({f}, {v.name})"
                self.let("y", call, (v.shape[0], *row))
        elif kind == "dtype" and self.buffers() and self.real:
            v, other = self.pick(*self.buffers()), self.pick("float32", "bfloat16", "float64")
            read = f"{v.name}.astype(jnp.{other})[{self.index(self.n)}].astype({self.D})"
            self.let("x", read if not self.derived else f"{v.name}[{self.index(self.n)}]", v.shape[1:])

    def array(self):
        """A `TensorArray` from its making to `stack`."""
        row, t, k = self.pick((), (self.m,)), self.name("t"), self.pick(1, 2, 3)
        self.use("TensorArray")
        with_rows = [v for v in self.env if v.kind == "D" and v.shape[1:] == row and v.shape]
        kind = self.pick("plain", "like", "from", "grows", "max", "unstack")
        bound = k + 3
        if kind == "from" and with_rows:
            v = self.pick(*with_rows)
            self.emit(f"{t} = tas.TensorArray.from_array({v.name})")
            k = v.shape[0]
        elif kind == "unstack" and with_rows:
            v = self.pick(*with_rows)
            k = v.shape[0]
            self.emit(f"{t} = tas.TensorArray({self.D}, size={k}).unstack({v.name})")
        elif kind == "like":
            self.emit(f"{t} = tas.TensorArray.like({self.some(row)}, {k})")
        elif kind == "grows":
            self.emit(f"{t} = tas.TensorArray({self.D}, size={k}, dynamic_size=True, element_shape={row})")
        elif kind == "max":
            self.emit(
                f"{t} = tas.TensorArray({self.D}, size=0, dynamic_size=True, element_shape={row}, max_size={bound})"
            )
        else:
            kind = "plain"
            self.emit(f"{t} = tas.TensorArray({self.D}, size={k}, element_shape={row}, clear_after_read=False)")
        if kind == "max":
            i, b = self.name("i"), self.name("f")
            with self.block(f"def {b}({i}, {t}):"):
                self.env.append(V(i, (), "i"))
                where = f", where={self.pred()}" if self.chance(0.5) else ""
                self.emit(f"return {t}.append({self.some(row, 2)}{where})")
            self.emit(f"{t} = {self.pick('lax', 'tas')}.fori_loop(0, {self.pick(1, bound)}, {b}, {t})")
            if self.chance(0.5):
                p = self.name("p")
                self.emit(f"{t}, {p} = {t}.pop(where={self.pred()}, mode='drop')")
                self.env.append(V(p, row, "D"))
            self.let("x", f"{t}.read({self.index(bound)}, mode='drop')", row)
            self.let("i", f"{t}.size()", (), "i")
            self.let("y", f"{t}.stack(pad=True)", (bound, *row))
            return
        for _ in range(self.pick(1, 2, 3)):
            i, o = self.missing(k)
            o = re.sub(r", lowering=\S+", "", o)
            how = self.pick("write", *(("write", "append") if kind == "grows" else ("write", "loop", "scatter")))
            if how == "append":
                self.emit(f"{t} = {t}.append({self.some(row)})")
                k += 1
            elif kind == "grows":
                self.emit(f"{t} = {t}.write({self.r.randrange(k)}, {self.some(row, 2)})")
            elif how == "write":
                self.emit(f"{t} = {t}.write({i}, {self.some(row, 2)}{o})")
            elif how == "scatter":
                x = f"jnp.stack([{self.some(row)}, {self.some(row)}])"
                self.emit(
                    f"{t} = {t}.scatter({self.indices(2, k)}, {x}, where=jnp.asarray([True, {self.chance(0.5)}]))"
                )
            else:
                f, i = self.name("f"), self.name("i")
                with self.block(f"def {f}({i}, {t}):"):
                    self.env.append(V(i, (), "i"))
                    self.let("x", f"{t}.read({self.index(k)}{self.pick('', f', where={self.pred()}')})", row)
                    self.emit(f"return {t}.write({self.index(k)}, {self.some(row, 2)})")
                self.emit(f"{t} = {self.pick('lax', 'tas')}.fori_loop(0, {self.pick(1, 2, k)}, {f}, {t})")
        self.let("x", f"{t}{self.pick('.read({})', '[{}]', '.gather({})').format(self.index(k))}", row)
        if row and self.chance(0.3):
            self.let("y", f"{t}.concat()", (k * self.m,))
        self.let("y", f"{t}.stack()", (k, *row))

    def carried(self):
        """A loop whose carry is a dict with a `TensorArray`, which perhaps grows, or whose body writes a ref."""
        if self.loops > 1:
            return
        if not self.derived and self.buffers() and self.chance(0.3):
            v, r, f, i = self.pick(*self.buffers()), self.name("r"), self.name("f"), self.name("i")
            self.use("ref of a loop")
            self.emit(f"{r} = jax.new_ref({v.name})")
            with self.block(f"def {f}({i}, c):"):
                self.env.append(V(i, (), "i"))
                self.emit(f"{r}[{self.index(v.shape[0])}] = {self.some(v.shape[1:], 2)}")
                self.let("x", f"{r}[{self.index(v.shape[0])}]", v.shape[1:])
                self.emit(f"return {self.some(v.shape[1:], 2)}")
            start = self.some(v.shape[1:])
            self.let("x", f"{self.pick('lax', 'tas')}.fori_loop(0, {self.pick(1, 2, 3)}, {f}, {start})", v.shape[1:])
            self.let("b", f"{r}[...]", v.shape)
            return
        row, t, f, g = self.pick((), (self.m,)), self.name("t"), self.name("f"), self.name("g")
        grows, steps, bound = self.chance(0.5), self.pick(0, 1, 2, 3), self.pick(3, 5)
        self.use("TensorArray of a loop, growing" if grows else "TensorArray of a loop")
        size = f"size=0, dynamic_size=True, element_shape={row}" if grows else f"size={bound}, element_shape={row}"
        tf = self.chance(0.3)
        x = self.name("x")
        self.loops += 1
        stop = f"i < {self.pick(*self.of((), 'i'))} % 4" if self.of((), "i") and self.chance(0.5) else f"i < {steps}"
        with self.block(f"def {f}({f'i, {t}, {x}' if tf else 'c'}):"):
            if not tf:
                self.emit(f"i, {t}, {x} = c['i'], c['t'], c['x']")
            self.env += [V("i", (), "i"), V(x, row, "D")]
            self.let("x", f"{t}.read({self.pick('i - 1', 'i // 2', self.index(bound))}, mode='drop')", row)
            if self.chance(0.4):
                self.statement()
            value, where = self.some(row, 2), f", where={self.pred()}" if self.chance(0.3) else ""
            if grows:
                new = self.pick(f"{t}.append({value}{where})", f"{t}.write(i, {value}{where})")
            else:
                new = self.pick(f"{t}.write(i, {value}{where})", f"{t}.write({self.index(bound)}, {value}{where})")
                if self.chance(0.3):
                    new = f"lax.cond({self.pred()}, lambda t: t.write(i, {value}), lambda t: t, {t})"
            last = self.some(row, 2)
            self.emit(f"return i + 1, {new}, {last}" if tf else f"return dict(i=i + 1, t={new}, x={last})")
        self.loops -= 1
        start = f"jnp.int32(0), tas.TensorArray({self.D}, {size}), {self.some(row)}"
        if tf:
            text = f"tas.tf.while_loop(lambda i, t, x: {stop}, {f}, ({start}), maximum_iterations={bound})"
            self.emit(f"_, {t}, {g} = {text}")
        else:
            i, a, b = "jnp.int32(0)", f"tas.TensorArray({self.D}, {size})", self.some(row)
            text = f"lambda c: c['i'] < {stop.split(' < ')[1]}, {f}, dict(i={i}, t={a}, x={b})"
            self.emit(f"{g} = tas.while_loop({text}, max_steps={bound}, on_limit='stop'{self.residuals()})")
            self.emit(f"{t}, {g} = {g}['t'], {g}['x']")
        self.env.append(V(g, row, "D"))
        self.let("x", f"{t}.gather(jnp.arange({bound}), mode='drop')", (bound, *row))
        self.let("i", f"jnp.asarray({t}.size())", (), "i")

    def residuals(self, inverse=False):
        if self.chance(0.4):
            return ""
        kinds = [
            '"tape"',
            '"recompute"',
            '"undo"',
            '"auto"',
            "residuals.Tape(offload=True)",
            "residuals.Recompute()",
            "residuals.Undo()",
        ]
        kinds += [
            "residuals.Checkpoint(1)",
            "residuals.Checkpoint(2)",
            "residuals.Auto(memory=100)",
            "residuals.Auto(memory=0)",
            "residuals.Auto()",
        ]
        text = self.pick(*kinds)
        self.use(f"residuals={text}")
        return f", residuals={text}"

    def loop(self):
        """A loop of any kind, whose body may change the places of its buffers, or return one of them twice."""
        kind = self.pick("fori", "fori", "scan", "scan", "while", "while", "tfwhile", "fold", "tfscan")
        if kind == "while" and self.bounded and not self.max_steps:
            kind = "bounded"
        lib = "tas" if kind in ("bounded", "tfwhile", "fold", "tfscan") else self.pick("lax", "lax", "tas")
        kind = "while" if kind == "bounded" else kind
        self.use(f"{lib} {kind}")
        self.loops += 1
        carry = [self.pick(*self.buffers()) for _ in range(self.pick(1, 1, 2, 2, 3))] if self.buffers() else []
        if self.of((2, self.n, self.m)):
            carry.append(V(self.pick(*self.of((2, self.n, self.m))), (2, self.n, self.m), "D"))
        if self.chance(0.5) or not carry:
            weak = self.dtype == "float64" and self.chance(0.3)
            carry.append(V("0.5" if weak else self.some((), 1), (), "D"))
        steps, f = self.pick(0, 1, 2, 3, 4), self.name("f")
        inner = [V(self.name("c"), v.shape, "D") for v in carry]
        start, names = ", ".join(v.name for v in carry), ", ".join(v.name for v in inner)
        result = ", ".join(self.name("b") for _ in inner)
        i = self.name("i")
        flip = self.chance(0.15)
        if kind in ("fold", "tfscan"):
            carry, inner = carry[:1], inner[:1]
            shape = carry[0].shape
            xs = [v for v in self.env if v.shape and v.shape[0] and v.kind in "Di"]
            v, x = self.pick(*xs), self.name("x")
            with self.block(f"def {f}({inner[0].name}, {x}):"):
                self.env += [inner[0], V(x, v.shape[1:], v.kind)]
                self.body(inner)
                self.emit(f"return {self.some(shape, 2)}")
            if kind == "fold":
                self.let("s", f"tas.tf.fold{self.pick('l', 'r')}({f}, {v.name}, {carry[0].name})", shape)
            else:
                self.let("y", f"tas.tf.scan({f}, {v.name}, {carry[0].name}, reverse={flip})", (v.shape[0], *shape))
        elif kind == "fori":
            low = self.pick(0, 0, 1)
            with self.block(f"def {f}({i}, carry):"):
                self.env += [*inner, V(i, (), "i")]
                self.emit(f"{names}, = carry")
                self.body(inner)
                self.back(inner)
            high = steps + low
            extra = self.residuals() if lib == "tas" else ""
            if self.chance(0.25) and self.of((), "i") and (not self.bounded or lib == "tas"):
                high = f"{self.pick(*self.of((), 'i'))} % 4 + {low}"
                extra += ", max_steps=5" if lib == "tas" else ""
            elif self.chance(0.2):
                extra += f", unroll={self.pick(1, 2, True)}"
            self.emit(f"{result}, = {lib}.fori_loop({low}, {high}, {f}, ({start},){extra})")
        elif kind == "scan":
            pool = [v for v in self.env if v.shape and v.kind in "Di" and v.shape[0] == self.n]
            xs = [self.pick(*pool) for _ in range(self.pick(0, 1, 1, 2))] if pool else []
            slices = [V(self.name("x"), v.shape[1:], v.kind) for v in xs]
            text, y = "".join(f"{v.name}, " for v in slices), self.pick((), (self.m,), None)
            length = self.n if xs else steps
            counts = not xs or self.chance(0.6)
            with self.block(f"def {f}(carry, x):"):
                self.env += [*inner, *slices, *([V(i, (), "i")] if counts else [])]
                self.emit(f"{names}, = carry")
                self.emit(f"({text}{i if counts else ''}) = x" if text + i * counts != i else f"{i} = x")
                self.body(inner)
                out = "None" if y is None else self.some(y, 2)
                self.back(inner, f", {out}")
            count = f"jnp.arange({length})" if counts else ""
            given = f"({''.join(f'{v.name}, ' for v in xs)}{count})" if xs else count
            extra = self.residuals() if lib == "tas" else ""
            extra += self.pick("", "", f", unroll={self.pick(1, 2)}") + (", reverse=True" if flip else "")
            ys = self.name("y")
            self.emit(f"({result},), {ys} = {lib}.scan({f}, ({start},), {given}{extra})")
            if y is not None:
                self.env.append(V(ys, (length, *y), "D"))
        else:
            stop = (
                f"{i} < {steps}"
                if self.chance(0.5) or not self.of((), "i")
                else f"{i} < {self.pick(*self.of((), 'i'))} % 5"
            )
            g, b = self.name("g"), f"{i}, {names}"
            whole = kind == "while"
            with self.block(f"def {g}({'carry' if whole else b}):"):
                if whole:
                    self.emit(f"{b}, = carry")
                self.env += [*inner, V(i, (), "i")]
                self.emit(f"return ({stop}) & {self.pred()}" if self.chance(0.35) else f"return {stop}")
            with self.block(f"def {f}({'carry' if whole else b}):"):
                if whole:
                    self.emit(f"{b}, = carry")
                self.env += [*inner, V(i, (), "i")]
                self.body(inner)
                self.back(inner, first=f"{i} + 1, ")
            if not whole:
                extra = self.pick(
                    "maximum_iterations=4", "maximum_iterations=jnp.int32(3), max_steps=6", "maximum_iterations=5"
                )
                extra += self.pick("", "", ", swap_memory=True", ", back_prop=False", ", name='loop'")
                if "back_prop=False" in extra and self.derived:
                    extra = extra.replace("False", "True")
                self.emit(f"_, {result} = tas.tf.while_loop({g}, {f}, (jnp.int32(0), {start}), {extra})")
            elif lib == "lax":
                self.emit(f"_, {result} = lax.while_loop({g}, {f}, (jnp.int32(0), {start}))")
            else:
                extra = self.residuals()
                if extra or self.bounded or self.chance(0.6):
                    extra += f", max_steps={self.pick(3, 6, 100)}, on_limit='stop'"
                if self.chance(0.25):
                    s = self.name("n")
                    self.emit(
                        f"(_, {result}), {s} = tas.while_loop("
                        f"{g}, {f}, (jnp.int32(0), {start}){extra}, return_steps=True)"
                    )
                    self.let("n", f"{s}[0].astype(jnp.int32)", (), "i")
                    self.let("n", f"{s}[1]", (), "b")
                else:
                    self.emit(f"_, {result} = tas.while_loop({g}, {f}, (jnp.int32(0), {start}){extra})")
        self.loops -= 1
        if kind not in ("fold", "tfscan"):
            self.env += [V(name.strip(), v.shape, "D") for name, v in zip(result.split(","), inner, strict=True)]

    def body(self, inner):
        for _ in range(self.pick(0, 0, 1, 1, 2)):
            self.statement()
        for v in inner:
            if v.shape == (2, self.n, self.m):
                for _ in range(self.pick(1, 2)):
                    self.cached()
            elif v.shape and self.chance(0.85):
                self.emit(f"{v.name} = {self.update(v)}")
            elif not v.shape:
                self.emit(f"{v.name} = {self.some((), 2)}")

    def back(self, inner, rest="", first=""):
        """Return the carry, now and then with its buffers in other places."""
        names = [v.name for v in inner]
        if self.chance(0.25):
            names = [self.pick(*[w.name for w in inner if w.shape == v.shape]) for v in inner]
            self.use("exchange")
        elif self.chance(0.1):
            names = [self.pick(*self.of(v.shape)) for v in inner]
        self.emit(f"return {first}{', '.join(names)}" if first else f"return ({', '.join(names)},){rest}")

    # Whole programs.

    def literal(self, shape, kind):
        if self.python and shape == () and kind in "bi":
            return str(self.chance(0.5) if kind == "b" else self.r.randrange(8))
        if self.python and shape == () and self.dtype == "float64" and self.schema in ("jit", "trace"):
            return f"{self.r.uniform(-1.5, 1.5):.2f}"
        if kind == "b":
            return f"jnp.asarray({self.chance(0.5)})"
        if kind == "i":
            values = np.array([self.r.randrange(8) for _ in range(int(np.prod(shape)))], int)
            return f"jnp.asarray({values.reshape(shape).tolist()}, jnp.int32)"
        size = int(np.prod(shape))
        if self.real or self.is_complex:
            values = np.array([round(self.r.uniform(-1.5, 1.5), 2) for _ in range(size)])
            values = values + 1j * np.round(np.cos(9 * values), 2) if self.is_complex else values
        else:
            values = np.array([self.r.randrange(7) for _ in range(size)], int)
            values = values % 2 == 1 if self.dtype == "bool_" else values
        return f"jnp.asarray({values.reshape(shape).tolist()}, {self.D})"

    def program(self):
        shapes = [(self.n,), (self.n, self.m), self.pick((self.n, self.m), (self.m,), (), (self.n,))]
        self.r.shuffle(shapes)
        small = self.schema in ("hvp", "jacfwd", "jacrev", "hessian", "vmap_grad")
        shapes = shapes[: 2 if small else 3]
        if self.caching:
            shapes[-1] = (2, self.n, self.m)
        params = [V(self.name("a"), s, "D") for s in shapes]
        params += [V(self.name("k"), (self.n,), "i"), V(self.name("k"), (), "i"), V(self.name("p"), (), "b")]
        self.static = self.pick(None, None, f"{self.r.randrange(1, 4)}", '"flat"')
        names = ", ".join(v.name for v in params)
        with self.block(f"def f({names}{', s' if self.static else ''}):"):
            self.env += params
            if self.static == '"flat"':
                b = params[0]
                self.emit(f'{b.name} = {b.name} * 2 if s == "flat" and {self.D} != jnp.bool_ else {b.name}')
            elif self.static:
                self.emit(
                    f"for _ in range(s):\n    {params[0].name} = {self.unary(params[0].shape, 0)}"
                    if self.real
                    else "pass"
                )
            for _ in range(self.pick(1, 1, 2, 3)):
                self.statement()
            if not any("_loop" in line or "scan" in line for line in self.lines):
                self.loop()
            out = [v.name for v in self.env if v not in params]
            out = self.r.sample(out, min(len(out), 3)) + out[-2:] if out else [params[0].name]
            if self.derived:
                kept = [v.name for v in self.env if v.kind == "D" and v.name in out] or [params[0].name]
                self.emit(f"return [{', '.join(dict.fromkeys(kept))}]")
            else:
                out = list(dict.fromkeys(out))
                self.emit(
                    f"return {self.pick('({},)', '[{}]').format(', '.join(out))}"
                    if self.chance(0.6)
                    else f"return dict({', '.join(f'{o}={o}' for o in out)})"
                )
        self.emit("")
        batched = "vmap" in self.schema
        size, axes = self.pick(1, 2, 3), []
        for v in params:
            axis = self.pick(None, 0, *range(len(v.shape) + 1)) if batched else None
            axes.append(axis)
        if batched and all(a is None for a in axes):
            axes[0] = 0
        for v, axis in zip(params, axes, strict=True):
            shape = v.shape if axis is None else (*v.shape[:axis], size, *v.shape[axis:])
            if v.kind == "b" and axis is not None:
                self.emit(f"{v.name} = jnp.asarray({[self.chance(0.5) for _ in range(size)]})")
            else:
                self.emit(f"{v.name} = {self.literal(shape, v.kind)}")
        s = f", {self.static}" if self.static else ""
        SCHEMAS[self.schema](self, params, names, s, f"({', '.join(map(str, axes))},)")
        if self.effects:
            self.lines = ["LOG = []", "def log(x):", "    LOG.append(np.array(x).tolist())", "", *self.lines]
            self.emit("jax.effects_barrier()\nresult = result, LOG")
        return "\n".join(self.lines) + "\n"

    def last(self, f):
        """Put transformations around the whole program, mostly a `jit`: loops outside of one compile alone."""
        f = self.around(f)
        return f"jax.jit({f})" if self.chance(0.93) and not f.startswith(("jax.jit", "tas.in_place")) else f

    def around(self, f, jit=True):
        """Put transformations that change nothing around `f`."""
        options = [
            "{}",
            "jax.checkpoint({})",
            "tas.in_place({}{o})",
            "tas.in_place({}{o})",
            "tas.in_place({}{o})",
            "tas.in_place({}{o})",
        ]
        if jit:
            options += ["jax.jit({})", "jax.jit({})"]
        for _ in range(self.pick(0, 1, 1, 1, 2)):
            o = f", max_steps={self.max_steps}" if self.max_steps else ""
            if self.chance(0.45):
                o += ", residuals=" + self.pick(
                    '"tape"',
                    '"undo"',
                    '"checkpoint"',
                    "residuals.Undo()",
                    "residuals.Checkpoint(2)",
                    "residuals.Tape()",
                    "residuals.Recompute()",
                )
            elif self.chance(0.6):
                o += f", memory={self.pick(0, 64, 10000)}"
            text = self.pick(*options)
            if "checkpoint" in text and self.effects:
                continue
            self.use(text.split("(")[0])
            f = text.format(f, o=o)
        if self.bounded and self.max_steps and "max_steps" not in f:
            f = f"tas.in_place({f}, max_steps={self.max_steps})"
        return f


def closed(g, params, names, s, chosen=None):
    """Return `f` as a function of its float arguments, closed over the others, and their names."""
    floats = [v for v in params if v.kind == "D"]
    chosen = floats if chosen is None else chosen
    xs = ", ".join(v.name for v in chosen)
    return f"lambda {xs}: f({names}{s})", xs, chosen


def whole(g, params, names, s, axes):
    f = f"lambda {names}: f({names}{s})" if s and g.chance(0.5) else "f"
    if s and f == "f":
        n = len(params)
        f = g.pick("tas.in_place(f)", f"jax.jit(f, static_argnums={n})", f"tas.in_place(f, static_argnums={n})")
        g.emit(f"result = {f}({names}{s})")
    else:
        g.emit(f"result = ({g.last(f)})({names})")


def grown(g, params, names, s, axes):
    """A loop that takes as many steps, and appends as many rows, as it turns out to need."""
    x, k = next(v for v in params if v.kind == "D"), next(v for v in params if v.kind == "i" and not v.shape)
    ta = f"tas.TensorArray({g.D}, size=0, dynamic_size=True, element_shape={x.shape})"
    with g.block(f"def grows({names}):"):
        g.emit(f"step = lambda c: (c[0] + 1, c[1].append({x.name}))")
        g.emit(f"rows = tas.while_loop(lambda c: c[0] < {k.name}, step, (jnp.int32(0), {ta}))[1]")
        g.emit(f"return f({names}{s}), rows")
    g.emit(f"result, rows = tas.growing(grows, initial_bound={g.pick(1, 2, 64)})({names})")
    g.emit("result = result, rows.stack()")


def jitted(g, params, names, s, axes):
    g.emit(f"result = jax.jit({g.around(f'lambda {names}: f({names}{s})')})({names})")


def donated(g, params, names, s, axes):
    g.emit(
        f"result = jax.jit({g.around(f'lambda {names}: f({names}{s})')}, donate_argnums={g.pick(0, '(0, 1)')})({names})"
    )


def shaped(g, params, names, s, axes):
    g.emit(f"result = jax.eval_shape({g.around(f'lambda {names}: f({names}{s})')}, {names})")


def traced(g, params, names, s, axes):
    f = g.around(f"lambda {names}: f({names}{s})")
    g.emit(f"result = evaluated({f}, {names})" if g.chance(0.6) else f"result = exported({f}, {names})")


def batched(g, params, names, s, axes):
    f = g.around(f"lambda {names}: f({names}{s})", jit=False)
    if g.chance(0.25):  # a batch of batches, whose outer one only has other integers
        inner, k = g.around(f"jax.vmap({f}, in_axes={axes})", jit=False), params[-2].name
        twice = f"jax.vmap(lambda {k}: ({inner})({names}))"
        g.emit(f"result = ({g.last(twice)})(jnp.stack([{k}, {k} + 1]))")
        return
    out = g.pick("", "", ", out_axes=-1")
    g.emit(f"result = ({g.last(f'jax.vmap({f}, in_axes={axes}{out})')})({names})")


def loss(g, params, names, s):
    body = f"f({names}{s})"
    weight = "jnp.real(o * (0.3 + 0.4j))" if g.is_complex else "jnp.sin(o)"
    dtype = "jnp.float64" if g.is_complex else g.D
    called = g.around("f") if not s and g.chance(0.4) else "f"
    with g.block(f"def loss({names}):"):
        g.emit(f"return sum(jnp.sum({weight}, dtype={dtype}) for o in {called}({body[2:]})")


def argnums(g, params):
    floats = [n for n, v in enumerate(params) if v.kind == "D"]
    return g.pick(0, tuple(floats), (floats[-1],), 1)


def gradient(g, params, names, s, axes):
    loss(g, params, names, s)
    kind = g.pick("grad", "grad", "value_and_grad")
    f = f"jax.{kind}({g.around('loss')}, argnums={argnums(g, params)})"
    g.emit(f"result = ({g.last(f)})({names})")


def batched_gradient(g, params, names, s, axes):
    loss(g, params, names, s)
    f = g.around(f"jax.grad({g.around('loss', False)}, argnums={g.pick(0, (0, 1))})", False)
    g.emit(f"result = ({g.last(f'jax.vmap({f}, in_axes={axes})')})({names})")


def gradient_of_batch(g, params, names, s, axes):
    loss(g, params, names, s)
    f = g.around(f"jax.vmap({g.around('loss', False)}, in_axes={axes})", False)
    f = f"lambda {names}: jnp.sum(({f})({names}))"
    g.emit(f"result = ({g.last(f'jax.grad({f}, argnums={g.pick(0, (0, 1), 1)})')})({names})")


def tangents(g, chosen):
    return "".join(f"{g.literal(v.shape, 'D')}, " for v in chosen)


def forward(g, params, names, s, axes):
    f, xs, chosen = closed(g, params, names, s)
    f, ts = g.around(f), tangents(g, chosen)
    if g.schema == "linearize":
        g.emit(f"value, linear = jax.linearize({f}, {xs})\nresult = value, linear({ts})")
    else:
        h = f"lambda {xs}: jax.jvp({f}, ({xs},), ({ts}))"
        g.emit(f"result = ({g.last(h)})({xs})")


def backward(g, params, names, s, axes):
    f, xs, _ = closed(g, params, names, s)
    g.emit(f"value, back = jax.vjp({g.around(f)}, {xs})")
    g.emit("cts = [(o * 0 + 1.0).astype(o.dtype) for o in value]\nresult = value, back(cts)")


def second(g, params, names, s, axes):
    loss(g, params, names, s)
    x = params[0]
    f = f"lambda {x.name}: loss({names})"
    h = g.around(f"jax.grad({g.around(f)})")
    t = g.literal(x.shape, "D")
    g.emit(f"result = ({g.last(f'lambda x: jax.jvp({h}, (x,), ({t},))')})({x.name})")


def jacobians(g, params, names, s, axes):
    x = params[0]
    f = g.around(f"lambda {x.name}: f({names}{s})", False)
    g.emit(f"result = ({g.last(f'jax.{g.schema}({f})')})({x.name})")


SCHEMAS = {
    "value": whole,
    "jit": jitted,
    "donate": donated,
    "growing": grown,
    "eval_shape": shaped,
    "trace": traced,
    "vmap": batched,
    "grad": gradient,
    "vmap_grad": batched_gradient,
    "grad_vmap": gradient_of_batch,
    "jvp": forward,
    "linearize": forward,
    "vjp": backward,
    "hvp": second,
    "jacfwd": jacobians,
    "jacrev": jacobians,
}
REVERSE = ("grad", "vmap_grad", "grad_vmap", "vjp", "hvp", "jacrev")
DERIVED = (*REVERSE, "jvp", "linearize", "jacfwd")
KEYS = True


def program(seed):
    return Grammar(seed).program()


# ---- The judge ------------------------------------------------------------------------------------------------------


def plain_op(update, swaps=False):
    """Return a row op as plain JAX has it, for weak types and as a second opinion. It drops what is out of range."""

    def apply(b, index, x=None, *, axis=0, length=None, where=None, mode=None, lowering="auto"):
        index = tuple(map(jnp.asarray, index if isinstance(index, tuple) else (index,)))
        if where is not None:
            index = (jnp.where(where, index[0], -1), *index[1:])
        if length is not None:
            steps = jnp.arange(length)
            fine = (index[0] >= 0) & (index[0] + length <= b.shape[axis])
            index = (jnp.where(fine[..., None], index[0][..., None] + steps, -1),)
        sizes = b.shape[axis:]
        fine = functools.reduce(jnp.logical_and, [(i >= 0) & (i < n) for i, n in zip(index, sizes, strict=False)])
        index = (slice(None),) * axis + tuple(jnp.where(fine, i, n) for i, n in zip(index, sizes, strict=False))
        rows = b.at[index].get(mode="fill", fill_value=0)
        if update is None:
            return rows
        new = getattr(b.at[index], update)(jnp.asarray(x, b.dtype), mode="drop")
        return (new, rows) if swaps else new

    return apply


def plain_while(cond, body, init, *, max_steps=None, on_limit="raise", residuals="auto", return_steps=False):
    carry, n = jax.lax.while_loop(
        lambda c: cond(c[0]) & (c[1] < (10**4 if max_steps is None else max_steps)),
        lambda c: (body(c[0]), c[1] + 1),
        (init, jnp.int64(0)),
    )
    return (carry, (n, cond(carry))) if return_steps else carry


plain_tas = types.SimpleNamespace(**vars(tas))
for _name, _u in {"read": None, "write": "set", "add": "add", "max": "max"}.items():
    setattr(plain_tas, f"ta_{_name}", plain_op(_u))
plain_tas.ta_swap = plain_op("set", swaps=True)
plain_tas.while_loop = plain_while
plain_tas.fori_loop = lambda *args, max_steps=None, residuals="auto", **k: jax.lax.fori_loop(*args, **k)
plain_tas.scan = lambda *args, residuals="auto", **k: jax.lax.scan(*args, **k)
plain_tas.in_place = plain_tas.growing = lambda f=None, **_: f


def mixed():
    """Return the programs of the other grammar, which has programs of this one."""
    return importlib.import_module("mixed_programs")


def run_fake(source, **names):
    """Run a program in NumPy, with these names beside its own."""
    state = {"jax": fake_jax, "jnp": fake_jnp, "lax": fake_lax, "np": np, "tas": fake_tas}
    state["residuals"] = fake_tas.residuals
    state.update(evaluated=lambda f, *a: f(*as_arrays(a)), exported=lambda f, *a: f(*as_arrays(a)))
    state["io_callback"] = lambda f, _, *a, **k: f(*a)
    state["mixed"] = lambda k, x: fake_jnp.asarray(mixed().in_numpy(k, x))
    state.update({name: as_arrays(x) for name, x in names.items()})
    State.exact, State.dry, State.frames = 0, 0, ()
    with np.errstate(all="ignore"):
        exec(source, state)
    return state["result"]


@functools.cache
def header():
    return compile(HEADER, "header", "exec")


def run_real(source, plain=False, **names):
    """Run a program in JAX, with these names beside its own."""
    state = {}
    exec(header(), state)
    state.update(names)
    state["mixed"] = lambda k, x: mixed().in_jax(k, x)
    if plain:
        state["tas"] = plain_tas
    exec(compile(source, "program", "exec"), state)
    return state["result"]


def tolerance(source, dtype):
    derived = any(word in source for word in ("grad", "jvp", "vjp", "jac", "linearize"))
    base = {"float64": 1e-9, "complex128": 1e-9, "float32": 1e-4, "complex64": 1e-4}.get(str(dtype), 0.1)
    return {1e-9: 2e-6, 1e-4: 3e-3}.get(base, 0.3) if derived else base


def difference(source, expected, got):
    """Return the kind of the first difference between two results and a description, or None."""
    expected, got = jax.tree.leaves(expected), jax.tree.leaves(got)
    if len(expected) != len(got):
        return "effects" if "LOG" in source else "structure", f"{len(expected)} leaves, {len(got)} given"
    for n, (e, g) in enumerate(zip(expected, got, strict=True)):
        if isinstance(e, (bool, float, int, complex)) or isinstance(g, (bool, float, int, complex)):
            if not np.allclose(np.asarray(e, complex), np.asarray(g, complex), rtol=0.1, atol=0.1):
                return "effects", f"leaf {n}: {e!r}, {g!r} given"
            continue
        e = np.asarray(e)
        if e.shape != g.shape:
            return "shape", f"leaf {n}: {e.shape}, {g.shape} given"
        if e.dtype != g.dtype:
            return "dtype", f"leaf {n}: {e.dtype}, {g.dtype} given"
        if isinstance(g, jax.ShapeDtypeStruct):
            continue
        g = np.asarray(g)
        if not is_float(e):
            if not np.array_equal(e, g):
                return "value", f"leaf {n}: {e.tolist()}, {g.tolist()} given"
            continue
        wide_e, wide_g = e.astype(complex), g.astype(complex)
        if not np.isfinite(wide_e).all() or (e.size and np.abs(wide_e).max() > 1e4):
            raise Near
        limit = tolerance(source, e.dtype) * max(1, np.abs(wide_e).max(initial=0))
        if not (np.abs(wide_e - wide_g) <= limit).all():
            return "value", f"leaf {n}: {e.tolist()}, {g.tolist()} given"
    return None


def weak_types(result):
    return [bool(getattr(leaf, "weak_type", False)) for leaf in jax.tree.leaves(result)]


def judge(source, weak=False):
    """Return None if the program does what the pages say, else the kind of failure and a text."""
    error = None
    try:
        expected = run_fake(source)
    except Near:
        return "near", ""
    except OutOfRange as e:
        error = e
    except Exception as e:
        return "oracle", f"{type(e).__name__}: {e}"
    try:
        got = jax.block_until_ready(run_real(source))
    except Exception as e:
        text = str(e)
        if error is not None and isinstance(e, (IndexError, ValueError, jax.errors.JaxRuntimeError)):
            return None if "out of range" in text else ("error text", f"{error!s} expected: {text[:300]}")
        if isinstance(e, IndexError) and "out of range" in text:
            return "near", ""  # an index known while tracing is an error there, also where nothing is executed
        kind = f"{'error type' if error else 'crash'} {type(e).__name__}"
        return kind, (f"{error} expected; " if error else "") + text[:1500]
    if error is not None:  # an op whose result nobody uses may be dropped, so this may be a program without it
        return "no error", str(error)
    try:
        found = difference(source, expected, got)
    except Near:
        return "near", ""
    except Exception as e:
        return "oracle", f"{type(e).__name__}: {e}"
    if found is None and weak:
        try:
            plain = jax.block_until_ready(run_real(source, plain=True))
        except Exception:
            return None
        if weak_types(plain) != weak_types(got):
            return "weak type", f"{weak_types(plain)}, {weak_types(got)} given"
    return found


def second_opinion(source, result=None):
    """Return whether plain JAX agrees with NumPy about a program that fails."""
    try:
        differs = difference(source, run_fake(source), run_real(source, True))
        return f"plain JAX differs too: {differs}" if differs else "plain JAX agrees with NumPy"
    except Exception as e:
        again = result is not None and str(e)[:60] == result[1][:60]
        return "plain JAX raises it too" if again else f"plain JAX raises {type(e).__name__}: {str(e)[:200]}"


# ---- Shrinking ------------------------------------------------------------------------------------------------------


def slots(module):
    """Yield a function that puts another expression where one is, and that expression."""
    for node in list(ast.walk(module)):
        for field, value in ast.iter_fields(node):
            if isinstance(value, ast.expr):
                yield functools.partial(setattr, node, field), value
            elif isinstance(value, list):
                for k, part in enumerate(value):
                    if isinstance(part, ast.expr):
                        yield functools.partial(value.__setitem__, k), part


def without(items):
    """Empty one place of a list after the other, for as long as the caller looks at the rest."""
    for k in range(len(items)):
        part = items.pop(k)
        yield
        items.insert(k, part)


def candidates(source):
    """Yield smaller programs: a statement is gone, or an expression is one of its parts."""
    module = ast.parse(source)
    for node in reversed(list(ast.walk(module))):
        block = getattr(node, "body", None)
        if isinstance(block, list) and len(block) > 1:
            for _ in without(block):
                yield ast.unparse(module)
        if isinstance(node, ast.Call):
            for _ in without(node.keywords):
                yield ast.unparse(module)
        if isinstance(node, (ast.Tuple, ast.List)) and len(node.elts) > 1 and isinstance(node.ctx, ast.Load):
            for _ in without(node.elts):
                yield ast.unparse(module)
    for put, old in slots(module):
        parts = [c for c in ast.iter_child_nodes(old) if isinstance(c, ast.expr) and not isinstance(c, ast.Attribute)]
        if isinstance(old, ast.Call) and isinstance(old.func, ast.Attribute):
            parts += [old.func.value]
        for part in parts:
            put(part)
            yield ast.unparse(module)
        put(old)


def shrink(source, kind, seconds=60.0):
    """Return the smallest program found that fails in the same way, and about which plain JAX says the same."""
    end, agrees, done = time.time() + seconds, second_opinion(source)[:26], False
    source = ast.unparse(ast.parse(source))
    while not done and time.time() < end:
        done, seen = True, set()
        for smaller in candidates(source):
            if time.time() > end:
                break
            if len(smaller) >= len(source) or smaller in seen:
                continue
            seen.add(smaller)
            result = judge(smaller, kind == "weak type")
            if result is not None and result[0] == kind and second_opinion(smaller)[:26] == agrees:
                source, done = smaller, False
                break
    return source


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0:200")
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--show", action="store_true", help="print the programs")
    parser.add_argument("--seconds", type=float, default=60.0, help="for shrinking one program")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    first, last = map(int, args.seeds.split(":"))
    counts, used, start = collections.Counter(), collections.Counter(), time.process_time()
    for seed in range(first, last):
        grammar = Grammar(seed)
        source = grammar.program()
        if args.show:
            print(source)
        result = judge(source, weak=seed % 8 == 0)
        opinion = second_opinion(source, result) if result and result[0] not in ("near", "oracle") else ""
        # Plain JAX has no gradient of a `while_loop`, so it cannot say that this scatter has none either.
        is_of_jax = result is not None and "scatter_mul gradients are only implemented" in str(result[1])
        if is_of_jax or opinion in ("plain JAX raises it too", f"plain JAX differs too: {result}"):
            result = "plain JAX too", f"{result}"
        counts[result[0] if result else "fine"] += 1
        if result is None:
            used.update(dict.fromkeys([*grammar.used, grammar.schema, grammar.dtype], 1))
        elif result[0] not in ("near", "plain JAX too"):
            head = f"seed {seed} ({grammar.schema}, {grammar.dtype}): {result[0]}: {result[1][:600]}"
            print(f"{head}\n    {opinion}", flush=True)
            if args.shrink and result[0] != "oracle":
                print(HEADER + shrink(source, result[0], args.seconds), flush=True)
        if seed % 100 == 99:
            print(f"... {seed + 1} after {time.process_time() - start:.0f} s, {dict(counts)}", flush=True)
        if seed % 300 == 299:
            jax.clear_caches()
    spent = time.process_time() - start
    print(dict(counts), f"{(last - first) / spent:.1f} programs per second of one core")
    print(dict(used.most_common()))


if __name__ == "__main__":
    main()
