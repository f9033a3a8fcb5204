"""PyTorch, eager: rows written in place, under autograd too, and `torch.stack` of a list of rows."""

import platform

import numpy as np
import torch

from benchmarks.inputs import inputs
from benchmarks.rivals import Prepared, Unsupported
from benchmarks.rivals import programs as texts


def versions():
    return {"Python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}


class InPlaceRows:
    """A tensor whose rows are assigned. A row that is read is copied: autograd may need it after it is overwritten."""

    def __init__(self, tensor):
        self.tensor = tensor

    def read(self, i):
        return self.tensor[i].clone()

    def write(self, i, value):
        self.tensor[i] = value
        return self

    def dense(self):
        return self.tensor


class ListRows:
    """A Python list of rows, stacked at the end."""

    def __init__(self, rows):
        self.rows = rows

    def read(self, i):
        return self.rows[i]

    def write(self, i, value):
        self.rows[i] = value
        return self

    def append(self, value):
        self.rows.append(value)
        return self

    def dense(self):
        return torch.stack(self.rows)


class Input:
    """The rows of `x`. They are unbound once, since each `x[i]` has a gradient of the size of `x`."""

    def __init__(self, x):
        self.tensor, self.shape, self.rows = x, x.shape, x.unbind()

    def __getitem__(self, i):
        return self.rows[i]


class InTorch:
    """What the programs are made of. `hold` is how this rival holds rows, `unstack` those of the input."""

    sum, tanh, sin, cos = (staticmethod(f) for f in (torch.sum, torch.tanh, torch.sin, torch.cos))
    sigmoid, matmul, ravel = staticmethod(torch.sigmoid), staticmethod(torch.matmul), staticmethod(torch.ravel)
    concat, top_k, array = staticmethod(torch.cat), staticmethod(torch.topk), staticmethod(torch.tensor)

    def __init__(self, hold, unstack):
        self.hold, self.unstack = hold, unstack

    def zeros(self, x):
        return self.hold(torch.zeros_like(x.tensor))

    def ones(self, x):
        return self.hold(torch.ones_like(x.tensor))

    def empty(self, size, shape, integer=False):
        return self.hold(torch.zeros((size, *shape), dtype=torch.int64 if integer else torch.float32))

    def growing(self, x):
        if self is not LIST:
            raise Unsupported("no tensor that grows")
        return ListRows([])

    @staticmethod
    def dense(rows):
        return rows.dense()

    @staticmethod
    def loop(stop, body, carry, start=0):
        for i in range(start, stop):
            carry = body(i, *carry)
        return carry

    @staticmethod
    def matvec(w, v, transpose=False):
        return v @ w if transpose else w @ v

    @staticmethod
    def log_softmax(x):
        return torch.log_softmax(x, -1)

    @staticmethod
    def take(rows, index):
        return rows[index]

    @staticmethod
    def cast(i):
        return i.to(torch.float32) if isinstance(i, torch.Tensor) else float(i)

    @staticmethod
    def zeros_of(shape, integer=False):
        return torch.zeros(shape, dtype=torch.int64 if integer else torch.float32)


ALL_THREADS = torch.get_num_threads()
IN_PLACE = InTorch(InPlaceRows, lambda x: InPlaceRows(x.tensor.clone()))
LIST = InTorch(lambda tensor: ListRows(list(tensor.unbind())), lambda x: ListRows(list(x.rows)))


def _eager_write(xp, T, row):
    value = torch.arange(row, dtype=torch.float32)

    def run():
        rows = xp.empty(T, (row,))
        for i in range(T):
            rows = rows.write(i, value)
        return rows.dense()

    return Prepared(run, lambda stacked: [stacked.numpy()])


def prepare(case, rival, derivative, T, row):
    xp = IN_PLACE if rival == "torch_rows" else LIST
    # What is as small as a buffer of such rows is copied sooner than two threads have found each other.
    torch.set_num_threads(ALL_THREADS if row >= 2**16 else 1)
    if case == "eager_write":
        return _eager_write(xp, T, row)
    program = getattr(texts, case)
    args = [torch.from_numpy(a) for a in inputs(case, T, row)]

    def run():
        if derivative == "forward":
            with torch.no_grad():
                return [program(xp, Input(args[0]), *args[1:])]
        leaves = [a.detach().requires_grad_() for a in args]
        total = program(xp, Input(leaves[0]), *leaves[1:])
        return [total.detach(), *torch.autograd.grad(total, leaves)]

    return Prepared(run, lambda found: [t.numpy() for t in found])
