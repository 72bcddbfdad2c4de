"""How does a report look in a terminal with colours? The columns of the text table, and bars."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from scalax.explain._rows import ReportRow
from scalax.explain._text import HEADS, cells_of, columns, cut, fitted, idle_notes, lines_of, totals

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

    from scalax.explain._report import ShardingReport

# Colours of mesh axes, of the sixteen that every terminal's theme makes readable.
_AXES = ('cyan', 'magenta', 'green', 'blue', 'bright_cyan', 'bright_magenta')
_WARN = 'yellow'
_BAR = 10
_RULES_BESIDE_BAR = 40  # the columns that rules have at least before there is a bar


@dataclasses.dataclass(frozen=True)
class RichReport:
    """What rich prints of a report: as wide as the console lets it be."""

    report: ShardingReport

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        report = self.report
        lines = lines_of(report.rows, folded=True)
        cells = [cells_of(*line) for line in lines]
        widths, hint, has_bars = _layout([HEADS, *cells], columns(options.max_width))
        has_bars = has_bars and not options.ascii_only

        # Two columns of space between columns, of which a box takes one.
        has_box = not options.ascii_only
        table = Table(
            box=box.SIMPLE_HEAD if has_box else None,
            show_edge=False,
            pad_edge=False,
            padding=(0, 1 if has_box else 2, 0, 0),
        )
        for head, width in zip(HEADS, widths, strict=False):
            is_size = head == HEADS[3]
            table.add_column(head, justify='right' if is_size else 'left', no_wrap=True, width=width)
            if is_size and has_bars:
                table.add_column('', no_wrap=True, width=_BAR)
        largest = max((row.bytes_per_device * fold.count for fold, row in lines), default=0)
        for (fold, row), texts in zip(lines, cells, strict=True):
            path, array, spec, number, *rule = (
                cut(text, width, column == 0)
                for column, (text, width) in enumerate(zip(texts, widths, strict=False))
            )
            share = row.bytes_per_device * fold.count / max(1, largest)
            bar = [_bar(share, _WARN if row.is_replicated else 'blue')] if has_bars else []
            table.add_row(
                _path_text(path),
                Text(array, 'dim'),
                _spec_text(spec, row, report.mesh),
                Text(number),
                *bar,
                *[Text(text, 'dim') for text in rule],
            )
        yield table
        yield Text('\n'.join(['', *totals(report.rows, report.mesh)]))
        for note in idle_notes(report.unused_rules, report.shadowed_rules):
            yield Text(note, _WARN)
        for text in hint:
            yield Text(text, 'dim')


def print_report(report: ShardingReport, file: TextIO | None) -> None:
    """Prints with rich if it is installed and *file* is a terminal."""
    out = sys.stdout if file is None else file
    if out.isatty() and importlib.util.find_spec('rich') is not None:
        from rich.console import Console

        Console(file=out).print(RichReport(report))
    else:
        print(report, file=out)


def _layout(cells: Sequence[tuple[str, ...]], width: int) -> tuple[list[int], list[str], bool]:
    """The widths of the columns, what to say of those left out, and whether there is room for bars."""
    widths, hint = fitted(cells, width)
    beside_bar, _ = fitted(cells, width - _BAR - 2)
    if len(widths) < len(HEADS):
        return widths, hint, beside_bar == widths
    longest = max(len(line[-1]) for line in cells)
    if len(beside_bar) == len(HEADS) and beside_bar[-1] >= min(_RULES_BESIDE_BAR, longest):
        return beside_bar, hint, True
    return widths, hint, False


def _path_text(path: str) -> Text:
    """What many leaves share steps back."""
    from rich.text import Text

    shared = path.rfind('}') + 1
    return Text.assemble((path[:shared], 'dim'), path[shared:])


def _spec_text(spec: str, row: ReportRow, mesh: Mapping[str, int]) -> Text:
    from rich.text import Text

    if row.is_replicated:
        return Text(spec, _WARN)
    if row.spec is None:
        return Text(spec, 'italic dim')
    text = Text(spec)
    for number, name in enumerate(mesh):
        text.highlight_regex(re.escape(repr(name)), _AXES[number % len(_AXES)])
    return text


def _bar(share: float, style: str) -> Text:
    """A line as long as its share, in halves of a column; what is not nothing is seen."""
    from rich.text import Text

    halves = max(1, round(2 * _BAR * share)) if share else 0
    return Text('━' * (halves // 2) + '╸' * (halves % 2), style)
