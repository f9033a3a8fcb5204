"""The scripts in `examples/`, as modules, and how close to their oracles they are."""

import importlib.util
import sys
from pathlib import Path

import jax
import numpy as np

DIRECTORY = Path(__file__).parents[2] / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(f"examples_{name}", DIRECTORY / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where `inspect` looks for the source of a class
    spec.loader.exec_module(module)
    return module


def close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10), found, expected)
