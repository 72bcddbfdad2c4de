"""What does the rule of a sharded operation say? Which dimensions of operands and results are one factor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from scalax.errors import RuleError, did_you_mean
from scalax.rules._pattern import Pattern, names_in, parse, pattern_error


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule such as ``'b c, -> b'``, read.

    Attributes:
        text: as it was written.
        operands: the dimensions of each operand.
        results: the dimensions of each result.
        reduction_factors: factors whose blocks the function combines.
        need_replication_factors: factors that the function wants whole on every device.
    """

    text: str
    operands: tuple[Pattern, ...]
    results: tuple[Pattern, ...]
    reduction_factors: tuple[str, ...] = ()
    need_replication_factors: tuple[str, ...] = ()

    @property
    def factors(self) -> tuple[str, ...]:
        """The names of the factors, in the order in which they are written."""
        return tuple(dict.fromkeys(name for name, _ in names_in(self.text)))


def read_rule(text: str, reduction_factors: Iterable[str], need_replication_factors: Iterable[str]) -> Rule:
    """Reads a rule.

    Raises:
        RuleError: it is not one; the message points at the place.

    Example:
        >>> rule = read_rule('b c, -> b', ('c',), ())
        >>> [len(operand.dimensions) for operand in rule.operands], rule.factors
        ([2, 0], ('b', 'c'))
    """
    if not isinstance(text, str):
        raise RuleError(
            f"sharded_op takes a rule first, such as @sharded_op('b c, -> b'), got {type(text).__name__}"
        )
    arrow = text.find('->')
    if arrow < 0:
        raise pattern_error(text, len(text), "no '->' between operands and results")
    second = text.find('->', arrow + 2)
    if second >= 0:
        raise pattern_error(text, second, "a second '->'")
    rule = Rule(
        text,
        _arrays(text, 0, arrow),
        _arrays(text, arrow + 2, len(text)),
        _names(text, 'reduction_factors', reduction_factors),
        _names(text, 'need_replication_factors', need_replication_factors),
    )
    _check_factors(rule, arrow)
    return rule


def _arrays(text: str, start: int, stop: int) -> tuple[Pattern, ...]:
    """The patterns between two places of a rule, which commas separate."""
    patterns = []
    for part in text[start:stop].split(','):
        if '(' in part:
            raise pattern_error(
                text, start + part.index('('), 'a group; a dimension is one factor here (reshape outside)'
            )
        patterns.append(parse(part, text, start))
        start += len(part) + 1
    return tuple(patterns)


def _names(text: str, option: str, names: Iterable[str]) -> tuple[str, ...]:
    known = list(dict.fromkeys(name for name, _ in names_in(text)))
    names = names if isinstance(names, str) else tuple(names)
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise RuleError(f"{option} is a tuple of factors, such as ('b', 'c'), got {names!r}")
    for name in names:
        if name not in known:
            raise RuleError(
                f'{option}: the rule {text!r} has no factor {name!r} ({did_you_mean(name, known)})'
            )
    return names


def _check_factors(rule: Rule, arrow: int) -> None:
    """Raises about factors that the rule leaves nothing to do with, or too much."""
    text, reduced, whole = rule.text, rule.reduction_factors, rule.need_replication_factors
    kept = {name: at for name, at in names_in(text) if at > arrow}
    for name, at in names_in(text):
        if name in reduced and name in whole:
            raise pattern_error(
                text, at, f'{name!r} is in reduction_factors and in need_replication_factors: choose one'
            )
        if name in reduced and name in kept:
            raise pattern_error(
                text, kept[name], f'{name!r} is in reduction_factors, and yet a dimension of a result'
            )
        if name not in kept and name not in (*reduced, *whole):
            raise pattern_error(
                text,
                at,
                f'{name!r} is in no result: reduction_factors=({name!r},) if the function combines its '
                f'blocks (ctx.psum), need_replication_factors=({name!r},) if it wants all of it',
            )
    dots = _has_ellipsis(rule.operands), _has_ellipsis(rule.results)
    if dots == (True, False):
        raise pattern_error(text, text.index('...'), "'...' is in no result")
    if dots == (False, True):
        raise pattern_error(text, text.index('...'), "'...' is in no operand")


def _has_ellipsis(patterns: Sequence[Pattern]) -> bool:
    return any(pattern.ellipsis is not None for pattern in patterns)
