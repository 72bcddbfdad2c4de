"""The arguments of a step: which hold examples of the batch, and how mesh axes shard them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from scalax._jaxpr.dim_sharding import DimSharding


@dataclasses.dataclass(frozen=True, eq=False)
class BatchArguments:
    """The shardings of the arguments of a step, and the mesh axes of its batch.

    Attributes:
        shardings: the sharding of each argument by dimension; of arguments that are no batch, without the
            axes of the batch.
        state_shardings: of the other arguments, the dimensions that batch axes shard, as FSDP does.
        batch_axes: the mesh axes that shard examples.
    """

    shardings: Sequence[DimSharding]
    state_shardings: Sequence[DimSharding]
    batch_axes: frozenset[str]

    def example_dim(self, argument: int) -> int | None:
        """Returns the dimension of the examples of an argument; None if it is no batch."""
        dims = enumerate(self.shardings[argument])
        return next((dim for dim, axes in dims if not self.batch_axes.isdisjoint(axes)), None)
