"""`PipelinedLoop`: the summary of a pipeline for plans, and the scopes of its operations."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax

from scalax._spmd.pipelines.tick_assignment import microbatch_at

PIPELINE_SCOPE = re.compile(r'pipeline\(([^,()]*), ([^:()]*):(\d+) ([^()]*)\)/?')
"""Matches the scope of a transfer in the name of an operation: its purpose, and file, line and function."""


def pipeline_scope(purpose: str, line: str) -> Any:
    """Returns the scope of a transfer of a pipeline, from which plans read its purpose and source line."""
    return jax.named_scope(f'pipeline({purpose}, {line})')


@dataclasses.dataclass(frozen=True)
class PipelinedLoop:
    """A loop over layers that runs as a pipeline. Bytes are summed over the devices of a stage.

    Attributes:
        line: the line of the user's code, such as ``'model.py:12 forward'``.
        axis: the mesh axis of the stages.
        stages: the number of stages.
        num_microbatches: the number of microbatches.
        num_repeats: how often each microbatch passes through all stages.
        layers: the number of layers.
        is_backward: whether the loop runs from the last layer to the first.
        executions: how often the loop runs in one call.
        weights: the bytes of the weights of all layers.
        saved_activation_bytes: the bytes of the activations that all layers save for the backward pass.
        send_bytes: the bytes of one microbatch that a stage sends to the next stage.
        io_bytes: the bytes of one microbatch that enter the first stage, and leave the last one.
        flops: the operations of the layers in one call, without those of idle stages; 0 if not counted.
    """

    line: str
    axis: str
    stages: int
    num_microbatches: int
    num_repeats: int
    layers: int
    is_backward: bool
    executions: int
    weights: int
    saved_activation_bytes: int
    send_bytes: int
    io_bytes: int
    flops: int = 0

    @property
    def ticks(self) -> int:
        """The number of ticks. In each, a stage computes one microbatch with one group of its layers."""
        return self.num_repeats * self.num_microbatches + self.stages - 1

    @property
    def bubble(self) -> float:
        """The fraction of the ticks in which a stage is idle.

        Example:
            >>> loop = PipelinedLoop('model.py:12 forward', 'stage', 4, 8, 1, 32, False, 1, 0, 0, 0, 0)
            >>> loop.ticks, round(loop.bubble, 3)
            (11, 0.273)
        """
        return (self.stages - 1) / self.ticks

    def at(self, stage: int, tick: int) -> tuple[int, int] | None:
        """Returns the microbatch that a stage computes in a tick, and the repeat; None if it is idle.

        Example:
            >>> loop = PipelinedLoop('model.py:12 forward', 'stage', 2, 4, 2, 8, False, 1, 0, 0, 0, 0)
            >>> [loop.at(1, tick) for tick in range(5)]
            [None, (0, 0), (1, 0), (0, 1), (1, 1)]
        """
        step = tick - (self.stages - 1 - stage if self.is_backward else stage)
        is_idle = not 0 <= step < self.num_repeats * self.num_microbatches
        return None if is_idle else microbatch_at(step, self.stages, self.num_repeats)

    @property
    def idle_flops(self) -> int:
        """The operations of idle stages: they compute, but their results are unused."""
        return self.flops * (self.stages - 1) // (self.num_repeats * self.num_microbatches)


PipelinedLoops = Sequence[tuple[PipelinedLoop, Any]]
"""Pipelines, each with the equation of its loop in the user's step."""
