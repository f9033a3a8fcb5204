"""An environment for each framework, so that none bends to what another needs."""

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".benchmarks"

#: name -> what pip installs there, beside NumPy.
PACKAGES = {
    "jax": ["equinox", str(ROOT)],
    "tensorflow": ["tensorflow-cpu"],
    # The wheels for CPUs have a version that sorts after PyPI's, so pip takes them where it can reach them.
    "torch": ["torch", "--extra-index-url", "https://download.pytorch.org/whl/cpu"],
}


def python_of(name: str) -> Path:
    """The interpreter of an environment that `make` makes."""
    return FOLDER / name / "bin" / "python"


def make(name: str) -> None:
    """Make an environment anew, with the Python that runs this."""
    print(f"{name}: {FOLDER / name}", flush=True)
    venv.create(FOLDER / name, clear=True, with_pip=True)
    command = [str(python_of(name)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "numpy"]
    subprocess.run([*command, *PACKAGES[name]], check=True)


def found(given: dict[str, Path]) -> dict[str, Path]:
    """The interpreters that there are: those given, those made, and for jax the one that runs this if no other."""
    every = {name: given.get(name, python_of(name)) for name in PACKAGES}
    there = {name: python for name, python in every.items() if python.exists()}
    return {"jax": Path(sys.executable)} | there


def variables() -> dict[str, str]:
    """What a worker finds in its environment: this checkout, and no GPU.

    All threads allocate from one arena, which is the only one that `malloc_trim` gives back in full: what one case
    leaves would otherwise hide what the next one takes.
    """
    mine = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "MALLOC_ARENA_MAX": "1"}
    return os.environ | mine
