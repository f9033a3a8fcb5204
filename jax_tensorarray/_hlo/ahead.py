"""Compile for a platform that need not be present: XLA's compilers need no device, only a description of one."""

import functools
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

#: A description of NVIDIA's H100 SXM, as XLA's GpuTargetConfigProto.
_H100 = Path(__file__).parent / "h100.txtpb"

#: The TPU that programs are compiled for, and the name of its type in libtpu.
_TPU, _TPU_TYPE = "v5e:2x2", "v5litepod-4"

PLATFORMS = ("cpu", "cuda", "tpu")

#: By platform, the module that its compiler comes with, and how to install it.
_COMPILERS = {
    "cuda": (
        "jax_plugins.xla_cuda13",
        f"pip install --no-deps jax-cuda13-plugin=={jax.__version__} jax-cuda13-pjrt=={jax.__version__}",
    ),
    "tpu": ("libtpu", "pip install 'jax[tpu]'"),
}

#: Autotuning is off: it measures kernels on a GPU. Without a GPU it compiles each kernel twice and keeps the default.
OPTIONS: dict[str, dict[str, int | str]] = {"cuda": {"xla_gpu_autotune_level": 0}}


def compiled_for(platform: str, f: Callable[..., Any], *args: Any, topology: str = _TPU) -> Any:
    """Compile a function of arrays for a CPU, an H100 or a TPU v5e. Only the types of its arguments matter.

    Raises ImportError if the compiler for the platform is not installed, or JAX has left it out.
    """
    device = jax.sharding.SingleDeviceSharding(devices_of(platform, topology)[0])
    types = jax.eval_shape(lambda *args: args, *args)
    described = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), types)
    jitted = f if hasattr(f, "trace") else jax.jit(f)
    return jitted.trace(*described).lower(lowering_platforms=(platform,)).compile(OPTIONS.get(platform))


def devices_of(platform: str, topology: str = _TPU) -> list[Any]:
    """Return devices of that kind, to compile for and not to run on."""
    if platform == "cpu":
        return jax.devices("cpu")
    if why := why_not(platform):
        raise ImportError(why)
    return _described_devices(platform, topology if platform == "tpu" else "")


def why_not(platform: str) -> str:
    """Return the reason why nothing can be compiled for a platform here, or an empty text if it can."""
    module, install = _COMPILERS[platform]
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None or importlib.util.find_spec(module) is None:
        return f"XLA's compiler for {platform!r} is not installed. Run `{install}`."
    return ""


@functools.cache
def _described_devices(platform: str, topology: str) -> list[Any]:
    if platform == "cuda":
        # The plugin looks for CUDA libraries, which are only needed to run a program.
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        of_gpu = {"target_config": _H100.read_text(), "topology": "1x1x1"}
        try:
            return list(topologies.get_topology_desc("", platform="cuda", **of_gpu).devices)
        except NotImplementedError as error:  # JAX has been used before, and has left the plugin out
            raise ImportError(
                "JAX looked for the libraries of CUDA when it was first used, did not find all of them, and left out "
                "XLA's compiler for 'cuda'. Set JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 before Python starts, or in "
                "os.environ before JAX is first used: to compile needs none of them."
            ) from error
    # libtpu asks the machine which TPU it has.
    told = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": _TPU_TYPE, "TPU_WORKER_HOSTNAMES": "localhost"}
    told["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # there is no TPU that two processes could use at once
    for name, value in told.items():
        os.environ.setdefault(name, value)
    return list(topologies.get_topology_desc(topology_name=topology, platform="tpu").devices)
