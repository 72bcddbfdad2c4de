"""Layouts of state: the placements of a state leaf, and its path."""

from __future__ import annotations

from typing import NamedTuple

from scalax._jaxpr.dim_rules import Axes
from scalax._spmd.placements.placement import Placement, Placements, Shard, remap_dims


class Layout(NamedTuple):
    """The layout of state.

    Attributes:
        placements: its placements; `Partial` along axes where an enclosing loop reduces the sum later.
        path: the leaf path of the state; None for another result, such as a loss.
        result: the index of the result of the step. Of equal layouts, the one with the lowest index is used.
        auto: the Auto axes that also shard it: pairs of a dimension and its axes.
    """

    placements: Placements
    path: str | None
    result: int = 0
    auto: tuple[tuple[int, Axes], ...] = ()


class ShiftedDims(dict[int, int]):
    """A mapping that adds an offset to every dimension, as stacking or indexing does."""

    def __init__(self, offset: int) -> None:
        super().__init__()
        self._offset = offset

    def __contains__(self, dim: object) -> bool:
        return isinstance(dim, int) and dim + self._offset >= 0

    def __missing__(self, dim: int) -> int:
        return dim + self._offset


def remap_layout(layout: Layout | None, dims: dict[int, int]) -> Layout | None:
    """Returns a layout after dimensions are renumbered.

    Returns None if the layout is None, or a sharded dimension is not among *dims*.

    Args:
        layout: the layout.
        dims: dimension -> its new index.
    """
    placements = None if layout is None else remap_dims(layout.placements, dims)
    if layout is None or placements is None:
        return None
    auto = tuple([(dims[dim], axes) for dim, axes in layout.auto if dim in dims])
    return layout._replace(placements=placements, auto=auto)


def state_placement(placement: Placement) -> Placement:
    """Returns a placement whose shard is marked as state."""
    return placement._replace(is_state=True) if isinstance(placement, Shard) else placement
