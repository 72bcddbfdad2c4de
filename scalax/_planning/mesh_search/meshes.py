"""The meshes that a number of devices can form, constraints on their sizes, and the helper of one."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from scalax._helper import MeshShardingHelper
from scalax.errors import ArgumentError, did_you_mean

Sizes = dict[str, int]
Constraints = Mapping[str, int | Collection[int]] | Callable[[Sizes], Any] | None


def possible_meshes(
    devices: int, names: Sequence[str], constraints: Constraints = None, option: str = 'constraints'
) -> Iterator[Sizes]:
    """All sizes of the mesh axes; the largest of the first axis come first.

    Args:
        devices: the number of devices; all are used.
        names: the mesh axes.
        constraints: mesh axis -> its size, or the sizes that it may have; or a function of the sizes that
            says whether they are wanted.
        option: what messages call these.

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
        for name, those in constraints.items():
            if name not in names:
                raise ArgumentError(f'{option}: {name!r} is no mesh axis ({did_you_mean(str(name), names)})')
            allowed[name] = _sizes(f'{option} of {name!r}', those)
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
        wanted = constraints(dict(sizes)) if callable(constraints) else True
        if wanted and all(sizes[name] in few for name, few in allowed.items()):
            yield sizes


def _sizes(option: str, those: Any) -> Collection[int]:
    sizes: Any = (those,) if isinstance(those, numbers.Integral) else those
    if not isinstance(sizes, Collection) or not all(isinstance(size, numbers.Integral) for size in sizes):
        raise ArgumentError(f'{option} are a size or several, such as [1, 2, 4], got {those!r}')
    return sizes


def helper_of(sizes: Sizes, devices: Sequence[Any], slices: Mapping[str, int]) -> MeshShardingHelper:
    """The helper of a mesh of these sizes; *slices* are how many there are along mesh axes, if several."""
    dcn = [slices.get(name, 1) for name in sizes] if slices else None
    return MeshShardingHelper(list(sizes.values()), list(sizes), True, dcn_axis_dims=dcn, devices=devices)


def slices_along(sizes: Sizes, count: int, axes: Sequence[str]) -> Sizes:
    """How many of *count* slices there are along each of these axes: as many as divide, the first ones first.

    Example:
        >>> slices_along({'stage': 4, 'data': 2, 'fsdp': 8}, 8, ['stage', 'data'])
        {'stage': 4, 'data': 2}
        >>> slices_along({'stage': 1, 'data': 8, 'fsdp': 8}, 4, ['stage', 'data'])
        {'stage': 1, 'data': 4}
    """
    found = {}
    for axis in axes if count > 1 else ():
        found[axis] = math.gcd(sizes[axis], count)
        count //= found[axis]
    if count > 1 and axes:  # there is no room for them, as the mesh says
        found[axes[-1]] *= count
    return found
