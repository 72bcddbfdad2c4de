"""NamedShardings in place of specs: whether their mesh is the one in force, and how another one differs."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from scalax._tree.specs import Fault, MeshAxes


def is_same_mesh(given: Mesh | AbstractMesh, own: Mesh | AbstractMesh, of_values: bool) -> bool:
    """Whether the mesh of a NamedSharding is the one in force, in which its axes may have other types.

    Args:
        given: the mesh of the NamedSharding.
        own: the mesh in force.
        of_values: whether the sharding is for a value inside of a function.
    """
    if given == own:
        return True
    theirs, ours = MeshAxes.of(given), MeshAxes.of(own)
    if [*theirs.sizes.items()] != [*ours.sizes.items()]:
        return False
    if isinstance(given, Mesh) and isinstance(own, Mesh):
        # A constraint is one on axes of any type, as JAX takes it without a mesh in force.
        return of_values and [*given.devices.flat] == [*own.devices.flat]
    manual, ambient = AxisType.Manual, jax.sharding.get_abstract_mesh()
    return all(
        kind is theirs.types[name] or manual in (kind, theirs.types[name]) or own == ambient
        for name, kind in ours.types.items()
    )


REORDERED = Fault(
    'other-mesh',
    'the NamedSharding orders the devices of its mesh anew (_logical_device_ids)',
    'build the mesh of the devices in that order: MeshShardingHelper.from_mesh(Mesh(devices, names)).',
)


def other_mesh(given: Any, own: Mesh | AbstractMesh) -> Fault:
    """How another mesh differs. Only meshes with devices can differ in their order."""
    detail = f'the NamedSharding is of another mesh: {given}'
    hint = "give NamedShardings of the helper's own mesh, or PartitionSpecs."
    theirs, ours = MeshAxes.of(given), MeshAxes.of(own)
    if list(theirs.sizes.items()) == list(ours.sizes.items()):
        both = isinstance(given, Mesh) and isinstance(own, Mesh)
        devices = [list(mesh.devices.flat) if both else [] for mesh in (given, own)]
        if devices[0] == devices[1]:
            types = ', '.join(f'{name}={kind.name}' for name, kind in theirs.types.items())
            detail = f'the NamedSharding is of this mesh with axes of other types: {types}'
            hint = 'give the PartitionSpec, which is for axes of any type, or make the helper of that mesh.'
        elif set(devices[0]) == set(devices[1]):
            ids = [device.id for device in devices[0]]
            detail = (
                'the NamedSharding is of a mesh with the devices of this one in another order: '
                f'ids {ids[:16]}{" ..." if len(ids) > 16 else ""}'
            )
            hint = 'give the PartitionSpec, or make the helper of that mesh (MeshShardingHelper.from_mesh).'
    return Fault('other-mesh', detail, hint)
