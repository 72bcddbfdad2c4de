"""`visualize` and its result: boxes of text in a terminal, coloured tables in notebooks and files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from scalax._core.render.blocks import Block, Heading, Lines, MeshAxes, Section
from scalax._core.render.renderable import Renderable
from scalax._core.render.tables import wrap_lines
from scalax.errors import plural
from scalax.visualize._blocks import Blocks
from scalax.visualize._grid import blocks_text
from scalax.visualize._html import table
from scalax.visualize._pictures import Picture, member_text, pictures_of
from scalax.visualize._text import drawing

_MAX_MEMBERS = 8


@dataclasses.dataclass(frozen=True)
class Visualization(Renderable):
    """Pictures of which device holds which block of each array; ``str()`` of it is a drawing for a terminal.

    Attributes:
        pictures: one picture for each shape and sharding of the leaves, in tree order.
    """

    pictures: tuple[Picture, ...]

    def _title(self) -> str:
        return 'Where arrays are'

    def _blocks(self, title: str) -> list[Block]:
        return _blocks(self.pictures)

    def _page_blocks(self, title: str) -> list[Block]:
        return [Heading(title, {}), *self._blocks(title)]


def visualize(pytree: Any) -> Visualization:
    """Shows which device holds which block of the arrays of a tree.

    Args:
        pytree: a pytree of jax.Arrays, or of ``jax.ShapeDtypeStruct`` with shardings, such as those of
            ``helper.abstract``. The mesh may be of any kind.

    Returns:
        A `Visualization`.

    Raises:
        ShardingError: some leaves have no sharding that can be shown; the message names all of them.

    Example:
        >>> import jax
        >>> from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
        >>> mesh = AbstractMesh((2, 2), ('data', 'model'))
        >>> sharding = NamedSharding(mesh, PartitionSpec(None, 'model'))
        >>> print(visualize(jax.ShapeDtypeStruct((4, 8), 'float32', sharding=sharding)).to_text(90))
        float32[4,8]
        P(None, 'model'): 2 blocks of [4,4], each on 2 devices
        dim 0: 4, unsharded; dim 1 → 8 over model=2
          0:4   4:8
        ┌─────┬─────┐
        │ 0,2 │ 1,3 │
        └─────┴─────┘
        <BLANKLINE>
        Numbers are positions, in mesh order, in the abstract mesh (data=2, model=2), which has no devices.
    """
    return Visualization(pictures_of(pytree))


def _blocks(pictures: Sequence[Picture]) -> list[Block]:
    """Returns all pictures, with the lines above and below each."""
    numberings = [*dict.fromkeys(picture.blocks.numbering for picture in pictures)]
    sections = [
        Section(
            '',
            [
                Lines([*_array_lines(picture)]),
                Lines([f'{picture.blocks.placement}: {blocks_text(picture.blocks)}']),
                _Drawing(picture.blocks),
                Lines(picture.blocks.notes),
                Lines([picture.blocks.numbering] if len(numberings) > 1 else []),
            ],
        )
        for picture in pictures
    ]
    return [
        *sections,
        Lines(numberings if len(numberings) == 1 else []),
        Lines([] if pictures else ['There are no arrays in the tree.']),
    ]


def _array_lines(picture: Picture) -> Iterator[str]:
    """Yields a line for each member of a picture."""
    for member in picture.members[:_MAX_MEMBERS]:
        yield member_text(picture, member)
    if rest := sum(member.count for member in picture.members[_MAX_MEMBERS:]):
        yield f'... and {plural(rest, "more array", "more arrays")} with this sharding'


@dataclasses.dataclass(frozen=True)
class _Drawing(Block):
    """The dimensions of an array, and its blocks as boxes of text, or as a coloured table."""

    blocks: Blocks

    def text(self, width: int) -> list[str]:
        dimensions, lines = drawing(self.blocks, width)
        # The drawing fits already, and wrapping would drop its spaces.
        return [*wrap_lines([dimensions], width), *lines]

    def html(self, mesh: MeshAxes) -> str:
        return table(self.blocks)
