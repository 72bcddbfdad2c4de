"""Shardings of values along the Auto axes: the mesh axes other than the batch's, as for tensor parallelism.

The compiler partitions along these axes. On its own, it would gather a value along all of them before a
collective along the batch axes. So `collectives` runs each collective on the shards along both, for which it
needs the Auto axes that shard each dimension. They follow from the specs of state, and are propagated to
values computed from state by the dimension rules.
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
    sharding_params,
)
from scalax._jax.primitives import primitive_name
from scalax._jaxpr.dim_rules import Axes, dim_rule

AutoDims = tuple[Axes, ...]
"""The Auto axes that shard each dimension of a value; an empty tuple if no sharding is known."""

NO_AXES: AutoDims = ()
# The calls of a jaxpr disagree.
_AMBIGUOUS: AutoDims = ((),)


def auto_spec(spec: PartitionSpec, rank: int, sizes: Mapping[str, int]) -> PartitionSpec:
    """Returns the part of a spec along the Auto axes, with an entry for each dimension.

    Args:
        spec: the spec. Its unconstrained dimensions stay unconstrained.
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
    """Returns the Auto axes that a spec names for each dimension."""
    result = tuple([entry_axes(entry) for entry in auto_spec(spec, rank, sizes)])
    return result if any(result) else NO_AXES


class AutoShardings:
    """The shardings of values along the Auto axes, as far as arguments and constraints determine them.

    Args:
        jaxpr: the jaxpr, open or closed.
        arguments: the shardings of its arguments along the Auto axes.
        sizes: the Auto axes and their sizes.

    Attributes:
        sizes: the Auto axes and their sizes.
    """

    def __init__(self, jaxpr: Any, arguments: Sequence[AutoDims], sizes: Mapping[str, int]) -> None:
        self.sizes = sizes
        self._of: dict[int, AutoDims] = {}
        if sizes:
            self._forward(jaxpr, arguments, is_final=True)

    def of(self, atom: Any) -> AutoDims:
        """Returns the sharding of a variable along the Auto axes, in all calls of its jaxpr."""
        dims = self._of.get(id(atom), NO_AXES)
        return NO_AXES if dims == _AMBIGUOUS else dims

    def along(self, axes: Container[str], atom: Any) -> AutoDims:
        """Returns the sharding of a variable along some of the Auto axes."""
        dims = tuple([tuple([axis for axis in names if axis in axes]) for names in self.of(atom)])
        return dims if any(dims) else NO_AXES

    def _forward(self, jaxpr: Any, arguments: Sequence[AutoDims], *, is_final: bool) -> list[AutoDims]:
        """Propagates shardings through a jaxpr, and returns the shardings of its results.

        Args:
            jaxpr: the jaxpr, open or closed.
            arguments: the shardings of its arguments.
            is_final: whether to record the shardings, as in the last pass over the body of a loop.
        """
        inner_jaxpr = open_jaxpr(jaxpr)
        dims_by_id = dict(zip(map(id, inner_jaxpr.invars), arguments, strict=True))
        for equation in inner_jaxpr.eqns:
            operands = [dims_by_id.get(id(atom), NO_AXES) for atom in equation.invars]
            results = self._results(equation, operands, is_final)
            dims_by_id.update(zip(map(id, equation.outvars), results, strict=False))
        if is_final:
            for key, dims in dims_by_id.items():
                if self._of.setdefault(key, dims) != dims:
                    self._of[key] = _AMBIGUOUS
        return [
            NO_AXES if isinstance(x, Literal) else dims_by_id.get(id(x), NO_AXES) for x in inner_jaxpr.outvars
        ]

    def _results(self, equation: Any, operands: Sequence[AutoDims], is_final: bool) -> Sequence[AutoDims]:
        name = primitive_name(equation)
        if name in CALLS:
            return self._forward(call_jaxpr(equation), operands, is_final=is_final)
        if name == 'cond':
            branch_results = [self._forward(x, operands[1:], is_final=is_final) for x in branches(equation)]
            return [next(filter(None, dims), NO_AXES) for dims in zip(*branch_results, strict=True)]
        if name in ('scan', 'while'):
            return self._loop(equation, operands, is_final)
        if name in SHARDING_PARAMS:
            shardings = sharding_params(equation)[1]
            return [
                self._constrained_dims(shardings.get(i), var, operands[i] if i < len(operands) else NO_AXES)
                for i, var in enumerate(equation.outvars)
            ]
        if not any(operands):
            return ()
        result_dims = dim_rule(equation).propagate(operands)
        return [
            self._valid_dims(tuple(dims), shape_of(var))
            for dims, var in zip(result_dims, equation.outvars, strict=False)
        ]

    def _loop(self, equation: Any, operands: Sequence[AutoDims], is_final: bool) -> Sequence[AutoDims]:
        loop = loop_of(equation)
        consts, first, xs = loop.split(operands)
        carry, element_dims = [*first], [dims[1:] if any(dims[1:]) else NO_AXES for dims in xs]
        results = self._forward(loop.body, [*consts, *carry, *element_dims], is_final=False)
        carry = [a or b for a, b in zip(carry, results, strict=False)]
        results = self._forward(loop.body, [*consts, *carry, *element_dims], is_final=is_final)
        if loop.cond is not None:
            self._forward(loop.cond, [*operands[: loop.num_cond_consts], *carry], is_final=is_final)
        ys = [((), *dims) if dims else NO_AXES for dims in results[loop.num_carry :]]
        return [*[a or b for a, b in zip(carry, results, strict=False)], *ys]

    def _constrained_dims(self, sharding: Any, var: Any, previous: AutoDims) -> AutoDims:
        """Returns the sharding of a constrained value. Unconstrained dimensions keep their sharding."""
        spec = getattr(sharding, 'spec', None)
        if spec is None:
            return previous
        rank = len(shape_of(var))
        entries = auto_spec(spec, rank, self.sizes)
        old_dims = previous or ((),) * rank
        dims = tuple(
            [
                axes if entry is PartitionSpec.UNCONSTRAINED else entry_axes(entry)
                for entry, axes in zip(entries, old_dims, strict=True)
            ]
        )
        return self._valid_dims(dims, shape_of(var)) if any(dims) else NO_AXES

    def _valid_dims(self, dims: AutoDims, shape: Sequence[int]) -> AutoDims:
        """Drops axes that do not divide a dimension, or that already shard an earlier one."""
        if not any(dims):
            return NO_AXES
        used, valid = set[str](), list[Axes]()
        for axes, size in zip(dims, shape, strict=True):
            fits = used.isdisjoint(axes) and size % _count(axes, self.sizes) == 0
            valid.append(axes if fits else ())
            used.update(valid[-1])
        return tuple(valid) if any(valid) else NO_AXES


def _count(axes: Axes, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis in axes)
