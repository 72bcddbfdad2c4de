"""Comparison of the mesh of a NamedSharding with the active mesh."""

from __future__ import annotations

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from scalax._core.pytree.partition_specs import MeshAxes


def matches_mesh(sharding: NamedSharding, mesh: Mesh | AbstractMesh, of_values: bool) -> bool:
    """Whether a NamedSharding is for the active mesh.

    Args:
        sharding: the NamedSharding, whose mesh may have other axis types.
        mesh: the active mesh.
        of_values: whether the sharding is for a value inside a function.
    """
    own_mesh: Mesh | AbstractMesh = sharding.mesh
    # A NamedSharding may also hold an order of the devices, which no public attribute shows.
    if sharding != NamedSharding(own_mesh, sharding.spec, memory_kind=sharding.memory_kind):
        return False
    if own_mesh == mesh:
        return True
    own_axes, active_axes = MeshAxes.of(own_mesh), MeshAxes.of(mesh)
    if [*own_axes.sizes.items()] != [*active_axes.sizes.items()]:
        return False
    if isinstance(own_mesh, Mesh) and isinstance(mesh, Mesh):
        # JAX accepts a constraint with axes of any type if no mesh is active.
        return of_values and [*own_mesh.devices.flat] == [*mesh.devices.flat]
    pairs = zip(own_axes.types.values(), active_axes.types.values(), strict=True)
    have_same_types = all(a is b or AxisType.Manual in (a, b) for a, b in pairs)
    return have_same_types or mesh == jax.sharding.get_abstract_mesh()
