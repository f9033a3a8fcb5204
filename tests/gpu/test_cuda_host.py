"""What each thread of a GPU does, run by the CPU, under sanitizers, thread by thread of every launch.

`cuda_host.cc` runs the bodies of `csrc/gpu_kernels.h`; the expected results are those of the loops in `oracle.py`. The
order of threads is part of a case, since on a GPU there is none: a result that depends on it is a race.
"""

import io
import struct
import subprocess
from itertools import product
from pathlib import Path
from typing import NamedTuple

import cpp
import ml_dtypes
import numpy as np
import oracle
import pytest

from jax_tensorarray._ops import sorting
from jax_tensorarray._ops.primitive import row_params

HERE = Path(__file__).parent

#: In the order of cuda_host.cc.
OPS = ["read", "write", "swap", "clear", "check", "read_part", "write_part", "add", "max"]
INDEX_TYPES = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
FLOATS8 = ("e3m4", "e4m3", "e4m3fn", "e4m3fnuz", "e4m3b11fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
FLOATS += [getattr(ml_dtypes, f"float8_{name}") for name in FLOATS8]
#: In the order of `ElementType`.
DTYPES = [np.bool_, *INDEX_TYPES, *FLOATS, np.complex64, np.complex128]
FORWARD, BACKWARD, SHUFFLED = range(3)

pytestmark = [*cpp.NEEDED, pytest.mark.slow]


class Case(NamedTuple):
    """A call of an op on `[batch, size, row]` by an index `[batch, count]`, and where in memory it finds them."""

    op: str
    buffer: np.ndarray
    index: np.ndarray
    value: np.ndarray | None = None
    where: np.ndarray | None = None
    is_sorted: bool = False
    reverse: bool = False
    strict: bool = True
    offset: int = 0  #: bytes from a multiple of 64 to the first row
    schedule: int = FORWARD

    def encoded(self) -> bytes:
        batch, size, row = self.buffer.shape
        dtype = self.buffer.dtype
        numbers = [OPS.index(self.op), batch, size, self.index.shape[1], row * dtype.itemsize]
        numbers += [INDEX_TYPES.index(self.index.dtype), self.where is not None, self.is_sorted, self.reverse]
        numbers += [self.strict, DTYPES.index(dtype), self.offset, self.schedule]
        arrays = [self.buffer, self.index]
        if self.where is not None:
            arrays.append(self.where)
        if self.is_sorted:
            arrays.append(oracle.visiting_order(self.index, self.where, size, reverse=self.reverse))
        if self.op != "read":
            arrays.append(self.value)
        return struct.pack(f"{len(numbers)}q", *map(int, numbers)) + b"".join(a.tobytes() for a in arrays)

    def expected(self) -> list[np.ndarray]:
        """Results by the oracle, in the order in which the program writes them."""
        results = []
        for b in range(len(self.buffer)):
            where = None if self.where is None else self.where[b]
            arguments = (self.buffer[b], self.index[b])
            if self.op == "read":
                results.append((oracle.ta_read(*arguments, where=where),))
            elif self.op == "add":
                results.append((added(*arguments, self.value[b], where, self.reverse),))
            elif self.op == "max":
                results.append((oracle.ta_max(*arguments, self.value[b], where=where),))
            else:
                buffer, old = oracle.ta_swap(*arguments, self.value[b], where=where, reverse=self.reverse)
                results.append((old, buffer) if self.op == "swap" else (buffer,))
        return [np.stack(x) for x in zip(*results, strict=True)]

    def message(self) -> str:
        """What the op has to say of the first index in order that is out of range."""
        for b, k in np.ndindex(self.index.shape):
            masked = self.where is not None and not self.where[b, k]
            if self.strict and not masked and not 0 <= int(self.index[b, k]) < self.buffer.shape[1]:
                size = self.buffer.shape[1]
                return f"the op: index {self.index[b, k]} is out of range for a buffer of size {size}"
        return ""


def added(buffer, index, value, where, reverse):
    """Sums in order, in the arithmetic of the dtype: here no thread flushes subnormals, as XLA's do."""
    buffer = np.array(buffer)
    visited = [k for k in range(len(index)) if (where is None or where[k]) and 0 <= int(index[k]) < len(buffer)]
    for k in reversed(visited) if reverse else visited:
        with np.errstate(all="ignore"):
            row = buffer[int(index[k])]
            row[...] = row | value[k] if buffer.dtype == bool else row + value[k]
    return buffer


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    return cpp.built(tmp_path_factory, HERE / "cuda_host.cc", "cuda_host", "-g1")


@pytest.fixture
def run(program, tmp_path):
    def run(encoded):
        given, results = tmp_path / "cases", tmp_path / "results"
        given.write_bytes(b"".join(encoded))
        done = subprocess.run([program, given, results], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return io.BytesIO(results.read_bytes())

    return run


def take(results, array):
    return np.frombuffer(results.read(array.nbytes), array.dtype).reshape(array.shape)


def take_message(results):
    (length,) = struct.unpack("q", results.read(8))
    return results.read(length).decode()


def assert_as_expected(run, cases):
    results = run(case.encoded() for case in cases)
    for case in cases:
        same = oracle.assert_same_numbers if case.op in ("add", "max") else oracle.assert_same_bits
        try:
            for expected in case.expected():
                with np.errstate(all="ignore"):
                    same(take(results, expected), expected)
            assert take_message(results) == case.message()
        except AssertionError as error:
            error.add_note(f"of {case.op} of {case.buffer.dtype}[{case.buffer.shape}] by {case.index.dtype}")
            raise
    assert results.read() == b""


def random_case(rng, op, *, dtype=np.uint8, rows=(0, 1, 2, 3, 4, 6, 8, 12, 16, 20, 48), **changes):
    batch, size, count = (int(rng.choice(n)) for n in ((1, 1, 2, 3), (0, 1, 3, 7), (0, 1, 2, 5, 33)))
    batch, size, count = (changes.pop(name, n) for name, n in (("batch", batch), ("size", size), ("count", count)))
    row = int(rng.choice(rows))
    index_type = INDEX_TYPES[rng.integers(len(INDEX_TYPES))]
    strays = rng.random() < 0.5
    low, high = (max(np.iinfo(index_type).min, -3), size + 3) if strays else (0, max(size, 1))
    index = rng.integers(low, high, (batch, count)).astype(index_type)
    if strays and rng.random() < 0.3:
        index[rng.random(index.shape) < 0.2] = np.iinfo(index_type).max
    options = {
        "value": oracle.random_bits(rng, (batch, count, row), dtype),
        "where": None if rng.random() < 0.5 else rng.random((batch, count)) < 0.7,
        "is_sorted": bool(rng.random() < 0.5) and op != "read",
        "reverse": bool(rng.random() < 0.5) and op != "read",
        "strict": bool(rng.random() < 0.5),
        "offset": int(rng.choice([0, 0, 1, 2, 4, 8, 16])) * np.dtype(dtype).itemsize,
        "schedule": int(rng.integers(3)),
    }
    buffer = oracle.random_bits(rng, (batch, size, row), dtype)
    return Case(op, buffer, index, **options | changes)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("is_masked", [False, True])
def test_positions_are_sorted_as_the_kernels_need_them(is_masked, reverse):
    rng = np.random.default_rng(14)
    index = rng.integers(-2, 8, (2, 40)).astype(np.int16)
    where = (rng.random(index.shape) < 0.7,) * is_masked
    params = row_params("swap", "drop", batch_dims=1, reverse=reverse)
    (found,) = sorting.visiting_order(np.zeros((len(index), 6)), index, *where, **params)
    np.testing.assert_array_equal(found, oracle.visiting_order(index, *(where or (None,)), 6, reverse=reverse))


@pytest.mark.parametrize("op", ["read", "write", "swap"])
def test_rows_of_every_width_and_alignment_are_moved(run, op):
    rng = np.random.default_rng(OPS.index(op))
    assert_as_expected(run, [random_case(rng, op) for _ in range(150)])


@pytest.mark.parametrize("op", ["add", "max"])
def test_duplicates_are_combined_in_order_with_the_rounding_of_the_dtype(run, op):
    cases = []
    for k, dtype in enumerate(DTYPES):
        rng, ordered = np.random.default_rng(k), np.dtype(dtype).kind != "c"
        if op == "add" or ordered:
            cases += [random_case(rng, op, dtype=dtype, rows=(0, 1, 2, 3, 4, 8, 12)) for _ in range(40)]
    assert_as_expected(run, cases)


@pytest.mark.parametrize("op", ["write", "swap", "add", "max"])
def test_long_runs_of_duplicates_mean_the_same_either_way(run, op):
    cases = []
    for rows, is_sorted in product((1, 3, 400), (False, True)):
        rng = np.random.default_rng(rows)
        options = {"dtype": np.float32, "rows": (1, 4), "size": rows, "count": 500, "is_sorted": is_sorted}
        cases += [random_case(rng, op, **options, schedule=s) for s in (FORWARD, BACKWARD, SHUFFLED)]
    assert_as_expected(run, cases)


@pytest.mark.parametrize("op", ["write", "swap", "add", "max"])
def test_the_schedule_of_threads_does_not_matter(run, op):
    rng = np.random.default_rng(5)
    case = random_case(rng, op, dtype=np.float32, rows=(5,), batch=2, size=3, count=40, is_sorted=False)
    both = [case._replace(schedule=s, is_sorted=o) for s, o in product((FORWARD, BACKWARD, SHUFFLED), (False, True))]
    assert_as_expected(run, both)


def test_rows_too_many_and_too_wide_for_one_block(run):
    rng = np.random.default_rng(7)
    wide = [random_case(rng, op, rows=(257 * 16, 4099), count=3, size=2) for op in ("read", "write", "swap")]
    many = [random_case(rng, "read", rows=(3, 16), count=2000, size=9, batch=2)]
    assert_as_expected(run, wide + many)


def test_a_launch_so_large_that_a_thread_moves_several_columns(run):
    rng = np.random.default_rng(8)
    rows = {"rows": (1_100_001,), "size": 1, "count": 1, "batch": 1, "where": None}
    assert_as_expected(run, [random_case(rng, op, **rows, schedule=SHUFFLED) for op in ("read", "write", "swap")])
    assert_as_expected(run, [random_case(rng, "add", dtype=np.uint8, **rows | {"offset": 1})])


def test_a_launch_so_large_that_a_thread_has_several_rows(run):
    """More rows than there are blocks in a grid: 65535 rows of 129 to 256 columns."""
    index = np.random.default_rng(9).integers(-1, 3, (1, 140_000)).astype(np.int32)
    buffer = np.arange(2 * 129, dtype=np.uint8).reshape(1, 2, 129)
    results = run([Case("read", buffer, index).encoded()])
    expected = np.concatenate([buffer[0], np.zeros((2, 129), np.uint8)])[index[0]]  # 2 and -1: rows of zeros
    np.testing.assert_array_equal(take(results, expected), expected)
    assert "out of range for a buffer of size 2" in take_message(results)


def test_whichever_thread_is_first_the_first_stray_in_order_is_named(run):
    index = np.array([[0, 1, 9, 2, -1], [1, 77, 0, 0, 3]], np.int64)
    buffer, value = np.zeros((2, 3, 2), np.float32), np.ones((2, 5, 2), np.float32)
    where = np.array([[True, True, False, True, True], [True] * 5])
    cases = [Case(op, buffer, index, value) for op in ("read", "write", "swap", "add", "max")]
    assert cases[0].message() == "the op: index 9 is out of range for a buffer of size 3"
    masked = [case._replace(where=where) for case in cases]
    assert masked[0].message() == "the op: index -1 is out of range for a buffer of size 3"
    every = cases + masked + [case._replace(strict=False) for case in cases]
    assert_as_expected(run, [case._replace(schedule=s) for case in every for s in (FORWARD, BACKWARD, SHUFFLED)])


def test_ranges_of_rows_are_cleared(run):
    rng = np.random.default_rng(11)
    cases, expected = [], []
    for index_type in 20 * INDEX_TYPES:
        batch, size, row = (int(rng.choice(n)) for n in ((1, 3), (0, 1, 5, 6000), (0, 1, 3, 8, 16)))
        buffer = oracle.random_bits(rng, (batch, size, row), np.uint8)
        bounds = [int(rng.integers(-2, size + 2)) for _ in range(2 * batch)]
        if np.iinfo(index_type).max < size or np.iinfo(index_type).min == 0:
            bounds = [min(max(b, 0), np.iinfo(index_type).max) for b in bounds]
        start, stop = np.array(bounds, index_type).reshape(2, batch)
        case = Case("clear", buffer, start[:, None], stop, offset=int(rng.choice([0, 1, 8])), schedule=SHUFFLED)
        cases.append(case.encoded())
        expected.append(np.stack([oracle.ta_clear(*x) for x in zip(buffer, start, stop, strict=True)]))
    results = run(cases)
    for e in expected:
        oracle.assert_same_bits(take(results, e), e)
        assert take_message(results) == ""


@pytest.mark.parametrize("op", ["read_part", "write_part"])
def test_parts_of_a_row_are_moved_and_no_others(run, op):
    rng = np.random.default_rng(13)
    cases, expected = [], []
    for _ in range(60):
        batch, size, parts, part = (int(rng.choice(n)) for n in ((1, 3), (1, 5), (0, 1, 7, 300), (0, 1, 3, 8, 16)))
        buffer = oracle.random_bits(rng, (batch, size, parts * part), np.uint8)
        value = oracle.random_bits(rng, (batch, parts * part), np.uint8)
        index = rng.integers(-1, size + 1, batch).astype(np.int32)
        moved = rng.integers(-1, parts + 2, batch).astype(np.int32)
        offset, schedule = int(rng.choice([0, 1, 8])), int(rng.choice([FORWARD, BACKWARD, SHUFFLED]))
        numbers = [OPS.index(op), batch, size, parts, parts * part, INDEX_TYPES.index(np.int32)]
        numbers += [0, 0, 0, 0, -1, offset, schedule]
        arrays = [buffer, index, moved, value]
        cases.append(struct.pack(f"{len(numbers)}q", *numbers) + b"".join(a.tobytes() for a in arrays))
        result = value.copy() if op == "read_part" else buffer.copy()
        for b, (i, n) in enumerate(zip(index, moved, strict=True)):
            end = max(n, 0) * part
            if 0 <= i < size and op == "read_part":
                result[b, :end] = buffer[b, i, :end]
            elif 0 <= i < size:
                result[b, i, :end] = value[b, :end]
        expected.append(result)
    results = run(cases)
    for e in expected:
        oracle.assert_same_bits(take(results, e), e)
        assert take_message(results) == ""


def test_an_index_is_checked_against_the_live_rows_of_its_batch(run):
    live = np.array([4, 1], np.int32)
    index = [np.array([[0, 3, 5, 2], [1, 4, 0, 7]]).astype(dtype) for dtype in INDEX_TYPES]
    case = Case("check", np.zeros((2, 0, 0), np.uint8), index[0], live, schedule=BACKWARD)
    cases = [case._replace(index=i, strict=strict) for i, strict in product(index, (False, True))]
    results = run([case.encoded() for case in cases])
    for case in cases:
        expected = np.stack([oracle.ta_check(*x) for x in zip(case.index, live, strict=True)])
        np.testing.assert_array_equal(take(results, expected), expected)
        text = "the op: index 5 is out of range for a buffer of size 4"
        assert take_message(results) == (text if case.strict else "")


# --- the order that a sort gives -------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("index_type", INDEX_TYPES)
def test_positions_are_sorted_by_row_and_then_by_when_they_are_visited(index_type, reverse):
    rng = np.random.default_rng(12)
    size = 40
    low, high = max(np.iinfo(index_type).min, -5), size + 5
    index, where = rng.integers(low, high, (3, 4, 50)).astype(index_type), rng.random((3, 4, 50)) < 0.8
    params = row_params("swap", "drop", batch_dims=1, reverse=reverse)
    (order,) = sorting.visiting_order(np.zeros((len(index), size)), index, where, **params)
    order = np.asarray(order)
    assert (order.shape, order.dtype) == ((3, 200), np.int32)
    for b in range(3):
        rows = [int(i) if w and 0 <= i < size else size for i, w in zip(index[b].flat, where[b].flat, strict=True)]
        visited = sorted(range(200), key=lambda k: (rows[k], -k if reverse else k))
        assert list(order[b]) == visited


def test_only_a_gpu_with_many_positions_has_them_sorted():
    assert sorting.is_sorted("cuda", size=10, count=1000)
    assert not sorting.is_sorted("cuda", size=10, count=4)
    assert not sorting.is_sorted("cpu", size=10, count=1000)
    assert not sorting.is_sorted("cuda", size=2**32, count=1000)
