"""The split of a batch into the microbatches of a pipeline."""

from __future__ import annotations

from typing import NamedTuple


class Microbatching(NamedTuple):
    """The numbers of examples, microbatches, stages and devices.

    Attributes:
        num_examples: the number of examples in the batch.
        num_microbatches: the number of microbatches.
        num_stages: the number of stages.
        num_devices: the number of devices of a stage that a microbatch is sharded over.
    """

    num_examples: int
    num_microbatches: int
    num_stages: int
    num_devices: int

    @property
    def is_batch_sharded(self) -> bool:
        """Whether the batch is sharded over the stages outside of the pipeline.

        Otherwise, because the number of microbatches is not a multiple of the number of stages, it is
        replicated over the stages.
        """
        return self.num_microbatches % self.num_stages == 0
