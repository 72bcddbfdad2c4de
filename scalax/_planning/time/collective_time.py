"""The time of one collective on some hardware.

V is the bytes of the full (gathered) array of one group, N the number of its devices, w the one-way bandwidth
of a link, and hop the latency from one chip to the next (https://jax-ml.github.io/scaling-book/sharding).

- all-gather and reduce-scatter: V / (w * ways), where *ways* is the sum over the torus axes of the group, 2
  for each ring and 1 for each line, and at least hop * (half the length of each ring + the full length of
  each line). Without a ring, a chip receives only the shards of the other chips: V (N - 1) / N. See the
  book's problems "AllGather time" and "AllGather latency".
- all-reduce: twice that.
- all-to-all: a quarter of V crosses the middle of the longest axis in each direction. On one ring that takes
  a quarter of the time of an all-gather.
- collective-permute: each device sends its shard to a neighbour, over one link. Simultaneous permutes may use
  the other links: the lower bound spreads them over all links of the group.

Groups that share links (interleaved on one axis, or on the devices of one chip) share their bandwidth.
Between slices, each device has its share of the bandwidth of its host, and receives the shards of the other
slices; the members of a group in one slice divide that transfer and exchange the results within the slice
(https://jax-ml.github.io/scaling-book/training, "Scaling Across Pods"). The same holds for nodes of GPUs. In
a permute only the devices with a neighbour in another slice send; they share the bandwidth of the hosts.

Devices connected by a switch (``torus_axes=0``) receive the shards of the others, V (N - 1) / N, over w
(https://jax-ml.github.io/scaling-book/gpus, "At the node level"), which is the bus bandwidth of
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md. For an all-reduce, switches that compute
sums (NVLink SHARP, ``switches_add``) receive V from each device and return V / N to it. Then each device
sends that part once, and the switches multicast it: V (N + 1) / N in each direction.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from scalax._planning.cost.collective_instances import Kind
from scalax._planning.hardware.specs import Hardware, required_specs
from scalax._planning.hardware.torus import Route

COMMUNICATION = 'a roofline of communication'
"""The purpose of the specs of the hardware, in messages."""
_ALL_TO_ALLS: tuple[Kind, ...] = ('all-to-all', 'ragged-all-to-all')


class NetworkSeconds(NamedTuple):
    """The seconds of one collective on each network."""

    ici: float = 0.0
    dcn: float = 0.0
    chip: float = 0.0


def collective_seconds(
    kind: Kind, size: float, route: Route, hardware: Hardware, per_chip: int, senders: float | None = None
) -> NetworkSeconds:
    """Returns the time of one collective.

    Args:
        kind: the kind of the collective.
        size: the bytes of the full array of one group.
        route: the links between the devices of the group.
        hardware: the hardware.
        per_chip: the number of devices per chip.
        senders: how many devices of each host send to another slice in a permute; by default all.

    Raises:
        PlanError: a required spec is unknown.

    Example:
        >>> from scalax._planning.hardware.specs import HARDWARE
        >>> from scalax._planning.hardware.torus import TorusSegment
        >>> ring = Route(1, 4, 4, (TorusSegment(0, 4, True),))
        >>> round(1e6 * collective_seconds('all-gather', 2 * 1024 * 4096 / 4, ring, HARDWARE['v4'], 1).ici, 1)
        23.3
    """
    passes = 2 if kind == 'all-reduce' else 1
    size_in_slice = size / route.slices if kind in _ALL_TO_ALLS else size
    ici = chip = dcn = 0.0
    if route.chips > 1:
        seconds_of = _torus_seconds if route.segments else _switch_seconds
        ici = passes * seconds_of(kind, size_in_slice, route, hardware)
        if kind == 'all-reduce' and not route.segments and hardware.switches_add:
            transferred = size_in_slice * (route.devices + 1) / route.devices
            ici = min(ici, max(hardware.hop_seconds, transferred / (hardware.ici_bytes_per_second or 1.0)))
    elif route.devices > 1:
        [hbm_rate] = required_specs(hardware, 'hbm_bytes_per_second', for_=COMMUNICATION)
        if hardware.chip_bytes_per_second is None:
            chip = passes * size_in_slice / hbm_rate
        else:
            received = _received_bytes(kind, size_in_slice, route.devices, route.size)
            chip = passes * received / hardware.chip_bytes_per_second
    if route.slices > 1:
        rate, chips = required_specs(
            hardware, 'dcn_bytes_per_second', 'chips_per_host', for_=f'{COMMUNICATION} between slices'
        )
        device_rate = rate / (senders or chips * per_chip)
        share = size if kind in (*_ALL_TO_ALLS, 'collective-permute') else size / route.devices
        dcn = passes * _received_bytes(kind, share, route.slices, route.size) / device_rate
    return NetworkSeconds(ici, dcn, chip)


def link_fraction(kind: Kind, route: Route) -> float:
    """Returns the fraction of a group's links in a slice that a collective uses: below 1 for a permute only.

    Example:
        >>> from scalax._planning.hardware.torus import TorusSegment
        >>> link_fraction('collective-permute', Route(1, 4, 4, (TorusSegment(0, 4, True),)))
        0.5
    """
    if kind != 'collective-permute' or not route.segments:
        return 1.0
    return _permute_links(route) / sum(segment.links_per_chip for segment in route.segments)


def _permute_links(route: Route) -> float:
    """Returns the number of links over which a device sends to its neighbour."""
    return max(segment.links_per_chip / (2 if segment.ring else 1) for segment in route.segments)


def _torus_seconds(kind: Kind, size: float, route: Route, hardware: Hardware) -> float:
    [link_rate] = required_specs(hardware, 'ici_bytes_per_second', for_=COMMUNICATION)
    link = link_rate / route.groups_sharing_links
    hop = hardware.hop_seconds
    if kind == 'collective-permute':
        latency = hop * min(segment.stride for segment in route.segments)
        return max(latency, size / route.size / (link * _permute_links(route)))
    latency = hop * sum(segment.hops for segment in route.segments)
    if kind in _ALL_TO_ALLS:
        box = math.prod(segment.length for segment in route.segments)
        bisections = (link * segment.links_per_chip * box / segment.length for segment in route.segments)
        return max(latency, max(size / 4 / bisection for bisection in bisections))
    has_ring = any(segment.ring for segment in route.segments)
    received = size if has_ring else size * (route.chips - 1) / route.chips
    return max(latency, received / (link * sum(segment.links_per_chip for segment in route.segments)))


def _switch_seconds(kind: Kind, size: float, route: Route, hardware: Hardware) -> float:
    [link_rate] = required_specs(hardware, 'ici_bytes_per_second', for_=COMMUNICATION)
    return max(hardware.hop_seconds, _received_bytes(kind, size, route.devices, route.size) / link_rate)


def _received_bytes(kind: Kind, size: float, shards: int, devices: int) -> float:
    """Returns the bytes that one device receives of an array of *size* bytes in some number of shards."""
    if kind == 'collective-permute':
        return size / devices
    received = size * (shards - 1) / shards
    return received / devices if kind in _ALL_TO_ALLS else received
