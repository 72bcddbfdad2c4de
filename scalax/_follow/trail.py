"""The trail of a value: the mesh axes that shard each of its dimensions, those of the batch and others."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from scalax._jax.equations import size_of
from scalax._jaxprs.dims import Dims, dims_of
from scalax._tree.paths import bits_of
from scalax._tree.specs import entries, entry_axes

Trail = tuple[tuple[str, ...], ...]
"""For each dimension the mesh axes that shard it; one empty tuple if no dimension is followed."""

LOST: Trail = ()
LOSTS = itertools.repeat(LOST)
"""For ``map(trails.get, map(id, variables), LOSTS)``: lost, where a dictionary has none."""


class Trails:
    """What is asked of trails over one mesh. Thousands of equations have a few, so answers are kept.

    Args:
        sizes: the sizes of the mesh axes.
        batch_axes: those that shard rows.

    Attributes:
        has_rows: tells whether some dimension of a trail holds rows of the batch.
        possible: the function of this name, of a trail and a shape.
        merged: the function of this name, of a tuple of trails and a number of dimensions.
        dims: `dims_of`.
    """

    def __init__(self, sizes: Mapping[str, int], batch_axes: frozenset[str]) -> None:
        self.sizes, self.batch_axes = sizes, batch_axes
        self.has_rows: Callable[[Trail], bool] = functools.cache(lambda trail: bool(along(trail, batch_axes)))
        within = functools.partial(possible, sizes=sizes)
        self.possible: Callable[[Trail, tuple[int, ...]], Trail] = functools.cache(within)
        self.merged: Callable[[tuple[Trail, ...], int], Trail] = functools.cache(merged)
        self.dims: Callable[[Any], Dims] = functools.cache(dims_of)
        self._through = functools.cache(Dims.through)

    def shards(self, axes: Iterable[str]) -> int:
        """In how many parts these mesh axes shard something."""
        return math.prod(self.sizes[axis] for axis in axes)

    def bytes_of(self, atom: Any, axes: Iterable[str]) -> float:
        """The bytes that a device has of a value that these mesh axes shard."""
        return size_of(atom) * bits_of(atom.aval.dtype) / 8 / self.shards(axes)

    def through(self, equation: Any, operands: Sequence[Trail]) -> Sequence[Trail]:
        """The trails of the results of an equation whose `dims` are known."""
        return self._through(self.dims(equation), tuple(operands))


def _or_lost(dims: Iterable[tuple[str, ...]]) -> Trail:
    trail = tuple(dims)
    return trail if any(trail) else LOST


def of_dims(dims: Mapping[int, tuple[str, ...]], ndim: int) -> Trail:
    """The trail with these dimensions."""
    return _or_lost(dims.get(i, ()) for i in range(ndim))


def merged(trails: Iterable[Trail], ndim: int) -> Trail:
    """The trail of a value of *ndim* dimensions that lies as each of several does: the first one decides."""
    fitting = [trail for trail in trails if len(trail) == ndim]
    return _or_lost(next(filter(None, each), ()) for each in zip(*fitting, strict=True))


def possible(trail: Trail, shape: Sequence[int], sizes: Mapping[str, int]) -> Trail:
    """The part of a trail that a value of this shape can have.

    A mesh axis shards one dimension, the first one; dimensions are sharded evenly, and empty ones are not.
    """
    used: set[str] = set()
    found = []
    for axes, size in zip(trail, shape, strict=bool(trail)):
        if not size or used.intersection(axes) or size % math.prod(sizes[axis] for axis in axes):
            axes = ()
        used.update(axes)
        found.append(axes)
    return _or_lost(found)


def common(mine: Trail, theirs: Trail) -> Trail:
    """The dimensions that have the same axes in two trails."""
    return _or_lost(a if a == b else () for a, b in zip(mine, theirs, strict=bool(mine and theirs)))


def of_sharding(sharding: NamedSharding | None, ndim: int) -> Trail:
    """The trail of an array with a sharding; a mesh axis of one device is nothing to follow."""
    if sharding is None:
        return LOST
    sizes = sharding.mesh.shape
    found = [tuple(axis for axis in entry_axes(entry) if sizes[axis] > 1) for entry in entries(sharding.spec)]
    return of_dims(dict(enumerate(found)), ndim)


def axes_of(trail: Iterable[tuple[str, ...]]) -> set[str]:
    """The mesh axes of a trail, or of some of its dimensions."""
    return {axis for axes in trail for axis in axes}


def without(trail: Trail, axes: Container[str]) -> Trail:
    """A trail along other mesh axes than these."""
    return _or_lost(tuple([axis for axis in each if axis not in axes]) for each in trail)


def put(trail: Trail, dim: int, axes: tuple[str, ...]) -> Trail:
    """A trail with these axes in one dimension."""
    return (*trail[:dim], axes, *trail[dim + 1 :])


def element_of(stack: Trail) -> Trail:
    """The trail of one element of a stack."""
    return _or_lost(stack[1:])


def stack_of(element: Trail) -> Trail:
    """The trail of a stack of such elements."""
    return ((), *element) if element else LOST


def along(trail: Trail, axes: frozenset[str]) -> Trail:
    """The dimensions of a trail that some of these mesh axes shard, also with others."""
    return _or_lost(each if axes.intersection(each) else () for each in trail)


def spec_of(trail: Trail, whole: Container[int] = ()) -> PartitionSpec:
    """The spec that keeps the followed dimensions where they are.

    Args:
        trail: the trail.
        whole: the dimensions that are not sharded if nothing is followed in them. What else there is, is left
            to the compiler.
    """
    return PartitionSpec(
        *[
            axes[0] if len(axes) == 1 else axes or (None if i in whole else PartitionSpec.UNCONSTRAINED)
            for i, axes in enumerate(trail)
        ]
    )


def closed_spec_of(trail: Trail, ndim: int) -> PartitionSpec:
    """The spec of a trail whose other dimensions are whole."""
    return spec_of(trail or ((),) * ndim, range(ndim))
