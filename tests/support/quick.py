"""`jit` for tests that compare numbers: XLA spends most of their time compiling programs that run once.

What the library gives to XLA is the same, and so are the passes over HLO that decide about copies and order; only
machine code is generated with less effort. That the optimized code is right is checked with `jax.jit`: by tests that
compare each program of the main job with plain JAX, by the main job itself, and by every test of a single op.
"""

import functools
from types import SimpleNamespace

import jax


def _known_options() -> dict[str, bool | int]:
    """Those of the options below that this version of XLA has."""
    known: dict[str, bool | int] = {}
    if jax.default_backend() == "cpu":
        for name, value in {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}.items():
            try:
                jax.jit(lambda x: x, compiler_options={name: value}).lower(0).compile()
            except jax.errors.JaxRuntimeError:
                continue
            known[name] = value
    return known


jit = functools.partial(jax.jit, compiler_options=_known_options())


def in_module(patch, module):
    """Let the functions of a module, which may not nest them, compile with `jit`; `patch` is pytest's monkeypatch."""
    patch.setattr(module, "jax", SimpleNamespace(**(vars(jax) | {"jit": jit})))
