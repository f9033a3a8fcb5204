"""The HLO that XLA compiles for an H100, on a machine that has none.

Needs the kernels of `_cuda` and JAX's CUDA plugin of the same version as jax, without what it depends on:

    pip install --no-deps jax-cuda13-plugin==$(python -c 'import jax; print(jax.__version__)') \
        jax-cuda13-pjrt==$(python -c 'import jax; print(jax.__version__)')
    python -m pytest tests/test_gpu_hlo.py
"""

import functools
import importlib.util
import os
from pathlib import Path

import jax
from jax.experimental import topologies

from jax_tensorarray import _ffi, _hlo
from jax_tensorarray._lowering.mlir import PREFIX

# The plugin looks for libraries of CUDA, which only a program that runs needs.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

#: What NVIDIA says of the H100 SXM, in the words of XLA's GpuTargetConfigProto.
H100 = Path(__file__).parent / "h100.txtpb"

#: Operations of optimised HLO for which a GPU launches nothing.
FREE = {
    "bitcast",
    "call",
    "conditional",
    "constant",
    "copy-done",
    "fusion-done",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
}
FREE |= {"tuple", "while", "after-all"}
FREE_CALLS = (f'"{PREFIX}fence"', f'"{PREFIX}empty"')


def why_not() -> str:
    """Why nothing can be compiled for a GPU here, or nothing."""
    if "cuda" not in _ffi.modules:
        return f"there are no CUDA kernels: {_ffi.missing.get('_cuda')}"
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        return "jax-cuda13-plugin is not installed; tests/gpu_hlo.py says how"
    return ""


@functools.cache
def _device():
    topology = topologies.get_topology_desc("", platform="cuda", target_config=H100.read_text(), topology="1x1x1")
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def compiled_for_h100(f, *args) -> str:
    """The optimised HLO of `f(*args)`, of which only shapes and dtypes are looked at."""
    described = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=_device()), args)
    return jax.jit(f).trace(*described).lower(lowering_platforms=("cuda",)).compile().as_text() or ""


def launches(hlo: str) -> list[_hlo.Operation]:
    """What a GPU launches in the loops of a program, nested loops and branches included: one iteration of each."""
    return [
        op
        for op in _hlo.loop_operations(hlo)
        if op.opcode not in FREE and not any(call in op.text for call in FREE_CALLS)
    ]
