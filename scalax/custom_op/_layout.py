"""Which mesh axes does each factor get? One answer for all operands and results of a call."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

from scalax._tree.specs import canonical, entries, entry_axes
from scalax.custom_op._fit import Factors, Fit

Axes = Mapping[str, tuple[str, ...]]
"""Factor -> mesh axes, of the factors that are sharded."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the factors of one call lie on a mesh.

    Attributes:
        fit: the factors of the operands and the results.
        axes: the mesh axes of each factor that is sharded, the outermost first.
        sizes: the sizes of the mesh axes.
    """

    fit: Fit
    axes: Axes
    sizes: Mapping[str, int]

    @classmethod
    def of_specs(cls, fit: Fit, specs: Sequence[PartitionSpec], sizes: Mapping[str, int]) -> Layout:
        """The layout that asks for the least moving.

        Args:
            fit: the factors.
            specs: how the operands lie, and then how the results are wanted.
            sizes: the sizes of the mesh axes that count; others are left alone.

        Where arrays disagree the largest operand counts, then the next; results come last.
        """
        arrays = [*fit.operands, *fit.results]
        order = sorted(range(len(fit.operands)), key=lambda i: -_elements(fit, fit.operands[i]))
        order += range(len(fit.operands), len(specs))
        axes: dict[str, tuple[str, ...]] = {}
        used: set[str] = set()
        for i in order:
            for factor, entry in zip(arrays[i], entries(specs[i]), strict=False):
                if factor is None or factor in fit.whole or factor in axes:
                    continue
                names = [axis for axis in entry_axes(entry) if axis in sizes and axis not in used]
                while names and fit.sizes[factor] % math.prod(sizes[axis] for axis in names):
                    names.pop()
                if names:
                    axes[factor] = tuple(names)
                    used.update(names)
        return cls(fit, axes, sizes)

    def spec(self, factors: Factors) -> PartitionSpec:
        """The spec of an array with these factors."""
        return canonical(PartitionSpec(*[self.axes.get(factor, ()) if factor else () for factor in factors]))

    def block(self, factors: Factors, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a block of an array."""
        return tuple(
            size // math.prod(self.sizes[axis] for axis in self.axes.get(factor or '', ()))
            for factor, size in zip(factors, shape, strict=True)
        )


def _elements(fit: Fit, factors: Factors) -> int:
    return math.prod(fit.sizes[factor] for factor in factors if factor is not None)
