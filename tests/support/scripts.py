"""The scripts in `examples/`, as modules, what they print, and how close to their oracles they are."""

import contextlib
import importlib.util
import io
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

DIRECTORY = Path(__file__).parents[2] / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(f"examples_{name}", DIRECTORY / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where `inspect` looks for the source of a class
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as missing:
        if missing.name != "optax":
            raise
        pytest.skip("optax is not installed", allow_module_level=True)  # on a machine that is lent without a network
    return module


def run(script, **options):
    """What the first training of a script returns, what all of it does, and what is printed."""
    trained, train, printed = [], script.train, io.StringIO()

    def kept(*args, **kwargs):
        trained.append(train(*args, **kwargs))
        return trained[-1]

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(script, "train", kept)
        result = script.main(**options)
    return trained[0], result, printed.getvalue()


def close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10), found, expected)
