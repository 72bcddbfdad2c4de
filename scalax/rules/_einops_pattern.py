"""Patterns that name the dimensions of an array, as in einops: ``'batch (heads head_dim) embed'``."""

from __future__ import annotations

import dataclasses
import functools
import re

from scalax.errors import RuleError

Part = str | int | None
"""A part of a dimension: a name, a size without a name, or None for anything."""

Dimension = tuple[Part, ...]
"""The parts of one dimension, the outermost first; none for a dimension of size 1."""

_TOKEN = re.compile(r'\.\.\.|\w+|\S')
_NAMELESS = re.compile('_|[1-9][0-9]*')


@dataclasses.dataclass(frozen=True)
class Pattern:
    """The dimensions that a pattern names.

    Attributes:
        dimensions: one entry a dimension, without the ellipsis.
        ellipsis: how many dimensions come before the ellipsis; None without one.
    """

    dimensions: tuple[Dimension, ...]
    ellipsis: int | None = None

    def of_rank(self, rank: int) -> tuple[Dimension, ...] | None:
        """One entry for each of *rank* dimensions; None where the pattern is for another rank."""
        more = rank - len(self.dimensions)
        if self.ellipsis is None:
            return None if more else self.dimensions
        if more < 0:
            return None
        return (*self.dimensions[: self.ellipsis], *[(None,)] * more, *self.dimensions[self.ellipsis :])

    def __str__(self) -> str:
        words = [str(parts[0] or '_') if len(parts) == 1 else _group_text(parts) for parts in self.dimensions]
        if self.ellipsis is not None:
            words.insert(self.ellipsis, '...')
        return ' '.join(words)


def _group_text(parts: Dimension) -> str:
    return f'({" ".join(str(part or "_") for part in parts)})' if parts else '1'


@functools.lru_cache(maxsize=4096)
def parse(text: str, whole: str = '', start: int = 0) -> Pattern:
    """Reads a pattern.

    Args:
        text: names separated by spaces, one a dimension, as in einops: they neither begin nor end with an
            underscore. ``(a b)`` is one dimension, *a* outermost; ``_`` is a dimension without a
            name, a number one of that size; ``...`` stands for any number of dimensions.
        whole: the text that it is a part of, for errors; by default it is not.
        start: where it starts in the whole.

    Raises:
        RuleError: it is not one; the message points at the place.

    Example:
        >>> parse('_ (heads head_dim) 1').dimensions
        ((None,), ('heads', 'head_dim'), ())
        >>> str(Pattern((('batch',), ('heads', 'head_dim'), (None,), ())))
        'batch (heads head_dim) _ 1'
        >>> parse('... embed').of_rank(3)
        ((None,), (None,), ('embed',))
    """
    error = functools.partial(pattern_error, whole or text)
    dimensions: list[Dimension] = []
    ellipsis: int | None = None
    group: list[Part] | None = None
    names: set[str] = set()
    opened = 0
    for token in _TOKEN.finditer(text):
        word, at = token.group(), start + token.start()
        is_name = word.isidentifier() and word.strip('_') == word
        if word in names:
            raise error(at, f'{word!r} is there twice')
        if word == '(' and group is None:
            group, opened = [], at
        elif word == ')' and group is not None:
            dimensions.append(tuple(group))
            group = None
        elif word == '...' and group is None and ellipsis is None:
            ellipsis = len(dimensions)
        elif is_name or _NAMELESS.fullmatch(word):
            names.update([word] if is_name else [])
            part: Part = word if is_name else None if word == '_' else int(word)
            parts = () if part == 1 else (part,)
            if group is None:
                dimensions.append(parts)
            else:
                group.extend(parts)
        else:
            raise error(at, f'{word!r} {_WRONG}')
    if group is not None:
        raise error(opened, "a '(' that is never closed")
    return Pattern(tuple(dimensions), ellipsis)


_WRONG = (
    "does not belong here: a pattern has names, '_', numbers, groups '(a b)', and one '...' outside of these"
)


def pattern_error(text: str, at: int, why: str) -> RuleError:
    """The error about a place in a pattern, with a caret under it."""
    shown = re.sub(r'\s', ' ', text)
    return RuleError(f'invalid pattern {text!r}: {why}\n  {shown}\n  {" " * at}^')


def names_in(text: str) -> list[tuple[str, int]]:
    """The names of a valid pattern with their places."""
    words = [(token.group(), token.start()) for token in _TOKEN.finditer(text)]
    return [(word, at) for word, at in words if word.isidentifier() and word != '_']
