"""NCCL's cost model of collectives on GPUs, for the compiler's schedule.

For each of its algorithms and protocols NCCL adds a start-up time, the latencies of the steps, and the bytes
divided by the effective bandwidth. It runs the fastest. This module does the same, with the formulas and
constants of https://github.com/NVIDIA/nccl/tree/1fc949c/src/tuning (``cost_model.cc``, ``ring.cc``,
``tree.cc``, ``nvls.cc``) and of ``topo.h`` and ``search.cc`` in its src/graph, without the extra latency of
rings through several domains. Hosts are assumed to have Intel CPUs.

- A ring passes each device once, over NVLink inside domains and over network cards between them.
- A tree, for all-reduces over several domains, is a chain inside each domain and a binary tree between them.
- The switches of NVLink 4 and later compute sums (NVLink SHARP), for all-reduces inside a domain. Each device
  has a channel, with one of a few bandwidths, for the sums of its shard.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from scalax._core.mesh.gpu_targets import Target
from scalax._planning.cost.collective_instances import Kind
from scalax._planning.hardware.torus import Route

_US, _GB = 1e-6, 1e9
# Compute capability -> the one-way bytes/s of an NVLink link, and the limit of protocol LL in a domain.
_LINK_RATES = {8: 20.0 * _GB, 9: 20.6 * _GB, 10: 40.1 * _GB}
_MAX_LL = {8: 87.7 * _GB, 9: 141 * _GB, 10: 282 * _GB}
_MAX_LL_TWO_DOMAINS, _MAX_LL_MANY_DOMAINS = 39 * _GB, 20.4 * _GB
_SHARP_STARTUP = 25 * _US
# Compute capability -> the efficiency of NVLink SHARP on a channel, and the possible bandwidths of channels.
_SHARP = {9: (0.85, (60, 50, 40, 30, 24, 20, 15)), 10: (0.74, (90, 80, 70, 60, 50, 45, 40, 30, 24, 20, 18))}


class _Protocol(NamedTuple):
    """The start-up time, the latency of a step over NVLink and over the network, and the bandwidth used."""

    startup: float
    nvlink_latency: float
    network_latency: float
    efficiency: float


_RINGS = (
    _Protocol(6.6 * _US, 0.6 * _US, 2.7 * _US, 0.5),  # LL
    _Protocol(14.0 * _US, 1.9 * _US, 4.0 * _US, 0.92),  # LL128
    _Protocol(8.4 * _US, 3.4 * _US, 14.0 * _US, 1.0),  # Simple
)
_TREES = (
    _Protocol(6.8 * _US, 0.6 * _US, 5.0 * _US, 0.92 / 3.8),
    _Protocol(14.0 * _US, 1.25 * _US, 8.5 * _US, 0.92 * 120 / 128),
    _Protocol(8.4 * _US, 4.0 * _US, 14.0 * _US, 0.92),
)
# Tenths of the bandwidth that trees reach for 64 bytes, 128 bytes, and so on; the full bandwidth beyond.
_TREE_TENTHS = (
    (10, 10, 10, 10, 9, 8, 7, 7, 7, 7, 6, 5, 4, 4, 5, 6, 7, 8, 9),
    (10, 10, 10, 10, 10, 9, 8, 8, 8, 7, 6, 6, 6, 6, 6, 6, 8, 9, 9, 9, 9),
    (9, 9, 9, 9, 9, 9, 9, 8, 7, 6, 6, 5, 5, 5, 5, 6, 7, 8, 7, 7, 8, 9, 9),
)


def nccl_seconds(
    kind: Kind, size: float, route: Route, target: Target, card: float | None, switches_add: bool
) -> float | None:
    """Returns the time of one collective; None for kinds that are not rings: all-to-alls and permutes.

    Args:
        kind: the kind of the collective.
        size: the bytes of the full array of one group.
        route: the devices of the group in each domain, and the domains.
        target: the GPU.
        card: the bytes/s of the network card of each GPU, if there are several domains.
        switches_add: whether switches compute sums.

    Example:
        >>> from scalax._core.mesh.gpu_targets import TARGETS
        >>> host = Route(1, 8, 8, ())
        >>> round(1e6 * nccl_seconds('all-gather', 2**30, host, TARGETS['h100'], None, True))
        2566
    """
    passes = {'all-reduce': 2, 'all-gather': 1, 'reduce-scatter': 1, 'collective-broadcast': 1}.get(kind)
    if passes is None or route.size < 2 or (route.slices > 1 and card is None):
        return None
    devices, domains, major = route.devices, route.slices, target.capability[0]
    nvlink = target.links * _LINK_RATES[major]
    cards = devices * (card or math.inf)
    rate = cards if devices == 1 else nvlink if domains == 1 else min(nvlink, cards)
    max_ll = _MAX_LL[major] if domains == 1 else _MAX_LL_TWO_DOMAINS if domains == 2 else _MAX_LL_MANY_DOMAINS
    limits = (max_ll, math.inf, math.inf)
    steps, network_steps = passes * (route.size - 1), passes * (domains - 1)
    candidates = [
        protocol.startup
        + (steps - network_steps) * protocol.nvlink_latency
        + network_steps * protocol.network_latency
        + size * steps / route.size / min(rate * protocol.efficiency, limit)
        for protocol, limit in zip(_RINGS, limits, strict=True)
    ]
    if kind == 'all-reduce' and domains > 1:
        doublings = max(1, int(size) // 64).bit_length() - 1
        for protocol, limit, tenths in zip(_TREES, limits, _TREE_TENTHS, strict=True):
            fraction = tenths[doublings] / 10 if doublings < len(tenths) else 1.0
            latency = (devices - 1) * protocol.nvlink_latency
            latency += (domains.bit_length() - 1) * protocol.network_latency
            seconds = 2 * size / (min(rate * protocol.efficiency, limit) * fraction)
            candidates.append(protocol.startup + 2 * latency + seconds)
    elif kind == 'all-reduce' and switches_add:
        efficiency, channels = _SHARP[major]
        # A device sends and receives twice as much over its own channel as over the others.
        channel = next((gbs * _GB for gbs in channels if gbs * _GB <= nvlink / (devices + 1)), 0)
        if channel:
            candidates.append(_SHARP_STARTUP + size / (devices * channel * efficiency))
    return min(candidates)
