"""Specs and programs, where versions of JAX differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

DELETED_ARGUMENTS_CRASH = jax.__version_info__ < (0, 11, 1)
"""Whether an argument that is deleted, or donated twice, ends the process on several devices.

Later versions raise.
"""


def entries(spec: PartitionSpec) -> tuple[Any, ...]:
    """The entries of a spec, one a dimension.

    Relies on *partitions* in new versions, which do not iterate over unreduced specs; older ones iterate.
    """
    return spec.partitions if hasattr(spec, 'partitions') else tuple(spec)


def sums_kind(spec: PartitionSpec) -> str:
    """How the parts along unreduced axes combine: a sum, or another kind in newer JAX.

    Relies on *unreduced_kind*, where there is another.
    """
    return getattr(getattr(spec, 'unreduced_kind', None), 'name', 'sum')


def kinds_of_sums() -> Mapping[str, Any]:
    """Those kinds by name; none in older JAX. Relies on ``jax.sharding.UnreducedKind`` being an enum."""
    return getattr(getattr(jax.sharding, 'UnreducedKind', None), '__members__', {})
