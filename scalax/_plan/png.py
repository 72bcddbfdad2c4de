"""Plans as pictures: the bars and the torus of the page, drawn by matplotlib."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from scalax._plan.figure_data import NO_DEVICE, AxisOnTorus, axes_on_torus, memory_bars, time_bars
from scalax._plan.text import head, verdict
from scalax._report.pages import visible
from scalax._report.svg import told_apart
from scalax._report.tables import human_bytes
from scalax.errors import MissingDependencyError

if TYPE_CHECKING:
    from scalax._plan.plan import Plan

_MOST_LAYERS = 8
_WIDTH = 10.0  # inches
_GIB = 2**30


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
    bars = [] if roofline is None else time_bars(roofline)
    torus = [chips for chips in axes_on_torus(plan.mesh, plan.places) if not chips.across]
    heights = [1.9, *([0.9 + 0.32 * len(bars)] if bars else []), *[0.7 + _WIDTH / _MOST_LAYERS] * len(torus)]
    # Without pyplot, whose windows and settings belong to the user.
    figure = Figure(figsize=(_WIDTH, sum(heights)), layout='constrained')
    FigureCanvasAgg(figure)
    parts: Any = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)
    parts = parts[:, 0]
    _draw_memory(parts[0], plan)
    if bars:
        _draw_times(parts[1], bars)
    for part, chips in zip(parts[len(parts) - len(torus) :], torus, strict=True):
        _draw_torus(part, chips)
    figure.savefig(path, format='png', dpi=150)


def _draw_memory(part: Any, plan: Plan) -> None:
    axes = part.subplots()
    whole, bars = memory_bars(plan.memory)
    left = 0.0
    for bar in bars:
        label = _plain(f'{bar.label}, {human_bytes(round(bar.value))}')
        axes.barh([0], [bar.value / _GIB], left=left, color=bar.color, label=label)
        left += bar.value / _GIB
    if plan.memory.limit is not None:
        axes.axvline(plan.memory.limit / _GIB, color='black', linestyle='--', label='limit')
    axes.set(xlim=(0, 1.02 * whole / _GIB), yticks=[], xlabel='GiB')
    axes.set_title(f'{_plain(head(plan))}\nmemory: {_plain(verdict(plan))}', fontsize=10, loc='left')
    part.legend(loc='outside lower center', ncols=4, fontsize=8, frameon=False)


def _draw_times(part: Any, bars: list[Any]) -> None:
    axes = part.subplots()
    drawn = axes.barh(
        [_plain(f'{bar.label} (bounds)' if bar.marked else bar.label) for bar in bars],
        [1e3 * bar.value for bar in bars],
        color=[bar.color for bar in bars],
    )
    axes.bar_label(drawn, fmt='%.3g ms', padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_title('milliseconds of one call', fontsize=10, loc='left')


def _draw_torus(part: Any, chips: AxisOnTorus) -> None:
    from matplotlib.colors import ListedColormap

    layers = chips.layers[:_MOST_LAYERS]
    several = len(chips.layers) > 1
    rest = (
        f', the first {len(layers)} of {len(chips.layers)} layers' if len(chips.layers) > len(layers) else ''
    )
    slices = f', the first of {chips.slices} slices' if chips.slices > 1 else ''
    part.suptitle(
        _plain(f'{chips.label}{rest}{slices}'),
        fontsize=10,
        x=0.02,
        ha='left',
    )
    colors = ListedColormap(told_apart(chips.size))
    for z, axes in enumerate(np.atleast_1d(part.subplots(1, _MOST_LAYERS))):
        axes.set_axis_off()
        if z < len(layers):
            layer = np.ma.masked_equal(layers[z], NO_DEVICE)
            axes.pcolormesh(
                layer, cmap=colors, vmin=-0.5, vmax=chips.size - 0.5, edgecolors='w', linewidth=0.5
            )
            axes.set_aspect('equal')
            axes.invert_yaxis()
            if several:
                axes.set_title(f'z={z}', fontsize=8)


def _plain(text: str) -> str:
    r"""The text escaped for matplotlib, which reads text between two dollars as a formula.

    Example:
        >>> _plain('$x$')
        '\\$x\\$'
    """
    return visible(text).replace('$', r'\$')
