"""The reader of optimised HLO: on text written by hand, and on loops that are known to copy or not to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from figures import FREE
from in_place import compiled
from jax import lax
from row_programs import ours, programs

from jax_tensorarray import ta_read, ta_write
from jax_tensorarray._hlo import text as hlo_text

BUFFER = 100 * 64 * 4

LOOP = """\
HloModule jit_f, is_scheduled=true

%parallel_copy (p: f32[100,64]) -> f32[100,64] {
  %p = f32[100,64]{1,0} parameter(0)
  ROOT %outlined = f32[100,64]{1,0} copy(%p)
}

%fused_update (b: f32[100,64], row: f32[1,64], i: s32[]) -> f32[100,64] {
  %b = f32[100,64]{1,0} parameter(0)
  %row = f32[1,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %update = f32[100,64]{1,0} dynamic-update-slice(%b, %row, %i, %zero)
  ROOT %reshaped = f32[6400]{0} bitcast(%update)
}

%fused_zeros (row: f32[1,64], i: s32[]) -> f32[100,64] {
  %row.1 = f32[1,64]{1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %zeros = f32[100,64]{1,0} broadcast(%i.1), dimensions={}
  ROOT %dense = f32[100,64]{1,0} dynamic-update-slice(f32[100,64]{1,0} %zeros, f32[1,64]{1,0} %row.1, s32[] %i.1)
}

%fused_sum (a: f32[100,64], b: f32[100,64]) -> f32[6400] {
  %a.1 = f32[100,64]{1,0} parameter(0)
  %b.1 = f32[100,64]{1,0} parameter(1)
  %sum = f32[100,64]{1,0} add(%a.1, %b.1)
  ROOT %flat = f32[6400]{0} bitcast(%sum)
}

%taken (arg: (f32[100,64])) -> f32[100,64] {
  %arg = (f32[100,64]{1,0}) parameter(0)
  %of_arg = f32[100,64]{1,0} get-tuple-element(%arg), index=0
  ROOT %in_branch = f32[100,64]{1,0} copy(%of_arg)
}

%untaken (arg.1: (f32[100,64])) -> f32[100,64] {
  %arg.1 = (f32[100,64]{1,0}) parameter(0)
  ROOT %of_arg.1 = f32[100,64]{1,0} get-tuple-element(%arg.1), index=0
}

%inner_body (c.1: (f32[100,64], s32[])) -> (f32[100,64], s32[]) {
  %c.1 = (f32[100,64]{1,0}, s32[]) parameter(0)
  %of_c.1 = f32[100,64]{1,0} get-tuple-element(%c.1), index=0
  %in_inner = f32[100,64]{1,0} copy(%of_c.1)
  ROOT %t.1 = (f32[100,64]{1,0}, s32[]) tuple(%in_inner, %i.9)
}

%body (c: (f32[100,64], s32[])) -> (f32[100,64], s32[]) {
  %c = (f32[100,64]{1,0}, /*index=1*/ s32[]) parameter(0)
  %of_c = f32[100,64]{1,0} get-tuple-element(%c), index=0
  %i.9 = s32[] get-tuple-element(%c), index=1
  %direct = f32[100,64]{1,0} copy(%of_c)
  %small = f32[64]{0} copy(%row.9)
  %called = f32[100,64]{1,0} call(%direct), to_apply=%parallel_copy
  %branched = f32[100,64]{1,0} conditional(%p.9, %x, %x), branch_computations={%untaken, %taken}
  %looped = (f32[100,64]{1,0}, s32[]) while(%c), condition=%cond, body=%inner_body
  %in_place = f32[6400]{0} fusion(%of_c, %row.9, %i.9), kind=kLoop, calls=%fused_update
  %made_dense = f32[100,64]{1,0} fusion(%row.9, %i.9), kind=kLoop, calls=%fused_zeros
  %added = f32[6400]{0} fusion(%called, %branched), kind=kLoop, calls=%fused_sum
  %kernel = (f32[100,64]{1,0}, f32[64]{0}) custom-call(%of_c), custom_call_target="jax_tensorarray_swap"
  ROOT %t = (f32[100,64]{1,0}, s32[]) tuple(%called, %i.9)
}

%cond (c.2: (f32[100,64], s32[])) -> pred[] {
  %c.2 = (f32[100,64]{1,0}, s32[]) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main.3 (x: f32[100,64]) -> f32[100,64] {
  %x.9 = f32[100,64]{1,0} parameter(0)
  %before_the_loop = f32[100,64]{1,0} copy(%x.9)
  %init = (f32[100,64]{1,0}, s32[]) tuple(%before_the_loop, %zero.9)
  %while.1 = (f32[100,64]{1,0}, s32[]) while(%init), condition=%cond, body=%body, backend_config={"n":"3"}
  ROOT %out = f32[100,64]{1,0} get-tuple-element(%while.1), index=0
}
"""


def names(operations):
    return sorted(op.name for op in operations)


def test_copies_are_found_in_the_body_and_in_what_it_calls_but_not_outside_the_loop():
    assert names(hlo_text.copies_in_loops(LOOP, BUFFER)) == ["direct", "in_branch", "in_inner", "outlined"]


def test_smaller_copies_count_where_asked_for():
    assert "small" in names(hlo_text.copies_in_loops(LOOP, 64 * 4))
    assert hlo_text.copies_in_loops(LOOP, BUFFER + 1) == []


def test_an_update_of_an_operand_is_in_place_and_an_update_of_zeros_or_a_sum_is_not():
    assert set(names(hlo_text.whole_buffer_operations_in_loops(LOOP, BUFFER))) == {
        *names(hlo_text.copies_in_loops(LOOP, BUFFER)),
        "made_dense",
        "added",
    }


def test_the_text_of_loops_is_what_they_run_and_what_runs_them():
    unused = "%fused_nothing (p.2: f32[9]) -> f32[9] {\n  ROOT %p.2 = f32[9]{0} parameter(0)\n}\n\nENTRY "
    loops = hlo_text.loops_only(LOOP.replace("ENTRY ", unused))
    assert loops.splitlines() == LOOP.replace("ENTRY ", "\nENTRY ").replace("\n\n\n", "\n\n").splitlines()


ON_A_GPU = """\
%fused_slice (b: f32[100,64], i: s32[]) -> f32[1,64] {
  %b = f32[100,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %slice = f32[1,64]{1,0} dynamic-slice(%b, %i), dynamic_slice_sizes={1,64}
}

%fused_call (b.1: f32[100,64], i.1: s32[], rows: f32[9,64]) -> f32[100,64] {
  %b.1 = f32[100,64]{1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %rows = f32[9,64]{1,0} parameter(2)
  %row = f32[1,64]{1,0} dynamic-slice(%rows, %i.1), dynamic_slice_sizes={1,64}
  ROOT %call = f32[100,64]{1,0} custom-call(%b.1, %i.1, %row), output_to_operand_aliasing={{}: (0, {})}
}

%fused_other_call (b.2: f32[100,64]) -> f32[100,64] {
  %b.2 = f32[100,64]{1,0} parameter(0)
  ROOT %call.2 = f32[100,64]{1,0} custom-call(%b.2), custom_call_target="y"
}

%body (c: (f32[100,64], s32[])) -> (f32[100,64], s32[]) {
  %start = ((f32[100,64]{1,0}, s32[]), f32[1,64]{1,0}, u32[]) fusion-start(%b.3, %i.3), kind=kLoop, calls=%fused_slice
  %done = f32[1,64]{1,0} fusion-done(%start)
  %in_place = f32[100,64]{1,0} fusion(%b.3, %i.3, %rows.3), kind=kCustom, calls=%fused_call
  %anew = f32[100,64]{1,0} fusion(%in_place), kind=kCustom, calls=%fused_other_call
  ROOT %t = (f32[100,64]{1,0}, s32[]) tuple(%anew, %i.3)
}

ENTRY %main (x: f32[100,64]) -> (f32[100,64], s32[]) {
  %loop = (f32[100,64]{1,0}, s32[]) while(%init), condition=%condition, body=%body
}
"""


def test_early_slices_and_fused_updates_touch_no_whole_buffer():
    operations = {op.name: op for op in hlo_text.operations_in_loops(ON_A_GPU)}
    assert (operations["start"].opcode, operations["start"].num_bytes) == ("fusion", 64 * 4)
    assert operations["in_place"].opcode == "dynamic-update-slice"
    assert [op.name for op in hlo_text.whole_buffer_operations_in_loops(ON_A_GPU, BUFFER)] == ["anew"]


def test_text_without_a_loop_has_no_loop_operations():
    assert list(hlo_text.operations_in_loops("")) == []
    assert hlo_text.copies_in_loops(LOOP.replace("body=", "calls="), BUFFER) == []


@pytest.mark.parametrize(
    ("shape", "num_bytes"),
    [
        ("f32[100,64]{1,0}", 25600),
        ("pred[8]{0}", 8),
        ("bf16[3]{0}", 6),
        ("f8e4m3fn[3]{0}", 3),
        ("f8e5m2fnuz[3]{0}", 3),
        ("c128[2]{0}", 32),
        ("s4[6]{0}", 3),
        ("f64[]", 8),
        ("f32[0,64]{1,0}", 0),
        ("token[]", 0),
        ("(s32[], (f32[2,3]{1,0}, u8[5]{0}), /*index=2*/ bf16[4]{0})", 24),
    ],
)
def test_size_of_the_largest_array_of_a_shape(shape, num_bytes):
    assert hlo_text.array_bytes(shape) == num_bytes


X = np.ones((100, 64), np.float32)


def chain(from_data, x, at):
    def body(i, b):
        to, seen = (at[i], at[i - 1]) if from_data else (i, i - 1)
        return ta_write(b, to, jnp.sin(ta_read(b, seen)))

    return jnp.sum(lax.fori_loop(1, len(x), body, x))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("transform", [lambda f: f, jax.grad], ids=["forward", "gradient"])
def test_an_index_from_data_costs_about_as_much_as_one_that_the_loop_counts(transform):
    """In operations an iteration."""
    x, at = jnp.ones((4000, 4), jnp.float32), jnp.arange(4000, dtype=jnp.int32)
    hlo = [compiled(transform(functools.partial(chain, of_data)), x, at).as_text() for of_data in (True, False)]
    from_data, counted = ([op for op in hlo_text.operations_in_loops(text) if op.opcode not in FREE] for text in hlo)
    assert 0 < len(from_data) <= 2 * len(counted), from_data
    assert hlo_text.whole_buffer_operations_in_loops(hlo[0], x.nbytes) == []


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ["read_then_write", "branches"])
def test_it_is_the_same_where_machine_code_is_made_with_less_effort(name):
    """As the tests do."""
    lowered = jax.jit(jax.grad(programs[name].with_ops(ours))).lower(X)
    less, more = (lowered.compile({"xla_backend_optimization_level": level}).as_text() for level in (0, 3))
    assert less == more
