"""The seconds of one collective on some hardware.

V is the bytes of the full (gathered) array of one group, N its devices, w the
one-way bandwidth of a link, and hop the least time from one chip to the next
(https://jax-ml.github.io/scaling-book/sharding).

- all-gather and reduce-scatter: V / (w * ways), where *ways* is 2 for each ring and 1 for each line, at least
  hop * (half of each ring + the whole of each line). Where nothing is a ring, a chip receives only what it
  lacks: V (N - 1) / N. See the book's problems "AllGather time" and "AllGather latency".
- all-reduce: twice that.
- all-to-all: a quarter of V crosses the middle of the longest axis each way. On one ring that takes a quarter
  of an all-gather.
- collective-permute: each device sends its part to a neighbour, over one link. Several permutes at a time may
  use the others: in a lower bound they are spread over all links of the group.

Groups that share links (interleaved on one axis, or on the devices of one chip) share their bandwidth.
Between slices each device has its share of the bandwidth of its host, and receives what it lacks; the
members of a group that are in one slice share that work, and exchange it there
(https://jax-ml.github.io/scaling-book/training, "Scaling Across Pods"). So do nodes of GPUs. In a permute
only those devices send whose neighbour is in another slice; they share the bandwidth of the hosts.

Devices joined by a switch (``torus_axes=0``) receive what they lack, V (N - 1) / N, over w
(https://jax-ml.github.io/scaling-book/gpus, "At the node level"); that is the bus bandwidth of
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md. Switches that add (NVLink SHARP,
``switches_add``) get V of each device for an all-reduce, and return to each its part, V / N; then each sends
its part once, and the switches give it to all: V (N + 1) / N go each way.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from scalax._planning.cost.collective_instances import Kind
from scalax._planning.hardware.specs import Hardware, numbers_of
from scalax._planning.hardware.torus import Route

COMMUNICATION = 'a roofline of communication'
"""What the numbers of the hardware are for, in messages."""
_EXCHANGES: tuple[Kind, ...] = ('all-to-all', 'ragged-all-to-all')


class NetworkSeconds(NamedTuple):
    """The seconds of one collective on each network."""

    ici: float = 0.0
    dcn: float = 0.0
    chip: float = 0.0


def collective_seconds(
    kind: Kind, whole: float, route: Route, hardware: Hardware, per_chip: int, senders: float | None = None
) -> NetworkSeconds:
    """The time of one collective.

    Args:
        kind: the kind of the collective.
        whole: the bytes of the full array of one group.
        route: the links that join the devices of the group.
        hardware: the hardware that has these links.
        per_chip: how many devices share a chip.
        senders: of a permute, how many devices of each host send to another slice; all of them by default.

    Raises:
        PlanError: a number of the hardware is unknown.

    Example:
        >>> from scalax._planning.hardware.specs import HARDWARE
        >>> from scalax._planning.hardware.torus import TorusSegment
        >>> ring = Route(1, 4, 4, (TorusSegment(0, 4, True),))
        >>> round(1e6 * collective_seconds('all-gather', 2 * 1024 * 4096 / 4, ring, HARDWARE['v4'], 1).ici, 1)
        23.3
    """
    times = 2 if kind == 'all-reduce' else 1
    inside = whole / route.slices if kind in _EXCHANGES else whole
    ici = chip = dcn = 0.0
    if route.chips > 1:
        join = _on_torus if route.segments else _on_switch
        ici = times * join(kind, inside, route, hardware)
        if kind == 'all-reduce' and not route.segments and hardware.switches_add:
            both_ways = inside * (route.devices + 1) / route.devices
            ici = min(ici, max(hardware.hop_seconds, both_ways / (hardware.ici_bytes_per_second or 1.0)))
    elif route.devices > 1:
        [hbm_rate] = numbers_of(hardware, 'hbm_bytes_per_second', for_=COMMUNICATION)
        if hardware.chip_bytes_per_second is None:
            chip = times * inside / hbm_rate
        else:
            lacking = _lacking(kind, inside, route.devices, route.size)
            chip = times * lacking / hardware.chip_bytes_per_second
    if route.slices > 1:
        rate, chips = numbers_of(
            hardware, 'dcn_bytes_per_second', 'chips_per_host', for_=f'{COMMUNICATION} between slices'
        )
        share = rate / (senders or chips * per_chip)
        part = whole if kind in (*_EXCHANGES, 'collective-permute') else whole / route.devices
        dcn = times * _lacking(kind, part, route.slices, route.size) / share
    return NetworkSeconds(ici, dcn, chip)


def part_of_links(kind: Kind, route: Route) -> float:
    """The part of the links of a group that one collective uses inside a slice: less than 1 for a permute.

    Example:
        >>> from scalax._planning.hardware.torus import TorusSegment
        >>> part_of_links('collective-permute', Route(1, 4, 4, (TorusSegment(0, 4, True),)))
        0.5
    """
    if kind != 'collective-permute' or not route.segments:
        return 1.0
    return _ways_of_permute(route) / sum(segment.ways for segment in route.segments)


def _ways_of_permute(route: Route) -> float:
    """The links over which a device sends to its neighbour."""
    return max(segment.ways / (2 if segment.ring else 1) for segment in route.segments)


def _on_torus(kind: Kind, whole: float, route: Route, hardware: Hardware) -> float:
    [link_rate] = numbers_of(hardware, 'ici_bytes_per_second', for_=COMMUNICATION)
    link = link_rate / route.groups_sharing_links
    hop = hardware.hop_seconds
    if kind == 'collective-permute':
        way = _ways_of_permute(route)
        return max(hop * min(segment.stride for segment in route.segments), whole / route.size / (link * way))
    least = hop * sum(segment.hops for segment in route.segments)
    if kind in _EXCHANGES:
        box = math.prod(segment.length for segment in route.segments)
        middles = (link * segment.ways * box / segment.length for segment in route.segments)
        return max(least, max(whole / 4 / middle for middle in middles))
    ring = any(segment.ring for segment in route.segments)
    lacking = whole if ring else whole * (route.chips - 1) / route.chips
    return max(least, lacking / (link * sum(segment.ways for segment in route.segments)))


def _on_switch(kind: Kind, whole: float, route: Route, hardware: Hardware) -> float:
    [link_rate] = numbers_of(hardware, 'ici_bytes_per_second', for_=COMMUNICATION)
    return max(hardware.hop_seconds, _lacking(kind, whole, route.devices, route.size) / link_rate)


def _lacking(kind: Kind, whole: float, parts: int, devices: int) -> float:
    """The bytes that one device has to receive of *whole* bytes that are spread over *parts* places."""
    if kind == 'collective-permute':
        return whole / devices
    lacking = whole * (parts - 1) / parts
    return lacking / devices if kind in _EXCHANGES else lacking
