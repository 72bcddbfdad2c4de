"""Equivalence classes of the dimensions of a jaxpr: dimensions that meet in matmuls, sums, loops and calls.

The columns of a matrix that are contracted with the rows of the next matrix are one dimension of the model,
such as its width or its heads. Sharding it over a mesh axis pays off only if it is sharded in all values.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from scalax._jax.equations import open_jaxpr, shape_of
from scalax._jaxpr.abstract_interpreter import AbstractInterpreter
from scalax._jaxpr.dim_rules import (
    ELEMENTWISE,
    UNKNOWN,
    DimRule,
    OperandDim,
    Sources,
    dim_rule,
    reshape_groups,
)

DimIds = tuple[int, ...]
"""An id for each dimension of a value."""


class _Meetings(NamedTuple):
    """Which dimensions of an equation meet.

    Attributes:
        united: the groups of operand dimensions that are contracted or reduced together.
        sources: for each dimension of each result, the operand dimensions that become it, of equal size.
        resized: the dimensions of results that come from operand dimensions of other sizes only.
        unsharded: the operand dimensions that are neither reduced nor become a dimension of a result.
    """

    united: Sequence[Sources]
    sources: Sequence[Sequence[Sources]]
    resized: Sequence[tuple[int, int]]
    unsharded: Sequence[OperandDim]


Shapes = tuple[tuple[int, ...], ...]


@functools.lru_cache(maxsize=4096)  # layers have the same shapes
def _meetings(rule: DimRule, operands: Shapes, results: Shapes) -> _Meetings:
    """Returns which dimensions meet in an equation, from its rule and the shapes of operands and results."""
    # Contracted, reduced and gathered dimensions may be sharded.
    shardable = {operand_dim for group in rule.reduced for operand_dim in group}
    all_sources, resized = [], []
    for i, (shape, result) in enumerate(zip(results, rule.results, strict=True)):
        result_sources = []
        for j, (size, sources) in enumerate(zip(shape, result, strict=True)):
            same_size = tuple([(operand, dim) for operand, dim in sources if operands[operand][dim] == size])
            shardable.update(same_size)
            result_sources.append(same_size)
            if sources and not same_size:
                resized.append((i, j))
        all_sources.append(result_sources)
    operand_dims = [
        (operand, dim) for operand, shape in enumerate(operands) for dim, size in enumerate(shape) if size > 1
    ]
    unsharded = [operand_dim for operand_dim in operand_dims if operand_dim not in shardable]
    return _Meetings([group for group in rule.reduced if len(group) > 1], all_sources, resized, unsharded)


class UnionFind:
    """Equivalence classes of integers. The smallest integer represents its class."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}

    def root(self, member: int) -> int:
        """Returns the representative of the class of an integer."""
        parents = self._parents
        while (parent := parents.get(member, member)) != member:
            parents[member] = member = parents.get(parent, parent)  # path halving
        return member

    def unite(self, a: int, b: int) -> None:
        """Merges the classes of two integers."""
        a, b = self.root(a), self.root(b)
        if a != b:
            self._parents[max(a, b)] = min(a, b)


class DimClasses(AbstractInterpreter[DimIds]):
    """Assigns ids to the dimensions of all values, and unites the ids of dimensions that meet.

    Args:
        jaxpr: the jaxpr, open or closed.
        num_shards: the number of shards that a dimension would have. If a reshape merges or splits
            dimensions, the first of them stays the same dimension if the number divides its size.

    Attributes:
        arguments: the ids of the dimensions of each argument of the jaxpr.
        union_find: the classes of the ids.
    """

    def __init__(self, jaxpr: Any, num_shards: int = 1) -> None:
        super().__init__(bottom=())
        self._num_shards, self._count = num_shards, itertools.count()
        self.union_find = UnionFind()
        self.arguments = [*map(self.new_ids, open_jaxpr(jaxpr).invars)]
        self.eval_jaxpr(jaxpr, self.arguments)

    def new_ids(self, atom: Any) -> DimIds:
        """Returns new ids for the dimensions of a value."""
        return tuple(itertools.islice(self._count, len(shape_of(atom))))

    def require_unsharded(self, ids: Iterable[int]) -> None:
        """Records dimensions that an equation needs unsharded.

        An equation needs all their elements at once, or reads single ones. This implementation does nothing.
        """

    def eval_equation(self, equation: Any, operands: Sequence[DimIds]) -> Sequence[DimIds]:
        operands = [ids or self.new_ids(atom) for ids, atom in zip(operands, equation.invars, strict=True)]
        results = zip(super().eval_equation(equation, operands), equation.outvars, strict=False)
        # Constants have no ids, and the stack of a constant has too few.
        return [ids if len(ids) == len(shape_of(var)) else self.new_ids(var) for ids, var in results]

    def eval_primitive(self, name: str, equation: Any, operands: Sequence[DimIds]) -> Sequence[DimIds]:
        if name in ELEMENTWISE and len(equation.outvars) == 1:  # a fast path for most equations
            same_rank = [ids for ids in operands if len(ids) == len(shape_of(equation.outvars[0]))]
            return [tuple(map(self.unite, zip(*same_rank, strict=True)))] if len(same_rank) > 1 else same_rank
        rule = dim_rule(equation)
        if rule is UNKNOWN:
            results = [*map(self.new_ids, equation.outvars)]
            self.require_unsharded(itertools.chain(*operands, *results))
            return results
        if name == 'reshape':
            return [self._reshape(equation, operands[0], self.new_ids(equation.outvars[0]))]
        shapes = (*map(shape_of, equation.invars),), (*map(shape_of, equation.outvars),)
        meetings = _meetings(rule, *shapes)
        for group in meetings.united:
            self.unite([operands[operand][dim] for operand, dim in group])
        results = []
        for result_sources in meetings.sources:
            ids = [
                self.unite([operands[operand][dim] for operand, dim in sources])
                if sources
                else next(self._count)
                for sources in result_sources
            ]
            results.append(tuple(ids))
        self.require_unsharded([results[i][dim] for i, dim in meetings.resized])
        if name != 'gather':
            self.require_unsharded([operands[i][dim] for i, dim in meetings.unsharded])
        return results

    def element_of(self, stack: DimIds) -> DimIds:
        self.require_unsharded(stack[:1])
        return stack[1:]

    def stack_of(self, element: DimIds) -> DimIds:
        stacked_id = next(self._count)
        self.require_unsharded([stacked_id])
        return (stacked_id, *element)

    def join(self, values: Sequence[DimIds]) -> DimIds:
        return tuple(map(self.unite, zip(*filter(None, values), strict=True)))

    def unite(self, ids: Sequence[int]) -> int:
        """Unites the classes of some ids, and returns the smallest of the ids."""
        smallest = first = ids[0]
        for other in ids:
            if other != first:
                self.union_find.unite(first, other)
                smallest = min(smallest, other)
        return smallest

    def _reshape(self, equation: Any, operand_ids: DimIds, new_ids: DimIds) -> DimIds:
        """Returns the ids of the result of a reshape.

        The first dimension of a merged group is the first dimension of the group that it is split into.
        """
        old_shape, new_shape = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
        result_ids, unmatched = [*new_ids], {*range(len(operand_ids))}
        for (old_dim, *_), (new_dim, *_) in reshape_groups(equation):
            if old_shape[old_dim] % self._num_shards == new_shape[new_dim] % self._num_shards == 0:
                result_ids[new_dim] = operand_ids[old_dim]
                unmatched.discard(old_dim)
        self.require_unsharded([operand_ids[dim] for dim in unmatched])
        return tuple(result_ids)
