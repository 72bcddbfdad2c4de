"""PartitionSpecs: their entries and axes, canonical form, and validity for one array on one mesh.

Shapes and axis sizes only, no devices.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import AxisType, PartitionSpec

from scalax._jax.shardings import entries, sums_kind
from scalax.errors import ArgumentError, MeshError, did_you_mean, plural

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


def replaced(spec: PartitionSpec, new: Sequence[Any]) -> PartitionSpec:
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


def with_sums(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
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
    return replaced(spec, entries(spec))


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
    return replaced(
        spec,
        [
            entry if entry is UNCONSTRAINED else tuple(axis for axis in entry_axes(entry) if axis in axes)
            for entry in entries(spec)
        ],
    )


def without_manual(spec: PartitionSpec, axes: MeshAxes) -> PartitionSpec:
    """The spec without the axes that are Manual: inside ``shard_map`` shapes are local to those."""
    return only_axes(spec, {axis for axis in spec_axes(spec) if axes.types.get(axis) is not AxisType.Manual})


@dataclasses.dataclass(frozen=True)
class Fault:
    """One reason why a spec cannot be used, without the leaf that it is about."""

    kind: str
    detail: str
    hint: str


def no_axis(axis: Any, sizes: Mapping[str, int]) -> str:
    """The text about an axis that a mesh lacks."""
    return f'the mesh has no axis {axis!r} ({did_you_mean(str(axis), sizes)})'


def chosen_axes(option: str, names: str | Iterable[str], axes: MeshAxes) -> tuple[str, ...]:
    """The mesh axes that an option names, one or several, in the order given.

    Raises:
        ArgumentError: *names* are not strings.
        MeshError: a name that the mesh does not have.
    """
    if not isinstance(names, Iterable):
        example = tuple(axes.sizes)[:1]
        raise ArgumentError(f'{option} are names of mesh axes, such as {example}, got {names!r}')
    chosen = (names,) if isinstance(names, str) else tuple(names)
    for name in chosen:
        if name not in axes.sizes:
            near = did_you_mean(str(name), axes.sizes)
            raise MeshError(f'{option}: the mesh ({axes}) has no axis {name!r} ({near})')
    return chosen


def faults(spec: PartitionSpec, shape: tuple[int, ...], axes: MeshAxes) -> list[Fault]:
    """Everything that is wrong with *spec* for an array of *shape*, divisibility aside."""
    return [*_entry_faults(spec, shape, axes), *_sums_faults(spec, axes)]


def _entry_faults(spec: PartitionSpec, shape: tuple[int, ...], axes: MeshAxes) -> Iterator[Fault]:
    used = spec_axes(spec)
    for axis in dict.fromkeys([*used, *sorted(spec.unreduced), *sorted(spec.reduced)]):
        if axis not in axes.sizes:
            hint = 'name only axes of the mesh, or build the mesh with that axis.'
            yield Fault('unknown-axis', no_axis(axis, axes.sizes), hint)
    for axis in dict.fromkeys(axis for axis in used if used.count(axis) > 1):
        dims = [str(dim) for dim, entry in enumerate(entries(spec)) for a in entry_axes(entry) if a == axis]
        yield Fault(
            'axis-reuse',
            f'mesh axis {axis!r} is used more than once (dimensions {", ".join(dims)})',
            'use each mesh axis at most once in a spec.',
        )
    if len(spec) > len(shape):
        yield Fault(
            'rank',
            f'the spec has {plural(len(spec), "entry", "entries")}, the array '
            f'{plural(len(shape), "dimension")}',
            'give a spec at most one entry a dimension (PartitionSpec() replicates).'
            if shape
            else 'a scalar takes PartitionSpec(), which replicates it; or are two arguments, or their rules, '
            'swapped?',
        )
    for dim, entry in enumerate(entries(spec)):
        kinds = sorted({axes.types[axis].name for axis in entry_axes(entry) if axis in axes.types})
        if len(kinds) > 1:
            yield Fault(
                'mixed-axis-types',
                f'dimension {dim} mixes mesh axes of types {" and ".join(kinds)}',
                'keep the axes of one dimension of one type (JAX would reorder them silently).',
            )


def _sums_faults(spec: PartitionSpec, axes: MeshAxes) -> Iterator[Fault]:
    """What is wrong with the unreduced and reduced axes of a spec."""
    named = sorted(spec.unreduced | spec.reduced)
    others = {axis: kind.name for axis, kind in axes.types.items() if kind is not AxisType.Explicit}
    if named and others:
        # Beside Auto axes JAX (0.10 to 0.12) makes parts of which each is the whole value; beside Manual ones
        # XLA ends the process.
        yield Fault(
            'unreduced',
            f'unreduced or reduced axes ({", ".join(map(repr, named))}) on a mesh that has axes of '
            f'type {" and ".join(sorted(set(others.values())))} ({", ".join(map(repr, others))})',
            'unreduced and reduced axes need a mesh whose axes are all of type Explicit.',
        )


def indivisible(
    spec: PartitionSpec, shape: tuple[int, ...], axes: MeshAxes
) -> list[tuple[int, tuple[str, ...]]]:
    """The dimensions that do not divide by their mesh axes, as (dimension, axes)."""
    pairs = [(dim, entry_axes(entry)) for dim, entry in enumerate(entries(spec))]
    return [(dim, names) for dim, names in pairs if names and shape[dim] % axes.size(names)]


def divisibility_fault(dim: int, names: tuple[str, ...], shape: tuple[int, ...], axes: MeshAxes) -> Fault:
    """The fault of one dimension found by `indivisible`."""
    sizes = ' x '.join(f'{name}={axes.sizes[name]}' for name in names)
    return Fault(
        'indivisible',
        f'dimension {dim} of size {shape[dim]} does not divide by {axes.size(names)} ({sizes})',
        'change the shape (of a batch: pad it, or drop its last examples) or the spec, or set '
        "on_indivisible='replicate' (or 'warn') on the rule, or on the helper for bare specs, to leave such "
        'dimensions unsharded.',
    )


def drop_indivisible(spec: PartitionSpec, shape: tuple[int, ...], axes: MeshAxes) -> PartitionSpec:
    """The spec without the axes that do not divide, dropped from the right of each dimension.

    Example:
        >>> axes = MeshAxes({'a': 2, 'b': 3}, {})
        >>> drop_indivisible(PartitionSpec(('a', 'b'), 'b'), (4, 9), axes)
        P('a', 'b')
    """
    kept: list[Any] = [*entries(spec)]
    for dim, names in indivisible(spec, shape, axes):
        while shape[dim] % axes.size(names):
            names = names[:-1]
        kept[dim] = names
    return replaced(spec, kept)
