"""Which TPU slices are known? Those that the TPU compiler (libtpu 0.0.50) describes."""

from __future__ import annotations

import math

from scalax.errors import did_you_mean

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

# What Google Cloud calls slices: v5p-128 is 128 TensorCores, v6e-64 is 64 chips
# (https://cloud.google.com/tpu/docs/v4, v5e, v5p and v6e): name -> (kind of chip, cores of one that count).
_ACCELERATORS = {'v4': ('v4', 2), 'v5litepod': ('v5e', 1), 'v5p': ('v5p', 2), 'v6e': ('v6e', 1)}


def meant(topology: str) -> str:
    """Which slices somebody may have meant who misspelt one, for a message.

    Example:
        >>> meant('v5p-128')
        "did you mean 'v5p:4x4x4'?"
    """
    name, _, count = topology.partition('-')
    kind, cores = _ACCELERATORS.get(name, ('', 0))
    for known in KNOWN:
        if known.startswith(f'{kind}:') and str(cores * chips(known)) == count:
            return f'did you mean {known!r}?'
    return did_you_mean(topology, KNOWN)


def chips(topology: str) -> int:
    """The chips of a slice.

    Example:
        >>> chips('v5p:4x4x8')
        128
    """
    return math.prod(map(int, topology.partition(':')[2].split('x')))
