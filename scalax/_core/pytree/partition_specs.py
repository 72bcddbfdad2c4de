"""PartitionSpecs: their entries and axes, canonical form, and validity for one array on one mesh.

Shapes and axis sizes only, no devices.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jax.sharding import AxisType, PartitionSpec

from scalax._jax.shardings import entries, sums_kind

UNCONSTRAINED = PartitionSpec.UNCONSTRAINED


def entry_axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a spec: ``'a'`` -> ``('a',)``, None and UNCONSTRAINED -> ``()``."""
    if entry is None or entry is UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, tuple | list) else (entry,)


def spec_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """Every mesh axis of a spec in order, with repetitions."""
    return tuple(axis for entry in entries(spec) for axis in entry_axes(entry))


def canonical_entry(entry: Any) -> Any:
    """One entry of a spec in the form that resolving returns: tuples have two axes or more."""
    if entry is UNCONSTRAINED:
        return entry
    axes = entry_axes(entry)
    return None if not axes else axes[0] if len(axes) == 1 else axes


def with_entries(spec: PartitionSpec, new: Sequence[Any]) -> PartitionSpec:
    """A canonical spec with other entries and the same unreduced and reduced axes.

    Canonical: no trailing None, no tuples of fewer than two axes. ``P('x')`` and ``P('x', None)`` mean
    the same and compare unequal, which costs users of ``jax.jit`` a second compilation.
    """
    kept = [canonical_entry(entry) for entry in new]
    while kept and kept[-1] is None:
        kept.pop()
    if spec.unreduced or spec.reduced:
        return spec.update(partitions=tuple(kept))
    return PartitionSpec(*kept)


def only_reduction_axes(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """The unreduced and reduced axes of a spec that are among *axes*, and no entries."""
    unreduced, reduced = spec.unreduced.intersection(axes), spec.reduced.intersection(axes)
    if not unreduced:
        return PartitionSpec(reduced=reduced)
    return spec.update(partitions=(), unreduced=unreduced, reduced=reduced)  # sums or maxima stay those


def canonical(spec: PartitionSpec) -> PartitionSpec:
    """The one form of a spec that resolving returns.

    Example:
        >>> canonical(PartitionSpec(('data',), None))
        P('data',)
    """
    return with_entries(spec, entries(spec))


def text(spec: PartitionSpec) -> str:
    """A spec as messages and reports show it, the same in every process: JAX prints sets in any order.

    Example:
        >>> text(PartitionSpec('a', None, unreduced={'c', 'b'}))
        "P('a', None, unreduced={'b', 'c'})"
    """
    if not spec.unreduced and not spec.reduced:
        return str(spec)
    parts = [repr(entry) for entry in entries(spec)]
    for name, axes in (('unreduced', spec.unreduced), ('reduced', spec.reduced)):
        if axes:
            parts.append(f'{name}={{{", ".join(map(repr, sorted(axes)))}}}')
    if sums_kind(spec) != 'sum':
        parts.append(f'unreduced_kind={sums_kind(spec)}')
    return f'P({", ".join(parts)})'


def axis_sizes_text(sizes: Mapping[str, int]) -> str:
    """The axes of a mesh with their sizes, as messages and reports show them.

    Example:
        >>> axis_sizes_text({'fsdp': 4, 'tp': 2})
        'fsdp=4, tp=2'
    """
    return ', '.join(f'{name}={size}' for name, size in sizes.items())


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """What resolving needs to know of a mesh: the sizes and types of its axes, in order."""

    sizes: Mapping[str, int]
    types: Mapping[str, AxisType]

    @classmethod
    @functools.lru_cache(maxsize=256)
    def of(cls, mesh: Any) -> MeshAxes:
        """Reads a ``Mesh`` or an ``AbstractMesh``."""
        return cls(dict(mesh.shape), dict(zip(mesh.axis_names, mesh.axis_types, strict=True)))

    def of_type(self, kind: AxisType) -> list[str]:
        """The axes of one type, in order."""
        return [axis for axis, type_ in self.types.items() if type_ is kind]

    def __str__(self) -> str:
        return axis_sizes_text(self.sizes)

    def size(self, axes: Sequence[str]) -> int:
        """The number of shards along *axes* together."""
        return math.prod(self.sizes[axis] for axis in axes)


def only_axes(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """The spec with only those axes in its entries that are among *axes*.

    Example:
        >>> only_axes(PartitionSpec(('data', 'fsdp'), 'tp', PartitionSpec.UNCONSTRAINED), {'fsdp'})
        P('fsdp', None, UNCONSTRAINED)
    """
    return with_entries(
        spec,
        [
            entry if entry is UNCONSTRAINED else tuple(axis for axis in entry_axes(entry) if axis in axes)
            for entry in entries(spec)
        ],
    )


def without_manual_axes(spec: PartitionSpec, axes: MeshAxes) -> PartitionSpec:
    """The spec without the axes that are Manual: inside ``shard_map`` shapes are local to those."""
    return only_axes(spec, {axis for axis in spec_axes(spec) if axes.types.get(axis) is not AxisType.Manual})
