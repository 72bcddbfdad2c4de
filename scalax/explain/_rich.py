"""Reports in colours, for terminals where rich is installed: the columns of the text table, and bars."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from scalax._report.tables import GAP, fits, lay_out, plain, terminal_width, wrapped
from scalax.explain._rows import (
    HEADS,
    Line,
    ReportRow,
    cells_of,
    fitted,
    footnotes,
    lines_of,
    totals,
)

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

# Colours of mesh axes, from the sixteen that terminal themes make readable.
_AXES = ('cyan', 'magenta', 'green', 'blue', 'bright_cyan', 'bright_magenta')
_WARN = 'yellow'
_BAR = 10
_BAR_HEAD = ''


@dataclasses.dataclass(frozen=True)
class RichTable:
    """A report as rich prints it: as wide as the console.

    Attributes:
        rows: the rows of the report.
        mesh: mesh axis name -> size.
        notes: the lines below the totals, in the colour of warnings.
    """

    rows: Sequence[ReportRow]
    mesh: Mapping[str, int]
    notes: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.text import Text

        lines = lines_of(self.rows, folded=True)
        width = terminal_width(options.max_width)
        cells, rules = _cells(lines, width, may_have_bars=not options.ascii_only)
        heads, *rows = lay_out(cells, width, 0, 3)
        text = Text(no_wrap=True, overflow='ignore')
        for line in heads:
            text.append(f'{plain(line)}\n', 'bold')
        longest = max(len(plain(line)) for row in [heads, *rows] for line in row)
        text.append(('-' if options.ascii_only else '─') * longest)
        for (_, row), pieces in zip(lines, rows, strict=True):
            for line in pieces:
                styled = [_styled(cells[0][column], text_, row, self.mesh) for column, text_ in line]
                whole = Text(GAP).join(styled)
                whole.rstrip()
                text.append('\n').append_text(whole)
        yield text
        for footnote in footnotes(rules, width):
            yield Text(footnote, 'dim')
        yield Text('\n'.join(['', *wrapped(totals(self.rows, self.mesh), width)]))
        for note in wrapped(self.notes, width):
            yield Text(note, _WARN)


def print_rich(report: RichTable, file: TextIO) -> bool:
    """Prints in colours if rich is installed and *file* is a terminal; returns whether it did."""
    isatty = getattr(file, 'isatty', None)  # the file of `print` needs `write` only
    if not isatty or not isatty() or importlib.util.find_spec('rich') is None:
        return False
    from rich.console import Console

    Console(file=file).print(report)
    return True


def _cells(
    lines: Sequence[Line], width: int, may_have_bars: bool
) -> tuple[Sequence[tuple[str, ...]], list[str]]:
    """The cells of the table, with bars if they fit, and the rules to list below it."""
    largest = max((row.bytes_per_device * fold.count for fold, row in lines), default=0)
    bars = [_bar(row.bytes_per_device * fold.count / max(1, largest)) for fold, row in lines]
    cells, below = fitted([HEADS, *(cells_of(*line) for line in lines)], width)
    with_bars = [
        (*texts, bar.ljust(_BAR), rule) for (*texts, rule), bar in zip(cells, [_BAR_HEAD, *bars], strict=True)
    ]
    return (with_bars if may_have_bars and fits(with_bars, width) else cells), below


def _styled(head: str, text: str, row: ReportRow, mesh: Mapping[str, int]) -> Text:
    """The text of a cell in the colours of its column."""
    from rich.text import Text

    if head == 'path':  # the part that many leaves share is dimmed
        shared = text.rfind('}') + 1
        return Text.assemble((text[:shared], 'dim'), text[shared:])
    if head == 'spec' and not row.is_replicated and row.spec is not None:
        colored = Text(text)
        for number, name in enumerate(mesh):
            colored.highlight_regex(re.escape(repr(name)), _AXES[number % len(_AXES)])
        return colored
    spec = _WARN if row.is_replicated else 'italic dim'
    bar = _WARN if row.is_replicated else 'blue'
    return Text(text, {'spec': spec, 'array': 'dim', 'rule': 'dim', _BAR_HEAD: bar}.get(head, ''))


def _bar(share: float) -> str:
    """A bar as long as its share, in halves of a column; a share above zero has at least one half."""
    halves = max(1, round(2 * _BAR * share)) if share else 0
    return '━' * (halves // 2) + '╸' * (halves % 2)
