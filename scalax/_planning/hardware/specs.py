"""Hardware: the numbers of chips and their networks that rooflines need.

Every number was published or measured; docs/estimates.md has the source of each ("Constants"). An unknown one
is None, and a roofline that needs it names it. For other hardware, or with better numbers, make a `Hardware`
of your own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from scalax._core.mesh.gpu_targets import TARGETS
from scalax._core.mesh.gpu_topologies import GPU_KINDS
from scalax.errors import PlanError, did_you_mean

HOP_SECONDS = 1e-6


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One kind of chip and its networks. A number that is not known is None.

    Attributes:
        name: its name.
        flops_per_second: the peak of one chip in bfloat16.
        hbm_bytes_per_second: between the memory of one chip and its cores.
        hbm_bytes: the memory of one device that a program can use.
        ici_bytes_per_second: one way, over one link between neighbouring chips.
        torus_axes: the dimensions of the torus of chips; 0 if a switch joins all chips of a slice (of GPUs:
            all that NVLink joins), with `ici_bytes_per_second` into and out of each.
        ring_multiple: an axis of the torus closes to a ring if its length is a multiple of this; 0: never.
        ring_needs_all: whether an axis closes only if all axes of the slice have such lengths.
        devices_per_chip: the number of devices that JAX makes of a chip, if devices do not say so.
        dcn_bytes_per_second: one way, between one host and others.
        chips_per_host: the number of chips that share that.
        host_bytes_per_second: one way, between the memory of a host and one of its chips.
        hop_seconds: the least time from one chip to the next, however few the bytes.
        device_kinds: what JAX calls such devices (``device.device_kind``).
        chip_bytes_per_second: one way, between two devices of a chip; that of its memory if it is None.
        chips_per_slice: the most chips that a switch joins; if it is None, those of a host.
        switches_add: whether switches add up what they carry, for all-reduces (NVLink SHARP).

    Raises:
        PlanError: a number is invalid.
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
    chip_bytes_per_second: float | None = None
    chips_per_slice: int | None = None
    switches_add: bool = False

    def __post_init__(self) -> None:
        may_be_zero = ('torus_axes', 'ring_multiple', 'hop_seconds')
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ('name', 'device_kinds') or value is None or isinstance(value, bool):
                continue
            if not (value >= 0 if field.name in may_be_zero else value > 0) or value == math.inf:
                raise PlanError(f'the hardware {self.name!r} is invalid: {field.name} is {value!r}')


_OF_GPUS = {'ici': 'NVLink', 'dcn': 'network'}


def network_text(name: str, hardware: Hardware | None) -> str:
    """A network, or what goes over it along mesh axes, as people who use such hardware call it.

    Example:
        >>> network_text('ici:tp', HARDWARE['h100']), network_text('ici:tp', HARDWARE['v5p'])
        ('NVLink:tp', 'ici:tp')
    """
    network, colon, axes = name.partition(':')
    is_gpu = hardware is not None and hardware.torus_axes == 0
    return f'{_OF_GPUS.get(network, network)}{colon}{axes}' if is_gpu else name


def numbers_of(hardware: Hardware, *names: str, for_: str) -> list[Any]:
    """Numbers of some hardware.

    Args:
        hardware: the hardware.
        *names: fields.
        for_: what needs them, for the message.

    Raises:
        PlanError: some are unknown; names all of them.

    Example:
        >>> numbers_of(Hardware('mine', flops_per_second=1e14), 'flops_per_second', for_='a roofline')
        [100000000000000.0]
    """
    missing = [name for name in names if getattr(hardware, name) is None]
    if missing:
        given = ', '.join(f'{name}=...' for name in missing)
        raise PlanError(
            f'{for_} needs numbers that the hardware {hardware.name!r} does not have: {", ".join(missing)}. '
            f'Add them: dataclasses.replace(hardware, {given})'
        )
    return [getattr(hardware, name) for name in names]


def _tpu(
    name: str, flops: float, hbm: float, gib: float, ici: float, dcn: float, *kinds: str, **network: Any
) -> Hardware:
    size = round(gib * 2**30)
    return Hardware(name, flops, hbm, size, ici, dcn_bytes_per_second=dcn, device_kinds=kinds, **network)


# The networks of two kinds of chips: cubes (v4, v5p, tpu7x) and squares (v5e, v6e).
_CUBE: dict[str, Any] = {'torus_axes': 3, 'ring_multiple': 4, 'ring_needs_all': True, 'chips_per_host': 4}
_SQUARE: dict[str, Any] = {'torus_axes': 2, 'ring_multiple': 16, 'devices_per_chip': 1, 'chips_per_host': 8}
_V4: dict[str, Any] = {**_CUBE, 'devices_per_chip': 1, 'host_bytes_per_second': 1.6e10}
_V5E: dict[str, Any] = {**_SQUARE, 'host_bytes_per_second': 1.5e10}
_V5P: dict[str, Any] = {**_CUBE, 'devices_per_chip': 1, 'host_bytes_per_second': 1.5e10}
_V6E: dict[str, Any] = {**_SQUARE, 'host_bytes_per_second': 3.2e10}
_7X: dict[str, Any] = {**_CUBE, 'devices_per_chip': 2, 'chip_bytes_per_second': 5.4e11}


def _gpu(
    name: str, flops: float, hbm: float, size: float, nvlink: float, card: float | None, host: float | None
) -> Hardware:
    """A GPU; *card* is the bandwidth of the network card that each has."""
    joined = GPU_KINDS[name]
    return Hardware(
        name,
        flops,
        hbm,
        round(size),
        nvlink,
        torus_axes=0,
        devices_per_chip=1,
        dcn_bytes_per_second=None if card is None else joined.gpus_per_host * card,
        chips_per_host=joined.gpus_per_host,
        chips_per_slice=None if joined.gpus_per_host == joined.gpus_per_domain else joined.gpus_per_domain,
        host_bytes_per_second=host,
        device_kinds=(TARGETS[name].device_kind,),
        # Those of NVLink 4 and later do; up to four GPUs are joined without any.
        switches_add=TARGETS[name].capability >= (9, 0) and joined.gpus_per_domain > 4,
    )


_CHIPS = (
    _tpu('v4', 2.75e14, 1.2e12, 30.75, 4.5e10, 2.5e10, 'TPU v4', **_V4),
    _tpu('v5e', 1.97e14, 8.1e11, 15.75, 4.5e10, 2.5e10, 'TPU v5 lite', 'TPU v5e', **_V5E),
    _tpu('v5p', 4.59e14, 2.8e12, 95.74, 9e10, 2.5e10, 'TPU v5', 'TPU v5p', **_V5P),
    _tpu('v6e', 9.2e14, 1.6e12, 31.25, 9e10, 1e11, 'TPU v6 lite', 'TPU v6e', **_V6E),
    _tpu('tpu7x', 2.307e15, 7.38e12, 94.74, 9e10, 5e10, 'TPU7x', **_7X),
    _gpu('a100', 3.12e14, 2.039e12, 80e9, 3e11, 2.5e10, 3.2e10),
    _gpu('h100', 9.895e14, 3.35e12, 80e9, 4.5e11, 5e10, 6.4e10),
    _gpu('h100-pcie', 7.565e14, 2e12, 80e9, 3e11, None, 6.4e10),
    _gpu('h100-nvl', 8.355e14, 3.9e12, 94e9, 3e11, None, 6.4e10),
    _gpu('h200', 9.895e14, 4.8e12, 141e9, 4.5e11, 5e10, 6.4e10),
    _gpu('gh200', 9.895e14, 4e12, 96e9, 4.5e11, 2.5e10, 4.5e11),
    _gpu('b200', 2.25e15, 8e12, 180e9, 9e11, 5e10, 6.4e10),
    _gpu('gb200', 2.5e15, 8e12, 186e9, 9e11, 5e10, None),
    _gpu('gb300', 2.5e15, 8e12, 277.7e9, 9e11, 1e11, None),
)
HARDWARE: Mapping[str, Hardware] = {chip.name: chip for chip in _CHIPS}
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


def hardware_of(device_kind: str) -> Hardware | None:
    """The hardware with this kind of device; None if its numbers are not known."""
    return next((entry for entry in HARDWARE.values() if device_kind in entry.device_kinds), None)
