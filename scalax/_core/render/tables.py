"""Text tables that fit the width of the terminal without truncation, and texts of units.

A path that is too long for its column gets its own line, above the rest of its row. If the other columns do
not fit either, every path gets its own line, and the rest of its row is packed below it.
"""

from __future__ import annotations

import math
import re
import shutil
import textwrap
from collections.abc import Container, Iterable, Sequence

from scalax._core.render.html_pages import visible
from scalax.errors import ArgumentError

GAP = '  '
_INDENT = 4
_PREFIXES = (('E', 1e18), ('P', 1e15), ('T', 1e12), ('G', 1e9), ('M', 1e6), ('k', 1e3))
_MIN_EXPONENT = -4  # of numbers that are written without an exponent
_UNITS = {'': 1, 'B': 1, **{f'{unit}iB': 1 << 10 * power for power, unit in enumerate('KMGT', 1)}}
_UNITS |= {f'{unit}B': 10 ** (3 * power) for power, unit in enumerate('KMGT', 1)}
_NO_BREAK = '\u00a0'
_BEFORE_UNIT = re.compile(r'(?<=\d) (?=(?:[KMGT]iB|B|ms|%)(?!\w))')
_MIN_PATH_WIDTH = 20  # characters of a line for the parts of a path


def human_bytes(count: int) -> str:
    """Formats a number of bytes in binary units.

    Example:
        >>> human_bytes(1536), human_bytes(3), human_bytes(5 * 2**40)
        ('1.5 KiB', '3 B', '5.0 TiB')
    """
    if count < 1024:
        return f'{count} B'
    size = count / 1024
    for unit in ('KiB', 'MiB', 'GiB'):
        if size < 1024:
            return f'{size:.1f} {unit}'
        size /= 1024
    return f'{size:.1f} TiB'


def parse_bytes(text: str) -> int:
    """Parses a size such as ``'16GiB'`` or ``'80GB'`` as a number of bytes. Returns 0 for any other text.

    Example:
        >>> parse_bytes('2 KiB'), parse_bytes('80GB'), parse_bytes('17'), parse_bytes('many')
        (2048, 80000000000, 17, 0)
    """
    match = re.fullmatch(r'(\d{1,15}(?:\.\d{1,9})?) ?([KMGT]?i?B|)', text.strip())
    return int(float(match[1]) * _UNITS.get(match[2], 0)) if match else 0


def signed_bytes(change: int) -> str:
    """Formats a difference in bytes, with its sign.

    Example:
        >>> signed_bytes(1536), signed_bytes(-3)
        ('+1.5 KiB', '-3 B')
    """
    return f'{"-" if change < 0 else "+"}{human_bytes(abs(change))}'


def three_figures(value: float) -> str:
    """Formats a number with three significant figures, because times of equal steps differ in the third.

    Example:
        >>> [three_figures(value) for value in (1959.974, 56.93, 3.1, 0.01234, 0, math.inf)]
        ['1,960', '56.9', '3.10', '0.0123', '0', 'inf']
    """
    if not value or not math.isfinite(value):
        return f'{value:g}'
    rounded = float(f'{value:.2e}')
    exponent = math.floor(math.log10(abs(rounded)))
    return f'{rounded:.3g}' if exponent < _MIN_EXPONENT else f'{rounded:,.{max(0, 2 - exponent)}f}'


def milliseconds(seconds: float) -> str:
    """Formats a time in milliseconds.

    Example:
        >>> milliseconds(1.5), milliseconds(0.0123456)
        ('1,500 ms', '12.3 ms')
    """
    return f'{three_figures(1e3 * seconds)} ms'


def human_flops(count: float) -> str:
    """Formats a number of floating-point operations.

    Example:
        >>> human_flops(1.673e16), human_flops(999_600), human_flops(12)
        ('16.7 PFLOPs', '1.00 MFLOPs', '12 FLOPs')
    """
    rounded = float(f'{count:.2e}')
    for prefix, size in _PREFIXES:
        if rounded >= size:
            return f'{three_figures(rounded / size)} {prefix}FLOPs'
    return f'{count:,.0f} FLOPs'


def array_text(dtype: str, shape: Sequence[int]) -> str:
    """Formats the type of an array as tables show it.

    Example:
        >>> array_text('float32', (8, 16))
        'float32[8,16]'
    """
    return f'{dtype}[{",".join(map(str, shape))}]'


def terminal_width(width: int | None) -> int:
    """Returns the width of a table in columns: *width*, or the width of the terminal; at least 60.

    Raises:
        ArgumentError: *width* is not a number of columns.
    """
    if width is not None and (not isinstance(width, int) or isinstance(width, bool)):
        raise ArgumentError(f'width is a number of columns or None, got {width!r}')
    return max(60, width or shutil.get_terminal_size((120, 24)).columns)


def fits(cells: Sequence[Sequence[str]], width: int) -> bool:
    """Returns whether each row fits on one line."""
    widths = _widths(cells)
    return sum(widths) + len(GAP) * (len(widths) - 1) <= width


def table(cells: Sequence[Sequence[str]], width: int, path: int, right: Container[int]) -> list[str]:
    """Returns the lines of a table, with underlined headings and without terminal control characters.

    Args:
        cells: the headings and the rows.
        width: the largest width of a line.
        path: the index of the column that may take lines of its own.
        right: the indices of the columns that are aligned to the right.
    """
    cells = [[visible(text) for text in texts] for texts in cells]
    widths = _widths(cells)
    room = width - sum(widths) - len(GAP) * (len(widths) - 1) + widths[path]
    if room < len(cells[0][path]):
        rows = [_packed_row(texts, widths, width, path, right) for texts in cells]
    else:
        widths[path] = max(len(texts[path]) for texts in cells if len(texts[path]) <= room)
        rows = [_aligned_row(texts, widths, width, path, right) for texts in cells]
    heads, *others = [[line.rstrip() for line in row] for row in rows]
    lines = [line for row in others for line in row]
    return [*heads, '-' * max(map(len, [*heads, *lines])), *lines]


def with_footnotes(cells: Sequence[Sequence[str]]) -> tuple[list[list[str]], list[str]]:
    """Replaces the texts of the last column by footnote marks. Returns the cells and the footnotes."""
    heads, *rows = cells
    texts = dict.fromkeys(text for *_, text in rows if text)
    marks = {text: f'[{number}]' for number, text in enumerate(texts, 1)}
    marked = [[*others, marks.get(text, '')] for *others, text in rows]
    return [[*heads], *marked], [f'{mark} {text}' for text, mark in marks.items()]


def wrap_lines(lines: Iterable[str], width: int) -> list[str]:
    """Wraps lines at *width*, without terminal control characters. Numbers stay with their units."""
    indent = ' ' * _INDENT
    joined = (_BEFORE_UNIT.sub(_NO_BREAK, visible(line)) for line in lines)
    return [
        part.replace(_NO_BREAK, ' ')
        for line in joined
        for part in textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False)
    ]


_BREAKS = ('/', ', ', ',', ' ', '.')


def break_text(text: str, room: int) -> list[str]:
    """Breaks a text into parts no longer than *room*: after a slash, or else a comma, a space or a dot.

    Example:
        >>> break_text('layers/{0..11}/attention', 16), break_text("P('fsdp', 'tp')", 10)
        (['layers/{0..11}/', 'attention'], ["P('fsdp', ", "'tp')"])
        >>> break_text('halo exchange: train.py:178 make_step', 32)
        ['halo exchange: train.py:178 ', 'make_step']
    """
    parts, room = [], max(room, 1)
    while len(text) > room:
        inside = text[:room].lstrip()  # no part is only the indentation
        ends = (text.rfind(mark, 0, room) + len(mark) for mark in _BREAKS if mark in inside)
        end = next(ends, room)
        parts.append(text[:end])
        text = text[end:]
    return [*parts, text]


def _widths(cells: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*cells, strict=True)]


def _padded(texts: Sequence[str], widths: Sequence[int], right: Container[int]) -> list[str]:
    pairs = enumerate(zip(texts, widths, strict=False))
    return [text.rjust(width) if i in right else text.ljust(width) for i, (text, width) in pairs]


def _aligned_row(
    texts: Sequence[str], widths: Sequence[int], width: int, path: int, right: Container[int]
) -> list[str]:
    """Returns the lines of a row. A path that is too long for its column is above the rest."""
    path_lines: list[str] = []
    if len(texts[path]) > widths[path]:
        path_lines = _path_lines(texts, widths, width, path, right)
        texts = [*[''] * (path + 1), *texts[path + 1 :]]
    return [*path_lines, GAP.join(_padded(texts, widths, right))] if any(texts) else path_lines


def _path_lines(
    texts: Sequence[str], widths: Sequence[int], width: int, path: int, right: Container[int]
) -> list[str]:
    """Returns the lines of a path, after the columns before it."""
    before = ''.join(f'{text}{GAP}' for text in _padded(texts[:path], widths, right))
    room = width - len(before)
    first, *others = break_text(texts[path], room if len(texts[path]) <= room else room - len(GAP))
    return [before + first, *(f'{" " * len(before)}{GAP}{name}' for name in others)]


def _packed_row(
    texts: Sequence[str], widths: Sequence[int], width: int, path: int, right: Container[int]
) -> list[str]:
    """Returns the lines of a row whose path has its own lines, and whose other columns are packed."""
    if width - sum(size + len(GAP) for size in widths[:path]) >= _MIN_PATH_WIDTH:
        lines, rest = _path_lines(texts, widths, width, path, right), texts[path + 1 :]
    else:  # the columns before the path leave no room for it on their line
        lines, rest = break_text(texts[path], width), [*texts[:path], *texts[path + 1 :]]
    line = ''
    for text in filter(None, rest):
        for part in break_text(text, width - _INDENT):
            if line and len(line) + len(GAP) + len(part) <= width:
                line += GAP + part
            else:
                lines += [line] * bool(line)
                line = ' ' * _INDENT + part
    return [*lines, *[line] * bool(line)]
