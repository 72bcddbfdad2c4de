"""Specs, where versions of JAX differ; and how a program is told its devices."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

DELETED_ARGUMENTS_CRASH = jax.__version_info__ < (0, 11, 1)
"""Whether an argument that is deleted, or donated twice, ends the process on several devices.

Later versions raise.
"""


entries: Callable[[PartitionSpec], tuple[Any, ...]] = (
    operator.attrgetter('partitions') if hasattr(PartitionSpec(), 'partitions') else tuple
)
"""The entries of a spec, one a dimension.

Relies on *partitions* in new versions, which do not iterate over unreduced specs; older ones iterate.
"""


def unreduced_kind(spec: PartitionSpec) -> str:
    """How the parts along unreduced axes combine: a sum, or another kind in newer JAX.

    Relies on *unreduced_kind*, where there is another.
    """
    return getattr(getattr(spec, 'unreduced_kind', None), 'name', 'sum')


def unreduced_kinds() -> Mapping[str, Any]:
    """Those kinds by name; none in older JAX. Relies on ``jax.sharding.UnreducedKind`` being an enum."""
    return getattr(getattr(jax.sharding, 'UnreducedKind', None), '__members__', {})


def unconstrained_sharding(leaf: Any, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """The sharding of a constraint that asks for nothing but the devices of the mesh.

    Relies on one whose dimensions are all UNCONSTRAINED leaving each to the compiler.
    """
    return NamedSharding(mesh, PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * np.ndim(leaf)))


def compile_for_devices(leaf: Any, mesh: Mesh | AbstractMesh) -> Any:
    """A value of a trace that has a program compiled for the devices of a mesh of Auto axes.

    Relies on JAX taking the devices of a program from constraints; of a mesh without devices their number is
    taken from `in_shardings` of operands inside, and not from constraints.
    """
    if isinstance(mesh, Mesh):
        return jax.lax.with_sharding_constraint(leaf, unconstrained_sharding(leaf, mesh))
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(jax.lax.optimization_barrier, in_shardings=((None, whole),))((leaf, 0))[0]
