"""Which TPU slices are known? Those that the TPU compiler (libtpu 0.0.50) describes."""

from __future__ import annotations

import math

_FLAT = '1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16'
_CUBES = '2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16'
SIZES = {
    'v4': _CUBES,
    'v5e': _FLAT,
    'v5p': f'{_CUBES} 16x16x24 16x20x28',
    'v6e': _FLAT,
    'tpu7x': _CUBES,
}
"""Kind of chip -> the slices of it."""

KNOWN = tuple(f'{name}:{size}' for name, sizes in SIZES.items() for size in sizes.split())
"""The names of slices; others whose sides are as even serve as well."""


def chips(topology: str) -> int:
    """The chips of a slice.

    Example:
        >>> chips('v5p:4x4x8')
        128
    """
    return math.prod(map(int, topology.partition(':')[2].split('x')))
