"""Meshes that a number of devices can form, constraints on their sizes, and helpers for them."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from scalax._helper import MeshShardingHelper
from scalax.errors import ArgumentError, did_you_mean

AxisSizes = dict[str, int]
Constraints = Mapping[str, int | Collection[int]] | Callable[[AxisSizes], Any] | None


def possible_meshes(
    devices: int, names: Sequence[str], constraints: Constraints = None, option: str = 'constraints'
) -> Iterator[AxisSizes]:
    """Yields all sizes of the mesh axes, starting with the largest first axis.

    Args:
        devices: the number of devices; every mesh uses all of them.
        names: the mesh axes.
        constraints: mesh axis -> its size, or its possible sizes; or a function of the sizes that returns
            whether to yield them.
        option: the name of the constraints in messages.

    Raises:
        ArgumentError: the constraints name an unknown axis, or are invalid.

    Example:
        >>> [*possible_meshes(8, ['fsdp', 'tp'], {'tp': range(2, 5)})]
        [{'fsdp': 4, 'tp': 2}, {'fsdp': 2, 'tp': 4}]
        >>> [*possible_meshes(4, ['fsdp', 'tp'], lambda sizes: sizes['fsdp'] >= sizes['tp'])]
        [{'fsdp': 4, 'tp': 1}, {'fsdp': 2, 'tp': 2}]
    """
    allowed: dict[str, Collection[int]] = {}
    if isinstance(constraints, Mapping):
        for name, value in constraints.items():
            if name not in names:
                raise ArgumentError(
                    f'{option}: {name!r} is not a mesh axis ({did_you_mean(str(name), names)})'
                )
            allowed[name] = _checked_sizes(f'{option} of {name!r}', value)
    elif constraints is not None and not callable(constraints):
        raise ArgumentError(
            f"{option} are given by mesh axis, such as {{'tp': [1, 2, 4]}}, or as a function of the sizes, "
            f'got {constraints!r}'
        )
    divisors = [size for size in range(devices, 0, -1) if devices % size == 0]
    for dims in itertools.product(divisors, repeat=len(names)):
        if math.prod(dims) != devices:
            continue
        sizes = dict(zip(names, dims, strict=True))
        is_allowed = constraints(dict(sizes)) if callable(constraints) else True
        if is_allowed and all(sizes[name] in allowed_sizes for name, allowed_sizes in allowed.items()):
            yield sizes


def _checked_sizes(option: str, value: Any) -> Collection[int]:
    sizes: Any = (value,) if isinstance(value, numbers.Integral) else value
    if not isinstance(sizes, Collection) or not all(isinstance(size, numbers.Integral) for size in sizes):
        raise ArgumentError(f'{option} have to be a size or several, such as [1, 2, 4], got {value!r}')
    return sizes


def make_helper(sizes: AxisSizes, devices: Sequence[Any], slices: Mapping[str, int]) -> MeshShardingHelper:
    """Returns the helper for a mesh of these sizes; *slices* is mesh axis -> number of slices along it."""
    dcn = [slices.get(name, 1) for name in sizes] if slices else None
    return MeshShardingHelper(list(sizes.values()), list(sizes), True, dcn_axis_dims=dcn, devices=devices)


def slices_along(sizes: AxisSizes, count: int, axes: Sequence[str]) -> AxisSizes:
    """Distributes *count* slices over mesh axes, as many as divide the size of each axis, in their order.

    Example:
        >>> slices_along({'stage': 4, 'data': 2, 'fsdp': 8}, 8, ['stage', 'data'])
        {'stage': 4, 'data': 2}
        >>> slices_along({'stage': 1, 'data': 8, 'fsdp': 8}, 4, ['stage', 'data'])
        {'stage': 1, 'data': 4}
    """
    slices = {}
    for axis in axes if count > 1 else ():
        slices[axis] = math.gcd(sizes[axis], count)
        count //= slices[axis]
    if count > 1 and axes:  # not divisible: making the mesh raises an error that says so
        slices[axes[-1]] *= count
    return slices
