"""Disjoint sets by union-find. The sets are the versions of a buffer, in a program and in HLO."""

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class UnionFind(Generic[T]):
    """Disjoint sets of things, each alone until it is joined with another."""

    def __init__(self) -> None:
        self._parents: dict[T, T] = {}

    def find(self, thing: T) -> T:
        """Return the representative of the set of a thing."""
        while (parent := self._parents.get(thing, thing)) != thing:
            self._parents[thing] = self._parents.get(parent, parent)  # halves the path
            thing = parent
        return thing

    def join(self, one: T, other: T) -> None:
        """Make one set of two."""
        self._parents[self.find(one)] = self.find(other)
