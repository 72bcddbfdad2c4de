"""Patterns that name the dimensions of an array, as in einops: ``'batch (heads head_dim) embed'``."""

from __future__ import annotations

import dataclasses
import functools
import keyword
import re
from typing import Any

from scalax.errors import RuleError

Part = str | int | None
"""A part of a dimension: a name, a size without a name, or None for anything."""

Dimension = tuple[Part, ...]
"""The parts of one dimension, the outermost first; none for a dimension of size 1."""

_TOKEN = re.compile(r'\.\.\.|\w+|\S')
# einops warns about these names ('in out'), each time; marked they are names like others.
_DISCOURAGED = re.compile(rf'\b({"|".join([*keyword.kwlist, "axis"])})\b')
_MARK = '\u00aa'


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
        text: names separated by spaces, one a dimension, as einops takes them: they neither begin nor end
            with an underscore. ``(a b)`` is one dimension, *a* outermost; ``_`` is a dimension without a
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
    # Here, so that importing scalax does not import it.
    from einops import EinopsError
    from einops.parsing import ParsedExpression

    error = functools.partial(pattern_error, whole or text)
    spaced, still_open = re.sub(r'\s', ' ', text), 0
    parsed = ParsedExpression('')
    # Longer and longer parts, because einops does not say where a pattern is wrong.
    for token in _TOKEN.finditer(spaced):
        part, at = spaced[: token.end()], start + token.start()
        still_open = part.count('(') - part.count(')')
        try:
            quiet = _DISCOURAGED.sub(rf'\1{_MARK}', part)
            parsed = ParsedExpression(quiet + ')' * still_open, allow_underscore=True)
        except EinopsError as problem:
            why = str(problem).replace('…', '...').replace(_MARK, '')
            raise error(at, ' '.join(why.split())) from None
        if parsed.has_ellipsis_parenthesized or token.group() == '…':
            raise error(at, "dimensions without names are '...', outside of groups")
    if still_open:
        raise error(start + text.rindex('('), "a '(' that is never closed")
    groups = [group for group in parsed.composition if isinstance(group, list)]
    return Pattern(
        tuple(tuple(map(_part, group)) for group in groups),
        # The ellipsis is the only entry that is not a list.
        next((i for i, group in enumerate(parsed.composition) if isinstance(group, str)), None),
    )


def _part(part: Any) -> Part:
    """A part as einops has it: a name, or an object with the size of an axis without one."""
    return None if part == '_' else part.removesuffix(_MARK) if isinstance(part, str) else part.value


def pattern_error(text: str, at: int, why: str) -> RuleError:
    """The error about a place in a pattern, with a caret under it."""
    shown = re.sub(r'\s', ' ', text)
    return RuleError(f'invalid pattern {text!r}: {why}\n  {shown}\n  {" " * at}^')


def names_in(text: str) -> list[tuple[str, int]]:
    """The names of a valid pattern with their places."""
    words = [(token.group(), token.start()) for token in _TOKEN.finditer(text)]
    return [(word, at) for word, at in words if word.isidentifier() and word != '_']
