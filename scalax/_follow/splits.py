"""Dimensions of weights that stay split over axes of the batch, as tensor parallelism splits them.

FSDP gathers a weight for each product, and leaves rows in place. Where rows are fewer than the weights of a
block are large, it takes less to gather the rows in front of the block, leave each device its columns of all
that is computed in between, and add up and scatter what comes out. The last product with a large vocabulary
is such a block, with the loss behind it; so are two feed-forward matrices of many hidden columns.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from scalax._follow.dimensions import Dimensions
from scalax._follow.experts import Stored
from scalax._follow.trail import Trail, Trails
from scalax._jax.equations import WITH_JAXPRS, dot_dims, jaxprs_in, loop_of, opened
from scalax._jax.primitives import primitive_name
from scalax._jaxprs.dependence import Dependence
from scalax._tree.specs import canonical_entry, entry_axes

# It has to take this much less: XLA may send the same bytes in a ring beside a product, which takes longer.
_MARGIN = 0.85


@dataclasses.dataclass
class Cost:
    """What the dimensions of one class send either way, in bytes that each device gets.

    Attributes:
        kept: with rows in place: weights that are gathered, and gradients that are scattered.
        split: with columns in place: rows that are gathered, and sums that are scattered.
        changes: how often the weights are others.
    """

    kept: float = 0.0
    split: float = 0.0
    changes: int = 1


Value = tuple[int, object]
"""A value of one call of a jaxpr: the id of the variable, and the call."""


class Step(NamedTuple):
    """An equation of a jaxpr or of one inside it, in one call.

    Attributes:
        equation: the equation.
        times: how often it runs.
        values: of each operand the value, and how often it is another one: a constant of a loop is one.
        total: its first result, or the sum that this is added to.
    """

    equation: Any
    times: int
    values: Sequence[tuple[Value, int]]
    total: Value


class Splits:
    """The dimensions that stay split.

    Args:
        jaxpr: the jaxpr that has all others in it.
        rows: the trails of its arguments.
        stored: where weights are over the axes of the batch.
        from_batch: the variables that depend on the batch.
        trails: answers about trails.

    Attributes:
        axes: the mesh axes that shard weights, if these are the same for all.
    """

    def __init__(
        self, jaxpr: Any, rows: Sequence[Trail], stored: Stored, from_batch: Dependence, trails: Trails
    ) -> None:
        self._stored, self._from_batch, self._trails = stored, from_batch, trails
        self._split: set[int] = set()
        arguments = opened(jaxpr).invars
        sharded = {axes for var in arguments for axes in stored.of(var) if axes}
        if len(sharded) != 1:
            return
        [self.axes] = sharded
        self._others = trails.batch_axes.difference(self.axes)
        if not any(map(self._may_pay, stored.products)):
            return
        self._dims = Dimensions(jaxpr, math.prod(trails.sizes[axis] for axis in self.axes))
        self._rows = self._dims_along(arguments, rows)
        found = self._dims_along(arguments, map(stored.of, arguments)) - self._rows - self._dims.whole
        self._costs = {dim: Cost() for dim in found}
        self._seen: set[Any] = set()
        for step in _steps(opened(jaxpr)):
            self._count(step)
        self._split = {dim for dim, cost in self._costs.items() if cost.split < _MARGIN * cost.kept}

    def dim(self, atom: Any) -> int | None:
        """The dimension of a value that stays split; None if none does."""
        if not self._split:
            return None
        return next((i for i, each in enumerate(self._dims.classes(atom)) if each in self._split), None)

    def spec(self, atom: Any, spec: PartitionSpec) -> PartitionSpec:
        """The spec of a value with rows: it lies in columns, if a dimension of it stays split."""
        dim = self.dim(atom)
        if dim is None:
            return spec
        left = [
            entry
            if entry is PartitionSpec.UNCONSTRAINED
            else canonical_entry(tuple([axis for axis in entry_axes(entry) if axis not in self.axes]))
            for entry in spec
        ]
        return PartitionSpec(*left[:dim], canonical_entry(self.axes), *left[dim + 1 :])

    def _may_pay(self, product: Any) -> bool:
        """Whether a weight that is gathered twice, as for a gradient, is more than its rows, in or out."""
        rows = [atom for atom in (*product.invars, *product.outvars) if atom in self._from_batch]
        weights = [atom for atom in product.invars if atom not in self._from_batch]
        return bool(rows) and 2 * max(map(self._bytes, weights), default=0) > min(map(self._rows_of, rows))

    def _dims_along(self, atoms: Iterable[Any], trails: Iterable[Trail]) -> set[int]:
        """The classes of the dimensions that mesh axes shard."""
        return {
            dim
            for atom, trail in zip(atoms, trails, strict=True)
            for dim, axes in zip(self._dims.classes(atom), trail, strict=False)
            if axes
        }

    def _count(self, step: Step) -> None:
        """Adds what an equation sends to the costs of the dimensions that it has."""
        equation, out = step.equation, step.equation.outvars[0]
        dims = [self._dims.classes(atom) for atom in (*equation.invars, out)]
        for dim in self._costs.keys() & {dim for each in dims for dim in each}:
            if primitive_name(equation) == 'dot_general':
                self._count_product(step, dim, dims)
            elif dim in dims[0] and dim not in dims[-1] and equation.invars[0] in self._from_batch:
                self._costs[dim].split += 2 * step.times * self._rows_of(out)  # a sum, on all devices

    def _count_product(self, step: Step, dim: int, dims: Sequence[list[int]]) -> None:
        equation, times, [out] = step.equation, step.times, step.equation.outvars
        contracted, (batch, _) = dot_dims(equation)
        cost, own = self._costs[dim], dims[-1]
        is_rows = [atom in self._from_batch for atom in equation.invars]
        for place, (atom, rows) in enumerate(zip(equation.invars, is_rows, strict=True)):
            value, changes = step.values[place]
            seen = (value, dim) in self._seen
            self._seen.add((value, dim))
            if not rows:
                along = self._dims_along([atom], [self._stored.of(atom)])
                # It has to lie along the dimension, once; and experts are another matter.
                if dim not in along or dims[place].count(dim) > 1 or any(dims[0][i] == dim for i in batch):
                    del self._costs[dim]
                    return
                cost.changes = max(cost.changes, changes)
                cost.kept += 0 if seen else changes * self._bytes(atom)
            elif dim not in dims[place] and not seen:
                cost.split += times * self._rows_of(atom)
        if all(is_rows) and dim in own and self._rows.intersection(dims[0][i] for i in contracted[0]):
            cost.kept += cost.changes * self._bytes(out)
        elif dim not in own and (step.total, dim) not in self._seen:
            self._seen.add((step.total, dim))
            # XLA scatters no sums in a dimension that further axes shard: it adds them up everywhere.
            cost.split += (2 if self._others else 1) * times * self._rows_of(out)

    def _bytes(self, atom: Any) -> float:
        return self._trails.bytes_of(atom, ())

    def _rows_of(self, atom: Any) -> float:
        """The bytes of all rows along the axes that shard weights."""
        return self._trails.bytes_of(atom, self._others)


def _steps(
    jaxpr: Any, times: int = 1, given: Mapping[int, tuple[Value, int]] | None = None
) -> Iterator[Step]:
    """The equations of a jaxpr and of those inside it, once for each call."""
    call, given = object(), given or {}

    def value(atom: Any) -> tuple[Value, int]:
        return given.get(id(atom), ((id(atom), call), times))

    sums = {
        id(atom): id(each.outvars[0])
        for each in jaxpr.eqns
        if primitive_name(each) in ('add', 'add_any')
        for atom in each.invars
    }
    for equation in jaxpr.eqns:
        name, values = primitive_name(equation), [*map(value, equation.invars)]
        if name not in WITH_JAXPRS:
            total = id(equation.outvars[0])
            while total in sums:
                total = sums[total]
            yield Step(equation, times, values, (total, call))
            continue
        rounds, same = 1, values[1:] if name == 'cond' else values
        if name in ('scan', 'while'):
            loop = loop_of(equation)
            rounds, same = loop.length or 1, [*loop.parts(values)[0]]
        for inside in jaxprs_in(equation):
            known = {id(var): each for var, each in zip(inside.invars, same, strict=False)}
            yield from _steps(inside, times * rounds, known)
