"""Memory against seconds: the alternatives of a search as points, each a link to what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from scalax._report import blocks
from scalax._report.blocks import Point, Scale, Tone
from scalax._report.tables import human_bytes, milliseconds, three_figures

_GIB = 2**30
_TITLE = 'Memory against seconds'
ABOUT = 'Each: from the least time up to that if nothing overlaps. Green is the best.'
_NEAR = 1 / 3  # of the limit: below that, a line at the limit would leave the points no room


class Alternative(NamedTuple):
    """One of the things that were compared.

    Attributes:
        name: its name.
        memory: the bytes of a device.
        bound: the seconds at least.
        estimate: the seconds if nothing overlaps.
        fits: whether it fits; None if the limit is unknown.
        is_best: whether it is the best.
        target: the part of the page that its point is a link to; empty for none.
    """

    name: str
    memory: int
    bound: float
    estimate: float
    fits: bool | None = None
    is_best: bool = False
    target: str = ''


def memory_against_seconds(every: Sequence[Alternative], limit: int | None) -> str:
    """A section of a page; empty without alternatives.

    Args:
        every: what was compared.
        limit: the bytes that a device may use.
    """
    is_near = limit is not None and max((each.memory for each in every), default=0) > _NEAR * limit
    beyond = f'; the limit is {human_bytes(limit)}' if limit and not is_near else ''
    drawn = blocks.scatter(
        [_point(each) for each in every],
        Scale(f'memory of a device, GiB{beyond}', _GIB, limit if is_near else None),
        Scale('milliseconds of a step', 1e-3),
        _TITLE,
    )
    dashed = ' Dashed: the limit.' if is_near else ''
    return blocks.section(_TITLE, drawn, ABOUT + dashed)


def _point(each: Alternative) -> Point:
    tone: Tone = 'bad' if each.fits is False else 'good' if each.is_best else ''
    seconds = f'{three_figures(1e3 * each.bound)} to {milliseconds(each.estimate)}'
    label = f'{each.name}: {human_bytes(each.memory)}, {seconds}'
    return Point(each.memory, each.estimate, label, tone, least=each.bound, target=each.target)
