"""Instructions that a CPU kernel takes for a call: `python tests/support/instructions.py _cpu.so` prints them as JSON.

A process calls the handlers of the compiled module as XLA does, and is stopped after every instruction by another one
that counts them. That needs no other program and no counters of the processor, and a busy machine changes nothing. Only
instructions of the module count: how libc moves bytes depends on the processor.

Needs Linux on x86-64, and nothing but Python; `jax` would start threads, which do not survive a fork.
"""

import ctypes
import functools
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_char_p, c_int, c_int64, c_size_t, c_void_p, sizeof
from pathlib import Path

# --- XLA's structures: xla/ffi/api/c_api.h ---------------------------------------------------------------------

PRED, S32, S64, F32 = 1, 4, 5, 11
WIDTH = {PRED: 1, S32: 4, F32: 4}
BUFFER, SCALAR, STRING, EXECUTE = 1, 3, 4, 3


class Versioned(Structure):
    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p))

    def __init__(self, *fields):
        super().__init__(sizeof(type(self)), None, *fields)


class Buffer(Versioned):
    _fields_ = (("dtype", c_int), ("data", c_void_p), ("rank", c_int64), ("dims", POINTER(c_int64)))


class Span(Structure):
    _fields_ = (("text", c_char_p), ("length", c_size_t))


class Scalar(Structure):
    _fields_ = (("dtype", c_int), ("value", c_void_p))


class Buffers(Versioned):
    _fields_ = (("size", c_int64), ("types", POINTER(c_int)), ("values", POINTER(c_void_p)))


class Attributes(Versioned):
    _fields_ = (
        ("size", c_int64),
        ("types", POINTER(c_int)),
        ("names", POINTER(c_void_p)),
        ("values", POINTER(c_void_p)),
    )


class Frame(Versioned):
    _fields_ = (
        ("api", c_void_p),
        ("context", c_void_p),
        ("stage", c_int),
        ("operands", Buffers),
        ("results", Buffers),
        ("attributes", Attributes),
        ("future", c_void_p),
    )

    def __init__(self, *fields):
        super().__init__(*fields)
        self.struct_size = Frame.future.offset  # XLA does not count this one


# --- a call ----------------------------------------------------------------------------------------------------

kept = []  # what the structures point to


def keep(value):
    kept.append(value)
    return value


def pointers(values):
    return keep((c_void_p * len(values))(*(ctypes.addressof(keep(v)) for v in values)))


def array(dtype: int, *shape: int) -> Buffer:
    """Zeros."""
    data = keep(ctypes.create_string_buffer(WIDTH[dtype] * max(1, _product(shape))))
    return Buffer(dtype, ctypes.addressof(data), len(shape), (c_int64 * len(shape))(*shape))


def _product(numbers: Sequence[int]) -> int:
    return numbers[0] * _product(numbers[1:]) if numbers else 1


def buffers(arrays: Sequence[Buffer]) -> Buffers:
    return Buffers(len(arrays), keep((c_int * len(arrays))(*[BUFFER] * len(arrays))), pointers(arrays))


def attribute(value):
    if isinstance(value, str):
        return STRING, Span(value.encode(), len(value))
    dtype, number = (PRED, ctypes.c_bool(value)) if isinstance(value, bool) else (S64, c_int64(value))
    return SCALAR, Scalar(dtype, ctypes.addressof(keep(number)))


def frame(operands: Sequence[Buffer], results: Sequence[Buffer], **attributes: object) -> Frame:
    names = sorted(attributes)  # as XLA has them
    types, values = zip(*(attribute(attributes[name]) for name in names), strict=True) if names else ((), ())
    return Frame(
        None,
        None,
        EXECUTE,
        buffers(operands),
        buffers(results),
        Attributes(
            len(names),
            keep((c_int * len(names))(*types)),
            pointers([Span(name.encode(), len(name)) for name in names]),
            pointers(values),
        ),
        None,
    )


def row_op(name: str, row: int, *, batch: int = 0, count: int = 0, masked: bool = False) -> tuple[str, Frame]:
    """A call on `[*batch, 8, row]` by an index `[*batch, *count]`; zero is none."""
    lead, positions = [batch] * bool(batch), [count] * bool(count)
    buffer, value = array(F32, *lead, 8, row), array(F32, *lead, *positions, row)
    operands = [buffer, array(S32, *lead, *positions)]
    if name != "read":
        operands.append(value)
    if masked:
        operands.append(array(PRED, *lead, *positions))
        ctypes.memset(operands[-1].data, 1, max(batch, 1) * max(count, 1))
    results = {"read": [value], "swap": [buffer, array(F32, *lead, *positions, row)]}.get(name, [buffer])
    flags = {"strict": True, "masked": masked, "sorted": False, "reverse": False}
    return name, frame(operands, results, op="ta_" + name, batch_dims=len(lead), **flags)


def cases() -> dict[str, tuple[str, Frame]]:
    """What is called: the name of a handler, and with what."""
    buffer, row, size = array(F32, 8, 8), array(F32, 8), array(S32)
    found = {
        "mask": ("mask", frame([buffer, size], [buffer], batch_dims=0)),
        "clear": ("clear", frame([buffer, size, size], [buffer], batch_dims=0)),
        "read_part": ("read_part", frame([buffer, size, size], [row], batch_dims=0)),
        "write_part": ("write_part", frame([buffer, size, row, size], [buffer], batch_dims=0)),
        "check": ("check", frame([array(S32), keep(one())], [array(S32)], op="ta_read", strict=True)),
        "fence": ("fence", frame([buffer], [buffer])),
        "empty": ("empty", frame([], [buffer])),
    }
    for name in ("read", "write", "swap", "add", "max"):
        for floats in (1, 8, 1024):
            found[f"{name} a row of {floats}"] = row_op(name, floats)
        found[f"{name} a row of 8 where"] = row_op(name, 8, masked=True)
        found[f"{name} a row of 8 of each of 16 buffers"] = row_op(name, 8, batch=16)
        found[f"{name} 100 rows of 1"] = row_op(name, 1, count=100)
        found[f"{name} 100 rows of 8"] = row_op(name, 8, count=100)
    return found


def one() -> Buffer:
    size = array(S32)
    ctypes.cast(size.data, POINTER(c_int))[0] = 1
    return size


# --- counting --------------------------------------------------------------------------------------------------

TRACEME, PEEKTEXT, PEEKUSER, POKETEXT, POKEUSER, CONTINUE, KILL, SINGLESTEP = 0, 1, 3, 4, 6, 7, 8, 9
RIP, RSP = 16 * 8, 19 * 8  # in sys/user.h
BREAKPOINT, WORD = 0xCC, 2**64
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = (c_int, c_int, c_void_p, c_void_p)
libc.ptrace.restype = c_int64


def why_not() -> str:
    """Why nothing can be counted here, or nothing."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return "instructions are counted on Linux on x86-64 only"
    tried = subprocess.run([sys.executable, __file__], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"no process may be traced here: {tried.stderr.splitlines()[-1]}"


def traced(request: int, child: int, at: int | None = None, value: int | None = None) -> int:
    """The result of a request to `ptrace`, as an unsigned word."""
    ctypes.set_errno(0)
    result = libc.ptrace(request, child, at, value)
    if result == -1 and ctypes.get_errno():
        raise OSError(ctypes.get_errno(), f"ptrace({request})")
    return result % WORD


def stops(child: int) -> None:
    """Wait until the child stops as it was told to."""
    _, status = os.waitpid(child, 0)
    if not os.WIFSTOPPED(status) or os.WSTOPSIG(status) not in (signal.SIGTRAP, signal.SIGSTOP):
        raise RuntimeError(f"the kernel ended or was stopped by a signal, with status {status}")


def instructions_of(call: Callable[[], object], handler: int, code: range) -> int:
    """How many instructions with addresses in `code` a call takes, in a child process.

    The child runs until it comes to the handler, and one instruction at a time until it returns from there.
    """
    child = os.fork()
    if child == 0:
        try:
            call()  # what happens only the first time
            if libc.ptrace(TRACEME, 0, None, None) == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
                call()
        finally:
            os._exit(0)
    stops(child)
    word = traced(PEEKTEXT, child, handler)
    traced(POKETEXT, child, handler, word & ~0xFF | BREAKPOINT)
    traced(CONTINUE, child)
    stops(child)
    traced(POKETEXT, child, handler, word)
    traced(POKEUSER, child, RIP, handler)
    back = traced(PEEKTEXT, child, traced(PEEKUSER, child, RSP))
    counted, at = 0, handler
    while at != back:
        counted += at in code
        traced(SINGLESTEP, child)
        stops(child)
        at = traced(PEEKUSER, child, RIP)
    traced(KILL, child)
    os.waitpid(child, 0)
    return counted


def code_of(path: Path) -> range:
    """The addresses of the instructions of a loaded module."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "r-xp" in line and line.endswith(str(path)):
            return range(*(int(at, 16) for at in line.split()[0].split("-")))
    raise ValueError(f"{path} is not loaded")


def compiler_of(path: Path) -> str:
    """The compiler that made the module, without its minor version."""
    found = re.search(rb"(GCC|clang)[^\0]*?(\d+)\.\d+\.\d+\0", path.read_bytes())
    return " ".join(part.decode() for part in found.groups()).lower() if found else "unknown compiler"


def count(path: Path) -> dict[str, int]:
    """Instructions of every case, with the handlers of the module at `path`."""
    spec = importlib.util.spec_from_file_location("_cpu", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = c_void_p, (ctypes.py_object, c_char_p)
    handlers = {
        target.removeprefix("jax_tensorarray_"): pointer_of(stages["execute"], None)
        for target, stages in module.registrations().items()
    }
    code = code_of(path)
    counts = {}
    for name, (handler, made) in cases().items():
        address, function = ctypes.addressof(keep(made)), handlers[handler]
        call = functools.partial(ctypes.CFUNCTYPE(c_void_p, c_void_p)(function), address)
        counts[name] = instructions_of(call, function, code)
    return counts


if __name__ == "__main__":
    if len(sys.argv) == 1:
        function = ctypes.cast(libc.abs, c_void_p).value or 0
        instructions_of(functools.partial(libc.abs, -1), function, range(0))  # whether that is allowed
    else:
        print(json.dumps(count(Path(sys.argv[1]).resolve())))
