"""`loop_copies` finds what makes a loop quadratic, in the user's line, and nothing in loops that are in place."""

import functools
import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import gpu_hlo
import in_place
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import row_programs
from jax import lax
from row_programs import ours, plain, programs

from jax_tensorarray import TensorArray, _kernels, ta_read, ta_write, while_loop
from jax_tensorarray import in_place as transformed
from jax_tensorarray._hlo import ahead
from jax_tensorarray._hlo import buffers as hlo_buffers
from jax_tensorarray._hlo import text as hlo_text
from jax_tensorarray.doctor import LoopCopies, LoopCopy
from jax_tensorarray.doctor import loop_copies as loop_copies_of_large_buffers

#: The buffers of these tests are small.
loop_copies = functools.partial(loop_copies_of_large_buffers, min_bytes=0)

X = jax.ShapeDtypeStruct((50, 8), jnp.float32)
ROWS = jnp.arange(50)


def write_in_a_scan(x):
    def body(ys, i):
        return ys.at[i].set(jnp.tanh(ys[i // 2] + x[i])), None

    return jnp.sum(lax.scan(body, jnp.zeros_like(x), ROWS)[0] ** 2)


def read_beside_write(x):
    def body(c, i):
        b, total = c
        return (b.at[i].set(jnp.sin(x[i])), total + jnp.sum(b[(i * 7) % 50])), None

    return lax.scan(body, (jnp.ones_like(x), 0.0), ROWS)[0][1]


def vmapped_cond(x):
    def one(b, until):
        def body(b, i):
            return lax.cond(i < until, lambda b: b.at[i].set(jnp.sin(b[i // 2])), lambda b: b, b), None

        return lax.scan(body, b, ROWS)[0]

    return jnp.sum(jax.vmap(one, (None, 0))(x, x[:3, 0]) ** 2)


def vmapped_while(x):
    def one(until):
        def body(c):
            i, b = c
            return i + 1, b.at[i].set(jnp.sin(b[i // 2]) * until)

        return lax.while_loop(lambda c: c[0] < until, body, (0, x))[1]

    return jnp.sum(jax.vmap(one)(x[:3, 0]) ** 2)


def decay(x):
    def body(b, i):
        return 0.9 * b.at[i].set(1.0), None

    return jnp.sum(lax.scan(body, x, ROWS)[0] ** 2)


def line_with(f, text):
    """The number of the line of `f` in which `text` stands."""
    lines, start = inspect.getsourcelines(f)
    (number,) = [start + k for k, line in enumerate(lines) if text in line]
    return number


@pytest.mark.parametrize(
    ("loop", "kind", "line"),
    [
        (read_beside_write, "copy", ".at[i].set"),
        (vmapped_cond, "select", "lax.cond"),
        (vmapped_while, "select", "lax.while_loop"),
        (decay, "anew", "0.9 *"),
        (decay, "copy", "0.9 *"),
    ],
)
def test_an_operation_is_found_with_its_line_and_type(loop, kind, line):
    """The advice for each cause is in `test_advice.py`."""
    found = loop_copies(loop)(X)
    assert {(copy.kind, copy.line) for copy in found} >= {(kind, line_with(loop, line))}
    if loop is decay:
        assert all("If you want that, leave it" in copy.advice for copy in found)
    for copy in found:
        assert Path(copy.file) == Path(__file__)
        assert copy.code == Path(__file__).read_text().splitlines()[copy.line - 1].strip()
        assert copy.dtype == "float32"
        assert copy.shape[-2:] == (50, 8)
        assert copy.num_bytes == 4 * np.prod(copy.shape)


LIBRARY = """
from jax.extend.core import Primitive
from jax.interpreters import mlir

write_p = Primitive("write")
write_p.def_abstract_eval(lambda b, i, row: b)
mlir.register_lowering(write_p, mlir.lower_fun(lambda b, i, row: b.at[i].set(row), multiple_results=False))

def write(b, i, row):
    return _write(b, i, row)

def _write(*operands):
    return write_p.bind(*operands)
"""


@pytest.mark.parametrize("folder", ["site-packages", "mine"])
def test_a_primitive_of_a_library_has_the_line_of_the_loop_that_calls_it(tmp_path, monkeypatch, folder):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "rows_of_others.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path / folder)
    monkeypatch.delitem(sys.modules, "rows_of_others", raising=False)
    rows = importlib.import_module("rows_of_others")

    def loop(x):
        def body(c, i):
            b, total = c
            return (rows.write(b, i, jnp.sin(x[i])), total + jnp.sum(b[(i * 7) % 50])), None

        return lax.scan(body, (jnp.ones_like(x), 0.0), ROWS)[0][1]

    found = loop_copies(loop)(X)
    assert {(copy.file, copy.line) for copy in found} == {(__file__, line_with(loop, "rows.write("))}


def attention_in_our_loop(x):
    def body(c):
        i, b = c
        return i + 1, ta_write(b, i, jnp.tanh(b @ ta_read(b, i)) @ b)

    last = while_loop(lambda c: c[0] < len(x), body, (0, x), max_steps=len(x), residuals="tape")
    return jnp.sum(last[1])


@pytest.mark.slow
def test_our_loop_is_named_by_its_own_lines():
    found = loop_copies(jax.grad(attention_in_our_loop))(X)
    assert {copy.line for copy in found if copy.kind == "save"} == {line_with(attention_in_our_loop, "while_loop(")}
    assert {copy.line for copy in found if copy.kind != "save"} == {line_with(attention_in_our_loop, "ta_write(")}


def test_a_history_of_the_program_is_no_tape():
    def frames(noise):
        def step(carry, x):
            (stack, history), (t, e) = carry, x
            stack = jnp.roll(stack, -1, 0).at[-1].set(0.9 * stack[-1] + e)
            return (stack, history.at[t].set(stack)), None

        start = jnp.zeros((4, 8)), jnp.zeros((len(noise), 4, 8))
        return lax.scan(step, start, (jnp.arange(len(noise)), noise))[0][1]

    plain, ours = (loop_copies(f)(X) for f in (frames, transformed(frames)))
    # Each step moves all rows of the stack, copies them, and stores them in the history.
    assert sorted(copy.kind for copy in plain) == sorted(copy.kind for copy in ours) == ["anew", "copy", "save"]
    assert "kept-on-the-tape" not in {copy.reason for copy in ours}
    assert "kept-on-the-tape" in {copy.reason for copy in loop_copies(jax.grad(attention_in_our_loop))(X)}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "of", [jax.jit, jax.checkpoint, lambda f: lambda x: f(x), lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x]))]
)
@pytest.mark.parametrize(("loop", "line"), [(vmapped_while, "lax.while_loop"), (vmapped_cond, "lax.cond")])
def test_a_select_is_on_the_line_of_its_loop_whoever_calls_it(of, loop, line):
    found = loop_copies(of(loop))(X)
    assert {copy.line for copy in found if copy.kind == "select"} == {line_with(loop, line)}


def test_an_array_of_one_element_is_no_buffer():
    def loop(x):
        return lax.fori_loop(0, 50, lambda i, c: (c[1], c[0].at[i % 1].set(c[1][i % 1] + 1)), (x, x))

    assert loop_copies(loop)(np.ones(1, np.float32)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", list(programs)[::2])
def test_copies_are_found_in_plain_loops_and_not_in_ours(name):
    x = np.ones((50, 8), np.float32)
    assert loop_copies(jax.grad(programs[name].with_ops(ours)))(x) == []
    with_plain = jax.grad(programs[name].with_ops(plain))
    copies = hlo_text.whole_buffer_operations_in_loops(in_place.compiled(with_plain, x).as_text(), x.nbytes)
    assert bool(loop_copies(with_plain)(x)) == bool(copies)


@pytest.mark.skipif(bool(gpu_hlo.why_not()), reason=gpu_hlo.why_not())
@pytest.mark.parametrize("name", ["cross", "closed_over_cond", "many_rows"])
def test_loops_for_a_gpu_are_read_as_well(name):
    x = np.ones((200, 64), np.float32)

    def found(ops):
        return list(hlo_buffers.findings(gpu_hlo.compiled_for_h100(jax.grad(programs[name].with_ops(ops)), x)))

    assert found(plain)
    assert found(ours) == []


def test_a_compiler_that_jax_has_left_out_is_named_with_what_to_set(monkeypatch):
    def refused(*_, **__):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(ahead, "why_not", lambda platform: "")
    monkeypatch.setattr(ahead.topologies, "get_topology_desc", refused)
    ahead._described_devices.cache_clear()
    with pytest.raises(ImportError, match=r"loop_copies: .*JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 before Python starts"):
        loop_copies(jnp.sin, platform="cuda")(1.0)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_a_platform_that_is_not_there_is_compiled_for(platform):
    if platform != "cpu" and ahead.why_not(platform):
        with pytest.raises(
            ImportError, match=f"loop_copies: XLA's compiler for '{platform}' is not installed. Run `pip"
        ):
            loop_copies(jnp.sin, platform=platform)(1.0)
        return

    def gradient(x, ops):
        def body(i, b):
            return ops.write(b, i, jnp.sin(ops.read(b, i - 1)))

        return jax.grad(lambda x: jnp.sum(lax.fori_loop(1, len(x), body, x) ** 2))(x)

    x = np.ones((1000, 64), np.float32)
    found = loop_copies(functools.partial(gradient, ops=plain), platform=platform)(x)
    assert found and found[0].shape == x.shape and found[0].file == row_programs.__file__
    if platform != "cuda" or "cuda" in _kernels.modules:
        assert loop_copies(functools.partial(gradient, ops=ours), platform=platform)(x) == []


def test_there_are_three_platforms():
    with pytest.raises(
        ValueError, match="loop_copies: platform must be None or one of 'cpu', 'cuda', 'tpu', but it is 'x'"
    ):
        loop_copies(jnp.sin, platform="x")(1.0)


def recurrent_with_a_state_of_the_size_of_its_inputs(x):
    def body(h, row):
        h = jnp.tanh(h @ jnp.eye(50) + row[0])
        return h, h

    return jnp.sum(lax.scan(body, jnp.zeros((8, 50)), x)[1] ** 2)


def scan_in_a_scan(x):
    def outer(h, row):
        def inner(h, other):
            h = jnp.sin(h + other * row[0])
            return h, h

        return lax.scan(inner, h, x)

    return jnp.sum(lax.scan(outer, jnp.zeros(8), x)[1] ** 2)


def layers_in_a_scan(x):
    weights = jnp.ones((3, 8, 8)) * x[0, 0]

    def step(h, row):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w) + row, None), h, weights)[0], row

    return jnp.sum(lax.scan(step, jnp.zeros(8), x)[0] ** 2)


def random_numbers(x):
    def body(key, row):
        key, of_step = jax.random.split(key)
        return key, jax.random.normal(of_step, (50, 8)) * row

    return jnp.sum(lax.scan(body, jax.random.key(0), x)[1] ** 2)


def no_loop(x):
    return jnp.sum(jnp.sin(x) ** 2)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(
    "loop",
    [
        recurrent_with_a_state_of_the_size_of_its_inputs,
        scan_in_a_scan,
        layers_in_a_scan,
        random_numbers,
        no_loop,
    ],
)
def test_states_stacked_outputs_and_inner_loops_are_no_copies(loop):
    assert loop_copies(loop)(X) == []
    assert loop_copies(jax.grad(loop))(X) == []


def test_jitted_functions_of_any_arguments_can_be_looked_at():
    @functools.partial(jax.jit, static_argnums=1)
    def grown(state, steps):
        return lax.fori_loop(0, steps, lambda i, ta: ta.write(i, ta.read(i // 2) * state["gain"]), state["rows"])

    state = {"rows": TensorArray.from_array(jnp.ones((50, 8))), "gain": 2.0}
    assert loop_copies(grown)(state, 20) == []
    assert loop_copies(jax.jit(jax.grad(write_in_a_scan)))(jnp.ones((50, 8)))


PROGRAM = """
import sys
import jax, jax.numpy as jnp
from jax_tensorarray.doctor import loop_copies
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
f = lambda x: jax.lax.fori_loop(0, 30, lambda i, b: b.at[i].set(jnp.sin(x[i])), x).sum()
print(*{copy.line for copy in loop_copies(jax.grad(f))(jnp.ones((30, 64)))})
"""


@pytest.mark.slow
def test_the_line_is_that_of_today_also_where_jax_has_stored_the_program(tmp_path):
    file = tmp_path / "program.py"
    line = next(k for k, text in enumerate(PROGRAM.splitlines(), 1) if text.startswith("f ="))
    for lines_before in (0, 3):
        file.write_text("\n" * lines_before + PROGRAM)
        command = [sys.executable, file, tmp_path / "cache"]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert int(run.stdout) == line + lines_before


def test_smaller_buffers_can_be_left_out():
    num_bytes = 50 * 8 * 4
    found = loop_copies(read_beside_write, min_bytes=num_bytes)(X)
    assert found
    assert found == loop_copies(read_beside_write)(X)
    assert loop_copies(read_beside_write, min_bytes=num_bytes + 1)(X) == []
    small = loop_copies_of_large_buffers(read_beside_write)(X)
    assert (small, small.smaller) == ([], len(found))
    assert " ".join(str(small).split()).endswith(f", but for {len(found)} smaller than min_bytes.")
    assert found.smaller == 0


def test_a_report_has_lines_code_and_advice_and_an_empty_one_is_one_line():
    found = loop_copies(jax.grad(write_in_a_scan))(X)
    report = str(found)
    assert report.startswith(f"{len(found)} operations on whole buffers in loops, ")
    line = line_with(write_in_a_scan, ".at[i].set")
    copy = "backward pass, a copy of the buffer, float32[50, 8] (2 times): 1.6 KiB per step, 50 steps."
    code = "    return ys.at[i].set(jnp.tanh(ys[i // 2] + x[i])), None"
    assert f"test_loop_copies.py:{line}\n{code}\n{copy}\nPut in_place" in report
    assert " ".join(report.split()).count(found[0].advice) == 1
    assert str(loop_copies(no_loop)(X)).count("\n") == 0


def test_a_line_that_is_not_known_or_not_there_is_left_out():
    one = LoopCopy(
        kind="copy",
        operation="copy.1",
        dtype="int8",
        shape=(3, 2048),
        num_bytes=6144,
        file=None,
        line=None,
        code="",
        in_gradient=False,
        advice="Do this.",
    )
    report = str(LoopCopies([one]))
    assert report.startswith("1 operation on a whole buffer in loops, 6.0 KiB per step:\n")
    copied = "a copy of the buffer, int8[3, 2048]: 6.0 KiB per step, steps that XLA cannot count."
    assert f"a line that XLA does not name\n{copied}\nDo this." in report


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "text"),
    [
        ((np.ones(3),), {}, TypeError, "the first argument must be a function, not ndarray"),
        ((no_loop, X), {"min_bytes": 0.5}, TypeError, "min_bytes must be an integer, not float"),
        ((no_loop, X), {"min_bytes": -1}, ValueError, "min_bytes must not be negative, but it is -1"),
    ],
)
def test_bad_arguments_are_refused(arguments, keywords, error, text):
    with pytest.raises(error, match=text):
        loop_copies(arguments[0], **keywords)(*arguments[1:])


TABLES = """\
HloModule jit_f

FileNames
1 "/home/me/a.py"
2 "/home/me/b.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=12 end_column=67}
2 {file_name_id=2 function_name_id=1 line=9 end_line=9 column=6 end_column=53}

StackFrames
1 {file_location_id=1 parent_frame_id=%d}
2 {file_location_id=2 parent_frame_id=%d}

"""


@pytest.mark.parametrize("none_is", [0, 1])
def test_the_tables_of_frames_are_read_however_parents_are_counted(none_is):
    frames = hlo_text.frames(TABLES % (none_is, none_is + 1))
    inner, outer = ("/home/me/b.py", 9), ("/home/me/a.py", 7)
    assert frames('metadata={op_name="jit(f)/add" stack_frame_id=2}') == [inner, outer]
    assert frames('metadata={op_name="jit(f)/add" stack_frame_id=1}') == [outer]
    assert frames('metadata={op_name="jit(f)/add"}') == []


def test_a_line_that_stands_in_the_instruction_is_read():
    frames = hlo_text.frames("HloModule jit_f\n")
    assert frames('metadata={op_name="add" source_file="/home/me/a.py" source_line=7}') == [("/home/me/a.py", 7)]
