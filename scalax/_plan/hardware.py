"""Hardware: the numbers of chips and their networks that rooflines need, each with its source.

Every number was published or measured. An unknown one is None; a roofline that needs it names it. For other
hardware, or with better numbers, make a `Hardware` of your own.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from scalax._mesh.gpu_nodes import StandIns
from scalax.errors import PlanError, did_you_mean

HOP_SECONDS = 1e-6

_BOOK = 'https://jax-ml.github.io/scaling-book'
_GOOGLE_7X = 'https://docs.cloud.google.com/tpu/docs/tpu7x, "System architecture"'
_MAXTEXT_7X = (
    'https://github.com/AI-Hypercomputer/maxtext, src/maxtext/utils/accelerator_to_spec_map.py: tpu7x slices '
    'of 4x4x4 chips and its multiples wrap around, smaller ones do not'
)
_SPECS = f'{_BOOK}/tpus, "TPU Specs"'
_NETWORK = f'{_BOOK}/tpus, "TPU Networking"'


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One kind of chip and its networks. A number that is not known is None.

    Attributes:
        name: its name.
        flops_per_second: the peak of one chip in bfloat16.
        hbm_bytes_per_second: between the memory of one chip and its cores.
        hbm_bytes: the memory of one device that a program can use.
        ici_bytes_per_second: one way, over one link between neighbouring chips.
        torus_axes: the dimensions of the torus of chips; 0 if a switch joins all chips of a slice (or of a
            node of GPUs), with `ici_bytes_per_second` into and out of each.
        ring_multiple: an axis of the torus closes to a ring if its length is a multiple of this; 0: never.
        ring_needs_all: whether an axis closes only if all axes of the slice have such lengths.
        devices_per_chip: the number of devices that JAX makes of a chip, if devices do not say so.
        dcn_bytes_per_second: one way, between one host and others.
        chips_per_host: the number of chips that share that; of GPUs also the most that a node joins.
        host_bytes_per_second: one way, between the memory of a host and one of its chips.
        hop_seconds: the least time from one chip to the next, however few the bytes.
        device_kinds: what JAX calls such devices (``device.device_kind``).
        sources: field -> the source of its number.
        chip_bytes_per_second: one way, between two devices of a chip; that of its memory if it is None.
        direct_links: for a torus of 0 dimensions: whether there is no switch, and each two chips have a link
            of their own, of `ici_bytes_per_second`.

    Raises:
        PlanError: a number is invalid.

    Example:
        >>> mine = Hardware('mine', flops_per_second=1e14, hbm_bytes_per_second=1e12)
        >>> mine.need('flops_per_second', for_='a roofline')
        >>> mine.need('ici_bytes_per_second', 'hop_seconds', for_='communication')
        Traceback (most recent call last):
            ...
        scalax.errors.PlanError: communication needs numbers that the hardware 'mine' does not have: \
ici_bytes_per_second. Add them: dataclasses.replace(hardware, ici_bytes_per_second=...)
    """

    name: str
    flops_per_second: float | None = None
    hbm_bytes_per_second: float | None = None
    hbm_bytes: int | None = None
    ici_bytes_per_second: float | None = None
    torus_axes: int | None = None
    ring_multiple: int | None = None
    ring_needs_all: bool = False
    devices_per_chip: int | None = None
    dcn_bytes_per_second: float | None = None
    chips_per_host: int | None = None
    host_bytes_per_second: float | None = None
    hop_seconds: float = HOP_SECONDS
    device_kinds: tuple[str, ...] = ()
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    direct_links: bool = False
    chip_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        may_be_zero = ('torus_axes', 'ring_multiple', 'hop_seconds')
        whole = ('torus_axes', 'ring_multiple', 'devices_per_chip', 'chips_per_host')
        others = ('name', 'direct_links', 'ring_needs_all', 'device_kinds', 'sources')
        wrong = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in others or value is None:
                continue
            if not isinstance(value, int | float) or isinstance(value, bool):
                needed = 'a number'
            elif field.name in may_be_zero and not 0 <= value < math.inf:
                needed = 'at least 0'
            elif field.name not in may_be_zero and not 0 < value < math.inf:
                needed = 'more than 0'
            elif field.name in whole and not isinstance(value, int):
                needed = 'a whole number'
            else:
                continue
            wrong.append(f'{field.name} has to be {needed}, got {value!r}')
        if wrong:
            raise PlanError(f'the hardware {self.name!r} is invalid: {"; ".join(wrong)}')

    def need(self, *names: str, for_: str) -> None:
        """Checks that some numbers are known.

        Args:
            *names: fields.
            for_: what needs them, for the message.

        Raises:
            PlanError: some are unknown; names all of them.
        """
        missing = [name for name in names if getattr(self, name) is None]
        if missing:
            given = ', '.join(f'{name}=...' for name in missing)
            error = PlanError(
                f'{for_} needs numbers that the hardware {self.name!r} does not have: {", ".join(missing)}. '
                f'Add them: dataclasses.replace(hardware, {given})'
            )
            error._unknown = missing
            raise error


# What an unknown number is at best: so what needs it takes the least time, or none.
_AT_BEST = {
    **dict.fromkeys(('ici_bytes_per_second', 'dcn_bytes_per_second', 'host_bytes_per_second'), math.inf),
    'ring_multiple': 1,
    'chips_per_host': 1,
}
T = TypeVar('T')


def with_unknown_at_best(time: Callable[[Hardware], T], hardware: Hardware) -> tuple[T, tuple[str, ...]]:
    """What some function makes of hardware, with the unknown numbers of its networks at their best.

    Args:
        time: the function, which raises the error of `Hardware.need` for each number that it lacks.
        hardware: the hardware.

    Returns:
        What it returns, and the names of the numbers that it lacked.

    Raises:
        PlanError: it needs others, or raises by itself.

    Example:
        >>> with_unknown_at_best(
        ...     lambda own: numbers_of(own, 'host_bytes_per_second', for_='x'), HARDWARE['v3']
        ... )
        ([inf], ('host_bytes_per_second',))
    """
    unknown: tuple[str, ...] = ()
    while True:
        try:
            return time(hardware), unknown
        except PlanError as error:
            if not error._unknown or not _AT_BEST.keys() >= {*error._unknown}:
                raise
            unknown += tuple(error._unknown)
            hardware = copy.copy(hardware)
            # Not by dataclasses.replace, because infinite numbers are refused.
            vars(hardware).update({name: _AT_BEST[name] for name in error._unknown})


def numbers_of(hardware: Hardware, *names: str, for_: str) -> list[float]:
    """Numbers of some hardware; raises as `Hardware.need` does if some are unknown."""
    hardware.need(*names, for_=for_)
    return [getattr(hardware, name) for name in names]


_BOOK_SOURCES = {
    **dict.fromkeys(('flops_per_second', 'hbm_bytes_per_second'), _SPECS),
    'ici_bytes_per_second': f'{_SPECS}, the table of interconnects',
    **dict.fromkeys(('torus_axes', 'ring_multiple', 'ring_needs_all'), _NETWORK),
    'chips_per_host': f'{_SPECS}, "Host size"',
    'dcn_bytes_per_second': f'{_SPECS}: bytes a second of one chip, times the chips of a host',
    'host_bytes_per_second': f'{_SPECS}: PCIe is typically about 1.5e10 of a chip',
    'hop_seconds': f'{_BOOK}/sharding, "A note on ICI latency": about 1 us',
    'hbm_bytes': 'the TPU compiler (libtpu 0.0.42.1), where it refuses a program that does not fit',
    'devices_per_chip': 'the topologies of the TPU compiler (libtpu 0.0.42.1)',
    'device_kinds': 'the topologies of the TPU compiler (libtpu 0.0.51)',
}


def _tpu(
    name: str,
    flops: float,
    hbm: float,
    gib: float | None,
    ici: float,
    dcn: float | None,
    kinds: tuple[str, ...],
    sources: Mapping[str, str] | None = None,
    **network: Any,
) -> Hardware:
    """A TPU, with a source for each number that it has: the book's, unless another is given."""
    size = None if gib is None else round(gib * 2**30)
    chip = Hardware(name, flops, hbm, size, ici, dcn_bytes_per_second=dcn, device_kinds=kinds, **network)
    every = {**_BOOK_SOURCES, **(sources or {})}
    return dataclasses.replace(
        chip, sources={field: every[field] for field in every if getattr(chip, field) is not None}
    )


# The networks of two kinds of chips: cubes (v4, v5p, tpu7x) and squares (v5e, v6e).
_CUBE: dict[str, Any] = {'torus_axes': 3, 'ring_multiple': 4, 'ring_needs_all': True, 'chips_per_host': 4}
_SQUARE: dict[str, Any] = {'torus_axes': 2, 'ring_multiple': 16, 'devices_per_chip': 1, 'chips_per_host': 8}
_V4: dict[str, Any] = {**_CUBE, 'devices_per_chip': 1, 'host_bytes_per_second': 1.6e10}
_V5E: dict[str, Any] = {**_SQUARE, 'host_bytes_per_second': 1.5e10}
_V5P: dict[str, Any] = {**_CUBE, 'devices_per_chip': 1, 'host_bytes_per_second': 1.5e10}
_V6E: dict[str, Any] = {**_SQUARE, 'host_bytes_per_second': 3.2e10}
_V3: dict[str, Any] = {'torus_axes': 2, 'ring_multiple': 32, 'devices_per_chip': 2, 'chips_per_host': 8}
_7X: dict[str, Any] = {**_CUBE, 'devices_per_chip': 2, 'chip_bytes_per_second': 5.4e11}
_V3_SOURCES = {'ring_multiple': f'{_SPECS}: a pod is 32x32; smaller ones are assumed not to close'}
_V4_SOURCES = {
    'hbm_bytes': 'the TPU compiler (libtpu 0.0.50.1), where the two cores of a chip are one device',
    'devices_per_chip': 'the TPU compiler, asked for "megacore" chips: what machines have',
    'host_bytes_per_second': f'{_BOOK}/tpus, "What Is a TPU?": PCIe has 16 GB/s each way',
}
_V6E_SOURCES = {'host_bytes_per_second': f'{_SPECS}, a footnote: PCIe has 32 GB/s'}
_7X_SOURCES = {
    'flops_per_second': _GOOGLE_7X,
    'hbm_bytes_per_second': _GOOGLE_7X,
    'ici_bytes_per_second': f'{_SPECS}, the table of interconnects; {_GOOGLE_7X} has a tenth more',
    'torus_axes': 'https://docs.cloud.google.com/tpu/docs/tpu7x, "Supported configurations"',
    **dict.fromkeys(('ring_multiple', 'ring_needs_all'), _MAXTEXT_7X),
    'dcn_bytes_per_second': f'{_GOOGLE_7X}: 100 Gb/s of a chip, four chips a host',
    'chips_per_host': f'{_GOOGLE_7X}: a VM has four chips',
    'chip_bytes_per_second': f'{_GOOGLE_7X}: chiplets are joined six times as fast as by a link of the torus',
}
_CHIPS = (
    _tpu('v3', 1.4e14, 9e11, None, 1e11, None, ('TPU v3',), _V3_SOURCES, **_V3),
    _tpu('v4', 2.75e14, 1.2e12, 30.75, 4.5e10, 2.5e10, ('TPU v4',), _V4_SOURCES, **_V4),
    _tpu('v5e', 1.97e14, 8.1e11, 15.75, 4.5e10, 2.5e10, ('TPU v5 lite', 'TPU v5e'), **_V5E),
    _tpu('v5p', 4.59e14, 2.8e12, 95.74, 9e10, 2.5e10, ('TPU v5', 'TPU v5p'), **_V5P),
    _tpu('v6e', 9.2e14, 1.6e12, 31.25, 9e10, 1e11, ('TPU v6 lite', 'TPU v6e'), _V6E_SOURCES, **_V6E),
    _tpu('tpu7x', 2.307e15, 7.38e12, 94.74, 9e10, 5e10, ('TPU7x',), _7X_SOURCES, **_7X),
)


_NVIDIA = 'https://www.nvidia.com/en-us/data-center'
_GPUS = f'{_BOOK}/gpus'
_MI300X = (
    'https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/amd-instinct-mi300x'
)
_XGMI = 'https://rocm.blogs.amd.com/software-tools-optimization/mi300x-rccl-xgmi'
_NIC = 'a network card of 400 Gb/s for each of eight GPUs'


def _gpu(
    name: str, flops: float, hbm: float, size: float, link: float, kind: str, sheet: str, **sources: str
) -> Hardware:
    """A GPU in a node of eight, with a card of 400 Gb/s for each; *sheet* is its data sheet."""
    every = {
        'flops_per_second': f'{sheet}: bfloat16, without sparsity',
        'hbm_bytes_per_second': sheet,
        'hbm_bytes': f'{sheet}; drivers, the libraries of collectives and JAX take a part of it',
        'ici_bytes_per_second': f'{sheet}: NVLink, half of what it carries both ways',
        'torus_axes': f'{_GPUS}, "At the node level"',
        'direct_links': f'{_GPUS}, "At the node level": switches join the GPUs',
        'ring_needs_all': 'there is no torus',
        'devices_per_chip': 'JAX has one device for each GPU',
        'chips_per_host': f'{_GPUS}, "At the node level"',
        'host_bytes_per_second': f'{sheet}: PCIe Gen5 x16, half of 128 GB/s both ways',
        'hop_seconds': 'taken over from TPUs; the libraries of collectives take longer',
        'device_kinds': 'the name that the driver gives to the GPU',
    }
    return Hardware(
        name,
        flops,
        hbm,
        round(size),
        link,
        torus_axes=0,
        direct_links=name == 'mi300x',
        devices_per_chip=1,
        dcn_bytes_per_second=8 * 5e10,
        chips_per_host=8,
        host_bytes_per_second=6.4e10,
        device_kinds=(kind,),
        sources={**every, **sources},
    )


_NODES = (
    _gpu(
        *('h100', 9.895e14, 3.35e12, 80e9, 4.5e11, 'NVIDIA H100 80GB HBM3'),
        f'{_NVIDIA}/h100, "Product Specifications", H100 SXM',
        dcn_bytes_per_second=f'{_NVIDIA}/dgx-h100: {_NIC}',
    ),
    _gpu(
        *('h200', 9.895e14, 4.8e12, 141e9, 4.5e11, 'NVIDIA H200'),
        f'{_NVIDIA}/h200, "Product Specifications", H200 SXM',
        dcn_bytes_per_second=f'{_NVIDIA}/dgx-h200: {_NIC}',
    ),
    _gpu(
        *('b200', 2.25e15, 8e12, 180e9, 9e11, 'NVIDIA B200'),
        f'{_NVIDIA}/dgx-b200, "Specifications": of eight GPUs, divided by eight',
        flops_per_second=f'{_GPUS}, "Quiz 1", question 3',
        dcn_bytes_per_second=f'https://docs.nvidia.com/dgx/dgxb200-user-guide, "Hardware Overview": {_NIC}',
    ),
    _gpu(
        *('mi300x', 1.3074e15, 5.3e12, 192e9, 6.4e10, 'AMD Instinct MI300X'),
        f'{_MI300X}-data-sheet.pdf',
        ici_bytes_per_second=f'{_MI300X}-platform-data-sheet.pdf: an xGMI link, half of 128 GB/s both ways',
        torus_axes=_XGMI,
        direct_links=f'{_XGMI}: each GPU has a link to each of its seven peers',
        chips_per_host=f'{_MI300X}-platform-data-sheet.pdf',
        dcn_bytes_per_second=f'assumed, as in servers that are sold: {_NIC}',
    ),
)
HARDWARE: Mapping[str, Hardware] = {chip.name: chip for chip in (*_CHIPS, *_NODES)}
"""The chips whose numbers are known, by name."""


def find_hardware(wanted: Hardware | str | None, device_kind: str) -> Hardware:
    """The hardware for the argument of `Plan.roofline`.

    Args:
        wanted: a `Hardware`, the name of one, or None for that of the devices.
        device_kind: what JAX calls the devices of the plan.

    Raises:
        PlanError: there is no such entry.

    Example:
        >>> find_hardware('v5p', 'cpu').flops_per_second
        459000000000000.0
        >>> find_hardware(None, 'TPU v6 lite').name
        'v6e'
    """
    if isinstance(wanted, Hardware):
        return wanted
    if wanted is not None:
        if not isinstance(wanted, str):
            raise PlanError(f'hardware is a scalax.plan.Hardware or the name of one, got {wanted!r}')
        if wanted not in HARDWARE:
            raise PlanError(f'there is no hardware {wanted!r} ({did_you_mean(wanted, HARDWARE)})')
        return HARDWARE[wanted]
    known = hardware_of(device_kind)
    if known is not None:
        return known
    raise PlanError(
        f'the numbers of {device_kind!r} devices are not known: give hardware=..., '
        f'a scalax.plan.Hardware of your own or one of {", ".join(map(repr, HARDWARE))}'
    )


def hardware_of(device_kind: str, simulates: str = '') -> Hardware | None:
    """The hardware with this kind of device, or that they stand for; None if its numbers are not known."""
    if simulates:
        return HARDWARE[simulates]
    return next((entry for entry in HARDWARE.values() if device_kind in entry.device_kinds), None)


def hardware_of_devices(devices: Sequence[Any]) -> Hardware | None:
    """The hardware that devices are, or stand for; None if its numbers are not known."""
    return hardware_of(devices[0].device_kind, devices.nodes.kind if isinstance(devices, StandIns) else '')
