"""Plans as pictures: the headline, the bars and the torus of the page, drawn by matplotlib."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from scalax._plan.figure_data import bound_texts, memory_parts, time_parts
from scalax._plan.text import head, no_seconds, shown_fits, verdict
from scalax._plan.torus_figures import NO_DEVICE, AxisOnTorus, axes_on_torus
from scalax._report.blocks import OPEN, Part
from scalax._report.pages import visible
from scalax._report.svg import axis_color, ink, palette, shades
from scalax._report.tables import milliseconds
from scalax.errors import MissingDependencyError

if TYPE_CHECKING:
    from scalax._plan.plan import Plan

_MOST_LAYERS = 8
_WIDTH = 10.0  # inches
_HEAD = 1.15
_GIB = 2**30
_LABELLED = 8  # squares in a row that numbers fit into
_HATCHED = {'recomputed': ('backward', 'forward'), 'gaps': ('track', 'muted')}


def save_png(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Draws a plan into a file.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingDependencyError('pictures of plans need matplotlib: pip install matplotlib') from error
    roofline = plan.known_roofline
    times = {} if roofline is None else time_parts(plan, roofline)
    torus = [chips for chips in axes_on_torus(plan.mesh, plan.places, plan.device_kind) if not chips.across]
    heights = [
        _HEAD,
        1.5,
        *([1.0 + 0.32 * len(times)] if times else []),
        *[0.7 + _WIDTH / _MOST_LAYERS] * len(torus),
    ]
    # Without pyplot, whose windows and settings belong to the user.
    figure = Figure(figsize=(_WIDTH, sum(heights)), layout='constrained')
    FigureCanvasAgg(figure)
    parts: Any = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)
    parts = parts[:, 0]
    _draw_head(parts[0], plan)
    _draw_memory(parts[1], plan)
    if roofline is not None and times:
        _draw_times(parts[2], times, roofline.bound, plan.not_compiled_for)
    for part, chips in zip(parts[len(parts) - len(torus) :], torus, strict=True):
        _draw_torus(part, chips)
    figure.savefig(path, format='png', dpi=150)


def _draw_head(part: Any, plan: Plan) -> None:
    """The name, the verdict as a badge, and the headline figures."""
    colors, roofline = palette(), plan.known_roofline
    part.text(0.02, 0.72, _plain(_short(head(plan), 95)), fontsize=12, fontweight='bold', va='center')
    said, tone = shown_fits(plan)
    ground = colors[f'{tone}-ground'] if tone else colors['raised']
    box = {'boxstyle': 'round,pad=0.4,rounding_size=0.9', 'facecolor': ground, 'edgecolor': 'none'}
    ink_ = colors[tone or 'text']
    part.text(0.03, 0.27, said, fontsize=11, fontweight='bold', color=ink_, bbox=box, va='center')
    if roofline is not None:
        figures = [f'{value}\n{label.partition(";")[0]}' for label, value in bound_texts(roofline).items()]
    else:
        lines, code = no_seconds(plan)
        figures = ['\n'.join(_short(line.partition('. ')[0], 90) for line in (*lines, *code))]
    for place, text in enumerate(figures):
        part.text(0.24 + 0.26 * place, 0.27, _plain_lines(text), fontsize=10, va='center')


def _draw_memory(part: Any, plan: Plan) -> None:
    axes = part.subplots()
    limit = plan.memory.limit
    left = 0.0
    for each in memory_parts(plan.memory):
        label = _plain(f'{each.label}, {each.text}')
        _bar(axes, 0, each.value / _GIB, left, each, label)
        left += each.value / _GIB
    # Without a limit, a bar over the whole width would read as full.
    whole = OPEN * left if limit is None else 1.02 * max(left, limit / _GIB)
    if limit is not None:
        axes.axvline(limit / _GIB, color=palette()['bad'], linestyle='--', label='limit')
    axes.set(xlim=(0, whole or 1), yticks=[], xlabel='GiB')
    known = ', no limit is known' if limit is None else ''
    axes.set_title(
        f'memory of each device: {_plain(_short(verdict(plan), 90))}{known}', fontsize=10, loc='left'
    )
    part.legend(loc='outside lower center', ncols=5, fontsize=8, frameon=False)


def _draw_times(part: Any, times: dict[str, list[Part]], bound: str, caveat: str) -> None:
    axes = part.subplots()
    known: dict[str, Any] = {}
    for row, parts in enumerate(times.values()):
        left = 0.0
        for each in parts:
            known[each.kind] = _bar(axes, row, 1e3 * each.value, left, each, '')
            left += 1e3 * each.value
        axes.text(left, row, f' {milliseconds(left / 1e3)}', fontsize=8, va='center')
    names = [_plain(_short(name, 30)) + (' (bounds)' if name == bound else '') for name in times]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    title = _plain(_short(f'milliseconds of one call{", " if caveat else ""}{caveat}', 110))
    axes.set_title(title, fontsize=10, loc='left')
    part.legend(known.values(), known, loc='outside lower center', ncols=5, fontsize=8, frameon=False)


def _bar(axes: Any, row: int, width: float, left: float, part: Part, label: str) -> Any:
    """A part of a bar, in the colour that it has on a page."""
    colors = palette()
    ground, lines = _HATCHED.get(part.kind, (part.kind, ''))
    hatch = {'hatch': '////', 'edgecolor': colors[lines], 'linewidth': 0} if lines else {}
    return axes.barh([row], [width], left=left, height=0.7, facecolor=colors[ground], label=label, **hatch)


def _draw_torus(part: Any, chips: AxisOnTorus) -> None:
    layers = chips.layers[:_MOST_LAYERS]
    several = len(chips.layers) > 1
    rest = (
        f', the first {len(layers)} of {len(chips.layers)} layers' if len(chips.layers) > len(layers) else ''
    )
    slices = f', the first of {chips.slices} slices' if chips.slices > 1 else ''
    part.suptitle(_plain(_short(f'{chips.label}{rest}{slices}', 110)), fontsize=10, x=0.02, ha='left')
    for z, axes in enumerate(np.atleast_1d(part.subplots(1, _MOST_LAYERS))):
        axes.set_axis_off()
        if z < len(layers):
            _draw_layer(axes, chips, z)
            if several:
                axes.set_title(f'z={z}', fontsize=8)


def _draw_layer(axes: Any, chips: AxisOnTorus, z: int) -> None:
    """The squares of a layer, with their places along the axis, and the links between them."""
    from matplotlib.collections import LineCollection, PolyCollection

    color = axis_color(chips.number)
    colors = shades(color, chips.size)
    for is_own, style in ((False, ('#bbbbbb', 1.0)), (True, (color, 2.0))):
        lines = [(link.start, link.end) for link in chips.links(z) if link.is_own is is_own]
        axes.add_collection(LineCollection(lines, colors=style[0], linewidths=style[1], zorder=1))
    layer = chips.layers[z]
    at = [(x, y, int(layer[y, x])) for y, x in zip(*np.nonzero(layer != NO_DEVICE), strict=True)]
    half = 0.33
    squares = [
        [(x - half, y - half), (x + half, y - half), (x + half, y + half), (x - half, y + half)]
        for x, y, _ in at
    ]
    axes.add_collection(PolyCollection(squares, facecolors=[colors[index] for *_, index in at], zorder=2))
    if max(layer.shape) <= _LABELLED:
        for x, y, index in at:
            axes.text(
                x, y, str(index), fontsize=6, ha='center', va='center', color=ink(colors[index]), zorder=3
            )
    axes.set(xlim=(-0.6, layer.shape[1] - 0.4), ylim=(layer.shape[0] - 0.4, -0.6))
    axes.set_aspect('equal')


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f'{text[: most - 3]}...'


def _plain_lines(text: str) -> str:
    return '\n'.join(map(_plain, text.split('\n')))


def _plain(text: str) -> str:
    r"""The text escaped for matplotlib, which reads text between two dollars as a formula.

    Example:
        >>> _plain('$x$')
        '\\$x\\$'
    """
    return visible(text).replace('$', r'\$')
