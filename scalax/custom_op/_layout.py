"""The mesh axes of each factor in one call, and the context from which the user's function reads them."""

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
"""Factor -> mesh axes, of the factors that are sharded."""


@dataclasses.dataclass(frozen=True)
class FactorLayout:
    """The mesh axes of the factors in one call.

    Attributes:
        factor_map: the factors of the operands and the results.
        axes: the mesh axes of each factor that is sharded, the outermost first.
        sizes: the sizes of the mesh axes.
    """

    factor_map: FactorMap
    axes: Axes
    sizes: Mapping[str, int]

    @classmethod
    def of_specs(
        cls, factor_map: FactorMap, specs: Sequence[PartitionSpec], sizes: Mapping[str, int]
    ) -> FactorLayout:
        """The layout that moves least.

        Args:
            factor_map: the factors.
            specs: the specs of the operands, and then those wanted for the results.
            sizes: the sizes of the mesh axes that count; others are left alone.

        Where arrays disagree the largest operand counts, then the next; results come last.
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
        """The spec of an array with these factors."""
        return canonical(PartitionSpec(*[self.axes.get(factor, ()) if factor else () for factor in factors]))


class FactorContext:
    """The first argument of the function of a `sharded_op`.

    Every method takes the name of a factor, or several names in a tuple. Where a factor is not sharded, as on
    one device, there is one block: collectives then return what they are given.
    """

    def __init__(
        self,
        factors: tuple[str, ...],
        axes: Mapping[str, tuple[str, ...]],
        sizes: Mapping[str, int],
        typed: bool = False,
    ) -> None:
        """Made by scalax.

        Args:
            factors: all names.
            axes: the mesh axes of the factors that are sharded.
            sizes: the sizes of mesh axes.
            typed: whether JAX tracks which values differ between devices.
        """
        self._factors, self._axes, self._sizes, self._typed = factors, axes, sizes, typed
        self._combined: set[str] = set()

    @property
    def combined(self) -> frozenset[str]:
        """The factors along which the function has communicated so far."""
        return frozenset(self._combined)

    def axis_names(self, factor: str | tuple[str, ...]) -> tuple[str, ...]:
        """The mesh axes that a factor is sharded over, the outermost first; none if it is unsharded."""
        names = (factor,) if isinstance(factor, str) else tuple(factor)
        for name in names:
            if name not in self._factors:
                raise RuleError(f'ctx: the rule has no factor {name!r} ({did_you_mean(name, self._factors)})')
        return tuple(axis for name in names for axis in self._axes.get(name, ()))

    def size(self, factor: str | tuple[str, ...]) -> int:
        """The number of blocks along a factor."""
        return math.prod(self._sizes[axis] for axis in self.axis_names(factor))

    def index(self, factor: str | tuple[str, ...]) -> jax.Array:
        """Which block along a factor this device has: an int32 scalar, 0 for the first."""
        axes = self.axis_names(factor)
        return jax.lax.axis_index(axes) if axes else jnp.zeros((), jnp.int32)

    def psum(self, x: Any, factor: str | tuple[str, ...]) -> Any:
        """The sum over the blocks of a factor, of every leaf of *x*."""
        axes = self._communicates(factor)
        return jax.lax.psum(x, axes) if axes else x

    def pmax(self, x: Any, factor: str | tuple[str, ...]) -> Any:
        """The maximum over the blocks of a factor, of every leaf of *x*."""
        axes = self._communicates(factor)
        return jax.lax.pmax(x, axes) if axes else x

    def pmin(self, x: Any, factor: str | tuple[str, ...]) -> Any:
        """The minimum over the blocks of a factor, of every leaf of *x*."""
        axes = self._communicates(factor)
        return jax.lax.pmin(x, axes) if axes else x

    def all_gather(self, x: Any, factor: str | tuple[str, ...], *, axis: int = 0, tiled: bool = False) -> Any:
        """The values of all blocks of a factor, as ``jax.lax.all_gather``.

        Args:
            x: arrays.
            factor: the factor.
            axis: the dimension along which they are put together.
            tiled: whether that is a dimension that *x* has; by default it is a new one.
        """
        axes = self._communicates(factor)
        if not axes:
            return x if tiled else jax.tree.map(lambda leaf: jnp.expand_dims(leaf, axis), x)
        # Without types of blocks the two are the same.
        to = 'invarying' if self._typed else 'varying'
        return jax.lax.all_gather(x, axes, axis=axis, tiled=tiled, to=to)

    def all_to_all(
        self, x: Any, factor: str | tuple[str, ...], split_axis: int, concat_axis: int, *, tiled: bool = False
    ) -> Any:
        """Sends a part of *x* to each block of a factor, as ``jax.lax.all_to_all``."""
        axes = self._communicates(factor)
        if axes:
            return jax.lax.all_to_all(x, axes, split_axis, concat_axis, tiled=tiled)
        return x if tiled else jax.tree.map(lambda leaf: jnp.moveaxis(leaf, split_axis, concat_axis), x)

    def _communicates(self, factor: str | tuple[str, ...]) -> tuple[str, ...]:
        axes = self.axis_names(factor)
        self._combined.update((factor,) if isinstance(factor, str) else factor)
        return axes
