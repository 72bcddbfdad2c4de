"""The result of a search, as it shows itself."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from scalax._report import blocks
from scalax._search.blocks import search_blocks, search_title
from scalax._search.outcome import SearchData


@dataclasses.dataclass(frozen=True)
class Search(SearchData):
    """What `search` returns; ``str()`` of it is a table.

    Attributes:
        candidates: the best first; after those that fit, those that do not, or could not be planned.
        topology: the hardware.
        interrupted: whether it was stopped before its end.
        not_tried: how many candidates were not reached.
        compiled: how many quick plans were compiled.
        compiled_in_full: how many full plans were.
        seconds: how long the search took.
    """

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, width: int | None = None) -> str:
        """The candidates as a table of text.

        Args:
            width: the width in columns; that of the terminal by default.
        """
        return blocks.text(search_blocks(self, ''), width)

    def _repr_html_(self) -> str:
        return blocks.fragment(search_blocks(self, search_title(self)))

    def to_html(self, path: str | os.PathLike[str], title: str | None = None) -> None:
        """Writes the search as a page of its own, which loads nothing: all meshes, and the plan of each.

        Args:
            path: the file to write.
            title: the title of the page.
        """
        title = title or search_title(self)
        shown = search_blocks(self, title, with_plans=True)
        Path(path).write_bytes(blocks.page(title, shown).encode())
