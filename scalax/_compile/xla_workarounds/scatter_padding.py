"""Scatters whose updates XLA may shard unevenly: XLA would apply the padding of the updates as updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from scalax._core.pytree.partition_specs import entries, entry_axes
from scalax._jax.equations import scatter_dims, shape_of, sharding_params
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import rebind, trace_equation
from scalax._jaxpr.dim_classes import DimClasses, DimIds
from scalax._jaxpr.dim_rules import SCATTERS, WINDOW_REDUCTIONS

_SUMS = frozenset(('scatter-add', 'scatter-sub'))
REDUCING = SCATTERS - {'scatter'}
# Their results have more or fewer elements along a dimension than an operand of the same rank.
_RESIZING = WINDOW_REDUCTIONS | {
    'concatenate',
    'dynamic_slice',
    'dynamic_update_slice',
    'pad',
    'slice',
    'split',
}


class _UnevenDims(DimClasses):
    """The dimensions that XLA may shard unevenly: dimensions that are resized or constrained unevenly.

    Attributes:
        uneven: the roots of the classes of these dimensions.
        scatters: the id of a scatter -> the dimensions of its indices and of its updates, for each use.
    """

    def __init__(self, jaxpr: Any) -> None:
        self.uneven: set[int] = set()
        self.scatters: dict[int, list[Sequence[DimIds]]] = {}
        super().__init__(jaxpr)
        self.uneven = {*map(self.union_find.root, self.uneven)}

    def eval_primitive(self, name: str, equation: Any, operands: Sequence[DimIds]) -> Sequence[DimIds]:
        results = super().eval_primitive(name, equation, operands)
        if name in REDUCING:
            self.scatters.setdefault(id(equation), []).append(operands[1:])
        elif name == 'sharding_constraint':
            self._add_constrained(equation, results[0])
        elif name in _RESIZING:
            self._add_resized(equation, operands, results)
        return results

    def _add_constrained(self, equation: Any, dims: DimIds) -> None:
        """Adds the dimensions that a constraint shards unevenly."""
        sharding, shape = sharding_params(equation)[1].get(0), shape_of(equation.outvars[0])
        if isinstance(sharding, NamedSharding):
            for entry, size, dim in zip(entries(sharding.spec), shape, dims, strict=False):
                if size % math.prod(sharding.mesh.shape[axis] for axis in entry_axes(entry)):
                    self.uneven.add(dim)

    def _add_resized(self, equation: Any, operands: Sequence[DimIds], results: Sequence[DimIds]) -> None:
        """Adds the dimensions along which the results are longer or shorter than the operands."""
        for outvar, result in zip(equation.outvars, results, strict=True):
            for invar, operand in zip(equation.invars, operands, strict=True):
                if len(operand) == len(result):
                    sizes = zip(shape_of(invar), shape_of(outvar), operand, result, strict=True)
                    # XLA does not shard a dimension of one element.
                    pairs = [
                        (i, j) for before, after, i, j in sizes if before != after and min(before, after) > 1
                    ]
                    self.uneven.update(*pairs)

    def has(self, scatter: Any, index_dim: int, update_dim: int) -> bool:
        """Whether this dimension of a scatter's indices, or this dimension of its updates, is uneven."""
        uses = self.scatters.get(id(scatter), ())
        dims = {dim for indices, updates in uses for dim in (indices[index_dim], updates[update_dim])}
        return not self.uneven.isdisjoint(map(self.union_find.root, dims))


def scatter_padding(jaxpr: Any, mesh: Mesh | AbstractMesh) -> Callable[[Any], Any]:
    """Returns a function that replaces a scatter of a jaxpr by a scatter whose updates are sharded evenly.

    XLA is wrong where it shards updates unevenly over some, but not all, of the mesh axes: it applies the
    padding as updates. Arguments are sharded evenly, and so are all values that share their dimensions. So
    only two kinds of dimension count: a dimension that some equation makes longer or shorter, as
    ``tokens[:, :-1]`` does, and a dimension that a constraint shards unevenly. Of these, only the dimensions
    count that the number of devices does not divide.

    For sums, zeros are appended to the updates. XLA would add such padding itself, so nothing is sent. If
    there are fewer updates than devices, or the scatter is not a sum, the updates are replicated.

    Args:
        jaxpr: the jaxpr.
        mesh: the mesh, of Auto axes.
    """
    analyses: list[_UnevenDims] = []  # computed at the first use: few programs need it
    has_idle_axes = sum(size > 1 for size in mesh.shape.values()) > 1

    def replace(scatter: Any) -> Any:
        sizes = shape_of(scatter.invars[2])
        candidates = [(i, j) for i, j in _batch_dims(scatter) if sizes[j] > 1 and sizes[j] % mesh.size]
        if not (candidates and has_idle_axes):
            return scatter
        if not analyses:
            analyses.append(_UnevenDims(jaxpr))
        dims = [(i, j) for i, j in candidates if analyses[0].has(scatter, i, j)]
        return _with_even_updates(scatter, dims, mesh) if dims else scatter

    return replace


def _batch_dims(scatter: Any) -> Iterator[tuple[int, int]]:
    """The pairs (dimension of the indices, dimension of the updates) that enumerate the updates."""
    dims, rank = scatter_dims(scatter), len(shape_of(scatter.invars[2]))
    for i, j in enumerate(j for j in range(rank) if j not in dims.update_window_dims):
        if i not in dims.scatter_indices_batching_dims:
            yield i, j


def _with_even_updates(scatter: Any, dims: Sequence[tuple[int, int]], mesh: Mesh | AbstractMesh) -> Any:
    """Returns a scatter whose updates are padded along these dimensions, or not sharded along them."""
    sizes, is_sum = shape_of(scatter.invars[2]), primitive_name(scatter) in _SUMS
    padded = [pair for pair in dims if is_sum and sizes[pair[1]] > mesh.size]
    unsharded = [pair for pair in dims if pair not in padded]
    # All zeros are added to the same element, so the indices are neither sorted nor unique.
    index_hints = {'indices_are_sorted': False, 'unique_indices': False} if padded else {}

    def make_even(array: Any, position: int) -> Any:
        """Pads or gathers the indices (position 0 of each pair of dimensions) or the updates (position 1)."""
        padding = {pair[position]: -sizes[pair[1]] % mesh.size for pair in padded}
        if padding:
            zero = jnp.zeros((), array.dtype)
            array = jax.lax.pad(array, zero, [(0, padding.get(i, 0), 0) for i in range(array.ndim)])
        if unsharded:
            gathered = {pair[position] for pair in unsharded}
            spec = [None if i in gathered else PartitionSpec.UNCONSTRAINED for i in range(array.ndim)]
            array = jax.lax.with_sharding_constraint(array, NamedSharding(mesh, PartitionSpec(*spec)))
        return array

    def scatter_evenly(array: Any, indices: Any, updates: Any) -> Any:
        return rebind(scatter, array, make_even(indices, 0), make_even(updates, 1), **index_hints)

    return trace_equation(jax.jit(scatter_evenly), scatter)
