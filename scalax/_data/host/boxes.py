"""Boxes: blocks of a global array, as the start and the end along each dimension."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Box = tuple[tuple[int, int], ...]
Index = tuple[slice, ...]


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Converts the slices of a block to a box.

    Example:
        >>> box_of((slice(None), slice(1, 3)), (4, 3))
        ((0, 4), (1, 3))
    """
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def boxes_of(shape: Sequence[int], indices: Mapping[Any, Index]) -> dict[Any, Box]:
    """Converts the slices of each device to a box.

    Example:
        >>> boxes_of((4, 3), {'a': (slice(None), slice(1, 3))})
        {'a': ((0, 4), (1, 3))}
    """
    return {device: box_of(index, shape) for device, index in indices.items()}


def box_shape(box: Box) -> tuple[int, ...]:
    """Returns the shape of a box."""
    return tuple(end - start for start, end in box)


def volume(box: Box) -> int:
    """Returns the number of elements of a box."""
    return math.prod(box_shape(box))


def intersection(a: Box, b: Box) -> Box:
    """Returns the intersection of two boxes: a box without elements if they are disjoint."""
    pairs = zip(a, b, strict=True)
    return tuple((start := max(a0, b0), max(start, min(a1, b1))) for (a0, a1), (b0, b1) in pairs)
