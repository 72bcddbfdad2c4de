"""A report as a table of text, as wide as the terminal."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scalax.explain._report import ReportRow, ShardingReport

_HEADS = ('path', 'array', 'spec', 'bytes/device', 'rule')
_RULE = 4  # the column of the rules
_LEAST_RULE = 24


def human_bytes(count: int) -> str:
    """A number of bytes in binary units.

    Example:
        >>> human_bytes(1536), human_bytes(3), human_bytes(5 * 2**40)
        ('1.5 KiB', '3 B', '5.0 TiB')
    """
    size = float(count)
    for unit in ('B', 'KiB', 'MiB', 'GiB', 'TiB'):
        if size < 1024 or unit == 'TiB':
            return f'{int(size)} B' if unit == 'B' else f'{size:.1f} {unit}'
        size /= 1024
    raise AssertionError('unreachable')


def render_table(report: ShardingReport, width: int | None = None) -> str:
    """The report as text, no line wider than *width* columns (default: the terminal's).

    The column of rules is left out where too little of it would be seen.
    """
    width = max(60, width or shutil.get_terminal_size((120, 24)).columns)
    cells = [_HEADS, *(_cells(row) for row in report.rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADS))]
    room = width - sum(widths[:_RULE] + [2] * _RULE)
    note = []
    if room >= min(_LEAST_RULE, widths[_RULE]):
        widths[_RULE] = min(room, widths[_RULE])
    else:
        widths.pop()
        _shrink(widths, width - 2 * (len(widths) - 1))
        note = [f'(the rules need {width + _LEAST_RULE - room} columns or more: to_text(width=...))']
    lines = [_line(line, widths) for line in cells]
    lines.insert(1, '-' * min(width, sum(widths) + 2 * (len(widths) - 1)))
    return '\n'.join([*lines, *_footer(report), *note])


def _cells(row: ReportRow) -> tuple[str, str, str, str, str]:
    spec = 'compiler' if row.spec is None else 'replicated' if row.is_replicated else str(row.spec)
    if row.memory_kind is not None:
        spec = f'{spec} in {row.memory_kind}'
    array = f'{row.dtype}[{",".join(map(str, row.shape))}]'
    return row.path or '(leaf)', array, spec, human_bytes(row.bytes_per_device), row.why


def _shrink(widths: list[int], room: int) -> None:
    """Takes columns from whichever is widest, until the table fits."""
    least = [12, 10, 8, 10]
    while sum(widths) > room:
        over = [(w - m, column) for column, (w, m) in enumerate(zip(widths, least, strict=True))]
        spare, column = max(over)
        if spare <= 0:
            return
        widths[column] -= 1


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    texts = []
    for column, (text, width) in enumerate(zip(cells, widths, strict=False)):
        if len(text) > width:
            # The end of a path tells leaves apart; of everything else the beginning says more.
            text = f'...{text[len(text) - width + 3 :]}' if column == 0 else f'{text[: width - 3]}...'
        texts.append(text.rjust(width) if column == 3 else text.ljust(width))
    return '  '.join(texts).rstrip()


def _footer(report: ShardingReport) -> list[str]:
    mesh = ', '.join(f'{name}={size}' for name, size in report.mesh.items())
    replicated = report.replicated
    lines = [
        '',
        f'{_arrays(len(report.rows))}, {human_bytes(report.bytes)} in all, '
        f'{human_bytes(report.bytes_per_device)} on each device of the mesh ({mesh})',
        f'replicated: {_arrays(len(replicated.paths))}, {human_bytes(replicated.bytes)} on each device',
    ]
    if report.unused_rules:
        lines.append(f'regexes that match nothing: {", ".join(map(repr, report.unused_rules))}')
    if report.shadowed_rules:
        lines.append(
            f'regexes always shadowed by earlier ones: {", ".join(map(repr, report.shadowed_rules))}'
        )
    return lines


def _arrays(count: int) -> str:
    return '1 array' if count == 1 else f'{count} arrays'
