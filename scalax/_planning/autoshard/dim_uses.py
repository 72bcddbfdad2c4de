"""What a step does with the dimensions of its arguments: which are one, and what is multiplied with them."""

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
class ArgumentDimensions:
    """What a jaxpr does with the dimensions of its arguments.

    Attributes:
        classes: dimension -> the number of its class; dimensions of one class meet somewhere.
        stacked: the dimensions that a loop takes one part of in each round.
        multiplied: the arguments that are multiplied, looked up or convolved with; others are only added to,
            or scaled, such as the state of an optimizer.
        experts: the dimensions along which a product has a matrix for each part of the rows.
        ranks: argument -> the number of its dimensions.
    """

    classes: Mapping[OperandDim, int]
    stacked: frozenset[OperandDim]
    multiplied: frozenset[int]
    experts: frozenset[OperandDim]
    ranks: Mapping[int, int]


def dimensions(jaxpr: Any, arguments: Mapping[int, int]) -> ArgumentDimensions:
    """Follows the dimensions of some arguments through a jaxpr.

    Args:
        jaxpr: the jaxpr, open or closed.
        arguments: number of an argument that is no batch -> the number that stands for it in the result. Of
            several for which the same stands, the first decides.
    """
    variables = open_jaxpr(jaxpr).invars
    found = _Uses(jaxpr, BatchDependence(jaxpr, [i not in arguments for i, _ in enumerate(variables)]))
    own = [(name, found.arguments[i]) for i, name in sorted(arguments.items())]
    places = {number: (name, dim) for name, numbers in own for dim, number in enumerate(numbers)}
    roots: dict[OperandDim, int] = {}
    for number, place in places.items():
        roots.setdefault(place, found.union_find.root(number))
    classes = {root: i for i, root in enumerate(dict.fromkeys(roots.values()))}
    return ArgumentDimensions(
        {place: classes[root] for place, root in roots.items()},
        frozenset(places[each] for each in found.stacked & places.keys()),
        frozenset(places[each][0] for each in found.multiplied & places.keys()),
        frozenset(places[each] for each in found.experts & places.keys()),
        {name: len(numbers) for name, numbers in own},
    )


class _Uses(DimClasses):
    """The dimensions of values, and what is done with those that weights have.

    Args:
        jaxpr: as for `DimClasses`.
        from_batch: the variables that depend on the batch; others are weights.

    Attributes:
        stacked: the dimensions that loops run over.
        multiplied: those of weights in products.
        experts: those of weights that products have in common with rows.
    """

    def __init__(self, jaxpr: Any, from_batch: BatchDependence) -> None:
        self._from_batch = from_batch
        self.stacked: set[int] = set()
        self.multiplied: set[int] = set()
        self.experts: set[int] = set()
        super().__init__(jaxpr)

    def record(self, facts: dict[int, DimIds]) -> None:
        """What a function is given in one place is not what it is given in another one."""

    def eval_primitive(self, name: str, equation: Any, operands: Sequence[DimIds]) -> Sequence[DimIds]:
        weights = [
            found if atom not in self._from_batch else ()
            for found, atom in zip(operands, equation.invars, strict=True)
        ]
        if name in CONTRACTIONS or name == 'gather':
            self.multiplied.update(*weights)
        if name == 'dot_general':
            shared = [
                source for sources in dim_rule(equation).results[0] if len(sources) > 1 for source in sources
            ]
            self.experts.update(weights[place][dim] for place, dim in shared if weights[place])
        if name in _SLICES:
            for out in equation.outvars:
                sizes = zip(operands[0], shape_of(equation.invars[0]), shape_of(out), strict=True)
                self.stacked.update(number for number, before, after in sizes if before > after == 1)
        return super().eval_primitive(name, equation, operands)

    def element_of(self, stack: DimIds) -> DimIds:
        self.stacked.update(stack[:1])
        return super().element_of(stack)
