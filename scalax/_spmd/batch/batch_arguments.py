"""The arguments of a step that hold the batch, and the mesh axes that shard them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from scalax._jaxpr.dim_sharding import DimSharding


@dataclasses.dataclass(frozen=True, eq=False)
class BatchArguments:
    """The shardings of the arguments of a step, and the mesh axes of its batch.

    Attributes:
        shardings: the sharding of each argument by dimension. For arguments that are not part of the batch,
            it excludes the batch axes.
        state_shardings: of the other arguments, the dimensions that batch axes shard, as FSDP does.
        batch_axes: the mesh axes that shard examples.
    """

    shardings: Sequence[DimSharding]
    state_shardings: Sequence[DimSharding]
    batch_axes: frozenset[str]

    def example_dim(self, argument: int) -> int | None:
        """Returns the batch dimension of an argument; None if it is not part of the batch."""
        dims = enumerate(self.shardings[argument])
        return next((dim for dim, axes in dims if not self.batch_axes.isdisjoint(axes)), None)
