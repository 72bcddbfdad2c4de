"""`visualize` and its result: text in a terminal, SVG and HTML in notebooks and files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from scalax._report import blocks
from scalax._report.blocks import Block, Lines, MeshAxes, Section
from scalax._report.pages import document as page
from scalax._report.pages import escape
from scalax._report.tables import wrapped
from scalax.visualize._drawn import Drawn, below, document, text_lines
from scalax.visualize._panels import dimension_texts
from scalax.visualize._pictures import Picture, pictures_of
from scalax.visualize._svg import MOST_LINE, draw
from scalax.visualize._text import MOST_PICTURES, arrays_texts, closing, drawing, notes, placement_text

_TITLE = 'Where arrays are'
# Files of their own follow the reader's choice of light or dark; inside a page, that page decides.
_COLORS = (
    'color-scheme: light dark; color: light-dark(#1a1f26, #e6eaef); background: light-dark(#fff, #12161b)'
)

# Of these elements only, wherever they are; where styles are dropped, words and drawings remain.
_STYLE = (
    ':scope { font-size: 14px; line-height: 1.5; overflow-wrap: anywhere } section { margin-bottom: 28px } '
    'section div { margin: 10px 0 } p { margin: 0 } section p:first-child { font-weight: 600 } '
    'div + p, section + p { opacity: 0.75 }'
)


@dataclasses.dataclass(frozen=True)
class Visualization:
    """Which device holds which block of which array; ``str()`` of it is a drawing for a terminal.

    Attributes:
        pictures: one for each shape and sharding of the leaves, in tree order.
    """

    pictures: tuple[Picture, ...]

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, width: int | None = None) -> str:
        """The pictures as text.

        Args:
            width: the width in columns, at least 60; that of the terminal by default.
        """
        return blocks.text(_blocks(self.pictures), width)

    def _repr_html_(self) -> str:
        return f'<div>\n<style>@scope {{ {_STYLE} }}</style>\n{blocks.html(_blocks(self.pictures))}</div>'

    def to_html(self, path: str | os.PathLike[str], title: str = _TITLE) -> None:
        """Writes the pictures as a page that loads nothing and runs no script.

        Args:
            path: the file to write.
            title: the title of the page.
        """
        Path(path).write_bytes(page(title, self._repr_html_()).encode())

    def to_svg(self, path: str | os.PathLike[str] | None = None) -> str:
        """The pictures as one SVG, which follows the reader's choice of light or dark.

        Args:
            path: a file to write it to.
        """
        shown = self.pictures[:MOST_PICTURES]
        parts = [_with_words(picture, self.pictures) for picture in shown]
        parts.append(_wrapped(closing(self.pictures)))
        label = '. '.join(map(_label, shown)) or _TITLE
        svg = document(below(parts, 32), label, _COLORS, margin=16) + '\n'
        if path is not None:
            Path(path).write_bytes(svg.encode())
        return svg


def visualize(pytree: Any) -> Visualization:
    """Shows which device holds which block of the arrays of a tree.

    Args:
        pytree: the leaves are jax.Arrays, or ``jax.ShapeDtypeStruct`` with shardings, as
            ``helper.abstract`` makes them; on meshes of any kind.

    Returns:
        A `Visualization`.

    Raises:
        ShardingError: some leaves have no sharding that can be shown; names all of them.

    Example:
        >>> import jax
        >>> from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
        >>> mesh = AbstractMesh((2, 2), ('data', 'model'))
        >>> sharding = NamedSharding(mesh, PartitionSpec(None, 'model'))
        >>> print(visualize(jax.ShapeDtypeStruct((4, 8), 'float32', sharding=sharding)).to_text(90))
        float32[4,8]
        P(None, 'model'): 2 blocks of [4,4], each on 2 devices
        dim 0: 4, whole; dim 1 → 8 over model=2
            0:4   4:8
          ┌─────┬─────┐
          │ 0,2 │ 1,3 │
          └─────┴─────┘
        <BLANKLINE>
        Numbers are positions, in mesh order, in the abstract mesh (data=2, model=2), which has no devices.
    """
    return Visualization(pictures_of(pytree))


@dataclasses.dataclass(frozen=True)
class _Drawing(Block):
    """The dimensions of an array, and its blocks as boxes of text or as SVG."""

    picture: Picture

    def text(self, width: int) -> list[str]:
        dimensions, drawn = drawing(self.picture.blocks, width)
        # Drawings fit already, and wrapping would drop their blanks.
        return [*wrapped([dimensions], width), *drawn]

    def html(self, mesh: MeshAxes) -> str:
        drawn = draw(self.picture.blocks)
        # On a narrow screen a picture shrinks to a readable size, and then scrolls.
        width = round(drawn.width) + 4
        size = f'width: {width}px; max-width: 100%; min-width: {round(width * 0.75)}px; height: auto'
        svg = document(drawn, _label(self.picture), f'display: block; {size}')
        return f'<p>{escape(_dimensions(self.picture))}</p>\n<div style="overflow-x: auto">{svg}</div>'


def _blocks(pictures: Sequence[Picture]) -> list[Block]:
    """All pictures, with the words above and below each."""
    shown = [
        Section(
            '',
            [
                *(Lines(arrays_texts(picture)), Lines([placement_text(picture)])),
                *(_Drawing(picture), Lines(notes(picture, pictures))),
            ],
        )
        for picture in pictures[:MOST_PICTURES]
    ]
    return [*shown, Lines(closing(pictures))]


def _with_words(picture: Picture, pictures: Sequence[Picture]) -> Drawn:
    """A picture with its texts as part of the drawing."""
    head = below(
        [_wrapped(arrays_texts(picture), 'bold'), _wrapped([placement_text(picture), _dimensions(picture)])],
        0,
    )
    foot = notes(picture, pictures)
    return below([head, draw(picture.blocks), *([_wrapped(foot)] if foot else [])], 12)


def _dimensions(picture: Picture) -> str:
    return '; '.join(dimension_texts(picture.blocks))


def _label(picture: Picture) -> str:
    return f'{", ".join(arrays_texts(picture))}: {placement_text(picture)}'


def _wrapped(lines: Iterable[str], weight: str = 'normal') -> Drawn:
    return text_lines(wrapped(lines, MOST_LINE), weight)
