"""What `visualize` returns: a value that prints in a terminal and shows itself in a notebook."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from scalax.visualize._page import TITLE, render_fragment, render_page, render_svg
from scalax.visualize._pictures import Picture, pictures_of
from scalax.visualize._text import render_text


@dataclasses.dataclass(frozen=True)
class Visualization:
    """Which device holds which block of which array; ``str()`` of it draws that for a terminal.

    Attributes:
        pictures: one for each way of lying that the leaves of the tree have, in tree order.
    """

    pictures: tuple[Picture, ...]

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, width: int | None = None) -> str:
        """The pictures as text.

        Args:
            width: the columns it may take; those of the terminal by default, and at least 60.
        """
        return render_text(self.pictures, width)

    def _repr_html_(self) -> str:
        return render_fragment(self.pictures)

    def to_html(self, path: str | os.PathLike[str], title: str = TITLE) -> None:
        """Writes the pictures as a page of its own, which loads nothing and runs no script.

        Args:
            path: the file to write.
            title: the title of the page.
        """
        Path(path).write_bytes(render_page(self.pictures, title).encode())

    def to_svg(self, path: str | os.PathLike[str] | None = None) -> str:
        """The pictures as one SVG, which follows the reader's choice of light or dark.

        Args:
            path: the file to write it to as well.
        """
        svg = render_svg(self.pictures)
        if path is not None:
            Path(path).write_bytes(svg.encode())
        return svg


def visualize(pytree: Any) -> Visualization:
    """Shows where the arrays of a tree lie.

    Args:
        pytree: the leaves are jax.Arrays, or ``jax.ShapeDtypeStruct`` with shardings, as
            ``helper.abstract`` makes them; of meshes of any kind.

    Returns:
        A `Visualization`.

    Raises:
        ShardingError: some leaves have no sharding that could be shown; all of them are named.

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
