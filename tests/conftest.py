"""The suite runs in 64 bits, so that derivatives can be compared with finite differences, and on eight CPU devices."""

import sys
from pathlib import Path

import jax

# The helpers of the tests are plain modules beside them, importable however pytest is started.
sys.path.insert(0, str(Path(__file__).parent))

jax.config.update("jax_enable_x64", True)

# What is divided among devices is tested on eight; everything else uses the first.
jax.config.update("jax_num_cpu_devices", 8)
