"""`DimSharding`: the mesh axes that shard each dimension of a value."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from jax.sharding import NamedSharding

from scalax._core.pytree.partition_specs import entries, entry_axes

DimSharding = tuple[tuple[str, ...], ...]
"""For each dimension the mesh axes that shard it, or other labels; `UNSHARDED` if no dimension has any."""

UNSHARDED: DimSharding = ()


def _canonical(dims: Iterable[tuple[str, ...]]) -> DimSharding:
    sharding = tuple(dims)
    return sharding if any(sharding) else UNSHARDED


def of_dims(dims: Mapping[int, tuple[str, ...]], ndim: int) -> DimSharding:
    """Returns the sharding of a value of *ndim* dimensions with these dimensions sharded."""
    return _canonical(dims.get(i, ()) for i in range(ndim))


def of_sharding(sharding: NamedSharding | None, ndim: int) -> DimSharding:
    """Returns the sharding of an array by dimension, without mesh axes of one device."""
    if sharding is None:
        return UNSHARDED
    sizes = sharding.mesh.shape
    dims = [tuple(axis for axis in entry_axes(entry) if sizes[axis] > 1) for entry in entries(sharding.spec)]
    return of_dims(dict(enumerate(dims)), ndim)


def merged(shardings: Iterable[DimSharding], ndim: int) -> DimSharding:
    """Merges shardings: each dimension is sharded as in the first sharding that shards it.

    Shardings of values with another number of dimensions than *ndim* are ignored.
    """
    same_ndim = [sharding for sharding in shardings if len(sharding) == ndim]
    return _canonical(next(filter(None, dims), ()) for dims in zip(*same_ndim, strict=True))


def axes_of(sharding: Iterable[tuple[str, ...]]) -> set[str]:
    """Returns the mesh axes of a sharding, or of some of its dimensions."""
    return {axis for axes in sharding for axis in axes}


def without(sharding: DimSharding, axes: Container[str]) -> DimSharding:
    """Returns a sharding without some mesh axes."""
    return _canonical(tuple([axis for axis in dim if axis not in axes]) for dim in sharding)


def only_along(sharding: DimSharding, axes: frozenset[str]) -> DimSharding:
    """Returns a sharding with only the dimensions that any of some mesh axes shards."""
    return _canonical(dim if axes.intersection(dim) else () for dim in sharding)
