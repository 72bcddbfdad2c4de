"""NamedShardings in place of specs: whether their mesh is the one in force, and how another one differs."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from scalax._tree.specs import Fault, MeshAxes


def mesh_fault(sharding: NamedSharding, own: Mesh | AbstractMesh, of_values: bool) -> Fault | None:
    """How the mesh of a NamedSharding differs from the one in force; None where it is that one.

    Args:
        sharding: the NamedSharding.
        own: the mesh in force, in which the axes of the given one may have other types.
        of_values: whether the sharding is for a value inside of a function.
    """
    given: Mesh | AbstractMesh = sharding.mesh
    # What else may be in one has no public name: JAX takes an order of the devices.
    if sharding != NamedSharding(given, sharding.spec, memory_kind=sharding.memory_kind):
        return Fault(
            'other-mesh',
            'the NamedSharding orders the devices of its mesh anew (_logical_device_ids)',
            'make the mesh of the devices in that order: MeshShardingHelper.from_mesh(Mesh(devices, names)).',
        )
    if given == own:
        return None
    detail = f'the NamedSharding is of another mesh: {given}'
    hint = "give NamedShardings of the helper's own mesh, or PartitionSpecs."
    theirs, ours = MeshAxes.of(given), MeshAxes.of(own)
    if [*theirs.sizes.items()] != [*ours.sizes.items()]:
        return Fault('other-mesh', detail, hint)
    own_devices: list[Any] = []  # only meshes with devices can differ in their order
    devices: list[Any] = []
    if isinstance(given, Mesh) and isinstance(own, Mesh):
        devices, own_devices = [*given.devices.flat], [*own.devices.flat]
        # A constraint is one on axes of any type, as JAX takes it without a mesh in force.
        is_same = of_values and devices == own_devices
    else:
        manual, is_ambient = AxisType.Manual, own == jax.sharding.get_abstract_mesh()
        pairs = [(kind, theirs.types[name]) for name, kind in ours.types.items()]
        is_same = is_ambient or all(mine is other or manual in (mine, other) for mine, other in pairs)
    if is_same:
        return None
    if devices == own_devices:
        types = ', '.join(f'{name}={kind.name}' for name, kind in theirs.types.items())
        detail = f'the NamedSharding is of this mesh with axes of other types: {types}'
        hint = 'give the PartitionSpec, which is for axes of any type, or make the helper of that mesh.'
    elif set(devices) == set(own_devices):
        ids = [device.id for device in devices]
        detail = (
            'the NamedSharding is of a mesh with the devices of this one in another order: '
            f'ids {ids[:16]}{" ..." if len(ids) > 16 else ""}'
        )
        hint = 'give the PartitionSpec, or make the helper of that mesh (MeshShardingHelper.from_mesh).'
    return Fault('other-mesh', detail, hint)
