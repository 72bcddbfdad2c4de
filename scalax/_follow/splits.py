"""Dimensions of weights that stay split over axes of the batch, as tensor parallelism splits them.

FSDP gathers a weight for each product, and leaves rows in place. Where rows are fewer than the weights of a
block are large, it takes less to gather the rows in front of the block, leave each device its columns of all
that is computed in between, and add up and scatter what comes out. The last product with a large vocabulary
is such a block, with the loss behind it; so are two feed-forward matrices of many hidden columns.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from scalax._follow.dimensions import WHOLE, Dimensions
from scalax._follow.experts import Stored
from scalax._follow.trail import Trail, Trails
from scalax._jax.equations import WITH_JAXPRS, branches, called, dot_dims, loop_of, opened
from scalax._jax.primitives import primitive_name
from scalax._jaxprs.dependence import Dependence

# It has to take this much less: XLA may send the same bytes in a ring beside a product, which takes longer.
_MARGIN = 0.85
# A weight is gathered for the forward and for the backward pass, and its gradient is scattered; rows move
# into a block and out of it at least once.
_MOST_SENT = 3


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
    """

    def __init__(
        self, jaxpr: Any, rows: Sequence[Trail], stored: Stored, from_batch: Dependence, trails: Trails
    ) -> None:
        self._stored, self._from_batch, self._trails = stored, from_batch, trails
        self._split: set[int] = set()
        arguments = opened(jaxpr).invars
        weights = [(var, stored.of(var)) for var in arguments]
        sharded = {axes for _, trail in weights for axes in trail if axes}
        if len(sharded) != 1 or not any(map(self._may_pay, stored.products)):
            return
        [self._axes] = sharded
        self._dims = Dimensions(jaxpr, math.prod(trails.sizes[axis] for axis in self._axes))
        self._others = trails.batch_axes.difference(self._axes)
        self._rows = {
            dim for var, trail in zip(arguments, rows, strict=True) for dim in self._along(var, trail)
        }
        found = {dim for var, trail in weights for dim in self._along(var, trail)} - {WHOLE} - self._rows
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
        return PartitionSpec(
            *[
                _joined(self._axes) if i == dim else _without(entry, self._axes)
                for i, entry in enumerate(spec)
            ]
        )

    def entering(self, equation: Any) -> Iterator[tuple[int, tuple[str, ...]]]:
        """The operands of a product that meet split columns, and the axes along which they are whole."""
        found = [self.dim(atom) for atom in equation.invars]
        for place in (0, 1):
            if found[place] is None and found[1 - place] is not None:
                yield place, self._axes

    def _may_pay(self, product: Any) -> bool:
        """Whether the weight of a product may be more than its rows, on their way in or out."""
        rows = [atom for atom in (*product.invars, *product.outvars) if atom in self._from_batch]
        weight = [atom for atom in product.invars if atom not in self._from_batch]
        return bool(rows) and _MOST_SENT * max(map(self._bytes, weight)) > min(map(self._bytes, rows))

    def _along(self, atom: Any, trail: Trail) -> list[int]:
        """The classes of the dimensions that mesh axes shard."""
        return [dim for dim, axes in zip(self._dims.classes(atom), trail, strict=False) if axes]

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
                is_split = dims[place].count(dim) == 1 and dim in self._along(atom, self._stored.of(atom))
                if not is_split or any(dims[0][i] == dim for i in batch):  # experts
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
        rounds, same = 1, values
        if name in ('scan', 'while'):
            loop = loop_of(equation)
            rounds, same = loop.length or 1, [*loop.parts(values)[0]]
        elif name == 'cond':
            same = values[1:]
        for inside in _inside(name, equation):
            known = {id(var): each for var, each in zip(inside.invars, same, strict=False)}
            yield from _steps(inside, times * rounds, known)


def _inside(name: str, equation: Any) -> list[Any]:
    """The jaxprs that an equation runs."""
    if name == 'cond':
        return [*map(opened, branches(equation))]
    return [opened(loop_of(equation).body if name in ('scan', 'while') else called(equation))]


def _joined(axes: tuple[str, ...]) -> Any:
    return axes[0] if len(axes) == 1 else axes


def _without(entry: Any, axes: tuple[str, ...]) -> Any:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return entry
    kept = tuple(axis for axis in ((entry,) if isinstance(entry, str) else entry) if axis not in axes)
    return _joined(kept) if kept else None
