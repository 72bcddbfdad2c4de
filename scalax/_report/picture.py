"""A comparison as a picture: memory against seconds, and its text, drawn by matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence

from scalax._report.memory_seconds import ABOUT, Alternative
from scalax._report.pages import visible
from scalax._report.svg import palette
from scalax._report.tables import human_bytes
from scalax.errors import MissingDependencyError

_GIB = 2**30
_LINE, _CHARACTER = 0.145, 0.075  # inches, of text of 8 points
_LEAST_WIDTH, _POINTS_HEIGHT = 9.0, 3.6
_MOST_LINES = 120
WIDTH = 120
"""The columns that text for a picture should have."""


def save_picture(
    text: str, every: Sequence[Alternative], limit: int | None, path: str | os.PathLike[str]
) -> None:
    """Draws a comparison into a file.

    Args:
        text: what is said of it, of at most `WIDTH` columns; of more than 120 lines the first are drawn.
        every: what was compared; without any, only the text is drawn.
        limit: the bytes that a device may use.
        path: the file, a PNG.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingDependencyError('pictures need matplotlib: pip install matplotlib') from error
    lines = [visible(line).replace('$', r'\$') for line in text.splitlines()]
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], f'... and {len(lines) - _MOST_LINES} lines more']
    width = max(_LEAST_WIDTH, _CHARACTER * max(map(len, lines), default=0))
    height = _LINE * (len(lines) + 2)
    points = _POINTS_HEIGHT if every else 0.0
    # Without pyplot, whose windows and settings belong to the user.
    figure = Figure(figsize=(width, height + points))
    FigureCanvasAgg(figure)
    figure.text(
        0.02, 1 - _LINE / (height + points), '\n'.join(lines), family='monospace', fontsize=8, va='top'
    )
    if every:
        whole = height + points
        axes = figure.add_axes((0.09, 0.6 / whole, 0.86, (points - 1.1) / whole))
        colors = palette()
        for each in every:
            color = colors['bad' if each.fits is False else 'good' if each.is_best else 'muted']
            x = each.memory / _GIB
            axes.plot([x, x], [1e3 * each.bound, 1e3 * each.estimate], color=color, linewidth=1)
            axes.plot([x], [1e3 * each.estimate], marker='o', color=color)
        if limit is not None and max(each.memory for each in every) > limit / 3:
            axes.axvline(limit / _GIB, color=colors['bad'], linestyle='--')
        known = '' if limit is None else f', the limit is {human_bytes(limit)}'
        axes.set(xlabel=f'memory of a device, GiB{known}', ylabel='milliseconds of a step')
        axes.set_xlim(0, 1.03 * axes.get_xlim()[1])
        axes.set_ylim(bottom=0)
        axes.set_title(ABOUT, fontsize=8, loc='left')
    figure.savefig(path, format='png', dpi=150)
