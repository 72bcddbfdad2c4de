"""The compiler's schedule as a page draws it: what runs when, beside what, and what waits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from scalax._core.render.blocks import Block, Lines, MeshAxes
from scalax._core.render.html_pages import escape
from scalax._core.render.tables import milliseconds
from scalax._planning.time.schedule import Span

_LEAST = 0.0002  # of the width: shorter spans are not drawn
_OPENED = 0.05  # of the width: shorter loops are not opened


@dataclasses.dataclass(frozen=True)
class Timeline(Block):
    """A lane for the device, and one for each link beside it; one run of a loop opens below, just as wide.

    Attributes:
        spans: what runs.
        seconds: the time that the width stands for.
    """

    spans: Sequence[Span]
    seconds: float

    def html(self, mesh: MeshAxes) -> str:
        drawn = [span for span in self.spans if span.seconds >= _LEAST * self.seconds]
        lanes = ''.join(
            f'<div class="lane"><b>{lane}</b><div>'
            f'{"".join(self._bar(span) for span in drawn if span.lane == lane)}</div></div>\n'
            for lane in sorted({span.lane for span in drawn})
        )
        loops = ''.join(
            Lines([f'One run of {_words(span)}:']).html(mesh)
            + Timeline(span.inside, span.seconds / span.times).html(mesh)
            for span in drawn
            if span.inside and span.seconds >= _OPENED * self.seconds
        )
        scale = f'A division is {milliseconds(self.seconds / 10)}; the device waits where it is orange.'
        return f'<div class="timeline">\n{lanes}</div>{Lines([scale]).html(mesh)}{loops}' if drawn else ''

    def _bar(self, span: Span) -> str:
        kind = 'wait' if span.name.startswith('wait') else 'loop' if span.inside else span.phase
        start, width = (f'{100 * time / self.seconds:.3f}%' for time in (span.start, span.seconds))
        return f'<i class="{kind}" style="left: {start}; width: {width}" title="{escape(_words(span))}"></i>'


def _words(span: Span) -> str:
    """What a span is: ``'wait: all-gather, 3.41 ms, forward, model.py:120 block_input'``."""
    runs = f'{span.times:,} x ' if span.times > 1 else ''
    return f'{runs}{span.name}, {milliseconds(span.seconds / span.times)}, {span.phase}, {span.source}'
