"""Loops over examples, such as ``jax.lax.map(f, x)``: each device runs the rounds of its own examples.

A `scan` over a dimension of examples has one example in each round, and only one device holds it. If rounds
do not depend on each other, each device runs the rounds of its own block, and exchanges nothing in them: what
a round computes differs from device to device, and is a whole value on each. What a round takes besides its
example is gathered before the loop. What rounds reduce, such as the gradient of a weight, is `Partial` behind
the loop. Rounds do not depend on each other if all that they carry is handed on as it is, or only reduced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from scalax._jax.equations import Loop, all_equations
from scalax._jaxpr.carry_accumulation import carry_reductions
from scalax._spmd.conversions import JaxprEditor
from scalax._spmd.placements.placement import REPLICATE, Partial, Placement, Placements, Shard
from scalax._spmd.values import Argument, Value


class IndependentAxes(NamedTuple):
    """The batch axes along which devices run the rounds of a loop apart, each its own ones.

    Attributes:
        axes: these axes, by number.
        others: the other batch axes.
        devices: how many devices run apart.
        carried: of each carried value its placement along these axes.
    """

    axes: Sequence[int]
    others: Sequence[int]
    devices: int
    carried: Sequence[Placement]

    def replicated(self, placements: Placements) -> Placements:
        """Returns the placements of what all rounds take."""
        return self._with(placements, REPLICATE)

    def sharded(self, placements: Placements) -> Placements:
        """Returns the placements of what has an element for each round."""
        return self._with(placements, Shard(0))

    def without_rounds(self, placements: Placements) -> Placements:
        """Returns the placements of a stack of which every device has the elements of its rounds."""
        return tuple(
            [
                REPLICATE if isinstance(x, Shard) and x.dim == 0 and i not in self.axes else x
                for i, x in enumerate(placements)
            ]
        )

    def within(self, placements: Placements) -> Placements:
        """Returns placements along the other axes alone."""
        return tuple([placements[i] for i in self.others]) if self.axes else placements

    def inside(self, argument: Argument) -> Argument:
        """Returns what is known of an argument along the other axes alone."""
        return argument._replace(placements=self.within(argument.placements))

    def around(self, within: Placements, placements: Placements) -> Placements:
        """Returns placements that are these along the other axes."""
        found = [*placements]
        for i, placement in zip(self.others, within, strict=True):
            found[i] = placement
        return tuple(found)

    def results(self, carried: Sequence[Placements], stacks: Sequence[Placements]) -> list[Placements]:
        """Returns the placements of results, from those along the other axes alone."""
        blank = (REPLICATE,) * (len(self.axes) + len(self.others))
        found = [
            self.around(x, self._with(blank, kind)) for x, kind in zip(carried, self.carried, strict=True)
        ]
        return [*found, *[self.around(x, self.sharded(blank)) for x in stacks]]

    def _with(self, placements: Placements, placement: Placement) -> Placements:
        return tuple([placement if i in self.axes else x for i, x in enumerate(placements)])


def independent_axes(
    editor: JaxprEditor, loop: Loop, begun: Sequence[Value], stacks: Sequence[Value]
) -> IndependentAxes:
    """Returns the batch axes along which devices may run the rounds of a `scan` apart, if there are any.

    Args:
        editor: the jaxpr that it is in.
        loop: the `scan`.
        begun: what it carries first.
        stacks: the stacks that it runs over.
    """
    sizes, every = editor.context.sizes, range(len(editor.context.axes))
    together = IndependentAxes((), every, 1, [REPLICATE] * len(begun))
    if has_pipelines(editor, loop):
        return together  # stages wait for each other
    axes = [
        i
        for i in every
        if any(
            isinstance(x := stack.placements[i], Shard) and x.dim == 0 and not x.is_state for stack in stacks
        )
    ]
    count = math.prod(sizes[i] for i in axes)
    if not axes or not loop.length or loop.length % count:
        return together
    carried = _reductions(loop)
    if carried is None:
        return together
    return IndependentAxes(axes, [i for i in every if i not in axes], count, carried)


def has_pipelines(editor: JaxprEditor, loop: Loop) -> bool:
    """Returns whether a round runs layers as a pipeline."""
    pipelines = editor.context.pipelines
    return bool(pipelines) and any(id(equation) in pipelines for equation in all_equations(loop.body))


def _reductions(loop: Loop) -> list[Placement] | None:
    """The placements of carried values behind rounds that run apart; None if rounds depend on each other."""
    reductions, found = carry_reductions(loop), list[Placement]()
    for i in range(loop.num_carry):
        if reductions.is_passed_through(i):
            found.append(REPLICATE)
        elif (reduction := reductions.of(i)) is not None:
            found.append(Partial(reduction))
        else:
            return None
    return found
