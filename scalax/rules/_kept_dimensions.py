"""Which dimensions of a parameter does a statistic of it keep? Pure: two shapes and a name."""

from __future__ import annotations

import itertools

import numpy as np

Dimensions = tuple[int | None, ...]
"""For each dimension of a statistic the parameter's dimension that it is; None for one of its own."""


def kept_dimensions(
    parameter: tuple[int, ...], shape: tuple[int, ...], name: str = '', loose: bool = False
) -> list[Dimensions]:
    """All ways to read *shape* as dimensions of the parameter; empty where there is none.

    Args:
        parameter: the parameter's shape.
        shape: the statistic's shape.
        name: ``'v_row'`` or ``'v_col'`` for the factors of Adafactor as optax calls them: these leave out
            the largest and the second largest dimension.
        loose: at the same rank some sizes may differ, as those of a low-rank factor or of block scales.

    Example:
        >>> kept_dimensions((4, 6), (6,))
        [(1,)]
        >>> kept_dimensions((4, 4), (4,))
        [(0,), (1,)]
        >>> kept_dimensions((4, 4), (4,), 'v_row')
        [(0,)]
        >>> kept_dimensions((4, 6), (1, 6)), kept_dimensions((4, 6), (3, 4, 6))
        ([(None, 1)], [(None, 0, 1)])
        >>> kept_dimensions((4, 6), (4, 2)), kept_dimensions((4, 6), (4, 2), loose=True)
        ([], [(0, None)])
    """
    extra = len(shape) - len(parameter)
    if extra > 0:
        return [(*[None] * extra, *range(len(parameter)))] if shape[extra:] == parameter else []
    if name in ('v_row', 'v_col') and extra == -1 and len(parameter) > 1:
        # The sort of optax's _factored_dims: which of two equal sizes comes last is up to numpy.
        second, largest = map(int, np.argsort(parameter)[-2:])
        gone = largest if name == 'v_row' else second
        dims = tuple(dim for dim in range(len(parameter)) if dim != gone)
        if shape == tuple(parameter[dim] for dim in dims):
            return [dims]
    found: list[Dimensions] = []
    for dims in itertools.combinations(range(len(parameter)), len(shape)):
        pairs = list(zip(shape, dims, strict=True))
        if all(size in (1, parameter[dim]) for size, dim in pairs):
            found.append(tuple(dim if size == parameter[dim] else None for size, dim in pairs))
    if not found and loose and extra == 0:
        pairs = list(zip(shape, range(len(shape)), strict=True))
        if any(size == parameter[dim] > 1 for size, dim in pairs):
            found.append(tuple(dim if size == parameter[dim] else None for size, dim in pairs))
    return found
