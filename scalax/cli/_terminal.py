"""Text on a terminal: colour for verdicts, where the reader is a terminal and has not declined it."""

from __future__ import annotations

import os
import re
import sys
from typing import TextIO

_BOLD, _RED, _GREEN = '1', '31', '32'
_MARKED = (
    (re.compile(r'\b(?:it )?does (?:NOT|not) fit\b|\Aerror:|^\d+\. .*|\Ainterrupted'), _RED),
    (re.compile(r'\bit fits\b|(?<=: )fits\b|\Anothing is wrong\Z'), _GREEN),
)


def show(text: object, file: TextIO | None = None) -> None:
    """Prints a text; on a terminal its first line is bold, and what fits and what does not has a colour.

    Args:
        text: what to print.
        file: where; stdout by default.
    """
    file = sys.stdout if file is None else file
    print(painted(str(text)) if takes_colour(file) else text, file=file)


def takes_colour(file: TextIO) -> bool:
    """Whether a file is a terminal that shows colours; NO_COLOR (https://no-color.org) declines them."""
    return file.isatty() and not os.environ.get('NO_COLOR') and os.environ.get('TERM') != 'dumb'


def painted(text: str) -> str:
    r"""A text with the codes of terminals for colours.

    Example:
        >>> painted('step\nmemory: it fits')
        '\x1b[1mstep\x1b[0m\nmemory: \x1b[32mit fits\x1b[0m'
    """
    first, *lines = text.split('\n')
    marked = _marked(first)
    return '\n'.join([_styled(first, _BOLD) if marked == first else marked, *map(_marked, lines)])


def _marked(line: str) -> str:
    for pattern, style in _MARKED:
        # mypy knows no type of a lambda with a default, which binds the style of this round.
        line = pattern.sub(lambda found, style=style: _styled(found[0], style), line)  # type: ignore[misc]
    return line


def _styled(text: str, style: str) -> str:
    return f'\x1b[{style}m{text}\x1b[0m' if text else text
