"""What the passes over the jaxpr of a program make of it for a CPU, where barriers hold."""

from jax_tensorarray._lowering import program as passes

CPU = passes.Target("cpu", divided=False, calls_nothing=False, outside=None)
PASSES = [each for each in passes.PASSES if each.applies_to(CPU)]
ALL = len(PASSES)


def by_passes(count):
    """Return the first passes, as a function of a program."""

    def rewrite(jaxpr):
        if not passes.needs_passes(jaxpr):
            return jaxpr
        for each in PASSES[:count]:
            jaxpr = each.run(jaxpr, CPU)
        return jaxpr

    return rewrite
