"""Pictures as HTML: tables of blocks, with one colour for each group of devices."""

from __future__ import annotations

from scalax._core.render.blocks import Lines
from scalax._core.render.html_pages import escape
from scalax.errors import plural
from scalax.visualize._blocks import Blocks, Index
from scalax.visualize._grid import devices_text, grid_of

_MAX_COLUMNS = 16


def table(blocks: Blocks) -> str:
    """Returns the line about the dimensions of an array, and its blocks as a table."""
    grid, colors = grid_of(blocks, _MAX_COLUMNS), _colors(blocks)

    def cell(index: Index | None) -> str:
        if index is None:
            return '<td>...</td>'
        devices = blocks.at(index)
        style = f'background: {colors[devices]}; color: #000; text-align: center'
        title = f'{blocks.slices(index)} on {plural(len(devices), "device")}'
        return f'<td style="{style}" title="{escape(title)}">{escape(devices_text(devices))}</td>'

    def head(scope: str, label: str) -> str:
        return f'<th scope="{scope}">{escape(label).replace(":", ":<wbr/>")}</th>'  # long ranges break

    heads = ''.join(head('col', label) for label in ['', *grid.columns])
    rows = ''.join(f'<tr>{head("row", label)}{"".join(map(cell, row))}</tr>\n' for label, row in grid.rows)
    return (
        f'{Lines([grid.dimensions]).html({})}\n<div class="scroll"><table class="grid">\n'
        f'<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table></div>'
    )


def _colors(blocks: Blocks) -> dict[tuple[int, ...], str]:
    """Returns a colour for each group of devices that holds a block; grey for all devices.

    The colours follow the order of the first devices of the groups, so that on one mesh a device has a
    similar colour for every sharding.
    """
    positions = {device: i for i, device in enumerate(blocks.devices)}
    groups = sorted({*blocks.holders.values()}, key=lambda group: [positions[device] for device in group])
    return {
        group: '#ddd' if len(group) == len(positions) else f'hsl({360 * i // len(groups)} 70% 78%)'
        for i, group in enumerate(groups)
    }
