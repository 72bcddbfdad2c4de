"""Placements of values along the mesh axes of the batch, and the conversions between them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeGuard

from jax.sharding import PartitionSpec

ReduceOp = Literal['sum', 'max', 'min']


class Shard(NamedTuple):
    """Each device holds a block of one dimension.

    Attributes:
        dim: the dimension.
        is_state: whether the value is state (a weight, its gradient or its moments), as opposed to examples.
            State is gathered where it meets examples.
        outer_axes: the Auto axes whose blocks of the dimension contain these blocks, from major to minor.
            With ``P(('tp', 'fsdp'))``, a device has a block, over ``fsdp``, of a block over ``tp``. The local
            shard consists of one such block for each block over ``tp``, and is sharded over ``tp``.
    """

    dim: int
    is_state: bool = False
    outer_axes: tuple[str, ...] = ()

    def at(self, dim: int) -> Shard:
        """Returns the same shard of another dimension."""
        return self._replace(dim=dim)


@dataclasses.dataclass(frozen=True, slots=True)
class Replicate:
    """Every device holds the same value."""


@dataclasses.dataclass(frozen=True, slots=True)
class Partial:
    """The value is the reduction over devices of the values that they hold.

    Attributes:
        reduce_op: the reduction.
    """

    reduce_op: ReduceOp = 'sum'


Placement = Shard | Replicate | Partial
Placements = tuple[Placement, ...]
"""The placement of a value along each of the batch axes, from major to minor."""

REPLICATE, SUM = Replicate(), Partial()


def shards_examples(placement: Placement) -> TypeGuard[Shard]:
    """Returns whether a placement is a shard of examples, rather than of state."""
    return isinstance(placement, Shard) and not placement.is_state


def without_state_mark(placement: Placement) -> Placement:
    """Returns a placement whose shard is not marked as state."""
    return placement._replace(is_state=False) if isinstance(placement, Shard) else placement


def without_outer_axes(placement: Placement) -> Placement:
    """Returns a placement whose shard is not a part of a shard over Auto axes."""
    return placement._replace(outer_axes=()) if isinstance(placement, Shard) else placement


def shard_counts(placements: Placements, sizes: Sequence[int], rank: int) -> list[int]:
    """Returns the number of blocks into which each dimension of a value is split."""
    counts = [1] * rank
    for placement, size in zip(placements, sizes, strict=True):
        if isinstance(placement, Shard):
            counts[placement.dim] *= size
    return counts


def local_shape(shape: Sequence[int], placements: Placements, sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of the local shard of a value.

    Args:
        shape: the global shape.
        placements: the placements of the value.
        sizes: the sizes of the batch axes.
    """
    if len(placements) == 1:
        [placement], [size] = placements, sizes
        if not isinstance(placement, Shard):
            return tuple(shape)
        dim = placement.dim
        return (*shape[:dim], shape[dim] // size, *shape[dim + 1 :])
    counts = shard_counts(placements, sizes, len(shape))
    return tuple([size // count for size, count in zip(shape, counts, strict=True)])


def spec_of(placements: Placements, axes: Sequence[str]) -> PartitionSpec:
    """Returns the spec of placements along the named axes."""
    entries: dict[int, list[str]] = {}
    for axis, placement in zip(axes, placements, strict=True):
        if isinstance(placement, Shard):
            entries.setdefault(placement.dim, []).append(axis)
    dims = [entries.get(dim) for dim in range(max(entries, default=-1) + 1)]
    return PartitionSpec(
        *[None if names is None else names[0] if len(names) == 1 else (*names,) for names in dims]
    )


def remap_dims(placements: Placements, dims: dict[int, int]) -> Placements | None:
    """Returns the placements after dimensions are renumbered.

    Returns None if a sharded dimension is not among *dims*.

    Args:
        placements: the placements.
        dims: dimension -> its new index.
    """
    result: list[Placement] = []
    for placement in placements:
        if isinstance(placement, Shard):
            if placement.dim not in dims:
                return None
            placement = placement.at(dims[placement.dim])
        result.append(placement)
    return tuple(result)


def join(first: Placement, second: Placement) -> Placement:
    """Returns the common placement of a value with two: after branches, or between iterations of a loop.

    A replicated value becomes any other placement without communication. A partial sum and a shard become the
    shard, to which the sum is scattered. Of two shards, the first is returned.
    """
    if first == second or isinstance(second, Replicate):
        return first
    if isinstance(first, Replicate):
        return second
    if isinstance(first, Shard) and isinstance(second, Shard):
        return first._replace(is_state=first.is_state and second.is_state)
    return first if isinstance(first, Shard) else second if isinstance(second, Shard) else REPLICATE


Kind = Literal['all_gather', 'all_to_all', 'reduce_scatter', 'all_reduce', 'slice', 'mask']


class RedistributeOp(NamedTuple):
    """One operation of a conversion between placements.

    Attributes:
        kind: the operation. `slice` takes a device's block of a replicated value. `mask` makes a replicated
            value partial by setting it to zero on all devices but the first. Both send nothing.
        axes: the indices of the batch axes, from major to minor.
        dim: the dimension that is gathered, scattered or sliced.
        other_dim: for an `all_to_all`, the dimension that is split.
        reduce_op: for an `all_reduce` or a `reduce_scatter`, the reduction.
        outer_axes: the `outer_axes` of the shards of *dim*.
        other_outer_axes: for an `all_to_all`, the `outer_axes` of the shards of *other_dim*.
    """

    kind: Kind
    axes: tuple[int, ...]
    dim: int = 0
    other_dim: int = 0
    reduce_op: ReduceOp = 'sum'
    outer_axes: tuple[str, ...] = ()
    other_outer_axes: tuple[str, ...] = ()


def redistribute(source: Placements, target: Placements) -> list[RedistributeOp]:
    """Returns the operations that convert a value between placements.

    | from, to    | Shard(b)         | Replicate  | Partial          |
    |-------------|------------------|------------|------------------|
    | Shard(a)    | all_to_all       | all_gather | all_gather, mask |
    | Replicate   | slice            |            | mask             |
    | Partial     | reduce_scatter   | all_reduce | (all_reduce, mask if the reductions differ) |

    Partial sums are scattered before others are reduced: under HSDP, first along the fast axis, and then only
    the shards along the slow one. Where several axes shard one dimension, the major axis has the larger
    blocks, so the minor axes are gathered before the major one changes.
    """
    return [*_redistributed(source, target)]


@functools.lru_cache(maxsize=4096)  # layers repeat conversions
def _redistributed(source: Placements, target: Placements) -> Sequence[RedistributeOp]:
    current, ops = [*source], list[RedistributeOp]()
    changing = [
        i
        for i, (source_placement, target_placement) in enumerate(zip(source, target, strict=True))
        if not same_blocks(source_placement, target_placement)
    ]
    if not changing:
        return ops
    if len({(source[i], target[i]) for i in changing}) == 1 and _own_their_dims(source, target, changing):
        source_placement, target_placement = source[changing[0]], target[changing[0]]
        if (
            isinstance(source_placement, Shard)
            and isinstance(target_placement, Shard)
            and source_placement.dim != target_placement.dim
            and {*source_placement.outer_axes}.isdisjoint(target_placement.outer_axes)
        ):
            return [
                RedistributeOp(
                    'all_to_all',
                    tuple(changing),
                    source_placement.dim,
                    target_placement.dim,
                    outer_axes=source_placement.outer_axes,
                    other_outer_axes=target_placement.outer_axes,
                )
            ]
    # Gather, from the minor axis to the major one.
    changing_dims = {dim for i in changing for dim in _dims(source[i], target[i])}
    first_axis = min(changing)
    gathered = [
        i
        for i, source_placement in enumerate(source)
        if isinstance(source_placement, Shard)
        and (i in changing or (i > first_axis and source_placement.dim in changing_dims))
    ]
    for i in reversed(gathered):
        _append(ops, RedistributeOp('all_gather', (i,), _dim(current[i]), outer_axes=_outer_axes(current[i])))
        current[i] = REPLICATE
    # Scatter sums, from the major axis to the minor one.
    for i, target_placement in enumerate(target):
        source_placement = current[i]
        if (
            isinstance(source_placement, Partial)
            and isinstance(target_placement, Shard)
            and source_placement.reduce_op == 'sum'
        ):
            majors = range(i)
            if all(
                same_blocks(current[j], target[j]) or _dim_or_none(target[j]) != target_placement.dim
                for j in majors
            ):
                _append(
                    ops,
                    RedistributeOp(
                        'reduce_scatter',
                        (i,),
                        target_placement.dim,
                        reduce_op=source_placement.reduce_op,
                        outer_axes=target_placement.outer_axes,
                    ),
                )
                current[i] = target_placement
    for i, target_placement in enumerate(target):
        source_placement = current[i]
        if isinstance(source_placement, Partial) and source_placement != target_placement:
            _append(ops, RedistributeOp('all_reduce', (i,), 0, 0, source_placement.reduce_op))
            current[i] = REPLICATE
    for i, target_placement in enumerate(target):
        if isinstance(current[i], Replicate) and isinstance(target_placement, Shard):
            _append(
                ops,
                RedistributeOp('slice', (i,), target_placement.dim, outer_axes=target_placement.outer_axes),
            )
        elif isinstance(current[i], Replicate) and isinstance(target_placement, Partial):
            _append(ops, RedistributeOp('mask', (i,), 0, 0, target_placement.reduce_op))
    return ops


def _append(ops: list[RedistributeOp], op: RedistributeOp) -> None:
    """Appends an operation, merged with the one before it if only their axes differ."""
    if ops and op.kind != 'all_to_all' and ops[-1]._replace(axes=()) == op._replace(axes=()):
        ops[-1] = op._replace(axes=(*sorted({*ops[-1].axes, *op.axes}),))
    else:
        ops.append(op)


def same_blocks(first: Placement, second: Placement) -> bool:
    """Returns whether devices hold the same elements in two placements."""
    if isinstance(first, Shard) and isinstance(second, Shard):
        return first.dim == second.dim and first.outer_axes == second.outer_axes
    return first == second


def _dim(placement: Placement) -> int:
    assert isinstance(placement, Shard)
    return placement.dim


def _outer_axes(placement: Placement) -> tuple[str, ...]:
    return placement.outer_axes if isinstance(placement, Shard) else ()


def _dim_or_none(placement: Placement) -> int | None:
    return placement.dim if isinstance(placement, Shard) else None


def _dims(*placements: Placement) -> list[int]:
    return [placement.dim for placement in placements if isinstance(placement, Shard)]


def _own_their_dims(source: Placements, target: Placements, axes: Sequence[int]) -> bool:
    """Whether no other axis shards the dimensions that these axes shard before or after a conversion."""
    dims = {dim for axis in axes for dim in _dims(source[axis], target[axis])}
    return dims.isdisjoint(_dims(*[x for axis, x in enumerate(source) if axis not in axes]))
