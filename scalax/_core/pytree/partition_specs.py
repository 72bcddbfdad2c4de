"""PartitionSpecs: their entries and axes, and their canonical form."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jax.sharding import AxisType, PartitionSpec

from scalax._jax.shardings import entries, unreduced_kind

UNCONSTRAINED = PartitionSpec.UNCONSTRAINED


def entry_axes(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a spec: ``'a'`` -> ``('a',)``, None, UNCONSTRAINED -> ``()``."""
    if entry is None or entry is UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, tuple | list) else (entry,)


def spec_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """Returns the mesh axes of a spec in order, with repetitions."""
    return tuple(axis for entry in entries(spec) for axis in entry_axes(entry))


def canonical_entry(entry: Any) -> Any:
    """Returns one entry of a spec in canonical form: tuples have at least two axes."""
    if entry is UNCONSTRAINED:
        return entry
    axes = entry_axes(entry)
    return None if not axes else axes[0] if len(axes) == 1 else axes


def with_entries(spec: PartitionSpec, new_entries: Sequence[Any]) -> PartitionSpec:
    """Returns a canonical spec with new entries, and the unreduced and reduced axes of *spec*.

    A canonical spec has no trailing None, and no tuples of fewer than two axes. ``P('x')`` and
    ``P('x', None)`` are equivalent but compare unequal: with ``jax.jit`` that costs a second compilation.
    """
    result = [canonical_entry(entry) for entry in new_entries]
    while result and result[-1] is None:
        result.pop()
    if spec.unreduced or spec.reduced:
        return spec.update(partitions=tuple(result))
    return PartitionSpec(*result)


def only_reduction_axes(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """Returns a spec without entries, with the unreduced and reduced axes of *spec* that are in *axes*."""
    unreduced, reduced = spec.unreduced.intersection(axes), spec.reduced.intersection(axes)
    if not unreduced:
        return PartitionSpec(reduced=reduced)
    return spec.update(partitions=(), unreduced=unreduced, reduced=reduced)  # keeps the kind of reduction


def canonical(spec: PartitionSpec) -> PartitionSpec:
    """Returns the canonical form of a spec, which `resolve` returns.

    Example:
        >>> canonical(PartitionSpec(('data',), None))
        P('data',)
    """
    return with_entries(spec, entries(spec))


def text(spec: PartitionSpec) -> str:
    """Returns the text of a spec, which is the same in every process: JAX prints sets in any order.

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
    if unreduced_kind(spec) != 'sum':
        parts.append(f'unreduced_kind={unreduced_kind(spec)}')
    return f'P({", ".join(parts)})'


def axis_sizes_text(sizes: Mapping[str, int]) -> str:
    """Returns the text of mesh axes and their sizes, as in messages and reports.

    Example:
        >>> axis_sizes_text({'fsdp': 4, 'tp': 2})
        'fsdp=4, tp=2'
    """
    return ', '.join(f'{name}={size}' for name, size in sizes.items())


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """The sizes and types of the axes of a mesh, in order."""

    sizes: Mapping[str, int]
    types: Mapping[str, AxisType]

    @classmethod
    @functools.lru_cache(maxsize=256)
    def of(cls, mesh: Any) -> MeshAxes:
        """Returns the axes of a ``Mesh`` or an ``AbstractMesh``."""
        return cls(dict(mesh.shape), dict(zip(mesh.axis_names, mesh.axis_types, strict=True)))

    def of_type(self, kind: AxisType) -> list[str]:
        """Returns the axes of one type, in order."""
        return [axis for axis, type_ in self.types.items() if type_ is kind]

    def __str__(self) -> str:
        return axis_sizes_text(self.sizes)

    def size(self, axes: Sequence[str]) -> int:
        """Returns the product of the sizes of *axes*."""
        return math.prod(self.sizes[axis] for axis in axes)


def only_axes(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """Removes all axes that are not in *axes* from the entries of a spec.

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
    """Removes Manual axes from a spec: inside ``shard_map`` shapes are local along these axes."""
    return only_axes(spec, {axis for axis in spec_axes(spec) if axes.types.get(axis) is not AxisType.Manual})
