"""Stacks of layers as a pipeline takes and gives them.

Where elements have rows, these are in microbatches, ``[microbatches, layers, ...]``. Where a stage runs
several groups of layers, its first one is among the first groups of the model, and so on: stage ``g % S``
runs group g. A spec lays them out one stage after the other, so groups move between stages.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from scalax._jaxprs.rows import Rows
from scalax._stages.deal import Deal, placed
from scalax._stages.pipelined import sending


@dataclasses.dataclass(frozen=True)
class Stack:
    """How a pipeline takes or gives a stack of layers.

    Attributes:
        deal: how rows are dealt.
        rows: where rows are in the stack; None without any.
        rounds: how many groups of layers a stage holds.
        line: the line of the loop.
    """

    deal: Deal
    rows: Rows | None
    rounds: int
    line: str = dataclasses.field(default='', compare=False)

    @property
    def is_plain(self) -> bool:
        """Whether the stack is taken as it is."""
        return self.rows is None and self.rounds == 1

    def of(self, x: Any) -> Any:
        """The stack as a pipeline takes it."""
        deal, rows = self.deal, self.rows
        if rows is None:
            return self._moved(x, 0)
        dealt = deal.of(x, rows).reshape(
            deal.microbatches, *x.shape[: rows.dim], -1, *x.shape[rows.dim + 1 :]
        )
        return self._moved(placed(dealt, {1: deal.axis, rows.dim + 1: deal.inside}), 1)

    def back(self, x: Any) -> Any:
        """The stack that a pipeline gives in this form."""
        if self.rows is None:
            return self._moved(x, 0, back=True)
        owners = self.deal.owners
        dealt = self._moved(x, 1, back=True).reshape(-1, owners, *x.shape[1:])
        return self.deal.back(dealt, self.rows)

    def _moved(self, x: Any, dim: int, *, back: bool = False) -> Any:
        """The stack with each group where it runs, or back; point to point, in as many steps as rounds."""
        axis = self.deal.axis
        if self.rounds == 1:
            return x

        def on_stage(local: Any) -> Any:
            return exchanged(local, axis, self.deal.stages, self.rounds, self.line, dim=dim, back=back)

        spec = PartitionSpec(*[None] * dim, axis)
        moved = jax.shard_map(on_stage, in_specs=spec, out_specs=spec, axis_names={axis}, check_vma=False)
        return moved(x)


def exchanged(
    local: Any, axis: str, stages: int, rounds: int, line: str, *, dim: int = 0, back: bool = False
) -> Any:
    """Returns the layers that a stage runs, of those that stages store, in code of one device; or back.

    Args:
        local: the layers of a stage, in the dimension *dim*.
        axis: the mesh axis of the stages.
        stages: how many there are.
        rounds: how many groups of layers a stage holds.
        line: the line of the loop.
        dim: the dimension of the layers.
        back: whether the layers are those that the stage ran, and those that it stores are returned.
    """
    stage = jax.lax.axis_index(axis)
    groups = local.reshape(*local.shape[:dim], rounds, -1, *local.shape[dim + 1 :])
    found = jnp.zeros_like(groups)
    for moves in _steps(stages, rounds):
        way = [(each.end, each.start) if back else (each.start, each.end) for each in moves]
        stored = jnp.asarray([each.stored for each in moves])[stage]
        run = jnp.asarray([each.run for each in sorted(moves, key=lambda each: each.end)])[stage]
        sent, kept = (run, stored) if back else (stored, run)
        group = jax.lax.dynamic_index_in_dim(groups, sent, dim, keepdims=False)
        with sending('layers change stages', line):
            group = jax.lax.ppermute(group, axis, way)
        found = jax.lax.dynamic_update_index_in_dim(found, group, kept, dim)
    return found.reshape(local.shape)


class _Move(NamedTuple):
    """A group of layers: stage *start* stores it as group *stored*, stage *end* runs it in round *run*."""

    start: int
    stored: int
    end: int
    run: int


def _steps(stages: int, rounds: int) -> Iterator[list[_Move]]:
    """All groups, in steps in each of which every stage sends one and gets one, by the stage that sends.

    Stage s stores the groups from ``s * rounds`` on, and group g runs on stage ``g % stages``. With q the
    greatest common divisor of both, the first groups of q stages run on one stage: ``stages / q`` apart, each
    of these stages begins with another one of its groups.
    """
    common = math.gcd(stages, rounds)
    for step in range(rounds):
        moves = []
        for start in range(stages):
            first, own = step // common * common, (step + start * common // stages) % common
            run, end = divmod(start * rounds + first + own, stages)
            moves.append(_Move(start, first + own, end, run))
        yield moves
