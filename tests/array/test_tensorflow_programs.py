"""Random programs give in TensorFlow and here the same values and gradients, but for defects listed by name.

A program is a list of instructions; `run` interprets it with TensorFlow, with this library, or with `Rows`, a NumPy
oracle that holds a Python list of rows. What is random is drawn by `Generator`, which runs the oracle along as it
draws, so that it knows the size of every array and draws only what is defined.

TENSORFLOW_PROGRAMS=1000 pytest tests/array/test_tensorflow_programs.py    runs more of them than usual
"""

import os
import warnings
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax

import jax_tensorarray as jt

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    tf = pytest.importorskip("tensorflow", reason="pip install 'jax-tensorarray[tensorflow]'")

PROGRAMS = int(os.environ.get("TENSORFLOW_PROGRAMS", "150"))

#: Programs with loops or branches in each other whose gradient TensorFlow 2.21 does not finish to trace: it waits for
#: itself. Of the first 150, all others were seen to finish.
TENSORFLOW_HANGS = frozenset({37, 46, 58, 84, 116, 121})
SEARCHED = 150

#: Most rows that an array with dynamic_size=True gets.
LIMIT = 7

#: Rows of the inputs.
ROWS, MORE_ROWS = 5, 3


class Spec(NamedTuple):
    """How an array is made."""

    size: int
    dynamic: bool
    infer_shape: bool
    element_shape: tuple[int, ...] | None


# --- the oracle ------------------------------------------------------------------------------------------------


class Rows:
    """A TensorArray in NumPy: a list of rows, copied by every update. None is a row not yet written."""

    def __init__(self, dtype, rows, element_shape):
        self.dtype, self.rows, self.element_shape = np.dtype(dtype), list(rows), element_shape

    def _with(self, rows):
        return Rows(self.dtype, rows, self.element_shape)

    def write(self, index, value):
        assert index >= 0
        rows = self.rows + [None] * (int(index) + 1 - len(self.rows))
        rows[int(index)] = np.asarray(value, self.dtype)
        return self._with(rows)

    def read(self, index):
        assert 0 <= index < len(self.rows)
        row = self.rows[int(index)]
        return np.zeros(self.element_shape, self.dtype) if row is None else row

    def gather(self, indices):
        return np.array([self.read(i) for i in indices], self.dtype).reshape(len(indices), *self.element_shape)

    def stack(self):
        return self.gather(range(len(self.rows)))

    def concat(self):
        return np.concatenate([self.read(i) for i in range(len(self.rows))])

    def scatter(self, indices, value):
        for index, row in zip(indices, value, strict=True):
            self = self.write(index, row)
        return self

    def unstack(self, value):
        return self._with(np.asarray(value, self.dtype))

    def split(self, value, lengths):
        return self._with(np.split(value, np.cumsum(lengths)[:-1]))

    def size(self):
        return len(self.rows)

    def identity(self):
        return self


# --- the three sides -------------------------------------------------------------------------------------------


class NumPy:
    """The oracle."""

    math = np

    def array(self, spec, dtype, elem):
        return Rows(dtype, [None] * spec.size, elem)

    def ensure_shape(self, value, shape):
        assert value.shape == shape
        return value

    def stack(self, ta, rows):
        return ta.stack()

    def concat(self, ta, length):
        return ta.concat()

    gather = staticmethod(Rows.gather)
    scatter = staticmethod(Rows.scatter)

    def loop(self, how, steps, body, carry):
        for i in range(steps):
            carry = body(i, carry)
        return carry

    def cond(self, pred, yes, no, carry):
        return yes(carry) if pred else no(carry)


class TensorFlow:
    """tf.function. `one_by_one`: indices that repeat are read and written by themselves."""

    math = SimpleNamespace(
        **{name: getattr(tf, name) for name in ("sin", "tanh", "stack", "maximum", "reshape")},
        sum=tf.reduce_sum,
        logical_xor=tf.math.logical_xor,
    )

    def __init__(self, one_by_one=False):
        self.one_by_one = one_by_one

    def ensure_shape(self, value, shape):
        return tf.ensure_shape(value, shape)

    def array(self, spec, dtype, elem):
        return tf.TensorArray(
            tf.as_dtype(dtype),
            spec.size,
            spec.dynamic,
            clear_after_read=False,
            infer_shape=spec.infer_shape,
            element_shape=spec.element_shape,
        )

    def stack(self, ta, rows):
        return ta.stack()

    def concat(self, ta, length):
        return ta.concat()

    def gather(self, ta, indices):
        if self.one_by_one:
            return tf.stack([ta.read(i) for i in tf.unstack(indices)])
        return ta.gather(indices)

    def scatter(self, ta, indices, value):
        if self.one_by_one:
            for k, index in enumerate(tf.unstack(indices)):
                ta = ta.write(index, value[k])
            return ta
        return ta.scatter(indices, value)

    def loop(self, how, steps, body, carry):
        return tf.while_loop(lambda i, _: i < steps, lambda i, c: (i + 1, body(i, c)), (tf.constant(0), carry))[1]

    def cond(self, pred, yes, no, carry):
        return tf.cond(pred, lambda: yes(carry), lambda: no(carry))


class JAX:
    """This library. `bounded`: arrays of dynamic size are given a max_size."""

    math = jnp

    def __init__(self, bounded=True):
        self.bounded = bounded
        self.padding = []

    def ensure_shape(self, value, shape):
        assert value.shape == shape
        return value

    def array(self, spec, dtype, elem):
        return jt.TensorArray(
            dtype,
            spec.size,
            spec.dynamic,
            clear_after_read=False,
            infer_shape=spec.infer_shape,
            element_shape=spec.element_shape,
            max_size=LIMIT if spec.dynamic and self.bounded else None,
        )

    def _trimmed(self, take, ta, length):
        """All rows: as many as there are, or as there may be where that is known only at run time."""
        if not isinstance(ta.size(), jax.core.Tracer):
            return take(ta)
        value = take(ta, pad=True)
        self.padding.append(jnp.any(value[length:] != 0))
        return value[:length]

    def stack(self, ta, rows):
        return self._trimmed(jt.TensorArray.stack, ta, rows)

    def concat(self, ta, length):
        return self._trimmed(jt.TensorArray.concat, ta, length)

    def gather(self, ta, indices):
        return ta.gather(indices)

    def scatter(self, ta, indices, value):
        return ta.scatter(indices, value)

    def loop(self, how, steps, body, carry):
        if how == "scan":
            return lax.scan(lambda c, i: (body(i, c), None), carry, jnp.arange(steps))[0]
        if how == "while":
            steps = lax.optimization_barrier(steps)
        return lax.fori_loop(0, steps, body, carry)

    def cond(self, pred, yes, no, carry):
        return lax.cond(pred, yes, no, carry)


# --- the interpreter -------------------------------------------------------------------------------------------


class Body(NamedTuple):
    """A body of a loop or a branch: instructions, and which of its arrays and rows it hands on."""

    instructions: tuple[Any, ...]
    arrays: tuple[int, ...]
    row: int


class Env:
    """What a program has made so far. Instructions name arrays, rows and blocks by their position here."""

    def __init__(self, arrays, rows, blocks, numbers, i):
        self.arrays, self.rows, self.blocks = list(arrays), list(rows), list(blocks)
        self.numbers, self.i = numbers, i
        self.others, self.sizes = [], []


def position(xp, env, spec, ta):
    """An index: ("known", 3), ("traced", 3), ("affine", m, a, modulus or None for the size), ("earlier", k)."""
    match spec:
        case ("known", j):
            return j
        case ("traced", j):
            return env.numbers[j]
        case ("affine", m, a, modulus):
            return (env.i * m + a) % (ta.size() if modulus is None else modulus)
        case ("earlier", k):
            return xp.math.maximum(env.i - k, 0) % ta.size()


def positions(xp, env, specs, ta):
    """Indices of a gather or scatter."""
    values = [position(xp, env, spec, ta) for spec in specs]
    return values if all(spec[0] == "known" for spec in specs) else xp.math.stack(values)


def mix(xp, how, a, b):
    """A row made of two others."""
    match how:
        case "sin":
            return xp.math.sin(a) + 0.5 * b
        case "product":
            return xp.math.tanh(a) * b
        case "difference":
            return 0.75 * a - b
        case "int":
            return a * 3 - b
        case "bool":
            return xp.math.logical_xor(a, b)


def step(xp, program, instruction, env):
    """Interpret one instruction."""
    arrays, rows, blocks, elem = env.arrays, env.rows, env.blocks, program.elem
    match instruction:
        case ("array", spec):
            arrays.append(xp.array(spec, program.dtype, elem))
        case ("write", a, index, r):
            arrays.append(arrays[a].write(position(xp, env, index, arrays[a]), rows[r]))
        case ("read", a, index):
            rows.append(xp.ensure_shape(arrays[a].read(position(xp, env, index, arrays[a])), elem))
        case ("mix", how, r, s):
            rows.append(mix(xp, how, rows[r], rows[s]))
        case ("stack", a, size):
            blocks.append(xp.ensure_shape(xp.stack(arrays[a], size), (size, *elem)))
        case ("gather", a, indices):
            rows_read = xp.gather(arrays[a], positions(xp, env, indices, arrays[a]))
            blocks.append(xp.ensure_shape(rows_read, (len(indices), *elem)))
        case ("scatter", a, indices, b):
            arrays.append(xp.scatter(arrays[a], positions(xp, env, indices, arrays[a]), blocks[b][: len(indices)]))
        case ("unstack", a, b, size):
            arrays.append(arrays[a].unstack(blocks[b][:size]))
        case ("split", a, b, size):
            flat = xp.math.reshape(blocks[b][:size], (-1, *elem[1:]))
            arrays.append(arrays[a].split(flat, [elem[0]] * size))
        case ("concat", a, size):
            blocks.append(xp.math.reshape(xp.concat(arrays[a], size * elem[0]), (size, *elem)))
        case ("ragged", b, size, lengths, read, write, r):
            flat = xp.math.reshape(blocks[b][:size], (-1, *elem[1:]))
            ta = xp.array(Spec(len(lengths), False, False, None), program.dtype, None).split(flat, lengths)
            env.others.append(ta.read(read))
            env.others.append((ta if write is None else ta.write(write, rows[r])).concat())
        case ("sum", b):
            rows.append(mix(xp, "sin", xp.math.sum(blocks[b], 0), rows[0]))
        case ("size", a):
            env.sizes.append(arrays[a].size())
        case ("identity", a):
            arrays.append(arrays[a].identity())
        case ("loop", how, steps, reverse, a, r, body):

            def once(i, carry):
                i = steps - 1 - i if reverse else i
                return inside(xp, program, body, env, a, carry, i if env.i is None else i + 3 * env.i)

            carry = xp.loop(how, steps, once, (tuple(arrays[k] for k in a), rows[r]))
            arrays += carry[0]
            rows.append(carry[1])
        case ("cond", pred, a, r, yes, no):
            match pred:
                case ("positive", k):
                    pred = xp.math.sum(rows[k]) > 0
                case ("number", k):
                    pred = env.numbers[k] % 2 == 0
                case ("step",):
                    pred = env.i % 2 == 0
            branches = [lambda carry, body=b: inside(xp, program, body, env, a, carry, env.i) for b in (yes, no)]
            carry = xp.cond(pred, *branches, (tuple(arrays[k] for k in a), rows[r]))
            arrays += carry[0]
            rows.append(carry[1])
        case _:
            raise AssertionError(instruction)


def inside(xp, program, body, env, a, carry, i):
    """Run a body. Its arrays are the carried ones, then the outer ones that are not carried."""
    arrays, row = carry
    others = [array for k, array in enumerate(env.arrays) if k not in a]
    inner = Env([*arrays, *others], [row, *env.rows], env.blocks, env.numbers, i)
    for instruction in body.instructions:
        step(xp, program, instruction, inner)
    return tuple(inner.arrays[k] for k in body.arrays), inner.rows[body.row]


class Program(NamedTuple):
    """A program: what its rows are, its instructions, and which of its rows and blocks it returns."""

    dtype: str
    elem: tuple[int, ...]
    instructions: tuple[Any, ...]
    rows: tuple[int, ...]
    blocks: tuple[int, ...]


def start(x, y, z, numbers):
    """What a program begins with."""
    return Env([], [y, x[0], x[3]], [x, z], numbers, None)


def run(xp, program, x, y, z, numbers):
    """The outputs of a program, and the sizes that it asked for."""
    env = start(x, y, z, numbers)
    for instruction in program.instructions:
        step(xp, program, instruction, env)
    return [*(env.rows[k] for k in program.rows), *(env.blocks[k] for k in program.blocks), *env.others], env.sizes


# --- the generator ---------------------------------------------------------------------------------------------


class Known(NamedTuple):
    """What is known of an array when the program is drawn."""

    spec: Spec
    size: int  #: in a body, the least that it can be
    shaped: bool  #: whether the shape of its rows is known
    written: frozenset[int] = frozenset()
    lineage: int = 0

    @property
    def loose(self):
        """Whether its rows could be of different shapes."""
        return not self.spec.infer_shape and self.spec.element_shape is None


class Scope:
    """What a body or the program can use so far."""

    def __init__(self, arrays, rows, blocks, looping, depth):
        self.arrays, self.rows, self.blocks, self.looping, self.depth = list(arrays), rows, list(blocks), looping, depth


class Generator:
    """Draws a program from a seed."""

    def __init__(self, seed):
        self.rng = rng = np.random.default_rng(seed)
        self.dtype = ["float64"] * 7 + ["int32", "int32", "bool"]
        self.dtype = self.dtype[rng.integers(10)]
        self.elem = [(), (2,), (2, 3)][rng.integers(3)]
        self.lineages = 0
        #: whether an index occurs more than once in a gather or a scatter, and whether a scatter makes an array longer
        self.repeats = self.scatter_grows = False
        self.loops = self.branches = self.nested = False

    @property
    def one_by_one(self):
        """Whether TensorFlow has no right gradient unless rows are gathered and scattered one by one: see DEFECTS."""
        return self.repeats or self.scatter_grows

    def one_of(self, choices):
        return choices[self.rng.integers(len(choices))]

    def chance(self, p):
        return self.rng.random() < p

    def inputs(self):
        def values(shape):
            if self.dtype == "float64":
                return self.rng.standard_normal(shape)
            return self.rng.integers(0, 2 if self.dtype == "bool" else 100, shape).astype(self.dtype)

        shapes = (ROWS, *self.elem), self.elem, (MORE_ROWS, *self.elem)
        return [np.asarray(values(shape), self.dtype) for shape in shapes] + [np.arange(LIMIT + 1, dtype=np.int32)]

    def program(self):
        """A program and its inputs."""
        inputs = self.inputs()
        env = start(*inputs)
        partial = Program(self.dtype, self.elem, (), (), ())
        scope = Scope([], len(env.rows), [len(b) for b in env.blocks], False, 0)
        instructions = []
        length = self.rng.integers(8, 17)
        while len(instructions) < length:
            kinds = ["array"] if not scope.arrays else [*TOP_LEVEL]
            instruction = self.draw(self.one_of(kinds), scope)
            if instruction is not None:
                instructions.append(instruction)
                step(NumPy(), partial, instruction, env)
                for k, array in enumerate(env.arrays):
                    written = frozenset(i for i, row in enumerate(array.rows) if row is not None)
                    scope.arrays[k] = scope.arrays[k]._replace(size=len(array.rows), written=written)
                scope.blocks = [len(b) for b in env.blocks]
        last = len(scope.arrays) - 1
        for k in sorted({last, *self.rng.integers(0, last + 1, 2).tolist()}):
            if self.can_stack(scope.arrays[k]):
                instructions.append(("stack", k, scope.arrays[k].size))
                scope.blocks.append(scope.arrays[k].size)
        rows = sorted({scope.rows - 1, *self.rng.integers(0, scope.rows, 2).tolist()})
        blocks = sorted(
            {*range(len(env.blocks), len(scope.blocks)), *self.rng.integers(0, len(scope.blocks), 2).tolist()}
        )
        return partial._replace(instructions=tuple(instructions), rows=tuple(rows), blocks=tuple(blocks)), inputs

    def can_stack(self, array):
        return len(array.written) == array.size > 0 if array.loose else array.shaped

    def read_position(self, array, scope):
        choices = [("known", j) for j in sorted(array.written)] if array.loose else []
        if not array.loose and array.shaped and array.size:
            j = int(self.rng.integers(array.size))
            choices += [("known", j), ("traced", j)]
            if scope.looping:
                m, a = (int(n) for n in self.rng.integers(1, 5, 2))
                choices += [("affine", m, a, None), ("affine", 1, 0, None), ("earlier", 1), ("earlier", 2)]
        return self.one_of(choices) if choices else None

    def write_position(self, array, scope):
        size = LIMIT if array.spec.dynamic else array.size
        if not size:
            return None
        choices = [("known", int(self.rng.integers(size)))]
        if not array.loose:
            choices.append(("traced", int(self.rng.integers(size))))
        if scope.looping and not array.loose:
            m, a = (int(n) for n in self.rng.integers(1, 5, 2))
            modulus = LIMIT if array.spec.dynamic else None
            choices += [("affine", m, a, modulus), ("affine", 1, 0, modulus), ("affine", 1, 0, modulus)]
        return self.one_of(choices)

    def draw(self, kind, scope):
        """An instruction, or None where this kind is not possible; `scope` knows its results then."""
        top = scope.depth == 0
        if kind == "array":
            if len(scope.arrays) > 20 or (not top and not self.chance(0.3)):
                return None
            dynamic = self.chance(0.3)
            given, infer = self.one_of([(True, True), (True, False), (False, True), (False, not top)])
            size = int(self.rng.integers(0, 4) if dynamic else self.rng.integers(1, 6))
            spec = Spec(size, dynamic, infer, self.elem if given else None)
            self.lineages += 1
            scope.arrays.append(Known(spec, size, given, frozenset(), self.lineages))
            return ("array", spec)
        if kind == "mix":
            how = {"int32": ["int"], "bool": ["bool"]}.get(self.dtype, ["sin", "product", "difference"])
            scope.rows += 1
            return ("mix", self.one_of(how), *self.rng.integers(0, scope.rows - 1, 2).tolist())
        if kind in ("loop", "cond"):
            return self.draw_nested(kind, scope)
        if kind == "sum":
            if self.dtype != "float64":
                return None
            scope.rows += 1
            return ("sum", int(self.rng.integers(len(scope.blocks))))
        b = int(self.rng.integers(len(scope.blocks)))
        if kind == "ragged":
            if not self.elem or not top or not scope.blocks[b]:
                return None
            total = scope.blocks[b] * self.elem[0]
            cuts = sorted(self.rng.integers(0, total + 1, 2).tolist())
            lengths = (cuts[0], cuts[1] - cuts[0], total - cuts[1])
            read = int(self.rng.integers(3))
            # TensorFlow has no gradient for a row over one of another shape: see DEFECTS.
            write = None if self.dtype == "float64" else (read + 1) % 3
            return ("ragged", b, scope.blocks[b], lengths, read, write, int(self.rng.integers(scope.rows)))

        # Mostly the last array, so that there are long chains, or else any earlier one.
        usable = [k for k, array in enumerate(scope.arrays) if top or not array.loose]
        if not usable:
            return None
        a = usable[-1] if self.chance(0.6) else self.one_of(usable)
        array = scope.arrays[a]
        exact = top or not array.spec.dynamic
        shaped = array.shaped or array.spec.infer_shape
        if kind == "write":
            index = self.write_position(array, scope)
            if index is None:
                return None
            least = index[1] + 1 if index[0] in ("known", "traced") else 1
            scope.arrays.append(array._replace(size=max(array.size, least), shaped=shaped))
            return ("write", a, index, int(self.rng.integers(scope.rows)))
        if kind == "read":
            index = self.read_position(array, scope)
            if index is None:
                return None
            scope.rows += 1
            return ("read", a, index)
        if kind == "stack":
            if not exact or not self.can_stack(array):
                return None
            scope.blocks.append(array.size)
            return ("stack", a, array.size)
        if kind == "concat":
            if not self.elem or not exact or not self.can_stack(array) or not array.size:
                return None
            scope.blocks.append(array.size)
            return ("concat", a, array.size)
        if kind == "gather":
            if (first := self.read_position(array, scope)) is None:
                return None
            indices = [first] + [self.read_position(array, scope) for _ in range(self.rng.integers(0, 4))]
            indices = self.distinct(indices)
            scope.blocks.append(len(indices))
            return ("gather", a, indices)
        if kind == "scatter":
            grows = array.spec.dynamic and not array.loose and self.chance(0.15)
            draw = self.write_position if grows else self.read_position
            if not array.loose and not array.shaped:
                return None
            indices = [draw(array, scope) for _ in range(self.rng.integers(1, 5))]
            if None in indices or not scope.blocks[b]:
                return None
            indices = self.distinct(indices[: scope.blocks[b]])
            self.scatter_grows |= grows
            least = max(index[1] + 1 if index[0] in ("known", "traced") else 1 for index in indices)
            scope.arrays.append(array._replace(size=max(array.size, least), shaped=shaped))
            return ("scatter", a, indices, b)
        if kind in ("unstack", "split"):
            size = scope.blocks[b] if array.spec.dynamic else array.size
            if (array.spec.dynamic and not top) or not 0 < size <= min(scope.blocks[b], LIMIT):
                return None
            if kind == "split" and not self.elem:
                return None
            scope.arrays.append(array._replace(size=size, shaped=shaped))
            return (kind, a, b, size)
        if kind == "size":
            return ("size", a) if top else None
        assert kind == "identity"
        scope.arrays.append(array)
        return ("identity", a)

    def distinct(self, indices):
        """Mostly without repetitions."""
        if self.chance(0.7):
            indices = list(
                {index[1] if index[0] in ("known", "traced") else index: index for index in indices}.values()
            )
        numbers = [index[1] for index in indices if index[0] in ("known", "traced")]
        self.repeats |= len(set(numbers)) < len(indices) > 1
        return tuple(indices)

    def draw_nested(self, kind, scope):
        fit = [k for k, array in enumerate(scope.arrays) if array.shaped and not array.loose]
        if not fit or scope.depth == 2:
            return None
        self.nested |= scope.depth > 0
        a = tuple(sorted({fit[-1], *(self.one_of(fit) for _ in range(self.rng.integers(0, 2)))}))
        r = int(self.rng.integers(scope.rows))
        carried = [scope.arrays[k] for k in a]
        if kind == "loop":
            self.loops = True
            # A slot may be handed another array of its kind.
            carried = [c._replace(size=min(d.size for d in carried if d.spec == c.spec)) for c in carried]
            how = self.one_of(["fori", "scan", "scan"] if self.dtype == "float64" else ["fori", "scan", "while"])
            steps = int(self.rng.integers(1, 6 if scope.depth == 0 else 4))
            instruction = ("loop", how, steps, self.chance(0.3), a, r, self.body(scope, carried, a, True))
        else:
            self.branches = True
            preds = [("number", int(self.rng.integers(LIMIT)))]
            preds += [("step",)] * 2 if scope.looping else []
            preds += [("positive", int(self.rng.integers(scope.rows)))] if self.dtype == "float64" else []
            bodies = self.body(scope, carried, a, scope.looping), self.body(scope, carried, a, scope.looping)
            instruction = ("cond", self.one_of(preds), a, r, *bodies)
        scope.arrays += [c._replace(lineage=scope.arrays[k].lineage) for c, k in zip(carried, a, strict=True)]
        scope.rows += 1
        return instruction

    def body(self, scope, carried, a, looping):
        others = [array for k, array in enumerate(scope.arrays) if k not in a]
        inner = Scope([*carried, *others], scope.rows + 1, scope.blocks, looping, scope.depth + 1)
        instructions = []
        length = self.rng.integers(2, 7)
        for _ in range(50):
            if len(instructions) < length and (drawn := self.draw(self.one_of(IN_BODIES), inner)) is not None:
                instructions.append(drawn)
        kept = []
        for slot in carried:
            same = [k for k, v in enumerate(inner.arrays) if v.spec == slot.spec and v.shaped and v.size >= slot.size]
            versions = [k for k in same if inner.arrays[k].lineage == slot.lineage]
            kept.append(versions[-1] if self.chance(0.75) else self.one_of(versions if self.chance(0.6) else same))
        row = inner.rows - 1 if self.chance(0.7) else int(self.rng.integers(inner.rows))
        return Body(tuple(instructions), tuple(kept), row)


TOP_LEVEL = (
    *("array", "array", "write", "write", "write", "read", "read", "mix", "stack", "gather", "scatter", "scatter"),
    *("unstack", "split", "concat", "ragged", "size", "identity", "loop", "loop", "cond"),
)
IN_BODIES = (
    *("array", "write", "write", "write", "write", "read", "read", "read", "read", "mix", "mix", "stack", "gather"),
    *("scatter", "unstack", "split", "concat", "sum", "identity", "loop", "cond"),
)


# --- values and gradients on each side -------------------------------------------------------------------------


def weights(outputs):
    """Coefficients of a linear and a quadratic term of every output."""
    rng = np.random.default_rng(0)
    return [tuple(rng.standard_normal((2, *out.shape))) for out in outputs]


def loss(xp, outputs, coefficients):
    return sum(xp.math.sum(a * o + 0.5 * b * o * o) for o, (a, b) in zip(outputs, coefficients, strict=True))


def in_tensorflow(program, inputs, coefficients=None, **options):
    """Outputs, sizes, and the gradient of the loss if there are coefficients."""
    xp = TensorFlow(**options)

    @tf.function(autograph=False)
    def f(*inputs):
        if coefficients is None:
            return *run(xp, program, *inputs), []
        with tf.GradientTape() as tape:
            tape.watch(inputs[:-1])
            outputs, sizes = run(xp, program, *inputs)
            total = loss(xp, outputs, coefficients)
        return outputs, sizes, tape.gradient(total, inputs[:-1], unconnected_gradients="zero")

    return tf.nest.map_structure(lambda t: t.numpy(), f(*map(tf.constant, inputs)))


def in_jax(program, inputs, coefficients=None, jit=True, **options):
    """As `in_tensorflow`, for this library; also whether all padding is zero."""

    def f(*inputs):
        xp = JAX(**options)
        outputs, sizes = run(xp, program, *inputs)
        total = 0.0 if coefficients is None else loss(xp, outputs, coefficients)
        return total, (outputs, sizes, xp.padding)

    if coefficients is not None:
        f = jax.grad(f, (0, 1, 2), has_aux=True)
    first, (outputs, sizes, padding) = (jax.jit(f) if jit else f)(*map(jnp.asarray, inputs))
    assert not np.any(padding)
    return jax.device_get((outputs, sizes, [] if coefficients is None else list(first)))


def assert_equal(got, expected, tolerance=1e-12):
    """Equal in structure, shapes, dtypes and values: floats within `tolerance` of the largest, others exactly."""
    assert len(got) == len(expected)
    for name, g, e in zip(("outputs", "sizes", "gradient"), got, expected, strict=False):
        assert len(g) == len(e), name
        for k, (a, b) in enumerate(zip(g, e, strict=True)):
            assert np.shape(a) == np.shape(b), f"{name} {k}"
            if name == "sizes":
                assert a == b
                continue
            assert a.dtype == b.dtype, f"{name} {k}"
            slack = tolerance * max(1.0, np.abs(b).max(initial=0)) if a.dtype == np.float64 else 0
            np.testing.assert_allclose(a, b, rtol=0, atol=slack, err_msg=f"{name} {k}", strict=True)


def drawn(seed):
    """A generator with its program, the inputs, the coefficients of the loss, and what the oracle answers."""
    generator = Generator(seed)
    program, inputs = generator.program()
    outputs, sizes = run(NumPy(), program, *inputs)
    coefficients = weights(outputs) if generator.dtype == "float64" else None
    return generator, program, inputs, coefficients, (outputs, sizes)


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_random_program_gives_what_tensorflow_gives(seed):
    generator, program, inputs, coefficients, answer = drawn(seed)
    here = in_jax(program, inputs, coefficients)
    assert_equal(here[:2], answer)
    if not generator.scatter_grows:
        assert_equal(here[:2], in_tensorflow(program, inputs)[:2])
    if coefficients is not None and seed not in TENSORFLOW_HANGS and not (seed >= SEARCHED and generator.nested):
        assert_equal(here, in_tensorflow(program, inputs, coefficients, one_by_one=generator.one_by_one))


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_random_program_without_a_loop_gives_the_same_eagerly(seed):
    generator, program, inputs, coefficients, answer = drawn(seed)
    if generator.loops:
        return
    eager = in_jax(program, inputs, coefficients, jit=False)
    assert_equal(eager[:2], answer)
    assert_equal(eager, in_jax(program, inputs, coefficients))
    if not generator.branches:
        assert_equal(in_jax(program, inputs, coefficients, jit=False, bounded=False), eager)


@pytest.mark.parametrize("seed", sorted(TENSORFLOW_HANGS))
def test_gradient_that_tensorflow_does_not_finish_is_that_of_finite_differences(seed):
    _, program, inputs, coefficients, _ = drawn(seed)

    def total(*args):
        return loss(NumPy(), run(NumPy(), program, *args, inputs[3])[0], coefficients)

    expected = oracle.gradient(total, inputs[:3])
    for g, e in zip(in_jax(program, inputs, coefficients)[2], expected, strict=True):
        np.testing.assert_allclose(g, e, rtol=0, atol=1e-6 * max(1, np.abs(e).max()))


# --- where TensorFlow answers something else ---------------------------------------------------------------------

X = np.array([1.0, 2.0, 3.0])


def new(ta, size=3, dynamic=False, **options):
    """An array of float64: `ta` is TensorFlow's class or ours."""
    return ta("float64", size, dynamic, clear_after_read=False, **options)


class Defect(NamedTuple):
    """A program on which TensorFlow differs: `ta` is the class, `x` the input; and where it does."""

    program: Any
    answer: Any  #: value, from NumPy
    where: str  #: "eager", "graph" or "XLA"
    what: str  #: "value", "gradient" or "error"


DEFECTS = {
    "gather of a row twice: the gradient has one of the two": Defect(
        lambda ta, x: new(ta).unstack(x).gather([0, 0, 1]), lambda x: x[[0, 0, 1]], "graph", "gradient"
    ),
    "scatter of two rows to one place: both get its gradient": Defect(
        lambda ta, x: new(ta).scatter([1, 1], x[:2]).stack(), lambda x: [0 * x[0], x[1], 0 * x[0]], "graph", "gradient"
    ),
    "scatter past the end of an array of dynamic size": Defect(
        lambda ta, x: new(ta, 1, True, max_size=4).scatter([0, 3], x[:2]).stack(),
        lambda x: [x[0], 0 * x[0], 0 * x[0], x[1]],
        "graph",
        "error",
    ),
    "a row over one of another shape": Defect(
        lambda ta, x: new(ta, 2, infer_shape=False).split(x, [1, 2]).write(1, x[:1]).concat(),
        lambda x: x[[0, 0]],
        "graph",
        "error",
    ),
    "a write changes the old version": Defect(
        lambda ta, x: (lambda old: old.write(0, x[1]).read(0) + 10 * old.read(0))(new(ta).unstack(x)),
        lambda x: x[1] + 10 * x[0],
        "eager",
        "value",
    ),
    "stack of rows past the first size": Defect(
        lambda ta, x: new(ta, 1, True, element_shape=(), max_size=3).write(0, x[0]).write(2, x[2]).stack(),
        lambda x: [x[0], 0 * x[0], x[2]],
        "XLA",
        "value",
    ),
    "scatter": Defect(
        lambda ta, x: new(ta, element_shape=()).scatter([2, 0], x[:2]).stack(),
        lambda x: [x[1], 0 * x[0], x[0]],
        "XLA",
        "error",
    ),
    "split into rows of different lengths": Defect(
        lambda ta, x: new(ta, 2, infer_shape=False).split(x, [1, 2]).concat(), lambda x: x, "XLA", "error"
    ),
}


def tensorflow_array(*args, max_size=None, **options):
    return tf.TensorArray(*args, **options)


def answer_of_tensorflow(defect):
    """Value, and gradient of its sum weighted with 1, 2, ... unless the value is wrong already; or the error."""

    def f(x):
        if defect.what == "value":
            return tf.convert_to_tensor(defect.program(tensorflow_array, x)), x
        with tf.GradientTape() as tape:
            tape.watch(x)
            out = tf.convert_to_tensor(defect.program(tensorflow_array, x))
            total = tf.reduce_sum(out * tf.cast(tf.reshape(1 + tf.range(tf.size(out)), tf.shape(out)), out.dtype))
        return out, tape.gradient(total, x, unconnected_gradients="zero")

    if defect.where != "eager":
        f = tf.function(f, autograph=False, jit_compile=defect.where == "XLA")
    try:
        return [t.numpy() for t in f(tf.constant(X))]
    except tf.errors.OpError as error:
        return error


def weighted(out):
    return (out * (1 + np.arange(np.size(out))).reshape(np.shape(out))).sum()


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", DEFECTS)
def test_our_answer_is_right_where_tensorflow_differs(name, jit):
    program, answer, *_ = DEFECTS[name]

    def f(x):
        out = program(jt.TensorArray, x)
        return weighted(out), out

    gradient, out = (jax.jit if jit else lambda f: f)(jax.grad(f, has_aux=True))(jnp.asarray(X))
    np.testing.assert_array_equal(out, answer(X))
    (expected,) = oracle.gradient(lambda x: weighted(np.asarray(answer(x))), [X])
    np.testing.assert_allclose(gradient, expected, atol=1e-8)


@pytest.mark.parametrize("name", DEFECTS)
def test_tensorflow_still_differs(name):
    defect = DEFECTS[name]
    got = answer_of_tensorflow(defect)
    if defect.what == "error":
        assert isinstance(got, tf.errors.OpError)
        return
    value, gradient = got
    right = np.asarray(defect.answer(X))
    if defect.what == "value":
        assert value.shape != right.shape or np.any(value != right)
    else:
        np.testing.assert_array_equal(value, right)
        (expected,) = oracle.gradient(lambda x: weighted(np.asarray(defect.answer(x))), [X])
        assert np.abs(gradient - expected).max() > 0.5
