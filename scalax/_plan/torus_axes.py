"""Mesh axes on the torus of chips: where each one runs, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from scalax._plan.hardware import hardware_of
from scalax._plan.torus import Place, Route, line_text, route_of, torus_of
from scalax.errors import PlanError


def axes_on_torus(mesh: Mapping[str, int], places: Sequence[Place], device_kind: str) -> list[str]:
    """Where each mesh axis larger than 1 runs, if that is known and the same for all of its groups.

    Args:
        mesh: mesh axis name -> size.
        places: the positions of the devices, in the order of the mesh.
        device_kind: what JAX calls the devices, which says which axes of the torus are rings.

    Example:
        >>> places = [Place(0, (x, y)) for x in range(2) for y in range(4)]
        >>> axes_on_torus({'tp': 2, 'fsdp': 4}, places, 'TPU v5 lite')
        ['tp=2: line of 2 along x', 'fsdp=4: line of 4 along y']
    """
    hardware = hardware_of(device_kind)
    if hardware is None or not places or not all(place.coords for place in places):
        return []
    numbers = np.arange(len(places)).reshape(tuple(mesh.values()))
    shown = []
    try:
        torus = torus_of(places, hardware)
        for number, (axis, size) in enumerate(mesh.items()):
            groups = np.moveaxis(numbers, number, -1).reshape(-1, size).tolist() if size > 1 else []
            routes = {route_of([places[i] for i in group], torus, axis) for group in groups}
            if len(routes) == 1:
                shown.append(f'{axis}={size}: {_route_text(routes.pop())}')
    except PlanError:  # numbers of the hardware are missing, or the devices form no torus of it
        return []
    return shown


def _route_text(route: Route) -> str:
    parts = [line_text(line) for line in route.lines]
    if route.chips < route.devices:
        parts.insert(0, f'the {route.devices // route.chips} devices of a chip')
    if route.slices > 1:
        parts.append(f'{route.slices} slices')
    return ' and '.join(parts)
