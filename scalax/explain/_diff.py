"""The difference of two reports as text."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from scalax._core.render.html_pages import visible
from scalax._core.render.tables import array_text, human_bytes
from scalax._core.util.folding import count_prefix, fold
from scalax.explain._rows import ReportRow, folded_path, spec_text


def changes(before: Sequence[ReportRow], after: Sequence[ReportRow]) -> list[str]:
    """The leaves that differ between two reports, a line each; those that are alike in many layers share one.

    Leaves are matched by their paths. Rules and reasons are not compared.
    """
    old, new = _by_path(before), _by_path(after)
    leaves = [
        *[(key[0], f'{text} -> {new[key]}') for key, text in old.items() if new.get(key, text) != text],
        *[(key[0], f'{text}, added') for key, text in new.items() if key not in old],
        *[(key[0], f'{text}, removed') for key, text in old.items() if key not in new],
    ]
    return [
        f'{folded_path(item)}: {count_prefix(item.count)}{visible(leaves[item.first][1])}'
        for item in fold(leaves)
    ]


def _by_path(rows: Sequence[ReportRow]) -> dict[tuple[str, int], str]:
    """What each row says, by path and its occurrence: with slashes in keys, two leaves can have one path."""
    repeats: collections.Counter[str] = collections.Counter()
    found = {}
    for row in rows:
        size = human_bytes(row.bytes_per_device)
        array = f'{array_text(row.dtype, row.shape)} {spec_text(row)} ({size} on a device)'
        found[row.path, repeats[row.path]] = array
        repeats[row.path] += 1
    return found
