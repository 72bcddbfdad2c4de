"""Batch dimensions of replicated values, of which each device only needs its own block.

A constant cotangent, for example, is replicated, but has the dimensions of the values that it meets. If a
dimension of a replicated value meets the batch dimension anywhere, the value is computed for the local
examples from the start.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any, Self

from scalax._jax.equations import WITH_JAXPRS, Literal, shape_of
from scalax._jax.primitives import primitive_name
from scalax._jaxpr.dim_classes import DimClasses, DimIds
from scalax._jaxpr.dim_rules import ELEMENTWISE, reshape_groups
from scalax._spmd.placements.placement import Placements, Replicate, Shard, shards_examples


class BatchDimClasses(DimClasses):
    """Classes of dimensions that include the dimensions of constants.

    Attributes:
        splits: for reshapes whose first result dimension is not divisible by the shards, such as a split of
            the batch into microbatches, the ids of the split dimensions, and of the dimension to shard.
    """

    def __init__(self, jaxpr: Any, blocks: int) -> None:
        self.splits: list[tuple[DimIds, int]] = []
        self._evaluated: dict[int, tuple[Sequence[DimIds], list[DimIds]]] = {}
        self._joined_pairs: dict[tuple[DimIds, DimIds], DimIds] = {}
        super().__init__(jaxpr, blocks)

    def _eval_equations(self, jaxpr: Any, arguments: Sequence[DimIds]) -> list[DimIds]:
        if (evaluated := self._evaluated.get(id(jaxpr))) is not None:
            # All calls of a jaxpr have the same dimensions.
            for previous_ids, ids in zip(evaluated[0], arguments, strict=True):
                self._join_pair(previous_ids, ids)
            return evaluated[1]
        ids_by_var = {id(var): ids for var, ids in zip(jaxpr.invars, arguments, strict=True)}

        def ids_of(atom: Any) -> DimIds:
            ids = ids_by_var.get(id(atom))
            if ids is None or len(ids) != len(shape_of(atom)):
                ids = self.new_ids(atom)
                if not isinstance(atom, Literal):
                    ids_by_var[id(atom)] = ids
            return ids

        for equation in jaxpr.eqns:
            name = primitive_name(equation)
            if name not in ELEMENTWISE or len(equation.outvars) != 1:
                operands = [ids_of(atom) for atom in equation.invars]
                if name in WITH_JAXPRS:
                    results = self.eval_equation(equation, operands)
                else:
                    results = self.eval_primitive(name, equation, operands)
                ids_by_var.update(zip(map(id, equation.outvars), results, strict=False))
                continue
            # A fast path for most equations: the operands have the dimensions of the result, or are scalars.
            [out], result = equation.outvars, None
            rank = len(shape_of(out))
            for atom in equation.invars:
                known_ids = ids_by_var.get(id(atom))
                if known_ids is None and isinstance(atom, Literal):
                    continue
                ids = ids_of(atom) if known_ids is None else known_ids
                if ids is not result and len(ids) == rank:
                    result = ids if result is None else self._join_pair(result, ids)
            ids_by_var[id(out)] = self.new_ids(out) if result is None else result
        self.record(ids_by_var)
        results = [ids_of(atom) for atom in jaxpr.outvars]
        self._evaluated[id(jaxpr)] = arguments, results
        return results

    def _join_pair(self, first: DimIds, second: DimIds) -> DimIds:
        """Returns the ids of dimensions that meet. The few pairs that differ occur often, and are cached."""
        if first == second:
            return first
        if (pair := (first, second)) not in self._joined_pairs:
            self._joined_pairs[pair] = self.join(pair)
        return self._joined_pairs[pair]

    def _reshape(self, equation: Any, operand_ids: DimIds, new_ids: DimIds) -> DimIds:
        result = super()._reshape(equation, operand_ids, new_ids)
        shape = shape_of(equation.outvars[0])
        for old_dims, new_dims in reshape_groups(equation):
            dim = sharded_part(new_dims, shape, self._num_shards)
            if dim is not None and result[new_dims[0]] == new_ids[new_dims[0]]:
                self.splits.append((tuple([operand_ids[x] for x in old_dims]), result[dim]))
        return result


def sharded_part(dims: Sequence[int], shape: Sequence[int], blocks: int) -> int | None:
    """Returns which dimension to shard after a reshape splits a sharded one: the largest divisible one.

    Args:
        dims: the dimensions into which the sharded one is split.
        shape: the shape of the result.
        blocks: the product of the sizes of all batch axes.
    """
    divisible = [dim for dim in dims if shape[dim] % blocks == 0]
    return max(divisible, key=lambda dim: shape[dim]) if divisible else None


class BatchDims:
    """The batch dimensions of the values of a jaxpr, and of its inner jaxprs.

    Args:
        jaxpr: the jaxpr, open or closed.
        arguments: the placements of its arguments.
        sizes: the sizes of the batch axes.
    """

    def __init__(self, jaxpr: Any, arguments: Sequence[Placements], sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)
        self._classes = BatchDimClasses(jaxpr, math.prod(sizes))
        self._axes: dict[int, set[int]] = {}
        for ids, placements in zip(self._classes.arguments, arguments, strict=True):
            for axis, placement in enumerate(placements):
                if shards_examples(placement):
                    root = self._classes.union_find.root(ids[placement.dim])
                    self._axes.setdefault(root, set()).add(axis)
        for ids, split_id in self._classes.splits:
            axes = {axis for x in ids for axis in self._axes.get(self._classes.union_find.root(x), ())}
            if axes:
                self._axes.setdefault(self._classes.union_find.root(split_id), set()).update(axes)

    def add(self, atom: Any, dim: int, axes: Iterable[int]) -> None:
        """Records a batch dimension of a value, with the indices of the axes that shard it."""
        dim_id = self._classes.of(atom)[dim]
        self._axes.setdefault(self._classes.union_find.root(dim_id), set()).update(axes)

    def along(self, axes: Sequence[int]) -> Self:
        """Returns the batch dimensions along some of the axes, which are given by index."""
        other = copy.copy(self)
        new_indices = {axis: i for i, axis in enumerate(axes)}
        other._sizes = tuple([self._sizes[axis] for axis in axes])
        other._axes = {
            root: {new_indices[x] for x in old_axes if x in new_indices}
            for root, old_axes in self._axes.items()
        }
        return other

    def dims(self, atom: Any) -> set[int]:
        """Returns the batch dimensions of a value."""
        root, ids = self._classes.union_find.root, self._classes.of(atom)
        return {dim for dim, dim_id in enumerate(ids) if root(dim_id) in self._axes}

    def placements(self, atom: Any, placements: Placements) -> Placements:
        """Returns the placements of a value after its batch dimensions are sharded too."""
        ids, result = self._classes.of(atom), [*placements]
        for dim, (dim_id, size) in enumerate(zip(ids, shape_of(atom), strict=False)):
            axes = self._axes.get(self._classes.union_find.root(dim_id), ())
            if size <= 1 or not axes or size % math.prod([self._sizes[axis] for axis in axes]):
                continue
            for axis in axes:
                if isinstance(result[axis], Replicate):
                    result[axis] = Shard(dim)
        return tuple(result)
