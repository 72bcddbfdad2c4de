"""Einops patterns, which name the dimensions of an array: ``'batch (heads head_dim) embed'``."""

from __future__ import annotations

import dataclasses
import functools
import re

from scalax.errors import RuleError

Part = str | int | None
"""A factor of a dimension: a name, a size without a name, or None for a factor of any size."""

Dimension = tuple[Part, ...]
"""The factors of one dimension, the outermost first; empty for a dimension of size 1."""

_TOKEN = re.compile(r'\.\.\.|\w+|\S')
_NAMELESS = re.compile('_|[1-9][0-9]*')


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A parsed pattern.

    Attributes:
        dimensions: one entry for each dimension, without the ellipsis.
        ellipsis: the number of dimensions before the ellipsis; None without one.
    """

    dimensions: tuple[Dimension, ...]
    ellipsis: int | None = None

    def of_rank(self, rank: int) -> tuple[Dimension, ...] | None:
        """Returns one entry for each of *rank* dimensions, or None if the pattern has another rank."""
        extra = rank - len(self.dimensions)
        if self.ellipsis is None:
            return None if extra else self.dimensions
        if extra < 0:
            return None
        return (*self.dimensions[: self.ellipsis], *[(None,)] * extra, *self.dimensions[self.ellipsis :])

    def __str__(self) -> str:
        words = [str(parts[0] or '_') if len(parts) == 1 else _group_text(parts) for parts in self.dimensions]
        if self.ellipsis is not None:
            words.insert(self.ellipsis, '...')
        return ' '.join(words)


def _group_text(parts: Dimension) -> str:
    return f'({" ".join(str(part or "_") for part in parts)})' if parts else '1'


@functools.lru_cache(maxsize=4096)
def parse(text: str, full_text: str = '', start: int = 0) -> Pattern:
    """Parses a pattern.

    Args:
        text: the names of the dimensions, separated by spaces. As in einops, a name neither begins nor ends
            with an underscore; ``(a b)`` is one dimension, *a* outermost; ``_`` is a dimension without a
            name, and a number is one of that size; ``...`` stands for any number of dimensions.
        full_text: for errors: the text that contains *text*, if any.
        start: the position of *text* in *full_text*.

    Raises:
        RuleError: *text* is not a pattern; the message points at the position.

    Example:
        >>> parse('_ (heads head_dim) 1').dimensions
        ((None,), ('heads', 'head_dim'), ())
        >>> str(Pattern((('batch',), ('heads', 'head_dim'), (None,), ())))
        'batch (heads head_dim) _ 1'
        >>> parse('... embed').of_rank(3)
        ((None,), (None,), ('embed',))
    """
    error = functools.partial(pattern_error, full_text or text)
    dimensions: list[Dimension] = []
    ellipsis: int | None = None
    group: list[Part] | None = None
    names: set[str] = set()
    group_start = 0
    for token in _TOKEN.finditer(text):
        word, position = token.group(), start + token.start()
        is_name = word.isidentifier() and word.strip('_') == word
        if word in names:
            raise error(position, f'{word!r} is used twice')
        if word == '(' and group is None:
            group, group_start = [], position
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
            raise error(position, f'{word!r} {_INVALID_WORD}')
    if group is not None:
        raise error(group_start, "'(' is never closed")
    return Pattern(tuple(dimensions), ellipsis)


_INVALID_WORD = (
    "does not belong here: a pattern has names, '_', numbers, groups '(a b)', and one '...' outside of these"
)


def pattern_error(text: str, position: int, reason: str) -> RuleError:
    """Returns the error about a position in a pattern, with a caret under it."""
    one_line = re.sub(r'\s', ' ', text)
    return RuleError(f'invalid pattern {text!r}: {reason}\n  {one_line}\n  {" " * position}^')


def names_in(text: str) -> list[tuple[str, int]]:
    """Returns the names in a valid pattern, each with its position."""
    words = [(token.group(), token.start()) for token in _TOKEN.finditer(text)]
    return [(word, position) for word, position in words if word.isidentifier() and word != '_']
