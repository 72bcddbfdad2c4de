"""Groups of leaves that are sharded alike: a parameter in all layers, with its optimizer's statistics."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from scalax._core.util.folding import fold
from scalax._jaxpr.dim_classes import UnionFind
from scalax._planning.autoshard.dim_uses import ArgumentDimensions
from scalax._planning.autoshard.step import Leaf

# Groups with less than this part of all bytes are replicated: biases, counters; norms, which nothing is
# multiplied with, sooner.
_REPLICATED, _REPLICATED_SCALE = 1e-4, 1e-2


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

    def dividing(self, parts: int) -> list[int]:
        """The dimensions that can be sharded into so many parts."""
        pairs = zip(self.classes, self.shape, strict=True)
        return [dim for dim, (number, size) in enumerate(pairs) if number is not None and size % parts == 0]


def make_groups(leaves: Sequence[Leaf], found: ArgumentDimensions, fixed: Iterable[int] = ()) -> list[Group]:
    """The groups whose sharding is to be found, the largest first; all other leaves are replicated.

    Args:
        leaves: the leaves, by the numbers that *found* has for them.
        found: what the step does with their dimensions.
        fixed: the leaves that the user has placed.
    """
    placed = set(fixed)
    members: dict[int, list[int]] = collections.defaultdict(list)
    for i, owner in sorted(_owners(leaves, found.multiplied).items()):
        if i not in placed and owner not in placed:
            members[owner].append(i)

    def size(owners: Iterable[int]) -> int:
        return sum(leaves[i].bytes for owner in owners for i in members[owner])

    def is_small(owners: Iterable[int]) -> bool:
        part = _REPLICATED_SCALE if found.multiplied.isdisjoint(owners) else _REPLICATED
        return size(owners) < part * sum(leaf.bytes for leaf in leaves)

    folded = _folded(list(members), leaves, found)
    folds = {name: owners for name, owners in folded.items() if not is_small(owners)}
    roots = _united(folds.values(), found)
    groups = []
    for name, owners in folds.items():
        numbers = tuple(sorted(i for owner in owners for i in members[owner]))
        first = max(owners, key=lambda i: leaves[i].bytes)
        classes = tuple(
            None if any((i, dim) in found.stacked for i in owners) else roots[found.classes[first, dim]]
            for dim in range(len(leaves[first].shape))
        )
        parameters = found.multiplied.intersection(numbers)
        groups.append(Group(name, numbers, parameters, classes, leaves[first].shape, size(owners)))
    return sorted((group for group in groups if group.shape), key=lambda group: -group.bytes)


def _owners(leaves: Sequence[Leaf], multiplied: frozenset[int]) -> dict[int, int]:
    """Leaf -> the parameter that it belongs to: of its shape, with most of its last keys.

    Leaves of the same path, in different arguments, are always together: one regex matches both.
    """
    ending: dict[tuple[tuple[int, ...], str], int] = {}
    owners = {}
    for i in sorted(range(len(leaves)), key=lambda i: i not in multiplied and 1 + leaves[i].path.count('/')):
        keys = leaves[i].path.split('/')
        ends = [(leaves[i].shape, '/'.join(keys[start:])) for start in range(len(keys))]
        owner = None if i in multiplied else next((ending[end] for end in ends if end in ending), None)
        owners[i] = i if owner is None else owner
        if owner is None:  # if only added, such as positions: statistics have at least two of its keys
            for end in ends if i in multiplied else ends[:2]:
                ending.setdefault(end, i)
    return owners


def stacked_dims(leaves: Sequence[Leaf], found: ArgumentDimensions) -> dict[int, int]:
    """Leaf -> the dimension of its layers: of parameters that a loop runs over, and of their statistics."""
    dims = dict(sorted(found.stacked, reverse=True))  # of several the first one
    return {i: dims[owner] for i, owner in _owners(leaves, found.multiplied).items() if owner in dims}


def _folded(owners: Sequence[int], leaves: Sequence[Leaf], found: ArgumentDimensions) -> dict[str, list[int]]:
    """Parameters whose paths differ in numbers only, under one name.

    A stack of layers in which the columns of one are the rows of the next is left as it is: these dimensions
    would be one, and could not be sharded in turns.
    """
    numbers: dict[str, list[int]] = collections.defaultdict(list)
    for i in owners:
        numbers[leaves[i].path].append(i)
    folds: dict[str, list[int]] = {}
    for item in fold([(path, len(leaves[mine[0]].shape)) for path, mine in numbers.items()]):
        mine = [i for path in item.paths for i in numbers[path]]
        if len(mine) > 1 and _joins_dimensions(mine, found):
            folds.update((leaves[i].path, [i]) for i in mine)
        else:
            folds[item.short_name(2)] = mine
    return folds


def _joins_dimensions(members: Sequence[int], found: ArgumentDimensions) -> bool:
    roots = _united([members], found)
    for i in members:
        own = {found.classes[i, dim] for dim in range(found.ranks[i]) if (i, dim) not in found.stacked}
        if len({roots[number] for number in own}) < len(own):
            return True
    return False


def _united(groups: Iterable[Sequence[int]], found: ArgumentDimensions) -> Mapping[int, int]:
    """Class -> that which stands for it, if those that dimensions of one group have are one."""
    known = UnionFind()
    for members in groups:
        firsts: dict[int, int] = {}
        for i in members:
            for dim in range(found.ranks[i]):
                if (i, dim) not in found.stacked:
                    known.unite(firsts.setdefault(dim, found.classes[i, dim]), found.classes[i, dim])
    return {number: known.root(number) for number in set(found.classes.values())}
