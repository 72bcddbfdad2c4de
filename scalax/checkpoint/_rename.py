"""Under which paths are the leaves of a checkpoint asked for?"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scalax.errors import ArgumentError, CheckpointError
from scalax.rules._tree_path import checked_regex


def renamed(paths: Sequence[str], rename: Sequence[tuple[str, str]], where: str) -> dict[str, str]:
    """The new path of each, by its old one: the first regex that is found in it is applied.

    Raises:
        CheckpointError: two leaves get one path.
        ArgumentError: *rename* is no list of pairs, or holds what is no regex or no replacement.

    Example:
        >>> renamed(['model/w', 'step'], [('^model/', 'params/')], '')
        {'model/w': 'params/w', 'step': 'step'}
    """
    pairs = checked_pairs('rename', rename)
    names: dict[str, str] = {}
    old: dict[str, str] = {}
    for path in paths:
        new = next(
            (substituted('rename', regex, to, path) for regex, to in pairs if regex.search(path)), path
        )
        if new in old:
            raise CheckpointError(
                f'rename gives two leaves of {where} one path: {old[new]!r} and {path!r} are both {new!r}'
            )
        names[path] = new
        old[new] = path
    return names


def checked_pairs(where: str, pairs: Iterable[Any], most: int = 2) -> list[tuple[Any, ...]]:
    """Tuples (regex, replacement, ...) with the regexes compiled; the message begins with *where*.

    Raises:
        ArgumentError: one is no tuple of two to *most* values, or its regex is none.
    """
    found = []
    if isinstance(pairs, str | Mapping) or not isinstance(pairs, Iterable):
        raise ArgumentError(f'{where}: expected a list of pairs (regex, replacement), got {pairs!r}')
    for pair in pairs:
        if not isinstance(pair, tuple | list) or not 2 <= len(pair) <= most:
            raise ArgumentError(f'{where}: expected a list of pairs (regex, replacement), got {pair!r} in it')
        checked_regex(where, pair[0], ArgumentError)
        found.append((re.compile(pair[0]), *pair[1:]))
    return found


def substituted(where: str, regex: re.Pattern[str], replacement: Any, text: str) -> str:
    """``regex.sub``, with an error that says which replacement does not fit its regex."""
    try:
        return regex.sub(replacement, text)
    except (re.error, IndexError, TypeError) as error:  # IndexError: a name that is no group of the regex
        raise ArgumentError(
            f'{where}: the replacement {replacement!r} does not fit {regex.pattern!r}: {error}'
        ) from None
