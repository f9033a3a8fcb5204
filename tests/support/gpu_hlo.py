"""The HLO that XLA compiles for an H100, on a machine that has none.

Needs the kernels of `_cuda` and JAX's CUDA plugin of the same version as jax, without what it depends on:

    pip install --no-deps jax-cuda13-plugin==$(python -c 'import jax; print(jax.__version__)') \
        jax-cuda13-pjrt==$(python -c 'import jax; print(jax.__version__)')
    python -m pytest tests/gpu/test_gpu_hlo.py
"""

from jax_tensorarray import _kernels
from jax_tensorarray._hlo import ahead
from jax_tensorarray._hlo import text as hlo_text
from jax_tensorarray._ops.calls import PREFIX

#: Operations of optimised HLO for which a GPU launches nothing, and a TPU does nothing.
FREE = {"after-all", "bitcast", "call", "conditional", "constant", "copy-done", "fusion-done", "get-tuple-element"}
FREE |= {"opt-barrier", "parameter", "tuple", "while"}
FREE_CALLS = (f'"{PREFIX}fence"', f'"{PREFIX}empty"')


def why_not() -> str:
    """Why nothing can be compiled for a GPU here, or nothing."""
    if "cuda" not in _kernels.modules:
        return f"there are no CUDA kernels: {_kernels.missing.get('_cuda')}"
    return ahead.why_not("cuda")


def compiled_for_h100(f, *args) -> str:
    """The optimised HLO of `f(*args)`. Only shapes and dtypes of the arguments matter."""
    return ahead.compiled_for("cuda", f, *args).as_text() or ""


def launches(hlo: str) -> list[hlo_text.Instruction]:
    """What a GPU launches in the loops of a program, nested loops and branches included: one iteration of each."""
    return [
        op
        for op in hlo_text.operations_in_loops(hlo)
        if op.opcode not in FREE and not any(call in op.attributes for call in FREE_CALLS)
    ]
