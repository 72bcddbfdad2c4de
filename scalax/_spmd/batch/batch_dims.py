"""The dimensions of replicated values that are dimensions of the batch: a device needs its block only.

A cotangent that is a constant has the dimensions of what it meets. So a value that is the same on every
device is computed for each device's examples from the start, if its dimension meets the batch anywhere.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any, Self

from scalax._jax.equations import Literal, shape_of
from scalax._jax.primitives import primitive_name
from scalax._jaxpr.dim_classes import DimClasses, DimIds
from scalax._jaxpr.dim_rules import ELEMENTWISE, reshape_groups
from scalax._spmd.placements.placement import Placements, Replicate, Shard


class _Numbered(DimClasses):
    """Numbers the dimensions of constants, too.

    Attributes:
        splits: of reshapes whose first dimension does not divide, such as that of a batch into microbatches,
            the numbers of the dimensions that are split, and that of the one that is sharded behind it.
    """

    def __init__(self, jaxpr: Any, blocks: int) -> None:
        self.splits: list[tuple[DimIds, int]] = []
        self._runs: dict[int, tuple[Sequence[DimIds], list[DimIds]]] = {}
        self._pairs: dict[tuple[DimIds, DimIds], DimIds] = {}
        super().__init__(jaxpr, blocks)

    def _eval_equations(self, jaxpr: Any, arguments: Sequence[DimIds]) -> list[DimIds]:
        if (run := self._runs.get(id(jaxpr))) is not None:
            # Wherever a jaxpr is used its values have the same dimensions.
            for before, numbers in zip(run[0], arguments, strict=True):
                self._joined_pair(before, numbers)
            return run[1]
        known = {id(var): numbers for var, numbers in zip(jaxpr.invars, arguments, strict=True)}

        def of(atom: Any) -> DimIds:
            numbers = known.get(id(atom))
            if numbers is None or len(numbers) != len(shape_of(atom)):
                numbers = self.new_ids(atom)
                if not isinstance(atom, Literal):
                    known[id(atom)] = numbers
            return numbers

        for equation in jaxpr.eqns:
            if primitive_name(equation) not in ELEMENTWISE or len(equation.outvars) != 1:
                results = self.eval_equation(equation, [of(atom) for atom in equation.invars])
                known.update(zip(map(id, equation.outvars), results, strict=False))
                continue
            # Most equations: their operands have the dimensions of the result, or none.
            [out], result = equation.outvars, None
            rank = len(shape_of(out))
            for atom in equation.invars:
                found = known.get(id(atom))
                if found is None and isinstance(atom, Literal):
                    continue
                numbers = of(atom) if found is None else found
                if numbers is not result and len(numbers) == rank:
                    result = numbers if result is None else self._joined_pair(result, numbers)
            known[id(out)] = self.new_ids(out) if result is None else result
        self.record(known)
        results = [of(atom) for atom in jaxpr.outvars]
        self._runs[id(jaxpr)] = arguments, results
        return results

    def _joined_pair(self, one: DimIds, other: DimIds) -> DimIds:
        """The numbers of dimensions that meet; few pairs are different, and those often."""
        if one == other:
            return one
        if (pair := (one, other)) not in self._pairs:
            self._pairs[pair] = self.join(pair)
        return self._pairs[pair]

    def _reshape(self, equation: Any, known: DimIds, new: DimIds) -> DimIds:
        result = super()._reshape(equation, known, new)
        shape = shape_of(equation.outvars[0])
        for old, split in reshape_groups(equation):
            dim = sharded_part(split, shape, self._num_shards)
            if dim is not None and result[split[0]] == new[split[0]]:
                self.splits.append((tuple([known[x] for x in old]), result[dim]))
        return result


def sharded_part(dims: Sequence[int], shape: Sequence[int], blocks: int) -> int | None:
    """Returns which of the dimensions that a sharded one is split into is sharded: the largest that divides.

    Args:
        dims: the dimensions.
        shape: the shape of the value that has them.
        blocks: into how many blocks all batch axes together split a dimension.
    """
    found = [dim for dim in dims if shape[dim] % blocks == 0]
    return max(found, key=lambda dim: shape[dim]) if found else None


class BatchDims:
    """The dimensions of the batch in the values of a jaxpr, and of those inside it.

    Args:
        jaxpr: the jaxpr, open or closed.
        arguments: the placements of its arguments.
        sizes: the sizes of the batch axes.
    """

    def __init__(self, jaxpr: Any, arguments: Sequence[Placements], sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)
        self._numbered = _Numbered(jaxpr, math.prod(sizes))
        self._axes: dict[int, set[int]] = {}
        for numbers, placements in zip(self._numbered.arguments, arguments, strict=True):
            for axis, placement in enumerate(placements):
                if isinstance(placement, Shard) and not placement.is_state:
                    root = self._numbered.union_find.root(numbers[placement.dim])
                    self._axes.setdefault(root, set()).add(axis)
        for numbers, split in self._numbered.splits:
            axes = {axis for x in numbers for axis in self._axes.get(self._numbered.union_find.root(x), ())}
            if axes:
                self._axes.setdefault(self._numbered.union_find.root(split), set()).update(axes)

    def add(self, atom: Any, dim: int, axes: Iterable[int]) -> None:
        """Takes note of a dimension of a value that is sharded over these axes, by number."""
        number = self._numbered.of(atom)[dim]
        self._axes.setdefault(self._numbered.union_find.root(number), set()).update(axes)

    def along(self, axes: Sequence[int]) -> Self:
        """Returns the dimensions of the batch along these of the axes alone, by number."""
        other = copy.copy(self)
        kept = {axis: i for i, axis in enumerate(axes)}
        other._sizes = tuple([self._sizes[axis] for axis in axes])
        other._axes = {root: {kept[x] for x in found if x in kept} for root, found in self._axes.items()}
        return other

    def dims(self, atom: Any) -> set[int]:
        """Returns the dimensions of a value that are dimensions of the batch."""
        root, numbers = self._numbered.union_find.root, self._numbered.of(atom)
        return {dim for dim, number in enumerate(numbers) if root(number) in self._axes}

    def placements(self, atom: Any, placements: Placements) -> Placements:
        """Returns the placements of a value whose dimensions of the batch are sharded as well."""
        numbers, result = self._numbered.of(atom), [*placements]
        for dim, (number, size) in enumerate(zip(numbers, shape_of(atom), strict=False)):
            axes = self._axes.get(self._numbered.union_find.root(number), ())
            if size <= 1 or not axes or size % math.prod([self._sizes[axis] for axis in axes]):
                continue
            for axis in axes:
                if isinstance(result[axis], Replicate):
                    result[axis] = Shard(dim)
        return tuple(result)
