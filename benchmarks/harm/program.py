"""What a program is, and in which ways it is measured."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_tensorarray import in_place

Function = Callable[..., Any]

#: How many examples there are under `vmap`.
EXAMPLES = 8


class Program(NamedTuple):
    """A plain function and its arguments: `make` gives them as NumPy arrays, from a generator of random numbers.

    Where `by` is a number, the sum of its squared results is differentiated by that argument. `axes` is `in_axes` of
    `vmap`; None stands for no `vmap`.
    """

    family: str
    name: str
    f: Function
    make: Callable[[np.random.Generator], tuple[Any, ...]]
    by: int | None = 0
    axes: int | tuple[int | None, ...] | None = 0
    rounding: float = 1.0  #: how many times the usual difference of results is still rounding

    def arguments(self, batched: bool) -> tuple[Any, ...]:
        """Arguments on the device, for one example or for all."""
        if not batched:
            return _on_device(self.make(np.random.default_rng(0)))
        made = [self.make(np.random.default_rng(seed)) for seed in range(EXAMPLES)]
        axes = self.axes if isinstance(self.axes, tuple) else (self.axes,) * len(made[0])
        stacked = [
            jax.tree.map(lambda *xs: np.stack(xs), *of) if axis == 0 else of[0]
            for axis, of in zip(axes, zip(*made, strict=True), strict=True)
        ]
        return _on_device(stacked)

    def variants(self) -> list[str]:
        """The names of the ways in which it makes sense."""
        return [
            name
            for name in VARIANTS
            if (self.by is not None or "grad" not in name) and (self.axes is not None or "vmap" not in name)
        ]


def _on_device(args: Any) -> tuple[Any, ...]:
    return tuple(jax.tree.map(jnp.asarray, arg) for arg in args)


def _gradient(p: Program, f: Function) -> Function:
    def loss(*args: Any) -> Any:
        results = [x for x in jax.tree.leaves(f(*args)) if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in results)

    return jax.grad(loss, p.by)


def _batched(p: Program, f: Function) -> Function:
    return jax.vmap(f, p.axes)


#: name of what is compared -> the program as it is
PLAIN: Mapping[str, Callable[[Program], Function]] = {
    "forward": lambda p: p.f,
    "gradient": lambda p: _gradient(p, p.f),
    "vmap": lambda p: _batched(p, p.f),
    "vmap(grad)": lambda p: _batched(p, _gradient(p, p.f)),
}

#: name -> what it is compared with, and the program under `in_place`
VARIANTS: Mapping[str, tuple[str, Callable[[Program], Function]]] = {
    "forward": ("forward", lambda p: in_place(p.f)),
    "grad(in_place)": ("gradient", lambda p: _gradient(p, in_place(p.f))),
    "in_place(grad)": ("gradient", lambda p: in_place(_gradient(p, p.f))),
    "vmap": ("vmap", lambda p: in_place(_batched(p, p.f))),
    "vmap(grad)": ("vmap(grad)", lambda p: in_place(_batched(p, _gradient(p, p.f)))),
}


PROGRAMS: list[Program] = []


def program(
    make: Callable[[np.random.Generator], tuple[Any, ...]], name: str = "", family: str = "", **how: Any
) -> Callable[[Function], Function]:
    """Register a function as a program, with its own name in the family that its module is called, or with others."""

    def register(f: Function) -> Function:
        PROGRAMS.append(Program(family or f.__module__.rpartition(".")[2], name or f.__name__, f, make, **how))
        return f

    return register


def sized(sizes: Sequence[int], make: Callable[..., Any], **how: Any) -> Callable[[Function], Function]:
    """Register a function as a program at each size. `make` maps a generator and a size to the arguments."""

    def register(f: Function) -> Function:
        for size in sizes:
            program(lambda r, size=size: make(r, size), name=f"{f.__name__}_{size}", **how)(f)
        return f

    return register


def normal(*shape: int, scale: float = 1.0) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    """Makes one argument: an array of normally distributed numbers."""
    return lambda r: (floats(r, *shape, scale=scale),)


def floats(r: np.random.Generator, *shape: int, scale: float = 1.0) -> Any:
    """Normally distributed numbers."""
    return r.standard_normal(shape, dtype=np.float32) * np.float32(scale)


def whole(r: np.random.Generator, end: int, *shape: int) -> Any:
    """Whole numbers from 0 to `end`, which is not one of them."""
    return r.integers(0, end, shape, dtype=np.int32)
