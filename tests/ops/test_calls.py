"""Handlers that are called with anything: each call is an error that names an argument, or means what NumPy says.

Anybody can write a call with `jax.ffi.ffi_call`, or change one in an export. Here a right call of each handler is
taken, and one thing about it is changed. `calls.cc` makes such calls under sanitizers, of the CPU's handlers and of the
GPU's; a few are made with XLA too.
"""

import copy
import functools
import io
import math
import os
import re
import struct
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cpp
import jax
import jax.numpy as jnp
import jaxlib
import ml_dtypes
import numpy as np
import oracle
import pytest
from waiting import finish

import jax_tensorarray  # noqa: F401  registers the handlers

HERE = Path(__file__).parent

#: Operands and results of each handler: their names in messages, and dimensions. B: the batch, T: rows, M: the parts
#: of a row, R: what a row or a part has, I: positions of the index.
ROWS = ("buffer: B T R", "index: B I")
UPDATE = (*ROWS, "value: B I R")
SIGNATURES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "read": (ROWS, ("result: B I R",)),
    "write": (UPDATE, ("result buffer: B T R",)),
    "swap": (UPDATE, ("result buffer: B T R", "result old: B I R")),
    "add": (UPDATE, ("result buffer: B T R",)),
    "max": (UPDATE, ("result buffer: B T R",)),
    "mask": (("buffer: B T R", "size: B"), ("result buffer: B T R",)),
    "clear": (("buffer: B T R", "start: B", "stop: B"), ("result buffer: B T R",)),
    "read_part": (("buffer: B T M R", "index: B", "parts: B"), ("result: B M R",)),
    "write_part": (("buffer: B T M R", "index: B", "value: B M R", "parts: B"), ("result buffer: B T M R",)),
    "check": (("index: B I", "size: B"), ("result: B I",)),
    "fence": (("buffer: R",), ("result buffer: R",)),
    "empty": ((), ("result buffer: R",)),
}
ROW_OPS = ("read", "write", "swap", "add", "max")

#: XLA's numbers of dtypes. Those without a dtype here are packed, or none that a handler knows.
DTYPES = {
    1: np.bool_,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.uint8,
    7: np.uint16,
    8: np.uint32,
    9: np.uint64,
    10: np.float16,
    11: np.float32,
    12: np.float64,
    16: ml_dtypes.bfloat16,
    15: np.complex64,
    18: np.complex128,
    20: ml_dtypes.float8_e4m3fn,
}
INT4, TOKEN, UNKNOWN = 21, 17, 99
INTEGERS = range(2, 10)

TOO_LARGE = r"must have fewer than 2\^63"


@dataclass
class Array:
    """An operand or a result: what the call says of it. `data` is that of an operand."""

    dtype: int
    shape: tuple[int, ...]
    data: bytes = b""
    is_first_operand: bool = False

    @property
    def nbytes(self) -> int:
        count = int(np.prod(self.shape, dtype=object)) if min(self.shape, default=0) >= 0 else 0
        if self.dtype == INT4:
            return (count + 1) // 2 if count < 2**20 else 0
        width = np.dtype(DTYPES[self.dtype]).itemsize if self.dtype in DTYPES else 0
        return count * width if count < 2**20 else 0

    def numbers(self) -> np.ndarray:
        return np.frombuffer(self.data, DTYPES[self.dtype]).reshape(self.shape)


@dataclass
class Call:
    handler: str
    operands: list[Array]
    results: list[Array]
    attributes: dict[str, Any] = field(default_factory=dict)
    #: If the call is recorded in a CUDA graph: whether a replay begins a run, and the data of the operands.
    replays: list[tuple[bool, list[bytes]]] = field(default_factory=list)

    def encoded(self) -> bytes:
        parts = [_text(self.handler)]
        for arrays in (self.operands, self.results):
            parts.append(_numbers(len(arrays)))
            for x in arrays:
                parts.append(_numbers(x.dtype, len(x.shape), *x.shape, x.nbytes))
                parts.append(x.data if arrays is self.operands else _numbers(x.is_first_operand))
        parts.append(_numbers(len(self.attributes)))
        for name, value in sorted(self.attributes.items()):
            kind = {int: 0, bool: 1, str: 2, float: 3}[type(value)]
            parts += [_text(name), _numbers(kind)]
            parts.append(_text(value) if kind == 2 else struct.pack("d", value) if kind == 3 else _numbers(value))
        parts.append(_numbers(len(self.replays)))
        for begins_run, contents in self.replays:
            parts += [_numbers(begins_run), *contents]
        return b"".join(parts)

    @property
    def lines(self) -> list[str]:
        return str(self.attributes.get("op", f"jax_tensorarray_{self.handler}")).split("\n")

    @property
    def op(self) -> str:
        return self.lines[0].split("@")[0]


def _numbers(*numbers: int) -> bytes:
    return struct.pack(f"{len(numbers)}q", *numbers)


def _text(text: str) -> bytes:
    return _numbers(len(text)) + text.encode()


# --- calls that are right --------------------------------------------------------------------------------------


def numbers(rng, dtype, shape, *, high=5, wild=False):
    """Small ones, whose sums are exact, and where they are wild sometimes the largest that there is."""
    low = 0 if DTYPES[dtype] in (np.bool_, np.uint8, np.uint16, np.uint32, np.uint64) else -1
    found = rng.integers(low, 2 if dtype == 1 else high, shape).astype(DTYPES[dtype])
    if wild and found.size and rng.random() < 0.2:
        found.flat[rng.integers(found.size)] = np.iinfo(DTYPES[dtype]).max  # of uint64 it would be -1 as an int64
    return found


def operand(rng, dtype, shape, **options):
    return Array(dtype, tuple(shape), numbers(rng, dtype, shape, **options).tobytes())


def right_call(rng, handler):
    few = lambda n: tuple(int(d) for d in rng.integers(1, 4, rng.integers(n + 1)))  # noqa: E731
    dims = {"B": few(2), "T": (int(rng.integers(1, 5)),), "R": few(2), "I": few(2), "M": (int(rng.integers(1, 4)),)}
    if handler in ROW_OPS and rng.random() < 0.3:
        dims["T"] = tuple(int(d) for d in rng.integers(1, 4, 2))
    if rng.random() < 0.1:
        dims[rng.choice(list(dims))] = (0,)
    elements = int(rng.choice([1, 2, 4, 5, 6, 9, 10, 11, 12, 16, 20] + [15, 18] * (handler != "max")))
    arrays = []
    for side in SIGNATURES[handler]:
        made = []
        for name, shape in (argument.split(": ") for argument in side):
            shape = tuple(d for letter in shape.split() for d in dims[letter])
            is_integer = name in ("index", "start", "stop", "parts") or (name == "size" and handler == "mask")
            dtype = elements
            if is_integer:
                dtype = int(rng.choice(INTEGERS))
            elif handler == "check":
                dtype = 4
            made.append(operand(rng, dtype, shape, wild=is_integer) if len(arrays) == 0 else Array(dtype, shape))
        arrays.append(made)
    call = Call(handler, *arrays)
    if handler in ROW_OPS:
        masked, is_sorted, reverse, strict = (bool(b) for b in rng.random(4) < 0.4)
        call.attributes = {
            "op": str(rng.choice([f"ta_{handler}", f"ta_{handler}@a b@c.py:7", f"ta_{handler}@"])),
            "batch_dims": len(dims["B"]),
            "masked": masked,
            "sorted": is_sorted,
            "reverse": reverse and handler != "max",
            "strict": strict,
        }
        if len(dims["T"]) > 1 or rng.random() < 0.3:
            call.attributes["index_dims"] = len(dims["T"])
        if masked:
            call.operands.append(operand(rng, 1, call.operands[1].shape))
        if is_sorted:
            call.operands.append(order_of(call))
    elif handler == "check":
        op = str(rng.choice(["TensorArray.read", "ta_read@a.py:1\nTensorArray.read\nta_swap@b.py:2"]))
        call.attributes = {"op": op, "strict": bool(rng.random() < 0.5)}
    elif handler not in ("fence", "empty"):
        call.attributes = {"batch_dims": len(dims["B"])}
    if call.results[0:1] and SIGNATURES[handler][1][0].startswith("result buffer") and call.operands:
        call.results[0].is_first_operand = bool(rng.random() < 0.5)
    if rng.random() < 0.2 and handler != "check":
        call.operands.append(operand(rng, 11, (2, 2)))  # a reader, which nobody looks at
    return call


def order_of(call):
    """The positions of each batch sorted by row."""
    buffer, index = call.operands[:2]
    n = call.attributes["batch_dims"]
    size = math.prod(buffer.shape[n : n + call.attributes.get("index_dims", 1)])
    rows = index.numbers().reshape(*index.shape[:n], math.prod(index.shape[n:]))
    where = None
    if call.attributes["masked"]:
        where = call.operands[2 + (call.handler != "read")].numbers().reshape(rows.shape)
    return Array(4, rows.shape, oracle.visiting_order(rows, where, size, reverse=call.attributes["reverse"]).tobytes())


# --- what is wrong with a call ---------------------------------------------------------------------------------


def misfits(call):
    """The arguments that do not fit the signature of the handler, as messages call them."""
    needed, resulting = ([x.split(": ") for x in side] for side in SIGNATURES[call.handler])
    flags = call.attributes
    wanted = {"check": ["op", "strict"], "fence": [], "empty": []}.get(call.handler, ["batch_dims"])
    kinds = {"batch_dims": int, "op": str} | ({"index_dims": int} if "index_dims" in flags else {})
    wanted = [*kinds, "masked", "reverse", "sorted", "strict"] if call.handler in ROW_OPS else wanted
    if call.handler not in ("fence", "empty") and (
        sorted(flags) != sorted(wanted) or any(type(flags[k]) is not kinds.get(k, bool) for k in flags)
    ):
        return ["attribute"]
    extra = [("where", "B I")] * flags.get("masked", False) + [("order", "B N")] * flags.get("sorted", False)
    counts = len(call.operands) - len(needed), len(call.results) - len(resulting)
    if counts[0] < 0 or (counts[0] > 0 and call.handler == "check") or counts[1]:
        return ["Wrong number of"]
    named = [*needed, *extra]
    if call.handler == "empty":
        return []
    missing = [name for name, _ in named[len(call.operands) :]]
    arrays = dict(zip([n for n, _ in named], call.operands, strict=False))
    arrays |= {name: x for (name, _), x in zip(resulting, call.results, strict=True)}
    return missing + _misfits(call, arrays, dict([*named, *resulting]))


def _misfits(call, arrays, signature):
    first = arrays["size" if call.handler == "check" else "buffer"]
    if call.handler == "check":
        dims = {"B": first.shape}
    elif call.handler == "fence":
        dims = {"R": first.shape}
    else:
        n, rank = call.attributes["batch_dims"], len(first.shape)
        if not 0 <= n < rank - call.handler.endswith("_part"):
            return ["batch_dims", "buffer"]
        k = call.attributes.get("index_dims", 1)
        if not 1 <= k <= rank - n:
            return ["index_dims"]
        dims = {"B": first.shape[:n], "T": first.shape[n : n + k], "R": first.shape[n + k :]}
        dims["M"] = dims["R"][:1]
        dims["R"] = dims["R"][1:] if call.handler.endswith("_part") else dims["R"]
    wrong = [name for name, x in arrays.items() if min(x.shape, default=0) < 0]
    if "index" in arrays:
        index = arrays["index"].shape
        if index[: len(dims["B"])] != dims["B"]:
            wrong.append("index")
        dims["I"] = index[len(dims["B"]) :]
        dims["N"] = (int(np.prod(dims["I"], dtype=object)),)
    for name, x in arrays.items():
        expected = tuple(d for letter in signature[name].split() for d in dims[letter])
        if x.shape != expected or math.prod(x.shape) >= 2**59:
            wrong.append(name)
        is_integer = name in ("index", "start", "stop", "parts") or (name == "size" and call.handler == "mask")
        fits = {"where": x.dtype == 1, "order": x.dtype == 4}.get(name, x.dtype == first.dtype and x.dtype in DTYPES)
        if call.handler == "check" and not is_integer:
            fits = x.dtype == 4
        if not (x.dtype in INTEGERS if is_integer else fits):
            wrong.append(name)
    if call.handler == "max" and first.dtype in (15, 18):
        wrong.append("buffer")
    return wrong


# --- what a right call means -----------------------------------------------------------------------------------


def error_of(call, index, where, sizes):
    """What a call with right arguments says of the first index, in order, that is out of range; or nothing."""
    if call.attributes["strict"]:
        for k, (i, w, size) in enumerate(zip(index.flat, where.flat, sizes.flat, strict=True)):
            if w and not 0 <= int(i) < size:
                op, _, place = call.lines[k % len(call.lines)].partition("@")
                noun = "TensorArray" if op.startswith("TensorArray") else "buffer"
                text = f"{op}: index {int(i)} is out of range for a {noun} of size {size}"
                return f"{text} ({place})" if place else text
    return ""


def meaning(call, found):
    """The error of a call whose arguments fit, or nothing, and its results; what is not specified is as found."""
    named = len(SIGNATURES[call.handler][0])
    arrays = [x.numbers() for x in call.operands[: named + call.attributes.get("masked", False)]]
    if call.handler in ("fence", "empty"):
        return "", arrays
    if call.handler == "check":
        index, size = arrays
        sizes = np.broadcast_to(size.reshape((*size.shape, *[1] * (index.ndim - size.ndim))), index.shape)
        results = [np.zeros(index.shape, np.int32)]
        for b in np.ndindex(size.shape):
            results[0][b] = oracle.ta_check(index[b], size[b])
        return error_of(call, index, np.full(index.shape, True), sizes), results
    buffer, index = arrays[:2]
    n = call.attributes["batch_dims"]
    rows = n + call.attributes.get("index_dims", 1)
    arrays[0] = buffer = buffer.reshape(*buffer.shape[:n], math.prod(buffer.shape[n:rows]), *buffer.shape[rows:])
    results, options = [np.array(buffer)], {}
    if call.handler in ROW_OPS:
        where = arrays[named] if call.attributes["masked"] else np.full(index.shape, True)
        error = error_of(call, index, where, np.full(index.shape, buffer.shape[n]))
        rows = np.zeros((*index.shape, *buffer.shape[n + 1 :]), buffer.dtype)
        results = {"read": [rows], "swap": [*results, rows]}.get(call.handler, results)
        if call.handler in ("write", "swap", "add"):
            options["reverse"] = call.attributes["reverse"]
    elif call.handler == "read_part":
        results = [np.frombuffer(found[0], buffer.dtype).reshape(*buffer.shape[:n], *buffer.shape[n + 1 :]).copy()]
    for b in np.ndindex(buffer.shape[:n]):
        one = [x[b] for x in arrays[:named]]
        if call.handler in ROW_OPS:
            op = {"write": oracle.ta_swap}.get(call.handler) or getattr(oracle, f"ta_{call.handler}")
            made = op(*one, where=where[b], **options)
            for result, x in zip(results, made if isinstance(made, tuple) else (made,), strict=False):
                result[b] = x
        elif call.handler in ("mask", "clear"):
            results[0][b] = oracle.ta_clear(one[0], one[1], one[2] if call.handler == "clear" else len(one[0]))
        elif 0 <= int(one[1]) < len(one[0]):
            row, parts = int(one[1]), max(int(one[-1]), 0)
            if call.handler == "read_part":
                results[0][b][:parts] = one[0][row, :parts]
            else:
                results[0][b][row, :parts] = one[2][:parts]
    return error if call.handler in ROW_OPS else "", results


def has_other_order(call):
    """Whether an order has the right type and is not that of the positions. It is nobody's but the GPU's concern."""
    if not call.attributes.get("sorted") or misfits(call):
        return False
    return order_of(call).data != call.operands[2 + (call.handler != "read") + call.attributes["masked"]].data


# --- changes ---------------------------------------------------------------------------------------------------


def changed(rng, call):
    """The call with one thing changed, which may be right all the same."""
    original, call = call, copy.deepcopy(call)
    what = rng.choice(["dims", "rank", "dtype", "attribute", "flag", "count", "order"], p=[0.25] * 3 + [0.25 / 4] * 4)
    arrays = [*call.operands, *call.results]
    one = arrays[rng.integers(len(arrays))] if arrays else None
    if what == "dims" and one.shape:
        at = rng.integers(len(one.shape))
        to = [one.shape[at] + 1, one.shape[at] + 1, max(one.shape[at] - 1, 0), 0, 2**61, 2**63 - 1, -1, -(2**63)]
        resize(rng, one, (*one.shape[:at], int(rng.choice(np.array(to, object))), *one.shape[at + 1 :]))
    elif what == "rank":
        at = int(rng.integers(len(one.shape) + 1))
        shapes = [(*one.shape[:at], int(rng.integers(4)), *one.shape[at:]), (*one.shape[:at], *one.shape[at + 1 :]), ()]
        resize(rng, one, shapes[rng.integers(3)])
    elif what == "dtype":
        one.dtype = int(rng.choice([*DTYPES, INT4, TOKEN, UNKNOWN]))
        resize(rng, one, one.shape)
    elif what == "attribute" and call.attributes:
        name = str(rng.choice(list(call.attributes)))
        value = call.attributes.pop(name)
        changes = [{}, {name: float(value) if name != "op" else 1}, {"a" + name: value}, {name: value, "z": True}]
        call.attributes |= changes[rng.integers(4)]
    elif what == "flag" and call.attributes:
        name = str(rng.choice([k for k in call.attributes if k != "op"]))
        if name in ("batch_dims", "index_dims"):
            n = call.attributes[name]
            call.attributes[name] = int(rng.choice(np.array([-1, n - 1, n + 1, n + 2, 2**62, -(2**63)], object)))
        else:
            call.attributes[name] = not call.attributes[name]
    elif what == "count":
        side = call.operands if rng.random() < 0.5 else call.results
        if side and rng.random() < 0.7:
            side.pop()
        else:
            side.append(Array(11, (2,), bytes(8) if side is call.operands else b""))
    elif call.attributes.get("sorted") and len(call.operands) > 2:
        order = call.operands[2 + (call.handler != "read") + call.attributes["masked"]]
        order.data = rng.integers(-(2**31), 2**31, order.shape).astype(np.int32).tobytes()
    for result in call.results:
        like = [(x.dtype, x.shape) for x in call.operands[:1]]
        result.is_first_operand &= like == [(result.dtype, result.shape)]  # XLA refuses to alias what differs
    # Nobody has as much memory as some could say that they have.
    is_real = all(not 2**20 <= math.prod(x.shape) < 2**62 * 2 for x in [*call.operands, *call.results])
    return call if is_real else original


def resize(rng, one, shape):
    has_data = one.data != b"" or one.nbytes == 0
    one.shape = tuple(shape)
    if has_data:
        one.data = numbers(rng, one.dtype, shape).tobytes() if one.dtype in DTYPES and one.nbytes else bytes(one.nbytes)


# --- under sanitizers ------------------------------------------------------------------------------------------


def needs_sources(test):
    return functools.reduce(lambda test, mark: mark(test), cpp.NEEDED, test)


PLATFORMS = ("cpu", "gpu")


def built(platform, tmp_path_factory):
    flags = ["-pthread", "-DTA_ONE_PIECE="]  # which takes long to compile
    flags += ["-fno-sanitize=enum"]  # XLA's headers read the dtypes of a newer XLA as they are
    flags += ["-fno-sanitize=null"]  # the address sanitizer sees null pointers too
    folders = HERE, HERE.parent / "gpu", HERE.parent / "gpu" / "emulated_gpu"
    flags += [*(f"-I{folder}" for folder in folders), "-isystem", str(Path(jaxlib.__file__).parent / "include")]
    flags += ["-DEMULATED_GPU"] * (platform == "gpu")
    return cpp.built(tmp_path_factory, HERE / "calls.cc", f"calls_{platform}", *flags)


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """Of two processes each begins with another platform."""
    is_second = os.environ.get("PYTEST_XDIST_WORKER") == "gw1"
    found = {platform: built(platform, tmp_path_factory) for platform in (PLATFORMS[::-1] if is_second else PLATFORMS)}
    return [found[platform] for platform in PLATFORMS]


def written(program, tmp_path, encoded):
    """What the program says of these calls."""
    (tmp_path / "calls").write_bytes(encoded)
    done = subprocess.run([program, tmp_path / "calls", tmp_path / "out"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return io.BytesIO((tmp_path / "out").read_bytes())


def take_text(out):
    (length,) = struct.unpack("q", out.read(8))
    return out.read(length).decode()


def outcomes(program, tmp_path, calls):
    """The error of each call, or nothing, and the bytes of its results."""
    out = written(program, tmp_path, _numbers(len(calls)) + b"".join(call.encoded() for call in calls))
    for call in calls:
        yield call, take_text(out), [out.read(x.nbytes) for x in call.results]
    assert out.read() == b""


def assert_as_meant(call, error, results):
    wrong = misfits(call)
    if wrong:
        names = "|".join(map(re.escape, wrong))
        by_us, by_xla = rf"^{re.escape(call.op)}: ({names}) is ", rf"^\[.*({names})"
        assert re.search(f"{by_us}|{by_xla}|{TOO_LARGE}", error, re.DOTALL), (error, wrong, call)
        return
    if any(math.prod(d or 1 for d in x.shape) >= 2**60 for x in [*call.operands, *call.results]):
        return  # no elements, of a size that no number holds: an error or not
    expected_error, expected = meaning(call, results)
    assert error == expected_error, (error, expected_error, call)
    for e, data in zip(expected, results, strict=False) if not error else ():
        oracle.assert_same_numbers(np.frombuffer(data, e.dtype).reshape(e.shape), e)


@pytest.mark.slow
@needs_sources
@pytest.mark.parametrize("handler", SIGNATURES)
def test_whatever_a_handler_is_called_with_it_touches_no_other_memory(programs, tmp_path, handler):
    rng = np.random.default_rng(list(SIGNATURES).index(handler))
    right = [right_call(rng, handler) for _ in range(200)]
    assert not any(misfits(call) for call in right)
    calls = right + [changed(rng, call) for call in right * 3]
    assert sum(bool(misfits(call)) for call in calls) > 100 or handler in ("empty", "fence")
    for program in programs:
        for call, error, results in outcomes(program, tmp_path, calls):
            if not has_other_order(call):
                assert_as_meant(call, error, results)


@pytest.mark.slow
@needs_sources
def test_a_call_that_is_to_go_on_drops_the_row_and_raise_says_so_once(programs, tmp_path):
    operands = [np.ones((3, 2), np.float32), np.array([1, 3, 4], np.int32), np.zeros((3, 2), np.float32)]
    flags = {"batch_dims": 0, "masked": False, "reverse": False, "sorted": False, "strict": True}
    write = Call(
        "write",
        [Array(dtype, x.shape, x.tobytes()) for dtype, x in zip((11, 4, 11), operands, strict=True)],
        [Array(11, (3, 2))],
        {"op": ">ta_write@a.py:7"} | flags,
    )
    end = Call("raise", [], [Array(4, ())])
    text = "ta_write: index 3 is out of range for a buffer of size 3 (a.py:7)"
    for program, said in zip(programs, (["", "", text, ""], [text, text, "", ""]), strict=True):  # a GPU is waited for
        found = list(outcomes(program, tmp_path, [write, write, end, end]))
        assert [error for _, error, _ in found] == said
        assert found[0][2] == found[1][2] == [np.array([[1, 1], [0, 0], [1, 1]], np.float32).tobytes()]


# --- in a CUDA graph -------------------------------------------------------------------------------------------


def with_other_contents(rng, call):
    """The same call of arrays with other numbers in them."""
    call, n = copy.deepcopy(call), len(SIGNATURES[call.handler][0])
    masked, is_sorted = (call.attributes.get(flag, False) for flag in ("masked", "sorted"))
    for k, x in enumerate(call.operands):
        is_order = is_sorted and k == n + masked
        if not is_order:
            is_integer = 0 < k < n and x.dtype in INTEGERS and call.operands[0].dtype not in INTEGERS
            x.data = numbers(rng, x.dtype, x.shape, wild=is_integer).tobytes()
    if is_sorted:
        call.operands[n + masked] = order_of(call)
    return call


def replayed(rng, call):
    """A call that is recorded without any contents, and the calls that its replays mean, with whether they begin a run.

    A run has several replays where the call is in a loop. XLA runs the stage before, kInitialize, once for each run.
    """
    replays = [(bool(k == 0 or rng.random() < 0.6), with_other_contents(rng, call)) for k in range(5)]
    recorded = copy.deepcopy(call)
    for x in recorded.operands:
        x.data = bytes(x.nbytes)
    recorded.replays = [(begins_run, [x.data for x in one.operands]) for begins_run, one in replays]
    return recorded, replays


@pytest.mark.slow
@needs_sources
@pytest.mark.parametrize("handler", [*SIGNATURES, "raise"])
def test_a_call_in_a_cuda_graph_means_at_each_replay_what_its_arrays_then_say(programs, tmp_path, handler):
    rng = np.random.default_rng(200 + [*SIGNATURES, "raise"].index(handler))
    made = [right_call(rng, handler) for _ in range(60)] if handler != "raise" else [Call("raise", [], [Array(4, ())])]
    calls = [replayed(rng, call) if handler != "raise" else (call, [(True, call)] * 5) for call in made]
    for recorded, replays in calls:
        recorded.replays = recorded.replays or [(begins_run, []) for begins_run, _ in replays]
    encoded = b"".join(recorded.encoded() for recorded, _ in calls)
    out = written(programs[PLATFORMS.index("gpu")], tmp_path, _numbers(len(calls)) + encoded)
    raised = 0
    for _, replays in calls:
        assert take_text(out) == ""
        pending = ""
        for begins_run, call in replays:
            earlier = take_text(out)
            assert earlier == (pending if begins_run else "")
            pending = "" if begins_run else pending
            results = [out.read(x.nbytes) for x in call.results]
            if handler == "raise":
                continue
            error, expected = meaning(call, results)
            for e, data in zip(expected, results, strict=False):
                oracle.assert_same_numbers(np.frombuffer(data, e.dtype).reshape(e.shape), e)
            pending = pending or error  # of several errors in a run the first
            raised += bool(error)
        assert take_text(out) == pending
    assert out.read() == b""
    assert raised > 5 or handler not in (*ROW_OPS, "check")


# --- by XLA ----------------------------------------------------------------------------------------------------


def run_by_xla(call):
    """What `jax.ffi.ffi_call` gives for it: an error, or nothing, and the bytes of the results."""
    aliases = {0: 0} if any(x.is_first_operand for x in call.results) else {}
    results = [jax.ShapeDtypeStruct(x.shape, DTYPES.get(x.dtype, jnp.int4)) for x in call.results]
    made = jax.ffi.ffi_call(
        f"jax_tensorarray_{call.handler}", results, input_output_aliases=aliases, has_side_effect=True
    )
    types = {int: np.int64, float: np.float64, bool: bool, str: str}
    attributes = {name: types[type(value)](value) for name, value in call.attributes.items()}
    operands = [jnp.asarray(x.numbers()) if x.dtype in DTYPES else jnp.zeros(x.shape, jnp.int4) for x in call.operands]
    try:
        found = finish(jax.jit(lambda *operands: made(*operands, **attributes))(*operands))
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        return str(error).partition(": ")[2], []  # after the code
    return "", [np.asarray(x).tobytes() for x in found]


@pytest.mark.slow
@pytest.mark.parametrize("handler", SIGNATURES)
def test_a_call_by_hand_is_an_error_or_means_what_numpy_says(handler):
    rng = np.random.default_rng(100 + list(SIGNATURES).index(handler))
    made = 0
    while made < 6:
        call = changed(rng, right_call(rng, handler))
        arrays = [*call.operands, *call.results]
        if any(x.dtype in (TOKEN, UNKNOWN) or not 0 <= math.prod(x.shape) < 2**20 for x in arrays):
            continue  # XLA has no such arrays
        if min((d for x in arrays for d in x.shape), default=0) < 0 or has_other_order(call):
            continue
        made += 1
        assert_as_meant(call, *run_by_xla(call))
