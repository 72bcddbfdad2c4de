"""The seconds of collectives of GPUs as NCCL expects them, for the compiler's schedule.

NCCL expects of each of its algorithms and protocols the time to begin, its steps one after the other, and the
bytes by the bandwidth that they leave; it runs the fastest. So does this, with the numbers of NCCL: latencies
and shares of https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc, what a link of NVLink carries
of https://github.com/NVIDIA/nccl/blob/master/src/graph/topo.h.

- A ring passes each device once, through NVLink inside of domains and the network cards between these.
- A tree, for all-reduces, is a chain inside of domains and a binary tree between them.
- Switches of NVLink 4 and later add up what they carry (NVLink SHARP), for all-reduces inside of a domain.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from scalax._mesh.gpu_targets import Target
from scalax._plan.collective_runs import Kind
from scalax._plan.torus import Route

_US = 1e-6
# Compute capability -> bytes a second of a link, one way; and what part of them switches that add reach.
_LINK = {8: 20.0e9, 9: 20.6e9, 10: 40.1e9}
_ADDING = {9: 0.85, 10: 0.74}
_BEGINS_ADDING = 25 * _US
_OF_ALL = 5 / 6  # bytes of the array for those that NVLink carries then


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
    _Protocol(14.0 * _US, 1.25 * _US, 8.5 * _US, 0.92 * 7 / 9),
    _Protocol(8.4 * _US, 4.0 * _US, 14.0 * _US, 0.92),
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
        >>> from scalax._mesh.gpu_targets import TARGETS
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
    steps, between = times * (route.size - 1), times * (domains - 1)
    found = [
        way.begin
        + (steps - between) * way.inside
        + between * way.between
        + whole * steps / route.size / (rate * way.share)
        for way in _RINGS
    ]
    if kind == 'all-reduce':
        levels = math.log2(domains)
        found += [
            way.begin
            + 2 * ((devices - 1) * way.inside + levels * way.between)
            + 2 * whole / (rate * way.share)
            for way in _TREES
        ]
        if domains == 1 and switches_add:
            found.append(_BEGINS_ADDING + whole / (nvlink * _ADDING[major] * _OF_ALL))
    return min(found)
