"""Scans over examples, such as ``jax.lax.map(f, x)``: each device runs the iterations of its own examples.

Each iteration of a `scan` over a batch dimension uses one example, which only one device holds. If the
iterations are independent, each device runs those of its local shard without any exchange; inside, values
differ between devices, and each is complete. All other operands are gathered before the scan. A carried value
that iterations reduce into, such as the gradient of a weight, is `Partial` after the scan. Iterations are
independent if they only pass carried values through or reduce into them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from scalax._jax.equations import Loop, all_equations
from scalax._jaxpr.carry_accumulation import carry_reductions
from scalax._spmd.conversions import JaxprEditor
from scalax._spmd.placements.placement import (
    REPLICATE,
    Partial,
    Placement,
    Placements,
    Shard,
    shards_examples,
)
from scalax._spmd.values import Argument, Value


class IndependentAxes(NamedTuple):
    """The batch axes along which devices run iterations of a scan independently, each for its own examples.

    Attributes:
        axes: the indices of these axes.
        others: the indices of the other batch axes.
        num_devices: the number of devices along these axes.
        carry_placements: the placement of each carried value, after the scan, along these axes.
    """

    axes: Sequence[int]
    others: Sequence[int]
    num_devices: int
    carry_placements: Sequence[Placement]

    def replicated(self, placements: Placements) -> Placements:
        """Returns placements that are replicated along these axes, for consts."""
        return self._with(placements, REPLICATE)

    def sharded(self, placements: Placements) -> Placements:
        """Returns placements that shard the stack along these axes, for xs and ys."""
        return self._with(placements, Shard(0))

    def unsharded_stack(self, placements: Placements) -> Placements:
        """Returns the placements of xs whose stack dimension is unsharded along the other axes."""
        return tuple(
            [
                REPLICATE if isinstance(x, Shard) and x.dim == 0 and i not in self.axes else x
                for i, x in enumerate(placements)
            ]
        )

    def along_others(self, placements: Placements) -> Placements:
        """Returns placements along the other axes alone."""
        return tuple([placements[i] for i in self.others]) if self.axes else placements

    def body_argument(self, argument: Argument) -> Argument:
        """Returns an argument of the body, which is partitioned along the other axes only."""
        return argument._replace(placements=self.along_others(argument.placements))

    def with_others(self, other_placements: Placements, placements: Placements) -> Placements:
        """Returns *placements* with the placements along the other axes replaced."""
        result = [*placements]
        for i, placement in zip(self.others, other_placements, strict=True):
            result[i] = placement
        return tuple(result)

    def results(self, carry: Sequence[Placements], ys: Sequence[Placements]) -> list[Placements]:
        """Returns the placements of the results of the scan.

        Args:
            carry: the placements of the carried values along the other axes.
            ys: the placements of the ys along the other axes.
        """
        blank = (REPLICATE,) * (len(self.axes) + len(self.others))
        carry_results = [
            self.with_others(x, self._with(blank, kind))
            for x, kind in zip(carry, self.carry_placements, strict=True)
        ]
        return [*carry_results, *[self.with_others(x, self.sharded(blank)) for x in ys]]

    def _with(self, placements: Placements, placement: Placement) -> Placements:
        return tuple([placement if i in self.axes else x for i, x in enumerate(placements)])


def independent_axes(
    editor: JaxprEditor, loop: Loop, init: Sequence[Value], xs: Sequence[Value]
) -> IndependentAxes:
    """Returns the batch axes along which devices may run the iterations of a `scan` independently.

    Args:
        editor: the editor of the jaxpr.
        loop: the `scan`.
        init: the initial carried values.
        xs: the scanned values.
    """
    sizes, all_axes = editor.context.sizes, range(len(editor.context.axes))
    none = IndependentAxes((), all_axes, 1, [REPLICATE] * len(init))
    if has_pipelines(editor, loop):
        return none  # stages wait for each other
    axes = [
        i for i in all_axes if any(shards_examples(x := stack.placements[i]) and x.dim == 0 for stack in xs)
    ]
    count = math.prod(sizes[i] for i in axes)
    if not axes or not loop.length or loop.length % count:
        return none
    carry_placements = _reductions(loop)
    if carry_placements is None:
        return none
    return IndependentAxes(axes, [i for i in all_axes if i not in axes], count, carry_placements)


def has_pipelines(editor: JaxprEditor, loop: Loop) -> bool:
    """Returns whether the body of a loop contains a pipeline."""
    pipelines = editor.context.pipelines
    return bool(pipelines) and any(id(equation) in pipelines for equation in all_equations(loop.body))


def _reductions(loop: Loop) -> list[Placement] | None:
    """Returns the placements of carried values after independent iterations.

    Returns None if the iterations are not independent.
    """
    reductions, placements = carry_reductions(loop), list[Placement]()
    for i in range(loop.num_carry):
        if reductions.is_passed_through(i):
            placements.append(REPLICATE)
        elif (reduction := reductions.of(i)) is not None:
            placements.append(Partial(reduction))
        else:
            return None
    return placements
