"""Experts: weights of which each device has some, over the mesh axes of the batch. Rows move to them.

In a product over experts, ``einsum('egcd,edh->egch', rows, weights)``, both operands have the dimension of
the experts. If the weights are sharded in it over an axis over which groups of rows are too, one of them has
to move: all weights to all devices, or each row to the device of its expert and back, an all-to-all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

from scalax._follow.trail import LOST, Trail, Trails, axes_of, common, element_of, put, stack_of
from scalax._jax.equations import dot_dims, shape_of
from scalax._jaxprs.dims import ELEMENTWISE, VIEWS, Dims
from scalax._jaxprs.interpreter import Interpreter


class Stored(Interpreter[Trail]):
    """Where weights are over the axes of the batch, in a jaxpr and in those inside it.

    Args:
        jaxpr: the jaxpr, open or closed.
        stored: of its arguments that are weights, the axes of the batch that shard each dimension.
        trails: answers about trails.
        from_batch: the variables that depend on the batch; these are no weights.

    Attributes:
        products: the products of matrices with weights.
    """

    def __init__(
        self, jaxpr: Any, stored: Sequence[Trail], trails: Trails, from_batch: Container[Any]
    ) -> None:
        super().__init__(nothing=LOST)
        self._trails, self._from_batch = trails, from_batch
        self.products: list[Any] = []
        if any(stored):
            self.results(jaxpr, stored)

    def primitive(self, name: str, equation: Any, operands: Sequence[Trail]) -> Sequence[Trail]:
        if name in VIEWS or (name in ELEMENTWISE and equation.outvars[0] not in self._from_batch):
            found = self._trails.through(equation, operands)
            pairs = zip(found, equation.outvars, strict=True)
            return [self._trails.possible(trail, shape_of(var)) for trail, var in pairs]
        if name == 'dot_general':
            self.products.append(equation)
        return ()

    def joined(self, facts: Sequence[Trail]) -> Trail:
        return functools.reduce(common, facts)

    def element_of(self, stack: Trail) -> Trail:
        return element_of(stack)

    def stack_of(self, element: Trail) -> Trail:
        return stack_of(element)


def move_to_experts(
    equation: Any, trails: Sequence[Trail], stored: Sequence[Trail], among: Trails
) -> tuple[int, Trail] | None:
    """Which operand of a product moves, and where to: batch dimensions of a product are sharded alike.

    Rows move to weights if those on a device are fewer bytes than the weights of all devices; and back, where
    they meet others. They move once for each product: there for the first one at the experts, and back behind
    the last one.

    Args:
        equation: the product.
        trails: those of its operands.
        stored: where these are over the axes of the batch, if they are weights.
        among: answers about trails.
    """
    _, batch = dot_dims(equation)
    for place, other in ((0, 1), (1, 0)):
        for mine, theirs in zip(batch[place], batch[other], strict=True):
            trail = stored[place] or trails[place]
            axes = trail[mine] if trail else ()
            groups = [
                each for i, each in enumerate(trails[other]) if i != theirs and {*axes}.intersection(each)
            ]
            # Each device would get all weights, and moves the rows that it has, few where slices divide them.
            gathered = among.bytes_of(equation.invars[place], ())
            moved = among.bytes_of(equation.invars[other], axes_of(groups))
            if not groups or (stored[place] and moved >= gathered):
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
    """The trails of an operand, one after the other, on its way to the other one; and what is split on it.

    If further mesh axes shard the columns of the other one, all devices along these would get the same. So
    each gets a part of a dimension, and they exchange these behind the move. Else the operand moves whole.

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


def scattered(dims: Dims, weight: int, trails: Sequence[Trail], result: Trail) -> Trail:
    """The trail of a product at experts. Sums over mesh axes are scattered over these; so they move back."""
    places = [(place, i) for place in (0, 1) for i in dims.summed_of(place) if trails[place]]
    summed = tuple(dict.fromkeys(axis for place, i in places for axis in trails[place][i]))
    dim = next((i for i in dims.own(weight) if not result[i]), None)
    return result if dim is None else put(result, dim, summed)
