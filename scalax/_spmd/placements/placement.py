"""Placements of values along the mesh axes of the batch, and the conversions between them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

from jax.sharding import PartitionSpec

ReduceOp = Literal['sum', 'max', 'min']


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """Each device holds a block of a dimension.

    Attributes:
        dim: the dimension.
        is_state: whether it is a block of state, such as a weight, its gradient or its moments, rather than
            of examples. State is gathered where it meets examples.
    """

    dim: int
    is_state: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Replicate:
    """Every device holds the same value."""


@dataclasses.dataclass(frozen=True, slots=True)
class Partial:
    """The value is the reduction, over devices, of what each of them holds.

    Attributes:
        reduce_op: the reduction.
    """

    reduce_op: ReduceOp = 'sum'


Placement = Shard | Replicate | Partial
Placements = tuple[Placement, ...]
"""The placement of a value along each of the batch axes, from the major axis to the minor one."""

REPLICATE, SUM = Replicate(), Partial()


def shard_counts(placements: Placements, sizes: Sequence[int], rank: int) -> list[int]:
    """Returns into how many blocks each dimension of a value is split."""
    counts = [1] * rank
    for placement, size in zip(placements, sizes, strict=True):
        if isinstance(placement, Shard):
            counts[placement.dim] *= size
    return counts


def local_shape(shape: Sequence[int], placements: Placements, sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of the block that each device holds.

    Args:
        shape: the shape of the value.
        placements: its placements.
        sizes: the sizes of the batch axes.
    """
    if not any(isinstance(x, Shard) for x in placements):
        return tuple(shape)
    if len(placements) == 1:
        [placement], [size] = placements, sizes
        dim = _dim(placement)
        return (*shape[:dim], shape[dim] // size, *shape[dim + 1 :])
    counts = shard_counts(placements, sizes, len(shape))
    return tuple([size // count for size, count in zip(shape, counts, strict=True)])


def spec_of(placements: Placements, axes: Sequence[str]) -> PartitionSpec:
    """Returns the spec of placements along these axes."""
    entries: dict[int, list[str]] = {}
    for axis, placement in zip(axes, placements, strict=True):
        if isinstance(placement, Shard):
            entries.setdefault(placement.dim, []).append(axis)
    dims = [entries.get(dim) for dim in range(max(entries, default=-1) + 1)]
    return PartitionSpec(
        *[None if names is None else names[0] if len(names) == 1 else (*names,) for names in dims]
    )


def remap_dims(placements: Placements, dims: dict[int, int]) -> Placements | None:
    """Returns the placements after dimensions have moved; None if a sharded one has no new place.

    Args:
        placements: the placements.
        dims: dimension -> its new place.
    """
    result: list[Placement] = []
    for placement in placements:
        if isinstance(placement, Shard):
            if placement.dim not in dims:
                return None
            placement = dataclasses.replace(placement, dim=dims[placement.dim])
        result.append(placement)
    return tuple(result)


def join(one: Placement, other: Placement) -> Placement:
    """Returns the placement of a value that may have either: after branches, or between rounds of a loop.

    A replicated value becomes either without communication. A sum and a block of one value become the block,
    because a sum is scattered to it, and of two blocks the first one stays.
    """
    if one == other or isinstance(other, Replicate):
        return one
    if isinstance(one, Replicate):
        return other
    if isinstance(one, Shard) and isinstance(other, Shard):
        return Shard(one.dim, one.is_state and other.is_state)
    return one if isinstance(one, Shard) else other if isinstance(other, Shard) else REPLICATE


Kind = Literal['all_gather', 'all_to_all', 'reduce_scatter', 'all_reduce', 'slice', 'mask']


class RedistributeOp(NamedTuple):
    """One operation of a conversion.

    Attributes:
        kind: the operation. `slice` takes a device's block of a replicated value, and `mask` makes a sum of
            one by setting it to zero on all devices but the first; both send nothing.
        axes: the batch axes, by number, from the major one to the minor one.
        dim: the dimension that is gathered, scattered or sliced.
        other_dim: of an `all_to_all` the dimension that is split.
        reduce_op: of an `all_reduce` and a `reduce_scatter` the reduction.
    """

    kind: Kind
    axes: tuple[int, ...]
    dim: int = 0
    other_dim: int = 0
    reduce_op: ReduceOp = 'sum'


def redistribute(source: Placements, target: Placements) -> list[RedistributeOp]:
    """Returns the operations that convert a value from its placements to others.

    | from, to    | Shard(b)         | Replicate  | Partial          |
    |-------------|------------------|------------|------------------|
    | Shard(a)    | all_to_all       | all_gather | all_gather, mask |
    | Replicate   | slice            |            | mask             |
    | Partial     | reduce_scatter   | all_reduce | (all_reduce, mask if the reductions differ) |

    Sums are scattered before others are reduced: under HSDP, along the fast axis first, and then only the
    shards along the slow one. Where several axes shard one dimension, the major one has the larger blocks, so
    the minor ones are gathered before a major one changes.
    """
    return [*_redistributed(source, target)]


@functools.lru_cache(maxsize=4096)  # layers are alike
def _redistributed(source: Placements, target: Placements) -> Sequence[RedistributeOp]:
    now, steps = [*source], list[RedistributeOp]()
    changing = [i for i, (a, b) in enumerate(zip(source, target, strict=True)) if not same_blocks(a, b)]
    if not changing:
        return steps
    if len({(source[i], target[i]) for i in changing}) == 1 and _are_alone(source, target, changing):
        a, b = source[changing[0]], target[changing[0]]
        if isinstance(a, Shard) and isinstance(b, Shard):
            return [RedistributeOp('all_to_all', tuple(changing), a.dim, b.dim)]
    # Gather, from the minor axis to the major one.
    disturbed = {dim for i in changing for dim in _dims(source[i], target[i])}
    first = min(changing)
    gathered = [
        i
        for i, a in enumerate(source)
        if isinstance(a, Shard) and (i in changing or (i > first and a.dim in disturbed))
    ]
    for i in reversed(gathered):
        _append(steps, RedistributeOp('all_gather', (i,), _dim(now[i])))
        now[i] = REPLICATE
    # Scatter sums, from the major axis to the minor one.
    for i, b in enumerate(target):
        a = now[i]
        if isinstance(a, Partial) and isinstance(b, Shard) and a.reduce_op == 'sum':
            majors = range(i)
            if all(same_blocks(now[j], target[j]) or _dim_or_none(target[j]) != b.dim for j in majors):
                _append(steps, RedistributeOp('reduce_scatter', (i,), b.dim, 0, a.reduce_op))
                now[i] = b
    for i, b in enumerate(target):
        a = now[i]
        if isinstance(a, Partial) and a != b:
            _append(steps, RedistributeOp('all_reduce', (i,), 0, 0, a.reduce_op))
            now[i] = REPLICATE
    for i, b in enumerate(target):
        if isinstance(now[i], Replicate) and isinstance(b, Shard):
            _append(steps, RedistributeOp('slice', (i,), b.dim))
        elif isinstance(now[i], Replicate) and isinstance(b, Partial):
            _append(steps, RedistributeOp('mask', (i,), 0, 0, b.reduce_op))
    return steps


def _append(steps: list[RedistributeOp], step: RedistributeOp) -> None:
    """Appends a step, as one with the step before it if they differ in the axis only."""
    if steps and step.kind != 'all_to_all' and steps[-1]._replace(axes=()) == step._replace(axes=()):
        steps[-1] = step._replace(axes=(*sorted({*steps[-1].axes, *step.axes}),))
    else:
        steps.append(step)


def same_blocks(one: Placement, other: Placement) -> bool:
    """Returns whether a device holds the same elements in two placements."""
    if isinstance(one, Shard) and isinstance(other, Shard):
        return one.dim == other.dim
    return one == other


def _dim(placement: Placement) -> int:
    assert isinstance(placement, Shard)
    return placement.dim


def _dim_or_none(placement: Placement) -> int | None:
    return placement.dim if isinstance(placement, Shard) else None


def _dims(*placements: Placement) -> list[int]:
    return [placement.dim for placement in placements if isinstance(placement, Shard)]


def _are_alone(source: Placements, target: Placements, axes: Sequence[int]) -> bool:
    """Whether no other axis shards a dimension that changes along these."""
    dims = {dim for axis in axes for dim in _dims(source[axis], target[axis])}
    return dims.isdisjoint(_dims(*[x for axis, x in enumerate(source) if axis not in axes]))
