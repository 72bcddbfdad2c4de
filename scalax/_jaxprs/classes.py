"""Classes of things that are one, such as dimensions that meet."""

from __future__ import annotations

from typing import Generic, TypeVar

Thing = TypeVar('Thing', int, tuple[int, int])


class Classes(Generic[Thing]):
    """Things of which some are one; of each class the least stands for all."""

    def __init__(self) -> None:
        self._parents: dict[Thing, Thing] = {}

    def root(self, thing: Thing) -> Thing:
        """What stands for the class of a thing."""
        parents = self._parents
        while (parent := parents.get(thing, thing)) != thing:
            parents[thing] = thing = parents.get(parent, parent)  # the next way is half as long
        return thing

    def unite(self, one: Thing, other: Thing) -> None:
        """Makes one class of two."""
        a, b = self.root(one), self.root(other)
        self._parents[max(a, b)] = min(a, b)
