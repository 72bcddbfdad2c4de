"""Under which paths are the leaves of a checkpoint asked for?"""

from __future__ import annotations

import re
from collections.abc import Sequence

from scalax.errors import CheckpointError


def renamed(paths: Sequence[str], rename: Sequence[tuple[str, str]], where: str) -> dict[str, str]:
    """The new path of each, by its old one: the first regex that is found in it is applied.

    Raises:
        CheckpointError: two leaves get one path.

    Example:
        >>> renamed(['model/w', 'step'], [('^model/', 'params/')], '')
        {'model/w': 'params/w', 'step': 'step'}
    """
    patterns = [(re.compile(regex), replacement) for regex, replacement in rename]
    names: dict[str, str] = {}
    old: dict[str, str] = {}
    for path in paths:
        new = next((regex.sub(to, path) for regex, to in patterns if regex.search(path)), path)
        if new in old:
            raise CheckpointError(
                f'rename gives two leaves of {where} one path: {old[new]!r} and {path!r} are both {new!r}'
            )
        names[path] = new
        old[new] = path
    return names
