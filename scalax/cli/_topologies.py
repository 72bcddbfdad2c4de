"""Which TPU slices are known? Those that the TPU compiler (libtpu 0.0.50) describes."""

from __future__ import annotations

import math

from scalax.explain._text import human_bytes
from scalax.plan import HARDWARE, Hardware

_FLAT = '1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16'
_CUBES = '2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16'
_SIZES = {
    'v4': _CUBES,
    'v5e': _FLAT,
    'v5p': f'{_CUBES} 16x16x24 16x20x28',
    'v6e': _FLAT,
    'tpu7x': _CUBES,
}

KNOWN = tuple(f'{name}:{size}' for name, sizes in _SIZES.items() for size in sizes.split())
"""The names of slices; others whose sides are as even serve as well."""


def chips(topology: str) -> int:
    """The chips of a slice.

    Example:
        >>> chips('v5p:4x4x8')
        128
    """
    return math.prod(map(int, topology.partition(':')[2].split('x')))


def table() -> str:
    """The kinds of chips with their numbers, and the slices of each."""
    lines = []
    for name, sizes in _SIZES.items():
        chip = HARDWARE[name]
        listed = '  '.join(sizes.split())
        lines += [f'{name:<6} {_numbers(chip)}', f'       {listed}']
    return '\n'.join(
        [
            'TPU slices, as --topology NAME:SIZE takes them:',
            '',
            *lines,
            '',
            'The chips of a slice are the product of its size; of several slices, times --slices.',
            'Sources: scalax.plan.HARDWARE[name].sources',
        ]
    )


def _numbers(chip: Hardware) -> str:
    devices = chip.devices_per_chip or 1
    memory = 'not known' if chip.hbm_bytes is None else human_bytes(chip.hbm_bytes)
    flops = (chip.flops_per_second or 0) / devices
    of_chip = '' if devices == 1 else f', {devices} of them a chip'
    return f'a device{of_chip}: {memory} of usable HBM, {flops:.4g} flops/s (bfloat16)'
