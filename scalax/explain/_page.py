"""Reports as HTML: a plain table, and the data that a script shows as a tree."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from scalax._report import pages
from scalax._report.tables import array_text, human_bytes
from scalax._util.folding import MOST_RUNS, Fold, runs
from scalax.errors import plural
from scalax.explain._rows import HEADS, Line, cells_of, spec_text


@functools.cache
def widget() -> pages.Widget:
    """The tree that folds, sorts and filters."""
    markup, style, model, view = (
        pages.asset('scalax.explain', name) for name in ('report.html', 'report.css', 'tree.js', 'report.js')
    )
    head = pages.asset('scalax._report', 'head.css')
    return pages.Widget(markup, f'{head}{style}', f'{model}\n{view}')


def plain(lines: Sequence[Line], below: Sequence[str]) -> str:
    """The report without scripts: the folded table, and paragraphs *below* it.

    If there are many lines, the largest per device are shown, in the order of the tree.
    """
    by_size = sorted(range(len(lines)), key=lambda i: -lines[i][0].count * lines[i][1].bytes_per_device)
    cells = [cells_of(*lines[i]) for i in sorted(by_size[: pages.MOST_LINES])]
    rest = [lines[i] for i in by_size[pages.MOST_LINES :]]
    if rest:
        count = sum(fold.count for fold, _ in rest)
        size = sum(fold.count * row.bytes_per_device for fold, row in rest)
        below = [
            f'smaller ones, not shown: {plural(count, "array")}, {human_bytes(size)} on each device',
            *below,
        ]
    return f'{pages.table(HEADS, cells, right=[3])}\n{pages.paragraphs(below)}'


def data(
    title: str,
    lines: Sequence[Line],
    mesh: Mapping[str, int],
    unused: Sequence[str],
    shadowed: Sequence[str],
    parts: tuple[int, int],
) -> dict[str, object]:
    """The data that the script shows. Texts are written once; lines hold their numbers."""
    texts: dict[str, int] = {}

    def number_of(text: str) -> int:
        return texts.setdefault(pages.visible(text), len(texts))

    values = [
        [
            _path(fold),
            *map(number_of, (array_text(row.dtype, row.shape), spec_text(row), row.rule, row.reason)),
            row.bytes,
            row.bytes_per_device,
            int(row.is_replicated),
        ]
        for fold, row in lines
    ]
    return {
        'title': pages.visible(title),
        'mesh': [(pages.visible(name), size) for name, size in mesh.items()],
        'unused': [pages.visible(regex) for regex in unused],
        'shadowed': [pages.visible(regex) for regex in shadowed],
        'unreduced': parts,
        'texts': list(texts),
        'lines': values,
    }


def _path(fold: Fold) -> list[object]:
    """The keys of a path; for folded keys: their text, their numbers, and the text before the numbers."""
    return [
        pages.visible(part)
        if isinstance(part, str)
        else (pages.visible(part.name(MOST_RUNS)), runs(part.numbers), pages.visible(part.stem))
        for part in fold.parts
    ]
