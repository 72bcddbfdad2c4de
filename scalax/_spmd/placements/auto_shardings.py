"""Shardings of values along the mesh axes that are not of the batch, such as tensor parallelism.

These axes stay Auto, and the compiler partitions along them. It would gather a value along all of them before
devices gather or scatter its blocks along the axes of the batch; so `collectives` exchanges blocks of both,
and needs to know which Auto axes shard which dimension: of state as its spec says, and of what is computed of
state as the dimensions that its dimensions come from.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from scalax._core.pytree.partition_specs import canonical_entry, entry_axes
from scalax._jax.equations import (
    CALLS,
    SHARDING_PARAMS,
    Literal,
    branches,
    call_jaxpr,
    loop_of,
    open_jaxpr,
    shape_of,
)
from scalax._jax.equations import sharding_params as shardings_of
from scalax._jax.primitives import primitive_name
from scalax._jaxpr.dim_rules import Axes, dim_rule

AutoDims = tuple[Axes, ...]
"""The Auto axes that shard each dimension of a value; an empty tuple if none is known to."""

NO_AXES: AutoDims = ()
# The uses of a jaxpr disagree.
_UNCLEAR: AutoDims = ((),)


def auto_spec(spec: PartitionSpec, rank: int, sizes: Mapping[str, int]) -> PartitionSpec:
    """Returns the part of a spec along Auto axes, with an entry for each dimension.

    Args:
        spec: the spec. What it leaves open stays open.
        rank: the number of dimensions.
        sizes: the Auto axes and their sizes.
    """
    dims = [*spec, *[None] * (rank - len(spec))]
    return PartitionSpec(
        *[
            entry
            if entry is PartitionSpec.UNCONSTRAINED
            else canonical_entry(tuple([axis for axis in entry_axes(entry) if axis in sizes]))
            for entry in dims
        ]
    )


def auto_dims(spec: PartitionSpec, rank: int, sizes: Mapping[str, int]) -> AutoDims:
    """Returns the Auto axes that a spec names, dimension by dimension."""
    found = tuple([entry_axes(entry) for entry in auto_spec(spec, rank, sizes)])
    return found if any(found) else NO_AXES


class AutoShardings:
    """Where values are along the Auto axes, as far as the arguments of a step and its constraints tell.

    Args:
        jaxpr: the jaxpr, open or closed.
        arguments: where its arguments are.
        sizes: the Auto axes and their sizes.

    Attributes:
        sizes: the same sizes.
    """

    def __init__(self, jaxpr: Any, arguments: Sequence[AutoDims], sizes: Mapping[str, int]) -> None:
        self.sizes = sizes
        self._of: dict[int, AutoDims] = {}
        if sizes:
            self._forward(jaxpr, arguments, is_final=True)

    def of(self, atom: Any) -> AutoDims:
        """Returns where a variable is, wherever its jaxpr is used."""
        dims = self._of.get(id(atom), NO_AXES)
        return NO_AXES if dims == _UNCLEAR else dims

    def along(self, axes: Container[str], atom: Any) -> AutoDims:
        """Returns where a variable is along some of the axes."""
        dims = tuple([tuple([axis for axis in names if axis in axes]) for names in self.of(atom)])
        return dims if any(dims) else NO_AXES

    def _forward(self, jaxpr: Any, arguments: Sequence[AutoDims], *, is_final: bool) -> list[AutoDims]:
        """Returns where the results of a jaxpr are. Rounds of a loop before the last one take no notes."""
        inner = open_jaxpr(jaxpr)
        known = dict(zip(map(id, inner.invars), arguments, strict=True))
        for equation in inner.eqns:
            operands = [known.get(id(atom), NO_AXES) for atom in equation.invars]
            results = self._results(equation, operands, is_final)
            known.update(zip(map(id, equation.outvars), results, strict=False))
        if is_final:
            for key, dims in known.items():
                if self._of.setdefault(key, dims) != dims:
                    self._of[key] = _UNCLEAR
        return [NO_AXES if isinstance(x, Literal) else known.get(id(x), NO_AXES) for x in inner.outvars]

    def _results(self, equation: Any, operands: Sequence[AutoDims], is_final: bool) -> Sequence[AutoDims]:
        name = primitive_name(equation)
        if name in CALLS:
            return self._forward(call_jaxpr(equation), operands, is_final=is_final)
        if name == 'cond':
            chosen = [self._forward(x, operands[1:], is_final=is_final) for x in branches(equation)]
            return [next(filter(None, dims), NO_AXES) for dims in zip(*chosen, strict=True)]
        if name in ('scan', 'while'):
            return self._loop(equation, operands, is_final)
        if name in SHARDING_PARAMS:
            said = shardings_of(equation)[1]
            return [
                self._said(said.get(i), var, operands[i] if i < len(operands) else NO_AXES)
                for i, var in enumerate(equation.outvars)
            ]
        if not any(operands):
            return ()
        found = dim_rule(equation).through(operands)
        return [
            self._possible(tuple(dims), shape_of(var))
            for dims, var in zip(found, equation.outvars, strict=False)
        ]

    def _loop(self, equation: Any, operands: Sequence[AutoDims], is_final: bool) -> Sequence[AutoDims]:
        loop = loop_of(equation)
        constants, begun, stacks = loop.parts(operands)
        carried, elements = [*begun], [dims[1:] if any(dims[1:]) else NO_AXES for dims in stacks]
        found = self._forward(loop.body, [*constants, *carried, *elements], is_final=False)
        carried = [a or b for a, b in zip(carried, found, strict=False)]
        found = self._forward(loop.body, [*constants, *carried, *elements], is_final=is_final)
        if loop.test is not None:
            self._forward(loop.test, [*operands[: loop.tested], *carried], is_final=is_final)
        stacked = [((), *dims) if dims else NO_AXES for dims in found[loop.carried :]]
        return [*[a or b for a, b in zip(carried, found, strict=False)], *stacked]

    def _said(self, sharding: Any, var: Any, before: AutoDims) -> AutoDims:
        """Where a value is that a constraint places; what the constraint leaves open stays."""
        spec = getattr(sharding, 'spec', None)
        if spec is None:
            return before
        rank = len(shape_of(var))
        entries = auto_spec(spec, rank, self.sizes)
        old = before or ((),) * rank
        dims = tuple(
            [
                axes if entry is PartitionSpec.UNCONSTRAINED else entry_axes(entry)
                for entry, axes in zip(entries, old, strict=True)
            ]
        )
        return self._possible(dims, shape_of(var)) if any(dims) else NO_AXES

    def _possible(self, dims: AutoDims, shape: Sequence[int]) -> AutoDims:
        """The part of it that a value of a shape can have: an axis shards one dimension, the first one."""
        if not any(dims):
            return NO_AXES
        used, found = set[str](), list[Axes]()
        for axes, size in zip(dims, shape, strict=True):
            fits = used.isdisjoint(axes) and size % _count(axes, self.sizes) == 0
            found.append(axes if fits else ())
            used.update(found[-1])
        return tuple(found) if any(found) else NO_AXES


def _count(axes: Axes, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis in axes)
