"""Where does each device of a mesh lie? Slices, coordinates in the torus, and cores of a chip."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from scalax._plan.hardware import Hardware
from scalax._plan.replica_groups import Groups
from scalax.errors import PlanError, did_you_mean

Network = Literal['ici', 'dcn', 'chip']
NETWORKS: tuple[Network, ...] = get_args(Network)


class Place(NamedTuple):
    """Where one device lies.

    Attributes:
        slice: what it reaches without the data centre's network; its host, where JAX names no slice.
        coords: where its chip lies in the torus; empty where there is none.
        core: which of the devices of its chip it is.
    """

    slice: int
    coords: tuple[int, ...] = ()
    core: int = 0


def places_of(devices: Iterable[Any]) -> tuple[Place, ...]:
    """Where devices lie, as they say themselves; in their order."""
    return tuple(map(_place, devices))


def _place(device: Any) -> Place:
    coords = tuple(getattr(device, 'coords', None) or ())
    # Devices of one slice may have no index; those of GPUs and CPUs reach as far as their host does.
    index = getattr(device, 'slice_index', None)
    if index is None:
        index = 0 if coords else device.process_index
    return Place(int(index), coords, int(getattr(device, 'core_on_chip', None) or 0))


def networks_of(groups: Groups, places: Sequence[Place]) -> tuple[Network, ...]:
    """What joins the devices of groups: 'ici' chips of a slice, 'dcn' slices, 'chip' the devices of a chip.

    Args:
        groups: one row a group, of positions in the order of *places*.
        places: where the devices of the mesh lie, in the order of the mesh.

    Returns:
        All that some group needs; nothing where devices do not lie in slices.

    Example:
        >>> places = [Place(slice, (x,)) for slice in range(2) for x in range(2)]
        >>> networks_of(np.array([[0, 2], [1, 3]]), places), networks_of(np.array([[0, 1, 2, 3]]), places)
        (('dcn',), ('ici', 'dcn'))
    """
    if not places or not all(place.coords for place in places):
        return ()
    used: set[Network] = set()
    for group in groups.tolist():
        slices: dict[int, list[tuple[int, ...]]] = collections.defaultdict(list)
        for device in group:
            slices[places[device].slice].append(places[device].coords)
        used |= {'dcn'} if len(slices) > 1 else set()
        used |= {'ici' if len({*chips}) > 1 else 'chip' for chips in slices.values() if len(chips) > 1}
    return tuple(network for network in NETWORKS if network in used)


def places_on_torus(
    torus: Mapping[str, int | Sequence[int]], mesh: Mapping[str, int], hardware: Hardware
) -> tuple[Place, ...]:
    """Where devices would lie if each mesh axis had axes of the torus to itself, and each device were a chip.

    Args:
        torus: mesh axis -> the lengths of the axes of the torus that it is laid along. Mesh axes that are not
            named lie across slices.
        mesh: mesh axis -> size.
        hardware: whose torus it is.

    Raises:
        PlanError: it does not fit the mesh, or the torus.

    Example:
        >>> from scalax._plan.hardware import HARDWARE
        >>> places_on_torus({'tp': 2}, {'data': 2, 'tp': 2}, HARDWARE['v5e'])[1:3]
        (Place(slice=0, coords=(1, 0), core=0), Place(slice=1, coords=(0, 0), core=0))
    """
    hardware.need('torus_axes', for_='torus=')
    dimensions = hardware.torus_axes or 0
    lengths = _lengths(torus)
    for name, wanted in lengths.items():
        if name not in mesh:
            raise PlanError(
                f'torus= names {name!r}, which is no axis of the mesh ({did_you_mean(name, mesh)})'
            )
        if math.prod(wanted) != mesh[name]:
            raise PlanError(
                f'torus={{{name!r}: {wanted}}} has {math.prod(wanted)} chips, '
                f'but the mesh axis {name!r} has {mesh[name]}'
            )
    used = sum(map(len, lengths.values()))
    if used > dimensions:
        raise PlanError(f'torus= uses {used} axes, but the torus of {hardware.name!r} has {dimensions}')
    slices = {name: size for name, size in mesh.items() if name not in lengths}
    places = []
    for index in np.ndindex(tuple(mesh.values())):
        at = dict(zip(mesh, index, strict=True))
        coords = [int(i) for name, wanted in lengths.items() for i in np.unravel_index(at[name], wanted)]
        across = 0
        for name, size in slices.items():
            across = across * size + at[name]
        places.append(Place(across, (*coords, *(0,) * (dimensions - used))))
    return tuple(places)


def _lengths(torus: Any) -> dict[str, tuple[int, ...]]:
    """A tuple for each mesh axis, of what the caller gave."""
    if isinstance(torus, Mapping):
        given = {name: (value,) if isinstance(value, int) else value for name, value in torus.items()}
        if all(isinstance(value, Sequence) for value in given.values()):
            lengths = {name: tuple(value) for name, value in given.items()}
            if all(isinstance(length, int) for value in lengths.values() for length in value):
                return lengths
    raise PlanError(
        'torus= says how long the axes of the torus are along which each mesh axis lies, such as '
        f"{{'fsdp': (4, 4), 'tp': 4}}, got {torus!r}"
    )
