"""The differences between two reports, as lines of text."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from scalax._core.render.html_pages import visible
from scalax._core.render.tables import array_text, human_bytes
from scalax._core.util.folding import count_prefix, fold
from scalax.explain._rows import ReportRow, folded_path, spec_text


def diff_lines(before: Sequence[ReportRow], after: Sequence[ReportRow]) -> list[str]:
    """Returns a line for each leaf that differs; leaves with the same change in many layers share a line.

    Leaves are matched by their paths. Rules and reasons are not compared.
    """
    old, new = _texts_by_path(before), _texts_by_path(after)
    leaves = [
        *[(key[0], f'{text} -> {new[key]}') for key, text in old.items() if new.get(key, text) != text],
        *[(key[0], f'{text}, added') for key, text in new.items() if key not in old],
        *[(key[0], f'{text}, removed') for key, text in old.items() if key not in new],
    ]
    return [
        f'{folded_path(item)}: {count_prefix(item.count)}{visible(leaves[item.first][1])}'
        for item in fold(leaves)
    ]


def _texts_by_path(rows: Sequence[ReportRow]) -> dict[tuple[str, int], str]:
    """Returns the text of each row, by its path and how many earlier rows have the same path.

    Two leaves have the same path if keys contain slashes.
    """
    repeats: collections.Counter[str] = collections.Counter()
    texts = {}
    for row in rows:
        size = human_bytes(row.bytes_per_device)
        text = f'{array_text(row.dtype, row.shape)} {spec_text(row)} ({size} on a device)'
        texts[row.path, repeats[row.path]] = text
        repeats[row.path] += 1
    return texts
