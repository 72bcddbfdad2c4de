"""The meshes that a number of devices can form, and constraints on their sizes."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from scalax.errors import ArgumentError, did_you_mean

Sizes = dict[str, int]
Constraints = Mapping[str, int | Collection[int]] | Callable[[Sizes], Any] | None


def possible_meshes(devices: int, names: Sequence[str], constraints: Constraints = None) -> Iterator[Sizes]:
    """All sizes of the mesh axes; the largest of the first axis come first.

    Args:
        devices: the number of devices; all are used.
        names: the mesh axes.
        constraints: mesh axis -> its size, or the sizes that it may have; or a function of the sizes that
            says whether they are wanted.

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
                raise ArgumentError(
                    f'constraints name {name!r}, which is no mesh axis ({did_you_mean(str(name), names)})'
                )
            allowed[name] = _sizes(name, those)
    elif constraints is not None and not callable(constraints):
        raise ArgumentError(
            "constraints are sizes by mesh axis, such as {'tp': [1, 2, 4]}, or a function of the sizes, "
            f'got {constraints!r}'
        )
    for dims in _products(devices, len(names)):
        sizes = dict(zip(names, dims, strict=True))
        wanted = constraints(dict(sizes)) if callable(constraints) else True
        if wanted and all(sizes[name] in few for name, few in allowed.items()):
            yield sizes


def _sizes(name: str, those: Any) -> Collection[int]:
    sizes: Any = (those,) if isinstance(those, numbers.Integral) else those
    if not isinstance(sizes, Collection) or not all(isinstance(size, numbers.Integral) for size in sizes):
        raise ArgumentError(
            f'constraints of {name!r} are a size or several, such as [1, 2, 4], got {those!r}'
        )
    return sizes


def _products(number: int, factors: int) -> Iterator[tuple[int, ...]]:
    if factors == 1:
        yield (number,)
        return
    for first in range(number, 0, -1):
        if number % first == 0:
            for rest in _products(number // first, factors - 1):
                yield first, *rest
