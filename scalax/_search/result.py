"""The result of a search, as it shows itself."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from scalax._report.tables import table, terminal_width, wrapped
from scalax._search.outcome import SearchData

_HEADS = ('', 'mesh', 'seconds', 'at least', 'bound by', 'memory', 'outcome')
_MEMORY, _OUTCOME = 5, 6


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
        read: how many plans were read from the file of an earlier search.
        seconds: how long the search took.
    """

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, width: int | None = None) -> str:
        """The candidates as a table of text.

        Args:
            width: the width in columns; that of the terminal by default.
        """
        width = terminal_width(width)
        lines = [self.head, *filter(None, [self.not_compiled_for])]
        cells = [(str(place), *candidate.cells) for place, candidate in enumerate(self.candidates, 1)]
        rows = table([_HEADS, *cells], width, _OUTCOME, _MEMORY)
        return '\n'.join([*wrapped(lines, width), '', *rows])

    def _repr_html_(self) -> str:
        from scalax._search.page import render_fragment  # here, because few programs show pages

        return render_fragment(self)

    def to_html(self, path: str | os.PathLike[str], title: str | None = None) -> None:
        """Writes the search as a page of its own, which loads nothing: all meshes, and the plan of each.

        Args:
            path: the file to write.
            title: the title of the page.
        """
        from scalax._search.page import render_page

        Path(path).write_bytes(render_page(self, title).encode())
