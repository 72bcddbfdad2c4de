"""How do pictures look in a terminal? Headings, boxes and notes, no line wider than it."""

from __future__ import annotations

from collections.abc import Sequence

from scalax._report.tables import terminal_width, wrapped
from scalax.visualize._boxes import drawing
from scalax.visualize._panels import blocks_text
from scalax.visualize._pictures import Picture, array_text

MOST_PICTURES = 50
_MOST_MEMBERS = 8


def render_text(pictures: Sequence[Picture], width: int | None) -> str:
    """All pictures as text, no line wider than *width* columns (default: the terminal's)."""
    width = terminal_width(width)
    parts = []
    for picture in pictures[:MOST_PICTURES]:
        dimensions, drawn = drawing(picture.blocks, width)
        above = [*arrays_texts(picture), lies_text(picture), dimensions]
        # Boxes fit already, and their blanks are part of them.
        parts.append([*wrapped(above, width), *drawn, *wrapped(notes(picture, pictures), width)])
    parts.append(wrapped(closing(pictures), width))
    return '\n\n'.join('\n'.join(lines) for lines in parts if lines)


def arrays_texts(picture: Picture) -> list[str]:
    """Which arrays a picture shows, a line for each kind."""
    lines = [array_text(picture, member) for member in picture.members[:_MOST_MEMBERS]]
    rest = sum(member.count for member in picture.members[_MOST_MEMBERS:])
    if rest:
        lines.append(
            f'... and {rest} more array{"" if rest == 1 else "s"} that lie{"s" if rest == 1 else ""} so'
        )
    return lines


def lies_text(picture: Picture) -> str:
    """How those arrays lie, and what blocks that makes."""
    return f'{picture.blocks.placement}: {blocks_text(picture.blocks)}'


def notes(picture: Picture, pictures: Sequence[Picture]) -> list[str]:
    """What must be known of one picture; what the numbers mean too, where pictures differ in that."""
    differ = len(_numberings(pictures)) > 1
    return [*picture.blocks.notes, *([picture.blocks.numbering] if differ else [])]


def closing(pictures: Sequence[Picture]) -> list[str]:
    """What is said once of all pictures: which are not drawn, and what the numbers mean."""
    if not pictures:
        return ['There are no arrays in the tree.']
    rest = pictures[MOST_PICTURES:]
    count = sum(picture.count for picture in rest)
    ways = f'{count} arrays that lie in {len(rest)} other ways' if len(rest) > 1 else '1 more kind of array'
    lines = [f'... and {ways} are not drawn: visualize a part of the tree.'] if rest else []
    numberings = _numberings(pictures)
    return [*lines, *(numberings if len(numberings) == 1 else [])]


def _numberings(pictures: Sequence[Picture]) -> list[str]:
    return list(dict.fromkeys(picture.blocks.numbering for picture in pictures))
