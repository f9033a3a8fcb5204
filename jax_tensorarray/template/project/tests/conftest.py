"""Every test runs in 64 bits, and on the CPU and a GPU."""

import jax
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_num_cpu_devices", 4)


def _has_gpu():
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


HAS_GPU = _has_gpu()


@pytest.fixture(
    autouse=True,
    params=["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU"))],
)
def platform(request):
    with jax.default_device(jax.devices(request.param)[0]):
        yield request.param
