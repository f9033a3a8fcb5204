"""What the passes over the jaxpr of a program make of it for several targets."""

from unittest import mock

from jax_tensorarray import _compat
from jax_tensorarray._lowering import program as passes


def _target(platform, *, calls_nothing=False):
    return passes.Target(platform, divided=False, calls_nothing=calls_nothing, outside=None)


CPU = _target("cpu")

#: Targets, and whether XLA keeps barriers there. Where nothing is called, nothing raises.
TARGETS = {
    "cpu": (CPU, True),
    "cpu, by branches": (CPU, False),
    "cuda": (_target("cuda"), True),
    "tpu": (_target("tpu", calls_nothing=True), True),
    "unknown": (_target(None), True),
}


def raises(name):
    return not TARGETS[name][0].calls_nothing


def passes_for(target):
    return [each for each in passes.PASSES if each.applies_to(target)]


ALL = len(passes.PASSES)


def by_passes(count=ALL, name="cpu"):
    """Return the first passes for a target, as a function of a program."""
    target, holds = TARGETS[name]

    def rewrite(jaxpr):
        if not passes.needs_passes(jaxpr):
            return jaxpr
        with mock.patch.object(_compat, "barriers_hold", lambda platform: holds):
            for each in passes_for(target)[:count]:
                jaxpr = each.run(jaxpr, target)
        return jaxpr

    return rewrite
