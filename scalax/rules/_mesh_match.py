"""NamedShardings in place of specs: whether their mesh is the one in force."""

from __future__ import annotations

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from scalax._core.pytree.partition_specs import MeshAxes


def matches_mesh(sharding: NamedSharding, own: Mesh | AbstractMesh, of_values: bool) -> bool:
    """Whether a NamedSharding is of the mesh in force.

    Args:
        sharding: the NamedSharding.
        own: the mesh in force, in which the axes of the given one may have other types.
        of_values: whether the sharding is for a value inside of a function.
    """
    given: Mesh | AbstractMesh = sharding.mesh
    # What else may be in one has no public name: JAX takes an order of the devices.
    if sharding != NamedSharding(given, sharding.spec, memory_kind=sharding.memory_kind):
        return False
    if given == own:
        return True
    theirs, ours = MeshAxes.of(given), MeshAxes.of(own)
    if [*theirs.sizes.items()] != [*ours.sizes.items()]:
        return False
    if isinstance(given, Mesh) and isinstance(own, Mesh):
        # A constraint is one on axes of any type, as JAX takes it without a mesh in force.
        return of_values and [*given.devices.flat] == [*own.devices.flat]
    pairs = zip(theirs.types.values(), ours.types.values(), strict=True)
    are_alike = all(one is other or AxisType.Manual in (one, other) for one, other in pairs)
    return are_alike or own == jax.sharding.get_abstract_mesh()
