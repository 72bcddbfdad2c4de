"""Layouts of state: where its dimensions are sharded, and which state it is."""

from __future__ import annotations

from typing import NamedTuple

from scalax._jaxpr.dim_rules import Axes
from scalax._spmd.placements.placement import Placement, Placements, Shard, remap_dims


class Layout(NamedTuple):
    """The layout of state.

    Attributes:
        placements: its placements; `Partial` where a sum is left to a loop around to be reduced.
        path: the path of the state; None of another result, such as a loss.
        result: the number of the result that it is of; of equal layouts, that of the first result counts.
        auto: the Auto axes that shard it too: dimensions with the axes of each.
    """

    placements: Placements
    path: str | None
    result: int = 0
    auto: tuple[tuple[int, Axes], ...] = ()


class ShiftedDims(dict[int, int]):
    """Dimensions that all have another number."""

    def __init__(self, by: int) -> None:
        super().__init__()
        self._by = by

    def __contains__(self, dim: object) -> bool:
        return isinstance(dim, int) and dim + self._by >= 0

    def __missing__(self, dim: int) -> int:
        return dim + self._by


def remap_layout(layout: Layout | None, dims: dict[int, int]) -> Layout | None:
    """Returns a layout with its dimensions in other places; None if a sharded one has none.

    Args:
        layout: the layout, if it is known.
        dims: dimension -> its new place.
    """
    placements = None if layout is None else remap_dims(layout.placements, dims)
    if layout is None or placements is None:
        return None
    auto = tuple([(dims[dim], axes) for dim, axes in layout.auto if dim in dims])
    return layout._replace(placements=placements, auto=auto)


def state_placement(placement: Placement) -> Placement:
    """Returns the placement of a block of state."""
    return Shard(placement.dim, is_state=True) if isinstance(placement, Shard) else placement
