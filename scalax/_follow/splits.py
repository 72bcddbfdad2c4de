"""Dimensions of weights that stay split over axes of the batch, as tensor parallelism splits them.

FSDP gathers a weight for each product, and leaves rows in place. Where rows are fewer than the weights of a
block are large, it takes less to gather the rows in front of the block, leave each device its columns of all
that is computed in between, and add up and scatter what comes out. The last product with a large vocabulary
is such a block, with the loss behind it; so are two feed-forward matrices of many hidden columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from scalax._follow.dimensions import Dimensions, Step
from scalax._follow.experts import Stored
from scalax._follow.trail import Trail, Trails
from scalax._follow.weights import FEW_ROWS
from scalax._jax.equations import dot_dims, opened, shape_of
from scalax._jax.primitives import primitive_name
from scalax._jaxprs.dependence import Dependence

# It has to take this much less: XLA may send the same bytes in a ring beside a product, which takes longer.
_MARGIN = 0.85


class Cost:
    """What the dimensions of one class send either way, in bytes that each device gets.

    Attributes:
        axes: the mesh axes that shard the weights.
        kept: with rows in place: weights that are gathered, and gradients that are scattered.
        split: with columns in place: rows that are gathered, and sums that are scattered.
        few: whether so few rows are multiplied at once that weights are gathered once before a loop.
        changes: how often the weights are others.
    """

    def __init__(self, axes: tuple[str, ...]) -> None:
        self.axes, self.kept, self.split = axes, 0.0, 0.0
        self.few, self.changes = False, 1


class Splits:
    """The dimensions that stay split.

    Args:
        jaxpr: the jaxpr that has all others in it.
        rows: the trails of its arguments.
        stored: where weights are over the axes of the batch.
        from_batch: the variables that depend on the batch.
        trails: answers about trails.
    """

    def __init__(
        self, jaxpr: Any, rows: Sequence[Trail], stored: Stored, from_batch: Dependence, trails: Trails
    ) -> None:
        self._stored, self._from_batch, self._trails = stored, from_batch, trails
        weights = [(var, stored.of(var)) for var in opened(jaxpr).invars]
        sharded = {axes for _, trail in weights for axes in trail if axes}
        self._axes: dict[int, tuple[str, ...]] = {}
        if len(sharded) != 1:
            return
        [axes] = sharded
        self._dims = Dimensions(jaxpr, math.prod(trails.sizes[axis] for axis in axes))
        costs: dict[int, Cost] = {}
        for var, trail in weights:
            for dim, each in zip(self._dims.of(var), trail, strict=False):
                if each:
                    costs[dim] = Cost(each)
        self._rows: set[int] = set()
        for var, trail in zip(opened(jaxpr).invars, rows, strict=True):
            for dim, each in zip(self._dims.of(var), trail, strict=False):
                if each:  # of a batch rows, of weights further axes
                    costs.pop(dim, None)
                if trails.batch_axes.intersection(each):
                    self._rows.add(dim)
        for dim in self._dims.whole:
            costs.pop(dim, None)
        seen: set[Any] = set()
        for step in self._dims.steps():
            self._count(step, costs, seen)
        self._axes = {dim: cost.axes for dim, cost in costs.items() if cost.split < _MARGIN * cost.kept}

    def dim(self, atom: Any) -> int | None:
        """The dimension of a value that stays split; None if none does."""
        if not self._axes:
            return None
        return next((i for i, each in enumerate(self._dims.of(atom)) if each in self._axes), None)

    def spec(self, atom: Any, spec: PartitionSpec) -> PartitionSpec:
        """The spec of a value with rows: it lies in columns, if a dimension of it stays split."""
        dim = self.dim(atom)
        if dim is None:
            return spec
        axes = self._axes[self._dims.of(atom)[dim]]
        return PartitionSpec(
            *[_joined(axes) if i == dim else _without(entry, axes) for i, entry in enumerate(spec)]
        )

    def entering(self, equation: Any) -> list[tuple[int, tuple[str, ...]]]:
        """The operands of a product that meet split columns, and the axes along which they are whole."""
        if not self._axes:
            return []
        found = [self.dim(atom) for atom in equation.invars]
        return [
            (place, self._axes[self._dims.of(equation.invars[1 - place])[other]])
            for place, other in ((0, found[1]), (1, found[0]))
            if found[place] is None and other is not None
        ]

    def _count(self, step: Step, costs: dict[int, Cost], seen: set[Any]) -> None:
        """Adds what an equation sends to the costs of the dimensions that it has."""
        equation, out = step.equation, step.equation.outvars[0]
        dims = [self._dims.of(atom) for atom in (*equation.invars, out)]
        for dim in costs.keys() & {dim for each in dims for dim in each}:
            if primitive_name(equation) == 'dot_general':
                self._count_product(step, dim, dims, costs, seen)
            elif dim in dims[0] and dim not in dims[-1] and equation.invars[0] in self._from_batch:
                costs[dim].split += 2 * step.times * self._bytes(out, costs[dim])

    def _count_product(
        self, step: Step, dim: int, dims: Sequence[list[int]], costs: dict[int, Cost], seen: set[Any]
    ) -> None:
        equation, times = step.equation, step.times
        contracted, (batch, _) = dot_dims(equation)
        cost, [out] = costs[dim], equation.outvars
        is_rows = [atom in self._from_batch for atom in equation.invars]
        weights = [
            (atom, own) for atom, own, rows in zip(equation.invars, dims, is_rows, strict=False) if not rows
        ]
        if any(not self._is_split(*weight, dim) for weight in weights) or (
            weights and any(dims[0][i] == dim for i in batch)  # experts
        ):
            del costs[dim]
            return
        for place, (atom, own, rows) in enumerate(zip(equation.invars, dims, is_rows, strict=False)):
            name, changes = step.names[place]
            if not rows:
                of_rows = equation.invars[1 - place]
                shape = shape_of(of_rows)
                count = math.prod(n for i, n in enumerate(shape) if i not in contracted[1 - place])
                few = count < FEW_ROWS * math.prod(
                    self._trails.sizes[axis] for axis in self._trails.batch_axes
                )
                cost.few, cost.changes = cost.few or few, max(cost.changes, changes)
                if (name, dim) not in seen:
                    cost.kept += (changes if few else times) * self._bytes(atom, None)
            elif dim not in own and (name, dim) not in seen:
                cost.split += times * self._bytes(atom, cost)
            seen.add((name, dim))
        if all(is_rows) and dim in dims[-1] and self._rows.intersection(dims[0][i] for i in contracted[0]):
            cost.kept += (cost.changes if cost.few else times) * self._bytes(out, None)
        elif dim not in dims[-1] and (step.total, dim) not in seen:
            seen.add((step.total, dim))
            # XLA scatters no sums in a dimension that further axes shard: it adds them up everywhere.
            sent = 2 if self._trails.batch_axes - {*cost.axes} else 1
            cost.split += sent * times * self._bytes(out, cost)

    def _is_split(self, atom: Any, own: Sequence[int], dim: int) -> bool:
        """Whether a weight lies along this dimension, and has it once."""
        trail = self._stored.of(atom)
        return own.count(dim) == 1 and bool(trail) and bool(trail[own.index(dim)])

    def _bytes(self, atom: Any, cost: Cost | None) -> float:
        """The bytes of a weight, or of all rows along the axes at hand."""
        others = self._trails.batch_axes - set(cost.axes) if cost else ()
        return self._trails.bytes_of(atom, others)


def _joined(axes: tuple[str, ...]) -> Any:
    return axes[0] if len(axes) == 1 else axes


def _without(entry: Any, axes: tuple[str, ...]) -> Any:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return entry
    kept = tuple(axis for axis in ((entry,) if isinstance(entry, str) else entry) if axis not in axes)
    return _joined(kept) if kept else None
