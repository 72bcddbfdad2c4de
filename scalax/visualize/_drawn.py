"""Drawings in SVG, side by side or one below the other, and colours that are safe for colour-blind readers.

Lines and labels are drawn in ``currentColor``, so that a picture takes the colour of the text around it.
Elements have no ids, so that two pictures on one page cannot clash.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from scalax._report.pages import escape

LINE = 20  # pixels from one line of text to the next
CHAR = 7.3  # pixels of a character of 12 px in a monospaced font, the widest of the common ones
FONT = 'ui-monospace, SFMono-Regular, Menlo, Consolas, &quot;DejaVu Sans Mono&quot;, monospace'
# Paul Tol, "Colour Schemes" (SRON technical note SRON/EPS/TN/09-002): the scheme "light", made for text on
# it, ordered so that neighbours differ; and the scale "iridescent" without its white end and the colours of
# its dark end on which black text has less than the contrast of 4.5 to 1 that WCAG 2 asks.
_FEW = ('#77AADD', '#EE8866', '#44BB99', '#FFAABB', '#EEDD88', '#99DDFF', '#BBCC33', '#AAAA00')
_SCALE = (
    *('#EAF0B5', '#DDECBF', '#D0E7CA', '#C2E3D2', '#B5DDD8', '#A8D8DC', '#9BD2E1', '#8DCBE4', '#81C4E7'),
    *('#7BBCE7', '#7EB2E4', '#88A5DD', '#9398D2', '#9B8AC4', '#9D7DB2', '#9A709E'),
)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Part of a picture: SVG elements whose upper left corner is at the origin, and their size."""

    body: str
    width: float
    height: float

    def at(self, x: float, y: float) -> str:
        """The elements, moved."""
        return f'<g transform="translate({number(x)} {number(y)})">{self.body}</g>' if self.body else ''


def text_lines(lines: Sequence[str], weight: str = 'normal') -> Drawn:
    """Lines of text; leading blanks are kept."""
    body = ''.join(
        f'<text x="0" y="{14 + row * LINE}" fill="currentColor" font-weight="{weight}" '
        f'xml:space="preserve">{escape(line)}</text>'
        for row, line in enumerate(lines)
    )
    return Drawn(body, max(map(len, lines), default=0) * CHAR, len(lines) * LINE)


def beside(parts: Sequence[Drawn], gap: float) -> Drawn:
    """Parts side by side."""
    body, x = [], 0.0
    for part in parts:
        body.append(part.at(x, 0))
        x += part.width + gap
    return Drawn(''.join(body), x - gap, max(part.height for part in parts))


def below(parts: Sequence[Drawn], gap: float) -> Drawn:
    """Parts one below the other."""
    body, y = [], 0.0
    for part in parts:
        body.append(part.at(0, y))
        y += part.height + gap
    return Drawn(''.join(body), max(part.width for part in parts), y - gap)


def document(drawn: Drawn, label: str, style: str, margin: float = 2) -> str:
    """A whole ``<svg>`` element, with a title for screen readers.

    Args:
        drawn: its content.
        label: a description of the picture.
        style: CSS for the element.
        margin: the pixels around it.
    """
    width, height = number(drawn.width + 2 * margin), number(drawn.height + 2 * margin)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(label)}" '
        f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" style="{style}" '
        f'font-family="{FONT}" font-size="12"><title>{escape(label)}</title>'
        f'{drawn.at(margin, margin)}</svg>'
    )


def number(value: float) -> str:
    """A number as short as SVG takes it.

    Example:
        >>> number(12.0), number(7.25)
        ('12', '7.2')
    """
    return f'{value:.1f}'.removesuffix('.0')


def told_apart(count: int) -> list[str]:
    """That many colours; if they are many, neighbours look alike.

    Example:
        >>> told_apart(2), len(set(told_apart(100)))
        (['#77AADD', '#EE8866'], 100)
    """
    if count <= len(_FEW):
        return list(_FEW[:count])
    return [scaled(i / (count - 1)) for i in range(count)]


def scaled(fraction: float) -> str:
    """The colour at a place of the scale, from 0 to 1.

    Example:
        >>> scaled(0), scaled(0.5), scaled(1)
        ('#EAF0B5', '#87C8E6', '#9A709E')
    """
    exact = fraction * (len(_SCALE) - 1)
    lower = min(int(exact), len(_SCALE) - 2)
    pairs = zip(_parts(_SCALE[lower]), _parts(_SCALE[lower + 1]), strict=True)
    return '#' + ''.join(f'{round(one + (other - one) * (exact - lower)):02X}' for one, other in pairs)


def _parts(text: str) -> list[int]:
    return [int(text[start : start + 2], 16) for start in (1, 3, 5)]
