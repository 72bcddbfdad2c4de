"""Experts: weights of which each device has some, over the mesh axes of the batch. Rows move to them.

In a product over experts, ``einsum('egcd,edh->egch', rows, weights)``, both operands have the dimension of
the experts. If the weights are sharded in it over an axis over which groups of rows are too, one of them has
to move: all weights to all devices, or each row to the device of its expert and back, an all-to-all.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

from scalax._follow.primitives import ELEMENTWISE, RULES, own_dims
from scalax._follow.trail import LOST, LOSTS, Trail, Trails, axes_of, common, put
from scalax._follow.weights import SAME
from scalax._jax.equations import CALLS, branches, called, dot_dims, loop_of, opened, shape_of
from scalax._jax.primitives import primitive_name


class Stored:
    """Where weights are over the axes of the batch, in a jaxpr and in those inside it.

    Args:
        jaxpr: the jaxpr, open or closed.
        stored: of its arguments that are weights, the axes of the batch that shard each dimension.
        trails: answers about trails.
        from_batch: the variables that depend on the batch; these are no weights.
    """

    def __init__(
        self, jaxpr: Any, stored: Sequence[Trail], trails: Trails, from_batch: Container[Any]
    ) -> None:
        self._trails, self._from_batch = trails, from_batch
        self._stored: dict[int, Trail] = {}  # by the ids of variables: literals are not hashable
        self._known: dict[Any, list[Trail]] = {}
        if any(stored):
            self._results(jaxpr, stored)

    def of(self, atom: Any) -> Trail:
        """Where a value is, wherever its jaxpr is used; nothing if it is no weight or a part of one."""
        return self._stored.get(id(atom), LOST)

    def _results(self, jaxpr: Any, stored: Sequence[Trail]) -> list[Trail]:
        jaxpr = opened(jaxpr)
        key = id(jaxpr), tuple(stored)
        if key not in self._known:
            found = dict(zip(map(id, jaxpr.invars), stored, strict=True))
            for equation in jaxpr.eqns:
                operands = [*map(found.get, map(id, equation.invars), LOSTS)]
                if any(operands):
                    for var, trail in zip(equation.outvars, self._equation(equation, operands), strict=False):
                        found[id(var)] = self._trails.possible(trail, shape_of(var))
            for var, trail in found.items():
                before = self._stored.get(var)
                self._stored[var] = trail if before is None else common(before, trail)
            self._known[key] = [found.get(id(atom), LOST) for atom in jaxpr.outvars]
        return self._known[key]

    def _equation(self, equation: Any, operands: Sequence[Trail]) -> Sequence[Trail]:
        name = primitive_name(equation)
        if name in SAME or (name in ELEMENTWISE and equation.outvars[0] not in self._from_batch):
            return RULES[name](equation, operands)
        if name in CALLS:
            return self._results(called(equation), operands)
        if name in ('scan', 'while'):
            loop = loop_of(equation)
            constants, _, stacks = loop.parts(operands)
            rows = [trail[1:] if any(trail[1:]) else LOST for trail in stacks]
            self._results(loop.body, [*constants, *[LOST] * loop.carried, *rows])
        elif name == 'cond':
            for branch in branches(equation):
                self._results(branch, operands[1:])
        return ()


def move_to_experts(
    equation: Any, trails: Sequence[Trail], stored: Sequence[Trail], sizes: Mapping[str, int]
) -> tuple[int, Trail] | None:
    """Which operand of a product moves, and where to: batch dimensions of a product are sharded alike.

    Rows move to weights if that takes less than to gather the weights; and back, where they meet others.

    Args:
        equation: the product.
        trails: those of its operands.
        stored: where these are over the axes of the batch, if they are weights.
        sizes: the sizes of the mesh axes.
    """
    _, batch = dot_dims(equation)
    for place, other in ((0, 1), (1, 0)):
        for mine, theirs in zip(batch[place], batch[other], strict=True):
            trail = stored[place] or trails[place]
            axes = trail[mine] if trail else ()
            elsewhere = {axis for i, each in enumerate(trails[other]) if i != theirs for axis in each}
            shared = elsewhere.intersection(axes)
            if not shared:
                continue
            if stored[place] and not _takes_less(equation, place, math.prod(sizes[axis] for axis in shared)):
                continue
            left = [tuple(axis for axis in each if axis not in axes) for each in trails[other]]
            return other, tuple(axes if i == theirs else each for i, each in enumerate(left))
    return None


def stay(equation: Any, trails: Sequence[Trail], stored: Sequence[Trail]) -> list[int]:
    """The weights of a product that are not gathered for it: the rows of each expert are with it."""
    _, batch = dot_dims(equation)
    return [
        place
        for place, other in ((0, 1), (1, 0))
        if stored[place] and trails[other]
        for mine, theirs in zip(batch[place], batch[other], strict=True)
        if stored[place][mine] and stored[place][mine] == trails[other][theirs]
    ]


def way(
    equation: Any, place: int, trails: Sequence[Trail], moved: Trail, sizes: Mapping[str, int]
) -> tuple[list[Trail], tuple[int, ...]]:
    """The trails of an operand on its way to the other one, and the dimension in parts of which it moves.

    If further mesh axes shard the columns of the other one, all devices along these would get the same. So
    each gets a part, and they exchange these behind the move. Else it moves whole, in parts of no dimension.

    Args:
        equation: the product.
        place: the number of the operand that moves.
        trails: those of the operands, before the move.
        moved: the trail behind it.
        sizes: the sizes of the mesh axes.
    """
    contracted, batch = dot_dims(equation)
    here, other, shape = trails[place], 1 - place, shape_of(equation.invars[place])
    columns = [each for i, each in enumerate(trails[other]) if i not in (*contracted[other], *batch[other])]
    axes = tuple(axis for each in columns for axis in each)
    if axes and axes in moved:
        dim = moved.index(axes)
        return [here, moved, put(moved, dim, ())], (dim,)
    count = math.prod(sizes[axis] for axis in axes)
    free = [i for i, size in enumerate(shape) if not here[i] and not moved[i] and size % count == 0]
    if axes and free and axes_of(moved).isdisjoint(axes):
        dim = max(free, key=shape.__getitem__)
        return [put(here, dim, axes), put(moved, dim, axes), moved], (dim,)
    return [here, moved], ()


def scattered(equation: Any, weight: int, trails: Sequence[Trail], result: Trail) -> Trail:
    """The trail of a product at experts. A sum over mesh axes is split over them: in parts it moves back."""
    contracted, _ = dot_dims(equation)
    pairs = [(trail, dims) for trail, dims in zip(trails, contracted, strict=True) if trail]
    summed = tuple(dict.fromkeys(axis for trail, dims in pairs for i in dims for axis in trail[i]))
    dim = next((i for i in own_dims(equation, weight) if not result[i]), None)
    return result if dim is None else put(result, dim, summed)


def _takes_less(equation: Any, weight: int, devices: int) -> bool:
    """Whether the rows on a device are less than the weights of all devices.

    Rows move once for each product: there for the first one at the experts, and back behind the last one.
    """
    weights, rows = (math.prod(shape_of(equation.invars[i])) for i in (weight, 1 - weight))
    return rows < weights * devices
