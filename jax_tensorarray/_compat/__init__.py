"""Every use of JAX's private API and every branch on its version, each with its reason.

Each function says what happens if the private name is missing. Mostly a program is slower, or an error is not found.
"""

import jax  # before jaxlib, which otherwise logs all of XLA's work

# It has no public name. It registers our callbacks with XLA's partitioner.
from jaxlib import xla_client

from jax_tensorarray._compat.checkify import checked_as, checked_besides, checked_inside, expanded_as
from jax_tensorarray._compat.checkpoints import CHECKPOINT, asks_policies, checkpoint_of, is_saved
from jax_tensorarray._compat.custom_vjp import custom_vjp_rules, define_vjp, log_of
from jax_tensorarray._compat.equations import eliminates_dead_code, frame_of, is_drop, made_jaxpr, new_variable, within
from jax_tensorarray._compat.first_use import Replacement, first_use, on_first_use
from jax_tensorarray._compat.hijax import has_linearization, name_of_primitive
from jax_tensorarray._compat.jaxprs import (
    cached,
    closed,
    closed_over,
    discharged,
    has_callbacks,
    has_ordered_effects,
    has_unordered_io,
    known_part,
    lifted,
    makes_refs,
    name_of_function,
    only_communicates,
    opened,
    replaced,
    writes_refs,
)
from jax_tensorarray._compat.lowering import (
    Traceable,
    before_lowering,
    is_divided,
    lowers_its_bodies,
    taken_apart,
    traceable_lowerings,
    traced_lowering,
)
from jax_tensorarray._compat.private import private_names
from jax_tensorarray._compat.pytrees import (
    flattened_by,
    flattened_by_control_flow,
    flattened_by_grad,
    unflattened_by_control_flow,
)
from jax_tensorarray._compat.sources import at_source_of, hide_own_frames, placed_as, source_here
from jax_tensorarray._compat.tracing import (
    can_name_axes,
    executes_eagerly,
    is_differentiated,
    looks_for_nans,
    maker_of,
    naming_axes,
    operands_of,
    records_equations,
    traced_as_a_whole,
    varying_axes,
    varying_over_batches,
)
from jax_tensorarray._compat.transposes import (
    UNSPECIFIED,
    forwarding_transposes,
    is_unspecified,
    register_accumulating_transpose,
    scan_counts,
)
from jax_tensorarray._compat.watching import (
    JittedFunction,
    compilations,
    each_call,
    function_of,
    lines_of_today,
    names_of_arguments,
    results,
    transformation_of,
)
from jax_tensorarray._compat.xla import barriers_hold, branches_are_steps, ffi_api_version, small_loops_are_quadratic
