"""Mesh axes on the torus as SVG: squares in shades of the colour of the axis, labels, and links."""

from __future__ import annotations

import collections

from scalax._plan.torus_figures import NO_DEVICE, AxisOnTorus
from scalax._report.svg import CHAR, Drawn, axis_color, document, ink, number, shades, text_lines

_MOST_LAYERS = 32
_PANEL = 190  # pixels: the largest width of a layer of chips
_SQUARE, _SMALLEST = 24.0, 5.0
_GAP = 0.5  # of a square
_LABELLED = 13.0  # pixels of a square that a number of two digits fits into
_MARGIN = 12.0


def layers(chips: AxisOnTorus) -> str:
    """A drawing for each layer of chips, and how many are left out."""
    shown = chips.layers[:_MOST_LAYERS]
    drawn = ''.join(
        document(_panel(chips, z), f'{chips.label}{f", z={z}" if len(chips.layers) > 1 else ""}', '')
        for z in range(len(shown))
    )
    rest = len(chips.layers) - len(shown)
    return drawn + (f'<p class="note">... and {rest} more layers</p>' if rest else '')


def _panel(chips: AxisOnTorus, z: int) -> Drawn:
    head = text_lines([f'z={z}']) if len(chips.layers) > 1 else Drawn('', 0, 0)
    body = _layer(chips, z)
    return Drawn(head.body + body.at(0, head.height), max(head.width, body.width), head.height + body.height)


def _layer(chips: AxisOnTorus, z: int) -> Drawn:
    layer = chips.layers[z]
    high, wide = layer.shape
    pitch = min(_SQUARE * (1 + _GAP), max(_SMALLEST * (1 + _GAP), _PANEL / max(high, wide)))
    square = pitch / (1 + _GAP)
    colors = shades(axis_color(chips.number), chips.size)
    middle = _MARGIN + square / 2
    lines: dict[bool, list[str]] = {False: [], True: []}
    for link in chips.links(z):
        (x1, y1), (x2, y2) = link.start, link.end
        move = f'h{number((x2 - x1) * pitch)}' if y1 == y2 else f'v{number((y2 - y1) * pitch)}'
        lines[link.is_own].append(f'M{number(middle + x1 * pitch)} {number(middle + y1 * pitch)}{move}')
    body = [
        f'<path d="{"".join(lines[is_own])}" fill="none" {style}/>'
        for is_own, style in (
            (False, 'stroke="currentColor" stroke-opacity="0.3"'),
            (True, f'stroke="{axis_color(chips.number)}" stroke-width="{number(max(2, square / 6))}"'),
        )
        if lines[is_own]
    ]
    squares: dict[int, list[str]] = collections.defaultdict(list)
    labels: dict[int, list[str]] = collections.defaultdict(list)
    side = number(square)
    for y, row in enumerate(layer.tolist()):
        for x, index in enumerate(row):
            if index == NO_DEVICE:
                continue
            left, top = _MARGIN + x * pitch, _MARGIN + y * pitch
            squares[index].append(f'M{number(left)} {number(top)}h{side}v{side}h-{side}z')
            if square >= _LABELLED and len(str(index)) * CHAR * 0.85 <= square:
                at = f'x="{number(left + square / 2)}" y="{number(top + square / 2 + 3.5)}"'
                labels[index].append(f'<text {at}>{index}</text>')
    for index, path in squares.items():
        body.append(f'<path d="{"".join(path)}" fill="{colors[index]}"/>')
    for index, texts in labels.items():
        body.append(
            f'<g text-anchor="middle" font-size="10" fill="{ink(colors[index])}">{"".join(texts)}</g>'
        )
    size = 2 * _MARGIN - _GAP * square
    return Drawn(''.join(body), wide * pitch + size, high * pitch + size)
