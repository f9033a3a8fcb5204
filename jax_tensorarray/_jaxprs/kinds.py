"""A table of the kinds of JAX's primitives, by name, because some are private or only in some versions.

A row has words and the primitives that these words describe. Each primitive is in one row. The sets below define the
words. A primitive that is not in the table has no words.
"""

from jax.extend.core import Primitive
from jax.extend.core import primitives as jax_primitives

from jax_tensorarray._types import Equation

_TABLE = (
    ("elementwise cheap fused arithmetic", "add max min mul sub"),
    ("elementwise cheap fused arithmetic moving", "select_n"),
    ("elementwise cheap fused arithmetic moving filling", "convert_element_type"),
    ("elementwise cheap fused", "abs neg"),
    ("elementwise fused arithmetic", "div"),
    ("elementwise fused logic", "and eq ne not or"),
    ("elementwise fused repeated", "ge gt le lt"),
    ("elementwise fused", "integer_pow sign square"),
    ("elementwise fused transcendental", "erf pow tan"),
    ("elementwise fused once", "rsqrt sqrt"),
    ("elementwise fused once transcendental", "exp2 expm1"),
    ("elementwise fused once transcendental vectorised", "exp log log1p logistic tanh"),
    ("elementwise fused transcendental vectorised", "cos sin"),
    ("fused once", "cbrt"),
    ("fused logic", "xor"),
    ("fused repeated", "clamp"),
    ("fused arithmetic moving", "add_any"),  # gradients add up whole arrays, most of them zeros
    ("fused", "acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type broadcast_to ceil"),
    ("fused", "clz complex conj cosh digamma eq_to erf_inv erfc floor imag is_finite le_to lgamma log2 lt_to mulhi"),
    ("fused", "nextafter one_minus_square polygamma population_count pvary real reduce_precision rem round"),
    ("fused", "shift_left shift_right_arithmetic shift_right_logical sinh split stack tile unstack zeta"),
    ("fused identity", "stop_gradient"),
    ("fused identity moving", "copy"),
    ("fused layout moving", "reshape squeeze transpose"),
    ("fused layout moving filling", "broadcast_in_dim"),
    ("fused filling", "iota"),
    ("fused uninitialised", "empty empty2"),
    ("fused moving", "pad"),
    ("fused moving repeated", "slice"),
    ("fused moving rearranging repeated", "concatenate rev"),
    ("fused moving rearranging read", "gather"),
    ("fused moving read", "dynamic_slice"),
    ("fused whole", "top_k"),
    ("update alone moving", "dynamic_update_slice"),
    ("update scatter moving", "scatter scatter-add"),
    ("update scatter", "scatter-max scatter-min scatter-mul scatter-sub"),
    ("update", "ta_add ta_max ta_write"),
    ("read", "ta_read"),
    ("ref", "addupdate get swap"),
    ("passed_on", "name ta_noted"),
    ("call", "closed_call custom_jvp_call custom_vjp_call eval_jaxpr jit"),
    ("alone", "rng_bit_generator"),
    ("alone whole", "conv_general_dilated dot_general"),
    ("alone whole slow", "triangular_solve"),
    ("alone slow", "cholesky fft"),
    ("once whole", "argmax argmin"),
    ("once whole rearranging", "sort"),
    ("once", "reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_window"),
    ("once", "reduce_window_max reduce_window_min reduce_window_sum reduce_xor"),
    ("slow", "custom_linear_solve eig eigh geqrf hessenberg householder_product lu lu_pivots_to_permutation qr"),
    ("slow", "schur svd tridiagonal tridiagonal_solve"),
    ("slow foreign", "ffi_call pallas_call"),
    ("", "after_all all_gather all_to_all approx_top_k axis_index call cond create_token cumlogsumexp cummax cummin"),
    ("", "cumprod cumsum custom_lin debug_callback debug_print device_put igamma igamma_grad_a igammac"),
    ("", "layout_constraint optimization_barrier pmax pmin polynomial ppermute psum ragged_all_to_all"),
    ("", "ragged_dot_general random_bits random_fold_in random_gamma random_seed random_split random_unwrap"),
    ("", "random_wrap regularized_incomplete_beta remat2 reshard rng_uniform scan select_and_gather_add"),
    ("", "select_and_scatter select_and_scatter_add sharding_constraint threefry2x32 while"),
)

#: The words of each primitive.
KINDS = {name: frozenset(words.split()) for words, names in _TABLE for name in names.split()}


def _having(word: str) -> frozenset[str]:
    return frozenset(name for name, words in KINDS.items() if word in words)


# --- meaning ---------------------------------------------------------------------------------------

#: The common functions of single elements: row `i` of the result depends only on row `i` of the operands.
ELEMENTWISE = _having("elementwise")

#: Elementwise operations that cost no more than another read of the row.
CHEAP = _having("cheap")

#: Combinations of predicates.
LOGIC = _having("logic")

#: The result is the operand. Only its derivative differs.
IDENTITIES = _having("identity")

#: The results are the operands after lowering.
PASSES_ON = _having("passed_on")

#: The same elements in another shape, or repeated.
LAYOUT = _having("layout")

#: May return an array filled with one number, such as an initial buffer.
FILLS = _having("filling")

#: Uninitialised arrays.
UNINITIALISED = _having("uninitialised")

#: Each element of the result may be any element of the operands.
MAKES_ALL = _having("rearranging")

#: Operations that move elements.
MOVES = _having("moving")

#: Operations on whole arrays, besides reductions.
WHOLE = _having("whole")

#: Reads of rows at traced indices.
READS = _having("read")

#: Programs compute indices with these: equal operands and parameters give equal results.
OF_INDICES = ELEMENTWISE.union(LAYOUT, ("clamp", "concatenate", "rem", "slice", "squeeze"))

#: The result is the first operand with some rows replaced.
UPDATES = _having("update")
SCATTERS = _having("scatter")

#: Reads and updates of refs.
OF_REFS = _having("ref")

#: Operations that run the one jaxpr in their parameters, with their own operands.
CALLS = _having("call")

# --- cost -------------------------------------------------------------------------------------------------

#: Operations on integers and bools that take no longer than a read of the result. None is a reduction.
REPEATED = CHEAP | LOGIC | LAYOUT | _having("repeated")

#: Functions that take many operations for each element.
TRANSCENDENTAL = _having("transcendental")

#: Operations that take long for the size of their results.
SLOW = _having("slow")

#: Operations that XLA may duplicate into each fusion that uses the result.
FUSED = _having("fused")

#: The fused operations that XLA also duplicates as a whole into a fusion with a slice of the result.
ARITHMETIC = _having("arithmetic")

#: The fused operations that compute elements. Some also move elements or change the shape of an array.
COMPUTES = ARITHMETIC | (FUSED - MOVES - FILLS - UNINITIALISED - WHOLE)

#: Operations that XLA duplicates into no fusion.
ALONE = _having("alone")

#: Operations that XLA for CPUs never duplicates, however many others use the result: it duplicates those that it takes
#: for cheap, even a sine. XLA may turn quotients, powers and products into cheap operations, so they are not here.
ONCE = _having("once")

#: Functions that XLA for CPUs vectorises, many times faster.
VECTORISED = _having("vectorised")

#: Primitives of JAX, also newer ones than the table, except for those that run foreign code.
OF_JAX = frozenset(x.name for x in vars(jax_primitives).values() if isinstance(x, Primitive)).union(KINDS)
OF_JAX -= _having("foreign")


def is_read(eqn: Equation) -> bool:
    """Return whether the result is a part of the first operand, at a constant or a traced index."""
    return eqn.primitive.name in READS or eqn.primitive.name == "slice"


def is_update(eqn: Equation) -> bool:
    """Return whether the result is the first operand with some rows replaced."""
    return eqn.primitive.name in UPDATES
