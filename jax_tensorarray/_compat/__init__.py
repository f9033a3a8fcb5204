"""Every use of JAX's private API and every branch on its version, each with its reason.

Each function says what happens where the private name is missing: results never depend on it, only speed does.
"""

import jax  # before jaxlib, which else logs whatever XLA does

# Neither has a public name. `hlo` makes operations of StableHLO, for lowering rules that are not made of JAX's own
# calls; `xla_client` is where XLA takes the rules by which it divides our calls among devices.
from jaxlib import xla_client
from jaxlib.mlir.dialects import stablehlo as hlo

from jax_tensorarray._compat.transposes import (
    UNSPECIFIED,
    install_forwarding_transposes,
    register_accumulating_transpose,
    scan_counts,
)
from jax_tensorarray._compat.versions import (
    CHECKPOINT,
    Traceable,
    asks_policies,
    at_source_of,
    barriers_hold,
    cached,
    can_rewrite_modules,
    checked_as,
    checked_besides,
    checkpoint_of,
    closed,
    closed_over,
    compilations,
    custom_vjp_rules,
    define_vjp,
    discharged,
    each_call,
    executes_eagerly,
    expanded_as,
    ffi_api_version,
    flattened_by_control_flow,
    flattened_by_grad,
    has_callbacks,
    has_ordered_effects,
    hide_own_frames,
    is_differentiated,
    known_part,
    lifted,
    log_of,
    lowers_its_bodies,
    maker_of,
    makes_refs,
    name_of_function,
    opened,
    operands_of,
    private_names,
    records_equations,
    replaced,
    run_after_lowering,
    small_loops_are_quadratic,
    source_here,
    traceable_lowerings,
    unflattened_by_control_flow,
    varying_axes,
    varying_over_batches,
    writes_refs,
)
