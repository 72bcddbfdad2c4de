"""Scatters whose updates XLA may split unevenly: it takes what is in their padding for updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from scalax._core.pytree.partition_specs import entries, entry_axes
from scalax._jax.equations import scatter_dims, shape_of, shardings_said
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import bound, equation_of
from scalax._jaxpr.dim_classes import Dimensions, Numbers
from scalax._jaxpr.dim_rules import SCATTERS, WINDOWS

_SUMS = frozenset(('scatter-add', 'scatter-sub'))
REDUCING = SCATTERS - {'scatter'}
# Their results have more or fewer elements along a dimension than an operand of the same rank.
_RESIZING = WINDOWS | {'concatenate', 'dynamic_slice', 'dynamic_update_slice', 'pad', 'slice', 'split'}


class _Unevenly(Dimensions):
    """Which dimensions XLA may split unevenly: those of several sizes, and what a constraint splits so.

    Attributes:
        numbers: their numbers, and some of the same class.
        scattered: the id of a scatter -> the numbers of its indices and of its updates, for each of its uses.
    """

    def __init__(self, jaxpr: Any) -> None:
        self.numbers: set[int] = set()
        self.scattered: dict[int, list[Sequence[Numbers]]] = {}
        super().__init__(jaxpr)
        self.numbers = {*map(self.classes.root, self.numbers)}

    def primitive(self, name: str, equation: Any, operands: Sequence[Numbers]) -> Sequence[Numbers]:
        results = super().primitive(name, equation, operands)
        if name in REDUCING:
            self.scattered.setdefault(id(equation), []).append(operands[1:])
        elif name == 'sharding_constraint':
            self._constrained(equation, results[0])
        elif name in _RESIZING:
            self._resized(equation, operands, results)
        return results

    def _constrained(self, equation: Any, numbers: Numbers) -> None:
        sharding, shape = shardings_said(equation)[1].get(0), shape_of(equation.outvars[0])
        if isinstance(sharding, NamedSharding):
            for entry, size, number in zip(entries(sharding.spec), shape, numbers, strict=False):
                if size % math.prod(sharding.mesh.shape[axis] for axis in entry_axes(entry)):
                    self.numbers.add(number)

    def _resized(self, equation: Any, operands: Sequence[Numbers], results: Sequence[Numbers]) -> None:
        for out, behind in zip(equation.outvars, results, strict=True):
            for atom, before in zip(equation.invars, operands, strict=True):
                if len(before) == len(behind):
                    sizes = zip(shape_of(atom), shape_of(out), before, behind, strict=True)
                    # What has one element is not split.
                    resized = [(i, j) for a, b, i, j in sizes if a != b and min(a, b) > 1]
                    self.numbers.update(*resized)

    def has(self, scatter: Any, index: int, update: int) -> bool:
        """Whether one is this dimension of the indices of a scatter, or this one of its updates."""
        uses = self.scattered.get(id(scatter), ())
        numbers = {number for indices, updates in uses for number in (indices[index], updates[update])}
        return not self.numbers.isdisjoint(map(self.classes.root, numbers))


def with_even_updates(jaxpr: Any, mesh: Mesh | AbstractMesh) -> Callable[[Any], Any]:
    """A function of the scatters of a jaxpr, which gives each of them with updates that are split evenly.

    Where XLA splits updates unevenly over some of the mesh axes, but not over all, it takes what is in their
    padding for updates. Arguments are split evenly, and so are all values that have their dimensions. So only
    those dimensions count that some equation makes longer or shorter, as ``tokens[:, :-1]`` does, or that a
    constraint splits unevenly; and of these the ones that the number of devices does not divide.

    Updates that are added up get zeros behind them. XLA has such padding itself, so nothing is sent. Where
    there are fewer than devices, or something else than their sum is taken, they are made whole.

    Args:
        jaxpr: the jaxpr.
        mesh: the mesh, of Auto axes.
    """
    found: list[_Unevenly] = []  # once something is asked, as in few programs
    has_idle_axes = sum(size > 1 for size in mesh.shape.values()) > 1

    def right(scatter: Any) -> Any:
        sizes = shape_of(scatter.invars[2])
        open_dims = [(i, j) for i, j in _dims_of_places(scatter) if sizes[j] > 1 and sizes[j] % mesh.size]
        if not (open_dims and has_idle_axes):
            return scatter
        if not found:
            found.append(_Unevenly(jaxpr))
        dims = [(i, j) for i, j in open_dims if found[0].has(scatter, i, j)]
        return _with_even(scatter, dims, mesh) if dims else scatter

    return right


def _dims_of_places(scatter: Any) -> Iterator[tuple[int, int]]:
    """The dimensions of the indices, and of the updates, along which there are updates of any place."""
    numbers, rank = scatter_dims(scatter), len(shape_of(scatter.invars[2]))
    for i, j in enumerate(j for j in range(rank) if j not in numbers.update_window_dims):
        if i not in numbers.scatter_indices_batching_dims:
            yield i, j


def _with_even(scatter: Any, dims: Sequence[tuple[int, int]], mesh: Mesh | AbstractMesh) -> Any:
    """The scatter, of updates that are longer along these dimensions, or not split."""
    sizes, is_sum = shape_of(scatter.invars[2]), primitive_name(scatter) in _SUMS
    longer = [pair for pair in dims if is_sum and sizes[pair[1]] > mesh.size]
    whole = [pair for pair in dims if pair not in longer]
    # Zeros are added to the same element, whatever was said of the indices.
    promises = {'indices_are_sorted': False, 'unique_indices': False} if longer else {}

    def evenly(x: Any, place: int) -> Any:
        more = {pair[place]: -sizes[pair[1]] % mesh.size for pair in longer}
        if more:
            x = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, more.get(i, 0), 0) for i in range(x.ndim)])
        if whole:
            gathered = {pair[place] for pair in whole}
            spec = [None if i in gathered else PartitionSpec.UNCONSTRAINED for i in range(x.ndim)]
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))
        return x

    def scattered(array: Any, indices: Any, updates: Any) -> Any:
        return bound(scatter, array, evenly(indices, 0), evenly(updates, 1), **promises)

    return equation_of(jax.jit(scattered), scatter)
