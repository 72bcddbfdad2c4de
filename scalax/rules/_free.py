"""Which dimensions and mesh axes of a leaf are free, once one rule has placed some? For ``a & b``."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from jax.sharding import PartitionSpec

from scalax._tree import specs


def fill(
    below: PartitionSpec, above: PartitionSpec, rank: int, closed: Collection[int] = ()
) -> PartitionSpec:
    """A spec whose free dimensions are filled from another, with axes that it does not use yet.

    Args:
        below: the spec.
        above: the other one.
        rank: the number of dimensions of the array.
        closed: dimensions that are not free, though nothing is placed there.

    Example:
        >>> fill(PartitionSpec(None, 'tp'), PartitionSpec(('fsdp', 'tp'), 'dp'), 2)
        P('fsdp', 'tp')
    """
    used = {*specs.spec_axes(below), *below.unreduced, *below.reduced}
    first, second = specs.entries(below), specs.entries(above)
    entries: list[Any] = []
    # A spec that is longer than the array stays so: validation names the leaf.
    for dim in range(max(rank, len(first), len(second))):
        entry = first[dim] if dim < len(first) else None
        if entry is None and dim < len(second) and dim not in closed:
            entry = second[dim]
            if entry is not specs.UNCONSTRAINED:
                # An axis that `above` uses twice stays so too, and is reported as its mistake.
                entry = tuple(axis for axis in specs.entry_axes(entry) if axis not in used)
        entries.append(entry)
    filled = specs.replaced(below, entries)
    unreduced, reduced = above.unreduced - used, above.reduced - used
    if unreduced or reduced:
        filled = filled.update(unreduced=below.unreduced | unreduced, reduced=below.reduced | reduced)
    return filled


def left_by(outer: PartitionSpec, spec: PartitionSpec, rank: int) -> PartitionSpec:
    """What of a spec can still be placed, once a rule further out took dimensions and axes.

    Example:
        >>> left_by(PartitionSpec('a', None), PartitionSpec('b', ('a', 'c')), 2)
        P(None, 'c')
    """
    taken, used = specs.entries(outer), specs.spec_axes(outer)
    left: list[Any] = []
    for dim, entry in enumerate(specs.entries(spec)):
        if dim < min(rank, len(taken)) and taken[dim] is not None:
            entry = None
        elif entry is not specs.UNCONSTRAINED:
            entry = tuple(axis for axis in specs.entry_axes(entry) if axis not in used)
        left.append(entry)
    return specs.replaced(spec, left)


def close(spec: PartitionSpec, dims: Collection[int]) -> PartitionSpec:
    """The spec in which those of *dims* are not free that hold nothing.

    Example:
        >>> close(PartitionSpec('a'), (0, 1))
        P('a', UNCONSTRAINED)
    """
    entries = [*specs.entries(spec), *[None] * (max(dims, default=-1) + 1)]
    for dim in dims:
        # Nobody fills a dimension that the compiler was given.
        entries[dim] = specs.UNCONSTRAINED if entries[dim] is None else entries[dim]
    return specs.replaced(spec, entries)


def taken_by(outer: PartitionSpec, spec: PartitionSpec, rank: int) -> PartitionSpec:
    """What a rule and those further out took of a leaf of *rank* dimensions, for the next rule to see.

    Axes that they use elsewhere than in one of these dimensions stand behind the last one.

    Example:
        >>> taken_by(PartitionSpec(None, 'a'), PartitionSpec('b', 'c'), 3)
        P('b', 'a', None)
    """
    filled = specs.entries(fill(outer, spec, rank))
    beyond = dict.fromkeys(axis for entry in filled[rank:] for axis in specs.entry_axes(entry))
    beyond.update(dict.fromkeys(sorted(spec.unreduced | spec.reduced)))
    seen = [*filled, *[None] * rank][:rank]
    return PartitionSpec(*seen, tuple(beyond)) if beyond else PartitionSpec(*seen)
