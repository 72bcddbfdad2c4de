"""The split of a batch into the microbatches of a pipeline."""

from __future__ import annotations

from typing import NamedTuple


class Microbatching(NamedTuple):
    """How a batch is split.

    Attributes:
        rows: the number of examples of the batch.
        microbatches: the number of microbatches.
        stages: the number of stages.
        devices: the number of devices of a stage that share a microbatch.
    """

    rows: int
    microbatches: int
    stages: int
    devices: int

    @property
    def owners(self) -> int:
        """How many stages own microbatches: all of them, or one if microbatches do not divide by them."""
        return self.stages if self.microbatches % self.stages == 0 else 1
