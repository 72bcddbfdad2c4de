"""The time of a single collective on a torus."""

import numpy as np

from scalax._planning.hardware.torus import positions_on_torus, route_of, torus_of
from scalax._planning.time.collective_time import collective_seconds


def seconds(kind, array_bytes, hardware, shape, axes):
    """Returns the time of one collective along axes of a mesh that is the torus; the first device's group.

    Args:
        kind: the kind of the collective.
        array_bytes: the bytes of the full array of one group.
        hardware: the hardware that has the torus.
        shape: the lengths of its axes, which are named X, Y and Z.
        axes: the axes along which the collective runs, such as ``'XY'``.
    """
    mesh = dict(zip('XYZ', shape, strict=False))
    positions = positions_on_torus(mesh, mesh, hardware)
    grid = np.arange(len(positions)).reshape(shape)
    group = grid[tuple(slice(None) if name in axes else 0 for name in mesh)].reshape(-1)
    route = route_of([positions[i] for i in group], torus_of(positions, hardware), axes)
    return collective_seconds(kind, array_bytes, route, hardware, 1).ici
