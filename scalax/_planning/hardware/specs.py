"""Hardware: the specs of chips and networks that rooflines need.

Every spec is published or measured; docs/estimates.md has the source of each ("Constants"). An unknown spec
is None, and a roofline that needs it raises an error. For other hardware, or with better numbers, users
create a `Hardware` of their own.
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
    """A kind of chip and its networks. Unknown specs are None.

    Attributes:
        name: its name.
        flops_per_second: the peak of one chip in bfloat16.
        hbm_bytes_per_second: the bandwidth between the memory of one chip and its cores.
        hbm_bytes: the memory of one device that a program can use.
        ici_bytes_per_second: the one-way bandwidth of one link between neighbouring chips.
        torus_axes: the number of axes of the torus of chips; 0 if a switch connects all chips of a slice (for
            GPUs: of an NVLink domain), with `ici_bytes_per_second` into and out of each chip.
        ring_multiple: an axis of the torus is a ring if its length is a multiple of this; 0: never.
        ring_needs_all: whether an axis is a ring only if all axes of the slice have such lengths.
        devices_per_chip: the number of JAX devices on a chip, for devices that do not report it.
        dcn_bytes_per_second: the one-way bandwidth between a host and other hosts.
        chips_per_host: the number of chips of a host, which share `dcn_bytes_per_second`.
        host_bytes_per_second: the one-way bandwidth between the memory of a host and one of its chips.
        hop_seconds: the latency from one chip to the next.
        device_kinds: JAX's names of such devices (``device.device_kind``).
        chip_bytes_per_second: the one-way bandwidth between two devices of a chip; by default that of its
            memory.
        chips_per_slice: the largest number of chips that a switch connects; by default `chips_per_host`.
        switches_add: whether switches compute the sums of all-reduces (NVLink SHARP).

    Raises:
        PlanError: a spec is invalid.
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


_GPU_NETWORKS = {'ici': 'NVLink', 'dcn': 'network'}


def network_text(name: str, hardware: Hardware | None) -> str:
    """Returns the usual name of a network of some hardware; mesh axes after a colon are kept.

    Example:
        >>> network_text('ici:tp', HARDWARE['h100']), network_text('ici:tp', HARDWARE['v5p'])
        ('NVLink:tp', 'ici:tp')
    """
    network, colon, axes = name.partition(':')
    is_gpu = hardware is not None and hardware.torus_axes == 0
    return f'{_GPU_NETWORKS.get(network, network)}{colon}{axes}' if is_gpu else name


def required_specs(hardware: Hardware, *names: str, for_: str) -> list[Any]:
    """Returns specs of some hardware, all of which have to be known.

    Args:
        hardware: the hardware.
        *names: the fields.
        for_: the purpose, for the message.

    Raises:
        PlanError: some specs are unknown. The message names all of them.

    Example:
        >>> required_specs(Hardware('mine', flops_per_second=1e14), 'flops_per_second', for_='a roofline')
        [100000000000000.0]
    """
    missing = [name for name in names if getattr(hardware, name) is None]
    if missing:
        keywords = ', '.join(f'{name}=...' for name in missing)
        raise PlanError(
            f'{for_} needs specs that the hardware {hardware.name!r} lacks: {", ".join(missing)}. '
            f'Add them: dataclasses.replace(hardware, {keywords})'
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
    """Returns the specs of a GPU; *card* is the bandwidth of its network card."""
    kind = GPU_KINDS[name]
    return Hardware(
        name,
        flops,
        hbm,
        round(size),
        nvlink,
        torus_axes=0,
        devices_per_chip=1,
        dcn_bytes_per_second=None if card is None else kind.gpus_per_host * card,
        chips_per_host=kind.gpus_per_host,
        chips_per_slice=None if kind.gpus_per_host == kind.gpus_per_domain else kind.gpus_per_domain,
        host_bytes_per_second=host,
        device_kinds=(TARGETS[name].device_kind,),
        # The switches of NVLink 4 and later do; up to four GPUs are connected without switches.
        switches_add=TARGETS[name].capability >= (9, 0) and kind.gpus_per_domain > 4,
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
"""The hardware with known specs, by name."""


def find_hardware(hardware: Hardware | str | None, device_kind: str) -> Hardware:
    """Returns the hardware for the argument of `Plan.roofline`.

    Args:
        hardware: a `Hardware`, the name of one, or None for that of the devices.
        device_kind: JAX's name of the devices of the plan.

    Raises:
        PlanError: there is no such entry.

    Example:
        >>> find_hardware('v5p', 'cpu').flops_per_second
        459000000000000.0
        >>> find_hardware(None, 'TPU v6 lite').name
        'v6e'
    """
    if isinstance(hardware, Hardware):
        return hardware
    if hardware is not None:
        if not isinstance(hardware, str):
            raise PlanError(f'hardware is a scalax.plan.Hardware or the name of one, got {hardware!r}')
        if hardware not in HARDWARE:
            raise PlanError(f'there is no hardware {hardware!r} ({did_you_mean(hardware, HARDWARE)})')
        return HARDWARE[hardware]
    if (entry := hardware_of(device_kind)) is not None:
        return entry
    raise PlanError(
        f'the specs of {device_kind!r} devices are unknown: pass hardware=..., '
        f'a scalax.plan.Hardware of your own or one of {", ".join(map(repr, HARDWARE))}'
    )


def hardware_of(device_kind: str) -> Hardware | None:
    """Returns the hardware with this kind of device; None if its specs are unknown."""
    return next((entry for entry in HARDWARE.values() if device_kind in entry.device_kinds), None)
