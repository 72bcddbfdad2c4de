"""Uses of the dimensions of arguments: classes of equal dimensions, layer dimensions, expert dimensions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from scalax._jax.equations import open_jaxpr, shape_of
from scalax._jaxpr.batch_dependence import BatchDependence
from scalax._jaxpr.dim_classes import DimClasses, DimIds
from scalax._jaxpr.dim_rules import CONTRACTIONS, OperandDim, dim_rule

_SLICES = frozenset({'slice', 'dynamic_slice', 'split'})


@dataclasses.dataclass(frozen=True)
class DimUses:
    """The uses of the dimensions of the arguments of a jaxpr.

    Attributes:
        classes: dimension -> its class. Dimensions in one class are equal somewhere in the jaxpr.
        layer_dims: the dimensions of stacked layers: a loop takes one slice in each iteration.
        weights: the arguments that are operands of matmuls, convolutions or look-ups. Other arguments, such
            as the state of an optimizer, are only added to or scaled.
        expert_dims: the dimensions that are batch dimensions of a matmul of weights with activations.
        ranks: argument -> its rank.
    """

    classes: Mapping[OperandDim, int]
    layer_dims: frozenset[OperandDim]
    weights: frozenset[int]
    expert_dims: frozenset[OperandDim]
    ranks: Mapping[int, int]


def analyze_dim_uses(jaxpr: Any, arguments: Mapping[int, int]) -> DimUses:
    """Follows the dimensions of some arguments through a jaxpr.

    Args:
        jaxpr: the jaxpr, open or closed.
        arguments: index of an argument that is not a batch -> its index in the result. If several have the
            same index, the first one determines the result.
    """
    variables = open_jaxpr(jaxpr).invars
    from_batch = BatchDependence(jaxpr, [i not in arguments for i, _ in enumerate(variables)])
    analysis = _DimUseAnalysis(jaxpr, from_batch)
    dim_ids = [(name, analysis.arguments[i]) for i, name in sorted(arguments.items())]
    dim_of = {dim_id: (name, dim) for name, ids in dim_ids for dim, dim_id in enumerate(ids)}
    roots: dict[OperandDim, int] = {}
    for dim_id, operand_dim in dim_of.items():
        roots.setdefault(operand_dim, analysis.union_find.root(dim_id))
    classes = {root: i for i, root in enumerate(dict.fromkeys(roots.values()))}
    return DimUses(
        {operand_dim: classes[root] for operand_dim, root in roots.items()},
        frozenset(dim_of[dim_id] for dim_id in analysis.layer_dims & dim_of.keys()),
        frozenset(dim_of[dim_id][0] for dim_id in analysis.weight_dims & dim_of.keys()),
        frozenset(dim_of[dim_id] for dim_id in analysis.expert_dims & dim_of.keys()),
        {name: len(ids) for name, ids in dim_ids},
    )


class _DimUseAnalysis(DimClasses):
    """The dimensions of values, and the uses of the dimensions of weights.

    Args:
        jaxpr: as for `DimClasses`.
        from_batch: the variables that depend on the batch; others are weights.

    Attributes:
        layer_dims: the dimensions that loops run over.
        weight_dims: the dimensions of weights in matmuls, convolutions and look-ups.
        expert_dims: the batch dimensions of weights in matmuls.
    """

    def __init__(self, jaxpr: Any, from_batch: BatchDependence) -> None:
        self._from_batch = from_batch
        self.layer_dims: set[int] = set()
        self.weight_dims: set[int] = set()
        self.expert_dims: set[int] = set()
        super().__init__(jaxpr)

    def record(self, facts: dict[int, DimIds]) -> None:
        """Records nothing: a cached inner jaxpr has other arguments at each call site."""

    def eval_primitive(self, name: str, equation: Any, operands: Sequence[DimIds]) -> Sequence[DimIds]:
        weights = [
            dim_ids if atom not in self._from_batch else ()
            for dim_ids, atom in zip(operands, equation.invars, strict=True)
        ]
        if name in CONTRACTIONS or name == 'gather':
            self.weight_dims.update(*weights)
        if name == 'dot_general':
            batch_dims = (sources for sources in dim_rule(equation).results[0] if len(sources) > 1)
            self.expert_dims.update(
                weights[operand][dim]
                for sources in batch_dims
                for operand, dim in sources
                if weights[operand]
            )
        if name in _SLICES:
            for out in equation.outvars:
                sizes = zip(operands[0], shape_of(equation.invars[0]), shape_of(out), strict=True)
                self.layer_dims.update(dim_id for dim_id, before, after in sizes if before > after == 1)
        return super().eval_primitive(name, equation, operands)

    def element_of(self, stack: DimIds) -> DimIds:
        self.layer_dims.update(stack[:1])
        return super().element_of(stack)
