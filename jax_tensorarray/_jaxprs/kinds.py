"""The kinds of primitives of JAX: one table, by name, since some are private, and some are only in some versions.

A row has the words that say what its primitives do, and these primitives. A primitive is in one row. The sets below say
what each word means. A primitive that the table does not know has no words.
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
    ("call", "closed_call custom_jvp_call custom_vjp_call eval_jaxpr jit pjit"),
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

#: By primitive, what it does.
KINDS = {name: frozenset(words.split()) for words, names in _TABLE for name in names.split()}


def _having(word: str) -> frozenset[str]:
    return frozenset(name for name, words in KINDS.items() if word in words)


# --- what an operation means ---------------------------------------------------------------------------------------

#: A row of the result is made of rows of the operands: the common functions of single elements.
ELEMENTWISE = _having("elementwise")

#: Elementwise operations that cost no more than reading the row again.
CHEAP = _having("cheap")

#: Combinations of predicates.
LOGIC = _having("logic")

#: The result is the operand, but for its derivative.
IDENTITIES = _having("identity")

#: What is lowered to its operands.
PASSES_ON = _having("passed_on")

#: The same elements in another shape, or repeated.
LAYOUT = _having("layout")

#: An array filled with one number, as many programs make for each of their buffers.
FILLS = _having("filling")

#: An array of any content.
UNINITIALISED = _having("uninitialised")

#: Each element is made from other ones.
MAKES_ALL = _having("rearranging")

#: Operations that move elements.
MOVES = _having("moving")

#: What computes with all of an array, besides sums and other reductions.
WHOLE = _having("whole")

#: Reads of rows at computed places.
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

# --- what it costs -------------------------------------------------------------------------------------------------

#: Operations on integers and bools that take no longer than to read their result from memory. None is a reduction.
REPEATED = CHEAP | LOGIC | LAYOUT | _having("repeated")

#: Functions that take many operations for each element.
TRANSCENDENTAL = _having("transcendental")

#: Operations that take long for the size of their results.
SLOW = _having("slow")

#: What XLA makes again where it fuses it.
FUSED = _having("fused")

#: The fused operations that XLA also computes again, as a whole, in a fusion with a slice of the result.
ARITHMETIC = _having("arithmetic")

#: Operations of XLA's own that it repeats in no fusion.
ALONE = _having("alone")

#: Operations that XLA for CPUs runs once, however many others use the result: it repeats what it takes to be cheap,
#: even a sine. Quotients, powers and products are not here, as XLA may turn them into cheap operations.
ONCE = _having("once")

#: Functions that XLA for CPUs computes many times faster in vectors.
VECTORISED = _having("vectorised")

#: Primitives of JAX, also those of a version that is newer than the table, but for those that run code of others.
OF_JAX = frozenset(x.name for x in vars(jax_primitives).values() if isinstance(x, Primitive)).union(KINDS)
OF_JAX -= _having("foreign")


def is_read(eqn: Equation) -> bool:
    """Return whether the result is a part of the first operand, at a known or a computed place."""
    return eqn.primitive.name in READS or eqn.primitive.name == "slice"


def is_update(eqn: Equation) -> bool:
    """Return whether the result is the first operand with some rows replaced."""
    return eqn.primitive.name in UPDATES
