"""Validation of a PartitionSpec for one array on one mesh.

Takes shapes and axis sizes only, no devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jax.sharding import AxisType, PartitionSpec

from scalax._core.pytree.partition_specs import (
    MeshAxes,
    entries,
    entry_axes,
    spec_axes,
    with_entries,
)
from scalax.errors import ArgumentError, MeshError, did_you_mean, plural


@dataclasses.dataclass(frozen=True)
class Fault:
    """A reason why a spec cannot be used for a leaf.

    Attributes:
        kind: a short stable word, as in `scalax.errors.Problem`.
        detail: the reason, in one sentence.
        hint: the advice to the user.
    """

    kind: str
    detail: str
    hint: str


def unknown_axis_text(axis: Any, sizes: Mapping[str, int]) -> str:
    """Returns the message about an axis that the mesh does not have."""
    return f'the mesh has no axis {axis!r} ({did_you_mean(str(axis), sizes)})'


def validated_axes(option: str, names: str | Iterable[str], axes: MeshAxes) -> tuple[str, ...]:
    """Returns the mesh axes that an option names, in the order given.

    Raises:
        ArgumentError: *names* are not strings.
        MeshError: the mesh does not have one of the names.
    """
    if not isinstance(names, Iterable):
        example = tuple(axes.sizes)[:1]
        raise ArgumentError(f'{option} are names of mesh axes, such as {example}, got {names!r}')
    result = (names,) if isinstance(names, str) else tuple(names)
    for name in result:
        if name not in axes.sizes:
            suggestion = did_you_mean(str(name), axes.sizes)
            raise MeshError(f'{option}: the mesh ({axes}) has no axis {name!r} ({suggestion})')
    return result


def faults(spec: PartitionSpec, shape: tuple[int, ...], axes: MeshAxes) -> list[Fault]:
    """Returns all faults of *spec* for an array of *shape*, except for divisibility."""
    return [*_entry_faults(spec, shape, axes), *_sums_faults(spec, axes)]


def _entry_faults(spec: PartitionSpec, shape: tuple[int, ...], axes: MeshAxes) -> Iterator[Fault]:
    """Yields the faults of the entries of a spec."""
    used = spec_axes(spec)
    for axis in dict.fromkeys([*used, *sorted(spec.unreduced), *sorted(spec.reduced)]):
        if axis not in axes.sizes:
            hint = 'name only axes of the mesh, or build the mesh with that axis.'
            yield Fault('unknown-axis', unknown_axis_text(axis, axes.sizes), hint)
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
            'give a spec at most one entry per dimension (PartitionSpec() replicates).'
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
                'use axes of one type for each dimension (JAX would reorder them silently).',
            )


def _sums_faults(spec: PartitionSpec, axes: MeshAxes) -> Iterator[Fault]:
    """Yields the faults of the unreduced and reduced axes of a spec."""
    named = sorted(spec.unreduced | spec.reduced)
    others = {axis: kind.name for axis, kind in axes.types.items() if kind is not AxisType.Explicit}
    if named and others:
        # If there are Auto axes, JAX (0.10 to 0.12) makes every term of the sum the full value. If there are
        # Manual axes, XLA ends the process.
        yield Fault(
            'unreduced',
            f'unreduced or reduced axes ({", ".join(map(repr, named))}) on a mesh that has axes of '
            f'type {" and ".join(sorted(set(others.values())))} ({", ".join(map(repr, others))})',
            'unreduced and reduced axes need a mesh whose axes are all of type Explicit.',
        )


def indivisible_dims(
    spec: PartitionSpec, shape: tuple[int, ...], axes: MeshAxes
) -> list[tuple[int, tuple[str, ...]]]:
    """Returns (dimension, axes) for each dimension that is not divisible by the sizes of its mesh axes."""
    pairs = [(dim, entry_axes(entry)) for dim, entry in enumerate(entries(spec))]
    return [(dim, names) for dim, names in pairs if names and shape[dim] % axes.size(names)]


def divisibility_fault(dim: int, names: tuple[str, ...], shape: tuple[int, ...], axes: MeshAxes) -> Fault:
    """Returns the fault of one dimension from `indivisible_dims`."""
    sizes = ' x '.join(f'{name}={axes.sizes[name]}' for name in names)
    return Fault(
        'indivisible',
        f'dimension {dim} of size {shape[dim]} is not divisible by {axes.size(names)} ({sizes})',
        'change the shape (of a batch: pad it, or drop its last examples) or the spec, or set '
        "on_indivisible='replicate' (or 'warn') on the rule, or on the helper for bare specs, to leave such "
        'dimensions unsharded.',
    )


def drop_indivisible(spec: PartitionSpec, shape: tuple[int, ...], axes: MeshAxes) -> PartitionSpec:
    """Removes axes from the right of each dimension until it is divisible.

    Example:
        >>> axes = MeshAxes({'a': 2, 'b': 3}, {})
        >>> drop_indivisible(PartitionSpec(('a', 'b'), 'b'), (4, 9), axes)
        P('a', 'b')
    """
    result: list[Any] = [*entries(spec)]
    for dim, names in indivisible_dims(spec, shape, axes):
        while shape[dim] % axes.size(names):
            names = names[:-1]
        result[dim] = names
    return with_entries(spec, result)
