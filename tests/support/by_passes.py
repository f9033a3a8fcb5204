"""What the passes over the jaxpr of a program make of it for several targets."""

import itertools
from unittest import mock

from jax.extend.core import Literal, check_jaxpr

from jax_tensorarray import _compat
from jax_tensorarray._jaxprs import jaxprs
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


#: Parameters that passes add, and that only the lowering of an op takes.
OF_PASSES = {"effect", "unordered"}


def check(jaxpr):
    """Check a jaxpr and those in it: JAX does not look into loops."""
    inner = _compat.opened(jaxpr)
    defined = {*inner.constvars, *inner.invars}
    for eqn in inner.eqns:
        assert all(isinstance(x, Literal) or x in defined for x in eqn.invars), eqn
        defined |= {*eqn.outvars}
    assert all(isinstance(x, Literal) or x in defined for x in inner.outvars)
    if not any(OF_PASSES & eqn.params.keys() for eqn in inner.eqns):
        check_jaxpr(inner)
    for eqn in inner.eqns:
        for each in jaxprs.jaxprs_in(eqn.params):
            check(each)


def by_passes(count=ALL, name="cpu"):
    """Return the first passes for a target, as a function of a program.

    What each leaves is a program to JAX, too: all variables are defined, once, before they are used, and types agree.
    """
    target, holds = TARGETS[name]

    def rewrite(jaxpr):
        if not jaxprs.has_ours(jaxpr):
            return jaxpr
        older = {"barriers_hold": lambda platform: holds, "branches_are_steps": lambda: not holds}
        with mock.patch.multiple(_compat, **older):
            for _, after in itertools.islice(passes.steps(jaxpr, target), count):
                check(after)
                jaxpr = after
        return jaxpr

    return rewrite
