"""PartitionSpecs, as versions of JAX differ, and constraints that select the devices of a program."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

DELETED_ARGUMENTS_CRASH = jax.__version_info__ < (0, 11, 1)
"""Whether a deleted argument, or one that is donated twice, ends the process on several devices.

Later versions raise an error.
"""


entries: Callable[[PartitionSpec], tuple[Any, ...]] = (
    operator.attrgetter('partitions') if hasattr(PartitionSpec(), 'partitions') else tuple
)
"""Returns the entries of a spec, one for each dimension.

Relies on *partitions* in new versions, where unreduced specs are not iterable; older specs are iterable.
"""


def unreduced_kind(spec: PartitionSpec) -> str:
    """Returns the reduction over the unreduced axes: ``'sum'``, or another kind in newer JAX.

    Relies on *unreduced_kind*, in versions that have other kinds.
    """
    return getattr(getattr(spec, 'unreduced_kind', None), 'name', 'sum')


def unreduced_kinds() -> Mapping[str, Any]:
    """Returns the kinds of unreduced specs by name. Relies on ``UnreducedKind`` being an enum."""
    return getattr(getattr(jax.sharding, 'UnreducedKind', None), '__members__', {})


def unconstrained_sharding(leaf: Any, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Returns the sharding of a constraint that specifies only the devices of the mesh.

    Relies on the compiler sharding UNCONSTRAINED dimensions as it likes.
    """
    return NamedSharding(mesh, PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * np.ndim(leaf)))


def compile_for_devices(leaf: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Returns a traced value with a constraint that compiles its program for the devices of a mesh.

    The axes of the mesh are Auto. Relies on JAX taking the devices of a program from constraints. For a mesh
    without devices, JAX takes their number from `in_shardings` of inner calls, and not from constraints.
    """
    if isinstance(mesh, Mesh):
        return jax.lax.with_sharding_constraint(leaf, unconstrained_sharding(leaf, mesh))
    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.jit(jax.lax.optimization_barrier, in_shardings=((None, replicated),))((leaf, 0))[0]
