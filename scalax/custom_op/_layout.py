"""The layout of one call, from factors to mesh axes, and the context that the user's function receives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from scalax._core.pytree.partition_specs import canonical, entries, entry_axes
from scalax.custom_op._rule import FactorMap, Factors
from scalax.errors import RuleError, did_you_mean

Axes = Mapping[str, tuple[str, ...]]
"""Sharded factor -> its mesh axes."""


@dataclasses.dataclass(frozen=True)
class FactorLayout:
    """The mesh axes of the factors in one call.

    Attributes:
        factor_map: the factors of the operands and the results.
        axes: the mesh axes of each sharded factor, the outermost first.
        sizes: the sizes of the mesh axes.
    """

    factor_map: FactorMap
    axes: Axes
    sizes: Mapping[str, int]

    @classmethod
    def from_specs(
        cls, factor_map: FactorMap, specs: Sequence[PartitionSpec], sizes: Mapping[str, int]
    ) -> FactorLayout:
        """Chooses a layout that moves little data.

        If arrays disagree, the largest operand takes precedence, then the next largest; results come last.

        Args:
            factor_map: the factors.
            specs: the specs of the operands, followed by the requested specs of the results.
            sizes: the sizes of the mesh axes to use; others are ignored.
        """
        arrays = [*factor_map.operands, *factor_map.results]
        elements = [
            math.prod(factor_map.sizes[factor] for factor in factors if factor is not None)
            for factors in factor_map.operands
        ]
        order = sorted(range(len(elements)), key=lambda i: -elements[i])
        order += range(len(elements), len(specs))
        axes: dict[str, tuple[str, ...]] = {}
        used: set[str] = set()
        for i in order:
            for factor, entry in zip(arrays[i], entries(specs[i]), strict=False):
                if factor is None or factor in factor_map.replicated or factor in axes:
                    continue
                names = [axis for axis in entry_axes(entry) if axis in sizes and axis not in used]
                while names and factor_map.sizes[factor] % math.prod(sizes[axis] for axis in names):
                    names.pop()
                if names:
                    axes[factor] = tuple(names)
                    used.update(names)
        return cls(factor_map, axes, sizes)

    def spec(self, factors: Factors) -> PartitionSpec:
        """Returns the spec of an array with these factors."""
        return canonical(PartitionSpec(*[self.axes.get(factor, ()) if factor else () for factor in factors]))


class FactorContext:
    """The first argument of the function of a `sharded_op`: collectives over factors.

    Every method takes the name of a factor, or several names in a tuple. An unsharded factor, as on one
    device, has one block, and collectives then return their argument.
    """

    def __init__(
        self,
        factors: tuple[str, ...],
        axes: Mapping[str, tuple[str, ...]],
        sizes: Mapping[str, int],
        check_vma: bool = False,
    ) -> None:
        """Created by scalax.

        Args:
            factors: the names of all factors.
            axes: the mesh axes of the sharded factors.
            sizes: the sizes of the mesh axes.
            check_vma: whether JAX tracks which values vary over mesh axes.
        """
        self._factors, self._axes, self._sizes, self._check_vma = factors, axes, sizes, check_vma
        self._combined: set[str] = set()

    @property
    def combined(self) -> frozenset[str]:
        """The factors that the function has called collectives over so far."""
        return frozenset(self._combined)

    def axis_names(self, factor: str | tuple[str, ...]) -> tuple[str, ...]:
        """Returns the mesh axes that shard a factor, the outermost first; none if it is unsharded."""
        names = (factor,) if isinstance(factor, str) else tuple(factor)
        for name in names:
            if name not in self._factors:
                raise RuleError(f'ctx: the rule has no factor {name!r} ({did_you_mean(name, self._factors)})')
        return tuple(axis for name in names for axis in self._axes.get(name, ()))

    def size(self, factor: str | tuple[str, ...]) -> int:
        """Returns the number of blocks along a factor."""
        return math.prod(self._sizes[axis] for axis in self.axis_names(factor))

    def index(self, factor: str | tuple[str, ...]) -> jax.Array:
        """Returns the index of this device's block along a factor, as an int32 scalar."""
        axes = self.axis_names(factor)
        return jax.lax.axis_index(axes) if axes else jnp.zeros((), jnp.int32)

    def psum(self, x: Any, factor: str | tuple[str, ...]) -> Any:
        """Sums every leaf of *x* over the blocks of a factor."""
        axes = self._axes_to_combine(factor)
        return jax.lax.psum(x, axes) if axes else x

    def pmax(self, x: Any, factor: str | tuple[str, ...]) -> Any:
        """Returns the maximum of every leaf of *x* over the blocks of a factor."""
        axes = self._axes_to_combine(factor)
        return jax.lax.pmax(x, axes) if axes else x

    def pmin(self, x: Any, factor: str | tuple[str, ...]) -> Any:
        """Returns the minimum of every leaf of *x* over the blocks of a factor."""
        axes = self._axes_to_combine(factor)
        return jax.lax.pmin(x, axes) if axes else x

    def all_gather(self, x: Any, factor: str | tuple[str, ...], *, axis: int = 0, tiled: bool = False) -> Any:
        """Gathers *x* from all blocks of a factor, as ``jax.lax.all_gather`` does.

        Args:
            x: arrays.
            factor: the factor.
            axis: the dimension to gather along.
            tiled: whether to concatenate along a dimension of *x*; by default the dimension is a new one.
        """
        axes = self._axes_to_combine(factor)
        if not axes:
            return x if tiled else jax.tree.map(lambda leaf: jnp.expand_dims(leaf, axis), x)
        # With check_vma=False the two are equivalent.
        to = 'invarying' if self._check_vma else 'varying'
        return jax.lax.all_gather(x, axes, axis=axis, tiled=tiled, to=to)

    def all_to_all(
        self, x: Any, factor: str | tuple[str, ...], split_axis: int, concat_axis: int, *, tiled: bool = False
    ) -> Any:
        """Sends a part of *x* to each block of a factor, as ``jax.lax.all_to_all`` does."""
        axes = self._axes_to_combine(factor)
        if axes:
            return jax.lax.all_to_all(x, axes, split_axis, concat_axis, tiled=tiled)
        return x if tiled else jax.tree.map(lambda leaf: jnp.moveaxis(leaf, split_axis, concat_axis), x)

    def _axes_to_combine(self, factor: str | tuple[str, ...]) -> tuple[str, ...]:
        """Returns the mesh axes of a factor, and records it as combined."""
        axes = self.axis_names(factor)
        self._combined.update((factor,) if isinstance(factor, str) else factor)
        return axes
