"""Print the folder of a complete CUDA compiler from PyPI, if there is one that this Python can see.

pip builds in an environment of its own, so two places are looked at: that one, and the one that is installed into.
"""

import importlib.util
import sysconfig
from pathlib import Path

NEEDED = {
    "nvidia-cuda-nvcc": "bin/nvcc",
    "nvidia-cuda-crt": "include/crt/host_config.h",
    "nvidia-nvvm": "nvvm/bin/cicc",
    "nvidia-cuda-runtime": "lib/libcudart_static.a",
}

spec = importlib.util.find_spec("nvidia")
places = list(spec.submodule_search_locations or []) if spec else []
places += [Path(sysconfig.get_path(name)) / "nvidia" for name in ("purelib", "platlib")]
roots = [root for place in places for root in sorted(Path(place).glob("cu[0-9]*"), reverse=True)]
print(next((root for root in roots if all((root / file).exists() for file in NEEDED.values())), ""))
