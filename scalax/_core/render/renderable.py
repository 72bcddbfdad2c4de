"""Base class of results: text, notebook output and an HTML page, rendered from one list of blocks."""

from __future__ import annotations

import os
from pathlib import Path

from scalax._core.render import blocks


class Renderable:
    """A result that renders itself. ``str()`` of it is text for a terminal."""

    def _title(self) -> str:
        """Returns the default title of a page and of notebook output."""
        raise NotImplementedError

    def _blocks(self, title: str) -> list[blocks.Block]:
        """Returns the blocks of the result. Text leaves out the title."""
        raise NotImplementedError

    def _page_blocks(self, title: str) -> list[blocks.Block]:
        """Returns the blocks of a page."""
        return self._blocks(title)

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, width: int | None = None) -> str:
        """Returns the result as text.

        Args:
            width: the width in columns, at least 60; by default the width of the terminal.
        """
        return blocks.text(self._blocks(''), width)

    def _repr_html_(self) -> str:
        return blocks.fragment(self._blocks(self._title()))

    def to_html(self, path: str | os.PathLike[str], title: str | None = None) -> None:
        """Writes the result as a self-contained HTML page, whose scripts only sort and filter.

        Args:
            path: the file to write.
            title: the title of the page, as plain text; by default it describes the result.

        Example:
            >>> import tempfile, pathlib
            >>> from scalax.explain import ShardingReport
            >>> path = pathlib.Path(tempfile.mkdtemp()) / 'report.html'
            >>> ShardingReport((), {'fsdp': 8}).to_html(path, title='Nothing yet')
            >>> path.read_text()[:15]
            '<!DOCTYPE html>'
        """
        title = self._title() if title is None else title
        Path(path).write_bytes(blocks.page(title, self._page_blocks(title)).encode())
