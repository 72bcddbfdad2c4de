"""Pictures as text: boxes of blocks."""

from __future__ import annotations

from scalax.visualize._blocks import Blocks, range_text
from scalax.visualize._grid import Grid, devices_text, grid_of

_MAX_RULED_ROWS = 8  # with more rows, lines between them take too much space


def drawing(blocks: Blocks, width: int) -> tuple[str, list[str]]:
    """Returns the line about the dimensions of an array, and the lines of its picture.

    Args:
        blocks: the blocks.
        width: the largest width of the picture, in characters.
    """
    texts = map(devices_text, blocks.holders.values())
    ranges = blocks.dimensions[blocks.sharded_dims[-1]].ranges if blocks.sharded_dims else ()
    labels = [*map(range_text, ranges), f'{len(ranges)} more']
    cell_width = max(map(len, [*texts, *labels])) + 2
    margin = max(len(label) for label, _ in grid_of(blocks, 3).rows) + 1
    grid = grid_of(blocks, (width - margin - 1) // (cell_width + 1))
    return grid.dimensions, _boxes(blocks, grid)


def _boxes(blocks: Blocks, grid: Grid) -> list[str]:
    cells = [
        ['...' if index is None else devices_text(blocks.at(index)) for index in row] for _, row in grid.rows
    ]
    # All cells have one width, so that equal blocks look equal.
    width = max(len(text) for row in [*cells, grid.columns] for text in row) + 2
    longest = max(len(label) for label, _ in grid.rows)
    margin = longest + 1 if longest else 0

    def rule(start: str, middle: str, end: str) -> str:
        return ' ' * margin + start + middle.join(['─' * width] * len(grid.columns)) + end

    heads = ' '.join(label.center(width) for label in grid.columns).rstrip()
    lines = [f'{" " * margin} {heads}'] if heads else []
    lines.append(rule('┌', '┬', '┐'))
    for i, ((label, _), texts) in enumerate(zip(grid.rows, cells, strict=True)):
        if i and len(grid.rows) <= _MAX_RULED_ROWS:
            lines.append(rule('├', '┼', '┤'))
        cell_texts = '│'.join(text.center(width) for text in texts)
        lines.append(f'{f"{label} ".rjust(margin) if margin else ""}│{cell_texts}│')
    return [*lines, rule('└', '┴', '┘')]
