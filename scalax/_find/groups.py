"""Groups of leaves that are sharded alike: a parameter in all layers, with its optimizer's statistics."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scalax._find.dimensions import Classes, Dimensions
from scalax._util.folding import fold

# Groups with less than this part of all bytes are replicated: biases, counters; norms, which nothing is
# multiplied with, sooner.
_REPLICATED, _REPLICATED_SCALE = 1e-4, 1e-2
# With more groups than this, those whose last keys and ranks agree are one: a search tries each by itself.
_MOST_GROUPS = 24


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of the arguments that are not batches.

    Attributes:
        path: its path in its argument.
        shape: its shape.
        bits: those of an element.
    """

    path: str
    shape: tuple[int, ...]
    bits: int

    @property
    def bytes(self) -> int:
        """Its bytes, on all devices together."""
        return -(-math.prod(self.shape) * self.bits // 8)


@dataclasses.dataclass(frozen=True)
class Group:
    """Leaves of one rank that are sharded alike.

    Attributes:
        name: their paths as one.
        leaves: their numbers.
        parameters: those of them that the step multiplies with; others are statistics of an optimizer.
        classes: for each dimension the number of its class; None for one that cannot be sharded.
        shape: that of the largest of them.
        bytes: of all of them.
    """

    name: str
    leaves: tuple[int, ...]
    parameters: frozenset[int]
    classes: tuple[int | None, ...]
    shape: tuple[int, ...]
    bytes: int


def make_groups(leaves: Sequence[Leaf], found: Dimensions, fixed: Iterable[int] = ()) -> list[Group]:
    """The groups whose sharding is to be found, the largest first; all other leaves are replicated.

    Args:
        leaves: the leaves, by the numbers that *found* has for them.
        found: what the step does with their dimensions.
        fixed: the leaves that the user has placed.
    """
    placed = set(fixed)
    members: dict[int, list[int]] = collections.defaultdict(list)
    for i, owner in enumerate(_owners(leaves, found.multiplied)):
        if i not in placed and owner not in placed:
            members[owner].append(i)
    every = sum(leaf.bytes for leaf in leaves)

    def size(owners: Iterable[int]) -> int:
        return sum(leaves[i].bytes for owner in owners for i in members[owner])

    folds = _folded(list(members), leaves, found)
    least = {
        name: _REPLICATED if found.multiplied & {*owners} else _REPLICATED_SCALE
        for name, owners in folds.items()
    }
    folds = {name: owners for name, owners in folds.items() if size(owners) >= least[name] * every}
    folds = _fewer(folds, leaves)
    parent = _united(folds.values(), found)
    groups = []
    for name, owners in folds.items():
        numbers = tuple(sorted(i for owner in owners for i in members[owner]))
        first = max(owners, key=lambda i: leaves[i].bytes)
        stacked = {dim for i in owners for dim in range(found.ranks[i]) if (i, dim) in found.stacked}
        classes = [
            None if dim in stacked else parent[found.classes[first, dim]] for dim in range(found.ranks[first])
        ]
        parameters = found.multiplied.intersection(numbers)
        groups.append(Group(name, numbers, parameters, tuple(classes), leaves[first].shape, size(owners)))
    return sorted((group for group in groups if group.shape), key=lambda group: -group.bytes)


def _owners(leaves: Sequence[Leaf], multiplied: frozenset[int]) -> list[int]:
    """For each leaf the parameter that it belongs to: of its shape, with most of its last keys.

    Leaves of the same path, in different arguments, are always together: one regex matches both.
    """
    ending: dict[Any, int] = {}
    for i in sorted(multiplied):
        for end in _endings(leaves[i]):
            ending.setdefault(end, i)
    owners = {}
    for i in sorted(range(len(leaves)), key=lambda i: (i not in multiplied, leaves[i].path.count('/'))):
        ends = _endings(leaves[i])
        owners[i] = i if i in multiplied else next((ending[end] for end in ends if end in ending), i)
        if owners[i] == i and i not in multiplied:  # such as positions, which are added: paths are in a tree
            ending.update(dict.fromkeys(ends[:2], i))
    return [owners[i] for i in range(len(leaves))]


def _endings(leaf: Leaf) -> list[tuple[tuple[int, ...], tuple[str, ...]]]:
    """The shape of a leaf with the last keys of its path, the most keys first."""
    keys = leaf.path.split('/')
    return [(leaf.shape, tuple(keys[start:])) for start in range(len(keys))]


def _folded(owners: Sequence[int], leaves: Sequence[Leaf], found: Dimensions) -> dict[str, list[int]]:
    """Parameters whose paths differ in numbers only, under one name.

    A stack of layers in which the columns of one are the rows of the next is left as it is: these dimensions
    would be one, and could not be sharded in turns.
    """
    numbers: dict[str, list[int]] = collections.defaultdict(list)
    for i in owners:
        numbers[leaves[i].path].append(i)
    folds: dict[str, list[int]] = {}
    for item in fold([(leaves[mine[0]].path, found.ranks[mine[0]]) for mine in numbers.values()]):
        mine = [i for path in item.paths for i in numbers[path]]
        if len(mine) > 1 and _joins_dimensions(mine, found):
            folds.update((leaves[i].path, [i]) for i in mine)
        else:
            folds[item.short_name(2)] = mine
    return folds


def _joins_dimensions(members: Sequence[int], found: Dimensions) -> bool:
    parent = _united([members], found)
    for i in members:
        own = [found.classes[i, dim] for dim in range(found.ranks[i]) if (i, dim) not in found.stacked]
        if len({parent[number] for number in own}) < len(set(own)):
            return True
    return False


def _fewer(folds: dict[str, list[int]], leaves: Sequence[Leaf]) -> dict[str, list[int]]:
    """The same if they are few; else those with the same last keys and rank are one."""
    for keys in (3, 2, 1):
        if len(folds) <= _MOST_GROUPS:
            break
        ends: dict[str, list[int]] = collections.defaultdict(list)
        for members in folds.values():
            last = [key for key in leaves[members[0]].path.split('/') if not key.isdecimal()][-keys:]
            ends[f'.../{"/".join(last)} of rank {len(leaves[members[0]].shape)}'].extend(members)
        folds = ends
    return folds


def _united(groups: Iterable[Sequence[int]], found: Dimensions) -> Mapping[int, int]:
    """Classes, of which those that dimensions of one group have are one."""
    known = Classes[int]()
    for members in groups:
        firsts: dict[int, int] = {}
        for i in members:
            for dim in range(found.ranks[i]):
                if (i, dim) not in found.stacked:
                    known.unite(firsts.setdefault(dim, found.classes[i, dim]), found.classes[i, dim])
    return {number: known.root(number) for number in set(found.classes.values())}
