"""Groups of leaves with the same sharding: a parameter in all layers, with its optimizer statistics."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from scalax._core.util.folding import fold
from scalax._jaxpr.dim_classes import UnionFind
from scalax._planning.autoshard.dim_uses import DimUses
from scalax._planning.autoshard.step import Leaf

# Groups with less than this fraction of all bytes are replicated, such as biases and counters. The second
# fraction is for groups that are not operands of matmuls, such as the scales of norms.
_SMALL_WEIGHTS, _SMALL_OTHERS = 1e-4, 1e-2


@dataclasses.dataclass(frozen=True)
class LeafGroup:
    """Leaves of one rank that have the same sharding.

    Attributes:
        name: the folded paths of the leaves.
        leaves: the indices of the leaves.
        parameters: the leaves that are operands of matmuls; the others are optimizer statistics.
        classes: the class of each dimension; None for a dimension that cannot be sharded.
        shape: the shape of the largest leaf.
        bytes: the bytes of all leaves.
    """

    name: str
    leaves: tuple[int, ...]
    parameters: frozenset[int]
    classes: tuple[int | None, ...]
    shape: tuple[int, ...]
    bytes: int

    def dims_divisible_by(self, num_shards: int) -> list[int]:
        """Returns the dimensions that are divisible into shards."""
        pairs = enumerate(zip(self.classes, self.shape, strict=True))
        return [dim for dim, (cls, size) in pairs if cls is not None and size % num_shards == 0]


def make_groups(leaves: Sequence[Leaf], uses: DimUses, fixed: Iterable[int] = ()) -> list[LeafGroup]:
    """Returns the groups whose sharding is searched, largest first. All other leaves are replicated.

    Args:
        leaves: the leaves.
        uses: the uses of their dimensions, by the index of the leaf.
        fixed: the leaves whose sharding the user has fixed.
    """
    fixed = set(fixed)
    members: dict[int, list[int]] = collections.defaultdict(list)
    for i, owner in sorted(_owners(leaves, uses.weights).items()):
        if i not in fixed and owner not in fixed:
            members[owner].append(i)

    def group_bytes(owners: Iterable[int]) -> int:
        return sum(leaves[i].bytes for owner in owners for i in members[owner])

    def is_small(owners: Iterable[int]) -> bool:
        fraction = _SMALL_OTHERS if uses.weights.isdisjoint(owners) else _SMALL_WEIGHTS
        return group_bytes(owners) < fraction * sum(leaf.bytes for leaf in leaves)

    folds = _fold_layers(list(members), leaves, uses)
    folds = {name: owners for name, owners in folds.items() if not is_small(owners)}
    roots = _merge_classes(folds.values(), uses)
    groups = []
    for name, owners in folds.items():
        indices = tuple(sorted(i for owner in owners for i in members[owner]))
        largest = max(owners, key=lambda i: leaves[i].bytes)
        classes = tuple(
            None if any((i, dim) in uses.layer_dims for i in owners) else roots[uses.classes[largest, dim]]
            for dim in range(len(leaves[largest].shape))
        )
        parameters = uses.weights.intersection(indices)
        groups.append(
            LeafGroup(name, indices, parameters, classes, leaves[largest].shape, group_bytes(owners))
        )
    return sorted((group for group in groups if group.shape), key=lambda group: -group.bytes)


def _owners(leaves: Sequence[Leaf], weights: frozenset[int]) -> dict[int, int]:
    """Returns leaf -> the parameter that it belongs to: with its shape, and the longest common path suffix.

    Leaves with the same path in different arguments always belong together: one regex matches both.
    """
    owner_by_suffix: dict[tuple[tuple[int, ...], str], int] = {}
    owners = {}
    for i in sorted(range(len(leaves)), key=lambda i: i not in weights and 1 + leaves[i].path.count('/')):
        keys = leaves[i].path.split('/')
        suffixes = [(leaves[i].shape, '/'.join(keys[start:])) for start in range(len(keys))]
        known_owners = (owner_by_suffix[suffix] for suffix in suffixes if suffix in owner_by_suffix)
        owner = None if i in weights else next(known_owners, None)
        owners[i] = i if owner is None else owner
        if owner is None:
            # A leaf that is only added, such as position embeddings, is not an operand of a matmul: its
            # statistics have to share at least two keys with it.
            for suffix in suffixes if i in weights else suffixes[:2]:
                owner_by_suffix.setdefault(suffix, i)
    return owners


def layer_dims_of(leaves: Sequence[Leaf], uses: DimUses) -> dict[int, int]:
    """Returns leaf -> the dimension of its stacked layers, for parameters and their statistics."""
    dims = dict(sorted(uses.layer_dims, reverse=True))  # the first dimension of several
    return {i: dims[owner] for i, owner in _owners(leaves, uses.weights).items() if owner in dims}


def _fold_layers(owners: Sequence[int], leaves: Sequence[Leaf], uses: DimUses) -> dict[str, list[int]]:
    """Folds parameters whose paths differ only in numbers, under one name.

    Layers are not folded if the output dimension of one is the input dimension of the next: both dimensions
    would be in one class, and sharding could not alternate between them.
    """
    by_path: dict[str, list[int]] = collections.defaultdict(list)
    for i in owners:
        by_path[leaves[i].path].append(i)
    folds: dict[str, list[int]] = {}
    for item in fold([(path, len(leaves[indices[0]].shape)) for path, indices in by_path.items()]):
        indices = [i for path in item.paths for i in by_path[path]]
        if len(indices) > 1 and _merges_dims_of_a_leaf(indices, uses):
            folds.update((leaves[i].path, [i]) for i in indices)
        else:
            folds[item.short_name(2)] = indices
    return folds


def _merges_dims_of_a_leaf(members: Sequence[int], uses: DimUses) -> bool:
    """Whether folding some leaves would put two dimensions of one leaf into one class."""
    roots = _merge_classes([members], uses)
    for i in members:
        classes = {uses.classes[i, dim] for dim in range(uses.ranks[i]) if (i, dim) not in uses.layer_dims}
        if len({roots[cls] for cls in classes}) < len(classes):
            return True
    return False


def _merge_classes(groups: Iterable[Sequence[int]], uses: DimUses) -> Mapping[int, int]:
    """Merges the classes of equal dimensions of the leaves of a group; returns class -> merged class."""
    union_find = UnionFind()
    for members in groups:
        first_class: dict[int, int] = {}
        for i in members:
            for dim in range(uses.ranks[i]):
                if (i, dim) not in uses.layer_dims:
                    cls = uses.classes[i, dim]
                    union_find.unite(first_class.setdefault(dim, cls), cls)
    return {cls: union_find.root(cls) for cls in set(uses.classes.values())}
