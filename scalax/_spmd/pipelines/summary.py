"""What plans say of the pipelines in a step."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax

PIPELINE_SCOPE = re.compile(r'pipeline\(([^,()]*), ([^:()]*):(\d+) ([^()]*)\)/?')
"""What is sent, and the file, line and function of the loop, in the names of operations."""


def pipeline_scope(what: str, line: str) -> Any:
    """The scope of operations that a pipeline adds: plans read in their names what they send."""
    return jax.named_scope(f'pipeline({what}, {line})')


def microbatch_at(turn: Any, stages: int, rounds: int) -> tuple[Any, Any]:
    """The microbatch that a stage computes when it has computed so many, and in which round.

    With several rounds, microbatches go in groups of as many as there are stages: each group through all
    rounds, before the next one enters.
    """
    return turn // (rounds * stages) * stages + turn % stages, turn // stages % rounds


@dataclasses.dataclass(frozen=True)
class PipelinedLoop:
    """A loop over layers that runs as a pipeline. Bytes are of all devices of a stage together.

    Attributes:
        line: the line of the user's code, such as ``'model.py:12 forward'``.
        axis: the mesh axis of the stages.
        stages: how many there are.
        num_microbatches: how many microbatches the batch is split into.
        num_repeats: how often each microbatch passes through all stages.
        layers: how many layers the loop runs over.
        is_backward: whether it runs from the last layer to the first.
        executions: how often the loop runs in one call.
        weights: the bytes of all layers' weights.
        saved_activation_bytes: the bytes of the activations that all layers save for the backward pass.
        send_bytes: the bytes of one microbatch that a stage sends to the next stage.
        io_bytes: the bytes of one microbatch that enter the first stage and leave the last one.
        flops: the operations of its layers in one call, those of idle stages left out; 0 if not counted.
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
        """How many ticks it takes: in each, a stage computes one microbatch with one group of its layers."""
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
        """The microbatch that a stage computes in a tick, and in which round; None if it is idle.

        Example:
            >>> loop = PipelinedLoop('model.py:12 forward', 'stage', 2, 4, 2, 8, False, 1, 0, 0, 0, 0)
            >>> [loop.at(1, tick) for tick in range(5)]
            [None, (0, 0), (1, 0), (0, 1), (1, 1)]
        """
        turn = tick - (self.stages - 1 - stage if self.is_backward else stage)
        is_idle = not 0 <= turn < self.num_repeats * self.num_microbatches
        return None if is_idle else microbatch_at(turn, self.stages, self.num_repeats)

    @property
    def idle_flops(self) -> int:
        """The operations of stages that are idle: they compute, and nothing of it is used."""
        return self.flops * (self.stages - 1) // (self.num_repeats * self.num_microbatches)


PipelinedLoops = Sequence[tuple[PipelinedLoop, Any]]
"""Pipelines, and the equations of the loops that they were."""
