"""Stacks of layers as a pipeline takes and gives them.

Where elements have rows, these are in microbatches, ``[microbatches, layers, ...]``. Where a stage runs
several groups of layers, its first one is among the first groups of the model, and so on: stage ``g % S``
runs group g. A spec lays them out one stage after the other, so groups move between stages.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import PartitionSpec

from scalax._jaxprs.rows import Rows
from scalax._spmd.layer_groups import exchanged
from scalax._stages.deal import Deal, placed


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
