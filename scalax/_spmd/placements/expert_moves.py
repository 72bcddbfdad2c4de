"""Examples that move to experts and back: each device along the Auto axes moves a part of their features.

If an Auto axis shards the columns of experts, all devices along it need the same examples. Instead of sending
these examples several times along the batch axes, each device sends a part of the features, and the devices
exchange the parts at the experts. On the way back, a sum over the Auto axis is scattered to the parts, which
sends half of what its reduction to all devices does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from scalax._jax.equations import dot_dims, shape_of, size_of
from scalax._jax.primitives import primitive_name
from scalax._jaxpr.dim_rules import ELEMENTWISE, dim_rule
from scalax._spmd.editor import EditorBase
from scalax._spmd.placements.auto_shardings import AutoDims
from scalax._spmd.placements.placement import RedistributeOp
from scalax._spmd.values import Value

_PRESERVES_SUM = ELEMENTWISE | {'reshape', 'squeeze', 'transpose'}
_MAX_DISTANCE = 8


class FeatureSplit(NamedTuple):
    """The split of the features of moved examples over Auto axes.

    Attributes:
        auto_dims: the axes, for each dimension.
        is_sum: whether a matmul computes the examples as a sum over the axes.
        joined_spec: the spec that joins the parts.
        result_spec: the spec that joins the result of the equation instead, if that is smaller; None if not.
    """

    auto_dims: AutoDims
    is_sum: bool
    joined_spec: PartitionSpec
    result_spec: PartitionSpec | None


def feature_split(
    editor: EditorBase, value: Value, equation: Any, op: RedistributeOp, shape: Sequence[int]
) -> FeatureSplit | None:
    """Returns the split of the features of examples that move to experts or back; None if they are not split.

    Args:
        editor: the editor of the jaxpr.
        value: the examples, whose sharding along the Auto axes is not known.
        equation: the equation for which they move.
        op: an `all_to_all`.
        shape: the local shape of the examples.
    """
    summed_axes = _summed_axes(editor, value)
    axes = summed_axes or _axes_of_experts(editor, value, equation, op)
    count = math.prod(editor.context.auto.sizes[axis] for axis in axes)
    free = [dim for dim, size in enumerate(shape) if dim not in (op.dim, op.other_dim) and size % count == 0]
    if not axes or not free:
        return None
    split_dim = max(free, key=shape.__getitem__)
    return FeatureSplit(
        tuple([axes if dim == split_dim else () for dim in range(len(shape))]),
        bool(summed_axes),
        _joined_spec(split_dim, len(shape)),
        _joined_result_spec(value, equation, split_dim) if summed_axes else None,
    )


def _joined_spec(dim: int, rank: int) -> PartitionSpec:
    return PartitionSpec(*[None if i == dim else PartitionSpec.UNCONSTRAINED for i in range(rank)])


def _joined_result_spec(value: Value, equation: Any, split_dim: int) -> PartitionSpec | None:
    """Returns the spec that joins the parts in the result of a matmul; None if it is not smaller."""
    [result, *_] = equation.outvars
    if primitive_name(equation) != 'dot_general' or size_of(result) >= size_of(value.var):
        return None
    operand = int(equation.invars[0] is not value.var)
    for dim, sources in enumerate(dim_rule(equation).results[0]):
        if (operand, split_dim) in sources:
            return _joined_spec(dim, len(shape_of(result)))
    return None


def _axes_of_experts(editor: EditorBase, value: Value, equation: Any, op: RedistributeOp) -> tuple[str, ...]:
    """Returns the Auto axes that shard the experts to which examples move, or what the experts computed."""
    if primitive_name(equation) != 'dot_general':
        return ()
    left, right = equation.invars
    i = int(left is not value.var)
    other, (_, batch) = editor.read((right, left)[i]), dot_dims(equation)
    if op.other_dim not in batch[i]:
        return ()
    dims = editor.context.auto.of(other.var)
    return tuple([axis for dim, axes in enumerate(dims) if dim not in batch[1 - i] for axis in axes])


def _summed_axes(editor: EditorBase, value: Value) -> tuple[str, ...]:
    """Returns the Auto axes over which the matmul that computes a value sums."""
    var = value.var
    for _ in range(_MAX_DISTANCE):
        equation = editor.producer_of(editor.read(var))
        if not any(result is var for result in equation.outvars):  # an argument
            return ()
        if primitive_name(equation) == 'dot_general':
            contracted, _ = dot_dims(equation)
            axes = [
                axis
                for operand, dims in zip(equation.invars, contracted, strict=True)
                if (sharding := editor.context.auto.of(operand))
                for dim in dims
                for axis in sharding[dim]
            ]
            return tuple(dict.fromkeys(axes))
        if primitive_name(equation) not in _PRESERVES_SUM or not equation.invars:
            return ()
        var = max(equation.invars, key=lambda atom: math.prod(editor.read(atom).shape))
    return ()
