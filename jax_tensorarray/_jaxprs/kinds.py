"""What the primitives of JAX do, by name: some are private, and some are only in some versions."""

from jax.extend.core import Primitive
from jax.extend.core import primitives as jax_primitives

from jax_tensorarray._types import Equation

SCATTERS = ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")

#: The result is the first operand with some rows replaced.
UPDATES = frozenset(("dynamic_update_slice", *SCATTERS))

#: Reads of rows at computed places.
READS = frozenset(("dynamic_slice", "gather"))

#: Reads and updates of refs.
OF_REFS = frozenset(("get", "swap", "addupdate"))

#: Elementwise operations that cost no more than reading the row again.
CHEAP = frozenset(("abs", "add", "convert_element_type", "max", "min", "mul", "neg", "select_n", "sub"))

ELEMENTWISE = CHEAP.union(
    ("and", "cos", "div", "eq", "erf", "exp", "exp2", "expm1", "ge", "gt", "integer_pow", "le", "log", "log1p"),
    ("logistic", "lt", "ne", "not", "or", "pow", "rsqrt", "sign", "sin", "sqrt", "square", "tan", "tanh"),
)

#: The result is the operand, but for its derivative.
IDENTITIES = frozenset(("copy", "stop_gradient"))

#: What is lowered to its operands.
PASSES_ON = frozenset(("name", "ta_noted"))

#: Combinations of predicates.
LOGIC = frozenset(("and", "or", "not", "xor", "eq", "ne"))

#: The same elements in another shape, or repeated.
LAYOUT = frozenset(("broadcast_in_dim", "reshape", "squeeze", "transpose"))

#: An array filled with one number, as many programs make for each of their buffers.
FILLS = frozenset(("broadcast_in_dim", "convert_element_type", "iota"))

#: Each element is made from other ones.
MAKES_ALL = frozenset(("concatenate", "gather", "rev", "sort"))

#: What moves elements. Gradients add up whole arrays by `add_any`, most of them zeros.
MOVES = LAYOUT.union(
    READS,
    ("add_any", "concatenate", "convert_element_type", "copy", "copy_p", "dynamic_update_slice", "pad", "rev"),
    ("scatter", "scatter-add", "scatter_add", "select_n", "slice", "squeeze"),
)

#: What computes with all of an array, besides sums and other reductions.
WHOLE = frozenset(("argmax", "argmin", "conv_general_dilated", "dot_general", "sort", "top_k", "triangular_solve"))

#: JAX's own primitives that have a public name, and others that may be met in loops.
OF_JAX = frozenset(x.name for x in vars(jax_primitives).values() if isinstance(x, Primitive)).union(
    ("broadcast_to", "debug_callback", "debug_print", "layout_constraint", "optimization_barrier", "pvary"),
    ("ragged_dot_general", "random_unwrap", "random_wrap", "reshard", "split", "stack", "tile", "unstack"),
)


def is_update(eqn: Equation) -> bool:
    """Return whether the result is the first operand with some rows replaced."""
    return eqn.primitive.name in UPDATES
