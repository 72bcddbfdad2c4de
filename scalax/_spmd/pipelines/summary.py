"""What plans say of the pipelines in a step."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax

SENDING = re.compile(r'pipeline\(([^,()]*), ([^:()]*):(\d+) ([^()]*)\)/?')
"""What is sent, and the file, line and function of the loop, in the names of operations."""


def sending(what: str, line: str) -> Any:
    """The scope of operations that a pipeline adds: plans read in their names what they send."""
    return jax.named_scope(f'pipeline({what}, {line})')


def at_turn(turn: Any, stages: int, rounds: int) -> tuple[Any, Any]:
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
        microbatches: in how many microbatches the batch passes through them.
        rounds: how often each microbatch passes through them.
        layers: the rounds of the loop.
        is_backward: whether it runs from the last layer to the first.
        times: how often it runs in one call.
        weights: the bytes of what its layers take that has no rows, of all layers: their parameters.
        kept: the bytes of what its layers give that has rows, of all layers: it waits for the backward pass.
        hop: the bytes of one microbatch on its way from a stage to the next one.
        door: the bytes of one microbatch that enters the first stage, and leaves the last one.
        flops: the operations of its layers in one call, those of idle stages left out; 0 if not counted.
    """

    line: str
    axis: str
    stages: int
    microbatches: int
    rounds: int
    layers: int
    is_backward: bool
    times: int
    weights: int
    kept: int
    hop: int
    door: int
    flops: int = 0

    @property
    def ticks(self) -> int:
        """How many ticks it takes: in each, a stage computes one microbatch with one group of its layers."""
        return self.rounds * self.microbatches + self.stages - 1

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
        is_idle = not 0 <= turn < self.rounds * self.microbatches
        return None if is_idle else at_turn(turn, self.stages, self.rounds)

    @property
    def idle_flops(self) -> int:
        """The operations of stages that are idle: they compute, and nothing of it is used."""
        return self.flops * (self.stages - 1) // (self.rounds * self.microbatches)


Loops = Sequence[tuple[PipelinedLoop, Any]]
"""Pipelines, and the equations of the loops that they were."""
