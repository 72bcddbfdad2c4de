"""Options of the partitioner that trade memory for communication."""

from __future__ import annotations

from typing import NamedTuple


class Options(NamedTuple):
    """Options of the partitioner.

    Attributes:
        reduce_each_round: whether a loop over microbatches, which adds up gradients, reduces the gradients of
            sharded weights in each round.

            - True: each device holds the sum of its own block of a weight, and reduces once for each
              microbatch.
            - False: each device holds the sum for all of a weight, in the dtype of the sum, and reduces
              behind the loop, once. Under FSDP that takes as much memory as all weights do on one device.
            - None, the default: sums are held if all of them take at most twice the memory of the largest
              one, as in a loss over chunks of tokens, which has one weight. It is in memory in any case while
              it is used. The sums of a model are reduced in each round.

            Where the weights are replicated, as in DDP and along the slow axis of HSDP, the sums take no more
            memory unreduced, and are always reduced once.
    """

    reduce_each_round: bool | None = None
