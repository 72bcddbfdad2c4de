"""The seconds of collectives of GPUs as NCCL expects them, for the compiler's schedule.

NCCL expects of each of its algorithms and protocols the time to begin, its steps one after the other, and the
bytes by the bandwidth that they leave; it runs the fastest. So does this, with the formulas and numbers of
https://github.com/NVIDIA/nccl/tree/1fc949c/src/tuning (``cost_model.cc``, ``ring.cc``, ``tree.cc``,
``nvls.cc``) and of ``topo.h`` and ``search.cc`` in its src/graph, but for what NCCL adds to the steps of
rings through several domains. Hosts are taken for those of Intel.

- A ring passes each device once, through NVLink inside of domains and the network cards between these.
- A tree, for all-reduces of several domains, is a chain inside of them and a binary tree between them.
- Switches of NVLink 4 and later add up what they carry (NVLink SHARP), for all-reduces inside of a domain.
  Each device has a channel, of one of a few bandwidths, through which the sums of its part of the array go.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from scalax._core.mesh.gpu_targets import Target
from scalax._planning.cost.collective_instances import Kind
from scalax._planning.hardware.torus import Route

_US, _GB = 1e-6, 1e9
# Compute capability -> bytes a second of a link of NVLink, one way, and of protocol LL in a domain at most.
_LINK = {8: 20.0 * _GB, 9: 20.6 * _GB, 10: 40.1 * _GB}
_MOST_LL = {8: 87.7 * _GB, 9: 141 * _GB, 10: 282 * _GB}
_MOST_LL_OF_TWO, _MOST_LL_OF_MORE = 39 * _GB, 20.4 * _GB  # domains
_BEGINS_ADDING = 25 * _US
# Compute capability -> what part switches that add reach of a channel, and the bandwidths of channels.
_ADDING = {9: (0.85, (60, 50, 40, 30, 24, 20, 15)), 10: (0.74, (90, 80, 70, 60, 50, 45, 40, 30, 24, 20, 18))}


class _Protocol(NamedTuple):
    """Seconds to begin, of a step over NVLink, and of one over the network; the part of the bandwidth."""

    begin: float
    inside: float
    between: float
    share: float


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
# The tenths of their bandwidth that trees reach for 64 bytes, for 128, and so on; all of it beyond.
_TENTHS = (
    (10, 10, 10, 10, 9, 8, 7, 7, 7, 7, 6, 5, 4, 4, 5, 6, 7, 8, 9),
    (10, 10, 10, 10, 10, 9, 8, 8, 8, 7, 6, 6, 6, 6, 6, 6, 8, 9, 9, 9, 9),
    (9, 9, 9, 9, 9, 9, 9, 8, 7, 6, 6, 5, 5, 5, 5, 6, 7, 8, 7, 7, 8, 9, 9),
)


def nccl_seconds(
    kind: Kind, whole: float, route: Route, target: Target, card: float | None, switches_add: bool
) -> float | None:
    """The time of one collective; None of those that are no rings: exchanges and permutes.

    Args:
        kind: the kind of the collective.
        whole: the bytes of the whole array of one group.
        route: the devices of the group in each domain, and the domains.
        target: the GPU.
        card: the bytes a second of the network card of each GPU, if there are several domains.
        switches_add: whether switches add up what they carry.

    Example:
        >>> from scalax._core.mesh.gpu_targets import TARGETS
        >>> host = Route(1, 8, 8, ())
        >>> round(1e6 * nccl_seconds('all-gather', 2**30, host, TARGETS['h100'], None, True))
        2566
    """
    times = {'all-reduce': 2, 'all-gather': 1, 'reduce-scatter': 1, 'collective-broadcast': 1}.get(kind)
    if times is None or route.size < 2 or (route.slices > 1 and card is None):
        return None
    devices, domains, major = route.devices, route.slices, target.capability[0]
    nvlink = target.links * _LINK[major]
    cards = devices * (card or math.inf)
    rate = cards if devices == 1 else nvlink if domains == 1 else min(nvlink, cards)
    most_ll = _MOST_LL[major] if domains == 1 else _MOST_LL_OF_TWO if domains == 2 else _MOST_LL_OF_MORE
    most = (most_ll, math.inf, math.inf)
    steps, between = times * (route.size - 1), times * (domains - 1)
    found = [
        way.begin
        + (steps - between) * way.inside
        + between * way.between
        + whole * steps / route.size / min(rate * way.share, limit)
        for way, limit in zip(_RINGS, most, strict=True)
    ]
    if kind == 'all-reduce' and domains > 1:
        doublings = max(1, int(whole) // 64).bit_length() - 1
        for way, limit, tenths in zip(_TREES, most, _TENTHS, strict=True):
            reached = tenths[doublings] / 10 if doublings < len(tenths) else 1.0
            hops = (devices - 1) * way.inside + (domains.bit_length() - 1) * way.between
            seconds = 2 * whole / (min(rate * way.share, limit) * reached)
            found.append(way.begin + 2 * hops + seconds)
    elif kind == 'all-reduce' and switches_add:
        part, channels = _ADDING[major]
        # Of its own channel a device sends and gets twice as much as of the others.
        channel = next((each * _GB for each in channels if each * _GB <= nvlink / (devices + 1)), 0)
        if channel:
            found.append(_BEGINS_ADDING + whole / (devices * channel * part))
    return min(found)
