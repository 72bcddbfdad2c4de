"""What all results have in common: text, part of a notebook and a page, from one list of blocks."""

from __future__ import annotations

import os
from pathlib import Path

from scalax._core.render import blocks


class Renderable:
    """A result that shows itself; ``str()`` of it is text for a terminal."""

    def _title(self) -> str:
        """The title in notebooks, and of a page without one of its own."""
        raise NotImplementedError

    def _blocks(self, title: str) -> list[blocks.Block]:
        """What there is to show, below a title, which text leaves out."""
        raise NotImplementedError

    def _page(self, title: str) -> list[blocks.Block]:
        """What a page shows."""
        return self._blocks(title)

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, width: int | None = None) -> str:
        """The result as text.

        Args:
            width: the width in columns, at least 60; that of the terminal by default.
        """
        return blocks.text(self._blocks(''), width)

    def _repr_html_(self) -> str:
        return blocks.fragment(self._blocks(self._title()))

    def to_html(self, path: str | os.PathLike[str], title: str | None = None) -> None:
        """Writes the result as a page that loads nothing; its scripts only sort and filter.

        Args:
            path: the file to write.
            title: the title of the page, plain text; by default the page says what it is about.

        Example:
            >>> import tempfile, pathlib
            >>> from scalax.explain import ShardingReport
            >>> path = pathlib.Path(tempfile.mkdtemp()) / 'report.html'
            >>> ShardingReport((), {'fsdp': 8}).to_html(path, title='Nothing yet')
            >>> path.read_text()[:15]
            '<!DOCTYPE html>'
        """
        title = self._title() if title is None else title
        Path(path).write_bytes(blocks.page(title, self._page(title)).encode())
