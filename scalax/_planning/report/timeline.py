"""Timeline of the compiler's schedule on a page: lanes with kernels, collectives, copies and waits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from scalax._core.render.blocks import Block, Lines, MeshAxes
from scalax._core.render.html_pages import escape
from scalax._core.render.tables import milliseconds
from scalax._planning.time.schedule import Span

_MIN_SPAN = 0.0002  # of the width; shorter spans are not drawn
_MIN_LOOP = 0.05  # of the width; shorter loops are not expanded


@dataclasses.dataclass(frozen=True)
class Timeline(Block):
    """A lane for the device, and one for each link; below, one iteration of each loop at full width.

    Attributes:
        spans: the spans.
        seconds: the time that the full width stands for.
    """

    spans: Sequence[Span]
    seconds: float

    def html(self, mesh: MeshAxes) -> str:
        drawn = [span for span in self.spans if span.seconds >= _MIN_SPAN * self.seconds]
        lanes = ''.join(
            f'<div class="lane"><b>{lane}</b><div>'
            f'{"".join(self._bar(span) for span in drawn if span.lane == lane)}</div></div>\n'
            for lane in sorted({span.lane for span in drawn})
        )
        loops = ''.join(
            Lines([f'One iteration of {_describe(span)}:']).html(mesh)
            + Timeline(span.inside, span.seconds / span.times).html(mesh)
            for span in drawn
            if span.inside and span.seconds >= _MIN_LOOP * self.seconds
        )
        scale = f'Each division is {milliseconds(self.seconds / 10)}. The device waits in the orange spans.'
        return f'<div class="timeline">\n{lanes}</div>{Lines([scale]).html(mesh)}{loops}' if drawn else ''

    def _bar(self, span: Span) -> str:
        kind = 'wait' if span.name.startswith('wait') else 'loop' if span.inside else span.phase
        start, width = (f'{100 * time / self.seconds:.3f}%' for time in (span.start, span.seconds))
        return (
            f'<i class="{kind}" style="left: {start}; width: {width}" title="{escape(_describe(span))}"></i>'
        )


def _describe(span: Span) -> str:
    """Describes a span: ``'wait: all-gather, 3.41 ms, forward, model.py:120 block_input'``."""
    times = f'{span.times:,} x ' if span.times > 1 else ''
    return f'{times}{span.name}, {milliseconds(span.seconds / span.times)}, {span.phase}, {span.source}'
