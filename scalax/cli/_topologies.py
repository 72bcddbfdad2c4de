"""Which TPU slices are there to ask for, and of which chips?"""

from __future__ import annotations

from scalax._mesh.topologies import SIZES
from scalax._report.tables import human_bytes
from scalax.plan import HARDWARE, Hardware


def table() -> str:
    """The kinds of chips with their numbers, and the slices of each."""
    lines = []
    for name, sizes in SIZES.items():
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
