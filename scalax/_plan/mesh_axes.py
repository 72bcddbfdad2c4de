"""Along which mesh axes does a collective run? Groups of devices, matched against the mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from scalax._plan.replica_groups import Groups


def axes_of_groups(groups: Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The fewest mesh axes along which all members of every group differ.

    A group may hold only some of the devices along its axes; the count of its members says so.

    Args:
        groups: one row a group, of positions in ``mesh.devices.flat``.
        sizes: mesh axis name -> size.

    Example:
        >>> axes_of_groups(np.array([[0, 2], [1, 3]]), {'data': 2, 'tp': 2})
        ('data',)
    """
    places = np.stack(np.unravel_index(groups, tuple(sizes.values())))
    varies = (places != places[:, :, :1]).any(axis=(1, 2))
    return tuple(name for name, differs in zip(sizes, varies, strict=True) if differs)


def devices_along(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    """How many devices lie along mesh axes together."""
    return math.prod(sizes[axis] for axis in axes)
